"""Analytic model of a training step: seconds of each stage as a function of the work in it.

- An engine's time is ``a * iterations + b * sampled tokens + c * prompt tokens`` per replica.
- A learner's time is a fixed part plus seconds per position, per loss token and per microbatch.
- Synchronous stages add up. Asynchronous rollouts take the slower of generation and training or, on shared CPU cores,
  the core seconds of both divided by the cores.

The coefficients are fitted by `measured`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from forge_agents.serving.client import waves


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnShape:
    """Token counts of one turn that a model decided."""

    policy: str
    prompt_tokens: int
    """Prompt tokens that no earlier turn of the episode holds."""
    shared_tokens: int
    """Of these, the tokens that all episodes of the group begin with."""
    response_tokens: int
    cut: bool
    """Whether `max_tokens` ended the response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeShape:
    """Size of one episode."""

    rounds: tuple[tuple[TurnShape, ...], ...]
    """Turns of models: consecutive rounds, and the simultaneous turns of each."""
    agents: int
    other_s: float
    """Seconds without an engine: environment, controller and players that are no models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of the engines in one collection, per replica."""

    iterations: float
    sampled_tokens: float
    prompt_tokens: float
    other_s: float = 0.0

    @property
    def features(self) -> tuple[float, float, float]:
        """Factors of the engine's coefficients."""
        return self.iterations, self.sampled_tokens, self.prompt_tokens


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings of a run that determine its step time, and the hardware."""

    group_size: int
    groups_per_step: int
    max_staleness: int
    trained: frozenset[str]
    """Names of the trained policies."""
    homes: Mapping[str, str]
    """Engine of each policy, by policy name."""
    max_tokens: Mapping[str, int]
    """Maximum length of a response, by policy name."""
    replicas: int = 1
    """Replicas of each engine."""
    engine_ranks: int = 1
    """Processes of each replica."""
    max_num_seqs: int = 64
    max_concurrent_episodes: int = 512
    max_resamples: int = 0
    max_tokens_per_microbatch: int = 2048
    learners: int = 1
    """Learners. Adapters of one model share one."""
    learner_ranks: int = 1
    """Processes of each learner."""
    learner_speed: float = 1.0
    """Speed of all ranks together, relative to the measured ones."""
    iterations: int = 1
    """Passes over each batch."""
    cores: float = math.inf
    """CPU cores that engines and learner share. Infinite on GPUs."""
    engine_threads: float = math.inf
    """Cores that one replica may use."""


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Coefficients in seconds."""

    iteration_s: float
    sampled_token_s: float
    prompt_token_s: float
    learner_fixed_s: float
    """Optimizer, packing and transfers of one step."""
    position_s: float
    loss_token_s: float
    microbatch_s: float
    publish_s: float
    """Transfer of weights to the store."""
    fetch_s: float
    """Transfer of weights from the store to one replica."""
    score_s: float
    """One call of the reward."""
    score_trajectory_s: float
    """One trajectory in it."""
    learner_cores: float = 1.0
    """CPU cores that the learner keeps busy."""

    def engine_s(self, work: Work) -> float:
        """Return the seconds of a collection."""
        coefficients = (self.iteration_s, self.sampled_token_s, self.prompt_token_s)
        return work.other_s + sum(c * count for c, count in zip(coefficients, work.features, strict=True))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Measured episodes, and what a learner computed of them."""

    episodes: Sequence[EpisodeShape]
    stop_rates: Mapping[str, float] = field(default_factory=dict)
    """By policy, the probability that a response ends at a token. It extends cut responses under a larger limit."""
    used_fraction: float = 1.0
    """Fraction of informative groups among those whose episodes earned different rewards."""
    outcomes: Sequence[Sequence[Hashable]] = ()
    """Rewards of the episodes of each group. Empty: all groups have different rewards."""
    positions: float = 0.0
    """Positions of a learner per informative episode."""
    loss_tokens: float = 0.0
    """Loss tokens per informative episode."""

    def __post_init__(self) -> None:
        if not self.episodes:
            raise ValueError("a workload needs at least one measured episode")
        if not 0 <= self.used_fraction <= 1:
            raise ValueError(f"used_fraction={self.used_fraction} must be in [0, 1]")

    def used_fraction_of(self, group_size: int) -> float:
        """Return the expected fraction of informative groups of this size.

        Unbiased up to the measured size: it averages over all subsets of the measured episodes.
        """
        if not self.outcomes:
            return self.used_fraction
        equal = [_probability_equal(Counter(group), group_size) for group in self.outcomes]
        return self.used_fraction * (1 - float(np.mean(equal)))

    def response_tokens(self, turn: TurnShape, limit: int | None) -> float:
        """Return the expected length of a response under another `max_tokens`."""
        length = turn.response_tokens
        if limit is None or limit <= length or not turn.cut:
            return min(length, limit) if limit is not None else length
        rate = self.stop_rates.get(turn.policy, 0.0)
        # expected value of a geometric length that is cut at the new limit
        more = (1 - (1 - rate) ** (limit - length)) / rate if rate > 0 else limit - length
        return length + more

    def sequential_tokens(self, episode: EpisodeShape, limits: Mapping[str, int]) -> float:
        """Return the tokens that an episode samples one after the other."""
        return sum(
            max(self.response_tokens(t, limits.get(t.policy)) for t in turns) for turns in episode.rounds if turns
        )

    def token_ratio(self, plan: Plan) -> tuple[float, float]:
        """Return tokens of the trained policies under the plan's limits over measured ones: in total, and sampled."""
        turns = [
            turn
            for episode in self.episodes
            for turns in episode.rounds
            for turn in turns
            if turn.policy in plan.trained
        ]
        prompts = sum(turn.prompt_tokens for turn in turns)
        before = sum(turn.response_tokens for turn in turns)
        after = sum(self.response_tokens(turn, plan.max_tokens.get(turn.policy)) for turn in turns)
        return (prompts + after) / max(1, prompts + before), after / max(1, before)


def _probability_equal(counts: Counter[Hashable], size: int) -> float:
    """Return the probability that `size` episodes earn the same, given how many of the measured earned each reward."""
    total = sum(counts.values())
    if size > total:  # more than were measured: draw with replacement
        return sum((count / total) ** size for count in counts.values())
    # without replacement, sum_i C(n_i, k) / C(n, k)
    return sum(math.comb(count, size) for count in counts.values()) / math.comb(total, size)


def collection_work(plan: Plan, workload: Workload, episodes: float) -> Work:
    """Return the expected work of collecting this many episodes, per replica of the busiest engine."""
    sampled: Counter[str] = Counter()
    prompts: Counter[str] = Counter()
    for episode in workload.episodes:
        for turn in (turn for turns in episode.rounds for turn in turns):
            home = plan.homes.get(turn.policy, "")
            sampled[home] += workload.response_tokens(turn, plan.max_tokens.get(turn.policy))  # type: ignore[assignment]
            shared = turn.shared_tokens * (1 - 1 / plan.group_size)  # cached after the first episode of a group
            prompts[home] += turn.prompt_tokens - shared  # type: ignore[assignment]
    per_replica = episodes / len(workload.episodes) / plan.replicas
    lengths = np.sort([workload.sequential_tokens(episode, plan.max_tokens) for episode in workload.episodes])
    other_s = float(np.mean([episode.other_s for episode in workload.episodes]))
    concurrent = max(1.0, min(episodes, plan.max_concurrent_episodes, plan.replicas * plan.max_num_seqs))
    turnover = episodes / concurrent
    return Work(
        iterations=max(_expected_maximum(lengths, episodes), float(lengths.mean()) * turnover),
        sampled_tokens=max(sampled.values(), default=0) * per_replica,
        prompt_tokens=max(prompts.values(), default=0) * per_replica,
        other_s=other_s * turnover,
    )


def _expected_maximum(ordered: np.ndarray, draws: float) -> float:
    """Return the expected maximum of `draws` samples with replacement from sorted values."""
    ranks = np.arange(len(ordered) + 1) / len(ordered)
    return float(np.sum(ordered * np.diff(ranks**draws)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Expected times of one step."""

    collect_s: float
    score_s: float
    learn_s: float
    sync_s: float
    step_s: float
    publish_s: float
    """Part of `sync_s` during which the learner is busy."""
    tokens: float
    """Sampled tokens of all policies."""


def step_times(plan: Plan, stages: StageTimes, workload: Workload) -> StepTimes:
    """Return the expected times of one warm step."""
    groups, used = _groups(plan, workload)
    collect_s = score_s = episodes = 0.0
    agents = float(np.mean([episode.agents for episode in workload.episodes]))
    for number, (count, probability) in enumerate(groups):
        played = count * plan.group_size
        engine_s = stages.engine_s(collection_work(plan, workload, played))
        scored_s = stages.score_s + stages.score_trajectory_s * played * agents
        episodes += probability * played
        if number == 0:
            collect_s = engine_s
        else:  # dynamic sampling runs while the step scores its groups
            scored_s += engine_s
        score_s += probability * scored_s
    learn_s = _learner_s(plan, stages, workload, used * plan.group_size)
    trained_homes = {plan.homes[name] for name in plan.trained if name in plan.homes}
    publish_s = stages.publish_s * max(1, len(trained_homes))
    sync_s = publish_s + stages.fetch_s * len(waves(range(plan.replicas)))
    tokens = sum(
        workload.response_tokens(turn, plan.max_tokens.get(turn.policy))
        for episode in workload.episodes
        for turns in episode.rounds
        for turn in turns
    ) / len(workload.episodes)
    step_s = collect_s + score_s + learn_s + sync_s
    if plan.max_staleness:
        step_s = max(collect_s + score_s, learn_s + publish_s, _core_seconds(plan, stages, collect_s, learn_s))
    return StepTimes(
        collect_s=collect_s,
        score_s=score_s,
        learn_s=learn_s,
        sync_s=sync_s,
        step_s=step_s,
        publish_s=publish_s,
        tokens=tokens * episodes,
    )


def _groups(plan: Plan, workload: Workload) -> tuple[list[tuple[float, float]], float]:
    """Return the groups of each round of a step with the round's probability, and the expected informative groups."""
    fraction = workload.used_fraction_of(plan.group_size)
    rounds, used = [(float(plan.groups_per_step), 1.0)], plan.groups_per_step * fraction
    for _ in range(plan.max_resamples):
        missing = plan.groups_per_step - used
        if missing < 1e-3:
            break
        rounds.append((max(1.0, missing), min(1.0, missing)))
        used += missing * fraction
    return rounds, used


def _learner_s(plan: Plan, stages: StageTimes, workload: Workload, episodes: float) -> float:
    total, sampled = workload.token_ratio(plan)
    positions = episodes * workload.positions * total
    microbatches = math.ceil(max(1.0, positions / plan.max_tokens_per_microbatch) / plan.learner_ranks)
    one_pass_s = (
        stages.position_s * positions + stages.loss_token_s * episodes * workload.loss_tokens * sampled
    ) / plan.learner_speed + stages.microbatch_s * microbatches
    return stages.learner_fixed_s + plan.iterations * one_pass_s


def _core_seconds(plan: Plan, stages: StageTimes, collect_s: float, learn_s: float) -> float:
    """Return a lower bound of the step on CPU cores that engines and learner share."""
    if math.isinf(plan.cores):
        return 0.0
    engine_cores = min(plan.cores, plan.engine_threads * plan.replicas * len(set(plan.homes.values())))
    return (engine_cores * collect_s + stages.learner_cores * learn_s) / plan.cores


def evaluation_s(plan: Plan, stages: StageTimes, workload: Workload, episodes: int, *, alongside: bool) -> float:
    """Return the seconds that an evaluation adds to a step, `alongside` which the next step may be collected."""
    batch = plan.groups_per_step * plan.group_size if alongside else 0
    both = stages.engine_s(collection_work(plan, workload, episodes + batch))
    return max(0.0, both - stages.engine_s(collection_work(plan, workload, batch))) if alongside else both
