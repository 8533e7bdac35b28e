"""The whole way of the data on a tiny model: real vLLM, Monarch, TorchTitan and TorchStore."""

import dataclasses
import importlib
import json
import os
import signal
from pathlib import Path

import cases
import numpy as np
import pytest
from local_processes import share, take_over

import forge_agents as fa
from forge_agents.envs import registry
from forge_agents.errors import EmptyBatchError, ForgeError, MismatchError, UnknownIdError
from forge_agents.rollout.players import ModelPlayer
from forge_trainers.records.run_folder import load_batch

pytestmark = pytest.mark.timeout(1800)


class Letters(cases.Letters):
    """The second agent reads the text of the first."""

    def __init__(self, *, start_chars=3):
        super().__init__()
        self.start_chars = start_chars

    def observe_text(self, agent):
        return self.said[-1][:8] if self.said else self.start


def config(**changes):
    settings = {
        "group_size": 8,
        "groups_per_step": 4,
        "checkpoint_every": 2,
        "max_resamples": 0,
        "seed": 1,
        "learner": fa.LearnerConfig(lr=3e-3, threads=1, compute_dtype="float32"),
        "engine": fa.EngineConfig(enforce_eager=True, kv_cache_gb=0.1, max_model_len=512, threads=1),
    }
    return fa.GRPOConfig(**(settings | changes))


@pytest.fixture(scope="module")
def team(tiny_llama):
    return fa.Policy(str(tiny_llama), name="team", sampling=fa.Sampling(max_tokens=8))


@pytest.fixture(scope="module")
def trainer_of(team, tmp_path_factory):
    """``trainer_of(out_dir)``: a trainer of `team`. All of them share one engine and one store.

    They share a learner, too, which goes on where the last one left it. ``fresh=True`` starts another, and so do other
    settings of it. It is in this process, unless ``local=False``.
    """
    with fa.GRPOTrainer(team, config=config(), out_dir=tmp_path_factory.mktemp("owner")) as owner:
        owner.evaluate(Letters, episodes=1)
        processes = owner._lifecycle.processes

        def make(out_dir, *, reward=None, fresh=False, local=True, policy=team, **changes):
            trainer = fa.GRPOTrainer(policy, reward, config(**changes), out_dir)
            for name in ("learner", "max_staleness"):  # the second decides the learner's correction
                fresh = fresh or getattr(trainer.config, name) != getattr(processes.config, name)
            if fresh:
                take_over(trainer, owner, local=local)
            else:
                share(trainer, owner)
            processes.config = trainer.config
            return trainer

        yield make


def test_a_team_learns_and_the_control_does_not(trainer_of, tiny_llama, tmp_path):
    from transformers import AutoModelForCausalLM

    def learner(lr):
        return fa.LearnerConfig(lr=lr, threads=1, compute_dtype="float32")

    def run(trainer, steps):
        before = trainer.evaluate(Letters, episodes=64)
        result = trainer.fit(Letters, steps=steps)
        return before, result, trainer.evaluate(Letters, episodes=64)

    first = trainer_of(tmp_path / "trained", fresh=True, local=False, learner=learner(3e-3))
    before, result, after = run(first, 12)
    assert after.reward - after.ci > before.reward + before.ci
    assert after.reward > 1.5 * before.reward
    for row in result.metrics:
        assert row["learner/logprob_gap_mean"] < 1e-3  # float32 sampler against float32 learner
        assert row["staleness/max"] == 0
    assert {"config.yaml", "metrics.jsonl", "episodes.jsonl", "reward.png", "tensorboard", "export"} <= {
        p.name for p in (tmp_path / "trained").iterdir()
    }
    table = fa.load_episodes(tmp_path / "trained", policy="team")
    assert [row["step"] for row in table] == [step for step in range(1, 13) for _ in range(4)]  # keep_episodes
    last = table.episode(-1)
    assert fa.Episode.from_json(last.to_json()) == last and last.turns[0].logprobs and last.turns[0].versions
    assert table[-1]["tokens"] == sum(len(turn.response_ids) for turn in last.turns) > 0
    assert table[-1]["reward"] == pytest.approx(table[-1]["trained_reward"])
    assert {row["error"] for row in table} == {""}
    start, trained = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (tiny_llama, result.export))
    assert start.keys() == trained.keys()
    assert any(not np.array_equal(start[k].float().numpy(), trained[k].float().numpy()) for k in start)

    with pytest.raises(ValueError, match=r"max_staleness=1 differs from 0 of the running processes"):
        first.fork(tmp_path / "control", config=config(max_staleness=1))
    engine, second = (
        first._lifecycle.processes.engines["team"].pids,
        first.fork(tmp_path / "control", config=config(learner=learner(0.0))),
    )
    still_before, still, still_after = run(second, 3)
    assert first._lifecycle.processes is None
    assert second._lifecycle.processes.engines["team"].pids == engine, "it was not started again"
    assert abs(still_before.reward - before.reward) <= before.ci  # and has its first weights
    assert [row["learner/lr"] for row in still.metrics] == [0.0] * 3
    assert abs(still_after.reward - still_before.reward) <= still_before.ci + still_after.ci


def test_resumed_run_continues_its_curriculum(trainer_of, tmp_path, monkeypatch):
    fa.list_envs()  # the plugins are loaded before the registry is copied
    monkeypatch.setattr(registry, "_specs", dict(registry._specs))
    fa.register("test/Letters-v0", entry_point=Letters, levels=[{"start_chars": 3}, {"start_chars": 5}])
    plan = fa.Curriculum("test/Letters-v0", low=0.0, high=1.0)
    trainer_of(tmp_path, fresh=True).fit(plan, steps=2)
    row = trainer_of(tmp_path, fresh=True).fit(plan, steps=3).metrics[-1]
    assert 1 <= row["curriculum/level"] <= 2
    expected = {name: value for name, value in row.items() if name.startswith("curriculum/success/test/Letters-v0@")}
    assert len(expected) == 2 and all(0 < success < 1 for success in expected.values())
    with np.load(max((tmp_path / "checkpoints").glob("step-*")) / "curriculum.npz") as saved:
        fading = 1 - (1 - 1 / plan.memory) ** (3 * 4 * 8)  # of all episodes of three steps, had they been of one level
        assert saved["success"][:, 1].sum() > fading * plan.memory
    assert {row["env_id"] for row in fa.load_episodes(tmp_path)} <= {"test/Letters-v0@1", "test/Letters-v0@2"}


def test_staleness_of_1_trains_on_samples_one_version_old(trainer_of, tmp_path):
    # a bound on the gap that float32 keeps on fresh samples only: what one update changed is no mismatch
    rows = trainer_of(tmp_path, max_staleness=1, max_logprob_gap=1e-3).fit(Letters, steps=3).metrics
    assert [row["staleness/max"] for row in rows] == [0, 1, 1]
    assert rows[0]["learner/logprob_gap_mean"] < 1e-3 < rows[1]["learner/logprob_gap_mean"]
    # the clip range lies around the learner, and a sample's age is a weight
    assert [row["learner/clip_fraction"] for row in rows] == [0, 0, 0]
    assert abs(rows[0]["learner/correction"] - 1) < 1e-5 < abs(rows[1]["learner/correction"] - 1)
    assert "correction: truncate" in (tmp_path / "config.yaml").read_text()


def test_a_sampler_at_another_temperature_ends_the_run_and_its_batch_is_kept(trainer_of, tmp_path, monkeypatch):
    make = ModelPlayer.__init__

    def colder(self, engine, policy, *args, **options):
        sampling = dataclasses.replace(policy.sampling, temperature=0.9)
        make(self, engine, dataclasses.replace(policy, sampling=sampling), *args, **options)

    monkeypatch.setattr(ModelPlayer, "__init__", colder)
    trainer = trainer_of(tmp_path, max_logprob_gap=1e-3)
    with pytest.raises(MismatchError, match="sampler and learner of team differ by"):
        trainer.fit(Letters, steps=1)
    assert load_batch(tmp_path / "failed-batches/step-000001-team.safetensors")["tokens"]["loss_mask"].any()
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_resumed_learner_follows_the_temperature_schedule(trainer_of, team, tmp_path, monkeypatch):
    sampling = dataclasses.replace(team.sampling, temperature=1.2, initial_temperature=1.8, temperature_steps=2)
    moving = dataclasses.replace(team, sampling=sampling)
    trainer = trainer_of(tmp_path, policy=moving, max_logprob_gap=1e-3)
    with monkeypatch.context() as patched:
        patched.setattr(trainer._lifecycle.processes, "policies", {"team": moving})
        trainer.fit(Letters, steps=1)
        rows = trainer_of(tmp_path, policy=moving, max_logprob_gap=1e-3, fresh=True).fit(Letters, steps=4).metrics
    learned = {step: row for step, row in enumerate(rows) if row["groups/used"]}  # a step may be flat
    assert {0, 1} <= set(learned)
    for step, row in learned.items():
        assert row["learner/temperature"] == pytest.approx((1.8, 1.5, 1.2, 1.2)[step])
        assert row["learner/logprob_gap_mean"] < 1e-3


def test_equal_episodes_end_the_run_with_the_reason(trainer_of, tmp_path):
    trainer = trainer_of(tmp_path, reward=lambda ts: np.zeros(len(ts)), max_empty_steps=2)
    with pytest.raises(EmptyBatchError, match="2 consecutive steps.*'zero_variance': 4"):
        trainer.fit(Letters, steps=10)


def test_groups_with_a_broken_environment_are_dropped_and_counted(trainer_of, tmp_path):
    class Fragile(Letters):
        def setup(self, rng):
            super().setup(rng)
            if self.start[0] < "n":
                raise RuntimeError("fragile")

    row = trainer_of(tmp_path, groups_per_step=8).fit(Fragile, steps=1).metrics[0]
    assert row["groups/failed"] > 0 and row["groups/used"] > 0
    assert row["groups/failed"] + row["groups/used"] + row["groups/zero_variance"] == 8
    assert "fragile" in (tmp_path / "episodes.jsonl").read_text()


def test_sigterm_finishes_the_step_and_saves_it(trainer_of, tmp_path, capsys):
    def stop_in_the_second_step(trajectories):
        if (tmp_path / "metrics.jsonl").exists():
            os.kill(os.getpid(), signal.SIGTERM)
        return np.array([trajectory.reward for trajectory in trajectories])

    trainer = trainer_of(tmp_path, reward=stop_in_the_second_step, groups_per_step=1, checkpoint_every=1000)
    with pytest.raises(SystemExit) as stopped:
        trainer.fit(Letters, steps=1000)
    message = capsys.readouterr().out
    assert stopped.value.code == 143 and "SIGTERM: finishing this step" in message, message
    assert "Run it again to continue" in message
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    (newest,) = (tmp_path / "checkpoints").glob("step-*")
    assert json.loads((newest / "experiment.json").read_text())["step"] == len(rows)


GAME = Path(__file__).parents[2] / "forge_agents/templates/project/word_duel/game.py"
BOARD = """
from pettingzoo.classic import tictactoe_v3

import forge_agents as fa


def see(seen, agent):
    own, other = seen["observation"].reshape(9, 2).T
    return " ".join("X" if own[i] else "O" if other[i] else str(i) for i in range(9))


def move(text, agent, action_space):
    return int([sign for sign in text if sign in "012345678"][-1])  # an exception is an illegal move


@fa.register("my/TicTacToe-v0", max_turns=9)
def tic_tac_toe():
    rules = "Tic-tac-toe. You are X. Answer with the number of a free square."
    return fa.wrap(tictactoe_v3.raw_env(), obs_to_text=see, text_to_action=move, instructions=rules)
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_short_custom_games_pass_their_check_and_train(trainer_of, tiny_llama, tmp_path, monkeypatch):
    """The game of the template, and a board of PettingZoo's."""
    pytest.importorskip("pygame")  # PettingZoo's board games import it
    fa.list_envs()
    fa.list_envs()  # the plugins are loaded before the registry is copied
    monkeypatch.setattr(registry, "_specs", dict(registry._specs))
    names = {"__name__": "snippet"}
    for code, most in ((GAME.read_text(), 30), (BOARD, 15)):
        assert len([line for line in code.splitlines() if line.strip()]) <= most
        exec(compile(code, "snippet", "exec"), names)
    fa.register("my/Hint-v0", tags=("2p", "cooperative"))(names["WordDuel"])
    assert fa.check_env("my/Hint-v0", episodes=2).ok
    assert fa.check_env("my/TicTacToe-v0", episodes=2).ok

    team = fa.Policy(str(tiny_llama), name="team", sampling=fa.Sampling(max_tokens=12))
    trainer = trainer_of(tmp_path, policy=team, fresh=True, group_size=4, groups_per_step=3, max_resamples=None)
    hinted = trainer.fit("my/Hint-v0", steps=1).metrics[-1]
    placed = trainer.fit("my/TicTacToe-v0", steps=2).metrics[-1]
    for version, row in enumerate((hinted, placed), 1):
        assert row["groups/used"] > 0 and row["groups/failed"] == 0 and row["learner/version"] == version
        assert row["learner/logprob_gap_mean"] < 1e-3


def test_mistakes_are_found_before_anything_starts(team, tmp_path):
    trainer = fa.GRPOTrainer(team, config=config(), out_dir=tmp_path)
    with pytest.raises(UnknownIdError, match="KuhnPoker"):
        trainer.fit("forge/KuhnPokr-v0", steps=1)
    with pytest.raises(ValueError, match="no agent 'lft'.*'left'"):
        fa.GRPOTrainer({"lft": team, "right": team}, config=config(), out_dir=tmp_path).fit(Letters, steps=1)
    with pytest.raises(ValueError, match="no agent has a trainable policy"):
        fa.GRPOTrainer(fa.Random(), config=config(), out_dir=tmp_path).fit(Letters, steps=1)
    with pytest.raises(ForgeError, match="smollm2-135m-instruct"):
        fa.GRPOTrainer(fa.Policy("smollm2-135m-instrct"), config=config(), out_dir=tmp_path).fit(Letters, steps=1)
    with pytest.raises(ValueError, match="steps=0"):
        trainer.fit(Letters, steps=0)


def test_second_session_restores_the_verifiers(trainer_of, tmp_path):
    def ensemble():
        share = fa.Rule(lambda t: t.reward, name="share")
        short = fa.Rule(lambda t: 1.0 / (1 + len(t.turns[-1].action)), name="short")
        return fa.Ensemble([share, short, fa.EnvReward()])

    learner = fa.LearnerConfig(lr=4e-3, lr_decay="linear", threads=1, compute_dtype="float32")
    first, second = ensemble(), ensemble()
    trainer_of(tmp_path, reward=first, fresh=True, learner=learner).fit(Letters, steps=2)
    trainer = trainer_of(tmp_path, reward=second, fresh=True, learner=learner)
    measured = trainer.evaluate(Letters, episodes=2)
    assert measured.scored_by == "ensemble" and 0 <= measured.reward <= 1 and measured.env_reward >= 0
    assert first.version == second.version > 0
    saved, restored = first.state_dict(), second.state_dict()
    assert saved.keys() == restored.keys()
    for key, value in saved.items():
        np.testing.assert_array_equal(value, restored[key], err_msg=key)  # bit by bit; no label, NaN, equals itself
    result = trainer.fit(Letters, steps=4)
    assert [row["step"] for row in result.metrics] == [1, 2, 3, 4]
    assert [row["learner/version"] for row in result.metrics] == [1, 2, 3, 4]
    for row in result.metrics:  # one after the other: who is not at work is idle, and nobody twice at once
        assert 0 < row["idle/engines"] < 1 and 0 < row["idle/learner"] < 1
        assert row["idle/engines"] + row["idle/learner"] > 0.95
    # the second session's schedule is the longer one
    assert [row["learner/lr"] for row in result.metrics] == pytest.approx([4e-3, 2e-3, 2e-3, 1e-3])


@pytest.mark.timeout(1800)
def test_a_killed_run_continues_bit_by_bit_and_leaves_no_process(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "perf"))
    (outcome,) = importlib.import_module("kills").kills(tmp_path, runs=1, steps=4, seed=5)
    assert outcome.differing == ()
    assert outcome.orphans == 0
