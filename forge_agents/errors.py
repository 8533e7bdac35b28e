"""Exception types, and suggestions for misspelled names.

A message says what arrived, what was expected and what to do.
"""

from __future__ import annotations

import asyncio
import difflib
import itertools
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

DISTRIBUTION = "forge-agents-rl"
"""Name of this project for pip, for messages that name an extra."""

USER_ERRORS = (Exception, SystemExit, asyncio.CancelledError, GeneratorExit)
"""Exceptions that count as a failure of a user's function. KeyboardInterrupt is Ctrl-C."""


_MAX_NAME_CHARS, _MAX_CANDIDATES = 200, 1000
"""Maximum length of names that are compared, and of their number: both may be a stranger's."""


class ForgeError(Exception):
    """Base of every error this package raises on purpose, except plain `ValueError`/`TypeError` on arguments."""


class UnknownIdError(ForgeError, KeyError):
    """An id is not registered."""

    def __str__(self) -> str:  # KeyError prints the repr
        return str(self.args[0]) if self.args else ""


class ArgumentError(ForgeError, TypeError):
    """Arguments do not fit: unknown or missing names, or a wrong type."""


class NotReadyError(ForgeError, RuntimeError):
    """Something does not exist yet, such as a trained model or a run."""


class MissingExtraError(ForgeError, ImportError):
    """A library is not installed. The message names the command that installs it."""


class UntrustedModuleError(ForgeError, ImportError):
    """A settings file names code of Python's library or of an installed package that is not for this project."""


def missing_stack(what: str, error: ModuleNotFoundError) -> Exception:
    """Return an error that names the extra to install if none is installed, else `error`."""
    if find_spec("pettingzoo") is not None:
        return error
    return MissingExtraError(
        f"{what} needs the package {error.name}. Without an extra, only verifiers can be used. "
        f"Install {DISTRIBUTION}[cpu] or [gpu] from a clone or a wheel"
    )


class ModelNotFoundError(ForgeError, FileNotFoundError):
    """A model is neither a folder, nor built in, nor in the local hub cache, nor downloadable."""


class StallError(ForgeError, TimeoutError):
    """A wait exceeded its timeout. The message and `who` name the process or component."""

    def __init__(self, message: str, who: str = "") -> None:
        super().__init__(message)
        self.who = who
        self.snapshot: Mapping[str, Any] = {}
        """State of the waiting process at that time, JSON-safe. Empty if not recorded. See `stalls.snapshot`."""


class LateAnswerError(ForgeError, TimeoutError):
    """An engine exceeded the time limit of an answer. The episode fails and the engine continues."""


class ActorDiedError(ForgeError, RuntimeError):
    """An actor's process ended unexpectedly. `place` (signal and stack) is equal for two deaths at the same place."""

    def __init__(self, message: str, who: str = "", place: str = "") -> None:
        super().__init__(message)
        self.who = who
        self.place = place
        self.ended_at_start = False
        """Whether the process ended before it could be called."""


class RespawnLimitError(ForgeError, RuntimeError):
    """Too many processes of a run died, or two died at the same place."""


class HostError(ForgeError, RuntimeError):
    """Hosts of a run are too few, unreachable, lost, or lack required files or hardware."""


class EndpointError(ForgeError, RuntimeError):
    """An endpoint refused a request, failed, or sent an invalid answer. `status` is the HTTP status, if any."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class BudgetError(ForgeError, RuntimeError):
    """An endpoint's budget for one run is used up."""


class PlayerLeftError(ForgeError, EOFError):
    """A human player left the game."""


class PreflightError(ForgeError, ValueError):
    """A run would fail after its engines were started. The problem was found before that."""


class EmptyBatchError(ForgeError, RuntimeError):
    """No group is informative, because within each group all rewards are equal."""


class MismatchError(ForgeError, RuntimeError):
    """An engine does not hold the expected weights: those of the learner, or those of an opponent's snapshot."""


class DivergedError(ForgeError, FloatingPointError):
    """A loss or gradient is not finite. The message names the file with the batch."""


class RunFolderError(ForgeError, OSError):
    """A run or cache folder cannot be used."""


def near_names(word: object, candidates: Iterable[str], *, cutoff: float = 0.5) -> list[str]:
    """Return at most three candidates similar to a word, the most similar first. Long names are not compared."""
    if len(str(word)) > _MAX_NAME_CHARS:  # the time grows with the product of both lengths
        return []
    short = (name for name in candidates if len(name) <= _MAX_NAME_CHARS)
    by_folded = {name.casefold(): name for name in itertools.islice(short, _MAX_CANDIDATES)}
    near = difflib.get_close_matches(str(word).casefold(), list(by_folded), n=3, cutoff=cutoff)
    return [by_folded[name] for name in near]


def did_you_mean(word: object, candidates: Iterable[str]) -> str:
    """Return a sentence with the `near_names`, such as ``" Did you mean 'a' or 'b'?"``. Empty if there are none."""
    near = near_names(word, candidates)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
