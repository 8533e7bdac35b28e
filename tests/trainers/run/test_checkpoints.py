import asyncio
import json
import math
import os
import random
import shutil
import threading

import numpy as np
import pytest

from forge_agents.errors import ActorDiedError, ForgeError, RunFolderError
from forge_agents.files import Checksums, outdated_export
from forge_trainers.records.run_folder import saved_reward
from forge_trainers.rl.credit import Baselines
from forge_trainers.rl.tasks import ProcessRandomness
from forge_trainers.run.checkpoints import Checkpoints, checked_mark


class Learner:
    """Keeps a number in a file."""

    compute_dtype = "float32"

    def __init__(self, value=0):
        self.value, self.free, self.error = value, threading.Event(), None
        self.free.set()

    async def start_save(self, folder, **_):
        self.taken = (folder, self.value)

    async def finish_save(self, **_):
        await asyncio.to_thread(self.free.wait)
        folder, value = self.taken
        folder.mkdir()
        (folder / "value.json").write_text(json.dumps(value))
        if self.error is not None:
            raise self.error
        sums = Checksums()
        sums.add((folder / "value.json").read_bytes())
        return {"value.json": sums.all}

    async def load(self, folder, **_):
        self.value = json.loads((folder / "value.json").read_text())


class Reward:
    def __init__(self, seen=0):
        self.seen = seen

    def state_dict(self):
        return {"a/seen": np.array(self.seen), "names": np.array(["x", "y"])}

    def load_state_dict(self, state):
        self.seen = int(state["a/seen"])


def save(folder, *steps, keep=2, scores=None, **parts):
    for step in steps:
        checkpoints = Checkpoints(folder, keep=keep, keep_best=scores is not None, parts=parts)
        asyncio.run(checkpoints.save(step, {"hero": Learner(step)}, score=(scores or {}).get(step)))


def restore(folder, **parts):
    learner = Learner(-1)
    step = asyncio.run(Checkpoints(folder, keep=2, parts=parts).restore({"hero": learner}))
    return step, learner.value


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_is_restored_and_the_oldest_forgotten(tmp_path):
    assert restore(tmp_path) == (0, -1)
    save(tmp_path, 10, 20, 100)
    assert restore(tmp_path) == (100, 100)
    assert names(tmp_path) == ["step-000020", "step-000100"]


@pytest.mark.parametrize("copy", ["step-000010-best", "step-zzzzzzzzzz", "step-0000000010", "step-999999"])
def test_copy_of_a_checkpoint_is_not_taken_for_the_newest(tmp_path, copy):
    """A backup by the user made the run delete each newer checkpoint and resume at the backup."""
    save(tmp_path, 10)
    shutil.copytree(tmp_path / "step-000010", tmp_path / copy)
    if copy == "step-999999":  # the name of a checkpoint, with the mark of another
        save(tmp_path, 20, keep=3)
        assert restore(tmp_path) == (20, 20) and "damaged-999999" in names(tmp_path)
        return
    save(tmp_path, 20, 30, 40)
    assert names(tmp_path) == sorted(["step-000030", "step-000040", copy])
    assert restore(tmp_path) == (40, 40)


@pytest.mark.parametrize("unreadable", ["checkpoints", "checkpoints/step-000020/experiment.json"])
def test_checkpoints_that_cannot_be_read_are_not_taken_for_none(tmp_path, monkeypatch, unreadable):
    """A run in such a folder, for example of another user, began anew and deleted its records."""
    folder = tmp_path / "checkpoints"
    assert not Checkpoints(folder, keep=2).any()
    save(folder, 10, 20)

    def refuse(call):
        def refusing(path, *args, **options):
            if os.fspath(path) == os.fspath(tmp_path / unreadable):
                raise PermissionError(13, "Permission denied", os.fspath(path))
            return call(path, *args, **options)

        return refusing

    monkeypatch.setattr(os, "listdir", refuse(os.listdir))
    monkeypatch.setattr(os, "stat", refuse(os.stat))
    with pytest.raises(RunFolderError, match=r"checkpoints cannot be read .*Permission denied.*Make them readable"):
        restore(folder)
    assert outdated_export(tmp_path) == ""


def test_best_checkpoint_is_kept_and_the_newest_is_restored(tmp_path):
    save(tmp_path, 1, 2, 3, 4, 5, keep=1, scores={1: 0.2, 2: 0.9, 3: 0.9, 4: float("nan"), 5: 0.1})
    assert names(tmp_path) == ["step-000003", "step-000005"]
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=True)
    assert checkpoints.best() == tmp_path / "step-000003"
    assert checkpoints.is_best(0.95) and not checkpoints.is_best(0.8) and not checkpoints.is_best(None)
    assert not Checkpoints(tmp_path, keep=1).is_best(0.95)
    assert not checkpoints.is_best(float("nan"))
    assert restore(tmp_path) == (5, 5)


def test_scores_of_another_measure_are_not_compared(tmp_path):
    save(tmp_path, 1, 2, scores={1: 16.6, 2: 14.6}, keep=3)
    now = Checkpoints(tmp_path, keep=3, keep_best=True)
    now.measure = "small"
    assert now.is_best(15.0) is False and now.other_measures() == [], "earlier versions saved no measure"
    for step, measure, score in [(1, "big", 16.6), (2, "big", 14.6), (3, "small", 0.5), (4, "small", 0.4)]:
        checkpoints = Checkpoints(tmp_path, keep=4, keep_best=True)
        checkpoints.measure = measure
        asyncio.run(checkpoints.save(step, {"hero": Learner(step)}, score=score))
    assert now.other_measures() == ["step-000002", "step-000001"]
    assert now.best() == tmp_path / "step-000003" and now.is_best(0.6) and not now.is_best(0.45)
    assert Checkpoints(tmp_path, keep=4).best() == tmp_path / "step-000003", "measured as the newest"
    now.measure = "big"
    assert now.best() == tmp_path / "step-000001" and not now.is_best(0.6)
    now.measure = "unranked"  # such as a game of trained policies against each other
    asyncio.run(now.save(5, {"hero": Learner(5)}))
    assert now.best() is None and Checkpoints(tmp_path, keep=4).best() is None, "so the newest is exported"


def test_training_continues_while_a_checkpoint_is_written(tmp_path):
    learner, reward = Learner(1), Reward(1)

    async def run():
        checkpoints = Checkpoints(tmp_path, keep=2, parts={"reward": reward})
        learner.free.clear()
        await checkpoints.start(1, {"hero": learner})
        learner.value = reward.seen = 2
        assert not checkpoints.any()
        learner.free.set()
        await checkpoints.finish()

    asyncio.run(run())
    fresh = Reward()
    assert restore(tmp_path, reward=fresh) == (1, 1)
    assert fresh.seen == 1


def test_a_half_written_checkpoint_is_invisible_and_goes_with_the_next(tmp_path):
    save(tmp_path, 10)
    (tmp_path / ".draft-000020").mkdir()
    (tmp_path / "step-000030").mkdir()
    assert restore(tmp_path) == (10, 10)
    save(tmp_path, 20)
    assert not list(tmp_path.glob(".draft-*"))


def cut(file):
    file.write_bytes(file.read_bytes()[:-3])


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def empty(file):
    file.write_bytes(b"")


def remove(file):
    file.unlink()


@pytest.mark.parametrize("damage", [cut, flip, empty, remove])
@pytest.mark.parametrize("name", ["hero/value.json", "reward.npz", "experiment.json"])
def test_damage_of_any_file_falls_back_to_the_checkpoint_before(tmp_path, caplog, name, damage):
    save(tmp_path, 10, reward=Reward(7))
    save(tmp_path, 20, reward=Reward(8))
    damage(tmp_path / "step-000020" / name)
    fresh = Reward()
    assert restore(tmp_path, reward=fresh) == (10, 10)
    assert fresh.seen == 7
    if (name, damage) != ("experiment.json", remove):  # that one was never complete
        assert "step-000020 does not load" in caplog.text
        save(tmp_path, 11, keep=1)  # the damaged one does not crowd out the good one
        assert names(tmp_path) == ["damaged-000020", "step-000011"]


def test_a_flipped_score_costs_no_checkpoint(tmp_path, caplog):
    save(tmp_path, 1, 2, scores={1: 0.5, 2: 0.4})
    mark = tmp_path / "step-000001/experiment.json"
    mark.write_text(mark.read_text().replace('"score"', '"scure"'))
    assert Checkpoints(tmp_path, keep=2, keep_best=True).best() == tmp_path / "step-000002"
    assert "is damaged" in caplog.text


def test_no_checkpoint_that_loads_is_an_error_and_nothing_is_renamed(tmp_path):
    save(tmp_path, 10)
    (tmp_path / "step-000010/hero/value.json").unlink()
    with pytest.raises(ForgeError, match=r"no checkpoint loads.*value\.json"):
        restore(tmp_path)
    assert names(tmp_path) == ["step-000010"]


def test_a_learner_that_dies_while_loading_is_no_damage(tmp_path):
    class Dying(Learner):
        async def load(self, folder, **_):
            raise ActorDiedError("hero-learner died")

    save(tmp_path, 10)
    with pytest.raises(ActorDiedError):
        asyncio.run(Checkpoints(tmp_path, keep=2).restore({"hero": Dying()}))
    assert restore(tmp_path) == (10, 10)


def test_other_policies_are_refused(tmp_path):
    save(tmp_path, 10)
    with pytest.raises(ForgeError, match=r"holds the policies \['hero'\]"):
        asyncio.run(Checkpoints(tmp_path, keep=2).restore({"rival": Learner()}))


def test_a_part_that_an_older_checkpoint_lacks_starts_afresh_with_a_warning(tmp_path, caplog):
    save(tmp_path, 10, reward=Reward(7))
    mark = tmp_path / "step-000010/experiment.json"
    mark.write_text(json.dumps({"step": 10, "policies": ["hero"]}))  # as it was written before there were sizes
    reward, baselines = Reward(), Baselines()
    assert restore(tmp_path, reward=reward, baselines=baselines) == (10, 10)
    assert reward.seen == 7
    assert "holds no baselines, which starts from its initial state" in caplog.text


def test_the_random_state_of_the_process_is_restored(tmp_path):
    def drawn():
        legacy = np.random.mtrand._rand  # the generator behind np.random.normal
        return random.gauss(0, 1), random.random(), legacy.normal(), legacy.random_sample()

    drawn()  # both keep the second of a pair
    save(tmp_path, 5, random=ProcessRandomness())
    expected = drawn()
    drawn()
    restore(tmp_path, random=ProcessRandomness())
    assert drawn() == expected


def test_checkpoint_that_a_killed_run_has_half_deleted_goes_with_the_next(tmp_path, monkeypatch):
    class KilledError(BaseException):
        pass

    def kill(folder, **_):
        if (folder / "experiment.json").exists():
            (folder / "experiment.json").unlink()
            raise KilledError

    save(tmp_path, 1, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr("forge_trainers.run.checkpoints.shutil.rmtree", kill)
        with pytest.raises(KilledError):
            save(tmp_path, 2, keep=1)
    assert restore(tmp_path) == (2, 2)
    save(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["step-000003"]


def test_checkpoint_that_a_running_training_deletes_is_no_damage(tmp_path, caplog):
    save(tmp_path, 1, 2, keep=1, scores={1: 0.9, 2: 0.1})

    class Evaluator(Learner):
        async def load(self, folder, **_):
            if folder.parent.name == "step-000002":
                await Checkpoints(tmp_path, keep=1, keep_best=True).save(3, {"hero": Learner(3)}, score=0.2)
            await super().load(folder)

    learner = Evaluator()
    assert asyncio.run(Checkpoints(tmp_path, keep=1).restore({"hero": learner})) == 3
    assert learner.value == 3 and names(tmp_path) == ["step-000001", "step-000003"] and not caplog.records


@pytest.mark.parametrize("is_deleted", [False, True], ids=["moved", "deleted"])
def test_draft_of_another_run_that_took_the_folder_is_not_completed_or_deleted(is_deleted, tmp_path):
    folder, learner = tmp_path / "run", Learner(1)

    async def run():
        learner.free.clear()
        checkpoints = Checkpoints(folder, keep=2)
        await checkpoints.start(1, {"hero": learner})
        if is_deleted:  # the next folder may get the same inode number
            shutil.rmtree(folder)
        else:
            folder.rename(tmp_path / "moved")
        (folder / ".draft-000001").mkdir(parents=True)
        learner.free.set()
        with pytest.raises(RunFolderError, match="was replaced"):
            await checkpoints.finish()

    asyncio.run(run())
    assert names(folder) == [".draft-000001"]


def test_failed_checkpoint_is_warned_of_and_the_next_is_written(tmp_path, caplog):
    learner = Learner(1)

    async def run():
        checkpoints = Checkpoints(tmp_path, keep=2)
        await checkpoints.save(1, {"hero": learner})
        learner.error = RunFolderError("No space left on device")
        await checkpoints.start(2, {"hero": learner})
        await checkpoints.start(3, {"hero": learner})
        with pytest.raises(RunFolderError, match=r"step 3 cannot be written.*No space left.*newest is .*step-000001"):
            await checkpoints.finish()
        assert names(tmp_path) == ["step-000001"]  # the half of it makes no room scarcer
        learner.error = None
        await checkpoints.save(4, {"hero": learner})

    asyncio.run(run())
    assert "step 2 cannot be written" in caplog.text and "training continues" in caplog.text
    assert restore(tmp_path) == (4, 1)


def test_a_folder_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="there is none yet"):
        save(tmp_path / "file/checkpoints", 1)


def test_cancelled_run_drops_its_unfinished_checkpoint(tmp_path, caplog):
    learner, begun = Learner(1), asyncio.Event()

    async def run():
        checkpoints = Checkpoints(tmp_path, keep=2)
        learner.free.clear()
        await checkpoints.start(1, {"hero": learner})
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            await checkpoints.settle()

    async def main():
        task = asyncio.ensure_future(run())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        learner.free.set()

    asyncio.run(main())
    assert "was not finished" in caplog.text
    assert restore(tmp_path) == (0, -1)


def test_the_newest_of_a_very_long_run_is_the_newest(tmp_path):
    for step in (999_999, 1_000_000):
        save(tmp_path, step, reward=Reward(step))
    assert [folder.name for folder in Checkpoints(tmp_path, keep=2).complete()] == ["step-1000000", "step-999999"]
    assert saved_reward(tmp_path)["a/seen"] == 1_000_000 and restore(tmp_path)[0] == 1_000_000


def test_damaged_reward_state_is_an_error(tmp_path):
    save(tmp_path, 1, reward=Reward(3))
    assert saved_reward(tmp_path)["a/seen"] == 3
    cut(tmp_path / "step-000001/reward.npz")
    with pytest.raises(ForgeError, match="cannot be read"):
        saved_reward(tmp_path)
    shutil.rmtree(tmp_path / "step-000001")
    assert saved_reward(tmp_path) == {}


@pytest.mark.parametrize(
    "mark",
    [
        {"step": 1, "policies": ["../../elsewhere"]},
        {"step": 1, "policies": ["/elsewhere"]},
        {"step": 1, "policies": ["hero"], "files": {"../../secret": [6, 0]}},
        {"step": 1, "policies": ["hero"], "files": {"hero/pipe": [6, 0]}},
        {"step": 1, "policies": ["hero"], "score": "best"},
        {"step": 1, "policies": ["hero"], "score": 10**400},
        {"step": math.inf, "policies": ["hero"]},
        *({"step": 1, "policies": ["hero"], "score": score} for score in ([], {}, "", math.nan, math.inf)),
        *({"step": 1, "policies": ["hero"], "files": files} for files in ([], "", {"hero/a": 1}, {"hero/a": []})),
        *({"step": 1, "policies": ["hero"], "chunk_bytes": size} for size in (None, "", 1, 1.5, math.nan)),
        *({"step": 1, "policies": [], "compute_dtypes": each} for each in ([], "", {"a": "int8"}, {"a": ["bfloat16"]})),
        "[" * 100_000,
    ],
)
def test_a_mark_that_leads_out_of_its_folder_is_damaged(tmp_path, mark):
    folder = tmp_path / "checkpoints" / "step-000001"
    (folder / "hero").mkdir(parents=True)
    os.mkfifo(folder / "hero" / "pipe")
    (folder / "experiment.json").write_text(mark if isinstance(mark, str) else json.dumps(mark))
    assert Checkpoints(tmp_path / "checkpoints", keep=1).best() is None
    with pytest.raises((OSError, ValueError)):
        checked_mark(folder)


@pytest.mark.parametrize("values", [{"score": []}, {"files": []}, {"files": {"x": 1}}, {"chunk_bytes": None}])
def test_values_that_no_checkpoint_has_stop_no_resumed_run(tmp_path, values):
    save(tmp_path, 1, 2, scores={1: 0.1, 2: 0.2})
    mark = tmp_path / "step-000002/experiment.json"
    mark.write_text(json.dumps(json.loads(mark.read_text()) | values))
    checkpoints = Checkpoints(tmp_path, keep=2, keep_best=True)
    checkpoints.check_resumable(["hero"])
    assert checkpoints.finished(1, ["hero"]) == 0
    assert checkpoints.is_best(0.15) and not checkpoints.is_best(0.05)
    assert restore(tmp_path) == (1, 1)


def test_checkpoint_with_more_checksums_than_chunks_is_damaged(tmp_path):
    save(tmp_path, 100)
    mark = tmp_path / "step-000100/experiment.json"
    mark.write_text(json.dumps(json.loads(mark.read_text()) | {"files": {"hero/value.json": [3, 0, 0]}}))
    with pytest.raises(ValueError, match="has 2 sums for 3 bytes"):
        checked_mark(tmp_path / "step-000100")


def test_link_in_an_older_checkpoint_stops_no_resumed_run(tmp_path):
    save(tmp_path, 1, 2, scores={1: 0.1, 2: 0.2})
    (tmp_path / "step-000001/x.npz").symlink_to(tmp_path / "step-000002/experiment.json")
    checkpoints = Checkpoints(tmp_path, keep=2, keep_best=True)
    assert checkpoints.best() == tmp_path / "step-000002" and checkpoints.other_measures() == []


def test_a_score_of_zero_is_better_than_one_below(tmp_path):
    save(tmp_path, 1, 2, keep=2, scores={1: 0.0, 2: -1.0})
    checkpoints = Checkpoints(tmp_path, keep=2, keep_best=True)
    assert not checkpoints.is_best(-0.5) and checkpoints.is_best(0.0)
