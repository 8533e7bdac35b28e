"""Snapshots of a league's policy in an engine: weights are read from disk and loaded when a match needs them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from forge_agents.models import resolve as models
from forge_agents.policy import SnapshotPolicy
from forge_agents.rollout.policy_engine import LoadedSnapshot, PolicyEngine
from forge_agents.runtime.machine import visible_gpus
from forge_agents.serving.adapter_files import ADAPTER_FILE, read_adapter, read_snapshot
from forge_trainers.selfplay.league import League

if TYPE_CHECKING:
    import torch

    from forge_agents.weights import Publisher, WeightStore, WeightStoreRef
    from forge_trainers.rl.config import GRPOConfig
    from forge_trainers.run.processes import Processes

_loads = itertools.count(1)
"""Versions of loads, unique in this process: after the loss of a learner other weights may have a snapshot's name."""


@dataclass(slots=True, kw_only=True)
class _Slot:
    """Weights of an engine that snapshots replace: one adapter, or all weights if `adapter` is empty."""

    adapter: str = ""
    is_fixed: bool = False
    """Whether the weights never change: those of the model below the adapters, which is the start model."""
    snapshot: str = ""
    """Name of the snapshot in the engine. Empty if unknown."""
    load: int = 0
    """Version of the snapshot's weights in the store and the engine."""
    publisher: Publisher | None = None
    store: WeightStoreRef | None = None
    """Weight store of `publisher`. None: the engine has the weights from its start."""
    adapter_weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Kept for a store that replaces the present one. Engines that start later read them there."""


class SnapshotEngine:
    """The engine that plays snapshots.

    Without LoRA it holds one snapshot at a time. With LoRA it is the policy's engine, in which each snapshot of a step
    has an adapter, and the start model is the model without one. Nothing is merged.
    """

    def __init__(self, league: League, config: GRPOConfig, folder: Path) -> None:
        self._league, self._config, self._folder = league, config, folder
        served = league.served
        self._slots = [_Slot(snapshot=league.start, is_fixed=isinstance(served, SnapshotPolicy))]
        if isinstance(served, SnapshotPolicy):
            self._slots += [_Slot(adapter=adapter) for adapter in served.adapters]
        self._load_s = 0.0
        self._packing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshots")
        """Copies snapshots, so that this process keeps answering its engines and learners."""

    def weights_of(self, name: str) -> Path:
        """Return the file of a snapshot's adapter, or the folder of its model."""
        folder = self._folder / name
        return folder if self._league.policy.lora is None else folder / "adapter" / ADAPTER_FILE

    def forget(self, name: str | None = None) -> None:
        """Load a snapshot again when it plays next, because its files may have changed. None: every snapshot."""
        for slot in self._slots:
            if not slot.is_fixed and name in (None, slot.snapshot):
                slot.snapshot = ""

    def batches(self, names: Sequence[str]) -> list[Sequence[str]]:
        """Divide snapshots into those that play at the same time. Snapshots that the engine holds come first."""
        fixed = [slot.snapshot for slot in self._slots if slot.is_fixed and slot.snapshot in names]
        loaded, size = {slot.snapshot for slot in self._slots}, max(1, sum(not slot.is_fixed for slot in self._slots))
        changing = sorted((name for name in names if name not in fixed), key=lambda name: name not in loaded)
        first, *rest = [changing[start : start + size] for start in range(0, len(changing), size)] or [[]]
        return [batch for batch in ([*fixed, *first], *rest) if batch]

    async def serve(self, snapshots: Mapping[str, int], processes: Processes) -> dict[str, PolicyEngine]:
        """Load one of `batches`, given as versions by name. Returns the engine of each snapshot."""
        slots = {slot.snapshot: slot for slot in self._slots if slot.snapshot in snapshots}
        free = iter([slot for slot in self._slots if slot.snapshot not in snapshots and not slot.is_fixed])
        slots |= {name: next(free) for name in snapshots if name not in slots}
        for name, version in snapshots.items():
            await processes.with_store(partial(self._load, slots[name], name, version, processes))
        served = processes.policy_engines[self._league.engine]
        return {
            name: replace(
                served,
                adapter=slots[name].adapter,
                snapshot=LoadedSnapshot(name=name, version=version, load=slots[name].load),
            )
            for name, version in snapshots.items()
        }

    def take_load_s(self) -> float:
        """Return the seconds spent loading since the last call."""
        load_s, self._load_s = self._load_s, 0.0
        return load_s

    async def _load(self, slot: _Slot, name: str, version: int, processes: Processes, by: WeightStore) -> None:
        """Load a snapshot's weights, unless the engine has them and the store, from which a new engine reads them."""
        store = by.ref
        if name == slot.snapshot and slot.store in (None, store):
            return
        started = time.perf_counter()
        tensors = await asyncio.to_thread(self._read, name, version)
        slot.snapshot = ""  # unknown if the load is interrupted
        slot.load = next(_loads)
        if slot.adapter:
            slot.adapter_weights = tensors
            processes.republish[slot.adapter] = partial(self._republish, slot)
        await self._publish(slot, tensors, store)
        timeout_s = self._config.stage_timeout_s
        engine = replace(processes.policy_engines[self._league.engine], adapter=slot.adapter)
        await engine.load_weights(slot.load, timeout_s=timeout_s)
        slot.snapshot = name
        self._load_s += time.perf_counter() - started

    async def _publish(self, slot: _Slot, tensors: Mapping[str, torch.Tensor], store: WeightStoreRef) -> None:
        import torch

        if slot.publisher is None or slot.store != store:
            dtype = getattr(torch, self._config.learner_of(self._league.policy).dtype_on(cpu=not visible_gpus()))
            name = slot.adapter or self._league.engine
            slot.publisher, slot.store = store.publisher(name, dtype=dtype, thread=self._packing), store
        await slot.publisher.publish(slot.load, tensors)

    async def _republish(self, slot: _Slot, store: WeightStoreRef) -> None:
        """Publish an adapter to a store that replaces another one. The engine has the weights already."""
        await self._publish(slot, slot.adapter_weights, store)

    def _read(self, name: str, version: int) -> Mapping[str, torch.Tensor]:
        """Read all tensors of a snapshot: of its adapter in PEFT's layout, or of its model by Hugging Face's names."""
        policy = self._league.policy
        if policy.lora is not None:
            return read_adapter(self.weights_of(name), models.resolve(policy.model), policy.lora)
        model = models.resolve(policy.model)
        return read_snapshot(self.weights_of(name) if version else model, model)
