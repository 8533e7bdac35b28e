"""Records of benchmark episodes: results and costs, the log that keeps them, and sums by player."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

from pydantic import Field, StrictBool

from forge_agents.episodes.stored import MAX_LINE_BYTES
from forge_agents.errors import RunFolderError
from forge_agents.files import check_plain_files, lock_file, user_path, warn_of_other_writers
from forge_agents.http_body import bounded_json
from forge_agents.types import MAX_REWARD, Episode, Trajectory, Turn, read_stored

if TYPE_CHECKING:
    from forge_agents.bench.plan import Match

_Seed: TypeAlias = Annotated[int, Field(strict=True, gt=-(2**63), lt=2**63)]
"""A stored seed. Larger ones may have one hash, so that comparing them takes hours."""
_Count: TypeAlias = Annotated[int, Field(strict=True, ge=0, lt=2**53)]
RECORD_FORMAT = 2
"""Version of stored records. Raised when the meaning of a field changes, so that older episodes are played again."""

_REPLACED = ("episodes.jsonl", "board.json", "exploitability.json")
"""Files of a benchmark's folder."""
_BEGIN = b'{"key"'
"""Begin of each stored record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord:
    """Result of one agent in one episode."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    player: str
    reward: Annotated[float, Field(strict=True, ge=-MAX_REWARD, le=MAX_REWARD)]
    success: StrictBool | None
    """Success as the environment reported it, see `reported_success`. If None, rules or rewards may define it, see
    `forge_agents.bench.verdicts.judged`."""
    decisions: _Count
    invalid: _Count
    """Decisions that the environment called illegal."""
    forfeit: StrictBool
    """Whether an illegal decision of the agent ended its episode."""
    cut_off: _Count
    """Responses cut short by `max_tokens` or the context."""
    tokens: _Count
    """Sampled tokens, or 0 without a model."""
    prompt_tokens: _Count
    """Prompt tokens, including cached ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Result of one episode."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    key: str
    """Hash of everything that determines the episode."""
    env: str
    seed: _Seed
    sample: _Count
    lineup: Mapping[str, str]
    """Player by agent."""
    seats: Mapping[str, AgentRecord]
    """Results of the agents that took part. Empty if the episode failed."""
    end: str
    error: str
    """Failure of the episode. Empty if it succeeded."""
    fault: str = ""
    """Player whose failure ended the episode. Empty if none failed, as if the environment did."""
    leavers: tuple[str, ...] = ()
    """Players that failed after a decision of theirs, or on whose last answer the environment failed, in this try or an
    earlier one, sorted."""
    seconds: Annotated[float, Field(strict=True, ge=0, lt=2**53)] = 0.0

    def __post_init__(self) -> None:
        if others := {*self.leavers, *filter(None, [self.fault])} - {*self.lineup.values()}:
            raise ValueError(f"episode {self.key:.20} failed by {min(others):.20}, who has no agent in it")
        if any(result.player != self.lineup.get(agent) for agent, result in self.seats.items()):
            raise ValueError(f"episode {self.key:.20} has a result of an agent or player that it does not plan")

    @classmethod
    def of(
        cls, episode: Episode, *, key: str, sample: int, lineup: Mapping[str, str], together: bool = False
    ) -> Record:
        """Return the record of an episode. `together` as in `SuiteEnv`."""
        error = episode.error
        results: dict[str, AgentRecord] = {}
        if not error:
            success, forfeits = reported_success(episode), forfeits_of(episode, together=together)
            results = {
                agent: _result(trajectory, lineup[agent], success[agent], agent in forfeits)
                for agent, trajectory in episode.trajectories.items()
            }
        return cls(
            key=key,
            env=episode.env_id,
            seed=episode.seed,
            sample=sample,
            lineup=dict(lineup),
            seats=results,
            end=episode.end_reason,
            error=f"{error.where}: {error.kind}: {error.message}"[:500] if error else "",
            fault=lineup.get(error.agent, "") if error else "",
            leavers=tuple(sorted({lineup[agent] for agent in left_by(episode, together=together)})),
            seconds=episode.duration_s,
        )

    def after(self, earlier: Record | None) -> Record:
        """Return this record with the leavers of an earlier try."""
        leavers = () if earlier is None else earlier.leavers
        return replace(self, leavers=tuple(sorted({*self.leavers, *leavers})))

    @property
    def played(self) -> tuple[str, int, int, tuple[tuple[str, str], ...]]:
        """Environment, seed, sample and players. A report has one episode of each."""
        return self.env, self.seed, self.sample, tuple(sorted(self.lineup.items()))

    def as_json(self, *, timing: bool = True) -> dict[str, Any]:
        """Return plain values. Without `timing`, only those that are equal in every run."""
        return {name: value for name, value in asdict(self).items() if timing or name != "seconds"}


def reported_success(episode: Episode) -> dict[str, bool | None]:
    """Return the success of each agent as the environment reported it, or None if it did not.

    An environment reports success in the last info of an agent, as ``"success"``, or as ``"outcome"`` with ``"win"`` or
    ``"solved"``. If rewards differ in sign and one agent succeeded, an agent without a report left early and failed.
    """
    rewards = episode.rewards
    reported = {agent: _reported(trajectory.info) for agent, trajectory in episode.trajectories.items()}
    opponents = min(rewards.values(), default=0.0) < 0 < max(rewards.values(), default=0.0)
    if opponents and any(reported.values()):
        return {agent: bool(success) for agent, success in reported.items()}
    return reported


def _reported(info: Mapping[str, Any]) -> bool | None:
    success, outcome = info.get("success"), info.get("outcome")
    if isinstance(success, bool):
        return success
    return outcome in ("win", "solved") if isinstance(outcome, str) else None


def forfeits_of(episode: Episode, *, together: bool = False) -> set[str]:
    """Return the agents that ended the episode by an illegal decision.

    The last infos list them in ``"forfeits"``. Without that key, the result has the agents whose last decision was
    illegal, unless play continued after it or after another illegal decision, or a limit ended the episode.

    Args:
        together: Whether all agents decide at the same time: play then ends with a round, otherwise with a decision.
    """
    infos = [trajectory.info.get("forfeits") for trajectory in episode.trajectories.values()]
    if named := [agents for agents in infos if isinstance(agents, (list, tuple))]:
        return set(episode.trajectories) & set(map(str, itertools.chain(*named)))
    last = _last_turns(episode, together=together)
    turns = (turn for trajectory in episode.trajectories.values() for turn in trajectory.turns[:-1])
    if any(turn.info.get("illegal") for turn in turns):
        return set()
    return {
        agent for agent, turn in last.items() if episode.trajectories[agent].info.get("illegal") and not turn.truncated
    }


def _last_turns(episode: Episode, *, together: bool) -> dict[str, Turn]:
    """Return the last turn of each agent that decided last in an episode, in the last round if all decide at once."""
    turns_of = {agent: trajectory.turns for agent, trajectory in episode.trajectories.items() if trajectory.turns}
    ends = {agent: len(turns) if together else turns[-1].index for agent, turns in turns_of.items()}
    return {agent: turns_of[agent][-1] for agent, end in ends.items() if end == max(ends.values())}


def left_by(episode: Episode, *, together: bool = False) -> list[str]:
    """Return the agents that may have chosen that an episode failed after they had decided in it.

    That is the agent whose player failed, or those on whose last answers the environment failed.
    """
    if episode.error is None:
        return []
    if agent := episode.error.agent:
        return [agent] if agent in episode.trajectories and episode.trajectories[agent].turns else []
    by_answer = episode.error.where in ("step", "observe", "reward")
    return list(_last_turns(episode, together=together)) if by_answer else []


def tokens_of(trajectory: Trajectory) -> tuple[int, int]:
    """Return the prompt tokens and sampled tokens of a trajectory, or 0 without a model."""
    turns = [part for turn in trajectory.turns for part in turn.parts]
    prompt = sum(turn.usage.prompt_tokens if turn.usage else len(turn.prompt_ids) for turn in turns)
    return prompt, sum(turn.usage.completion_tokens if turn.usage else len(turn.response_ids) for turn in turns)


def _result(trajectory: Trajectory, player: str, success: bool | None, forfeit: bool) -> AgentRecord:
    turns = trajectory.turns
    invalid = sum(bool(turn.info.get("illegal")) for turn in turns)
    prompt_tokens, sampled = tokens_of(trajectory)
    return AgentRecord(
        player=player,
        reward=trajectory.reward,
        success=success,
        decisions=len(turns),
        invalid=max(invalid, int(forfeit and bool(turns))),
        forfeit=forfeit,
        cut_off=sum(turn.finish_reason in ("length", "context") for turn in turns),
        tokens=sampled,
        prompt_tokens=prompt_tokens,
    )


class EpisodeLog:
    """``episodes.jsonl`` in a folder. One process at a time writes to it.

    Lines that a killed process left incomplete, or that cannot be read, are dropped, and their episodes are played
    again. Failed episodes are kept for inspection and played again, too. The records of later tries name the `leavers`
    of earlier ones.

    Raises:
        RunFolderError: The folder cannot be used, has files of another program, or another process writes there.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = user_path(folder) / "episodes.jsonl"
        self._lock_path = self.path.with_name(f".{self.path.stem}.lock")
        self.unreadable = 0
        """Number of dropped lines."""
        self.done: dict[str, Record] = {}
        """Successful episodes by key."""
        self.failed: dict[str, Record] = {}
        """Newest failure of each episode that ever failed, by key."""
        self._file: IO[str] | None = None

    def __enter__(self) -> EpisodeLog:
        check_plain_files(self.path.parent)
        self._check_is_ours()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            warn_of_other_writers(self.path.parent)
            with contextlib.ExitStack() as stack:
                stack.enter_context(lock_file(self._lock_path))
                self._file = stack.enter_context(self.path.open("a+", encoding="utf-8", errors="replace"))
                self._read(self._file)
                self._opened = stack.pop_all()
        except BlockingIOError:
            raise RunFolderError(
                f"another benchmark writes to {self.path}. Wait for it, or choose another out_dir"
            ) from None
        except OSError as error:
            raise RunFolderError(f"{self.path} cannot be written: {error}. Choose another out_dir") from None
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):  # `add` reported that its record could not be written
            self._opened.close()

    def _check_is_ours(self) -> None:
        """Refuse a folder of another program that has files of the names that a benchmark replaces."""
        names = [name for name in _REPLACED if (self.path.parent / name).exists()]
        if not names or self._lock_path.exists():
            return
        try:
            with self.path.open("rb") as file:
                if file.read(len(_BEGIN)) == _BEGIN:
                    return
        except OSError:
            pass  # opening it later reports the error, or there is none and the other files are not ours
        raise RunFolderError(
            f"{self.path.parent} is no folder of a benchmark and has {', '.join(names)}, which a benchmark would "
            "change. Choose another out_dir"
        )

    def add(self, record: Record) -> None:
        """Store a record. The record is written before this returns, so a killed run loses only unfinished episodes."""
        if self._file is None:
            raise RuntimeError("the log is closed. Use it in a with block")
        try:
            self._file.write(json.dumps(record.as_json()) + "\n")
            self._file.flush()
        except OSError as cause:
            raise not_written(self.path, cause) from cause
        self._keep(record)

    def drop_others(self, plan: Mapping[str, Match]) -> None:
        """Drop the records of planned keys that are not of the planned environment, seed, sample and players."""
        for records in (self.done, self.failed):
            for key in [key for key in plan if key in records and records[key].played != plan[key].played]:
                del records[key]
                self.unreadable += 1

    def _keep(self, record: Record) -> None:
        record = record.after(self.failed.get(record.key))
        (self.failed if record.error else self.done)[record.key] = record

    def _read(self, file: IO[str]) -> None:
        file.seek(0)
        line = "\n"
        for line in iter(lambda: file.readline(MAX_LINE_BYTES), ""):
            try:
                self._keep(read_stored(Record, bounded_json(line)))
            except (ValueError, RecursionError):
                self.unreadable += 1
        if not line.endswith("\n"):  # a killed process left half a line: the next record starts a new one
            file.write("\n")
            file.flush()


def not_written(file: Path, cause: OSError) -> RunFolderError:
    """Return the error for a file of a benchmark that cannot be written, such as on a full disk."""
    return RunFolderError(
        f"{file} cannot be written ({cause}). Free some disk space and run it again: finished episodes are kept"
    )


# ---- costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Tokens and cost of one player in the successful episodes of a report."""

    prompt_tokens: int
    """Prompt tokens, including cached ones."""
    tokens: int
    """Sampled tokens."""
    cost: float
    """Cost in the unit of the prices, or 0 without prices."""


def facts_at(facts: Mapping[str, Any], agent: str) -> Mapping[str, Any]:
    """Return the facts of the policy that acts for an agent. In a team every agent has its own."""
    agent_facts: Mapping[str, Any] = facts.get("agents", {}).get(agent, facts)
    return agent_facts


def priced(facts: Mapping[str, Any]) -> bool:
    """Return whether a player with these facts has a price."""
    policies = [facts, *facts.get("agents", {}).values()]
    return any(policy.get("price_in") or policy.get("price_out") for policy in policies)


def cost_of(facts: Mapping[str, Any], prompt_tokens: int, tokens: int) -> float:
    """Return the cost of prompt and sampled tokens for a player with these facts."""
    return float(facts.get("price_in", 0.0) * prompt_tokens + facts.get("price_out", 0.0) * tokens) / 1e6


def spent_by_player(records: Iterable[Record], players: Mapping[str, Mapping[str, Any]]) -> dict[str, Spent]:
    """Return the sums over all agents of each player."""
    sums = dict.fromkeys(players, (0, 0, 0.0))
    for record in records:
        for agent, result in record.seats.items():
            prompts, sampled, cost = sums[result.player]
            cost += cost_of(facts_at(players[result.player], agent), result.prompt_tokens, result.tokens)
            sums[result.player] = prompts + result.prompt_tokens, sampled + result.tokens, cost
    return {name: Spent(prompt_tokens=p, tokens=s, cost=cost) for name, (p, s, cost) in sums.items()}
