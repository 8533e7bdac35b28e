"""Predictions from measured runs: scaled stage times, checks of the runs, and the command."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import forge_agents as fa
from forge_agents.cli import main as cli
from forge_agents.errors import RunFolderError
from forge_trainers.forecast.simulate import Hardware, read_run
from forge_trainers.run_file import RunLeague

ROW = {
    "time/collect_s": 6.0,
    "time/score_s": 0.24,
    "time/learn_s": 3.0,
    "time/sync_s": 0.5,
    "time/step_s": 9.74,
    "idle/engines": 1 - 6 / 9.74,
    "tokens": 240.0,
    **dict.fromkeys(("groups/zero_variance", "groups/failed", "groups/abstained"), 0.0),
    "groups/used": 3.0,
    "learner/forward_backward_s": 2.5,
    "learner/step_s": 3.0,
    "learner/cpu_s": 4.5,
}
"""Metrics of a measured step: 3 groups of 4 episodes, engines that never wait, and 1.5 busy cores of the learner."""


def config(**trainer: Any) -> fa.RunConfig:
    return fa.RunConfig(
        env="forge/Relay-v0",
        policies={"team": fa.Policy("smollm2-135m-instruct", name="team", sampling=fa.Sampling(max_tokens=12))},  # type: ignore[dict-item]
        steps=40,
        trainer=fa.GRPOConfig(**{"group_size": 4, "groups_per_step": 3, **trainer}),
    )


def with_policies(**policies: fa.Policy) -> fa.RunConfig:
    named = {name: dataclasses.replace(policy, name=name) for name, policy in policies.items()}
    mapping = dict(zip(("asker", "answerer"), [*named, *named], strict=False))
    return dataclasses.replace(config(), policies=named, policy_mapping=mapping)


@pytest.fixture
def measure(tmp_path: Path) -> Callable[..., Path]:
    """``measure(name, run, **changes)``: a folder of a run whose steps have the metrics of `ROW` with changes."""

    def write(name: str = "measured", run: fa.RunConfig | None = None, *, steps: int = 4, **changes: Any) -> Path:
        run = run or config()
        folder = tmp_path / name
        folder.mkdir()
        settings = {
            "env": [run.env],
            "policies": {name: dataclasses.asdict(policy) for name, policy in run.policies.items()},
            "trainer": json.loads(json.dumps(dataclasses.asdict(run.trainer))),
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        rows = [{"step": step, **ROW, **changes} for step in range(1, steps + 1)]
        rows[0] |= dict.fromkeys(ROW, 99.0)  # a cold step
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return write


@pytest.fixture
def predicted(measure: Callable[..., Path]) -> Callable[..., Any]:
    """``predicted(hardware, **trainer)``: the prediction of a run with these settings from the measured run."""
    folder = measure()
    return lambda hardware=None, **trainer: fa.simulate(config(**trainer), measured=[folder], hardware=hardware)


# ---- the model


def test_measured_settings_take_the_measured_seconds(predicted):
    result = predicted()
    stages = (result.collect_s, result.score_s, result.learn_s, result.sync_s)
    assert stages == pytest.approx((6.0, 0.24, 3.0, 0.5)) and result.step_s == pytest.approx(9.74)
    assert result.tokens_per_s == pytest.approx(240 / 9.74) and result.hours == pytest.approx(40 * 9.74 / 3600)
    assert (result.engines_idle, result.learner_idle) == pytest.approx((1 - 6 / 9.74, 1 - 3.2 / 9.74))
    assert (result.steps, result.engine_gpus, result.learner_gpus) == (40, 0, 0)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"groups_per_step": 6}, {"collect": 6 * 5 / 3, "learn": 0.5 + 2 * 2.5, "score": 0.48}),
        ({"group_size": 8}, {"collect": 6 * 5 / 3, "learn": 0.5 + 2 * 2.5, "score": 0.48}),
        ({"max_concurrent_episodes": 6}, {"collect": 6 * 4 / 3}),  # two waves
        ({"engine": fa.EngineConfig(max_num_seqs=6)}, {"collect": 6 * 4 / 3}),
        ({"learner": fa.LearnerConfig(num_iterations=2)}, {"learn": 0.5 + 2 * 2.5}),
        ({"engine": fa.EngineConfig(replicas=2)}, {"collect": 6 * 2 / 3, "sync": 0.2 + 2 * 0.3}),  # each loads half
    ],
)
def test_stages_scale_with_their_work(predicted, changes, seconds):
    result = predicted(**changes)
    expected = {"collect": 6.0, "score": 0.24, "learn": 3.0, "sync": 0.5, **seconds}
    assert {stage: getattr(result, f"{stage}_s") for stage in expected} == pytest.approx(expected)
    assert result.step_s == pytest.approx(sum(expected.values()))


def test_time_without_an_engine_scales_with_waves_only(measure):
    waiting = measure(**{"idle/engines": 1 - 2 / 9.74})  # engines compute for 2 of 6 seconds
    longer, waves = (
        fa.simulate(config(**changes), measured=[waiting]).collect_s
        for changes in ({"group_size": 8}, {"max_concurrent_episodes": 6})
    )
    assert longer == pytest.approx(4 + 2 * 5 / 3) and waves == pytest.approx(2 * 4 + 2 * 4 / 3)
    assert fa.simulate(config(), measured=[waiting]).engines_idle == pytest.approx(1 - 2 / 9.74)


def test_engines_that_take_turns_do_not_wait_for_the_environment(measure):
    policy = fa.Policy("tiny-random", sampling=fa.Sampling(max_tokens=12))
    run = with_policies(hero=policy, rival=policy)
    learners = {f"learner/{n}/{m}": 1.0 for n in run.policies for m in ("forward_backward_s", "step_s", "cpu_s")}
    folder = measure("two", run, **{"idle/engines": 1 - 3 / 9.74, **learners})  # each of two computes for 3 s
    assert read_run(folder, engines=2).waiting_s == pytest.approx(0)
    assert read_run(folder, engines=1).waiting_s == pytest.approx(3)
    hardware = Hardware(gpus=4)
    assert fa.simulate(run, measured=[folder], hardware=hardware).learner_gpus == 2


def test_asynchronous_step_takes_the_slower_side_or_the_shared_cores(measure, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    ahead, gpus = config(max_staleness=1), Hardware(gpus=2)
    folder = measure()
    assert fa.simulate(ahead, measured=[folder], hardware=gpus).step_s == pytest.approx(6.24)
    assert fa.simulate(ahead, measured=[folder]).step_s == pytest.approx(6.24)
    learning = measure("learning", **{"time/learn_s": 7.0, "learner/cpu_s": 10.5})
    assert fa.simulate(ahead, measured=[learning], hardware=gpus).step_s == pytest.approx(7.2)
    assert fa.simulate(ahead, measured=[learning]).step_s == pytest.approx(6 / 2 + 7 * 0.75)
    assert fa.simulate(ahead, measured=[folder], hardware=gpus).engines_idle < 0.05


def test_resampling_collects_what_is_missing(measure):
    half = measure(**{"groups/used": 1.5, "groups/zero_variance": 1.5})
    none, two = (fa.simulate(config(max_resamples=count), measured=[half]) for count in (0, 2))
    assert two.tokens_per_s * two.step_s == pytest.approx(none.tokens_per_s * none.step_s * (1 + 0.5 + 0.25))
    assert none.learn_s == pytest.approx(3.0) and two.learn_s == pytest.approx(0.5 + 2.5 * 1.75)
    assert two.score_s == pytest.approx(0.24 * 1.75 + 6 * (1 / 3 + 2 / 3 * 0.75))


def test_predictions_of_several_runs_are_averaged(measure):
    small, large = measure("small", config(group_size=2, groups_per_step=2), **{"groups/used": 2.0}), measure()
    one, two, both = (fa.simulate(config(), measured=runs) for runs in ([small], [large], [small, large]))
    for name in ("step_s", "collect_s", "score_s", "learn_s", "sync_s", "hours", "engines_idle", "tokens_per_s"):
        assert getattr(both, name) == pytest.approx((getattr(one, name) + getattr(two, name)) / 2)
    assert one.learn_s == pytest.approx(0.5 + 2.5 * 3)  # 12 episodes after 4


def test_settings_decide_how_many_gpus_there_are(predicted):
    two, wide = ({"engine": fa.EngineConfig(replicas=r, tp=t), "learner_procs": 2} for r, t in ((1, 2), (2, 2)))
    result = predicted(Hardware(gpus=8), **two)
    assert (result.engine_gpus, result.learner_gpus) == (2, 2)
    assumptions = " ".join(result.assumptions)
    assert "every engine replica has 2 GPU(s) of the measured kind" in assumptions and "on a CPU" in assumptions
    assert "an engine of 2 rank(s) is as fast as the measured engines of 1" in result.assumptions
    more = predicted(Hardware(gpus=8), **wide)
    assert (more.engine_gpus, more.learner_gpus) == (4, 2) and more.collect_s < result.collect_s
    with pytest.raises(ValueError, match="gpus=5: the engines need 4 and the learner 2"):
        predicted(Hardware(gpus=5), **wide)
    with pytest.raises(ValueError, match=r"engine.tp=2: .* a host has 1 GPUs"):
        predicted(Hardware(gpus=8, gpus_per_host=1), **two)


def test_adapters_of_one_model_share_an_engine_and_a_learner(measure):
    def gpus(**loras: fa.LoRA | None) -> tuple[int, int]:
        policies = {
            name: fa.Policy("tiny-random", lora=lora, sampling=fa.Sampling(max_tokens=12))
            for name, lora in loras.items()
        }
        run = with_policies(**policies)
        folder = measure("-".join(f"{name}{lora is not None}" for name, lora in loras.items()) + str(len(loras)), run)
        result = fa.simulate(run, measured=[folder], hardware=Hardware(gpus=4))
        return result.engine_gpus, result.learner_gpus

    assert gpus(hero=None, rival=None) == (2, 2)
    assert gpus(hero=fa.LoRA(), rival=fa.LoRA()) == (1, 1)
    assert gpus(a=fa.LoRA(), b=fa.LoRA(rank=4)) == (1, 2)  # adapters of two shapes share only the engine


def test_more_gpus_speed_the_learner_up_by_the_scaling(predicted, measure):
    one, two, four = (
        predicted(Hardware(gpus=9, learner_scaling=0.75), learner_procs=count).learn_s for count in (1, 2, 4)
    )
    assert (one, two, four) == pytest.approx((3.0, 0.5 + 2.5 / 1.5, 0.5 + 2.5 / 1.5**2))
    policy = fa.Policy("tiny-random", sampling=fa.Sampling(max_tokens=12))
    run = with_policies(hero=policy, rival=policy)  # two learners, measured on one host or with a GPU each
    for peak, learn_s in (({}, 0.5 + 2.5 / 2), ({"learner/peak_device_bytes": 1.0}, 3.0)):
        folder = measure(f"run-{len(peak)}", run, **peak)
        hardware = Hardware(gpus=4, learner_scaling=1.0)
        assert fa.simulate(run, measured=[folder], hardware=hardware).learn_s == pytest.approx(learn_s)


def test_evaluations_take_time(predicted):
    every, never = predicted(eval_every=10, eval_episodes=24), predicted()
    assert every.step_s == never.step_s and every.hours - never.hours == pytest.approx(4 * 10 / 3600)


# ---- measured runs


def test_run_without_enough_synchronous_steps_is_refused(measure, tmp_path):
    with pytest.raises(RunFolderError, match=r"has no config\.yaml.* Train a few steps: forge-agents train CONFIG"):
        read_run(tmp_path)
    with pytest.raises(RunFolderError, match="0 steps after the first 1"):
        read_run(measure("short", steps=1))
    with pytest.raises(RunFolderError, match=r"0 steps after the first 1 without an evaluation \(of 3\)"):
        read_run(measure("evaluated", **{"time/evaluate_s": 1.0}))
    with pytest.raises(RunFolderError, match=r"max_staleness=1, whose stages overlap.* --trainer.max_staleness 0"):
        read_run(measure("ahead", config(max_staleness=1)))
    with pytest.raises(RunFolderError, match="no measured step of .* trained anything"):
        read_run(measure("idle", **{"groups/used": 0.0}))


@pytest.mark.parametrize(
    ("name", "old", "missing"),
    [
        ("config.yaml", "max_staleness:", "'max_staleness'"),
        ("config.yaml", "policies:", "'policies'"),
        ("metrics.jsonl", "groups/abstained", "'groups/abstained'"),
        ("metrics.jsonl", "time/sync_s", "'time/sync_s'"),
    ],
)
def test_folder_of_another_version_says_what_it_lacks(measure, name, old, missing):
    file = measure() / name
    file.write_text(file.read_text().replace(old, "other" + ":" * old.endswith(":")))
    with pytest.raises(RunFolderError, match=rf"{name} has no {missing}: another version .* forge-agents train CONFIG"):
        read_run(file.parent)


@pytest.mark.parametrize(
    ("run", "hardware", "message"),
    [
        (dataclasses.replace(config(), env="forge/KuhnPoker-v0"), {}, "environments forge/Relay-v0, .*KuhnPoker"),
        (with_policies(solo=config().policies["team"]), {}, r"policies team \(all weights, max_tokens 12\), .* solo"),
        (with_policies(team=fa.Policy("m", sampling=fa.Sampling(max_tokens=13))), {}, "max_tokens 12.*max_tokens 13"),
        (with_policies(team=fa.Policy("m", trainable=False)), {}, "no learner to predict"),
        (dataclasses.replace(config(), league=RunLeague()), {}, "Remove league"),
        (config(), {"gpus": 1}, "the engines need 1 and the learner 1"),
        (config(), {"gpus": -3}, "gpus=-3 must be at least 0"),
        (config(), {"gpus": 4, "learner_scaling": 0.2}, r"in \[0.5, 1\]"),
        (config(), {"gpu_gb": 0.0}, "gpu_gb=0.0"),
    ],
)
def test_impossible_predictions_are_refused(measure, run, hardware, message):
    folder = measure()
    with pytest.raises(ValueError, match=message):
        fa.simulate(run, measured=[folder], hardware=Hardware(**hardware))


def test_runs_on_gpu_and_cpu_are_not_averaged(measure):
    runs = [measure(), measure("gpu", **{"learner/peak_device_bytes": 1.0})]
    with pytest.raises(ValueError, match="different kinds of device, GPU and CPU"):
        fa.simulate(config(), measured=runs)


def test_modules_in_a_measured_run_are_not_run(measure, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)  # as the current folder
    folder = measure("measured_run")
    file = folder / "config.yaml"
    file.write_text(file.read_text().replace("routing: prefix", "routing: measured_run.evil:Router"))
    (folder / "evil.py").write_text("raise AssertionError('a module of a stranger was imported')")
    assert fa.simulate(config(), measured=[folder]).step_s == pytest.approx(9.74)


# ---- the command


def test_command_prints_json_and_tables(measure, tmp_path, capsys):
    file, folder = tmp_path / "train.yaml", measure()
    file.write_text(yaml.safe_dump({
        "env": "forge/Relay-v0",
        "policies": {"team": {"model": "smollm2-135m-instruct", "sampling": {"max_tokens": 12}}},
        "trainer": {"group_size": 4, "groups_per_step": 3},
        "out_dir": str(folder),
    }))  # fmt: skip
    words = ["simulate", str(file)]
    assert cli.main([*words, "--gpus", "3", "--trainer.max_staleness", "1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["engine_gpus"], printed["learner_gpus"]) == (1, 1)
    assert cli.main([*words, "--measured", str(folder), str(folder), "--gpus", "2"]) == 0
    text = capsys.readouterr().out
    assert "1 for engines, 1 for the learner" in text and "engines idle" in text
    assert cli.main([*words, "--out_dir", str(tmp_path / "none")]) == 1
    message = capsys.readouterr().err
    assert "no measured run" in message and "needs no measurement: --gpus 8 --model 8b" in message
