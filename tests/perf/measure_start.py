"""Seconds of a start by its parts: an engine cold, warm, of an export and not compiled, and all processes of a run."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perf_common import POLICY, Options, goal, in_child, policy

DEADLINE_S = 900
GOAL_COLD_S, GOAL_WARM_S = 60.0, 15.0


def measure(options: Options) -> list[dict[str, Any]]:
    """The record ``start``."""
    from forge_agents.serving import _vllm

    with tempfile.TemporaryDirectory(prefix="forge-perf-") as folder:
        saved = {name: f"{folder}/{name}" for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")}
        eager = dataclasses.replace(options, quick=True)
        export = dataclasses.replace(options, model=_exported(options.model, f"{folder}/export"))
        result = {}
        for name, how in {"cold": options, "warm": options, "export": export, "eager": eager}.items():
            env = {**_vllm.environment(_config(how)), **saved}
            result[name] = in_child(run_engine, how, timeout_s=DEADLINE_S, env=env)
        result["run"] = in_child(run_processes, options, timeout_s=DEADLINE_S, env=saved)
    most_s = {"cold": GOAL_COLD_S, "warm": GOAL_WARM_S, "export": GOAL_WARM_S}
    goals = {f"{name}_s": goal(result[name]["all"]["s"], seconds, at_most=True) for name, seconds in most_s.items()}
    return [{"measure": "start", **result, "peer": "goals", "ratio": None, "goals": goals}]


def _config(options: Options) -> Any:
    from forge_agents.serving import EnginePlan

    return EnginePlan(model=options.model, max_model_len=512, enforce_eager=options.quick or None)


def _exported(model: str, folder: str) -> str:
    """A copy of the model with other weights, as a training leaves it."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    for file in Path(folder).glob("*.safetensors"):
        save_file({name: tensor * 1.01 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return folder


def run_engine(options: Options) -> dict[str, dict[str, float]]:
    """An engine in this process, whose startup parts can be measured."""
    parts: dict[str, dict[str, float]] = {}
    began = _now()
    with _Part(parts, "imports"):
        from vllm import EngineArgs, LLMEngine  # noqa: F401
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        from forge_agents.serving import _vllm
    timed = {
        "load the model": (CPUModelRunner, "load_model"),
        "compile or load compiled": (CPUModelRunner, "warming_up_model"),
        "cache": (CPUModelRunner, "initialize_kv_cache"),
        "first tokens": (_vllm, "_warm_up"),
    }
    for name, (where, what) in timed.items():
        setattr(where, what, _timed(parts, name, getattr(where, what)))
    _vllm.build(_config(options))
    wall, cpu = (now - then for now, then in zip(_now(), began, strict=True))
    rest = {key: whole - sum(part[key] for part in parts.values()) for key, whole in (("s", wall), ("cpu_s", cpu))}
    every = {**parts, "other": rest, "all": {"s": wall, "cpu_s": cpu}}
    return {name: {key: round(value, 2) for key, value in part.items()} for name, part in every.items()}


async def run_processes(options: Options) -> dict[str, float]:
    """Store, engine and learner of a run, each in its process, with all that was compiled."""
    from forge_agents.runtime import mesh
    from forge_trainers.rl.config import GRPOConfig
    from forge_trainers.run.processes import Processes

    config = GRPOConfig(engine=_config(options))
    async with mesh.session():
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            processes = await Processes.start({POLICY: policy(options, 16)}, config, folder=Path(folder), learn=True)
            seconds = time.perf_counter() - started
            await processes.stop()
    return {"s": round(seconds, 2)}


def _now() -> tuple[float, float]:
    """Wall seconds, and processor seconds of this process and of its children that have ended."""
    spent = os.times()
    return time.perf_counter(), spent.user + spent.system + spent.children_user + spent.children_system


class _Part:
    """Adds what the block takes to a part."""

    def __init__(self, parts: dict[str, dict[str, float]], name: str) -> None:
        self._sums = parts.setdefault(name, {"s": 0.0, "cpu_s": 0.0})

    def __enter__(self) -> None:
        self._began = _now()

    def __exit__(self, *exc: object) -> None:
        for key, now, then in zip(("s", "cpu_s"), _now(), self._began, strict=True):
            self._sums[key] += now - then


def _timed(parts: dict[str, dict[str, float]], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        with _Part(parts, name):
            return call(*args, **options)

    return timed
