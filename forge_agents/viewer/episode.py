"""One stored episode as the page shows it: who sat where, and the turns in the order they happened.

In: a row of ``episodes.jsonl``. Out: plain values for JSON. Waits for nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forge_agents.tools import parse_tool_calls
from forge_agents.viewer.digest import digest, number, total_reward

Decode = Callable[[str, Sequence[int]], "list[str] | None"]


def shown_episode(n: int, row: Mapping[str, Any], pieces: Decode) -> dict[str, Any]:
    """Episode `n` for the page.

    Args:
        row: As stored, whatever its version: what is missing is left out.
        pieces: Texts of the tokens of a policy, as `Pieces.of`.
    """
    brief = digest(row)
    facts = {
        "n": n,
        "step": brief.step,
        "env": brief.env,
        "seed": brief.seed,
        "reward": brief.reward,
        "trained": brief.trained,
        "seconds": brief.seconds,
        "end": brief.end,
    }
    if "trajectories" not in row:
        seats = [{"agent": agent, "policy": player, **_seat(row, agent)} for agent, player in row["lineup"].items()]
        return {**facts, "error": {"message": row["error"]} if row.get("error") else None, "agents": seats, "turns": []}
    trajectories = row["trajectories"]
    turns = [
        turn for agent, trajectory in trajectories.items() for turn in _turns(row, agent, trajectory["turns"], pieces)
    ]
    agents = [_agent(row, agent, trajectory) for agent, trajectory in trajectories.items()]
    turns.sort(key=lambda turn: int(turn["index"]))
    return {**facts, "error": row.get("error"), "agents": agents, "turns": turns}


def _seat(row: Mapping[str, Any], agent: str) -> dict[str, Any]:
    """What a benchmark kept of a seat."""
    seat = dict(row["seats"].get(agent, {}))
    return {"reward": number(seat.pop("reward", None)), "facts": {k: v for k, v in seat.items() if k != "player"}}


def _agent(row: Mapping[str, Any], agent: str, trajectory: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "agent": agent,
        "policy": str(trajectory.get("policy", "")),
        "reward": total_reward(trajectory),
        "trained": number((row.get("rewards") or {}).get(agent)),
        "instructions": str(trajectory.get("instructions", "")),
        "info": finite(trajectory.get("info") or {}),
    }


def _turns(
    row: Mapping[str, Any], agent: str, turns: Sequence[Mapping[str, Any]], pieces: Decode
) -> list[dict[str, Any]]:
    advantages = (row.get("advantages") or {}).get(agent) or []
    shown: list[dict[str, Any]] = []
    called = 0.0
    for turn, advantage in itertools.zip_longest(turns, advantages[: len(turns)]):
        info = turn.get("info") or {}
        calls, after_calls = number(info.get("tool_calls")) or 0.0, bool(shown and shown[-1]["calls"])
        shown.append(
            {
                "agent": agent,
                "index": int(turn["index"]),
                "observation": str(turn.get("observation", "")),
                "result": after_calls,
                "action": str(turn.get("action", "")),
                "calls": _calls(str(turn.get("action", "")), int(calls - called)),
                "reward": number(turn.get("reward")),
                "advantage": number(advantage),
                "prompt_tokens": len(turn.get("prompt_ids", ())),
                "ids": list(turn.get("response_ids", ())),
                "pieces": pieces(str(turn.get("policy", "")), turn["response_ids"]) if turn.get("response_ids") else [],
                "logprobs": [number(value) for value in turn.get("logprobs", ())],
                "versions": [[span["version"], span["start"], span["end"]] for span in turn.get("versions", ())],
                "finish": str(turn.get("finish_reason", "")),
                "ended": "terminated" if turn.get("terminated") else "truncated" if turn.get("truncated") else "",
                "seconds": number(turn.get("generate_s")),
                "info": finite(info),
            }
        )
        called = max(called, calls)
    return shown


def _calls(action: str, count: int) -> list[dict[str, Any]]:
    """The tool calls that a turn made; none where the environment ran none."""
    if count <= 0:
        return []
    found = [{"name": call.name, "arguments": finite(call.arguments)} for call in parse_tool_calls(action)[:count]]
    return found or [{"name": "", "arguments": {}}]


def finite(value: Any, depth: int = 50) -> Any:
    """`value` with NaN and infinities as None, so that it is JSON for browsers too; cut off below `depth` levels."""
    if depth == 0:
        return "..."
    if isinstance(value, Mapping):
        return {str(key): finite(item, depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item, depth - 1) for item in value]
    return number(value) if isinstance(value, float) else value
