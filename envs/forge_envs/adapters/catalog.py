"""The ids of each adapter's namespace, found without importing the libraries they come from.

In: a name, or None for all that can be listed. Out: ids in the registry. Waits for nothing.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from forge_agents.envs.registry import register
from forge_envs.adapters.excluded import (
    PETTINGZOO_EXCLUDED,
    REASONING_GYM_EXCLUDED,
    TEXTARENA_EXCLUDED,
    TEXTARENA_PLAYERS,
)

_UPSTREAM_ID = re.compile(r"(?P<game>.+?)-v(?P<version>\d+)(?P<variant>-.+)?")
_RENDERINGS = ("-raw", "-train")
"""Endings of TextArena's ids that say how observations are written, which the adapter does itself."""

TEXT_ENVS = ("Blackjack-v1", "CliffWalking-v1", "FrozenLake-v1", "FrozenLake8x8-v1", "Taxi-v4")
"""Gymnasium's own environments whose observations and actions are discrete. Others are found by name."""


def textarena(name: str | None) -> str | None:
    """``textarena/Game-variant-vN``. TextArena's spelling ``Game-vN-variant`` is understood, too."""
    games = {_moved_version(game): game for game in _textarena_games()}
    if name is None:
        for id_, game in games.items():
            if _part(game, "game") not in TEXTARENA_EXCLUDED:
                _textarena(id_, game)
        return None
    id_ = _moved_version(name) if _UPSTREAM_ID.fullmatch(name) else name
    if id_ not in games:
        return None
    _textarena(id_, games[id_])
    return f"textarena/{id_}"


def _textarena(id_: str, game: str) -> None:
    least, most = TEXTARENA_PLAYERS.get(_part(game, "game"), (1, 1))
    seats = f"{least}p" if least == most else f"{least}-{most}p"
    register(
        f"textarena/{id_}",
        entry_point="forge_envs.adapters.textarena:TextArena",
        max_turns=1000,
        tags=("adapter", "textarena", seats),
        game=game,
    )


@cache
def _textarena_games() -> tuple[str, ...]:
    """TextArena's ids, read off the calls that register them."""
    source = (_folder("textarena") / "envs" / "__init__.py").read_text()
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


def reasoning_gym(name: str | None) -> str | None:
    """``reasoning-gym/generator-v0``."""
    generators = _reasoning_gym_generators()
    if name is None:
        for generator, category in generators.items():
            if generator not in REASONING_GYM_EXCLUDED:
                _reasoning_gym(generator, category)
        return None
    generator = name.removesuffix("-v0")
    if generator not in generators:
        return None
    _reasoning_gym(generator, generators[generator])
    return f"reasoning-gym/{generator}-v0"


def _reasoning_gym(generator: str, category: str) -> None:
    register(
        f"reasoning-gym/{generator}-v0",
        entry_point="forge_envs.adapters.reasoning_gym:ReasoningGym",
        tags=("adapter", "reasoning-gym", "1p", category),
        generator=generator,
    )


@cache
def _reasoning_gym_generators() -> dict[str, str]:
    """Category by generator, read off the calls that register them."""
    found = {}
    root = _folder("reasoning_gym")
    for path in sorted(root.rglob("*.py")):
        source = path.read_text()
        if "register_dataset(" not in source:
            continue
        names = dict(re.findall(r"^(\w+) = \"(\w+)\"$", source, re.MULTILINE))
        for argument in re.findall(r"^register_dataset\(\s*([\w\"]+)", source, re.MULTILINE):
            generator = argument.strip('"') if argument.startswith('"') else names.get(argument, "")
            if generator:
                found[generator] = path.relative_to(root).parts[0]
    return found


def pettingzoo(name: str | None) -> str | None:
    """``pettingzoo/game-vN`` for PettingZoo's classic games, N being PettingZoo's own version."""
    games = dict(_classic_games())
    chosen = list(games) if name is None else [game for game in games if name in (game, f"{game}-v{games[game]}")]
    for game in chosen:
        if name is not None or (game not in PETTINGZOO_EXCLUDED and _has_dependencies(game)):
            register(
                f"pettingzoo/{game}-v{games[game]}",
                entry_point="forge_envs.adapters.pettingzoo:classic",
                max_turns=1000,
                tags=("adapter", "pettingzoo"),
                game=f"{game}_v{games[game]}",
            )
    return f"pettingzoo/{chosen[0]}-v{games[chosen[0]]}" if name is not None and chosen else None


def _classic_games() -> Iterator[tuple[str, int]]:
    for path in sorted((_folder("pettingzoo") / "classic").glob("*_v*.py")):
        game, _, version = path.stem.rpartition("_v")
        yield game, int(version)


def _has_dependencies(game: str) -> bool:
    needed = {"chess": "chess", "leduc_holdem": "rlcard", "texas_holdem": "rlcard", "hanabi": "pyspiel"}
    package = needed.get(game) or ("rlcard" if game.startswith("texas") else "")
    return not package or importlib.util.find_spec(package) is not None


def gymnasium(name: str | None) -> str | None:
    """``gymnasium/Id-vN`` for environments with text or discrete spaces; any such id can be asked for by name."""
    for id_ in TEXT_ENVS if name is None else (name,):
        if re.fullmatch(r"[\w.-]+-v\d+", id_):
            register(
                f"gymnasium/{id_}",
                entry_point="forge_envs.adapters.gymnasium:GymnasiumText",
                max_turns=200,
                tags=("adapter", "gymnasium", "1p"),
                game=id_,
            )
    return None


def openenv(name: str | None) -> str | None:
    """``openenv/Server-v0``: any OpenEnv server, given its ``url``. Nothing to list: a server must run."""
    if name not in ("Server", "Server-v0"):
        return None
    register("openenv/Server-v0", entry_point="forge_envs.adapters.openenv:OpenEnv", tags=("adapter", "openenv", "1p"))
    return "openenv/Server-v0"


def verifiers(name: str | None) -> str | None:
    """``verifiers/name-v0`` for environment modules of PrimeIntellect's verifiers; any such module is found by name.

    Listed are those of installed packages that say they need the library.
    """
    names = _environment_packages() if name is None else (name.removesuffix("-v0").replace("_", "-"),)
    found = [each for each in names if _loads_environment(each.replace("-", "_"))]
    for each in found:
        register(
            f"verifiers/{each}-v0",
            entry_point="forge_envs.adapters.verifiers:load",
            tags=("adapter", "verifiers", "1p"),
            name=each,
        )
    return f"verifiers/{found[0]}-v0" if name is not None and found else None


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


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no package {package!r}")
    return Path(spec.origin).parent
