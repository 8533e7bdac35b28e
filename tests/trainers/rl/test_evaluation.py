"""Evaluations that overlap with the collection of the next step: results, and no side effects."""

import asyncio
import math
import random

import numpy as np
import pytest
from fake_run import TEAM, Draws, KillError, Processes, trainer

import forge_agents as fa
import forge_verifiers as fv
from forge_agents.errors import RunFolderError
from forge_trainers.rl.collect import Collector
from forge_trainers.rl.evaluation import Evaluator
from forge_trainers.rl.rewards import env_reward
from forge_trainers.rl.trainer import GRPOTrainer


@pytest.fixture(autouse=True)
def slow_evaluations(monkeypatch):
    measured = Evaluator.metrics

    async def metrics(self):
        processes = self._lifecycle.running
        version = processes.learners["team"].version
        metrics = await measured(self)
        await asyncio.sleep(0.05)
        assert processes.learners["team"].version == processes.engine.version == version
        return metrics

    monkeypatch.setattr(Evaluator, "metrics", metrics)


def held_out_rewards(monkeypatch, rewards):
    """Let evaluations report `rewards`, by version of the weights."""
    measured = Evaluator.metrics

    async def metrics(self):
        version = self._lifecycle.running.learners["team"].version
        return await measured(self) | {"eval/reward": rewards[version]}

    monkeypatch.setattr(Evaluator, "metrics", metrics)


STEPS = 4


def test_overlapping_evaluation_does_not_change_rewards(tmp_path):
    with trainer(tmp_path / "beside", eval_every=2) as run:
        rows = run.fit(Draws, steps=STEPS).metrics
        assert run._lifecycle.processes.engine.most == 2 * 3 + 5, "an evaluation and a step are played together"
    with trainer(tmp_path / "ahead", eval_every=2, max_staleness=1) as run:
        ahead = run.fit(Draws, steps=STEPS).metrics
    with trainer(tmp_path / "apart") as run:
        held_out = []
        for steps in (2, STEPS):
            apart = run.fit(Draws, steps=steps).metrics
            held_out.append(run.evaluate(Draws, episodes=5).reward)
    measured = [row.get("eval/reward") for row in rows]
    assert measured == [row.get("eval/reward") for row in ahead] == [None, held_out[0], None, held_out[1]]
    assert [row["reward/mean"] for row in rows] == [row["reward/mean"] for row in apart]
    assert held_out[0] != held_out[1], "each is of its own version"
    # the time of a step that overlaps with an evaluation starts with the evaluation
    assert [("time/evaluate_s" in row) for row in rows] == [False, False, True, False]
    for row in rows:
        stages = [value for name, value in row.items() if name.startswith("time/") and name != "time/step_s"]
        assert row["time/step_s"] == pytest.approx(sum(stages))
    assert rows[2]["time/evaluate_s"] > 0.05


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (4, 4), (512, 6)])
def test_max_concurrent_episodes_bounds_the_episodes_at_the_same_time(tmp_path, limit, most):
    with trainer(tmp_path, max_concurrent_episodes=limit) as run:
        result = run.fit(Draws, steps=1)
        assert run._lifecycle.processes.engine.most == most, "two groups of three episodes"
    assert result.metrics[0]["groups/used"] + result.metrics[0]["groups/zero_variance"] == 2


def test_run_killed_during_or_after_an_evaluation_resumes_equal(tmp_path):
    def noisy(trajectories):
        return [trajectory.reward + random.random() for trajectory in trajectories]

    def fit(folder, **options):
        with trainer(folder, reward=noisy, eval_every=1, checkpoint_every=1, **options) as run:
            return run.fit(Draws, steps=STEPS).metrics

    def lasting(rows):
        return [{name: x for name, x in row.items() if not name.startswith(("time/", "tokens_per_s"))} for row in rows]

    random.seed(7)
    whole = fit(tmp_path / "whole")
    random.seed(7)
    for dies_at in (1, 3):  # in the step after an evaluation, whose groups were collected before the checkpoint
        with pytest.raises(KillError):
            fit(tmp_path / "killed", dies_at=dies_at)
        random.seed(0)
    assert lasting(fit(tmp_path / "killed")) == lasting(whole)


def test_best_checkpoint_holds_the_evaluated_weights(tmp_path, monkeypatch):
    held_out_rewards(monkeypatch, [0.0, 1.0, 3.0, 2.0, 1.0])
    with trainer(tmp_path, eval_every=1, checkpoint_every=100, keep_checkpoints=1) as run:
        run.fit(Draws, steps=STEPS)
    best = run._checkpoints.best()
    assert best.name == "step-000002" and (best / "team" / "version").read_text() == "2"


class Rivals(Draws):
    possible_agents = ("a", "b")

    def act(self, agent, action):
        self.said += 1
        other = "b" if agent == "a" else "a"
        return fa.Outcome(rewards={agent: float(action or 0), other: -float(action or 0)}, done=self.said == 2)


@pytest.mark.parametrize(
    ("tags", "opponent", "reward", "best"),
    [
        (("zero-sum",), TEAM, None, None),
        ((), TEAM, None, "step-000001"),
        (("zero-sum",), fa.Scripted(lambda seen: "1", name="one"), None, "step-000001"),
        (("zero-sum",), TEAM, lambda trajectory: abs(trajectory.reward), "step-000001"),
    ],
)
def test_zero_sum_self_play_ranks_no_checkpoint(tmp_path, capsys, monkeypatch, *, tags, opponent, reward, best):
    held_out_rewards(monkeypatch, [0.0, 0.2, 0.1])
    fa.register("tests/Rivals-v0", entry_point=Rivals, tags=tags)
    settings = {"eval_episodes": 4, "eval_every": 1, "checkpoint_every": 1}
    with trainer(tmp_path, policies={"a": TEAM, "b": opponent}, reward=reward, **settings) as run:
        run.fit("tests/Rivals-v0", steps=2)
        result = run._checkpoints.best()
    assert (result and result.name) == best
    assert ("does not rank checkpoints: the newest counts as the best" in capsys.readouterr().out) == (best is None)


@pytest.mark.parametrize("every", [0, 3])
def test_no_groups_are_collected_after_the_last_step(tmp_path, every, monkeypatch):
    played = []

    collect = Collector.collect

    async def counted(self, step, numbers, put):
        played.append(step)
        await collect(self, step, numbers, put)

    monkeypatch.setattr(Collector, "collect", counted)
    with trainer(tmp_path, eval_every=every) as run:
        run.fit(Draws, steps=3)
    assert played == [0, 1, 2]


def test_evaluation_reports_its_weights(tmp_path, capsys, monkeypatch):
    async def start(*args, **kwargs):
        return Processes(None)

    monkeypatch.setattr("forge_trainers.rl.lifecycle.Processes.start", start)

    def evaluated():
        config = fa.GRPOConfig(group_size=3, groups_per_step=2, preflight=False)
        with GRPOTrainer(TEAM, config=config, out_dir=tmp_path) as run:
            run.evaluate(Draws, episodes=2)
            run.evaluate(Draws, episodes=2)
        return capsys.readouterr().err

    assert evaluated().count("evaluating the start models (there is no checkpoint)") == 1
    with trainer(tmp_path) as run:
        run.fit(Draws, steps=2)
    capsys.readouterr()
    assert evaluated().count(f"{tmp_path}: evaluating the weights after step 2") == 1


@pytest.mark.parametrize("link", ["plan.yaml", ".plan.yaml.draft", "faults.jsonl", None])
def test_evaluation_replaces_no_file_of_strangers_or_other_programs(tmp_path, link):
    out_dir = tmp_path / "run"
    file = out_dir / "plan.yaml" if link is None else tmp_path / "mine"
    out_dir.mkdir()
    file.write_text("my: plan")
    if link is not None:
        (out_dir / link).symlink_to(file)
    with trainer(out_dir) as run, pytest.raises(RunFolderError, match=r"is a link|has plan.yaml, which a run would"):
        run.evaluate(Draws, episodes=2)
    assert file.read_text() == "my: plan"


# ---- the measured reward


class Unpaid(Draws):
    """The environment always pays 0."""

    def act(self, agent, action):
        self.said += 1
        return fa.Outcome(done=self.said == 2)


@fa.Rule
def high(trajectory):
    """The mean digit, from 0 to 1."""
    return sum(int(turn.action) for turn in trajectory.turns) / 9 / len(trajectory.turns)


def weak(name, place):
    return fa.Rule(lambda trajectory: int(trajectory.turns[place].action) > 4, name=name)


def mean_of(episodes, verifier=high):
    return float(np.mean(verifier.score([one.trajectories["a"] for one in episodes])))


REWARDS = {
    "rule": lambda: high,
    "function": lambda: lambda trajectory: high.grade(trajectory) * 3,
    "sum": lambda: 2.0 * high + weak("first", 0),
    "columns": lambda: fa.MultiReward({"high": high, "first": weak("first", 0)}),
    "ensemble": lambda: fa.Ensemble([high, weak("first", 0), weak("second", 1)]),
}


@pytest.mark.parametrize("kind", REWARDS)
def test_runs_are_evaluated_by_their_own_reward(tmp_path, kind, capsys):
    with trainer(tmp_path, reward=REWARDS[kind](), eval_every=1, keep_checkpoints=1) as run:
        rows = run.fit(Unpaid, steps=STEPS).metrics
        result = run.evaluate(Unpaid, episodes=5)
        other = run.evaluate(Unpaid, episodes=5, reward=high)
        paid = run.evaluate(Unpaid, episodes=5, reward=env_reward)
        best = run._checkpoints.best()
    measured = [row["eval/reward"] for row in rows]
    assert len(set(measured)) > 1 and {row["eval/env_reward"] for row in rows} == {0.0}
    assert {row["env_reward/mean"] for row in rows} == {0.0} != {row["reward/mean"] for row in rows}
    assert int(best.name.rpartition("-")[2]) == int(np.argmax(measured)) + 1
    assert result.reward == pytest.approx(measured[-1]) and (result.env_reward, result.env_ci) == (0.0, 0.0)
    if kind == "rule":
        assert result.reward == pytest.approx(mean_of(result.episodes))
    assert other.reward == pytest.approx(mean_of(other.episodes)) and other.scored_by == "high"
    assert (paid.reward, paid.scored_by) == (0.0, "environment")
    printed = capsys.readouterr().out
    assert "held-out episodes are scored by the run's reward" in printed and "held-out env 0.000" in printed
    assert "  env 0.000  held-out" in printed


def test_environment_reward_is_not_reported_twice(tmp_path, capsys):
    with trainer(tmp_path, eval_every=1) as run:
        rows = run.fit(Draws, steps=1).metrics
        result = run.evaluate(Draws, episodes=5)
    assert not {"eval/env_reward", "env_reward/mean"} & rows[0].keys() and "scored by" not in capsys.readouterr().out
    assert result.reward == result.env_reward > 0


def test_training_also_reports_the_environment_reward(tmp_path):
    with trainer(tmp_path, reward=lambda trajectory: 5.0 - trajectory.reward) as run:
        rows = run.fit(Draws, steps=2).metrics
    for row in rows:
        assert row["env_reward/mean"] == pytest.approx(5.0 - row["reward/mean"]) and row["env_reward/mean"] > 0


def test_evaluation_does_not_change_the_ensemble(tmp_path):
    def fit(name, **settings):
        with trainer(tmp_path / name, reward=REWARDS["ensemble"](), **settings) as run:
            rows = run.fit(Unpaid, steps=STEPS).metrics
            return [row["reward/mean"] for row in rows], run.reward.state_dict()

    rewards, state = fit("evaluated", eval_every=1)
    same_rewards, same_state = fit("alone")
    assert rewards == same_rewards
    assert state.keys() == same_state.keys() and all(state[k].tobytes() == same_state[k].tobytes() for k in state)


def test_evaluation_during_prefetch_does_not_change_the_reward(tmp_path):
    with trainer(tmp_path, reward=REWARDS["ensemble"](), max_staleness=1, eval_every=1) as run:
        run.fit(Unpaid, steps=STEPS)
        report = run.reward.report()
    assert report.version == STEPS and report.window_rows == STEPS * 6
    assert {verifier.scored for verifier in report.verifiers} == {STEPS * 6}


class CallCount(fv.Composable):
    """A reward that changes with each call: a tenth of the number of calls."""

    name, family, cost = "calls", None, "cheap"

    def __init__(self):
        self.calls = 0

    def score(self, trajectories):
        self.calls += 1
        return np.full(len(trajectories), self.calls / 10)

    def state_dict(self):
        return {"calls": np.array(self.calls)}

    def load_state_dict(self, state):
        self.calls = int(state["calls"])


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_held_out_reward_is_that_of_the_trained_step_whichever_is_scored_first(tmp_path, monkeypatch, max_staleness):
    held_out, late = Collector.held_out, []

    def fit(name, *, slow):
        reward = CallCount()

        async def collected(self, *args):
            groups, trained = await held_out(self, *args), run._lifecycle.next_step
            for _ in range(3000 if slow and trained < STEPS else 0):
                if reward.calls > trained:
                    late.append(trained)
                    break
                await asyncio.sleep(0.02)
            return groups

        monkeypatch.setattr(Collector, "held_out", collected)
        settings = {"eval_every": 1, "max_resamples": 0, "max_empty_steps": STEPS + 1, "max_staleness": max_staleness}
        with trainer(tmp_path / name, reward=reward, preflight=False, **settings) as run:
            rows = run.fit(Unpaid, steps=STEPS).metrics
        return [row["eval/reward"] for row in rows]

    after_training = pytest.approx([0.2, 0.3, 0.4, 0.5])  # one more than the trained steps
    assert fit("fast", slow=False) == fit("slow", slow=True) == after_training
    assert late == [1, 2, 3], "the next step was scored first"


def test_evaluation_does_not_fit_an_ensemble(tmp_path):
    with trainer(tmp_path, reward=REWARDS["ensemble"]()) as run:
        result = run.evaluate(Unpaid, episodes=12)
        assert math.isfinite(result.reward) and run.reward.version == 0 and run.reward.learning


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: fa.Ensemble([high, one, weak("first", 0)])])
def test_reward_that_compares_episodes_is_evaluated_on_groups(tmp_path, wrap):
    with trainer(tmp_path, reward=wrap(fv.SelfConsistency())) as run:
        result = run.evaluate(Unpaid, episodes=5)
    seeds = [episode.seed for episode in result.episodes]
    assert len(seeds) == 6 and len(set(seeds)) == 2, "two groups of group_size=3"
    assert math.isfinite(result.reward) and result.abstained == 0


def test_evaluations_leave_out_and_count_abstentions(tmp_path):
    def unsure(trajectory):
        return None if int(trajectory.turns[0].action) < 5 else 1.0

    with trainer(tmp_path, reward=unsure, eval_every=1) as run:
        row = run.fit(Unpaid, steps=1).metrics[0]
        result = run.evaluate(Unpaid, episodes=5)
    silent = sum(int(one.trajectories["a"].turns[0].action) < 5 for one in result.episodes)
    assert 0 < silent < 5 and result.abstained == row["eval/abstained"] == silent and result.reward == 1.0


@pytest.mark.parametrize(
    "around",
    [
        lambda ensemble: 0.8 * ensemble + 0.2 * fa.Rule(high.grade, name="other"),
        lambda ensemble: fa.MultiReward({"ensemble": ensemble, "first": weak("other", 0)}),
    ],
    ids=["sum", "columns"],
)
def test_rewards_that_contain_an_ensemble_are_evaluated_during_training(tmp_path, around):
    settings = {"eval_every": 1, "max_resamples": 0, "max_empty_steps": STEPS + 1}
    for steps in (2, STEPS):  # the second session resumes
        with trainer(tmp_path, reward=around(REWARDS["ensemble"]()), preflight=False, **settings) as run:
            rows = run.fit(Unpaid, steps=steps).metrics
    assert len(rows) == steps and all(0 < row["eval/reward"] <= 2 for row in rows)
