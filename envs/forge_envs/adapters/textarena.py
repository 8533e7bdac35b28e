"""Games of TextArena (arXiv:2504.11442), unchanged inside, as PettingZoo text environments.

In: a game's id, a number of players, text actions. Out: per-seat messages, TextArena's rewards, and an outcome that
never calls a forfeit a win. Waits for nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv
from forge_envs.adapters.catalog import TEXTARENA_EXCLUDED, TEXTARENA_PLAYERS, folder_of
from forge_envs.adapters.contained import Randomness, failure, fitting
from forge_envs.adapters.patterns import bound_patterns
from forge_envs.adapters.textarena_moves import legal_moves

_CUT = "[earlier messages are left out]\n"
WORD_GAMES = frozenset(
    "Codenames DontSayIt Hangman LetterAuction SpellingBee WordChains WordLadder WordSearch Wordle".split()  # noqa: SIM905
)
"""The games that ask NLTK for its corpus ``words``, some also for its tagger."""

_MOST = {"Set": 20.0}
"""Largest reward of games of one seat that do not pay at most 1."""
_TAGGER = "averaged_perceptron_tagger_eng"


class TextArena(TurnEnv):
    """One game of TextArena.

    Seats are ``player_0``, ``player_1``, ... A seat's `instructions` are the prompts that the game writes at the
    start; its observation is every message of the game and of other players since its last decision. Actions go
    through the game's default action wrappers, cut to `max_action_chars`.

    ``infos[agent]["legal_actions"]`` lists the legal actions of about 50 games that have few.

    Rewards are TextArena's own, given when the game ends, partial credit included. Bandit is corrected: TextArena pays
    the regret of the button that was chosen, and so the worst button most (its issue 173); here the reward is 1 minus
    the regret. At the end every seat's info holds

    * ``"outcome"``: ``"win"``, ``"loss"`` or ``"draw"`` among the seats; for one seat ``"solved"`` (the most that can
      be earned: 20 in Set, 1 in other games), ``"partial"`` or ``"failed"``; ``"forfeit"`` for a seat that the game
      ended or removed for invalid moves; and
      ``"void"`` for a seat whose last rival forfeited: its reward stays TextArena's (usually 1), but it is no win.
    * ``"forfeits"``: the seats that forfeited; ``"score"``: the own reward; ``"reason"`` and ``"role"``, as
      TextArena says.

    Games match patterns within a time limit; a text that exceeds it is a forfeit like an exception.

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
        if reason := TEXTARENA_EXCLUDED.get(game_name(game)):
            warnings.warn(f"TextArena's {game} does not work as it should: it {reason}", RuntimeWarning, stacklevel=2)
        self.game = game
        self.possible_agents = tuple(f"player_{seat}" for seat in range(number))
        self._arguments = options

    def setup(self, rng: np.random.Generator) -> str:
        """Make and reset a fresh game on a private state of the global generators."""
        import textarena

        seed = int(rng.integers(2**31))
        self._randomness = Randomness(seed)
        words = words_offered() if game_name(self.game) in WORD_GAMES else contextlib.nullcontext()
        with self._randomness.contained(), words:
            home = textarena.envs.registration.ENV_REGISTRY[self.game].entry_point
            if isinstance(home, str):
                importlib.import_module(home.partition(":")[0])
            bound_patterns("textarena")
            self._game = textarena.make(self.game, **self._arguments)
            self._game.reset(num_players=len(self.possible_agents), seed=seed)
            self._core = self._game
            while isinstance(self._core, textarena.Wrapper):
                self._core = self._core.env
            self._read: dict[str, list[Any]] = {agent: [] for agent in self.possible_agents}
            seen = self._core.state.observations
            self._prompts = {
                agent: [str(text) for _, text, *kind in seen.get(seat, []) if _kind(kind) == "PROMPT"]
                for seat, agent in enumerate(self.possible_agents)
            }
            return self._deliver()

    def instructions(self, agent: str) -> str:
        return "\n".join(self._prompts[agent])

    def observe_text(self, agent: str) -> str:
        seat = self.possible_agents.index(agent)
        told = []
        for sender, text, *kind in [*self._read[agent], *self._core.state.observations.get(seat, [])]:
            own_words = sender == seat and _kind(kind) == "PLAYER_ACTION"
            if not own_words and not (_kind(kind) == "PROMPT" and str(text) in self._prompts[agent]):
                told.append(f"[{self._core.state.role_mapping.get(sender, f'Player {sender}')}] {str(text).strip()}")
        return fitting("\n".join(told), self.max_observation_chars, _CUT)

    def legal_actions(self, agent: str) -> list[str] | None:
        return legal_moves(game_name(self.game), self._core)

    def act(self, agent: str, action: str) -> Outcome:
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

    def _crash(self, agent: str, error: Exception) -> Outcome:
        rewards = {seat: -1.0 if name == agent else 0.0 for seat, name in enumerate(self.possible_agents)}
        infos = {seat: {"invalid_move": name == agent} for seat, name in enumerate(self.possible_agents)}
        return self._end(rewards, infos, error=failure(error))

    def _end(self, rewards: dict[int, Any], infos: dict[int, dict[str, Any]], error: str = "") -> Outcome:
        agents = self.possible_agents
        told = {agent: infos.get(seat, {}) for seat, agent in enumerate(agents)}
        forfeits = [agent for agent in agents if told[agent].get("invalid_move")]
        score = {agent: _number(rewards.get(seat), agent in forfeits) for seat, agent in enumerate(agents)}
        if game_name(self.game) == "Bandit" and not (forfeits or error):
            score = {agent: 1.0 - regret for agent, regret in score.items()}
        verdict = outcomes(score, forfeits, most=_MOST.get(game_name(self.game), 1.0))
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


def outcomes(score: dict[str, float], forfeits: list[str], *, most: float = 1.0) -> dict[str, str]:
    """What the end of a game counts as for each seat; see `TextArena`. A single seat can earn at most `most`.

    Seats that did not forfeit are compared with each other: the highest score wins, equal scores win, draw or lose
    together by their sign. A lone seat left over by forfeits has beaten nobody.
    """
    playing = {agent: value for agent, value in score.items() if agent not in forfeits}
    verdict = dict.fromkeys(forfeits, "forfeit")
    if len(score) == 1:
        return verdict | {a: "solved" if v >= most else "partial" if v > 0 else "failed" for a, v in playing.items()}
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


# ---- words: nothing is downloaded


@contextlib.contextmanager
def words_offered() -> Iterator[None]:
    """Inside, NLTK finds a word list and a tagger, and `nltk.download` does nothing."""
    _offer()
    with mock.patch("nltk.download", return_value=False):
        yield


@cache
def _offer() -> None:
    """Put a stand-in for what is missing on NLTK's path; what is installed comes first.

    The stand-in of ``words/en`` holds the lower-case words of TextArena's American dictionary, that of
    ``words/en-basic`` its nouns of three to eight letters. A word is a noun where the dictionary gives it a possessive
    and a plural; the tagger calls nouns NN and all else JJ.
    """
    import nltk

    if all(_is_there(resource) for resource in ("corpora/words", f"taggers/{_TAGGER}")):
        return
    dictionary = folder_of("textarena") / "envs" / "utils" / "data" / "en_US.dic"
    entries = dict(line.partition("/")[::2] for line in dictionary.read_text().splitlines()[1:])
    words = sorted(word for word in entries if word.isascii() and word.isalpha() and word.islower())
    short = range(3, 9)
    nouns = {word for word in words if {"M", "S"} <= set(entries[word])}
    folder = Path(tempfile.mkdtemp(prefix="forge-words-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _write(folder / "corpora/words/README", "Words of TextArena's dictionary en_US, in the place of NLTK's corpus.\n")
    _write(folder / "corpora/words/en", "\n".join(words))
    _write(folder / "corpora/words/en-basic", "\n".join(word for word in words if word in nouns and len(word) in short))
    tags = {word: "NN" if word in nouns else "JJ" for word in words}
    for part, content in (("weights", {}), ("tagdict", tags), ("classes", ["JJ", "NN"])):
        _write(folder / f"taggers/{_TAGGER}/{_TAGGER}.{part}.json", json.dumps(content))
    nltk.data.path.append(str(folder))


def _is_there(resource: str) -> bool:
    import nltk

    try:
        nltk.data.find(resource)
    except LookupError:
        return False
    return True


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
