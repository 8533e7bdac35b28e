"""Stopping criteria: ends a run that is solved, has nothing left to learn, or never had anything to learn from."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from forge_agents import states
from forge_agents.types import MAX_REWARD, Episode, EpisodeGroup, total_tokens
from forge_trainers.rl.failures import acting_agents, explain_idle, nothing_to_train_on
from forge_trainers.rl.samples import StepSamples

EnvAgent: TypeAlias = tuple[str, str]
"""An environment's id and an agent's name."""

_UNTRAINED = "no step had an informative group, so the weights are those that training started with"
_MAX_IDLE_EPISODES = 1024
_EVIDENCE = {"episodes": 64, "groups": 24}
"""Consecutive episodes and groups at the maximum that count as solved. By the rule of three, with 95 % confidence fewer
than 3 in 64 episodes would earn less. Episodes of a group share their task, so several tasks are required, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReason:
    """Why a run ends before its last step."""

    kind: Literal["solved", "plateau", "uninformative", "broken"]
    """``solved``: every episode earns the maximum. ``plateau``: every episode earns the highest reward seen so far, and
    the maximum is unknown. ``uninformative``: groups have zero variance or do not count, for other reasons.
    ``broken``: every episode failed or nothing was sampled, in the first step of a session or in `max_empty_steps`
    consecutive ones, or trained policies had no turn in as many steps, or in the whole run."""
    reason: str
    """Observations and advice."""

    @property
    def is_success(self) -> bool:
        """Whether the run learned all it could."""
        return self.kind in ("solved", "plateau")


class StoppingCriteria:
    """Watches the rewards of trained agents. Ends the run after `patience` consecutive uninformative steps."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self.scoring = ""
        """Hash of the environments and the reward of this session."""
        self._range: dict[EnvAgent, tuple[float, float]] = {}
        """Lowest and highest reward since the environments and the reward are these, of episodes in which the agent
        acted."""
        self._range_scoring = ""
        """`scoring` of `_range`."""
        self._tokens: Counter[str] = Counter()
        """Number of sampled tokens of each trained policy in the whole run."""
        self._learned = set[str]()
        """Trained policies that had a sample in the whole run."""
        self.reset()

    def reset(self) -> None:
        """Restart the count of consecutive uninformative steps, such as at the start of a session."""
        self._any_valid, self._invalid = False, 0
        self._steps = self._groups = self._episodes = self._too_long = self._abstained = self._failed = 0
        self._best: dict[EnvAgent, Counter[float]] = {}
        """In these steps: number of groups by the reward of their best episode."""
        self._sampled = 0
        """In these steps: number of tokens that trained policies sampled."""
        self._idle: deque[Episode] = deque(maxlen=_MAX_IDLE_EPISODES)
        """In these steps: newest episodes in which no trained policy sampled a token."""

    def after(
        self,
        step: int,
        groups: Sequence[EpisodeGroup],
        samples: StepSamples,
        trained: Collection[str],
        max_rewards: Mapping[str, float | None],
        *,
        last: bool = False,
    ) -> StopReason | None:
        """Record a step after training. Returns a reason to stop the run, if there is one.

        `max_rewards` has every environment of the run, or None if the maximum is unknown. `last` marks the last step.
        """
        if self._range_scoring != self.scoring:
            self._range, self._range_scoring = {}, self.scoring
        problem, informative = nothing_to_train_on(groups, trained), samples.counts["used"] > 0
        self._learned.update(samples.samples)
        for trajectory in (t for group in groups for t in group.trajectories if t.policy in trained):
            tokens = total_tokens(trajectory.turns)
            self._tokens[trajectory.policy] += tokens
            self._sampled += tokens
        if problem is not None:
            self._invalid += 1
            # After a valid step, one step of few seeds may just be bad luck.
            if not self._any_valid or self._invalid >= self._patience:
                return StopReason(kind="broken", reason=f"step {step + 1}: {problem}")
        if informative:
            self.reset()
        else:
            self._steps += 1
            self._too_long += samples.counts["too_long"]
        if problem is None:
            self._any_valid, self._invalid = True, 0
        for group in groups:
            self._record(group, trained, informative=informative)
        if not informative and self._steps >= self._patience:
            return self._uninformative(samples, max_rewards)
        if last and not any(self._tokens.values()):
            return self._no_turns()
        return None

    def summary(self, trained: Collection[str]) -> str:
        """Return what a finished run did not train. Empty if it trained every policy."""
        idle = [name for name in trained if not self._tokens[name]]
        if idle:
            return f"{_named(idle)} never had a turn, so the exported weights are those that training started with"
        if not self._learned:
            return _UNTRAINED
        if left_out := [name for name in trained if name not in self._learned]:
            its = "its" if len(left_out) == 1 else "their"
            return (
                f"{_named(left_out)} had no informative group: the rewards of {its} agents did not differ within "
                f"groups. {its.capitalize()} exported weights are those that training started with"
            )
        return ""

    def _record(self, group: EpisodeGroup, trained: Collection[str], *, informative: bool) -> None:
        """Record the rewards of a group, of agents for which a trained policy acted."""
        episodes = group.episodes
        acted = [acting_agents(episode, trained) for episode in episodes]
        if not informative:
            pairs = zip(episodes, acted, strict=True)
            self._idle += [episode for episode, acting in pairs if not acting and episode.error is None]
        if group.failed:
            self._failed += (not informative) * len(episodes)
            return
        agents = set().union(*acted)
        rewards = {agent: values for agent, values in group.rewards_of(trained).items() if agent in agents}
        if not informative:
            scored = [bool(a) and not any(np.isnan(r[at]) for r in rewards.values()) for at, a in enumerate(acted)]
            self._groups += any(scored)
            self._episodes += sum(scored)
            self._abstained += sum(map(bool, acted)) - sum(scored)
        for agent, values in rewards.items():
            if not np.isnan(values).all():
                key, least, most = (group.env_id, agent), float(np.nanmin(values)), float(np.nanmax(values))
                low, high = self._range.get(key, (least, most))
                self._range[key] = (min(low, least), max(high, most))
                if not informative:
                    self._best.setdefault(key, Counter())[float(f"{most:.6g}")] += 1

    def _no_turns(self) -> StopReason:
        """Return the reason for a run, or for many steps, in which no trained policy sampled a token."""
        advice = "Give the trained policy an opponent that plays legal moves"
        return StopReason(kind="broken", reason=f"nothing was trained: {explain_idle(self._idle)}. {advice}")

    def _uninformative(self, samples: StepSamples, max_rewards: Mapping[str, float | None]) -> StopReason | None:
        if self._idle and not self._sampled:
            return self._no_turns()
        idle = {episode.env_id for episode in self._idle} - {env_id for env_id, _ in self._best}
        if self._best and set(max_rewards) - {env_id for env_id, _ in self._best} - idle:
            return None  # an environment with a small weight may be informative
        best = "; ".join(self._describe(key, max_rewards.get(key[0])) for key in self._best)
        if (
            self._best
            and not idle
            and not self._too_long
            and self._abstained + self._failed < self._episodes
            and all(_reaches(min(best), self._top(key, max_rewards.get(key[0]))) for key, best in self._best.items())
        ):
            if self._episodes < _EVIDENCE["episodes"] or self._groups < _EVIDENCE["groups"]:
                return None
            return self._at_maximum(max_rewards, best)
        counts = samples.counts
        advice = {
            "zero_variance": "All episodes of a group earn the same, or differ by no more than min_spread or the noise "
            "of the reward, so there is nothing to compare: change the difficulty, the temperature, group_size or the "
            "scale of the reward. If this is the maximum, declare it with the environment's max_reward",
            "failed": "Episodes fail: see the errors in episodes.jsonl",
            "too_long": "Samples are longer than the learner accepts: raise engine.max_model_len, or limit the "
            "length of episodes",
            "abstained": "The reward returned NaN: check its requirements",
        }
        cause = max(advice, key=lambda outcome: counts[outcome])
        return StopReason(
            kind="uninformative",
            reason=f"{self._steps} consecutive steps had no informative group. Groups of the last: {dict(counts)}. "
            + (f"Best of each group, of episodes in which the agent acted: {best}. " if best else "")
            + (f"{_capitalized(explain_idle(self._idle))}. " if idle else "")
            + advice[cause],
        )

    def _at_maximum(self, max_rewards: Mapping[str, float | None], best: str) -> StopReason:
        """Return "solved" if the maximum is known, or if the highest reward seen is 1, the maximum of most rewards."""
        left_out = {"have no reward": self._abstained, "failed": self._failed}
        left_out["ended before a trained policy's turn"] = len(self._idle)
        rest = ", ".join(f"{number} more {what}" for what, number in left_out.items() if number)
        episodes = f"all {self._episodes} episodes of the last {self._steps} steps{rest and f' ({rest})'} earned"
        best += "" if self._learned else f". {_capitalized(_UNTRAINED)}"
        unknown = [key for key in self._best if max_rewards.get(key[0]) is None]
        if all(_reaches(self._range[key][1], 1.0) and _reaches(1.0, self._range[key][1]) for key in unknown):
            return StopReason(kind="solved", reason=f"solved: {episodes} the maximum reward: {best}")
        return StopReason(
            kind="plateau",
            reason=f"plateau: {episodes} the highest reward seen: {best}. The maximum is unknown: declare it with "
            "max_reward of the environment or the reward. If more can be earned, change the difficulty, the "
            "temperature or group_size",
        )

    def _top(self, key: EnvAgent, maximum: float | None) -> float:
        """Return the maximum, or the highest reward seen if it varies. A constant reward must reach 1."""
        if maximum is not None:
            return maximum
        low, high = self._range[key]
        return max(high, 1.0) if _reaches(low, high) else high

    def _describe(self, key: EnvAgent, maximum: float | None) -> str:
        (env_id, agent), best = key, self._best[key]
        rewards = [f"{reward:g}" if len(best) == 1 else f"{reward:g} ({n})" for reward, n in best.most_common(3)]
        top = f"of at most {maximum:g}" if maximum is not None else f"the highest seen is {self._range[key][1]:g}"
        return f"{agent} of {env_id} {', '.join(rewards)}{' and others' if len(best) > 3 else ''}, {top}"

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return reward ranges, token counts and the policies that learned, for a checkpoint."""
        return {
            "agents": np.array([list(key) for key in self._range], dtype=np.str_).reshape(-1, 2),
            "ranges": np.array(list(self._range.values()), dtype=np.float64).reshape(-1, 2),
            "scoring": np.array(self._range_scoring, dtype=np.str_),
            "policies": np.array(list(self._tokens), dtype=np.str_),
            "tokens": np.array(list(self._tokens.values()), dtype=np.int64),
            "learned": np.array(sorted(self._learned), dtype=np.str_),
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state_dict`. Raises ValueError for ranges or counts that no run has."""
        keys, policies = states.texts(state, "agents", -1, 2), states.texts(state, "policies", -1)
        ranges = states.numbers(state, "ranges", len(keys), 2, low=-MAX_REWARD, high=MAX_REWARD).tolist()
        tokens = states.whole(state, "tokens", len(policies)).tolist()
        self._range = {(e, a): (low, high) for (e, a), (low, high) in zip(keys, ranges, strict=True)}
        self._range_scoring = str(state.get("scoring", ""))  # earlier versions did not save it
        self._tokens = Counter(dict(zip(policies, tokens, strict=True)))
        self._learned = set(state.get("learned", state["policies"]).tolist())  # earlier versions did not save it


def _named(policies: Sequence[str]) -> str:
    return "policy " + policies[0] if len(policies) == 1 else "policies " + ", ".join(policies)


def _reaches(reward: float, top: float) -> bool:
    return reward >= top - (1e-4 * abs(top) or 1e-6)  # in proportion: the maximum may be 1e-9


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
