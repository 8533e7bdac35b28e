"""Patches of vLLM 0.32 for families of models and for engines on CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

from forge_agents.models import families

if TYPE_CHECKING:
    import torch


def skip_inductor() -> None:
    """Keep vLLM from patching Inductor, whose import takes a tenth of the start of an engine that is not compiled.

    Must be called before vLLM is imported. On a GPU, the module sets paths of CUDA as well, and is imported.
    """
    sys.modules.setdefault("vllm.env_override", ModuleType("vllm.env_override"))


def keep_experts_of_cpu() -> None:
    """Let experts compute as without adapters, which adapt attention only. For adapters, vLLM has a kernel for GPUs."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    original = FusedMoEConfig.__post_init__
    if original.__module__ == __name__:  # a second engine in this process
        return

    def __post_init__(config: Any) -> None:  # noqa: N807  (a method of that class)
        config.is_lora_enabled = False
        original(config)

    FusedMoEConfig.__post_init__ = __post_init__


def register_recurrent() -> None:
    """Make vLLM load the text part of Qwen3.5, also of checkpoints with images, and also without torchvision.

    vLLM's module of the text model imports that of the model with images, which needs torchvision, and does so in
    another process first. CPU installations have no torchvision, whose functions are never called for text.
    """
    from transformers.utils import is_torchvision_available
    from vllm import ModelRegistry
    from vllm.model_executor.models.utils import WeightsMapper

    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    absent = () if is_torchvision_available() else names
    sys.modules.update((name, MagicMock(__spec__=None)) for name in absent)
    try:
        from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
    finally:
        for name in absent:
            del sys.modules[name]
    for kind in (Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM):
        kind.hf_to_vllm_mapper |= WeightsMapper(orig_to_new_prefix={"model.visual.": None})
        ModelRegistry.register_model(kind.__name__, kind)


def map_text_of_gemma() -> None:
    """Make vLLM load the text part of Gemma 3 with images, by the names of published models or of transformers 5."""
    from vllm.model_executor.models.gemma3 import Gemma3ForCausalLM
    from vllm.model_executor.models.utils import WeightsMapper

    names = {
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        "model.language_model.": "model.",
    }
    Gemma3ForCausalLM.hf_to_vllm_mapper |= WeightsMapper(orig_to_new_prefix={**dict.fromkeys(families.UNUSED), **names})


_STACKS = {"gate_up_proj": "w13_weight", "gate_up_proj_bias": "w13_bias", "down_proj": "w2_weight",
           "down_proj_bias": "w2_bias"}  # fmt: skip
"""Weights of the experts of gpt-oss, and vLLM's names for the weights of one of them."""


def reload_experts_and_sinks() -> None:
    """Make vLLM's reload see the experts and the sinks of gpt-oss.

    The reload waits for calls of the weights' loaders, and vLLM copies sinks and stacks of experts without them: the
    update would be lost.
    """
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader
    from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

    original = GptOssForCausalLM.load_weights
    if original.__module__ == __name__:  # a second engine in this process
        return

    def load_weights(model: Any, weights: Iterable[tuple[str, Any]]) -> set[str]:
        sinks = {name: weight for name, weight in model.named_parameters() if name.endswith(".attn.sinks")}

        def others() -> Iterator[tuple[str, Any]]:
            for name, tensor in weights:
                layer, _, part = name.partition(".mlp.experts.")
                if part in _STACKS:
                    yield from ((f"{layer}.mlp.experts.{i}.{_STACKS[part]}", one) for i, one in enumerate(tensor))
                elif name.endswith(".sinks"):
                    weight = sinks[name.replace(".self_attn.", ".attn.")]
                    heads = slice(get_tensor_model_parallel_rank() * len(weight), None)
                    load = getattr(weight, "weight_loader", default_weight_loader)
                    load(weight, tensor[heads][: len(weight)])
                else:
                    yield name, tensor

        return set(original(model, others())) | sinks.keys()

    GptOssForCausalLM.load_weights = load_weights


def rotate_all_heads() -> None:
    """Make RoPE on CPU rotate every head of queries with three axes, as in latent attention.

    vLLM 0.32's kernel counts heads along the last axis. The kernel would rotate a single head of each query, and by the
    position of another query.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    original = RotaryEmbedding.forward_cpu
    if original.__module__ == __name__:  # a second engine in this process
        return

    def forward_cpu(rope: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        return (original if query.dim() == 2 else type(rope).forward_native)(rope, positions, query, key)

    RotaryEmbedding.forward_cpu = forward_cpu
