"""Policies brought to life: one player decides for one seat through one episode.

In: a policy and, for a model, its engine and renderer. Out: decisions. Waits for engines and endpoints, which keep
their own deadlines, and for people.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from forge_agents.errors import EndpointError, StallError
from forge_agents.policy import AnyPolicy, Endpoint, Human, Policy, Random, Sampling, Scripted
from forge_agents.rollout.endpoint import client_of
from forge_agents.rollout.rendering import Renderer
from forge_agents.rollout.terminal import terminal
from forge_agents.types import Completion, FinishReason, Message, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a player answers, and the tokens behind it where a model decided."""

    action: str
    prompt_ids: tuple[int, ...] = ()
    completion: Completion | None = None
    finish_reason: FinishReason = "scripted"
    """Of an answer without tokens; a completion brings its own."""
    usage: Usage | None = None
    generate_s: float = 0.0


_TOO_LONG = ("context_length_exceeded", "maximum context length")
"""How servers refuse a conversation that does not fit: OpenAI's code, vLLM's words."""


class ContextFullError(Exception):
    """The conversation no longer fits the model's context: the episode ends, truncated."""


class Generator(Protocol):
    """What a player needs of an engine."""

    @property
    def max_model_len(self) -> int: ...  # noqa: D102

    async def generate(  # noqa: D102
        self,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        *,
        choices: Sequence[str] = (),
        seed: int | None = None,
    ) -> Completion: ...


class Player(Protocol):
    """Decides for one seat through one episode."""

    async def decide(self, observation: str, info: Mapping[str, Any]) -> Decision:
        """The action for `observation`; `info` is the environment's `infos[agent]`."""
        ...


class ModelPlayer:
    """A served model in a seat; keeps the seat's token stream.

    Args:
        constrain: Sample among the legal actions only.
        draw: Names this seat of this episode: what is sampled follows from it and the turn, whatever else the engine
            does. None: from the engine's own stream of random numbers.
    """

    def __init__(
        self,
        engine: Generator,
        renderer: Renderer,
        sampling: Sampling,
        instructions: str,
        *,
        constrain: bool = False,
        draw: str | None = None,
    ) -> None:
        self._engine, self._renderer, self._sampling, self._instructions = engine, renderer, sampling, instructions
        self._constrain, self._draw, self._decisions = constrain, draw, 0
        self._last: Decision | None = None

    async def decide(self, observation: str, info: Mapping[str, Any]) -> Decision:
        """Ask the engine. Raises ContextFullError where the prompt leaves no room for a token."""
        if self._last is None or self._last.completion is None:
            prompt_ids = self._renderer.start(self._instructions, observation)
        else:
            prompt_ids = self._renderer.extend(self._last.prompt_ids, self._last.completion.token_ids, observation)
        room = self._engine.max_model_len - len(prompt_ids)
        if room < 1:
            raise ContextFullError(
                f"prompt of {len(prompt_ids)} tokens fills the context of {self._engine.max_model_len}; "
                "raise max_model_len or shorten observations"
            )
        sampling = replace(self._sampling, max_tokens=min(self._sampling.max_tokens, room))
        started = time.perf_counter()
        legal = info.get("legal_actions") if self._constrain else None
        asked: dict[str, Any] = {"choices": tuple(legal)} if legal else {}
        if self._draw is not None:
            asked["seed"] = seed_of(f"{self._draw}/{self._decisions}")
            self._decisions += 1
        completion = await self._engine.generate(prompt_ids, sampling, **asked)
        if completion.finish_reason == "length" and sampling.max_tokens < self._sampling.max_tokens:
            completion = replace(completion, finish_reason="context")
        self._last = Decision(
            action=self._renderer.text(completion.token_ids),
            prompt_ids=prompt_ids,
            completion=completion,
            generate_s=time.perf_counter() - started,
        )
        return self._last


def seed_of(draw: str) -> int:
    """The sampling seed, 32 bits, of a draw with this name."""
    return int.from_bytes(hashlib.sha256(draw.encode()).digest()[:4], "big")


class EndpointPlayer:
    """A model behind an endpoint in a seat; keeps the seat's conversation."""

    def __init__(self, endpoint: Endpoint, instructions: str) -> None:
        endpoint.api_key()  # a key that is not set ends the run, not an episode
        self._endpoint = endpoint
        self._messages = [Message(role="system", content=instructions)] if instructions else []

    async def decide(self, observation: str, info: Mapping[str, Any]) -> Decision:
        """Ask the endpoint.

        Raises:
            EndpointError: No answer, or none in time.
            ContextFullError: The server says that the conversation is too long for the model.
            BudgetError: Nothing is left to spend.
        """
        messages = [*self._messages, Message(role="user", content=observation)]
        client = await client_of(self._endpoint)
        started = time.perf_counter()
        try:
            reply = await client.ask(messages, self._endpoint.sampling)
        except StallError as late:  # of someone else's server: the episode's failure, not the run's
            raise EndpointError(str(late)) from None
        except EndpointError as error:
            if error.status == 400 and any(words in str(error) for words in _TOO_LONG):
                raise ContextFullError(str(error)) from None
            raise
        action = reply.text.strip()
        self._messages = [*messages, Message(role="assistant", content=action)]
        return Decision(
            action=action,
            finish_reason=reply.finish_reason,
            usage=reply.usage,
            generate_s=time.perf_counter() - started,
        )


class HumanPlayer:
    """A person at the terminal in a seat."""

    def __init__(self, agent: str, instructions: str) -> None:
        self._agent, self._instructions = agent, instructions

    async def decide(self, observation: str, info: Mapping[str, Any]) -> Decision:
        """What the person types. Raises PlayerLeftError where the input ends."""
        started = time.perf_counter()
        legal = tuple(map(str, info.get("legal_actions") or ()))
        action = await terminal().ask(self._agent, observation, instructions=self._instructions, legal_actions=legal)
        self._instructions = ""  # shown once
        return Decision(action=action, generate_s=time.perf_counter() - started)


class RandomPlayer:
    """Uniform over `info["legal_actions"]`, or a short random text."""

    def __init__(self, seed: int, agent: str, episode_seed: int) -> None:
        self._rng = np.random.default_rng([seed, episode_seed, zlib.crc32(agent.encode())])

    async def decide(self, observation: str, info: Mapping[str, Any]) -> Decision:
        """A random action."""
        legal = info.get("legal_actions")
        if legal:
            return Decision(action=str(legal[int(self._rng.integers(len(legal)))]))
        letters = self._rng.integers(97, 123, size=int(self._rng.integers(1, 9)))
        return Decision(action="".join(map(chr, letters)))


class ScriptedPlayer:
    """A user's function in a seat."""

    def __init__(self, policy: Scripted, agent: str) -> None:
        self._policy, self._agent = policy, agent

    async def decide(self, observation: str, info: Mapping[str, Any]) -> Decision:
        """The function's action."""
        return Decision(action=self._policy(observation, self._agent))


@dataclass(frozen=True, slots=True)
class Served:
    """A policy's engine and renderer."""

    engine: Generator
    renderer: Renderer


def player_for(
    policy: AnyPolicy,
    *,
    agent: str,
    episode_seed: int,
    instructions: str,
    served: Mapping[str, Served],
    draw: str | None = None,
) -> Player:
    """A fresh player of `policy` for one seat of one episode.

    Args:
        served: Engines of the model policies, by policy name.
        draw: Names the episode among all that are ever played; see `ModelPlayer`.
    """
    if isinstance(policy, Policy):
        if policy.name not in served:
            raise ValueError(f"policy {policy.name!r} has no engine; running engines: {', '.join(served) or 'none'}")
        live = served[policy.name]
        return ModelPlayer(
            live.engine,
            live.renderer,
            policy.sampling,
            instructions,
            constrain=policy.constrain_actions,
            draw=None if draw is None else f"{draw}/{agent}",
        )
    if isinstance(policy, Endpoint):
        return EndpointPlayer(policy, instructions)
    if isinstance(policy, Human):
        return HumanPlayer(agent, instructions)
    if isinstance(policy, Random):
        return RandomPlayer(policy.seed, agent, episode_seed)
    return ScriptedPlayer(policy, agent)
