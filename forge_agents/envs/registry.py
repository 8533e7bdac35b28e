"""Registry of environments and suites: register, look up and make them by id.

Plugins of the entry-point group `forge_agents.envs` are imported at the first look-up. A *provider* offers the
environments of another library under a namespace. The library is imported when one of its environments is made.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib import metadata
from typing import Any, TypeAlias, TypeVar, cast, overload

from forge_agents.envs.spec import AnyEnv, EnvSpec, Isolation, split_id, split_level
from forge_agents.errors import DISTRIBUTION, ArgumentError, MissingExtraError, UnknownIdError, did_you_mean
from forge_agents.imports import MODULE_ADVICE, import_user_module, plugin_object

E = TypeVar("E", bound=Callable[..., Any])

GROUP = "forge_agents.envs"
"""Entry-point group of environment plugins. Each names a module that calls `register` when imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteDefaults:
    """Default settings of a benchmark of a suite."""

    episodes: int = 64
    """Number of seeds per environment and assignment of players to agents. At least 1."""
    seed: int = 0
    """Seed of the episode seeds. At least 0."""
    swap_agents: bool = True
    """Whether each of two players plays each agent."""
    max_tokens: int = 64
    """Maximum number of tokens per response of models and endpoints that are given by name. At least 1."""

    def __post_init__(self) -> None:
        for name, minimum in (("episodes", 1), ("seed", 0), ("max_tokens", 1)):
            if getattr(self, name) < minimum:
                raise ValueError(f"{name}={getattr(self, name)} of a suite must be at least {minimum}")


ListIds: TypeAlias = Callable[[str | None], str | None]
"""``f(None)`` registers all ids of a namespace that can be listed. ``f(name)`` may register one that is not listed, and
returns the id that `name` refers to, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """Source of the ids of a namespace."""

    entry_point: str
    """``"package.module:function"`` of a `ListIds`, imported at the first listing or look-up."""
    package: str
    """Package that must be importable, such as ``"textarena"``."""
    extra: str
    """Extra of this project that installs the package. Empty if none does."""


_specs: dict[str, EnvSpec] = {}
_suites: dict[str, tuple[tuple[str, ...], SuiteDefaults]] = {}
_providers: dict[str, Provider] = {}
_listed: set[str] = set()
"""Namespaces whose ids are in `_specs`."""
_broken_plugins: dict[str, str] = {}
_lock = threading.RLock()
_loaded = False


@overload
def register(id: str, entry_point: None = None, **settings: Any) -> Callable[[E], E]: ...


@overload
def register(id: str, entry_point: str | Callable[..., Any], **settings: Any) -> EnvSpec: ...


def register(
    id: str,  # noqa: A002  # as in Gymnasium
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
    """Register an environment, as a decorator of a class or factory or by a call with `entry_point`.

    Registering a class of the same qualified name again replaces the earlier one, so notebook cells can be rerun.

    Args:
        id: ``namespace/Name-vN``. Increase N whenever rewards or observations change.
        entry_point: ``"package.module:Class"``, imported when the environment is first made, or the class.
        max_turns: Number of decisions, of all agents together, after which an episode is truncated.
        tags: Words to filter by.
        levels: Constructor arguments by level of difficulty, easiest first. ``id@1`` is the environment at its first
            level. `forge_agents.Curriculum` chooses among levels.
        isolation: ``"process"`` runs the environment in a worker process (`forge_agents.envs.workers.env`), so that a
            crash or hang costs one episode.
        step_timeout_s: Maximum seconds of one call in a worker process.
        oracle: Scripted policy, as ``"package.module:Name"`` or factory. See `forge_agents.envs.oracles.OracleFactory`.
            `forge_agents.Oracle` plays it.
        **kwargs: Default constructor arguments, and wrapper arguments as in `make`.

    Raises:
        ValueError: The id is malformed, has a level, or belongs to another environment.
    """
    if isinstance(tags, str):
        raise TypeError(f"tags of {id} is the string {tags!r}. Pass a tuple of strings")
    if split_level(id)[1] is not None:
        raise ValueError(f"{id!r} has a level. Register {split_level(id)[0]!r} with levels=[{{...}}, {{...}}, ...]")
    build = partial(
        EnvSpec,
        id=id,
        max_turns=max_turns,
        tags=tuple(tags),
        levels=tuple(levels),
        isolation=isolation,
        step_timeout_s=step_timeout_s,
        oracle=oracle,
        kwargs=kwargs,
    )
    if entry_point is not None:
        return _add(build(entry_point=entry_point))

    def decorate(target: Any) -> Any:
        new = _add(build(entry_point=target))
        if isinstance(target, type) and hasattr(target, "spec"):
            target.spec = new  # instances made without `make` know their id and turn limit as well
        return target

    return decorate


def _add(new: EnvSpec) -> EnvSpec:
    if new.id.partition("/")[0] in _plugin_names():
        _load_plugins()  # so that an id of a plugin is refused here, and the plugin loads
    with _lock:
        old, name = _specs.get(new.id), _qualified(new.entry_point)
        if old is not None and _qualified(old.entry_point) != name:
            namespace, _, rest = new.name.partition("/")
            other = f"my/{rest}-v0" if namespace in _plugin_names() else f"{new.name}-v{new.version + 1}"
            raise ValueError(
                f"{new.id} is already {_qualified(old.entry_point)}. Register {name} under another name or version, "
                f"e.g. {other}"
            )
        _specs[new.id] = new
    return new


def spec(id: str) -> EnvSpec:  # noqa: A002
    """Return the spec of an id.

    An id without a version refers to the newest version, ``id@2`` to the second level. ``module:namespace/Name-vN``
    imports the module first.

    Raises:
        UnknownIdError: No environment, level or module has this name. The message suggests similar ids.
        MissingExtraError: The namespace belongs to a library that is not installed. The message has the command.
    """
    if not isinstance(id, str):
        raise TypeError(f'an environment id is a string such as "forge/Relay-v0", got {type(id).__name__}')
    base, level = split_level(id)
    env_spec = _find(base)
    return env_spec if level is None else env_spec.at_level(level)


def _find(full_id: str) -> EnvSpec:
    """Return the spec of an id without a level."""
    _load_plugins()
    env_id = _import_module_of(full_id)
    if env_id not in _specs:
        env_id = _ask_provider(env_id)
    if env_id in _specs:
        return _specs[env_id]
    versions = [s for s in _specs.values() if s.name == env_id]
    if versions:
        return max(versions, key=lambda s: s.version)
    if env_id in _suites:
        raise UnknownIdError(
            f"{env_id!r} is a suite: fa.suite({env_id!r}) lists its environments, fa.benchmark plays them"
        )
    hint = did_you_mean(env_id, [*_specs, *_suites])
    if not hint:
        similar = sorted(other for other in _specs if other.casefold().split("/")[-1].startswith(env_id.casefold()))
        hint = f" Did you mean {' or '.join(map(repr, similar))}?" if similar else ""
    broken = "".join(f" Plugin {name!r} failed to load: {why}." for name, why in _broken_plugins.items())
    module_hint = f" For an environment of your own module, use 'my_module:{env_id}' or import the module first."
    module_hint = module_hint if env_id == full_id and "/" in env_id else ""
    raise UnknownIdError(
        f"no environment is registered as {env_id!r}.{hint}{broken}{module_hint} `forge-agents list` shows all ids."
    )


def make(
    id: str,  # noqa: A002
    *,
    max_turns: int | None = None,
    isolation: Isolation | None = None,
    **kwargs: Any,
) -> AnyEnv:
    """Make an environment.

    Args:
        id: As in `register`, or without a version for the newest. An outdated version gives a warning.
        max_turns: Replaces the registered turn limit.
        isolation: Replaces the registered isolation.
        **kwargs: Constructor arguments, which override the registered ones. Unless the constructor has an argument of
            that name also ``role_shuffle=True``, ``invalid_action="end" | "penalty" | "ask"``,
            ``observation_window=chars`` and ``reward_scale=factor``. See `forge_agents.envs.wrappers`. A parallel
            environment that is wrapped or isolated becomes turn-based.

    Returns:
        The environment. Its attribute ``spec`` is the spec that it was made with.

    Raises:
        UnknownIdError: No environment is registered under the id.
        ArgumentError: The constructor does not take one of the arguments.
        TypeError: `max_turns` is set for something that is not a PettingZoo environment.
    """
    registered = spec(id)
    start = f"{registered.name}-v"  # compared first: libraries register hundreds of environments
    others = [other for id_, other in _specs.items() if id_.startswith(start)]
    newest = max((other.version for other in others if other.name == registered.name), default=registered.version)
    if registered.version < newest:
        warnings.warn(f"{registered.id} is outdated: {registered.name}-v{newest} exists", UserWarning, stacklevel=2)
    return make_from_spec(
        replace(
            registered,
            max_turns=registered.max_turns if max_turns is None else max_turns,
            isolation=registered.isolation if isolation is None else isolation,
            kwargs={**registered.kwargs, **kwargs},
        )
    )


def make_from_spec(env_spec: EnvSpec) -> AnyEnv:
    """Make the environment of a spec, isolated and wrapped. Raises as `make`."""
    from forge_agents.envs import wrappers

    wrapping = _wrapper_arguments(env_spec)
    inner = replace(env_spec, kwargs={name: value for name, value in env_spec.kwargs.items() if name not in wrapping})
    if inner.isolation == "process":
        from forge_agents.envs.workers.env import WorkerEnv

        env: Any = WorkerEnv(inner)
    else:
        env = wrappers.build(inner)
    if wrapping:
        env = wrappers.apply_wrappers(env, wrapping)
    env.spec = env_spec
    return cast("AnyEnv", env)


def list_envs(tag: str | None = None) -> list[str]:
    """Return all ids, sorted, including those of installed libraries. With `tag` only those that have it."""
    _load_plugins()
    for namespace, provider in tuple(_providers.items()):
        if _is_installed(provider.package):
            _list_namespace(namespace)
    return sorted(env_id for env_id, s in _specs.items() if tag is None or tag in s.tags)


def ids_with_oracles() -> list[str]:
    """Return the ids of registered environments with an oracle, sorted."""
    _load_plugins()
    return sorted(env_id for env_id, s in _specs.items() if s.oracle is not None)


def provide(namespace: str, *, entry_point: str, package: str, extra: str = "") -> None:
    """Offer the environments of a library under ``namespace/``, which has one provider. Arguments as in `Provider`."""
    provider = Provider(entry_point=entry_point, package=package, extra=extra)
    if _providers.setdefault(namespace, provider) != provider:
        raise ValueError(f"namespace {namespace!r} is already offered by {_providers[namespace].entry_point}")


def register_suite(
    name: str, ids: Iterable[str], *, episodes: int = 64, seed: int = 0, swap_agents: bool = True, max_tokens: int = 64
) -> None:
    """Register a suite: a named list of environment ids and its benchmark settings, see `SuiteDefaults`.

    The environments may be registered later.

    Raises:
        ValueError: No ids, an id twice or without a version, a setting out of range, or a name that is taken or has
            characters other than letters, digits, "-", "_" and ".".
    """
    if isinstance(ids, str):
        raise TypeError(f"ids of suite {name!r} is the string {ids!r}. Pass a list of ids")
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"suite name {name!r} must consist of letters, digits, '-', '_' and '.', e.g. 'mine-v0'")
    ids = tuple(ids)
    entry = (ids, SuiteDefaults(episodes=episodes, seed=seed, swap_agents=swap_agents, max_tokens=max_tokens))
    if not ids or len(set(ids)) < len(ids):
        raise ValueError(f"suite {name!r} needs one or more different ids, got {list(ids)}")
    for env_id in ids:
        split_id(env_id)
    _load_plugins()  # so that the name of a plugin's suite is refused here, and the plugin loads
    with _lock:
        if (existing := _suites.setdefault(name, entry)) != entry:
            raise ValueError(
                f"suite {name!r} is already registered with {', '.join(existing[0])}, "
                f"{', '.join(f'{key}={value}' for key, value in asdict(existing[1]).items())}. Choose another name or "
                "version"
            )


def list_suites() -> list[str]:
    """Return the names of all suites, sorted."""
    _load_plugins()
    return sorted(_suites)


def suite(name: str) -> tuple[str, ...]:
    """Return the ids of a suite. ``module:name`` imports the module first. Raises UnknownIdError, also for its ids."""
    ids, _ = _suites[suite_name(name)]
    for env_id in ids:
        spec(env_id)
    return ids


def suite_name(name: str) -> str:
    """Import the module in ``module:name``, if any, and return the name of the suite. Raises UnknownIdError."""
    _load_plugins()
    short = _import_module_of(name)
    if short in _specs:
        raise UnknownIdError(f"{short!r} is an environment, not a suite. fa.benchmark plays it, fa.make makes it")
    if short not in _suites:
        hint = did_you_mean(short, [*_suites, *_specs])
        module_hint = f" For a suite of your own module, use 'my_module:{short}'." if short == name else ""
        raise UnknownIdError(
            f"there is no suite {short!r}.{hint}{module_hint} `forge-agents list` shows all suites and ids."
        )
    return short


def suite_defaults(name: str) -> SuiteDefaults:
    """Return the benchmark settings of a suite, an environment id, or several of them joined by ``+``.

    Several take the maximum of episodes and tokens and the seed of the first, and swap agents if any of them does.
    """
    _load_plugins()
    parts = [name] if name in _suites else [p if "/" in p else _import_module_of(p) for p in name.split("+")]
    defaults = [_suites[part][1] if part in _suites else SuiteDefaults() for part in parts]
    return SuiteDefaults(
        episodes=max(d.episodes for d in defaults),
        seed=defaults[0].seed,
        swap_agents=any(d.swap_agents for d in defaults),
        max_tokens=max(d.max_tokens for d in defaults),
    )


def _import_module_of(env_id: str) -> str:
    """Import the module in ``module:id``, if any, and return the id."""
    module, colon, rest = env_id.rpartition(":")
    if not colon:
        return env_id
    try:
        import_user_module(module)
    except ModuleNotFoundError as cause:
        raise UnknownIdError(f"cannot import module {module!r} of {env_id!r}: {cause}. {MODULE_ADVICE}") from cause
    return rest


def _ask_provider(env_id: str) -> str:
    """Let the provider of the namespace register an id. Returns its full id, or `env_id` if there is no provider."""
    namespace, slash, name = env_id.partition("/")
    provider = _providers.get(namespace)
    if not slash or provider is None:
        return env_id
    if not _is_installed(provider.package):
        command = f"pip install '{DISTRIBUTION}[{provider.extra}]'"
        remedy = command if provider.extra else "install the library that has it"
        raise MissingExtraError(f"environments {namespace}/... need the package {provider.package!r}: {remedy}")
    return _list_namespace(namespace)(name) or env_id


def _list_namespace(namespace: str) -> ListIds:
    """Register the ids of a namespace, once. Returns the provider's function."""
    list_ids = cast("ListIds", plugin_object(_providers[namespace].entry_point))
    if namespace not in _listed:
        list_ids(None)
        _listed.add(namespace)  # only after success, so that a failed listing is repeated
    return list_ids


@cache
def _is_installed(package: str) -> bool:
    try:
        module_spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # a parent package is missing
        return False
    return module_spec is not None and module_spec.has_location  # excludes folders of that name


def _qualified(target: str | Callable[..., Any]) -> str:
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '?')}:{getattr(target, '__qualname__', repr(target))}"


def _parameters(env_spec: EnvSpec) -> inspect.Signature | None:
    """Return the signature of the constructor, None for a builtin without one."""
    try:
        return inspect.signature(env_spec.load())
    except ValueError:
        return None


def _wrapper_arguments(env_spec: EnvSpec) -> dict[str, Any]:
    """Return the arguments that wrap. An argument that the constructor has belongs to the constructor."""
    from forge_agents.envs.wrappers import BY_NAME

    kwargs, signature = env_spec.kwargs, _parameters(env_spec)
    if signature is None:
        return {name: value for name, value in kwargs.items() if name in BY_NAME}
    parameters = signature.parameters
    wrapping = {name: value for name, value in kwargs.items() if name in BY_NAME and name not in parameters}
    try:
        signature.bind(**{name: value for name, value in kwargs.items() if name not in wrapping})
    except TypeError as error:
        accepted = [p.name for p in parameters.values() if p.kind is not inspect.Parameter.VAR_POSITIONAL]
        unknown = next((name for name in kwargs if name not in accepted and name not in wrapping), "")
        hint = did_you_mean(unknown, [*accepted, *BY_NAME]) if unknown else ""
        listed = ", ".join(accepted) or "no arguments"
        raise ArgumentError(f"{env_spec.id}: {error}. It takes: {listed}.{hint}") from None
    return wrapping


def settings_of(env_spec: EnvSpec) -> dict[str, Any]:
    """Return the constructor arguments of a spec by name, defaults included."""
    from forge_agents.envs.wrappers import BY_NAME

    signature = _parameters(env_spec)
    parameters = dict(signature.parameters) if signature is not None else {}
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    kwargs = env_spec.kwargs.items()
    return defaults | {name: value for name, value in kwargs if name in parameters or name not in BY_NAME}


@cache
def _plugin_names() -> frozenset[str]:
    return frozenset(point.name for point in metadata.entry_points(group=GROUP))


def _load_plugins() -> None:
    global _loaded  # noqa: PLW0603  # one registry per process
    with _lock:
        if _loaded:
            return
        _loaded = True  # before loading, because a plugin may use the registry
        for point in metadata.entry_points(group=GROUP):
            try:
                plugin = point.load()
                if callable(plugin):
                    plugin()
            except Exception as error:  # noqa: BLE001  # a broken plugin must not hide the others
                why = _broken_plugins[point.name] = f"{type(error).__name__}: {error}"
                warnings.warn(
                    f"environment plugin {point.name!r} ({point.value}) failed to load: {why}. Fix or uninstall it",
                    RuntimeWarning,
                    stacklevel=4,
                )
