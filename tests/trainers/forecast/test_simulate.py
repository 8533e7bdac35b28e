"""Predictions from measured runs: stage times, plans, splits of GPUs, and the command."""

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
from forge_trainers.forecast.measured import measure, plan_of, read_run
from forge_trainers.forecast.model import (
    EpisodeShape,
    Plan,
    StageTimes,
    TurnShape,
    Workload,
    collection_work,
    step_times,
)
from forge_trainers.forecast.simulate import Hardware, on_gpus, planned
from forge_trainers.run_file import RunLeague

TRUE = StageTimes(
    iteration_s=0.05,
    sampled_token_s=0.004,
    prompt_token_s=0.002,
    learner_fixed_s=0.4,
    position_s=0.003,
    loss_token_s=0.001,
    microbatch_s=0.3,
    publish_s=0.2,
    fetch_s=0.3,
    score_s=0.02,
    score_trajectory_s=0.01,
    learner_cores=1.5,
)
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


def write_run(folder, run, *, steps=4, stages=TRUE):
    """Write a run folder whose stages took as long as `stages` predict."""
    rng = np.random.default_rng(0)
    settings = settings_of(run)
    plan = plan_of(settings["policies"], settings["trainer"], cores=CORES)
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    episodes, lengths = [], rng.integers(2, 13, size=(steps, plan.groups_per_step, plan.group_size, 2))
    for (step, group, place), _ in np.ndenumerate(lengths[..., 0]):
        first, second = (int(length) for length in lengths[step, group, place])
        turns = [turn("asker", 0, 20, 20, first), turn("answerer", 1, 9, 30, second)]
        turns[1]["prompt_ids"] = turns[1]["prompt_ids"][:9] + [int(t) + place for t in turns[1]["prompt_ids"][9:]]
        episodes.append({
            "step": step + 1,
            "env_id": run.env,
            "seed": group,
            "rewards": {"asker": float(place)},
            "error": None,
            "duration_s": sum(t["generate_s"] for t in turns),
            "trajectories": {t["agent"]: {"agent": t["agent"], "turns": [t]} for t in turns},
        })  # fmt: skip
    (folder / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in episodes))
    (folder / "metrics.jsonl").write_text("")
    count = plan.group_size * plan.groups_per_step
    positions, loss_tokens = 70.0 * count, 14.0 * count
    shapes = [shape for step in range(steps) for shape in _shapes_of(episodes, step + 1)]
    workload = Workload(episodes=shapes, positions=positions / count, loss_tokens=loss_tokens / count)
    times = step_times(dataclasses.replace(plan, max_staleness=0), stages, workload)
    passes_s = times.learn_s - 0.4
    row = {
        **{f"time/{name}_s": getattr(times, f"{name}_s") for name in ("collect", "score", "learn", "sync", "step")},
        **dict.fromkeys(("groups/zero_variance", "groups/failed", "groups/abstained"), 0.0),
        "groups/used": float(plan.groups_per_step),
        "learner/positions": positions,
        "learner/loss_tokens": loss_tokens,
        "learner/microbatches": float(math.ceil(positions / plan.max_tokens_per_microbatch)),
        "learner/forward_backward_s": passes_s,
        "learner/step_s": passes_s + 0.4,
        "learner/cpu_s": 1.5 * (passes_s + 0.4),
    }
    rows = [{"step": step + 1, **row} for step in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _shapes_of(episodes, step):
    from forge_trainers.forecast.measured import _shapes

    groups = {}
    for episode in episodes:
        if episode["step"] == step:
            groups.setdefault(episode["seed"], []).append(episode)
    return [shape for group in groups.values() for shape in _shapes(group)]


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
    return measure([read_run(folders["sync"], cores=CORES)])


# ---- the model


def episode(*responses, other_s=0.0, cut=False):
    turns = [
        TurnShape(policy="team", prompt_tokens=20, shared_tokens=20, response_tokens=count, cut=cut)
        for count in responses
    ]
    return EpisodeShape(rounds=tuple((shape,) for shape in turns), agents=2, other_s=other_s)


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
    workload = Workload(episodes=[episode(2, 3), episode(5, 5)])
    one, two = (collection_work(plan(replicas=count), workload, 8) for count in (1, 2))
    assert one.sampled_tokens == pytest.approx(8 * 7.5) and two.sampled_tokens == pytest.approx(4 * 7.5)
    # two prompts of 20 tokens, which the group of four computes once
    assert one.prompt_tokens == pytest.approx(8 * 40 / 4)
    assert one.iterations == pytest.approx(5 + 5 * (1 - 0.5**8))  # expected maximum of 8 draws of 5 or 10
    waves = collection_work(plan(max_concurrent_episodes=2), workload, 8)
    assert waves.iterations == pytest.approx(4 * 7.5)


def test_lengths_follow_max_tokens():
    cut, ended = episode(4, cut=True), episode(4)
    workload = Workload(episodes=[cut, ended], stop_rates={"team": 0.5})
    assert workload.response_tokens(cut.rounds[0][0], 3) == 3
    assert workload.response_tokens(ended.rounds[0][0], 100) == 4
    assert workload.response_tokens(cut.rounds[0][0], 100) == pytest.approx(6.0)  # two more tokens on average
    assert workload.response_tokens(cut.rounds[0][0], 5) == pytest.approx(5.0)
    never = Workload(episodes=[cut])
    assert never.response_tokens(cut.rounds[0][0], 9) == 9


def test_larger_groups_are_informative_more_often():
    workload = Workload(episodes=[episode(1)], outcomes=[("a", "a", "a", "b")])
    assert workload.used_fraction_of(2) == pytest.approx(1 - 3 / 6)
    assert workload.used_fraction_of(4) == 1.0
    assert workload.used_fraction_of(8) == pytest.approx(1 - (0.75**8 + 0.25**8))
    with pytest.raises(ValueError, match="used_fraction=2"):
        Workload(episodes=[episode(1)], used_fraction=2)


def test_asynchronous_step_takes_the_slower_side_or_the_shared_cores():
    workload = Workload(episodes=[episode(5)], positions=100, loss_tokens=5)
    together = step_times(plan(), TRUE, workload)
    stages = (together.collect_s, together.score_s, together.learn_s, together.sync_s)
    assert together.step_s == pytest.approx(sum(stages))
    ahead = step_times(plan(max_staleness=1), TRUE, workload)
    assert ahead.step_s == pytest.approx(max(ahead.collect_s + ahead.score_s, ahead.learn_s + ahead.publish_s))
    crowded = step_times(plan(max_staleness=1, cores=1.0, engine_threads=1.0), TRUE, workload)
    assert crowded.step_s == pytest.approx(crowded.collect_s + 1.5 * crowded.learn_s)


def test_resampling_collects_what_is_missing():
    workload = Workload(episodes=[episode(5)], used_fraction=0.5, positions=100, loss_tokens=5)
    none, two = (step_times(plan(max_resamples=count), TRUE, workload) for count in (0, 2))
    assert two.tokens == pytest.approx(none.tokens * (1 + 0.5 + 0.25))
    assert two.score_s > none.score_s and two.learn_s > none.learn_s


# ---- measured runs


def test_fit_recovers_the_stage_times(measured):
    assert measured.stages.learner_fixed_s == pytest.approx(0.4, rel=0.05)
    assert measured.stages.learner_cores == pytest.approx(1.5)
    assert measured.stages.publish_s + measured.stages.fetch_s == pytest.approx(0.5, rel=0.02)
    assert measured.stages.score_s + 24 * measured.stages.score_trajectory_s == pytest.approx(0.26, rel=0.02)
    assert measured.workload.used_fraction == 1.0
    assert (measured.workload.positions, measured.workload.loss_tokens) == (70.0, 14.0)


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


def test_asynchronous_runs_need_a_synchronous_one(folders):
    asynchronous = read_run(folders["async"], cores=CORES)
    both = measure([read_run(folders["sync"], cores=CORES), asynchronous])
    assert both.run.folder == folders["sync"]
    with pytest.raises(ValueError, match="no measured run has max_staleness=0"):
        measure([asynchronous])


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
        measure([read_run(folders["sync"]), read_run(other)])


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


def test_unknown_routing_is_refused():
    settings = settings_of(config())
    settings["trainer"]["engine"]["routing"] = "affinity"
    with pytest.raises(ValueError, match="routing='affinity'"):
        plan_of(settings["policies"], settings["trainer"], cores=CORES)


# ---- predictions


def test_larger_run_is_predicted_from_a_small_one(folders, tmp_path):
    larger = config(group_size=8, groups_per_step=6, engine=fa.EngineConfig(max_num_seqs=16))
    small = config(group_size=2, groups_per_step=2)
    runs = [folders["sync"], write_run(tmp_path / "small", small)]
    actual = read_run(write_run(tmp_path / "larger", larger), cores=CORES)
    prediction = fa.simulate(larger, measured=runs, hardware=Hardware(cores=CORES))
    assert prediction.step_s == pytest.approx(actual.step_s, rel=0.25)
    stages = (prediction.collect_s, prediction.score_s, prediction.learn_s, prediction.sync_s)
    assert prediction.step_s == pytest.approx(sum(stages))
    assert (prediction.steps, prediction.engine_gpus, prediction.learner_gpus) == (40, 0, 0)
    assert prediction.hours == pytest.approx(40 * prediction.step_s / 3600)


def test_asynchronous_rollouts_on_gpus_hide_the_shorter_stage(folders):
    hardware = Hardware(gpus=2)
    together, ahead = (
        fa.simulate(config(max_staleness=k), measured=[folders["sync"]], hardware=hardware) for k in (0, 1)
    )
    assert ahead.step_s < together.step_s and ahead.engines_idle < together.engines_idle
    assert (ahead.engine_gpus, ahead.learner_gpus) == (1, 1)
    assert any("measured on a CPU" in text for text in ahead.assumptions)
    assert any("microbatches have 2,048 positions" in text for text in ahead.assumptions)
    explicit = config(learner=fa.LearnerConfig(max_tokens_per_microbatch=2048))
    fewer = fa.simulate(explicit, measured=[folders["sync"]], hardware=hardware).assumptions
    assert len(fewer) == len(together.assumptions) - 1


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
        runs = types.SimpleNamespace(run=types.SimpleNamespace(on_gpu=on_gpu, plan=base))
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
    assert cli.main([*words, "--measured", str(folders["sync"]), str(folders["async"]), "--gpus", "2"]) == 0
    text = capsys.readouterr().out
    assert "1 for engines, 1 for the learner" in text and "engines idle" in text
    assert cli.main([*words, "--out_dir", str(tmp_path / "none")]) == 1
    assert "no measured run" in capsys.readouterr().err
    assert cli.main([*words, "--out_dir", str(tmp_path / "none"), "--gpus", "4"]) == 1
    assert "needs no measurement: --gpus 4 --model 8b" in capsys.readouterr().err


def test_prediction_needs_no_torch():
    code = "import sys, forge_trainers.forecast.model, forge_trainers.forecast.measured; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "False"
