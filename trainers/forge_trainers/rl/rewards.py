"""Rewards: the environment's own, several at once, and questions about the rewards inside a reward."""

from __future__ import annotations

import logging
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_agents.display import printable
from forge_agents.errors import USER_ERRORS, ArgumentError
from forge_agents.types import Reward, Trajectory
from forge_verifiers.core.functions import name_of
from forge_verifiers.core.verifier import (
    Assessment,
    Composable,
    EnvReward,
    as_floats,
    declared_judges,
    load_nested,
    nested_state,
    reward_of,
)

if TYPE_CHECKING:
    from forge_trainers.run.parts import OwnEngine, OwnModel

_log = logging.getLogger(__name__)


def env_reward(trajectories: Sequence[Trajectory]) -> np.ndarray:
    """Return the environment's total reward of each trajectory, float32 ``[n]``."""
    return np.array([trajectory.reward for trajectory in trajectories], dtype=np.float32)


class EnvTurnReward:
    """The environment's own reward, turn by turn.

    A reward that arrives before an agent's first turn counts in the total only.
    """

    name = "env_turn_reward"

    def __call__(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
        """Return total rewards, float32 ``[n]``."""
        return env_reward(trajectories)

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """Return total rewards and the reward of every turn, of any range."""
        turns = [np.array([turn.reward for turn in t.turns], np.float32) for t in trajectories]
        return Assessment(scores=env_reward(trajectories), turns=turns)


def is_env_reward(reward: Reward) -> bool:
    """Return whether a reward is the environment's own."""
    return reward is env_reward or isinstance(reward, EnvTurnReward)


def reward_name(reward: Reward) -> str:
    """Return the name of a reward for users: "environment" for the environment's own."""
    return "environment" if is_env_reward(reward) else str(getattr(reward, "name", None) or name_of(reward))


class MultiReward:
    """Several rewards. The advantages of each are computed separately and then added (GDPO, arXiv 2601.05242).

    Summing the rewards first makes (format 1, answer 0) indistinguishable from (format 0, answer 1), and the reward
    with the largest variance dominates. Departure: the paper also normalizes the sum of advantages over the batch.

    If one reward abstains (NaN or None), the trajectory still learns from the others. Trajectories with this reward are
    compared with each other. The total is the weighted sum of the rewards that did not abstain, or NaN if all did.

    Args:
        rewards: By name: functions from trajectories to float ``[n]``, or objects with an ``assess`` method.
        weights: Finite weights of the advantages and of the total reward. Default 1.
    """

    name = "multi_reward"

    def __init__(
        self, rewards: Mapping[str, Callable[[Sequence[Trajectory]], Any]], weights: Mapping[str, float] | None = None
    ) -> None:
        if not rewards or not isinstance(rewards, Mapping):
            raise ValueError(f"MultiReward needs a dict of at least one reward, got {reprlib.repr(rewards)}")
        if nested := [name for name, reward in rewards.items() if isinstance(reward, MultiReward)]:
            raise ValueError(f"reward {nested[0]!r} is a MultiReward inside a MultiReward. Pass all rewards to one")
        if not all(name in rewards and _is_weight(weight) for name, weight in (weights or {}).items()):
            raise ValueError(f"weights={weights} must be finite numbers for the rewards {', '.join(rewards)} only")
        self._rewards = {name: reward_of(reward) for name, reward in rewards.items()}
        self.weights = {name: float((weights or {}).get(name, 1.0)) for name in rewards}
        """Weights by name, in order."""

    def parts(self) -> Mapping[str, Any]:
        """Return the rewards by name."""
        return self._rewards

    def __call__(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
        """Return weighted sums, float32 ``[n]``, of the rewards that did not abstain, or NaN where all did."""
        scores = {name: assess(reward, trajectories, name).scores for name, reward in self._rewards.items()}
        return weighted_sum([(self.weights[name], values) for name, values in scores.items()])

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the state of the rewards, under ``name/``."""
        return nested_state(self._rewards)  # type: ignore[arg-type]  # any reward may have a state

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state_dict`."""
        load_nested(self._rewards, state, owner=self.name)  # type: ignore[arg-type]  # as above


def _is_weight(value: Any) -> bool:
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _inner(reward: Any) -> tuple[list[Any], bool]:
    """Return the rewards directly inside a reward, and whether it is an ensemble."""
    if isinstance(reward, Composable) and (verifiers := getattr(reward, "verifiers", ())):
        return [*verifiers], True
    parts = getattr(reward, "parts", None) if isinstance(reward, MultiReward | Composable) else None
    return ([*parts().values()] if callable(parts) else []), False


def leaf_rewards(reward: Any) -> Iterator[tuple[Any, bool]]:
    """Yield the rewards at the leaves of sums, ensembles and `MultiReward`, each with whether an ensemble holds it."""
    inner, is_ensemble = _inner(reward)
    if not inner:
        yield reward, False
    for part in inner:
        yield from ((leaf, is_ensemble or in_ensemble) for leaf, in_ensemble in leaf_rewards(part))


def all_rewards(reward: Any) -> Iterator[Any]:
    """Yield a reward and everything inside: parts of sums and of `MultiReward`, and verifiers of ensembles."""
    yield reward
    for part in _inner(reward)[0]:
        yield from all_rewards(part)


def compares_groups(reward: Any) -> bool:
    """Return whether a part of `reward` compares the episodes of a group, as `SelfConsistency` does.

    An ensemble counts by its verifiers: the ensemble itself scores each episode alone.
    """
    parts = [part for part in all_rewards(reward) if not hasattr(part, "verifiers")]
    leaves = (part for part in parts if not callable(getattr(part, "parts", None)))
    return any(getattr(part, "sees_groups", False) for part in leaves)


def check_env_rewards(reward: Any, max_rewards: Mapping[str, float | None]) -> None:
    """Raise ArgumentError if an environment pays more than the range of an `EnvReward` allows.

    `max_rewards` is the maximum reward of an agent, by environment, or None if the environment does not declare it.
    """
    for leaf, _ in leaf_rewards(reward):
        for env_id, high in max_rewards.items():
            if isinstance(leaf, EnvReward) and not leaf.clip and high is not None and high > leaf.high + leaf.rounding:
                raise ArgumentError(f"{env_id}: {leaf.range_error(leaf.low, high)}")


def max_reward_of(reward: Any, env_max: float | None) -> float | None:
    """Return the maximum of `reward` if the environment pays at most `env_max`, or None if it is unknown.

    Exact verifiers give 1, an `EnvReward` its share of the environment's maximum, and a sum the weighted sum. A graded
    verifier, such as a judge or an ensemble, may never give its highest score, so its maximum is unknown. Any other
    reward may declare a ``max_reward``.
    """
    from forge_verifiers.core.verifier import Verifier, terms_of

    if is_env_reward(reward):
        return env_max
    if (declared := getattr(reward, "max_reward", None)) is not None:
        return float(declared)
    terms = terms_of(reward) if isinstance(reward, Verifier) else ()
    total = 0.0
    for weight, verifier in terms:
        if isinstance(verifier, EnvReward) and env_max is not None:
            total += weight * min(1.0, (env_max - verifier.low) / (verifier.high - verifier.low))
        elif getattr(verifier, "exact", False):
            total += weight
        else:
            return None
    return total if terms else None


def engines_of(reward: Any) -> list[OwnEngine]:
    """Return the engines that the judges of a reward start themselves, without duplicates. A run places them."""
    return _attributes(reward, "own_engine")


def models_of(reward: Any) -> list[OwnModel]:
    """Return the models that verifiers of a reward load into this process, without duplicates."""
    return _attributes(reward, "own_model")


def _attributes(reward: Any, attribute: str) -> list[Any]:
    """Collect an attribute of all verifiers of a reward, including those in ``judges`` of a user's function."""
    values: dict[int, Any] = {}
    queue, visited = [leaf for leaf, _ in leaf_rewards(reward)], set[int]()
    while queue:
        leaf = queue.pop(0)
        if id(leaf) in visited:
            continue
        visited.add(id(leaf))
        if (value := getattr(leaf, attribute, None)) is not None:
            values[id(value)] = value
        queue += [inner for verifier in declared_judges(leaf) for inner, _ in leaf_rewards(verifier)]
    return [*values.values()]


def weighted_sum(parts: Sequence[tuple[float, np.ndarray]]) -> np.ndarray:
    """Return the weighted sum float32 ``[n]`` of the scores that are not NaN, or NaN where all are."""
    scores = np.stack([weight * np.asarray(values, np.float32) for weight, values in parts])
    return np.where(np.isnan(scores).all(axis=0), np.nan, np.nansum(scores, axis=0)).astype(np.float32)


def assess(reward: Reward, trajectories: Sequence[Trajectory], name: str) -> Assessment:
    """Call `reward` and check the result. Raises TypeError or ValueError unless it is one number per trajectory."""
    if not trajectories:
        return Assessment(scores=np.empty(0, np.float32))
    method = getattr(reward, "assess", None)
    try:
        result = method(trajectories) if callable(method) else Assessment(scores=reward(trajectories))
    except USER_ERRORS as error:
        if not isinstance(error, Exception):  # SystemExit would end the program without a reason
            raise RuntimeError(f"reward {name} raised {type(error).__name__}: {error}") from error  # noqa: TRY004
        error.add_note(f"reward {name} raised this for a batch of {len(trajectories)} trajectories")
        raise
    noise = None if result.noise is None else np.asarray(result.noise, np.float32)
    turns = None if result.turns is None else [_finite(values) for values in result.turns]
    if failed := getattr(result, "failed", None):
        share, cause = f"{len(failed)} of {len(trajectories)} trajectories", printable(next(iter(failed.values())))
        _log.warning("reward %s fails on %s. They have no reward and count as abstained: %s", name, share, cause)
    if turns is not None and [len(values) for values in turns] != [len(t.turns) for t in trajectories]:
        raise ValueError(f"reward {name} returned a wrong number of turn scores. Return one score per turn")
    scores = _checked(result.scores, trajectories, name)
    if noise is not None and noise.shape != scores.shape:
        raise ValueError(f"reward {name} returned noise of shape {noise.shape}. Return one number per score")
    return Assessment(scores=scores, noise=noise, turns=turns)


def _checked(returned: Any, trajectories: Sequence[Trajectory], name: str) -> np.ndarray:
    try:
        scores = _finite(returned)
        shape = f"shape {scores.shape}"
    except (TypeError, ValueError):
        scores, shape = np.empty(0), reprlib.repr(returned)
    if scores.shape != (len(trajectories),):
        raise ValueError(
            f"reward {name} returned {shape} for {len(trajectories)} trajectories. Return one number each"
        ) from None
    if infinite := int(np.isnan(scores).sum() - np.isnan(np.asarray(as_floats(returned), np.float64)).sum()):
        _log.warning(
            "reward %s returned %d infinite scores. They count as abstained. Return finite numbers, or NaN to abstain",
            name,
            infinite,
        )
    return scores


def _finite(values: Any) -> np.ndarray:
    """Return float32 with NaN in place of infinities, so that one overflow costs a trajectory and not the run."""
    with np.errstate(over="ignore"):
        array = np.asarray(as_floats(values), np.float32)
    return np.where(np.isinf(array), np.float32(np.nan), array)
