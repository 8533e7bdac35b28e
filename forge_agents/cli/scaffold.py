"""Templates of ``forge-agents init``: a run with its environment and reward, or an installable environment."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
import sys
from pathlib import Path

from forge_agents.errors import ForgeError, did_you_mean
from forge_agents.files import user_path

ENV = "env"
"""Template of an installable project."""
TEMPLATES = {
    "team": "one model for both agents of a cooperative game",
    "duel": "a model against random play in a zero-sum game",
    "tools": "an agent that can call a custom tool",
    "sft": "a model that is fine-tuned on conversations before GRPO",
    ENV: "an installable project with a two-player game and its test, named after the folder",
}
"""Descriptions of the templates by name."""
_BASE = {"sft": "team"}
"""Templates that take missing files from another template."""
_FOLDER = Path(__file__).parents[1] / "templates"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[-_][A-Za-z0-9]+)*", re.ASCII)


def create(folder: Path | str, template: str = "team") -> Path:
    """Write the files of a template. Returns the folder.

    Args:
        folder: New or empty. With the template ``env``, its name becomes the name of the project: letters and digits
            with single hyphens or underscores between them, such as ``word-duel``. The package is then called
            ``word_duel`` and the class ``WordDuel``.
        template: A key of `TEMPLATES`.

    Raises:
        ForgeError: The template is unknown, the folder is not empty, or its name cannot be that of a project.
    """
    if template not in TEMPLATES:
        hint = did_you_mean(template, TEMPLATES)
        raise ForgeError(f"unknown template {template!r}. Choose one of {', '.join(TEMPLATES)}.{hint}")
    root = user_path(folder)
    names = _project_names(root.absolute().name) if template == ENV else {}
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ForgeError(f"{root} already exists and is not an empty folder. Choose another name")
    root.mkdir(parents=True, exist_ok=True)
    if template == ENV:
        _write_project(root, names)
        return root
    for name in (_BASE.get(template, template), template):
        for file in (_FOLDER / name).iterdir():
            if file.is_file():
                shutil.copyfile(file, root / file.name)
    return root


def _project_names(name: str) -> dict[str, str]:
    """Return the names that replace those of the template, which is a working project called word-duel."""
    if not _NAME.fullmatch(name):
        raise ForgeError(f"{name!r} cannot name a project. Use letters, digits and single hyphens, such as word-duel")
    package = name.replace("-", "_").lower()
    if keyword.iskeyword(package) or package in sys.stdlib_module_names or importlib.util.find_spec(package):
        raise ForgeError(f"a package called {package!r} would hide an existing one. Choose another name")
    title = "".join(part[:1].upper() + part[1:] for part in re.split(r"[-_]", name))
    return {"word-duel": name, "word_duel": package, "WordDuel": title}


def _write_project(root: Path, names: dict[str, str]) -> None:
    template = _FOLDER / "project"
    for file in template.rglob("*.*"):
        if file.suffix not in (".md", ".py", ".toml"):  # such as .pyc
            continue
        path, text = (
            re.sub("|".join(names), lambda match: names[match.group()], content)
            for content in (str(file.relative_to(template)), file.read_text())
        )
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
