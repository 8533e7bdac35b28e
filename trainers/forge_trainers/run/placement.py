"""Placement of a run's processes on GPUs, and a check that their memory suffices.

Sizes are computed by `serving.memory` and `learner.memory`, for a starting run and for `forge-agents simulate`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from forge_agents.errors import HostError, ModelNotFoundError
from forge_agents.models import resolve as models
from forge_agents.models.sizes import ModelSize
from forge_agents.runtime import mesh, startup
from forge_agents.runtime.hosts import HERE, ProcessSlot
from forge_agents.runtime.machine import available_bytes, total_bytes
from forge_agents.serving.config import EngineConfig, EnginePlan
from forge_agents.serving.memory import (
    OVERHEAD_BYTES,
    check_cache,
    item_bytes,
    pass_bytes,
)
from forge_agents.serving.shares import (
    USABLE_SHARE,
    MemoryShare,
    describe_parts,
    divide_gpu,
    with_memory_share,
)
from forge_trainers.learner.memory import RECOMPUTED, by_memory, persistent_bytes, published_bytes
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.run.parts import (
    Compute,
    OwnEngine,
    OwnModel,
    Part,
    check_on_cpu,
    checked_parts,
    judges_of,
    unique_names,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A process with its expected memory."""

    slot: ProcessSlot
    parts: Mapping[str, int]
    """Bytes by content."""
    policies: Sequence[str] = ()
    """Policies that it serves or trains. Judges and models of the controller have none."""

    @property
    def bytes(self) -> int:
        """Bytes of its GPU."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Placement of all computing processes."""

    processes: Sequence[Placed]
    engines: Mapping[str, EnginePlan]
    """Settings of each engine by process name, with its share of a shared GPU."""
    learners: Mapping[str, LearnerPlan]
    """Settings of each learner by process name, including those that depend on memory."""
    doubts: Sequence[str] = ()
    """Memory that may be needed but is not counted."""

    def lines(self) -> list[str]:
        """Return the lines of a table with a row per mesh, whose ranks need equal memory. Empty without a GPU."""
        if not any(process.slot.gpu for process in self.processes):
            return []
        rows = [("process", "ranks", "GPUs", "GB of each", "parts")]
        for name, ranks in itertools.groupby(self.processes, key=lambda process: process.slot.name):
            first, *others = ranks
            gpus: dict[str, list[str]] = defaultdict(list)
            for slot in (process.slot for process in (first, *others)):
                gpus[slot.host].append(slot.gpu)
            role, total = first.slot.role.removesuffix("s"), first.slot.gpu_bytes
            rows.append((
                name if role == "learner" else f"{role} {name}",
                str(1 + len(others)),
                ", ".join(f"{' '.join(each)} of {host}" for host, each in gpus.items()),
                f"{first.bytes / 1e9:.1f}" + f" of {total / 1e9:.1f}" * bool(total),
                describe_parts(first.parts),
            ))  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

    def chosen(self, before: Mapping[str, LearnerPlan]) -> list[str]:
        """Return a line for each learner whose memory-dependent settings differ from the minimum.

        Args:
            before: Settings before the placement, by process name.
        """
        lines = []
        for name, settings in before.items():
            placed = self.learners[name]
            if settings.left_to_memory and placed != settings.with_memory():
                values = ", ".join(f"{field} {getattr(placed, field)}" for field in settings.left_to_memory)
                lines.append(f"{name}, by memory: {values}")
        return lines


def place_here(
    meshes: Sequence[Compute],
    *,
    engine: EngineConfig | None = None,
    judges: Sequence[OwnEngine] = (),
    held: Sequence[OwnModel] = (),
    turns: bool = False,
) -> tuple[Mapping[str, EnginePlan], Mapping[str, LearnerPlan]]:
    """Place processes on the hosts of the run before they start, and print the table.

    Args:
        meshes: Engines and learners of the run.
        engine: Settings of every engine. None: there are none.
        judges: Engines that start with the first score. Each gets its share of a GPU.
        held: Models that this process loads with the first score.
        turns: Engines and learners that do not fit at the same time use their GPUs in turns.

    Returns:
        Settings of each engine, with its share of a shared GPU, and of each learner, with those by memory.
    """
    engine = EnginePlan.of(engine or EngineConfig())
    before = {each.name: each.learner for each in meshes if each.learner is not None}
    unchanged = {each.name: engine for each in meshes if each.learner is None}, before
    slots = mesh.preview_placement([(each.name, each.role, each.ranks) for each in meshes])
    on_gpus = any(slot.gpu for slot in slots)
    check_on_cpu(slots, meshes, engine)
    try:
        parts = checked_parts(meshes, engine)
    except ModelNotFoundError as error:
        if on_gpus:
            startup.say(f"the memory on GPUs was not checked: {error}")
        return unchanged
    if not on_gpus:  # no GPU is shared, but the passes of learners depend on the host's memory
        for part in [part for part in parts if part.learner is None]:  # on GPUs, vLLM needs less for windows
            check_cache(part.size, engine, part.name, dtype=part.dtype, tp=part.ranks)
        placement = place(parts, engine, mesh.preview_placement)
        for line in placement.chosen(before):
            startup.say(line)
        return unchanged[0], placement.learners
    placement, doubts = _place_on_gpus(parts, engine, judges, held, turns=turns)
    for line in (*placement.lines(), *placement.chosen(before), *placement.doubts, *doubts):
        startup.say(line)
    return placement.engines, placement.learners


def _place_on_gpus(
    parts: list[Part], engine: EnginePlan, judges: Sequence[OwnEngine], held: Sequence[OwnModel], *, turns: bool
) -> tuple[Placement, list[str]]:
    """Place the parts of a run, judges and held models, and reserve their GPUs. Also returns lines of doubts."""
    named_judges = unique_names(judges, reserved=(part.name for part in parts))
    judge_parts, doubts = judges_of(named_judges)
    loaded, unknown = held_on(held, mesh.local_gpus())
    parts, doubts = [*parts, *judge_parts], [*doubts, *unknown]
    placement = place(parts, engine, mesh.preview_placement, turns=turns, loaded=loaded)
    used = {(process.slot.host, process.slot.gpu) for process in placement.processes if process.slot.gpu}
    doubts += [
        f"not counted: {name}, which runs already on a GPU of this run"
        for name in mesh.running_on(used)
        if name not in named_judges
    ]
    mesh.reserve([(part.name, part.role, part.ranks) for part in parts])  # in any order of startup
    for part in judge_parts:
        named_judges[part.name].place(part.name, placement.engines[part.name])
    if any(settings.sleeps for settings in placement.engines.values()):
        startup.say("engines and learner do not fit at the same time and use the GPU in turns (never tested on a GPU)")
    if not mesh.has_remote_hosts():
        doubts += host_doubts(parts, placement, free=available_bytes())
    return placement, doubts


def host_bytes(parts: Sequence[Part], placement: Placement) -> dict[str, dict[str, int]]:
    """Return the bytes of host memory that a run needs in addition to its GPUs, by host and content.

    Contents are published weights on the first host of each learner, processes that are offloaded in turns, and state
    of learners with `LearnerConfig.cpu_offload`. Programs and libraries are not counted.
    """
    published, colocated, offloaded = "published weights", "colocated processes", "offloaded optimizer"
    hosts = {process.slot.host: {published: 0, colocated: 0, offloaded: 0} for process in placement.processes}
    learners = {part.name: part for part in parts if part.learner is not None}
    in_turns = any(engine.sleeps for engine in placement.engines.values())
    counted: set[str] = set()
    for process in placement.processes:
        needs, part = hosts[process.slot.host], learners.get(process.slot.name)
        if part is not None and part.learner is not None:
            if part.name not in counted and part.learner.lora is None:
                needs[published] += published_bytes(part.size, part.learner)
            counted.add(part.name)
            if part.learner.cpu_offload:
                state = persistent_bytes(part.size, part.learner, ranks=part.ranks, sharing=part.sharing)
                needs[offloaded] += sum(state.values())
        if in_turns and process.slot.role in ("learner", "engines"):
            content = ("weights", "adapters", "optimizer", "reference")
            needs[colocated] += sum(process.parts.get(name, 0) for name in content)
    return {host: {name: count for name, count in needs.items() if count} for host, needs in hosts.items()}


def host_doubts(parts: Sequence[Part], placement: Placement, *, free: int) -> list[str]:
    """Return a line for each host whose free memory (in bytes) may not suffice, see `host_bytes`."""
    lines = []
    for host, needs in host_bytes(parts, placement).items():
        if (needed := sum(needs.values())) > free:
            content = ", ".join(f"{name} {count / 1e9:.1f}" for name, count in needs.items())
            lines.append(
                f"the memory of {host}: up to {needed / 1e9:.1f} GB are needed ({content}) and {free / 1e9:.1f} are "
                "free. Train an adapter, which is then published alone"
            )
    return lines


def held_on(models_held: Iterable[OwnModel], here: Sequence[ProcessSlot]) -> tuple[list[Placed], list[str]]:
    """Return the models of the controller's process by GPU, and lines about those that are not counted.

    `here` has a slot on each GPU that the process sees. Raises HostError for a GPU that does not exist.
    """
    names, parts = defaultdict[int, list[str]](list), defaultdict[int, Counter[str]](Counter)
    doubts = list[str]()
    for model in models_held:
        kind, _, index = model.device.partition(":")
        if kind != "cuda":
            continue
        number = int(index or 0)
        if number >= len(here):
            raise HostError(
                f"{model.name} has device {model.device}, and the controller's host has {len(here)} GPUs. Set another "
                'device, or "cpu"'
            )
        try:
            folder = models.resolve(model.model)
            size, item = ModelSize.of(folder), item_bytes(models.dtype_of(folder), EngineConfig())
        except ModelNotFoundError as error:
            doubts.append(f"not counted: the model of {model.name}: {error}")
            continue
        names[number].append(model.name)
        parts[number].update(
            weights=models.weight_bytes(folder), activations=pass_bytes(size, model.batch_tokens, item=item)
        )
    placed = []
    for number, counts in sorted(parts.items()):
        content = {**counts, "overhead": OVERHEAD_BYTES}
        slot = replace(here[number], name=", ".join(names[number]))
        placed.append(Placed(slot=slot, parts=content))
    return placed, doubts


def place(
    parts: Sequence[Part],
    engine: EngineConfig,
    preview: Callable[[Sequence[tuple[str, str, int]]], list[ProcessSlot]],
    *,
    turns: bool = False,
    loaded: Sequence[Placed] = (),
) -> Placement:
    """Assign memory to each process.

    A learner whose recomputation depends on memory recomputes as little as possible. Only if nothing fits with full
    recomputation, engines and learners use GPUs in turns.

    Args:
        parts: Parts of the run.
        engine: Settings of every engine except those of judges.
        preview: Function that returns the slots of meshes, such as `mesh.preview_placement`.
        turns: Whether engines and learners may be offloaded in turns if they do not fit at the same time.
        loaded: Models that stay on GPUs. See `held_on`.

    Raises:
        HostError: There are too few GPUs, or too little memory on one. The message has the arithmetic.
    """
    engine = EnginePlan.of(engine)
    flexible = any(
        part.learner is not None and "activation_checkpointing" in part.learner.left_to_memory for part in parts
    )
    engines = [engine, replace(engine, sleeps=True)] if turns and not engine.sleeps else [engine]
    candidates = list(itertools.product(engines, RECOMPUTED if flexible else RECOMPUTED[:1]))
    for number, (candidate, mode) in enumerate(candidates, 1):
        adapted = [
            part
            if part.learner is None or part.learner.activation_checkpointing is not None
            else replace(part, learner=replace(part.learner, activation_checkpointing=mode))
            for part in parts
        ]
        with contextlib.suppress(HostError) if number < len(candidates) else contextlib.nullcontext():
            return _place(adapted, candidate, preview, loaded)
    raise AssertionError("the last candidate returns or raises")


def _place(
    parts: Sequence[Part],
    engine: EnginePlan,
    preview: Callable[[Sequence[tuple[str, str, int]]], list[ProcessSlot]],
    loaded: Sequence[Placed],
) -> Placement:
    slots = preview([(part.name, part.role, part.ranks) for part in parts])
    slots_on: dict[tuple[str, str], list[ProcessSlot]] = defaultdict(list)
    for slot in slots:
        slots_on[slot.host, slot.gpu].append(slot)
    held = {(process.slot.host, process.slot.gpu): process for process in loaded}
    alone = {gpu: group[0] for gpu, group in slots_on.items() if len(group) == 1 and gpu not in held}
    on_cpu = _cpu_bytes(parts, slots)
    filled = []
    for part in parts:
        if part.learner is not None:  # passes are larger on exclusive GPUs and on CPU; an engine takes shared memory
            sizes = [slot.gpu_bytes for (_, gpu), slot in alone.items() if gpu and slot.name == part.name]
            device_bytes = min(sizes) if len(sizes) == part.ranks else on_cpu.get(part.name, 0)
            learner = by_memory(
                part.size,
                part.learner,
                device_bytes,
                ranks=part.ranks,
                sharing=part.sharing,
                on_cpu=part.name in on_cpu,
            )
            filled.append(replace(part, learner=learner))
        else:
            filled.append(part)
    parts = filled
    by_name = {part.name: part for part in parts}
    shares: dict[str, list[MemoryShare]] = defaultdict(list)
    for host, gpu in dict.fromkeys((*slots_on, *held)):
        group, model = slots_on.get((host, gpu), []), held.get((host, gpu))
        total = (group[0] if model is None else model.slot).gpu_bytes
        if gpu and total:
            residents = [by_name[slot.name] for slot in group]
            for name, count in _divide(f"GPU {gpu} of {host}", total, residents, engine, model).items():
                shares[name].append(MemoryShare(count, total, shared=len(group) + (model is not None) > 1))
    settings = {part.name: _engine_settings(part, parts, engine, shares) for part in parts if part.learner is None}
    share_of = {name: min(share.bytes for share in group) for name, group in shares.items()}
    return Placement(
        processes=[
            *(_placed(slot, by_name[slot.name], settings, share_of.get(slot.name, 0)) for slot in slots),
            *loaded,
        ],
        engines=settings,
        learners={part.name: part.learner for part in parts if part.learner is not None},
        doubts=_doubts(parts, [*slots, *(process.slot for process in loaded)]),
    )


def _cpu_bytes(parts: Sequence[Part], slots: Sequence[ProcessSlot]) -> dict[str, int]:
    """Return the bytes of memory per rank of learners that compute on this host's CPU, by name.

    All of them share half of the host's memory. The other half is for engines, environments and other programs.
    """
    elsewhere = {slot.name for slot in slots if slot.gpu or not slot.host.startswith(HERE)}
    local = {part.name: part.ranks for part in parts if part.learner is not None and part.name not in elsewhere}
    return dict.fromkeys(local, total_bytes() // 2 // max(1, sum(local.values())))


def _engine_settings(
    part: Part, parts: Sequence[Part], engine: EnginePlan, shares: Mapping[str, Sequence[MemoryShare]]
) -> EnginePlan:
    """Return the settings of an engine with its share of memory. Replicas have equal shares."""
    key = (part.role, part.size, part.dtype, part.adapters, part.judge)
    replicas = [
        other
        for other in parts
        if other.learner is None and (other.role, other.size, other.dtype, other.adapters, other.judge) == key
    ]
    all_shares = [share for replica in replicas for share in shares.get(replica.name, ())]
    return with_memory_share(part.judge or engine, part.served, all_shares)


def _divide(gpu: str, total: int, parts: Sequence[Part], engine: EnginePlan, held: Placed | None) -> dict[str, int]:
    """Return the bytes of a GPU that each engine may use: its needs, and an equal part of the rest.

    If engines and learners use the GPU in turns, the engines of judges and the controller's models stay loaded.

    Raises:
        HostError: The memory does not suffice.
    """
    learners = {part.name: part.learner_bytes() for part in parts if part.learner is not None}
    others = {} if held is None else {f"{held.slot.role} {held.slot.name}": held.parts}
    engines = {f"{part.role.removesuffix('s')} {part.name}": part for part in parts if part.learner is None}
    phases = [({**learners, **others}, engines)]
    sleeping = sum(part.judge is None for part in engines.values())
    if engine.sleeps and learners and sleeping:  # while learners compute, and while engines compute
        asleep = {f"{sleeping} sleeping engine{'s' * (sleeping > 1)}": {"overhead": sleeping * OVERHEAD_BYTES}}
        judges = {name: part for name, part in engines.items() if part.judge is not None}
        offloaded = {name: {"overhead": needs["overhead"]} for name, needs in learners.items()}
        phases = [({**learners, **asleep, **others}, judges), ({**offloaded, **others}, engines)]
    shares: dict[str, int] = {}
    for fixed, active in phases:
        models_of = {name: (part.served, part.judge or engine) for name, part in active.items()}
        advice = [*_advice(parts, active.values(), engine, has_held=held is not None)]
        for name, count in divide_gpu(gpu, total, models_of, fixed, advice=advice).items():
            shares[active[name].name] = min(count, shares.get(active[name].name, count))
    return shares


def _advice(parts: Sequence[Part], active: Iterable[Part], engine: EnginePlan, *, has_held: bool) -> Iterator[str]:
    """Yield changes that reduce the memory of the processes of a GPU, of which `active` are the active engines."""
    plans = [part.learner for part in parts if part.learner is not None]
    kinds = {part.role for part in active}
    if serves := "engines" in kinds:
        cache = "engine.max_model_len" if engine.kv_cache_gb is None else "engine.kv_cache_gb"
        yield f"lower {cache} or engine.max_num_seqs, raise engine.tp, or give engines separate GPUs"
    if "judges" in kinds:
        yield _REDUCE_JUDGE
    if plans:
        yield _reduce_learner(plans)
    if has_held:
        yield _REDUCE_HELD
    if plans and serves and not engine.sleeps:
        yield "set colocate, so that engines and learner use the GPU in turns"


_REDUCE_JUDGE = (
    "give judges separate GPUs (mesh.gpus: {judges: 1}), or a shorter context: "
    "Judge(engine=fa.EngineConfig(max_model_len=4096))"
)
_REDUCE_HELD = 'load the models of the controller elsewhere (device="cuda:1", or "cpu"), or lower their batch_tokens'


def _reduce_learner(plans: Iterable[LearnerPlan]) -> str:
    plans = [*plans]
    full = all(plan.activation_checkpointing == "full" for plan in plans)
    replicas = "lower learner.dp_replicate, " if any(plan.dp_replicate > 1 for plan in plans) else ""
    recompute = "" if full else "set learner.activation_checkpointing to 'full', "
    return (
        f"raise learner_procs, which shards the learner, {replicas}{recompute}lower "
        "learner.max_tokens_per_microbatch and engine.max_model_len (the longest sample is one pass), train an adapter "
        "(Policy(lora=...)), or set learner.cpu_offload"
    )


def _doubts(parts: Sequence[Part], slots: Sequence[ProcessSlot]) -> list[str]:
    """Return lines about learners whose longest sample is not limited and may exceed the counted microbatch."""
    lines = []
    for part in parts:
        config, context = part.learner, part.size.context
        counted = 0 if config is None else config.max_tokens_per_microbatch or 0
        if config is None or config.max_sample_tokens is not None or context <= counted:
            continue
        longest = sum(part.learner_bytes(max_sample_tokens=context).values())
        gpus = {(slot.host, slot.gpu): slot.gpu_bytes for slot in slots if slot.name == part.name and slot.gpu_bytes}
        alone = not any((slot.host, slot.gpu) in gpus for slot in slots if slot.name != part.name)
        if gpus and (not alone or longest > USABLE_SHARE * min(gpus.values())):
            lines.append(
                f"{part.name}: only passes of {counted} tokens are counted. A longer sample is one "
                f"pass, and one of the model's {context} tokens would take {longest / 1e9:.1f} GB: set "
                "engine.max_model_len to what conversations need"
            )
    return lines


def _placed(slot: ProcessSlot, part: Part, engines: Mapping[str, EnginePlan], share: int) -> Placed:
    needs: Mapping[str, int]
    if part.learner is not None:
        needs = part.learner_bytes()
    else:
        engine = engines[part.name]
        fixed = part.served.fixed(engine)
        cache = part.served.least_cache(engine)
        if share and engine.kv_cache_gb is None:  # vLLM uses its whole share
            cache = max(cache, share - sum(fixed.values()))
        needs = {**fixed, "cache": cache}
    return Placed(slot=slot, parts=needs, policies=part.policies)
