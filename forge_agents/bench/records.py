"""What one benchmark episode came to and cost, and the file that keeps it.

In: episodes. Out: records, one JSON line each, appended as soon as an episode has ended; sums by player. Waits for
nothing.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import IO, Any

from forge_agents.errors import RunFolderError
from forge_agents.files import check_plain_files, user_path
from forge_agents.types import Episode, Trajectory

RECORD_FORMAT = 2
"""Of a stored record; raised whenever what a field means changes, so that older episodes are played again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatRecord:
    """One seat of one episode."""

    player: str
    reward: float
    success: bool | None
    """What `said_success` says. Where that is None, the environment's rules or rewards may tell: see
    `forge_agents.bench.verdicts.judged`."""
    decisions: int
    invalid: int
    """Decisions that the environment called illegal."""
    forfeit: bool
    """The seat's episode ended by an illegal decision of its own."""
    cut_off: int
    """Responses that `max_tokens` or the context cut short."""
    tokens: int
    """Tokens sampled; 0 where no model decided."""
    prompt_tokens: int
    """Tokens read, cached ones included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One episode."""

    key: str
    """Hash of all that decides how it goes."""
    env: str
    seed: int
    sample: int
    lineup: Mapping[str, str]
    """Player by seat."""
    seats: Mapping[str, SeatRecord]
    """By seat, of those that took part. Empty where the episode failed."""
    end: str
    error: str
    """Empty, or what failed."""
    seconds: float = 0.0

    @classmethod
    def of(
        cls,
        episode: Episode,
        *,
        key: str,
        sample: int,
        lineup: Mapping[str, str],
        together: bool = False,
    ) -> Record:
        """The record of `episode`; `together` as of a `World`."""
        error = episode.error
        good = {} if error else said_success(episode)
        lost = set() if error else forfeits_of(episode, together=together)
        seats = {} if error else {a: _seat(t, lineup[a], good[a], a in lost) for a, t in episode.trajectories.items()}
        return cls(
            key=key,
            env=episode.env_id,
            seed=episode.seed,
            sample=sample,
            lineup=dict(lineup),
            seats=seats,
            end=episode.end_reason,
            error=f"{error.where}: {error.kind}: {error.message}"[:500] if error else "",
            seconds=episode.duration_s,
        )

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Record:
        """The record that `as_json` wrote. Raises TypeError, KeyError or ValueError where it is none."""
        seats = {str(agent): SeatRecord(**seat) for agent, seat in row["seats"].items()}
        return cls(**{**row, "seats": seats})

    def as_json(self, *, timing: bool = True) -> dict[str, Any]:
        """Plain values; without `timing` those that are the same in every run."""
        row = asdict(self)
        if not timing:
            del row["seconds"]
        return row


def said_success(episode: Episode) -> dict[str, bool | None]:
    """What an environment says of each seat's success; None where it says nothing.

    It says so in a seat's last info under ``"success"``, or under ``"outcome"``: ``"win"`` and ``"solved"`` are
    success. Where rewards differ in sign and one seat is said to have succeeded, a seat of which nothing is said left
    before the end and did not succeed.
    """
    rewards = episode.rewards
    said = {agent: _said(trajectory.info) for agent, trajectory in episode.trajectories.items()}
    rivals = min(rewards.values(), default=0.0) < 0 < max(rewards.values(), default=0.0)
    if rivals and any(said.values()):
        return {agent: bool(success) for agent, success in said.items()}
    return said


def forfeits_of(episode: Episode, *, together: bool = False) -> set[str]:
    """The seats that ended the episode by an illegal decision.

    Those that the environment names in its last infos under ``"forfeits"``. Where it says nothing, those whose last
    decision was illegal, unless play went on after it or after another illegal one, or a limit was what ended it.

    Args:
        together: Whether all seats decide at the same time: play ends with a round, else with a decision.
    """
    said = [trajectory.info.get("forfeits") for trajectory in episode.trajectories.values()]
    if named := [seats for seats in said if isinstance(seats, (list, tuple))]:
        return set(episode.trajectories) & set(map(str, itertools.chain(*named)))
    seats = {agent: trajectory.turns for agent, trajectory in episode.trajectories.items() if trajectory.turns}
    if any(turn.info.get("illegal") for turns in seats.values() for turn in turns[:-1]):
        return set()
    end = max((len(turns) if together else turns[-1].index for turns in seats.values()), default=0)
    return {
        agent
        for agent, turns in seats.items()
        if episode.trajectories[agent].info.get("illegal")
        and (len(turns) if together else turns[-1].index) == end
        and not turns[-1].truncated
    }


def _said(info: Mapping[str, Any]) -> bool | None:
    """What an environment says of a seat in its last info; None where it says nothing."""
    success, outcome = info.get("success"), info.get("outcome")
    if isinstance(success, bool):
        return success
    return outcome in ("win", "solved") if isinstance(outcome, str) else None


def tokens_of(trajectory: Trajectory) -> tuple[int, int]:
    """Tokens read and sampled in a seat; 0 where no model decided."""
    turns = [part for turn in trajectory.turns for part in turn.parts]
    read = sum(turn.usage.prompt_tokens if turn.usage else len(turn.prompt_ids) for turn in turns)
    return read, sum(turn.usage.completion_tokens if turn.usage else len(turn.response_ids) for turn in turns)


def _seat(trajectory: Trajectory, player: str, success: bool | None, forfeit: bool) -> SeatRecord:
    turns = trajectory.turns
    invalid = sum(bool(turn.info.get("illegal")) for turn in turns)
    read, sampled = tokens_of(trajectory)
    return SeatRecord(
        player=player,
        reward=trajectory.reward,
        success=success,
        decisions=len(turns),
        invalid=max(invalid, int(forfeit and bool(turns))),
        forfeit=forfeit,
        cut_off=sum(turn.finish_reason in ("length", "context") for turn in turns),
        tokens=sampled,
        prompt_tokens=read,
    )


class EpisodeLog:
    """``episodes.jsonl`` in a folder: what was played, by key. One process at a time writes to it.

    A line that a killed process left half-written is dropped, and so is a line that cannot be read; their episodes are
    played again. Episodes that failed are kept to read, and played again too.

    Raises:
        RunFolderError: The folder cannot be used, or another process writes there.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = user_path(folder) / "episodes.jsonl"
        self.unreadable = 0
        """Lines that were dropped."""
        self.done: dict[str, Record] = {}
        """By key."""
        self.failed: dict[str, Record] = {}
        """The newest failure of each episode that ever failed, by key."""
        self._file: IO[str] | None = None

    def __enter__(self) -> EpisodeLog:
        check_plain_files(self.path.parent)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+", encoding="utf-8", errors="replace")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if self._file is not None:
                self._file.close()
            raise RunFolderError(
                f"another benchmark writes to {self.path}; wait for it, or give this one its own out_dir"
            ) from None
        except OSError as error:
            raise RunFolderError(f"{self.path} cannot be written: {error}; give another out_dir") from None
        self._read(self._file)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, record: Record) -> None:
        """Keep a record: written out before this returns, so that a killed run loses only what was under way."""
        if self._file is None:
            raise RuntimeError("the log is closed; use it in a with block")
        self._file.write(json.dumps(record.as_json()) + "\n")
        self._file.flush()
        self._keep(record)

    def _keep(self, record: Record) -> None:
        (self.failed if record.error else self.done)[record.key] = record

    def _read(self, file: IO[str]) -> None:
        file.seek(0)
        line = "\n"
        for line in file:
            try:
                self._keep(Record.from_json(json.loads(line)))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                self.unreadable += 1
        if not line.endswith("\n"):  # a killed process wrote half of it: what comes next starts on a line of its own
            file.write("\n")
            file.flush()


# ---- what it cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What one player spent in the episodes of a report, failed ones left out."""

    prompt_tokens: int
    """Tokens read, cached ones included."""
    tokens: int
    """Tokens sampled."""
    cost: float
    """Currency units; 0 of a player without prices."""


def facts_at(facts: Mapping[str, Any], agent: str) -> Mapping[str, Any]:
    """The facts of the policy that decides for an agent: of a team, the agent's own."""
    found: Mapping[str, Any] = facts.get("agents", {}).get(agent, facts)
    return found


def priced(facts: Mapping[str, Any]) -> bool:
    """Whether a player with these facts costs anything."""
    policies = [facts, *facts.get("agents", {}).values()]
    return any(policy.get("price_in") or policy.get("price_out") for policy in policies)


def cost_of(facts: Mapping[str, Any], prompt_tokens: int, tokens: int) -> float:
    """Currency units that a player with these facts pays for tokens read and sampled."""
    return float(facts.get("price_in", 0.0) * prompt_tokens + facts.get("price_out", 0.0) * tokens) / 1e6


def spent_by_player(records: Iterable[Record], players: Mapping[str, Mapping[str, Any]]) -> dict[str, Spent]:
    """Sums over all seats that each player held."""
    read: Counter[str] = Counter()
    sampled: Counter[str] = Counter()
    cost: defaultdict[str, float] = defaultdict(float)
    for record in records:
        for agent, seat in record.seats.items():
            read[seat.player] += seat.prompt_tokens
            sampled[seat.player] += seat.tokens
            cost[seat.player] += cost_of(facts_at(players[seat.player], agent), seat.prompt_tokens, seat.tokens)
    return {name: Spent(prompt_tokens=read[name], tokens=sampled[name], cost=cost[name]) for name in players}
