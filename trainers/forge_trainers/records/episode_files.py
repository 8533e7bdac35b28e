"""Episodes that a run has written, read back.

In: a run's folder. Out: `Episode`s, each with the rewards its agents were trained on. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_agents.errors import RunFolderError
from forge_agents.types import Episode, EpisodeError, Trajectory, Turn, VersionSpan
from forge_trainers.records.run_folder import read_rows

EPISODES = "episodes.jsonl"


def read_episodes(folder: Path) -> list[tuple[Episode, dict[str, float]]]:
    """The episodes that a run kept, in the order they were written.

    Returns:
        Pairs of an episode and its agents' rewards, as in `RunFolder.keep_episodes`.

    Raises:
        RunFolderError: The file is missing or was not written by a run.
    """
    file = folder / EPISODES
    if not file.is_file():
        raise RunFolderError(f"{folder} holds no {EPISODES}, so it is not the folder of a run")
    found = []
    for number, row in enumerate(read_rows(file)):
        try:
            found.append((_episode(row), dict(row["rewards"])))
        except (KeyError, TypeError, ValueError, AttributeError) as cause:
            raise RunFolderError(f"row {number} of {file} is no episode ({type(cause).__name__}: {cause})") from cause
    return found


def _episode(row: Mapping[str, Any]) -> Episode:
    return Episode(
        env_id=row["env_id"],
        seed=row["seed"],
        trajectories={
            agent: Trajectory(**{**fields, "turns": tuple(map(_turn, fields["turns"]))})
            for agent, fields in row["trajectories"].items()
        },
        error=None if row["error"] is None else EpisodeError(**row["error"]),
        end_reason=row["end_reason"],
        duration_s=row["duration_s"],
    )


def _turn(fields: Mapping[str, Any]) -> Turn:
    columns = {name: tuple(fields[name]) for name in ("prompt_ids", "response_ids", "logprobs")}
    return Turn(**{**fields, **columns, "versions": tuple(VersionSpan(**span) for span in fields["versions"])})
