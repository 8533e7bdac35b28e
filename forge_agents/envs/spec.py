"""What is known of an environment before it is made: the one thing that registry, wrappers and workers hand each other.

In: what `register` was told. Out: an `EnvSpec`, and the class or factory that it names. Waits for nothing.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

from forge_agents.errors import ForgeError, UnknownIdError, did_you_mean

if TYPE_CHECKING:
    from pettingzoo import AECEnv

AnyEnv: TypeAlias = "AECEnv[str, Any, Any]"
Isolation: TypeAlias = Literal["none", "process"]

_ID = re.compile(r"(?P<base>[\w.-]+/[\w.-]+?)(?:-v(?P<version>\d+))?(?:@\d+)?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """How to make an environment."""

    id: str
    """``namespace/Name-vN``; ``namespace/Name-vN@K`` of its level K."""
    entry_point: str | Callable[..., Any] = field(repr=False)
    """``"package.module:Class"``, or the class or factory itself."""
    max_turns: int | None = None
    """Decisions of all agents together after which an episode is truncated; None leaves it to the environment."""
    tags: tuple[str, ...] = ()
    """Words to filter by, e.g. ``"2p"``."""
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Constructor arguments, and those that `forge_agents.envs.wrappers.BY_NAME` names."""
    levels: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    """Constructor arguments of each level of difficulty, the easiest first: ``id@1`` is made with the first."""
    isolation: Isolation = "none"
    """``"process"``: the environment lives in a worker process, because it is slow, or may crash or hang."""
    step_timeout_s: float = 60.0
    """Seconds that one call may take in a worker process; then the worker is replaced and the episode fails."""
    oracle: str | Callable[..., Any] | None = field(default=None, repr=False)
    """Who plays it well: ``"package.module:Name"`` of a `forge_agents.envs.oracles.OracleFactory`, or the factory; None
    where nobody does."""

    def __post_init__(self) -> None:
        split_id(self.id)
        for name in ("entry_point", "oracle"):
            point = getattr(self, name)
            if isinstance(point, str) and not re.fullmatch(r"[\w.]+:[\w.]+", point):
                raise ValueError(f"{name} of {self.id} is {point!r}; write 'package.module:Class'")
        if not (self.oracle is None or isinstance(self.oracle, str) or callable(self.oracle)):
            raise TypeError(
                f"oracle of {self.id} is {type(self.oracle).__name__}; give a factory (agent, settings, rng) -> player"
            )
        check_max_turns(self.max_turns, self.id)
        if self.isolation not in get_args(Isolation) or not self.step_timeout_s > 0:
            raise ValueError(
                f"{self.id}: isolation={self.isolation!r} must be one of {', '.join(get_args(Isolation))}, and "
                f"step_timeout_s={self.step_timeout_s} above 0"
            )

    @property
    def name(self) -> str:
        """The id without its version."""
        return split_id(self.id)[0]

    @property
    def version(self) -> int:
        """The N of ``-vN``."""
        return split_id(self.id)[1]

    def at_level(self, level: int) -> EnvSpec:
        """The environment at one of its levels, 1 is the easiest.

        Raises:
            UnknownIdError: It has no such level.
        """
        if not 1 <= level <= len(self.levels):
            has = f"has levels 1 to {len(self.levels)}" if self.levels else "was registered without levels"
            raise UnknownIdError(f"there is no {self.id}@{level}: {self.id} {has}")
        arguments = {**self.kwargs, **self.levels[level - 1]}
        return replace(self, id=f"{self.id}@{level}", kwargs=arguments, levels=())

    def load(self) -> Callable[..., Any]:
        """The class or factory, imported if need be."""
        return self._loaded("entry point", self.entry_point)

    def load_oracle(self) -> Callable[..., Any]:
        """The oracle's factory, imported if need be; there must be one."""
        assert self.oracle is not None
        return self._loaded("oracle", self.oracle)

    def _loaded(self, what: str, point: str | Callable[..., Any]) -> Callable[..., Any]:
        if not isinstance(point, str):
            return point
        module, _, path = point.partition(":")
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            if not hasattr(found, part):
                raise ForgeError(
                    f"{what} {point!r} of {self.id}: {module} has no {path!r}.{did_you_mean(part, dir(found))}"
                )
            found = getattr(found, part)
        return cast("Callable[..., Any]", found)


def check_max_turns(max_turns: int | None, owner: str) -> None:
    """Raise unless `max_turns` is None or a positive integer."""
    if max_turns is not None and (type(max_turns) is not int or max_turns < 1):
        raise ValueError(f"max_turns of {owner} is {max_turns!r}; set an integer >= 1, or None for no limit")


def split_level(id_: str) -> tuple[str, int | None]:
    """An id and the level that it names, if any."""
    bare, at, level = id_.rpartition("@")
    return (bare, int(level)) if at and level.isdecimal() else (id_, None)


def split_id(id_: str) -> tuple[str, int]:
    """Name and version, without a level.

    Raises:
        ValueError: The id does not read ``namespace/Name-vN``.
    """
    match = _ID.fullmatch(id_)
    if match is None or match["version"] is None:
        raise ValueError(f"environment id {id_!r} should read 'namespace/Name-vN', e.g. 'my/Kuhn-v0'")
    return match["base"], int(match["version"])
