"""Many weak scores into one probability of correctness, without labels. Start at `default`; `published` are its peers.

In: scores [n, m], NaN where a verifier abstained. Out: P(correct) [n]. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

from forge_agents.errors import UnknownIdError, did_you_mean
from forge_verifiers.combiners.base import Combiner, CombinerReport, NotFittedError
from forge_verifiers.combiners.default import Default, Prior
from forge_verifiers.combiners.published import DawidSkene, Logistic, Majority, Mean, Weaver

__all__ = [
    "Combiner",
    "CombinerReport",
    "DawidSkene",
    "Default",
    "Logistic",
    "Majority",
    "Mean",
    "NotFittedError",
    "Prior",
    "Weaver",
    "get",
    "kind",
    "names",
    "register",
]

_KINDS: dict[str, type[Combiner]] = {}

_Kind = TypeVar("_Kind", bound=type[Combiner])


def register(kind: _Kind) -> _Kind:
    """Makes a combiner available by its ``name``, here and as ``combine=`` of an ensemble.

    A decorator of a `Combiner`. Registering the same class (by its qualified name) again replaces the earlier one, so
    notebook cells can be run twice.

    Raises:
        TypeError: no class derived from `Combiner`.
        ValueError: it has no name, or the name is taken by another class.
    """
    anything: Any = kind
    if not (isinstance(anything, type) and issubclass(anything, Combiner)):
        raise TypeError(f"{kind!r} is no combiner; register a class derived from forge_verifiers.combiners.Combiner")
    name = getattr(kind, "name", "")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{kind.__name__} has no name; give it name: ClassVar[str]")
    known = _KINDS.get(name, kind)
    if (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ValueError(f"the combiner {name!r} is {known.__module__}.{known.__qualname__}; choose another name")
    _KINDS[name] = kind
    return kind


for _kind in (Mean, Majority, Logistic, DawidSkene, Weaver, Default):
    register(_kind)


def names() -> tuple[str, ...]:
    """Names that `get` knows."""
    return tuple(_KINDS)


def kind(name: str) -> type[Combiner]:
    """The class of this name.

    Raises:
        UnknownIdError: no combiner has this name.
    """
    if name not in _KINDS:
        raise UnknownIdError(f"no combiner is called {name!r}; known: {', '.join(_KINDS)}.{did_you_mean(name, _KINDS)}")
    return _KINDS[name]


def get(
    name: str,
    families: Sequence[Hashable | None] | Mapping[int, Hashable] | None = None,
    anchors: Sequence[int] | None = None,
    priors: Mapping[int, Prior] | None = None,
) -> Combiner:
    """A fresh, unfitted combiner.

    Args:
        name: "mean", "majority", "logistic", "dawid-skene", "weaver", "default" (`Default`), or one registered.
        families: one label per verifier (None = unrelated), or {column: label}. "logistic", "dawid-skene" and
            "weaver" are kept as published and use neither families nor anchors.
        anchors: columns of verifiers known to be better than the rest.
        priors: what is known of verifiers beforehand, by column; for combiners whose `takes_priors` is True.

    Raises:
        UnknownIdError: no combiner has this name.
        ValueError: priors for a combiner that takes none.
    """
    wanted: Any = kind(name)
    if priors and not wanted.takes_priors:
        raise ValueError(f"the {name!r} combiner takes no priors; use {Default.name!r}, or leave priors out")
    known = {"priors": priors} if priors else {}
    made: Combiner = wanted(families=families, anchors=anchors, **known)
    return made
