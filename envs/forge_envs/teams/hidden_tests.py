"""What functions of modules that a model wrote give, asked in the sandbox.

In: modules, calls. Out: results in JSON. Waits for the sandbox, with its deadline.
"""

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


def given(
    sandbox: Sandbox, modules: Mapping[str, str], calls: Sequence[tuple[str, str, Sequence[Any]]]
) -> tuple[list[str], SandboxResult]:
    """Call functions one after the other, in one process that never holds the right results.

    Args:
        sandbox: Where.
        modules: Sources by name.
        calls: Module, function, arguments.

    Returns:
        Of each call until the process ended ``["ok", result]`` or ``["error", kind]``, as JSON; and how it ended.
    """
    files = {f"{name}.py": source.encode() for name, source in modules.items()}
    result = sandbox.run(_HARNESS, stdin=json.dumps(calls), files=files)
    return result.stdout.splitlines()[: len(calls)], result
