"""How a user's function is called: the names of its parameters say what it takes.

In: a function, trajectories. Out: what it returned for each, and why a trajectory has nothing. Waits for the function.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import reprlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from forge_agents.errors import ArgumentError
from forge_agents.imports import is_library
from forge_agents.types import Trajectory

Many: TypeAlias = Literal["one", "all"]
Fill: TypeAlias = Literal["trajectory", "text", "info"]
"""What an argument is: the trajectory, what it wrote or had read last, or what its ``info`` has by that name."""
_SAYS: Mapping[Fill, Mapping[str, Many]] = {
    "trajectory": {"trajectory": "one", "traj": "one", "t": "one", "trajectories": "all", "trajs": "all", "ts": "all"},
    "text": {"completion": "one", "prompt": "one", "completions": "all", "prompts": "all"},
}


_SHOWN = 8
"""Names of an ``info`` that are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """What a function said of n trajectories."""

    values: Any
    """[n]; None where it was not asked or failed. What a function of all trajectories returned, as it is, if it was
    asked about all."""
    failed: Mapping[int, str]
    """Rows on which it raised, or that lack what it takes, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A function and what its parameters ask for."""

    function: Callable[..., Any]
    batch: bool
    """Whether it takes all trajectories in one call and returns a number each."""
    takes: Mapping[str, Fill]
    """Its parameters that have no default."""
    may_take: tuple[str, ...]
    """Its others; a function of texts gets those that it can get."""
    rest: bool
    """Whether a function of texts gets all that it can get: it has ``**kwargs``."""

    @property
    def plain(self) -> bool:
        """Whether trajectories are all that it takes."""
        return [*self.takes.values()] == ["trajectory"]

    def __call__(self, trajectories: Sequence[Trajectory]) -> Returned:
        """Call it. Where it raises on each of several trajectories, or on all in one call, its error is raised."""
        if self.batch and self.plain:
            return Returned(values=self.function(trajectories), failed={})
        failed, asked = {}, []
        for row, trajectory in enumerate(trajectories):
            if lacks := self._lacks(trajectory):
                takes = f"which {called(self.function)} takes"
                failed[row] = f"trajectory.info has no {lacks!r}, {takes}; it has {has(trajectory)}"
            elif trajectory.turns or "text" not in self.takes.values():  # who never moved wrote nothing
                asked.append(row)
        shown = [trajectories[row] for row in asked]
        if not self.batch:
            found = one_by_one(self._one, shown)
            failed |= {asked[at]: why for at, why in found.failed.items()}
            values = found.values
        else:
            values = self.function(**self._arguments(shown)) if shown else []
            if len(asked) == len(trajectories):
                return Returned(values=values, failed=failed)
        if np.shape(values)[:1] != (len(asked),):
            seen = f"{len(asked)} of {len(trajectories)} trajectories, as not all have what it takes"
            raise ValueError(
                f"{called(self.function)} was shown {seen}, and returned {reprlib.repr(values)}; return a number each"
            )
        by_row = dict(zip(asked, values, strict=True))
        return Returned(values=[by_row.get(row) for row in range(len(trajectories))], failed=failed)

    def _lacks(self, trajectory: Trajectory) -> str | None:
        named = (name for name, fill in self.takes.items() if fill == "info" and name != "info")
        return next((name for name in named if name not in trajectory.info), None)

    def _one(self, trajectory: Trajectory) -> Any:
        if self.plain:
            return self.function(trajectory)
        return self.function(**{name: column[0] for name, column in self._arguments([trajectory]).items()})

    def _arguments(self, shown: Sequence[Trajectory]) -> dict[str, list[Any]]:
        """By parameter, of each trajectory."""
        fills = dict(self.takes)
        if "text" in fills.values():
            own = "all" if self.batch else "one"
            texts: dict[str, Fill] = {name: "text" for name, says in _SAYS["text"].items() if says == own}
            infos: dict[str, Fill] = {name: "info" for trajectory in shown for name in trajectory.info}
            whole: dict[str, Fill] = {"info": "info"} if "info" in self.may_take else {}
            known = infos | texts | whole
            fills = {name: fill for name, fill in known.items() if self.rest or name in self.may_take} | fills
        return {name: [_value(name, fill, trajectory) for trajectory in shown] for name, fill in fills.items()}


def _value(name: str, fill: Fill, trajectory: Trajectory) -> Any:
    if fill == "trajectory":
        return trajectory
    if fill == "text":
        last = trajectory.turns[-1]
        return last.response if name.startswith("completion") else last.observation
    return trajectory.info.get(name) if name in trajectory.info or name != "info" else trajectory.info


def one_by_one(grade: Callable[[Trajectory], Any], trajectories: Sequence[Trajectory]) -> Returned:
    """`grade` of each; one that raises costs its own row. Where all raise, the first error is raised."""
    values: list[Any] = []
    errors: dict[int, Exception] = {}
    for row, trajectory in enumerate(trajectories):
        try:
            values.append(grade(trajectory))
        except Exception as error:  # noqa: BLE001  # of somebody's code: it costs its row and is told
            values.append(None)
            errors[row] = error
    if errors and len(errors) == len(trajectories):
        raise errors[0]
    return Returned(values=values, failed={row: told(error) for row, error in errors.items()})


def told(error: Exception) -> str:
    """An error in one line, with the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_library(frame.filename)] or frames
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"


def has(trajectory: Trajectory) -> str:
    """Names in a trajectory's ``info``, for those who looked for another there."""
    names = sorted(map(repr, trajectory.info))
    more = [f"and {len(names) - _SHOWN} more"] if names[_SHOWN:] else []
    return ", ".join([*names[:_SHOWN], *more]) or "nothing"


def called(function: Any) -> str:
    """A function as errors call it: name, parameters, file and line."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = name_of(function)
    with contextlib.suppress(TypeError, ValueError):
        name += str(inspect.signature(function))
    code = getattr(inspect.unwrap(inner), "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


def name_of(function: Any) -> str:
    """A function's own name, or that of what `functools.partial` holds, or its class's."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def read(function: Any, what: str, *, otherwise: Many | None = None) -> Reading:
    """Find out what a function takes.

    ========================================  ====================================================================
    parameters without a default              how it is called
    ========================================  ====================================================================
    ``trajectory``, ``traj``, ``t``           with one trajectory; returns a number
    ``trajectories``, ``trajs``, ``ts``       with all; returns a number each
    ``completion``, ``prompt``                with the response of one trajectory's last turn, reasoning included, and
                                              the text that the agent had read; returns a number
    ``completions``, ``prompts``              with lists of these, as TRL calls its rewards; returns a number each
    ========================================  ====================================================================

    An annotation that names `Trajectory` says the same. ``info`` and any other name beside these is looked up in
    ``trajectory.info``. Functions of texts that take ``**kwargs`` get all of it.

    Args:
        function: The function.
        what: What it is to be, for errors: ``"verifier"``, ``"reward"``.
        otherwise: What an only parameter of another name is; None refuses it.

    Raises:
        ArgumentError: Nothing, or more than one thing, says what it takes.
    """
    if isinstance(function, type) or not callable(function):
        is_class = isinstance(function, type)
        sent = f"the class {name_of(function)}" if is_class else f"{type(function).__name__} {function!r:.60}"
        raise ArgumentError(
            f"{sent} is no {what}; send a function, or an object that derives from "
            "forge_verifiers.Composable and has name, family, cost and score"
        )
    advice = (
        "name its parameter `trajectory` (one; return a number), `trajectories` (all; return a number each), or "
        "`completion` (the text of the last turn) beside names of trajectory.info"
    )
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise ArgumentError(f"{what} {called(function)} is async and asked in a thread of its own; write it without")
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # of some functions written in C
        parameters = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    said = {p.name: _said(p) for p in needed}
    takes, kinds = {name: fill for name, (_, fill) in said.items()}, {says for says, _ in said.values() if says}
    if not kinds and otherwise and len(needed) <= 1 and any(p.kind < p.KEYWORD_ONLY for p in parameters):
        kinds, takes = {otherwise}, {"": "trajectory"}
    if len(kinds) != 1:
        seen = "one trajectory and all of them" if kinds else f"{', '.join(takes) or 'anything'}, whatever that is"
        wrap = ", or wrap it in fv.Rule, which shows it one trajectory at a time"
        advice += wrap if what == "verifier" and len(needed) == 1 and not kinds else ""
        raise ArgumentError(f"{what} {called(function)} takes {seen}; {advice}")
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return Reading(
        function=function,
        batch=kinds == {"all"},
        takes=takes,
        may_take=tuple(p.name for p in parameters if p.kind in named and p.name not in takes),
        rest=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def _said(parameter: inspect.Parameter) -> tuple[Many | None, Fill]:
    """Whether a parameter asks for one or all, None where it does not say, and what fills it."""
    kind = parameter.annotation
    text = kind if isinstance(kind, str) else "" if kind is parameter.empty else inspect.formatannotation(kind)
    if "Trajectory" in text:
        return ("all" if "[" in re.sub(r"(Optional|Annotated|Union)\[", "", text) else "one"), "trajectory"
    fills = (fill for fill, names in _SAYS.items() if parameter.name in names)
    fill: Fill = next(fills, "info")
    return _SAYS.get(fill, {}).get(parameter.name), fill
