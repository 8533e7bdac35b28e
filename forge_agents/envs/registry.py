"""Environments by id: register, look up, make; suites are named lists of ids and how they are played.

In: ids, classes or "package.module:Class" strings; the installed plugins of the entry-point group `forge_agents.envs`,
imported at the first look-up; and *providers*, each a namespace of another library's environments. A library is
imported when one of its environments is made, not before. Out: specs and fresh PettingZoo environments. Waits for
nothing, except for a worker process where an environment asks for one.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from typing import Any, TypeAlias, TypeVar, cast, overload

from forge_agents.envs.spec import AnyEnv, EnvSpec, Isolation, split_id, split_level
from forge_agents.errors import DISTRIBUTION, ArgumentError, MissingExtraError, UnknownIdError, did_you_mean
from forge_agents.imports import import_user_module

E = TypeVar("E", bound=Callable[..., Any])

GROUP = "forge_agents.envs"
"""Entry-point group of environment plugins. Each names a module that calls `register` when imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteDefaults:
    """What a benchmark of a suite takes where its caller says nothing."""

    episodes: int = 64
    """Seeds for every environment and seating, at least 1."""
    seed: int = 0
    """Chooses the episodes' seeds, at least 0."""
    swap_seats: bool = True
    """Each of two players takes each seat."""
    max_tokens: int = 64
    """Most tokens of one response, at least 1, of models and endpoints given in words."""

    def __post_init__(self) -> None:
        for name, least in (("episodes", 1), ("seed", 0), ("max_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} of a suite must be at least {least}")


ListIds: TypeAlias = Callable[[str | None], str | None]
"""``f(None)`` registers all ids of a namespace that can be listed. ``f(name)`` may register one more, for a name that
is not listed, and returns the id that the name means, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """Where the ids of a namespace come from."""

    entry_point: str
    """``"package.module:function"`` of a `ListIds`; imported at the first listing or look-up."""
    package: str
    """What must be importable for the environments to be listed and made, e.g. ``"textarena"``."""
    extra: str
    """The optional extra of this project that installs it; empty where it is always there."""


_specs: dict[str, EnvSpec] = {}
_suites: dict[str, tuple[tuple[str, ...], SuiteDefaults]] = {}
_providers: dict[str, Provider] = {}
_listed: set[str] = set()
"""Namespaces whose ids are in `_specs` already."""
_broken_plugins: dict[str, str] = {}
_lock = threading.RLock()
_loaded = False


@overload
def register(
    id: str,
    entry_point: None = None,
    *,
    max_turns: int | None = None,
    tags: Iterable[str] = (),
    levels: Iterable[Mapping[str, Any]] = (),
    isolation: Isolation = "none",
    step_timeout_s: float = 60.0,
    oracle: str | Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Callable[[E], E]: ...


@overload
def register(
    id: str,
    entry_point: str | Callable[..., Any],
    *,
    max_turns: int | None = None,
    tags: Iterable[str] = (),
    levels: Iterable[Mapping[str, Any]] = (),
    isolation: Isolation = "none",
    step_timeout_s: float = 60.0,
    oracle: str | Callable[..., Any] | None = None,
    **kwargs: Any,
) -> EnvSpec: ...


def register(
    id: str,  # noqa: A002  # the word that every registry uses
    entry_point: str | Callable[..., Any] | None = None,
    *,
    max_turns: int | None = None,
    tags: Iterable[str] = (),
    levels: Iterable[Mapping[str, Any]] = (),
    isolation: Isolation = "none",
    step_timeout_s: float = 60.0,
    oracle: str | Callable[..., Any] | None = None,
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
        levels: Constructor arguments of each level of difficulty, the easiest first. ``id@1`` names the environment at
            its first level wherever an id does; `forge_agents.Curriculum` chooses among them.
        isolation: ``"process"`` for an environment that is slow, or may crash or hang: it then lives in a worker
            process (`forge_agents.envs.workers.env`), and a failure costs one episode.
        step_timeout_s: Seconds that one call may take there.
        oracle: Who plays it well, ``"package.module:Name"``, imported when it first plays, or the factory itself: see
            `forge_agents.envs.oracles.OracleFactory`. It plays where `forge_agents.Oracle` takes a seat.
        **kwargs: Default constructor arguments, and wrappers as in `make`.

    Raises:
        ValueError: The id is malformed, names a level, or is taken by another environment.
    """
    if isinstance(tags, str):
        raise TypeError(f"tags of {id} is the string {tags!r}; pass a tuple of strings")
    if split_level(id)[1] is not None:
        raise ValueError(f"{id!r} names a level; register {split_level(id)[0]!r} with levels=[{{...}}, {{...}}, ...]")
    words, steps = tuple(tags), tuple(levels)

    def add(target: Any) -> EnvSpec:
        new = EnvSpec(
            id=id,
            entry_point=target,
            max_turns=max_turns,
            tags=words,
            kwargs=kwargs,
            levels=steps,
            isolation=isolation,
            step_timeout_s=step_timeout_s,
            oracle=oracle,
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
    """The spec of an id; an id without a version means the newest, ``id@2`` the environment at its second level.

    ``module:namespace/Name-vN`` imports the module first, which registers the id.

    Raises:
        UnknownIdError: Nothing is registered under the id, it has no such level, or there is no such module. The
            message names near ids.
        MissingExtraError: The id's namespace belongs to a library that is not installed; the message says how to.
    """
    if not isinstance(id, str):
        raise TypeError(f'an environment\'s id is a text such as "forge/Relay-v0", got {type(id).__name__}')
    bare, level = split_level(id)
    found = _registered(bare)
    return found if level is None else found.at_level(level)


def _registered(id: str) -> EnvSpec:  # noqa: A002
    """The spec of an id without a level."""
    _load_plugins()
    given, id = id, _without_module(id)  # noqa: A001
    if id not in _specs:
        id = _look_up(id)  # noqa: A001
    if id in _specs:
        return _specs[id]
    versions = [s for s in _specs.values() if s.name == id]
    if versions:
        return max(versions, key=lambda s: s.version)
    if id in _suites:
        raise UnknownIdError(f"{id!r} is a suite: fa.suite({id!r}) names its environments, fa.benchmark plays them")
    hint = did_you_mean(id, [*_specs, *_suites])
    if not hint:
        same_name = sorted(known for known in _specs if known.casefold().split("/")[-1].startswith(id.casefold()))
        hint = f" Did you mean {' or '.join(map(repr, same_name))}?" if same_name else ""
    broken = "".join(f" Plugin {name!r} failed to load: {why}." for name, why in _broken_plugins.items())
    yours = f" One of a module of yours is 'my_module:{id}', or {id!r} once that is imported."
    yours = yours if id == given and "/" in id else ""
    raise UnknownIdError(
        f"no environment is registered as {id!r}.{hint}{broken}{yours} `forge-agents list` shows all ids."
    )


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
    newest = max((s.version for s in _specs.values() if s.name == found.name), default=found.version)
    if found.version < newest:
        warnings.warn(f"{found.id} is outdated: {found.name}-v{newest} exists", UserWarning, stacklevel=2)
    return made(
        replace(
            found,
            max_turns=found.max_turns if max_turns is None else max_turns,
            isolation=found.isolation if isolation is None else isolation,
            kwargs={**found.kwargs, **kwargs},
        )
    )


def made(wanted: EnvSpec) -> AnyEnv:
    """The environment of a spec, isolated and wrapped as it says; raises as `make`, but looks nothing up."""
    from forge_agents.envs import wrappers

    wraps = _check_arguments(wanted)
    bare = replace(wanted, kwargs={name: value for name, value in wanted.kwargs.items() if name not in wraps})
    if bare.isolation == "process":
        from forge_agents.envs.workers.env import WorkerEnv

        env: Any = WorkerEnv(bare)
    else:
        env = wrappers.build(bare)
    if wraps:
        env = wrappers.wrapped(env, wraps)
    env.spec = wanted
    return cast("AnyEnv", env)


def list_envs(tag: str | None = None) -> list[str]:
    """All ids, sorted, those of installed libraries included; with `tag`, those that carry it."""
    _load_plugins()
    for namespace, provider in tuple(_providers.items()):
        if _found(provider.package):
            _list_namespace(namespace)
    return sorted(id_ for id_, s in _specs.items() if tag is None or tag in s.tags)


def ids_with_oracles() -> list[str]:
    """Ids of the registered environments that have an oracle, sorted."""
    _load_plugins()
    return sorted(id_ for id_, s in _specs.items() if s.oracle is not None)


def provide(namespace: str, *, entry_point: str, package: str, extra: str = "") -> None:
    """Offer the environments of a library under ``namespace/``; the rest as in `Provider`.

    Raises:
        ValueError: The namespace is offered by another function.
    """
    offer = Provider(entry_point=entry_point, package=package, extra=extra)
    if _providers.setdefault(namespace, offer) != offer:
        raise ValueError(f"namespace {namespace!r} is already offered by {_providers[namespace].entry_point}")


def register_suite(
    name: str, ids: Iterable[str], *, episodes: int = 64, seed: int = 0, swap_seats: bool = True, max_tokens: int = 64
) -> None:
    """Name a list of environment ids, which may be registered later, and say how it is played: see `SuiteDefaults`.

    Raises:
        ValueError: No ids, an id twice or without a version, numbers that make no sense, or a name that is taken or
            has other characters than letters, digits, "-", "_" and ".".
    """
    if isinstance(ids, str):
        raise TypeError(f"suite {name!r} was given the string {ids!r}; pass a list of ids")
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"suite name {name!r} must be letters, digits, '-', '_' or '.', e.g. 'mine-v0'")
    ids = tuple(ids)
    entry = (ids, SuiteDefaults(episodes=episodes, seed=seed, swap_seats=swap_seats, max_tokens=max_tokens))
    if not ids or len(set(ids)) < len(ids):
        raise ValueError(f"suite {name!r} needs one or more different ids, got {list(ids)}")
    for id_ in ids:
        split_id(id_)
    with _lock:
        if (known := _suites.setdefault(name, entry)) != entry:
            raise ValueError(f"suite {name!r} is already {known}; choose another name or version")


def list_suites() -> list[str]:
    """Names of all suites, sorted."""
    _load_plugins()
    return sorted(_suites)


def suite(name: str) -> tuple[str, ...]:
    """The ids of a suite, in its order.

    ``module:name`` imports the module first, which registers the suite.

    Raises:
        UnknownIdError: No suite has the name, one of its environments is not registered, or there is no such module.
    """
    ids, _ = _suites[suite_name(name)]
    for id_ in ids:
        spec(id_)
    return ids


def suite_name(name: str) -> str:
    """The name of a suite without a module before it, which is imported.

    Raises:
        UnknownIdError: No suite has the name, or there is no such module.
    """
    _load_plugins()
    bare = _without_module(name)
    if bare in _specs:
        raise UnknownIdError(f"{bare!r} is an environment and no suite; fa.benchmark plays it, fa.make makes it")
    if bare not in _suites:
        near = did_you_mean(bare, [*_suites, *_specs])
        yours = f" One of a module of yours is 'my_module:{bare}'." if bare == name else ""
        raise UnknownIdError(f"no suite is called {bare!r}.{near}{yours} `forge-agents list` shows all suites and ids.")
    return bare


def suite_defaults(name: str) -> SuiteDefaults:
    """How a suite is played where nothing is said; also of what is no suite, such as one environment's id.

    Several, with ``+`` between them, take the most episodes and tokens and the first seed of them, and swap seats if
    one of them does.
    """
    _load_plugins()
    parts = [name] if name in _suites else [part if "/" in part else _without_module(part) for part in name.split("+")]
    each = [_suites[part][1] if part in _suites else SuiteDefaults() for part in parts]
    return SuiteDefaults(
        episodes=max(one.episodes for one in each),
        seed=each[0].seed,
        swap_seats=any(one.swap_seats for one in each),
        max_tokens=max(one.max_tokens for one in each),
    )


def _without_module(id_: str) -> str:
    """The id behind the colon; the module before it is imported."""
    module, colon, rest = id_.rpartition(":")
    if not colon:
        return id_
    try:
        import_user_module(module)
    except ModuleNotFoundError as cause:
        raise UnknownIdError(
            f"{id_!r} names the module {module!r}: {cause}. Run the command in the module's folder, put the module "
            "beside the run's file, or install it"
        ) from cause
    return rest


def _look_up(id_: str) -> str:
    """The id that `id_` means, registered if its namespace knows it; `id_` itself where no namespace does."""
    namespace, slash, name = id_.partition("/")
    provider = _providers.get(namespace)
    if not slash or provider is None:
        return id_
    if not _found(provider.package):
        raise MissingExtraError(
            f"environments {namespace}/... need the package {provider.package!r}: "
            f"pip install '{DISTRIBUTION}[{provider.extra}]'"
        )
    return _list_namespace(namespace)(name) or id_


def _list_namespace(namespace: str) -> ListIds:
    """Register a namespace's ids, once. Returns the function that does so."""
    module, _, name = _providers[namespace].entry_point.partition(":")
    list_ids = cast("ListIds", getattr(importlib.import_module(module), name))
    if namespace not in _listed:
        list_ids(None)
        _listed.add(namespace)  # not before: what broke off would be missing in silence from the next listing
    return list_ids


@cache
def _found(package: str) -> bool:
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # a parent package is missing
        return False
    return found is not None and found.has_location  # a mere folder of that name is no package


def _qualified(target: str | Callable[..., Any]) -> str:
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '?')}:{getattr(target, '__qualname__', repr(target))}"


def _check_arguments(found: EnvSpec) -> dict[str, Any]:
    """Those of `found.kwargs` that wrap; an argument that the constructor names is the constructor's.

    Raises:
        ArgumentError: One is neither the constructor's nor a wrapper's, or the constructor misses one.
    """
    from forge_agents.envs.wrappers import BY_NAME

    try:
        signature = inspect.signature(found.load())
    except ValueError:  # a builtin without a signature: its own error has to do
        return {name: value for name, value in found.kwargs.items() if name in BY_NAME}
    own = signature.parameters
    wraps = {name: value for name, value in found.kwargs.items() if name in BY_NAME and name not in own}
    try:
        signature.bind(**{name: value for name, value in found.kwargs.items() if name not in wraps})
    except TypeError as error:
        known = [p.name for p in own.values() if p.kind is not inspect.Parameter.VAR_POSITIONAL]
        strange = next((name for name in found.kwargs if name not in known and name not in wraps), "")
        hint = did_you_mean(strange, [*known, *BY_NAME]) if strange else ""
        raise ArgumentError(f"{found.id}: {error}. It takes: {', '.join(known) or 'no arguments'}.{hint}") from None
    return wraps


def settings_of(found: EnvSpec) -> dict[str, Any]:
    """Arguments that the constructor gets, by name: what the spec says, and the rest as it is by default."""
    from forge_agents.envs.wrappers import BY_NAME

    try:
        own = dict(inspect.signature(found.load()).parameters)
    except ValueError:  # a builtin without a signature
        own = {}
    usual = {name: one.default for name, one in own.items() if one.default is not one.empty}
    return usual | {name: value for name, value in found.kwargs.items() if name in own or name not in BY_NAME}


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
