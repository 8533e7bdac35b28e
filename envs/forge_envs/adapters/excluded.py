"""What the adapters leave out of the listing, each with the measured reason, and how many seats the games take.

In: nothing. Out: names and reasons. Waits for nothing. A game left out can still be made by name.
"""

from __future__ import annotations

import sys

_TWO = (
    "Alquerque", "Battleship", "Breakthrough", "Checkers", "Chess", "Chopsticks", "ColonelBlotto",
    "ConnectFour", "Crusade", "Debate", "DontSayIt", "GameOfPureStrategy", "GermanWhist", "HighSociety",
    "IndianPoker", "IteratedMatchingPennies", "IteratedPrisonersDilemma", "IteratedRockPaperScissors",
    "IteratedStagHunt", "IteratedTwoThirdsAverage", "IteratedUltimatumGame", "KuhnPoker", "LetterAuction",
    "LinesOfAction", "MemoryGame", "NewRecruit", "Nim", "Othello", "PigDice", "QuantumTicTacToe",
    "ReverseTicTacToe", "ScenarioPlanning", "SimpleBlindAuction", "SimpleNegotiation", "SimpleTak",
    "SpellingBee", "SpiteAndMalice", "Stratego", "Tak", "TicTacToe", "TruthAndDeception", "TwoDollar",
    "UltimateTicTacToe", "UsedCar", "UsedCarNegotiation", "WildTicTacToe", "WordChains",
)
TEXTARENA_PLAYERS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(_TWO, (2, 2)),
    "Briscola": (2, 4),
    "CharacterConclave": (3, 15),
    "Codenames": (4, 4),
    "Golf": (2, 4),
    "LiarsDice": (2, 15),
    "MarketEntryGame": (2, 15),
    "Poker": (2, 15),
    "PublicGoodsGame": (2, 15),
    "SantoriniBaseFixed": (2, 3),
    "ScorableGames": (2, 15),
    "SecretMafia": (6, 15),
    "SettlersOfCatan": (4, 4),
    "Snake": (2, 15),
    "Surround": (2, 15),
    "Taboo": (4, 4),
    "ThreePlayerGOPS": (3, 3),
    "ThreePlayerIPD": (3, 3),
    "ThreePlayerTicTacToe": (3, 3),
}
"""Fewest and most seats by game, measured with TextArena 0.7.4; a game that is not here has one."""

TEXTARENA_EXCLUDED: dict[str, str] = {
    "CharacterConclave": "raises at the first move: add_observation() without observation_type",
    "BabyAiText": "imports gym, which Gymnasium replaced",
    "Debate": "its jury or oracle is a model behind OpenRouter: needs the network and a key",
    "GuessWho": "its jury or oracle is a model behind OpenRouter: needs the network and a key",
    "ScenarioPlanning": "its jury or oracle is a model behind OpenRouter: needs the network and a key",
    "ScorableGames": "games_descriptions/ is missing from the wheel",
    "TwentyQuestions": "its jury or oracle is a model behind OpenRouter: needs the network and a key",
    "UsedCar": "its module is missing from the wheel",
    "UsedCarNegotiation": "instructions/blue_book.txt is missing from the wheel",
}
"""Reason by game."""

if sys.version_info < (3, 12):
    _NEWER = (
        "Checkers", "Chess", "IteratedStagHunt", "Klondike", "ReverseTicTacToe", "UltimateTexasHoldem",
    )
    TEXTARENA_EXCLUDED |= dict.fromkeys(_NEWER, "its source is written for Python 3.12 and newer: SyntaxError")

REASONING_GYM_EXCLUDED: dict[str, str] = {
    "composite": "is a mixture of the others and needs their list as an argument",
}
PETTINGZOO_EXCLUDED: dict[str, str] = {}
