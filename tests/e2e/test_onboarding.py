"""First commands of a new user, `init` and `train`, on the whole stack with a tiny model."""

import json
import math
import os
import sys
from pathlib import Path

import pytest
from local_processes import use_local_processes

from forge_agents.cli import main as cli

SMALL = [
    "--trainer.group_size=2",
    "--trainer.groups_per_step=2",
    "--trainer.eval_every=1",
    "--trainer.eval_episodes=2",
    "--trainer.engine.enforce_eager=true",
    "--trainer.engine.kv_cache_gb=0.1",
    "--trainer.engine.threads=1",
    "--trainer.tracker=tensorboard",
]

TEMPLATES = {
    "duel": ("hero", "runs/duel", "my/Duel-v0"),
    "tools": ("keeper", "runs/warehouse", "my/Warehouse-v0"),
    "sft": ("team", "runs/guess", "my/Guess-v0"),
}
"""Policies, run folder and environment by template. The template sft uses the environment of team."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_folder_of_init_trains_from_another_folder(template, tiny_llama, tmp_path, monkeypatch, capsys):
    """From where the user stands: the modules and data are found beside the file, the run is written here."""
    monkeypatch.chdir(tmp_path)
    use_local_processes(monkeypatch)
    name, folder, env = TEMPLATES[template]
    run = Path(folder)
    assert cli.main(["init", "mine", "--template", template]) == 0
    words = ["mine/train.yaml", f"--policies.{name}.model={tiny_llama}", "--steps=1", *SMALL]
    if template == "sft":
        words += ["--warm_start.team.steps=1", "--warm_start.team.trainer.learner.threads=1"]
    assert cli.main(["train", *words]) == 0
    message = capsys.readouterr().out
    (row,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert row["step"] == 1 and math.isfinite(row["reward/mean"]) and math.isfinite(row["eval/reward"])
    assert "next   forge-agents eval mine/train.yaml" in message
    bench = f"--players.trained {run}/export --players.random random --suite my_env:{env}"
    assert f"PYTHONPATH=mine forge-agents bench {bench}" in message
    assert message.endswith(f"       forge-agents view {run}\n")
    assert (run / "export/config.json").exists() and list((run / "tensorboard").iterdir())
    assert not Path("mine/runs").exists()

    assert cli.main(["view", str(run), "--out", "page.html"]) == 0
    assert env in Path("page.html").read_text()
    if template == "sft":
        assert len((run / "warm-start/team/metrics.jsonl").read_text().splitlines()) == 1
        capsys.readouterr()
        assert cli.main(["eval", *words]) == 0
        assert " episodes, 0 failed" in capsys.readouterr().out


@pytest.mark.timeout(900)
def test_a_person_watches_the_demo(tiny_llama, tmp_path):
    """In a terminal, with a model that cannot learn it in one step: the verdict says so."""
    pexpect = pytest.importorskip("pexpect")
    words = ["demo", f"--model={tiny_llama}", "--steps=1", "--control_steps=0", "--episodes=2", "--out_dir=shown"]
    words += ["--engine.enforce_eager=true", "--engine.max_model_len=512", "--engine.kv_cache_gb=0.1"]
    child = pexpect.spawn(
        sys.executable,
        ["-m", "forge_agents.cli.main", *words],
        cwd=str(tmp_path),
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"},  # whoever runs the tests may have set others
        dimensions=(40, 100),
        encoding="utf-8",
        timeout=600,
    )
    child.str_last_chars = 5000  # a failure shows the table
    try:
        child.expect(r"Two agents of .*forge/Relay-v0.*, both played by")
        child.expect("1/1")  # the bar of the training
        child.expect("mean reward on held-out seeds")
        child.expect("trained .* did not learn")
        child.expect(r"the first step of training was done .*\d.* s after the demo began")
        child.expect("the team did NOT learn as it should. See the table")
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 1
    finally:
        child.close(force=True)
    assert (tmp_path / "shown/demo.png").stat().st_size > 10_000
    assert (tmp_path / "shown/trained/export/config.json").exists()
