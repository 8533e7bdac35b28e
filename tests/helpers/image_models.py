"""A tiny Qwen3.5 checkpoint with an image encoder and a draft model, as published ones have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 2,
          "out_hidden_size": 128, "num_position_embeddings": 4}  # fmt: skip


def with_images(text_model: Path, folder: Path) -> Path:
    """Write a copy of a tiny Qwen3.5 for text, dense or a mixture, to `folder`, as a part of a model with images."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    shutil.copytree(text_model, folder)
    text = json.loads((text_model / "config.json").read_text())
    architecture = text.pop("architectures")[0].replace("ForCausalLM", "ForConditionalGeneration")
    family = text["model_type"].removesuffix("_text")
    config = {"architectures": [architecture], "model_type": family, "text_config": text,
              "vision_config": VISION | {"model_type": f"{family}_vision"},
              "tie_word_embeddings": text["tie_word_embeddings"],
              "image_token_id": 261, "video_token_id": 262, "vision_start_token_id": 263}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    encoder = Qwen3_5VisionModel(Qwen3_5VisionConfig(**VISION)).state_dict()
    tensors = {f"model.visual.{name}": tensor.to(getattr(torch, text["dtype"])) for name, tensor in encoder.items()}
    for name, tensor in load_file(text_model / "model.safetensors").items():
        tensors[name.replace("model.", "model.language_model.", 1)] = tensor
    tensors["mtp.norm.weight"] = torch.ones(128)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
