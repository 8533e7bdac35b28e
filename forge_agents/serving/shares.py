"""Divides a GPU's memory between engines: each gets what it needs and an equal part of the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from forge_agents.errors import HostError
from forge_agents.serving.config import EngineConfig
from forge_agents.serving.memory import USUAL_SHARE, Footprint

C = TypeVar("C", bound=EngineConfig)
USABLE_SHARE = 0.95
"""Fraction of a GPU's memory that is divided. The rest is the allocator's overhead."""


def divide_gpu(
    gpu: str,
    total: int,
    engines: Mapping[str, tuple[Footprint, EngineConfig]],
    fixed: Mapping[str, Mapping[str, int]],
    *,
    advice: Sequence[str],
) -> dict[str, int]:
    """Return the bytes of a GPU that each engine may use: its needs, and an equal part of the rest.

    Args:
        gpu: Description of the GPU.
        total: Bytes of the GPU.
        engines: Models and settings of the engines, by name. An engine with `gpu_memory_utilization` gets that part.
        fixed: Bytes of other processes, by name and part.
        advice: Changes that reduce the memory.

    Raises:
        HostError: The memory does not suffice. The message has the arithmetic and the advice.
    """
    alone = len(engines) == 1 and not fixed
    needs = {name: model.needs(config) for name, (model, config) in engines.items()}
    reserved = {name: sum(parts.values()) for name, parts in needs.items()}
    shares = {name: config.gpu_memory_utilization for name, (_, config) in engines.items()}
    limits = {name: int(total * share) for name, share in shares.items() if share is not None}
    if alone and not limits:
        limits = dict.fromkeys(engines, int(total * USUAL_SHARE))
    usable = sum(limits.values()) if alone else int(total * USABLE_SHARE)
    taken = sum(count for parts in fixed.values() for count in parts.values())
    spare = usable - taken - sum((reserved | limits).values())
    if spare < 0 or any(reserved[name] > limit for name, limit in limits.items()):
        limited = [
            f"{'raise' if reserved[name] > limits[name] else 'lower'} gpu_memory_utilization={share} of {name}, which "
            f"takes {limits[name] / 1e9:.1f} GB, or leave it out"
            for name, share in shares.items()
            if share is not None
        ]
        raise HostError(
            f"{gpu} has {total / 1e9:.1f} GB, of which {usable / 1e9:.1f} may be used: "
            f"{describe_needs({**fixed, **needs})}. To make it fit, {'; '.join([*limited, *advice])}"
        )
    even = spare // max(1, len(engines) - len(limits))
    return {name: limits.get(name, least + even) for name, least in reserved.items()}


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """Memory that one rank of an engine may use on its GPU."""

    bytes: int
    total: int
    shared: bool


def with_memory_share(config: C, model: Footprint, shares: Sequence[MemoryShare]) -> C:
    """`config` with memory limits if one of the engine's ranks or replicas, which have `shares`, shares its GPU.

    Limits are in bytes, because vLLM's own measurement depends on other processes that start and end. All replicas have
    the same settings, so the fullest GPU decides.
    """
    if config.gpu_memory_utilization is not None or not any(share.shared for share in shares):
        return config
    fraction = min(share.bytes / share.total for share in shares)
    left = min(share.bytes for share in shares) - sum(model.fixed(config).values())
    return replace(
        config, gpu_memory_utilization=round(fraction, 4), kv_cache_gb=config.kv_cache_gb or round(left / 1e9, 3)
    )


def describe_needs(needs: Mapping[str, Mapping[str, int]]) -> str:
    """Names with the memory that each expects, as text."""
    return "; ".join(
        f"{name} expects {sum(parts.values()) / 1e9:.1f} GB ({describe_parts(parts)})" for name, parts in needs.items()
    )


def describe_parts(parts: Mapping[str, int]) -> str:
    """Parts of a process with their GB, as text. Those below 50 MB are left out."""
    return ", ".join(f"{part} {count / 1e9:.1f}" for part, count in parts.items() if count >= 5e7)
