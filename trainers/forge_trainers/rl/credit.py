"""Who gets how much of the reward: rewards of a step's trajectories to advantages.

In: rewards by sibling group and role. Out: one advantage per turn, or nothing where those compared do not differ.
Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from forge_agents.imports import import_object
from forge_agents.settings import settings_class

Key: TypeAlias = Literal["seed", "role", "turn"]


@settings_class
@dataclass(frozen=True, kw_only=True)
class Overlong:
    """DAPO's soft punishment of long responses (arXiv 2503.14476, eq. 13)."""

    max_tokens: int
    """Responses longer than this lose a whole point."""
    cache_tokens: int
    """The loss grows from 0 over this many tokens before `max_tokens`. From 1 to `max_tokens`."""

    def __post_init__(self) -> None:
        if not 1 <= self.cache_tokens <= self.max_tokens:
            raise ValueError(f"cache_tokens={self.cache_tokens} must lie in 1 to max_tokens={self.max_tokens}")

    def penalties(self, num_tokens_n: np.ndarray) -> np.ndarray:
        """What responses of so many tokens lose: float64 ``[n]`` in [-1, 0]."""
        free = self.max_tokens - self.cache_tokens  # eq. 13: 0 up to here, then (free - |y|) / cache, at last -1
        return np.clip((free - np.asarray(num_tokens_n, np.float64)) / self.cache_tokens, -1.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What one trajectory earned."""

    seed: int
    """Number of its sibling group in the step."""
    role: str
    """Its seat and environment."""
    reward: float
    """Of the whole trajectory, finite."""
    response_tokens: Sequence[int]
    """Sampled tokens of each turn."""
    turns: np.ndarray | None = None
    """Score of each turn, NaN where there is none; None where the reward scores no turns."""
    noise: float | None = None
    """Standard deviation of the reward; None where it is not known."""

    def __post_init__(self) -> None:
        if not np.isfinite(self.reward) or (self.turns is not None and np.isinf(self.turns).any()):
            raise ValueError(f"rewards must be finite, got {self.reward} with turns {self.turns}")
        if self.turns is not None and len(self.turns) != len(self.response_tokens):
            raise ValueError(f"{len(self.turns)} scores for {len(self.response_tokens)} turns; send one per turn")


class Baselines:
    """Running mean reward of each role, which outlives a step: the state of ``Credit(baseline="rae")``."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def update(self, key: str, rewards_n: np.ndarray, decay: float) -> float:
        """Take in n rewards and return the new mean; it starts at 0.

        The paper takes rewards in one by one, ``b <- decay * b + (1 - decay) * R`` (arXiv 2506.24119), so
        that b depends on their order. Here all n count alike, and what is left of the old b is the same.
        """
        left = decay ** len(rewards_n)  # n updates b <- decay * b + ... leave decay^n of the old b
        self._means[key] = left * self._means.get(key, 0.0) + (1.0 - left) * float(np.mean(rewards_n))
        return self._means[key]

    def state_dict(self) -> dict[str, np.ndarray]:
        """Names and means, for a checkpoint."""
        return {"names": np.array(list(self._means), dtype=np.str_), "means": np.array(list(self._means.values()))}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state_dict`."""
        self._means = dict(zip(state["names"].tolist(), state["means"].tolist(), strict=True))


@settings_class
@dataclass(frozen=True, kw_only=True)
class Credit:
    """How a reward is compared with those of other trajectories."""

    by: tuple[Key, ...] = ("seed", "role")
    """Trajectories are compared where they agree in these. Without "seed" the whole step is compared; without "role"
    seats share a baseline, though what is good for one says nothing about another (arXiv 2602.08847); with "turn" only
    turns of the same number are compared (arXiv 2510.11062)."""
    baseline: Literal["mean", "leave_one_out", "rae", "none"] = "mean"
    """What is subtracted: the mean of those compared with (GRPO, arXiv 2402.03300) or without (RLOO, arXiv 2402.14740)
    the trajectory itself; "rae": the running mean of the role, and turn, if `by` names them, over the whole run
    (SPIRAL, arXiv 2506.24119); or nothing."""
    scale: Literal["std", "batch_std", "none"] = "std"
    """What the difference is divided by: the standard deviation of those compared (GRPO), that of all differences of
    the step, role by role if `by` names roles (REINFORCE++, arXiv 2501.03262), or nothing (Dr. GRPO, arXiv
    2503.20783). "std" needs the baseline of a group."""
    turns: Literal["own", "to_go", "return"] = "own"
    """Where a reward scores turns: "own": a turn's own score is compared; "to_go": then the advantages of the turn and
    those after it are summed (process supervision in GRPO, arXiv 2402.03300, section 4.1.3); "return": scores of the
    turn and those after it are summed first and then compared."""
    discount: float = 1.0
    """What the score of the next turn counts in those sums; the one after it the square of that. In [0, 1]."""
    rae_decay: float = 0.95
    """What one reward leaves of the running mean, in [0, 1)."""
    overlong: Overlong | None = None
    """Punishment of long responses, added to each turn's score, or its mean over turns to the reward."""
    min_spread: float = 1e-6
    """Trajectories whose rewards differ by no more than this teach nothing and are skipped. At least 0."""
    noise_multiple: float = 0.0
    """They teach nothing, either, where the standard deviation of their rewards is below this many times the noise
    that the reward knows of itself. At least 0; 0 asks for `min_spread` alone."""

    def __post_init__(self) -> None:
        for name in ("min_spread", "noise_multiple"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        if not (0 <= self.discount <= 1 and 0 <= self.rae_decay < 1):
            raise ValueError(f"discount={self.discount} must lie in [0, 1], rae_decay={self.rae_decay} in [0, 1)")
        if set(self.by) - {"seed", "role", "turn"} or len(set(self.by)) != len(self.by):
            raise ValueError(f"by={self.by} must name each of 'seed', 'role', 'turn' at most once")
        if self.scale == "std" and not self._grouped:
            raise ValueError(
                f"scale='std' is that of a group, which baseline={self.baseline!r} does not look at; set scale to "
                "'batch_std' or 'none'"
            )

        for name, value, is_read, wanted in (
            ("rae_decay", 0.95, self.baseline == "rae", "baseline='rae'"),
            ("discount", 1.0, self.turns != "own", "turns='to_go' or turns='return'"),
        ):
            if getattr(self, name) != value and not is_read:
                given = f"{name}={getattr(self, name)}"
                raise ValueError(f"{given} has no effect without {wanted}: set that, or leave {name} out")

    @property
    def needs_siblings(self) -> bool:
        """Whether a group of one teaches nothing."""
        return self._grouped and "seed" in self.by

    @property
    def _grouped(self) -> bool:
        return self.baseline in ("mean", "leave_one_out")

    def advantages(self, rewards_n: np.ndarray, noise_n: np.ndarray | None = None) -> np.ndarray | None:
        """Advantages of n trajectories, or turns, that are compared with each other.

        A rule of your own derives from this class and writes this method; `assign` asks it about each set of those
        compared. A running mean and a scale over the whole step are beyond it: `assign` knows them.

        Args:
            rewards_n: float ``[n]``, finite.
            noise_n: float ``[n]``, the standard deviation of each reward; None where it is not known.

        Returns:
            float32 ``[n]``, or None where the rewards do not differ and their mean is the baseline.
        """
        rewards = np.asarray(rewards_n, dtype=np.float64)
        if rewards.ndim != 1 or not np.isfinite(rewards).all():
            raise ValueError(f"rewards must be finite and [n], got shape {rewards.shape}: {rewards.tolist()}")
        found = self._compared(rewards, noise_n)
        return None if found is None else found.astype(np.float32)

    def assign(self, scored: Sequence[Scored], baselines: Baselines | None = None) -> list[np.ndarray | None]:
        """Advantages of every turn of a step's trajectories.

        Args:
            scored: All trajectories that are to learn.
            baselines: Running means of earlier steps, brought up to date; None starts afresh.

        Returns:
            By trajectory float32 ``[its turns]``, or None where those compared with it do not differ. A turn without a
            score has no advantage of its own.
        """
        values = [self._values(one) for one in scored]
        places: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        for i, own in enumerate(values):
            for t in np.flatnonzero(~np.isnan(own)):
                places.setdefault(self._key(scored[i], int(t)), []).append((i, int(t)))
        found: list[np.ndarray | None] = [None] * len(scored)
        for key, members in places.items():
            rewards = np.array([values[i][t] for i, t in members])
            if self.baseline == "rae":
                running = baselines if baselines is not None else Baselines()
                advantages: np.ndarray | None = rewards - running.update("/".join(key), rewards, self.rae_decay)
            else:
                noise = [scored[i].noise for i, _ in members]
                known = None if None in noise else np.array(noise, np.float64)
                advantages = self.advantages(rewards, known)
            if advantages is None:
                continue
            for (i, t), advantage in zip(members, advantages, strict=True):
                mine = found[i]
                if mine is None:
                    mine = found[i] = np.zeros(len(values[i]))
                mine[t] = advantage
        if self.scale == "batch_std":
            found = self._scaled(scored, found, values)
        return [None if own is None else self._spread(one, own) for one, own in zip(scored, found, strict=True)]

    def _values(self, one: Scored) -> np.ndarray:
        """What is compared: a number per turn, NaN where there is none, or one for the trajectory."""
        lost = np.zeros(len(one.response_tokens))
        if self.overlong is not None:
            lost = self.overlong.penalties(np.array(one.response_tokens))
        if one.turns is None:
            reward = one.reward + (float(lost.mean()) if len(lost) else 0.0)
            return np.full(len(lost) if "turn" in self.by else 1, reward)
        turns = np.asarray(one.turns, np.float64) + lost
        if self.turns != "return" or np.isnan(turns).all():
            return turns
        return self._summed(np.nan_to_num(turns))

    def _key(self, one: Scored, turn: int) -> tuple[str, ...]:
        parts = {"seed": str(one.seed), "role": one.role, "turn": str(turn)}
        return tuple(parts[name] for name in self.by if name != "seed" or self.baseline != "rae")

    def _compared(self, rewards: np.ndarray, noise: np.ndarray | None) -> np.ndarray | None:
        if self.baseline == "none":
            return rewards
        if len(rewards) < 2 or self._flat(rewards, noise):
            return None
        # GRPO (arXiv 2402.03300, section 4.1.2): A_i = (r_i - mean(r)) / std(r); Dr. GRPO (2503.20783) leaves std out.
        centred: np.ndarray = rewards - rewards.mean()
        if self.baseline == "leave_one_out":
            # RLOO (arXiv 2402.14740): r_i - mean of the n - 1 others = (r_i - mean of all) * n / (n - 1)
            centred *= len(rewards) / (len(rewards) - 1)
        if self.scale == "std":
            centred /= rewards.std(ddof=1)
        return centred

    def _flat(self, rewards: np.ndarray, noise: np.ndarray | None) -> bool:
        if np.ptp(rewards) <= self.min_spread:
            return True
        if noise is None or not self.noise_multiple:
            return False
        return bool(rewards.std(ddof=1) < self.noise_multiple * np.sqrt(np.mean(np.square(noise, dtype=np.float64))))

    def _scaled(
        self, scored: Sequence[Scored], found: Sequence[np.ndarray | None], compared: Sequence[np.ndarray]
    ) -> list[np.ndarray | None]:
        """Divided by the standard deviation over the step, of all or of the role; turns without a score are no part."""
        # REINFORCE++ (arXiv 2501.03262): A / std over the batch; one seat's rewards say nothing of another's spread.
        names = [one.role if "role" in self.by else "" for one in scored]
        pools: dict[str, list[np.ndarray]] = {}
        for name, own, values in zip(names, found, compared, strict=True):
            if own is not None:
                pools.setdefault(name, []).append(own[~np.isnan(values)])
        spreads = {name: float(np.concatenate(pool).std()) for name, pool in pools.items()}
        return [
            None if own is None or spreads[name] <= self.min_spread else own / spreads[name]
            for name, own in zip(names, found, strict=True)
        ]

    def _spread(self, one: Scored, own: np.ndarray) -> np.ndarray:
        """One float32 per turn."""
        if one.turns is not None and self.turns == "to_go":
            own = self._summed(own)
        return np.broadcast_to(own, len(one.response_tokens)).astype(np.float32)

    def _summed(self, turns: np.ndarray) -> np.ndarray:
        """Discounted sum over each turn and those after it."""
        out, total = np.empty(len(turns)), 0.0  # G_t = r_t + discount * G_(t+1), backwards
        for t in range(len(turns) - 1, -1, -1):
            total = turns[t] + self.discount * total
            out[t] = total
        return out


def imported_credit(place: str) -> Credit:
    """The rule at "package.module:name": a `Credit`, or a subclass that is made without arguments.

    Raises:
        ValueError: It cannot be imported, or is something else.
    """
    found = import_object(place, "credit")
    try:
        rule = found() if isinstance(found, type) and issubclass(found, Credit) else found
    except TypeError as cause:
        raise ValueError(f"credit {place!r} is not made without arguments ({cause}); name an object of it") from cause
    if not isinstance(rule, Credit):
        what = f"credit {place!r} is {type(rule).__name__}"
        raise ValueError(f"{what}; name a forge_agents.Credit, or a subclass of it")  # noqa: TRY004
    return rule
