"""LoRA adapters on TorchTitan models, also several adapters on one model.

TorchTitan's ``LoRAConverter`` creates the layers. The layers hold ``lora_a.weight`` [rank, in] and ``lora_b.weight``
[out, rank] next to the frozen ``weight``.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from forge_agents.models import families
from forge_agents.policy import LORA_TARGETS, LoRA
from forge_trainers.learner import titan

_A, _B, _WEIGHT = ".lora_a.weight", ".lora_b.weight", ".weight"
_LAYERS = dict(zip(LORA_TARGETS, ("wq", "wkv", "wkv", "wo", "w1", "w3", "w2"), strict=True))
"""Fields of TorchTitan's configurations by LoRA target. Keys and values share a field."""
_FUSED_LAYERS = {"qkv_proj": "wqkv", "gate_up_proj": "w1", "o_proj": "wo", "down_proj": "w2"}
"""The same for the layers of `fused`."""
_RECURRENT_LAYERS = _LAYERS | {name: name for name in ("in_proj_qkv", "in_proj_z", "out_proj")}
"""The same for the layers of `qwen3_5`."""
_LATENT_LAYERS = _LAYERS | {"q_a_proj": "wq_a", "q_b_proj": "wq_b", "kv_a_proj_with_mqa": "wkv_a"}
"""The same for the layers of `latent`."""


def is_adapter(name: str) -> bool:
    """Whether the parameter `name` belongs to an adapter."""
    return name.endswith((_A, _B))


def adapted(model_config: Any, lora: LoRA) -> Any:
    """Add adapters to a complete TorchTitan model configuration.

    Queries, keys and values are separate products, unless they are one weight in the checkpoint. All other weights are
    frozen.

    Raises:
        ValueError: The model has no layer of that kind.
    """
    linear = set()
    for name, config, *_ in model_config.traverse(titan.Linear.Config):
        field = name.rpartition(".")[2]
        if field in {"wq_a", "wkv_a"}:  # on all ranks, which TorchTitan's adapters do not know. There is no `tp`
            config.sharding_config = None
        if ".moe." not in name:  # experts have no adapter
            linear.add(field)
    fused, recurrent = "wqkv" in linear, "in_proj_qkv" in linear
    fields = _FUSED_LAYERS if fused else _RECURRENT_LAYERS if recurrent else _LAYERS
    latent = None
    if "wkv_a" in linear:
        fields, latent = _LATENT_LAYERS, int("wq_a" in linear)
    targets = families.adapted_layers(lora.targets, fused=fused, recurrent=recurrent, latent=latent)
    if absent := [target for target in targets if fields[target] not in linear]:
        has = [target for target, field in fields.items() if field in linear]
        raise ValueError(f"this model has no linear layers {absent} for a LoRA adapter. It has {has}")
    layers = sorted({fields[target] for target in targets})
    settings = titan.LoRAConverter.Config(rank=lora.rank, alpha=lora.alpha, target_modules=layers)
    return titan.LoRAConverter(settings).convert(model_config)


def lower_base(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Store frozen weights in `dtype`, the dtype in which they are used."""
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            parameter.data = parameter.data.to(dtype)


@contextmanager
def switched_off(model: torch.nn.Module) -> Iterator[None]:
    """Context in which the model computes without its adapter."""
    layers = [module for module in model.modules() if hasattr(module, "_lora_scaling")]
    scales = [layer._lora_scaling for layer in layers]
    for layer in layers:
        layer._lora_scaling = 0.0  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer._lora_scaling = scale


class Adapter:
    """Adapter of one policy on a model that policies may share. One adapter is in the model's parameters at a time.

    A is initialized uniformly within ``1 / sqrt(in)``, from the seed and independently of the sharding, and B with
    zeros. `other` is another adapter of this model.
    """

    @torch.no_grad()
    def __init__(self, model: torch.nn.Module, *, seed: int, other: Adapter | None = None) -> None:
        self._parameters = {titan.canonical_fqn(name): p for name, p in model.named_parameters() if is_adapter(name)}
        self._inside: list[Adapter] = [] if other is None else other._inside
        """The adapter in the model's parameters, none at first. All adapters of the model share this list."""
        self._away: list[torch.Tensor] = []
        """Values of `_parameters` from the last time that the adapter left the model."""
        for name, live in self._parameters.items():
            whole = torch.zeros(live.shape)
            if name.endswith(_A):
                rng = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
                bound = 1 / math.sqrt(live.shape[1])
                whole.uniform_(-bound, bound, generator=rng)
            self._away.append(_local(_like(whole.to(live.device, live.dtype), live)))
        self.enter()

    @torch.no_grad()
    def enter(self) -> bool:
        """Load this adapter into the model. Returns whether the model had another adapter before."""
        if self._inside == [self]:
            return False
        for other in self._inside:
            other._save()
        for live, away in zip(self._parameters.values(), self._away, strict=True):
            _local(live).copy_(away)
        self._inside[:] = [self]
        return True

    def copy_from(self, other: Adapter) -> None:
        """Take over the values of `other`, an adapter of the same model. Afterwards `other` is in the model."""
        other.enter()
        self._save()

    def _save(self) -> None:
        for live, away in zip(self._parameters.values(), self._away, strict=True):
            away.copy_(_local(live))


def merged(state: Mapping[str, Any], scale: float) -> Iterator[tuple[str, Any]]:
    """Merge the adapters of a TorchTitan state dict into their weights, one tensor at a time.

    `scale` is ``alpha / rank``. Merged weights are float32 and keep their sharding.
    """
    for name, value in state.items():
        if is_adapter(name):
            continue
        module = name.removesuffix(_WEIGHT)
        if module + _A not in state:
            yield name, value
            continue
        # W + alpha / r * B A (LoRA, arXiv 2106.09685, eq. 3), in float32, because the change is small compared with W
        change = scale * (_whole(state[module + _B]).float() @ _whole(state[module + _A]).float())
        yield name, value.float() + _like(change, value)


def peft_state(state: Mapping[str, Any], adapter: Any) -> dict[str, torch.Tensor]:
    """The adapter by PEFT name: ``base_model.model.`` LAYER ``.lora_A.weight`` [rank, in] and ``.lora_B.weight``.

    `adapter` is TorchTitan's converter between its names and those of Hugging Face. The tensors are plain copies.
    """
    result = {}
    for name, value in state.items():
        if name.endswith(_B):
            module = name.removesuffix(_B)
            a_RI, b_OR = _whole(state[module + _A]), _whole(value)
            # Hugging Face orders the rows of some layers differently. Converting row numbers shows the order.
            rows = torch.arange(b_OR.shape[0])[:, None].expand(-1, a_RI.shape[1])
            ((layer, order),) = adapter.to_hf({module + _WEIGHT: rows}).items()
            prefix = "base_model.model." + families.module_name(layer).removesuffix(_WEIGHT)
            result[prefix + ".lora_A.weight"] = a_RI.clone()
            result[prefix + ".lora_B.weight"] = b_OR[order[:, 0].to(b_OR.device)]
    return result


def peft_config(lora: LoRA, base: str, weights: Iterable[str]) -> dict[str, Any]:
    """Content of PEFT's ``adapter_config.json`` for an adapter of these names on the model `base`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted({name.split(".")[-3] for name in weights}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_rslora": False,
    }


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return result.detach()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return result.detach()


def _like(whole: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`whole`, the same on every rank, with the sharding of `tensor`."""
    if not isinstance(tensor, DTensor):
        return whole
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
