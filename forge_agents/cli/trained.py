"""Serving of a run's policies as they were trained: the gateway in front of engines, on loopback and behind a token."""

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
from forge_agents.programs.policy_server import PolicyServer
from forge_agents.runtime import startup
from forge_agents.runtime.interrupts import LoopRunner
from forge_agents.serving.config import EngineConfig
from forge_agents.serving.fleet import Fleet

T = TypeVar("T")
_DRAIN_S = 30.0
"""Seconds that active requests may take after the server is asked to stop."""


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """Policies of a run that can be served."""

    policies: Mapping[str, Policy]
    """Policies by name. A trained policy has its exported model, or its base model and an adapter."""
    adapters: Mapping[str, Path]
    """Folders of adapters by policy."""
    missing: Mapping[str, str]
    """Frozen policies whose model is not on this machine, with the reason."""
    names: Mapping[str, str]
    """Policies by the names that requests may use."""
    engine: EngineConfig
    """Context length and dtype of the engines in training."""


def read_run(folder: Path, export: Path, *, also: Sequence[str] = ()) -> TrainedRun | None:
    """Return the policies of a training run; None if its folder has no settings of policies.

    Args:
        folder: Folder of the run.
        export: Exported model, or folder with a model per trained policy.
        also: More names of the policy, if only one was trained.

    Raises:
        RunFolderError: ``config.yaml`` has values that this version does not know.
        ModelNotFoundError: A trained policy was not exported.
    """
    check_plain_files(folder)
    try:
        settings = safe_yaml.read(folder / "config.yaml")
    except (OSError, ValueError):
        return None
    if not isinstance(settings, dict) or not isinstance(settings.get("policies"), dict):
        return None
    try:
        policies = {name: _policy(row) for name, row in settings["policies"].items()}
        for name, policy in policies.items():
            if name != policy.name:  # the name is that of a folder in the export, and a policy's `name` is checked
                raise ValueError(f"policies has {name!r} with name {policy.name!r}; both must be the same")
        stored = (settings.get("trainer") or {}).get("engine") or {}
        engine = EngineConfig(**{name: stored[name] for name in ("max_model_len", "dtype") if name in stored})
        mapping = {str(agent): str(policy) for agent, policy in (settings.get("policy_mapping") or {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as cause:
        raise RunFolderError(
            visible(f"{folder / 'config.yaml'} does not describe policies as this version does ({cause}); serve ")
            + f"{export} instead, like any model"
        ) from None
    trained = [name for name, policy in policies.items() if policy.trainable]
    adapters = {}
    for name in trained:
        model = export if (export / "config.json").is_file() else export / name
        if not (model / "config.json").is_file():
            raise ModelNotFoundError(f"{export} holds no model of the trained policy {name}; export it again")
        if policies[name].lora is not None and (model / "adapter").is_dir() and not _missing_model(policies[name]):
            adapters[name] = model / "adapter"
            models.check_contained_files(model)
        else:  # the exported weights include the adapter
            policies[name] = replace(policies[name], model=str(model), lora=None)
    missing = {
        name: reason for name, policy in policies.items() if not policy.trainable and (reason := _missing_model(policy))
    }
    policies = {name: policy for name, policy in policies.items() if name not in missing}
    names = {name: name for name in policies} | dict.fromkeys(also if len(trained) == 1 else (), *trained[:1])
    # programs ask for agents, so the name of an agent takes precedence over that of a policy
    return TrainedRun(
        policies=policies,
        adapters=adapters,
        missing=missing,
        names=names | {agent: policy for agent, policy in mapping.items() if policy in policies},
        engine=engine,
    )


def _missing_model(policy: Policy) -> str:
    """Return why the model of a policy is not on this machine; empty if it is."""
    try:
        models.resolve(policy.model)
    except ModelNotFoundError as cause:
        return str(cause)
    return ""


def _policy(row: Mapping[str, Any]) -> Policy:
    sampling, lora = _instance(Sampling, row["sampling"]), row.get("lora")
    return _instance(Policy, {**row, "sampling": sampling, "lora": None if lora is None else _instance(LoRA, lora)})


def _instance(cls: Callable[..., T], row: Mapping[str, Any]) -> T:
    """Return a dataclass of plain values. Unknown values are refused, because they may matter."""
    if unknown := sorted(map(str, row.keys() - {field.name for field in fields(cls)})):  # type: ignore[arg-type]
        raise ValueError(f"unknown: {', '.join(unknown)}")
    return cls(**row)


def serve_run(run: TrainedRun, engine: EngineConfig, *, host: str, port: int, token: str) -> int:
    """Answer requests until Ctrl-C, SIGTERM or the loss of an engine.

    Args:
        run: Policies to serve.
        engine: Settings of every engine.
        host: Address to listen on.
        port: Port to listen on.
        token: Token that requests need.

    Raises:
        KeyboardInterrupt: Ctrl-C; all processes have ended.
        SystemExit: SIGTERM, with status 143; all processes have ended.
        ActorDiedError: An engine died and cannot be restarted.
    """
    with contextlib.closing(LoopRunner(status=lambda: "the server is stopped")) as runner:
        if runner.run(_until_terminated(_serve(run, engine, host, port, token))):
            sys.exit(128 + signal.SIGTERM)
    return 0


async def _until_terminated(work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`. Returns whether SIGTERM ended it."""
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
                server = PolicyServer(gateway, run.names, run.policies, fleet.policy_engines, token=token)
                say(f"answering on {gateway.url}")
                try:
                    await server.failed
                finally:
                    await server.drain(_DRAIN_S)
        finally:
            await fleet.stop()
