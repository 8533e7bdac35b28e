"""What the site adds to the pages in docs/: the reference, the list of errors, and the rest of the navigation.

In: the source, read and never run, and recipes. Out: pages ``api/*.md``, ``errors.md`` and ``recipes/*.md``, made anew
at each build. Waits for nothing.
"""

from __future__ import annotations

import ast
import builtins
import functools
import gc
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("forge_agents", "envs/forge_envs", "verifiers/forge_verifiers", "trainers/forge_trainers")
REFERENCE = {
    "forge_agents": "`import forge_agents as fa`: the names that most programs need.",
    "forge_agents/testing": "For tests of environments.",
    "forge_agents/bench": "Suites, ratings, reports, exact opponents.",
    "forge_agents/rollout": "Parts of a loop of your own that play groups of episodes.",
    "forge_agents/serving": "Engines, below the trainer.",
    "forge_agents/weights": "Weights by version, from learners to engines.",
    "forge_agents/sandbox": "Where code that a model wrote runs.",
    "forge_agents/programs": "Limits of the containers that programs run in.",
    "forge_agents/tools": "Tools, and how calls are written.",
    "verifiers/forge_verifiers": "Verifiers and what makes one reward of them.",
    "trainers/forge_trainers": "The parts of a loop of your own, after play: rewards, credit, batches, learners.",
    "trainers/forge_trainers/losses": "Inputs and outputs of a loss of your own.",
}
"""Packages with public names, and what is said of them."""
ENVIRONMENTS = "api/forge_envs.md"
"""The page of the built-in environments."""


# ---- hooks that mkdocs calls


def on_config(config: Any) -> Any:
    """Complete the navigation. A build keeps most of its objects, and garbage collection would take a fifth of it."""
    gc.disable()
    config.nav = navigation(config.nav)
    return config


def on_post_build(**_: Any) -> None:
    """Collect garbage again."""
    gc.enable()


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with its links to ``recipes/`` of the repository as links to the recipes' pages of the site."""
    markdown = re.sub(r"\]\(\.\./((?:\.\./)*)recipes/README\.md", r"](\1recipes/index.md", markdown)
    return re.sub(r"\]\(\.\./((?:\.\./)*)recipes/(\w+)/README\.md", r"](\1recipes/\2.md", markdown)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made of the source."""
    from mkdocs.structure.files import File

    for package, about in REFERENCE.items():
        files.append(File.generated(config, _api_page(package), content=reference(package, about)))
    files.append(File.generated(config, ENVIRONMENTS, content=environments()))
    files.append(File.generated(config, "errors.md", content=errors_page()))
    for page, source in recipes().items():
        files.append(File.generated(config, page, content=recipe(source)))
    return files


def navigation(nav: list[Any]) -> list[Any]:
    """`nav` with every page of docs/: those it does not name at the end of its section."""
    sections = {title: list(pages) for entry in nav for title, pages in entry.items()}
    docs = ROOT / "docs"
    named = {page for pages in sections.values() for page in pages}
    result = {
        "Guides": sorted(path.name for path in docs.glob("*.md")),
        "Results": [path.relative_to(docs).as_posix() for path in sorted(docs.glob("results/**/*.md"))],
        "Recipes": list(recipes()),
        "Decisions": [f"decisions/{path.name}" for path in sorted(docs.glob("decisions/*.md"))],
        "Reference": [*(_api_page(package) for package in REFERENCE), ENVIRONMENTS, "errors.md"],
    }
    for title, pages in result.items():
        sections[title] += [page for page in pages if page not in named]
    return [{title: pages} for title, pages in sections.items()]


def _api_page(package: str) -> str:
    return f"api/{_dotted(ROOT / package / '__init__.py')}.md"


# ---- the recipes


def recipes() -> dict[str, Path]:
    """The README of each recipe by its page, that of all of them first."""
    result = sorted((ROOT / "recipes").glob("*/README.md"))
    return {"recipes/index.md": ROOT / "recipes" / "README.md"} | {f"recipes/{p.parent.name}.md": p for p in result}


def recipe(source: Path) -> str:
    """A recipe with links to pages of the site. Links to the README lead to the start page."""
    text = source.read_text().replace("](../../README.md", "](../index.md")
    text = re.sub(r"\]\((?:\.\./)?(\w+)/README\.md", r"](\1.md", text)
    return re.sub(r"\]\((?:\.\./)+docs/", "](../", text)


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


def environments() -> str:
    """A page with the rules, rewards and arguments of each built-in environment, from the docstring of its class."""
    source = (ROOT / "envs" / "forge_envs" / "__init__.py").read_text(encoding="utf-8")
    lines = ["# forge_envs", "", "Rules, rewards and constructor arguments of the built-in environments.", ""]
    for module, name in dict.fromkeys(re.findall(r'"((?:games|teams)\.\w+):([A-Z]\w+)"', source)):
        lines += [f"::: forge_envs.{module}.{name}", "    options:", f"      heading: {name}"]
        lines += [f"      toc_label: {name}", "      members: false", ""]
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
    result = {}
    for node in ast.walk(ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                result[alias.asname or alias.name] = dotted if _is_module(dotted) else node.module
    return result


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


@functools.cache
def errors_page() -> str:
    """Every error class with its explanation, and every message that the source raises."""
    own_classes, every, messages = error_classes(), exception_classes(), raised_messages()
    lines = [
        "# Every error",
        "",
        "Made of the source at each build. `…` stands for what depends on the case: names, numbers, paths. Paste a",
        "piece of a message into the search field above. What to do about a run that goes wrong without an error is in",
        "[monitoring](monitoring.md#symptoms).",
        "",
        "Classes that derive from `forge_agents.errors.ForgeError` come first; a command tells such an error in one",
        "line. Mistakes in arguments are mostly plain [`ValueError`](#valueerror) and [`TypeError`](#typeerror), which",
        "follow with all others.",
        "",
    ]
    for name in [*sorted(own_classes), *sorted({*messages, *every} - {*own_classes})]:
        if name in messages or name in own_classes:
            lines += [f"## {name}", "", every.get(name, ""), "", *_message_lines(messages.get(name, {})), ""]
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
    return _derived({"ForgeError"})


@functools.cache
def exception_classes() -> dict[str, str]:
    """Explanation by name of every exception class that the source defines."""
    return _derived({name for name, value in vars(builtins).items() if _is_error(value)})


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException) and not issubclass(value, Warning)


def _derived(result: set[str]) -> dict[str, str]:
    """Explanation by name of the classes in `found` and all that derive from them, of those in the source."""
    classes = _classes()
    while more := {name for name, (bases, _) in classes.items() if result.intersection(bases)} - result:
        result |= more
    return {name: classes[name][1].partition("\n\nArgs:")[0] for name in result if name in classes}


@functools.cache
def _classes() -> dict[str, tuple[list[str], str]]:
    """Bases and docstring by name of all classes of the source."""
    classes = (node for _, nodes in _sources() for node in nodes if isinstance(node, ast.ClassDef))
    return {node.name: ([ast.unparse(base) for base in node.bases], ast.get_docstring(node) or "") for node in classes}


@functools.cache
def raised_messages() -> dict[str, dict[str, list[str]]]:
    """Messages by error class and module, in the order of the source.

    Of exceptions that are raised on the spot and of those that are made to be returned, stored or raised elsewhere.
    """
    names = {*exception_classes(), *(name for name, value in vars(builtins).items() if _is_error(value))}
    result: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for module, nodes in _sources():
        for name, call in sorted(_exceptions(nodes, names), key=lambda made: (made[1].lineno, made[1].col_offset)):
            texts = (re.sub(r"\s+", " ", _template(arg)).strip() for arg in call.args)
            message = next((text for text in texts if re.search(r"\w", text)), "")
            if message and message not in result[name][module]:
                result[name][module].append(message)
    return result


def _exceptions(nodes: list[ast.AST], names: set[str]) -> Iterator[tuple[str, ast.Call]]:
    """Calls that make an exception, with its class: a known one, one that is raised, or what a function returns."""
    types = {node: ast.unparse(node.returns) for node in nodes if isinstance(node, ast.FunctionDef) and node.returns}
    makers = {function.name: text.rpartition(".")[2] for function, text in types.items()}
    for node in nodes:
        if isinstance(node, ast.Call) and (name := _last_name(node.func)) in names:
            if not any(isinstance(arg, ast.Call) and _last_name(arg.func) in names for arg in node.args):
                yield name, node  # one that carries another says no more than that
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            function = _last_name(node.exc.func)
            name = makers.get(function, function)
            if function not in names and name[:1].isupper():  # of a library, as HTTPException, or made by a function
                yield name, node.exc
        elif isinstance(node, ast.FunctionDef):
            for name in names.intersection(types.get(node, "").split(" | ")):
                for inner in ast.walk(node):
                    made = inner.value if isinstance(inner, ast.Return) else None
                    if isinstance(made, ast.Call) and isinstance(made.func, ast.Call):  # type(error)(message)
                        yield name, made


def _last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _template(node: ast.expr) -> str:
    """The text that `node` makes, with … for what is known only when it runs."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    if isinstance(node, ast.BoolOp):  # given or "what is said otherwise"
        return _template(node.values[-1])
    return "…"


@functools.cache
def _sources() -> list[tuple[str, list[ast.AST]]]:
    """Name and syntax nodes of each module."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return [(_dotted(file), [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]) for file in files]
