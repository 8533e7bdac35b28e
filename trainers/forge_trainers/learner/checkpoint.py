"""Checkpoints and exports of the learner, all or nothing.

In: state dicts. Out: folders that appear complete. Waits for the disk and the other ranks; a checkpoint is written on
a thread of its own.

PyTorch unpickles a checkpoint's ``.metadata`` and every value in it that is no tensor, and a pickle may call anything.
Here the first is read by an unpickler that knows the classes of that file only, the others by ``weights_only``, so a
folder that anybody may have written is read without running what it holds.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pickle
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from enum import Enum, EnumMeta
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from forge_agents.errors import RunFolderError
from forge_agents.files import Checksums
from forge_agents.models import families
from forge_agents.models.resolve import check_contained_files

_log = logging.getLogger(__name__)
_NONSENSE = (AssertionError, AttributeError, IndexError, KeyError, TypeError)
"""What PyTorch raises over metadata that nobody can have written."""
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")


# ---- writing


class _SummedFile(io.BufferedWriter):
    """A new file whose sums are taken on the way."""

    def __init__(self, path: str | os.PathLike[str], sums: Checksums) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._sums = sums

    def write(self, data: Any) -> int:
        self._sums.add(data)
        return super().write(data)


class _SummingFileSystem(FileSystem):
    """Files that are only ever written, and their sums by name."""

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
    """PyTorch's writer of one checkpoint into a folder that gets its name last, so none is there half."""

    def __init__(self, folder: Path, use_device: Callable[[], object]) -> None:
        super().__init__(folder.with_name(f".unfinished-{folder.name}"))
        self.folder = folder
        self.fs = self.files = _SummingFileSystem()
        self._use_device = use_device

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict  # nothing is copied: whoever changes these tensors waits first

    def write_data(self, plan: Any, planner: Any) -> Any:
        self._use_device()  # PyTorch copies to the host on the current device's stream, and waits for that one
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)  # on the first rank, after all have written; what it raises, all hear
        _put_in_place(Path(self.path), self.folder)


class Writer:
    """Writes one checkpoint at a time while the learner computes: torch's ``async_save``.

    Nothing is copied: what is being written must not change before `wait` has returned. That costs no memory, and a
    learner changes its weights only in the optimiser's step, which comes last.

    Args:
        use_device: Makes the device of what is written the current one of the thread that writes.
    """

    def __init__(self, use_device: Callable[[], object] = lambda: None) -> None:
        self._use_device = use_device
        self._group: dist.ProcessGroup | None = None
        self._under_way: tuple[_Writer, Future[Any]] | None = None

    def start(self, state: dict[str, Any], folder: Path) -> None:
        """Begin to write `state` to `folder` with torch's distributed checkpoint. All ranks call it together.

        Args:
            state: Nested dicts of tensors, DTensors and numbers; the same keys on every rank.
            folder: Appears once everything is written; replaced if it exists.
        """
        self.wait()
        if self._group is None and not is_alone():  # the thread's collectives must not mix with those of training
            self._group = dist.new_group(backend="gloo")
        writer = _Writer(folder, self._use_device)
        if _is_first_rank():
            shutil.rmtree(writer.path, ignore_errors=True)  # what a killed process left
        _wait_for_ranks()  # else it could remove what another rank has just made
        saving: Any = state_dict_saver.async_save(
            state, storage_writer=writer, process_group=self._group, no_dist=is_alone()
        )
        self._under_way = writer, saving

    def wait(self) -> float:
        """Return once nothing is being written, and how many seconds that took; whether it succeeded, `finish` says."""
        if self._under_way is None or self._under_way[1].done():
            return 0.0
        started = time.perf_counter()
        self._under_way[1].exception()
        return time.perf_counter() - started

    def finish(self) -> dict[str, list[int]]:
        """Wait for what `start` began.

        Returns:
            Size and CRCs of the files that this rank wrote, by name; see `forge_agents.files.Sums`.

        Raises:
            RunFolderError: It could not be written; what the folder held before is still there.
        """
        if self._under_way is None:
            return {}
        writer, saving = self._under_way
        try:
            saving.result()
        except (CheckpointException, OSError, RuntimeError) as error:  # RuntimeError: torch's, where the disk is full
            raise RunFolderError(f"cannot write a checkpoint to {writer.folder}: {_reason(error, writer)}") from error
        return {name: sums.all for name, sums in writer.files.sums.items()}


def _reason(error: BaseException, writer: _Writer) -> str:
    """What went wrong on which rank, without DCP's tracebacks, and the room that is left on the disk.

    Of a full disk torch only says that a position is unexpected.
    """
    causes = {rank: cause for rank, (cause, _) in getattr(error, "failures", {}).items()} or {0: error}
    words = "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in causes.items())
    with contextlib.suppress(OSError):
        words += f" ({shutil.disk_usage(Path(writer.folder).parent).free / 1e9:.1f} GB are free there)"
    return " ".join(words.split())


def optimizer_state(optimizers: Any) -> dict[str, Any]:
    """State of TorchTitan's ``OptimizersContainer``, moments of zero before the first step.

    PyTorch makes those by a step of its own, which does not count.
    """
    begun = any(optimizer.state for optimizer in optimizers)
    state: dict[str, Any] = optimizers.state_dict()
    if not begun:
        for moments in (moments for optimizer in optimizers for moments in optimizer.state.values()):
            moments["step"].zero_()
        state = optimizers.state_dict()
    return state


# ---- reading

_DCP = "torch.distributed.checkpoint"
_CLASSES = frozenset(
    (f"{_DCP}.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
) | {(f"{_DCP}.filesystem", "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout")}


class _Reader(FileSystemReader):
    """PyTorch's reader, for folders that nobody vouches for."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        folder = Path(self.path)
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise pickle.UnpicklingError(f"{folder / '.metadata'} describes no checkpoint")
        for name in {str(place.relative_path) for place in found.storage_data.values()}:
            if name != Path(name).name or not stat.S_ISREG((folder / name).lstat().st_mode):
                raise pickle.UnpicklingError(f"{folder / '.metadata'} names {name!r}, which is no file of this folder")
        found.storage_meta = StorageMeta(load_id=self.load_id)
        return found


class _Planner(DefaultLoadPlanner):
    """PyTorch's planner; values that are no tensors are read as tensors are: without calling anything."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        packed = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), packed)  # nothing but plain values comes through
        packed.seek(0)
        super().load_bytes(read_item, packed)


class _Unpickler(pickle._Unpickler):
    """Knows the classes that PyTorch writes into ``.metadata``, and lets their attributes be."""

    dispatch = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name == "PosixPath":  # where it was written; not used
            return PurePosixPath
        if (module, name) in _CLASSES:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # how Python before 3.11.4 writes a member of an enumeration
            return _member
        raise pickle.UnpicklingError(f"the checkpoint's .metadata asks for {module}.{name}, which no checkpoint needs")

    def load_build(self) -> None:
        if isinstance(self.stack[-2], type):  # type: ignore[attr-defined]  # a state would change the class for all
            raise pickle.UnpicklingError("the checkpoint's .metadata changes a class")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build  # type: ignore[assignment]  # of the same class, for mypy of the base


def _member(kind: object, name: object) -> Enum:
    """A member of an enumeration by its name, and no other attribute of anything."""
    if not (isinstance(kind, EnumMeta) and isinstance(name, str) and name in kind.__members__):
        raise pickle.UnpicklingError("the checkpoint's .metadata asks for an attribute, which no checkpoint needs")
    member: Enum = kind.__members__[name]
    return member


def load(state: dict[str, Any], folder: Path, *, optional: Collection[str] = ()) -> dict[str, Any]:
    """Read a checkpoint into the tensors of `state`. Nothing that it holds is run, whoever wrote it.

    Args:
        state: As `Writer.start` was given it; its tensors are overwritten.
        folder: What it wrote.
        optional: Keys of `state` that a checkpoint of an older version may lack: they keep what they hold.

    Returns:
        `state` with what was read.

    Raises:
        RunFolderError: There is no complete checkpoint, or it does not match `state`.
    """
    if not (folder / ".metadata").is_file():
        raise RunFolderError(f"{folder} holds no complete checkpoint; choose another, or start without one")
    try:
        reader = _Reader(folder)
        stored = {str(name).partition(".")[0] for name in reader.read_metadata().state_dict_metadata}
        wanted = {name: value for name, value in state.items() if name in stored or name not in optional}
        if left := sorted(state.keys() - wanted.keys()):
            _log.warning("%s holds no %s; the run goes on with what it has", folder, ", ".join(left))
        state_dict_loader.load(wanted, storage_reader=reader, planner=_Planner(), no_dist=is_alone())
    except pickle.UnpicklingError as error:
        raise RunFolderError(f"{folder} is refused: {error}. Nothing in it was run; ask who made it") from error
    except (CheckpointException, OSError, RuntimeError, ValueError, EOFError, *_NONSENSE) as error:
        raise RunFolderError(f"{folder} does not fit this model ({error}); was it saved by another one?") from error
    return state | wanted


# ---- exports


def export(
    state: Iterable[tuple[str, Any]],
    model_folder: Path,
    folder: Path,
    *,
    dtype: torch.dtype,
    adapter: tuple[dict[str, torch.Tensor], dict[str, Any]] | None = None,
) -> Path:
    """Write a Hugging Face model folder from weights in Hugging Face's names.

    Args:
        state: Names and tensors, plain or DTensors, which all ranks gather; one by one they go to the host's memory.
        model_folder: The model trained; its config and tokenizer files are taken over. A token that ends answers in
            its chat template is added to the ``eos_token_id`` of generation_config.json.
        folder: Appears when complete; an existing one is replaced.
        dtype: Written to config.json.
        adapter: Tensors and configuration of a PEFT adapter, for the subfolder ``adapter``; None writes none.

    Raises:
        ModelNotFoundError: A link in the model's folder leads out of it.
        RunFolderError: The folder cannot be written.
    """
    check_contained_files(model_folder)
    whole = {}
    for name, value in state:
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if _is_first_rank():
            whole[name] = full.cpu()
    failure: Exception | None = None
    try:
        if _is_first_rank():
            unfinished = folder.with_name(f".unfinished-{folder.name}")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            save_torch_state_dict(whole, str(unfinished), metadata={"format": "pt"})
            for file in model_folder.iterdir():
                if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_WEIGHTS):
                    shutil.copyfile(file, unfinished / file.name)
            config = json.loads((model_folder / "config.json").read_text())
            config.pop("torch_dtype", None)  # the name before transformers 5
            config["dtype"] = str(dtype).removeprefix("torch.")
            (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            _add_stop_token(unfinished, model_folder)
            if adapter is not None:  # in the files that PEFT writes
                weights, settings = adapter
                (unfinished / "adapter").mkdir()
                plain = {name: value.cpu().contiguous() for name, value in weights.items()}
                save_file(plain, unfinished / "adapter" / "adapter_model.safetensors")
                (unfinished / "adapter" / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
            _put_in_place(unfinished, folder)
    except (OSError, SafetensorError) as error:  # the latter where a disk is full
        failure = error
    _wait_for_ranks()
    if failure is not None:
        raise RunFolderError(f"cannot export to {folder}: {failure}. Make room, or the folder writable") from failure
    return folder


def _add_stop_token(folder: Path, model_folder: Path) -> None:
    """Let generation with an export stop at the token that ends an answer in its chat template.

    transformers and vLLM stop at the ids in generation_config.json. In base models it often holds only the tokenizer's
    end-of-sequence token, while their chat template, and so training, ends an answer with another one.
    """
    from forge_agents.rollout.rendering import Renderer  # loads what a learner needs for nothing else

    template, tokenizer = families.chat_template(folder), folder / "tokenizer_config.json"
    if not template or not tokenizer.is_file():
        return
    eos = json.loads(tokenizer.read_text()).get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if "eos_token" in template or (eos and eos in template):
        return  # it ends answers with the usual token, and the tokenizer, which takes seconds, need not be loaded
    end_id = Renderer.of(model_folder).end_ids[-1]
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text()) if file.is_file() else {}
    source = settings if file.is_file() else json.loads((folder / "config.json").read_text())
    given = source.get("eos_token_id")
    stop_ids = given if isinstance(given, list) else [] if given is None else [given]
    if end_id not in stop_ids:
        file.write_text(json.dumps({**settings, "eos_token_id": [*stop_ids, end_id]}, indent=2) + "\n")


def _put_in_place(unfinished: Path, target: Path) -> None:
    replaced = target.with_name(f".replaced-{target.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    unfinished.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)


def is_alone() -> bool:
    """Whether there are no other ranks, so that torch's distributed checkpoint has nobody to agree with (``no_dist``).

    It would send plans to itself through gloo, whose thread copies them with threads of its own. OpenMP (libgomp) then
    counts more threads than cores, and from there on lets each wait asleep and not by spinning: every operation of the
    learner takes 60 us longer to begin.
    """
    return not dist.is_initialized() or dist.get_world_size() == 1


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _wait_for_ranks() -> None:
    if not is_alone():
        dist.barrier()
