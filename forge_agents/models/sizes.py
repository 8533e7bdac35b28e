"""Sizes of a decoder, computed from its configuration: `ModelSize`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_agents.errors import ModelNotFoundError
from forge_agents.http_body import bounded_json
from forge_agents.models import families
from forge_agents.models.resolve import weight_bytes

_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "0.6b": {
        **_QWEN3, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "8b": {
        **_QWEN3, "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288,
    },
    "32b": {
        **_QWEN3, "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25600,
    },
    "70b": {
        "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072, "hidden_size": 8192,
        "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672,
    },
    "30b-a3b": {
        **_QWEN3, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "intermediate_size": 6144, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
}  # fmt: skip
"""Configs of Qwen3-0.6B, 8B and 32B, Llama-3.3-70B and Qwen3-30B-A3B, to size a run without a download."""


_MAX_PER_BYTE = 64
"""Maximum number of weights per byte of a model's files. Layers may share weights, and weights may have few bits."""
_POSITION_BYTES = 10
"""Peak memory of vLLM's table of rotary embeddings, per position and element of a head."""
_SCALED_ALREADY = ("default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """Sizes of the recurrent layers of a model. Counts are numbers of elements."""

    layers: int
    heads: int
    """Key heads."""
    mixed: int
    """Queries, keys and values of a position."""
    values: int
    """Values of a position, as many as gates."""
    state: int
    """State of one sequence in a layer, with the inputs that the convolution still needs."""
    weights: int
    """Weights of a layer's attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Sizes of latent attention. Counts are numbers of elements."""

    query_rank: int
    """Size of the vector from which queries are computed, or 0 if they are computed from the hidden state."""
    rank: int
    """Size of the vector from which keys and values are computed."""
    rotated: int
    """Elements of a query or key that RoPE rotates. All heads share those of the key."""
    value: int
    """Size of a head's values."""

    @property
    def compressed(self) -> int:
        """Elements that are computed from a hidden state for keys and values, and that a cache keeps."""
        return self.rank + self.rotated

    def weights(self, hidden: int, heads: int, head_dim: int) -> int:
        """Return the number of weights of a layer's attention."""
        queries = heads * head_dim
        queries = self.query_rank * (hidden + queries) if self.query_rank else hidden * queries
        expanded = heads * (head_dim - self.rotated + self.value)
        return queries + hidden * self.compressed + self.rank * (1 + expanded) + heads * self.value * hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Sizes of a Llama- or Qwen3-like decoder. Counts are numbers of elements, not bytes."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    """Maximum number of tokens."""
    tied: bool
    """Whether the output head shares the embedding."""
    feed_forward: int
    """Intermediate size of a layer's feed-forward. In a mixture, the sum over all experts of one token."""
    experts_per_token: int
    """1 for a dense model."""
    qk_norm: bool
    """Whether queries and keys are normalized per head."""
    norms: int
    """Number of norms of a layer's hidden states."""
    fused: bool
    """Whether queries, keys and values are one weight, and gate and up projection another."""
    sinks: bool
    """Whether attention has sinks, as in gpt-oss."""
    num_experts: int
    """Number of experts per layer, or 0 for a dense model."""
    experts: int
    """Number of weights of a layer's experts, without the shared one."""
    shared: int
    """Intermediate size of an expert that computes all tokens, or 0 if there is none."""
    dense: int
    """Number of weights of one layer without these experts."""
    sparse_layers: int
    """Number of layers with experts, or 0 for a dense model."""
    plain_channels: int
    """Intermediate size of the other layers' feed-forward."""
    recurrence: Recurrence | None
    """Layers with a state in place of keys and values. The other layers then have a gate for each query. None: no such
    layers."""
    latent: Latent | None
    """Attention whose keys and values are computed from one vector per position. None: usual attention."""

    @classmethod
    def of(cls, folder: Path) -> ModelSize:
        """Read the size of the model in a folder.

        Raises:
            ModelNotFoundError: Its config.json is missing, unreadable or incomplete.
        """
        path = folder / "config.json"
        try:
            return cls.from_config(bounded_json(path.read_bytes()))
        except (OSError, ValueError, LookupError, TypeError, ArithmeticError, AttributeError, RecursionError) as cause:
            raise ModelNotFoundError(f"{path} does not say how large the model is: {cause!r}") from cause

    @classmethod
    def named(cls, name: str) -> ModelSize:
        """Return the size of a well-known shape of `SHAPES`, such as "8b"."""
        return cls.from_config(SHAPES[name.lower()])

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSize:
        """Compute the size from the content of a config.json."""
        config = families.decoder_config(config)
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        latent = _latent(config) if families.has_latent(config) else None
        kv_heads = int((config.get("num_key_value_heads") if latent is None else 0) or heads)
        head_dim = families.head_dim_of(config)
        count, layers = families.num_experts(config), int(config["num_hidden_layers"])
        shared = families.shared_expert_size(config)
        model_type = str(config.get("model_type", ""))
        norms = 4 if model_type.startswith("gemma3") else 2
        if not 0 <= layers <= families.MAX_LAYERS:
            raise ValueError(f"num_hidden_layers={layers} is outside [0, {families.MAX_LAYERS}]")
        between = int((config.get("moe_intermediate_size") if count else 0) or config["intermediate_size"])
        chosen = int(config.get("num_experts_per_tok") or 1) if count else 1
        recurrence = _recurrence(config) if families.is_recurrent(config) else None
        projections = heads * (1 if recurrence is None else 2) + 2 * kv_heads
        attention = hidden * head_dim * projections + heads * head_dim * hidden
        if latent is not None:
            attention = latent.weights(hidden, heads, head_dim)
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=int(config["vocab_size"]),
            context=_context(config),
            tied=families.is_tied(config),
            feed_forward=between * chosen + shared,
            experts_per_token=chosen,
            qk_norm=model_type.startswith(("qwen3", "gemma3")),
            norms=norms,
            fused=families.is_fused(config),
            sinks=families.has_sinks(config),
            num_experts=count,
            experts=3 * hidden * between * count,
            shared=shared,
            dense=attention
            + (norms + 3 * shared + (shared > 0 and latent is None)) * hidden
            + (hidden * count if count else 3 * hidden * between),
            sparse_layers=sum(families.has_experts(config, layer) for layer in range(layers)),
            plain_channels=int(config.get("intermediate_size") or 0),
            recurrence=recurrence,
            latent=latent,
        )

    @property
    def plain_layers(self) -> int:
        """Number of layers without experts."""
        return self.layers - self.sparse_layers

    @property
    def adapts_feed_forward(self) -> bool:
        """Whether LoRA can adapt the feed-forward of some layers. Experts, also shared ones, have no adapters."""
        return self.plain_layers > 0 and self.latent is None

    @property
    def attention_layers(self) -> int:
        """Number of layers with keys and values."""
        return self.layers - (0 if self.recurrence is None else self.recurrence.layers)

    @property
    def embedding(self) -> int:
        """Number of weights of the embedding, and of the head if it is separate."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def layer(self) -> int:
        """Number of weights of one layer."""
        return self.dense + self.experts

    @property
    def weights(self) -> int:
        """Number of all weights, without biases and query and key norms, which are less than a thousandth."""
        plain = 0
        if self.num_experts:
            plain = 3 * self.hidden * self.plain_channels - self.hidden * (self.num_experts + 3 * self.shared)
            plain -= self.experts
        recurrent = 0
        if self.recurrence is not None:
            attention = (
                2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
                + self.heads * self.head_dim * self.hidden
            )
            recurrent = self.recurrence.layers * (self.recurrence.weights - attention)
        return self.layers * self.layer + self.plain_layers * plain + recurrent + self.embedding + self.hidden

    def kv_per_token(self, tp: int = 1) -> int:
        """Return the KV cache elements per token of one of `tp` ranks. Heads are copied if there are too few.

        With latent attention, every rank keeps the vectors from which it computes keys and values.
        """
        if self.latent is not None:
            return self.layers * self.latent.compressed
        return 2 * self.attention_layers * max(1, self.kv_heads // tp) * self.head_dim

    def divides(self, tp: int) -> bool:
        """Return whether `tp` ranks of an engine can share the heads."""
        return self.heads % tp == 0 and (self.kv_heads % tp == 0 or tp % self.kv_heads == 0)


def _recurrence(config: Mapping[str, Any]) -> Recurrence:
    keys, values, key_size, value_size, width = families.recurrent_sizes(config)
    hidden, mixed = int(config["hidden_size"]), 2 * keys * key_size + values * value_size
    return Recurrence(
        layers=sum(families.is_recurrent(config, layer) for layer in range(config["num_hidden_layers"])),
        heads=keys,
        mixed=mixed,
        values=values * value_size,
        state=values * key_size * value_size + (width - 1) * mixed,
        weights=hidden * (mixed + 2 * values * value_size + 2 * values) + width * mixed,
    )


def _latent(config: Mapping[str, Any]) -> Latent:
    return Latent(
        query_rank=families.query_rank(config) or 0,
        rank=int(config["kv_lora_rank"]),
        rotated=int(config["qk_rope_head_dim"]),
        value=int(config["v_head_dim"]),
    )


def check_described(folder: Path, *, free_bytes: float = math.inf) -> None:
    """Refuse a model whose config.json asks for far more memory than its weights. Other sizes are not checked.

    Libraries allocate the described model before they compare it with the files.

    Raises:
        ModelNotFoundError: The config describes far more weights than the files have, or more positions than
            `free_bytes` of memory hold.
    """
    try:
        size = ModelSize.of(folder)
    except ModelNotFoundError:  # an architecture with other names for its sizes
        return
    check_count(folder, size.weights)
    table = _POSITION_BYTES * size.context * size.head_dim
    if table > free_bytes:
        raise ModelNotFoundError(
            f"{folder / 'config.json'} describes {size.context} positions, whose table takes {table / 1e9:.1f} GB. "
            "There is less free memory. Download the model again, from a source that you trust"
        )


def check_count(folder: Path, described: int) -> None:
    """Refuse a model of which `described` weights are far more than its files have.

    Raises:
        ModelNotFoundError: The weights are more than 64 times as many as the files have bytes.
    """
    if described > _MAX_PER_BYTE * (stored := weight_bytes(folder)):
        raise ModelNotFoundError(
            f"{folder / 'config.json'} describes {described} weights, and the weight files have only {stored} bytes. "
            "Download the model again, from a source that you trust"
        )


def _context(config: Mapping[str, Any]) -> int:
    """Maximum context, as in vLLM: times the RoPE scaling factor unless `max_position_embeddings` includes it."""
    rope = families.rope_of(config)
    is_scaled = rope["rope_type"] in _SCALED_ALREADY or "gemma3" in str(config.get("model_type"))
    factor = 1 if is_scaled else rope.get("factor") or 1
    return int(config["max_position_embeddings"] * factor)
