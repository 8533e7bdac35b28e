"""Gymnasium environments with discrete or text spaces, as one-seat text environments.

In: a Gymnasium id, actions by name or number. Out: its text rendering or text observation, its rewards. Waits for
nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv
from forge_agents.errors import ArgumentError
from forge_envs.adapters.contained import Randomness, ended, failure

ACTION_NAMES: dict[str, tuple[str, ...]] = {
    "Blackjack": ("stick", "hit"),
    "CliffWalking": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
"""Names of the actions, by number; other environments' actions are called by their numbers."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class GymnasiumText(TurnEnv):
    """One Gymnasium environment; the seat is ``player``.

    The observation is the text observation itself, or what ``render_mode="ansi"`` draws (the coloured, current place in
    brackets), or the numbers of a discrete observation. An action is the last word or number in the text that names
    one; a text that names none ends the episode with `illegal_reward`, told in the info under ``"illegal"``. An
    exception inside the environment ends it likewise, told under ``"error"``.

    Args:
        game: Gymnasium's id, e.g. ``"FrozenLake-v1"``.
        illegal_reward: Reward of a text that names no action.
        **options: Arguments of `gymnasium.make`.

    Raises:
        ArgumentError: Its action space is neither discrete nor text, or its observations cannot be told as text.
    """

    possible_agents = ("player",)

    def __init__(self, game: str, *, illegal_reward: float = -1.0, **options: Any) -> None:
        super().__init__()
        import gymnasium

        self._env: Any = _made(game, options)
        action, seen = self._env.action_space, self._env.observation_space
        if not isinstance(action, gymnasium.spaces.Discrete | gymnasium.spaces.Text):
            raise ArgumentError(f"{game} acts in {action}; this adapter takes Discrete and Text, fa.wrap any")
        if self._env.render_mode != "ansi" and not _is_tellable(seen):
            raise ArgumentError(f"{game} observes {seen} and has no render mode 'ansi'; use fa.wrap")
        count, named = int(getattr(action, "n", 0)), ACTION_NAMES.get(re.sub(r"-v\d+$", "", game), ())
        numbers = tuple(str(number + int(getattr(action, "start", 0))) for number in range(count))
        self._names = named if len(named) == count else numbers
        self._illegal_reward = illegal_reward

    def setup(self, rng: np.random.Generator) -> None:
        seed = int(rng.integers(2**31))
        self._randomness = Randomness(seed)
        with self._randomness.contained():
            self._seen, _ = self._env.reset(seed=seed)

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
            known = [word for word in words if word in self._names]
            if not known:
                why = f"{action[:60]!r} names none of {', '.join(self._names)}"
                return ended(agent, self._illegal_reward, illegal=why)
            move = self._names.index(known[-1]) + int(getattr(self._env.action_space, "start", 0))
        try:
            with self._randomness.contained():
                self._seen, reward, done, cut, _ = self._env.step(move)
        except Exception as error:  # noqa: BLE001  # the environment's code, on text that a model wrote
            return ended(agent, self._illegal_reward, error=failure(error))
        return Outcome(rewards={agent: float(reward)}, done=bool(done), truncated=bool(cut) and not done)

    def close(self) -> None:
        self._env.close()


def _made(game: str, options: dict[str, Any]) -> Any:
    """The environment, drawing itself as text where it can."""
    import gymnasium

    bare = gymnasium.make(game, **options)
    if "render_mode" in options or "ansi" not in bare.metadata.get("render_modes", ()):
        return bare
    bare.close()
    return gymnasium.make(game, render_mode="ansi", **options)


def _is_tellable(space: Any) -> bool:
    from gymnasium.spaces import Discrete, MultiBinary, MultiDiscrete, Text, Tuple

    if isinstance(space, Tuple):
        return all(_is_tellable(part) for part in space.spaces)
    return isinstance(space, Discrete | MultiBinary | MultiDiscrete | Text)


def _as_text(env: Any, seen: Any) -> str:
    if isinstance(seen, str):
        return seen
    if env.spec is not None and env.spec.id.startswith("Blackjack"):
        return f"Your sum: {seen[0]}. The dealer shows: {seen[1]}. Usable ace: {'yes' if seen[2] else 'no'}."
    if isinstance(seen, tuple):
        return ", ".join(str(part) for part in seen)
    return str(seen)
