"""Credit assignment: from the rewards of a step's trajectories to one advantage per turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import numpy as np

from forge_agents import states
from forge_agents.imports import import_object
from forge_agents.settings import settings_class
from forge_agents.types import MAX_REWARD

Key: TypeAlias = Literal["seed", "role", "turn"]
_COMPARING = ("mean", "leave_one_out")
"""Baselines that are computed from the compared rewards, so a single reward has no advantage."""
_MAX_ALTERNATIVES = 256
"""Maximum number of alternatives of a turn, and of turns with alternatives. All of an episode are listed."""


@settings_class
@dataclass(frozen=True, kw_only=True)
class Overlong:
    """DAPO's soft penalty for long responses (arXiv 2503.14476, eq. 13)."""

    max_tokens: int
    """Response length, in tokens, from which the penalty is -1."""
    cache_tokens: int
    """Number of tokens before `max_tokens` over which the penalty grows linearly from 0 to -1. From 1 to
    `max_tokens`."""

    def __post_init__(self) -> None:
        if not 1 <= self.cache_tokens <= self.max_tokens:
            raise ValueError(f"cache_tokens={self.cache_tokens} must be in 1 to max_tokens={self.max_tokens}")

    def penalties(self, num_tokens_n: np.ndarray) -> np.ndarray:
        """Return the penalties of responses with these numbers of tokens: float64 ``[n]`` in [-1, 0]."""
        free = self.max_tokens - self.cache_tokens  # eq. 13: 0 up to here, then (free - |y|) / cache, at last -1
        return np.clip((free - np.asarray(num_tokens_n, np.float64)) / self.cache_tokens, -1.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The reward of one trajectory."""

    group: int
    """Number of the trajectory's group, "seed" in `Credit.by`. Any number that differs between groups."""
    role: str
    """Environment and agent, and the name of the reward in a `MultiReward`: "role" in `Credit.by`."""
    reward: float
    """Reward of the whole trajectory. Finite."""
    response_tokens: Sequence[int]
    """Number of sampled tokens of each turn."""
    turns: np.ndarray | None = None
    """float32 ``[turns]``, the reward of each turn, NaN where there is none. None if turns are not scored."""
    noise: float | None = None
    """Standard deviation of the reward. None if unknown."""
    alternatives: Mapping[int, Sequence[Scored]] = field(default_factory=dict)
    """By position of a turn: the same trajectory, played again from this turn on."""

    def __post_init__(self) -> None:
        if not np.isfinite(self.reward) or (self.turns is not None and np.isinf(self.turns).any()):
            raise ValueError(f"rewards must be finite, got {self.reward} with turns {self.turns}")
        if self.turns is not None and len(self.turns) != len(self.response_tokens):
            raise ValueError(f"{len(self.turns)} scores for {len(self.response_tokens)} turns. Pass one per turn")


class Baselines:
    """Running mean reward of each role over the run: the state of ``Credit(baseline="rae")``."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def update(self, key: str, rewards_n: np.ndarray, decay: float) -> float:
        """Add n rewards and return the new mean. The mean starts at 0.

        The paper adds rewards one by one, ``b <- decay * b + (1 - decay) * R`` (arXiv 2506.24119), so its b depends on
        their order. Here all n rewards have the same weight, and the old b keeps the same total weight.
        """
        weight = decay ** len(rewards_n)  # n updates b <- decay * b + ... leave decay^n of the old b
        self._means[key] = weight * self._means.get(key, 0.0) + (1.0 - weight) * float(np.mean(rewards_n))
        return self._means[key]

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return names and means, for a checkpoint."""
        return {"names": np.array(list(self._means), dtype=np.str_), "means": np.array(list(self._means.values()))}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state_dict`. Raises ValueError for means that no rewards have."""
        names = states.texts(state, "names", -1)
        means = states.numbers(state, "means", len(names), low=-MAX_REWARD, high=MAX_REWARD)
        self._means = dict(zip(names, means.tolist(), strict=True))


@settings_class
@dataclass(frozen=True, kw_only=True)
class Credit:
    """How rewards become advantages: the trajectories to compare, the baseline and the scale.

    For another rule, derive from this class and override `advantages`.
    """

    by: tuple[Key, ...] = ("seed", "role")
    """Properties that compared trajectories have in common. Without "seed", all groups of the step are compared.
    Without "role", agents share a baseline, although the reward of one agent says nothing about another's (arXiv
    2602.08847). With "turn", only turns of the same number are compared (arXiv 2510.11062)."""
    baseline: Literal["mean", "leave_one_out", "rae", "counterfactual", "none"] = "mean"
    """Value subtracted from each reward. "mean": the mean of the compared rewards (GRPO, arXiv 2402.03300).
    "leave_one_out": the same without the trajectory itself (RLOO, arXiv 2402.14740). "rae": the running mean of the
    role, and turn, if `by` names them, over the run (SPIRAL, arXiv 2506.24119). "counterfactual": the mean of
    `samples` alternatives, for which the environment is copied right before the turn and the same policies play on
    (COMA, arXiv 1705.08926; VinePPO, arXiv 2410.01679). "none": 0."""
    scale: Literal["std", "batch_std", "none"] = "std"
    """Divisor of the difference. "std": standard deviation of the compared rewards, with divisor n - 1 (GRPO).
    "batch_std": standard deviation of the step's differences, with divisor n, without zero-variance groups, per role if
    `by` names roles (REINFORCE++, arXiv 2501.03262). "none": 1 (Dr. GRPO, arXiv 2503.20783). "std" needs a group's
    baseline."""
    turns: Literal["own", "to_go", "return"] = "own"
    """Use of turn rewards. "own": the reward of a turn is compared. "to_go": as "own", then the advantages of the turn
    and of later turns are summed (process supervision in GRPO, arXiv 2402.03300, section 4.1.3). "return": the rewards
    of the turn and of later turns are summed and then compared."""
    discount: float = 1.0
    """Discount per turn in these sums. In [0, 1]."""
    rae_decay: float = 0.95
    """Weight of the running mean when one reward is added. In [0, 1)."""
    samples: int = 4
    """Number of alternatives per chosen turn with ``baseline="counterfactual"``. From 1 to 256."""
    decisions: Literal["every", "longest"] | int = "every"
    """Turns of each episode with alternatives: "every" turn of a trained policy, the "longest" (the most sampled
    tokens), or a number of random ones. Other turns subtract the mean of the other compared rewards, so a number is
    biased where answers change the number of turns. With "longest" their advantage is 0, because the choice depends on
    the answer."""
    overlong: Overlong | None = None
    """Penalty for long responses, added to the reward of each turn, or its mean over turns to the total reward. With a
    `MultiReward`, the penalty is added to each part."""
    min_spread: float = 1e-6
    """Trajectories are skipped if their rewards differ by no more than this. At least 0."""
    noise_multiple: float = 0.0
    """Trajectories are also skipped if the standard deviation of their rewards is below this multiple of the noise
    that the reward reports. At least 0. 0 (default) uses only `min_spread`."""
    balance_roles: bool = False
    """Whether to scale the advantages of each role by one factor per step, so that the sums of their absolute values
    over the sampled tokens are equal for all roles that a policy plays in an environment. Their total stays the same,
    except that factors are limited to 0.1 to 10. With a `MultiReward`, the sums over its parts are scaled. Prevents a
    role with long responses from capturing a shared policy (arXiv 2605.24202)."""

    def __post_init__(self) -> None:
        self._check_numbers()
        compares = self.baseline in _COMPARING
        if unknown := [key for key in self.by if key not in get_args(Key)]:
            raise ValueError(f"by={self.by} names {unknown[0]!r}. Choose from 'seed', 'role' (the agent) and 'turn'")
        if len(set(self.by)) != len(self.by):
            raise ValueError(f"by={self.by} must name each of 'seed', 'role', 'turn' at most once")
        forks = self.baseline == "counterfactual"
        if isinstance(self.decisions, str) and self.decisions not in ("every", "longest"):
            raise ValueError(f"decisions={self.decisions!r} must be 'every', 'longest' or a number")
        if forks and "turn" in self.by:
            raise ValueError(f"by={self.by} names 'turn', but baseline='counterfactual' has a baseline for each turn")
        if forks and type(self).advantages is not Credit.advantages:
            raise ValueError(
                f"{type(self).__name__} overrides advantages, which baseline='counterfactual' does not call. Override "
                "assign, or choose another baseline"
            )
        if self.scale == "std" and not (compares or forks):
            raise ValueError(
                f"scale='std' needs a group, but baseline={self.baseline!r} does not use one. Set scale to 'batch_std' "
                "or 'none'"
            )
        skips = compares or forks or self.scale == "batch_std"
        for name, default, is_used, condition in (
            ("rae_decay", 0.95, self.baseline == "rae", "baseline='rae'"),
            ("samples", 4, forks, "baseline='counterfactual'"),
            ("decisions", "every", forks, "baseline='counterfactual'"),
            ("turns", "own", not forks, "a baseline other than 'counterfactual', which compares total rewards"),
            ("discount", 1.0, self.turns != "own", "turns='to_go' or turns='return'"),
            ("noise_multiple", 0.0, compares, "baseline='mean' or baseline='leave_one_out'"),
            ("min_spread", 1e-6, skips, "baseline='mean' or scale='batch_std'"),
        ):
            if getattr(self, name) != default and not is_used:
                setting = f"{name}={getattr(self, name)}"
                raise ValueError(f"{setting} has no effect without {condition}: set that, or leave {name} out")

    def _check_numbers(self) -> None:
        for name in ("min_spread", "noise_multiple"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be at least 0 and finite: inf skips all trajectories"
                )
        if not 0 <= self.discount <= 1:
            raise ValueError(f"discount={self.discount} must be in [0, 1]")
        if not 0 <= self.rae_decay < 1:
            raise ValueError(f"rae_decay={self.rae_decay} must be in [0, 1)")
        for name in ("samples", "decisions"):
            if isinstance(value := getattr(self, name), int) and not 1 <= value <= _MAX_ALTERNATIVES:
                raise ValueError(f"{name}={value} must be at least 1 and at most {_MAX_ALTERNATIVES}")

    @property
    def compares_episodes(self) -> bool:
        """Whether a group of one episode has no advantages."""
        return self.baseline in _COMPARING and "seed" in self.by

    @property
    def compares_step(self) -> bool:
        """Whether a step of one episode has no advantages."""
        compares = self.baseline in _COMPARING or (self.scale == "batch_std" and self.baseline != "counterfactual")
        return type(self).assign is Credit.assign and compares and "role" in self.by

    @property
    def is_per_group(self) -> bool:
        """Whether the advantages of a group do not depend on the other groups of the step."""
        standard = type(self).assign is Credit.assign  # a subclass may compare anything there
        uses_step = self.baseline == "rae" or self.scale == "batch_std" or self.balance_roles
        return standard and "seed" in self.by and not uses_step

    def advantages(self, rewards_n: np.ndarray, noise_n: np.ndarray | None = None) -> np.ndarray | None:
        """Compute the advantages of n trajectories or turns that are compared with each other.

        A subclass may override this method. `assign` calls it for each set of compared trajectories. Running means and
        the scale over a step are applied by `assign`.

        Args:
            rewards_n: float ``[n]``, finite.
            noise_n: float ``[n]``, the standard deviation of each reward. None if unknown.

        Returns:
            float32 ``[n]``, or None if the baseline is their mean and the rewards do not differ.
        """
        rewards = np.asarray(rewards_n, dtype=np.float64)
        if rewards.ndim != 1 or not np.isfinite(rewards).all():
            raise ValueError(f"rewards must be finite and [n], got shape {rewards.shape}: {rewards.tolist()}")
        if self.baseline == "none":
            return rewards.astype(np.float32)
        if self.baseline == "counterfactual":
            raise ValueError("baseline='counterfactual' needs the alternatives of each turn. Call assign")
        if len(rewards) < 2 or np.ptp(rewards) <= self.min_spread:
            return None
        if noise_n is not None and self.noise_multiple:
            noise = np.sqrt(np.mean(np.square(noise_n, dtype=np.float64)))
            if rewards.std(ddof=1) < self.noise_multiple * noise:
                return None
        # GRPO (arXiv 2402.03300, section 4.1.2): A_i = (r_i - mean(r)) / std(r); Dr. GRPO (2503.20783) leaves std out.
        centered: np.ndarray = rewards - rewards.mean()
        if self.baseline == "leave_one_out":
            # RLOO (arXiv 2402.14740): r_i - mean of the n - 1 others = (r_i - mean of all) * n / (n - 1)
            centered *= len(rewards) / (len(rewards) - 1)
        if self.scale == "std":
            centered /= rewards.std(ddof=1)
        return centered.astype(np.float32)

    def assign(self, scored: Sequence[Scored], baselines: Baselines | None = None) -> list[np.ndarray | None]:
        """Compute the advantages of every turn of a step's trajectories, before `balance_roles`.

        Args:
            scored: All trajectories to learn from.
            baselines: Running means of earlier steps, updated in place. None starts from 0.

        Returns:
            By trajectory: float32 ``[turns]``, or None if the compared rewards do not differ. A turn without a reward
            has advantage 0.
        """
        if self.baseline == "counterfactual":
            return self._counterfactual(scored)
        values = [self._values(trajectory) for trajectory in scored]
        compared: dict[tuple[str, ...], list[tuple[int, int]]] = {}  # trajectory and turn, by what they have in common
        by = [name for name in self.by if name != "seed" or self.baseline != "rae"]  # a running mean has no groups
        for i, rewards in enumerate(values):
            for t in np.flatnonzero(~np.isnan(rewards)).tolist():
                key = {"seed": str(scored[i].group), "role": scored[i].role, "turn": str(t)}
                compared.setdefault(tuple(key[name] for name in by), []).append((i, t))
        result: list[np.ndarray | None] = [None] * len(scored)
        for shared, members in compared.items():
            rewards = np.array([values[i][t] for i, t in members])
            if self.baseline == "rae":
                running = baselines if baselines is not None else Baselines()
                advantages: np.ndarray | None = rewards - running.update("/".join(shared), rewards, self.rae_decay)
            else:
                noise = [scored[i].noise for i, _ in members]
                advantages = self.advantages(rewards, None if None in noise else np.array(noise, np.float64))
            if advantages is None:
                continue
            for (i, t), advantage in zip(members, advantages, strict=True):
                row = result[i]
                if row is None:
                    row = result[i] = np.zeros(len(values[i]))
                row[t] = advantage
        if self.scale == "batch_std":
            result = self._scaled(scored, result, values)
        for i, row in enumerate(result):
            if row is not None:
                to_go = self.turns == "to_go" and scored[i].turns is not None
                per_turn = self._discounted_sums(row) if to_go else row
                result[i] = np.broadcast_to(per_turn, len(scored[i].response_tokens)).astype(np.float32)
        return result

    def _counterfactual(self, scored: Sequence[Scored]) -> list[np.ndarray | None]:
        """Subtract from the reward of a trajectory, for each turn, the mean reward of the turn's alternatives.

        COMA (arXiv 1705.08926, eq. 4): A(s, u) = Q(s, u) - sum_u' pi(u') Q(s, u'). The trajectory is one sample of
        Q(s, u) and the k alternatives are samples of the sum, so the expectation is exact for any k, and the variance
        is Var(R | s, u) + Var(R | s) / k. The trajectory itself is no alternative: with it in the mean, the expectation
        would be k / (k + 1) of A.
        """
        totals = [self._total(trajectory) for trajectory in scored]
        compared: dict[tuple[str, ...], list[int]] = {}
        for i, trajectory in enumerate(scored):
            key = {"seed": str(trajectory.group), "role": trajectory.role}
            compared.setdefault(tuple(key[name] for name in self.by), []).append(i)
        result: list[np.ndarray | None] = [None] * len(scored)
        values = [np.full(len(trajectory.response_tokens), np.nan) for trajectory in scored]  # NaN: no advantage
        for members in compared.values():
            alternative_rewards = {
                (i, t): np.array([self._total(each) for each in alternatives])
                for i in members
                for t, alternatives in scored[i].alternatives.items()
            }
            member_rewards, num = [totals[i] for i in members], len(members)
            rewards = np.concatenate([member_rewards, *alternative_rewards.values()])
            if len(rewards) < 2 or np.ptp(rewards) <= self.min_spread:
                continue
            mean = float(np.mean(member_rewards))
            for i in members:
                if num > 1 and self.decisions != "longest":
                    values[i][:] = (totals[i] - mean) * num / (num - 1)  # minus the mean of the others, as in RLOO
                for t in scored[i].alternatives:
                    values[i][t] = totals[i] - alternative_rewards[i, t].mean()
                if not np.isnan(values[i]).all():
                    row = np.nan_to_num(values[i])
                    result[i] = row / rewards.std(ddof=1) if self.scale == "std" else row
        if self.scale == "batch_std":
            result = self._scaled(scored, result, values)
        return [None if row is None else row.astype(np.float32) for row in result]

    def _total(self, trajectory: Scored) -> float:
        """Return the total reward, with the mean penalty for long responses."""
        if self.overlong is None or not trajectory.response_tokens:
            return trajectory.reward
        return trajectory.reward + float(self.overlong.penalties(np.array(trajectory.response_tokens)).mean())

    def _values(self, trajectory: Scored) -> np.ndarray:
        """Return the rewards to compare: one per turn, NaN if missing, or a single reward for the trajectory."""
        penalties = np.zeros(len(trajectory.response_tokens))
        if self.overlong is not None:
            penalties = self.overlong.penalties(np.array(trajectory.response_tokens))
        if trajectory.turns is None:
            reward = trajectory.reward + (float(penalties.mean()) if len(penalties) else 0.0)
            return np.full(len(penalties) if "turn" in self.by else 1, reward)
        turns = np.asarray(trajectory.turns, np.float64)
        if self.turns != "return" or np.isnan(turns).all():
            return turns + penalties
        return self._discounted_sums(np.nan_to_num(turns) + penalties)

    def _scaled(
        self, scored: Sequence[Scored], advantages: Sequence[np.ndarray | None], values: Sequence[np.ndarray]
    ) -> list[np.ndarray | None]:
        """Divide by the standard deviation over the step, or over the role, of turns whose value is not NaN."""
        # REINFORCE++ (arXiv 2501.03262): A / std over the batch, per role: roles may differ in their range of rewards.
        roles = [trajectory.role if "role" in self.by else "" for trajectory in scored]
        pools: dict[str, list[np.ndarray]] = {}
        for role, row, rewards in zip(roles, advantages, values, strict=True):
            if row is not None:
                pools.setdefault(role, []).append(row[~np.isnan(rewards)])
        spreads = {role: float(np.concatenate(pool).std()) for role, pool in pools.items()}
        return [
            None if row is None or spreads[role] <= self.min_spread else row / spreads[role]
            for role, row in zip(roles, advantages, strict=True)
        ]

    def _discounted_sums(self, turns: np.ndarray) -> np.ndarray:
        """Return the discounted sum over each turn and the later ones."""
        out, total = np.empty(len(turns)), 0.0  # G_t = r_t + discount * G_(t+1), backwards
        for t in range(len(turns) - 1, -1, -1):
            total = turns[t] + self.discount * total
            out[t] = total
        return out


def imported_credit(place: str) -> Credit:
    """Import the rule at "package.module:name": a `Credit`, or a subclass whose constructor needs no arguments."""
    value = import_object(place, "credit")
    try:
        rule = value() if isinstance(value, type) and issubclass(value, Credit) else value
    except TypeError as cause:
        raise ValueError(f"credit {place!r} needs constructor arguments ({cause}). Name an instance instead") from cause
    if not isinstance(rule, Credit):
        kind = f"credit {place!r} is {type(rule).__name__}"
        raise ValueError(f"{kind}. Name a forge_agents.Credit, or a subclass of it")  # noqa: TRY004
    return rule
