"""The imports as a drawing: which room stands on which floor, and what it rests on.

    python docs/_house.py             # draws
    python docs/_house.py --write     # puts the drawing into docs/architecture.md

In: the source, read and never run. Out: text. A room imports rooms of lower floors, never of its own or a higher one,
and no modules import each other in a circle; tests/docs/test_house.py fails where one does. Imports inside functions
and for types alone count, and so do names that a package hands on, ``fa.NAME``. The packages' own ``__init__``
pages, which hand them on when they are first used, and ``__main__`` do not.
"""

from __future__ import annotations

import argparse
import ast
import graphlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- drawn by docs/_house.py -->\n", "<!-- end of the drawing -->"
SOURCES = {"forge_agents": "", "forge_envs": "envs", "forge_verifiers": "verifiers", "forge_trainers": "trainers"}
FLOORS = (
    "forge_agents",
    "models runtime sandbox",
    "envs weights",
    "tools",
    "rollout",
    "programs serving",
    "bench episodes",
    "testing",
    "forge_envs.adapters forge_envs.games forge_envs.teams",
    "forge_envs.experts forge_verifiers.core",
    "forge_verifiers.code forge_verifiers.combiners forge_verifiers.rules",
    "forge_verifiers.judge forge_verifiers.report",
    "forge_verifiers.models",
    "forge_verifiers.ensemble",
    "forge_verifiers.distillation",
    "forge_trainers.losses forge_trainers.batch",
    "forge_trainers.learner forge_trainers.records",
    "forge_trainers.run viewer",
    "forge_trainers.selfplay forge_trainers.offline",
    "forge_trainers.rl",
    "forge_trainers",
    "forge_trainers.forecast",
    "cli",
)
"""Rooms from the ground up; those of forge_agents without its name. A package's own name stands for its modules that
lie in no room."""

Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """The source files by module name."""
    found = {}
    for package, folder in SOURCES.items():
        root = ROOT / folder
        for file in sorted((root / package).rglob("*.py")):
            name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            if "templates" not in file.parts and name.removesuffix(".__main__") not in SOURCES:
                found[name] = file
    return found


def imported(file: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """What a module imports of our own, wherever in it the import stands, and what packages hand on to it."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    called = {}  # packages, by what the module calls them
    for node in nodes:
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else handed_on(node.module).get(name, node.module) for name in names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            called |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name in SOURCES}
        yield from (name for name in names if name in known)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in called:
            package = called[node.value.id]
            if home := handed_on(package).get(f"{package}.{node.attr}"):
                yield home


@cache
def handed_on(package: str) -> Mapping[str, str]:
    """The modules of the names that a package's own ``__init__`` imports for types, and hands on when they are used."""
    if package not in SOURCES:
        return {}
    tree = ast.parse((ROOT / SOURCES[package] / package / "__init__.py").read_text(encoding="utf-8"))
    found = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module)
    return {f"{package}.{alias.asname or alias.name}": str(node.module) for node in found for alias in node.names}


@cache
def module_graph() -> Graph:
    """Imports between modules."""
    known = modules()
    return {name: set(imported(file, known)) - {name} for name, file in known.items()}


def room_of(module: str) -> str:
    """The folder that a module lies in; the package for one that lies in none."""
    package, *rest = module.split(".")
    is_room = len(rest) > 1 or (rest and (ROOT / SOURCES[package] / package / rest[0]).is_dir())
    return f"{package}.{rest[0]}" if is_room else package


def room_graph(graph: Graph) -> Graph:
    """Imports between rooms."""
    found: Graph = defaultdict(set)
    for module, others in graph.items():
        found[room_of(module)] |= {room_of(other) for other in others} - {room_of(module)}
    return dict(found)


def floors() -> dict[str, int]:
    """The floor of each room, from 0, the ground."""
    return {
        name if name.partition(".")[0] in SOURCES else f"forge_agents.{name}": number
        for number, names in enumerate(FLOORS)
        for name in names.split()
    }


def faults(graph: Graph) -> list[str]:
    """What is wrong with the house, a line each."""
    at = floors()
    rooms = {room_of(module) for module in graph}
    found = [f"{room} stands on no floor; add it to FLOORS" for room in sorted(rooms - at.keys())]
    found += [f"there is no room {room}; take it out of FLOORS" for room in sorted(at.keys() - rooms)]
    for module, others in sorted(graph.items()):
        for other in sorted(others):
            here, there = room_of(module), room_of(other)
            if here != there and at.get(there, -1) >= at.get(here, len(FLOORS)):
                found.append(f"{module} imports {other}: {there} does not stand below {here}")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found.append("modules import each other in a circle: " + " -> ".join(reversed(error.args[1])))
    return found


def drawing() -> str:
    """The house, top floor first: a line for each room, with the rooms that it imports."""
    graph = module_graph()
    arrows, at = room_graph(graph), floors()
    lines = ["floor  room                  imports"]
    for number in reversed(range(len(FLOORS))):
        for room in sorted(room for room, floor in at.items() if floor == number):
            below = sorted(arrows.get(room, ()), key=lambda name: (-at[name], name))
            names = " ".join(_short(name) for name in below) or "-"
            lines.append(f"{number:5}  {_short(room):20}  {names}")
    return "\n".join(lines)


def _short(room: str) -> str:
    """As FLOORS writes it; the package alone is its ground floor."""
    package, _, name = room.partition(".")
    return name if package == "forge_agents" and name else f"{package.removeprefix('forge_')}.{name}".strip(".")


def written(page: str) -> str:
    """`page` with today's drawing between its marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}```text\n{drawing()}\n```\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into docs/architecture.md")
    if parser.parse_args().write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(drawing())
    print("\n".join(faults(module_graph())))
