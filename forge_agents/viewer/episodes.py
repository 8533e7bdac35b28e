"""One stored episode: all that the page shows once it is open.

In: a row of ``episodes.jsonl``, of a training run or a benchmark. Out: plain values for JSON. Waits for the disk where
tokens become text, never for the network.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forge_agents.episodes.stored import digest, finite, number, total_reward
from forge_agents.models.resolve import is_builtin, resolve
from forge_agents.tools import parse_tool_calls

Decode = Callable[[str, Sequence[int]], "list[str] | None"]


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
                "reward": total_reward(trajectory),
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
    called = 0.0
    calling: set[int] = set()  # turns that made calls
    for turn, place, advantage in itertools.zip_longest(turns, _places(turns), advantages[: len(turns)]):
        info, action = turn.get("info") or {}, str(turn.get("action", ""))
        total = number(info.get("tool_calls")) or 0.0  # of the episode so far
        calls = _calls(turn, int(total - called))
        yield {
            "agent": agent,
            **place,
            "observation": str(turn.get("observation", "")),
            "result": place["after"] in calling,
            "reasoning": str(turn.get("reasoning", "")),
            "reasoning_tokens": int(number(turn.get("reasoning_tokens")) or 0),
            "action": action,
            "left_out": str((turn.get("compaction") or {}).get("text", "")),
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
        called = max(called, total)
        calling |= {place["index"]} if calls else set()


def _places(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where the turns of a seat stand in the tree of its conversations.

    Returns:
        Of each its ``index``, its ``branch``, ``after``: the index of the turn that it goes on from, None where it
        begins a conversation, and ``depth``: how often its branch and those before it left another.
    """
    last: dict[float, int] = {}
    branches: dict[float, float] = {}
    depths: dict[float, int] = {}
    placed = []
    for turn in turns:
        index, branch, fork = int(turn["index"]), number(turn.get("branch")) or 0, number(turn.get("forked_from"))
        after = last.get(branch, int(fork) if fork in branches else None)
        if branch not in depths:
            depths[branch] = 0 if after is None else depths[branches[after]] + 1
        last[branch], branches[index] = index, branch
        placed.append({"index": index, "branch": branch, "after": after, "depth": depths[branch]})
    return placed


def _calls(turn: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The tool calls that a turn made; none where the environment ran none."""
    if count <= 0:
        return []
    told: Any = turn.get("tool_calls")
    if not isinstance(told, list) or not told:  # of an earlier version, or an environment that reads calls by itself
        told = [asdict(call) for call in parse_tool_calls(str(turn.get("action", "")))]
    calls = [call for call in told[:count] if isinstance(call, Mapping)]
    found = [{"name": str(call.get("name", "")), "arguments": finite(call.get("arguments") or {})} for call in calls]
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
