"""A project of one's own around a new environment: what ``forge-agents new-env NAME`` writes.

In: a name and a folder. Out: files that install, register a two-seat game and pass their test. Waits for nothing.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from pathlib import Path
from string import Template

from forge_agents.errors import ForgeError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[-_][A-Za-z0-9]+)*", re.ASCII)

_PYPROJECT = '''\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "$project"
version = "0.1.0"
description = "Text worlds for forge_agents."
requires-python = ">=3.11"
dependencies = ["forge-agents-rl"]

[project.entry-points."forge_agents.envs"]
$package = "$package"

[tool.hatch.build.targets.wheel]
packages = ["$package"]
'''

_README = '''\
# $project

A world for `forge_agents`: `$env_id`.

    pip install -e . pytest
    pytest
    forge-agents check $env_id

The game is in `$package/game.py`. Raise the version in its id whenever rewards or observations change.
'''

_INIT = '''\
"""Importing this package registers its environments; forge_agents does so through the entry point in pyproject.toml."""

from forge_agents.envs.registry import register

register("$env_id", entry_point="$package.game:$title", max_turns=2, tags=("2p", "cooperative"))
'''

_GAME = '''\
"""$title: one seat knows a word and hints at it, the other guesses."""

from difflib import SequenceMatcher

import forge_agents as fa

WORDS = ("apple", "river", "candle", "tiger", "piano", "window")


class $title(fa.TurnEnv):
    """Both get the likeness of guess and word, 0 to 1; nothing if the hint holds the word."""

    possible_agents = ["giver", "guesser"]

    def setup(self, rng):
        self.word, self.hint = str(rng.choice(WORDS)), ""

    def instructions(self, agent):
        return "Describe the word without saying it." if agent == "giver" else "Guess the word. Answer with one word."

    def observe_text(self, agent):
        return f"Word: {self.word}" if agent == "giver" else f"Hint: {self.hint}"

    def secrets(self, agent):
        return [self.word] if agent == "guesser" else []

    def act(self, agent, action):
        if agent == "giver":
            self.hint = action[:200]
            return fa.Outcome()
        likeness = SequenceMatcher(None, action.strip().lower()[:50], self.word).ratio()
        reward = 0.0 if self.word in self.hint.lower() else likeness
        return fa.Outcome(rewards={"giver": reward, "guesser": reward}, done=True)
'''

_TEST = '''\
import forge_agents as fa


def played(hint, guess=None):
    env = fa.make("$env_id")
    env.reset(seed=0)
    env.step(hint)
    env.step(guess or env.word)
    return env.rewards


def test_it_keeps_the_contract():
    assert fa.check_env("$env_id").ok


def test_a_right_guess_pays_both_and_an_open_hint_nobody():
    env = fa.make("$env_id")
    env.reset(seed=0)
    assert played("You know it.") == {"giver": 1.0, "guesser": 1.0}
    assert played("You know it.", "?") == {"giver": 0.0, "guesser": 0.0}
    assert played(f"It is {env.word}.") == {"giver": 0.0, "guesser": 0.0}
'''


def create(name: str, folder: Path | str = ".") -> Path:
    """Write a project.

    Args:
        name: Letters, digits, and hyphens or underscores between them; the project's name, and the package's and the
            class's in their manners: ``word-duel``, ``word_duel``, ``WordDuel``.
        folder: Where the project's folder is made.

    Returns:
        The project's folder.

    Raises:
        ForgeError: The name is no name or hides another package, or the folder holds something.
    """
    if not _NAME.fullmatch(name):
        raise ForgeError(f"{name!r} cannot name a project; use letters, digits and single hyphens, such as word-duel")
    package = name.replace("-", "_").lower()
    if keyword.iskeyword(package) or package in sys.stdlib_module_names or importlib.util.find_spec(package):
        raise ForgeError(f"a package called {package!r} would hide one that exists; choose another name")
    title = "".join(part[:1].upper() + part[1:] for part in re.split(r"[-_]", name))
    words = {"project": name, "package": package, "title": title, "env_id": f"{package}/{title}-v0"}
    root = Path(folder) / name
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ForgeError(f"{root} is there already; choose another name or folder")
    files = {
        "pyproject.toml": _PYPROJECT,
        "README.md": _README,
        f"{package}/__init__.py": _INIT,
        f"{package}/game.py": _GAME,
        "tests/test_game.py": _TEST,
    }
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(Template(text).substitute(words))
    return root
