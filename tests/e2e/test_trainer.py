"""The whole way of the data on a tiny model: real vLLM, Monarch, TorchTitan and TorchStore."""

import dataclasses
import importlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import forge_agents as fa
from forge_agents.errors import EmptyBatchError, ForgeError, MismatchError, UnknownIdError
from forge_agents.rollout.players import ModelPlayer
from forge_trainers.records.run_folder import load_batch

pytestmark = pytest.mark.timeout(300)


class Letters(fa.TurnEnv):
    """Say lowercase letters; two seats in turn, each paid the share of lowercase letters in what it said."""

    possible_agents = ["left", "right"]

    def setup(self, rng):
        self.start = "".join(map(chr, rng.integers(97, 123, 3)))
        self.said = []

    def instructions(self, agent):
        return "abc"

    def observe_text(self, agent):
        return self.said[-1][:8] if self.said else self.start

    def act(self, agent, action):
        self.said.append(action)
        share = sum("a" <= c <= "z" for c in action) / max(len(action), 1)
        return fa.Outcome(rewards={agent: share}, done=len(self.said) == 2)


def config(**changes):
    settings = {
        "group_size": 8,
        "groups_per_step": 4,
        "checkpoint_every": 2,
        "refills": 0,
        "seed": 1,
        "learner": fa.LearnerConfig(lr=3e-3, threads=1, compute_dtype="float32"),
        "engine": fa.EngineConfig(enforce_eager=True, kv_cache_gb=0.1, max_model_len=256, threads=1),
    }
    return fa.GRPOConfig(**(settings | changes))


@pytest.fixture
def team(tiny_llama):
    return fa.Policy(str(tiny_llama), name="team", sampling=fa.Sampling(max_tokens=8))


def test_a_team_learns_and_the_control_does_not(team, tiny_llama, tmp_path):
    from transformers import AutoModelForCausalLM

    def run(name, lr):
        settings = config(learner=fa.LearnerConfig(lr=lr, threads=1, compute_dtype="float32"))
        with fa.GRPOTrainer(team, config=settings, out_dir=tmp_path / name) as trainer:
            before = trainer.evaluate(Letters, episodes=64)
            result = trainer.fit(Letters, steps=12)
            return before, result, trainer.evaluate(Letters, episodes=64)

    before, result, after = run("trained", 3e-3)
    assert after.reward - after.ci > before.reward + before.ci
    assert after.reward > 1.5 * before.reward
    for row in result.metrics:
        assert row["learner/logprob_gap_mean"] < 1e-3  # float32 sampler against float32 learner
        assert row["staleness/max"] == 0
    assert {"config.yaml", "metrics.jsonl", "episodes.jsonl", "reward.png", "tensorboard", "export"} <= {
        p.name for p in (tmp_path / "trained").iterdir()
    }
    table = fa.load_episodes(tmp_path / "trained", policy="team")
    assert [row["step"] for row in table] == [step for step in range(12) for _ in range(4)]  # keep_episodes
    last = table.episode(-1)
    assert fa.Episode.from_json(last.to_json()) == last and last.turns[0].logprobs and last.turns[0].versions
    assert table[-1]["tokens"] == sum(len(turn.response_ids) for turn in last.turns) > 0
    assert table[-1]["reward"] == pytest.approx(table[-1]["trained_reward"])
    assert {row["error"] for row in table} == {""}
    start, trained = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (tiny_llama, result.export))
    assert start.keys() == trained.keys()
    assert any(not np.array_equal(start[k].float().numpy(), trained[k].float().numpy()) for k in start)

    still_before, _, still_after = run("control", 0.0)
    assert abs(still_after.reward - still_before.reward) <= still_before.ci + still_after.ci


def test_a_second_session_continues_with_what_the_verifiers_learned(team, tmp_path):
    def ensemble():
        share = fa.Rule(lambda t: t.reward, name="share")
        short = fa.Rule(lambda t: 1.0 / (1 + len(t.turns[-1].action)), name="short")
        return fa.Ensemble([share, short, fa.EnvReward()])

    settings = config(learner=fa.LearnerConfig(lr=4e-3, lr_decay="linear", threads=1, compute_dtype="float32"))
    first, second = ensemble(), ensemble()
    with fa.GRPOTrainer(team, reward=first, config=settings, out_dir=tmp_path) as trainer:
        trainer.fit(Letters, steps=2)
    with fa.GRPOTrainer(team, reward=second, config=settings, out_dir=tmp_path) as trainer:
        trainer.evaluate(Letters, episodes=2)
        assert first.version == second.version > 0
        saved, restored = first.state_dict(), second.state_dict()
        assert saved.keys() == restored.keys()
        for key, value in saved.items():
            np.testing.assert_array_equal(value, restored[key], err_msg=key)  # bit by bit; no label, NaN, equals itself
        result = trainer.fit(Letters, steps=4)
    assert [row["step"] for row in result.metrics] == [0, 1, 2, 3]
    assert [row["learner/version"] for row in result.metrics] == [1, 2, 3, 4]
    for row in result.metrics:  # one after the other: who is not at work is idle, and nobody twice at once
        assert 0 < row["idle/engines"] < 1 and 0 < row["idle/learner"] < 1
        assert row["idle/engines"] + row["idle/learner"] > 0.95
    # the second session's schedule is the longer one
    assert [row["learner/lr"] for row in result.metrics] == pytest.approx([4e-3, 2e-3, 2e-3, 1e-3])


def test_one_step_ahead_is_one_version_behind(team, tmp_path):
    # a bound on the gap that float32 keeps on fresh samples only: what one update changed is no mismatch
    settings = config(max_staleness=1, max_logprob_gap=1e-3)
    with fa.GRPOTrainer(team, config=settings, out_dir=tmp_path) as trainer:
        rows = trainer.fit(Letters, steps=3).metrics
    assert [row["staleness/max"] for row in rows] == [0, 1, 1]
    assert rows[0]["learner/logprob_gap_mean"] < 1e-3 < rows[1]["learner/logprob_gap_mean"]


def test_a_sampler_at_another_temperature_ends_the_run_and_its_batch_is_kept(team, tmp_path, monkeypatch):
    make = ModelPlayer.__init__

    def colder(self, engine, renderer, sampling, *args, **options):
        make(self, engine, renderer, dataclasses.replace(sampling, temperature=0.9), *args, **options)

    monkeypatch.setattr(ModelPlayer, "__init__", colder)
    with (
        fa.GRPOTrainer(team, config=config(max_logprob_gap=1e-3), out_dir=tmp_path) as trainer,
        pytest.raises(MismatchError, match="sampler and learner of team differ by"),
    ):
        trainer.fit(Letters, steps=1)
    assert load_batch(tmp_path / "failed-batches/step-000000-team.safetensors")["tokens"]["loss_mask"].any()
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_siblings_that_never_differ_end_the_run_with_the_reason(team, tmp_path):
    with (
        fa.GRPOTrainer(
            team, reward=lambda ts: np.zeros(len(ts)), config=config(max_empty_steps=2), out_dir=tmp_path
        ) as trainer,
        pytest.raises(EmptyBatchError, match="2 steps in a row.*'flat': 4"),
    ):
        trainer.fit(Letters, steps=10)


def test_groups_with_a_broken_environment_are_dropped_and_counted(team, tmp_path):
    class Fragile(Letters):
        def setup(self, rng):
            super().setup(rng)
            if self.start[0] < "n":
                raise RuntimeError("fragile")

    with fa.GRPOTrainer(team, config=config(groups_per_step=8), out_dir=tmp_path) as trainer:
        row = trainer.fit(Fragile, steps=1).metrics[0]
    assert row["groups/failed"] > 0 and row["groups/used"] > 0
    assert row["groups/failed"] + row["groups/used"] + row["groups/flat"] == 8
    assert "fragile" in (tmp_path / "episodes.jsonl").read_text()


def test_mistakes_are_found_before_anything_starts(team, tmp_path):
    trainer = fa.GRPOTrainer(team, config=config(), out_dir=tmp_path)
    with pytest.raises(UnknownIdError, match="KuhnPoker"):
        trainer.fit("forge/KuhnPokr-v0", steps=1)
    with pytest.raises(ValueError, match="no seat 'lft'.*'left'"):
        fa.GRPOTrainer({"lft": team, "right": team}, config=config(), out_dir=tmp_path).fit(Letters, steps=1)
    with pytest.raises(ValueError, match="no seat holds a trainable policy"):
        fa.GRPOTrainer(fa.Random(), config=config(), out_dir=tmp_path).fit(Letters, steps=1)
    with pytest.raises(ForgeError, match="smollm2-135m-instruct"):
        fa.GRPOTrainer(fa.Policy("smollm2-135m-instrct"), config=config(), out_dir=tmp_path).fit(Letters, steps=1)
    with pytest.raises(ValueError, match="steps=0"):
        trainer.fit(Letters, steps=0)


SCRIPT = """
import sys
sys.path.insert(0, {here!r})
import forge_agents as fa
from test_trainer import Letters, config
team = fa.Policy({model!r}, name="team", sampling=fa.Sampling(max_tokens=8))
with fa.GRPOTrainer(team, config=config(checkpoint_every=2), out_dir={out!r}) as trainer:
    trainer.fit(Letters, steps={steps})
print("finished")
"""


def start(tiny_llama, out, steps):
    code = SCRIPT.format(here=str(Path(__file__).parent), model=str(tiny_llama), out=str(out), steps=steps)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_steps(out, count, process, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        file = out / "metrics.jsonl"
        if file.exists() and len(file.read_text().splitlines()) >= count:
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    raise AssertionError(f"no {count} steps after {timeout_s} s")


def test_sigterm_finishes_the_step_and_saves_it(tiny_llama, tmp_path):
    process = start(tiny_llama, tmp_path, steps=1000)
    wait_for_steps(tmp_path, 1, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "finishing this step" in output, output
    assert "run it again to continue" in output
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    newest = max((tmp_path / "checkpoints").glob("step-*"))
    assert json.loads((newest / "experiment.json").read_text())["step"] == len(rows)


@pytest.mark.timeout(600)
def test_a_killed_run_continues_bit_by_bit_and_leaves_no_process(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "perf"))
    (outcome,) = importlib.import_module("kills").kills(tmp_path, runs=1, steps=4, seed=5)
    assert outcome.differing == ()
    assert outcome.orphans == 0
