"""Calls user functions as verifiers and rewards: the names of their parameters decide which arguments they receive."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import reprlib
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from forge_agents.errors import USER_ERRORS, ArgumentError
from forge_agents.imports import is_library
from forge_agents.types import Trajectory

Many: TypeAlias = Literal["one", "all"]
Source: TypeAlias = Literal["trajectory", "text", "info"]
"""Source of an argument: the trajectory, the texts of its last turn, or the entry of its ``info`` with that name."""
_PARAMETERS: Mapping[Source, Mapping[str, Many]] = {
    "trajectory": {"trajectory": "one", "traj": "one", "t": "one", "trajectories": "all", "trajs": "all", "ts": "all"},
    "text": {"completion": "one", "prompt": "one", "completions": "all", "prompts": "all"},
}
_MAX_LISTED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionResults:
    """A function's results for n trajectories."""

    values: Any
    """[n], or None for rows that were skipped or failed. The unchanged result of a function that got all rows."""
    failed: Mapping[int, str]
    """Error by row on which it raised, or which lacks an argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A function and the arguments that it takes."""

    function: Callable[..., Any]
    batch: bool
    """True if it takes all trajectories in one call and returns one number for each."""
    required: Mapping[str, Source]
    """Parameters without a default."""
    optional: tuple[str, ...]
    """Parameters with a default. A function of texts receives those that are available."""
    takes_kwargs: bool
    """True if it has ``**kwargs``. A function of texts then receives everything."""

    @property
    def plain(self) -> bool:
        """True if trajectories are its only argument."""
        return [*self.required.values()] == ["trajectory"]

    def call(self, trajectories: Sequence[Trajectory]) -> FunctionResults:
        """Call the function. Its error is raised if it raises on every trajectory, or on all in one call.

        If some trajectories lack an argument, an error on all others is a failure of these rows: a single unusual
        answer does not stop a run.
        """
        if self.batch and self.plain:
            return FunctionResults(values=self.function(trajectories), failed={})
        failed: dict[int, str] = {}
        rows: list[int] = []
        for row, trajectory in enumerate(trajectories):
            if missing := self._missing_info(trajectory):
                need = f"which {describe_function(self.function)} takes"
                failed[row] = f"trajectory.info has no {missing!r}, {need}. It has {info_keys(trajectory)}"
            elif trajectory.turns or "text" not in self.required.values():  # without a turn there is no text
                rows.append(row)
        selected = [trajectories[row] for row in rows]
        if not self.batch:
            results = grade_each(self._call_one, selected, total=len(trajectories))
            failed |= {rows[k]: reason for k, reason in results.failed.items()}
            values = results.values
        elif len(rows) == len(trajectories):
            return FunctionResults(values=self.function(**self._arguments(selected)), failed=failed)
        else:
            try:
                values = self.function(**self._arguments(selected)) if selected else []
            except USER_ERRORS as error:  # reported for these rows
                values = [None] * len(rows)
                failed |= dict.fromkeys(rows, describe_error(error))
        if np.shape(values)[:1] != (len(rows),):
            raise ValueError(
                f"{describe_function(self.function)} received {len(rows)} of {len(trajectories)} trajectories, because "
                f"not all have its arguments, and returned {reprlib.repr(values)}. Return a number each"
            )
        by_row = dict(zip(rows, values, strict=True))
        return FunctionResults(values=[by_row.get(row) for row in range(len(trajectories))], failed=failed)

    def _missing_info(self, trajectory: Trajectory) -> str | None:
        names = (name for name, source in self.required.items() if source == "info" and name != "info")
        return next((name for name in names if name not in trajectory.info), None)

    def _call_one(self, trajectory: Trajectory) -> Any:
        if self.plain:
            return self.function(trajectory)
        return self.function(**{name: column[0] for name, column in self._arguments([trajectory]).items()})

    def _arguments(self, trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
        """Values for each trajectory, by parameter."""
        sources = dict(self.required)
        if "text" in sources.values():
            many = "all" if self.batch else "one"
            available: dict[str, Source] = {name: "info" for trajectory in trajectories for name in trajectory.info}
            available |= {name: "text" for name, each in _PARAMETERS["text"].items() if each == many}
            available |= {"info": "info"} if "info" in self.optional else {}
            extra = {name: s for name, s in available.items() if self.takes_kwargs or name in self.optional}
            sources = extra | sources
        return {name: [_value(name, source, t) for t in trajectories] for name, source in sources.items()}


def _value(name: str, source: Source, trajectory: Trajectory) -> Any:
    if source == "trajectory":
        return trajectory
    if source == "text":
        last = trajectory.turns[-1]
        return last.response if name.startswith("completion") else last.observation
    return trajectory.info.get(name) if name in trajectory.info or name != "info" else trajectory.info


def check_trajectories(trajectories: Any) -> None:
    """Raise ArgumentError unless the argument is a list of trajectories. An episode also has turns."""
    is_list = isinstance(trajectories, Collection) and not isinstance(trajectories, str)
    wrong = next((each for each in trajectories if not hasattr(each, "agent")), None) if is_list else trajectories
    if wrong is not None:
        raise ArgumentError(
            f"a verifier scores a list of trajectories, but got {type(wrong).__name__}. Pass [trajectory], or "
            "list(episode.trajectories.values())"
        )


def grade_each(
    grade: Callable[[Trajectory], Any], trajectories: Sequence[Trajectory], total: int | None = None
) -> FunctionResults:
    """Call `grade` on each trajectory. An exception loses only its row.

    If all raise, the first error is raised, unless they are a part of `total` trajectories.
    """
    check_trajectories(trajectories)
    values: list[Any] = []
    errors: dict[int, BaseException] = {}
    for row, trajectory in enumerate(trajectories):
        try:
            values.append(grade(trajectory))
        except USER_ERRORS as error:  # reported for its row
            values.append(None)
            errors[row] = error
    if errors and len(errors) == (len(trajectories) if total is None else total):
        raise errors[0]
    return FunctionResults(values=values, failed={row: describe_error(error) for row, error in errors.items()})


def describe_error(error: BaseException) -> str:
    """An error in one line, with the file and line that raised it."""
    trace = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in trace if not is_library(frame.filename)] or trace
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def info_keys(trajectory: Trajectory) -> str:
    """The keys of a trajectory's ``info`` for an error message."""
    names = sorted(map(repr, trajectory.info))
    more = [f"and {len(names) - _MAX_LISTED} more"] if names[_MAX_LISTED:] else []
    return ", ".join([*names[:_MAX_LISTED], *more]) or "nothing"


def describe_function(function: Any) -> str:
    """Name, parameters, file and line of a function for an error message."""
    if isinstance(signature := getattr(function, "signature", None), Signature):  # a reward that calls a function
        function = signature.function
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = name_of(function)
    with contextlib.suppress(TypeError, ValueError):
        name += str(inspect.signature(function))
    code = getattr(inspect.unwrap(inner), "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


def name_of(function: Any) -> str:
    """Name of a function, of the function in a `functools.partial`, or of an object's class."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def parse_signature(function: Any, role: str, *, default: Many | None = None) -> Signature:
    """Determine a function's arguments from its parameters.

    ========================================  ====================================================================
    parameters without a default              call
    ========================================  ====================================================================
    ``trajectory``, ``traj``, ``t``           one trajectory; returns a number
    ``trajectories``, ``trajs``, ``ts``       all trajectories; returns one number each
    ``completion``, ``prompt``                response of a trajectory's last turn, reasoning included, and its
                                              observation; returns a number
    ``completions``, ``prompts``              lists of these, as in TRL; returns one number each
    ========================================  ====================================================================

    An annotation with `Trajectory` has the same effect. ``info`` and other names next to these are looked up in
    ``trajectory.info``. Functions of texts with ``**kwargs`` receive all of it.

    Args:
        function: The function.
        role: ``"verifier"`` or ``"reward"``, for errors.
        default: Meaning of a single parameter of another name. With None, such a parameter raises.

    Raises:
        ArgumentError: Not a function, or the parameters have no or contradictory meanings.
    """
    if isinstance(function, type) or not callable(function):
        is_class = isinstance(function, type)
        if isinstance(function, list | tuple):
            raise ArgumentError(
                f"a {type(function).__name__} is not a {role}. To combine several, pass fa.Ensemble([...]), "
                "fa.MultiReward({name: ...}) or a weighted sum such as 0.8 * a + 0.2 * b"
            )
        if is_class and any(callable(getattr(function, name, None)) for name in ("score", "assess")):
            name = name_of(function)
            raise ArgumentError(f"the class {name} is not a {role}, but its objects are. Write {name}(...)")
        value = f"the class {name_of(function)}" if is_class else f"{type(function).__name__} {reprlib.repr(function)}"
        raise ArgumentError(
            f"{value} is not a {role}. Pass a function, or an object that derives from "
            "forge_verifiers.Composable and has name, family, cost and score"
        )
    advice = (
        "name its parameter `trajectory` (one; return a number), `trajectories` (all; return a number each), or "
        "`completion` (the text of the last turn) next to names of trajectory.info"
    )
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise ArgumentError(f"{role} {describe_function(function)} is async. Write it without async")
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # some functions written in C have no signature
        parameters = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    meanings = {p.name: _meaning(p) for p in needed}
    required = {name: source for name, (_, source) in meanings.items()}
    kinds = {many for many, _ in meanings.values() if many}
    if not kinds and default and len(needed) <= 1 and any(p.kind < p.KEYWORD_ONLY for p in parameters):
        kinds, required = {default}, {"": "trajectory"}
    if len(kinds) != 1:
        takes = f"parameters of unknown meaning ({', '.join(required) or 'none is named'})"
        takes = "both one trajectory and all of them" if kinds else takes
        wrap = ", or wrap it in fa.Rule, which passes one trajectory at a time"
        advice += wrap if role == "verifier" and len(needed) == 1 and not kinds else ""
        raise ArgumentError(f"{role} {describe_function(function)} takes {takes}; {advice}")
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return Signature(
        function=function,
        batch=kinds == {"all"},
        required=required,
        optional=tuple(p.name for p in parameters if p.kind in named and p.name not in required),
        takes_kwargs=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def _meaning(parameter: inspect.Parameter) -> tuple[Many | None, Source]:
    """Whether a parameter takes "one" or "all" trajectories, None if unclear, and the source of its value."""
    kind = parameter.annotation
    text = kind if isinstance(kind, str) else "" if kind is parameter.empty else inspect.formatannotation(kind)
    if "Trajectory" in text:
        return ("all" if "[" in re.sub(r"(Optional|Annotated|Union)\[", "", text) else "one"), "trajectory"
    source: Source = next((source for source, names in _PARAMETERS.items() if parameter.name in names), "info")
    return _PARAMETERS.get(source, {}).get(parameter.name), source
