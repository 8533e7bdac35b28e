"""TextArena's games: players, exclusions and ids."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache

from forge_envs.adapters.listing import entry, folder_of, register_ids

_TWO = (
    "Alquerque", "Battleship", "Breakthrough", "Checkers", "Chess", "Chopsticks", "ColonelBlotto",
    "ConnectFour", "Crusade", "Debate", "DontSayIt", "GameOfPureStrategy", "GermanWhist", "HighSociety",
    "IndianPoker", "IteratedMatchingPennies", "IteratedPrisonersDilemma", "IteratedRockPaperScissors",
    "IteratedStagHunt", "IteratedTwoThirdsAverage", "IteratedUltimatumGame", "KuhnPoker", "LetterAuction",
    "LinesOfAction", "MemoryGame", "NewRecruit", "Nim", "Othello", "PigDice", "QuantumTicTacToe",
    "ReverseTicTacToe", "ScenarioPlanning", "SimpleBlindAuction", "SimpleNegotiation", "SimpleTak",
    "SpellingBee", "SpiteAndMalice", "Stratego", "Tak", "TicTacToe", "TruthAndDeception", "TwoDollar",
    "UltimateTicTacToe", "UsedCar", "UsedCarNegotiation", "WildTicTacToe", "WordChains",
)  # fmt: skip
_MANY = "LiarsDice MarketEntryGame Poker PublicGoodsGame ScorableGames Snake Surround"
PLAYERS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(_TWO, (2, 2)),
    **dict.fromkeys(("Briscola", "Golf"), (2, 2)),  # with more players these call a missing method at their end
    **dict.fromkeys(_MANY.split(), (2, 15)),
    **dict.fromkeys(("ThreePlayerGOPS", "ThreePlayerIPD", "ThreePlayerTicTacToe"), (3, 3)),
    **dict.fromkeys(("Codenames", "SettlersOfCatan", "Taboo"), (4, 4)),
    "CharacterConclave": (3, 15),
    "SantoriniBaseFixed": (2, 3),
    "SecretMafia": (6, 15),
}
"""Minimum and maximum number of players by game, measured with TextArena 0.7.4. Other games have one player."""

_ORACLE = "asks a jury or oracle, a model behind OpenRouter: needs the network and a key"
_WIN_FAILS = "raises TypeError or AttributeError at the end, which counts as a forfeit of the winner"
EXCLUDED: dict[str, str] = {
    **dict.fromkeys(("Debate", "GuessWho", "ScenarioPlanning", "TwentyQuestions"), _ORACLE),
    "DontSayIt-v0-unlimited": "raises TypeError at the first move, because it has no limit to compare the turn with",
    "CharacterConclave": "raises at the first move: add_observation() without observation_type",
    "BabyAiText": "imports gym, which Gymnasium replaced",
    **dict.fromkeys(("Checkers", "FifteenPuzzle", "Tak"), _WIN_FAILS),
    "QuantumTicTacToe": "leaves the player to move without a legal action once eight squares are solid",
    "ScorableGames": "misses games_descriptions/ in the wheel",
    "UsedCar": "misses its module in the wheel",
    "UsedCarNegotiation": "misses instructions/blue_book.txt in the wheel",
}
"""Games and variants of games that are not listed, with the reason."""

if sys.version_info < (3, 12):
    _NEWER = ("Checkers", "Chess", "IteratedStagHunt", "Klondike", "ReverseTicTacToe", "UltimateTexasHoldem")
    EXCLUDED |= dict.fromkeys(_NEWER, "is written for Python 3.12 and newer: SyntaxError")

_UPSTREAM_ID = re.compile(r"(?P<game>.+?)-v(?P<version>\d+)(?P<variant>-.+)?")
_RENDERINGS = ("-raw", "-train")
"""Suffixes of TextArena's ids for renderings of observations, which the adapter does itself."""


def list_ids(name: str | None) -> str | None:
    """Register ``textarena/Game-variant-vN``. See `forge_agents.envs.registry.ListIds`.

    TextArena's spelling ``Game-vN-variant`` is also accepted.
    """
    entries, hidden = {}, set()
    for game in _textarena_games():
        env_id, title = _move_version(game), _part(game, "game")
        low, high = PLAYERS.get(title, (1, 1))
        players = f"{low}p" if low == high else f"{low}-{high}p"
        tags = (players, "competitive") if high > 1 else (players,)
        entries[env_id] = entry("textarena:TextArena", "textarena", *tags, max_turns=1000, game=game)
        if title in EXCLUDED or game in EXCLUDED:
            hidden.add(env_id)
    if name is not None and _UPSTREAM_ID.fullmatch(name):
        name = _move_version(name)
    return register_ids("textarena", name, entries, hidden)


@cache
def _textarena_games() -> tuple[str, ...]:
    """Return TextArena's ids, read from the source that registers them."""
    source = (folder_of("textarena") / "envs" / "__init__.py").read_text()
    games = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.startswith("register"):
            ids = [word.value for word in node.keywords if word.arg == "id"]
            games += [str(word.value) for word in ids if isinstance(word, ast.Constant)]
    return tuple(sorted(game for game in games if not game.endswith(_RENDERINGS) and _UPSTREAM_ID.fullmatch(game)))


def _part(game: str, part: str) -> str:
    match = _UPSTREAM_ID.fullmatch(game)
    return (match[part] or "") if match else ""


def _move_version(game: str) -> str:
    """Rewrite ``"2048-v0-hard"`` as ``"2048-hard-v0"``, because ids of the registry end in the version."""
    variant = re.sub(r"[^\w.-]", "-", _part(game, "variant"))
    return f"{_part(game, 'game')}{variant}-v{_part(game, 'version')}"
