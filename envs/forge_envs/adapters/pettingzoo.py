"""PettingZoo's classic board and card games as text."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from forge_agents.envs.wrappers import WrappedEnv, wrap
from forge_agents.errors import DISTRIBUTION, MissingExtraError
from forge_envs.adapters.listing import entry, folder_of, register_ids

_GO_COLUMNS = "ABCDEFGHJKLMNOPQRSTUVWXYZ"


class Rules(NamedTuple):
    """Text interface of a game."""

    instructions: str
    text: Callable[[Any, Any, str], str]
    """``f(env, observation, agent)`` returns the observation without the moves."""
    names: Callable[[Any, str], Sequence[str]]
    """``f(env, agent)`` returns the names of all actions, by number."""
    lists_moves: bool = True
    """Whether the observation ends with the legal moves. False if they are too many."""
    max_seed: int = 2**63 - 1
    """Largest seed that the game accepts. Larger seeds are mapped to smaller ones."""
    lowest_reward: float = -1.0
    """Largest loss of an agent with the game's default arguments. An illegal text must not cost less."""
    chip: float = 0.0
    """Reward of a chip in poker. Rivals share the chips of an agent that forfeits. 0 in other games."""


class ClassicGame(WrappedEnv):
    """A classic game as text, with the names of legal moves in ``infos[agent]["legal_actions"]``.

    The action is the last word or phrase in a text that names a legal move. Any other text ends the game: the agent
    gets `illegal_reward`, the others 0 (in poker the chips that it has paid), and the agent's info has the reason under
    ``"illegal"``.
    """

    judges_silence = True

    def __init__(self, env: Any, rules: Rules, *, illegal_reward: float | None = None) -> None:
        self._rules = rules
        super().__init__(
            env,
            obs_to_text=self._describe,
            text_to_action=self._parse_move,
            legal_actions=self._list_moves,
            instructions=rules.instructions,
            illegal_reward=rules.lowest_reward if illegal_reward is None else illegal_reward,
        )

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Start an episode."""
        if seed is not None and seed > self._rules.max_seed:  # seeds of evaluations and benchmarks are large
            seed = int(np.random.default_rng(seed).integers(self._rules.max_seed))
        super().reset(seed=seed, options=options)

    def _mirror(self) -> None:
        self._moves: dict[str, int] = {}  # number of each legal move of the acting agent
        super()._mirror()

    def _pay(self, agent: str, reward: float) -> None:
        super()._pay(agent, reward)
        if self._rules.chip:
            players = dict(zip(self.env.possible_agents, self.env.env.game.players, strict=True))
            chips = float(players.pop(agent).in_chips)
            rivals = [name for name, player in players.items() if "folded" not in str(player.status).lower()]
            for name in rivals:
                self.rewards[name] = chips * self._rules.chip / len(rivals)
                self._cumulative_rewards[name] += self.rewards[name]

    def _list_moves(self, observation: Any, agent: str) -> Sequence[str]:
        names = self._rules.names(self.env, agent)
        mask = observation.get("action_mask") if isinstance(observation, dict) else None
        legal = range(len(names)) if mask is None else np.flatnonzero(mask)
        self._moves = {names[number]: int(number) for number in legal}
        return list(self._moves)

    def _describe(self, observation: Any, agent: str) -> str:
        text = self._rules.text(self.env, observation, agent)
        if agent != self.agent_selection or not self._moves:
            return f"{text}\nNot your turn."
        return f"{text}\nYour moves: {', '.join(self._moves)}" if self._rules.lists_moves else text

    def _parse_move(self, text: str, agent: str, space: Any) -> int:
        moves = {name.casefold(): number for name, number in self._moves.items()}
        normalized = " ".join(text.casefold().split())
        if normalized in moves:
            return moves[normalized]
        longest_first = "|".join(map(re.escape, sorted(moves, key=len, reverse=True)))
        matches = re.findall(rf"(?<![\w-])(?:{longest_first})(?![\w-])", normalized[-4000:])
        if not matches:
            raise ValueError(f"{text[:60]!r} names no legal move")
        return moves[matches[-1]]


def classic(game: str, *, illegal_reward: float | None = None, **options: Any) -> ClassicGame:
    """Make a classic game of PettingZoo as text.

    Args:
        game: Module under ``pettingzoo.classic``, e.g. ``"connect_four_v3"``.
        illegal_reward: Reward of a text without a legal move. None: the largest loss in the game, otherwise a player
            that is about to lose would leave.
        **options: Arguments of the game, e.g. ``board_size=9`` for go.
    """
    name = re.sub(r"_v\d+$", "", game)
    if name not in RULES:
        raise ValueError(f"there is no text interface for PettingZoo's {game!r}. Known: {', '.join(sorted(RULES))}")
    return ClassicGame(_raw_env(game, **options), RULES[name], illegal_reward=illegal_reward)


def _raw_env(module: str, **options: Any) -> Any:
    """Import and make a game without pygame's greeting and PettingZoo's deprecation warning."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return importlib.import_module(f"pettingzoo.classic.{module}").raw_env(**options)
    except ImportError as error:
        help_ = "pip install pygame-ce, or" if getattr(error, "name", None) == "pygame" else "pip install"
        extra = f"'{DISTRIBUTION}[classic]'"
        raise MissingExtraError(f"PettingZoo's {module.partition('.')[0]}: {error}; {help_} {extra}") from error


# ---- boards


def _grid(planes: np.ndarray[Any, Any], free: str | np.ndarray[Any, Any] = ".") -> np.ndarray[Any, Any]:
    return np.where(planes[..., 0] > 0, "X", np.where(planes[..., 1] > 0, "O", free))


def _rows(signs: np.ndarray[Any, Any]) -> str:
    return "\n".join(" ".join(row) for row in signs)


def _tictactoe(env: Any, seen: Mapping[str, Any], agent: str) -> str:
    return f"{_rows(_grid(seen['observation']).T)}\nThe squares are numbered\n0 3 6\n1 4 7\n2 5 8"


def _connect_four(env: Any, seen: Mapping[str, Any], agent: str) -> str:
    return f"{_rows(_grid(seen['observation']))}\n0 1 2 3 4 5 6"


def _chess(env: Any, seen: Any, agent: str) -> str:
    board = env.board
    rows = [f"{8 - number} {row}" for number, row in enumerate(str(board).splitlines())]
    colour = "White (capitals)" if agent == env.possible_agents[0] else "Black (small letters)"
    last = f"Last move: {board.peek().uci()}\n" if board.move_stack else ""
    return "\n".join([*rows, "  a b c d e f g h"]) + f"\n{last}You are {colour}."


def _chess_names(env: Any, agent: str) -> Sequence[str]:
    from pettingzoo.classic.chess import chess_utils

    player = env.possible_agents.index(agent)
    chess_utils.legal_moves(env.board)  # fills the table that action_to_move reads
    names = [""] * env.action_space(agent).n
    for number in np.flatnonzero(env.observe(agent)["action_mask"]):
        names[number] = chess_utils.action_to_move(env.board, int(number), player).uci()
    return names


def _go(env: Any, seen: Any, agent: str) -> str:
    stones = env._go.board  # not from the observation, whose planes swap colours with the player who moved last
    signs = np.where(stones == 1, "X", np.where(stones == -1, "O", "."))
    rows = [f"{len(signs) - number:2d} {' '.join(row)}" for number, row in enumerate(signs)]
    colour = "X, black" if agent == env.possible_agents[0] else "O, white"
    return "\n".join([*rows, "   " + " ".join(_GO_COLUMNS[: len(signs)])]) + f"\nYou are {colour}."


def _go_names(env: Any, agent: str) -> Sequence[str]:
    size = round((env.action_space(agent).n - 1) ** 0.5)
    return [f"{_GO_COLUMNS[n % size]}{size - n // size}" for n in range(size * size)] + ["pass"]


# ---- cards


def _poker(env: Any, seen: Any, agent: str) -> str:
    state = env.env.get_state(env.possible_agents.index(agent))["raw_obs"]
    hand = state["hand"] if isinstance(state["hand"], list) else [state["hand"]]
    public = state.get("public_cards", [state.get("public_card")])
    table = [str(card) for card in public if card]
    chips = [int(count) for count in state["all_chips"]]
    cards = f"Your cards: {' '.join(hand)}. Table: {' '.join(table) or 'no card'}."
    return f"{cards} Chips in: you {int(state['my_chips'])}, all seats {chips}."


def _rps(env: Any, seen: Any, agent: str) -> str:
    number = int(seen)
    moves = _rps_names(env, agent)
    return "Choose." if number >= len(moves) else f"Your opponent played {moves[number]}. Choose."


def _rps_names(env: Any, agent: str) -> Sequence[str]:
    return ("rock", "paper", "scissors", "spock", "lizard")[: env.action_space(agent).n]


def _hanabi(env: Any, seen: Any, agent: str) -> str:
    inner = env.hanabi_env
    return str(inner.game_state.observation_string(inner.possible_agents.index(agent)))


def _hanabi_names(env: Any, agent: str) -> Sequence[str]:
    inner = env.hanabi_env
    state, player = inner.game_state, inner.possible_agents.index(agent)
    legal = set(state.legal_actions(player)) if not state.is_terminal() else set()
    return [
        state.action_to_string(player, number).strip("()").strip() if number in legal else ""
        for number in range(env.action_space(agent).n)
    ]


def _fixed(*names: str) -> Callable[[Any, str], Sequence[str]]:
    return lambda env, agent: names


_CARDS = "Cards are written suit then rank: S, H, D, C. Answer with the name of a move."
_LIMIT = _fixed("call", "raise", "fold", "check")
_NO_LIMIT = _fixed("fold", "check or call", "raise half pot", "raise full pot", "all in")
_SIGNS = "You are X, your opponent is O. Answer with the number of a"
RULES = {
    "tictactoe": Rules(f"You play tic-tac-toe. {_SIGNS} free square.", _tictactoe, _fixed(*"012345678")),
    "connect_four": Rules(f"You play connect four. {_SIGNS} column.", _connect_four, _fixed(*"0123456")),
    "chess": Rules(
        "You play chess. Answer with a move from square to square, e.g. e2e4; a promotion is e7e8q.",
        _chess,
        _chess_names,
    ),
    "go": Rules(
        "You play go. Black is X and moves first, white is O. Answer with a point, e.g. D4, or pass.",
        _go,
        _go_names,
        lists_moves=False,
    ),
    "rps": Rules(
        "You play rock, paper, scissors, many rounds. Answer with one word.", _rps, _rps_names, lowest_reward=-15.0
    ),
    "leduc_holdem": Rules(f"You play Leduc hold'em. {_CARDS}", _poker, _LIMIT, lowest_reward=-7.0, chip=0.5),
    "texas_holdem": Rules(f"You play limit Texas hold'em. {_CARDS}", _poker, _LIMIT, lowest_reward=-25.0, chip=0.5),
    "texas_holdem_no_limit": Rules(
        f"You play no-limit Texas hold'em. {_CARDS}", _poker, _NO_LIMIT, lowest_reward=-100.0, chip=1.0
    ),
    "hanabi": Rules(
        "You play Hanabi together. You see all hands but your own. Answer with the name of a move.",
        _hanabi,
        _hanabi_names,
        max_seed=2**31 - 1,
    ),
}
"""Text interfaces by game."""


# ---- two games of the namespace forge/, where moves are numbers and the last number counts

_NUMBER = re.compile(r"(?<![\w.-])\d(?!\w|\.\d)", re.ASCII)
_SQUARES = np.arange(9).reshape(3, 3).astype(str)  # PettingZoo numbers the squares column by column


def tic_tac_toe(*, illegal_reward: float = -1.0) -> WrappedEnv:
    """Make tic-tac-toe with the agents ``player_1`` and ``player_2``.

    The last isolated digit in a text is the number of the square, 0 to 8. `illegal_reward` is the reward of a text
    without a free square. The other agent gets 0.
    """
    draw = lambda seen: _rows(_grid(seen["observation"], _SQUARES).T)  # noqa: E731
    return _numbered("tictactoe", RULES["tictactoe"].instructions, draw, illegal_reward)


def connect_four(*, illegal_reward: float = -1.0) -> WrappedEnv:
    """Make connect four with the agents ``player_0`` and ``player_1``, as `tic_tac_toe`. Columns are 0 to 6."""
    instructions = f"You play connect four. {_SIGNS} free column."
    return _numbered("connect_four", instructions, lambda seen: _connect_four(None, seen, ""), illegal_reward)


def _numbered(game: str, instructions: str, draw: Callable[[Any], str], illegal_reward: float) -> WrappedEnv:
    def read(seen: Any, agent: str) -> str:
        free = f"Free: {', '.join(_numbers(seen))}" if any(seen["action_mask"]) else "Not your turn."
        return f"{draw(seen)}\n{free}"

    return wrap(
        _raw_env(f"{game}.{game}"),
        obs_to_text=read,
        text_to_action=lambda text, agent, space: int(_NUMBER.findall(text)[-1]),
        legal_actions=lambda seen, agent: _numbers(seen),
        instructions=instructions,
        illegal_reward=illegal_reward,
    )


def _numbers(seen: Mapping[str, Any]) -> list[str]:
    return [str(move) for move in np.flatnonzero(seen["action_mask"])]


# ---- ids


def list_ids(name: str | None) -> str | None:
    """Register ``pettingzoo/game-vN`` for the classic games. See `forge_agents.envs.registry.ListIds`."""
    entries, hidden = {}, set()
    for path in sorted((folder_of("pettingzoo") / "classic").glob("*_v*.py")):
        game, _, version = path.stem.rpartition("_v")
        entries[f"{game}-v{version}"] = entry("pettingzoo:classic", "pettingzoo", max_turns=1000, game=path.stem)
        if name is None and not _has_dependencies(game):
            hidden.add(f"{game}-v{version}")
    return register_ids("pettingzoo", name, entries, hidden)


def _has_dependencies(game: str) -> bool:
    needed = {"chess": "chess", "hanabi": "pyspiel"}
    package = "rlcard" if game.endswith(("holdem", "no_limit")) else needed.get(game)
    return package is None or importlib.util.find_spec(package) is not None
