"""Runs as one HTML file, to be sent to somebody: the same page, its data inside.

In: runs. Out: a file that loads nothing from anywhere. Waits for the disk.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_agents.errors import RunFolderError
from forge_agents.files import write_whole
from forge_agents.viewer.app import SCRIPTS, static_text
from forge_agents.viewer.index import MOST_ROWS, SORTS, Query
from forge_agents.viewer.runs import Run

_POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; img-src data:; base-uri 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_LINKED = '<link rel="stylesheet" href="static/style.css">'
_LOADED = '<script type="module" src="static/app.js"></script>'


def write_page(runs: Sequence[Run], target: str | os.PathLike[str], *, episodes: int = 200) -> Path:
    """Write one self-contained page.

    Args:
        runs: What it shows.
        target: The HTML file.
        episodes: How many episodes of each run go along, the newest.
    """
    data = {"runs": [_data(run, episodes) for run in runs], "sorts": list(SORTS)}
    # "<" never appears in the data, so nothing in it can end the element it stands in
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    style, script = static_text("style.css"), bundle()
    policy = _POLICY.format(script=_hash(script), style=_hash(style))
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    tail = f'<script type="application/json" id="data">{text}</script>\n<script type="module">{script}</script>'
    page = static_text("index.html")
    assert _LINKED in page and _LOADED in page
    return write_whole(target, page.replace(_LINKED, head).replace(_LOADED, tail))


def bundle() -> str:
    """The page's modules as one: each after those it imports, without import and export."""
    parts = []
    for name in SCRIPTS:
        text = re.sub(r"^import [^;]*;\n", "", static_text(name), flags=re.MULTILINE)
        parts.append(re.sub(r"^export ", "", text, flags=re.MULTILINE))
    return "\n".join(parts)


def _data(run: Run, episodes: int) -> dict[str, Any]:
    run.look()
    rows: list[dict[str, Any]] = []
    while len(rows) < episodes:
        part = run.index.find(Query(offset=len(rows), limit=min(MOST_ROWS, episodes - len(rows))))["rows"]
        if not part:
            break
        rows += part
    return {
        "status": {**run.status(), "folder": run.folder.name},  # not where it lies on this machine
        "metrics": run.metrics(),
        "settings": run.settings(),
        "verifiers": run.verifiers(),
        "tables": run.tables(),
        "rows": rows,
        "episodes": {row["n"]: _episode(run, row["n"]) for row in rows},
    }


def _episode(run: Run, n: int) -> dict[str, Any]:
    """Episode `n`, or ``problem``: why it cannot be shown."""
    try:
        return run.episode(n)
    except RunFolderError as cause:
        return {"problem": str(cause)}


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
