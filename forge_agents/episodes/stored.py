"""Episodes as runs and benchmarks keep them, a line each in ``episodes.jsonl``: what a list shows, a table of all.

In: the folder of a run or a benchmark, which may still grow. Out: a `Digest` of a line, and an `EpisodeTable`. Waits
for the disk.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, overload

from forge_agents.display import visible
from forge_agents.envs.env import writable
from forge_agents.errors import RunFolderError, did_you_mean
from forge_agents.files import check_plain_files, user_path
from forge_agents.types import Episode, total_tokens

EPISODES = "episodes.jsonl"
"""The file's name in the folder of a run or a benchmark."""


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
    except (ArithmeticError, KeyError, TypeError, ValueError, AttributeError) as cause:
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
    rewards = {agent: total_reward(trajectory) for agent, trajectory in trajectories.items()}
    turns = [turn for trajectory in trajectories.values() for turn in trajectory["turns"]]
    learners = set(row.get("trained") or ())
    counted = {a for a, t in trajectories.items() if t.get("policy") in learners} or set(trajectories)
    paid = row.get("rewards") or {}
    error = row.get("error") or {}
    said = (str(turn.get(part, "")) for turn in turns for part in ("observation", "reasoning", "action"))
    left_out = (str(turn["compaction"]["text"]) for turn in turns if turn.get("compaction"))
    return Digest(
        step=int(row["step"]) if row.get("step") is not None else None,
        env=str(row["env_id"]),
        seed=int(row["seed"]),
        reward=_mean(rewards[agent] for agent in counted),
        trained=_mean(paid.get(agent) for agent in counted),
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
            [row["env_id"], *said, *left_out, *(str(error[key]) for key in ("kind", "message") if key in error)]
        ),
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


def total_reward(trajectory: Mapping[str, Any]) -> float:
    """What the environment gave an agent in all."""
    earned = (number(turn.get("reward")) or 0.0 for turn in trajectory["turns"])
    return math.fsum((number(trajectory.get("initial_reward")) or 0.0, *earned))


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


def whole_lines(file: IO[bytes], num_bytes: float = math.inf) -> Iterator[tuple[bytes, Any, str]]:
    """Up to about `num_bytes` of a JSON-lines file that grows: each line, what it holds, and what is wrong with it.

    A last line without its end is left for later, unless it is whole already.
    """
    read = 0
    while read < num_bytes and (raw := file.readline()):
        row, wrong = None, ""
        try:
            row = json.loads(raw) if raw.strip() else None
        except (ValueError, RecursionError):
            if not raw.endswith(b"\n"):
                return
            wrong = "it is not JSON; the process that wrote it was killed, or the file was damaged"
        read += len(raw)
        yield raw, row, wrong


# ---- a run's episodes as a table

_OF_A_TURN = (
    "agent", "policy", "observation", "reasoning", "reasoning_tokens", "action", "reward", "finish_reason",
    "terminated", "truncated", "generate_s", "branch", "forked_from",
)


class _Own(io.RawIOBase):
    """A file read at a place of its own; that of an ordinary one moves when another process of a fork reads."""

    def __init__(self, file: Path) -> None:
        self._file, self._place = file.open("rb", buffering=0), 0  # one that a resumed run replaces is read as it was

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        self._place = place if whence == io.SEEK_SET else self._place + place
        return self._place

    def readinto(self, room: Any) -> int:
        read = os.preadv(self._file.fileno(), [room], self._place)
        self._place += read
        return read

    def close(self) -> None:
        self._file.close()
        super().close()


class EpisodeTable(Sequence[dict[str, Any]]):
    """What a run or a benchmark kept of its episodes: a record each, oldest first.

    ``pandas.DataFrame(table)`` and ``datasets.Dataset.from_list(table)`` take it as it is. The file is read as far as
    somebody asks: a loop that breaks off has read no further, while ``len`` reads all. Records are kept, whole episodes
    read again, by any number of threads and forked processes, such as those of a data loader. What a run that goes on
    writes meanwhile is in the next table. See `load_episodes` for the columns.
    """

    def __init__(self, file: Path, wanted: Callable[[Mapping[str, Any]], bool], check_end: Callable[[], None]) -> None:
        self._name, self._file, self._turn = file, io.BufferedReader(_Own(file)), threading.RLock()
        self._wanted, self._check_end = wanted, check_end
        self._found: list[tuple[int, dict[str, Any]]] = []
        self._at = self._lines = self._episodes = 0
        self._whole = False

    def __len__(self) -> int:
        self._read()
        return len(self._found)

    @overload
    def __getitem__(self, at: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, at: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, at: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(at, slice):
            self._read()
            return [record for _, record in self._found[at]]
        self._read(at + 1 if at >= 0 else None)
        return self._found[at][1]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self._found[at][1] for at in self._places())

    def __repr__(self) -> str:
        read = f", {len(self._found)} episodes read{'' if self._whole else ' so far'}" if self._found else ""
        return f"EpisodeTable({str(self._name)!r}{read})"  # a debugger shows it, too: nothing is read for it

    def __str__(self) -> str:
        self._read()
        return repr(self)

    def episode(self, at: int) -> Episode:
        """The whole episode of record `at`.

        Raises:
            RunFolderError: It was kept by a benchmark, which keeps no turns, or by another version.
        """
        self[at]
        return self._episode(self._line(at))

    def episodes(self) -> Iterator[Episode]:
        """The whole episodes, one after another; raises as `episode`."""
        return (self._episode(self._line(at)) for at in self._places())

    def turns(self) -> Iterator[dict[str, Any]]:
        """A record per turn, one after another; raises as `episode`.

        Keys: ``episode``, ``step``, ``env_id``, ``seed`` as in the episode's record; ``turn``, ``agent``, ``policy``,
        ``observation``, ``reasoning``, ``reasoning_tokens``, ``action``, ``reward``, ``finish_reason``, ``terminated``,
        ``truncated``, ``generate_s``, ``branch``, ``forked_from`` as in `Turn`; ``tokens`` that a model sampled;
        ``advantage`` of each of them, None where nothing was learned.
        """
        for at in self._places():
            row, record = self._line(at), self._found[at][1]
            learned = row.get("advantages") or {}
            place: Counter[str] = Counter()
            for turn in self._episode(row).turns:
                own = learned.get(turn.agent) or []
                number = place[turn.agent]
                place[turn.agent] += 1
                yield {
                    **{name: record[name] for name in ("episode", "step", "env_id", "seed")},
                    "turn": turn.index,
                    **{name: getattr(turn, name) for name in _OF_A_TURN},
                    "tokens": turn.usage.completion_tokens if turn.usage else total_tokens([turn]),
                    "advantage": own[number] if number < len(own) else None,
                }

    def _places(self) -> Iterator[int]:
        at = 0
        while at < len(self._found) or self._read(at + 1):
            yield at
            at += 1

    def _read(self, count: int | None = None) -> bool:
        """Read on until there are `count` records, or to the end; whether there are."""
        with self._turn:
            self._file.seek(self._at)
            while not self._whole and (count is None or len(self._found) < count):
                raw, row, wrong = next(whole_lines(self._file), (b"", None, ""))
                if raw.strip():
                    try:
                        record = _record(self._episodes, row, wrong)
                    except ValueError as cause:
                        raise RunFolderError(
                            f"line {self._lines + 1} of {self._name} cannot be read: {cause}; without it the rest can"
                        ) from cause
                    if self._wanted(record):
                        self._found.append((self._at, record))
                    self._episodes += 1
                elif not raw:
                    self._check_end()
                    self._whole = True
                # what raised is met again, and not left out
                self._at, self._lines = self._at + len(raw), self._lines + 1
            return count is None or len(self._found) >= count

    def _line(self, at: int) -> Mapping[str, Any]:
        with self._turn:
            self._file.seek(self._found[at][0])
            line = self._file.readline()
        row: Mapping[str, Any] = json.loads(line)
        return row

    def _episode(self, row: Mapping[str, Any]) -> Episode:
        if "trajectories" not in row:
            raise RunFolderError(
                f"{self._name} was written by a benchmark, which keeps what its episodes came to and not their turns; "
                "fa.play plays one of them again"
            )
        try:
            return Episode.from_json(row)
        except ValueError as cause:
            raise RunFolderError(f"{self._name}: {cause}") from cause


def load_episodes(
    run: str | os.PathLike[str],
    *,
    env: str = "",
    step: int | range | None = None,
    policy: str = "",
    failed: bool | None = None,
    where: Callable[[Mapping[str, Any]], bool] | None = None,
) -> EpisodeTable:
    """The episodes that a training run or a benchmark kept, as a table.

    Each record has ``episode``, its number in the file; ``step``, None in a benchmark; ``env_id``, ``seed``;
    ``reward``, the environment's, mean over the seats of policies that learn, and over all seats where none does, NaN
    of an episode that failed before anybody took a seat;
    ``trained_reward``, the same of what was trained on; ``turns``; ``tokens`` that models sampled; ``duration_s``;
    ``end_reason``; ``error``, empty or where it failed and the exception's name; and lists with an entry per seat:
    ``agents``, ``policies``, ``rewards``, the environment's, and ``trained_rewards``, NaN where a reward abstained and
    None where nothing was trained.

    Args:
        run: Its folder, or the ``episodes.jsonl`` in it.
        env: Only of this environment; the module before its id may be left out.
        step: Only of this training step, or of a range of them.
        policy: Only those in which this policy, or in a benchmark this player, had a seat.
        failed: True: only those that failed; False: only the others.
        where: Only records for which it is true, such as ``lambda row: row["reward"] > 0.5``.

    Raises:
        RunFolderError: There is no such file, or, while the table is read, a line of it is no episode.
        ValueError: While the table is read to its end: no episode is of that environment or policy.
    """
    path = user_path(run)
    file = path if path.name == EPISODES else path / EPISODES
    check_plain_files(file.parent)
    if not file.is_file():
        near = [other.name for other in path.parent.iterdir() if other.is_dir()] if path.parent.is_dir() else []
        hint = "" if path.is_dir() else did_you_mean(path.name, near)
        raise RunFolderError(f"{path} holds no {EPISODES}; give the out_dir of a training run or a benchmark.{hint}")
    if isinstance(step, int) and step < 1:
        raise ValueError(f"step={step}; steps count from 1, and table[-8:] is the newest of a table")
    steps = range(step, step + 1) if isinstance(step, int) else step
    known: dict[str, set[str]] = {"env": set(), "policy": set()}

    def wanted(row: Mapping[str, Any]) -> bool:
        known["env"].add(row["env_id"])
        known["policy"].update(row["policies"])
        return (
            env in ("", row["env_id"], _bare(row["env_id"]))
            and (not policy or policy in row["policies"])
            and (steps is None or row["step"] in steps)
            and failed in (None, bool(row["error"]))
            and (where is None or bool(where(row)))
        )

    def check_end() -> None:
        for name, asked in (("env", env), ("policy", policy)):
            if asked and known[name] and asked not in known[name] | set(map(_bare, known[name])):
                seen = ", ".join(sorted(known[name]))
                near = did_you_mean(asked, known[name])
                raise ValueError(f"{name}={asked!r}: {file} has episodes of {visible(f'{seen}.{near}')}")

    return EpisodeTable(file, wanted, check_end)


def _bare(env_id: str) -> str:
    """An environment's id without the module that registers it."""
    return env_id.rpartition(":")[2]


def _record(number: int, row: Any, wrong: str) -> dict[str, Any]:
    """What a table has of an episode. Raises ValueError where the line holds none."""
    if wrong:
        raise ValueError(wrong)
    found = digest(row)
    seats, paid = json.loads(found.agents), row.get("rewards")
    paid = paid if isinstance(paid, dict) else {}
    return {
        "episode": number,
        "step": found.step,
        "env_id": found.env,
        "seed": found.seed,
        "reward": math.nan if found.reward is None else found.reward,
        "trained_reward": found.trained,
        "turns": found.turns,
        "tokens": found.tokens,
        "duration_s": found.seconds,
        "end_reason": found.end,
        "error": found.error,
        "agents": [agent for agent, _, _ in seats],
        "policies": [policy for _, policy, _ in seats],
        "rewards": [reward for _, _, reward in seats],
        "trained_rewards": [paid.get(agent) for agent, _, _ in seats],
    }
