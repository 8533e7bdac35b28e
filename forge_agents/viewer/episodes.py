"""One stored episode: what the list shows of it, and all that the page shows once it is open.

In: a row of ``episodes.jsonl``, of a training run or a benchmark. Out: a `Digest`, or plain values for JSON. Waits for
the disk where tokens become text, never for the network.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_agents.envs.env import writable
from forge_agents.models.resolve import is_builtin, resolve
from forge_agents.tools import parse_tool_calls

Decode = Callable[[str, Sequence[int]], "list[str] | None"]


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
            return _storable(_of_episode(row) if "trajectories" in row else _of_record(row))
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        raise ValueError(f"an episode with a damaged field ({type(cause).__name__}: {cause})") from cause
    raise ValueError("neither an episode of a training run nor a record of a benchmark")


def _storable(found: Digest) -> Digest:
    """The digest as SQLite takes it: text that can be written, integers of 64 bits."""
    fields = dataclasses.asdict(found)
    for name, value in fields.items():
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{name} has {value.bit_length()} bits")
        if isinstance(value, str):
            fields[name] = writable(value)
    return Digest(**fields)


def _of_episode(row: Mapping[str, Any]) -> Digest:
    trajectories: Mapping[str, Any] = row["trajectories"]
    rewards = {agent: _total_reward(trajectory) for agent, trajectory in trajectories.items()}
    turns = [turn for trajectory in trajectories.values() for turn in trajectory["turns"]]
    learners = set(row.get("trained") or ())
    counted = {a for a, t in trajectories.items() if t.get("policy") in learners} or set(trajectories)
    paid = row.get("rewards") or {}
    error = row.get("error") or {}
    said = (str(turn.get(part, "")) for turn in turns for part in ("observation", "action"))
    return Digest(
        step=int(row["step"]) if row.get("step") is not None else None,
        env=str(row["env_id"]),
        seed=int(row["seed"]),
        reward=_mean(rewards[agent] for agent in counted),
        trained=_mean(paid.get(agent) for agent in counted),
        turns=len(turns),
        tokens=sum(
            int(turn["usage"]["completion_tokens"]) if turn.get("usage") else len(turn.get("response_ids", ()))
            for turn in turns
        ),
        seconds=number(row.get("duration_s")) or 0.0,
        error=f"{error.get('where', '?')}: {error.get('kind', '?')}" if error else "",
        end=str(row.get("end_reason", "")),
        agents=json.dumps([[agent, str(t.get("policy", "")), rewards[agent]] for agent, t in trajectories.items()]),
        text="\n".join([row["env_id"], *said, *(str(error[key]) for key in ("kind", "message") if key in error)]),
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


def _total_reward(trajectory: Mapping[str, Any]) -> float:
    """What the environment gave an agent in all."""
    earned = (number(turn.get("reward")) or 0.0 for turn in trajectory["turns"])
    return math.fsum((number(trajectory.get("early_reward")) or 0.0, *earned))


def _mean(values: Iterable[Any]) -> float | None:
    known = [value for value in map(number, values) if value is not None]
    return math.fsum(known) / len(known) if known else None


def number(value: Any) -> float | None:
    """`value` as a finite float; None where it is missing, NaN or infinite."""
    try:
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
    except OverflowError:  # an int of 400 digits
        return None


def finite(value: Any, depth: int = 50) -> Any:
    """`value` with NaN and infinities as None, so that it is JSON for browsers too; cut off below `depth` levels."""
    if depth == 0:
        return "..."
    if isinstance(value, Mapping):
        return {str(key): finite(item, depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item, depth - 1) for item in value]
    return number(value) if isinstance(value, float) else value


def shown_episode(n: int, row: Mapping[str, Any], pieces: Decode) -> dict[str, Any]:
    """Episode `n` for the page: who sat where, and the turns in the order they happened.

    Args:
        row: As stored, whatever its version: what is missing is left out.
        pieces: Texts of the tokens of a policy, as `Pieces.of`.
    """
    brief = digest(row)
    names = ("step", "env", "seed", "reward", "trained", "seconds", "end")
    facts = {"n": n, **{name: getattr(brief, name) for name in names}}
    if "trajectories" not in row:
        seats = [{"agent": agent, "policy": player, **_seat(row, agent)} for agent, player in row["lineup"].items()]
        return {**facts, "error": {"message": row["error"]} if row.get("error") else None, "agents": seats, "turns": []}
    agents: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    for agent, trajectory in row["trajectories"].items():
        turns += _turns(row, agent, trajectory["turns"], pieces)
        agents.append(
            {
                "agent": agent,
                "policy": str(trajectory.get("policy", "")),
                "reward": _total_reward(trajectory),
                "trained": number((row.get("rewards") or {}).get(agent)),
                "instructions": str(trajectory.get("instructions", "")),
                "info": finite(trajectory.get("info") or {}),
            }
        )
    turns.sort(key=lambda turn: int(turn["index"]))
    return {**facts, "error": row.get("error"), "agents": agents, "turns": turns}


def _seat(row: Mapping[str, Any], agent: str) -> dict[str, Any]:
    """What a benchmark kept of a seat."""
    seat = dict(row["seats"].get(agent, {}))
    return {"reward": number(seat.pop("reward", None)), "facts": {k: v for k, v in seat.items() if k != "player"}}


def _turns(
    row: Mapping[str, Any], agent: str, turns: Sequence[Mapping[str, Any]], pieces: Decode
) -> Iterator[dict[str, Any]]:
    advantages = (row.get("advantages") or {}).get(agent) or []
    called, after_calls = 0.0, False
    for turn, advantage in itertools.zip_longest(turns, advantages[: len(turns)]):
        info, action = turn.get("info") or {}, str(turn.get("action", ""))
        total = number(info.get("tool_calls")) or 0.0  # of the episode so far
        calls = _calls(action, int(total - called))
        yield {
            "agent": agent,
            "index": int(turn["index"]),
            "observation": str(turn.get("observation", "")),
            "result": after_calls,
            "action": action,
            "calls": calls,
            "reward": number(turn.get("reward")),
            "advantage": number(advantage),
            "ids": list(turn.get("response_ids", ())),
            "pieces": pieces(str(turn.get("policy", "")), turn["response_ids"]) if turn.get("response_ids") else [],
            "logprobs": [number(value) for value in turn.get("logprobs", ())],
            "versions": [[span["version"], span["start"], span["end"]] for span in turn.get("versions", ())],
            "finish": str(turn.get("finish_reason", "")),
            "ended": "terminated" if turn.get("terminated") else "truncated" if turn.get("truncated") else "",
            "seconds": number(turn.get("generate_s")),
            "info": finite(info),
        }
        called, after_calls = max(called, total), bool(calls)


def _calls(action: str, count: int) -> list[dict[str, Any]]:
    """The tool calls that a turn made; none where the environment ran none."""
    if count <= 0:
        return []
    found = [{"name": call.name, "arguments": finite(call.arguments)} for call in parse_tool_calls(action)[:count]]
    return found or [{"name": "", "arguments": {}}]


class Pieces:
    """The text of single tokens, as the tokenizers of a run's policies write them.

    Args:
        folder: The run's folder; its exported models come first.
        models: Model by policy, as the run's settings name them.
    """

    def __init__(self, folder: Path, models: Mapping[str, str]) -> None:
        self._folder, self._models = folder, dict(models)
        self._tokenizer = functools.lru_cache(maxsize=16)(self._load)

    def of(self, policy: str, ids: Sequence[int]) -> list[str] | None:
        """One text per id; None where the tokenizer is not on this machine.

        Joined they are the response. A character that several tokens spell stands in the last of them, the others are
        empty.
        """
        tokenizer = self._tokenizer(policy)
        if tokenizer is None:
            return None
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        try:
            return [stream.step(tokenizer, token) or "" for token in ids]
        except (OverflowError, TypeError, ValueError):
            return None  # ids of another tokenizer

    def _load(self, policy: str) -> Any:
        from tokenizers import Tokenizer

        file = next((file for file in self._candidates(policy) if file.is_file()), None)
        return Tokenizer.from_file(str(file)) if file else None

    def _candidates(self, policy: str) -> Iterator[Path]:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        export, model = self._folder / "export", self._models.get(policy, "")
        if "/" not in policy and policy not in ("", ".", ".."):  # a stranger's file says what policies are called
            yield export / policy / "tokenizer.json"
        if len(self._models) == 1:
            yield export / "tokenizer.json"
        if is_builtin(model):
            yield resolve(model) / "tokenizer.json"
        elif model:
            yield Path(model).expanduser() / "tokenizer.json"
            try:
                cached = try_to_load_from_cache(model, "tokenizer.json")
            except HFValidationError:
                return
            if isinstance(cached, str):
                yield Path(cached)
