import contextlib
import dataclasses
import io
import json
import os
import re
import resource
import shutil
import time
import tracemalloc
from contextlib import nullcontext
from zipfile import ZipFile

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import forge_agents as fa
from forge_agents.errors import RunFolderError
from forge_agents.files import foreign_entry
from forge_agents.types import Episode, Trajectory
from forge_trainers.learner.checkpoint import check_replaceable, copy_exports
from forge_trainers.records.run_folder import RunFolder, check_begins, check_resumable, hashes_of_models, read_arrays
from forge_trainers.records.trackers import TrackerNames
from forge_trainers.run.plan import Plan


def test_metrics_are_kept_by_step_and_nan_is_null(tmp_path):
    run = RunFolder(tmp_path / "r", {"a": 1})
    run.log(0, {"reward/mean": 0.5, "kl": float("nan")})
    run.close()
    assert json.loads((tmp_path / "r/metrics.jsonl").read_text()) == {"step": 0, "reward/mean": 0.5, "kl": None}
    assert list((tmp_path / "r/tensorboard").iterdir())


def test_a_second_process_is_refused(tmp_path):
    run = RunFolder(tmp_path, {})
    with pytest.raises(RunFolderError, match="another process is training"):
        RunFolder(tmp_path, {})
    run.close()
    RunFolder(tmp_path, {}).close()


def test_finished_run_without_its_checkpoints_is_not_begun_anew(tmp_path):
    """A new run would delete the records of a run that was copied without its checkpoints, or freed of them."""
    check_begins(tmp_path)
    RunFolder(tmp_path, {}).close()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    check_begins(tmp_path)  # stopped before the first checkpoint
    (tmp_path / "export").mkdir()
    with pytest.raises(RunFolderError, match=r"finished run without its checkpoints.*Choose another out_dir"):
        check_begins(tmp_path)


def test_plan_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    """An evaluation of another user's run ended."""
    (tmp_path / "file").write_text("")
    Plan(engines={}, learners={}).write(tmp_path / "file" / "run")
    assert "the plan of the processes is not recorded" in caplog.text


@pytest.mark.parametrize("moved", [True, False])
def test_run_whose_folder_was_moved_or_deleted_leaves_the_next_run_alone(moved, tmp_path):
    folder, error = tmp_path / "r", "moved or deleted during this run, and another run has begun there"
    first = RunFolder(folder, {"seed": 1})
    first.log(1, {"x": 1.0})
    folder.rename(tmp_path / "moved")
    if not moved:
        shutil.rmtree(tmp_path / "moved")
    second = RunFolder(folder, {"seed": 2})
    with pytest.raises(RunFolderError, match=error):
        first.rewind(0)
    with pytest.raises(RunFolderError, match=error):
        first.log(2, {"x": 2.0})
    first.__exit__(RunFolderError)
    second.log(1, {"x": 3.0})
    second.close()
    assert json.loads((folder / "metrics.jsonl").read_text()) == {"step": 1, "x": 3.0}
    assert (folder / "config.yaml").read_text() == "seed: 2\n" and (folder / ".lock").exists()


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "run", tmp_path / "file"):
        with pytest.raises(RunFolderError, match="Choose another out_dir"):
            RunFolder(path, {})


def test_rewind_forgets_later_steps_and_a_half_written_line(tmp_path):
    run = RunFolder(tmp_path, {})
    for step in range(1, 5):
        run.log(step, {"x": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "x"')
    run.rewind(2)
    assert [row["step"] for row in run.metrics()] == [1, 2]
    for rest in (b'{"step": 3, "x": "\xc3', b"\0" * 300, b"\xff\xfe\n"):  # after a power cut
        with (tmp_path / "metrics.jsonl").open("ab") as file:
            file.write(rest)
        assert [row["step"] for row in run.metrics()] == [1, 2]
        run.rewind(2)
    line = json.dumps({"step": 1, "said": "a" * 100_000}) + "\n"
    (tmp_path / "episodes.jsonl").write_text(line * 100 + '{"step": 3}\n{"st')
    tracemalloc.start()
    run.rewind(2)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "episodes.jsonl").read_text() == line * 100 and most < 3_000_000, "a long run is no whole text"
    run.close()


def test_long_episodes_are_kept_by_a_resumed_run(tmp_path):
    """A hundred turns with prompts of 22,000 tokens each."""
    line = json.dumps({"step": 1, "prompt_ids": [7] * 2_200_000}) + "\n"
    with RunFolder(tmp_path, {}) as run:
        (tmp_path / "episodes.jsonl").write_text(line + '{"step": 2}\n')
        run.rewind(1)
        assert (tmp_path / "episodes.jsonl").read_text() == line
        (tmp_path / "metrics.jsonl").write_text(line + '{"step": 2}\n')
        with pytest.raises(RunFolderError, match=r"metrics\.jsonl:1 is not JSON"):  # a stranger's: 60 bytes per value
            run.metrics()


def test_a_sparse_line_is_read_in_parts(tmp_path, monkeypatch):
    """A sparse file may have a line of terabytes."""
    monkeypatch.setattr("forge_trainers.records.run_folder.MAX_LINE_BYTES", 10_000)
    run = RunFolder(tmp_path, {})
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    os.truncate(tmp_path / "metrics.jsonl", 50_000_000)
    tracemalloc.start()
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl:2 is not JSON"):
        run.metrics()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 3_000_000
    run.close()


def test_damage_in_the_middle_is_an_error(tmp_path):
    run = RunFolder(tmp_path, {})
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\ngarbage\n{"step": 1}\n')
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl:2 is not JSON"):
        run.metrics()
    for odd in ("[1]", '{"step": "1"}', '"step"'):  # of a stranger's folder
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0}}\n{odd}\n')
        with pytest.raises(RunFolderError, match=r"metrics\.jsonl:2 has no step number"):
            run.metrics()
    run.close()


def test_changed_settings_keep_the_old_ones(tmp_path):
    first = RunFolder(tmp_path, {"env": "a", "trainer": {"lr": 1, "seed": 0}})
    first.close()
    second = RunFolder(tmp_path, {"env": "b\x1b[2J", "trainer": {"lr": 2, "seed": 0, "new": None}})
    assert "lr: 1" in (tmp_path / "config.yaml").read_text(), "nothing is rewritten before the run has started"
    second.keep_settings()
    second.close()
    assert (first.changed, second.changed) == ("", r"env: a -> b\x1b[2J; trainer.lr: 1 -> 2")
    assert "lr: 2" in (tmp_path / "config.yaml").read_text()
    assert "lr: 1" in (tmp_path / "config.previous.yaml").read_text()


def test_long_keys_of_many_nested_settings_are_not_joined(tmp_path):
    """They stand for 250 GB in a file of 10 MB."""
    lines = ["policies:", " hero:", "  lora:"]
    for depth in range(3, 13):
        lines += [" " * depth + f"? {'x' * 5000}", " " * depth + ":"]
    lines += [" " * 13 + f"k{number}: 1" for number in range(400)]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    settings = {"policies": {"hero": {"lora": {"rank": 1}}}}
    run = RunFolder(tmp_path, settings)
    run.close()
    assert run.changed == "config.yaml could not be read"
    with pytest.raises(
        RunFolderError, match=r"config\.yaml has names of settings with more than 10 million characters"
    ):
        check_resumable(tmp_path, settings, ["policies.hero.lora"])


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (None, None, None),
        (fa.LoRA(), fa.LoRA(), None),
        (fa.LoRA(rank=8, targets=["q_proj"]), fa.LoRA(rank=8, targets=["q_proj"]), None),
        (fa.LoRA(targets=["q_proj"]), fa.LoRA(targets=["o_proj"]), r"\.targets is \['q_proj'\] .* \['o_proj'\]"),
        (None, fa.LoRA(rank=4), r" is None in the run .* and \{.*'rank': 4.*\} in this"),
    ],
)
def test_run_is_resumed_only_with_the_same_adapter(tmp_path, before, after, message):
    old, new = ({"policies": {"team": dataclasses.asdict(fa.Policy("m", lora=lora))}} for lora in (before, after))
    with RunFolder(tmp_path, old):
        pass
    refused = pytest.raises(RunFolderError, match=f"policies.team.lora{message}") if message else nullcontext()
    with refused:
        check_resumable(tmp_path, new, ["policies.team.lora"])


def test_model_that_was_not_here_before_is_no_change(tmp_path):
    unknown, expected = {"weights": hashes_of_models({"a": fa.Policy("nobody/has-this")})}, {"weights": {"a": "1234"}}
    for name, before, after in (("downloaded", unknown, expected), ("moved", expected, unknown)):
        with RunFolder(tmp_path / name, before):
            pass
        check_resumable(tmp_path / name, after, ["weights.a"])


@pytest.mark.parametrize(("key", "one"), [("policies.a.model", False), ("policy.model", True)])
def test_another_start_model_is_named_with_its_hash(tmp_path, key, one):
    def settings(model, digest):
        policy = {"name": "a", "model": model}
        return {"policy": policy} if one else {"policies": {"a": policy}}, {"weights": {"a": digest}}

    (before, old), (after, new) = settings("small", "1234"), settings("large", "5678")
    with RunFolder(tmp_path, before | old):
        pass
    named = rf"^{key} is small \(hash 1234\) in the run .* and large \(hash 5678\) in this call.*set {key} back"
    with pytest.raises(RunFolderError, match=named):
        check_resumable(tmp_path, after | new, ["weights.a"])


def test_curve_is_a_picture_and_an_error_of_matplotlib_costs_only_it(tmp_path, caplog, monkeypatch):
    run = RunFolder(tmp_path, {})
    assert run.plot() is None
    for step in range(3):
        run.log(step, {"reward/mean": 0.1 * step, "reward/ci": 0.05})
    assert run.plot().read_bytes().startswith(b"\x89PNG")

    def fail(*_, **__):
        raise RuntimeError("latex could not be found")

    monkeypatch.setattr(Figure, "savefig", fail)
    assert run.plot() is None and "reward.png is not drawn (RuntimeError: latex could not be found)" in caplog.text
    run.close()


def test_episodes_are_written_whole(tmp_path):
    run = RunFolder(tmp_path, {})
    episode = Episode(env_id="e", seed=1, trajectories={"a": Trajectory(agent="a", policy="p", turns=())})
    run.keep_episodes(3, [episode], [{"a": 0.5}])
    run.keep_episodes(4, [episode], [{"a": 0.5}], [{"a": [0.25]}])
    row, learned = map(json.loads, (tmp_path / "episodes.jsonl").read_text().splitlines())
    assert (row["step"], row["rewards"], row["seed"], row["trajectories"]["a"]["policy"]) == (3, {"a": 0.5}, 1, "p")
    assert (row["advantages"], learned["advantages"]) == ({}, {"a": [0.25]})
    run.close()


def test_a_file_that_cannot_be_written_ends_the_run_with_the_reason(tmp_path):
    run = RunFolder(tmp_path, {})
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl cannot be written.*continues from the newest checkpoint"):
        run.log(0, {"x": 1.0})
    run.close()


@contextlib.contextmanager
def full_disk():
    """No file can grow, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_is_named_with_the_file_and_changes_nothing(tmp_path):
    advice = "cannot be written .*Free some disk space and run it again"
    with full_disk(), pytest.raises(RunFolderError, match=rf"config\.yaml {advice}"):
        RunFolder(tmp_path / "new", {"lr": 1})
    assert not (tmp_path / "new").exists()
    with RunFolder(tmp_path / "run", {"lr": 1}) as run:
        run.log(1, {"x": 1.0})
        run.log(2, {"x": 2.0})
    before = {file.name: file.read_text() for file in (tmp_path / "run").iterdir() if file.is_file()}
    with RunFolder(tmp_path / "run", {"lr": 2}) as run:
        with full_disk(), pytest.raises(RunFolderError, match=rf"metrics\.jsonl {advice}"):
            run.rewind(1)
        assert not list((tmp_path / "run").glob(".*.draft")), "it would take space of the full disk"
        with full_disk(), pytest.raises(RunFolderError, match=rf"config\.previous\.yaml {advice}"):
            run.keep_settings()
        with full_disk(), pytest.raises(RunFolderError, match=rf"ending\.json {advice}"):
            run.end(2, "solved", "all won")
        with full_disk(), pytest.raises(RunFolderError, match=rf"reward\.png {advice}"):
            run.plot()
    left = {name: (tmp_path / "run" / name).read_text() for name in before}
    assert left == before, "config.yaml above all, without which a run can be neither exported nor checked"


LINKS = (".lock", "config.yaml", ".config.yaml.draft", "metrics.jsonl", "reward.png", "data.sha256", "wandb.id")


@pytest.mark.parametrize("name", [*LINKS, "mlflow.id"])
def test_a_folder_with_links_is_not_written_through_them(tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run" / name).symlink_to(tmp_path / "mine")
    with pytest.raises(RunFolderError, match="is a link"):
        RunFolder(tmp_path / "run", {"a": 1})
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize(
    "name",
    [
        *("checkpoints", "export", "league", "learner", "seed-3", "tensorboard", "wandb", ".wandb", "warm-start"),
        *("checkpoints/step-1", "export/a/x.json"),
    ],
)
@pytest.mark.parametrize("begin", [lambda path: RunFolder(path, {}), lambda path: check_resumable(path, {}, [])])
def test_training_refuses_folders_with_links_out_of_the_run(tmp_path, name, begin):
    home = tmp_path / "home"
    (home / "documents").mkdir(parents=True)
    entry = tmp_path / "run" / name
    entry.parent.mkdir(parents=True)
    entry.symlink_to(home)
    with pytest.raises(RunFolderError, match=f"{entry.name} is a link.*put the whole run folder on it"):
        begin(tmp_path / "run")
    assert [path.name for path in home.rglob("*")] == ["documents"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == [name.split("/")[0]]


def test_training_refuses_a_pipe_among_its_files(tmp_path):
    (tmp_path / "league").mkdir()
    os.mkfifo(tmp_path / "league/hero-000001")
    with pytest.raises(RunFolderError, match="hero-000001 is not a file"):
        RunFolder(tmp_path, {})


def test_file_that_another_process_deletes_meanwhile_is_not_foreign(tmp_path):
    assert foreign_entry([tmp_path / "gone"], tmp_path) is None
    os.mkfifo(tmp_path / "pipe")
    assert foreign_entry([tmp_path / "gone", tmp_path / "pipe"], tmp_path) == tmp_path / "pipe"


def test_arrays_that_stand_for_more_than_their_file_are_refused(tmp_path):
    file = tmp_path / "league.npz"
    assert read_arrays(file) is None
    os.mkfifo(file)  # opening it would wait for ever
    with pytest.raises(RunFolderError, match="is a link or not a file"):
        read_arrays(file)
    file.unlink()
    np.savez(file, names=np.array(["a"]), empty=np.zeros((0, 3)))
    assert {name: value.shape for name, value in read_arrays(file).items()} == {"names": (1,), "empty": (0, 3)}
    np.savez_compressed(file, names=np.zeros(1_000_000))
    with pytest.raises(ValueError, match="stands for more"):
        read_arrays(file)
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (10000000000000000,), }"
    with ZipFile(file, "w") as parts:
        parts.writestr("names.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(ValueError, match="does not fit into memory"):
        read_arrays(file)
    for kind, shape in (("<U0", (10**6,)), ("<f8", (10**6, 0)), ([("a", "<U0"), ("b", "<U0")], (3,))):
        buffer = io.BytesIO()
        np.lib.format.write_array_header_1_0(buffer, {"descr": kind, "fortran_order": False, "shape": shape})
        with ZipFile(file, "w") as parts:
            parts.writestr("names.npy", buffer.getvalue())
        with pytest.raises(ValueError, match="league.npz has .* bytes and names the shape"):
            read_arrays(file)
    os.truncate(file, 1 << 40)
    with pytest.raises(ValueError, match="almost none are on the disk"):
        read_arrays(file)


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("names.npy", "{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999999999999,)}"),
        ("names.npy", "{'descr': '<f8', 'fortran_order': False, 'shape': (True,)}"),
        ("names.npy", "{'descr': (), 'fortran_order': False, 'shape': (1,)}"),
        ("names.npy", "(" * 5000),
        ("note", ""),
    ],
)
def test_damaged_headers_of_arrays_and_other_parts_are_refused(tmp_path, name, header):
    with ZipFile(tmp_path / "league.npz", "w") as parts:
        start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
        parts.writestr(name, (start if header else b"text") + header.encode() + bytes(8))
        parts.writestr("padding.npy", bytes(500))
    with pytest.raises(ValueError, match="league.npz"):
        read_arrays(tmp_path / "league.npz")


def test_a_run_folder_may_be_a_link_and_hold_links_that_no_run_follows(tmp_path):
    disk = tmp_path / "disk"
    (disk / "wandb/run-1").mkdir(parents=True)
    (disk / "wandb/latest-run").symlink_to("run-1")
    (disk / "notes").symlink_to(tmp_path)
    (tmp_path / "run").symlink_to(disk)
    RunFolder(tmp_path / "run", {"a": 1}).close()
    assert (disk / "config.yaml").read_text() == "a: 1\n"


def test_failed_call_leaves_no_folder(tmp_path):
    def refused(path, *made):
        with contextlib.suppress(KeyError), RunFolder(path, {"a": 1}):
            for name in made:
                (path / name).touch()
            raise KeyError("no such model")

    refused(tmp_path / "runs" / "refused")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="wandbb"):
        RunFolder(tmp_path / "runs" / "refused", {"a": 1}, tracker="wandbb")
    assert not list(tmp_path.iterdir())

    folder = RunFolder(tmp_path / "runs" / "kept", {"a": 1})
    folder.log(0, {"reward/mean": 1.0})
    folder.close()
    refused(tmp_path / "runs" / "kept")  # a run that is
    assert (tmp_path / "runs" / "kept" / "metrics.jsonl").exists()
    refused(tmp_path / "runs" / "broken", "stall-0.json")  # which says why it broke
    mine = tmp_path / "mine"
    mine.mkdir()
    refused(mine)
    assert list(mine.iterdir()) == [] and (tmp_path / "runs" / "broken" / "config.yaml").exists()


@pytest.mark.parametrize("begin", [lambda path: RunFolder(path, {}), lambda path: check_resumable(path, {}, [])])
@pytest.mark.parametrize(
    "name", ["config.yaml", "plan.yaml", "reward.png", "export/a.txt", "checkpoints/step-000001/a"]
)
def test_a_folder_with_files_of_another_program_is_refused_and_unchanged(name, begin, tmp_path):
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("theme: dark")
    with pytest.raises(RunFolderError, match=f"is no folder of a run and has {name.partition('/')[0]}, which"):
        begin(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]


def test_a_run_without_its_lock_and_a_folder_of_other_files_are_used(tmp_path):
    with RunFolder(tmp_path / "run", {"trainer": {}}) as run:
        run.log(1, {"reward/mean": 1.0})
    (tmp_path / "run" / ".lock").unlink()  # a copy may have no hidden files
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.yaml").write_text("env: forge/Relay-v0")
    for name in ("run", "mine"):
        RunFolder(tmp_path / name, {"trainer": {}}).close()
    assert (tmp_path / "mine" / "train.yaml").read_text() == "env: forge/Relay-v0"


def test_a_folder_of_an_evaluation_becomes_that_of_a_run(tmp_path):
    Plan(engines={}, learners={}).write(tmp_path)
    RunFolder(tmp_path, {"trainer": {}}).close()
    assert (tmp_path / "config.yaml").exists()


MODEL = ("config.json", "generation_config.json", "model-00001-of-00002.safetensors", "adapter/adapter_config.json")


@pytest.mark.parametrize(
    ("files", "other"),
    [
        (MODEL, None),
        ((), None),
        ((*MODEL, "README.md", "additional_chat_templates/tool.jinja"), None),
        (("thesis.txt",), "thesis.txt"),
        (("README.md",), "README.md"),
        (("policies/hero/config.json",), "policies"),
        ((*MODEL, ".git/config"), ".git"),
        ((*MODEL, "src/index.js"), "src"),
        ((*MODEL, "adapter/thesis.txt"), "adapter"),
        ((*MODEL, "train.py"), "train.py"),
        (("config.yaml", "export/config.json", "metrics.jsonl"), "config.yaml"),
    ],
)
def test_an_export_replaces_nothing_but_an_exported_model(tmp_path, files, other):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    if other is None:
        check_replaceable(tmp_path)
    else:
        with pytest.raises(RunFolderError, match=f"holds {re.escape(repr(other))} and is no exported model, so it is"):
            check_replaceable(tmp_path)
    check_replaceable(tmp_path / "nothing")


def test_copies_of_an_export_replace_and_hold_models_only(tmp_path):
    run, mine = tmp_path / "run" / "export", tmp_path / "mine"
    for policy in ("hero", "rival"):
        for name in (*MODEL, ".git/hooks/pre-commit", "setup.py"):
            (run / policy / name).parent.mkdir(parents=True, exist_ok=True)
            (run / policy / name).write_text(policy)
    (mine / "rival").mkdir(parents=True)
    (mine / "rival" / "thesis.txt").write_text("mine")
    with pytest.raises(RunFolderError, match=r"rival holds 'thesis.txt' and is no exported model"):
        copy_exports(run, mine)
    assert [path.name for path in mine.iterdir()] == ["rival"], "nothing was copied"
    (mine / "rival" / "thesis.txt").unlink()
    for _ in range(2):
        copy_exports(run, mine)
        copied = {str(file.relative_to(mine)): file.read_text() for file in mine.rglob("*") if file.is_file()}
        assert copied == {f"{policy}/{name}": policy for policy in ("hero", "rival") for name in MODEL}
    with (run / "hero" / "model-00002-of-00002.safetensors").open("wb") as sparse:
        sparse.truncate(1 << 32)
    with pytest.raises(ValueError, match="almost none are on the disk"):
        copy_exports(run, mine)
    assert (mine / "hero" / "config.json").read_text() == "hero", "the earlier copy is still there"


@pytest.mark.parametrize("exists", [True, False])
def test_export_does_not_replace_a_link(tmp_path, exists):
    run, disk, link = tmp_path / "run", tmp_path / "disk", tmp_path / "latest"
    for folder in (run, disk)[: 1 + exists]:
        folder.mkdir()
        (folder / "config.json").write_text(folder.name)
    link.symlink_to(disk)
    with pytest.raises(RunFolderError, match="latest is a link, so it is not replaced. Name the folder that it leads"):
        copy_exports(run, link)
    assert link.readlink() == disk and disk.exists() is exists
    copy_exports(run, link.resolve())
    assert (link / "config.json").read_text() == "run"


def test_copy_of_an_export_is_not_written_through_links(tmp_path):
    """A stranger's run folder may hold them, where the user saves the model."""
    source, other, run = tmp_path / "export", tmp_path / "other", tmp_path / "run"
    for folder in (source, other, run):
        folder.mkdir()
    for name in MODEL:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("hero")
    (other / "config.json").write_text("mine")
    for name in (".unfinished-final", ".replaced-final"):
        (run / name).symlink_to(other)
    for _ in range(2):
        copy_exports(source, run / "final")
    assert [(file.name, file.read_text()) for file in other.iterdir()] == [("config.json", "mine")]
    assert (run / "final" / "config.json").read_text() == "hero" and not (run / "final").is_symlink()
    assert [path.name for path in run.iterdir()] == ["final"]


def test_picture_of_rewards_has_the_exploitability(tmp_path, monkeypatch):
    """In mirror self-play the mean reward is 0 in every step."""
    drawn = []
    monkeypatch.setattr(Axes, "plot", lambda self, steps, values, **style: drawn.append((style["label"], [*values])))
    with RunFolder(tmp_path, {}) as run:
        for step, value in enumerate((0.5, 0.25)):
            run.log(step, {"reward/mean": 0.0, "eval/exploitability": value, "eval/exploitability/b": value / 2})
        run.plot_rewards(["a"])
        run.plot_rewards(["a", "b"])
    one = [("training episodes", [0, 0]), ("exploitability", [0.5, 0.25])]
    assert drawn == [*one, *one, ("exploitability of b", [0.25, 0.125])]


@pytest.mark.parametrize("value", ["x", [1, 2], {"a": 1}, 10**400, None, float("nan")])
def test_curves_leave_out_values_that_are_no_numbers(value, tmp_path):
    with RunFolder(tmp_path, {}) as run:
        for metric in ("reward/mean", "reward/ci", "eval/reward", "eval/ci"):
            run._append("metrics.jsonl", [{"step": 1, "reward/mean": 0.1, "eval/reward": 0.1, metric: value}])
        assert run.plot_rewards(["a"]) == tmp_path / "reward.png"
        run._append("metrics.jsonl", [{"step": 10**400, "reward/mean": 0.1}])
        with pytest.raises(RunFolderError, match="has no step number"):
            run.plot_rewards(["a"])


@pytest.mark.parametrize("nested", [True, False])
def test_many_names_of_metrics_take_linear_time(nested):
    names, started = TrackerNames(r"-\w. /", nested=nested), time.process_time()
    assert len(set(names.of([f"{n:05d}/{n % 7}" for n in range(60_000)]).values())) == 60_000
    assert time.process_time() - started < 20
