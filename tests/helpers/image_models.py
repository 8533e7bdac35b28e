"""Tiny checkpoints with an image encoder, as published ones of Qwen3.5 and Gemma 3 have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 2,
          "out_hidden_size": 128, "num_position_embeddings": 4}  # fmt: skip
GEMMA_VISION = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "image_size": 8,
                "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 2}  # fmt: skip


def with_images(text_model: Path, folder: Path, *, published: bool = False) -> Path:
    """Write a copy of a tiny Qwen3.5 or Gemma 3 for text to `folder`, as a part of a model with images.

    The names of Gemma 3 are those of transformers 5 or of the `published` models. Qwen3.5 has the same in both.
    """
    shutil.copytree(text_model, folder)
    text = json.loads((text_model / "config.json").read_text())
    architecture = text.pop("architectures")[0].replace("ForCausalLM", "ForConditionalGeneration")
    family = text["model_type"].removesuffix("_text")
    config = {"architectures": [architecture], "model_type": family, "text_config": text,
              "tie_word_embeddings": text["tie_word_embeddings"]}  # fmt: skip
    torch.manual_seed(0)
    if family == "gemma3":
        del text["tie_word_embeddings"]  # which transformers ignores there
        config |= {"vision_config": GEMMA_VISION, "mm_tokens_per_image": 4, "image_token_index": 261,
                   "boi_token_index": 262, "eoi_token_index": 263}  # fmt: skip
        encoder = _gemma_encoder(config)
    else:
        config |= {"vision_config": VISION | {"model_type": f"{family}_vision"},
                   "image_token_id": 261, "video_token_id": 262, "vision_start_token_id": 263}  # fmt: skip
        encoder = _qwen_encoder() | {"mtp.norm.weight": torch.ones(128)}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.to(getattr(torch, text["dtype"])) for name, tensor in encoder.items()}
    for name, tensor in load_file(text_model / "model.safetensors").items():
        tensors[name.replace("model.", "model.language_model.", 1)] = tensor
    if published and family == "gemma3":
        tensors = {_published(name): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _qwen_encoder() -> dict[str, torch.Tensor]:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    encoder = Qwen3_5VisionModel(Qwen3_5VisionConfig(**VISION)).state_dict()
    return {f"model.visual.{name}": tensor for name, tensor in encoder.items()}


def _gemma_encoder(config: dict[str, object]) -> dict[str, torch.Tensor]:
    from transformers import Gemma3Config, Gemma3Model

    tensors = Gemma3Model(Gemma3Config(**config)).state_dict()
    return {f"model.{name}": tensor for name, tensor in tensors.items() if not name.startswith("language_model.")}


def _published(name: str) -> str:
    """Name of a tensor in published models of Gemma 3."""
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    name = name.removeprefix("model.").replace("language_model.", "language_model.model.", 1)
    return name.replace("vision_tower.", "vision_tower.vision_model.", 1)
