"""Predictions from measured runs: scaled stage times, plans, splits of GPUs, and the command."""

import dataclasses
import json
import math
import subprocess
import sys
import types

import numpy as np
import pytest
import yaml

import forge_agents as fa
from forge_agents.cli import main as cli
from forge_agents.errors import RunFolderError
from forge_trainers.forecast.measured import plan_of, read_run
from forge_trainers.forecast.model import EpisodeShape, Measurement, Plan, TurnShape, step_times
from forge_trainers.forecast.simulate import Hardware, on_gpus, planned
from forge_trainers.run_file import RunLeague

SECONDS = {"collect": 6.0, "score": 0.24, "learn": 3.0, "sync": 0.5}
"""Mean seconds of the stages of the measured runs, whose learner spends 2.5 s in forward and backward passes."""
CORES = 2.0
FILES = ("config.yaml", "metrics.jsonl", "episodes.jsonl")


def config(**trainer):
    return fa.RunConfig(
        env="forge/Relay-v0",
        policies={"team": fa.Policy("smollm2-135m-instruct", name="team", sampling=fa.Sampling(max_tokens=12))},
        steps=40,
        trainer=fa.GRPOConfig(**{"group_size": 4, "groups_per_step": 3, **trainer}),
    )


def settings_of(run):
    return {
        "env": [run.env],
        "policies": {name: dataclasses.asdict(policy) for name, policy in run.policies.items()},
        "trainer": json.loads(json.dumps(dataclasses.asdict(run.trainer))),
    }


def turn(agent, index, shared, prompt, response):
    number = {"asker": 1, "answerer": 2}[agent]
    return {
        "agent": agent,
        "index": index,
        "policy": "team",
        "prompt_ids": [number] * shared + list(range(1000 * index + 10, 1000 * index + 10 + prompt - shared)),
        "response_ids": list(range(response)),
        "finish_reason": "length" if response == 12 else "stop",
        "generate_s": 0.1 * response,
    }


def write_run(folder, run, *, steps=4):
    """Write a run folder with episodes of seeded lengths whose stages took `SECONDS`."""
    rng = np.random.default_rng(0)
    size, groups = run.trainer.group_size, run.trainer.groups_per_step
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(settings_of(run)))
    episodes, lengths = [], rng.integers(2, 13, size=(steps, groups, size, 2))
    for (step, group, place), _ in np.ndenumerate(lengths[..., 0]):
        first, second = (int(length) for length in lengths[step, group, place])
        turns = [turn("asker", 0, 20, 20, first), turn("answerer", 1, 9, 30, second)]
        turns[1]["prompt_ids"] = turns[1]["prompt_ids"][:9] + [int(t) + place for t in turns[1]["prompt_ids"][9:]]
        episodes.append({
            "step": step + 1,
            "env_id": run.env,
            "seed": group,
            "error": None,
            "duration_s": sum(t["generate_s"] for t in turns),
            "trajectories": {t["agent"]: {"agent": t["agent"], "turns": [t]} for t in turns},
        })  # fmt: skip
    (folder / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in episodes))
    row = {
        **{f"time/{stage}_s": seconds for stage, seconds in SECONDS.items()},
        **dict.fromkeys(("groups/zero_variance", "groups/failed", "groups/abstained"), 0.0),
        "groups/used": float(groups),
        "learner/forward_backward_s": 2.5,
        "learner/step_s": 3.0,
        "learner/cpu_s": 4.5,
    }
    rows = [{"step": step + 1, **row} for step in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def copy_run(source, target, **changes):
    target.mkdir(exist_ok=True)
    for file in FILES:
        text = (source / file).read_text()
        (target / file).write_text(changes.get(file.partition(".")[0], lambda text: text)(text))
    return target


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return {
        "sync": write_run(root / "sync", config()),
        "async": write_run(root / "async", config(max_staleness=1), steps=6),
    }


@pytest.fixture(scope="module")
def measured(folders):
    return read_run(folders["sync"], cores=CORES)


# ---- the model


def episode(*responses, other_s=0.0):
    turns = [TurnShape(policy="team", prompt_tokens=20, shared_tokens=20, response_tokens=count) for count in responses]
    return EpisodeShape(rounds=tuple((shape,) for shape in turns), agents=2, other_s=other_s)


def measurement(*episodes, **changes):
    fields = {
        "plan": plan(),
        "on_gpu": False,
        "env_ids": frozenset({"game"}),
        "episodes": episodes,
        "collect_s": 3.0,
        "score_trajectory_s": 0.01,
        "learn_s": 2.0,
        "passes_s": 1.5,
        "sync_s": 0.5,
        "used_groups": 2.0,
        "used_fraction": 1.0,
        "learner_cores": 1.5,
    }
    return Measurement(**{**fields, **changes})


def plan(**changes):
    return dataclasses.replace(
        Plan(
            group_size=4,
            groups_per_step=2,
            max_staleness=0,
            trained=frozenset({"team"}),
            homes={"team": "team"},
            max_tokens={"team": 10},
        ),
        **changes,
    )


def test_work_of_a_collection_is_counted_per_replica():
    measured = measurement(episode(2, 3), episode(5, 5))
    one, two = (measured.work(plan(replicas=count), 8) for count in (1, 2))
    assert one.sampled_tokens == pytest.approx(8 * 7.5) and two.sampled_tokens == pytest.approx(4 * 7.5)
    # two prompts of 20 tokens, which the group of four computes once
    assert one.prompt_tokens == pytest.approx(8 * 40 / 4)
    assert one.iterations == pytest.approx(5 + 5 * (1 - 0.5**8))  # expected maximum of 8 draws of 5 or 10
    waves = measured.work(plan(max_concurrent_episodes=2), 8)
    assert waves.iterations == pytest.approx(4 * 7.5)


def test_measured_plan_takes_the_measured_seconds():
    times = step_times(plan(), measurement(episode(2, 3), episode(5, 5, other_s=0.5)))
    assert (times.collect_s, times.learn_s, times.sync_s) == pytest.approx((3.0, 2.0, 0.5))
    assert times.score_s == pytest.approx(8 * 2 * 0.01) and times.publish_s == pytest.approx(0.2)
    assert times.step_s == pytest.approx(5.66) and times.tokens == pytest.approx(8 * 7.5)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"groups_per_step": 4}, {"collect": 5 / 3 * 3, "learn": 0.5 + 2 * 1.5, "score": 0.32}),  # equal iterations
        ({"max_concurrent_episodes": 4}, {"collect": 4 / 3 * 3}),  # twice the iterations
        (
            {"max_tokens": {"team": 2}},
            {"collect": 3 * (0.4 + 0.4 + 1) / 3, "learn": 0.5 + 1.5 * (0.8 * 44 / 50 + 0.08)},
        ),
        ({"iterations": 2}, {"learn": 0.5 + 2 * 1.5}),
        ({"learner_speed": 1.8}, {"learn": 0.5 + 1.5 / 1.8}),
        ({"replicas": 2}, {"collect": 2 / 3 * 3, "sync": 0.2 + 2 * 0.3}),  # each loads half of the time
    ],
)
def test_stages_scale_with_their_work(changes, seconds):
    times = step_times(plan(**changes), measurement(episode(5, 5)))
    expected = {"collect": 3.0, "score": 0.16, "learn": 2.0, "sync": 0.5, **seconds}
    assert {stage: getattr(times, f"{stage}_s") for stage in expected} == pytest.approx(expected)


def test_time_without_an_engine_does_not_scale_with_tokens():
    slow = measurement(episode(5, 5, other_s=2.0))
    assert slow.engine_s(plan(max_tokens={"team": 2}), 8) == pytest.approx(2.0 + 1.0 * (0.4 + 0.4 + 1) / 3)
    assert slow.engine_s(plan(max_concurrent_episodes=4), 8) == pytest.approx(4.0 + 4 / 3)


def test_asynchronous_step_takes_the_slower_side_or_the_shared_cores():
    measured = measurement(episode(5))
    ahead = step_times(plan(max_staleness=1), measured)
    assert ahead.step_s == pytest.approx(3.0 + 0.16)
    learner = step_times(plan(max_staleness=1), measurement(episode(5), learn_s=4.0))
    assert learner.step_s == pytest.approx(4.0 + 0.2)
    crowded = step_times(plan(max_staleness=1, cores=1.0, engine_threads=1.0), measured)
    assert crowded.step_s == pytest.approx(3.0 + 1.5 * 2.0)


def test_resampling_collects_what_is_missing():
    measured = measurement(episode(5), used_fraction=0.5)
    none, two = (step_times(plan(max_resamples=count), measured) for count in (0, 2))
    assert two.tokens == pytest.approx(none.tokens * (1 + 0.5 + 0.25))
    assert two.score_s > none.score_s and two.learn_s > none.learn_s


# ---- measured runs


def test_means_of_the_steps_are_read(measured):
    assert (measured.collect_s, measured.learn_s, measured.passes_s, measured.sync_s) == (6.0, 3.0, 2.5, 0.5)
    assert measured.score_trajectory_s == pytest.approx(0.24 / 24)
    assert (measured.used_groups, measured.used_fraction, measured.learner_cores) == (3.0, 1.0, 1.5)


def test_learners_compute_at_the_same_time_and_adapters_of_one_model_in_turn(folders, tmp_path):
    rows = [json.loads(line) for line in (folders["sync"] / "metrics.jsonl").read_text().splitlines()]
    times = {
        "hero": {"forward_backward_s": 2.5, "step_s": 2.5, "cpu_s": 2.0},
        "rival": {"forward_backward_s": 0.25, "step_s": 0.5, "cpu_s": 0.1},
    }
    for row in rows:
        row |= {f"learner/{policy}/{name}": value for policy, of in times.items() for name, value in of.items()}
    lines = "".join(json.dumps(row) + "\n" for row in rows)

    def read(lora):
        policy = fa.Policy("smollm2-135m-instruct", sampling=fa.Sampling(max_tokens=12), lora=lora)
        policies = {name: dataclasses.replace(policy, name=name) for name in times}
        settings = settings_of(dataclasses.replace(config(), policies=policies, policy_mapping={"a": "hero"}))
        changes = {"config": lambda _: yaml.safe_dump(settings), "metrics": lambda _: lines}
        return read_run(copy_run(folders["sync"], tmp_path / str(lora is None), **changes), cores=8.0)

    apart, shared = read(None), read(fa.LoRA())
    assert (apart.passes_s, apart.learner_cores) == (2.5, pytest.approx(2.0 / 2.5 + 0.1 / 0.5))
    assert (shared.passes_s, shared.learner_cores) == (2.75, pytest.approx(2.1 / 3.0))


def test_resampled_groups_count_for_no_scoring(folders, tmp_path):
    def resample(text):
        rows = [json.loads(line) for line in text.splitlines()]
        rows[-1] |= {"groups/zero_variance": 2.0, "groups/failed": 1.0, "time/score_s": 9.0}
        return "".join(json.dumps(row) + "\n" for row in rows)

    run = read_run(copy_run(folders["sync"], tmp_path / "resampled", metrics=resample))
    assert run.score_trajectory_s == pytest.approx(0.24 / 24)
    assert run.used_fraction == pytest.approx(9 / 12)


def test_episode_shapes_are_read(folders):
    run = read_run(folders["sync"], cores=CORES)
    assert len(run.episodes) == 36  # the first step is cold
    (first,), (second,) = run.episodes[0].rounds
    assert (first.prompt_tokens, first.shared_tokens) == (20, 20)
    assert (second.prompt_tokens, second.shared_tokens) == (30, 9)
    assert run.episodes[0].agents == 2


def test_simultaneous_turns_form_one_round(folders, tmp_path):
    def overlap(text):
        rows = [json.loads(line) for line in text.splitlines()]
        for row in rows:
            row["duration_s"] = 1.0 + max(t["turns"][0]["generate_s"] for t in row["trajectories"].values())
            row["trajectories"]["asker"]["turns"][0]["generate_s"] += 1.0
        return "".join(json.dumps(row) + "\n" for row in rows)

    run = read_run(copy_run(folders["sync"], tmp_path / "parallel", episodes=overlap))
    assert any(len(shape.rounds) == 1 and len(shape.rounds[0]) == 2 for shape in run.episodes)


def test_measured_run_must_be_synchronous_and_train(folders, tmp_path):
    with pytest.raises(RunFolderError, match=r"max_staleness=1, whose stages overlap.* --trainer.max_staleness 0"):
        read_run(folders["async"])
    idle = copy_run(folders["sync"], tmp_path / "idle", metrics=lambda text: text.replace('used": 3.0', 'used": 0.0'))
    with pytest.raises(RunFolderError, match="no measured step of .* trained anything"):
        read_run(idle)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": ["forge/Other-v0"]}, "different environments: forge/Other-v0; forge/Relay-v0"),
        ({"trainer": {"learner_procs": 2}}, "different values of learner_procs: 1; 2"),
    ],
)
def test_different_runs_are_refused(folders, tmp_path, changes, message):
    def change(text):
        settings = yaml.safe_load(text)
        settings["trainer"] |= changes.get("trainer", {})
        return yaml.safe_dump({**settings, **{k: v for k, v in changes.items() if k != "trainer"}})

    other = copy_run(folders["sync"], tmp_path / "other", config=change)
    with pytest.raises(ValueError, match=message):
        fa.simulate(config(), measured=[folders["sync"], other])


def test_folder_without_a_run_is_refused(folders, tmp_path):
    with pytest.raises(RunFolderError, match=r"has no config\.yaml"):
        read_run(tmp_path)
    short = copy_run(folders["sync"], tmp_path / "short", metrics=lambda text: text.splitlines()[0] + "\n")
    with pytest.raises(RunFolderError, match="0 steps after the first 1"):
        read_run(short)


@pytest.mark.parametrize(
    ("name", "change", "missing"),
    [
        ("config.yaml", ("max_staleness:", "staleness:"), "'max_staleness'"),
        ("config.yaml", ("policies:", "players:"), "'policies'"),
        ("metrics.jsonl", ("groups/abstained", "groups/silent"), "'groups/abstained'"),
        ("metrics.jsonl", ("time/sync_s", "time/weights_s"), "'time/sync_s'"),
        ("episodes.jsonl", ("generate_s", "took_s"), "'generate_s'"),
    ],
)
def test_folder_of_another_version_says_what_it_lacks(folders, tmp_path, name, change, missing):
    file = name.partition(".")[0]
    other = copy_run(folders["sync"], tmp_path / "other", **{file: lambda text: text.replace(*change)})
    with pytest.raises(RunFolderError, match=rf"{name} has no {missing}: another version .* forge-agents train CONFIG"):
        read_run(other)


def test_modules_in_a_measured_run_are_not_run(folders, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)  # as the current folder
    routed = lambda text: text.replace("routing: prefix", "routing: measured_run.evil:Router")  # noqa: E731
    run = copy_run(folders["sync"], tmp_path / "measured_run", config=routed)
    (run / "evil.py").write_text("raise AssertionError('a module of a stranger was imported')")
    with pytest.raises(RunFolderError, match="the module measured_run.evil lies in the folder of a run"):
        read_run(run)


def test_unknown_routing_is_refused():
    settings = settings_of(config())
    settings["trainer"]["engine"]["routing"] = "affinity"
    with pytest.raises(ValueError, match="routing='affinity'"):
        plan_of(settings["policies"], settings["trainer"], cores=CORES)


# ---- predictions


def test_predictions_of_several_runs_are_averaged(folders, tmp_path):
    larger = config(group_size=8, groups_per_step=6, engine=fa.EngineConfig(max_num_seqs=16))
    folder = write_run(tmp_path / "small", config(group_size=2, groups_per_step=2))
    small, large, both = (
        fa.simulate(larger, measured=runs, hardware=Hardware(cores=CORES))
        for runs in ([folder], [folders["sync"]], [folder, folders["sync"]])
    )
    for name in ("step_s", "collect_s", "score_s", "learn_s", "sync_s", "hours", "engines_idle", "tokens_per_s"):
        assert getattr(both, name) == pytest.approx((getattr(small, name) + getattr(large, name)) / 2)
    assert both.learn_s == pytest.approx(0.5 + 2.5 * (12 + 4) / 2)  # 12 and 4 times the episodes
    stages = (both.collect_s, both.score_s, both.learn_s, both.sync_s)
    assert both.step_s == pytest.approx(sum(stages))
    assert (both.steps, both.engine_gpus, both.learner_gpus) == (40, 0, 0)
    assert both.hours == pytest.approx(40 * both.step_s / 3600)


def test_asynchronous_rollouts_on_gpus_hide_the_shorter_stage(folders):
    hardware = Hardware(gpus=2)
    together, ahead = (
        fa.simulate(config(max_staleness=k), measured=[folders["sync"]], hardware=hardware) for k in (0, 1)
    )
    assert ahead.step_s < together.step_s and ahead.engines_idle < together.engines_idle
    assert (ahead.engine_gpus, ahead.learner_gpus) == (1, 1)
    assert any("measured on a CPU" in text for text in ahead.assumptions)
    cores = Hardware(gpus=2, cores=2)
    assert fa.simulate(config(max_staleness=1), measured=[folders["sync"]], hardware=cores) == ahead


def test_settings_decide_how_many_gpus_there_are(folders):
    two, wide = (config(engine=fa.EngineConfig(replicas=r, tp=t), learner_procs=2) for r, t in ((1, 2), (2, 2)))
    prediction = fa.simulate(two, measured=[folders["sync"]], hardware=Hardware(gpus=8))
    assert (prediction.engine_gpus, prediction.learner_gpus) == (2, 2)
    assert "every engine replica has 2 GPU(s) of the measured kind" in " ".join(prediction.assumptions)
    assert "an engine of 2 rank(s) is as fast as the measured engines of 1" in prediction.assumptions
    more = fa.simulate(wide, measured=[folders["sync"]], hardware=Hardware(gpus=8))
    assert (more.engine_gpus, more.learner_gpus) == (4, 2) and more.collect_s < prediction.collect_s
    with pytest.raises(ValueError, match="gpus=5: the engines need 4 and the learner 2"):
        fa.simulate(wide, measured=[folders["sync"]], hardware=Hardware(gpus=5))
    with pytest.raises(ValueError, match=r"engine.tp=2: .* a host has 1 GPUs"):
        fa.simulate(two, measured=[folders["sync"]], hardware=Hardware(gpus=8, gpus_per_host=1))


def test_each_learner_has_its_own_gpus():
    def of(**loras):
        policies = {
            name: dataclasses.asdict(fa.Policy("smollm2-135m-instruct", name=name, lora=lora))
            for name, lora in loras.items()
        }
        return plan_of(policies, settings_of(config())["trainer"], cores=math.inf)

    assert of(hero=None, rival=None).learners == 2
    assert of(hero=fa.LoRA(), rival=fa.LoRA()).learners == 1
    assert of(hero=fa.LoRA(), rival=fa.LoRA(rank=4)).learners == 2  # adapters of two shapes share only the engine
    base, hardware = of(hero=None, rival=None), Hardware(gpus=6, learner_scaling=1.0)
    for on_gpu, speed in ((True, 2.0), (False, 4.0)):  # measured with one GPU each, or on one host together
        runs = types.SimpleNamespace(on_gpu=on_gpu, plan=base)
        assert on_gpus(dataclasses.replace(base, learner_ranks=2), runs, hardware).learner_speed == speed
    with pytest.raises(ValueError, match="the engines need 2 and the learner 2"):
        on_gpus(base, runs, Hardware(gpus=3))


def test_threads_of_an_engine_are_those_of_all_its_ranks():
    def threads(tp):
        settings = settings_of(config(engine=fa.EngineConfig(tp=tp), max_staleness=1))
        return plan_of(settings["policies"], settings["trainer"], cores=8).engine_threads

    assert (threads(1), threads(2)) == (4, 4)  # half of the cores


def test_more_gpus_speed_the_learner_up_by_the_scaling(folders):
    def learn_s(gpus):
        hardware = Hardware(gpus=9, learner_scaling=0.75)
        return fa.simulate(config(learner_procs=gpus), measured=[folders["sync"]], hardware=hardware).learn_s

    one, two, four = map(learn_s, (1, 2, 4))
    variable = (one - two) / (1 - 1 / 1.5)
    assert one > two > four and one - four == pytest.approx(variable * (1 - 1 / 1.5**2), rel=0.05)


def test_evaluations_take_time(folders):
    every = fa.simulate(config(eval_every=10, eval_episodes=16), measured=[folders["sync"]])
    never = fa.simulate(config(), measured=[folders["sync"]])
    assert every.step_s == never.step_s and every.hours > never.hours


@pytest.mark.parametrize(
    ("run", "hardware", "message"),
    [
        (lambda: dataclasses.replace(config(), env="forge/KuhnPoker-v0"), {}, "Measure the same environments"),
        (lambda: dataclasses.replace(config(), league=RunLeague()), {}, "Remove league"),
        (config, {"gpus": 1}, "the engines need 1 and the learner 1"),
        (config, {"cores": 0.0}, "cores=0.0 must be above 0"),
        (config, {"gpus": -3}, "gpus=-3 must be at least 0"),
        (config, {"gpus": 4, "learner_scaling": 0.2}, r"in \[0.5, 1\]"),
        (config, {"gpu_gb": 0.0}, "gpu_gb=0.0"),
    ],
)
def test_impossible_predictions_are_refused(folders, run, hardware, message):
    with pytest.raises(ValueError, match=message):
        fa.simulate(run(), measured=[folders["sync"]], hardware=Hardware(**hardware))


def test_policies_must_be_those_that_were_measured(measured):
    solo = fa.Policy("smollm2-135m-instruct", name="solo")
    other = dataclasses.replace(config(), policies={"solo": solo}, policy_mapping="solo")
    with pytest.raises(ValueError, match="have the policies team, this run has solo"):
        planned(other, measured, Hardware())
    frozen = dataclasses.replace(config().policies["team"], trainable=False)
    with pytest.raises(ValueError, match="no learner to predict"):
        planned(dataclasses.replace(config(), policies={"team": frozen}), measured, Hardware())


def test_adapters_of_one_model_share_an_engine():
    lora = fa.Policy("m", name="a", lora=fa.LoRA())
    policies = {name: dataclasses.asdict(dataclasses.replace(lora, name=name)) for name in "ab"}
    policies["c"] = dataclasses.asdict(fa.Policy("m", name="c", trainable=False))
    shared = plan_of(policies, dataclasses.asdict(fa.GRPOConfig()), cores=math.inf)
    assert shared.homes == {"a": "a", "b": "a", "c": "c"} and shared.trained == {"a", "b"}


# ---- the command


def test_command_prints_json_and_tables(folders, tmp_path, capsys):
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump({
        "env": "forge/Relay-v0",
        "policies": {"team": {"model": "smollm2-135m-instruct", "sampling": {"max_tokens": 12}}},
        "trainer": {"group_size": 4, "groups_per_step": 3},
        "out_dir": str(folders["sync"]),
    }))  # fmt: skip
    words = ["simulate", str(file)]
    assert cli.main([*words, "--gpus", "3", "--trainer.max_staleness", "1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["engine_gpus"], printed["learner_gpus"]) == (1, 1)
    assert cli.main([*words, "--measured", str(folders["sync"]), str(folders["sync"]), "--gpus", "2"]) == 0
    text = capsys.readouterr().out
    assert "1 for engines, 1 for the learner" in text and "engines idle" in text
    assert cli.main([*words, "--out_dir", str(tmp_path / "none")]) == 1
    assert "no measured run" in capsys.readouterr().err
    assert cli.main([*words, "--out_dir", str(tmp_path / "none"), "--gpus", "4"]) == 1
    assert "needs no measurement: --gpus 4 --model 8b" in capsys.readouterr().err


def test_prediction_needs_no_torch():
    code = "import sys, forge_trainers.forecast.model, forge_trainers.forecast.measured; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "False"
