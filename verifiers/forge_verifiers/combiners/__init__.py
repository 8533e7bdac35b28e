"""Combiners of weak verifiers' scores into P(correct). Start at `default`. `published` has baselines."""

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
    """Class decorator that makes a `Combiner` available by its ``name``, here and as ``combine=`` of an ensemble.

    A class with the same qualified name replaces the earlier one, so that notebook cells can run twice.

    Raises:
        TypeError: Not a subclass of `Combiner`.
        ValueError: No name, or the name belongs to another class.
    """
    value: Any = kind
    if not (isinstance(value, type) and issubclass(value, Combiner)):
        raise TypeError(f"{kind!r} is no combiner. Register a class derived from forge_verifiers.combiners.Combiner")
    name = getattr(kind, "name", "")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{kind.__name__} has no name. Give it name: ClassVar[str]")
    existing = _KINDS.get(name, kind)
    if (existing.__module__, existing.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ValueError(f"the combiner {name!r} is {existing.__module__}.{existing.__qualname__}. Choose another name")
    _KINDS[name] = kind
    return kind


for _kind in (Mean, Majority, Logistic, DawidSkene, Weaver, Default):
    register(_kind)


def names() -> tuple[str, ...]:
    """Registered names."""
    return tuple(_KINDS)


def kind(name: str) -> type[Combiner]:
    """The class with this name. Raises UnknownIdError for an unknown name."""
    if name not in _KINDS:
        raise UnknownIdError(f"no combiner is called {name!r}. Known: {', '.join(_KINDS)}.{did_you_mean(name, _KINDS)}")
    return _KINDS[name]


def get(
    name: str,
    families: Sequence[Hashable | None] | Mapping[int, Hashable] | None = None,
    anchors: Sequence[int] | None = None,
    priors: Mapping[int, Prior] | None = None,
) -> Combiner:
    """Create an unfitted combiner.

    Args:
        name: "mean", "majority", "logistic", "dawid-skene", "weaver", "default" (`Default`), or a registered name.
        families: One label per verifier (None = unrelated), or {column: label}. "logistic", "dawid-skene" and
            "weaver" are implemented as published and ignore families and anchors.
        anchors: Columns of verifiers known to be better than the rest.
        priors: Prior knowledge about verifiers by column, for combiners with `takes_priors`.

    Raises:
        UnknownIdError: No combiner has this name.
        ValueError: Priors for a combiner that takes none.
    """
    cls: Any = kind(name)
    if priors and not cls.takes_priors:
        raise ValueError(f"the {name!r} combiner takes no priors. Use {Default.name!r}, or leave priors out")
    combiner: Combiner = cls(families=families, anchors=anchors, **({"priors": priors} if priors else {}))
    return combiner
