"""Which process of a run computes on which GPU, and whether its memory suffices: `place`.

In: what is going to run, and where each process would be. Out: the engine's share of its GPUs, and a table; or an error
with the arithmetic. Waits for nothing.

The bytes are `serving.memory`'s and `learner.memory`'s, for a run that starts and for `forge-agents simulate` alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forge_agents.errors import HostError, ModelNotFoundError
from forge_agents.models import resolve as models
from forge_agents.models.sizes import ModelSize
from forge_agents.policy import LORA_TARGETS, LoRA
from forge_agents.runtime import mesh, starts
from forge_agents.runtime.hosts import Seat
from forge_agents.serving.config import EngineConfig
from forge_agents.serving.memory import (
    OVERHEAD_BYTES,
    USUAL_SHARE,
    check_context,
    check_tp,
    engine_bytes,
    item_bytes,
    kv_bytes,
)
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.degrees import check_degrees, shards_of
from forge_trainers.learner.memory import learner_bytes

ATTENTION_TARGETS = LORA_TARGETS[:4]
ROOM = 0.95
"""Share of a GPU's memory that is given away; the rest is the allocator's waste."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One mesh of processes that compute: an engine, or a learner."""

    name: str
    ranks: int
    size: ModelSize
    learner: LearnerConfig | None = None
    """Settings of a learner; None: it is an engine."""
    dtype: str = "bfloat16"
    """What its model is stored in, which an engine takes unless its settings say otherwise."""
    adapters: Sequence[LoRA] = ()
    """Beside an engine's model."""
    sharing: int = 1
    """Policies that a learner learns for; adapters of one model take turns in it."""

    @property
    def role(self) -> str:
        """As in `Hosts`."""
        return "engines" if self.learner is None else "learner"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One process and what it is expected to take."""

    seat: Seat
    bytes: int
    """Of its GPU."""
    parts: Mapping[str, int]
    """The same, by what it is for."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """All processes that compute."""

    processes: Sequence[Placed]
    engine: EngineConfig
    """With what it may take of each GPU, where it shares one."""
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


def place_here(
    engines: Mapping[str, tuple[Path, Sequence[LoRA]]],
    learners: Mapping[str, tuple[LearnerConfig, int]],
    *,
    ranks: int,
    engine: EngineConfig | None = None,
    turns: bool = False,
) -> EngineConfig:
    """Place what is about to start on the run's hosts, and show the table.

    Args:
        engines: Model folder and adapters, by the name of each engine's processes.
        learners: Settings, with the model's folder, and policies that share it, by the name of each learner's
            processes.
        ranks: Of each learner.
        engine: Settings of every engine; None where there is none.
        turns: Where engines and learners do not fit side by side, they use their GPUs in turns.

    Returns:
        `engine`, with what it may take of a GPU that it shares, and whether it sleeps. Without GPUs it is as it was.

    Raises:
        HostError: As `place`.
        ValueError: Ranks cannot share a model, with or without GPUs.
    """
    engine = engine or EngineConfig()
    meshes = [(name, "learner", ranks) for name in learners] + [(name, "engines", engine.tp) for name in engines]
    on_gpus = any(seat.gpu for seat in mesh.rehearse(meshes))
    try:
        parts = [
            *(
                Part(name=name, ranks=ranks, size=ModelSize.of(Path(own.model)), learner=own, sharing=sharing)
                for name, (own, sharing) in learners.items()
            ),
            *(
                Part(
                    name=name,
                    ranks=engine.tp,
                    size=ModelSize.of(folder),
                    dtype=models.dtype_of(folder),
                    adapters=adapters,
                )
                for name, (folder, adapters) in engines.items()
            ),
        ]
    except ModelNotFoundError as error:
        if on_gpus:
            starts.say(f"whether it fits into the GPUs is not known: {error}")
        return engine
    check_ranks(parts)
    check_models(parts, engine)
    if not on_gpus:
        return engine
    placement = place(parts, engine, mesh.rehearse, turns=turns)
    mesh.plan(meshes)  # whatever starts first: engines that share a GPU with a learner do
    if placement.engine.sleeps:
        starts.say("engines and learner do not fit side by side and take turns; that has not been run by us on a GPU")
    for line in (*placement.lines(), *placement.doubts):
        starts.say(line)
    return placement.engine


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


def place(
    parts: Sequence[Part],
    engine: EngineConfig,
    rehearse: Callable[[Sequence[tuple[str, str, int]]], list[Seat]],
    *,
    turns: bool = False,
) -> Placement:
    """Give each process its memory.

    Args:
        parts: What runs.
        engine: Settings of every engine.
        rehearse: Says where meshes go, as `mesh.rehearse`.
        turns: Engines sleep while learners compute, and the other way round, where they do not fit side by side.

    Raises:
        HostError: There are too few GPUs, or what is on one does not fit; the message has the arithmetic.
    """
    if turns and not engine.sleeps:
        try:
            return place(parts, engine, rehearse)
        except HostError:
            engine = replace(engine, sleeps=True)
    by_name = {part.name: part for part in parts}
    seats = rehearse([(part.name, part.role, part.ranks) for part in parts])
    on: dict[tuple[str, str], list[Seat]] = defaultdict(list)
    for seat in seats:
        on[seat.host, seat.gpu].append(seat)
    shares: dict[tuple[str, str], int] = {}
    for where, sitting in on.items():
        if where[1] and (total := sitting[0].gpu_bytes):
            shares[where] = _share(total, [(seat, by_name[seat.name]) for seat in sitting], engine)
    engines = [
        (by_name[seat.name], shares[where], seat.gpu_bytes, len(sitting) > 1)
        for where, sitting in on.items()
        if where in shares
        for seat in sitting
        if seat.role == "engines"
    ]
    if any(shared for *_, shared in engines) and engine.gpu_memory_utilization is None:
        # what one may take is said in bytes, because vLLM would measure beside processes that come and go; all engines
        # have the same settings, so the fullest GPU says it for those that have one alone, too
        share = min(room / total for _, room, total, _ in engines)
        left = min(room - sum(_engine(part, engine).values()) for part, room, *_ in engines)
        for part in [part for part, *_ in engines] if engine.kv_cache_gb is None else ():
            if (least := _least_cache(part, engine)) > left:
                raise HostError(
                    f"engine {part.name} needs {least / 1e9:.1f} GB of cache for one conversation of "
                    f"{_context(part, engine)} tokens, and engines, which all have the same settings, can have "
                    f"{left / 1e9:.1f} beside what shares the fullest GPU. {_less_engine(engine)}"
                )
        cache = engine.kv_cache_gb or left / 1e9
        engine = replace(engine, gpu_memory_utilization=round(share, 4), kv_cache_gb=round(cache, 3))
    return Placement(
        processes=[_placed(seat, by_name[seat.name], engine, shares.get((seat.host, seat.gpu), 0)) for seat in seats],
        engine=engine,
        doubts=_doubts(parts, seats),
    )


def _share(total: int, sitting: Sequence[tuple[Seat, Part]], engine: EngineConfig) -> int:
    """Bytes of a GPU that each engine on it may take.

    Raises:
        HostError: They do not suffice.
    """
    where = f"GPU {sitting[0][0].gpu} of {sitting[0][0].host}"
    learners = [
        (part.name, _learner(part, part.learner)) for _, part in sitting if part.learner is not None
    ]
    engines = [part for _, part in sitting if part.learner is None]
    taken = sum(sum(found.values()) for _, found in learners)
    room = int(total * ROOM) - taken
    asleep = len(engines) * OVERHEAD_BYTES if engine.sleeps else 0
    if (not engines or asleep) and room < asleep:
        beside = f" beside {len(engines)} sleeping engine{'s' * (len(engines) > 1)}" if asleep else ""
        raise HostError(f"{where} has {total / 1e9:.1f} GB and{beside} {_said(learners)}: {_LESS_LEARNER}")
    if not engines:
        return 0
    if asleep:  # what learners keep there while engines compute
        room = int(total * ROOM) - sum(found["overhead"] for _, found in learners)
    each = room // len(engines)
    wished = int(total * (engine.gpu_memory_utilization or (USUAL_SHARE if len(sitting) == 1 else 0)))
    if len(sitting) > 1 and wished > max(0, each):
        raise HostError(
            f"{where} has {total / 1e9:.1f} GB, of which {max(0, each) / 1e9:.1f} are left for each of {len(engines)} "
            f"engine{'s' * (len(engines) > 1)} beside what shares it, and engine.gpu_memory_utilization="
            f"{engine.gpu_memory_utilization} would take {wished / 1e9:.1f}: lower it, or leave it out"
        )
    each = wished or each
    for part in engines:
        fixed, cache = _engine(part, engine), _least_cache(part, engine)
        if sum(fixed.values()) + cache > each:
            wish = f"one conversation of {_context(part, engine)} tokens"
            wish = wish if engine.kv_cache_gb is None else "engine.kv_cache_gb"
            needs = [(f"engine {part.name}", {**fixed, wish: cache})]
            beside = f" Beside it, {_said(learners)}." if learners else ""
            raise HostError(
                f"{where} has {total / 1e9:.1f} GB, of which each engine on it may take {max(0, each) / 1e9:.1f}, and "
                f"{_said(needs)}.{beside} {_less_engine(engine)}{'; ' + _LESS_LEARNER if learners else ''}"
                + ", or set colocate, so that both take turns there" * bool(learners and not engine.sleeps)
            )
    return each


def _less_engine(engine: EngineConfig) -> str:
    cache = "engine.max_model_len" if engine.kv_cache_gb is None else "engine.kv_cache_gb"
    share = "" if engine.gpu_memory_utilization is None else "raise engine.gpu_memory_utilization, "
    return f"Lower {cache} or engine.max_num_seqs, {share}raise engine.tp, or give engines GPUs of their own"


_LESS_LEARNER = (
    "raise learner_procs, which shard the learner, set learner.activation_checkpointing to 'full', lower "
    "learner.max_tokens_per_microbatch and engine.max_model_len, of which a sample is one pass, learn an adapter "
    "(Policy(lora=...)), or set learner.cpu_offload"
)


def _said(needs: Iterable[tuple[str, Mapping[str, int]]]) -> str:
    return "; ".join(
        f"{name} expects {sum(found.values()) / 1e9:.1f} GB ("
        + ", ".join(f"{part} {count / 1e9:.1f}" for part, count in found.items() if count >= 5e7)
        + ")"
        for name, found in needs
    )


def _learner(part: Part, config: LearnerConfig) -> Mapping[str, int]:
    return learner_bytes(part.size, config, ranks=part.ranks, sharing=part.sharing)


def _doubts(parts: Sequence[Part], seats: Sequence[Seat]) -> list[str]:
    """Of learners whose longest sample nobody limited: that it may be more than the microbatch that was counted."""
    found = []
    for part in parts:
        config, most = part.learner, part.size.context
        if config is None or config.max_sample_tokens is not None or most <= config.max_tokens_per_microbatch:
            continue
        longest = sum(_learner(part, replace(config, max_sample_tokens=most)).values())
        gpus = {(seat.host, seat.gpu): seat.gpu_bytes for seat in seats if seat.name == part.name and seat.gpu_bytes}
        alone = not any((seat.host, seat.gpu) in gpus for seat in seats if seat.name != part.name)
        if gpus and (not alone or longest > ROOM * min(gpus.values())):
            found.append(
                f"{part.name}: counted are passes of {config.max_tokens_per_microbatch} tokens. A longer sample is one "
                f"pass, and one of the model's {most} tokens would take {longest / 1e9:.1f} GB: set "
                "engine.max_model_len, or learner.max_sample_tokens, to what conversations need"
            )
    return found


def _context(part: Part, engine: EngineConfig) -> int:
    return engine.max_model_len or part.size.context


def _engine(part: Part, engine: EngineConfig) -> Mapping[str, int]:
    return engine_bytes(part.size, engine, dtype=part.dtype, tp=part.ranks, adapters=part.adapters)


def _least_cache(part: Part, engine: EngineConfig) -> int:
    if engine.kv_cache_gb is not None:
        return int(engine.kv_cache_gb * 1e9)
    return kv_bytes(part.size, _context(part, engine), item=item_bytes(part.dtype, engine), tp=part.ranks)


def _placed(seat: Seat, part: Part, engine: EngineConfig, share: int) -> Placed:
    found: Mapping[str, int]
    if part.learner is not None:
        found = _learner(part, part.learner)
    else:
        fixed = _engine(part, engine)
        cache = _least_cache(part, engine)
        if share and engine.kv_cache_gb is None:  # vLLM takes all it may
            cache = max(cache, share - sum(fixed.values()))
        found = {**fixed, "cache": cache}
    return Placed(seat=seat, bytes=sum(found.values()), parts=found)
