"""Stopping criteria: a run that is solved, uninformative or broken ends with the reason, and is saved before."""

import asyncio
import contextlib
import json
import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fake_processes import TEAM, Counting, Duel, Learner, Processes, collect_with, group

import forge_agents as fa
from forge_agents.cli import main as cli
from forge_agents.episodes.stored import digest
from forge_agents.errors import EmptyBatchError
from forge_agents.policy import resolve_policies
from forge_agents.types import EpisodeError, EpisodeGroup
from forge_trainers.rl.credit import Credit
from forge_trainers.rl.evaluation import Evaluator
from forge_trainers.rl.failures import describe_error
from forge_trainers.rl.plan import RunPlan
from forge_trainers.rl.policy_mapping import at_step, check_trainable
from forge_trainers.rl.rewards import EnvTurnReward, MultiReward, env_reward, max_reward_of
from forge_trainers.rl.samples import credit_groups
from forge_trainers.rl.scoring import score
from forge_trainers.rl.session import Session
from forge_trainers.rl.stopping import StoppingCriteria
from forge_trainers.rl.tasks import TaskSampler
from forge_trainers.rl.trainer import GRPOTrainer
from forge_verifiers.core.composition import ForAgent
from forge_verifiers.rules.text import Exact


def trainer(folder, played, **settings):
    """A trainer whose groups of a step, and of every resampling round, are `played(step)`."""

    async def collect(collector, step, numbers, put, attempt):
        made.asked.append((step, attempt))
        groups = played(step)
        for number, one in enumerate(groups if put else ()):
            made._lifecycle.messages.report_failure(one)
            put(number, one)
        return groups

    reward = settings.pop("reward", None)
    config = {"groups_per_step": 4, "checkpoint_every": 100, "max_resamples": 0} | settings
    policies = {"player_0": TEAM, "player_1": fa.Random(name="rival")}
    made = GRPOTrainer(policies, reward, fa.GRPOConfig(**config), folder)
    made._lifecycle.processes, made.asked = Processes(), []
    collect_with(made, collect)
    return made


def evaluate_with(run, groups, delay_s=0.0):
    """Let evaluations of `run` collect ``groups()``."""

    async def collect(tasks, collect_group, processes):
        await asyncio.sleep(delay_s)
        return groups()

    run._policies.collect = collect


def test_best_checkpoint_is_ranked_by_the_trained_policy(tmp_path):
    """In a zero-sum game the mean over all agents would be 0 in every evaluation."""
    rewards = [-1.0, 1.0, 0.0]
    settings = {"groups_per_step": 1, "eval_every": 1, "keep_checkpoints": 1}
    with trainer(tmp_path, lambda step: [group(1.0, 0.0, seed=step)], **settings) as run:
        evaluate_with(run, lambda: [group(rewards[run._lifecycle.next_step - 1], seed=n) for n in range(4)])
        result = run.fit(Duel, steps=3)
    assert [row["eval/reward"] for row in result.metrics] == [-1.0, 1.0, 0.0]
    assert [row["eval/reward/team"] for row in result.metrics] == [-1.0, 1.0, 0.0]
    assert [row["reward/team"] for row in result.metrics] == [0.5] * 3
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert saved == ["step-000002", "step-000003"], "the best and the newest"
    rows = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert digest(rows[0]).reward == rows[0]["rewards"]["player_0"] == 1.0 and rows[0]["trained"] == ["team"]


@pytest.mark.parametrize(("full", "warned"), [(1, False), (2, True)], ids=["a tenth", "a fifth"])
def test_run_warns_once_of_many_full_contexts(tmp_path, capsys, full, warned):
    def played(step):
        made = group(1.0, 0.0, *[1.0, 0.0] * 4, seed=step)
        endings = ["context"] * full + ["terminated"] * (10 - full)
        return [replace(made, episodes=tuple(map(lambda e, end: replace(e, end_reason=end), made.episodes, endings)))]

    with trainer(tmp_path, played, groups_per_step=1) as run:
        run.fit(Duel, steps=3)
    shown = [line for line in capsys.readouterr().out.splitlines() if "were out of context" in line]
    assert len(shown) == warned and all("2 of 10 episodes" in line for line in shown)
    rows = (tmp_path / "warnings.jsonl").read_text().splitlines() if warned else []
    assert [json.loads(row)["step"] for row in rows] == [1] * warned


def plan_of(run, sampler):
    return RunPlan(sampler, run._policies, run.config, run.reward)


def test_run_shows_the_policies_of_all_agents(tmp_path, capsys):
    def shown(seats):
        run = GRPOTrainer(seats, out_dir=tmp_path)
        plan = plan_of(run, TaskSampler(Duel))
        run._lifecycle.messages.say = print
        learners = {name: SimpleNamespace(name=f"{name}-l") for name in plan.models}
        run._lifecycle.messages.announce(plan, learners, 20)
        return capsys.readouterr().out.splitlines()

    one, other = fa.Policy("m"), fa.Policy("m")
    assert shown(one) == ["player_0, player_1: policy policy (trainable, learner policy-l)"]
    assert shown({"player_0": one, "player_1": fa.Random()}) == [
        "player_0: policy policy (trainable, learner policy-l)",
        "player_1: policy random (frozen)",
    ]
    assert shown({"player_0": one, "player_1": other}) == [
        "player_0: policy player_0 (trainable, learner player_0-l)",
        "player_1: policy player_1 (trainable, learner player_1-l)",
    ]
    assert shown(fa.League(TEAM))[0] == "player_0, player_1: policy team (trainable, learner team-l)"
    with pytest.raises(ValueError, match="without a name"):
        shown(lambda agent, seed: fa.Policy("m"))


def test_run_names_fixed_agents_that_an_ensemble_learns_from(tmp_path):
    def messages(reward, players):
        run = GRPOTrainer(players, reward, out_dir=tmp_path)
        plan, lines = plan_of(run, TaskSampler(Duel)), []
        run._lifecycle.messages.say = lines.append
        run._lifecycle.messages.announce(plan, {name: object() for name in plan.models}, 20)
        return [line for line in lines if "ensemble" in line and "not trained" in line]

    ensemble, fixed = fa.Ensemble([Exact(), fa.EnvReward()]), {"player_0": TEAM, "player_1": fa.Random()}
    (line,) = messages(ensemble, fixed)
    assert "not trained: player_1. If" in line and "forge_verifiers.ForAgent(AGENT, ensemble)" in line
    assert not messages(ensemble, TEAM) and not messages(ForAgent("player_0", ensemble), fixed)
    assert not messages(fa.Ensemble([ForAgent("player_0", Exact())]), fixed) and not messages(None, fixed)


def test_run_shows_learning_rates_and_warns_of_low_ones(tmp_path, capsys, tiny_models):
    model = str(tiny_models(family="llama", dtype="bfloat16"))
    full, low = fa.Policy(model, name="full"), fa.Policy(model, name="low", learner={"lr": 1e-9})
    run = GRPOTrainer({"player_0": full, "player_1": low}, out_dir=tmp_path)
    learners = {name: SimpleNamespace(name=f"{name}-l") for name in ("full", "low")}
    run._lifecycle.messages.say = print
    run._lifecycle.messages.announce(plan_of(run, TaskSampler(Duel)), learners, 20)
    first, second, warning = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "player_0: policy full (trainable, learner full-l, lr 2e-05, the default for all weights of"
    )
    assert second == "player_1: policy low (trainable, learner low-l, lr 1e-09)"
    assert warning.startswith("policy low: lr=1e-09 is too low to train all weights")


@pytest.mark.parametrize(
    ("sampling", "output"),
    [
        ({"temperature": 0}, "temperature=0, always the most probable token"),
        ({"temperature": 0.005}, "vLLM samples at 0.01 or above"),
        ({"top_p": 0.9}, "top_p=0.9. Training needs the model's full distribution"),
        ({"top_k": 20, "min_p": 0.1}, "top_k=20, min_p=0.1. "),
        ({"bad_words": ("no",)}, r"bad_words=\('no',\)"),
        ({"repetition_penalty": 1.1}, "or penalized"),
    ],
)
def test_trainer_refuses_sampling_the_learner_cannot_compute(sampling, output, tmp_path):
    for trainable in (True, False):
        hero = fa.Policy("m", name="hero", sampling=fa.Sampling(**sampling), trainable=trainable)
        for seats in (hero, {"player_0": fa.Random(), "player_1": hero}):
            if trainable:
                with pytest.raises(ValueError, match=f"policy 'hero' samples with .*{output}"):
                    GRPOTrainer(seats, out_dir=tmp_path)
            else:
                GRPOTrainer(seats, out_dir=tmp_path)
    trainer = GRPOTrainer(fa.Policy("m", sampling=fa.Sampling(stop=("a",), temperature=2)), out_dir=tmp_path)
    with pytest.raises(ValueError, match="episodes=0 measures nothing"):  # its mean would be NaN
        trainer.evaluate("forge/KuhnPoker-v0", episodes=0)


def test_temperature_schedule_needs_batches_of_one_step():
    hero = fa.Policy("m", sampling=fa.Sampling(initial_temperature=1.5, temperature_steps=10))
    check_trainable({"hero": hero}, 1)
    with pytest.raises(ValueError, match="max_staleness=2 a batch may hold groups of two steps, at two temperatures"):
        check_trainable({"hero": hero}, 2)


def test_policies_use_the_temperature_of_the_step():
    hero = fa.Policy(
        "m", name="hero", sampling=fa.Sampling(temperature=0.5, initial_temperature=1.5, temperature_steps=2)
    )
    still = fa.Random()
    for seats in (hero, {"a": hero, "b": still}, lambda agent, seed: still if agent == "b" else hero):
        for step, temperature in ((0, 1.5), (1, 1.0), (2, 0.5), (9, 0.5)):
            result = resolve_policies(at_step(seats, step), ("a", "b"), 7)
            assert result["a"] == replace(hero, sampling=fa.Sampling(temperature=temperature))
            assert result["b"] == (still if seats is not hero else result["a"])


@pytest.mark.parametrize(
    "seats",
    [
        fa.Policy("m", constrain_actions=True),
        {"player_0": fa.Random(), "player_1": fa.Policy("m", constrain_actions=True)},
        fa.League(fa.Policy("m", constrain_actions=True)),
    ],
)
def test_trainer_refuses_constrained_actions(seats, tmp_path):
    with pytest.raises(ValueError, match="is trainable and constrains its actions"):
        GRPOTrainer(seats, out_dir=tmp_path)
    GRPOTrainer(
        {"player_0": TEAM, "player_1": fa.Policy("m", constrain_actions=True, trainable=False)}, out_dir=tmp_path
    )


def ending_of(folder):
    return json.loads((folder / "ending.json").read_text())


def test_solved_run_ends_saved_and_exported(tmp_path, capsys):
    """Rewards rise for two steps, then every episode earns the highest reward seen."""

    def played(step):
        rewards = (0.0, 0.5, 1.0, 0.5) if step < 2 else (1.0,) * 4
        return [group(*rewards, seed=10 * step + n) for n in range(4)]

    with trainer(tmp_path, played, max_empty_steps=4) as run:
        result = run.fit(Duel, steps=200)
    assert result.steps == 8 and result.reason.startswith("solved: all 96 episodes of the last 6 steps")
    assert "player_0 of t 1, the highest seen is 1" in result.reason
    assert result.export.is_dir() and (tmp_path / "checkpoints/step-000008/experiment.json").exists()
    assert ending_of(tmp_path) == {"step": 8, "ending": "solved", "reason": result.reason}
    assert "solved: all 96" in capsys.readouterr().out

    with trainer(tmp_path, played, max_empty_steps=4) as again:  # with other seeds; the reward ranges are known
        assert again.fit(Duel, steps=200).steps == 14
    assert again.asked[0] == (8, 0)


def test_finished_run_starts_no_processes(tmp_path, capsys):
    def again(steps, **seats):
        reward = Counting()
        run = GRPOTrainer({"player_0": TEAM, "player_1": fa.Random(name="rival"), **seats}, reward, out_dir=tmp_path)
        return run, run._finished(plan_of(run, TaskSampler(Duel)), steps), reward

    with trainer(tmp_path, lambda step: [group(0.0, 1.0, seed=step)], reward=Counting(), groups_per_step=1) as run:
        first = run.fit(Duel, steps=2)
    (first.export / "config.json").write_text("{}")
    assert again(3)[1] is None and again(2, player_1=fa.Policy("m"))[1] is None
    run, result, reward = again(2)
    assert result == replace(first, curve=result.curve) and reward.seen == run.reward.seen == 8
    assert f"{tmp_path} has reached step 2 already: set steps above 2 to train, or" in " ".join(
        capsys.readouterr().err.split()
    )
    assert (run.save(tmp_path / "copy") / "config.json").read_text() == "{}"
    assert again(1)[1].steps == 2
    (tmp_path / "checkpoints/step-000002/reward.npz").write_bytes(b"damaged")
    assert again(2)[1] is None  # `restore` reports the damage and takes the one before
    with trainer(tmp_path, lambda step: [group(0.0, 1.0, seed=step)], groups_per_step=1) as run:
        run._lifecycle.next_step = 2
        run.fit(Duel, steps=3)
    (tmp_path / "checkpoints/step-000003/exported").unlink()  # killed during the export
    assert again(3)[1] is None


def test_uninformative_run_ends_saved_with_advice(tmp_path):
    def played(step):
        return [group(*([0.25, 0.75] if step == 0 else [0.25, 0.25]), seed=4 * step + n) for n in range(4)]

    with trainer(tmp_path, played, max_empty_steps=3) as run, pytest.raises(EmptyBatchError) as caught:
        run.fit(Duel, steps=200)
    output = str(caught.value)
    assert "3 consecutive steps had no informative group" in output and "'zero_variance': 4" in output
    assert "player_0 of t 0.25, the highest seen is 0.75" in output and "player_1" not in output
    assert (tmp_path / "export").is_dir() and str(tmp_path / "export") in output
    assert (tmp_path / "checkpoints/step-000004/experiment.json").exists()
    assert ending_of(tmp_path)["ending"] == "uninformative"
    with trainer(tmp_path, played, max_empty_steps=3) as again, pytest.raises(EmptyBatchError):
        again.fit(Duel, steps=200)
    assert again.asked[0] == (4, 0) and ending_of(tmp_path)["step"] == 7


BROKEN = EpisodeError(
    where="step",
    kind="KeyError",
    message="'gold'",
    trace='Traceback\n  File "/home/me/my_env.py", line 12, in act\n  File "/site-packages/np.py", line 9, in f\n',
)
FAILED = {"error": BROKEN, "end": "error"}


def test_failing_episodes_end_the_run_with_file_and_line(tmp_path, capsys):
    def played(step):
        return [group(0.0, 0.0, seed=n, **FAILED) for n in range(4)]

    with trainer(tmp_path, played, max_resamples=3) as run, pytest.raises(EmptyBatchError) as caught:
        run.fit(Duel, steps=5)
    place = "step: KeyError: 'gold' at /home/me/my_env.py:12 in act"
    assert f"step 1: all 8 episodes failed (8 in step: KeyError). First: {place}" in str(caught.value)
    assert "forge-agents check" in str(caught.value)
    assert run.asked == [(0, 0)], "nothing is resampled where nothing can be played"
    out = capsys.readouterr().out
    assert out.count(place) == 2, "once at once, once at the end"
    assert out.index(place) < out.index("train 1/5") and "used 0  zero-variance 0  failed 4  out of context 0%" in out
    assert (tmp_path / "checkpoints/step-000001/experiment.json").exists() and ending_of(tmp_path)["ending"] == "broken"


@pytest.mark.parametrize(
    ("groups", "advice"),
    [
        ([group(0, 0, sampled=False, turns=False, end="context")] * 4, r"out of context.*Raise engine.max_model_len"),
        ([group(0, 0, sampled=False, turns=False)] * 4, "no trained policy had a turn"),
        (
            [group(0, 0, error=EpisodeError(where="policy", kind="EndpointError", message="401"), end="error")] * 4,
            "A player fails. Check that its server answers",
        ),
    ],
)
def test_the_advice_fits_the_cause(tmp_path, groups, advice, capsys):
    with trainer(tmp_path, lambda step: groups) as run, pytest.raises(EmptyBatchError, match=advice):
        run.fit(Duel, steps=5)
    if "context" in advice:
        assert "out of context 100%" in capsys.readouterr().out


# ---- evidence that a run is solved


def scored(groups):
    def reward(trajectories):
        """The environment's reward, abstaining at 9."""
        result = env_reward(trajectories)
        return np.where(result == 9, np.nan, result)

    items = asyncio.run(score(groups, reward, timeout_s=60))
    return items, credit_groups(items, Credit(), {"team"})


def watch(steps, *, patience=3, tops=None):
    """Return the kind of the stop reason for steps of groups, and the number of steps."""
    endings = StoppingCriteria(patience)
    for number, groups in enumerate(steps):
        items, samples = scored(groups)
        if (result := endings.after(number, items, samples, {"team"}, tops or {"t": None})) is not None:
            return result.kind, number + 1
    return None, len(steps)


FULL = [group(*(1.0,) * 8, seed=n) for n in range(8)]
HALF = [group(*(0.5,) * 8, seed=n) for n in range(8)]
DOUBLE = [group(*(2.0,) * 8, seed=n) for n in range(8)]
UNSURE = [group(*(9.0,) * 8, seed=n) for n in range(8)]
MIXED = [group(*(1.0, 0.0) * 4)]


@pytest.mark.parametrize(
    ("steps", "tops", "expected"),
    [
        ([FULL] * 9, {"t": None}, ("solved", 3)),  # always the maximum
        ([FULL] * 9, {"t": 1.0}, ("solved", 3)),
        ([[group(2.0, 0.0)], *[DOUBLE] * 9], {"t": None}, ("plateau", 4)),
        ([[group(2.0, 0.0)], *[DOUBLE] * 9], {"t": 2.0}, ("solved", 4)),
        ([[*FULL, *UNSURE[:1]]] * 9, {"t": 1.0}, ("solved", 3)),  # one abstention
        ([[*FULL[:1], *UNSURE]] * 60, {"t": 1.0}, ("uninformative", 3)),  # mostly abstentions
        ([FULL] * 9, {"t": 2.0}, ("uninformative", 3)),  # the environment pays more
        ([HALF] * 9, {"t": None}, ("uninformative", 3)),  # always the same, below 1
        ([HALF] * 9, {"t": 0.5}, ("solved", 3)),
        ([MIXED, *[HALF] * 9], {"t": None}, ("uninformative", 4)),  # a higher reward was seen
        ([[group(0.5, 0.0)], *[HALF] * 9], {"t": None}, ("plateau", 4)),  # the highest seen, maximum unknown
        ([*[[group(1.0, 1.0)]] * 31, MIXED, *[[group(1.0, 1.0)]] * 31], {"t": 1.0}, (None, 63)),  # a rare task
        ([[group(1.0, 1.0)]] * 40, {"t": 1.0}, ("solved", 32)),  # few episodes
        ([[group(*(1.0,) * 8, seed=n) for n in range(2)]] * 20, {"t": 1.0}, ("solved", 12)),  # few tasks
        ([FULL] * 9, {"t": None, "other": None}, (None, 9)),  # another environment has no groups yet
        ([*[FULL] * 4, [group(*(0.0,) * 8, env_id="other")]], {"t": 1.0, "other": 1.0}, ("uninformative", 5)),
        ([*[FULL] * 2, MIXED, *[FULL] * 9], {"t": None}, ("solved", 6)),  # a curriculum moved to harder tasks
        ([[*FULL, group(1.0, 1.0, error=BROKEN)]] * 9, {"t": None}, ("solved", 3)),  # a few failures
        ([[group(*(0.0,) * 8, seed=n) for n in range(8)]] * 9, {"t": 5e-5}, ("uninformative", 3)),  # small rewards
        ([[group(*(5e-5,) * 8, seed=n) for n in range(8)]] * 9, {"t": 5e-5}, ("solved", 3)),
        ([[group(*(0.0,) * 8, seed=n) for n in range(8)]] * 9, {"t": 1e-9}, ("uninformative", 3)),
        ([[group(*(1e-9,) * 8, seed=n) for n in range(8)]] * 9, {"t": 1e-9}, ("solved", 3)),
        ([[group(*(0.0,) * 8, seed=n) for n in range(8)]] * 9, {"t": 0.0}, ("solved", 3)),
    ],
)
def test_run_is_solved_only_with_enough_evidence(steps, tops, expected):
    assert watch(steps, tops=tops) == expected


def idle_group(seed=0, env_id="t", reward=1.0, forfeits=("player_1",), size=8):
    """Episodes that the rival ended before the team's first turn."""

    def ended(episode):
        first, second = episode.trajectories["player_0"], episode.trajectories["player_1"]
        info = {"forfeits": list(forfeits), "outcome": "void"}
        first = replace(first, turns=(), initial_reward=reward, info=info)
        return replace(episode, trajectories={"player_0": first, "player_1": replace(second, info=info)})

    played = group(*(reward,) * size, seed=seed, env_id=env_id)
    return EpisodeGroup(env_id=env_id, seed=seed, episodes=tuple(map(ended, played.episodes)))


IDLE = [idle_group(seed=n) for n in range(8)]


@pytest.mark.parametrize(
    ("steps", "tops", "expected"),
    [
        ([IDLE] * 9, {"t": None}, ("broken", 3)),  # the rival forfeits first: all rewards are 1 without a sampled token
        ([IDLE] * 9, {"t": 1.0}, ("broken", 3)),
        ([MIXED, *[IDLE] * 9], {"t": 1.0}, ("broken", 4)),  # also after informative steps
        ([[*IDLE, *FULL[:1]]] * 6, {"t": 1.0}, (None, 6)),  # too little evidence
        ([[*IDLE, *FULL[:1]]] * 30, {"t": 1.0}, ("solved", 24)),  # enough groups
        ([[*FULL, idle_group(env_id="u")]] * 9, {"t": 1.0, "u": 1.0}, ("uninformative", 3)),  # no evidence for u
        (
            [[*FULL[:2], *[group(*(1.0,) * 8, error=BROKEN)] * 6]] * 9,
            {"t": 1.0},
            ("uninformative", 3),
        ),  # most episodes failed
    ],
)
def test_only_episodes_with_sampled_tokens_prove_success(steps, tops, expected):
    assert watch(steps, tops=tops) == expected


def test_run_without_turns_fails_and_names_who_ended_the_games(tmp_path):
    run = trainer(tmp_path, lambda step: IDLE, max_empty_steps=3, groups_per_step=8)
    with run, pytest.raises(EmptyBatchError) as caught:
        run.fit(Duel, steps=200)
    output = str(caught.value)
    assert "no trained policy had a turn in 192 episodes" in output
    assert "192 by player_1 (rival) with an illegal action" in output and "player_1 wrote 'x'" in output
    assert not (tmp_path / "export").exists() and ending_of(tmp_path)["ending"] == "broken"


def test_short_run_without_turns_fails_at_its_end(tmp_path):
    """The run has fewer steps than `max_empty_steps`."""
    idle = [idle_group(seed=n, forfeits=()) for n in range(4)]
    run = trainer(tmp_path, lambda step: idle)
    with run, pytest.raises(EmptyBatchError, match="32 by player_1 .rival. with the"):
        run.fit(Duel, steps=1)
    assert not (tmp_path / "export").exists()


def test_resumed_run_remembers_earlier_turns(tmp_path):
    with trainer(tmp_path, lambda step: MIXED, groups_per_step=1) as run:
        run.fit(Duel, steps=2)
    with trainer(tmp_path, lambda step: IDLE[:1], groups_per_step=1) as run:
        assert run.fit(Duel, steps=3).steps == 3


def test_run_without_informative_groups_says_so(tmp_path, capsys):
    with trainer(tmp_path, lambda step: HALF) as run:
        run.fit(Duel, steps=2)
    assert "no step had an informative group, so the weights are those that training started with" in " ".join(
        capsys.readouterr().out.split()
    )


def test_perfect_policy_is_solved_without_training(tmp_path):
    with trainer(tmp_path, lambda step: FULL, max_empty_steps=3, groups_per_step=8) as run:
        reason = run.fit(Duel, steps=200).reason
    assert reason.startswith("solved: all 192 episodes") and "No step had an informative group" in reason


def test_divergence_of_zero_variance_groups_does_not_prevent_the_end_of_a_run(tmp_path, capsys):
    """The policy learns from it, but no group is informative."""
    learner = fa.LearnerConfig(loss="grpo", kl_coef=0.1)
    settings = {"learner": learner, "loss_normalization": "sampled", "max_empty_steps": 3, "groups_per_step": 8}
    with trainer(tmp_path / "full", lambda step: FULL, **settings) as run:
        reason = run.fit(Duel, steps=200).reason
    assert reason.startswith("solved: all 192 episodes") and "those that training started with" not in reason
    with (
        trainer(tmp_path / "half", lambda step: HALF, **settings) as run,
        pytest.raises(EmptyBatchError, match="3 consecutive steps had no informative group"),
    ):
        run.fit(Duel, steps=200)
    with trainer(tmp_path / "short", lambda step: HALF, **settings) as run:
        run.fit(Duel, steps=2)
    assert "those that training started with" not in " ".join(capsys.readouterr().out.split())


def test_policy_without_turns_is_named_at_the_end(tmp_path, capsys):
    class Two(Processes):
        policies = {"team": TEAM, "second": fa.Policy("m", name="second")}

        def __init__(self):
            super().__init__()
            self.learners["second"] = Learner()

    with trainer(tmp_path, lambda step: MIXED, groups_per_step=1) as run:
        run._lifecycle.processes = Two()
        run.fit(Duel, steps=1)
    assert "policy second never had a turn" in " ".join(capsys.readouterr().out.split())


def test_evaluation_without_turns_has_no_reward(tmp_path, caplog):
    with trainer(tmp_path, lambda step: MIXED) as run:
        evaluate_with(run, lambda: IDLE)
        result = run.evaluate(Duel, episodes=8)
    assert np.isnan(result.reward) and np.isnan(result.by_policy["team"])
    assert "held-out episodes do not measure team: policy team had no turn in 64 episodes" in caplog.text
    assert "64 by player_1 (rival) with an illegal action" in caplog.text


def test_evaluation_has_as_many_episodes_as_the_config_says(tmp_path, monkeypatch):
    numbers = []

    async def evaluate(evaluator, episodes):
        numbers.append(episodes)

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    with trainer(tmp_path, lambda step: MIXED, eval_episodes=8) as run:
        run.evaluate(Duel)
        run.evaluate(Duel, episodes=3)
    assert numbers == [8, 3]


def test_one_zero_variance_policy_of_two_does_not_end_the_run():
    def both(seed):
        """The team always earns 1, and a second trained policy has not learned yet."""
        siblings = []
        for item, reward in zip(group(1.0, 1.0, seed=seed).episodes, (0.0, 1.0), strict=True):
            team = item.trajectories["player_0"]
            turn = replace(team.turns[0], agent="player_1", policy="second", reward=reward)
            second = replace(item.trajectories["player_1"], policy="second", turns=(turn,))
            siblings.append(replace(item, trajectories={"player_0": team, "player_1": second}))
        return EpisodeGroup(env_id="t", seed=seed, episodes=tuple(siblings))

    endings = StoppingCriteria(1)
    items = asyncio.run(score([both(n) for n in range(40)], env_reward, timeout_s=60))
    trained = {"team", "second"}
    assert endings.after(0, items, credit_groups(items, Credit(), trained), trained, {"t": 1.0}) is None
    assert endings.summary(sorted(trained)) == (
        "policy team had no informative group: the rewards of its agents did not differ within groups. Its exported "
        "weights are those that training started with"
    )
    resumed = StoppingCriteria(1)
    resumed.load_state_dict(endings.state_dict())
    assert resumed.summary(["team"]) and not resumed.summary(["second"])
    resumed.load_state_dict({key: value for key, value in endings.state_dict().items() if key != "learned"})
    assert not resumed.summary(["team"]), "a checkpoint of an earlier version does not tell"


def test_reward_ranges_survive_a_resume():
    first = StoppingCriteria(3)
    items, samples = scored([group(0.5, 0.0)])
    first.after(0, items, samples, {"team"}, {"t": None})
    second = StoppingCriteria(3)
    second.load_state_dict(first.state_dict())
    items, samples = scored(HALF)
    result = [second.after(n, items, samples, {"team"}, {"t": None}) for n in range(3)]
    assert result[:2] == [None, None] and result[2].kind == "plateau"
    StoppingCriteria(1).load_state_dict(StoppingCriteria(1).state_dict())


def test_the_most_that_a_reward_can_be():
    verifier = Exact()
    assert max_reward_of(env_reward, 3.0) == max_reward_of(EnvTurnReward(), 3.0) == 3.0
    assert max_reward_of(verifier, 3.0) == 1.0 and max_reward_of(0.25 * verifier, None) == 0.25
    assert (
        max_reward_of(lambda ts: np.ones(len(ts)), 3.0) is None
        and max_reward_of(MultiReward({"a": verifier}), 3.0) is None
    )
    graded = fa.Rule(lambda t: 0.9, name="graded")
    assert max_reward_of(fa.EnvReward(low=-1, high=3) + 0.2 * verifier, 1.0) == pytest.approx(0.7)
    assert max_reward_of(fa.EnvReward() + 0.2 * verifier, None) is None
    assert max_reward_of(graded, 3.0) is None and max_reward_of(0.5 * verifier + 0.5 * graded, 3.0) is None

    class Scored:
        max_reward = 7

    assert max_reward_of(Scored(), None) == 7.0


def test_failure_names_the_users_code():
    assert describe_error(BROKEN).endswith("at /home/me/my_env.py:12 in act")
    ours = f'  File "{fa.__file__}", line 3, in checked\n'
    through_ours = replace(BROKEN, trace=BROKEN.trace + ours)
    assert describe_error(through_ours).endswith("at /home/me/my_env.py:12 in act")
    only_ours = replace(BROKEN, trace=ours)
    assert describe_error(only_ours) == f"{BROKEN.where}: {BROKEN.kind}: {BROKEN.message}"
    assert describe_error(EpisodeError(where="reward", kind="ValueError", message="nan")) == "reward: ValueError: nan"


def test_reason_counts_scored_episodes():
    endings = StoppingCriteria(1)
    items, samples = scored([*FULL * 3, *UNSURE[:2]])
    result = endings.after(0, items, samples, {"team"}, {"t": 1.0})
    assert result.reason.startswith("solved: all 192 episodes of the last 1 steps (16 more have no reward) earned")


def test_control_characters_of_an_environment_are_escaped(tmp_path, capsys):
    """The error contains markup of rich and a control sequence."""
    words = EpisodeError(where="step", kind="KeyError", message="'[/INST]' [bold]\x1b[2J")

    def played(step):
        broken = [group(0.0, 1.0, error=words, end="error")] if step == 0 else []
        return [*broken, *(group(0.0, 1.0, seed=n) for n in range(4 - len(broken)))]

    with trainer(tmp_path, played) as run:
        assert run.fit(Duel, steps=2).steps == 2
    assert "step: KeyError: '[/INST]' [bold]\\x1b[2J. The traceback" in capsys.readouterr().out


@pytest.mark.parametrize("changed", [True, False])
def test_highest_reward_ends_a_plateau_and_is_forgotten_if_the_reward_changes(tmp_path, changed):
    def strict(trajectory):
        return 0.9 if trajectory.reward == 1.0 else 0.5 if trajectory.reward else 0.1

    def lenient(trajectory):
        return 0.5 if trajectory.reward else 0.1

    with trainer(tmp_path, lambda step: [group(0.0, 1.0, seed=n) for n in range(4)], reward=strict) as run:
        run.fit(Duel, steps=1)

    def played(step):
        return [group(*((0.0, 0.5) * 2 if step == 1 else (0.5,) * 4), seed=10 * step + n) for n in range(4)]

    with trainer(tmp_path, played, reward=lenient if changed else strict, max_empty_steps=4) as run:
        if changed:
            result = run.fit(Duel, steps=200)
            assert result.reason.startswith("plateau: all 96 episodes of the last 6 steps earned the highest reward")
            assert "max_reward" in result.reason and "solved" not in result.reason
            assert result.steps == 8 and result.export.is_dir() and ending_of(tmp_path)["ending"] == "plateau"
        else:
            with pytest.raises(
                EmptyBatchError, match=r"Best of each group, .* acted: .* 0\.5, the highest seen is 0\.9"
            ):
                run.fit(Duel, steps=200)


@pytest.mark.parametrize(("most", "known"), [(3, 3.0), (2.5, 2.5), (np.float32(2), 2.0), ("much", None), (print, None)])
def test_max_reward_of_an_environment_must_be_a_number(most, known):
    kind = type("t", (Duel,), {"max_reward": most})
    assert TaskSampler(kind).max_reward == {"t": known}


def unlucky(step):
    """One seed per step, of which every third one fails."""
    return [group(0.0, 1.0, seed=step, **(FAILED if step % 3 == 2 else {}))]


def test_run_of_single_groups_survives_a_failing_seed(tmp_path, capsys):
    with trainer(tmp_path, unlucky, groups_per_step=1) as run:
        assert run.fit(Duel, steps=9).steps == 9
    assert capsys.readouterr().out.count("used 0  zero-variance 0  failed 1") == 3


def test_broken_run_ends_after_max_empty_steps(tmp_path):
    def played(step):
        return [group(0.0, 1.0, seed=n, **(FAILED if step > 1 else {})) for n in range(4)]

    with trainer(tmp_path, played, max_empty_steps=3) as run, pytest.raises(EmptyBatchError, match=r"step 5: all 8"):
        run.fit(Duel, steps=50)
    assert ending_of(tmp_path)["ending"] == "broken"
    with trainer(tmp_path, played, max_empty_steps=3) as again, pytest.raises(EmptyBatchError, match=r"step 6: all 8"):
        again.fit(Duel, steps=50)  # no valid step in this session


def test_held_out_episodes_that_fail_are_counted(tmp_path):
    groups = [group(0.0, 1.0, seed=n) for n in range(4)]
    with trainer(tmp_path, lambda step: groups, eval_every=1, eval_episodes=4) as run:
        evaluate_with(run, lambda: [group(1.0, seed=n, **(FAILED if n else {})) for n in range(4)])
        (row,) = run.fit(Duel, steps=1).metrics
    assert (row["eval/reward"], row["eval/failed"]) == (1.0, 3.0)


def test_evaluation_reports_each_level(tmp_path):
    levels = ["t@1", "t@2", "t@1", "t@2"]
    with trainer(tmp_path, lambda step: [group(0.0, 1.0)] * 4, eval_every=1) as run:
        evaluate_with(run, lambda: [group(float(n), seed=n, env_id=level) for n, level in enumerate(levels)])
        (row,) = run.fit(Duel, steps=1).metrics
        result = run.evaluate(Duel)
    assert result.by_env == {"t@1": 1.0, "t@2": 2.0} and result.reward == 1.5
    assert {name: told for name, told in row.items() if "env/" in name} == {"eval/env/t@1": 1.0, "eval/env/t@2": 2.0}


def test_stage_times_sum_to_the_step_time(tmp_path, monkeypatch):
    """Checkpoints and evaluations count in the step that follows."""
    begun = Learner.start_save

    async def slow(self, folder, **_):
        await asyncio.sleep(0.05)
        await begun(self, folder)

    monkeypatch.setattr(Learner, "start_save", slow)
    with trainer(tmp_path, lambda step: [group(0.0, 1.0)] * 4, eval_every=2, checkpoint_every=1) as run:
        evaluate_with(run, lambda: [group(1.0)], delay_s=0.05)
        rows = run.fit(Duel, steps=3).metrics
    stages = [{name for name in row if name.startswith("time/")} - {"time/step_s"} for row in rows]
    always = {f"time/{stage}_s" for stage in ("collect", "score", "learn", "sync")}
    assert [stage - always for stage in stages] == [set(), {"time/save_s"}, {"time/evaluate_s", "time/save_s"}]
    assert all(always <= stage for stage in stages)
    for row, own in zip(rows, stages, strict=True):
        assert sum(row[name] for name in own) == pytest.approx(row["time/step_s"])
    assert all(row["time/save_s"] > 0.045 for row in rows[1:]) and rows[2]["time/evaluate_s"] > 0.045


def test_waiting_for_a_checkpoint_counts_as_save_time(tmp_path, monkeypatch):
    learn, versions = Learner.train_step, []

    async def waits(self, batch, **settings):
        versions.append(self.version)
        waited_s = 0.1 if len(versions) > 1 else 0.0
        await asyncio.sleep(waited_s)
        return {**await learn(self, batch, **settings), "save_wait_s": waited_s}

    monkeypatch.setattr(Learner, "train_step", waits)
    with trainer(tmp_path, lambda step: [group(0.0, 1.0)] * 4) as run:
        first, second = run.fit(Duel, steps=2).metrics
    assert "time/save_s" not in first and second["time/save_s"] >= 0.1
    assert second["time/learn_s"] + second["time/save_s"] <= second["time/step_s"]


def test_resampling_time_is_not_scoring_time(tmp_path, monkeypatch):
    requests, now = [], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def played(step):
        requests.append(step)
        if len(requests) > 1:  # resampling
            now[0] += 100
            return [group(0.0, 1.0, seed=9)]
        return [group(0.0, 1.0, seed=n) for n in range(3)] + [group(0.5, 0.5, seed=3)]

    with trainer(tmp_path, played, max_resamples=1) as run:
        (row,) = run.fit(Duel, steps=1).metrics
    assert row["groups/resampled"] == 1 and row["time/resample_s"] == 100 and row["time/score_s"] == 0


def test_interrupt_in_the_last_step_still_exports(tmp_path):
    def played(step):
        os.kill(os.getpid(), signal.SIGINT)
        return [group(0.0, 1.0)] * 4

    with trainer(tmp_path, played) as run:
        result = run.fit(Duel, steps=1)
    assert result.steps == 1 and result.export.is_dir()


def test_interrupt_after_the_checkpoint_of_a_step_saves_the_next_step(tmp_path, monkeypatch):
    checkpoint = Session._checkpoint

    async def interrupted(self, step, **options):
        due = await checkpoint(self, step, **options)
        if step == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return due

    monkeypatch.setattr(Session, "_checkpoint", interrupted)
    run = trainer(tmp_path, lambda step: [group(0.0, 1.0)] * 4)
    with pytest.raises(KeyboardInterrupt, match="stopped after step 2, saved"):
        run.fit(Duel, steps=5)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-000002"]


@pytest.mark.parametrize(("failed", "status"), [(0, 0), (3, 0), (4, 1)])
def test_evaluation_counts_failures_and_abstentions(failed, status, tmp_path, monkeypatch, capsys):
    """The reward abstains in the episode where player_0 earns 9."""

    rewards = (9.0, 0.0, 1.0, 0.5)

    def unsure(trajectories):
        return np.array([np.nan if t.reward == 9 else t.reward for t in trajectories])

    run = trainer(tmp_path, lambda step: [])
    evaluate_with(
        run, lambda: [group(reward, seed=n, **(FAILED if n < failed else {})) for n, reward in enumerate(rewards)]
    )
    result = run.evaluate(Duel, episodes=4, reward=unsure)
    assert (result.failed, result.abstained) == (failed, 1 if failed == 0 else 0)
    assert np.isnan(result.reward) if failed == 4 else result.reward == 0.5

    evaluated = SimpleNamespace(evaluate=lambda *_, **__: result)
    monkeypatch.setattr(fa, "GRPOTrainer", lambda *_: contextlib.nullcontext(evaluated), raising=False)
    (tmp_path / "run.yaml").write_text("env: forge/KuhnPoker-v0\npolicies: {hero: {model: m}}\n")
    assert cli.main(["eval", str(tmp_path / "run.yaml")]) == status
    message = f"4 episodes, {failed} failed" + (", 1 without a reward" if failed == 0 else "")
    assert message in capsys.readouterr().out.splitlines()
