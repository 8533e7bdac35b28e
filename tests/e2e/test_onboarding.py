"""What a newcomer does first, on the whole stack with a tiny model: `init` and `train`."""

import json
import os
import sys
from pathlib import Path

import pytest

from forge_agents.cli import main as cli

SMALL = [
    "--trainer.group_size=2",
    "--trainer.groups_per_step=2",
    "--trainer.eval_every=0",
    "--trainer.engine.enforce_eager=true",
    "--trainer.engine.kv_cache_gb=0.1",
    "--trainer.engine.threads=1",
    "--trainer.log_to=tensorboard",
]


@pytest.mark.timeout(300)
def test_a_folder_of_init_trains_as_it_stands(tiny_llama, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "mine"]) == 0
    monkeypatch.chdir(tmp_path / "mine")
    words = ["train", "train.yaml", f"--policies.team.model={tiny_llama}", "--steps=1", *SMALL]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    (row,) = [json.loads(line) for line in Path("runs/guess/metrics.jsonl").read_text().splitlines()]
    assert row["step"] == 0 and 0 <= row["reward/mean"] <= 1
    assert "next   forge-agents eval train.yaml" in said
    assert "--players.trained runs/guess/export --players.random random --suite my_world:my/Guess-v0" in said
    assert said.endswith("       forge-agents view runs/guess\n")
    assert Path("runs/guess/export/config.json").exists() and list(Path("runs/guess/tensorboard").iterdir())


@pytest.mark.timeout(300)
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
        timeout=240,
    )
    child.str_last_chars = 5000  # a failure shows the table
    try:
        child.expect(r"Two seats of .*forge/Relay-v0.*, both played by")
        child.expect("1/1")  # the bar of the training
        child.expect("mean reward on held-out seeds")
        child.expect("trained .* did not learn")
        child.expect("the team did NOT learn as it should; see the table")
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 1
    finally:
        child.close(force=True)
    assert (tmp_path / "shown/demo.png").stat().st_size > 10_000
    assert (tmp_path / "shown/trained/export/config.json").exists()
