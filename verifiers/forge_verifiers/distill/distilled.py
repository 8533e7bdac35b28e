"""A small text model that stands in for an ensemble.

In: trajectories. Out: its guess of the ensemble's posterior. Waits for nothing.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from forge_agents.types import Trajectory
from forge_verifiers.combiners import NotFittedError
from forge_verifiers.core.verifier import Composable, Cost, Scores, State
from forge_verifiers.distill.features import FORMAT, MEASURES, NUM_HASHED, text_features

_CHUNK = 512
_SHAPES = {
    "hashed": (NUM_HASHED,),
    "measured": (len(MEASURES),),
    "bias": (),
    "centre": (len(MEASURES),),
    "scale": (len(MEASURES),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How a distilled verifier compares with its ensemble, on groups that it was not fitted on."""

    auroc: float
    """How well it ranks trajectories that the ensemble holds to be correct (posterior above 0.5) before the others;
    NaN where the ensemble holds all to be the same."""
    correlation: float
    """Pearson correlation with the posterior; NaN where either is constant."""
    calibration_error: float
    """Mean gap to the posterior over up to ten bins of equal size, in [0, 1]."""
    fitted: int
    """Trajectories it was fitted on."""
    held_out: int
    """Trajectories it was compared on."""
    per_s: float
    """Trajectories that it scores in a second, on one core."""
    ensemble_per_s: float
    """Trajectories that the ensemble scores in a second; NaN where posteriors were given."""

    @property
    def speedup(self) -> float:
        """How much faster than the ensemble it is; NaN where that is unknown."""
        return self.per_s / self.ensemble_per_s


class Distilled(Composable):
    """A small text model in place of an ensemble; made by `distill`, or from what one has saved.

    It reads the last turns of a trajectory: what was written, the final answer, the observation. It judges style and
    wording and cannot work anything out, and it makes the errors of the ensemble that it was fitted on: beside the
    ensemble's own verifiers it adds nothing. It does not follow a policy that learns to write differently; distil anew.

    Args:
        name: What reports call it.
        family: Verifiers of one family share a cause of error.
    """

    cost: Cost = "cheap"

    def __init__(self, *, name: str = "distilled", family: str | None = None) -> None:
        self.name, self.family = name, family
        self.agreement: Agreement | None = None
        """What `distill` measured; None before."""
        self._weights: State = {}

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """Its guess of the ensemble's posterior, float32 [n]; NaN for an agent that never decided.

        Raises:
            NotFittedError: nothing was loaded.
        """
        if not self._weights:
            raise NotFittedError(f"verifier {self.name!r} has no weights yet; make it with distill, or load them")
        scores = np.full(len(trajectories), math.nan, np.float32)
        decided = [at for at, trajectory in enumerate(trajectories) if trajectory.turns]
        for low in range(0, len(decided), _CHUNK):
            rows = decided[low : low + _CHUNK]
            hashed, measures = text_features([trajectories[at] for at in rows])
            w = self._weights
            logits = hashed @ w["hashed"] + standard(measures, w["centre"], w["scale"]) @ w["measured"] + w["bias"]
            scores[rows] = 1.0 / (1.0 + np.exp(-np.clip(logits, -30.0, 30.0)))
        return scores

    def state_dict(self) -> State:
        """Weights and agreement; loading them gives bit-equal scores. Empty before `distill`."""
        if not self._weights:
            return {}
        measured = [] if self.agreement is None else dataclasses.astuple(self.agreement)
        return {
            "format": np.array(FORMAT),
            "agreement": np.array(measured, np.float64),
            **{key: value.copy() for key, value in self._weights.items()},
        }

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            ValueError: the state is of other features, incomplete, or has arrays of wrong shapes.
        """
        if not state:
            self._weights, self.agreement = {}, None
            return
        found = str(state.get("format", np.array("unknown")))
        if found != FORMAT:
            raise ValueError(f"state of {found!r} features arrived at {self.name!r}, expected {FORMAT!r}; distil again")
        for key, shape in _SHAPES.items():
            if key not in state or np.shape(state[key]) != shape:
                shown = np.shape(state[key]) if key in state else "nothing"
                raise ValueError(f"state of {self.name!r} has {shown} under {key!r}, expected shape {shape}")
        self._weights = {key: np.array(state[key], np.float32) for key in _SHAPES}
        measured = np.asarray(state.get("agreement", ()), np.float64).tolist()
        self.agreement = _agreement_from(measured)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights, the agreement, name and family to one safetensors file."""
        from safetensors.numpy import save_file

        state = self.state_dict()
        if not state:
            raise NotFittedError(f"verifier {self.name!r} has no weights yet; make it with distill, or load them")
        metadata = {"format": str(state.pop("format")), "name": self.name, "family": self.family or ""}
        save_file(state, os.fspath(path), metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The verifier that `save` wrote.

        Raises:
            ValueError: the file is not one of these.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(os.fspath(path), framework="numpy") as file:
                metadata = file.metadata() or {}
                state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # it is no mapping
        except SafetensorError as cause:
            raise ValueError(f"{path} is no safetensors file ({cause}); give what Distilled.save wrote") from cause
        verifier = cls(name=metadata.get("name", "distilled"), family=metadata.get("family") or None)
        verifier.load_state_dict({**state, "format": np.array(metadata.get("format", "unknown"))})
        return verifier


def standard(measures: NDArray[np.float32], centre: NDArray[Any], scale: NDArray[Any]) -> NDArray[np.float32]:
    """Measures in standard deviations, at most five either way; 0 where nothing ever varied."""
    varies = scale > 1e-6
    return np.asarray(np.clip((measures - centre) / np.where(varies, scale, 1.0), -5, 5) * varies, np.float32)


def _agreement_from(measured: list[float]) -> Agreement | None:
    if len(measured) != len(dataclasses.fields(Agreement)):
        return None
    auroc, correlation, error, fitted, held_out, per_s, ensemble_per_s = measured
    return Agreement(
        auroc=auroc,
        correlation=correlation,
        calibration_error=error,
        fitted=int(fitted),
        held_out=int(held_out),
        per_s=per_s,
        ensemble_per_s=ensemble_per_s,
    )
