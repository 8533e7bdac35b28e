"""The whole stack on one GPU, in four stages: it runs, it is fast, it fits, it learns more.

    python tests/perf/gpu_stages.py --stage 1 --out OUT [--limit_s 540] [--parts machine greedy ...]
    python tests/perf/gpu_stages.py --stage 1 --out OUT --model tiny-random --quick      # the same on two CPU cores

Each part runs in a process of its own with a timeout. It writes what it measures to OUT/PART.json as it goes, so that a
part that dies costs only itself. Parts that no longer fit into `--limit_s` are left out, and OUT/stage-N.json has all
parts, goals, and reasons of failures. Exit status 1: a part failed, was left out, or missed a goal.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_parts as parts
import measure_rollout
import measure_step
import measure_trl
from perf_common import ChildFailedError, Options, goal, in_child

from forge_agents.files import write_atomic
from forge_agents.models.resolve import resolve
from forge_agents.runtime import processes
from forge_agents.serving import _vllm

SCALE = 8
"""Times the work of `make perf`: 512 episodes at once."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One measurement."""

    function: Callable[..., Any]
    timeout_s: float
    arguments: Mapping[str, Any] = field(default_factory=dict)
    env: Callable[[Options], Mapping[str, str]] = lambda options: {}
    """Variables that exist before the part's Python starts."""


def _learner_env(options: Options) -> Mapping[str, str]:
    return processes.openmp_variables()


def _engine_env(options: Options) -> Mapping[str, str]:
    return _vllm.environment(parts.greedy_plan(options))


def _recipe(*words: str) -> Part:
    return Part(function=parts.script, timeout_s=400, arguments={"words": words})


STAGES: Mapping[int, Mapping[str, Part]] = {
    1: {
        "machine": Part(function=parts.machine, timeout_s=150),
        "greedy": Part(function=parts.greedy, timeout_s=240, env=_engine_env),
        "learns": Part(function=parts.learns, timeout_s=420, arguments={"limit_s": 420}),
    },
    2: {
        "rollout": Part(function=measure_rollout.run_actor, timeout_s=180),
        "rollout_llm": Part(function=measure_rollout.run_llm, timeout_s=180, env=measure_rollout.llm_variables),
        "learner": Part(function=parts.learner, timeout_s=120, env=_learner_env),
        "learner_1.7b": Part(function=parts.learner, timeout_s=180, arguments={"shape": "1.7b"}, env=_learner_env),
        "learner_0.6b": Part(function=parts.learner, timeout_s=150, arguments={"shape": "0.6b"}, env=_learner_env),
        "step": Part(function=measure_step.run_steps, timeout_s=180),
        "step_trl": Part(function=measure_trl.run_trl, timeout_s=300),
        "layouts_0.6b": Part(function=parts.layouts, timeout_s=300, arguments={"shape": "0.6b"}),
    },
    3: {
        "layouts": Part(function=parts.layouts, timeout_s=240),
        "turns_1.7b": Part(function=parts.turns, timeout_s=240, arguments={"shape": "1.7b"}),
        "growth": Part(function=parts.turns, timeout_s=240, arguments={"steps": 20}),
        "adapters": Part(function=parts.adapters, timeout_s=180),
        "out_of_memory": Part(function=parts.out_of_memory, timeout_s=180),
    },
    4: {
        "two_policies": _recipe("examples/two_policies.py", "--kind", "full", "--groups", "128", "--steps", "20"),
        "self_play": _recipe("examples/self_play.py", "--seeds", "0", "--steps", "40"),
        "tables": _recipe("examples/worlds.py", "forge/Tables-v0@1", "--games", "640", "--seeds", "0"),
    },
}


def main(words: Sequence[str] | None = None) -> int:
    """Run a stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=STAGES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--limit_s", type=float, default=540, help="seconds for all parts")
    parser.add_argument("--parts", nargs="+", help="only these")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--quick", action="store_true", help="small sizes, to test the program")
    args = parser.parse_args(words)
    stage = STAGES[args.stage]
    chosen = list(stage) if args.parts is None else args.parts
    if unknown := [name for name in chosen if name not in stage]:
        parser.error(f"stage {args.stage} has no part {unknown[0]!r}. It has {', '.join(stage)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a part's processes are ended as well
    out, results = args.out.resolve(), dict[str, dict[str, Any]]()
    out.mkdir(parents=True, exist_ok=True)
    model = str(resolve(args.model))
    options = Options(model=model, quick=args.quick, scale=1 if args.quick else SCALE)
    end = time.monotonic() + args.limit_s
    with tempfile.TemporaryDirectory(prefix="forge-stages-") as work:
        os.environ["FORGE_STAGES_WORK"] = work
        for name in chosen:
            results[name] = run(stage[name], options, out / f"{name}.json", end - time.monotonic())
            goals = {} if args.quick else checks(results)
            write_atomic(out / f"stage-{args.stage}.json", json.dumps({"goals": goals, **results}, indent=1))
            _print(json.dumps({name: results[name]}))
    missed = [name for name, each in goals.items() if not each["reached"]]
    failed = [name for name, result in results.items() if "error" in result]
    _print(f"failed: {', '.join(failed) or 'none'}. Goals missed: {', '.join(missed) or 'none'}")
    return 1 if failed or missed else 0


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run(part: Part, options: Options, file: Path, left_s: float) -> dict[str, Any]:
    """Run one part. The result has an `error` if it failed, and its `seconds`."""
    started, timeout_s = time.monotonic(), min(part.timeout_s, left_s)
    if timeout_s < min(30, part.timeout_s):
        return {"error": f"left out: {left_s:.0f} s were left"}
    shape = {"shape": "tiny"} if options.quick and "shape" in part.arguments else {}
    own_file = {"file": str(file)} if part.function.__module__ == parts.__name__ else {}
    limit = {"limit_s": timeout_s} if "limit_s" in part.arguments else {}
    arguments = {**part.arguments, **shape, **own_file, **limit}
    try:
        result = in_child(part.function, options, timeout_s=timeout_s, env=part.env(options), **arguments)
    except ChildFailedError as failure:
        recorded = json.loads(file.read_text()) if file.exists() else {}
        result = {**recorded, "error": str(failure)[-2000:]}
    return {**result, "seconds": round(time.monotonic() - started, 1)}


def checks(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The goals that the results so far decide, each with its value."""
    found = dict[str, dict[str, Any]]()

    def at_least(name: str, value: float | None, wanted: float) -> None:
        if value is not None:
            found[name] = goal(value, wanted, at_most=False)

    def at_most(name: str, value: float | None, wanted: float) -> None:
        if value is not None:
            found[name] = goal(value, wanted, at_most=True)

    def fact(part: str, *keys: str) -> Any:
        value: Any = results.get(part, {})
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    if (answers := fact("greedy", "equal")) is not None:
        at_least("greedy answers equal to the CPU's", answers / fact("greedy", "answers"), 1.0)
    at_most("gap between sampler and learner", fact("learns", "learner/logprob_gap_mean"), 0.035)
    if curve := fact("learns", "curve"):
        at_least("held-out reward", curve[-1][1], parts.TARGET)
    for most in sorted(fact("rollout") or {}):
        rate, peer = fact("rollout", most, "tokens_per_s"), fact("rollout_llm", most, "tokens_per_s")
        at_least(f"rollout of {most} tokens over vLLM's LLM", rate / peer if rate and peer else None, 0.95)
    at_least("MFU at 1.7B", fact("learner_1.7b", "mfu"), 0.35)
    step, peer = fact("step", "numbers", "wall_s"), fact("step_trl", "wall_s")
    at_most("seconds of a step over TRL's", step / peer if step and peer else None, 1.0)
    for name in ("layouts_0.6b", "layouts"):
        for row in fact(name, "layouts") or ():
            _check_layout(name, row, at_least, at_most)
    at_most("longest switch at 1.7B", max((s for _, s in fact("turns_1.7b", "switches") or ()), default=None), 3.0)
    used = [value for value in fact("growth", "used_bytes") or () if value]
    at_most("memory after the last step over the third", used[-1] / used[2] if len(used) > 3 else None, 1.01)
    return found


def _check_layout(name: str, row: Mapping[str, Any], at_least: Any, at_most: Any) -> None:
    for what, measured in (("learner", "learner GB peak"), ("engine", "engine GB peak"), ("GPU", "GPU GB in use")):
        expected = row.get(f"{what} GB expected")
        if row.get(measured) and expected:
            at_most(f"{name}, {row['layout']}: {what}, measured over expected", row[measured] / expected, 1.1)
            at_least(f"{name}, {row['layout']}: {what}, at least", row[measured] / expected, 0.9)
    if name == "layouts_0.6b" and row["layout"] == "shared":
        at_most("seconds to return 0.6B", row.get("weights back s"), 0.2)


if __name__ == "__main__":
    sys.exit(main())
