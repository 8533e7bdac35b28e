"""Stored episodes of runs and benchmarks, one per line of ``episodes.jsonl``: summaries and an `EpisodeTable`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, overload

from forge_agents.display import visible
from forge_agents.envs.env import writable
from forge_agents.errors import RunFolderError, did_you_mean
from forge_agents.files import check_plain_files, user_path
from forge_agents.http_body import too_many_values
from forge_agents.jsonl import number
from forge_agents.settings import named_arguments
from forge_agents.types import Episode, total_tokens

EPISODES = "episodes.jsonl"
"""The file's name in the folder of a run or a benchmark."""


MAX_LINE_BYTES = 1 << 28
"""Maximum size of an episode that is read. A sparse file may have lines of any size."""
MAX_LINE_COMMAS = 20_000_000
"""Maximum number of commas in a line: a hundred turns of 100,000 tokens each have half as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """Summary of a stored episode."""

    step: int | None
    """Training step, or None in a benchmark."""
    env: str
    seed: int
    reward: float | None
    """Mean environment reward over the agents of trained policies, or over all agents if none is trained, or
    None if there is no reward."""
    trained: float | None
    """The same mean of the training rewards, without abstentions, or None if there are none."""
    turns: int
    tokens: int
    """Number of tokens sampled by models."""
    seconds: float
    error: str
    """Place of the failure and name of the exception. Empty if the episode did not fail."""
    end: str
    agents: str
    """JSON list of agent, policy or player, and reward, in the order of agents."""
    text: str
    """All texts of the episode, for full-text search."""


def digest(row: Any) -> Digest:
    """Summarize one row. Fields that a version of the format lacks stay empty.

    Raises:
        ValueError: The row is no episode of a known format.
    """
    try:
        if "trajectories" in row or "lineup" in row:
            return _storable(_of_episode(row) if "trajectories" in row else _of_record(row))
    except (ArithmeticError, KeyError, TypeError, ValueError, AttributeError) as cause:
        raise ValueError(f"an episode with a damaged field ({type(cause).__name__}: {cause})") from cause
    raise ValueError("neither an episode of a training run nor a record of a benchmark")


def _storable(row: Digest) -> Digest:
    """Return the digest in values that SQLite can store: valid text and integers of 64 bits."""
    fields = dataclasses.asdict(row)
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
    trained = set(row.get("trained") or ())
    counted = {a for a, t in trajectories.items() if t.get("policy") in trained} or set(trajectories)
    training_rewards = row.get("rewards") or {}
    error = row.get("error") or {}
    texts = (str(turn.get(part, "")) for turn in turns for part in ("observation", "reasoning", "action"))
    omissions = (str(turn["compaction"]["text"]) for turn in turns if turn.get("compaction"))
    return Digest(
        step=int(row["step"]) if row.get("step") is not None else None,
        env=str(row["env_id"]),
        seed=int(row["seed"]),
        reward=_mean(rewards[agent] for agent in counted),
        trained=_mean(training_rewards.get(agent) for agent in counted),
        turns=len(turns),
        tokens=sum(
            int(turn["usage"]["completion_tokens"]) if turn.get("usage") else len(turn.get("response_ids", ()))
            for turn in (part for turn in turns for part in (turn, turn.get("notes")) if part)
        ),
        seconds=number(row.get("duration_s")) or 0.0,
        error=f"{error.get('where', '?')}: {error.get('kind', '?')}" if error else "",
        end=str(row.get("end_reason", "")),
        agents=json.dumps([[agent, str(t.get("policy", "")), rewards[agent]] for agent, t in trajectories.items()]),
        text="\n".join(
            [row["env_id"], *texts, *omissions, *(str(error[key]) for key in ("kind", "message") if key in error)]
        ),
    )


def _of_record(row: Mapping[str, Any]) -> Digest:
    results: Mapping[str, Any] = row["seats"]
    rewards = {agent: number(result.get("reward")) for agent, result in results.items()}
    error = str(row.get("error", ""))
    return Digest(
        step=None,
        env=str(row["env"]),
        seed=int(row["seed"]),
        reward=_mean(rewards.values()),
        trained=None,
        turns=sum(int(result.get("decisions", 0)) for result in results.values()),
        tokens=sum(int(result.get("tokens", 0)) for result in results.values()),
        seconds=number(row.get("seconds")) or 0.0,
        error=": ".join(error.split(": ")[:2]),
        end=str(row.get("end", "")),
        agents=json.dumps([[agent, str(player), rewards.get(agent)] for agent, player in row["lineup"].items()]),
        text="\n".join([str(row["env"]), error, *map(str, row["lineup"].values())]),
    )


def total_reward(trajectory: Mapping[str, Any]) -> float:
    """Return the total environment reward of an agent."""
    rewards = (number(turn.get("reward")) or 0.0 for turn in trajectory["turns"])
    return math.fsum((number(trajectory.get("initial_reward")) or 0.0, *rewards))


def _mean(values: Iterable[Any]) -> float | None:
    numbers = [value for value in map(number, values) if value is not None]
    return math.fsum(numbers) / len(numbers) if numbers else None


def finite(value: Any, depth: int = 50) -> Any:
    """Return `value` for JSON: None for NaN and infinities, text for dates of YAML, cut off below `depth` levels."""
    if depth == 0:
        return "..."
    if isinstance(value, Mapping):
        return {str(key): finite(item, depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item, depth - 1) for item in value]
    return number(value) if isinstance(value, float) else value if isinstance(value, int | str | None) else str(value)


def whole_lines(file: IO[bytes], num_bytes: float = math.inf) -> Iterator[tuple[bytes, Any, str]]:
    """Read up to about `num_bytes` of a growing JSON-lines file: each line, its value, and its error.

    A last line without a line break is read only if it is complete JSON. Of a line that is too large, each part of the
    maximum size is yielded with an error. A line with too many values is not parsed.
    """
    read = 0
    while read < num_bytes and (raw := file.readline(MAX_LINE_BYTES)):
        row, problem = None, ""
        try:
            if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
                problem = f"it has more than {MAX_LINE_BYTES >> 20} MiB"
            elif too_many := too_many_values(raw, max_commas=MAX_LINE_COMMAS):
                problem = f"it has {too_many}"
            else:
                row = json.loads(raw) if raw.strip() else None
        except (ValueError, RecursionError):
            if not raw.endswith(b"\n"):
                return
            problem = "it is not JSON. The process that wrote it was killed, or the file was damaged"
        read += len(raw)
        yield raw, row, problem


# ---- table of episodes

_TURN_FIELDS = (
    "agent", "policy", "observation", "reasoning", "reasoning_tokens", "action", "reward", "finish_reason",
    "terminated", "truncated", "generate_s", "branch", "session", "forked_from",
)  # fmt: skip


class EpisodeTable(Sequence[dict[str, Any]]):
    """The episodes of a run or a benchmark: one record each, oldest first.

    ``pandas.DataFrame(table)`` and ``datasets.Dataset.from_list(table)`` accept it. Records stay in memory, whole
    episodes are read again. Threads and forked processes, such as those of a data loader, can share a table. Episodes
    that a run adds later appear only in a new table. See `load_episodes` for the columns.
    """

    def __init__(self, name: Path, file: IO[bytes], records: Sequence[tuple[int, int, dict[str, Any]]]) -> None:
        self._name = name
        self._file = file  # kept open, because a file that a resumed run replaces must be read as it was
        weakref.finalize(self, file.close)
        self._records = records
        """Offset and length of the line, and record of each episode."""

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, at: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, at: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, at: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(at, slice):
            return [record for _, _, record in self._records[at]]
        return self._records[at][2]

    def __repr__(self) -> str:
        return f"EpisodeTable({str(self._name)!r}, {len(self)} episodes)"

    def episode(self, at: int) -> Episode:
        """Return the whole episode of record `at`. Raises RunFolderError for a benchmark, or another version."""
        return self._episode(self._line(at))

    def episodes(self) -> Iterator[Episode]:
        """Iterate over the whole episodes. Raises as `episode`."""
        return map(self.episode, range(len(self)))

    def turns(self) -> Iterator[dict[str, Any]]:
        """Iterate over all turns, one record each. Raises as `episode`.

        Keys: ``episode``, ``step``, ``env_id``, ``seed`` as in the episode's record; ``turn``, ``agent``, ``policy``,
        ``observation``, ``reasoning``, ``reasoning_tokens``, ``action``, ``reward``, ``finish_reason``, ``terminated``,
        ``truncated``, ``generate_s``, ``branch``, ``session``, ``forked_from`` as in `Turn`; ``tokens``, the number of
        sampled tokens; and ``advantage``, None if the turn was not trained on.
        """
        for at, record in enumerate(self):
            row = self._line(at)
            advantages = each if isinstance(each := row.get("advantages"), Mapping) else {}
            position: Counter[str] = Counter()
            for turn in self._episode(row).turns:
                of_agent = each if isinstance(each := advantages.get(turn.agent), list) else []
                number = position[turn.agent]
                position[turn.agent] += 1
                yield {
                    **{name: record[name] for name in ("episode", "step", "env_id", "seed")},
                    "turn": turn.index,
                    **{name: getattr(turn, name) for name in _TURN_FIELDS},
                    "tokens": turn.usage.completion_tokens if turn.usage else total_tokens([turn]),
                    "advantage": of_agent[number] if number < len(of_agent) else None,
                }

    def _line(self, at: int) -> Mapping[str, Any]:
        offset, length, _ = self._records[at]
        row: Mapping[str, Any] = json.loads(os.pread(self._file.fileno(), length, offset))
        return row

    def _episode(self, row: Mapping[str, Any]) -> Episode:
        if "trajectories" not in row:
            raise RunFolderError(
                f"{self._name} was written by a benchmark, which stores results of episodes and not their turns. "
                "fa.play repeats one of them"
            )
        try:
            return Episode.from_json(row)
        except ValueError as cause:
            raise RunFolderError(f"{self._name}: {cause}") from cause


@named_arguments
def load_episodes(
    run: str | os.PathLike[str],
    *,
    env: str = "",
    step: int | range | None = None,
    policy: str = "",
    failed: bool | None = None,
    where: Callable[[Mapping[str, Any]], bool] | None = None,
) -> EpisodeTable:
    """Load the episodes of a training run or a benchmark as a table.

    Columns:

    - ``episode``: number in the file
    - ``step``: training step, None in a benchmark
    - ``env_id``, ``seed``, ``turns``, ``duration_s``, ``end_reason``
    - ``reward``: mean environment reward over the agents of trained policies, or over all agents if none is trained,
      NaN if the episode failed before any agent took part
    - ``trained_reward``: the same mean of the rewards that were trained on
    - ``tokens``: number of tokens sampled by models
    - ``error``: place of the failure and name of the exception, or empty
    - ``agents``, ``policies``, ``rewards`` (of the environment), ``trained_rewards`` (NaN if a reward abstained,
      None if nothing was trained) and ``trained_session_rewards`` (a list, None for agents whose sessions have no
      rewards of their own): lists with one entry per agent

    Args:
        run: Folder of the run, or the ``episodes.jsonl`` in it.
        env: Keep only this environment. The module before its id is optional.
        step: Keep only this training step, or a range of steps.
        policy: Keep only episodes in which this policy, or in a benchmark this player, took part.
        failed: True keeps only failed episodes, False only the others.
        where: Keep only records for which this function is true, such as ``lambda row: row["reward"] > 0.5``.

    Raises:
        RunFolderError: The file does not exist, or a line is no episode.
        ValueError: No episode is of that environment or policy.
    """
    path = user_path(run)
    file = path if path.name == EPISODES else path / EPISODES
    check_plain_files(file.parent)
    if not file.is_file():
        if path.is_file():
            raise RunFolderError(f"{path} is a file. Give the folder of a run or a benchmark, or its {EPISODES}")
        near = [other.name for other in path.parent.iterdir() if other.is_dir()] if path.parent.is_dir() else []
        hint = "" if path.is_dir() else did_you_mean(path.name, near)
        raise RunFolderError(f"{path} holds no {EPISODES}. Give the out_dir of a training run or a benchmark.{hint}")
    if isinstance(step, int) and step < 1:
        raise ValueError(f"step={step}. Steps count from 1, and table[-8:] is the newest of a table")
    steps = range(step, step + 1) if isinstance(step, int) else step

    def is_selected(row: Mapping[str, Any]) -> bool:
        return (
            env in ("", row["env_id"], _bare(row["env_id"]))
            and (not policy or policy in row["policies"])
            and (steps is None or row["step"] in steps)
            and failed in (None, bool(row["error"]))
            and (where is None or bool(where(row)))
        )

    with contextlib.ExitStack() as on_error:
        stream = on_error.enter_context(file.open("rb"))
        envs, policies, records, offset, count = set[str](), set[str](), [], 0, 0
        for line, (raw, row, problem) in enumerate(whole_lines(stream), 1):
            if raw.strip():
                try:
                    record = _record(count, row, problem)
                except ValueError as cause:
                    raise RunFolderError(
                        f"line {line} of {file} cannot be read: {cause}. Remove it to read the others"
                    ) from cause
                count += 1
                envs.add(record["env_id"])
                policies.update(record["policies"])
                if is_selected(record):
                    records.append((offset, len(raw), record))
            offset += len(raw)
        for option, value, existing in (("env", env, envs), ("policy", policy, policies)):
            if value and existing and value not in existing | set(map(_bare, existing)):
                listed = ", ".join(sorted(existing))
                hint = did_you_mean(value, existing)
                raise ValueError(f"{option}={value!r}: {file} has episodes of {visible(f'{listed}.{hint}')}")
        on_error.pop_all()
    return EpisodeTable(file, stream, records)


def _numbers(values: Any) -> list[float] | None:
    """Return the numbers of a list, NaN for other values, or None if there is no list."""
    if not isinstance(values, list):
        return None
    return [_number_or_nan(value) for value in values]


def _number_or_nan(value: Any) -> float:
    return math.nan if (finite := number(value)) is None else finite


def _bare(env_id: str) -> str:
    """An environment's id without the module that registers it."""
    return env_id.rpartition(":")[2]


def _record(number: int, row: Any, problem: str) -> dict[str, Any]:
    """The record of an episode. Raises ValueError if the line holds none."""
    if problem:
        raise ValueError(problem)
    summary = digest(row)
    agents, training_rewards = json.loads(summary.agents), row.get("rewards")
    training_rewards = training_rewards if isinstance(training_rewards, dict) else {}
    by_session = each if isinstance(each := row.get("session_rewards"), dict) else {}
    return {
        "episode": number,
        "step": summary.step,
        "env_id": summary.env,
        "seed": summary.seed,
        "reward": math.nan if summary.reward is None else summary.reward,
        "trained_reward": summary.trained,
        "turns": summary.turns,
        "tokens": summary.tokens,
        "duration_s": summary.seconds,
        "end_reason": summary.end,
        "error": summary.error,
        "agents": [agent for agent, _, _ in agents],
        "policies": [policy for _, policy, _ in agents],
        "rewards": [reward for _, _, reward in agents],
        "trained_rewards": [
            _number_or_nan(training_rewards[agent]) if agent in training_rewards else None for agent, _, _ in agents
        ],
        "trained_session_rewards": [_numbers(by_session.get(agent)) for agent, _, _ in agents],
    }
