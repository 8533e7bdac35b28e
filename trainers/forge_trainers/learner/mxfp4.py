"""Copies of models whose experts are stored in 4 bits (MXFP4), with experts in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from forge_agents.errors import ModelNotFoundError
from forge_agents.models.resolve import safetensors_header, weight_files
from forge_trainers.learner import checkpoint

_BLOCKS, _SCALES = "_blocks", "_scales"


def write_bfloat16(source: Path, folder: Path) -> Path:
    """Write a copy of the model in `source` that can be trained. An existing `folder` is replaced.

    Raises:
        ModelNotFoundError: The model has no weights in MXFP4, or a part of them is missing.
        RunFolderError: The folder cannot be written.
    """
    files = {name: file for file in weight_files(source) for name in safetensors_header(file)}
    if not any(name.endswith(_BLOCKS) for name in files):
        raise ModelNotFoundError(f"{source} has no weights in 4 bits (MXFP4), so a copy in bfloat16 is not needed")
    return checkpoint.export(_tensors(files), source, folder, dtype=torch.bfloat16)


def _tensors(files: dict[str, Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by the names of an unquantized checkpoint, in bfloat16."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    def read(name: str) -> torch.Tensor:
        if name not in files:
            raise ModelNotFoundError(f"the model lacks {name}. Download it again")
        with safe_open(files[name], framework="pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(name)
            return tensor

    for name in files:
        if name.endswith(_BLOCKS):
            weight = name.removesuffix(_BLOCKS)
            yield weight, convert_moe_packed_tensors(read(name), read(weight + _SCALES), dtype=torch.bfloat16)
        elif not name.endswith(_SCALES):
            yield name, read(name).to(torch.bfloat16)
