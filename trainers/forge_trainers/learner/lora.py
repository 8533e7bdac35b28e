"""LoRA adapters on TorchTitan's models, and several of them on one model.

In: a model's configuration, `forge_agents.LoRA`, state dicts. Out: adapted models, adapters in PEFT's layout, merged
weights. Waits for the other ranks where weights are sharded.

TorchTitan's ``LoRAConverter`` makes the layers: beside a frozen ``weight`` they hold ``lora_a.weight`` [rank, in] and
``lora_b.weight`` [out, rank].
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from forge_agents.policy import LORA_TARGETS, LoRA
from forge_trainers.learner import titan

_A, _B, _WEIGHT = ".lora_a.weight", ".lora_b.weight", ".weight"
_LAYERS = dict(zip(LORA_TARGETS, ("wq", "wkv", "wkv", "wo", "w1", "w3", "w2"), strict=True))
"""The fields of TorchTitan's configurations that hold these layers; keys and values share one."""


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return name.endswith((_A, _B))


def adapted(model_config: Any, lora: LoRA) -> Any:
    """TorchTitan's model configuration with adapters; everything else in it is frozen.

    Args:
        model_config: Complete but for them, shardings included; queries, keys and values not fused. It is changed.
        lora: Which layers.

    Raises:
        ValueError: The model has no such layer.
    """
    linear = {name.rpartition(".")[2] for name, *_ in model_config.traverse(titan.Linear.Config)}
    if absent := [target for target in lora.targets if _LAYERS[target] not in linear]:
        has = [target for target in LORA_TARGETS if _LAYERS[target] in linear]
        raise ValueError(f"this model has no linear layers {absent} for a LoRA adapter; it has {has}")
    layers = sorted({_LAYERS[target] for target in lora.targets})
    settings = titan.LoRAConverter.Config(rank=lora.rank, alpha=lora.alpha, target_modules=layers)
    return titan.LoRAConverter(settings).convert(model_config)


def lower_base(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Store what is frozen in `dtype`: it needs no more digits than it is computed with."""
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            parameter.data = parameter.data.to(dtype)


@contextmanager
def switched_off(model: torch.nn.Module) -> Iterator[None]:
    """The model without its adapter, for as long as the context lasts."""
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
    """One policy's adapter on a model that others may share. One of them is in the model's parameters at a time.

    A starts uniform within ``1 / sqrt(in)``, the same for any sharding, and B at zero.

    Args:
        model: Adapted and parallelised.
        seed: Of A.
        beside: Another adapter of this model; None for the first.
    """

    @torch.no_grad()
    def __init__(self, model: torch.nn.Module, *, seed: int, beside: Adapter | None = None) -> None:
        self._parameters = {titan.canonical_fqn(name): p for name, p in model.named_parameters() if is_adapter(name)}
        self._inside: list[Adapter] = [] if beside is None else beside._inside
        self._away: list[torch.Tensor] = []
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
        """Put this adapter into the model. Returns whether another one was there."""
        if self._inside == [self]:
            return False
        for other in self._inside:
            other._put_away()
        for live, away in zip(self._parameters.values(), self._away, strict=True):
            _local(live).copy_(away)
        self._inside[:] = [self]
        return True

    def _put_away(self) -> None:
        for live, away in zip(self._parameters.values(), self._away, strict=True):
            away.copy_(_local(live))


def merged(state: Mapping[str, Any], scale: float) -> Iterator[tuple[str, Any]]:
    """TorchTitan's state dict with the adapters added to the weights they belong to, one tensor after the other.

    Args:
        state: Of an adapted model.
        scale: ``alpha / rank``.

    Yields:
        Names and tensors as of the model without adapters; adapted weights in float32, sharded as they were.
    """
    for name, value in state.items():
        if is_adapter(name):
            continue
        module = name.removesuffix(_WEIGHT)
        if module + _A not in state:
            yield name, value
            continue
        # W + alpha / r * B A (LoRA, arXiv 2106.09685, eq. 3), in float32: the change is small beside W
        change = scale * (_whole(state[module + _B]).float() @ _whole(state[module + _A]).float())
        yield name, value.float() + _like(change, value)


def peft_state(state: Mapping[str, Any], adapter: Any) -> dict[str, torch.Tensor]:
    """The adapter under PEFT's names: ``base_model.model.`` LAYER ``.lora_A.weight`` [rank, in] and ``.lora_B.weight``.

    Args:
        state: TorchTitan's state dict of an adapted model.
        adapter: Converts state dicts between TorchTitan's and Hugging Face's names.

    Returns:
        Whole, plain tensors: copies, of the type they have.
    """
    found = {}
    for name, value in state.items():
        if name.endswith(_B):
            module = name.removesuffix(_B)
            a_RI, b_OR = _whole(state[module + _A]), _whole(value)
            # Hugging Face orders the rows of some layers otherwise: ask the adapter where each row goes
            rows = torch.arange(b_OR.shape[0])[:, None].expand(-1, a_RI.shape[1])
            ((layer, order),) = adapter.to_hf({module + _WEIGHT: rows}).items()
            prefix = "base_model.model." + layer.removesuffix(_WEIGHT)
            found[prefix + ".lora_A.weight"] = a_RI.clone()
            found[prefix + ".lora_B.weight"] = b_OR[order[:, 0].to(b_OR.device)]
    return found


def peft_config(lora: LoRA, base: str) -> dict[str, Any]:
    """PEFT's ``adapter_config.json`` of an adapter on the model `base`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_rslora": False,
    }


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def _like(whole: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`whole`, which every rank has, sharded as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return whole
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
