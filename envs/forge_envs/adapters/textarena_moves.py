"""Legal actions of TextArena's games, for games with few of them.

Each function takes the game's core environment (version 0.7.4) and returns the legal actions of the current player, or
None if any text is legal or the actions cannot be listed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

_FACES = {1: "A", 11: "J", 12: "Q", 13: "K"}
_MAX_CHIPS = 3
"""Largest listed bet or raise in poker, in chips. All possible bets would dominate the list."""


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


def _ultimate_tic_tac_toe(core: Any) -> Iterable[str]:
    state = _state(core)
    boards = range(9) if state["next_micro_board"] is None else [state["next_micro_board"]]
    free = [board for board in boards if state["macro_board"][board // 3][board % 3] == " "]
    return [f"[{board} {3 * r + c}]" for board in free for r, c in _cells(3, 3) if state["board"][board][r][c] == " "]


def _connect_four(core: Any) -> Iterable[str]:
    return [f"[col {column}]" for column, top in enumerate(_state(core)["board"][0]) if top == "."]


def _nim(core: Any) -> Iterable[str]:
    return [f"[{pile} {n}]" for pile, size in enumerate(_state(core)["piles"]) for n in range(1, size + 1)]


def _kuhn_poker(core: Any) -> Iterable[str] | None:
    tree = _state(core)["current_legal_action_tree"]
    return [f"[{move}]" for move in tree] if isinstance(tree, dict) else None


def _poker(core: Any) -> Iterable[str]:
    state, player = _state(core), core.state.current_player_id
    chips, due = state["player_chips"][player], state["current_bet"] - state["player_bets"][player]
    verb = "raise" if state["current_bet"] else "bet"
    more = [f"[{verb} {n}]" for n in range(1, min(_MAX_CHIPS, chips - due) + 1)] if due >= 0 else []
    return [*(["[check]"] if due <= 0 else ["[call]", "[fold]"]), *more]


def _indian_poker(core: Any) -> Iterable[str]:
    state, player = _state(core), core.state.current_player_id
    chips, due = state["player_chips"][player], state["highest_bet"] - state["current_bets"][player]
    verb = "raise" if due else "bet"
    more = [f"[{verb} {n}]" for n in range(1, min(_MAX_CHIPS, chips - due) + 1)]
    calls = ["[call]"] if due and due <= chips else [] if due else ["[check]"]
    return [*calls, "[fold]", *more]


def _liars_dice(core: Any) -> Iterable[str]:
    state = _state(core)
    quantity, face = (state["current_bid"][name] for name in ("quantity", "face_value"))
    dice = sum(state["remaining_dice"].values())
    bids = itertools.product(range(max(quantity, 1), dice + 1), range(max(face, 1), 7))
    higher = [f"[Bid: {n}, {value}]" for n, value in bids if (n, value) != (quantity, face)]
    return [*(["[Call]"] if quantity and state["last_bidder_id"] is not None else []), *higher]


def _othello(core: Any) -> Iterable[str]:
    moves = core._valid_moves("B" if core.state.current_player_id == 0 else "W")
    return [f"[{row}, {column}]" for row, column in moves] or ["[skip]"]


def _breakthrough(core: Any) -> Iterable[str]:
    player, size = core.state.current_player_id, core.board_size
    step, files = (1 if player == 0 else -1), core._col_to_file
    for row, column in _cells(size, size):
        for to in (column - 1, column, column + 1):
            if core._is_on_board(row + step, to) and core._is_valid_move(player, row, column, row + step, to):
                yield f"[{files[column]}{row + 1}{files[to]}{row + step + 1}]"


def _alquerque(core: Any) -> Iterable[str]:
    board, player, size = _state(core)["board"], core.state.current_player_id, core.BOARD_N
    piece, rival = ("R", "B") if player == 0 else ("B", "R")
    jumps = [(2 * dr, 2 * dc) for dr, dc in core.neighbours]
    for row, column in _cells(size, size):
        for dr, dc in (*core.forward_dirs[player], *jumps) if board[row][column] == piece else ():
            to = row + dr, column + dc
            if to in core.rc_to_cell and board[to[0]][to[1]] == "":
                over = board[row + dr // 2][column + dc // 2] if abs(dr) == 2 or abs(dc) == 2 else rival
                if over == rival:
                    yield f"[{core.rc_to_cell[row, column]} {core.rc_to_cell[to]}]"


def _lines_of_action(core: Any) -> Iterable[str]:
    board, size = _state(core)["board"], core.BOARD_N
    side, enemy = ("O", "X") if core.state.current_player_id == 0 else ("X", "O")
    ways = [(dr, dc) for dr, dc in itertools.product((-1, 0, 1), repeat=2) if dr or dc]
    for row, column in _cells(size, size):
        for dr, dc in ways if board[row][column] == side else ():
            length = core._count_pieces_on_line(row, column, dr, dc)
            to = row + length * dr, column + length * dc
            passed = [(row + n * dr, column + n * dc) for n in range(1, length)]
            inside = 0 <= to[0] < size and 0 <= to[1] < size
            if inside and board[to[0]][to[1]] != side and all(board[r][c] != enemy for r, c in passed):
                yield f"[{core.rc_to_coord(row, column)}{core.rc_to_coord(*to)}]"


def _memory_game(core: Any) -> Iterable[str]:
    size, matched = core.grid_size, _state(core)["matched_positions"]
    left = [cell for cell in _cells(size, size) if cell not in matched]
    return [f"[{a} {b} {c} {d}]" for (a, b), (c, d) in itertools.combinations(left, 2)]


def _battleship(core: Any) -> Iterable[str]:
    board = _state(core)["tracking_board"][core.state.current_player_id]
    size = core.grid_size
    return [f"[{chr(ord('A') + row)}{column}]" for row, column in _cells(size, size) if board[row][column] == "~"]


def _chess(core: Any) -> Iterable[str]:
    return [f"[{move.uci()}]" for move in _state(core)["board"].legal_moves]


def _checkers(core: Any) -> Iterable[str]:
    player = core.state.current_player_id
    for row, column in _cells(8, 8):
        for dr, dc in itertools.product((-2, -1, 1, 2), repeat=2):
            to = row + dr, column + dc
            on_board = 0 <= to[0] < 8 and 0 <= to[1] < 8
            if abs(dr) == abs(dc) and on_board and core._is_valid_move(player, row, column, *to):
                yield f"[{row} {column} {to[0]} {to[1]}]"


def _chopsticks(core: Any) -> Iterable[str]:
    hands, player = _state(core)["hands"], core.state.current_player_id
    mine, opponent = hands[player], hands[1 - player]
    attacks = [f"[attack {hand} {target}]" for hand, target in _cells(2, 2) if mine[hand] and opponent[target]]
    total = sum(mine)
    return attacks + [f"[split {left} {total - left}]" for left in range(total + 1) if [left, total - left] != mine]


def _pure_strategy(core: Any) -> Iterable[str]:
    hand = _state(core)["player_hands"][core.state.current_player_id]
    return [f"[{_FACES.get(card, card)}]" for card in hand]


def _high_society(core: Any) -> Iterable[str]:
    return [f"[{card}]" for card in sorted(set(_state(core)["player_money"][core.state.current_player_id]))]


def _german_whist(core: Any) -> Iterable[str]:
    player = core.state.current_player_id
    hand = _state(core)["players"][player]["hand"]
    return [f"[play {at}]" for at, card in enumerate(hand, 1) if core._is_valid_play(player, card)]


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


def _santorini(core: Any) -> Iterable[str]:
    moves: str = core._get_valid_moves(core.state.current_player_id)
    return moves.split(", ") if moves else []


def _frozen_lake(core: Any) -> Iterable[str]:
    row, column = _state(core)["player_pos"]
    return [
        f"[{name}]"
        for name, (dr, dc) in core.actions.items()
        if 0 <= row + dr < core.size and 0 <= column + dc < core.size
    ]


def _game_2048(core: Any) -> Iterable[str]:
    board = _state(core)["board"]
    columns = [list(column) for column in zip(*board, strict=True)]
    lines = {
        "[Up]": columns,
        "[Down]": [column[::-1] for column in columns],
        "[Left]": board,
        "[Right]": [row[::-1] for row in board],
    }
    return [name for name, each in lines.items() if any(core._compress_and_merge(line[:])[0] != line for line in each)]


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
    "2048": _game_2048,
    "Alquerque": _alquerque,
    "Bandit": lambda core: [f"[{button}]" for button in core.buttons],
    "Battleship": _battleship,
    "Blackjack": _fixed("[hit]", "[stand]"),
    "Breakthrough": _breakthrough,
    "Briscola": _briscola,
    "Checkers": _checkers,
    "Chess": _chess,
    "Chopsticks": _chopsticks,
    "ConnectFour": _connect_four,
    "Crusade": lambda core: core._legal_moves_for_player(core.state.current_player_id),
    "FrozenLake": _frozen_lake,
    "GermanWhist": _german_whist,
    "GuessTheNumber": _guess_the_number,
    "HighSociety": _high_society,
    "IndianPoker": _indian_poker,
    "IteratedMatchingPennies": _fixed("[heads]", "[tails]"),
    "IteratedPrisonersDilemma": _in_decisions("[cooperate]", "[defect]"),
    "IteratedRockPaperScissors": _fixed("[rock]", "[paper]", "[scissors]"),
    "IteratedStagHunt": _in_decisions("[Stag]", "[Hare]"),
    "IteratedTwoThirdsAverage": lambda core: [f"[{n}]" for n in range(int(core.min_guess), int(core.max_guess) + 1)],
    "IteratedUltimatumGame": _ultimatum,
    "KuhnPoker": _kuhn_poker,
    "LiarsDice": _liars_dice,
    "LightsOut": _lights_out,
    "LinesOfAction": _lines_of_action,
    "MarketEntryGame": _in_decisions("[E]", "[S]"),
    "MemoryGame": _memory_game,
    "Minesweeper": _minesweeper,
    "Nim": _nim,
    "Othello": _othello,
    "PegJump": _peg_jump,
    "PigDice": _fixed("[roll]", "[hold]"),
    "Poker": _poker,
    "PublicGoodsGame": _public_goods,
    "QuantumTicTacToe": _quantum_tic_tac_toe,
    "SantoriniBaseFixed": _santorini,
    "Secretary": _fixed("[accept]", "[continue]"),
    "ThreeCardMonte": lambda core: [f"[{cup}]" for cup in range(core.num_cups)],
    "TowerOfHanoi": _tower_of_hanoi,
    "UltimateTicTacToe": _ultimate_tic_tac_toe,
    "WildTicTacToe": _wild_tic_tac_toe,
}

GAMES_WITH_MOVES = frozenset(_MOVES)
"""Names of games whose legal actions are listed."""
