"""Models with experts in 4 bits, and their copies for training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_agents.cli.main import main
from forge_agents.errors import ModelNotFoundError
from forge_trainers.learner.core import LearnerCore
from forge_trainers.learner.mxfp4 import write_bfloat16
from forge_trainers.learner.plan import LearnerPlan

NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""Magnitudes of a number in 4 bits (OCP Microscaling Formats 1.0, table 5). The highest bit is the sign."""


def in_four_bits(model: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Write a copy of a tiny gpt-oss with random experts in MXFP4. Returns their values, in the layout of bfloat16."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    weights = {name: weight.to(torch.bfloat16) for name, weight in load_file(folder / "model.safetensors").items()}
    generator, values = torch.Generator().manual_seed(0), {}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        codes = torch.randint(0, 16, (experts, outputs, inputs // 32, 32), generator=generator)
        exponents = torch.randint(-6, -2, (experts, outputs, inputs // 32), generator=generator)
        signed = torch.where(codes >= 8, -NUMBERS[codes % 8], NUMBERS[codes % 8]) * 2.0 ** exponents[..., None]
        values[name] = signed.flatten(2).transpose(1, 2)
        weights[name + "_blocks"] = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)  # the low half first
        weights[name + "_scales"] = (exponents + 127).to(torch.uint8)
    # as in gpt-oss, blocks and scales may be in different files
    scales = {name: weights.pop(name) for name in list(weights) if name.endswith("_scales")}
    for number, part in enumerate((weights, scales), 1):
        save_file(part, folder / f"model-0000{number}-of-00002.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    return values


def test_a_copy_in_bfloat16_has_the_values_of_four_bits_and_learns(tiny_models, random_batch, tmp_path, capsys):
    quantized, copy = tmp_path / "quantized", tmp_path / "copy"
    values = in_four_bits(tiny_models(family="gpt_oss", dtype="bfloat16"), quantized)
    assert len(values) == 4
    with pytest.raises(ValueError, match=r"stored in 4 bits \(MXFP4\).*forge-agents list --models MODEL --bfloat16"):
        LearnerCore(LearnerPlan(model=str(quantized), threads=1))
    assert main(["list", "--models", str(quantized), "--bfloat16", str(copy)]) == 0
    assert capsys.readouterr().out.strip() == str(copy)
    written = load_file(copy / "model.safetensors")
    for name, value in values.items():
        assert torch.equal(written[name].float(), value), name
    assert not [name for name in written if name.endswith(("_blocks", "_scales"))]
    assert "quantization_config" not in json.loads((copy / "config.json").read_text())
    core = LearnerCore(LearnerPlan(model=str(copy), threads=1))
    assert core.train_step(random_batch())["grad_norm"] > 0


def test_models_without_all_of_their_parts_are_refused(tiny_models, tmp_path):
    with pytest.raises(ModelNotFoundError, match="no weights in 4 bits"):
        write_bfloat16(tiny_models(family="gpt_oss"), tmp_path / "copy")
    in_four_bits(tiny_models(family="gpt_oss", dtype="bfloat16"), tmp_path / "quantized")
    (tmp_path / "quantized" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"lacks model\.layers\.0\.mlp\.experts\.\w+_scales"):
        write_bfloat16(tmp_path / "quantized", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
