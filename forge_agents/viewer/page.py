"""Files of the page, and a version of it as one HTML file that contains the data and loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from forge_agents.errors import RunFolderError
from forge_agents.files import write_atomic
from forge_agents.viewer.index import MAX_ROWS, SORTS, Query
from forge_agents.viewer.runs import Run, find_runs

STYLES = ("vendor/uPlot.min.css", "style.css")
PLOTS = "vendor/uPlot.iife.min.js"
SCRIPTS = tuple(
    f"{name}.js" for name in ("dom", "source", "chart", "curves", "turns", "episodes", "timeline", "tables", "app")
)
"""Modules of the page, in the order of their imports."""
FILES = frozenset((*STYLES, PLOTS, *SCRIPTS))
"""Files that a browser may request, in addition to ``index.html``."""
_POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; img-src data:; base-uri 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


def static_text(name: str) -> str:
    """Return the text of ``index.html`` or of one of `FILES`."""
    return (resources.files("forge_agents.viewer") / "static" / name).read_text(encoding="utf-8")


def save_page(runs: Sequence[str | os.PathLike[str]], target: str | os.PathLike[str], *, episodes: int = 200) -> Path:
    """Write the page of `runs` as one HTML file that needs no server and loads nothing.

    Args:
        runs: Folders of runs, or folders with such folders.
        episodes: Number of newest episodes per run in the file.

    Raises:
        RunFolderError: A folder holds no run, or `target` is a file of another program.
    """
    if episodes < 0:
        raise ValueError(f"episodes={episodes} must be at least 0")
    data = {"runs": [_data(run, episodes) for run in find_runs(runs)], "sorts": list(SORTS)}
    # without "<" in the data, nothing in it can end the element that contains it
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    style = "\n".join(map(static_text, STYLES))
    # uPlot's file ends with a comment line; its only name becomes a variable of the module
    script = "\n".join([static_text(PLOTS), *(_without_imports(static_text(name)) for name in SCRIPTS)])
    policy = _POLICY.format(script=_hash(script), style=_hash(style))
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    tail = f'<script type="application/json" id="data">{text}</script>\n<script type="module">{script}</script>'
    page = re.sub(r"<(link rel=\"stylesheet\"|script)[^>]*>(</script>)?\n", "", static_text("index.html"))
    page = page.replace("</head>", f"{head}\n</head>").replace("</body>", f"{tail}\n</body>")
    return write_atomic(target, page, replaces="<title>forge_agents</title>")


def _without_imports(script: str) -> str:
    """Return a module without imports and exports, to be joined with the others."""
    return re.sub(r"^(import [^;]*;\n|export )", "", script, flags=re.MULTILINE)


def _data(run: Run, episodes: int) -> dict[str, Any]:
    run.update()
    rows: list[dict[str, Any]] = []
    while len(rows) < episodes:
        part = run.index.find(Query(offset=len(rows), limit=min(MAX_ROWS, episodes - len(rows))))["rows"]
        if not part:
            break
        rows += part
    return {
        "status": {**run.status(), "folder": run.folder.name},  # without the path on this machine
        "metrics": run.metrics(),
        "settings": run.settings(),
        "verifiers": run.verifiers(),
        "tables": run.tables(),
        "facets": {
            "envs": Counter(row["env"] for row in rows).most_common(),
            "errors": Counter(row["error"] for row in rows if row["error"]).most_common(),
        },
        "rows": rows,
        "episodes": {row["n"]: _episode(run, row["n"]) for row in rows},
    }


def _episode(run: Run, n: int) -> dict[str, Any]:
    """Return episode `n`, or ``problem`` with the reason why it cannot be shown."""
    try:
        return run.episode(n)
    except RunFolderError as cause:
        return {"problem": str(cause)}


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
