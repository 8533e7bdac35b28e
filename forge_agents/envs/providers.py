"""Whole namespaces of environments from other libraries: listed where the library is installed, made on demand.

In: offers, each a namespace, a function that registers its ids, and the extra that brings the library. Out: ids in the
registry. Waits for nothing; a library is imported when one of its environments is made, not before.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias, cast

from forge_agents.errors import MissingExtraError, UnknownIdError

Register: TypeAlias = Callable[[str | None], str | None]
"""``f(None)`` registers all ids of a namespace that can be listed. ``f(name)`` may register one more, for a name that
is not listed, and returns the id that the name means, or None."""

DISTRIBUTION = "forge-agents-rl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """Where the ids of a namespace come from."""

    namespace: str
    """The part of the ids before the slash."""
    entry_point: str
    """``"package.module:function"`` of a `Register`."""
    package: str
    """What must be importable, e.g. ``"textarena"``."""
    extra: str
    """The optional extra of this project that installs it; empty where it is always there."""

    def installed(self) -> bool:
        """Whether the library can be imported."""
        return _found(self.package)

    def require(self) -> None:
        """Raises MissingExtraError unless the library is there."""
        if not self.installed():
            raise MissingExtraError(
                f"environments {self.namespace}/... need the package {self.package!r}: "
                f"pip install '{DISTRIBUTION}[{self.extra}]'"
            )

    def load(self) -> Register:
        """The function that registers ids."""
        module, _, name = self.entry_point.partition(":")
        return cast("Register", getattr(importlib.import_module(module), name))


_providers: dict[str, Provider] = {}
_listed: set[str] = set()


def provide(namespace: str, *, entry_point: str, package: str, extra: str = "") -> Provider:
    """Offer the environments of a library under ``namespace/``.

    Args:
        namespace: The part of the ids before the slash.
        entry_point: ``"package.module:function"`` of a `Register`; imported at the first listing or look-up.
        package: What must be importable for the environments to be listed and made.
        extra: The optional extra that installs it.

    Raises:
        ValueError: The namespace is offered by another function.
    """
    offer = Provider(namespace=namespace, entry_point=entry_point, package=package, extra=extra)
    if _providers.setdefault(namespace, offer) != offer:
        raise ValueError(f"namespace {namespace!r} is already offered by {_providers[namespace].entry_point}")
    return offer


def list_installed() -> None:
    """Register the ids of all namespaces whose library is installed."""
    for provider in list(_providers.values()):
        if provider.installed():
            _list(provider)


def look_up(id_: str) -> str:
    """The id that `id_` means, registered if its namespace knows it; `id_` itself where no namespace does.

    Raises:
        MissingExtraError: The namespace's library is not installed.
    """
    namespace, slash, name = id_.partition("/")
    provider = _providers.get(namespace)
    if not slash or provider is None:
        return id_
    provider.require()
    _list(provider)
    return provider.load()(name) or id_


def _list(provider: Provider) -> None:
    if provider.namespace not in _listed:
        _listed.add(provider.namespace)
        provider.load()(None)


@cache
def _found(package: str) -> bool:
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # a parent package is missing
        return False
    return found is not None and found.has_location  # a mere folder of that name is no package


def without_module(id_: str) -> str:
    """The id behind the colon; the module before it is imported."""
    module, colon, rest = id_.rpartition(":")
    if not colon:
        return id_
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as cause:
        raise UnknownIdError(
            f"{id_!r} names the module {module!r}: {cause}. Run the command in the module's folder, or install it"
        ) from cause
    return rest
