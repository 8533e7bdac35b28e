"""Reads the files of LoRA adapters in PEFT's format, which a stranger may have written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from forge_agents.models.resolve import safetensors_header
from forge_agents.policy import LoRA
from forge_agents.serving._shapes import adapter_shapes, check_shapes

if TYPE_CHECKING:
    import torch

ADAPTER_FILE = "adapter_model.safetensors"
"""Name of the file with an adapter's weights in PEFT's format."""


def read_adapter(file: Path, model: Path, lora: LoRA) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter. Names and shapes are checked before the weights are read.

    Args:
        file: The adapter's safetensors file. `lora` counts in place of the settings next to it.
        model: Folder of the model below the adapter.
        lora: Settings of the adapter.

    Raises:
        ValueError: The file cannot be read, has other tensors, or weights that are not finite.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    advice = "Export the adapter again, or restore the file"
    try:
        header = safetensors_header(file)
        check_shapes({name: tuple(entry["shape"]) for name, entry in header.items()}, adapter_shapes(str(model), lora))
        tensors: dict[str, torch.Tensor] = load_file(file)
    except (OSError, SafetensorError) as cause:
        raise ValueError(f"{file} cannot be read ({cause}). {advice}") from None
    except ValueError as cause:
        raise ValueError(f"{file} does not fit {lora} on {model.name}: {cause}. {advice}") from None
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ValueError(f"{file} has weights in {name!r:.200} that are not finite numbers. {advice}")
    return tensors
