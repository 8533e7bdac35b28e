"""A stored episode of a training run or a benchmark as plain values for the page. Needs no network."""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forge_agents.episodes.stored import digest, finite, total_reward
from forge_agents.http_body import MAX_MODEL_BRACKETS, MAX_MODEL_COMMAS, bounded_json
from forge_agents.jsonl import number
from forge_agents.models.resolve import is_builtin, resolve
from forge_agents.models.tokenizer_file import check_growth, parts
from forge_agents.tools import parse_tool_calls

_MAX_TOKENIZER_BYTES = 1 << 26
_NOT_DECODED = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "truncation", "padding"))
"""Parts of a tokenizer that only encode texts. Loading one that lengthens texts may take all memory."""
_MAX_DECODERS = 8
_MAX_PENDING = 16
"""Maximum number of tokens that form one character."""
_MAX_CHARS, _CHARS_PER_TOKEN = 4000, 32
"""Maximum length of a turn's texts, and its growth per token. Longer turns are shown without the texts of tokens."""
_MAX_S, _S_PER_TOKEN = 5.0, 5e-5
"""Maximum computation for all turns of a run, and its growth per token. A token usually takes 5 us."""
Decode = Callable[[str, Sequence[int]], "list[str] | None"]


def shown_episode(n: int, row: Mapping[str, Any], pieces: Decode) -> dict[str, Any]:
    """Return episode `n` for the page: agents with their policies, and turns in order, with the texts of `pieces`."""
    brief = digest(row)
    names = ("step", "env", "seed", "reward", "trained", "seconds", "end")
    facts = {"n": n, **{name: getattr(brief, name) for name in names}}
    if "trajectories" not in row:
        results = [{"agent": agent, "policy": name, **_result(row, agent)} for agent, name in row["lineup"].items()]
        error = {"message": row["error"]} if row.get("error") else None
        return {**facts, **finite({"error": error, "agents": results}), "turns": []}
    agents: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    for agent, trajectory in row["trajectories"].items():
        turns += _turns(row, agent, trajectory, pieces)
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
    return {**facts, "error": finite(row.get("error")), "agents": agents, "turns": turns}


def _result(row: Mapping[str, Any], agent: str) -> dict[str, Any]:
    """Return the benchmark result of an agent."""
    facts = dict(row["seats"].get(agent, {}))
    return {"reward": number(facts.pop("reward", None)), "facts": {k: v for k, v in facts.items() if k != "player"}}


def _turns(
    row: Mapping[str, Any], agent: str, trajectory: Mapping[str, Any], pieces: Decode
) -> Iterator[dict[str, Any]]:
    turns: Sequence[Mapping[str, Any]] = trajectory["turns"]
    sessions = dict(enumerate(trajectory.get("session_rewards") or ()))
    advantages = (row.get("advantages") or {}).get(agent) or []
    alternatives = _alternatives(row, agent)
    previous_calls = 0.0
    with_calls: set[int] = set()
    for turn, position, advantage in itertools.zip_longest(turns, _positions(turns), advantages[: len(turns)]):
        info, action = turn.get("info") or {}, str(turn.get("action", ""))
        total_calls = number(info.get("tool_calls")) or 0.0  # of the episode so far
        calls = _calls(turn, int(total_calls - previous_calls))
        yield {
            "agent": agent,
            **position,
            "observation": str(turn.get("observation", "")),
            "result": position["after"] in with_calls,
            "reasoning": str(turn.get("reasoning", "")),
            "reasoning_tokens": int(number(turn.get("reasoning_tokens")) or 0),
            "action": action,
            "left_out": str((turn.get("compaction") or {}).get("text", "")),
            "calls": calls,
            "reward": number(turn.get("reward")),
            "session_reward": number(sessions.get(int(number(turn.get("session")) or 0))),
            "advantage": number(advantage),
            "alternatives": alternatives.get(position["index"], []),
            "ids": finite(list(turn.get("response_ids", ()))),
            "pieces": pieces(str(turn.get("policy", "")), turn["response_ids"]) if turn.get("response_ids") else [],
            "logprobs": [number(value) for value in turn.get("logprobs", ())],
            "versions": finite([[span["version"], span["start"], span["end"]] for span in turn.get("versions", ())]),
            "finish": str(turn.get("finish_reason", "")),
            "ended": "terminated" if turn.get("terminated") else "truncated" if turn.get("truncated") else "",
            "seconds": number(turn.get("generate_s")),
            "info": finite(info),
        }
        previous_calls = max(previous_calls, total_calls)
        with_calls |= {position["index"]} if calls else set()


def _alternatives(row: Mapping[str, Any], agent: str) -> dict[float | None, list[float | None]]:
    """Return the agent's rewards in the alternatives of counterfactual credit, by index of the turn. None: failed."""
    rewards: dict[float | None, list[float | None]] = {}
    listed = row.get("alternatives")
    for one in listed if isinstance(listed, list) else ():
        of_agents = one.get("rewards") if isinstance(one, Mapping) else None
        if isinstance(of_agents, Mapping):
            rewards.setdefault(number(one.get("turn")), []).append(number(of_agents.get(agent)))
    return rewards


def _positions(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the positions of an agent's turns in the tree of its conversations.

    Returns:
        For each turn ``index``, ``branch``, ``after`` (index of the turn that it continues, None at the start of a
        conversation) and ``depth`` (number of forks before its branch).
    """
    last: dict[float, int] = {}
    branches: dict[float, float] = {}
    depths: dict[float, int] = {}
    positions = []
    for turn in turns:
        index, branch, fork = int(turn["index"]), number(turn.get("branch")) or 0, number(turn.get("forked_from"))
        after = last.get(branch, int(fork) if fork in branches else None)
        if branch not in depths:
            depths[branch] = 0 if after is None else depths[branches[after]] + 1
        last[branch], branches[index] = index, branch
        positions.append({"index": index, "branch": branch, "after": after, "depth": depths[branch]})
    return positions


def _calls(turn: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the tool calls of a turn. Empty if the environment ran none."""
    if count <= 0:
        return []
    stored: Any = turn.get("tool_calls")
    if not isinstance(stored, list) or not stored:  # an older version, or an environment that parses calls itself
        stored = [asdict(call) for call in parse_tool_calls(str(turn.get("action", "")))]
    calls = [call for call in stored[:count] if isinstance(call, Mapping)]
    shown = [{"name": str(call.get("name", "")), "arguments": finite(call.get("arguments") or {})} for call in calls]
    return shown or [{"name": "", "arguments": {}}]


class Pieces:
    """Texts of single tokens, by the tokenizers of a run's policies.

    Args:
        folder: Folder of the run. The tokenizers of its exported models take precedence.
        models: Models of the run's settings, by policy.
    """

    def __init__(self, folder: Path, models: Mapping[str, str]) -> None:
        self._folder, self._models = folder, dict(models)
        self._tokenizer = functools.lru_cache(maxsize=16)(self._load)
        self._max_s = _MAX_S

    def of(self, policy: str, ids: Sequence[int]) -> list[str] | None:
        """Return one text per token, or None if the tokenizer is not on this machine.

        The joined texts are the response. A character of several tokens belongs to the last of them, and the other
        texts are empty.
        """
        tokenizer = self._tokenizer(policy)
        if tokenizer is None or self._max_s < 0:
            return None
        from tokenizers.decoders import DecodeStream

        texts: list[str] = []
        pending: list[int] = []
        stream, size, start = DecodeStream(skip_special_tokens=False), 0, time.thread_time()
        max_chars = _MAX_CHARS + _CHARS_PER_TOKEN * len(ids)
        max_s = self._max_s = self._max_s + _S_PER_TOKEN * len(ids)
        try:
            for token in ids:
                text = stream.step(tokenizer, token)
                pending = [] if text else [*pending, token]
                if len(pending) > _MAX_PENDING:  # a stream takes quadratic time for tokens that form no character
                    text = tokenizer.decode(pending, skip_special_tokens=False)
                    stream, pending = DecodeStream(skip_special_tokens=False), []
                texts.append(text or "")
                size += len(texts[-1])
                if size > max_chars or time.thread_time() - start > max_s:
                    return None
        except (OverflowError, TypeError, ValueError):
            return None  # tokens of another tokenizer
        finally:
            self._max_s -= time.thread_time() - start
        return texts

    def _load(self, policy: str) -> Any:
        """Return the tokenizer of a policy. None if there is none, or if its texts could be very long."""
        from tokenizers import Tokenizer

        try:
            file = next((file for file in self._candidates(policy) if file.is_file()), None)
            if file is None or file.stat().st_size > _MAX_TOKENIZER_BYTES:
                return None
            settings = {**bounded_json(file.read_bytes(), MAX_MODEL_BRACKETS, MAX_MODEL_COMMAS), **_NOT_DECODED}
            decoders = list(parts(settings.get("decoder")))
            if len(decoders) > _MAX_DECODERS or any(map(_lengthens, decoders)):
                return None
            check_growth(file, settings)
            return Tokenizer.from_str(json.dumps(settings))
        except Exception:  # noqa: BLE001  # the library raises this for invalid files; names may be no paths
            return None

    def _candidates(self, policy: str) -> Iterator[Path]:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        export, model = self._folder / "export", self._models.get(policy, "")
        if "/" not in policy and policy not in ("", ".", ".."):  # names come from a file that may be a stranger's
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


def _lengthens(decoder: Mapping[str, Any]) -> bool:
    """Return whether a decoder may multiply the length of a text, or searches a pattern, which may take very long."""
    if decoder["type"] != "Replace":
        return False
    replaced = decoder["pattern"].get("String")
    return replaced is None or len(decoder["content"]) > len(replaced)
