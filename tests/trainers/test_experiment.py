import asyncio
import json

import numpy as np
import pytest

from forge_agents.errors import ForgeError
from forge_trainers.credit import Baselines
from forge_trainers.experiment import Checkpoints


class Learner:
    """Keeps a number in a file."""

    def __init__(self, value=0):
        self.value = value

    async def save(self, folder):
        folder.mkdir()
        (folder / "value.json").write_text(json.dumps(self.value))

    async def load(self, folder):
        self.value = json.loads((folder / "value.json").read_text())


class Reward:
    def __init__(self, seen=0):
        self.seen = seen

    def state_dict(self):
        return {"a/seen": np.array(self.seen), "names": np.array(["x", "y"])}

    def load_state_dict(self, state):
        self.seen = int(state["a/seen"])


def save(folder, *steps, keep=2, reward=None):
    for step in steps:
        asyncio.run(Checkpoints(folder, keep=keep, reward=reward).save(step, {"hero": Learner(step)}))


def restore(folder, reward=None):
    learner = Learner(-1)
    step = asyncio.run(Checkpoints(folder, keep=2, reward=reward).restore({"hero": learner}))
    return step, learner.value


def test_the_newest_is_restored_and_the_oldest_forgotten(tmp_path):
    save(tmp_path, 10, 20, 100)
    assert restore(tmp_path) == (100, 100)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000020", "step-000100"]


def test_nothing_saved_means_step_zero(tmp_path):
    assert restore(tmp_path) == (0, -1)


def test_a_half_written_checkpoint_is_invisible(tmp_path):
    save(tmp_path, 10)
    (tmp_path / ".draft-000020").mkdir()
    (tmp_path / "step-000030").mkdir()
    assert restore(tmp_path) == (10, 10)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, caplog):
    save(tmp_path, 10, 20)
    (tmp_path / "step-000020/hero/value.json").write_text("{")
    assert restore(tmp_path) == (10, 10)
    assert "step-000020 does not load" in caplog.text


def test_no_checkpoint_that_loads_is_an_error(tmp_path):
    save(tmp_path, 10)
    (tmp_path / "step-000010/hero/value.json").unlink()
    with pytest.raises(ForgeError, match="no checkpoint loads"):
        restore(tmp_path)


def test_other_policies_are_refused(tmp_path):
    save(tmp_path, 10)
    with pytest.raises(ForgeError, match=r"holds the policies \['hero'\]"):
        asyncio.run(Checkpoints(tmp_path, keep=2).restore({"rival": Learner()}))


def test_what_a_reward_has_learned_is_kept(tmp_path):
    save(tmp_path, 10, reward=Reward(7))
    fresh = Reward()
    restore(tmp_path, reward=fresh)
    assert fresh.seen == 7


def test_running_baselines_are_restored_with_the_learners(tmp_path):
    running, later = Baselines(), Baselines()
    running.update("env/a", np.array([1.0, 3.0]), 0.5)
    asyncio.run(Checkpoints(tmp_path, keep=1, baselines=running).save(5, {"hero": Learner(1)}))
    asyncio.run(Checkpoints(tmp_path, keep=1, baselines=later).restore({"hero": Learner()}))
    assert later.update("env/a", np.array([1.5]), 0.5) == 1.5
    assert later.update("env/b", np.array([1.0]), 0.5) == 0.5
