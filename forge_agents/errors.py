"""Errors that say what arrived, what was expected and what to do.

In: nothing. Out: exception types, `did_you_mean`. Waits for nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

DISTRIBUTION = "forge-agents-rl"
"""What pip calls this project; the messages that name an extra need it."""


class ForgeError(Exception):
    """Base of every error this package raises on purpose, except plain `ValueError`/`TypeError` on arguments."""


class UnknownIdError(ForgeError, KeyError):
    """An id that nothing is registered under."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0]) if self.args else ""


class ArgumentError(ForgeError, TypeError):
    """Arguments that what was named does not take: unknown names, missing ones, the wrong kind of thing."""


class NotReadyError(ForgeError, RuntimeError):
    """Something was asked for before there is any: a model that nothing has trained, a run that has not begun."""


class MissingExtraError(ForgeError, ImportError):
    """A library that is not installed. The message names the command that installs it."""


class ModelNotFoundError(ForgeError, FileNotFoundError):
    """A model that is neither a folder, nor built in, nor in the local hub cache, nor downloadable."""


class StallError(ForgeError, TimeoutError):
    """A wait that outlived its deadline. The message names who was waited for.

    Args:
        who: Their name; empty where nobody in particular was waited for.
    """

    def __init__(self, message: str, who: str = "") -> None:
        super().__init__(message)
        self.who = who
        self.snapshot: Mapping[str, Any] = {}
        """What the process that waited was doing then, JSON-safe; empty where nobody looked."""


class LateAnswerError(ForgeError, TimeoutError):
    """An answer that an engine worked on for longer than it may; it costs its episode, and the engine goes on."""


class ActorDiedError(ForgeError, RuntimeError):
    """An actor's process ended while work was expected of it.

    Args:
        message: Says who died during what.
        place: Equal for two deaths by the same signal at the same place; empty where it is not known.
    """

    def __init__(self, message: str, who: str = "", place: str = "") -> None:
        super().__init__(message)
        self.who = who
        self.place = place


class RespawnLimitError(ForgeError, RuntimeError):
    """More processes died than a run may start again, or two died at the same place."""


class HostError(ForgeError, RuntimeError):
    """Hosts that a run asks for and cannot have: too few, unreachable, lost, or without what they should hold."""


class EndpointError(ForgeError, RuntimeError):
    """An endpoint that refused, failed or answered nonsense.

    Args:
        message: Names the endpoint; holds no key.
        status: HTTP status of its refusal; None where there was none.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class BudgetError(ForgeError, RuntimeError):
    """What an endpoint may spend in one run is spent."""


class PlayerLeftError(ForgeError, EOFError):
    """A person left the seat."""


class PreflightError(ForgeError, ValueError):
    """What a run would have failed at once its engines ran, found before they were started."""


class EmptyBatchError(ForgeError, RuntimeError):
    """Nothing to learn from: no group had rewards that differ."""


class MismatchError(ForgeError, RuntimeError):
    """Sampler and learner disagree about what was sampled: they do not hold the same model."""


class DivergedError(ForgeError, FloatingPointError):
    """A loss or gradient that is no finite number. The message says where the batch is."""


class RunFolderError(ForgeError, OSError):
    """A run or cache folder that cannot be used."""


def near_names(word: object, known: Iterable[str], *, cutoff: float = 0.5) -> list[str]:
    """At most three known names that are near a word, the nearest first.

    Args:
        cutoff: How alike they must be, 0 to 1, as `difflib.get_close_matches` takes it.
    """
    by_folded = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(str(word).casefold(), list(by_folded), n=3, cutoff=cutoff)
    return [by_folded[name] for name in near]


def did_you_mean(word: object, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """A sentence with the `near_names`, e.g. ``" Did you mean 'a' or 'b'?"``; empty when none is near."""
    near = near_names(word, known, cutoff=cutoff)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
