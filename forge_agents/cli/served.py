"""Policies of runs, exports and models, as ``forge-agents serve`` answers with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from forge_agents import safe_yaml
from forge_agents.display import visible
from forge_agents.errors import ModelNotFoundError, RunFolderError, did_you_mean
from forge_agents.files import check_plain_files, user_path
from forge_agents.models.exports import trained_prompts
from forge_agents.models.fingerprint import sampled_hash
from forge_agents.models.resolve import check_contained_files, local_folder, resolve
from forge_agents.policy import LoRA, Policy, Sampling, unique_name
from forge_agents.serving.config import EngineConfig

T = TypeVar("T")
_EXPORT_PREFIX = "export-step-"
"""Prefix of the folders that ``forge-agents export`` writes."""
_ANY_LENGTH = 10_000_000
"""Maximum number of tokens of a response without a run: the context is the limit."""


@dataclass(frozen=True, kw_only=True)
class ServedPolicies:
    """Policies to serve, with the settings of their training."""

    policies: Mapping[str, Policy]
    """Policies by name. A trained policy has its exported model, or its base model and an adapter."""
    names: Mapping[str, str]
    """Policies by the names that requests may use."""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """Folders of adapters by policy."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Frozen policies whose model is not on this machine, with the reason."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Context length and dtype of the engines in training."""


def find_policies(checkpoint: str, *, policy: str = "", name: str = "") -> ServedPolicies:
    """Return the policies of a run as they were trained, or of an export or a model.

    Args:
        checkpoint: Folder of a run, an export, or a model (a built-in name, a Hugging Face id or a folder).
        policy: Only this policy. Empty: all.
        name: Name in requests, if there is one trained policy. Empty: the name of the run or the model.

    Raises:
        ModelNotFoundError: There is no such model or policy, or a trained policy was not exported.
        RunFolderError: ``config.yaml`` has values that this version does not know.
        ValueError: `name` is given for several policies.
    """
    folder = user_path(checkpoint)
    export = _export(folder)
    served = None if export == folder else _read_run(folder, export)
    if served is None:
        served = _read_models(checkpoint, export)
    if policy:
        served = _only(served, policy, checkpoint)
    trained = [each.name for each in served.policies.values() if each.trainable]
    alias = name or _short_name(checkpoint, folder)
    if len(trained) == 1 and (name or alias not in served.names):
        served = replace(served, names={alias: trained[0], **served.names})
    if name and name not in served.names:
        raise ValueError(
            f"name={name!r} is none of the names in {checkpoint}: {', '.join(served.names)}. Leave it out, or choose "
            "one policy with --policy"
        )
    return served


def _export(folder: Path) -> Path:
    """Return the final export of a run, or its newest exported checkpoint, or the folder itself."""
    steps = [child for child in folder.glob(f"{_EXPORT_PREFIX}*") if child.is_dir()]
    newest = max(steps, key=lambda child: (len(child.name), child.name), default=folder)
    return folder / "export" if (folder / "export").is_dir() else newest


def _short_name(checkpoint: str, folder: Path) -> str:
    path = folder.absolute()
    if not path.is_dir():
        return checkpoint
    return path.parent.name if path.name == "export" or path.name.startswith(_EXPORT_PREFIX) else path.name


def _only(served: ServedPolicies, policy: str, checkpoint: str) -> ServedPolicies:
    if policy in served.missing:
        raise ModelNotFoundError(f"the model of policy {policy} is missing: {served.missing[policy]}")
    if policy not in served.policies:
        hint = did_you_mean(policy, served.policies)
        raise ModelNotFoundError(
            f"{checkpoint} holds the policies {', '.join(served.policies)}. Choose one with --policy.{hint}"
        )
    names = {name: target for name, target in served.names.items() if target == policy}
    return replace(served, policies={policy: served.policies[policy]}, names=names, missing={})


def _read_models(checkpoint: str, export: Path) -> ServedPolicies:
    """Return policies without sampling of a training: one model, or each model in a folder."""
    models = {child.name: child for child in sorted(export.iterdir())} if export.is_dir() else {}
    if not export.is_dir() or (export / "config.json").is_file():
        name = unique_name(_short_name(checkpoint, user_path(checkpoint)), set())
        folders = {name: resolve(export if export.is_dir() else checkpoint)}
    else:
        models = {name: child for name, child in models.items() if (child / "config.json").is_file()}
        used = set[str]()
        folders = {unique_name(name, used): resolve(child) for name, child in models.items()}
    if not folders:
        raise ModelNotFoundError(
            f"{export} holds no exported model. Training writes export/ at its end, `forge-agents export RUN` exports "
            "a checkpoint, and trainer.save(folder) works at any time"
        )
    sampling = Sampling(max_tokens=_ANY_LENGTH)
    policies = {
        name: Policy(str(model), name=name, sampling=sampling, **trained_prompts(str(model)))
        for name, model in folders.items()
    }
    return ServedPolicies(policies=policies, names={name: name for name in policies})


def _read_run(folder: Path, export: Path) -> ServedPolicies | None:
    """Return the policies of a training run, or None if its folder has no settings of policies."""
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
                raise ValueError(f"policies has {name!r} with name {policy.name!r}. Both must be the same")
        stored = (settings.get("trainer") or {}).get("engine") or {}
        engine = EngineConfig(**{name: stored[name] for name in ("max_model_len", "dtype") if name in stored})
        mapping = {str(agent): str(policy) for agent, policy in (settings.get("policy_mapping") or {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as cause:
        raise RunFolderError(
            visible(f"{folder / 'config.yaml'} does not describe policies as this version does ({cause}). Serve ")
            + f"{export} instead, like any model"
        ) from None
    hashes = settings.get("weights")
    adapters = {}
    for name in [name for name, policy in policies.items() if policy.trainable]:
        model = export if (export / "config.json").is_file() else export / name
        if not (model / "config.json").is_file():
            raise ModelNotFoundError(f"{export} holds no model of the trained policy {name}. Export it again")
        if policies[name].lora is not None and (model / "adapter").is_dir() and _has_base(policies[name], hashes):
            adapters[name] = model / "adapter"
            check_contained_files(model)
        else:  # the exported weights include the adapter
            policies[name] = replace(policies[name], model=str(model), lora=None)
    reasons = {name: _missing_model(policy) for name, policy in policies.items() if not policy.trainable}
    missing = {name: reason for name, reason in reasons.items() if reason}
    policies = {name: policy for name, policy in policies.items() if name not in missing}
    # programs ask for agents, so the name of an agent takes precedence over that of a policy
    names = {name: name for name in policies} | {agent: name for agent, name in mapping.items() if name in policies}
    return ServedPolicies(policies=policies, names=names, adapters=adapters, missing=missing, engine=engine)


def _missing_model(policy: Policy) -> str:
    """Return why the model of a policy is not on this machine. Empty if it is."""
    try:
        resolve(policy.model, offline=True)
    except ModelNotFoundError as cause:
        return str(cause)
    return ""


def _has_base(policy: Policy, hashes: Any) -> bool:
    """Return whether the model that a policy's adapter was trained on is on this machine, with the hash of the run."""
    folder = local_folder(policy.model) if not _missing_model(policy) else None
    recorded = hashes.get(policy.name) if isinstance(hashes, Mapping) else None
    return folder is not None and recorded in (None, sampled_hash(folder))


def _policy(row: Mapping[str, Any]) -> Policy:
    sampling, lora = _instance(Sampling, row["sampling"]), row.get("lora")
    return _instance(Policy, {**row, "sampling": sampling, "lora": None if lora is None else _instance(LoRA, lora)})


def _instance(cls: Callable[..., T], row: Mapping[str, Any]) -> T:
    """Return a dataclass of plain values. Unknown values are refused, because they may matter."""
    if unknown := sorted(map(str, row.keys() - {field.name for field in fields(cls)})):  # type: ignore[arg-type]
        raise ValueError(f"unknown: {', '.join(unknown)}")
    return cls(**row)
