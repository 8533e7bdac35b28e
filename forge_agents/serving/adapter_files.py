"""Reads weights of a league's snapshots, which a stranger may have written: adapters in PEFT's format, and models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forge_agents.files import check_dense
from forge_agents.models import families
from forge_agents.models.resolve import read_json, safetensors_header, weight_files
from forge_agents.policy import LoRA
from forge_agents.serving._shapes import adapter_shapes, check_shapes, expected_shapes

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
    return _read(file, [file], adapter_shapes(str(model), lora), f"{lora} on {model.name}")


def read_snapshot(folder: Path, model: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a model that was trained from the one in the folder `model`.

    Checks and errors are those of `read_adapter`. Tensors that no engine computes, as of image encoders, are left out.
    """
    config = read_json(model / "config.json")

    def is_left_out(name: str) -> bool:
        return name == "lm_head.weight" or families.is_unused(name, config)  # a head that is tied

    expected = expected_shapes(str(model)) or {}
    return _read(folder, weight_files(folder), expected, model.name, is_left_out=is_left_out)


def _read(
    path: Path,
    files: Sequence[Path],
    expected: Mapping[str, tuple[int, ...]],
    target: str,
    *,
    is_left_out: Callable[[str], bool] = lambda _: False,
) -> dict[str, torch.Tensor]:
    """Return the `expected` tensors of `files`. There may be others that `is_left_out`."""
    import torch
    from safetensors import SafetensorError, safe_open

    advice = "Export it again, or restore the file"
    shapes: dict[str, tuple[int, ...]] = {}
    tensors: dict[str, torch.Tensor] = {}
    try:
        for file in files:
            check_dense(file)
            shapes |= {name: tuple(entry["shape"]) for name, entry in safetensors_header(file).items()}
        check_shapes({n: shape for n, shape in shapes.items() if n in expected or not is_left_out(n)}, expected)
        for file in files:
            with safe_open(file, framework="pt") as opened:
                names = [name for name in opened.keys() if name in expected]  # noqa: SIM118  # not a mapping
                tensors |= {name: opened.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as cause:
        raise ValueError(f"{path} cannot be read ({cause}). {advice}") from None
    except ValueError as cause:
        raise ValueError(f"{path} does not fit {target}: {cause}. {advice}") from None
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):  # other types lack functions
            raise ValueError(f"{path} has weights of type {tensor.dtype} in {name!r:.200}. {advice}")
        if not all(bound.bfloat16().isfinite() for bound in tensor.aminmax()):
            raise ValueError(f"{path} has weights in {name!r:.200} that are not finite numbers. {advice}")
    return tensors
