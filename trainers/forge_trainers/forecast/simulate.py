"""Predict what a run takes before its machines are rented: step time, idle shares, staleness, cost.

In: a run's settings, folders of short measured runs, a number of GPUs. Out: a `Prediction`. Waits for nothing.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_agents.envs import registry
from forge_agents.errors import ForgeError
from forge_agents.files import user_path
from forge_agents.runtime.hosts import ENVS
from forge_agents.settings import settings_class
from forge_trainers.forecast.measured import TO_MEASURE, Measured, measure, plan_of, read_run
from forge_trainers.forecast.simulation import Plan, SimulatedRun
from forge_trainers.forecast.simulation import simulate as run_steps
from forge_trainers.learner.config import LEAST_MICROBATCH
from forge_trainers.run_file import RunConfig

if TYPE_CHECKING:
    from rich.table import Table

_EVEN = 8
"""Even parts of the GPUs that are tried for the learner, beside powers of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a run would take. Seconds are means over warm steps."""

    step_s: float
    """The four stages together, as ``time/step_s``."""
    collect_s: float
    score_s: float
    learn_s: float
    sync_s: float
    engines_idle: float
    """Share of the time, in [0, 1], mean over all engines."""
    learner_idle: float
    staleness: Mapping[int, float]
    """Share of loss tokens by how many versions they are old."""
    tokens_per_s: float
    """Sampled."""
    steps: int
    """Of the whole run."""
    hours: float
    """The whole run, evaluations included, without starting and checkpoints."""
    gpus: int
    """0: the hardware that was measured."""
    engine_gpus: int
    learner_gpus: int
    gpu_hours: float
    cost: float
    """`gpu_hours` at the price that was given."""
    assumptions: Sequence[str]
    """What was not measured."""
    splits: Sequence[Prediction] = ()
    """Every split of the GPUs that was tried, fastest first."""

    def json(self) -> dict[str, Any]:
        """As plain data; keys of `staleness` are words."""
        found = dataclasses.asdict(self)
        for one in (found, *found["splits"]):
            one["staleness"] = {str(age): share for age, share in one["staleness"].items()}
        return found

    def table(self) -> Table:
        """What is said of this prediction."""
        from rich.table import Table

        rows = {
            "step": f"{self.step_s:.2f} s",
            "  collect": f"{self.collect_s:.2f} s",
            "  judge": f"{self.score_s:.2f} s",
            "  learn": f"{self.learn_s:.2f} s",
            "  sync": f"{self.sync_s:.2f} s",
            "engines idle": f"{self.engines_idle:.0%}",
            "learner idle": f"{self.learner_idle:.0%}",
            "staleness": ", ".join(f"{age}: {share:.0%}" for age, share in self.staleness.items()),
            "tokens sampled": f"{self.tokens_per_s:,.0f} a second",
            "the run": f"{self.steps} steps in {self.hours:.2f} hours",
        }
        if self.gpus:
            rows["GPUs"] = f"{self.gpus}: {self.engine_gpus} for engines, {self.learner_gpus} for the learner"
            rows["cost"] = f"{self.cost:,.2f} for {self.gpu_hours:,.1f} GPU hours"
        table = Table("what", "predicted", title="prediction")
        for row in rows.items():
            table.add_row(*row)
        return table

    def splits_table(self) -> Table:
        """A row for each split."""
        from rich.table import Table

        table = Table("engines", "learner", "step s", "engines idle", "learner idle", "hours", "cost", title="splits")
        for one in self.splits:
            table.add_row(
                str(one.engine_gpus), str(one.learner_gpus), f"{one.step_s:.2f}", f"{one.engines_idle:.0%}",
                f"{one.learner_idle:.0%}", f"{one.hours:.2f}", f"{one.cost:,.2f}",
            )  # fmt: skip
        return table


@settings_class
@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What the run is to be simulated on."""

    gpus: int = 0
    """GPUs; 0: the machine that was measured."""
    gpus_per_host: int = 8
    """GPUs of each host; the ranks of one engine are on one host."""
    learner_gpus: int = 0
    """How many of them learn; 0: the fastest split."""
    learner_scaling: float = 0.9
    """Share of the ideal speed that each doubling of the learner's GPUs keeps."""
    price_per_gpu_hour: float = 0.0
    """In any currency."""
    cores: float | None = None
    """CPU cores that engines and learner share. None: as many as this machine has where the runs were measured on CPU;
    with GPUs they share none."""

    def __post_init__(self) -> None:
        if self.gpus < 0:
            raise ValueError(f"gpus={self.gpus}: say how many there are, or 0 for the machine that was measured")
        if not 0 <= self.learner_gpus <= max(0, self.gpus - 1):
            raise ValueError(
                f"learner_gpus={self.learner_gpus} of gpus={self.gpus}; engines need at least one, and so does the "
                "learner. 0 leaves the choice to the simulator"
            )
        if self.gpus_per_host < 1:
            raise ValueError(f"gpus_per_host={self.gpus_per_host}; give at least 1")
        if not 0.5 <= self.learner_scaling <= 1:
            raise ValueError(f"learner_scaling={self.learner_scaling}; in [0.5, 1]: at 0.5 more GPUs gain nothing")
        if not (math.isfinite(self.price_per_gpu_hour) and self.price_per_gpu_hour >= 0):
            raise ValueError(f"price_per_gpu_hour={self.price_per_gpu_hour} must be finite and at least 0")
        if self.cores is not None and not self.cores > 0:
            raise ValueError(f"cores={self.cores} must be above 0")


def simulate(
    run: RunConfig,
    *,
    measured: Sequence[str | os.PathLike[str]] = (),
    hardware: Hardware | None = None,
    steps: int = 8,
) -> Prediction:
    """Predict a run from measured ones.

    Args:
        run: As ``forge-agents train`` takes it.
        measured: Folders of short runs of the same environment and policies, at least one with ``max_staleness=0``.
            Empty: the run's own `out_dir`.
        hardware: Where it is to run; None: where it was measured.
        steps: Steps that are looked at, once the first are over.

    Raises:
        RunFolderError: A folder holds no run, or too short a one.
        ValueError: The runs are of something else, or the GPUs are too few.
    """
    where = hardware or Hardware()
    if steps < 1:
        raise ValueError(f"steps={steps} looks at nothing; set at least 1")
    if not measured and not (user_path(run.out_dir) / "metrics.jsonl").is_file():
        raise ValueError(
            f"nothing is measured: out_dir={run.out_dir} holds no run. Train a few steps, keep their episodes, and "
            f"name the folder: {TO_MEASURE}; then --measured runs/measured"
            + f". Whether it fits into {where.gpus} GPUs needs none: --gpus {where.gpus} --model 8b" * bool(where.gpus)
        )
    found = measure([read_run(folder, cores=where.cores) for folder in measured or [run.out_dir]])
    base = planned(run, found, where)
    if not where.gpus:
        return _predict(run, found, base, where, steps=steps)
    engines, learners = len(set(base.homes.values())), base.learners
    each = engines * base.engine_ranks
    if where.gpus < each + learners:
        ranks = f" of {base.engine_ranks} ranks" * (base.engine_ranks > 1)
        learner = "a learner" if learners == 1 else f"{learners} learners"
        raise ValueError(f"gpus={where.gpus}: {engines} engines{ranks} and {learner} need {each + learners} at least")
    chosen = [where.learner_gpus] if where.learner_gpus else [
        count
        for count in _splits(where.gpus, each, learners)
        if engines <= _engines_beside(count, where, base.engine_ranks)
    ]
    if not chosen:
        raise ValueError(
            f"engine.tp={base.engine_ranks}: the ranks of one engine are on one host, and no split of {where.gpus} "
            f"GPUs, {where.gpus_per_host} a host, leaves room for {engines} beside a learner; lower engine.tp"
        )
    tried = [_predict(run, found, _split(base, found, where, k), where, steps=steps, learner_gpus=k) for k in chosen]
    tried.sort(key=lambda one: (one.hours, one.learner_gpus))
    return dataclasses.replace(tried[0], splits=tuple(tried))


def planned(run: RunConfig, found: Measured, where: Hardware) -> Plan:
    """The plan of a run on the machine that was measured.

    Raises:
        ValueError: It has a league, or environment or policies are not those that were measured.
    """
    if run.league is not None:
        raise ValueError("opponents of a league change engines, which is not simulated; leave league out")
    env_ids = {run.env} if isinstance(run.env, str) else set(run.env)
    # the module before a colon only says what to import
    if {one.rpartition(":")[2] for one in env_ids} != {one.rpartition(":")[2] for one in found.run.env_ids}:
        raise ValueError(
            f"the measured runs played {', '.join(sorted(found.run.env_ids))}, this one plays "
            f"{', '.join(sorted(env_ids))}; how long episodes are is only known of what was played"
        )
    seated = set(run.policy_mapping.values()) if isinstance(run.policy_mapping, dict) else {run.policy_mapping}
    policies = {name: dataclasses.asdict(policy) for name, policy in run.policies.items() if name in seated}
    if set(policies) != set(found.run.plan.homes):
        raise ValueError(
            f"the measured runs had the policies {', '.join(sorted(found.run.plan.homes))}, this one has "
            f"{', '.join(sorted(policies))}; measure the same"
        )
    on_gpu = found.run.on_gpu or bool(where.gpus)
    cores = math.inf if on_gpu else float(os.cpu_count() or 1)
    plan = plan_of(
        policies,
        dataclasses.asdict(run.trainer),
        cores=found.core_share * (cores if where.cores is None else where.cores),
        on_gpu=on_gpu,
        isolated=ENVS in run.mesh.counts or any(_isolated(name) for name in env_ids),
    )
    if not plan.trained:
        raise ValueError("no seat holds a trainable policy; there is no learner to simulate")
    return plan


def _isolated(env_id: str) -> bool:
    try:
        return registry.spec(env_id).isolation == "process"
    except ForgeError:  # a class of the user's, not registered here
        return False


def _splits(gpus: int, engines: int, learners: int = 1) -> list[int]:
    """Numbers of GPUs for the learners that are worth a try: even steps, and powers of two from either end.

    Args:
        gpus: All of them.
        engines: That one replica of each engine takes.
        learners: Each takes as many as the others.
    """
    most = gpus - engines
    even = {round(most * share / _EVEN) for share in range(1, _EVEN)}
    powers = {2**n for n in range(most.bit_length())}
    found = even | {learners * power for power in powers} | {gpus - power * engines for power in powers}
    return sorted({count - count % learners for count in found if learners <= count <= most})


def _engines_beside(learner_gpus: int, where: Hardware, ranks: int) -> int:
    """Engines of so many ranks on the GPUs behind the learners'; no engine is on two hosts."""
    each = where.gpus_per_host
    ends = (min(first + each, where.gpus) - max(first, learner_gpus) for first in range(0, where.gpus, each))
    return sum(max(0, free) // ranks for free in ends)


def _split(base: Plan, found: Measured, where: Hardware, learner_gpus: int) -> Plan:
    """A plan with that many GPUs for the learners and the others for the engines.

    Raises:
        ValueError: An engine or a learner gets none.
    """
    replicas = _engines_beside(learner_gpus, where, base.engine_ranks) // len(set(base.homes.values()))
    if replicas < 1:
        raise ValueError(
            f"learner_gpus={learner_gpus} leaves less than {base.engine_ranks} of {where.gpus} GPUs, "
            f"{where.gpus_per_host} a host, for each engine"
        )
    ranks = learner_gpus // base.learners
    if ranks < 1:
        raise ValueError(f"learner_gpus={learner_gpus} is less than one for each of {base.learners} learners")
    measured = found.run.plan
    # on a CPU all learners together had one host
    ratio = ranks / measured.learner_ranks * (1 if found.run.on_gpu else base.learners)
    return dataclasses.replace(
        base,
        replicas=replicas,
        learner_ranks=ranks,
        learner_speed=ratio ** (1 + math.log2(where.learner_scaling)),
        engine_threads=math.inf,
        learner_threads=math.inf,
    )


def _predict(
    run: RunConfig, found: Measured, plan: Plan, where: Hardware, *, steps: int, learner_gpus: int = 0
) -> Prediction:
    warm, seed = plan.max_staleness + 1, run.trainer.seed
    rows = run_steps(plan, found.stages, found.workload, steps=warm + steps + plan.max_staleness, seed=seed)
    before, looked_at = rows[warm - 1], rows[warm : warm + steps]
    spent_s = looked_at[-1].ends_s - before.ends_s
    hours = (run.steps * spent_s / steps + _evaluations_s(run, plan, found)) / 3600
    ages = sum((Counter(row.ages) for row in looked_at), Counter[int]())
    stages = ("step_s", "collect_s", "score_s", "learn_s", "sync_s")
    means: dict[str, Any] = {name: float(np.mean([getattr(row, name) for row in looked_at])) for name in stages}

    def idle(busy_s: Iterable[float]) -> float:
        return min(1.0, max(0.0, 1 - sum(busy_s) / spent_s))

    return Prediction(
        **means,
        engines_idle=idle(row.engine_busy_s for row in looked_at),
        learner_idle=idle(row.learner_busy_s for row in looked_at),
        staleness={age: ages[age] / max(1, ages.total()) for age in range(plan.max_staleness + 1)},
        tokens_per_s=sum(row.tokens for row in looked_at) / spent_s,
        steps=run.steps,
        hours=hours,
        gpus=where.gpus,
        engine_gpus=where.gpus - learner_gpus,
        learner_gpus=learner_gpus,
        gpu_hours=where.gpus * hours,
        cost=where.gpus * hours * where.price_per_gpu_hour,
        assumptions=_assumptions(run, found, where),
    )


def _evaluations_s(run: RunConfig, plan: Plan, found: Measured) -> float:
    """What all evaluations add to the run: beside each but the last the next step is played."""
    if not run.trainer.eval_every:
        return 0.0

    def play_s(episodes: int, groups: int) -> float:
        own = SimulatedRun(plan, found.stages, found.workload, seed=run.trainer.seed)
        own.play([*own.draw(0, groups), *own.draw(0, episodes, size=1, resample=1)])
        return float(own.env.now)

    episodes, groups = run.trainer.eval_episodes, run.trainer.groups_per_step
    beside_s = max(0.0, play_s(episodes, groups) - play_s(0, groups))
    return (math.ceil(run.steps / run.trainer.eval_every) - 1) * beside_s + play_s(episodes, 0)


def _assumptions(run: RunConfig, found: Measured, where: Hardware) -> tuple[str, ...]:
    told = [
        "episodes stay as long as they were measured, and as many groups teach something",
        "nothing fails; starting, checkpoints and logging take no time",
    ]
    if run.trainer.learner.max_tokens_per_microbatch is None:
        told.append(
            f"the learner's passes are of {LEAST_MICROBATCH:,} positions: how many memory allows is not simulated, "
            "learner.max_tokens_per_microbatch says it"
        )
    ranks, before = run.trainer.engine.tp, found.run.plan.engine_ranks
    size = f"{ranks} GPU{'s' * (ranks > 1)}"
    if ranks != before:
        told.append(f"an engine of {ranks} rank{'s' * (ranks > 1)} is as fast as the measured ones of {before}")
    if where.gpus:
        told += [
            f"every engine replica is {size} of the kind that was measured, and engines never run out of cache",
            f"twice the GPUs make the learner {2 * where.learner_scaling:.2f} times as fast (learner_scaling)",
            "weights travel as fast as measured, to half of the replicas at a time",
        ]
        if not found.run.on_gpu:
            told.append("stages were measured on a CPU: a GPU counts as as fast as that host. Measure on one GPU")
    elif (procs := run.trainer.learner_procs) != (measured := found.run.plan.learner_ranks):
        told.append(f"the learner takes as long with {procs} ranks as with {measured}")
    return tuple(told)
