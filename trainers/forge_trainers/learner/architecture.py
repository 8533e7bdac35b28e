"""TorchTitan model specs from the config.json of a Hugging Face model.

Llama uses TorchTitan's Llama blocks. All other families are its Qwen3 blocks with other options: biases, norms of
queries and keys, RoPE frequencies, sliding windows, experts. `fused` has the layers of Phi, `gemma` those of Gemma,
`gpt_oss` those of gpt-oss, `latent` those of DeepSeek.

Axes: R tokens routed to the experts of this rank, D hidden size, E experts, F hidden size of an expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from forge_agents.models import families
from forge_agents.models import resolve as models
from forge_trainers.learner import gemma, gpt_oss, latent, qwen3_5, titan
from forge_trainers.learner.fused import FusedFeedForward, FusedQKV
from forge_trainers.learner.lean import Embedding, FeedForward, RMSNorm

_ONES = {"weight": torch.nn.init.ones_}
_NORMAL = {"weight": partial(torch.nn.init.normal_, std=0.02), "bias": torch.nn.init.zeros_}
_BIASED = ("Qwen2ForCausalLM", "GptOssForCausalLM")
"""Architectures with biases of queries, keys and values that their config.json does not mention."""
_NORMED = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Gemma3ForCausalLM", *families.RECURRENT)
"""Architectures that normalize queries and keys per head."""
_EPSILON = dict.fromkeys(("GptOssForCausalLM", "Glm4MoeLiteForCausalLM", "Phi3ForCausalLM"), 1e-5)
"""Default of the norms' epsilon where it is not 1e-6."""
_THETA = {"SmolLM3ForCausalLM": 2e6, "Gemma3ForCausalLM": 1e6, "GptOssForCausalLM": 1.5e5}
"""Default of RoPE's base where it is not 10,000."""
_OFFSET_NORMED = ("Gemma3ForCausalLM", *families.RECURRENT)
"""Architectures whose norms have the factor ``1 + weight``."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """``config.json`` of a model folder. Raises ModelNotFoundError if the file is missing or not a JSON object."""
    return models.read_json(Path(folder) / "config.json")


def spec_from_config(
    config: Mapping[str, Any],
    *,
    inner_attention: Any,
    max_seq_len: int | None = None,
    fuse_qkv: bool = True,
    lean: bool = False,
) -> Any:
    """Build the TorchTitan ``ModelSpec`` of a config.json.

    Supported are tied embeddings, a head_dim other than hidden_size / heads, RMSNorm's epsilon, RoPE scaling, layers
    without positions, and sliding windows. The spec's state-dict adapter converts weights between the naming schemes.

    Args:
        config: Content of config.json.
        inner_attention: TorchTitan attention config, a ``VarlenAttention.Config`` or a subclass.
        max_seq_len: Size of the RoPE cache in tokens. None: the model's ``max_position_embeddings``.
        fuse_qkv: Whether to compute queries, keys and values as one product. Adapters need separate products.
        lean: Whether to use the layers of `lean`, which do not support DTensors.

    Raises:
        ValueError: The architecture or one of its options is not supported. The message lists the supported ones.
    """
    families.check_trainable(config)
    adapter = _ADAPTERS.get(config["architectures"][0], StateDictAdapter)
    config = families.decoder_config(config)
    name = config["architectures"][0]
    is_llama, is_gemma = name == "LlamaForCausalLM", name == "Gemma3ForCausalLM"
    has_latent = families.has_latent(config)
    model_kind, block_kind, parallelize = _classes(config)
    dim, vocab_size = config["hidden_size"], config["vocab_size"]
    head_dim, tied = families.head_dim_of(config), families.is_tied(config)
    rotated = config["qk_rope_head_dim"] if has_latent else head_dim
    ropes = _ropes(config, LlamaRope if is_llama or has_latent else Rope, rotated, max_seq_len)

    def norm(size: int, *, offset: bool = name in _OFFSET_NORMED) -> Any:
        kind = ((gemma.RMSNorm, gemma.LeanRMSNorm) if offset else (titan.RMSNorm, RMSNorm))[lean]
        epsilon = config.get("rms_norm_eps", _EPSILON.get(name, 1e-6))
        return kind.Config(normalized_shape=size, eps=epsilon, param_init=_ONES)

    def attention(layer: int) -> Any:
        if families.is_recurrent(config, layer):
            return _delta_net(config, partial(norm, offset=False))
        if has_latent:
            return latent.attention(config, inner_attention, rope=ropes[layer], norm=norm, linear=_linear)
        qk_norm = norm(head_dim) if name in _NORMED else None
        return _attention(
            config, layer, inner_attention, head_dim=head_dim, rope=ropes[layer], qk_norm=qk_norm, fuse_qkv=fuse_qkv
        )

    def block(layer: int) -> Any:
        parts = {"attention_norm": norm(dim), "ffn_norm": norm(dim), "attention": attention(layer)}
        parts |= _feed_forward(config, layer, lean=lean)
        if is_gemma:
            parts |= {"attention_post_norm": norm(dim), "ffn_post_norm": norm(dim)}
            parts["scale"] = config.get("query_pre_attn_scalar", 256) ** -0.5
        return block_kind.Config(**parts)

    model = model_kind.Config(
        dim=dim, vocab_size=vocab_size, enable_weight_tying=tied, norm=norm(dim),
        layers=[block(layer) for layer in range(config["num_hidden_layers"])],
        tok_embeddings=(Embedding if lean else titan.Embedding).Config(
            num_embeddings=vocab_size, embedding_dim=dim,
            param_init={"weight": titan.skip_param_init} if tied else _NORMAL,
        ),
        lm_head=_linear(dim, vocab_size),
    )  # fmt: skip
    return titan.ModelSpec(
        name="llama3" if is_llama else "deepseek_v3" if has_latent else "qwen3",
        flavor="hf",
        model=model,
        parallelize_fn=parallelize,
        pipelining_fn=titan.pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=adapter,
    )


def _classes(config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Classes of the model and its layers, and TorchTitan's function that distributes the model over ranks."""
    if config["architectures"][0] == "LlamaForCausalLM":
        return titan.Llama3Model, titan.Llama3TransformerBlock, titan.parallelize_llama
    if families.has_sinks(config):
        return titan.GptOssModel, titan.GptOssTransformerBlock, titan.parallelize_gptoss
    if families.has_latent(config):
        return titan.DeepSeekV3Model, titan.DeepSeekV3TransformerBlock, titan.parallelize_deepseekv3
    if config["architectures"][0] == "Gemma3ForCausalLM":
        return gemma.Model, gemma.TransformerBlock, titan.parallelize_qwen3
    model = qwen3_5.Model if families.is_recurrent(config) else titan.Qwen3Model
    return model, titan.Qwen3TransformerBlock, titan.parallelize_qwen3


def _feed_forward(config: Mapping[str, Any], layer: int, *, lean: bool) -> dict[str, Any]:
    """Experts or feed-forward of a layer, as arguments of its block."""
    if families.has_experts(config, layer):
        return {"moe": moe_config(config, param_init=_NORMAL["weight"])}
    ffn = titan.make_ffn_config(
        dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        w1_param_init=_NORMAL,
        w2w3_param_init=_NORMAL,
    )
    if families.is_fused(config):
        return {"feed_forward": FusedFeedForward.of(ffn)}
    is_gemma = config["architectures"][0] == "Gemma3ForCausalLM"
    if not (is_gemma or lean):
        return {"feed_forward": ffn}
    kind = gemma.FeedForward if is_gemma else FeedForward
    return {"feed_forward": kind.Config(w1=ffn.w1, w2=ffn.w2, w3=ffn.w3)}


def _attention(
    config: Mapping[str, Any], layer: int, inner: Any, *, head_dim: int, rope: Any, qk_norm: Any, fuse_qkv: bool
) -> Any:
    name, dim, num_heads = config["architectures"][0], config["hidden_size"], config["num_attention_heads"]
    if (window := families.window_of(config, layer)) is not None:
        inner = replace(inner, window_size=(window - 1, 0))  # TorchTitan does not count the query's own position
    make = partial(
        titan.make_gqa_config, dim=dim, n_kv_heads=config.get("num_key_value_heads") or num_heads,
        fuse_qkv=fuse_qkv or families.is_fused(config),
        # TorchTitan derives head_dim and the default softmax scale from dim / heads when it is None
        head_dim=None if name == "LlamaForCausalLM" and head_dim == dim // num_heads else head_dim,
        rope=rope, qk_norm=qk_norm, wqkv_param_init=_NORMAL, wo_param_init=_NORMAL, inner_attention=inner,
    )  # fmt: skip
    gqa = make(n_heads=num_heads)
    if families.is_recurrent(config):
        gqa.qkv_linear = make(n_heads=2 * num_heads).qkv_linear
        return qwen3_5.GatedAttention.of(gqa)
    if families.is_fused(config):
        gqa.qkv_linear = FusedQKV.of(gqa.qkv_linear)
    if name in _BIASED:
        for part in ("wqkv",) if fuse_qkv else ("wq", "wkv"):
            setattr(gqa.qkv_linear, part, replace(getattr(gqa.qkv_linear, part), bias=True))
    if families.has_sinks(config):
        return gpt_oss.Attention.Config(
            n_heads=num_heads, n_kv_heads=gqa.n_kv_heads, head_dim=head_dim, dim=dim, qkv_linear=gqa.qkv_linear,
            wo=replace(gqa.wo, bias=True), inner_attention=inner, rope=rope,
            param_init={"sinks": torch.nn.init.zeros_},
        )  # fmt: skip
    return gqa


def _linear(inputs: int, outputs: int) -> Any:
    return titan.Linear.Config(in_features=inputs, out_features=outputs, param_init=_NORMAL)


def _delta_net(config: Mapping[str, Any], norm: Any) -> Any:
    keys, values, key_size, value_size, width = families.recurrent_sizes(config)
    dim, mixed = config["hidden_size"], 2 * keys * key_size + values * value_size
    return qwen3_5.GatedDeltaNet.Config(
        heads=(keys, values),
        sizes=(key_size, value_size),
        in_proj_qkv=_linear(dim, mixed),
        in_proj_z=_linear(dim, values * value_size),
        in_proj_b=_linear(dim, values),
        in_proj_a=_linear(dim, values),
        conv1d=titan.Conv1d.Config(
            in_channels=mixed, out_channels=mixed, kernel_size=width, groups=mixed, bias=False, param_init=_NORMAL
        ),
        norm=norm(value_size),
        out_proj=_linear(values * value_size, dim),
        param_init=dict.fromkeys(("A_log", "dt_bias"), torch.nn.init.ones_),
    )


def _ropes(config: Mapping[str, Any], kind: Any, head_dim: int, max_seq_len: int | None) -> list[Any]:
    """RoPE of each layer."""
    is_gemma = config["architectures"][0] == "Gemma3ForCausalLM"
    ropes = {
        layers: _rope(config, layers, kind, head_dim, max_seq_len)
        for layers in ("full_attention", "sliding_attention")[: 1 + is_gemma]
    }
    result = []
    for layer in range(config["num_hidden_layers"]):
        rope = ropes["sliding_attention" if is_gemma and families.is_local(config, layer) else "full_attention"]
        has_positions = families.has_positions(config, layer)
        result.append(rope if has_positions else replace(rope, frequencies=(0.0,) * len(rope.frequencies), factor=1.0))
    return result


def _rope(config: Mapping[str, Any], layers: str, kind: Any, head_dim: int, max_seq_len: int | None) -> Any:
    rope, context = families.rope_of(config, layers), families.positions_of(config)
    default = _THETA.get(config["architectures"][0], 10000.0)
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or default)
    assert context is not None
    if max_seq_len is not None and max_seq_len > context:
        raise ValueError(f"max_seq_len={max_seq_len} exceeds the model's {context} positions. Lower it")
    default = 0.25 if families.is_recurrent(config) else 1.0
    fraction = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or default
    rotated = int(head_dim * fraction)
    scaling, factor = rope["rope_type"], 1.0
    if scaling == "default":
        frequencies = 1.0 / (theta ** (torch.arange(0, rotated, 2).float() / rotated))
    else:
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        parameters = {**rope, "rope_theta": theta, "partial_rotary_factor": fraction}
        if scaling == "longrope":
            factor = config["max_position_embeddings"] / context  # which scales cosines and sines
            parameters |= {"original_max_position_embeddings": context, "factor": factor}
        settings = LlamaConfig(
            hidden_size=config["hidden_size"], num_attention_heads=config["num_attention_heads"], head_dim=head_dim,
            max_position_embeddings=config["max_position_embeddings"], rope_parameters=parameters,
        )  # fmt: skip
        frequencies, factor = ROPE_INIT_FUNCTIONS[scaling](settings, torch.device("cpu"))
    return kind.Config(
        dim=rotated, max_seq_len=max_seq_len or context, theta=theta, frequencies=tuple(frequencies.tolist()),
        factor=float(factor),
    )  # fmt: skip


def _angles(config: Any) -> torch.Tensor:
    """Rotation angle of every position and pair of channels, float32 [positions, channels / 2]."""
    frequencies = torch.tensor(config.frequencies, dtype=torch.float32)
    return torch.outer(torch.arange(config.max_seq_len, dtype=torch.float32), frequencies)


class Rope(titan.CosSinRoPE):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan's rotary embedding (rotation of halves) with given frequencies. A frequency of 0 rotates nothing."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.CosSinRoPE.Config):  # type: ignore[misc]  # torchtitan is untyped
        """As ``CosSinRoPE.Config``. The scaling fields of the base class are not used."""

        frequencies: tuple[float, ...]
        """Scaled frequency of each pair of channels, in radians per position."""
        factor: float = 1.0
        """Factor on cosines and sines, used by YaRN."""

    @staticmethod
    def apply_rotary_emb(
        query: torch.Tensor, key: torch.Tensor, rope_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate the first channels of each head, as many as the cache has. The others stay as they are."""
        rotated = rope_cache.shape[-1] // 2
        if rotated == query.shape[-1]:
            return titan.CosSinRoPE.apply_rotary_emb(query, key, rope_cache)  # type: ignore[no-any-return]
        parts = titan.CosSinRoPE.apply_rotary_emb(query[..., :rotated], key[..., :rotated], rope_cache)
        turned_query, turned_key = (
            torch.cat([part, x[..., rotated:]], dim=-1) for part, x in zip(parts, (query, key), strict=True)
        )
        return turned_query, turned_key

    def _precompute_cache(self) -> torch.Tensor:
        angles = _angles(self.config).repeat(1, 2)
        cache: torch.Tensor = torch.cat([angles.cos(), angles.sin()], dim=-1) * self.config.factor
        return cache


class LlamaRope(titan.ComplexRoPE):  # type: ignore[misc]  # torchtitan is untyped
    """As `Rope`, but rotates neighboring channels, as TorchTitan orders the rows of Llama's weights."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.ComplexRoPE.Config):  # type: ignore[misc]  # torchtitan is untyped
        """As `Rope.Config`."""

        frequencies: tuple[float, ...]
        factor: float = 1.0

    def _precompute_cache(self) -> torch.Tensor:
        angles = _angles(self.config)
        return torch.polar(torch.full_like(angles, self.config.factor), angles)


def share_rope_tables(model: torch.nn.Module) -> None:
    """Let layers with equal RoPE settings share a table. TorchTitan creates one per layer."""
    tables: dict[tuple[object, ...], torch.Tensor] = {}
    for module in model.modules():
        if isinstance(module, (Rope, LlamaRope)):
            config = module.config
            module.cache = tables.setdefault((type(module), config.frequencies, config.factor), module.cache)


class StateDictAdapter(titan.Qwen3StateDictAdapter):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan's state-dict adapter for Qwen3, extended by the biases and fused weights of similar architectures."""

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self.from_hf_map |= {
            f"model.layers.{{}}.self_attn.{x}_proj.bias": f"layers.{{}}.attention.qkv_linear.w{x}.bias" for x in "qkv"
        } | {
            "model.layers.{}.self_attn.qkv_proj.weight": "layers.{}.attention.qkv_linear.wqkv.weight",
            "model.layers.{}.mlp.gate_up_proj.weight": "layers.{}.feed_forward.w13.weight",
        }


class RecurrentStateDictAdapter(titan.Qwen3StateDictAdapter):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan's state-dict adapter for Qwen3 with the weights of recurrent layers and of mixtures of Qwen3.5.

    The experts of a layer are one tensor in a checkpoint, as in the model.
    """

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self.from_hf_map |= {
            f"model.layers.{{}}.linear_attn.{name}": f"layers.{{}}.attention.{name}" for name in qwen3_5.WEIGHTS
        } | {f"model.layers.{{}}.mlp.{hf_name}": f"layers.{{}}.moe.{name}" for hf_name, name in qwen3_5.SHARED.items()}

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The tensors by the names of the checkpoint."""
        stacks, others = _split(state_dict, ".inner_experts.")
        result: dict[str, Any] = super().to_hf(others)
        for name, value in stacks.items():
            layer, _, weight = name.partition(".moe.")
            result[f"model.{layer}.mlp.{qwen3_5.STACKS[weight]}"] = value
        return result

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """The tensors by TorchTitan's names."""
        stacks, others = _split(hf_state_dict, ".mlp.experts.")
        result: dict[str, Any] = super().from_hf(others)
        names = {hf_name: name for name, hf_name in qwen3_5.STACKS.items()}
        for name, value in stacks.items():
            layer, _, weight = name.removeprefix("model.").partition(".mlp.")
            result[f"{layer}.moe.{names[weight]}"] = value
        return result

    def _validate_hf_rope_config(self, expected_rope_cls: type) -> None:
        """Nothing: recurrent layers have no RoPE, and `spec_from_config` chose that of the others."""


def _split(tensors: Mapping[str, Any], mark: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors with `mark` in their names, and the others."""
    chosen = {name: value for name, value in tensors.items() if mark in name}
    return chosen, {name: value for name, value in tensors.items() if name not in chosen}


class GemmaStateDictAdapter(titan.Qwen3StateDictAdapter):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan's state-dict adapter for Qwen3 with the names of Gemma's norms."""

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self.from_hf_map |= {
            "model.layers.{}.post_attention_layernorm.weight": "layers.{}.attention_post_norm.weight",
            "model.layers.{}.pre_feedforward_layernorm.weight": "layers.{}.ffn_norm.weight",
            "model.layers.{}.post_feedforward_layernorm.weight": "layers.{}.ffn_post_norm.weight",
        }


class TextPart(titan.Qwen3StateDictAdapter):  # type: ignore[misc]  # torchtitan is untyped
    """Names of the text part of a checkpoint with images, to put before another state-dict adapter."""

    _PREFIX = "model.language_model."

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The tensors by the names of the checkpoint."""
        tensors = super().to_hf(state_dict)
        return {name.replace("model.", self._PREFIX, 1): value for name, value in tensors.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """The tensors by TorchTitan's names."""
        tensors = {name.replace(self._PREFIX, "model.", 1): value for name, value in hf_state_dict.items()}
        result: dict[str, Any] = super().from_hf(tensors)
        return result


class RecurrentTextPart(TextPart, RecurrentStateDictAdapter):
    """The text part of Qwen3.5."""


class GemmaTextPart(TextPart, GemmaStateDictAdapter):
    """The text part of Gemma 3, by the names of transformers 5 or of the published models."""

    is_published = False
    """Whether the checkpoint has the names of the published models."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The tensors by the names of the checkpoint."""
        tensors = super().to_hf(state_dict)
        if not self.is_published:
            return tensors
        return {families.PUBLISHED_TEXT + name.replace(self._PREFIX, "model.", 1): x for name, x in tensors.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """The tensors by TorchTitan's names."""
        return super().from_hf({families.module_name(name): value for name, value in hf_state_dict.items()})


_ADAPTERS = {"LlamaForCausalLM": titan.Llama3StateDictAdapter, "Gemma3ForCausalLM": GemmaStateDictAdapter,
             "GptOssForCausalLM": gpt_oss.StateDictAdapter,
             **dict.fromkeys(families.RECURRENT, RecurrentStateDictAdapter),
             "Qwen3_5ForConditionalGeneration": RecurrentTextPart,
             "Qwen3_5MoeForConditionalGeneration": RecurrentTextPart,
             "Gemma3ForConditionalGeneration": GemmaTextPart,
             "DeepseekV3ForCausalLM": latent.StateDictAdapter,
             "Glm4MoeLiteForCausalLM": latent.StateDictAdapter}  # fmt: skip
"""TorchTitan's converters between its state dicts and those of Hugging Face, where they are not `StateDictAdapter`."""


@titan.with_own_config
class Experts(titan.GroupedExperts):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan's grouped experts in the dtype of their input. TorchTitan's version always computes in bfloat16."""

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Apply each expert to its tokens. `x_RD` is sorted by expert. Returns [R, D] of the same dtype."""
        weights = (self.w1_EFD, self.w3_EFD, self.w2_EDF)
        gate, up, down = (w.to_local() if isinstance(w, DTensor) else w for w in weights)
        gate, up, down = (w.transpose(-2, -1) for w in (gate, up, down))
        ends_E = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
        # SwiGLU, W2 (silu(W1 x) * W3 x) (arXiv 2002.05202, eq. 6), for each expert's rows
        hidden = F.silu(F.grouped_mm(x_RD, gate, offs=ends_E)) * F.grouped_mm(x_RD, up, offs=ends_E)
        return F.grouped_mm(hidden, down, offs=ends_E)


@titan.with_own_config
class Gate(titan.Linear):  # type: ignore[misc]  # torchtitan is untyped
    """Scores of experts in float32, as in transformers: small differences decide. TorchTitan's are so on GPU only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output in float32."""
        return F.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())


_ROUTE_SCALE = {"DeepseekV3ForCausalLM": 2.5, "Glm4MoeLiteForCausalLM": 1.8}
"""Default of the factor on the weights of experts."""


def moe_config(config: Mapping[str, Any], *, param_init: Any) -> Any:
    """Mixture of experts of a layer: the top experts, weighted by a softmax over all experts, and a shared one.

    DeepSeek weights by sigmoids, and chooses by sigmoids plus a correction bias within the best groups of experts.

    There is no load balancing: correction biases stay as they are, and the auxiliary loss of pre-training is left out.
    """
    dim, count, top_k = config["hidden_size"], families.num_experts(config), config["num_experts_per_tok"]
    has_sinks, shared_size = families.has_sinks(config), families.shared_expert_size(config)
    has_latent, groups = families.has_latent(config), {}
    is_gated = shared_size > 0 and not has_latent
    if has_latent:
        groups = {"route_scale": config.get("routed_scaling_factor", _ROUTE_SCALE[config["architectures"][0]])}
        if config["n_group"] > 1:
            groups |= {"num_expert_groups": config["n_group"], "num_limited_groups": config["topk_group"]}
    experts = {"dim": dim, "hidden_dim": families.expert_size(config), "num_experts": count}
    kind, names = (
        (gpt_oss.Experts, gpt_oss.EXPERT_WEIGHTS) if has_sinks
        else (qwen3_5.Experts, qwen3_5.EXPERT_WEIGHTS) if is_gated
        else (Experts, ("w1_EFD", "w2_EDF", "w3_EFD"))
    )  # fmt: skip
    shared = titan.make_ffn_config(dim=dim, hidden_dim=shared_size, w1_param_init=_NORMAL, w2w3_param_init=_NORMAL)
    router = titan.make_router_config(
        dim=dim,
        num_experts=count,
        gate_param_init={},
        top_k=top_k,
        score_func="sigmoid" if has_latent else "softmax",
        # gpt-oss has a softmax over the chosen experts, which is the same
        route_norm=has_sinks or bool(config.get("norm_topk_prob", shared_size > 0)),
        **groups,
    )
    router.gate = Gate.Config(
        in_features=dim,
        out_features=count,
        bias=has_sinks,
        param_init={"weight": param_init, "bias": torch.nn.init.zeros_},
    )
    return titan.make_moe_config(
        num_experts=count,
        load_balance_coeff=1.0 if has_latent else None,  # any number creates the bias, which nothing updates
        shared_experts=qwen3_5.SharedExpert.of(shared) if is_gated else shared if shared_size else None,
        router=router,
        routed_experts=titan.RoutedExperts.Config(
            inner_experts=kind.Config(**experts, param_init=dict.fromkeys(names, param_init)),
            token_dispatcher=titan.make_token_dispatcher_config(
                num_experts=count, top_k=top_k, comm_backend="standard"
            ),
        ),
    )
