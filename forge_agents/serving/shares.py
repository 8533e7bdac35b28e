"""Divides a GPU's memory between engines: each gets what it needs and an equal part of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from forge_agents.serving.config import EngineConfig
from forge_agents.serving.memory import USUAL_SHARE, Footprint

C = TypeVar("C", bound=EngineConfig)
USABLE_SHARE = 0.95
"""Fraction of a GPU's memory that is divided. The rest is the allocator's overhead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """Memory that one engine requests on one of its GPUs."""

    name: str
    configured: int | None
    """Bytes by the engine's settings, or None if it takes what it gets."""
    needs: Mapping[str, int]
    """Minimum bytes, by part."""

    @property
    def least(self) -> int:
        """Bytes without which the engine does not start."""
        return sum(self.needs.values())

    @property
    def reserved(self) -> int:
        """Bytes that are assigned before the rest is divided."""
        return self.least if self.configured is None else self.configured


def memory_request(name: str, model: Footprint, config: EngineConfig, total: int, *, alone: bool) -> MemoryRequest:
    """The request of an engine for a GPU of `total` bytes, on which it may be `alone`."""
    share = config.gpu_memory_utilization or (USUAL_SHARE if alone else None)
    configured = None if share is None else int(total * share)
    return MemoryRequest(name=name, configured=configured, needs=model.needs(config))


def divide_memory(available: int, requests: Sequence[MemoryRequest]) -> dict[str, int] | None:
    """Bytes by engine name: the need and an equal part of the rest, or None if `available` is too little."""
    spare = available - sum(request.reserved for request in requests)
    if spare < 0 or any(request.least > request.reserved for request in requests):
        return None
    even = spare // max(1, sum(request.configured is None for request in requests))
    return {
        request.name: request.reserved + even if request.configured is None else request.configured
        for request in requests
    }


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


def describe_needs(needs: Iterable[tuple[str, Mapping[str, int]]]) -> str:
    """Names with the memory that each expects, as text."""
    return "; ".join(
        f"{name} expects {sum(parts.values()) / 1e9:.1f} GB ({describe_parts(parts)})" for name, parts in needs
    )


def describe_parts(parts: Mapping[str, int]) -> str:
    """Parts of a process with their GB, as text. Those below 50 MB are left out."""
    return ", ".join(f"{part} {count / 1e9:.1f}" for part, count in parts.items() if count >= 5e7)
