"""Checkpoints as Hugging Face models: the weights that were saved, and errors that say what there is."""

import dataclasses
import json
import shutil

import pytest
import torch
import yaml
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file

from forge_agents import LoRA, Policy
from forge_agents.cli import main as cli
from forge_agents.errors import ModelNotFoundError, RunFolderError
from forge_agents.models.fingerprint import sampled_hash
from forge_agents.testing import tiny_model
from forge_trainers.learner import checkpoint
from forge_trainers.learner.core import LearnerCore
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.run.export import export_checkpoint


@pytest.fixture(scope="module")
def learned(tiny_llama):
    return LearnerCore(LearnerPlan(model=str(tiny_llama), lora=LoRA(rank=2), lr=1e-2, threads=1))


@pytest.fixture
def run(learned, random_batch, tmp_path):
    """Two checkpoints. The older one had the higher held-out reward. Its model is ``step-000001.safetensors``."""
    for step, score in ((1, 0.9), (2, 0.4)):
        folder = tmp_path / "checkpoints" / f"step-{step:06d}"
        learned.train_step(random_batch(seed=step))
        learned.save(folder / "hero")
        learned.export(tmp_path / f"model-{step}")
        mark = {"step": step, "policies": ["hero"], "score": score}
        (folder / "experiment.json").write_text(json.dumps(mark))
    policy = dataclasses.asdict(Policy(learned.config.model, name="hero", lora=learned.config.lora))
    policy["lora"]["targets"] = list(policy["lora"]["targets"])
    settings = {"policies": {"hero": {name: policy[name] for name in ("model", "name", "lora")}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


def same(one, other):
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    return first.keys() == second.keys() and all(bool((second[name] == value).all()) for name, value in first.items())


def test_score_of_a_run_that_measures_exploitability_is_named_so(run, capsys):
    settings = yaml.safe_load((run / "config.yaml").read_text()) | {"trainer": {"exploitability_samples": 200}}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    for step, score in ((1, -0.25), (2, -0.125)):
        mark = {"step": step, "policies": ["hero"], "score": score}
        (run / f"checkpoints/step-{step:06d}/experiment.json").write_text(json.dumps(mark))
    export_checkpoint(run, say=print)
    assert "checkpoint  step-000002, exploitability 0.1250" in capsys.readouterr().out


def test_the_best_and_the_newest_are_the_weights_of_their_steps(run, capsys, caplog, monkeypatch):
    monkeypatch.setattr(LearnerCore, "_state", None)  # an export reads the weights alone
    best, newest = export_checkpoint(run), export_checkpoint(run, checkpoint="newest")
    assert best.name == "export-step-000001" and same(best, run / "model-1")
    assert newest.name == "export-step-000002" and same(newest, run / "model-2") and not same(best, newest)
    assert (best / "adapter/adapter_model.safetensors").exists()
    assert cli.main(["export", str(run), "--checkpoint", "step-000002", "--out", str(run / "mine")]) == 0
    assert same(run / "mine", newest)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    out = capsys.readouterr().out
    assert "checkpoint  step-000002, held-out reward 0.4000" in out
    assert f"next   forge-agents serve {run / 'mine'}" in out


@pytest.mark.parametrize("dtypes", ["float32 bfloat16", "bfloat16 bfloat16", "bfloat16 float32"])
@pytest.mark.parametrize("lora", [None, LoRA(rank=2)])
def test_export_on_any_machine_is_rounded_as_that_of_the_run(lora, dtypes, random_batch, tmp_path, monkeypatch):
    dtype, stored = dtypes.split()
    monkeypatch.setattr("forge_trainers.learner.config.has_fast_bfloat16", lambda: dtype == "float32")
    model = tiny_model(tmp_path / "start", dtype=stored)
    plan = LearnerPlan(model=str(model), lora=lora, compute_dtype=dtype, seed=7, lr=1e-6, threads=1)
    learner, folder = LearnerCore(plan), tmp_path / "checkpoints/step-000001"
    learner.train_step(random_batch(seed=1))
    learner.save(folder / "hero")
    learner.export(tmp_path / "export")
    assert not same(tmp_path / "export", model)
    mark = {"step": 1, "policies": ["hero"], "compute_dtypes": {"hero": dtype}}
    (folder / "experiment.json").write_text(json.dumps(mark))
    policy = {"model": str(model), "name": "hero", "lora": None if lora is None else {"rank": 2}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"policies": {"hero": policy}, "trainer": {"seed": 7}}))
    assert same(export_checkpoint(tmp_path), tmp_path / "export")


@pytest.mark.parametrize("trainer", [[1], {"seed": -1}, {"seed": "x"}])
def test_settings_that_no_run_writes_are_refused(run, trainer):
    settings = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**settings, "trainer": trainer}))
    with pytest.raises(RunFolderError, match="or other values than a run writes"):
        export_checkpoint(run)


def test_an_export_downloads_no_model_that_a_run_names(run, monkeypatch):
    monkeypatch.setattr("forge_agents.models.resolve._snapshot", lambda *_: pytest.fail("a download"))
    (run / "config.yaml").write_text("policies: {hero: {model: stranger/model}}")
    with pytest.raises(ModelNotFoundError, match="is not on this machine"):
        export_checkpoint(run)


def test_adapter_is_not_exported_on_a_changed_start_model(run, tiny_llama, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(tiny_llama, base)
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["policies"]["hero"]["model"] = str(base)
    (run / "config.yaml").write_text(yaml.safe_dump({**settings, "weights": {"hero": sampled_hash(base)}}))
    assert same(export_checkpoint(run, out=run / "good"), run / "model-1")
    (run / "config.yaml").write_text(yaml.safe_dump({**settings, "weights": [1]}))
    assert same(export_checkpoint(run, out=run / "without-hashes"), run / "model-1")
    (run / "config.yaml").write_text(yaml.safe_dump({**settings, "weights": {"hero": sampled_hash(base)}}))
    weights = load_file(base / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunFolderError, match=r"base, the start model of policy hero, has changed since the run"):
        export_checkpoint(run, out=run / "bad")
    assert not (run / "bad").exists()


def test_export_of_missing_or_damaged_checkpoints_is_refused(run, tmp_path):
    with pytest.raises(RunFolderError, match="'step-9'. It has best, newest, step-000002, step-000001"):
        export_checkpoint(run, checkpoint="step-9")
    with pytest.raises(RunFolderError, match="exists already"):
        export_checkpoint(run, out=run / "model-1")
    with pytest.raises(RunFolderError, match=r"config\.yaml cannot be read"):
        export_checkpoint(tmp_path / "nothing")
    mark = run / "checkpoints/step-000001/experiment.json"
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "files": {"hero/__0_0.distcp": [1, 1]}}))
    with pytest.raises(RunFolderError, match="is damaged: hero/__0_0.distcp has [0-9]+ bytes, 1 were written"):
        export_checkpoint(run)
    (run / "config.yaml").write_text("env: x")
    with pytest.raises(RunFolderError, match="names no policies"):
        export_checkpoint(run)
    (run / "config.yaml").write_text("policies: {villain: {model: x}}")
    with pytest.raises(RunFolderError, match="has no policy 'hero'"):
        export_checkpoint(run, checkpoint="newest")


def test_a_private_file_does_not_become_part_of_an_export(tiny_llama, tmp_path):
    """The model's folder is a stranger's: a link in it names a file of the user."""
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    (tmp_path / "id_rsa").write_text("secret")
    (folder / "README.md").symlink_to(tmp_path / "id_rsa")
    with pytest.raises(ModelNotFoundError, match="README.md is a link out of the model's folder"):
        checkpoint.export((), folder, tmp_path / "export", dtype=torch.float32)
    assert not (tmp_path / "export").exists()


def test_an_export_has_no_files_of_a_folder_that_takes_the_models_place(tiny_llama, tmp_path, monkeypatch):
    folder, private, write = (
        shutil.copytree(tiny_llama, tmp_path / "model"),
        tmp_path / "private",
        save_torch_state_dict,
    )
    shutil.copytree(tiny_llama, private)
    (private / "README.md").write_text("secret")
    (folder / "notes.md").write_text("not of a model")

    def slow_write(*args, **options):
        write(*args, **options)
        folder.rename(tmp_path / "old")
        folder.symlink_to(private)

    monkeypatch.setattr(checkpoint, "save_torch_state_dict", slow_write)
    exported = checkpoint.export([("w", torch.ones(2))], folder, tmp_path / "export", dtype=torch.float32)
    names = {path.name for path in exported.iterdir()}
    assert {"config.json", "tokenizer.json"} <= names and not names & {"README.md", "notes.md"}


def test_a_run_with_links_out_of_it_is_not_exported(run, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (run / "checkpoints").rename(elsewhere / "checkpoints")
    (run / "checkpoints").symlink_to(elsewhere / "checkpoints")
    with pytest.raises(RunFolderError, match="checkpoints is a link"):
        export_checkpoint(run)
    (run / "checkpoints").unlink()
    (elsewhere / "checkpoints").rename(run / "checkpoints")
    (elsewhere / "linked").symlink_to(run)  # the run folder itself may be a link
    assert same(export_checkpoint(elsewhere / "linked"), run / "model-1")
