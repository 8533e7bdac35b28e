"""Atomic checkpoints and exports of the learner.

Checkpoints may come from strangers. PyTorch unpickles a checkpoint's ``.metadata`` file and every value that is not a
tensor, and unpickling can run any code. This module reads ``.metadata`` with an unpickler that accepts only the classes
of that file, and all other values with ``weights_only``. The module `untrusted` checks both before.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import math
import os
import pickle
import re
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from forge_agents.errors import ModelNotFoundError, RunFolderError
from forge_agents.files import Checksums, apply_umask, check_dense
from forge_agents.models import families
from forge_agents.models.resolve import check_contained_files, copy_model_file, opened_folder, read_json
from forge_trainers.learner import untrusted

_log = logging.getLogger(__name__)
_MALFORMED = (AssertionError, AttributeError, IndexError, KeyError, MemoryError, TypeError)
"""Errors that PyTorch and the unpickler raise for malformed metadata."""
_CHECKED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
_COPIED = re.compile(
    r"(added_tokens|chat_template|config|generation_config|(video_)?preprocessor_config|processor_config|tokenizer"
    r"|special_tokens_map|tokenizer_config|vocab)\.json|chat_template\.jinja|(merges|vocab)\.txt|tokenizer\.model"
    r"|(README|LICENSE|NOTICE|USE_POLICY)(\.\w+)?",
    re.ASCII,
)
"""Names of the files that an export takes from the start model."""
_TEMPLATES = "additional_chat_templates"
"""Folder of a tokenizer with several chat templates."""
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json", re.ASCII)
_ADAPTER = "adapter"
_FOLDERS = {_TEMPLATES: re.compile(r".*\.jinja"), _ADAPTER: re.compile(r"adapter_(model\.safetensors|config\.json)")}
"""Names of the files in an export's subfolders."""


# ---- writing


class _SummedFile(io.BufferedWriter):
    """A new file that computes checksums while it is written."""

    def __init__(self, path: str | os.PathLike[str], sums: Checksums) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._sums = sums

    def write(self, data: Any) -> int:
        self._sums.add(data)
        return super().write(data)


class _SummingFileSystem(FileSystem):
    """Files for writing, with their checksums by name."""

    def __init__(self) -> None:
        self.sums: dict[str, Checksums] = {}

    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Any:
        assert mode == "wb"
        sums = self.sums[Path(path).name] = Checksums()
        return _SummedFile(path, sums)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _Writer(FileSystemWriter):
    """PyTorch's writer of one checkpoint. The folder gets its name last, so it never holds an incomplete checkpoint."""

    def __init__(self, folder: Path, use_device: Callable[[], object]) -> None:
        super().__init__(folder.with_name(f".unfinished-{folder.name}"))
        self.folder = folder
        self.fs = self.files = _SummingFileSystem()
        self._use_device = use_device

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict  # no copy: the learner waits before it changes these tensors

    def write_data(self, plan: Any, planner: Any) -> Any:
        self._use_device()  # PyTorch copies to the host on the current device's stream and waits for that stream
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)  # runs on the first rank after all have written; all ranks get its errors
        _put_in_place(Path(self.path), self.folder)


class Writer:
    """Writes one checkpoint at a time in the background, with torch's ``async_save``.

    To save memory the state is not copied, so it must not change before `wait` has returned. The learner waits before
    its optimizer changes the weights, at the end of a training step. `use_device` sets the current device of the
    writing thread.
    """

    def __init__(self, use_device: Callable[[], object] = lambda: None) -> None:
        self._use_device = use_device
        self._group: dist.ProcessGroup | None = None
        self._under_way: tuple[_Writer, Future[Any]] | None = None

    def start(self, state: dict[str, Any], folder: Path) -> None:
        """Start to write `state` to `folder` with torch's distributed checkpoint. A collective of all ranks.

        `state` holds nested dicts of tensors, DTensors and numbers, with the same keys on every rank. An existing
        folder is replaced when everything is written.
        """
        self.wait()
        if self._group is None and not is_alone():  # collectives of the thread must not mix with those of training
            self._group = dist.new_group(backend="gloo")
        writer = _Writer(folder, self._use_device)
        if _is_first_rank():
            shutil.rmtree(writer.path, ignore_errors=True)  # left by a killed process
        _wait_for_ranks()  # otherwise the first rank could remove files that another rank has just created
        saving: Any = state_dict_saver.async_save(
            state, storage_writer=writer, process_group=self._group, no_dist=is_alone()
        )
        self._under_way = writer, saving

    def wait(self) -> float:
        """Wait until nothing is being written. Returns the seconds waited. Errors are raised by `finish`."""
        if self._under_way is None or self._under_way[1].done():
            return 0.0
        started = time.perf_counter()
        self._under_way[1].exception()
        return time.perf_counter() - started

    def finish(self) -> dict[str, list[int]]:
        """Wait until the checkpoint of `start` is written. Returns size and CRCs of this rank's files by name.

        Raises:
            RunFolderError: The checkpoint could not be written. The folder's previous content is unchanged.
        """
        if self._under_way is None:
            return {}
        writer, saving = self._under_way
        try:
            saving.result()
        except (CheckpointException, OSError, RuntimeError) as error:  # torch raises RuntimeError if the disk is full
            raise RunFolderError(f"cannot write a checkpoint to {writer.folder}: {_reason(error, writer)}") from error
        return {name: sums.all for name, sums in writer.files.sums.items()}


def _reason(error: BaseException, writer: _Writer) -> str:
    """Error message with the cause on each rank, without tracebacks, and the free disk space.

    For a full disk, torch's message only mentions an unexpected file position.
    """
    causes = {rank: cause for rank, (cause, _) in getattr(error, "failures", {}).items()} or {0: error}
    words = "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in causes.items())
    with contextlib.suppress(OSError):
        words += f" ({shutil.disk_usage(Path(writer.folder).parent).free / 1e9:.1f} GB are free there)"
    return " ".join(words.split())


def optimizer_state(optimizers: Any) -> dict[str, Any]:
    """State of TorchTitan's ``OptimizersContainer``, with moments of zero before the first step.

    PyTorch creates the moments by an optimizer step, so the step counter is reset to 0.
    """
    has_state = any(optimizer.state for optimizer in optimizers)
    state: dict[str, Any] = optimizers.state_dict()
    if not has_state:
        for moments in (moments for optimizer in optimizers for moments in optimizer.state.values()):
            moments["step"].zero_()
        state = optimizers.state_dict()
    return state


# ---- reading


class _Reader(FileSystemReader):
    """PyTorch's reader, for untrusted folders."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = self._metadata
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    @functools.cached_property
    def _metadata(self) -> Metadata:
        folder = Path(self.path)
        with self.fs.create_stream(self._get_metadata_path(), "rb") as file:
            metadata = untrusted.read_metadata(file.read())  # a read allocates no more than the file has
        places = metadata.storage_data.values()
        if any(not isinstance(place.relative_path, str) or place.transform_descriptors for place in places):
            raise pickle.UnpicklingError(f"{folder / '.metadata'} names a compressed part, or no file")
        for name in {place.relative_path for place in places}:
            if name != Path(name).name or not stat.S_ISREG((folder / name).lstat().st_mode):
                raise pickle.UnpicklingError(f"{folder / '.metadata'} names {name!r}, which is no file of this folder")
        return metadata

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        part = super()._slice_file(file, sinfo)
        untrusted.check_archive(part, sinfo.length)
        part.seek(0)
        return part


class _Planner(DefaultLoadPlanner):
    """PyTorch's planner. Values other than tensors are read with ``weights_only``, too."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        place = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, place, torch.load(value, weights_only=True))  # plain values only


def load(state: dict[str, Any], folder: Path, *, optional: Collection[str] = ()) -> dict[str, Any]:
    """Read a checkpoint into the tensors of `state`, without running any code from the checkpoint.

    Keys in `optional` are left out of the result if the checkpoint lacks them. Returns the state read.

    Raises:
        RunFolderError: The checkpoint is missing, incomplete or does not match `state`.
    """
    if not (folder / ".metadata").is_file():
        raise RunFolderError(f"{folder} holds no complete checkpoint. Choose another folder, or start without one")
    try:
        reader = _Reader(folder)
        stored = {str(name).partition(".")[0] for name in reader.read_metadata().state_dict_metadata}
        requested = {name: value for name, value in state.items() if name in stored or name not in optional}
        if left := sorted(state.keys() - requested.keys()):
            _log.warning("%s holds no %s. The run continues with its current values", folder, ", ".join(left))
        state_dict_loader.load(requested, storage_reader=reader, planner=_Planner(), no_dist=is_alone())
    except (
        pickle.UnpicklingError, CheckpointException, OSError, RuntimeError, ValueError, EOFError, *_MALFORMED
    ) as error:  # fmt: skip
        failures = [failure for failure, _ in getattr(error, "failures", {}).values()] or [error]
        for failure in failures:
            if isinstance(failure, pickle.UnpicklingError):
                raise RunFolderError(
                    f"{folder} is refused: {failure}. No code of it was run. Use only checkpoints whose origin you "
                    "trust"
                ) from error
        raise RunFolderError(f"{folder} does not fit this model ({error}). Was it saved by another model?") from error
    return requested


def invalid_tensor(state: Mapping[str, Any]) -> str:
    """Return the name of a tensor with numbers on this rank that no training has, or an empty text.

    Those are numbers that are not finite, and negative second moments or counts of steps. One training step would
    spread them to all weights.

    Args:
        state: Parts of a learner's state, by name: tensors and other values by name.
    """
    for name, value in (item for part in state.values() if isinstance(part, Mapping) for item in part.items()):
        local = value.to_local() if isinstance(value, DTensor) else value
        if not isinstance(local, torch.Tensor) or local.dtype not in _CHECKED or not local.numel():
            continue
        least, most = map(float, torch.aminmax(local.detach()))  # makes no copy
        is_count = str(name).endswith((".exp_avg_sq", ".step"))
        if not (math.isfinite(least) and math.isfinite(most)) or (is_count and least < 0):
            return str(name)
    return ""


# ---- exports


def export(
    state: Iterable[tuple[str, Any]],
    model_folder: Path,
    folder: Path,
    *,
    dtype: torch.dtype,
    adapter: tuple[dict[str, torch.Tensor], dict[str, Any]] | None = None,
) -> Path:
    """Write a Hugging Face model folder. A collective of all ranks.

    Args:
        state: Pairs of Hugging Face name and tensor (plain or DTensor). Tensors are gathered and moved to host memory
            one at a time.
        model_folder: Folder of the model that was trained. Its config, tokenizer and license files are copied. If its
            chat template ends answers with another token, the token is added to ``eos_token_id`` in
            generation_config.json.
        folder: Folder to write. An existing folder is replaced when everything is written.
        dtype: Dtype recorded in config.json.
        adapter: Tensors and configuration of a PEFT adapter for the subfolder ``adapter``. None: no subfolder.

    Raises:
        ModelNotFoundError: A link in the model's folder leads out of the folder.
        RunFolderError: The folder cannot be written.
    """
    with opened_folder(model_folder) as opened:
        check_contained_files(opened)
        whole = {}
        for name, value in state:
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if _is_first_rank():
                whole[name] = full.cpu()
        failure: Exception | None = None
        try:
            if _is_first_rank():
                check_replaceable(folder)
                unfinished = _new_folder(folder.with_name(f".unfinished-{folder.name}"))
                save_torch_state_dict(whole, str(unfinished), metadata={"format": "pt"})
                for file in unfinished.glob("*.safetensors"):
                    apply_umask(file)
                templates = [f"{_TEMPLATES}/{file.name}" for file in (opened / _TEMPLATES).glob("*.jinja")]
                for name in (*filter(_COPIED.fullmatch, sorted(os.listdir(opened))), *templates):  # noqa: PTH208
                    (unfinished / name).parent.mkdir(exist_ok=True)
                    copy_model_file(opened, name, unfinished / name)
                config = read_json(unfinished / "config.json")
                for name in ("torch_dtype", "quantization_config"):  # the former is dtype's name before transformers 5
                    config.pop(name, None)
                config["dtype"] = str(dtype).removeprefix("torch.")
                (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n")
                _add_stop_token(unfinished)
                if adapter is not None:  # in the files that PEFT writes
                    weights, settings = adapter
                    (unfinished / _ADAPTER).mkdir()
                    plain = {name: value.cpu().contiguous() for name, value in weights.items()}
                    save_file(plain, unfinished / _ADAPTER / "adapter_model.safetensors")
                    apply_umask(unfinished / _ADAPTER / "adapter_model.safetensors")
                    (unfinished / _ADAPTER / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
                _put_in_place(unfinished, folder)
        except (OSError, SafetensorError) as error:  # SafetensorError: the disk is full
            failure = error
    _wait_for_ranks()
    if isinstance(failure, ModelNotFoundError):
        raise failure
    if failure is not None:
        raise RunFolderError(
            f"cannot export to {folder}: {failure}. Free disk space, or make the folder writable"
        ) from failure
    return folder


def _add_stop_token(folder: Path) -> None:
    """Add the token that ends an answer in the chat template to the stop tokens of an export.

    transformers and vLLM stop at the ids in generation_config.json. The file of a base model often holds only the
    tokenizer's end-of-sequence token, while its chat template, and so training, ends answers with another token.
    """
    from forge_agents.rollout.rendering import Renderer  # imports transformers, which takes seconds

    template, tokenizer = families.chat_template(folder), folder / "tokenizer_config.json"
    if not template or not tokenizer.is_file():
        return
    eos = read_json(tokenizer).get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if "eos_token" in template or (eos and eos in template):
        return  # answers end with the usual token, so the tokenizer need not be loaded, which takes seconds
    end_id = Renderer.of(folder).end_ids[-1]
    file = folder / "generation_config.json"
    settings = read_json(file) if file.is_file() else {}
    source = settings if file.is_file() else read_json(folder / "config.json")
    stop_ids = source.get("eos_token_id")
    stop_ids = stop_ids if isinstance(stop_ids, list) else [] if stop_ids is None else [stop_ids]
    if end_id not in stop_ids:
        file.write_text(json.dumps({**settings, "eos_token_id": [*stop_ids, end_id]}, indent=2) + "\n")


def check_replaceable(target: Path) -> None:
    """Raise RunFolderError if a link, or a folder with anything but an exported model, is where an export will be."""
    if target.is_symlink():
        raise RunFolderError(f"{target} is a link, so it is not replaced. Name the folder that it leads to")
    entries = sorted(target.iterdir()) if target.exists() else []
    others = [entry.name for entry in entries if not _is_exported(entry)]
    if entries and not others and not (target / "config.json").exists():
        others = [entry.name for entry in entries]
    if others:
        raise RunFolderError(
            f"{target} holds {others[0]!r} and is no exported model, so it is not replaced. Move it to another place"
        )


def _is_exported(entry: Path) -> bool:
    """Return whether `entry` of a folder is a file or a subfolder that exports write."""
    if entry.is_dir() and not entry.is_symlink():
        pattern = _FOLDERS.get(entry.name)
        return pattern is not None and all(item.is_file() and pattern.fullmatch(item.name) for item in entry.iterdir())
    return bool(_COPIED.fullmatch(entry.name) or _WEIGHTS.fullmatch(entry.name))


def copy_exports(source: Path, target: Path) -> None:
    """Copy an exported model, or those in subfolders. A copy replaces nothing but another exported model.

    Files that no export writes are left out.

    Raises:
        ModelNotFoundError: `source` is no folder, or has a link out of it.
        RunFolderError: There is no exported model in `source`, or something else at the place of a copy.
        ValueError: A file takes almost no space on its disk.
    """
    if (source / "config.json").exists():
        _copy_export(source, target)
        return
    names = sorted(file.parent.name for file in source.glob("*/config.json"))
    if not names:
        raise RunFolderError(f"{source} holds no exported model")
    for name in names:
        check_replaceable(target / name)
    for name in names:
        _copy_export(source / name, target / name)


def _copy_export(source: Path, target: Path) -> None:
    check_replaceable(target)
    unfinished = _new_folder(target.with_name(f".unfinished-{target.name}"))
    with opened_folder(source) as opened:
        entries = filter(_is_exported, sorted(opened.iterdir()))
        files = [file for entry in entries for file in (sorted(entry.iterdir()) if entry.is_dir() else [entry])]
        for file in files:
            name = str(file.relative_to(opened))
            check_dense(file)
            (unfinished / name).parent.mkdir(exist_ok=True)
            copy_model_file(opened, name, unfinished / name)
    _put_in_place(unfinished, target)


def _put_in_place(unfinished: Path, target: Path) -> None:
    replaced = target.with_name(f".replaced-{target.name}")
    _remove(replaced)
    if target.exists():
        target.rename(replaced)
    unfinished.rename(target)
    _remove(replaced)


def _new_folder(path: Path) -> Path:
    """Make an empty folder in place of what an earlier session left. A link, perhaps of a stranger, is not followed."""
    _remove(path)
    path.mkdir(parents=True)
    return path


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def is_alone() -> bool:
    """Whether there is a single rank, for which torch's distributed checkpoint must not communicate (``no_dist``).

    Otherwise torch would send plans from the rank to itself through gloo, whose thread copies them with a thread pool.
    OpenMP (libgomp) then counts more threads than cores, and from there on its threads sleep instead of spinning. Every
    operation of the learner would start 60 us later.
    """
    return not dist.is_initialized() or dist.get_world_size() == 1


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _wait_for_ranks() -> None:
    if not is_alone():
        dist.barrier()
