"""Legal actions of TextArena's games, for games with few of them.

Each function takes the game's core environment (version 0.7.4) and returns the legal actions of the current player, or
None if any text is legal or the actions cannot be listed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

_FACES = {1: "A", 11: "J", 12: "Q", 13: "K"}


def legal_moves(game: str, core: Any) -> list[str] | None:
    """Return the legal actions of the current player, or None if they are unknown. `core` is inside all wrappers."""
    list_moves = _MOVES.get(game)
    moves = None if list_moves is None or core.state.done else list_moves(core)
    return None if moves is None else list(moves)


def _fixed(*moves: str) -> Callable[[Any], Iterable[str]]:
    return lambda core: moves


def _state(core: Any) -> dict[str, Any]:
    state: dict[str, Any] = core.state.game_state
    return state


def _cells(rows: int, columns: int) -> Iterable[tuple[int, int]]:
    return itertools.product(range(rows), range(columns))


def _free_squares(core: Any) -> list[int]:
    """Return the numbers of the empty squares of a square board, row by row."""
    board = _state(core)["board"]
    return [row * len(board) + column for row, column in _cells(len(board), len(board)) if board[row][column] == ""]


def _tic_tac_toe(core: Any) -> Iterable[str]:
    return [f"[{square}]" for square in _free_squares(core)]


def _wild_tic_tac_toe(core: Any) -> Iterable[str]:
    return [f"[{mark} {square}]" for square in _free_squares(core) for mark in "XO"]


def _quantum_tic_tac_toe(core: Any) -> Iterable[str]:
    return [f"[{first},{second}]" for first, second in itertools.combinations(_free_squares(core), 2)]


def _connect_four(core: Any) -> Iterable[str]:
    return [f"[col {column}]" for column, top in enumerate(_state(core)["board"][0]) if top == "."]


def _nim(core: Any) -> Iterable[str]:
    return [f"[{pile} {n}]" for pile, size in enumerate(_state(core)["piles"]) for n in range(1, size + 1)]


def _kuhn_poker(core: Any) -> Iterable[str] | None:
    tree = _state(core)["current_legal_action_tree"]
    return [f"[{move}]" for move in tree] if isinstance(tree, dict) else None


def _othello(core: Any) -> Iterable[str]:
    moves = core._valid_moves("B" if core.state.current_player_id == 0 else "W")
    return [f"[{row}, {column}]" for row, column in moves] or ["[skip]"]


def _chess(core: Any) -> Iterable[str]:
    return [f"[{move.uci()}]" for move in _state(core)["board"].legal_moves]


def _pure_strategy(core: Any) -> Iterable[str]:
    hand = _state(core)["player_hands"][core.state.current_player_id]
    return [f"[{_FACES.get(card, card)}]" for card in hand]


def _briscola(core: Any) -> Iterable[str]:
    hand = _state(core)["players"][core.state.current_player_id]["hand"]
    return [f"[play {at}]" for at in range(1, len(hand) + 1)]


def _ultimatum(core: Any) -> Iterable[str]:
    state = _state(core)
    offers = state["phase"] == "offering"
    return [f"[Offer: ${n}]" for n in range(state["pool"] + 1)] if offers else ["[Accept]", "[Reject]"]


def _in_decisions(*moves: str) -> Callable[[Any], Iterable[str] | None]:
    """Return `moves` in the decision phase. In conversation any text is legal."""
    return lambda core: moves if _state(core)["phase"] == "decision" else None


def _public_goods(core: Any) -> Iterable[str] | None:
    state = _state(core)
    return [f"[{n}]" for n in range(state["endowment"] + 1)] if state["phase"] == "decision" else None


def _frozen_lake(core: Any) -> Iterable[str]:
    row, column = _state(core)["player_pos"]
    return [
        f"[{name}]"
        for name, (dr, dc) in core.actions.items()
        if 0 <= row + dr < core.size and 0 <= column + dc < core.size
    ]


def _lights_out(core: Any) -> Iterable[str]:
    return [f"[{row} {column}]" for row, column in _cells(core.size, core.size)]


def _minesweeper(core: Any) -> Iterable[str]:
    return [f"[{row} {column}]" for row, column in _cells(core.rows, core.cols) if not core.revealed[row][column]]


def _tower_of_hanoi(core: Any) -> Iterable[str]:
    towers = _state(core)["towers"]
    pairs = [(a, b) for a, b in itertools.permutations(towers, 2) if towers[a]]
    return [f"[{a} {b}]" for a, b in pairs if not towers[b] or towers[b][-1] > towers[a][-1]]


def _guess_the_number(core: Any) -> Iterable[str]:
    return [f"[{n}]" for n in range(core.min_number, core.max_number + 1) if n not in core.guessed_numbers]


def _peg_jump(core: Any) -> Iterable[str]:
    board = _state(core)["board"]
    return [f"[{a} {b}]" for a, over, b in core.ALLOWED_MOVES if board[a] and board[over] and not board[b]]


_MOVES: dict[str, Callable[[Any], Iterable[str] | None]] = {
    **dict.fromkeys(("ReverseTicTacToe", "SimpleTak", "ThreePlayerTicTacToe", "TicTacToe"), _tic_tac_toe),
    **dict.fromkeys(("Snake", "Surround"), _fixed("[up]", "[down]", "[left]", "[right]")),
    **dict.fromkeys(("GameOfPureStrategy", "ThreePlayerGOPS"), _pure_strategy),
    "Bandit": lambda core: [f"[{button}]" for button in core.buttons],
    "Blackjack": _fixed("[hit]", "[stand]"),
    "Briscola": _briscola,
    "Chess": _chess,
    "ConnectFour": _connect_four,
    "Crusade": lambda core: core._legal_moves_for_player(core.state.current_player_id),
    "FrozenLake": _frozen_lake,
    "GuessTheNumber": _guess_the_number,
    "IteratedMatchingPennies": _fixed("[heads]", "[tails]"),
    "IteratedPrisonersDilemma": _in_decisions("[cooperate]", "[defect]"),
    "IteratedRockPaperScissors": _fixed("[rock]", "[paper]", "[scissors]"),
    "IteratedStagHunt": _in_decisions("[Stag]", "[Hare]"),
    "IteratedTwoThirdsAverage": lambda core: [f"[{n}]" for n in range(int(core.min_guess), int(core.max_guess) + 1)],
    "IteratedUltimatumGame": _ultimatum,
    "KuhnPoker": _kuhn_poker,
    "LightsOut": _lights_out,
    "MarketEntryGame": _in_decisions("[E]", "[S]"),
    "Minesweeper": _minesweeper,
    "Nim": _nim,
    "Othello": _othello,
    "PegJump": _peg_jump,
    "PigDice": _fixed("[roll]", "[hold]"),
    "PublicGoodsGame": _public_goods,
    "QuantumTicTacToe": _quantum_tic_tac_toe,
    "Secretary": _fixed("[accept]", "[continue]"),
    "ThreeCardMonte": lambda core: [f"[{cup}]" for cup in range(core.num_cups)],
    "TowerOfHanoi": _tower_of_hanoi,
    "WildTicTacToe": _wild_tic_tac_toe,
}

GAMES_WITH_MOVES = frozenset(_MOVES)
"""Names of games whose legal actions are listed."""
