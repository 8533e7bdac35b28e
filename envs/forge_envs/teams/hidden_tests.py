"""Calls of model-written functions in the sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from forge_agents.sandbox import Sandbox, SandboxResult

_HARNESS = """
import io, json, sys
out, sys.stdout = sys.stdout, io.StringIO()
for module, name, arguments in json.load(sys.stdin):
    function = getattr(__import__(module), name)
    try:
        line = json.dumps(["ok", function(*arguments)])
    except Exception as error:
        line = json.dumps(["error", type(error).__name__])
    print(line, file=out, flush=True)
"""


def call_functions(
    sandbox: Sandbox, modules: Mapping[str, str], calls: Sequence[tuple[str, str, Sequence[Any]]]
) -> tuple[list[str], SandboxResult]:
    """Call functions (module, name, arguments) in one process that never receives the expected results.

    Returns:
        A JSON line per call until the process ended, ``["ok", result]`` or ``["error", type]``, and how it ended.
    """
    files = {f"{name}.py": source.encode() for name, source in modules.items()}
    result = sandbox.run(_HARNESS, stdin=json.dumps(calls), files=files)
    return result.stdout.splitlines()[: len(calls)], result
