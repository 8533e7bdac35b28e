"""Which process of a run computes on which GPU, and whether its memory suffices: `place`.

In: what is going to run, and where each process would be. Out: the engine's share of its GPUs, and a table; or an error
with the arithmetic. Waits for nothing.

The bytes are `serving.memory`'s and `learner.memory`'s, for a run that starts and for `forge-agents simulate` alike.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from forge_agents.errors import HostError, ModelNotFoundError
from forge_agents.models import resolve as models
from forge_agents.models.sizes import ModelSize
from forge_agents.policy import LORA_TARGETS, LoRA
from forge_agents.runtime import mesh, startup
from forge_agents.runtime.hosts import HERE, ProcessSlot
from forge_agents.runtime.machine import available_bytes, total_bytes
from forge_agents.serving.config import EngineConfig, EnginePlan
from forge_agents.serving.memory import (
    OVERHEAD_BYTES,
    check_cache,
    check_context,
    check_head_size,
    check_tp,
    item_bytes,
    pass_bytes,
)
from forge_agents.serving.shares import (
    USABLE_SHARE,
    Footprint,
    MemoryRequest,
    MemoryShare,
    describe_needs,
    divide_memory,
    memory_request,
    with_memory_share,
)
from forge_trainers.learner.degrees import check_degrees, check_without_gpu, shards_of
from forge_trainers.learner.memory import RECOMPUTED, by_memory, learner_bytes, offloaded_bytes, published_bytes
from forge_trainers.learner.plan import LearnerPlan

ATTENTION_TARGETS = LORA_TARGETS[:4]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One mesh of processes that compute: an engine, a judge's, or a learner."""

    name: str
    ranks: int
    size: ModelSize
    learner: LearnerPlan | None = None
    """Settings of a learner; None: it is an engine."""
    judge: EnginePlan | None = None
    """Settings of a judge's engine; None: it has those of all engines."""
    dtype: str = "bfloat16"
    """What its model is stored in, which an engine takes unless its settings say otherwise."""
    adapters: Sequence[LoRA] = ()
    """Beside an engine's model."""
    sharing: int = 1
    """Policies that a learner learns for; adapters of one model take turns in it."""

    @property
    def role(self) -> str:
        """As in `Hosts`."""
        return "learner" if self.learner is not None else "engines" if self.judge is None else "judges"

    @property
    def served(self) -> Footprint:
        """Of an engine."""
        return Footprint(size=self.size, dtype=self.dtype, tp=self.ranks, adapters=self.adapters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One process and what it is expected to take."""

    seat: ProcessSlot
    bytes: int
    """Of its GPU."""
    parts: Mapping[str, int]
    """The same, by what it is for."""


class OwnEngine(Protocol):
    """An engine that starts when somebody first asks it, such as a judge's."""

    @property
    def name(self) -> str:
        """What it is called where no other has that name."""

    @property
    def model(self) -> str:
        """As `Policy` takes it."""

    @property
    def config(self) -> EngineConfig:
        """Its settings."""

    @property
    def running(self) -> bool:
        """Whether it has started already."""

    def place(self, name: str, config: EngineConfig) -> None:
        """Start so called and with these settings, which say what it may take of a GPU that it shares."""


class OwnModel(Protocol):
    """A model that the controller's process loads with the first score, such as a reward model."""

    @property
    def name(self) -> str:
        """What the verifier is called."""

    @property
    def model(self) -> str:
        """As `Policy` takes it."""

    @property
    def device(self) -> str:
        """In torch's words; only GPUs are divided."""

    @property
    def batch_tokens(self) -> int:
        """Of one pass."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """All processes that compute."""

    processes: Sequence[Placed]
    engines: Mapping[str, EnginePlan]
    """Settings of each engine by the name of its processes, with what it may take of each GPU, where it shares one."""
    learners: Mapping[str, LearnerPlan]
    """Settings of each learner by the name of its processes, with what they leave to memory."""
    doubts: Sequence[str] = ()
    """What may come and was not counted."""

    def lines(self) -> list[str]:
        """A table, a row for each process; nothing where no process has a GPU."""
        if not any(one.seat.gpu for one in self.processes):
            return []
        rows = [("process", "rank", "host", "GPU", "expects")]
        for one in self.processes:
            seat, of = one.seat, f" of {one.seat.gpu_bytes / 1e9:.1f}" if one.seat.gpu_bytes else ""
            role = seat.role.removesuffix("s")
            name = f"{role} {seat.name}" if role != "learner" else seat.name
            rows.append((name, str(seat.rank), seat.host, seat.gpu, f"{one.bytes / 1e9:.1f}{of} GB"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

    def chosen(self, asked: Mapping[str, LearnerPlan]) -> list[str]:
        """A line for each learner that has more by memory than nothing recomputed, in passes as small as can be.

        Args:
            asked: Its settings before, by the name of its processes.
        """
        found = []
        for name, before in asked.items():
            least, own = before.with_memory(), self.learners[name]
            if told := [f"{one} {getattr(own, one)}" for one in before.left_to_memory] if own != least else []:
                found.append(f"{name}, by memory: {', '.join(told)}")
        return found


def place_here(
    engines: Mapping[str, tuple[Path, Sequence[LoRA]]],
    learners: Mapping[str, tuple[LearnerPlan, int]],
    *,
    ranks: int,
    engine: EngineConfig | None = None,
    judges: Sequence[OwnEngine] = (),
    held: Sequence[OwnModel] = (),
    turns: bool = False,
) -> tuple[Mapping[str, EnginePlan], Mapping[str, LearnerPlan]]:
    """Place what is about to start on the run's hosts, and show the table.

    Args:
        engines: Model folder and adapters, by the name of each engine's processes.
        learners: Settings, with the model's folder, and policies that share it, by the name of each learner's
            processes.
        ranks: Of each learner.
        engine: Settings of every engine; None where there is none.
        judges: Whose engines start with the first score; each is told what it may take. Only GPUs are divided.
        held: What this process loads with the first score.
        turns: Where engines and learners do not fit side by side, they use their GPUs in turns.

    Returns:
        `engine` for each engine, with what that may take of a GPU that it shares, and whether it sleeps; without GPUs
        as it was. And each learner's settings, with what they leave to memory.

    Raises:
        HostError: As `place`.
        ValueError: Ranks cannot share a model, with or without GPUs, or an engine cannot compute it without.
    """
    engine = EnginePlan.of(engine or EngineConfig())
    asked = {name: settings for name, (settings, _) in learners.items()}
    as_it_is = dict.fromkeys(engines, engine), asked
    meshes = [(name, "learner", ranks) for name in learners] + [(name, "engines", engine.tp) for name in engines]
    seats = mesh.preview_placement(meshes)
    on_gpus = any(seat.gpu for seat in seats)
    for name in dict.fromkeys(seat.name for seat in seats if not seat.gpu):
        if name in engines:
            check_head_size(engines[name][0], name)
        else:
            check_without_gpu(asked[name])
    try:
        parts = checked_parts(engines, learners, ranks=ranks, engine=engine)
    except ModelNotFoundError as error:
        if on_gpus:
            startup.say(f"whether it fits into the GPUs is not known: {error}")
        return as_it_is
    if not on_gpus:  # nothing is divided, and learners still take passes by the host's memory
        check_caches(parts, engine)
        placement = place(parts, engine, mesh.preview_placement)
        for line in placement.chosen(asked):
            startup.say(line)
        return as_it_is[0], placement.learners
    own = by_own_name(judges, taken=(part.name for part in parts))
    counted, doubts = judges_of(own)
    parts += counted
    beside, unknown = held_on(held, mesh.local_gpus())
    doubts += unknown
    placement = place(parts, engine, mesh.preview_placement, turns=turns, beside=beside)
    there = mesh.running_on({(one.seat.host, one.seat.gpu) for one in placement.processes if one.seat.gpu})
    doubts += [f"not counted: {name}, which runs already on a GPU of this run" for name in there if name not in own]
    mesh.reserve([(part.name, part.role, part.ranks) for part in parts])  # whatever starts first
    for part in counted:
        own[part.name].place(part.name, placement.engines[part.name])
    if any(settings.sleeps for settings in placement.engines.values()):
        startup.say("engines and learner do not fit side by side and take turns; that has not been run by us on a GPU")
    if not mesh.has_remote_hosts():
        doubts += host_doubts(parts, placement, free=available_bytes())
    for line in (*placement.lines(), *placement.chosen(asked), *placement.doubts, *doubts):
        startup.say(line)
    return placement.engines, placement.learners


def parts_of(
    engines: Mapping[str, tuple[Path, Sequence[LoRA]]],
    learners: Mapping[str, tuple[LearnerPlan, int]],
    *,
    ranks: int,
    tp: int,
) -> list[Part]:
    """What runs, learners first; arguments as of `place_here`, with the ranks of each engine.

    Raises:
        ModelNotFoundError: The sizes of a model are not known.
    """
    return [
        *(
            Part(name=name, ranks=ranks, size=ModelSize.of(Path(own.model)), learner=own, sharing=sharing)
            for name, (own, sharing) in learners.items()
        ),
        *(
            Part(name=name, ranks=tp, size=ModelSize.of(folder), dtype=models.dtype_of(folder), adapters=adapters)
            for name, (folder, adapters) in engines.items()
        ),
    ]


def checked_parts(
    engines: Mapping[str, tuple[Path, Sequence[LoRA]]],
    learners: Mapping[str, tuple[LearnerPlan, int]],
    *,
    ranks: int,
    engine: EngineConfig | None = None,
) -> list[Part]:
    """What runs; arguments as of `place_here`. Asks for no host, so a run looks before it waits in a cluster's queue.

    Raises:
        ModelNotFoundError: The sizes of a model are not known.
        ValueError: Ranks cannot share a model, or it has not what settings ask for.
    """
    engine = engine or EngineConfig()
    parts = parts_of(engines, learners, ranks=ranks, tp=engine.tp)
    check_ranks(parts)
    check_models(parts, engine)
    return parts


def host_bytes(parts: Sequence[Part], placement: Placement) -> dict[str, dict[str, int]]:
    """Bytes of each host's memory that a run needs beside its GPUs, by host and by what they hold.

    Counted are weights on their way to engines, on the first host of each learner; what sleeps or is parked while
    others compute; and what a learner with `LearnerConfig.cpu_offload` keeps there. Programs and libraries come on top.

    Args:
        parts: What runs.
        placement: Where.
    """
    hosts = {one.seat.host: {"weights on their way": 0, "what sleeps or is parked": 0, "what is offloaded": 0}
             for one in placement.processes}  # fmt: skip
    learning = {part.name: part for part in parts if part.learner is not None}
    parked = any(own.sleeps for own in placement.engines.values())
    seen: set[str] = set()
    for one in placement.processes:
        here, part = hosts[one.seat.host], learning.get(one.seat.name)
        if part is not None and part.learner is not None:
            if part.name not in seen and part.learner.lora is None:
                here["weights on their way"] += published_bytes(part.size, part.learner)
            seen.add(part.name)
            if part.learner.cpu_offload:
                here["what is offloaded"] += offloaded_bytes(part.size, part.learner) // part.ranks
        if parked and one.seat.role in ("learner", "engines"):
            kept = ("weights", "adapters", "optimizer", "reference")
            here["what sleeps or is parked"] += sum(one.parts.get(name, 0) for name in kept)
    return {host: {what: count for what, count in needs.items() if count} for host, needs in hosts.items()}


def host_doubts(parts: Sequence[Part], placement: Placement, *, free: int) -> list[str]:
    """What the hosts of a run may lack memory for; see `host_bytes`.

    Args:
        parts: What runs.
        placement: Where.
        free: Bytes of each host's memory.
    """
    found = []
    for host, needs in host_bytes(parts, placement).items():
        if (needed := sum(needs.values())) > free:
            told = ", ".join(f"{what} {count / 1e9:.1f}" for what, count in needs.items())
            said = f"the memory of {host}: up to {needed / 1e9:.1f} GB are needed ({told})"
            found.append(f"{said} and {free / 1e9:.1f} are free. Take an adapter, which alone travels then")
    return found


def by_own_name(judges: Iterable[OwnEngine], taken: Iterable[str] = ()) -> dict[str, OwnEngine]:
    """Each by a name that no other process of the run has."""
    found, names = dict[str, OwnEngine](), set(taken)
    for judge in judges:
        name = next(name for n in itertools.count(1) if (name := judge.name + f"-{n}" * (n > 1)) not in names)
        names.add(name)
        found[name] = judge
    return found


def judges_of(judges: Mapping[str, OwnEngine]) -> tuple[list[Part], list[str]]:
    """Their engines, and what is not counted: those that run already, or whose model is not known here."""
    parts, doubts = list[Part](), list[str]()
    for name, judge in judges.items():
        if judge.running:
            doubts.append(f"not counted: the engine of {name}, which runs already")
            continue
        try:
            folder = models.resolve(judge.model)
            size, dtype = ModelSize.of(folder), models.dtype_of(folder)
        except ModelNotFoundError as error:
            doubts.append(f"not counted: the engine of {name}: {error}")
            continue
        parts.append(Part(name=name, ranks=judge.config.tp, size=size, dtype=dtype, judge=EnginePlan.of(judge.config)))
    check_ranks(parts)
    for part in parts:
        assert part.judge is not None
        check_models([part], part.judge)
    return parts, doubts


def held_on(models_held: Iterable[OwnModel], here: Sequence[ProcessSlot]) -> tuple[list[Placed], list[str]]:
    """What the controller's process itself has on its GPUs, one for each, and what of it is not counted.

    Args:
        models_held: That it loads.
        here: A seat on each GPU that it sees.

    Raises:
        HostError: It sees no such GPU.
    """
    names, parts = defaultdict[int, list[str]](list), defaultdict[int, Counter[str]](Counter)
    doubts = list[str]()
    for own in models_held:
        kind, _, index = own.device.partition(":")
        if kind != "cuda":
            continue
        number = int(index or 0)
        if number >= len(here):
            raise HostError(
                f"{own.name} is to live on {own.device}, and the controller's host has {len(here)} GPUs; give it "
                'another device, or "cpu"'
            )
        try:
            folder = models.resolve(own.model)
            size, item = ModelSize.of(folder), item_bytes(models.dtype_of(folder), EngineConfig())
        except ModelNotFoundError as error:
            doubts.append(f"not counted: the model of {own.name}: {error}")
            continue
        names[number].append(own.name)
        parts[number].update(
            weights=models.weight_bytes(folder), activations=pass_bytes(size, own.batch_tokens, item=item)
        )
    found = []
    for number, counts in sorted(parts.items()):
        taken = {**counts, "overhead": OVERHEAD_BYTES}
        seat = replace(here[number], name=", ".join(names[number]))
        found.append(Placed(seat=seat, bytes=sum(taken.values()), parts=taken))
    return found, doubts


def check_ranks(parts: Iterable[Part]) -> None:
    """See that ranks can share their models, before the first of them starts.

    Raises:
        ValueError: They cannot.
    """
    for part in parts:
        if part.learner is None:
            check_tp(part.size, part.ranks, part.name)
        else:
            shards_of(part.learner, part.ranks)
            check_degrees(part.learner, part.size)


def check_models(parts: Iterable[Part], engine: EngineConfig) -> None:
    """See that models have the positions and the layers that settings ask for.

    Raises:
        ValueError: One has not.
    """
    for part in parts:
        lora = None if part.learner is None else part.learner.lora
        if part.learner is None:
            check_context(part.size, engine.max_model_len, part.name)
        elif lora is not None and not part.size.plain_layers and set(lora.targets) - set(ATTENTION_TARGETS):
            raise ValueError(
                f"{part.name}: every layer of this mixture has experts, which get no adapter; set "
                f"LoRA(targets={ATTENTION_TARGETS!r})"
            )


def check_caches(parts: Iterable[Part], engine: EngineConfig) -> None:
    """See that engines' caches on CPU hold a conversation. On GPUs vLLM keeps less where attention has a window.

    Raises:
        ValueError: One does not.
    """
    for part in parts:
        if part.learner is None:
            check_cache(part.size, engine, part.name, dtype=part.dtype, tp=part.ranks)


def place(
    parts: Sequence[Part],
    engine: EngineConfig,
    rehearse: Callable[[Sequence[tuple[str, str, int]]], list[ProcessSlot]],
    *,
    turns: bool = False,
    beside: Sequence[Placed] = (),
) -> Placement:
    """Give each process its memory.

    Args:
        parts: What runs.
        engine: Settings of every engine but judges'.
        rehearse: Says where meshes go, as `mesh.preview_placement`.
        turns: Engines sleep while learners compute, and the other way round, where they do not fit side by side.
        beside: What is on GPUs anyway, and stays; see `held_on`.

    A learner that leaves to memory what it recomputes does the least with which all fits, before anybody takes turns.

    Raises:
        HostError: There are too few GPUs, or what is on one does not fit; the message has the arithmetic.
    """
    engine = EnginePlan.of(engine)
    learners = [part.learner for part in parts if part.learner is not None]
    left = any("activation_checkpointing" in learner.left_to_memory for learner in learners)
    engines = [engine, replace(engine, sleeps=True)] if turns and not engine.sleeps else [engine]
    *ways, last = itertools.product(engines, RECOMPUTED if left else RECOMPUTED[:1])
    for own, how in ways:
        with contextlib.suppress(HostError):
            return _place([_recomputing(part, how) for part in parts], own, rehearse, beside)
    own, how = last
    return _place([_recomputing(part, how) for part in parts], own, rehearse, beside)


def _recomputing(part: Part, how: Literal["none", "selective", "full"]) -> Part:
    """The same where it leaves to memory what it recomputes."""
    if part.learner is None or part.learner.activation_checkpointing is not None:
        return part
    return replace(part, learner=replace(part.learner, activation_checkpointing=how))


def _place(
    parts: Sequence[Part],
    engine: EnginePlan,
    rehearse: Callable[[Sequence[tuple[str, str, int]]], list[ProcessSlot]],
    beside: Sequence[Placed],
) -> Placement:
    seats = rehearse([(part.name, part.role, part.ranks) for part in parts])
    on: dict[tuple[str, str], list[ProcessSlot]] = defaultdict(list)
    for seat in seats:
        on[seat.host, seat.gpu].append(seat)
    held = {(one.seat.host, one.seat.gpu): one for one in beside}
    alone = {where: own for where, own in on.items() if len(own) == 1 and where not in held}
    on_cpu = _on_cpu_here(parts, seats)
    parts = [
        part if part.learner is None else replace(part, learner=_filled(part, part.learner, alone, on_cpu))
        for part in parts
    ]
    by_name = {part.name: part for part in parts}
    rooms: dict[str, list[MemoryShare]] = defaultdict(list)
    for where in dict.fromkeys((*on, *held)):
        sitting, own = on.get(where, []), held.get(where)
        total = (sitting[0] if own is None else own.seat).gpu_bytes
        if where[1] and total:
            together = [(seat, by_name[seat.name]) for seat in sitting]
            for name, room in _rooms(f"GPU {where[1]} of {where[0]}", total, together, engine, own).items():
                rooms[name].append(MemoryShare(room, total, shared=len(sitting) + (own is not None) > 1))
    settings = {part.name: _told(part, parts, engine, rooms) for part in parts if part.learner is None}
    room_of = {name: min(room.bytes for room in found) for name, found in rooms.items()}
    return Placement(
        processes=[
            *(_placed(seat, by_name[seat.name], settings, room_of.get(seat.name, 0)) for seat in seats), *beside
        ],
        engines=settings,
        learners={part.name: part.learner for part in parts if part.learner is not None},
        doubts=_doubts(parts, [*seats, *(one.seat for one in beside)]),
    )


def _on_cpu_here(parts: Sequence[Part], seats: Sequence[ProcessSlot]) -> dict[str, int]:
    """Bytes of memory for each rank of learners that compute on this host's CPU, by the learner's name.

    All of them together have half of the host's; engines, environments and whatever else runs have the other.
    """
    own = {part.name: [seat for seat in seats if seat.name == part.name] for part in parts if part.learner is not None}
    here = {
        name: found for name, found in own.items() if all(not one.gpu and one.host.startswith(HERE) for one in found)
    }
    return dict.fromkeys(here, total_bytes() // 2 // max(1, sum(map(len, here.values()))))


def _filled(
    part: Part,
    learner: LearnerPlan,
    alone: Mapping[tuple[str, str], Sequence[ProcessSlot]],
    on_cpu: Mapping[str, int],
) -> LearnerPlan:
    """A learner's settings, with larger passes where its ranks have GPUs alone; an engine takes what is left of one.

    Or where they compute on this host's CPU, by what they have of its memory.
    """
    own = [seat.gpu_bytes for (_, gpu), (seat,) in alone.items() if gpu and seat.name == part.name]
    device_bytes = min(own) if len(own) == part.ranks else on_cpu.get(part.name, 0)
    return by_memory(
        part.size, learner, device_bytes, ranks=part.ranks, sharing=part.sharing, on_cpu=part.name in on_cpu
    )


def _told(
    part: Part, parts: Sequence[Part], engine: EnginePlan, rooms: Mapping[str, Sequence[MemoryShare]]
) -> EnginePlan:
    """An engine's settings with what it may take; engines of one model have the same."""
    alike = (part.role, part.size, part.dtype, part.adapters, part.judge)
    found = [
        room
        for one in parts
        if one.learner is None and (one.role, one.size, one.dtype, one.adapters, one.judge) == alike
        for room in rooms.get(one.name, ())
    ]
    return with_memory_share(part.judge or engine, part.served, found)


def _rooms(
    gpu: str, total: int, sitting: Sequence[tuple[ProcessSlot, Part]], engine: EnginePlan, held: Placed | None
) -> dict[str, int]:
    """Bytes of a GPU that each engine on it may take: what it needs, and an even part of what nobody does.

    Where engines and learners take turns, judges' engines are there beside either, and so is what the controller holds.

    Raises:
        HostError: They do not suffice.
    """
    where = f"{gpu} has {total / 1e9:.1f} GB"
    learners = [(part.name, _learner(part, part.learner)) for _, part in sitting if part.learner is not None]
    learning = [part.learner for _, part in sitting if part.learner is not None]
    others = [] if held is None else [(f"{held.seat.role} {held.seat.name}", held.parts)]
    kept = 0 if held is None else held.bytes
    alone = len(sitting) == 1 and held is None
    engines = {part.name: part for _, part in sitting if part.learner is None}
    wishes = [
        memory_request(name, part.served, part.judge or engine, total, alone=alone) for name, part in engines.items()
    ]
    sleeping = sum(engine.sleeps and part.judge is None for part in engines.values()) if learners else 0
    taken, asleep = sum(sum(found.values()) for _, found in learners), sleeping * OVERHEAD_BYTES
    whole = wishes[0].reserved if alone and wishes else int(total * USABLE_SHARE)
    if taken + kept + asleep > whole and (asleep or not wishes):
        beside = f" beside {sleeping} sleeping engine{'s' * (sleeping > 1)}" if asleep else ""
        less = "; ".join([_less_learner(learning)] * bool(learners) + [_LESS_HELD] * bool(others))
        raise HostError(f"{where} and{beside} {describe_needs([*learners, *others])}: {less}")
    turns = [(taken + kept, wishes)]
    if asleep:  # the learners', and the engines' beside what learners keep there
        judges = [wish for wish in wishes if engines[wish.name].judge is not None]
        turns = [(taken + kept + asleep, judges), (sum(found["overhead"] for _, found in learners) + kept, wishes)]
    rooms: dict[str, int] = {}
    for before, there in turns:
        room = max(0, whole - before)
        if (found := divide_memory(room, there)) is None:
            less = _less_learner(learning)
            raise HostError(f"{where}, {_too_much(room, there, learners, others, engine, engines=engines, less=less)}")
        for name, most in found.items():
            rooms[name] = min(most, rooms.get(name, most))
    return rooms


def _too_much(
    room: int,
    wishes: Sequence[MemoryRequest],
    learners: Sequence[tuple[str, Mapping[str, int]]],
    others: Sequence[tuple[str, Mapping[str, int]]],
    engine: EnginePlan,
    *,
    engines: Mapping[str, Part],
    less: str,
) -> str:
    """Why engines do not fit into `room` of a GPU, and what to do."""
    asked = [wish for wish in wishes if wish.configured is not None]
    if (wished := sum(wish.reserved for wish in asked)) > room:
        part, many = engines[asked[0].name], f"{len(wishes)} engine{'s' * (len(wishes) > 1)}"
        whose = "engine.gpu_memory_utilization" if part.judge is None else f"gpu_memory_utilization of {part.name}"
        return (
            f"of which {room / len(wishes) / 1e9:.1f} are left for each of {many} beside what shares it, and "
            f"{whose}={(part.judge or engine).gpu_memory_utilization} would take {wished / 1e9:.1f}: lower it, or "
            "leave it out"
        )
    many = "its engine" if len(wishes) == 1 else f"its {len(wishes)} engines"
    if short := [wish for wish in asked if wish.least > wish.reserved]:
        wishes, room, many = short[:1], short[0].reserved, "its engine"
    judges = [engines[wish.name].judge for wish in wishes]
    needs = describe_needs((f"{engines[wish.name].role.removesuffix('s')} {wish.name}", wish.needs) for wish in wishes)
    judged, playing = any(judge is not None for judge in judges), any(judge is None for judge in judges)
    return (
        f"of which {many} may take {room / 1e9:.1f}, and {needs}."
        + f" Beside it, {describe_needs([*learners, *others])}." * bool(learners or others)
        + f" {_less_engine(engine)}" * playing
        + f"{';' * playing} {_LESS_JUDGE}" * judged
        + f"; {less}" * bool(learners)
        + f"; {_LESS_HELD}" * bool(others)
        + ", or set colocate, so that both take turns there" * bool(learners and playing and not engine.sleeps)
    )


def _less_engine(engine: EnginePlan) -> str:
    cache = "engine.max_model_len" if engine.kv_cache_gb is None else "engine.kv_cache_gb"
    share = "" if engine.gpu_memory_utilization is None else "raise engine.gpu_memory_utilization, "
    return f"Lower {cache} or engine.max_num_seqs, {share}raise engine.tp, or give engines GPUs of their own"


_LESS_JUDGE = (
    "give judges a GPU of their own (mesh.gpus: {judges: 1}), or less to do: "
    "Judge(engine=fa.EngineConfig(max_model_len=4096))"
)
_LESS_HELD = 'let what the controller loads live elsewhere (device="cuda:1", or "cpu"), or lower its batch_tokens'


def _less_learner(learning: Iterable[LearnerPlan]) -> str:
    full = all(one.activation_checkpointing == "full" for one in learning)
    recompute = "" if full else "set learner.activation_checkpointing to 'full', "
    return (
        f"raise learner_procs, which shard the learner, {recompute}lower "
        "learner.max_tokens_per_microbatch and engine.max_model_len, of which a sample is one pass, learn an adapter "
        "(Policy(lora=...)), or set learner.cpu_offload"
    )


def _learner(part: Part, config: LearnerPlan) -> Mapping[str, int]:
    return learner_bytes(part.size, config, ranks=part.ranks, sharing=part.sharing)


def _doubts(parts: Sequence[Part], seats: Sequence[ProcessSlot]) -> list[str]:
    """Of learners whose longest sample nobody limited: that it may be more than the microbatch that was counted."""
    found = []
    for part in parts:
        config, most = part.learner, part.size.context
        room = 0 if config is None else config.max_tokens_per_microbatch or 0
        if config is None or config.max_sample_tokens is not None or most <= room:
            continue
        longest = sum(_learner(part, replace(config, max_sample_tokens=most)).values())
        gpus = {(seat.host, seat.gpu): seat.gpu_bytes for seat in seats if seat.name == part.name and seat.gpu_bytes}
        alone = not any((seat.host, seat.gpu) in gpus for seat in seats if seat.name != part.name)
        if gpus and (not alone or longest > USABLE_SHARE * min(gpus.values())):
            found.append(
                f"{part.name}: counted are passes of {room} tokens. A longer sample is one "
                f"pass, and one of the model's {most} tokens would take {longest / 1e9:.1f} GB: set "
                "engine.max_model_len to what conversations need"
            )
    return found


def _placed(seat: ProcessSlot, part: Part, engines: Mapping[str, EnginePlan], room: int) -> Placed:
    found: Mapping[str, int]
    if part.learner is not None:
        found = _learner(part, part.learner)
    else:
        engine = engines[part.name]
        fixed = part.served.fixed(engine)
        cache = part.served.least_cache(engine)
        if room and engine.kv_cache_gb is None:  # vLLM takes all it may
            cache = max(cache, room - sum(fixed.values()))
        found = {**fixed, "cache": cache}
    return Placed(seat=seat, bytes=sum(found.values()), parts=found)
