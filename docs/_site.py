"""What the site adds to the pages in docs/: the reference, the list of errors, and the rest of the navigation.

In: the source, read and never run. Out: pages ``api/*.md`` and ``errors.md``, made anew at each build. Waits for
nothing.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("forge_agents", "envs/forge_envs", "verifiers/forge_verifiers", "trainers/forge_trainers")
REFERENCE = {
    "forge_agents": "`import forge_agents as fa`: the names that most programs need.",
    "forge_agents/testing": "For tests of environments and verifiers.",
    "forge_agents/bench": "Suites, ratings, reports, exact opponents.",
    "forge_agents/serving": "Engines, below the trainer.",
    "forge_agents/sandbox": "Where code that a model wrote runs.",
    "forge_agents/tools": "Tools, and how calls are written.",
    "verifiers/forge_verifiers": "Verifiers and what makes one reward of them.",
    "trainers/forge_trainers": "Trainers, their settings, credit and losses.",
}
"""Packages with public names, and what is said of them."""
_ARGUMENT_ERRORS = ("ValueError", "TypeError")


# ---- hooks that mkdocs calls


def on_config(config: Any) -> Any:
    """Complete the navigation."""
    config.nav = navigation(config.nav)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made of the source."""
    from mkdocs.structure.files import File

    for package, about in REFERENCE.items():
        files.append(File.generated(config, _api_page(package), content=reference(package, about)))
    files.append(File.generated(config, "errors.md", content=errors_page()))
    return files


def navigation(nav: list[Any]) -> list[Any]:
    """`nav` with every page of docs/: those it does not name at the end of its section."""
    sections = {title: list(pages) for entry in nav for title, pages in entry.items()}
    docs = ROOT / "docs"
    named = {page for pages in sections.values() for page in pages}
    found = {
        "Guides": sorted(path.name for path in docs.glob("*.md")),
        "Results": [path.relative_to(docs).as_posix() for path in sorted(docs.glob("results/**/*.md"))],
        "Decisions": [f"decisions/{path.name}" for path in sorted(docs.glob("decisions/*.md"))],
        "Reference": [*(_api_page(package) for package in REFERENCE), "errors.md"],
    }
    for title, pages in found.items():
        sections[title] += [page for page in pages if page not in named]
    return [{title: pages} for title, pages in sections.items()]


def _api_page(package: str) -> str:
    return f"api/{_dotted(ROOT / package / '__init__.py')}.md"


# ---- the reference


def reference(package: str, about: str) -> str:
    """A page with an entry for each name in the package's ``__all__``; what `forge_agents` offers is there only."""
    lines = [f"# {_dotted(ROOT / package / '__init__.py')}", "", about, ""]
    elsewhere = set() if package == "forge_agents" else set(documented("forge_agents").values())
    for name, path in documented(package).items():
        if path in elsewhere:
            lines += [f"- `{name}` is [described here][{path}]", ""]
        else:
            lines += [f"::: {path}", "    options:", f"      heading: {name}", f"      toc_label: {name}", ""]
    return "\n".join(lines)


def documented(package: str) -> dict[str, str]:
    """Where each public name of the package is defined."""
    homes, module = imported_names(package), _dotted(ROOT / package / "__init__.py")
    return {
        name: home if _is_module(home := homes.get(name, module)) and home.endswith(f".{name}") else f"{home}.{name}"
        for name in public_names(package)
        if not name.startswith("__")
    }


def public_names(package: str) -> list[str]:
    """The package's ``__all__``."""
    for node in ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return [str(name) for name in ast.literal_eval(node.value)]
    raise ValueError(f"{package}/__init__.py has no __all__; give it one, or take it out of REFERENCE")


def imported_names(package: str) -> dict[str, str]:
    """Modules by the names that the package's facade imports of them, also for type checkers only."""
    found = {}
    for node in ast.walk(ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                found[alias.asname or alias.name] = dotted if _is_module(dotted) else node.module
    return found


def _is_module(dotted: str) -> bool:
    below = Path(*dotted.split("."))
    return any(
        (ROOT / root / below).is_dir() or (ROOT / root / below).with_suffix(".py").is_file()
        for root in (".", "envs", "verifiers", "trainers")
    )


def _dotted(file: Path) -> str:
    """Import name of a source file."""
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    if parts[0] in ("envs", "verifiers", "trainers"):
        del parts[0]
    return ".".join(parts).removesuffix(".__init__")


# ---- the errors


def errors_page() -> str:
    """Every error class with its explanation, and every message that the source raises."""
    classes, messages = error_classes(), raised_messages()
    lines = [
        "# Every error",
        "",
        "Made of the source at each build. `…` stands for what depends on the case: names, numbers, paths. Paste a",
        "piece of a message into the search field above. What to do about a run that goes wrong without an error is in",
        "[debugging](debugging.md).",
        "",
        "Every class below derives from `forge_agents.errors.ForgeError`. Mistakes in arguments are plain",
        "[`ValueError`](#valueerror) and [`TypeError`](#typeerror).",
        "",
    ]
    for name, explanation in sorted(classes.items()):
        lines += [f"## {name}", "", explanation, "", *_message_lines(messages.get(name, {})), ""]
    for name in _ARGUMENT_ERRORS:
        lines += [f"## {name}", "", *_message_lines(messages.get(name, {})), ""]
    return "\n".join(lines)


def _message_lines(by_module: dict[str, list[str]]) -> Iterator[str]:
    for module, messages in sorted(by_module.items()):
        yield f"`{module}`"
        yield ""
        for message in messages:
            yield f"- `{message}`" if "`" not in message else f"- `` {message} ``"
        yield ""


def error_classes() -> dict[str, str]:
    """Explanation by name of `ForgeError` and all that derive from it."""
    bases: dict[str, list[str]] = {}
    texts: dict[str, str] = {}
    for _, tree in _sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [ast.unparse(base) for base in node.bases]
                texts[node.name] = ast.get_docstring(node) or ""
    found = {"ForgeError"}
    while more := {name for name, above in bases.items() if found.intersection(above)} - found:
        found |= more
    return {name: texts[name].partition("\n\nArgs:")[0] for name in found}


def raised_messages() -> dict[str, dict[str, list[str]]]:
    """Messages by error class and module, in the order of the source."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for module, tree in _sources():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
                continue
            message = re.sub(r"\s+", " ", _template(node.exc.args[0])).strip()
            if re.search(r"\w", message):
                found[ast.unparse(node.exc.func).rpartition(".")[2]][module].append(message)
    return found


def _template(node: ast.expr) -> str:
    """The text that `node` makes, with … for what is known only when it runs."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return "…"


@functools.cache
def _sources() -> list[tuple[str, ast.Module]]:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return [(_dotted(file), ast.parse(file.read_text(encoding="utf-8"))) for file in files]
