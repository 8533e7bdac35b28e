"""`play`: one game, from a seed to an `Episode`, from any Python: a script, a prompt, a notebook.

In: an environment, who sits in its seats, a seed. Out: an episode. Waits for engines, endpoints and environments, each
with its own deadline, and for people.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any, SupportsIndex, TypeVar

from pettingzoo import AECEnv, ParallelEnv

from forge_agents.envs import registry
from forge_agents.envs.oracles import oracle_of
from forge_agents.envs.spec import EnvSpec
from forge_agents.errors import NotReadyError, PlayerLeftError
from forge_agents.policy import Oracle, Policy, PolicyMapping, policies_by_name, resolve_policies, with_unique_names
from forge_agents.rollout import rollout
from forge_agents.rollout.players import PolicyEngine
from forge_agents.rollout.rollout import PlayableEnv
from forge_agents.runtime import startup
from forge_agents.runtime.interrupts import LoopRunner
from forge_agents.serving.config import EngineConfig
from forge_agents.serving.fleet import Fleet
from forge_agents.types import Episode, Turn

T = TypeVar("T")


class Engines:
    """Engines that stay up from game to game: ``with fa.Engines(team) as engines: fa.play(..., engines=engines)``.

    Args:
        policies: Whose models are served; policies of one model share an engine.
        config: Settings of every engine; None leaves out compilation, so that they start sooner.

    Raises:
        ModelNotFoundError: On entering: there is no such model.
        StallError, ActorDiedError: On entering: an engine did not start in time, or died.
    """

    def __init__(self, *policies: Policy, config: EngineConfig | None = None) -> None:
        self._models = {_asked(policy): policy for policy in policies}
        self._config = config or EngineConfig(enforce_eager=True)
        self._fleet: Fleet | None = None
        self._loop = LoopRunner(self._stop)
        self._turn = threading.Lock()

    def __enter__(self) -> Engines:
        self._loop.run(self._start())
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.close()

    def run(
        self, policies: Iterable[Policy], game: Callable[[Mapping[str, PolicyEngine]], Coroutine[Any, Any, T]]
    ) -> T:
        """Run ``game(served)`` to its end; `served` has what players of `policies` need, by their names.

        Of several threads one plays after the other.

        Raises:
            NotReadyError: Outside of the block, or after Ctrl-C in it.
            ValueError: A policy is of a model that is not served here.
        """
        if self._fleet is None:
            raise NotReadyError(
                "these engines are not running; they do inside their block, with fa.Engines(policy) as engines: ..., "
                "until Ctrl-C"
            )
        served = {}
        for policy in policies:
            model = _asked(policy)
            if model not in self._models:
                raise ValueError(
                    f"policy {policy.name!r} plays {model}, and these engines serve {', '.join(self._models)}; "
                    "name it in fa.Engines(...), or leave out engines= and it gets one of its own"
                )
            served[policy.name] = self._fleet.policy_engines[model]
        with self._turn:
            return self._loop.run(game(served))

    async def _start(self) -> None:
        with startup.show():
            self._fleet = await Fleet.start(self._models, self._config)

    async def _stop(self) -> None:
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            await fleet.stop()


def _asked(policy: Policy) -> str:
    """Names a model by all that its prompts depend on; models of one folder share an engine however they are asked."""
    return policy.model if policy.thinking == "auto" else f"{policy.model} with thinking {policy.thinking}"


def play(
    env: str | EnvSpec | PlayableEnv | Callable[..., PlayableEnv],
    seats: PolicyMapping,
    *,
    seed: int = 0,
    env_args: Mapping[str, Any] | None = None,
    max_turns: int | None = None,
    engines: Engines | None = None,
    watch: Callable[[Turn], object] | None = None,
) -> Episode:
    """Play one game to its end. ``print`` shows the episode as a conversation.

    The same seed, players and weights play the same game again, where the environment keeps to its seed.

    Args:
        env: An id, a spec, a class or factory, or an environment, which is reset and left open.
        seats: One player for all seats, a player by seat, or a function ``(agent, seed) -> player``. A `Policy` gets
            an engine for this one call, which takes ten seconds and more, unless `engines` serve its model. A model
            behind a server, such as that of ``forge-agents serve``, sits down as an `Endpoint`.
        max_turns: Decisions after which the episode is cut off; None is the registered limit, or else 1000.
        watch: Told each turn as it is decided, before its reward is known: ``watch=print`` shows a game live.

    Returns:
        The episode. If the environment or a player failed, a warning and `Episode.error` say where and why, and the
        turns and rewards so far are kept.

    Raises:
        UnknownIdError, ArgumentError: No such environment, or arguments that it does not take.
        TypeError, ValueError: What is no environment or no player, a seat without a player, a player for a seat that
            does not exist, an oracle where the environment has none, or engines that do not serve a model.
        ModelNotFoundError: There is no such model.
        StallError, ActorDiedError: An engine did not start in time, is gone or does not answer.
        BudgetError: An endpoint's budget is spent.
    """
    seed = _whole(seed)
    if max_turns is not None and max_turns < 1:
        raise ValueError(f"max_turns={max_turns} plays nothing; set at least 1, or None")
    game = _made(env, env_args or {})
    spec = getattr(game, "spec", None)
    spec = spec if isinstance(spec, EnvSpec) else None
    env_id = spec.id if spec else type(game).__name__
    try:
        agents = game.possible_agents
        chosen = resolve_policies(with_unique_names(resolve_policies(seats, agents, seed)), agents, seed)
        models = {agent: policy for agent, policy in chosen.items() if isinstance(policy, Policy)}
        policies_by_name(models, list(models))  # each has its own name; other players may share one
        if any(isinstance(policy, Oracle) for policy in chosen.values()):
            oracle_of(spec, env_id)  # refused before an engine starts
        most, draw = max_turns or (spec and spec.max_turns) or 1000, f"{env_id}/{seed}"

        def one(served: Mapping[str, PolicyEngine]) -> Coroutine[Any, Any, Episode]:
            return rollout.play(
                game, chosen, seed=seed, env_id=env_id, engines=served, max_turns=most, rng_key=draw, watch=watch
            )

        with contextlib.nullcontext(engines) if engines else Engines(*models.values()) as running:
            episode = running.run(models.values(), one)
    finally:
        if game is not env:
            rollout.close(game, env_id)
    if (error := episode.error) is not None and error.kind != PlayerLeftError.__name__:
        warnings.warn(
            f"{env_id} failed in {error.where}, {error.kind}: {error.message:.300}; its rewards are those before that. "
            "Episode.error has the trace",
            RuntimeWarning,
            stacklevel=2,
        )
    return episode


def _whole(seed: Any) -> int:
    """A seed, of Python's or NumPy's numbers, as what JSON holds."""
    if not isinstance(seed, SupportsIndex) or operator.index(seed) < 0:
        raise ValueError(f"seed={seed!r} is no seed; set a whole number from 0 on")
    return operator.index(seed)


def _made(env: Any, arguments: Mapping[str, Any]) -> PlayableEnv:
    """The environment that `env` stands for."""
    if isinstance(env, AECEnv | ParallelEnv):
        if arguments:
            raise TypeError(
                f"env_args={dict(arguments)} came with an environment that is made already; make it with them"
            )
        return env
    if isinstance(env, str):
        return registry.make(env, **arguments)
    if isinstance(env, EnvSpec):
        return registry.make_from_spec(replace(env, kwargs={**env.kwargs, **arguments}))
    made = env(**arguments) if callable(env) else env
    if not isinstance(made, AECEnv | ParallelEnv):
        raise TypeError(
            "a game is an environment's id, an EnvSpec, a PettingZoo environment, or a class or factory of one, got "
            f"{type(made).__name__}; fa.wrap makes text games of array environments"
        )
    return made
