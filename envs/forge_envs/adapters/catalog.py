"""The ids of each adapter's namespace, found without importing the libraries they come from.

In: a name, or None for all that can be listed. Out: ids in the registry. Waits for nothing.

What a listing leaves out stands here with its measured reason; it can still be made by name.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from forge_agents.envs.registry import register

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
    "Briscola": (2, 2),  # games of more end with a call of a method that does not exist
    "CharacterConclave": (3, 15),
    "Codenames": (4, 4),
    "Golf": (2, 2),  # the same
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

_ORACLE = "asks a jury or oracle, a model behind OpenRouter: needs the network and a key"
_WIN_FAILS = "raises TypeError or AttributeError where it should name the winner, whose action then counts as a forfeit"
TEXTARENA_EXCLUDED: dict[str, str] = {
    **dict.fromkeys(("Debate", "GuessWho", "ScenarioPlanning", "TwentyQuestions"), _ORACLE),
    "CharacterConclave": "raises at the first move: add_observation() without observation_type",
    "BabyAiText": "imports gym, which Gymnasium replaced",
    **dict.fromkeys(("Checkers", "FifteenPuzzle", "Tak"), _WIN_FAILS),
    "QuantumTicTacToe": "leaves the player to move without a legal action once eight squares are solid",
    "ScorableGames": "misses games_descriptions/ in the wheel",
    "UsedCar": "misses its module in the wheel",
    "UsedCarNegotiation": "misses instructions/blue_book.txt in the wheel",
}
"""Reason by game."""

if sys.version_info < (3, 12):
    _NEWER = ("Checkers", "Chess", "IteratedStagHunt", "Klondike", "ReverseTicTacToe", "UltimateTexasHoldem")
    TEXTARENA_EXCLUDED |= dict.fromkeys(_NEWER, "is written for Python 3.12 and newer: SyntaxError")

REASONING_GYM_EXCLUDED: dict[str, str] = {
    "composite": "is a mixture of the others and needs their list as an argument",
}
"""Reason by generator."""
TEXT_ENVS = ("Blackjack-v1", "CliffWalking-v1", "FrozenLake-v1", "FrozenLake8x8-v1", "Taxi-v4")
"""Gymnasium's own environments whose observations and actions are discrete. Others are found by name."""

_UPSTREAM_ID = re.compile(r"(?P<game>.+?)-v(?P<version>\d+)(?P<variant>-.+)?")
_RENDERINGS = ("-raw", "-train")
"""Endings of TextArena's ids that say how observations are written, which the adapter does itself."""


def _offer(
    namespace: str, name: str | None, known: Mapping[str, Mapping[str, Any]], hidden: Collection[str] = ()
) -> str | None:
    """What a `ListIds` does: register all ids but the hidden ones, or the one that `name` means.

    Args:
        namespace: The part of the ids before the slash.
        name: An id without its namespace, perhaps without its version, or None for all.
        known: Arguments of `register` by id without namespace.
        hidden: Ids that are not listed.
    """
    if name is None:
        chosen = [id_ for id_ in known if id_ not in hidden]
    else:
        chosen = [id_ for id_ in known if name in (id_, id_.rpartition("-v")[0])][:1]
    for id_ in chosen:
        register(f"{namespace}/{id_}", **known[id_])
    return f"{namespace}/{chosen[0]}" if name is not None and chosen else None


def _entry(home: str, *tags: str, **kwargs: Any) -> dict[str, Any]:
    """Arguments of `register`."""
    return {"entry_point": f"forge_envs.adapters.{home}", "tags": ("adapter", *tags), **kwargs}


def textarena(name: str | None) -> str | None:
    """``textarena/Game-variant-vN``. TextArena's spelling ``Game-vN-variant`` is understood, too."""
    known, hidden = {}, set()
    for game in _textarena_games():
        id_, title = _moved_version(game), _part(game, "game")
        least, most = TEXTARENA_PLAYERS.get(title, (1, 1))
        seats = f"{least}p" if least == most else f"{least}-{most}p"
        known[id_] = _entry("textarena:TextArena", "textarena", seats, max_turns=1000, game=game)
        if title in TEXTARENA_EXCLUDED:
            hidden.add(id_)
    if name is not None and _UPSTREAM_ID.fullmatch(name):
        name = _moved_version(name)
    return _offer("textarena", name, known, hidden)


@cache
def _textarena_games() -> tuple[str, ...]:
    """TextArena's ids, read off the calls that register them."""
    source = (folder_of("textarena") / "envs" / "__init__.py").read_text()
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.startswith("register"):
            ids = [word.value for word in node.keywords if word.arg == "id"]
            found += [str(word.value) for word in ids if isinstance(word, ast.Constant)]
    return tuple(sorted(game for game in found if not game.endswith(_RENDERINGS) and _UPSTREAM_ID.fullmatch(game)))


def _part(game: str, part: str) -> str:
    match = _UPSTREAM_ID.fullmatch(game)
    return (match[part] or "") if match else ""


def _moved_version(game: str) -> str:
    """``"2048-v0-hard"`` as ``"2048-hard-v0"``: ids of the registry end in their version."""
    variant = re.sub(r"[^\w.-]", "-", _part(game, "variant"))
    return f"{_part(game, 'game')}{variant}-v{_part(game, 'version')}"


_CURRICULUM_LEVELS = 4
"""Of reasoning-gym's 102 curricula all but two have at least so many levels, and of those two the last counts twice."""


def reasoning_gym(name: str | None) -> str | None:
    """``reasoning-gym/generator-v0``."""
    known = {
        f"{generator}-v0": _entry(
            "reasoning_gym:ReasoningGym",
            "reasoning-gym",
            "1p",
            category,
            generator=generator,
            levels=[{"level": level} for level in range(_CURRICULUM_LEVELS * graded)],
        )
        for generator, (category, graded) in _reasoning_gym_generators().items()
    }
    return _offer("reasoning-gym", name, known, {f"{generator}-v0" for generator in REASONING_GYM_EXCLUDED})


@cache
def _reasoning_gym_generators() -> dict[str, tuple[str, bool]]:
    """Category of each generator and whether it has a curriculum, read off the calls that register them."""
    found = {}
    root = folder_of("reasoning_gym")
    for path in sorted(root.rglob("*.py")):
        source = path.read_text()
        if "register_dataset(" not in source:
            continue
        names = dict(re.findall(r"^(\w+) = \"(\w+)\"$", source, re.MULTILINE))
        for argument, rest in re.findall(r"^register_dataset\(\s*([\w\"]+)([^)]*)", source, re.MULTILINE):
            generator = argument.strip('"') if argument.startswith('"') else names.get(argument, "")
            if generator:
                found[generator] = path.relative_to(root).parts[0], "Curriculum" in rest
    return found


def pettingzoo(name: str | None) -> str | None:
    """``pettingzoo/game-vN`` for PettingZoo's classic games, N being PettingZoo's own version."""
    known, hidden = {}, set()
    for path in sorted((folder_of("pettingzoo") / "classic").glob("*_v*.py")):
        game, _, version = path.stem.rpartition("_v")
        known[f"{game}-v{version}"] = _entry("pettingzoo:classic", "pettingzoo", max_turns=1000, game=path.stem)
        if name is None and not _has_dependencies(game):
            hidden.add(f"{game}-v{version}")
    return _offer("pettingzoo", name, known, hidden)


def _has_dependencies(game: str) -> bool:
    needed = {"chess": "chess", "leduc_holdem": "rlcard", "texas_holdem": "rlcard", "hanabi": "pyspiel"}
    package = needed.get(game) or ("rlcard" if game.startswith("texas") else "")
    return not package or importlib.util.find_spec(package) is not None


def gymnasium(name: str | None) -> str | None:
    """``gymnasium/Id-vN`` for environments with text or discrete spaces; any such id can be asked for by name."""
    known = {
        id_: _entry("gymnasium:GymnasiumText", "gymnasium", "1p", max_turns=200, game=id_)
        for id_ in (TEXT_ENVS if name is None else (name,))
        if re.fullmatch(r"[\w.-]+-v\d+", id_)
    }
    return _offer("gymnasium", name, known)


def openenv(name: str | None) -> str | None:
    """``openenv/Server-v0``: any OpenEnv server, given its ``url``. Nothing to list: a server must run."""
    return _offer("openenv", name, {"Server-v0": _entry("openenv:OpenEnv", "openenv", "1p")}, ("Server-v0",))


def verifiers(name: str | None) -> str | None:
    """``verifiers/name-v0`` for environment modules of PrimeIntellect's verifiers; any such module is found by name.

    Listed are those of installed packages that say they need the library.
    """
    name = None if name is None else name.removesuffix("-v0").replace("_", "-")
    known = {
        f"{each}-v0": _entry("verifiers:load", "verifiers", "1p", name=each)
        for each in (_environment_packages() if name is None else (name,))
        if _loads_environment(each.replace("-", "_"))
    }
    return _offer("verifiers", name, known)


def _environment_packages() -> Iterator[str]:
    for package in importlib.metadata.distributions():
        if re.search(r"^Requires-Dist: verifiers\b", package.read_text("METADATA") or "", re.MULTILINE):
            yield package.name.replace("_", "-")


def _loads_environment(module: str) -> bool:
    """Whether there is a module with a ``load_environment``, read off its source."""
    if not re.fullmatch(r"[A-Za-z]\w*", module):
        return False
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # the main program
        return False
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return False
    return "load_environment" in Path(spec.origin).read_text(errors="replace")


def folder_of(package: str) -> Path:
    """Where an installed package lies; it is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no package {package!r}")
    return Path(spec.origin).parent
