"""Games of TextArena (arXiv:2504.11442) as text environments."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import re
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv
from forge_envs.adapters.contained import Randomness, failure, fitting
from forge_envs.adapters.listing import folder_of
from forge_envs.adapters.patterns import bound_patterns
from forge_envs.adapters.textarena_games import EXCLUDED, PLAYERS
from forge_envs.adapters.textarena_moves import legal_moves

_CUT = "[earlier messages are left out] ..."  # without a line end, which would make a cut line look like a message
_INDENT = "    "
_TAG = re.compile(r"[\s\u200b-\u200f\u2060-\u2064\ufeff]*[\[\uff3b\u3010\u3014\u27e6]")
"""Begin of a line that looks like a new message: a bracket, also a wide one, behind blanks or invisible letters."""
WORD_GAMES = frozenset(
    "Codenames DontSayIt Hangman LetterAuction SpellingBee WordChains WordLadder WordSearch Wordle".split()  # noqa: SIM905
)
"""Games that use NLTK's corpus ``words``, some also its tagger."""

_MAX_REWARD = {"Set": 20.0}
"""Maximum reward of single-player games, if it is not 1."""
_TAGGER = "averaged_perceptron_tagger_eng"


class TextArena(TurnEnv):
    """A game of TextArena with the agents ``player_0``, ``player_1``, ...

    `instructions` are the prompts that the game writes at the start. An observation has all messages of the game and of
    other players since the agent's last decision. A line that begins with a name in brackets is a new message, and
    further lines of a player's text are indented. Actions pass through the game's default action wrappers.
    ``infos[agent]["legal_actions"]`` lists the legal actions of about 35 games.

    Rewards are TextArena's, at the end of the game. Bandit is corrected: TextArena pays the regret of the chosen
    button (its issue 173), and here the reward is 1 minus the regret. In games of one player, progress counts from that
    of the start or of one mark in all cells: RushHour, WordLadder and LogicPuzzle would pay up to 0.67 for it. At the
    end every agent's info contains

    * ``"outcome"``: ``"win"``, ``"loss"`` or ``"draw"``; with one agent ``"solved"`` (maximum reward), ``"partial"`` or
      ``"failed"``; ``"forfeit"`` for an agent that the game ended or removed because of invalid moves; ``"void"`` for
      an agent whose last opponent forfeited, which keeps its reward but has not won;
    * ``"forfeits"``: agents that forfeited; ``"score"``: the agent's reward; ``"reason"`` and ``"role"`` of TextArena.

    An exception in the game, or a pattern match that exceeds its time limit, is a forfeit of the acting agent: reward
    -1, the others 0 and ``"void"``, with ``"error"`` in all infos. TextArena uses Python's global random generator, and
    each instance has a private state of it.

    Args:
        game: TextArena's id, e.g. ``"TicTacToe-v0"``.
        num_players: Number of players. None uses the game's minimum.
        max_turns: As in `TurnEnv`.
        **options: Constructor arguments of the game.

    Raises:
        ValueError: The game is unknown, or does not allow that number of players.
    """

    max_observation_chars = 65536

    judges_silence = True

    def __init__(
        self, game: str, *, num_players: int | None = None, max_turns: int | None = None, **options: Any
    ) -> None:
        super().__init__(max_turns=max_turns)
        import textarena

        low, high = PLAYERS.get(game_name(game), (1, 1))
        number = low if num_players is None else num_players
        if type(number) is not int or not low <= number <= high:
            raise ValueError(f"num_players={num_players!r} of {game}: the game takes {low} to {high} players")
        if game not in textarena.envs.registration.ENV_REGISTRY:
            raise ValueError(f"TextArena {textarena.__version__} has no game {game!r}")
        if reason := EXCLUDED.get(game_name(game), EXCLUDED.get(game)):
            warnings.warn(f"TextArena's {game} has a known fault: it {reason}", RuntimeWarning, stacklevel=2)
        self.game = game
        self.possible_agents = tuple(f"player_{player}" for player in range(number))
        self._arguments = options

    def setup(self, rng: np.random.Generator) -> str:
        """Make and reset a new game with a private state of the global generators."""
        import textarena

        seed = int(rng.integers(2**31))
        self._randomness = Randomness(seed)
        words = words_offered() if game_name(self.game) in WORD_GAMES else contextlib.nullcontext()
        with self._randomness.contained(), words:
            entry_point = textarena.envs.registration.ENV_REGISTRY[self.game].entry_point
            if isinstance(entry_point, str):
                importlib.import_module(entry_point.partition(":")[0])
            bound_patterns("textarena")
            self._game = textarena.make(self.game, **self._arguments)
            self._game.reset(num_players=len(self.possible_agents), seed=seed)
            self._core = self._game
            while isinstance(self._core, textarena.Wrapper):
                self._core = self._core.env
            self._effortless = _effortless(self._core) if len(self.possible_agents) == 1 else 0.0
            self._messages: dict[str, list[Any]] = {agent: [] for agent in self.possible_agents}
            observations = self._core.state.observations
            self._prompts = {
                agent: [str(text) for _, text, *kind in observations.get(player, []) if _kind(kind) == "PROMPT"]
                for player, agent in enumerate(self.possible_agents)
            }
            return self._next_player()

    def instructions(self, agent: str) -> str:
        return "\n".join(self._prompts[agent])

    def observe_text(self, agent: str) -> str:
        player = self.possible_agents.index(agent)
        lines = []
        for sender, text, *kind in [*self._messages[agent], *self._core.state.observations.get(player, [])]:
            # Countdown, Cryptarithm and Slitherlink give the kind of an action as its sender
            own_action = "PLAYER_ACTION" in (_kind([sender]), _kind(kind) if sender == player else "")
            if not own_action and not (_kind(kind) == "PROMPT" and str(text) in self._prompts[agent]):
                role = self._core.state.role_mapping.get(sender, f"Player {sender}")
                lines.append(f"[{role}] {indented(str(text).strip(), all_lines=sender >= 0)}")
        return fitting("\n".join(lines), self.max_observation_chars, _CUT)

    def legal_actions(self, agent: str) -> list[str] | None:
        return legal_moves(game_name(self.game), self._core)

    def act(self, agent: str, action: str) -> Outcome:
        self._messages[agent] = []
        try:
            with self._randomness.contained():
                done, _ = self._game.step(action=indented(action[: self.max_action_chars]))
                if not (done or self._core.state.done or self._is_deserted()):
                    return Outcome(next=self._next_player())
                rewards, infos = self._game.close()
        except Exception as error:  # noqa: BLE001  # library code on model-written text
            return self._crash(agent, error)
        return self._end(rewards or {}, infos)

    def _is_deserted(self) -> bool:
        """Whether a running game has at most one player left and would search for the next player forever."""
        eliminated = set(getattr(self._core.state, "elimination_order", ()))
        return len(eliminated) >= len(self.possible_agents) - 1 > 0

    def _next_player(self) -> str:
        """Fetch the messages of the player to move. Returns its agent."""
        player, messages = self._core.get_observation()
        agent = str(self.possible_agents[player])
        self._messages[agent] = [*self._messages[agent], *messages]
        return agent

    def _crash(self, agent: str, error: Exception) -> Outcome:
        rewards = {player: -1.0 if name == agent else 0.0 for player, name in enumerate(self.possible_agents)}
        infos = {player: {"invalid_move": name == agent} for player, name in enumerate(self.possible_agents)}
        return self._end(rewards, infos, error=failure(error))

    def _end(self, rewards: dict[int, Any], infos: dict[int, dict[str, Any]], error: str = "") -> Outcome:
        agents = self.possible_agents
        facts = {agent: infos.get(player, {}) for player, agent in enumerate(agents)}
        forfeits = [agent for agent in agents if facts[agent].get("invalid_move")]
        score = {agent: _as_reward(rewards.get(player), agent in forfeits) for player, agent in enumerate(agents)}
        if game_name(self.game) == "Bandit" and not (forfeits or error):
            score = {agent: 1.0 - regret for agent, regret in score.items()}
        if 0 < self._effortless < 1:
            score = {
                agent: max(0.0, (value - self._effortless) / (1 - self._effortless)) if 0 <= value < 1 else value
                for agent, value in score.items()
            }
        verdict = outcomes(score, forfeits, max_reward=_MAX_REWARD.get(game_name(self.game), 1.0))
        if error:
            verdict = {agent: "forfeit" if agent in forfeits else "void" for agent in agents}
        info = {
            agent: {
                "outcome": verdict[agent],
                "forfeits": forfeits,
                "score": score[agent],
                "reason": str(facts[agent].get("reason", ""))[:500],
                "role": str(facts[agent].get("role", "")),
            }
            | ({"error": error} if error else {})
            for agent in agents
        }
        return Outcome(rewards=score, done=True, info=info)


def outcomes(score: dict[str, float], forfeits: list[str], *, max_reward: float = 1.0) -> dict[str, str]:
    """Return the ``"outcome"`` of each agent. See `TextArena`.

    Agents that did not forfeit are compared: the highest score wins, and equal scores win, draw or lose together by
    their sign. A game of one player is solved by `max_reward`.
    """
    playing = {agent: value for agent, value in score.items() if agent not in forfeits}
    verdict = dict.fromkeys(forfeits, "forfeit")
    if len(score) == 1:
        for agent, value in playing.items():
            verdict[agent] = "solved" if value >= max_reward else "partial" if value > 0 else "failed"
        return verdict
    if forfeits and len(playing) < 2:
        return verdict | dict.fromkeys(playing, "void")
    best, worst = max(playing.values()), min(playing.values())
    for agent, value in playing.items():
        if best == worst:
            verdict[agent] = "win" if value > 0 else "loss" if value < 0 else "draw"
        else:
            verdict[agent] = "win" if value == best else "loss"
    return verdict


def indented(text: str, *, all_lines: bool = True) -> str:
    """Return `text` with an indentation before each line but the first, unless it has one.

    A player's line then never looks like a message of the game or of another player, also where the game quotes it. Of
    the game's messages (``all_lines=False``) only lines are indented that look like another message.
    """
    first, *others = text.splitlines() or [""]

    def indent(line: str) -> str:
        needs_it = line.strip() and (all_lines or _TAG.match(line)) and not line.startswith(_INDENT)
        return _INDENT + line if needs_it else line

    return "\n".join([first, *map(indent, others)])


def game_name(game: str) -> str:
    """Return the game without version and variant: ``"2048"`` for ``"2048-v0-hard"``."""
    return re.split(r"-v\d+", game)[0]


def _effortless(core: Any) -> float:
    """Return the part of a game of one player that is solved at the start or by one mark for all cells, 0 if unknown.

    Many games pay the solved part at a wrong move.
    """
    measure = getattr(core, "_get_percentage_completion", None)
    if measure is None:
        return 0.0
    grids = core.game_board_solution.values() if type(core).__name__ == "LogicPuzzleEnv" else ()
    marks = Counter(mark for grid in grids for row in grid.values() for mark in row.values())
    return max(float(measure()), max(marks.values(), default=0) / max(1, marks.total()))


def _kind(rest: list[Any]) -> str:
    """Return the kind of a message. A few games omit the kind."""
    return str(getattr(rest[0], "name", "")) if rest else ""


def _as_reward(reward: Any, forfeited: bool) -> float:
    """Return a reward as float. If the game gave no number, -1 for a forfeit and else 0."""
    return float(reward) if isinstance(reward, int | float) else -1.0 if forfeited else 0.0


# ---- word lists, without downloads


@contextlib.contextmanager
def words_offered() -> Iterator[None]:
    """Provide NLTK with a word list and a tagger, disable `nltk.download`, and read each dictionary once."""
    _write_words()
    _share_dictionaries()
    with mock.patch("nltk.download", return_value=False):
        yield


@cache
def _share_dictionaries() -> None:
    """Make all games of this process share TextArena's dictionaries. Each game would read them for over a second."""
    from textarena.envs.utils import word_lists

    word_lists._parse_condition = cache(word_lists._parse_condition)  # called 300,000 times with a dozen conditions
    kind, read = word_lists.EnglishDictionary, word_lists.EnglishDictionary.__init__

    @cache
    def content(**settings: bool) -> dict[str, Any]:
        dictionary = kind.__new__(kind)
        read(dictionary, **settings)
        return dict(vars(dictionary))

    def share(dictionary: Any, **settings: bool) -> None:
        vars(dictionary).update(content(**settings))

    kind.__init__ = share


@cache
def _write_words() -> None:
    """Write substitutes for missing NLTK data. Installed data takes precedence.

    ``words/en`` gets the lower-case words of TextArena's American dictionary, and ``words/en-basic`` its nouns of three
    to eight letters. Words with a possessive and a plural count as nouns. The tagger labels nouns NN and all other
    words JJ.
    """
    import nltk

    if all(_has_resource(resource) for resource in ("corpora/words", f"taggers/{_TAGGER}")):
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


def _has_resource(resource: str) -> bool:
    import nltk

    try:
        nltk.data.find(resource)
    except LookupError:
        return False
    return True


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
