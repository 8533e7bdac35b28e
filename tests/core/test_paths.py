"""Paths as users write them: with a home folder and environment variables."""

import json
from pathlib import Path

import pytest
import yaml
from refusals import raises

import forge_agents as fa
from forge_agents.cli import main as cli
from forge_agents.cli.config import parse
from forge_agents.files import user_path, write_atomic
from forge_agents.jsonl import json_objects
from forge_agents.models import resolve as models
from forge_trainers.records.run_folder import RunFolder


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("UNSET", raising=False)
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


def test_home_and_variables_are_expanded(tmp_path, home):
    assert user_path("~/x") == home / "x" and user_path("$RUNS/x") == tmp_path / "runs/x"
    assert user_path("${RUNS}/$HOME") == Path(f"{tmp_path}/runs/{home}")
    assert user_path("runs/x") == Path("runs/x") and user_path(Path("~/x")) == home / "x"
    for name in ("a$b", "~x"):  # a folder that is called so
        Path(name).mkdir()
        assert user_path(name) == Path(name)


@pytest.mark.parametrize(("path", "message"), [("$UNSET/x", "variable UNSET is not set"), ("~nobody9/x", "~nobody9")])
def test_unset_variables_are_refused(path, message):
    raises(ValueError, message, user_path, path)
    raises(ValueError, message, fa.GRPOTrainer, fa.Policy("m"), out_dir=path)


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "PLAIN"])
@pytest.mark.parametrize("form", ["runs/${}", "runs/${{{}}}x", "$RUNS/${}", "${}é"])
def test_variables_with_credentials_are_no_part_of_a_path(name, form, home, monkeypatch):
    monkeypatch.setenv(name, "sk-verysecret1234567890abcd")
    raises(ValueError, f"variable {name} may hold a credential", user_path, form.format(name))


@pytest.mark.parametrize("make", [fa.GRPOTrainer, fa.SFTTrainer, fa.DPOTrainer])
def test_trainers_take_folders_in_the_home_folder(make, home):
    trainer = make(fa.Policy("m"), out_dir="~/runs/x")
    assert trainer.out_dir == home / "runs/x"
    trainer.close()


def test_run_folders_data_and_models_are_found_in_the_home_folder(home, tiny_llama, monkeypatch):
    RunFolder("~/run", {"a": 1}).close()
    assert (home / "run" / "config.yaml").exists()
    raises(Exception, str(home / "run"), fa.load_episodes, "~/run")
    write_atomic("$HOME/rows.jsonl", json.dumps({"a": 1}))
    assert [row for _, row in json_objects("~/rows.jsonl")] == [{"a": 1}]
    (home / "model").symlink_to(tiny_llama)
    monkeypatch.setenv("MODELS", str(home))
    assert models.resolve("~/model") == models.resolve("$MODELS/model") == home / "model"
    assert models.local_folder("$MODELS/model") == home / "model"


def test_settings_file_and_its_paths_are_found_in_the_home_folder(home, tmp_path):
    settings = {"env": "e", "policies": {"team": {"model": "~/m"}}, "out_dir": "$RUNS/x"}
    (home / "train.yaml").write_text(yaml.safe_dump(settings))
    run = parse(fa.RunConfig, ["~/train.yaml"], prog="x", description="d")
    (item,) = run.of_seeds(1)
    assert fa.GRPOTrainer(item.players, out_dir=item.out_dir).out_dir == tmp_path / "runs/x"
    assert [r.out_dir for r in run.of_seeds(2)] == [str(tmp_path / f"runs/x/seed-{n}") for n in (0, 1)]


def test_no_command_makes_a_folder_named_tilde(home, tmp_path):
    assert cli.main(["init", "~/mine"]) == 0 and (home / "mine/train.yaml").exists()
    words = ["bench", "--players.random", "random", "--suite", "forge/KuhnPoker-v0", "--episodes", "2"]
    assert cli.main([*words, "--out=~/bench", "--html=$RUNS/b.html"]) == 0
    assert (home / "bench").is_dir() and (tmp_path / "runs/b.html").is_file()
    assert list(Path().iterdir()) == []
