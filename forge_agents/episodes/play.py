"""`play`: one episode from a script, a prompt or a notebook, and `Engines`, which stay up between episodes."""

from __future__ import annotations

import contextlib
import operator
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any, SupportsIndex, TypeVar

from pettingzoo import AECEnv, ParallelEnv

from forge_agents.display import printable
from forge_agents.envs import registry
from forge_agents.envs.oracles import oracle_of
from forge_agents.envs.spec import EnvSpec
from forge_agents.errors import NotReadyError, PlayerLeftError
from forge_agents.policy import Oracle, Policy, PolicyMapping, policies_by_name, resolve_policies, with_unique_names
from forge_agents.rollout import rollout
from forge_agents.rollout.episode import PlayableEnv
from forge_agents.rollout.episode import play as play_one
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.runtime import startup
from forge_agents.runtime.interrupts import LoopRunner
from forge_agents.runtime.watchdog import Watchdog
from forge_agents.serving.config import EngineConfig
from forge_agents.serving.fleet import Fleet
from forge_agents.settings import named_arguments
from forge_agents.types import Episode, Turn

T = TypeVar("T")


class Engines:
    """Engines that stay up between episodes: ``with fa.Engines(team) as engines: fa.play(..., engines=engines)``.

    Args:
        policies: Policies whose models are served. Policies of one model share an engine.
        config: Settings of every engine. None disables compilation, for a faster start.

    Raises:
        ModelNotFoundError: When entered: the model does not exist.
        StallError, ActorDiedError: When entered: an engine did not start in time, or died.
    """

    def __init__(self, *policies: Policy, config: EngineConfig | None = None) -> None:
        self._models = {_engine_key(policy): policy for policy in policies}
        self._config = config or EngineConfig(enforce_eager=True)
        self._fleet: Fleet | None = None
        self._loop = LoopRunner(self._stop)
        self._lock = threading.Lock()

    def __enter__(self) -> Engines:
        self._loop.run(self._start())
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.close()

    def run(
        self, policies: Iterable[Policy], game: Callable[[Mapping[str, PolicyEngine]], Coroutine[Any, Any, T]]
    ) -> T:
        """Run ``game(engines)`` to its end, with the engines of `policies` by name, one game at a time.

        Raises:
            NotReadyError: Outside of the block, or after Ctrl-C in it.
            ValueError: The model of a policy is not served by these engines.
        """
        if self._fleet is None:
            raise NotReadyError(
                "these engines are not running. They run inside their block, with fa.Engines(policy) as engines: ..., "
                "until Ctrl-C"
            )
        engines = {}
        for policy in policies:
            model = _engine_key(policy)
            if model not in self._models:
                raise ValueError(
                    f"policy {policy.name!r} plays {model}, and these engines serve {', '.join(self._models)}. "
                    "Name it in fa.Engines(...), or leave out engines= and it gets one of its own"
                )
            engines[policy.name] = self._fleet.policy_engines[model]
        with self._lock:
            return self._loop.run(game(engines))

    async def _start(self) -> None:
        with startup.show():
            self._fleet = await Fleet.start(self._models, self._config)

    async def _stop(self) -> None:
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            await fleet.stop()


def _engine_key(policy: Policy) -> str:
    """Identifies a model with its prompt settings. Models of one folder share an engine, whatever the settings."""
    return policy.model if policy.thinking == "auto" else f"{policy.model} with thinking {policy.thinking}"


@named_arguments
def play(
    env: str | EnvSpec | PlayableEnv | Callable[..., PlayableEnv],
    policies: PolicyMapping,
    *,
    seed: int = 0,
    env_args: Mapping[str, Any] | None = None,
    max_turns: int | None = None,
    engines: Engines | None = None,
    watch: Callable[[Turn], object] | None = None,
) -> Episode:
    """Play one episode to its end. ``print`` shows it as a conversation.

    The same seed, policies and weights repeat the episode if the environment is deterministic given its seed. Code that
    blocks for 120 s is named on the error stream and continues.

    Args:
        env: An id, a spec, a class or factory, or an environment. The environment is reset and not closed.
        policies: One policy for all agents, a mapping from agent to policy, or a function ``(agent, seed) -> policy``.
            A `Policy` gets an engine for this call, unless `engines` serve its model. The start of an engine takes ten
            seconds or more. A model behind a server, such as that of ``forge-agents serve``, is an `Endpoint`.
        seed: Seed of the episode. At least 0.
        env_args: Arguments of the environment.
        max_turns: Maximum number of decisions. None uses the registered limit, or 1000 if there is none.
        engines: Running engines of the policies' models.
        watch: Called with each turn when it is decided, before its reward is known: ``watch=print`` shows a game live.

    Returns:
        The episode. If the environment or a player failed, a warning and `Episode.error` say where and why, and the
        turns and rewards so far are kept.

    Raises:
        UnknownIdError, ArgumentError: The environment does not exist, or does not accept the arguments.
        TypeError, ValueError: `env` is no environment, a policy is no policy, an agent has no policy, a policy is for
            an agent that does not exist, the environment has no oracle, or `engines` do not serve a model.
        ModelNotFoundError: The model does not exist.
        StallError, ActorDiedError: An engine did not start in time, has died or does not answer.
        BudgetError: An endpoint's budget is spent.
    """
    seed = _check_seed(seed)
    if not isinstance(engines, Engines | None):
        raise TypeError(
            f"engines={engines!r:.80} is not an fa.Engines. Use `with fa.Engines(policy) as engines:`, or leave it out"
        )
    if max_turns is not None and max_turns < 1:
        raise ValueError(f"max_turns={max_turns} plays nothing. Set at least 1, or None")
    game = _made(env, env_args or {})
    spec = getattr(game, "spec", None)
    spec = spec if isinstance(spec, EnvSpec) else None
    env_id = spec.id if spec else type(game).__name__
    try:
        agents = game.possible_agents
        resolved = resolve_policies(with_unique_names(resolve_policies(policies, agents, seed)), agents, seed)
        models = {agent: policy for agent, policy in resolved.items() if isinstance(policy, Policy)}
        if models:
            policies_by_name(models, list(models))  # models must have unique names; other players may share one
        if any(isinstance(policy, Oracle) for policy in resolved.values()):
            oracle_of(spec, env_id)  # fails before an engine starts
        limit = max_turns or (spec and spec.max_turns) or 1000

        async def play_episode(policy_engines: Mapping[str, PolicyEngine]) -> Episode:
            with Watchdog(interrupts=False):  # the code that blocks may be a debugger, and Ctrl-C ends this call
                return await play_one(
                    game,
                    resolved,
                    seed=seed,
                    env_id=env_id,
                    engines=policy_engines,
                    max_turns=limit,
                    rng_key=f"{env_id}/{seed}",
                    watch=watch,
                )

        with Engines(*models.values()) if engines is None else contextlib.nullcontext(engines) as running:
            episode = running.run(models.values(), play_episode)
    finally:
        if game is not env:
            rollout.close(game, env_id)
    _warn_if_failed(episode)
    return episode


def _warn_if_failed(episode: Episode) -> None:
    if (error := episode.error) is not None and error.kind != PlayerLeftError.__name__:
        message = printable(error.message).rstrip(".")
        warnings.warn(
            f"{episode.env_id} failed in {error.where}, {error.kind}: {message}. Its rewards are "
            "those that were paid before the failure. Episode.error has the traceback",
            RuntimeWarning,
            stacklevel=4,  # the caller of `play`, behind the frame of named_arguments
        )


def _check_seed(seed: Any) -> int:
    """Return a seed of Python's or NumPy's integer types as a plain int."""
    if not isinstance(seed, SupportsIndex) or operator.index(seed) < 0:
        raise ValueError(f"seed={seed!r} is no seed. Set a whole number from 0 on")
    return operator.index(seed)


def _made(env: Any, arguments: Mapping[str, Any]) -> PlayableEnv:
    """Return the environment that `env` names, creates or is."""
    if isinstance(env, AECEnv | ParallelEnv):
        if arguments:
            raise TypeError(f"env_args={dict(arguments)} came with an existing environment. Create it with them")
        return env
    if isinstance(env, str):
        return registry.make(env, **arguments)
    if isinstance(env, EnvSpec):
        return registry.make_from_spec(replace(env, kwargs={**env.kwargs, **arguments}))
    made = env(**arguments) if callable(env) else env
    if not isinstance(made, AECEnv | ParallelEnv):
        raise TypeError(
            "a game is an environment's id, an EnvSpec, a PettingZoo environment, or a class or factory of one, got "
            f"{type(made).__name__}. fa.wrap makes text games of array environments"
        )
    return made
