"""A killed and resumed run with prefetching: every group is collected, scored and trained on once."""

import asyncio
import contextlib
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from fake_processes import TEAM, Counting, Duel, Processes, collect_with, group
from fake_run import KillError

import forge_agents as fa
from forge_trainers.rl import session
from forge_trainers.rl.prefetch import Prefetch, TakenGroups
from forge_trainers.rl.reward_state import RewardState
from forge_trainers.rl.trainer import GRPOTrainer
from forge_trainers.run.checkpoints import Checkpoints

STEPS, SIZE = 9, 3


def of(step, number):
    """Return a group whose rewards identify it."""
    name = (step * SIZE + number + 1) / 100
    return group(name, name / 2, seed=step * SIZE + number)


def run(folder, monkeypatch, *, staleness, killed_in=None, fails_in=None, slow=()):
    """Train to the end, or until the learner of a step dies. Returns the ensemble and the groups of each step.

    Args:
        fails_in: Step whose last group raises an error when the step before is complete.
        slow: Groups that end when their step has been learned from.
    """
    learned = []

    async def collect(collector, step, numbers, put, attempt):
        async def collect_group(number):
            await asyncio.sleep(0.001)
            if (step, number) in slow:
                await done[step].wait()
            if (step, number) == (fails_in, SIZE - 1):
                await done[step - 1].wait()
                raise ZeroDivisionError
            put(number, of(step, number))

        await asyncio.gather(*map(collect_group, numbers))

    class Learns(Processes):
        def __init__(self):
            super().__init__()
            self.learners["team"].train_step = self.train_step

        async def train_step(self, batch, **_):
            await asyncio.sleep(0.03)  # scoring continues meanwhile
            if len(learned) + first == killed_in:
                raise KillError
            return {"logprob_gap_mean": 0.0}

    rules = [fa.Rule(lambda t, power=power: abs(t.reward) ** power, name=f"r{power}") for power in (1, 2, 3)]
    ensemble = fa.Ensemble(rules, max_rows=10_000)
    config = fa.GRPOConfig(
        groups_per_step=SIZE, checkpoint_every=3, max_staleness=staleness, max_resamples=0, keep_episodes=99
    )
    trainer = GRPOTrainer({"player_0": TEAM, "player_1": fa.Random(name="rival")}, ensemble, config, folder)
    trainer._lifecycle.processes = Learns()
    collect_with(trainer, collect)
    log, first = session.log_step, max([int(p.name[5:]) for p in folder.glob("checkpoints/step-*")], default=0)

    done = [asyncio.Event() for _ in range(STEPS)]
    for event in done[:first]:
        event.set()

    def logged(run, step, groups, *rest, **options):
        learned.append([(group.seed // SIZE, group.seed % SIZE) for group in groups])
        log(run, step, groups, *rest, **options)
        done[step].set()

    monkeypatch.setattr(session, "log_step", logged)
    error = KillError if killed_in is not None else ZeroDivisionError if fails_in is not None else None
    with pytest.raises(error) if error else contextlib.nullcontext():
        trainer.fit(Duel, steps=STEPS)
    trainer.close()
    return ensemble, learned


def flat(steps):
    return list(itertools.chain.from_iterable(steps))


def rows(ensemble):
    """Return the scores of the window in the order of the groups."""
    scores = ensemble.state_dict()["window/scores"]
    return scores[np.lexsort(scores.T)]


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_resumed_run_fits_the_ensemble_with_every_row_once(tmp_path, staleness, capsys, monkeypatch):
    slow = {(2, 1), (5, 0)} if staleness == 2 else ()
    whole, steps = run(tmp_path / "whole", monkeypatch, staleness=staleness, slow=slow)
    every = [(step, number) for step in range(STEPS) for number in range(SIZE)]
    assert sorted(flat(steps)) == every
    _, before = run(tmp_path / "killed", monkeypatch, staleness=staleness, killed_in=4, slow=slow)
    assert "continuing after" not in capsys.readouterr().out
    resumed, after = run(tmp_path / "killed", monkeypatch, staleness=staleness, slow=slow)
    assert "continuing after step 3\n" in capsys.readouterr().out
    assert sorted(flat(before[:3] + after)) == every, "none is learned from twice, none left out"
    if staleness == 2:  # the slow group is late, and a group of the next step replaces it
        assert (2, 1) not in flat(before[:3]) and (3, 0) in before[2] and (2, 1) in after[0]
    np.testing.assert_allclose(rows(resumed), rows(whole))


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_an_error_between_two_steps_loses_no_complete_step(tmp_path, staleness, capsys, monkeypatch):
    whole, _ = run(tmp_path / "whole", monkeypatch, staleness=staleness)
    _, before = run(tmp_path / "failed", monkeypatch, staleness=staleness, fails_in=5)
    assert len(before) == 5 and "step 5 was saved. The same call continues after it" in capsys.readouterr().out
    resumed, after = run(tmp_path / "failed", monkeypatch, staleness=staleness)
    assert "continuing after step 5\n" in capsys.readouterr().out
    assert sorted(flat(before[:5] + after)) == [(step, number) for step in range(STEPS) for number in range(SIZE)]
    np.testing.assert_allclose(rows(resumed), rows(whole))


def test_a_step_that_an_error_interrupts_is_not_saved(tmp_path, monkeypatch):
    run(tmp_path, monkeypatch, staleness=0, killed_in=4)
    assert [folder.name for folder in sorted(tmp_path.glob("checkpoints/step-*"))] == ["step-000003"]


def test_scores_of_prefetched_groups_are_not_saved():
    reward = Counting()
    evidence = RewardState(reward)
    for step in (0, 1):
        evidence.begin_scoring(step)
        reward.seen += 1
        evidence.end_scoring(step)
    evidence.settle(0)
    evidence.begin_scoring(2)
    reward.seen += 1
    assert evidence.state_dict() == {"seen": 1}
    evidence.settle(1)
    assert evidence.state_dict() == {"seen": 2}
    evidence.begin()
    assert reward.seen == 2
    reward.seen += 5  # changed between two calls of fit
    assert evidence.state_dict() == {"seen": 7}
    evidence.begin()
    assert reward.seen == 7
    assert not RewardState(len).exists and RewardState(len).state_dict() == {}


def test_changed_verifier_or_label_of_a_resumed_run_loses_its_earlier_scores(tmp_path):
    def positive(trajectory):
        return float(trajectory.reward > 0.5)

    def negative(trajectory):
        return float(trajectory.reward <= 0.5)

    def solved(trajectory):
        return trajectory.reward > 0.5

    def resumed(judge, *, label=None):
        rules = [fa.Rule(lambda t: abs(t.reward), name="plain"), fa.Rule(judge, name="judge", cost="expensive")]
        ensemble = fa.Ensemble(rules, label=label)
        state = RewardState(ensemble, [ensemble])
        checkpoints = Checkpoints(tmp_path, keep=1, parts={"reward": state})
        asyncio.run(checkpoints.restore({"team": learner}))
        return ensemble, checkpoints

    async def nothing(*_, **__):
        return {}

    learner = SimpleNamespace(load=nothing, start_save=nothing, finish_save=nothing, compute_dtype="float32")
    played = [group(0.2, 0.8, seed=seed).episodes[0].trajectories["player_0"] for seed in range(8)]
    played += [group(0.8, 0.2, seed=seed).episodes[0].trajectories["player_0"] for seed in range(8, 16)]
    first, checkpoints = resumed(positive, label=solved)
    first(played)
    asyncio.run(checkpoints.save(1, {"team": learner}))
    same, _ = resumed(positive, label=solved)
    window = same.state_dict()["window/queried"]
    assert window.shape == (16, 2) and window.all() and len(same._panel._cache) > 0
    np.testing.assert_array_equal(same(played), first(played))
    changed, _ = resumed(negative)
    state = changed.state_dict()
    assert state["window/queried"].sum(axis=0).tolist() == [16, 0] and not len(changed._panel._cache)
    assert np.isnan(state["window/labels"]).all()
    assert changed.scores(played)[:, 1].tolist() == [negative(trajectory) for trajectory in played]


def test_restart_without_a_checkpoint_resets_the_reward(tmp_path):
    reward = fa.Ensemble([fa.Rule(lambda t: t.reward, name=name) for name in "abc"])
    checkpoints = Checkpoints(tmp_path, keep=1, parts={"reward": RewardState(reward)})
    assert asyncio.run(checkpoints.restore({"team": SimpleNamespace()})) == 0
    reward([episode.trajectories["player_0"] for episode in of(0, 0).episodes])
    assert len(rows(reward)) == 2
    assert asyncio.run(checkpoints.restore({"team": SimpleNamespace()})) == 0
    assert len(rows(reward)) == 0


def test_early_and_owed_groups_survive_a_checkpoint():
    taken = TakenGroups()
    taken.take(0, [(0, 0), (1, 2)], 2)  # of (0, 0), (0, 1)
    taken.take(1, [(0, 1), (1, 0)], 2)
    assert taken.state_dict()["early"].shape == (0, 2), "nothing is learned from yet"
    taken.settle(0)
    again = TakenGroups()
    again.load_state_dict(taken.state_dict())
    assert (again.early, again.owed) == ({(1, 2)}, {(0, 1)})
    assert again.missing(0, 2) == [1] and again.missing(1, 3) == [0, 1] and again.missing(2, 3) == [0, 1, 2]

    played = []

    async def collect(step, numbers, put):
        for number in again.missing(step, 2):
            played.append((step, number))
            put(number, (step, number))

    async def judge(step, groups):
        return groups

    async def rest():
        ahead = Prefetch(collect, judge, staleness=2, steps=3, size=2, taken=again)
        result = []
        for step in (1, 2):
            result.append(await ahead.batch(step).scored)
            again.settle(step)
        return result

    again.early = frozenset({(1, 1)})
    again.begin()
    assert asyncio.run(rest()) == [[(0, 1), (1, 0)], [(2, 0), (2, 1)]]
    assert played == [(0, 1), (1, 0), (2, 0), (2, 1)] and not again.early | again.owed
