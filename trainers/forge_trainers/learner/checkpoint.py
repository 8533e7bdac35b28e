"""Checkpoints and exports of the learner, all or nothing.

In: state dicts. Out: folders that appear complete. Waits for the disk and the other ranks; a checkpoint is written on
a thread of its own.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.tensor import DTensor

from forge_agents.errors import RunFolderError
from forge_trainers.learner.checkpoint_reader import Planner, Reader
from forge_trainers.learner.checksums import Sums

_log = logging.getLogger(__name__)
_NONSENSE = (AssertionError, AttributeError, IndexError, KeyError, TypeError)
"""What PyTorch raises over metadata that nobody can have written."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")


class _Stream(io.RawIOBase):
    """What is written to it goes to `file`, and into `sums`."""

    def __init__(self, file: io.IOBase, sums: Sums) -> None:
        self._file, self._sums = file, sums

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._file.write(data)
        self._sums.add(data)
        return memoryview(data).nbytes

    def tell(self) -> int:
        return self._sums.size

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()


class _SummingFileSystem(FileSystem):
    def __init__(self) -> None:
        self.sums: dict[str, Sums] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as file:
            if mode != "wb":
                yield file
                return
            sums = self.sums[Path(path).name] = Sums()
            yield _Stream(file, sums)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _Writer(FileSystemWriter):
    """PyTorch's writer of distributed checkpoints, which remembers the sums of what it has written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = self._summing = _SummingFileSystem()

    @property
    def sums(self) -> dict[str, list[int]]:
        """Size and CRCs by file name."""
        return {name: sums.all for name, sums in self._summing.sums.items()}


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


class Writer:
    """Writes one checkpoint at a time, on a thread, while the learner computes.

    Nothing is copied: what is being written must not change before `wait` has returned. That costs no memory, and a
    learner changes its weights only in the optimiser's step, which comes last.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._group: dist.ProcessGroup | None = None
        self._under_way: Future[dict[str, list[int]]] | None = None

    def start(self, state: dict[str, Any], folder: Path) -> None:
        """Begin to write `state` to `folder` with torch's distributed checkpoint. All ranks call it together.

        The folder gets its name once everything is written, so a killed process leaves none that looks complete.

        Args:
            state: Nested dicts of tensors, DTensors and numbers; the same keys on every rank.
            folder: Replaced if it exists.

        Raises:
            RunFolderError: The folder cannot be written.
        """
        self.wait()
        unfinished = folder.with_name(f".unfinished-{folder.name}")
        try:
            if _is_first_rank():
                folder.parent.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(unfinished, ignore_errors=True)
        except OSError as error:
            raise _unwritable(folder, error) from error
        if self._group is None:  # the thread's collectives must not mix with those of training
            self._group = dist.new_group(backend="gloo")
        _wait_for_ranks()
        self._under_way = self._thread.submit(_write, state, unfinished, folder, self._group)

    def wait(self) -> None:
        """Return once nothing is being written; whether it succeeded, `finish` says."""
        if self._under_way is not None:
            self._under_way.exception()

    def finish(self) -> dict[str, list[int]]:
        """Wait for what `start` began; on the first rank, the folder is in place then.

        Returns:
            Size and CRCs of the files that this rank wrote, by name; see `forge_trainers.learner.checksums`.

        Raises:
            RunFolderError: It could not be written; what `folder` held before is still there.
        """
        return {} if self._under_way is None else self._under_way.result()


def _write(
    state: dict[str, Any], unfinished: Path, folder: Path, group: dist.ProcessGroup
) -> dict[str, list[int]]:
    writer = _Writer(unfinished)
    failure: list[str | None] = [None]
    try:
        state_dict_saver.save(state, storage_writer=writer, process_group=group)
        if _is_first_rank():
            _put_in_place(unfinished, folder)
    except CheckpointException as error:  # every rank hears of it
        raise _unwritable(folder, error) from error
    except (OSError, RuntimeError) as error:  # RuntimeError: torch's, where the disk is full
        failure = [str(error)]
    dist.broadcast_object_list(failure, group_src=0, group=group)
    if failure[0] is not None:
        raise _unwritable(folder, failure[0])
    return writer.sums


def _unwritable(folder: Path, error: object) -> RunFolderError:
    return RunFolderError(f"cannot write a checkpoint to {folder}: {' '.join(str(error).split())}")


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
        reader = Reader(folder)
        stored = {str(name).partition(".")[0] for name in reader.read_metadata().state_dict_metadata}
        wanted = {name: value for name, value in state.items() if name in stored or name not in optional}
        if left := sorted(state.keys() - wanted.keys()):
            _log.warning("%s holds no %s; the run goes on with what it has", folder, ", ".join(left))
        state_dict_loader.load(wanted, storage_reader=reader, planner=Planner())
    except pickle.UnpicklingError as error:
        raise RunFolderError(f"{folder} is refused: {error}. Nothing in it was run; ask who made it") from error
    except (CheckpointException, OSError, RuntimeError, ValueError, EOFError, *_NONSENSE) as error:
        raise RunFolderError(f"{folder} does not fit this model ({error}); was it saved by another one?") from error
    return state | wanted


def export(
    state: dict[str, Any],
    model_folder: Path,
    folder: Path,
    *,
    dtype: torch.dtype,
    adapter: tuple[dict[str, torch.Tensor], dict[str, Any]] | None = None,
) -> Path:
    """Write a Hugging Face model folder from weights in Hugging Face's names.

    Args:
        state: Plain tensors, or DTensors, which all ranks gather one by one.
        model_folder: The model trained; its config and tokenizer files are taken over.
        folder: Appears when complete; an existing one is replaced.
        dtype: Written to config.json.
        adapter: Tensors and configuration of a PEFT adapter, for the subfolder ``adapter``; None writes none.

    Raises:
        RunFolderError: The folder cannot be written.
    """
    whole = {}
    for name, value in state.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if _is_first_rank():
            whole[name] = full.cpu()
    failure: Exception | None = None
    try:
        if _is_first_rank():
            _write_model(whole, model_folder, folder, dtype, adapter)
    except (OSError, SafetensorError) as error:  # the latter where a disk is full
        failure = error
    _wait_for_ranks()
    if failure is not None:
        raise RunFolderError(f"cannot export to {folder}: {failure}. Make room, or the folder writable") from failure
    return folder


def _write_model(
    state: dict[str, torch.Tensor],
    model_folder: Path,
    folder: Path,
    dtype: torch.dtype,
    adapter: tuple[dict[str, torch.Tensor], dict[str, Any]] | None,
) -> None:
    unfinished = folder.with_name(f".unfinished-{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_torch_state_dict(state, str(unfinished), metadata={"format": "pt"})
    for file in model_folder.iterdir():
        if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_WEIGHTS):
            shutil.copyfile(file, unfinished / file.name)
    config = json.loads((model_folder / "config.json").read_text())
    config.pop("torch_dtype", None)  # the name before transformers 5
    config["dtype"] = str(dtype).removeprefix("torch.")
    (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if adapter is not None:
        write_adapter(*adapter, unfinished / "adapter")
    _put_in_place(unfinished, folder)


def write_adapter(state: dict[str, torch.Tensor], config: dict[str, Any], folder: Path) -> None:
    """Write an adapter as PEFT does: ``adapter_model.safetensors`` and ``adapter_config.json``."""
    folder.mkdir()
    save_file({name: value.cpu().contiguous() for name, value in state.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _put_in_place(unfinished: Path, target: Path) -> None:
    replaced = target.with_name(f".replaced-{target.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    unfinished.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _wait_for_ranks() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
