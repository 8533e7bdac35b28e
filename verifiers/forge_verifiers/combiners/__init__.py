"""Combiners: many weak scores in, one probability of correctness out. Pure numpy; waits for nothing."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from forge_agents.errors import UnknownIdError, did_you_mean
from forge_verifiers.combiners.base import Combiner, CombinerReport, NotFittedError
from forge_verifiers.combiners.dawid_skene import DawidSkene
from forge_verifiers.combiners.logistic import Logistic
from forge_verifiers.combiners.mean import Majority, Mean
from forge_verifiers.combiners.priors import Prior
from forge_verifiers.combiners.symbolic import Symbolic
from forge_verifiers.combiners.weaver import Weaver

__all__ = [
    "Combiner",
    "CombinerReport",
    "DawidSkene",
    "Logistic",
    "Majority",
    "Mean",
    "NotFittedError",
    "Prior",
    "Symbolic",
    "Weaver",
    "get",
    "names",
]

_KINDS: dict[str, type[Combiner]] = {
    kind.name: kind for kind in (Mean, Majority, Logistic, DawidSkene, Weaver, Symbolic)
}


def names() -> tuple[str, ...]:
    """Names that `get` knows."""
    return tuple(_KINDS)


def get(
    name: str,
    families: Sequence[Hashable | None] | Mapping[int, Hashable] | None = None,
    anchors: Sequence[int] | None = None,
    priors: Mapping[int, Prior] | None = None,
) -> Combiner:
    """A fresh, unfitted combiner.

    Args:
        name: "mean", "majority", "logistic", "dawid-skene", "weaver" or "default" (`Symbolic`).
        families: one label per verifier (None = unrelated), or {column: label}. "logistic", "dawid-skene" and
            "weaver" are kept as published and use neither families nor anchors.
        anchors: columns of verifiers known to be better than the rest.
        priors: what is known of verifiers beforehand, by column; "default" only.

    Raises:
        UnknownIdError: no combiner has this name.
        ValueError: priors for a combiner that takes none.
    """
    if name not in _KINDS:
        raise UnknownIdError(f"no combiner is called {name!r}; known: {', '.join(_KINDS)}.{did_you_mean(name, _KINDS)}")
    if name == Symbolic.name:
        return Symbolic(families=families, anchors=anchors, priors=priors)
    if priors:
        raise ValueError(f"the {name!r} combiner takes no priors; use {Symbolic.name!r}, or leave priors out")
    return _KINDS[name](families=families, anchors=anchors)
