"""Templates of ``forge-agents init``: a run with its environment and reward, or an installable environment."""

from __future__ import annotations

import importlib.util
import json
import keyword
import re
import shutil
import sys
from pathlib import Path

from forge_agents.envs import registry
from forge_agents.errors import ForgeError, did_you_mean
from forge_agents.files import user_path

ENV = "env"
"""Template of an installable project."""
OPENENV = "openenv"
"""Template of an OpenEnv package."""
VERIFIERS = "verifiers"
"""Template of a package for verifiers."""
TEMPLATES = {
    "team": "one model for both agents of a cooperative game",
    "duel": "a model against random play in a zero-sum game",
    "tools": "an agent that can call a custom tool",
    "sft": "a model that is fine-tuned on conversations before GRPO",
    OPENENV: "an environment, named by --env, for OpenEnv and the trainers that use it, such as TRL",
    VERIFIERS: "an environment, named by --env, for verifiers 0.4 and prime-rl",
    ENV: "an installable project with a two-player game and its test, named after the folder",
}
"""Descriptions of the templates by name."""
_BASE = {"sft": "team"}
"""Templates that take missing files from another template."""
_FOLDER = Path(__file__).parents[1] / "templates"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[-_][A-Za-z0-9]+)*", re.ASCII)


def create(folder: Path | str, template: str = "team", env: str | None = None) -> Path:
    """Write the files of a template. Returns the folder.

    Args:
        folder: New or empty. With the template ``env``, its name becomes the name of the project: letters and digits
            with single hyphens or underscores between them, such as ``word-duel``. The package is then called
            ``word_duel`` and the class ``WordDuel``.
        template: A key of `TEMPLATES`.
        env: Id of the environment that the templates ``openenv`` and ``verifiers`` serve. Others have none.

    Raises:
        UnknownIdError, ArgumentError: The environment does not exist, or needs arguments.
        ForgeError: The template is unknown, `env` is missing or has no effect, the folder is not empty, or its name
            cannot be that of a project.
    """
    if template not in TEMPLATES:
        hint = did_you_mean(template, TEMPLATES)
        raise ForgeError(f"unknown template {template!r}. Choose one of {', '.join(TEMPLATES)}.{hint}")
    if (env is not None) != (template in (OPENENV, VERIFIERS)):
        raise ForgeError(f"template {template!r} {'takes no environment' if env else 'needs an environment: --env ID'}")
    root = user_path(folder)
    names = _project_names(root.absolute().name) if template in (ENV, OPENENV, VERIFIERS) else {}
    if env is not None:
        names |= _served_names(env)
        if template == VERIFIERS and not names["player_0"].isidentifier():
            raise ForgeError(
                f"verifiers has roles with the names of Python, not {names['player_0']!r}, an agent of {env}"
            )
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ForgeError(f"{root} already exists and is not an empty folder. Choose another name")
    root.mkdir(parents=True, exist_ok=True)
    if names:
        _write_project(root, _FOLDER / ("project" if template == ENV else template), names)
        return root
    for name in (_BASE.get(template, template), template):
        for file in (_FOLDER / name).iterdir():
            if file.is_file():
                shutil.copyfile(file, root / file.name)
    return root


def _project_names(name: str) -> dict[str, str]:
    """Return the names that replace those of the template, a working project called word-duel."""
    if not _NAME.fullmatch(name):
        raise ForgeError(f"{name!r} cannot name a project. Use letters, digits and single hyphens, such as word-duel")
    package = name.replace("-", "_").lower()
    if keyword.iskeyword(package) or package in sys.stdlib_module_names or importlib.util.find_spec(package):
        raise ForgeError(f"a package called {package!r} would hide an existing one. Choose another name")
    title = "".join(part[:1].upper() + part[1:] for part in re.split(r"[-_]", name))
    return {"word-duel": name, "word_duel": package, "WordDuel": title}


def _served_names(env: str) -> dict[str, str]:
    """Return what replaces the environment and its agents in a template. The first agent is a client's or model's."""
    module = env.rpartition(":")[0]
    if module and importlib.util.find_spec(module.partition(".")[0]) is None:
        raise ForgeError(
            f"the new project could not import {module!r} of {env!r}, because no installed package has it. Install it "
            "first, for example in a project that `forge-agents init NAME --template env` writes"
        )
    made = registry.make(env)
    first, *others = made.possible_agents
    made.close()
    players = ", ".join(f"{json.dumps(agent)}: fa.Random()" for agent in others)
    quoted = {'"player_0"': json.dumps(first), '"player_1": fa.Random()': players}
    return {"WORD_DUEL": env, **quoted, "player_0": first}


def _write_project(root: Path, template: Path, names: dict[str, str]) -> None:
    for file in template.rglob("*.*"):
        if file.suffix not in (".md", ".py", ".toml", ".yaml"):  # such as .pyc
            continue
        path, text = (
            re.sub("|".join(map(re.escape, names)), lambda match: names[match.group()], content)
            for content in (str(file.relative_to(template)), file.read_text())
        )
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
