"""Gymnasium environments with discrete or text spaces, as single-agent text environments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv, as_json
from forge_agents.errors import ArgumentError
from forge_agents.imports import import_user_module
from forge_envs.adapters.contained import Randomness, failure
from forge_envs.adapters.listing import entry, register_ids

ACTION_NAMES: dict[str, tuple[str, ...]] = {
    "Blackjack": ("stick", "hit"),
    "CliffWalking": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
"""Names of actions by number. Actions of other environments are their numbers."""

_LOWEST = {"CliffWalking": -100.0, "Taxi": -10.0}
"""Lowest reward of a step in games that do not end with it."""
_MAX_TURNS = 200
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class GymnasiumText(TurnEnv):
    """A Gymnasium environment with the agent ``player``.

    The observation is the text observation, the rendering of ``render_mode="ansi"`` (the highlighted position in
    brackets), or the numbers of a discrete observation. The action is the last word or number in the text that names
    one. A text without an action, or outside a text space, ends the episode with `illegal_reward` and ``"illegal"`` in
    the info. An exception in the environment ends it with `illegal_reward` and ``"error"`` in the info. The game's info
    is the agent's.

    Args:
        game: Gymnasium's id, e.g. ``"FrozenLake-v1"``, or ``"module:id"`` of a module that registers it.
        illegal_reward: Reward of a text without an action. None: the lowest reward of all steps that are left in
            CliffWalking and Taxi, otherwise -1. Set it for games in which an agent can lose more.
        **options: Arguments of `gymnasium.make`.

    Raises:
        ArgumentError: There is no such environment, its action space is neither discrete nor text, or its observations
            cannot be written as text.
    """

    possible_agents = ("player",)
    judges_silence = True

    def __init__(self, game: str, *, illegal_reward: float | None = None, **options: Any) -> None:
        super().__init__()
        import gymnasium

        self._env: Any = _make(game, options)
        action, observation = self._env.action_space, self._env.observation_space
        if not isinstance(action, gymnasium.spaces.Discrete | gymnasium.spaces.Text):
            raise ArgumentError(f"{game} has the action space {action}, not Discrete or Text. Use fa.wrap")
        if self._env.render_mode != "ansi" and not _is_writable(observation):
            raise ArgumentError(f"{game} has observations in {observation} and no render mode 'ansi'. Use fa.wrap")
        name = re.sub(r"-v\d+$", "", game)
        count, names = int(getattr(action, "n", 0)), ACTION_NAMES.get(name, ())
        numbers = tuple(str(number + int(getattr(action, "start", 0))) for number in range(count))
        self._names = names if len(names) == count else numbers
        self._illegal_reward, self._lowest = illegal_reward, _LOWEST.get(name)

    def setup(self, rng: np.random.Generator) -> None:
        seed = int(rng.integers(2**31))
        self._randomness = Randomness(seed)
        with self._randomness.contained():
            self._seen, info = self._env.reset(seed=seed)
        self._keep(info)

    def instructions(self, agent: str) -> str:
        game = str(self._env.spec.id) if self._env.spec else "the game"
        return f"You play {game}. " + (f"Answer with one of: {', '.join(self._names)}." if self._names else "Answer.")

    def observe_text(self, agent: str) -> str:
        if self._env.render_mode == "ansi":
            drawn = str(self._env.render())
            return _ANSI.sub("", re.sub(r"\x1b\[[0-9;]+m(.*?)\x1b\[0m", r"[\1]", drawn)).strip()
        return _as_text(self._env, self._seen)

    def legal_actions(self, agent: str) -> Sequence[str] | None:
        return self._names or None

    def act(self, agent: str, action: str) -> Outcome:
        move: Any = action
        if self._names:
            words = re.findall(r"-?\w+", action.casefold()[-4000:])
            actions = [word for word in words if word in self._names]
            if not actions:
                return self._stop(agent, illegal=f"{action[:60]!r} names none of {', '.join(self._names)}")
            move = self._names.index(actions[-1]) + int(getattr(self._env.action_space, "start", 0))
        elif not self._env.action_space.contains(move) and not self._env.action_space.contains(move := move.strip()):
            return self._stop(agent, illegal=f"{action[:60]!r} is not in {self._env.action_space}"[:400])
        try:
            with self._randomness.contained():
                self._seen, reward, done, cut, info = self._env.step(move)
        except Exception as error:  # noqa: BLE001  # library code on model-written text
            return self._stop(agent, error=failure(error))
        self._keep(info)
        paid = {agent: float(reward)}
        return Outcome(rewards=paid, done=bool(done), truncated=bool(cut) and not done, info={agent: self._facts})

    def _keep(self, info: dict[str, Any]) -> None:
        self._facts = {str(name): as_json(value) for name, value in info.items() if name != "action_mask"}

    def _stop(self, agent: str, **why: str) -> Outcome:
        return Outcome(rewards={agent: self._penalty()}, done=True, info={agent: self._facts | why})

    def _penalty(self) -> float:
        if self._illegal_reward is not None:
            return self._illegal_reward
        return -1.0 if self._lowest is None else self._lowest * max(1, (self._limit or _MAX_TURNS) - self.num_turns)

    def close(self) -> None:
        self._env.close()


def _make(game: str, options: dict[str, Any]) -> Any:
    """Make the environment, with text rendering if available."""
    import gymnasium

    module, _, env_id = str(game).rpartition(":")
    try:
        if module:  # not by `gymnasium.make`, because a settings file may name only some modules
            import_user_module(module)
        bare = gymnasium.make(env_id, **options)
    except (gymnasium.error.Error, ModuleNotFoundError) as cause:
        raise ArgumentError(f"Gymnasium cannot make {game!r}: {cause}") from cause
    if "render_mode" in options or "ansi" not in bare.metadata.get("render_modes", ()):
        return bare
    bare.close()
    return gymnasium.make(env_id, render_mode="ansi", **options)


def _is_writable(space: Any) -> bool:
    from gymnasium.spaces import Discrete, MultiBinary, MultiDiscrete, Text, Tuple

    if isinstance(space, Tuple):
        return all(_is_writable(part) for part in space.spaces)
    return isinstance(space, Discrete | MultiBinary | MultiDiscrete | Text)


def _as_text(env: Any, seen: Any) -> str:
    if env.spec is not None and env.spec.id.startswith("Blackjack"):
        return f"Your sum: {seen[0]}. The dealer shows: {seen[1]}. Usable ace: {'yes' if seen[2] else 'no'}."
    return ", ".join(map(str, seen)) if isinstance(seen, tuple) else str(seen)


TEXT_ENVS = ("Blackjack-v1", "CliffWalking-v1", "FrozenLake-v1", "FrozenLake8x8-v1", "Taxi-v4")
"""Gymnasium's own environments with discrete observations and actions. Other environments are available by name."""


def list_ids(name: str | None) -> str | None:
    """Register ``gymnasium/Id-vN``. See `forge_agents.envs.registry.ListIds`."""
    entries = {
        env_id: entry("gymnasium:GymnasiumText", "gymnasium", "1p", max_turns=_MAX_TURNS, game=env_id)
        for env_id in (TEXT_ENVS if name is None else (name,))
        if re.fullmatch(r"[\w.-]+-v\d+", env_id)
    }
    return register_ids("gymnasium", name, entries)
