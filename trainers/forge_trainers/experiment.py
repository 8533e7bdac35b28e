"""Checkpoints of a whole experiment: every learner, what the reward has learned, and the step to continue from.

In: learners and a reward. Out: folders ``step-NNNNNN``, complete once they hold ``experiment.json``. Waits for the
learners.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable
from zipfile import BadZipFile

import numpy as np

from forge_agents.errors import ForgeError
from forge_agents.rollout import all_or_first_error

if TYPE_CHECKING:
    from forge_trainers.learner import Learner

_log = logging.getLogger(__name__)
_MARK = "experiment.json"
_REWARD = "reward.npz"
_BASELINES = "baselines.npz"


@runtime_checkable
class Stateful(Protocol):
    """A reward that learns, such as a verifier ensemble: arrays by name."""

    def state_dict(self) -> Mapping[str, np.ndarray]: ...  # noqa: D102
    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None: ...  # noqa: D102


class Checkpoints:
    """The newest checkpoints of a run.

    Args:
        folder: Where they lie.
        keep: How many stay on disk, at least 1.
        reward: Saved and restored where it is `Stateful`.
        baselines: The same, of what credit remembers.
    """

    def __init__(self, folder: Path, *, keep: int, reward: object = None, baselines: Stateful | None = None) -> None:
        self._folder, self._keep = folder, keep
        parts = {_REWARD: reward, _BASELINES: baselines}
        self._parts = {name: part for name, part in parts.items() if isinstance(part, Stateful)}

    def any(self) -> bool:
        """Whether there is a complete checkpoint."""
        return bool(self._complete())

    async def save(self, step: int, learners: Mapping[str, Learner]) -> Path:
        """Write the state after `step` steps: into a draft folder, renamed when whole."""
        draft, final = self._folder / f".draft-{step:06d}", self._folder / f"step-{step:06d}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        await all_or_first_error(learner.save(draft / name) for name, learner in learners.items())
        for name, part in self._parts.items():
            np.savez(draft / name, allow_pickle=False, **part.state_dict())
        (draft / _MARK).write_text(json.dumps({"step": step, "policies": sorted(learners)}))
        shutil.rmtree(final, ignore_errors=True)
        draft.rename(final)
        for old in self._complete()[self._keep :]:
            shutil.rmtree(old)
        return final

    async def restore(self, learners: Mapping[str, Learner]) -> int:
        """Load the newest checkpoint that loads.

        Returns:
            The step to continue from; 0 where there is none.

        Raises:
            ForgeError: Checkpoints are there and none of them loads, or they hold other policies.
        """
        failures = []
        for folder in self._complete():
            state = json.loads((folder / _MARK).read_text())
            if state["policies"] != sorted(learners):
                raise ForgeError(
                    f"{folder} holds the policies {state['policies']}, this run trains {sorted(learners)}; "
                    "choose another out_dir"
                )
            try:
                await all_or_first_error(learner.load(folder / name) for name, learner in learners.items())
                for name, part in self._parts.items():
                    with np.load(folder / name, allow_pickle=False) as saved:
                        part.load_state_dict(dict(saved))
            except (OSError, RuntimeError, ValueError, KeyError) as cause:
                _log.warning("checkpoint %s does not load (%s); trying the one before", folder, cause)
                failures.append(f"{folder}: {cause}")
                continue
            return int(state["step"])
        if failures:
            raise ForgeError("no checkpoint loads: " + "; ".join(failures))
        return 0

    def _complete(self) -> list[Path]:
        """Complete checkpoints, newest first."""
        return sorted((mark.parent for mark in self._folder.glob(f"step-*/{_MARK}")), reverse=True)


def saved_reward(folder: Path) -> dict[str, np.ndarray]:
    """What the reward had learned at the newest complete checkpoint in `folder`; empty where nothing was saved.

    Raises:
        ForgeError: It cannot be read.
    """
    files = sorted((mark.with_name(_REWARD) for mark in folder.glob(f"step-*/{_MARK}")), reverse=True)
    newest = next((file for file in files if file.exists()), None)
    if newest is None:
        return {}
    try:
        with np.load(newest, allow_pickle=False) as saved:
            return dict(saved)
    except (OSError, ValueError, BadZipFile) as cause:
        raise ForgeError(f"{newest} cannot be read ({cause}); delete that checkpoint") from cause
