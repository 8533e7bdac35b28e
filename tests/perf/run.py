"""Measure every stage and its peer: one JSON line per measure.

python tests/perf/run.py [MEASURE ...] [--model MODEL] [--quick] [--peer trl]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import Any

from perf_common import ChildFailedError, Options

MODULES = {"step": "measure_step", "rollout": "measure_rollout", "learner": "measure_learner",
           "weights": "measure_weights", "learner_memory": "measure_memory",
           "judging": "measure_judging", "replicas": "measure_replicas", "torn": "measure_torn",
           "queue": "measure_queue", "expected": "measure_expected", "start": "measure_start",
           "league": "measure_league"}  # fmt: skip
"""Modules by measure."""


def main() -> int:
    """Run the requested measures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help=f"of {', '.join(MODULES)}; default: all")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="built-in name, hub id or folder")
    parser.add_argument("--quick", action="store_true", help="small sizes, to test the scripts")
    parser.add_argument(
        "--peer", action="append", default=[], choices=["trl"], help="also run a peer that takes minutes"
    )
    arguments = parser.parse_args()
    expected = arguments.measures or list(MODULES)
    if unknown := [name for name in expected if name not in MODULES]:
        parser.error(f"no measure {unknown[0]!r}. Known are {', '.join(MODULES)}")
    from forge_agents.models import resolve as models

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a measure's processes are ended as well
    options = Options(model=str(models.resolve(arguments.model)), quick=arguments.quick, peers=tuple(arguments.peer))
    measured = [_measure(name, options, arguments.model) for name in dict.fromkeys(expected)]
    return 0 if all(measured) else 1


def _measure(name: str, options: Options, model: str) -> bool:
    """Print the records of one measure. Returns whether they could be measured."""
    started = time.perf_counter()
    try:
        records: list[dict[str, Any]] = importlib.import_module(MODULES[name]).measure(options)
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")
        lines = [line for line in str(error).splitlines() if line.strip()]
        _print({"measure": name, "error": f"{lines[0]} ... {lines[-1]}", "reached": False})
        return False
    common = {"model": Path(model).name, "cpus": os.cpu_count(), "machine": platform.machine(), "quick": options.quick}
    for record in records:
        reached = all(item["reached"] for item in record["goals"].values()) if record["goals"] else None
        spent = round(time.perf_counter() - started, 1)
        _print({**record, "reached": reached, **common, "measured_in_s": spent})
    return True


def _print(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def _child(name: str, out: str, given: str) -> None:
    """The other end of `in_child`."""
    module, _, function = name.partition(":")
    fields, arguments = json.loads(given)
    options = Options(**{**fields, "peers": tuple(fields["peers"])})
    result = getattr(importlib.import_module(module), function)(options, **arguments)
    result = asyncio.run(result) if asyncio.iscoroutine(result) else result
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(*sys.argv[2:5])
    else:
        sys.exit(main())
