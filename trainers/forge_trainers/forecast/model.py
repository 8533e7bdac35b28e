"""Analytic model of a training step: the measured seconds of each stage, scaled by the work of the planned run.

- A third of the engines' seconds scales with iterations, a third with sampled tokens, a third with prompt tokens.
- The learner's passes scale with positions and loss tokens, and its other seconds are fixed.
- Scoring scales with trajectories. Publishing is fixed, and fetching scales with the replicas that take turns.
- Synchronous stages add up. Asynchronous rollouts take the slower of generation and training or, on shared CPU cores,
  the core seconds of both divided by the cores.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forge_agents.serving.client import waves

_LOSS_TOKENS = 0.2
"""Fraction of forward and backward passes that scales with loss tokens: the head of a small model."""
_PUBLISH = 0.4
"""Fraction of a sync that is the transfer to the store, as `make perf` measures it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnShape:
    """Token counts of one turn that a model decided."""

    policy: str
    prompt_tokens: int
    """Prompt tokens that no earlier turn of the episode holds."""
    shared_tokens: int
    """Of these, the tokens that all episodes of the group begin with."""
    response_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeShape:
    """Size of one episode."""

    rounds: tuple[tuple[TurnShape, ...], ...]
    """Turns of models: consecutive rounds, and the simultaneous turns of each."""
    agents: int
    other_s: float
    """Seconds without an engine: environment, controller and players that are no models."""


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

    @property
    def episodes(self) -> int:
        """Episodes of a step without resampling."""
        return self.group_size * self.groups_per_step


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Means over the warm steps of a synchronous run, and its episodes."""

    plan: Plan
    on_gpu: bool
    env_ids: frozenset[str]
    episodes: Sequence[EpisodeShape]
    collect_s: float
    score_trajectory_s: float
    """Seconds to score one trajectory, from steps without resampling."""
    learn_s: float
    passes_s: float
    """Part of `learn_s`: forward and backward passes."""
    sync_s: float
    used_groups: float
    """Informative groups of a step."""
    used_fraction: float
    """Fraction of informative groups."""
    learner_cores: float
    """CPU cores that the learner keeps busy."""

    @property
    def agents(self) -> float:
        """Mean number of trajectories of an episode."""
        return float(np.mean([episode.agents for episode in self.episodes]))

    def work(self, plan: Plan, episodes: float) -> Work:
        """Return the expected work of collecting this many episodes with a plan, per replica of the busiest engine."""
        sampled: Counter[str] = Counter()
        prompts: Counter[str] = Counter()
        for turn in (turn for episode in self.episodes for turns in episode.rounds for turn in turns):
            home = plan.homes.get(turn.policy, "")
            sampled[home] += _length(turn, plan)
            shared = turn.shared_tokens * (1 - 1 / plan.group_size)  # cached after the first episode of a group
            prompts[home] += turn.prompt_tokens - shared  # type: ignore[assignment]
        per_replica = episodes / len(self.episodes) / plan.replicas
        lengths = np.sort([_sequential_tokens(episode, plan) for episode in self.episodes])
        turnover = episodes / max(1.0, min(episodes, plan.max_concurrent_episodes, plan.replicas * plan.max_num_seqs))
        return Work(
            iterations=max(_expected_maximum(lengths, episodes), float(lengths.mean()) * turnover),
            sampled_tokens=max(sampled.values(), default=0) * per_replica,
            prompt_tokens=max(prompts.values(), default=0) * per_replica,
            other_s=float(np.mean([episode.other_s for episode in self.episodes])) * turnover,
        )

    def engine_s(self, plan: Plan, episodes: float) -> float:
        """Return the seconds of collecting this many episodes with a plan."""
        before, after = self.work(self.plan, self.plan.episodes), self.work(plan, episodes)
        # at least a tenth of the collection is the engine's, so that a slow environment leaves something to scale
        seconds = max(self.collect_s - before.other_s, 0.1 * self.collect_s)
        ratios = [new / old if old else 1.0 for new, old in zip(after.features, before.features, strict=True)]
        return after.other_s + seconds * float(np.mean(ratios))

    def learner_s(self, plan: Plan, episodes: float) -> float:
        """Return the seconds of training on this many informative episodes with a plan."""
        turns = [turn for episode in self.episodes for turns in episode.rounds for turn in turns]
        turns = [turn for turn in turns if turn.policy in plan.trained]
        prompts = sum(turn.prompt_tokens for turn in turns)
        sampled_before = sum(turn.response_tokens for turn in turns)
        sampled = sum(_length(turn, plan) for turn in turns)
        positions = (prompts + sampled) / max(1, prompts + sampled_before)
        work = (1 - _LOSS_TOKENS) * positions + _LOSS_TOKENS * sampled / max(1, sampled_before)
        work *= episodes / (self.used_groups * self.plan.group_size) * plan.iterations / self.plan.iterations
        return self.learn_s - self.passes_s + self.passes_s * work / plan.learner_speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of the engines in one collection, per replica."""

    iterations: float
    sampled_tokens: float
    prompt_tokens: float
    other_s: float = 0.0
    """Seconds without an engine."""

    @property
    def features(self) -> tuple[float, float, float]:
        """Quantities that an engine's seconds scale with, in equal parts."""
        return self.iterations, self.sampled_tokens, self.prompt_tokens


def _length(turn: TurnShape, plan: Plan) -> int:
    """Return the length of a response under the plan's `max_tokens`. A larger limit does not lengthen it."""
    return min(turn.response_tokens, plan.max_tokens.get(turn.policy, turn.response_tokens))


def _sequential_tokens(episode: EpisodeShape, plan: Plan) -> int:
    """Return the tokens that an episode samples one after the other."""
    return sum(max(_length(turn, plan) for turn in turns) for turns in episode.rounds if turns)


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


def step_times(plan: Plan, measured: Measurement) -> StepTimes:
    """Return the expected times of one warm step."""
    rounds, used = _groups(plan, measured.used_fraction)
    score_s = episodes = 0.0
    for number, (count, probability) in enumerate(rounds):
        played = count * plan.group_size
        scored_s = measured.score_trajectory_s * played * measured.agents
        if number:  # dynamic sampling runs while the step scores its groups
            scored_s += measured.engine_s(plan, played)
        episodes += probability * played
        score_s += probability * scored_s
    collect_s = measured.engine_s(plan, plan.episodes)
    learn_s = measured.learner_s(plan, used * plan.group_size)
    publish_s = _PUBLISH * measured.sync_s
    fetch_s = (1 - _PUBLISH) * measured.sync_s / len(waves(range(measured.plan.replicas)))
    sync_s = publish_s + fetch_s * len(waves(range(plan.replicas)))
    turns = (turn for episode in measured.episodes for turns in episode.rounds for turn in turns)
    tokens = sum(_length(turn, plan) for turn in turns) / len(measured.episodes)
    step_s = collect_s + score_s + learn_s + sync_s
    if plan.max_staleness:
        core_s = _core_seconds(plan, collect_s, learn_s, measured.learner_cores)
        step_s = max(collect_s + score_s, learn_s + publish_s, core_s)
    return StepTimes(
        collect_s=collect_s,
        score_s=score_s,
        learn_s=learn_s,
        sync_s=sync_s,
        step_s=step_s,
        publish_s=publish_s,
        tokens=tokens * episodes,
    )


def _groups(plan: Plan, used_fraction: float) -> tuple[list[tuple[float, float]], float]:
    """Return the groups of each round of a step with the round's probability, and the expected informative groups."""
    rounds, used = [(float(plan.groups_per_step), 1.0)], plan.groups_per_step * used_fraction
    for _ in range(plan.max_resamples):
        missing = plan.groups_per_step - used
        if missing < 1e-3:
            break
        rounds.append((max(1.0, missing), min(1.0, missing)))
        used += missing * used_fraction
    return rounds, used


def _core_seconds(plan: Plan, collect_s: float, learn_s: float, learner_cores: float) -> float:
    """Return a lower bound of the step on CPU cores that engines and learner share."""
    if math.isinf(plan.cores):
        return 0.0
    engine_cores = min(plan.cores, plan.engine_threads * plan.replicas * len(set(plan.homes.values())))
    return (engine_cores * collect_s + learner_cores * learn_s) / plan.cores


def evaluation_s(plan: Plan, measured: Measurement, episodes: int, *, alongside: bool) -> float:
    """Return the seconds that an evaluation adds to a step, `alongside` which the next step may be collected."""
    batch = plan.episodes if alongside else 0
    both = measured.engine_s(plan, episodes + batch)
    return max(0.0, both - measured.engine_s(plan, batch)) if alongside else both
