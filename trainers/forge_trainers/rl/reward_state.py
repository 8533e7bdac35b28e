"""The state of a reward that learns, for checkpoints: without the steps that were scored ahead of the learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from forge_agents.bench.fingerprints import digest
from forge_trainers.records.description import describe
from forge_trainers.run.checkpoints import Stateful

if TYPE_CHECKING:
    from forge_verifiers.ensemble.ensemble import Ensemble

_HASHES = "parts/hashes"
"""Key of the hashes of an ensemble's verifiers among the arrays of a reward."""


class RewardState:
    """State of a reward after the last training step, without steps that were scored ahead. Any reward may have none.

    Steps that were scored ahead are collected and scored again after a resume, so their evidence must not be saved. The
    state is copied between steps, because a scoring thread may be changing it at any other time.

    `ensembles` are those of the reward. The ensembles forget the scores of verifiers that have changed since the
    checkpoint.
    """

    def __init__(self, reward: object, ensembles: Sequence[Ensemble] = ()) -> None:
        self._reward = reward if isinstance(reward, Stateful) else None
        self._ensembles = list(ensembles)
        self._hashes = _part_hashes(self._ensembles)
        self._scored: dict[int, dict[str, np.ndarray]] = {}
        self._learned: dict[str, np.ndarray] | None = None
        self._ahead: set[int] = set()

    @property
    def exists(self) -> bool:
        """Whether the reward has a state."""
        return self._reward is not None

    def begin(self) -> None:
        """Begin a session: forget steps that were scored and not trained on."""
        if self._ahead and self._learned is not None and self._reward is not None:
            self._reward.load_state_dict(self._learned)
        self._scored, self._ahead = {}, set()

    def begin_scoring(self, step: int) -> None:
        """Note that the groups of `step` are about to be scored."""
        if not self._ahead:
            self._learned = self._state()
        self._ahead.add(step)

    def end_scoring(self, step: int) -> None:
        """Note that the groups of `step` are scored and those of the next step are not."""
        self._scored[step] = self._state()

    def settle(self, step: int) -> None:
        """Note that `step` was trained on."""
        self._ahead.discard(step)
        self._learned = self._scored.pop(step, self._learned)

    def trained(self) -> dict[str, np.ndarray]:
        """Return the reward's own state after the last training step. Empty if the reward has none."""
        return self._state() if self._learned is None or not self._ahead else self._learned

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the state after the last training step, with the hashes of the ensembles' verifiers."""
        state = self.trained()
        return {**state, _HASHES: np.array(list(self._hashes.items()), np.str_)} if self._hashes else state

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state_dict`."""
        self._scored, self._learned, self._ahead = {}, None, set()
        if self._reward is None:
            return
        self._reward.load_state_dict({name: value for name, value in state.items() if name != _HASHES})
        saved = dict(state.get(_HASHES, np.empty((0, 2), np.str_)).tolist())
        changed = {part for part, value in self._hashes.items() if saved.get(part, value) != value}
        for number, ensemble in enumerate(self._ensembles):
            names = [verifier.name for verifier in ensemble.verifiers if f"{number}/{verifier.name}" in changed]
            ensemble.forget(names, labels=f"{number}" in changed)

    def _state(self) -> dict[str, np.ndarray]:
        """Return a copy of the reward's state."""
        return {} if self._reward is None else {k: np.array(v) for k, v in self._reward.state_dict().items()}


def _part_hashes(ensembles: Sequence[Ensemble]) -> dict[str, str]:
    """Return a hash of each verifier by number of its ensemble and name, and of the labels by number."""
    parts = {f"{number}": ensemble.label for number, ensemble in enumerate(ensembles)} | {
        f"{number}/{verifier.name}": verifier
        for number, ensemble in enumerate(ensembles)
        for verifier in ensemble.verifiers
    }
    return {name: digest(describe(part, whole_addresses=True)) for name, part in parts.items()}
