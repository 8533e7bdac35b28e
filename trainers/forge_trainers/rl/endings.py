"""Sees that a run has nothing left to learn, or never had anything, and says which.

In: the judged groups of each step. Out: an `Ending`, or None while there is more to learn. Waits for nothing.
"""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

import forge_agents
import forge_trainers
import forge_verifiers
from forge_agents.bench.records import forfeits_of
from forge_agents.types import Episode, EpisodeError, total_tokens
from forge_trainers.rl.rewards import EnvTurnReward, JudgedGroup, env_reward
from forge_trainers.rl.update import StepSamples

Seat: TypeAlias = tuple[str, str]
"""An environment's id and an agent's name."""

_UNTRAINED = "no step had anything to learn from, so the weights are those that training began with"
_MOST_IDLE = 1024
_PROOF = {"episodes": 64, "groups": 24}
"""Episodes and groups in a row at the top that count as solved. By the rule of three, with 95 % confidence fewer than 3
in 64 episodes would earn less. Episodes of a group share their task, so enough tasks must have been seen, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why a run ends before its steps are done."""

    kind: Literal["solved", "plateau", "uninformative", "broken"]
    """``solved``: every episode earns the most there is. ``plateau``: every episode earns the highest reward that was
    seen, and nobody knows whether more can be earned. ``uninformative``: siblings earn the same, or
    no group counts for other reasons. ``broken``: every episode failed, or nothing was sampled, in the first step of a
    session or in as many in a row as are waited for; or trained policies never had a turn in as many, or in the whole
    run."""
    reason: str
    """What was seen and what to do about it."""

    @property
    def well(self) -> bool:
        """Whether the run did what it could."""
        return self.kind in ("solved", "plateau")


class Endings:
    """Watches the rewards of trained seats.

    Args:
        patience: Steps in a row that taught nothing after which the run ends.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._seen: dict[Seat, tuple[float, float]] = {}
        """Lowest and highest reward of the whole run, of episodes in which the agent acted."""
        self._tokens: Counter[str] = Counter()
        """Tokens of the whole run that each trained policy sampled."""
        self._learned = 0
        """Steps of the whole run that had something to learn from."""
        self.begin()

    def begin(self) -> None:
        """Begin a session: steps that taught nothing are counted from here."""
        self._played, self._unplayed = False, 0
        self._steps = self._groups = self._episodes = self._lost = self._abstained = self._failed = 0
        self._levels: dict[Seat, Counter[float]] = {}
        """Of those steps, groups by the reward of their best sibling."""
        self._sampled = 0
        """Tokens of those steps that trained policies sampled."""
        self._idle: deque[Episode] = deque(maxlen=_MOST_IDLE)
        """Newest episodes of those steps in which no trained policy sampled a token."""

    def after(
        self,
        step: int,
        judged: Sequence[JudgedGroup],
        samples: StepSamples,
        trained: Collection[str],
        tops: Mapping[str, float | None],
        *,
        last: bool = False,
    ) -> Ending | None:
        """Take note of a step that has been learned from.

        Args:
            step: Its number.
            judged: Its groups.
            samples: What they taught.
            trained: Policies that learn.
            tops: Of every environment that may be drawn, the most that its reward can be; None where nobody knows.
            last: Whether this is the last step of the run.
        """
        reason, taught = nothing_played(judged, trained), bool(samples.samples)
        self._count(judged, trained)
        if reason is not None:
            self._unplayed += 1
            if not self._played or self._unplayed >= self._patience:  # later a step of few seeds may just be unlucky
                return Ending(kind="broken", reason=f"step {step + 1}: {reason}")
        if taught:
            self.begin()
            self._learned += 1
        else:
            self._steps += 1
            self._lost += samples.counts["too_long"]
        if reason is None:
            self._played, self._unplayed = True, 0
        for item in judged:
            self._take_note(item, trained, taught=taught)
        if not taught and self._steps >= self._patience:
            return self._ended(samples, tops)
        if last and not any(self._tokens.values()):
            return self._without_turns()
        return None

    def remark(self, trained: Collection[str]) -> str:
        """What a finished run did not train; empty if it trained every policy."""
        idle = [name for name in trained if not self._tokens[name]]
        if idle:
            names = "policy " + idle[0] if len(idle) == 1 else "policies " + ", ".join(idle)
            return f"{names} never had a turn, so the exported weights are those that training began with"
        return "" if self._learned else _UNTRAINED

    def _count(self, judged: Sequence[JudgedGroup], trained: Collection[str]) -> None:
        for item in judged:
            for trajectory in item.group.trajectories:
                if trajectory.policy in trained:
                    self._tokens[trajectory.policy] += (tokens := total_tokens(trajectory.turns))
                    self._sampled += tokens

    def _take_note(self, item: JudgedGroup, trained: Collection[str], *, taught: bool) -> None:
        """Rewards of a group, of the agents that a trained policy acted for."""
        episodes = item.group.episodes
        acted = [acting(episode, trained) for episode in episodes]
        if not taught:
            pairs = zip(episodes, acted, strict=True)
            self._idle += [episode for episode, agents in pairs if not agents and episode.error is None]
        if item.group.failed:
            self._failed += (not taught) * len(episodes)
            return
        own = {agent: rewards for agent, rewards in item.rewards_of(trained).items() if any(agent in a for a in acted)}
        if not taught:
            scored = [bool(a) and not any(np.isnan(own[agent][at]) for agent in own) for at, a in enumerate(acted)]
            self._groups += any(scored)
            self._episodes += sum(scored)
            self._abstained += sum(map(bool, acted)) - sum(scored)
        for agent, rewards in own.items():
            if not np.isnan(rewards).all():
                seat, least, most = (item.group.env_id, agent), float(np.nanmin(rewards)), float(np.nanmax(rewards))
                low, high = self._seen.get(seat, (least, most))
                self._seen[seat] = (min(low, least), max(high, most))
                if not taught:
                    self._levels.setdefault(seat, Counter())[round(most, 6)] += 1

    def _without_turns(self) -> Ending:
        """The end of a run, or of many steps, in which no trained policy sampled a token."""
        return Ending(
            kind="broken",
            reason=f"nothing was trained: {without_turns(self._idle)}. Give the trained policy an opponent that plays "
            "legal moves",
        )

    def _ended(self, samples: StepSamples, tops: Mapping[str, float | None]) -> Ending | None:
        if self._idle and not self._sampled:
            return self._without_turns()
        idle = {episode.env_id for episode in self._idle} - {env_id for env_id, _ in self._levels}
        if self._levels and set(tops) - {env_id for env_id, _ in self._levels} - idle:
            return None  # an environment that is drawn seldom may teach something yet
        best = "; ".join(self._describe(seat, tops.get(seat[0])) for seat in self._levels)
        if (
            self._levels
            and not idle
            and not self._lost
            and self._abstained + self._failed < self._episodes
            and all(_reaches(min(levels), self._top(seat, tops.get(seat[0]))) for seat, levels in self._levels.items())
        ):
            if self._episodes < _PROOF["episodes"] or self._groups < _PROOF["groups"]:
                return None
            return self._at_the_top(tops, best)
        counts = samples.counts
        advice = {
            "zero_variance": "Siblings earn the same, so nothing can be compared: change difficulty, temperature or "
            "group_size. If this is all that can be earned, say so with the environment's max_reward",
            "failed": "Episodes fail: see the errors in episodes.jsonl",
            "too_long": "Samples are longer than the learner takes: raise learner.max_sample_tokens, or end episodes",
            "abstained": "The reward returned NaN: see what it needs",
        }
        cause = max(advice, key=lambda fate: counts[fate])
        return Ending(
            kind="uninformative",
            reason=f"{self._steps} steps in a row had no group to learn from; groups of the last: {dict(counts)}. "
            + (f"Best of each group: {best}. " if best else "")
            + (f"{_capitalized(without_turns(self._idle))}. " if idle else "")
            + advice[cause],
        )

    def _at_the_top(self, tops: Mapping[str, float | None], best: str) -> Ending:
        """Solved where the most there is is known, or is 1 by all that was seen: the full mark of most rewards."""
        left_out = {"have no reward": self._abstained, "failed": self._failed}
        left_out["ended before a trained policy's turn"] = len(self._idle)
        rest = ", ".join(f"{number} more {what}" for what, number in left_out.items() if number)
        all_of_them = f"all {self._episodes} episodes of the last {self._steps} steps{rest and f' ({rest})'} earned"
        best += "" if self._learned else f". {_capitalized(_UNTRAINED)}"
        unknown = [seat for seat in self._levels if tops.get(seat[0]) is None]
        if all(_reaches(self._seen[seat][1], 1.0) and _reaches(1.0, self._seen[seat][1]) for seat in unknown):
            return Ending(kind="solved", reason=f"solved: {all_of_them} the most there is: {best}")
        return Ending(
            kind="plateau",
            reason=f"plateau: {all_of_them} the highest reward seen: {best}. Nobody knows whether it is the most there "
            "is: say so with max_reward of the environment or the reward; if more can be earned, change the "
            "difficulty, the temperature or group_size",
        )

    def _top(self, seat: Seat, known: float | None) -> float:
        """Where a seat stops earning more: at what is known, else the highest it earned once it has also earned less.

        A reward that never moved is at its top from 1 on.
        """
        if known is not None:
            return known
        low, high = self._seen[seat]
        return max(high, 1.0) if _reaches(low, high) else high

    def _describe(self, seat: Seat, known: float | None) -> str:
        (env_id, agent), levels = seat, self._levels[seat]
        shown = [f"{level:g}" if len(levels) == 1 else f"{level:g} ({n})" for level, n in levels.most_common(3)]
        top = f"of at most {known:g}" if known is not None else f"the highest seen is {self._seen[seat][1]:g}"
        return f"{agent} of {env_id} {', '.join(shown)}{' and others' if len(levels) > 3 else ''}, {top}"

    def state_dict(self) -> dict[str, np.ndarray]:
        """Lowest and highest reward by seat, and what was sampled and learned, for a checkpoint."""
        return {
            "seats": np.array([list(seat) for seat in self._seen], dtype=np.str_).reshape(-1, 2),
            "seen": np.array(list(self._seen.values()), dtype=np.float64).reshape(-1, 2),
            "policies": np.array(list(self._tokens), dtype=np.str_),
            "tokens": np.array(list(self._tokens.values()), dtype=np.int64),
            "learned": np.array(self._learned),
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state_dict`."""
        seats, seen = state["seats"].tolist(), state["seen"].tolist()
        self._seen = {(e, a): (low, high) for (e, a), (low, high) in zip(seats, seen, strict=True)}
        self._tokens = Counter(dict(zip(state["policies"].tolist(), state["tokens"].tolist(), strict=True)))
        self._learned = int(state["learned"])


def _reaches(reward: float, top: float) -> bool:
    return reward >= top - 1e-4 * max(1.0, abs(top))


def most_of(reward: Any, env_top: float | None) -> float | None:
    """The most that `reward` can be where the environment pays at most `env_top`; None where nobody knows.

    Exact verifiers give 1, an `EnvReward` its share of the environment's most, weighted ones the sum. One that only
    grades, such as a judge or an ensemble, may never give its highest score. Any other reward may say it in
    ``max_reward``.
    """
    from forge_verifiers.core.verifier import EnvReward, Verifier, terms_of

    if reward is env_reward or isinstance(reward, EnvTurnReward):
        return env_top
    if (own := getattr(reward, "max_reward", None)) is not None:
        return float(own)
    terms = terms_of(reward) if isinstance(reward, Verifier) else ()
    total = 0.0
    for weight, verifier in terms:
        if isinstance(verifier, EnvReward) and env_top is not None:
            total += weight * min(1.0, (env_top - verifier.low) / (verifier.high - verifier.low))
        elif getattr(verifier, "exact", False):
            total += weight
        else:
            return None
    return total if terms else None


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def acting(episode: Episode, policies: Collection[str]) -> set[str]:
    """The agents of an episode for which one of `policies` sampled a token."""
    return {
        agent
        for agent, trajectory in episode.trajectories.items()
        if trajectory.policy in policies and any(turn.response_ids for turn in trajectory.turns)
    }


def without_turns(episodes: Collection[Episode], policies: Collection[str] = ()) -> str:
    """Who ended `episodes`, in which no trained policy, or none of `policies`, had a turn."""
    enders: Counter[str] = Counter()
    for episode in episodes:
        turns, lost = episode.turns, sorted(forfeits_of(episode))
        agents = lost or [turns[-1].agent] if turns else []
        names = ", ".join(f"{agent} ({episode.trajectories[agent].policy})" for agent in agents)
        did = "with an illegal action" if lost else "with the last turn of the game"
        enders[f"by {names} {did}" if names else "by the environment, before any turn"] += 1
    who = "; ".join(f"{number} {ender}" for ender, number in enders.most_common(3))
    example = next((turn for episode in episodes for turn in episode.turns[-1:]), None)
    said = "" if example is None else f". The first ended after {example.agent} wrote {example.action[:80]!r}"
    nobody = f"policy {', '.join(policies)} had no turn" if policies else "no trained policy had a turn"
    return f"{nobody} in {len(episodes)} episodes, which were ended {who}{said}"


def nothing_played(judged: Sequence[JudgedGroup], trained: Collection[str]) -> str | None:
    """Why groups can teach nothing however often they are played; None where they can."""
    episodes = [episode for item in judged for episode in item.group.episodes]
    own = [t for episode in episodes for t in episode.trajectories.values() if t.policy in trained]
    errors = [episode.error for episode in episodes if episode.error is not None]
    if errors and len(errors) == len(episodes):
        causes = Counter(f"{error.where}: {error.kind}" for error in errors)
        blame = (
            "A player fails; see that its server answers and its settings fit"
            if causes.most_common(1)[0][0].startswith("policy")
            else "The environment fails; try `forge-agents check` on it"
        )
        return (
            f"all {len(episodes)} episodes failed ({', '.join(f'{n} in {cause}' for cause, n in causes.items())}). "
            f"First: {where_it_failed(errors[0])}. {blame}, then run it again"
        )
    if any(turn.response_ids for trajectory in own for turn in trajectory.turns) or not episodes:
        return None
    if any(episode.error is None and episode.end_reason != "context" and episode.turns for episode in episodes):
        return None  # games may end before a trained policy's turn; `Endings` waits before it calls that broken
    full = [episode for episode in episodes if episode.end_reason == "context"]
    if not full:
        return (
            f"not one token was sampled in {len(episodes)} episodes: no trained policy had a turn. See that the "
            "environment lets its agents decide and that a trained policy sits in one of its seats"
        )
    longest = max((len(t.instructions) for episode in full for t in episode.trajectories.values()), default=0)
    return (
        f"not one token was sampled: {len(full)} of {len(episodes)} episodes were out of context before an answer "
        f"(instructions of up to {longest} characters). Raise engine.max_model_len, or shorten instructions and "
        "observations"
    )


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')
_OURS = tuple(package.__path__[0] + os.sep for package in (forge_agents, forge_trainers, forge_verifiers))
"""Where we only find what a user's code has done."""
_FOREIGN = ("site-packages", "dist-packages", "<frozen", sysconfig.get_paths()["stdlib"])


def where_it_failed(error: EpisodeError) -> str:
    """An episode's failure in one line, with the file and line of the user's code or else a library's, if any."""
    return f"{error.where}: {error.kind}: {error.message[:300]}{_place(error.trace)}"


def raised_in(error: EpisodeError) -> str:
    """The file in which an episode's failure was raised; empty where it has no trace."""
    frames = _FRAME.findall(error.trace)
    return frames[-1][0] if frames else ""


def where_it_raised(error: BaseException) -> str:
    """An exception in one line, with the file and line of the user's code or else a library's, if any."""
    trace = "".join(traceback.format_exception(error))
    return f"{type(error).__name__}: {str(error)[:300]}{_place(trace)}"


def _place(trace: str) -> str:
    frames = _FRAME.findall(trace)
    frames = [frame for frame in frames if not frame[0].startswith(_OURS)]
    own = [frame for frame in frames if not any(part in frame[0] for part in _FOREIGN)] or frames
    return f" at {own[-1][0]}:{own[-1][1]} in {own[-1][2].strip()}" if own else ""
