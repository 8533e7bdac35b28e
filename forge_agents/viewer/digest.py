"""What the list of episodes shows of each, and what a search looks through.

In: one row of ``episodes.jsonl``, of a training run or a benchmark. Out: a `Digest`. Waits for nothing.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forge_agents.envs.env import writable


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """One stored episode in brief."""

    step: int | None
    """Training step; None in a benchmark."""
    env: str
    seed: int
    reward: float | None
    """Mean of the environment's reward over the seats of policies that learn, or over all where none does or the row
    does not say; None where there is none."""
    trained: float | None
    """The same of what was trained on, abstentions left out; None where there is nothing."""
    turns: int
    tokens: int
    """Sampled by models."""
    seconds: float
    error: str
    """Empty, or where it failed and the exception's name."""
    end: str
    agents: str
    """JSON: agent, policy or player, reward, in the order of seats."""
    text: str
    """All that was said, for the search."""


def digest(row: Any) -> Digest:
    """The digest of one row.

    Fields that a version of the format lacks are left empty; what does not look like an episode at all is refused.

    Raises:
        ValueError: It is no episode of a form that is known here.
    """
    try:
        if "trajectories" in row or "lineup" in row:
            found = _of_episode(row) if "trajectories" in row else _of_record(row)
            return _storable(found)
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        raise ValueError(f"an episode with a damaged field ({type(cause).__name__}: {cause})") from cause
    raise ValueError("neither an episode of a training run nor a record of a benchmark")


def number(value: Any) -> float | None:
    """`value` as a finite float; None where it is missing, NaN or infinite."""
    try:
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
    except OverflowError:  # an int of 400 digits
        return None


def total_reward(trajectory: Mapping[str, Any]) -> float:
    """What the environment gave an agent in all."""
    earned = (number(turn.get("reward")) or 0.0 for turn in trajectory["turns"])
    return math.fsum((number(trajectory.get("early_reward")) or 0.0, *earned))


def _storable(found: Digest) -> Digest:
    """The digest as SQLite takes it: text that can be written, integers of 64 bits."""
    fields: dict[str, Any] = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    for name, value in fields.items():
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{name} has {value.bit_length()} bits")
        if isinstance(value, str):
            fields[name] = writable(value)
    return Digest(**fields)


def _of_episode(row: Mapping[str, Any]) -> Digest:
    trajectories: Mapping[str, Any] = row["trajectories"]
    rewards = {agent: total_reward(trajectory) for agent, trajectory in trajectories.items()}
    turns = [turn for trajectory in trajectories.values() for turn in trajectory["turns"]]
    learners = set(row.get("trained") or ())
    counted = {a for a, t in trajectories.items() if t.get("policy") in learners} or set(trajectories)
    paid = row.get("rewards") or {}
    error = row.get("error") or {}
    return Digest(
        step=int(row["step"]) if row.get("step") is not None else None,
        env=str(row["env_id"]),
        seed=int(row["seed"]),
        reward=_mean(rewards[agent] for agent in counted),
        trained=_mean(paid.get(agent) for agent in counted),
        turns=len(turns),
        tokens=sum(_sampled(turn) for turn in turns),
        seconds=number(row.get("duration_s")) or 0.0,
        error=f"{error.get('where', '?')}: {error.get('kind', '?')}" if error else "",
        end=str(row.get("end_reason", "")),
        agents=json.dumps([[agent, str(t.get("policy", "")), rewards[agent]] for agent, t in trajectories.items()]),
        text="\n".join(_said(row["env_id"], turns, error)),
    )


def _of_record(row: Mapping[str, Any]) -> Digest:
    seats: Mapping[str, Any] = row["seats"]
    rewards = {agent: number(seat.get("reward")) for agent, seat in seats.items()}
    error = str(row.get("error", ""))
    return Digest(
        step=None,
        env=str(row["env"]),
        seed=int(row["seed"]),
        reward=_mean(rewards.values()),
        trained=None,
        turns=sum(int(seat.get("decisions", 0)) for seat in seats.values()),
        tokens=sum(int(seat.get("tokens", 0)) for seat in seats.values()),
        seconds=number(row.get("seconds")) or 0.0,
        error=": ".join(error.split(": ")[:2]),
        end=str(row.get("end", "")),
        agents=json.dumps([[agent, str(player), rewards.get(agent)] for agent, player in row["lineup"].items()]),
        text="\n".join([str(row["env"]), error, *map(str, row["lineup"].values())]),
    )


def _sampled(turn: Mapping[str, Any]) -> int:
    usage = turn.get("usage")
    return int(usage["completion_tokens"]) if usage else len(turn.get("response_ids", ()))


def _said(env_id: str, turns: Iterable[Mapping[str, Any]], error: Mapping[str, Any]) -> Iterator[str]:
    yield env_id
    for turn in turns:
        yield str(turn.get("observation", ""))
        yield str(turn.get("action", ""))
    yield from (str(error[key]) for key in ("kind", "message") if key in error)


def _mean(values: Iterable[Any]) -> float | None:
    known = [value for value in map(number, values) if value is not None]
    return math.fsum(known) / len(known) if known else None
