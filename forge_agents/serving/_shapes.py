"""Names and shapes of the tensors in an update of an engine's weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from forge_agents.models import families
from forge_agents.models import resolve as models
from forge_agents.policy import LoRA

if TYPE_CHECKING:
    import torch


def expected_shapes(model: str) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes that an update's tensors must have, from the folder's safetensors files. None without files.

    A tied ``lm_head.weight`` is optional and left out.

    Raises:
        ModelNotFoundError: A file is incomplete or no safetensors file.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    config = models.read_json(Path(model, "config.json"))
    for path in models.weight_files(Path(model)):
        header = models.safetensors_header(path)
        shapes |= {
            name: tuple(entry["shape"]) for name, entry in header.items() if not families.is_unused(name, config)
        }
    if families.is_tied(config):
        shapes = {name: shape for name, shape in shapes.items() if families.module_name(name) != "lm_head.weight"}
    return shapes or None


def adapter_shapes(model: str, lora: LoRA) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an adapter's tensors in PEFT's layout, from the model folder's safetensors files.

    Raises:
        ValueError: The folder has no such files, or a target is no layer of the model.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    targets = adapted_layers(model, lora)
    missing = set(targets)
    for name, shape in (expected_shapes(model) or {}).items():
        layer = families.module_name(name).removesuffix(".weight")
        target = layer.rpartition(".")[2]
        if target in targets and len(shape) == 2:
            shapes[f"base_model.model.{layer}.lora_A.weight"] = (lora.rank, shape[1])
            shapes[f"base_model.model.{layer}.lora_B.weight"] = (shape[0], lora.rank)
            missing.discard(target)
    if missing:
        raise ValueError(f"{model} has no layers {sorted(missing)} for a LoRA adapter. Leave them out of its targets")
    return shapes


def adapted_layers(model: str, lora: LoRA) -> tuple[str, ...]:
    """Names of the linear layers of a model that an adapter has."""
    config = models.read_json(Path(model, "config.json"))
    return families.adapted_layers(
        lora.targets,
        fused=families.is_fused(config),
        recurrent=families.is_recurrent(config),
        latent=families.query_rank(config),
    )


def check_tensors(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]] | None) -> None:
    """Refuse an update that does not fit, before it changes the engine.

    Raises:
        ValueError: A tensor is missing, unknown, or of another shape.
    """
    if expected is not None:
        counted = {name: tensor for name, tensor in tensors.items() if name in expected or name != "lm_head.weight"}
        check_shapes({name: tuple(tensor.shape) for name, tensor in counted.items()}, expected)


def check_shapes(shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError if a tensor is missing, unknown, or of another shape."""
    missing = sorted(expected.keys() - shapes.keys())
    unknown = sorted(shapes.keys() - expected.keys())
    if missing or unknown:
        raise ValueError(
            f"the update does not fit the served model: {len(missing)} tensors are missing ({missing[:3]}), "
            f"{len(unknown)} are unknown ({unknown[:3]}). Publish under Hugging Face names"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise ValueError(f"tensor {name!r} has shape {shapes[name]}. The served model has {shape}")
