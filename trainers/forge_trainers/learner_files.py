"""Checkpoints and exports of the learner, all or nothing.

In: state dicts. Out: folders that appear complete. Waits for the disk and the other ranks.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from forge_agents.errors import RunFolderError

_NUMBERED = re.compile(r"(.*?)(\d+)")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")


def save(state: dict[str, Any], folder: Path, *, keep: int | None = None) -> None:
    """Write `state` to `folder` with torch's distributed checkpoint.

    The folder gets its name once everything is written, so a killed process leaves none that looks complete.

    Args:
        state: Nested dicts of tensors, DTensors and numbers; the same keys on every rank.
        folder: Replaced if it exists.
        keep: With a name like ``step-12``, leave this many siblings of highest number, this one included. None: all.

    Raises:
        RunFolderError: The folder cannot be written.
    """
    unfinished = folder.with_name(f".unfinished-{folder.name}")
    try:
        if _is_first_rank():
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(unfinished, ignore_errors=True)
        _wait_for_ranks()
        state_dict_saver.save(state, checkpoint_id=str(unfinished))
        if _is_first_rank():
            _put_in_place(unfinished, folder)
            for old in [] if keep is None else _numbered_siblings(folder)[:-keep]:
                shutil.rmtree(old, ignore_errors=True)
    except (OSError, CheckpointException) as error:
        raise RunFolderError(f"cannot write a checkpoint to {folder}: {error}") from error
    _wait_for_ranks()


def load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Read a checkpoint into the tensors of `state`.

    Args:
        state: As `save` was given it; its tensors are overwritten.
        folder: What `save` wrote.

    Returns:
        `state` with what was read.

    Raises:
        RunFolderError: There is no complete checkpoint, or it does not match `state`.
    """
    if not (folder / ".metadata").is_file():
        raise RunFolderError(f"{folder} holds no complete checkpoint; choose another, or start without one")
    try:
        state_dict_loader.load(state, checkpoint_id=str(folder))
    except (CheckpointException, RuntimeError, ValueError) as error:
        raise RunFolderError(f"{folder} does not fit this model ({error}); was it saved by another one?") from error
    return state


def _numbered_siblings(folder: Path) -> list[Path]:
    """Complete checkpoints named like `folder` but for the number at the end, by rising number."""
    prefix, number = _split(folder.name)
    if number is None:
        return [folder]
    found = [path for path in folder.parent.iterdir() if _split(path.name)[0] == prefix and _split(path.name)[1]]
    complete = [path for path in found if (path / ".metadata").is_file()]
    return sorted(complete, key=lambda path: int(_split(path.name)[1] or 0))


def _split(name: str) -> tuple[str, str | None]:
    match = _NUMBERED.fullmatch(name)
    return (match[1], match[2]) if match else (name, None)


def export(state: dict[str, Any], model_folder: Path, folder: Path, *, dtype: torch.dtype) -> Path:
    """Write a Hugging Face model folder from weights in Hugging Face's names.

    Args:
        state: Plain tensors, or DTensors, which all ranks gather one by one.
        model_folder: The model trained; its config and tokenizer files are taken over.
        folder: Appears when complete; an existing one is replaced.
        dtype: Written to config.json.

    Raises:
        RunFolderError: The folder cannot be written.
    """
    whole = {}
    for name, value in state.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if _is_first_rank():
            whole[name] = full.cpu()
    try:
        if _is_first_rank():
            _write_model(whole, model_folder, folder, dtype)
    except OSError as error:
        raise RunFolderError(f"cannot export to {folder}: {error}") from error
    _wait_for_ranks()
    return folder


def _write_model(state: dict[str, torch.Tensor], model_folder: Path, folder: Path, dtype: torch.dtype) -> None:
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
    _put_in_place(unfinished, folder)


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
