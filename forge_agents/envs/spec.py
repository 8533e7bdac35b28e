"""`EnvSpec`: how to make an environment, shared by the registry, wrappers and workers."""

from __future__ import annotations

import functools
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
    """``namespace/Name-vN``, or ``namespace/Name-vN@K`` for level K."""
    entry_point: str | Callable[..., Any] = field(repr=False)
    """``"package.module:Class"``, or the class or factory itself."""
    max_turns: int | None = None
    """Number of decisions, of all agents together, after which an episode is truncated. None leaves it to the
    environment."""
    tags: tuple[str, ...] = ()
    """Words to filter by, such as ``"2p"``."""
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Constructor arguments, and wrapper arguments as in `forge_agents.envs.wrappers.BY_NAME`."""
    levels: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    """Constructor arguments by level of difficulty, easiest first. ``id@1`` uses the first."""
    isolation: Isolation = "none"
    """``"process"`` runs the environment in a worker process, because it is slow or may crash or hang."""
    step_timeout_s: float = 60.0
    """Maximum seconds of one call in a worker process. After that the worker is replaced and the episode fails."""
    oracle: str | Callable[..., Any] | None = field(default=None, repr=False)
    """Scripted policy: ``"package.module:Name"`` of a `forge_agents.envs.oracles.OracleFactory`, or the factory."""

    def __post_init__(self) -> None:
        split_id(self.id)
        for name in ("entry_point", "oracle"):
            target = getattr(self, name)
            if isinstance(target, str) and not re.fullmatch(r"[\w.]+:[\w.]+", target):
                raise ValueError(f"{name} of {self.id} is {target!r}. Write 'package.module:Class'")
        if not (self.oracle is None or isinstance(self.oracle, str) or callable(self.oracle)):
            raise TypeError(
                f"oracle of {self.id} is {type(self.oracle).__name__}. Pass a factory (agent, settings, rng) -> player"
            )
        check_max_turns(self.max_turns, self.id)
        if self.isolation not in get_args(Isolation) or not self.step_timeout_s > 0:
            raise ValueError(
                f"{self.id}: isolation={self.isolation!r} must be one of {', '.join(get_args(Isolation))}, and "
                f"step_timeout_s={self.step_timeout_s} must be above 0"
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
        """Return the spec of one level, counted from 1 (easiest). Raises UnknownIdError if there is no such level."""
        if not 1 <= level <= len(self.levels):
            has = f"has levels 1 to {len(self.levels)}" if self.levels else "was registered without levels"
            raise UnknownIdError(f"there is no {self.id}@{level}: {self.id} {has}")
        arguments = {**self.kwargs, **self.levels[level - 1]}
        return replace(self, id=f"{self.id}@{level}", kwargs=arguments, levels=())

    def load(self) -> Callable[..., Any]:
        """Return the class or factory, importing it if necessary."""
        return self._load("entry point", self.entry_point)

    def load_oracle(self) -> Callable[..., Any]:
        """Return the factory of the oracle, importing it if necessary. The oracle must exist."""
        assert self.oracle is not None
        return self._load("oracle", self.oracle)

    def _load(self, what: str, target: str | Callable[..., Any]) -> Callable[..., Any]:
        if not isinstance(target, str):
            return target
        module, _, path = target.partition(":")
        value: Any = importlib.import_module(module)
        for part in path.split("."):
            if not hasattr(value, part):
                raise ForgeError(
                    f"{what} {target!r} of {self.id}: {module} has no {path!r}.{did_you_mean(part, dir(value))}"
                )
            value = getattr(value, part)
        return cast("Callable[..., Any]", value)


def check_max_turns(max_turns: int | None, owner: str) -> None:
    """Raise unless `max_turns` is None or a positive integer."""
    if max_turns is not None and (type(max_turns) is not int or max_turns < 1):
        raise ValueError(f"max_turns of {owner} is {max_turns!r}. Set an integer >= 1, or None for no limit")


def split_level(env_id: str) -> tuple[str, int | None]:
    """Split ``id@level`` into the id and the level, None if there is none."""
    base, at, level = env_id.rpartition("@")
    return (base, int(level)) if at and level.isdecimal() else (env_id, None)


@functools.lru_cache(maxsize=4096)  # making an environment compares its version with all ids
def split_id(env_id: str) -> tuple[str, int]:
    """Split ``namespace/Name-vN``, with or without a level, into name and version. Raises ValueError if malformed."""
    match = _ID.fullmatch(env_id)
    if match is None or match["version"] is None:
        raise ValueError(f"environment id {env_id!r} must have the form 'namespace/Name-vN', e.g. 'my/Kuhn-v0'")
    return match["base"], int(match["version"])
