"""Policies brought to life: one player decides for one seat through one episode.

In: a policy and, for a model, its engine and renderer. Out: decisions. Waits for the engine, which keeps its own
deadlines.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from forge_agents.policy import AnyPolicy, Policy, Random, Sampling, Scripted
from forge_agents.rendering import Renderer
from forge_agents.types import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a player answers, and the tokens behind it where a model decided."""

    action: str
    prompt_ids: tuple[int, ...] = ()
    completion: Completion | None = None
    generate_s: float = 0.0


class ContextFullError(Exception):
    """The conversation no longer fits the model's context: the episode ends, truncated."""


class Generator(Protocol):
    """What a player needs of an engine."""

    @property
    def max_model_len(self) -> int: ...  # noqa: D102

    async def generate(  # noqa: D102
        self, prompt_ids: tuple[int, ...], sampling: Sampling, *, choices: Sequence[str] = ()
    ) -> Completion: ...


class Player(Protocol):
    """Decides for one seat through one episode."""

    async def decide(self, observation: str, info: Mapping[str, Any]) -> Decision:
        """The action for `observation`; `info` is the environment's `infos[agent]`."""
        ...


class ModelPlayer:
    """A served model in a seat; keeps the seat's token stream."""

    def __init__(
        self, engine: Generator, renderer: Renderer, sampling: Sampling, instructions: str, *, constrain: bool = False
    ) -> None:
        self._engine, self._renderer, self._sampling, self._instructions = engine, renderer, sampling, instructions
        self._constrain = constrain
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
        if legal:
            completion = await self._engine.generate(prompt_ids, sampling, choices=tuple(legal))
        else:
            completion = await self._engine.generate(prompt_ids, sampling)
        if completion.finish_reason == "length" and sampling.max_tokens < self._sampling.max_tokens:
            completion = replace(completion, finish_reason="context")
        self._last = Decision(
            action=self._renderer.text(completion.token_ids),
            prompt_ids=prompt_ids,
            completion=completion,
            generate_s=time.perf_counter() - started,
        )
        return self._last


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
) -> Player:
    """A fresh player of `policy` for one seat of one episode.

    Args:
        served: Engines of the model policies, by policy name.
    """
    if isinstance(policy, Policy):
        if policy.name not in served:
            raise ValueError(f"policy {policy.name!r} has no engine; running engines: {', '.join(served) or 'none'}")
        live = served[policy.name]
        return ModelPlayer(
            live.engine, live.renderer, policy.sampling, instructions, constrain=policy.constrain_actions
        )
    if isinstance(policy, Random):
        return RandomPlayer(policy.seed, agent, episode_seed)
    return ScriptedPlayer(policy, agent)
