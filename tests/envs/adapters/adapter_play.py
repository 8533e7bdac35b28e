"""Helpers to play adapters with random or fixed texts."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import forge_agents as fa

BRACKETS = re.compile(r"\[([^\[\]\n]{1,60})\]")
OFFER = re.compile(
    r"(?:available|valid|legal|possible|allowed)[^\n:\[]{0,40}:?\s*((?:[^\n]*\[[^\n]*\n?)+)", re.IGNORECASE
)


def play(env: Any, seed: int, choose: Callable[[Any, str, random.Random], str], *, max_turns: int = 300) -> list[Any]:
    """Return observations, actions and rewards of an episode, and finally the infos by agent."""
    env.reset(seed=seed)
    rng = random.Random(seed)
    steps: list[Any] = []
    infos: dict[str, Any] = {}
    while env.agents and len(steps) < max_turns:
        agent = env.agent_selection
        observation, reward, terminated, truncated, info = env.last()
        infos[agent] = info
        action = None if terminated or truncated else choose(env, agent, rng)
        steps.append((agent, str(observation), reward, action))
        env.step(action)
    return [*steps, infos]


def plausible(env: Any, agent: str, rng: random.Random) -> str:
    """Return a legal action, or a text that the game is likely to accept."""
    game, legal = env.unwrapped, env.infos[agent].get("legal_actions")
    if legal:
        return rng.choice(legal)
    return _bracketed(game, agent, rng) if type(game).__name__ == "TextArena" else _answer(game, agent, rng)


def _bracketed(game: Any, agent: str, rng: random.Random) -> str:
    """Return an example or offer of TextArena with other numbers."""
    seen = game.observe_text(agent)
    offers = [word for block in OFFER.findall(seen) for word in BRACKETS.findall(block)]
    if offers and rng.random() < 0.8:
        return f"[{rng.choice(offers)}]"
    word = rng.choice(BRACKETS.findall(game.instructions(agent) + seen[-4000:]) or ["0"])
    if rng.random() < 0.6:
        word = re.sub(r"\d+", lambda _: str(rng.randrange(10)), word)
    return f"[{word}]"


def _answer(game: Any, agent: str, rng: random.Random) -> str:
    """Return the gold answer of a reasoning-gym question, one of its words, or a number."""
    words = re.findall(r"\w+", game.observe_text(agent)) or ["0"]
    options = (str(game._entry["answer"]), rng.choice(words), str(rng.randrange(-20, 100)))
    return f"<answer>{rng.choice(options)}</answer>"


def infos_after(env_id: str, texts: tuple[str, ...]) -> list[tuple[str, dict[str, Any]]]:
    """Play every text, in as many episodes as necessary. Return each with the info of its agent after the move."""
    waiting, played = list(texts), []
    env = fa.make(env_id)
    while waiting:
        env.reset(seed=len(waiting))
        while env.agents and waiting:
            agent = env.agent_selection
            observation, _, terminated, truncated, _ = env.last()
            assert env.observation_space(agent).contains(observation)
            if terminated or truncated:
                env.step(None)
                continue
            env.step(waiting[-1])
            played.append((waiting.pop(), dict(env.infos[agent])))
    env.close()
    return played
