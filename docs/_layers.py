"""The layers of the packages, checked against the imports of their modules.

    python docs/_layers.py             # prints the layers, and imports that break them
    python docs/_layers.py --write     # puts the layers into docs/concepts.md

A package imports packages of lower layers and packages to its right in its own layer. Modules do not import each other
in a circle. tests/docs/test_layers.py fails otherwise. The source is parsed, not executed. Imports inside functions and
for types alone count, and so do names that a package re-exports, ``fa.NAME``. The top-level ``__init__`` modules, which
import these names on first use, and ``__main__`` do not count.
"""

from __future__ import annotations

import argparse
import ast
import graphlib
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "concepts.md"
BEGIN, END = "<!-- written by docs/_layers.py -->\n", "<!-- end of the layers -->"
SOURCES = {"forge_agents": "", "forge_envs": "envs", "forge_verifiers": "verifiers", "forge_trainers": "trainers"}
LAYERS = {
    "tools for people": "cli forge_trainers.forecast viewer",
    "learning": (
        "forge_trainers forge_trainers.rl forge_trainers.offline forge_trainers.selfplay forge_trainers.run"
        " forge_trainers.records forge_trainers.learner forge_trainers.losses forge_trainers.batch"
    ),
    "acting and scoring": (
        "forge_verifiers.distillation forge_verifiers.ensemble forge_verifiers.models forge_verifiers.judge"
        " forge_verifiers.report forge_verifiers.rules forge_verifiers.combiners forge_verifiers.code"
        " forge_verifiers.core testing bench episodes forge_envs.adapters programs serving rollout"
    ),
    "environments, tools, weights": (
        "forge_envs.oracles forge_envs.teams forge_envs.games forge_envs tools envs weights"
    ),
    "processes, models, isolation": "runtime models sandbox",
    "foundation": "forge_agents",
}
"""Packages by layer, highest layer first. A package imports packages to its right and packages of lower layers.
Packages of forge_agents are written without its name. A top-level name means the modules that lie directly in it."""

Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """The source files by module name."""
    files = {}
    for package, folder in SOURCES.items():
        root = ROOT / folder
        for file in sorted((root / package).rglob("*.py")):
            name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            if "templates" not in file.parts and name.removesuffix(".__main__") not in SOURCES:
                files[name] = file
    return files


def imported(file: Path, sources: Mapping[str, Path]) -> Iterator[str]:
    """The project's modules that a module imports, at any place in it, also by a re-exported name."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    packages = {}  # top-level packages by their local name
    for node in nodes:
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in sources else reexports(node.module).get(name, node.module) for name in names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            packages |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name in SOURCES}
        yield from (name for name in names if name in sources)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in packages:
            package = packages[node.value.id]
            if home := reexports(package).get(f"{package}.{node.attr}"):
                yield home


@cache
def reexports(package: str) -> Mapping[str, str]:
    """Modules by the names that a top-level ``__init__`` imports for type checkers and re-exports on first use."""
    if package not in SOURCES:
        return {}
    tree = ast.parse((ROOT / SOURCES[package] / package / "__init__.py").read_text(encoding="utf-8"))
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module)
    return {f"{package}.{alias.asname or alias.name}": str(node.module) for node in imports for alias in node.names}


@cache
def module_graph() -> Graph:
    """Imports between modules."""
    sources = modules()
    return {name: set(imported(file, sources)) - {name} for name, file in sources.items()}


def package_of(module: str) -> str:
    """The package that a module lies in; the top-level name if it lies directly in that."""
    package, *rest = module.split(".")
    is_package = len(rest) > 1 or (rest and (ROOT / SOURCES[package] / package / rest[0]).is_dir())
    return f"{package}.{rest[0]}" if is_package else package


def ranks() -> dict[str, int]:
    """Packages with their rank; a package imports only packages of higher rank numbers."""
    names = [name for names in LAYERS.values() for name in names.split()]
    return {name if name.partition(".")[0] in SOURCES else f"forge_agents.{name}": i for i, name in enumerate(names)}


def violations(graph: Graph) -> list[str]:
    """Imports that break the layers, and packages without a layer, a line each."""
    rank = ranks()
    packages = {package_of(module) for module in graph}
    lines = [f"{package} has no layer; add it to LAYERS" for package in sorted(packages - rank.keys())]
    lines += [f"there is no package {package}; remove it from LAYERS" for package in sorted(rank.keys() - packages)]
    for module, others in sorted(graph.items()):
        for other in sorted(others):
            upper, lower = package_of(module), package_of(other)
            if upper != lower and rank.get(lower, len(rank)) <= rank.get(upper, -1):
                lines.append(f"{module} imports {other}: {lower} is neither in a layer below {upper} nor to its right")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        lines.append("modules import each other in a circle: " + " -> ".join(reversed(error.args[1])))
    return lines


def listing() -> str:
    """The layers, highest first, as indented text."""
    blocks = []
    for number, (title, names) in enumerate(LAYERS.items()):
        packages = textwrap.wrap("  ".join(_short(name) for name in names.split()), 100)
        blocks.append("\n".join([f"{len(LAYERS) - number}  {title}", *(f"     {line}" for line in packages)]))
    return "\n".join(blocks)


def _short(package: str) -> str:
    """A package without ``forge_``; the modules directly in ``forge_agents`` are called ``agents``."""
    return "envs.shared" if package == "forge_envs" else package.removeprefix("forge_")


def written(page: str) -> str:
    """`page` with the present layers between its marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}```text\n{listing()}\n```\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into docs/concepts.md")
    if parser.parse_args().write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(listing())
    print("\n".join(violations(module_graph())))
