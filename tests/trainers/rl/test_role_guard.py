"""The role guard: measures of each role, warnings before a role stops learning, and silence in good runs."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_processes import sampled_turn
from fake_run import Draws, trainer

from forge_agents.types import Episode, EpisodeError, EpisodeGroup, Trajectory, VersionSpan
from forge_trainers.rl.role_guard import RoleGuard, role_metrics

GOOD_RUNS = json.loads((Path(__file__).parent / "good_runs.json").read_text())


def made(agents, advantages, *, policy="team", error=None):
    """A group of one episode. `agents` has the log-probabilities of each agent's only turn."""
    trajectories = {
        agent: Trajectory(
            agent=agent,
            policy=policy,
            turns=(sampled_turn(agent, 0, 0.0, policy, (3,) * len(logprobs), logprobs=tuple(logprobs)),),
        )
        for agent, logprobs in agents.items()
    }
    episode = Episode(env_id="t", seed=0, trajectories=trajectories, error=error)
    return EpisodeGroup(env_id="t", seed=0, episodes=(episode,), advantages=advantages)


def test_measures_of_roles_are_means_over_their_tokens():
    half, sure = float(np.log(0.5)), 0.0
    groups = [
        made({"a": [half, sure], "b": [half] * 4}, {"a": [np.array([-2.0])], "b": [np.array([0.5])]}),
        made({"a": [half, half], "b": [half] * 4}, {"a": [None], "b": [None]}),  # zero variance
    ]
    metrics = role_metrics(groups, {"team"})
    assert metrics == pytest.approx(
        {
            "roles/a/advantage_mass": 2 * 2 / 4,
            "roles/a/gradient": 2 * 0.5 / 4,
            "roles/a/entropy": 3 * np.log(2) / 4,
            "roles/a/gradient_share": 0.5,  # 1 of 2 * 0.5 + 4 * 0.5 * 0.5
            "roles/b/advantage_mass": 4 * 0.5 / 8,
            "roles/b/gradient": 4 * 0.5 * 0.5 / 8,
            "roles/b/entropy": np.log(2),
            "roles/b/gradient_share": 0.5,
        }
    )


def test_role_of_several_policies_is_measured_over_all_of_them():
    half = float(np.log(0.5))
    groups = [
        made({"a": [half] * 3, "b": [half]}, {"a": [np.array([1.0])], "b": [np.array([1.0])]}, policy="one"),
        made({"a": [half], "b": [half] * 3}, {"a": [np.array([3.0])], "b": [np.array([1.0])]}, policy="two"),
    ]
    metrics = role_metrics(groups, {"one", "two"})
    assert metrics["roles/a/advantage_mass"] == pytest.approx((3 * 1 + 1 * 3) / 4)
    assert metrics["roles/a/gradient"] == pytest.approx(0.5 * 6 / 4)
    assert metrics["roles/b/advantage_mass"] == pytest.approx(1.0)
    assert metrics["roles/a/gradient_share"] == pytest.approx(0.6)  # 6 of 10 in both policies
    alone = [made({"a": [half]}, {"a": [np.array([1.0])]}, policy=policy) for policy in ("one", "two")]
    assert role_metrics(alone, {"one", "two"}) == {}  # one role


def test_tokens_that_close_the_reasoning_do_not_count():
    half = float(np.log(0.5))
    group = made({"a": [half, half, 0.0], "b": [half]}, {"a": [np.array([1.0])], "b": [None]})
    (episode,) = group.episodes
    (turn,) = episode.trajectories["a"].turns
    turn = replace(turn, versions=(VersionSpan(version=0, start=0, end=2),))
    trajectories = {**episode.trajectories, "a": replace(episode.trajectories["a"], turns=(turn,))}
    metrics = role_metrics([replace(group, episodes=(replace(episode, trajectories=trajectories),))], {"team"})
    assert metrics["roles/a/advantage_mass"] == 1.0
    assert metrics["roles/a/entropy"] == pytest.approx(-half) and metrics["roles/a/gradient"] == pytest.approx(0.5)


def test_gradient_is_half_of_the_l1_norm_at_the_logits():
    logits = torch.randn(5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    logprob = logits.log_softmax(0)[2]
    (-1.5 * logprob).backward()
    group = made({"a": [logprob.item()], "b": [-1.0]}, {"a": [np.array([1.5])], "b": [None]})
    assert role_metrics([group], {"team"})["roles/a/gradient"] == pytest.approx(float(logits.grad.abs().sum()) / 2)


def test_frozen_roles_failed_groups_and_single_roles_are_not_measured():
    advantages = {"a": [np.array([1.0])], "b": [np.array([1.0])]}
    both = {"a": [-1.0, float("nan")], "b": [-1.0]}
    failed = made(both, advantages, error=EpisodeError(where="env", kind="ValueError", message="x"))
    assert role_metrics([made(both, advantages)], {"other"}) == {} == role_metrics([failed], {"team"})
    assert role_metrics([made({"a": [-1.0]}, {"a": [np.array([1.0])]})], {"team"}) == {}
    assert role_metrics([made(both, advantages)], {"team"})["roles/a/entropy"] == 1.0  # NaN is no token


def run(steps, curves, *, seed=0, share=None):
    """Warnings by step of a run with ``curves[role](x) -> (reward, gradient, entropy)``, x from 0 to 1."""
    rng, guard, warnings = np.random.default_rng(seed), RoleGuard(), {}
    for step in range(steps):
        row = {}
        for role, curve in curves.items():
            reward, gradient, entropy = curve(step / (steps - 1)) * (1 + 0.03 * rng.standard_normal(3))
            row |= {f"reward/{role}": reward, f"roles/{role}/gradient": gradient, f"roles/{role}/entropy": entropy}
            row |= {f"roles/{role}/advantage_mass": gradient} | ({} if share is None else share[role])
        guard._ranges = dict.fromkeys(curves, (0.0, 1.0))
        if new := guard.after(row, [], {}):
            warnings[step] = new
    return warnings


def learns(x):
    return np.array([0.1 + 0.8 * x, 0.5, 2.0 - x])


def dies(x):
    return np.array([0.1, 0.5 * np.exp(-5 * x), 2.0 * np.exp(-5 * x)])


def shares(**values):
    return {role: {f"roles/{role}/gradient_share": value} for role, value in values.items()}


def test_role_that_stops_learning_is_announced_five_steps_before():
    warnings = run(100, {"a": learns, "b": dies})
    (step,) = warnings
    dead = np.log(20) / 5 * 99  # the gradient is at 5 % of its start
    assert dead - 20 < step <= dead - 5
    assert warnings[step][0].startswith("role b stops learning in about")
    assert warnings[step][0].endswith("that of a still changes. Set entropy_coef")
    shared = run(100, {"a": learns, "b": dies}, share=shares(a=0.7, b=0.3))
    assert shared[step][0].startswith("role b stops learning in about") and "balance_roles=True" in shared[step][0]


def test_role_that_captures_its_policy_is_announced():
    warnings = run(100, {"a": learns, "b": dies}, share=shares(a=0.95, b=0.05))
    first = min(warnings)
    assert first < 20 and warnings[first][0].startswith("role a captures its policy: it holds 95% of the gradient")
    equal = run(100, {"a": learns, "b": dies}, share=shares(a=0.7, b=0.3))
    assert not any("captures" in text for texts in equal.values() for text in texts)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "curves",
    [
        {"a": learns, "b": lambda x: np.array([0.1 + 0.85 * min(1, 2 * x), 0.5 * np.exp(-5 * x), 2 * np.exp(-5 * x)])},
        {"a": learns, "b": lambda x: np.array([0.95, 0.5 * np.exp(-5 * x), 2 * np.exp(-5 * x)])},
        {"a": learns, "b": lambda x: np.array([0.1 + 0.4 * min(1, 2 * x), 0.5 * np.exp(-5 * x), 2 * np.exp(-5 * x)])},
        {"a": lambda x: np.array([0.3, 0.5, 2.0]), "b": dies},
        {"a": lambda x: np.array([0.3, 0.5, 2.0]), "b": lambda x: np.array([0.3, 0.5, 2.0])},
        {"a": learns, "b": lambda x: np.array([0.1, 0.3, 2.0])},
    ],
    ids=[
        "solves its task",
        "is solved",
        "keeps its best level",
        "all rewards stand still",
        "does not learn",
        "is slow",
    ],
)
def test_good_and_idle_runs_cause_no_warning(curves, seed):
    assert run(100, curves, seed=seed, share=shares(a=0.97, b=0.03)) == {}


@pytest.mark.parametrize("name", GOOD_RUNS)
def test_recorded_good_runs_cause_no_warning(name):
    recorded = GOOD_RUNS[name]
    guard = RoleGuard()
    rewards = {agent: np.array([0.0, best]) for agent, best in recorded["best"].items()}
    group = EpisodeGroup(env_id="t", seed=0, episodes=(), rewards=rewards)
    rows = [dict(zip(recorded["metrics"], row, strict=True)) for row in recorded["rows"]]
    assert [text for row in rows for text in guard.after(row, [group], {})] == []
    assert len(rows) >= 10 and sum(name.endswith("/gradient") for name in recorded["metrics"]) >= 2


def test_resumed_guard_continues_with_earlier_steps():
    rows = [{"reward/a": 0.1 + step / 20, "roles/a/gradient": 1.0, "roles/a/entropy": 2.0} for step in range(12)]
    rows = [{**row, "step": 1, "reward/b": 0.1 - step / 200, "roles/b/entropy": 2.0} for step, row in enumerate(rows)]
    rows = [{**row, "roles/b/gradient": 0.8**step, "roles/b/advantage_mass": None} for step, row in enumerate(rows)]
    for first in (0, 6):
        guard = RoleGuard(rows[:first])
        guard._ranges = dict.fromkeys("ab", (0.0, 1.0))
        new = [text for row in rows[first:] for text in guard.after({**row, "roles/b/advantage_mass": 1.0}, [], {})]
        assert len(new) == 1 and new[0].startswith("role b stops learning in about")


def test_resumed_guard_knows_the_range_of_earlier_rewards():
    """The reward falls to a constant, which is not near the maximum that the role has earned before."""
    curves = [(0.1 + step / 20, max(0.1, 0.9 - step / 10), 0.8**step) for step in range(16)]
    metrics = ("reward/a", "reward/team/b", "roles/team/b/gradient")
    same = dict.fromkeys(("roles/a/gradient", "roles/a/entropy", "roles/team/b/entropy"), 1.0)
    rows = [dict(zip(metrics, each, strict=True)) | same | {"roles/team/b/advantage_mass": 1.0} for each in curves]

    def warned(first):
        guard, steps = RoleGuard(rows[:first]), []
        for step, row in enumerate(rows[first:], first):
            rewards = {agent: np.array([row[f"reward/{agent}"]]) for agent in ("a", "team/b")}
            group = EpisodeGroup(env_id="t", seed=0, episodes=(), rewards=rewards)
            steps += [(step, text.split()[1]) for text in guard.after(row, [group], {})]
        return steps

    assert warned(0) == [(9, "team/b")]
    assert warned(13) == [(13, "team/b")]


class Two(Draws):
    """As `Draws`, with two agents in turn."""

    possible_agents = ("a", "b")


def test_run_records_roles_and_warnings(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(RoleGuard, "after", lambda self, metrics, groups, max_rewards: ["role b stops"])
    with trainer(tmp_path) as made_trainer:
        rows = made_trainer.fit(Two, steps=2).metrics
    assert {name for name in rows[1] if name.startswith("roles/a")} == {
        f"roles/a/{name}" for name in ("advantage_mass", "gradient", "entropy", "gradient_share")
    }
    assert rows[1]["roles/b/entropy"] == 1.0  # the fake engine's log-probabilities are -1
    warnings = [json.loads(line) for line in (tmp_path / "warnings.jsonl").read_text().splitlines()]
    assert warnings == [{"step": step, "warning": "role b stops"} for step in (1, 2)]
    assert capsys.readouterr().out.count("warning: role b stops") == 2


@pytest.mark.parametrize("value", ["abc", [1], {"a": 1}, 10**400, None, math.nan])
def test_values_of_a_strangers_run_that_are_no_numbers_are_left_out(value):
    rows = [
        {"step": 1, "reward/left": 0.25, "roles/left/gradient": 2.0},
        {"reward/left": value, "roles/left/gradient": value},
    ]
    guard = RoleGuard(rows)
    assert guard._ranges["left"] == (0.25, 0.25)
    assert [*guard._curves["roles/left/gradient"]._last] == [2.0]
