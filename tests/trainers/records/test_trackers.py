import logging
import math
import os
import posixpath
import re
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest

from forge_agents.errors import ForgeError, MissingExtraError, RunFolderError, StallError
from forge_trainers.offline.config import SFTConfig
from forge_trainers.records import trackers
from forge_trainers.records.run_folder import RunFolder
from forge_trainers.rl.config import GRPOConfig


class FakeRun:
    def __init__(self, given):
        self.given, self.rows, self.finished = given, [], False
        self.id = given["id"] or "abc"

    def define_metric(self, *names, **options):
        self.metric = names, options

    def log(self, row):
        self.rows.append(row)

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    """Weights & Biases, without it."""
    fake = types.ModuleType("wandb")
    fake.runs = []
    fake.init = lambda **given: fake.runs.append(FakeRun(given)) or fake.runs[-1]
    fake.__spec__ = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return fake


@pytest.mark.parametrize("folder", ["wandb", ".wandb"])  # W&B takes either
def test_wandb_settings_of_the_current_folder_choose_no_server_or_team(folder, wandb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / folder).mkdir()
    settings = tmp_path / folder / "settings"
    for line in ("base_url = http://stranger.example", "https_proxy: http://stranger.example", "Entity = stranger"):
        settings.write_text(f"[default]\nproject = mine\n{line}\n")
        with pytest.raises(ForgeError, match=r"sets .*send your key or run where it chooses"):
            RunFolder(tmp_path / "run", {}, tracker="wandb")
    assert wandb.runs == []
    settings.write_text("[default]\n\n# of `wandb init`\nproject = mine\nmode = offline\n")
    RunFolder(tmp_path / "run", {}, tracker="wandb").close()
    settings.write_text("[default]\nentity = stranger\nproject = mine\n")
    monkeypatch.setenv("WANDB_ENTITY", "mine")  # W&B prefers it
    RunFolder(tmp_path / "run", {}, tracker="wandb").close()


@pytest.mark.parametrize("text", ["../../elsewhere", "", "a\n", "x" * 10_000, "a/b"])
def test_id_of_a_tracker_that_no_tracker_wrote_is_refused(text, wandb, tmp_path):
    (tmp_path / "wandb.id").write_text(text)
    with pytest.raises(ForgeError, match=r"wandb.id holds .*Delete the file to start new curves"):
        RunFolder(tmp_path, {}, tracker="wandb")


def test_pipe_that_an_id_names_as_its_original_is_not_opened(wandb, tmp_path):
    (tmp_path / "trap").mkdir()
    os.mkfifo(tmp_path / "trap" / "wandb.id")  # opening it would wait for ever
    run = tmp_path / "run"
    run.mkdir()
    (run / "wandb.id").write_text(f"abc\n{tmp_path / 'trap'}")
    RunFolder(run, {}, tracker="wandb").close()
    assert wandb.runs[-1].given["id"] == "abc"


def test_resumed_run_continues_its_curves_in_wandb(wandb, tmp_path):
    for step in range(2):
        run = RunFolder(tmp_path / "guess", {"trainer": {"seed": 3}}, tracker="wandb")
        run.log(step, {"reward/mean": 0.5})
        run.close()
    first, second = wandb.runs
    assert first.given["id"] is None and second.given["id"] == "abc" and second.given["resume"] == "allow"
    assert first.given["name"] == "guess" and first.given["project"] == "forge-agents"
    assert first.given["config"] == {"trainer": {"seed": 3}}
    assert first.rows == [{"step": 0, "reward/mean": 0.5}] and second.rows == [{"step": 1, "reward/mean": 0.5}]
    assert first.finished and first.metric == (("*",), {"step_metric": "step"})
    assert not (tmp_path / "guess/tensorboard").exists()
    assert [row["step"] for row in run.metrics()] == [0, 1]  # whatever a tracker does


def test_copied_run_has_curves_of_its_own_and_a_moved_one_continues(wandb, tmp_path, caplog):
    first, copied, moved = (tmp_path / name for name in ("first", "copied", "moved"))

    def opened(folder):
        RunFolder(folder, {}, tracker="wandb").close()
        return wandb.runs[-1].given["id"]

    assert opened(first) is None
    shutil.copytree(first, copied)
    init = wandb.init
    wandb.init = lambda **given: init(**given | {"id": given["id"] or "def"})  # W&B chooses another id
    assert opened(copied) == "def" and f"{copied} is a copy of {first}: new curves begin" in caplog.text
    assert opened(first) == "abc" and opened(copied) == "def"
    first.rename(moved)
    assert opened(moved) == "abc" and opened(moved) == "abc"
    (tmp_path / "link").symlink_to(moved)
    assert opened(tmp_path / "link") == "abc" and opened(moved) == "abc"
    (moved / "wandb.id").write_text("abc")  # as earlier versions wrote it
    assert opened(moved) == "abc"


def test_a_tracker_that_fails_costs_its_curve_and_not_the_run(wandb, tmp_path, caplog):
    run = RunFolder(tmp_path, {}, tracker="wandb")

    def refuse(row):
        raise ConnectionError("no route")

    wandb.runs[0].log = refuse
    with caplog.at_level(logging.WARNING):
        run.log(0, {"x": 1.0})
    assert "wandb did not take step 0 (ConnectionError: no route)" in caplog.text
    assert run.metrics() == [{"step": 0, "x": 1.0}]
    run.close()


def test_a_tracker_that_hangs_costs_its_curves_and_not_the_run(wandb, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(trackers, "TRACKER_TIMEOUT_S", 0.01)
    run, answered = RunFolder(tmp_path, {}, tracker="wandb"), threading.Event()
    take = wandb.runs[0].log
    monkeypatch.setattr(wandb.runs[0], "log", lambda row: answered.wait(60) and take(row))
    with caplog.at_level(logging.WARNING):
        run.log(0, {"x": 0.0})
        run.log(1, {"x": 1.0})  # left out, and not waited for
    assert caplog.text.count("wandb did not") == 1 and "take step 0 (no answer in 0.01 s. Until there is" in caplog.text
    answered.set()
    run._tracking.result(30)
    monkeypatch.setattr(trackers, "TRACKER_TIMEOUT_S", 30)
    run.log(2, {"x": 2.0})
    run.close()
    assert [row["step"] for row in wandb.runs[0].rows] == [0, 2] and wandb.runs[0].finished
    assert [row["step"] for row in run.metrics()] == [0, 1, 2]


@pytest.mark.parametrize("hangs", ["log", "finish"])
def test_a_tracker_that_hangs_at_the_end_is_named_and_left(hangs, wandb, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(trackers, "TRACKER_TIMEOUT_S", 0.01 if hangs == "log" else 30)
    monkeypatch.setattr(trackers, "CLOSE_TIMEOUT_S", 0.02)
    run, answered = RunFolder(tmp_path, {}, tracker="wandb"), threading.Event()
    monkeypatch.setattr(wandb.runs[0], hangs, lambda *row: answered.wait(60))
    with caplog.at_level(logging.WARNING):
        run.log(0, {"x": 0.0})
        run.close()
    last = {"log": "wandb is left open", "finish": "wandb did not close (no answer in 0.02 s."}[hangs]
    assert last in caplog.text and not wandb.runs[0].finished
    answered.set()
    RunFolder(tmp_path, {}).close()  # the folder is free all the same


def test_a_tracker_that_does_not_open_is_named_before_anything_starts(wandb, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "OPEN_TIMEOUT_S", 0.02)
    answered = threading.Event()
    monkeypatch.setattr(wandb, "init", lambda **given: answered.wait(60))
    with pytest.raises(StallError, match=r"wandb did not open within 0\.02 s\. .* leave out tracker=wandb") as error:
        RunFolder(tmp_path / "run", {}, tracker="wandb")
    answered.set()
    assert error.value.who == "wandb" and not (tmp_path / "run").exists()
    RunFolder(tmp_path / "run", {}).close()  # the folder is free


def test_error_of_a_tracker_that_cannot_open_is_raised(wandb, tmp_path, monkeypatch):
    monkeypatch.setattr(wandb, "init", lambda **given: (_ for _ in ()).throw(TimeoutError("run init timed out")))
    with pytest.raises(TimeoutError, match="run init timed out"):
        RunFolder(tmp_path, {}, tracker="wandb")


def test_missing_tracker_names_its_extra_before_the_start(monkeypatch, tmp_path):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    message = r"tracker=mlflow needs a package: pip install 'forge-agents-rl\[mlflow\]'"
    with pytest.raises(MissingExtraError, match=message):
        RunFolder(tmp_path, {}, tracker="mlflow")
    RunFolder(tmp_path, {}).close()  # the folder is free again


def test_unknown_tracker_is_refused():
    message = r"tracker='wandbb' is none of tensorboard, .*\bmlflow\b.*\. Did you mean 'wandb'"
    for config in (GRPOConfig, SFTConfig):
        with pytest.raises(ValueError, match=message):
            config(tracker="wandbb")


SINK = """
from forge_trainers.records.trackers import Tracker

class Lines(Tracker):
    def __init__(self, folder, config):
        self.file = (folder / "lines.txt").open("a")
        self.file.write(f"{config}\\n")

    def log(self, step, metrics):
        self.file.writelines(f"{step} {name} {value}\\n" for name, value in metrics.items())

    def close(self):
        self.file.close()

class Other:
    log = close = None
"""


def test_tracker_of_a_user_takes_rows_of_every_session(tmp_path, monkeypatch):
    (tmp_path / "my_sink.py").write_text(SINK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_sink", raising=False)
    tracker = "my_sink:Lines"
    assert GRPOConfig(tracker=tracker).tracker == SFTConfig(tracker=tracker).tracker == tracker
    for step in range(2):
        run = RunFolder(tmp_path / "run", {"a": 1}, tracker=tracker)
        run.log(step, {"reward/mean": 0.5})
        run.close()
    session = ["{'a': 1}", "{} reward/mean 0.5"]
    lines = (tmp_path / "run/lines.txt").read_text().splitlines()
    assert lines == [line.format(step) if "{}" in line else line for step in range(2) for line in session]


@pytest.mark.parametrize(
    ("tracker", "message"),
    [
        ("my_sink:Linse", r"'my_sink:Linse' cannot be imported .*Did you mean 'Lines'"),
        (
            "no_sink:Lines",
            r"'no_sink:Lines' cannot be imported .*Run the command in the module's folder, put the module next to",
        ),
        ("my_sink:Other", r"is <class 'my_sink.Other'>\. Name a subclass of .*\.trackers\.Tracker"),
    ],
)
def test_class_that_is_no_tracker_is_refused(tracker, message, tmp_path, monkeypatch):
    (tmp_path / "my_sink.py").write_text(SINK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_sink", raising=False)
    with pytest.raises(ValueError, match=message):
        GRPOConfig(tracker=tracker)


PROGRAM = """
from forge_trainers.records.run_folder import RunFolder

run = RunFolder("real", {"trainer": {"seed": 3}}, tracker="wandb")
run.log(0, {"reward/mean": 0.5})
run.close()
"""


def test_wandb_itself_takes_the_curves_without_a_network(tmp_path):
    pytest.importorskip("wandb")
    words = dict(os.environ, WANDB_MODE="offline", WANDB_SILENT="true")
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, env=words, check=True, timeout=300)
    (file,) = tmp_path.glob("real/wandb/offline-run-*/run-*.wandb")
    assert b"reward/mean" in file.read_bytes()


def test_event_files_that_cannot_be_written_cost_their_curve_and_not_the_run(tmp_path, caplog):
    run = RunFolder(tmp_path, {}, tracker="tensorboard")
    (tmp_path / "tensorboard").write_text("in the way")
    for step in range(2):
        run.log(step, {"reward/mean": 0.5})
    run.close()
    assert [row["step"] for row in run.metrics()] == [0, 1]
    assert "tensorboard did not take step 0" in caplog.text


def test_event_files_hold_every_curve(tmp_path):
    run = RunFolder(tmp_path, {}, tracker="tensorboard")
    metrics = {"reward/red": 0.25, "reward/blue": 0.75, "curriculum/success/my/Sums-v0@1": 1.0, "nan": float("nan")}
    for step in range(2):
        run.log(step, metrics)
    run.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = EventAccumulator(str(tmp_path / "tensorboard"))
    result.Reload()
    assert [(e.step, e.value) for e in result.Scalars("reward/blue")] == [(0, 0.75), (1, 0.75)]
    assert result.Scalars("curriculum/success/my/Sums-v0_1")[1].value == 1.0


def test_names_are_cleaned_stably_and_stay_apart():
    names = trackers.TrackerNames(r"-\w. /", nested=False, longest=40)
    first = names.of(["a@1", "a:1", "/x//y/../z/", "eval/reward", "eval/reward/hero", "é b", "n" * 60, "..", ""])
    assert first["a:1"] == "a_1" and first["a@1"].startswith("a_1_") and first["/x//y/../z/"] == "x/y/__/z"
    assert first["eval/reward"] == "eval/reward" and first["eval/reward/hero"] == "eval/reward.hero"
    assert first["é b"] == "é b" and len(first["n" * 60]) == 40 and first[".."] == "__"
    assert names.of(["x/y", "x"])["x/y"] == "x/y_" and names.of(["x"])["x"] == "x_", "no folder is a file"
    assert len(set(first.values())) == len(first) and names.of(["a:1", "a@1"]) == {n: first[n] for n in ("a:1", "a@1")}


def test_curves_of_a_session_after_the_clock_was_set_back_are_shown(tmp_path, monkeypatch):
    sessions = ((1, 2, 3), 1_800_000_000.5), ((3, 4), 1_799_900_000.5), ((4, 5), 1_799_900_000.5)
    for session, (steps, clock_s) in enumerate(sessions):
        clock = types.SimpleNamespace(time=lambda now=clock_s: now)
        monkeypatch.setattr("forge_trainers.records.trackers.time", clock)
        with RunFolder(tmp_path, {}, tracker="tensorboard") as run:
            for step in steps:
                run.log(step, {"x": step + session / 4})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = EventAccumulator(str(tmp_path / "tensorboard"))
    result.Reload()
    expected = [(1, 1.0), (2, 2.0), (3, 3.25), (4, 4.5), (5, 5.5)]
    assert [(event.step, event.value) for event in result.Scalars("x")] == expected


@pytest.mark.parametrize("tracker", ["tensorboard", "mlflow"])
def test_resumed_run_keeps_the_names_of_its_curves(tracker, mlflow, tmp_path):
    rows = [{"success/a:1": 0.5, "x/y": math.nan}, {"success/a:1": 0.5, "success/a@1": 0.1, "x": 1.0}]
    names = []
    for start, logged in enumerate([rows, rows[1:], [{"success/a@1": 0.1, "x": 1.0, "x/y": 2.0}]]):
        with RunFolder(tmp_path / "run", {}, tracker=tracker) as run:
            for step, row in enumerate(logged, start + 1):
                run.log(step, row)
            names.append(run._curves.names.of(["success/a:1", "success/a@1", "x"]))
    assert names[0] == names[1] == names[2] and names[0]["success/a:1"] == "success/a_1"
    assert names[0]["success/a@1"].startswith("success/a_1_")
    assert names[0]["x"] == ("x_" if tracker == "mlflow" else "x")


class PickyMLflow:
    """MLflow's rules for names, as in its ``utils/validation.py``. A batch with one bad name fails as a whole."""

    def __init__(self):
        self.taken, self.calls = [], []

    def get_experiment_by_name(self, name):
        self.calls.append(("experiment", name))

    def create_experiment(self, name):
        return "7"

    def create_run(self, experiment, run_name):
        self.calls.append(("run", experiment, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))

    def update_run(self, run, status):
        self.calls.append(("again", run, status))

    def log_batch(self, run, metrics=(), params=()):
        for name, *_ in (*metrics, *params):
            is_path = posixpath.normpath(name) == name and not name.startswith(("/", ".."))
            if not re.fullmatch(r"[/\w.\- ]+", name) or not is_path or len(name) > 250 or "refused" in name:
                raise ValueError(f"Invalid metric name: {name!r}")
        if len(metrics) > 1000 or len(params) > 100:
            raise ValueError("too many at once")
        self.taken += [(name, value) for name, value, *_ in metrics]
        self.calls.append(("batch", run, [(name, value, step) for name, value, _, step in metrics], [*params]))

    def set_terminated(self, run):
        self.calls.append(("end", run))


@pytest.fixture
def mlflow(monkeypatch):
    client = PickyMLflow()
    module, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")
    module.MlflowClient, module.__spec__ = lambda: client, types.SimpleNamespace()
    entities.Param, entities.Metric = lambda *given: given, lambda *given: given
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return client


def test_mlflow_gets_parameters_once_and_finite_metrics_by_step(mlflow, tmp_path):
    folder = tmp_path / "duel"
    folder.mkdir()
    for step in range(2):
        curves = trackers.open_tracker("mlflow", folder, {"trainer": {"learner": {"lr": 1e-5}}, "env": ["a"]})
        curves.log(step, {"reward/mean": 0.25, "kl": float("nan")})
        curves.close()
    assert mlflow.calls == [
        ("experiment", "forge-agents"),
        ("run", "7", "duel"),
        ("batch", "r1", [], [("trainer.learner.lr", "1e-05"), ("env", "['a']")]),
        ("batch", "r1", [("reward/mean", 0.25, 0)], []),
        ("end", "r1"),
        ("again", "r1", "RUNNING"),
        ("batch", "r1", [("reward/mean", 0.25, 1)], []),
        ("end", "r1"),
    ]


def test_mlflow_takes_names_of_environments_agents_and_policies(mlflow, tmp_path, caplog):
    run = RunFolder(tmp_path, {}, tracker="mlflow")
    names = ["curriculum/success/my/Sums-v0@1", "eval/env/my/Sums-v0@2", "reward/player #1", "reward/a:b", "é", "/x//y"]
    metrics = {name: float(number) for number, name in enumerate(names)}
    run.log(0, metrics | {"eval/reward": 9.0, "eval/reward/red": 8.0})
    run.close()
    assert sorted(value for _, value in mlflow.taken) == [0, 1, 2, 3, 4, 5, 8, 9] and not caplog.records
    assert ("curriculum/success/my/Sums-v0_1", 0.0) in mlflow.taken


def test_one_refused_metric_costs_itself_and_is_named_and_no_row_is_lost(mlflow, tmp_path, caplog):
    run = RunFolder(tmp_path, {}, tracker="mlflow")
    odd = {"text": "x", "none": None, "yes": True, "tensor": np.float32(4)}
    run.log(0, {"good": 1.0, "refused": 2.0, "better": 3.0, **odd})
    run.close()
    assert dict(mlflow.taken) == {"good": 1.0, "better": 3.0, "yes": 1.0, "tensor": 4.0}
    assert "refused left out" in caplog.text and "text, none" in caplog.text
    (row,) = run.metrics()
    assert (row["good"], row["refused"], row["text"], row["none"], row["tensor"]) == (1.0, 2.0, None, None, 4.0)


def test_full_disk_is_reported_in_one_message(tmp_path, caplog, capfd):
    run = RunFolder(tmp_path, {"policies": {}}, tracker="tensorboard")
    run.log(0, {"reward/mean": 0.5})
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    for file in (tmp_path / "tensorboard").iterdir():
        file.unlink()
    run._curves._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115  # the run closes it
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl cannot be written .*No space left"), run:
        run.log(1, {"reward/mean": 0.5})
    assert not caplog.records and "Traceback" not in "".join(capfd.readouterr())


def test_event_files_on_a_full_disk_cost_a_line_a_step_without_a_traceback(tmp_path, caplog, capfd):
    run = RunFolder(tmp_path, {}, tracker="tensorboard")
    run._curves._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115  # the run closes it
    for step in range(2):
        run.log(step, {"reward/mean": 0.5})
    run.close()
    assert [record.message for record in caplog.records] == [
        f"tensorboard did not take step {step} (OSError: [Errno 28] No space left on device)" for step in range(2)
    ]
    assert "Traceback" not in "".join(capfd.readouterr())
