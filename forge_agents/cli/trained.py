"""Serve the policies of a run as they were trained: ``forge-agents serve RUN``.

In: a run's folder. Out: the gateway in front of engines, on loopback, behind a token. Waits for engines, for requests
and for Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from forge_agents import safe_yaml
from forge_agents.display import visible
from forge_agents.errors import ModelNotFoundError, RunFolderError
from forge_agents.files import check_plain_files
from forge_agents.models import resolve as models
from forge_agents.policy import LoRA, Policy, Sampling
from forge_agents.programs.gateway import Gateway
from forge_agents.programs.standing import Standing
from forge_agents.runtime import startup
from forge_agents.runtime.interrupts import LoopRunner
from forge_agents.serving.config import EngineConfig
from forge_agents.serving.fleet import Fleet

T = TypeVar("T")
_DRAIN_S = 30.0
"""Seconds that calls under way get when the server is asked to end."""


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """Who may be asked, and how they sampled."""

    policies: Mapping[str, Policy]
    """By name; what has learned is a policy of its exported model, or keeps its own and has an adapter."""
    adapters: Mapping[str, Path]
    """Folders of adapters, by policy."""
    missing: Mapping[str, str]
    """Policies that did not learn and whose model is not here, and why."""
    names: Mapping[str, str]
    """Policies by the names that they answer to."""
    engine: EngineConfig
    """Context and arithmetic of the engines that sampled in training."""


def read_run(folder: Path, export: Path, *, also: Sequence[str] = ()) -> TrainedRun | None:
    """What a training run left; None where its folder says nothing of policies.

    Args:
        folder: Of the run.
        export: What it learned, a model, or one for each policy that learned.
        also: More names, of the only policy that learned.

    Raises:
        RunFolderError: ``config.yaml`` holds what this version does not know.
        ModelNotFoundError: A policy that learned was not exported.
    """
    check_plain_files(folder)
    try:
        settings = safe_yaml.read(folder / "config.yaml")
    except (OSError, ValueError):
        return None
    if not isinstance(settings, dict) or not isinstance(settings.get("policies"), dict):
        return None
    try:
        found = {name: _policy(row) for name, row in settings["policies"].items()}
        for name, policy in found.items():
            if name != policy.name:  # a folder of the export is called so, and `name` of a policy is checked
                raise ValueError(f"policies has {name!r} with name {policy.name!r}; both must be the same")
        had = (settings.get("trainer") or {}).get("engine") or {}
        engine = EngineConfig(**{name: had[name] for name in ("max_model_len", "dtype") if name in had})
        sits = {str(name): str(policy) for name, policy in (settings.get("policy_mapping") or {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as cause:
        raise RunFolderError(
            visible(f"{folder / 'config.yaml'} holds no policies as this version writes them ({cause}); serve ")
            + f"{export} instead, as vLLM serves any model"
        ) from None
    learned = [name for name, policy in found.items() if policy.trainable]
    adapters = {}
    for name in learned:
        own = export if (export / "config.json").is_file() else export / name
        if not (own / "config.json").is_file():
            raise ModelNotFoundError(f"{export} holds no model of the policy {name}, which has learned; export it anew")
        if found[name].lora is not None and (own / "adapter").is_dir() and not _why_not(found[name]):
            adapters[name] = own / "adapter"
            models.check_contained_files(own)
        else:  # the adapter is in the exported weights, too
            found[name] = replace(found[name], model=str(own), lora=None)
    missing = {name: why for name, policy in found.items() if not policy.trainable and (why := _why_not(policy))}
    found = {name: policy for name, policy in found.items() if name not in missing}
    names = {name: name for name in found} | dict.fromkeys(also if len(learned) == 1 else (), *learned[:1])
    # a seat's name is what its program asks for, also where a policy of another seat is called so
    return TrainedRun(
        policies=found,
        adapters=adapters,
        missing=missing,
        names=names | {name: policy for name, policy in sits.items() if policy in found},
        engine=engine,
    )


def _why_not(policy: Policy) -> str:
    """Why the model of a policy is not on this machine; empty where it is."""
    try:
        models.resolve(policy.model)
    except ModelNotFoundError as cause:
        return str(cause)
    return ""


def _policy(row: Mapping[str, Any]) -> Policy:
    sampling, lora = _made(Sampling, row["sampling"]), row.get("lora")
    return _made(Policy, {**row, "sampling": sampling, "lora": None if lora is None else _made(LoRA, lora)})


def _made(kind: Callable[..., T], row: Mapping[str, Any]) -> T:
    """A dataclass of plain values, all of which it has to know: what is left out might be what mattered."""
    if unknown := sorted(map(str, row.keys() - {field.name for field in fields(kind)})):  # type: ignore[arg-type]
        raise ValueError(f"unknown: {', '.join(unknown)}")
    return kind(**row)


def serve_run(run: TrainedRun, engine: EngineConfig, *, host: str, port: int, token: str) -> int:
    """Answer requests until Ctrl-C, SIGTERM or the loss of an engine.

    Args:
        run: Who is asked.
        engine: Settings of every engine.
        host: Address to listen on.
        port: The same.
        token: What requests must bring.

    Raises:
        KeyboardInterrupt: Ctrl-C; all that was started has ended.
        SystemExit: SIGTERM, with status 143; the same.
        ActorDiedError: An engine is gone for good.
    """
    with contextlib.closing(LoopRunner(status=lambda: "the server is stopped")) as runner:
        if runner.run(_until_terminated(_serve(run, engine, host, port, token))):
            sys.exit(128 + signal.SIGTERM)
    return 0


async def _until_terminated(work: Coroutine[Any, Any, None]) -> bool:
    """Whether SIGTERM ended `work`."""
    task, terminated = asyncio.ensure_future(work), []

    def stop() -> None:
        terminated.append(True)
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not terminated:
            raise
    return bool(terminated)


async def _serve(run: TrainedRun, engine: EngineConfig, host: str, port: int, token: str) -> None:
    with startup.show() as say:
        fleet = await Fleet.start(run.policies, engine, tuned=run.adapters)
        try:
            with Gateway(host=host, port=port) as gateway:
                standing = Standing(gateway, run.names, run.policies, fleet.policy_engines, token=token)
                say(f"answering on {gateway.url}")
                try:
                    await standing.failed
                finally:
                    await standing.drained(_DRAIN_S)
        finally:
            await fleet.stop()
