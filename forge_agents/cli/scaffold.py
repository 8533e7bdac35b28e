"""Folders to begin with: what ``forge-agents init DIR`` and ``forge-agents new-env NAME`` write.

In: a folder and a template's name, or a project's name. Out: a configuration, an environment, a reward and a README
that work together; or a project that installs, registers a two-seat game and passes its test. Waits for nothing.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
import sys
from pathlib import Path

from forge_agents.errors import ForgeError, did_you_mean
from forge_agents.files import user_path

TEMPLATES = {
    "team": "one model in both seats of a cooperative game",
    "duel": "a model against random play in a zero-sum game",
    "tools": "an agent that may call a tool of your own",
    "sft": "a model that imitates conversations before it plays",
}
"""What each template shows, by name."""
_REST_OF = {"sft": "team"}
"""Templates that take what they lack from another."""
_FOLDER = Path(__file__).parents[1] / "templates"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[-_][A-Za-z0-9]+)*", re.ASCII)


def create(folder: Path | str, template: str = "team") -> Path:
    """Write a template's files. Returns the folder.

    Args:
        folder: New or empty.

    Raises:
        ForgeError: There is no such template, or the folder holds something.
    """
    if template not in TEMPLATES:
        raise ForgeError(
            f"there is no template {template!r}, only {', '.join(TEMPLATES)}.{did_you_mean(template, TEMPLATES)}"
        )
    root = user_path(folder)
    _must_be_free(root, "folder")
    root.mkdir(parents=True, exist_ok=True)
    for name in (_REST_OF.get(template, template), template):
        for file in (_FOLDER / name).iterdir():
            if file.is_file():
                shutil.copyfile(file, root / file.name)
    return root


def create_project(name: str, folder: Path | str = ".") -> Path:
    """Write a project around a new environment. Returns the project's folder.

    Args:
        name: Letters, digits, and hyphens or underscores between them; the project's name, and the package's and the
            class's in their manners: ``word-duel``, ``word_duel``, ``WordDuel``.
        folder: Where the project's folder is made.

    Raises:
        ForgeError: The name is no name or hides another package, or the folder holds something.
    """
    if not _NAME.fullmatch(name):
        raise ForgeError(f"{name!r} cannot name a project; use letters, digits and single hyphens, such as word-duel")
    package = name.replace("-", "_").lower()
    if keyword.iskeyword(package) or package in sys.stdlib_module_names or importlib.util.find_spec(package):
        raise ForgeError(f"a package called {package!r} would hide one that exists; choose another name")
    title = "".join(part[:1].upper() + part[1:] for part in re.split(r"[-_]", name))
    root, template = user_path(folder) / name, _FOLDER / "project"
    _must_be_free(root, "name or folder")
    # the template is a project called word-duel, which works as it stands
    names = {"word-duel": name, "word_duel": package, "WordDuel": title}
    for file in template.rglob("*.*"):
        if file.suffix in (".md", ".py", ".toml"):  # and no .pyc
            both = (str(file.relative_to(template)), file.read_text())
            path, text = (re.sub("|".join(names), lambda found: names[found.group()], words) for words in both)
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
    return root


def _must_be_free(root: Path, other: str) -> None:
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ForgeError(f"{root} is there already; choose another {other}")
