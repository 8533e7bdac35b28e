"""How engines share a GPU: each gets what it needs, and an even part of what nobody does.

In: engines' sizes and settings, bytes of a GPU. Out: bytes for each, and its settings with them. Waits for nothing.

A run's placement and engines that are served or compared use the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from forge_agents.models.sizes import ModelSize
from forge_agents.policy import LoRA
from forge_agents.serving.config import EngineConfig
from forge_agents.serving.memory import USUAL_SHARE, engine_bytes, item_bytes, kv_bytes

ROOM = 0.95
"""Share of a GPU's memory that is given away; the rest is the allocator's waste."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What an engine serves, as its memory follows from it."""

    size: ModelSize
    dtype: str
    """What its model is stored in, which an engine takes unless its settings say otherwise."""
    tp: int = 1
    """Ranks."""
    adapters: Sequence[LoRA] = ()
    """Beside its model."""

    def fixed(self, config: EngineConfig) -> dict[str, int]:
        """Bytes of one rank without its cache, by part."""
        return engine_bytes(self.size, config, dtype=self.dtype, tp=self.tp, adapters=self.adapters)

    def least_cache(self, config: EngineConfig) -> int:
        """Bytes of its cache at least: what was said, or one conversation."""
        if config.kv_cache_gb is not None:
            return int(config.kv_cache_gb * 1e9)
        context = config.max_model_len or self.size.context
        return kv_bytes(self.size, context, item=item_bytes(self.dtype, config), tp=self.tp)

    def needs(self, config: EngineConfig) -> dict[str, int]:
        """Bytes of one rank at least, by part."""
        cache = "engine.kv_cache_gb"
        if config.kv_cache_gb is None:
            cache = f"one conversation of {config.max_model_len or self.size.context} tokens"
        return {**self.fixed(config), cache: self.least_cache(config)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One engine's, of one of its GPUs."""

    name: str
    asked: int | None
    """Bytes that its settings say; None: what it gets."""
    needs: Mapping[str, int]
    """At least, by what it is for."""

    @property
    def least(self) -> int:
        """Bytes without which it does not start."""
        return sum(self.needs.values())

    @property
    def taken(self) -> int:
        """Bytes that are its own before the rest is divided."""
        return self.least if self.asked is None else self.asked


def wish_of(name: str, model: Footprint, config: EngineConfig, total: int, *, alone: bool) -> Wish:
    """What an engine wants of a GPU of `total` bytes, on which it is `alone`."""
    share = config.gpu_memory_utilization or (USUAL_SHARE if alone else None)
    return Wish(name=name, asked=None if share is None else int(total * share), needs=model.needs(config))


def divided(room: int, wishes: Sequence[Wish]) -> dict[str, int] | None:
    """Bytes of `room` for each engine by name: what it needs, and an even part of the rest; None: it is too little."""
    spare = room - sum(wish.taken for wish in wishes)
    if spare < 0 or any(wish.least > wish.taken for wish in wishes):
        return None
    even = spare // max(1, sum(wish.asked is None for wish in wishes))
    return {wish.name: wish.taken + even if wish.asked is None else wish.asked for wish in wishes}


@dataclass(frozen=True, slots=True)
class Room:
    """What one rank of an engine may take of its GPU."""

    bytes: int
    total: int
    shared: bool


def told(config: EngineConfig, model: Footprint, rooms: Sequence[Room]) -> EngineConfig:
    """An engine's settings with what it may take, where one of its ranks or replicas, whose `rooms` they are, shares.

    That is said in bytes, because vLLM would measure beside processes that come and go. Replicas have the same
    settings, so the fullest GPU says it for those that have one alone, too.
    """
    if config.gpu_memory_utilization is not None or not any(room.shared for room in rooms):
        return config
    share = min(room.bytes / room.total for room in rooms)
    left = min(room.bytes for room in rooms) - sum(model.fixed(config).values())
    return replace(
        config, gpu_memory_utilization=round(share, 4), kv_cache_gb=config.kv_cache_gb or round(left / 1e9, 3)
    )


def said(needs: Iterable[tuple[str, Mapping[str, int]]]) -> str:
    """Who expects how much, in words."""
    return "; ".join(
        f"{name} expects {sum(found.values()) / 1e9:.1f} GB ("
        + ", ".join(f"{part} {count / 1e9:.1f}" for part, count in found.items() if count >= 5e7)
        + ")"
        for name, found in needs
    )
