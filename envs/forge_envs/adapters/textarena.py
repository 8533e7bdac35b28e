"""Games of TextArena (arXiv:2504.11442), unchanged inside, as PettingZoo text environments.

In: a game's id, a number of players, text actions. Out: per-seat messages, TextArena's rewards, and an outcome that
never calls a forfeit a win. Waits for nothing.
"""

from __future__ import annotations

import contextlib
import random
import re
from typing import Any

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv
from forge_envs.adapters.contained import Randomness, failure
from forge_envs.adapters.excluded import TEXTARENA_PLAYERS
from forge_envs.adapters.words import WORD_GAMES, words_offered

_BRACKETS = re.compile(r"\[([^\[\]\n]{1,60})\]")
_OFFER = re.compile(
    r"(?:available|valid|legal|possible|allowed)[^\n:\[]{0,40}:?\s*((?:[^\n]*\[[^\n]*\n?)+)", re.IGNORECASE
)
_CUT = "[earlier messages are left out]\n"


class TextArena(TurnEnv):
    """One game of TextArena.

    Seats are ``player_0``, ``player_1``, ... A seat's `instructions` are the prompts that the game writes at the
    start; its observation is every message of the game and of other players since its last decision. Actions go
    through the game's default action wrappers, cut to `max_action_chars`.

    Rewards are TextArena's own, given when the game ends, partial credit included. At the end every seat's info holds

    * ``"outcome"``: ``"win"``, ``"loss"`` or ``"draw"`` among the seats; for one seat ``"solved"`` (reward >= 1),
      ``"partial"`` or ``"failed"``; ``"forfeit"`` for a seat that the game ended or removed for invalid moves; and
      ``"void"`` for a seat whose last rival forfeited: its reward stays TextArena's (usually 1), but it is no win.
    * ``"forfeits"``: the seats that forfeited; ``"score"``: the own reward; ``"reason"`` and ``"role"``, as
      TextArena says.

    TextArena seeds and draws from Python's global generator; here each instance has a private state of it. An
    exception inside a game is a forfeit of the seat that acted (reward -1, the others 0 and ``"void"``), told in
    every info under ``"error"``.

    Args:
        game: TextArena's id, e.g. ``"TicTacToe-v0"``.
        num_players: Seats; None takes the least number that the game allows.
        max_turns: As in `TurnEnv`.
        **options: The game's own constructor arguments.

    Raises:
        ValueError: The game is unknown, or does not allow that number of players.
    """

    max_observation_chars = 65536

    def __init__(
        self, game: str, *, num_players: int | None = None, max_turns: int | None = None, **options: Any
    ) -> None:
        super().__init__(max_turns=max_turns)
        import textarena

        least, most = TEXTARENA_PLAYERS.get(game_name(game), (1, 1))
        number = least if num_players is None else num_players
        if type(number) is not int or not least <= number <= most:
            raise ValueError(f"num_players={num_players!r} of {game}: the game takes {least} to {most} players")
        if game not in textarena.envs.registration.ENV_REGISTRY:
            raise ValueError(f"TextArena {textarena.__version__} has no game {game!r}")
        self.game = game
        self.possible_agents = tuple(f"player_{seat}" for seat in range(number))
        self._arguments = options

    def setup(self, rng: np.random.Generator) -> str:
        """Make and reset a fresh game on a private state of the global generators."""
        import textarena

        seed = int(rng.integers(2**31))
        self._randomness = Randomness(seed)
        with self._randomness.contained(), self._words():
            self._game = textarena.make(self.game, **self._arguments)
            self._game.reset(num_players=len(self.possible_agents), seed=seed)
            self._core = self._game
            while isinstance(self._core, textarena.Wrapper):
                self._core = self._core.env
            self._read: dict[str, list[Any]] = {agent: [] for agent in self.possible_agents}
            self._prompts = {agent: self._prompts_of(agent) for agent in self.possible_agents}
            return self._deliver()

    def instructions(self, agent: str) -> str:
        """The prompts that the game wrote for the seat at the start."""
        return "\n".join(self._prompts[agent])

    def observe_text(self, agent: str) -> str:
        """Messages since the seat's last decision, each headed by who says it."""
        seat = self.possible_agents.index(agent)
        told = []
        for sender, text, *kind in [*self._read[agent], *self._core.state.observations.get(seat, [])]:
            own_words = sender == seat and _kind(kind) == "PLAYER_ACTION"
            if not own_words and not (_kind(kind) == "PROMPT" and str(text) in self._prompts[agent]):
                told.append(f"[{self._core.state.role_mapping.get(sender, f'Player {sender}')}] {str(text).strip()}")
        whole = "\n".join(told).encode(errors="replace").decode()
        room = self.max_observation_chars - len(_CUT)
        return whole if len(whole) <= room else _CUT + whole[-room:]

    def act(self, agent: str, action: str) -> Outcome:
        """One move; what it means is the game's to say."""
        self._read[agent] = []
        try:
            with self._randomness.contained():
                done, _ = self._game.step(action=action[: self.max_action_chars])
                if not (done or self._core.state.done or self._deserted()):
                    return Outcome(next=self._deliver())
                rewards, infos = self._game.close()
        except Exception as error:  # noqa: BLE001  # the game's code, on text that a model wrote
            return self._crash(agent, error)
        return self._end(rewards or {}, infos)

    def sample_action(self, agent: str, rng: random.Random) -> str:
        """A text that the game may well accept: an example or offer of its own, numbers varied."""
        seen = self.observe_text(agent)
        offers = [word for block in _OFFER.findall(seen) for word in _BRACKETS.findall(block)]
        if offers and rng.random() < 0.8:
            return f"[{rng.choice(offers)}]"
        words = _BRACKETS.findall(self.instructions(agent) + seen[-4000:]) or ["0"]
        word = rng.choice(words)
        if rng.random() < 0.6:
            word = re.sub(r"\d+", lambda _: str(rng.randrange(10)), word)
        return f"[{word}]"

    def _words(self) -> contextlib.AbstractContextManager[None]:
        return words_offered() if game_name(self.game) in WORD_GAMES else contextlib.nullcontext()

    def _deserted(self) -> bool:
        """Whether one seat or none is left in a game that goes on: such games look for the next one forever."""
        out = set(getattr(self._core.state, "elimination_order", ()))
        return len(out) >= len(self.possible_agents) - 1 > 0

    def _deliver(self) -> str:
        """Who decides now, with its messages fetched from the game."""
        seat, messages = self._core.get_observation()
        agent = str(self.possible_agents[seat])
        self._read[agent] = [*self._read[agent], *messages]
        return agent

    def _prompts_of(self, agent: str) -> list[str]:
        seen = self._core.state.observations.get(self.possible_agents.index(agent), [])
        return [str(text) for _, text, *kind in seen if _kind(kind) == "PROMPT"]

    def _crash(self, agent: str, error: Exception) -> Outcome:
        rewards = {seat: -1.0 if name == agent else 0.0 for seat, name in enumerate(self.possible_agents)}
        infos = {seat: {"invalid_move": name == agent} for seat, name in enumerate(self.possible_agents)}
        return self._end(rewards, infos, error=failure(error))

    def _end(self, rewards: dict[int, Any], infos: dict[int, dict[str, Any]], error: str = "") -> Outcome:
        agents = self.possible_agents
        told = {agent: infos.get(seat, {}) for seat, agent in enumerate(agents)}
        forfeits = [agent for agent in agents if told[agent].get("invalid_move")]
        score = {agent: _number(rewards.get(seat), agent in forfeits) for seat, agent in enumerate(agents)}
        verdict = outcomes(score, forfeits)
        if error:
            verdict = {agent: "forfeit" if agent in forfeits else "void" for agent in agents}
        info = {
            agent: {
                "outcome": verdict[agent],
                "forfeits": forfeits,
                "score": score[agent],
                "reason": str(told[agent].get("reason", ""))[:500],
                "role": str(told[agent].get("role", "")),
            }
            | ({"error": error} if error else {})
            for agent in agents
        }
        return Outcome(rewards=score, done=True, info=info)


def outcomes(score: dict[str, float], forfeits: list[str]) -> dict[str, str]:
    """What the end of a game counts as for each seat; see `TextArena`.

    Seats that did not forfeit are compared with each other: the highest score wins, equal scores win, draw or lose
    together by their sign. A lone seat left over by forfeits has beaten nobody.
    """
    playing = {agent: value for agent, value in score.items() if agent not in forfeits}
    verdict = dict.fromkeys(forfeits, "forfeit")
    if len(score) == 1:
        return verdict | {a: "solved" if v >= 1 else "partial" if v > 0 else "failed" for a, v in playing.items()}
    if forfeits and len(playing) < 2:
        return verdict | dict.fromkeys(playing, "void")
    best, worst = max(playing.values()), min(playing.values())
    for agent, value in playing.items():
        if best == worst:
            verdict[agent] = "win" if value > 0 else "loss" if value < 0 else "draw"
        else:
            verdict[agent] = "win" if value == best else "loss"
    return verdict


def game_name(game: str) -> str:
    """The game without version and variant: ``"2048-v0-hard"`` is ``"2048"``."""
    return re.split(r"-v\d+", game)[0]


def _kind(rest: list[Any]) -> str:
    """The kind of a message; a few games leave it out."""
    return str(getattr(rest[0], "name", "")) if rest else ""


def _number(reward: Any, forfeited: bool) -> float:
    """A reward; where the game gave none, or a text in its place, that of a forfeit or 0."""
    return float(reward) if isinstance(reward, int | float) else -1.0 if forfeited else 0.0
