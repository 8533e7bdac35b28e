"""How large a decoder is, from its configuration alone: `ModelSize`.

In: a model folder, or the name of a well-known shape. Out: numbers of weights, and of keys and values that one token
leaves. Waits for nothing but the disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_agents.errors import ModelNotFoundError, did_you_mean
from forge_agents.models import families

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
"""What the config.json of Qwen3-0.6B, 8B, 32B, of Llama-3.3-70B and of Qwen3-30B-A3B say, to size a run without a
download."""


_SCALED_ALREADY = ("default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Sizes of a Llama- or Qwen3-like decoder. Counts are of numbers, not of bytes."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    """Tokens that its own limit allows."""
    tied: bool
    """The head is the embedding."""
    feed_forward: int
    """Channels between the products of a layer's feed-forward; in a mixture, those of the experts of one token."""
    experts_per_token: int
    """1 of a dense model."""
    qk_norm: bool
    """Queries and keys are normalised per head."""
    num_experts: int
    """Of one layer; 0 of a dense model."""
    experts: int
    """Their weights."""
    dense: int
    """Weights of one layer without experts."""
    sparse_layers: int
    """Those with experts; 0 of a dense model."""
    plain_channels: int
    """Channels of the feed-forward of the others."""

    @classmethod
    def of(cls, folder: Path) -> ModelSize:
        """Of the model in a folder.

        Raises:
            ModelNotFoundError: Its config.json is missing, unreadable, or says too little.
        """
        path = folder / "config.json"
        try:
            return cls.from_config(json.loads(path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as cause:
            raise ModelNotFoundError(f"{path} does not say how large the model is: {cause!r}") from cause

    @classmethod
    def named(cls, name: str) -> ModelSize:
        """Of a well-known shape, such as "8b".

        Raises:
            ModelNotFoundError: There is no such shape.
        """
        known = name.lower()
        if known not in SHAPES:
            raise ModelNotFoundError(
                f"no model shape {name!r}; known: {', '.join(SHAPES)}.{did_you_mean(known, tuple(SHAPES))}"
            )
        return cls.from_config(SHAPES[known])

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSize:
        """Of the content of a config.json."""
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or hidden // heads)
        count, layers = families.num_experts(config), int(config["num_hidden_layers"])
        between = int((config.get("moe_intermediate_size") if count else 0) or config["intermediate_size"])
        chosen = int(config.get("num_experts_per_tok") or 1) if count else 1
        attention = hidden * head_dim * (heads + 2 * kv_heads) + heads * head_dim * hidden
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=int(config["vocab_size"]),
            context=_context(config),
            tied=bool(config.get("tie_word_embeddings", False)),
            feed_forward=between * chosen,
            experts_per_token=chosen,
            qk_norm=str(config.get("model_type", "")).startswith("qwen3"),
            num_experts=count,
            experts=3 * hidden * between * count,
            dense=attention + 2 * hidden + (hidden * count if count else 3 * hidden * between),
            sparse_layers=sum(families.has_experts(config, layer) for layer in range(layers)),
            plain_channels=int(config["intermediate_size"]),
        )

    @property
    def plain_layers(self) -> int:
        """Layers whose feed-forward are products of their own, not experts."""
        return self.layers - self.sparse_layers

    @property
    def embedding(self) -> int:
        """Weights of the embedding, and of the head where it has its own."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def layer(self) -> int:
        """Weights of one layer."""
        return self.dense + self.experts

    @property
    def weights(self) -> int:
        """All of them; biases and the norms of queries and keys, less than a thousandth, are left out."""
        plain = 0
        if self.num_experts:
            plain = 3 * self.hidden * self.plain_channels - self.hidden * self.num_experts - self.experts
        return self.layers * self.layer + self.plain_layers * plain + self.embedding + self.hidden

    def kv_per_token(self, tp: int = 1) -> int:
        """Numbers that a token leaves in the cache of one of `tp` ranks; heads are copied where there are too few."""
        return 2 * self.layers * max(1, self.kv_heads // tp) * self.head_dim

    def divides(self, tp: int) -> bool:
        """Whether `tp` ranks of an engine can share the heads."""
        return self.heads % tp == 0 and (self.kv_heads % tp == 0 or tp % self.kv_heads == 0)


def _context(config: Mapping[str, Any]) -> int:
    """As vLLM takes it: what scales positions counts where `max_position_embeddings` does not say it already."""
    rope = families.rope_of(config)
    factor = 1 if rope["rope_type"] in _SCALED_ALREADY else rope.get("factor") or 1
    return int(config["max_position_embeddings"] * factor)
