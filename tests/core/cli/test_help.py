"""The help of every command, what commands say at the end, and how fast all that starts."""

import functools
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from threading import Lock
from types import SimpleNamespace

import pytest

import forge_agents as fa
from forge_agents.cli import main as cli
from forge_agents.cli.registry import COMMANDS, EXAMPLES, GROUPS
from forge_trainers.records.run_folder import FitResult


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_every_command_has_help_and_valid_examples(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main([command, "--help"])
    output, _, examples = capsys.readouterr().out.partition("\nexamples:\n")
    assert exit_.value.code == 0 and f"usage: forge-agents {command}" in output
    assert EXAMPLES[command] and all(example in examples for example in EXAMPLES[command])
    assert f"forge-agents {command}" in examples
    for option in re.findall(r"--([\w.-]+)", " ".join(words.partition(" -- ")[0] for words in EXAMPLES[command])):
        group = option.partition(".")[0]
        assert f"--{option}" in output or group in ("players", "policies"), option
        assert f"--{group}" in output


def test_every_command_is_in_one_group_of_the_help(capsys):
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(COMMANDS) and len(listed) <= 15
    assert cli.main([]) == cli.main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(f"  {name}" in output for name in listed) and max(map(len, output.splitlines())) <= 100


@pytest.mark.parametrize(("command", "lines"), [("train", 120), ("eval", 60), ("simulate", 110), ("sft", 90)])
def test_help_shows_the_main_settings_and_help_all_the_rest(command, lines, capsys):
    texts = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            cli.main([command, flag])
        texts.append(capsys.readouterr().out)
    short, full = (set(re.findall(r"^  (--[a-z][\w.-]*)", text, re.MULTILINE)) for text in texts)
    assert texts[0].count("\n") < lines
    assert "[--SETTING VALUE ...]" in texts[0].splitlines()[0] and "==SUPPRESS==" not in texts[0]
    assert f"forge-agents {command} --help-all" in texts[0]
    assert len(short) <= 50 and short - {"--send_key", "--trust_host"} < full


def test_short_help_explains_a_default_of_none(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert 'eq. 11). None (default) uses the value of the loss: 3 for "dapo" and 0 for the others --trainer' in text


def test_benchmark_prints_the_next_command(tmp_path, capsys):
    words = ["bench", "--suite", "forge/KuhnPoker-v0", "--episodes", "2", "--out_dir", str(tmp_path)]
    assert cli.main([*words, "--players.a", "random", "--limits.max_episodes", "1"]) == 1
    assert f"next   forge-agents {' '.join(words)} --players.a random" in capsys.readouterr().out
    assert cli.main([*words, "--players.a", "random"]) == 0
    output = capsys.readouterr().out
    assert f"next   forge-agents bench merge {tmp_path}/board.json OTHER.json --html all.html" in output


class Trained:
    """Stands for a trainer that has been there."""

    def __init__(self, policies, *settings):
        *_, self.out_dir, mesh = settings
        assert mesh == fa.Hosts()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def fit(self, *given, **more):
        folder = Path(self.out_dir)
        return FitResult(steps=3, metrics=[], out_dir=folder, export=folder / "export", curve=folder / "curve.png")


def test_training_prints_the_next_commands(monkeypatch, tmp_path, capsys):
    for trainer in ("GRPOTrainer", "SFTTrainer"):
        monkeypatch.setattr(fa, trainer, Trained)
    run = tmp_path / "run"
    (run / "export/hero").mkdir(parents=True)  # a folder for each policy where several learned
    words = ["--env", "forge/Relay-v0", "--policies.hero.model", "m", "--policies.idle.model", "m"]
    words += ["--policy_mapping.asker", "hero", "--policy_mapping.answerer", "idle", "--out_dir", str(run)]
    assert cli.main(["train", *words]) == 0
    assert capsys.readouterr().out.splitlines()[3:] == [
        f"next   forge-agents eval {' '.join(words)}",
        f"       forge-agents bench --players.trained {run}/export/hero --players.random random --suite forge/Relay-v0",
        f"       forge-agents view {run}",
    ]
    assert cli.main(["sft", "--data", "d", "--policy.model", "m", "--policy.name", "hero", "--out_dir", str(run)]) == 0
    assert f"next   forge-agents train CONFIG.yaml --policies.hero.model {run}/export" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["run $(id)", "run; id"])
def test_suggested_commands_quote_the_names_of_folders(name, monkeypatch, tmp_path, capsys):
    for trainer in ("GRPOTrainer", "SFTTrainer"):
        monkeypatch.setattr(fa, trainer, Trained)
    run = tmp_path / name
    (run / "export").mkdir(parents=True)
    (run / "export/config.json").touch()
    monkeypatch.setattr("forge_trainers.run.export.export_checkpoint", lambda *_, **__: run / "export")
    policy = ["--policies.hero.model", "m", "--out_dir", str(run)]
    calls = (
        ["export", str(run)],
        ["train", "--env", "forge/KuhnPoker-v0", *policy],
        ["init", str(tmp_path / "new" / name)],
    )
    calls += (["sft", "--data", "d", "--policy.model", "m", "--out_dir", str(run)],)
    for call in calls:
        assert cli.main(call) == 0
        output = capsys.readouterr().out
        commands = [line[7:] for line in output.splitlines() if line.startswith(("next ", "       forge"))]
        assert commands and any(name in word for command in commands for word in shlex.split(command)), output
        assert not any(name in re.sub(r"'[^']*'", "", command) for command in commands), output


def test_training_of_a_policy_per_agent_suggests_a_team_benchmark(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(fa, "GRPOTrainer", Trained)
    for name in ("asker", "answerer"):
        (tmp_path / "export" / name).mkdir(parents=True)
    words = ["--env", "forge/Relay-v0", "--policies.asker.model", "m", "--policies.answerer.model", "m"]
    words += ["--policy_mapping.asker", "asker", "--policy_mapping.answerer", "answerer", "--out_dir", str(tmp_path)]
    assert cli.main(["train", *words]) == 0
    assert f"--players.trained {tmp_path} --players.random random" in capsys.readouterr().out


def test_several_seeds_train_separately_and_suggest_cross_play(monkeypatch, tmp_path, capsys):
    made = []

    class Seen(Trained):
        def __init__(self, policies, reward, config, out_dir, mesh):
            super().__init__(policies, reward, config, out_dir, mesh)
            reward.seen.append(config.seed)
            made.append((reward.seen, config.seed, Path(out_dir).name))

    monkeypatch.setattr(fa, "GRPOTrainer", Seen)
    monkeypatch.setattr(sys.modules[__name__], "LEARNS", SimpleNamespace(seen=[]), raising=False)
    words = ["train", "--env", "forge/Relay-v0", "--policies.hero.model", "m", "--out_dir", str(tmp_path)]
    words += ["--trainer.seed", "4", "--reward", f"{__name__}:LEARNS"]
    assert cli.main([*words, "--seeds", "2"]) == 0
    assert made == [([4], 4, "seed-4"), ([5], 5, "seed-5")]
    models = f"{tmp_path}/seed-4/export {tmp_path}/seed-5/export"
    assert f"next   forge-agents bench forge/Relay-v0 --cross_play {models}\n" in capsys.readouterr().out
    monkeypatch.setattr(sys.modules[__name__], "LEARNS", Lock())
    assert cli.main([*words, "--seeds", "2"]) == 1 and "cannot be copied for each seed" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main([*words, "--seeds", "0"])


def test_list_prints_one_line_per_environment_to_a_pipe(capsys):
    from forge_agents.envs import registry

    assert cli.main(["list"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    listed = [line[0] for line in lines if len(line) == 5]
    assert listed == registry.list_envs()
    assert ["forge/KuhnPoker-v0", "2p, zero-sum, hidden-information", "3", "", "oracle"] in lines
    assert ["forge/Library-v0", "2p, cooperative, hidden-information, tool", "", "6", "oracle"] in lines
    assert cli.main(["list", "--tag", "zero-sum"]) == 0
    tagged = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    zero_sum = [line for line in lines if len(line) == 5 and "zero-sum" in line[1].split(", ")]
    assert [line for line in tagged if len(line) == 5] == zero_sum
    assert {line[0]: line[4] for line in zero_sum}["forge/LeducPoker-v0"] == ""


@pytest.mark.parametrize("words", [["-c", "import forge_agents"], ["-m", "forge_agents.cli.main", "--help"]])
def test_startup_is_fast(words):
    """Help takes no longer than importing one common library: processor time, best of three."""

    assert cost(*words) < 4 * cost("-c", "import numpy")


def test_help_imports_no_heavy_library():
    code = """
import contextlib, io, sys
from forge_agents.cli import main as cli
with contextlib.redirect_stdout(io.StringIO()):
    for command in cli.COMMANDS:
        with contextlib.suppress(SystemExit):
            cli.main([command, "--help"])
print({"torch", "vllm", "monarch", "transformers", "scipy", "sklearn", "fastapi"} & sys.modules.keys())
"""
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300)
    assert result.stdout == "set()\n"


@functools.cache
def cost(*words):
    took = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], check=True, capture_output=True, timeout=300)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(took)
