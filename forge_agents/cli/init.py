"""A folder to begin with: what ``forge-agents init DIR`` writes.

In: a folder and a template's name. Out: a configuration, an environment, a reward and a README that work together.
Waits for nothing.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from forge_agents.errors import ForgeError, did_you_mean

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


def create(folder: Path | str, template: str = "team") -> Path:
    """Write a template's files.

    Args:
        folder: New or empty.
        template: A name in `TEMPLATES`.

    Returns:
        The folder.

    Raises:
        ForgeError: There is no such template, or the folder holds something.
    """
    if template not in TEMPLATES:
        raise ForgeError(
            f"there is no template {template!r}, only {', '.join(TEMPLATES)}.{did_you_mean(template, TEMPLATES)}"
        )
    root = Path(folder)
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ForgeError(f"{root} is there already; choose another folder")
    root.mkdir(parents=True, exist_ok=True)
    for name in (_REST_OF.get(template, template), template):
        for file in (_FOLDER / name).iterdir():
            if file.is_file():
                shutil.copyfile(file, root / file.name)
    return root
