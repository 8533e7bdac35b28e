import asyncio
import json

import numpy as np
import pytest

import forge_agents as fa
from forge_agents.cli import main as cli
from forge_agents.errors import RunFolderError
from forge_agents.types import Trajectory
from forge_trainers.records.run_folder import RunFolder, verifier_history
from forge_trainers.run.checkpoints import Checkpoints
from forge_verifiers import Gate


def played(seed):
    rng = np.random.default_rng(seed)
    infos = [{"votes": rng.random(4).tolist()} for _ in range(32)]
    return [
        Trajectory(agent="a", policy="p", turns=(), env_id="t", seed=seed * 10 + k // 8, info=info)
        for k, info in enumerate(infos)
    ]


def ensemble():
    return fa.Ensemble([fa.Rule(lambda t, k=k: t.info["votes"][k], name=f"judge{k}", family="x") for k in range(4)])


@pytest.fixture
def run(tmp_path):
    """A run of three steps with a checkpoint after the second."""
    folder, reward = RunFolder(tmp_path, {}), ensemble()
    for step in range(3):
        reward.score(played(step))
        folder._append("metrics.jsonl", [{"step": step, "reward/mean": step / 10}])
        folder.keep_verifiers(step, reward)
        if step == 1:
            asyncio.run(Checkpoints(tmp_path / "checkpoints", keep=1, parts={"reward": reward}).save(2, {}))
    folder.close()
    return tmp_path


def test_every_step_is_kept_with_its_reward(run):
    history = verifier_history(run)
    assert [(s.step, s.report.version, s.reward) for s in history] == [(0, 1, 0.0), (1, 2, 0.1), (2, 3, 0.2)]
    assert history[-1].report.verifiers[0].family == "x"
    assert history[-1].report.evidence.scores.shape == (64, 4) and history[0].report.evidence is None


def test_a_resumed_run_forgets_the_steps_it_repeats(run):
    folder = RunFolder(run, {})
    folder.rewind(0)
    folder.close()
    assert [s.step for s in verifier_history(run)] == [0]


def test_an_ensemble_within_a_reward_is_found(tmp_path):
    inner, folder = ensemble(), RunFolder(tmp_path, {})
    reward = 0.9 * Gate(fa.Rule(lambda t: True, name="check"), inner) + 0.1 * fa.Rule(lambda t: 1.0, name="one")
    reward(played(0))
    folder.keep_verifiers(0, reward)
    asyncio.run(Checkpoints(tmp_path / "checkpoints", keep=1, parts={"reward": reward}).save(1, {}))
    folder.close()
    (result,) = verifier_history(tmp_path)
    assert [v.name for v in result.report.verifiers] == [v.name for v in inner.verifiers]
    assert result.report.evidence.posterior().tobytes() == inner.report().evidence.posterior().tobytes()


def test_a_reward_that_reports_nothing_leaves_no_log(tmp_path):
    class Other:
        def report(self):
            return "fine"

    folder = RunFolder(tmp_path, {})
    for reward in (fa.EnvReward(), len, Other()):
        folder.keep_verifiers(0, reward)
    folder.close()
    assert not (tmp_path / "verifiers.jsonl").exists()


def test_without_a_checkpoint_there_are_numbers_and_no_score_rows(run):
    (run / "checkpoints/step-000002/experiment.json").unlink()
    assert verifier_history(run)[-1].report.evidence is None


def test_the_checkpoint_of_other_verifiers_is_left_out(run):
    rows = [json.loads(line) for line in (run / "verifiers.jsonl").read_text().splitlines()]
    rows[-1]["verifiers"][0]["name"] = "renamed"
    (run / "verifiers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert verifier_history(run)[-1].report.evidence is None


def test_folder_without_verifiers_is_an_error(tmp_path):
    with pytest.raises(RunFolderError, match="is not a run folder"):
        verifier_history(tmp_path)
    RunFolder(tmp_path, {}).close()
    with pytest.raises(RunFolderError, match=r"has no verifiers.*verifiers\.jsonl"):
        verifier_history(tmp_path)
    (tmp_path / "verifiers.jsonl").write_text("")
    with pytest.raises(RunFolderError, match="no step"):
        verifier_history(tmp_path)
    (tmp_path / "verifiers.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(RunFolderError, match="not a report"):
        verifier_history(tmp_path)


def test_the_command_prints_the_table_and_writes_the_page(run, capsys):
    assert cli.main(["view", "--verifiers", str(run)]) == 0
    out = capsys.readouterr().out
    assert "judge3" in out and "version 3" in out and "verifiers.html" in out
    text = (run / "verifiers.html").read_text()
    assert "judge3" in text and "Calibration" in text
    assert cli.main(["view", "--verifiers", str(run), "--out", str(run / "a/b.html")]) == 0
    assert (run / "a/b.html").exists()


def test_the_page_is_not_written_through_a_link(run, tmp_path, capsys):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (run / "verifiers.html").symlink_to(victim)
    assert cli.main(["view", "--verifiers", str(run)]) == 1
    assert victim.read_text() == "precious"
    assert "verifiers.html is a file of another program, so it is not replaced" in capsys.readouterr().err
    (run / "verifiers.html").unlink()
    own = tmp_path / "own.html"
    assert [cli.main(["view", "--verifiers", str(run), "--out", str(own)]) for _ in range(2)] == [0, 0]
    (run / "verifiers.html").symlink_to(own)
    own.write_text(written := own.read_text() + "\n")
    assert cli.main(["view", "--verifiers", str(run)]) == 0
    assert own.read_text() == written and "judge3" in (run / "verifiers.html").read_text()


@pytest.mark.parametrize(
    ("place", "value", "shown"),
    [
        ("combiner", "\x1b]52;c;eA==\x07", "combiner \N{REPLACEMENT CHARACTER}]52"),
        ("version", "\x1b[2J", r"version is '\x1b[2J', and int is expected"),
        ("class_balance", 10**400, "not a report"),
        ("verifiers/rows", "[link=http://evil]x[/link]", "rows is '[link=http://evil]x[/link]', and int is expected"),
        ("verifiers/tpr", "x", "tpr is 'x', and float is expected"),
        ("verifiers/family", 3, "family is 3, and str | None is expected"),
    ],
)
def test_odd_values_of_a_strangers_report_are_escaped_or_refused(run, capsys, place, value, shown):
    lines = [json.loads(line) for line in (run / "verifiers.jsonl").read_text().splitlines()]
    row = lines[-1]["verifiers"][0] if "/" in place else lines[-1]
    row[place.rpartition("/")[2]] = value
    (run / "verifiers.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert cli.main(["view", "--verifiers", str(run)]) == (place != "combiner")
    said = "".join(capsys.readouterr())
    assert shown in said and not {"\x1b", "\x07"} & set(said)


def test_the_command_says_where_there_are_no_verifiers(tmp_path, capsys):
    RunFolder(tmp_path, {}).close()
    assert cli.main(["view", "--verifiers", str(tmp_path)]) == 1
    assert "has no verifiers" in capsys.readouterr().err
