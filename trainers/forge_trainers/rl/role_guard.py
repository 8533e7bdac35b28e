"""Role guard: measures how much each role contributes to the gradient, and warns before a role stops learning."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from forge_agents.jsonl import number
from forge_agents.types import EpisodeGroup, Trajectory, Turn

_HALF = 5
"""Number of steps of a mean. A trend compares the last `_HALF` steps with the `_HALF` steps before."""
_CAPTURED = 0.9
"""Share of a shared policy's gradient from which one role captures it."""
_FALLEN, _DEAD, _HORIZON = 0.5, 0.05, 15
"""A role stops learning if its gradient is below `_FALLEN` of its highest mean and falls, at the present rate, below
`_DEAD` of it within `_HORIZON` steps."""
_NEAR = 0.1
"""A reward is near its maximum if less than this part of its range is left."""
_TINY = 1e-9
_ADVICE = "Set entropy_coef"
_ADVICE_IF_SHARED = (
    "Set credit=fa.Credit(balance_roles=True), which gives all roles the same advantage mass, set entropy_coef, or "
    "give the role its own policy"
)


def role_metrics(groups: Sequence[EpisodeGroup], trained: Collection[str]) -> dict[str, float]:
    """Measure every trained role of a step. Empty if there is only one.

    ``roles/AGENT/advantage_mass`` is the mean absolute advantage of the role's sampled tokens, which is 0 in
    zero-variance groups. ``gradient`` is the mean of |advantage| (1 - p), where p is the probability of the sampled
    token. On fresh samples, this is half of the L1 norm of the policy loss's gradient with respect to the token's
    logits. ``entropy`` is the mean of -log p, an unbiased estimate of the entropy. ``gradient_share`` is the role's
    share of the gradient of a policy that plays several roles, summed over tokens.
    """
    sums: dict[tuple[str, str], np.ndarray] = {}  # by policy and agent: tokens, |A|, |A| (1 - p), -log p
    for group in groups:
        for index, episode in enumerate(group.episodes if not group.failed else ()):
            for agent, trajectory in episode.trajectories.items():
                if trajectory.policy in trained:
                    rows = (group.advantages or {}).get(agent)
                    total = sums.setdefault((trajectory.policy, agent), np.zeros(4))
                    total += _token_sums(trajectory, None if rows is None else rows[index])
    sums = {role: total for role, total in sums.items() if total[0]}
    roles = dict.fromkeys(agent for _, agent in sums)
    if len(roles) < 2:
        return {}
    metrics: dict[str, float] = {}
    for role in roles:  # several policies may play it, in different groups
        policies = {policy for policy, agent in sums if agent == role}
        tokens, mass, gradient, entropy = np.sum([total for (_, agent), total in sums.items() if agent == role], axis=0)
        means = {"advantage_mass": mass / tokens, "gradient": gradient / tokens, "entropy": entropy / tokens}
        gradients = [total[2] for (policy, _), total in sums.items() if policy in policies]
        if len(gradients) > len(policies):
            means["gradient_share"] = gradient / sum(gradients) if sum(gradients) > _TINY else math.nan
        metrics |= {f"roles/{role}/{name}": float(value) for name, value in means.items()}
    return metrics


def _token_sums(trajectory: Trajectory, advantages: np.ndarray | None) -> np.ndarray:
    """Return the number of sampled tokens and the sums of |A|, |A| (1 - p) and -log p over them."""
    turns_of = enumerate(trajectory.turns)
    parts = [(t, _sampled_logprobs(part)) for t, turn in turns_of for part in turn.parts]
    if not parts:
        return np.zeros(4)
    logprobs = np.concatenate([values for _, values in parts])
    turns = np.repeat([t for t, _ in parts], [len(values) for _, values in parts])
    valid = np.isfinite(logprobs)
    logprobs = np.minimum(logprobs[valid], 0.0)
    size = np.zeros(len(logprobs)) if advantages is None else np.abs(advantages)[turns[valid]]
    return np.array([len(logprobs), size.sum(), (size * -np.expm1(logprobs)).sum(), -logprobs.sum()])


def _sampled_logprobs(turn: Turn) -> np.ndarray:
    """Return the log-probabilities of the tokens that a version sampled. Tokens that close the reasoning have none."""
    logprobs = np.asarray(turn.logprobs, np.float64)
    spans = [logprobs[span.start : span.end] for span in turn.versions]
    return np.concatenate(spans) if spans else logprobs


class _Trend(NamedTuple):
    """Mean of the last `_HALF` steps, and of as many steps before."""

    before: float
    now: float
    error: float
    """Standard error of the difference."""

    @property
    def rises(self) -> bool:
        return self.now - self.before > max(self.error, _TINY)


class _Curve:
    """A metric by step: its last values, and the highest and the first mean of `_HALF` steps."""

    def __init__(self) -> None:
        self._last = deque[float](maxlen=2 * _HALF)
        self.highest, self.first = -math.inf, math.nan

    def append(self, value: float) -> None:
        self._last.append(value)
        if len(self._last) >= _HALF:
            mean = float(np.mean([*self._last][-_HALF:]))
            self.highest = max(self.highest, mean)
            self.first = mean if math.isnan(self.first) else self.first

    @property
    def trend(self) -> _Trend | None:
        """None before there are enough steps."""
        if len(self._last) < 2 * _HALF:
            return None
        halves = np.array(self._last).reshape(2, _HALF)
        before, now = halves.mean(axis=1)
        return _Trend(float(before), float(now), float(np.sqrt(halves.var(axis=1, ddof=1).sum() / _HALF)))

    def changes(self, margin: float) -> bool:
        """Return whether the value changes by more than noise, and has changed by `margin` since the start."""
        if (trend := self.trend) is None:
            return False
        by, since_start = abs(trend.now - trend.before), abs(trend.now - self.first)
        return by > max(3 * trend.error, _TINY) and since_start > margin


class RoleGuard:
    """Warns before a role stops learning, or before one role captures a policy that several roles share.

    A role causes no warning while its reward rises, is near its maximum, or has risen and keeps its highest level.
    Neither does a run in which all rewards stand still. Each warning is given once per session.
    """

    def __init__(self, rows: Sequence[Mapping[str, float | None]] = ()) -> None:
        """Continue a run with these metrics of earlier steps."""
        self._curves: dict[str, _Curve] = {}
        self._ranges: dict[str, tuple[float, float]] = {}
        """By agent: lowest reward of an episode, and the maximum, or the highest reward if it is unknown."""
        self._warned = set[tuple[str, str]]()
        for row in rows:
            self._record(row)
            for name, value in row.items():  # the rewards of single episodes are not recorded
                if name.startswith("reward/") and (reward := number(value)) is not None:
                    self._extend_range(name.removeprefix("reward/"), [reward])

    def after(
        self,
        metrics: Mapping[str, float],
        groups: Sequence[EpisodeGroup],
        max_rewards: Mapping[str, float | None],
    ) -> list[str]:
        """Record a step's metrics and return new warnings. `max_rewards` has the maximum by environment, if known."""
        for group in groups:
            for agent, rewards in group.rewards.items():
                maximum = max_rewards.get(group.env_id)
                valid = [float(reward) for reward in rewards if not np.isnan(reward)]
                if valid:
                    self._extend_range(agent, valid if maximum is None else [*valid, maximum])
        self._record(metrics)
        gradients = [name for name in metrics if name.startswith("roles/") and name.endswith("/gradient")]
        roles = [name.removeprefix("roles/").removesuffix("/gradient") for name in gradients]
        roles = [role for role in roles if f"reward/{role}" in self._curves and role in self._ranges]
        found = {("stops", role): self._stops(role, roles) for role in roles}
        found |= {("captures", role): self._captures(role, roles) for role in roles}
        new = {key: text for key, text in found.items() if text and key not in self._warned}
        self._warned |= set(new)
        return [*new.values()]

    def _record(self, row: Mapping[str, float | None]) -> None:
        for name, value in row.items():
            if name.startswith(("roles/", "reward/")) and (finite := number(value)) is not None:
                self._curves.setdefault(name, _Curve()).append(finite)

    def _extend_range(self, agent: str, rewards: Sequence[float]) -> None:
        low, high = self._ranges.get(agent, (math.inf, -math.inf))
        self._ranges[agent] = min(low, *rewards), max(high, *rewards)

    def _trend(self, name: str) -> _Trend | None:
        return self._curves[name].trend if name in self._curves else None

    def _does_well(self, role: str) -> bool:
        """Return whether the reward of a role rises, is near its maximum, or has risen and keeps its highest level."""
        reward = self._curves[f"reward/{role}"]
        trend, margin, maximum = reward.trend, self._margin(role), self._ranges[role][1]
        if trend is None or trend.rises:
            return True
        keeps = reward.first < reward.highest - margin and trend.now >= reward.highest - margin
        return keeps or trend.now >= maximum - margin

    def _margin(self, role: str) -> float:
        """Return a part of the range of rewards that does not count. A constant reward is compared with 0."""
        low, high = self._ranges[role]
        return _NEAR * max(high - low, abs(high)) + _TINY

    def _changes(self, role: str) -> bool:
        return self._curves[f"reward/{role}"].changes(self._margin(role) / 2)

    def _loses_entropy(self, role: str) -> bool:
        curve = self._curves[f"roles/{role}/entropy"]
        return curve.trend is not None and curve.trend.now < (1 - _NEAR) * curve.first

    def _stops(self, role: str, roles: Sequence[str]) -> str:
        """Return a warning if the gradient of `role` falls towards zero while another's reward still changes."""
        trend = self._trend(f"roles/{role}/gradient")
        if trend is None or self._does_well(role):
            return ""
        highest = self._curves[f"roles/{role}/gradient"].highest
        steps = _steps_until(trend, _DEAD * highest)
        changing = [other for other in roles if other != role and self._changes(other)]
        if trend.now > _FALLEN * highest or steps > _HORIZON or not changing:
            return ""
        names = ("gradient", "advantage_mass", "entropy")
        parts = ", ".join(f"{name} {self._from_highest(role, name)}" for name in names)
        advice = _ADVICE_IF_SHARED if f"roles/{role}/gradient_share" in self._curves else _ADVICE
        when = f"in about {math.ceil(steps)} steps" if steps else "now"
        return (
            f"role {role} stops learning {when}: {parts}. Its reward does not rise ({self._from_highest(role)}), while "
            f"that of {', '.join(changing)} still changes. {advice}"
        )

    def _captures(self, role: str, roles: Sequence[str]) -> str:
        """Return a warning if `role` holds a shared policy's gradient while another of its roles does badly."""
        share, own = self._trend(f"roles/{role}/gradient_share"), self._trend(f"reward/{role}")
        if share is None or own is None or share.now < _CAPTURED or not self._changes(role):
            return ""
        sharing = [other for other in roles if f"roles/{other}/gradient_share" in self._curves]
        captured = [o for o in sharing if o != role and self._loses_entropy(o) and not self._does_well(o)]
        if not captured:
            return ""
        falling = ", ".join(
            f"{other} (reward {self._from_highest(other)}, entropy {self._from_highest(other, 'entropy')})"
            for other in captured
        )
        return (
            f"role {role} captures its policy: it holds {share.now:.0%} of the gradient, while the reward of {falling} "
            f"does not rise. {_ADVICE_IF_SHARED}"
        )

    def _from_highest(self, role: str, name: str = "") -> str:
        """Return the highest and the present mean of a role's metric, by default its reward."""
        curve = self._curves[f"roles/{role}/{name}" if name else f"reward/{role}"]
        now = curve.trend.now if curve.trend else math.nan
        return f"{curve.highest:.3g} -> {now:.3g}"


def _steps_until(trend: _Trend, level: float) -> float:
    """Return the number of steps until an exponentially falling value reaches `level`. Infinite if it does not fall."""
    if trend.now <= level:
        return 0.0
    if trend.now >= trend.before:
        return math.inf
    return _HALF * math.log(trend.now / level) / math.log(trend.before / trend.now)
