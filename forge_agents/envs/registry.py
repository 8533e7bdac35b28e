"""Environments by id: register, look up, make; suites are named lists of ids and how they are played.

In: ids, classes or "package.module:Class" strings, and the installed plugins of the entry-point group
`forge_agents.envs`, imported at the first look-up. Out: specs and fresh PettingZoo environments. Waits for nothing,
except for a worker process where an environment asks for one.
"""

from __future__ import annotations

import importlib
import inspect
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast, get_args, overload

from forge_agents.envs import providers
from forge_agents.envs.suites import SuiteDefaults
from forge_agents.errors import ArgumentError, ForgeError, UnknownIdError, did_you_mean

if TYPE_CHECKING:
    from pettingzoo import AECEnv

AnyEnv: TypeAlias = "AECEnv[str, Any, Any]"
E = TypeVar("E", bound=Callable[..., Any])
Isolation: TypeAlias = Literal["none", "process"]

GROUP = "forge_agents.envs"
"""Entry-point group of environment plugins. Each names a module that calls `register` when imported."""

WRAPPERS = ("role_shuffle", "invalid_action", "observation_window", "reward_scale")
"""Arguments of `make` that wrap the environment, innermost first; `forge_agents.envs.wrappers` says what each does."""

_ID = re.compile(r"(?P<base>[\w.-]+/[\w.-]+?)(?:-v(?P<version>\d+))?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """How to make an environment."""

    id: str
    """``namespace/Name-vN``."""
    entry_point: str | Callable[..., Any] = field(repr=False)
    """``"package.module:Class"``, or the class or factory itself."""
    max_turns: int | None = None
    """Decisions of all agents together after which an episode is truncated; None leaves it to the environment."""
    tags: tuple[str, ...] = ()
    """Words to filter by, e.g. ``"2p"``."""
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Constructor arguments, and those of `WRAPPERS`."""
    isolation: Isolation = "none"
    """``"process"``: the environment lives in a worker process, because it is slow, or may crash or hang."""
    step_timeout_s: float = 60.0
    """Seconds that one call may take in a worker process; then the worker is replaced and the episode fails."""

    def __post_init__(self) -> None:
        _split(self.id)
        if isinstance(self.entry_point, str) and not re.fullmatch(r"[\w.]+:[\w.]+", self.entry_point):
            raise ValueError(f"entry_point of {self.id} is {self.entry_point!r}; write 'package.module:Class'")
        check_max_turns(self.max_turns, self.id)
        if self.isolation not in get_args(Isolation) or not self.step_timeout_s > 0:
            raise ValueError(
                f"{self.id}: isolation={self.isolation!r} must be one of {', '.join(get_args(Isolation))}, and "
                f"step_timeout_s={self.step_timeout_s} above 0"
            )

    @property
    def name(self) -> str:
        """The id without its version."""
        return _split(self.id)[0]

    @property
    def version(self) -> int:
        """The N of ``-vN``."""
        return _split(self.id)[1]

    def load(self) -> Callable[..., Any]:
        """The class or factory, imported if need be."""
        if not isinstance(self.entry_point, str):
            return self.entry_point
        module, _, path = self.entry_point.partition(":")
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            if not hasattr(found, part):
                raise ForgeError(
                    f"entry point {self.entry_point!r} of {self.id}: {module} has no {path!r}."
                    f"{did_you_mean(part, dir(found))}"
                )
            found = getattr(found, part)
        return cast("Callable[..., Any]", found)


_specs: dict[str, EnvSpec] = {}
_suites: dict[str, tuple[tuple[str, ...], SuiteDefaults]] = {}
_broken_plugins: dict[str, str] = {}
_lock = threading.RLock()
_loaded = False


@overload
def register(
    id: str,
    *,
    entry_point: None = None,
    max_turns: int | None = None,
    tags: Iterable[str] = (),
    isolation: Isolation = "none",
    step_timeout_s: float = 60.0,
    **kwargs: Any,
) -> Callable[[E], E]: ...


@overload
def register(
    id: str,
    *,
    entry_point: str | Callable[..., Any],
    max_turns: int | None = None,
    tags: Iterable[str] = (),
    isolation: Isolation = "none",
    step_timeout_s: float = 60.0,
    **kwargs: Any,
) -> EnvSpec: ...


def register(
    id: str,  # noqa: A002  # the word that every registry uses
    *,
    entry_point: str | Callable[..., Any] | None = None,
    max_turns: int | None = None,
    tags: Iterable[str] = (),
    isolation: Isolation = "none",
    step_timeout_s: float = 60.0,
    **kwargs: Any,
) -> EnvSpec | Callable[[Any], Any]:
    """Make an environment available by id.

    A decorator of a class or factory, or a call with `entry_point`. Registering the same class (by its qualified
    name) again replaces the earlier one, so notebook cells can be run twice.

    Args:
        id: ``namespace/Name-vN``. Raise N whenever rewards or observations change.
        entry_point: ``"package.module:Class"``, imported when the environment is first made; or the class.
        max_turns: Decisions of all agents together after which an episode is truncated.
        tags: Words to filter by.
        isolation: ``"process"`` for an environment that is slow, or may crash or hang: it then lives in a worker
            process (`forge_agents.envs.workers.env`), and a failure costs one episode.
        step_timeout_s: Seconds that one call may take there.
        **kwargs: Default constructor arguments, and wrappers as in `make`.

    Returns:
        The spec, or the decorator.

    Raises:
        ValueError: The id is malformed, or taken by another environment.
    """
    if isinstance(tags, str):
        raise TypeError(f"tags of {id} is the string {tags!r}; pass a tuple of strings")
    words = tuple(tags)

    def add(target: Any) -> EnvSpec:
        new = EnvSpec(
            id=id,
            entry_point=target,
            max_turns=max_turns,
            tags=words,
            kwargs=kwargs,
            isolation=isolation,
            step_timeout_s=step_timeout_s,
        )
        with _lock:
            old = _specs.get(id)
            if old is not None and _qualified(old.entry_point) != _qualified(target):
                raise ValueError(
                    f"{id} is already {_qualified(old.entry_point)}; register {_qualified(target)} under another name "
                    f"or version, e.g. {new.name}-v{new.version + 1}"
                )
            _specs[id] = new
        return new

    def decorate(target: Any) -> Any:
        spec = add(target)
        if isinstance(target, type) and hasattr(target, "spec"):
            target.spec = spec  # the class made directly knows its id and turn limit, too
        return target

    return decorate if entry_point is None else add(entry_point)


def spec(id: str) -> EnvSpec:  # noqa: A002
    """The spec of an id; an id without a version means the newest.

    ``module:namespace/Name-vN`` imports the module first, which registers the id.

    Raises:
        UnknownIdError: Nothing is registered under the id, or there is no such module. The message names near ids.
        MissingExtraError: The id's namespace belongs to a library that is not installed; the message says how to.
    """
    _load_plugins()
    id = providers.without_module(id)  # noqa: A001
    if id not in _specs:
        id = providers.look_up(id)  # noqa: A001
    if id in _specs:
        return _specs[id]
    versions = [s for s in _specs.values() if s.name == id]
    if versions:
        return max(versions, key=lambda s: s.version)
    hint = did_you_mean(id, _specs)
    if not hint:
        same_name = sorted(known for known in _specs if known.casefold().split("/")[-1].startswith(id.casefold()))
        hint = f" Did you mean {' or '.join(map(repr, same_name))}?" if same_name else ""
    broken = "".join(f" Plugin {name!r} failed to load: {why}." for name, why in _broken_plugins.items())
    raise UnknownIdError(f"no environment is registered as {id!r}.{hint}{broken} `forge-agents list` shows all ids.")


def make(
    id: str,  # noqa: A002
    *,
    max_turns: int | None = None,
    isolation: Isolation | None = None,
    **kwargs: Any,
) -> AnyEnv:
    """A fresh environment.

    Args:
        id: As in `register`; without a version the newest; an older version than the newest warns.
        max_turns: Replaces the registered turn limit.
        isolation: Replaces the registered one.
        **kwargs: Constructor arguments; they win over the registered ones. Also, unless the constructor has an
            argument of that name: ``role_shuffle=True``, ``invalid_action="end" | "penalty" | "ask"``,
            ``observation_window=chars`` and ``reward_scale=factor``, see `forge_agents.envs.wrappers`. A simultaneous
            game that is wrapped or isolated takes turns.

    Returns:
        The environment, wrapped as was asked, with attribute ``spec``: the spec it was really made with.

    Raises:
        UnknownIdError: Nothing is registered under the id.
        ArgumentError: An argument that the constructor does not take.
        TypeError: A turn limit on what is no PettingZoo environment.
    """
    found = spec(id)
    check_max_turns(max_turns, id)
    newest = max((s.version for s in _specs.values() if s.name == found.name), default=found.version)
    if found.version < newest:
        warnings.warn(f"{found.id} is outdated: {found.name}-v{newest} exists", UserWarning, stacklevel=2)
    found = replace(
        found,
        max_turns=found.max_turns if max_turns is None else max_turns,
        isolation=found.isolation if isolation is None else isolation,
        kwargs={**found.kwargs, **kwargs},
    )
    build = found.load()
    wraps = _wrapper_arguments(found, build)
    bare = replace(found, kwargs={name: value for name, value in found.kwargs.items() if name not in wraps})
    _check_arguments(bare, build)
    if bare.isolation == "process":
        from forge_agents.envs.workers.env import WorkerEnv

        env: Any = WorkerEnv(bare)
    else:
        env = build_env(bare)
    if wraps:
        from forge_agents.envs.wrappers import wrapped

        env = wrapped(env, wraps)
    env.spec = found
    return cast("AnyEnv", env)


def build_env(found: EnvSpec) -> AnyEnv:
    """The environment of a spec in this process, with its turn limit, not wrapped."""
    env: Any = found.load()(**found.kwargs)
    env.spec = found
    if found.max_turns is None:
        return cast("AnyEnv", env)
    if "max_turns" in vars(env) or hasattr(type(env), "max_turns"):  # its own, not that of something inside
        env.max_turns = found.max_turns
        return cast("AnyEnv", env)
    from forge_agents.envs.wrappers import TimeLimit

    return TimeLimit(env, found.max_turns)


def list_envs(tag: str | None = None) -> list[str]:
    """All ids, sorted, those of installed libraries included; with `tag`, those that carry it."""
    _load_plugins()
    providers.list_installed()
    return sorted(id_ for id_, s in _specs.items() if tag is None or tag in s.tags)


def register_suite(
    name: str, ids: Iterable[str], *, episodes: int = 64, seed: int = 0, swap_seats: bool = True, max_tokens: int = 64
) -> None:
    """Name a list of environment ids, which may be registered later, and say how it is played: see `SuiteDefaults`.

    Raises:
        ValueError: No ids, an id twice or without a version, numbers that make no sense, or the name is taken.
    """
    if isinstance(ids, str):
        raise TypeError(f"suite {name!r} was given the string {ids!r}; pass a list of ids")
    ids = tuple(ids)
    entry = (ids, SuiteDefaults(episodes=episodes, seed=seed, swap_seats=swap_seats, max_tokens=max_tokens))
    if not ids or len(set(ids)) < len(ids):
        raise ValueError(f"suite {name!r} needs one or more different ids, got {list(ids)}")
    for id_ in ids:
        _split(id_)
    with _lock:
        if (known := _suites.setdefault(name, entry)) != entry:
            raise ValueError(f"suite {name!r} is already {known}; choose another name or version")


def list_suites() -> list[str]:
    """Names of all suites, sorted."""
    _load_plugins()
    return sorted(_suites)


def suite(name: str) -> tuple[str, ...]:
    """The ids of a suite, in its order.

    Raises:
        UnknownIdError: No suite has the name, or one of its environments is not registered.
    """
    _load_plugins()
    if name not in _suites:
        raise UnknownIdError(f"no suite is called {name!r}.{did_you_mean(name, _suites)}")
    for id_ in _suites[name][0]:
        spec(id_)
    return _suites[name][0]


def suite_defaults(name: str) -> SuiteDefaults:
    """How a suite is played where nothing is said; also of what is no suite, such as one environment's id."""
    _load_plugins()
    return _suites[name][1] if name in _suites else SuiteDefaults()


def check_max_turns(max_turns: int | None, owner: str) -> None:
    """Raise unless `max_turns` is None or a positive integer."""
    if max_turns is not None and (type(max_turns) is not int or max_turns < 1):
        raise ValueError(f"max_turns of {owner} is {max_turns!r}; set an integer >= 1, or None for no limit")


def _split(id_: str) -> tuple[str, int]:
    match = _ID.fullmatch(id_)
    if match is None or match["version"] is None:
        raise ValueError(f"environment id {id_!r} should read 'namespace/Name-vN', e.g. 'my/Kuhn-v0'")
    return match["base"], int(match["version"])


def _qualified(target: str | Callable[..., Any]) -> str:
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '?')}:{getattr(target, '__qualname__', repr(target))}"


def _check_arguments(found: EnvSpec, build: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(build)
        signature.bind(**found.kwargs)
    except ValueError:
        return  # a builtin without a signature: its own error has to do
    except TypeError as error:
        known = [p.name for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_POSITIONAL]
        strange = next((name for name in found.kwargs if name not in known), "")
        hint = did_you_mean(strange, [*known, *WRAPPERS]) if strange else ""
        raise ArgumentError(f"{found.id}: {error}. It takes: {', '.join(known) or 'no arguments'}.{hint}") from None


def _wrapper_arguments(found: EnvSpec, build: Callable[..., Any]) -> dict[str, Any]:
    """Those of `found.kwargs` that wrap; an argument that the constructor names is the constructor's."""
    try:
        named = set(inspect.signature(build).parameters)
    except ValueError:
        named = set()
    return {name: found.kwargs[name] for name in WRAPPERS if name in found.kwargs and name not in named}


def _load_plugins() -> None:
    global _loaded  # noqa: PLW0603  # the registry is the process's, like sys.modules
    with _lock:
        if _loaded:
            return
        _loaded = True  # before loading: a plugin may look something up itself
        for point in metadata.entry_points(group=GROUP):
            try:
                plugin = point.load()
                if callable(plugin):
                    plugin()
            except Exception as error:  # noqa: BLE001  # a stranger's broken plugin must not hide all the others
                why = _broken_plugins[point.name] = f"{type(error).__name__}: {error}"
                warnings.warn(
                    f"environment plugin {point.name!r} ({point.value}) failed to load: {why}; mend or uninstall it",
                    RuntimeWarning,
                    stacklevel=4,
                )
