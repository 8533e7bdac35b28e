"""A training run in simulated time: the trainer's loop over engines, learner and weights that only take time.

In: a plan, seconds of every stage, a workload: how long episodes are. Out: what each step took, how old its samples
were, how busy the stages were. Waits in simulated time only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import simpy

from forge_agents.serving.client import waves
from forge_trainers.forecast.engine import Cores, EngineTimes, Process, Replica, Request, SimulatedReplicas
from forge_trainers.rl.pipeline import window

_LUCK = 1
"""Names the random numbers that decide which groups teach something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnShape:
    """One decision, without its words."""

    agent: str
    policy: str
    prompt_tokens: int = 0
    """0 where no model decided."""
    response_tokens: int = 0
    cut: bool = False
    """`max_tokens` ended the response."""
    common_tokens: int = 0
    """First tokens of the prompt that siblings share; only of an agent's first turn."""
    continues: bool = False
    """The prompt begins with the agent's previous prompt and response."""
    think_s: float = 0.0
    """Seconds of environment and controller before the decision."""
    answer_s: float = 0.0
    """Seconds from the question to the answer, as measured; players without an engine take as long again."""


Rounds = tuple[tuple[TurnShape, ...], ...]
"""An episode: rounds one after the other, the turns of a round at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerWork:
    """What a learner computes of one or more groups."""

    positions: int = 0
    """Tokens through the model, common prompts once."""
    loss_tokens: int = 0
    longest: int = 0
    """Positions of the longest sample, which no rank shares with another."""

    def microbatches(self, max_tokens: int) -> int:
        """Forward passes with room for `max_tokens` each."""
        return max(1, math.ceil(self.positions / max_tokens))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Groups to draw from."""

    groups: Sequence[Sequence[Rounds]]
    """Siblings that were measured, by group."""
    stop_rates: Mapping[str, float] = field(default_factory=dict)
    """By policy: probability that a response ends at a token. It says how long one that was cut goes on under a larger
    `max_tokens`; 0 or absent: to the new limit."""
    used_share: float = 1.0
    """Share of groups that teach something, of those whose siblings earn differently."""
    outcomes: Sequence[Sequence[Hashable]] = ()
    """What siblings earned, by group; groups of other sizes are alike more or less often. Empty: all differ."""

    def __post_init__(self) -> None:
        if not self.groups or not all(self.groups):
            raise ValueError("a workload needs at least one measured episode")
        if not 0 <= self.used_share <= 1:
            raise ValueError(f"used_share={self.used_share} is a share, in [0, 1]")

    def used_share_of(self, size: int) -> float:
        """Share of groups of `size` siblings that teach something.

        Siblings without replacement, so for sizes up to the measured ones this is right on average.
        """
        if not self.outcomes:
            return self.used_share
        return self.used_share * (1 - float(np.mean([_alike(Counter(group), size) for group in self.outcomes])))

    def draw(self, rng: np.random.Generator, size: int, max_tokens: Mapping[str, int]) -> list[Rounds]:
        """`size` siblings of one measured group, with responses as long as `max_tokens` by policy lets them be."""
        siblings = self.groups[int(rng.integers(len(self.groups)))]
        picked = rng.integers(len(siblings), size=size)
        return [self._under(rng, siblings[int(at)], max_tokens) for at in picked]

    def _under(self, rng: np.random.Generator, rounds: Rounds, max_tokens: Mapping[str, int]) -> Rounds:
        """The episode under other limits; what is said longer or shorter is read so in later rounds."""
        shift, found = 0, []
        for turns in rounds:
            new, said = [], 0
            for turn in turns:
                length = self._length(rng, turn, max_tokens.get(turn.policy))
                prompt = max(turn.common_tokens, turn.prompt_tokens + shift) if turn.prompt_tokens else 0
                new.append(replace(turn, response_tokens=length, prompt_tokens=prompt))
                said += length - turn.response_tokens
            shift += said
            found.append(tuple(new))
        return tuple(found)

    def _length(self, rng: np.random.Generator, turn: TurnShape, limit: int | None) -> int:
        if not turn.response_tokens or limit is None:
            return turn.response_tokens
        if not turn.cut or limit <= turn.response_tokens:
            return min(turn.response_tokens, limit)
        rate = self.stop_rates.get(turn.policy, 0.0)
        more = int(rng.geometric(rate)) if rate > 0 else limit
        return min(limit, turn.response_tokens + more)


def _alike(counts: Counter[Hashable], size: int) -> float:
    """Probability that `size` siblings earn the same, where this many of those measured earned each."""
    total = sum(counts.values())
    if size > total:  # more than were measured: each earns what any of those did
        return sum((count / total) ** size for count in counts.values())
    # drawn without replacement, sum_i C(n_i, k) / C(n, k): with it, a group would too often hold one sibling twice
    return sum(math.comb(count, size) for count in counts.values()) / math.comb(total, size)


def learner_work(
    groups: Sequence[Sequence[Rounds]], trained: frozenset[str], *, max_tokens: int, share_prefixes: bool
) -> LearnerWork:
    """What the learners of `trained` policies compute of groups of siblings, all together.

    Args:
        groups: Siblings, by group.
        trained: Names of the policies.
        max_tokens: Most positions of one piece.
        share_prefixes: Whether siblings' common prompt is computed once for each piece.
    """
    positions = loss_tokens = longest = 0
    for group in groups:
        by_agent: dict[str, list[list[TurnShape]]] = {}
        for rounds in group:
            own: dict[str, list[TurnShape]] = {}
            for turn in (turn for turns in rounds for turn in turns):
                if turn.policy in trained and turn.response_tokens:
                    own.setdefault(turn.agent, []).append(turn)
            for agent, said in own.items():
                by_agent.setdefault(agent, []).append(said)
        for siblings in by_agent.values():
            loss_tokens += sum(turn.response_tokens for said in siblings for turn in said)
            samples = [_samples(said) for said in siblings]
            common = min(said[0].common_tokens for said in siblings) if share_prefixes else 0
            positions += sum(sum(others) for _, *others in samples)
            positions += _positions([first for first, *_ in samples], common, max_tokens)
            longest = max(longest, *(length for lengths in samples for length in lengths))
    return LearnerWork(positions=positions, loss_tokens=loss_tokens, longest=longest)


def _samples(said: Sequence[TurnShape]) -> list[int]:
    """Tokens of a seat's samples: a turn that continues the one before ends the same sample."""
    lengths: list[int] = []
    for turn in said:
        if lengths and turn.continues:
            lengths.pop()
        lengths.append(turn.prompt_tokens + turn.response_tokens)
    return lengths


def _positions(lengths: Sequence[int], common: int, max_tokens: int) -> int:
    """Of siblings laid out in pieces of at most `max_tokens`, each with the common tokens once."""
    total = piece = 0
    for length in lengths:
        own = length - common
        if piece and piece + own <= max_tokens:
            piece += own
            total += own
        else:
            piece = length
            total += length
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerTimes:
    """Seconds of one optimiser step: fixed, by what is computed, and for each forward pass."""

    step_s: float
    """Optimiser, packing and the way to the learner."""
    position_s: float
    loss_token_s: float = 0.0
    microbatch_s: float = 0.0
    cores: float = 1.0
    """Processor cores it keeps busy meanwhile, on a host without accelerator."""
    scaling: float = 1.0
    """On n times as many cores it is n**scaling times as fast."""

    def seconds(self, work: LearnerWork, microbatches: int, speed: float = 1.0) -> float:
        """Of one step; `speed` is that of all ranks over those that were measured."""
        computed = self.position_s * work.positions + self.loss_token_s * work.loss_tokens
        least = self.position_s * work.longest
        return self.step_s + max(computed / speed, least) + self.microbatch_s * microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of every stage."""

    engine: EngineTimes
    learner: LearnerTimes
    publish_s: float = 0.0
    """Learner to store."""
    fetch_s: float = 0.0
    """Store to one live engine."""
    score_s: float = 0.0
    """One call of the reward."""
    score_trajectory_s: float = 0.0
    """Beside it, each trajectory."""
    cache_block: int = 0
    """Tokens of a block of the engines' prefix cache; 0: nothing is cached."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is simulated: settings of a run, and the hardware under it."""

    group_size: int
    groups_per_step: int
    max_staleness: int
    trained: frozenset[str]
    """Policies that learn."""
    homes: Mapping[str, str]
    """The engine of each policy that a model plays, by policy name."""
    max_tokens: Mapping[str, int]
    """Of a response, by policy name."""
    replicas: int = 1
    """Of each engine."""
    engine_ranks: int = 1
    """Of each replica."""
    max_num_seqs: int = 64
    affine: bool = True
    """Conversations go back to the replica that holds them."""
    max_concurrent_episodes: int = 512
    """Of one step's collection, as in the trainer."""
    max_resamples: int = 0
    max_tokens_per_microbatch: int = 2048
    share_prefixes: bool = True
    learner_speed: float = 1.0
    """Of all its ranks together, over those that were measured."""
    learners: int = 1
    """Adapters of one model share theirs."""
    iterations: int = 1
    """Passes of the learner over each batch."""
    learner_ranks: int = 1
    """Of each of them."""
    cores: float = math.inf
    """Processor cores that engines and learner share; infinite where they compute on GPUs."""
    engine_threads: float = math.inf
    """Cores that one replica may use."""
    learner_threads: float = math.inf
    """Cores that all ranks of the learner may use."""
    isolated: bool = False
    """Environments run beside the controller, not on its thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """What one step took, as the trainer's stopwatch tells it."""

    collect_s: float
    score_s: float
    learn_s: float
    sync_s: float
    ends_s: float
    """When it ends."""
    tokens: int
    """Sampled."""
    ages: Mapping[int, int]
    """Loss tokens by how many versions they were old."""
    engine_busy_s: float
    """Since the step before; mean over replicas."""
    learner_busy_s: float
    """Learning and publishing."""

    @property
    def step_s(self) -> float:
        """The stages together."""
        return self.collect_s + self.score_s + self.learn_s + self.sync_s


@dataclass(slots=True)
class _Group:
    """Siblings in play."""

    siblings: Sequence[Rounds]
    step: int
    """That they were started for."""
    done: simpy.Event
    requests: list[tuple[TurnShape, Request]] = field(default_factory=list)


Played: TypeAlias = Mapping[int, Sequence[Sequence[Rounds]]]
"""Groups by step."""


def simulate(
    plan: Plan, stages: StageTimes, workload: Workload, *, steps: int, seed: int = 0, played: Played | None = None
) -> tuple[SimulatedStep, ...]:
    """Run `steps` steps.

    A step's groups and lengths follow from the seed and its number, never from the timing, as in the trainer. The same
    arguments give the same result.

    Args:
        plan: Settings and hardware.
        stages: Seconds.
        workload: What groups are drawn from.
        steps: Of the run.
        seed: Of what is drawn.
        played: Groups of steps, which are played as they are.

    Raises:
        ValueError: There is no step to simulate.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} simulates nothing; set at least 1")
    run = SimulatedRun(plan, stages, workload, seed=seed, played=played)
    main = run.env.process(run.train(steps))
    run.env.run(main)
    return tuple(run.steps)


class SimulatedRun:
    """One run. `forge_trainers.rl.trainer` and `forge_trainers.rl.pipeline.Pipeline` have the rules that it repeats.

    Takes what `simulate` takes.
    """

    def __init__(
        self, plan: Plan, stages: StageTimes, workload: Workload, *, seed: int = 0, played: Played | None = None
    ) -> None:
        self.plan, self.stages, self.workload, self._seed = plan, stages, workload, seed
        self._played = played or {}
        self.env = simpy.Environment()
        self.cores = Cores(self.env, plan.cores)
        room, threads, block = plan.max_num_seqs, plan.engine_threads, stages.cache_block
        start = partial(Replica, self.env, self.cores, stages.engine, room=room, threads=threads, block=block)
        self.engines = {
            home: SimulatedReplicas([start() for _ in range(plan.replicas)], affine=plan.affine, room=room)
            for home in sorted(set(plan.homes.values()))
        }
        self._controller = simpy.Resource(self.env, 1)
        self._live = simpy.Resource(self.env, plan.max_concurrent_episodes)
        self.steps: list[SimulatedStep] = []
        self.version = 0
        """Of the learner's weights."""
        self._learner_busy_s = 0.0
        self._weights: simpy.Event = self.env.timeout(0)
        """Their last return; where steps are collected ahead, it goes on while the learner does."""
        self._waiting: list[_Group] = []
        """Started, and in no batch yet; oldest first."""
        self._news = self.env.event()
        """The next group ends."""

    def train(self, steps: int) -> Process:
        """The loop of `GRPOTrainer.fit`."""
        ahead, _ = window(self.plan.max_staleness)
        batches: list[tuple[simpy.Process, simpy.Process]] = []
        engines_before = learner_before = 0.0
        for step in range(steps):
            begun = self.env.now
            for at in range(len(batches), min(step + ahead + 1, steps)):
                groups = self._played.get(at) or self.draw(at, self.plan.groups_per_step)
                self._waiting += self._begin(groups, at)
                before = batches[-1] if batches else (self.env.timeout(0), self.env.timeout(0))
                taken = self.env.process(self._taken(at, len(groups), before[0]))
                batches.append((taken, self.env.process(self._judged(at, taken, before[1]))))
            collection: list[_Group] = yield batches[step][0]
            collected = self.env.now
            used: list[_Group] = yield batches[step][1]
            judged = self.env.now
            ages = yield from self._learn(used)
            learned = self.env.now
            yield self._weights
            published = self.env.event()
            self._weights = self.env.process(self._sync(published))
            yield published if self.plan.max_staleness else self._weights
            synced = self.env.now
            each_s = [replica.busy_s for engine in self.engines.values() for replica in engine.replicas]
            busy = sum(each_s) / len(each_s)
            self.steps.append(
                SimulatedStep(
                    collect_s=collected - begun,
                    score_s=judged - collected,
                    learn_s=learned - judged,
                    sync_s=synced - learned,
                    ends_s=synced,
                    tokens=sum(request.response_tokens for group in collection for _, request in group.requests),
                    ages=ages,
                    engine_busy_s=busy - engines_before,
                    learner_busy_s=self._learner_busy_s - learner_before,
                )
            )
            engines_before, learner_before = busy, self._learner_busy_s

    def play(self, groups: Sequence[Sequence[Rounds]]) -> list[tuple[TurnShape, Request]]:
        """Collect these groups and nothing else. Returns what was asked of engines."""
        played = self._begin(groups, 0)
        self.env.run(self.env.all_of([group.done for group in played]))
        return [asked for group in played for asked in group.requests]

    def draw(self, step: int, count: int, *, resample: int = 0, size: int | None = None) -> list[list[Rounds]]:
        """Groups of a step or a resample, of `size` siblings or as many as planned."""
        rng = np.random.default_rng([self._seed, step, resample])
        return [self.workload.draw(rng, size or self.plan.group_size, self.plan.max_tokens) for _ in range(count)]

    def _begin(self, drawn: Sequence[Sequence[Rounds]], step: int) -> list[_Group]:
        """Start groups, once the weights that travel have arrived."""
        groups = [_Group(siblings, step, self.env.event()) for siblings in drawn]
        self.env.process(self._collect(groups))
        return groups

    def _collect(self, groups: Sequence[_Group]) -> Process:
        yield self._weights
        for group in groups:
            self.env.process(self._siblings(group))

    def _siblings(self, group: _Group) -> Process:
        yield self.env.all_of([self.env.process(self._episode(rounds, group)) for rounds in group.siblings])
        group.done.succeed()
        news, self._news = self._news, self.env.event()
        news.succeed()

    def _taken(self, step: int, size: int, before: simpy.Event) -> Generator[simpy.Event, Any, list[_Group]]:
        """The groups of a step: what is finished, oldest first, and all that may not come later."""
        yield before
        _, late = window(self.plan.max_staleness)
        while True:
            played = [group for group in self._waiting if group.done.triggered]
            due = any(group.step <= step - late and not group.done.triggered for group in self._waiting)
            if not due and len(played) >= size:
                break
            yield self._news
        for group in played[:size]:
            self._waiting.remove(group)
        return played[:size]

    def _episode(self, rounds: Rounds, group: _Group) -> Process:
        name = object()
        held: dict[str, tuple[Hashable, int]] = {}
        with self._live.request() as place:
            yield place
            for turns in rounds:
                if len(turns) == 1:
                    yield from self._turn(turns[0], group, name, held)
                else:
                    yield self.env.all_of([self.env.process(self._turn(t, group, name, held)) for t in turns])

    def _turn(self, turn: TurnShape, group: _Group, name: object, held: dict[str, tuple[Hashable, int]]) -> Process:
        yield from self._think(turn.think_s)
        home = self.plan.homes.get(turn.policy)
        if home is None or not turn.response_tokens:
            yield self.env.timeout(turn.answer_s)
            return
        cached: list[tuple[Hashable, int]] = [((id(group), turn.agent), turn.common_tokens)]
        if turn.continues and turn.agent in held:
            cached = [held[turn.agent]]
        conversation = (name, turn.agent)
        request = Request(self.env.event(), turn.prompt_tokens, turn.response_tokens, cached, conversation)
        held[turn.agent] = (conversation, turn.prompt_tokens + turn.response_tokens)
        group.requests.append((turn, request))
        self.engines[home].ask(request, conversation)
        yield request.done

    def _think(self, seconds: float) -> Process:
        if self.plan.isolated:
            yield self.cores.start(seconds).done
        elif seconds:
            with self._controller.request() as place:
                yield place
                yield self.cores.start(seconds).done

    def _judge(self, groups: Sequence[_Group]) -> simpy.Event:
        agents = sum(len({t.agent for turns in r for t in turns}) for group in groups for r in group.siblings)
        return self.cores.start(self.stages.score_s + self.stages.score_trajectory_s * agents).done

    def _judged(
        self, step: int, taken: simpy.Process, before: simpy.Event
    ) -> Generator[simpy.Event, Any, list[_Group]]:
        """Judge, and replace what teaches nothing. Returns the groups that teach something; what was taken grows."""
        plan, share = self.plan, self.workload.used_share_of(self.plan.group_size)
        rng = np.random.default_rng([self._seed, step, 0, _LUCK])
        groups: list[_Group] = yield taken
        yield before
        yield self._judge(groups)
        used = [group for group in groups if rng.random() < share]
        for resample in range(1, plan.max_resamples + 1):
            missing = plan.groups_per_step - len(used)
            if missing <= 0:
                break
            more = self._begin(self.draw(step, missing, resample=resample), step)
            yield self.env.all_of([group.done for group in more])
            yield self._judge(more)
            used += [group for group in more if rng.random() < share]
            groups += more
        return used

    def _learn(self, used: Sequence[_Group]) -> Generator[simpy.Event, Any, Mapping[int, int]]:
        """All optimizer steps on one batch. Returns loss tokens by age."""
        plan, times = self.plan, self.stages.learner
        ages: Counter[int] = Counter()
        for group in used:
            for turn, request in group.requests:
                if turn.policy in plan.trained:
                    for version, tokens in request.versions.items():
                        ages[self.version - version] += tokens
        assert all(0 <= age <= plan.max_staleness for age in ages), f"ages {dict(ages)}"
        room, ranks = plan.max_tokens_per_microbatch, plan.learner_ranks
        siblings = [group.siblings for group in used]
        work = learner_work(siblings, plan.trained, max_tokens=room, share_prefixes=plan.share_prefixes)
        if not work.loss_tokens:
            return ages
        microbatches = math.ceil(work.microbatches(room) / ranks)
        demand = min(times.cores, plan.learner_threads)
        one_pass_s = times.seconds(work, microbatches, plan.learner_speed) - times.step_s
        seconds = times.step_s + plan.iterations * one_pass_s
        seconds *= (times.cores / demand) ** times.scaling
        begun = self.env.now
        yield self.cores.start(seconds, demand).done
        self._learner_busy_s += self.env.now - begun
        self.version += 1
        return ages

    def _sync(self, published: simpy.Event) -> Process:
        homes = sorted({home for policy, home in self.plan.homes.items() if policy in self.plan.trained})
        begun = self.env.now
        yield self.env.all_of([self.cores.start(self.stages.publish_s).done for _ in homes])
        self._learner_busy_s += self.env.now - begun
        version = self.version
        published.succeed()
        yield self.env.all_of([self.env.process(self._roll(home, version)) for home in homes])

    def _roll(self, home: str, version: int) -> Process:
        """New weights for half of the replicas at a time, as `EngineClient.load_weights` does."""
        for wave in waves(self.engines[home].replicas):
            yield self.env.all_of([replica.update(self.stages.fetch_s, version) for replica in wave])
