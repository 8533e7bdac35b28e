"""Checkpoints of a whole experiment: every learner, and the step to continue from.

In: learners. Out: folders ``step-NNNNNN``, complete once they hold ``experiment.json``. Waits for the learners.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from forge_agents.errors import ForgeError
from forge_agents.rollout import all_or_first_error

if TYPE_CHECKING:
    from forge_trainers.learner import Learner

_log = logging.getLogger(__name__)
_MARK = "experiment.json"


class Checkpoints:
    """The newest checkpoints of a run.

    Args:
        folder: Where they lie.
        keep: How many stay on disk, at least 1.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder, self._keep = folder, keep

    def any(self) -> bool:
        """Whether there is a complete checkpoint."""
        return bool(self._complete())

    async def save(self, step: int, learners: Mapping[str, Learner]) -> Path:
        """Write the state after `step` steps: into a draft folder, renamed when whole."""
        draft, final = self._folder / f".draft-{step:06d}", self._folder / f"step-{step:06d}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        await all_or_first_error(learner.save(draft / name) for name, learner in learners.items())
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
