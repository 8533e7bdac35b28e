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
from forge_trainers.forecast.engine import EngineTimes
from forge_trainers.forecast.measured import measure, plan_of, read_run
from forge_trainers.forecast.simulate import Hardware, _engines_beside, _split, _splits, planned
from forge_trainers.forecast.simulation import (
    LearnerTimes,
    SimulatedRun,
    StageTimes,
    TurnShape,
    Workload,
    learner_work,
    simulate,
)
from forge_trainers.run_file import RunLeague

TRUE = StageTimes(
    engine=EngineTimes(iteration_s=0.05, sequence_s=0.004, prompt_token_s=0.002, cores=2.0),
    learner=LearnerTimes(step_s=0.4, position_s=0.003, loss_token_s=0.001, microbatch_s=0.3, cores=1.5),
    publish_s=0.2,
    fetch_s=0.3,
    score_s=0.02,
    score_trajectory_s=0.01,
    cache_block=128,
)
CORES = 2.0


def config(**trainer):
    return fa.RunConfig(
        env="forge/Relay-v0",
        policies={"team": fa.Policy("smollm2-135m-instruct", name="team", sampling=fa.Sampling(max_tokens=12))},
        steps=40,
        trainer=fa.GRPOConfig(group_size=4, groups_per_step=3, **trainer),
    )


def settings_of(run):
    return {
        "env": [run.env],
        "policies": {name: dataclasses.asdict(policy) for name, policy in run.policies.items()},
        "trainer": json.loads(json.dumps(dataclasses.asdict(run.trainer))),
    }


def world():
    """Groups of two-turn episodes whose answers differ in length."""
    rng = np.random.default_rng(0)
    groups = []
    for _ in range(20):
        siblings = []
        for _ in range(4):
            first, second = (int(length) for length in rng.integers(2, 13, size=2))
            asks = TurnShape(agent="asker", policy="team", prompt_tokens=20, response_tokens=first, common_tokens=20)
            says = TurnShape(agent="answerer", policy="team", prompt_tokens=30, response_tokens=second, common_tokens=9)
            siblings.append(((asks,), (says,)))
        groups.append(siblings)
    return Workload(groups=groups)


def turn_row(turn, index, request):
    own = {"asker": 1, "answerer": 2}[turn.agent]
    common, rest = [own] * turn.common_tokens, turn.prompt_tokens - turn.common_tokens
    return {
        "agent": turn.agent,
        "index": index,
        "policy": turn.policy,
        "prompt_ids": [*common, *range(1000 + id(request) % 997, 1000 + id(request) % 997 + rest)],
        "response_ids": list(range(turn.response_tokens)),
        "finish_reason": "length" if turn.response_tokens == 12 else "stop",
        "generate_s": request.ended_s - request.asked_s,
    }


def test_a_routing_that_nobody_knows_is_refused():
    settings = settings_of(config())
    settings["trainer"]["engine"]["routing"] = "affinity"
    with pytest.raises(ValueError, match="routing='affinity' is none of prefix, load"):
        plan_of(settings["policies"], settings["trainer"], cores=CORES, on_gpu=False)


def written(folder, run, *, steps=4, stages=TRUE, cores=CORES):
    """A run folder as the trainer writes it, of a run that took as long as `stages` say."""
    settings = settings_of(run)
    plan = plan_of(settings["policies"], settings["trainer"], cores=cores, on_gpu=False)
    simulated = simulate(plan, stages, world(), steps=steps)
    room, busy = plan.max_tokens_per_microbatch, min(stages.learner.cores, plan.learner_threads)
    slower = stages.learner.cores / busy
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    metrics, episodes = [], []
    for step, took in enumerate(simulated):
        own = SimulatedRun(plan, stages, world(), seed=0)
        groups = own.draw(step, plan.groups_per_step)
        asked = own.play(groups)
        work = learner_work(groups, plan.trained, max_tokens=room, share_prefixes=True)
        passes = work.microbatches(plan.max_tokens_per_microbatch)
        passes_s = slower * (0.003 * work.positions + 0.001 * work.loss_tokens + 0.3 * passes)
        metrics.append({
            "step": step + 1,
            **{f"time/{name}_s": getattr(took, f"{name}_s") for name in ("collect", "score", "learn", "sync", "step")},
            **dict.fromkeys(("groups/zero_variance", "groups/failed", "groups/abstained"), 0.0),
            "groups/used": float(plan.groups_per_step),
            **{f"learner/{name}": float(getattr(work, name)) for name in ("positions", "loss_tokens")},
            "learner/microbatches": float(passes),
            "learner/forward_backward_s": passes_s,
            "learner/step_s": passes_s + 0.4 * slower,
            "learner/cpu_s": busy * (passes_s + 0.4 * slower),
        })  # fmt: skip
        played = iter(asked)
        for number, siblings in enumerate(groups):
            mine = [next(played) for _ in range(2 * len(siblings))]
            for place, rounds in enumerate(siblings):
                turns = [next(pair for pair in mine if pair[0] is turn) for (turn,) in rounds]
                mine = [pair for pair in mine if pair not in turns]
                rows = [turn_row(turn, index, request) for index, (turn, request) in enumerate(turns)]
                episodes.append({
                    "step": step + 1,
                    "env_id": run.env,
                    "seed": number,
                    "rewards": {"asker": float(place)},
                    "error": None,
                    "duration_s": sum(row["generate_s"] for row in rows),
                    "trajectories": {row["agent"]: {"agent": row["agent"], "turns": [row]} for row in rows},
                })  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (folder / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in episodes))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return {
        "sync": written(root / "sync", config()),
        "async": written(root / "async", config(max_staleness=1), steps=6),
    }


@pytest.fixture(scope="module")
def found(folders):
    return measure([read_run(folders["sync"], cores=CORES)])


# ---- stage times


def test_a_run_of_known_times_gives_them_back(found):
    engine, learner = found.stages.engine, found.stages.learner
    for sequences, prompt_tokens in ((1, 0), (6, 0), (12, 0), (12, 240)):
        true = TRUE.engine.seconds(sequences, prompt_tokens)
        assert engine.seconds(sequences, prompt_tokens) == pytest.approx(true, rel=0.1)
    assert learner.step_s == pytest.approx(0.4, rel=0.05)
    assert learner.cores == pytest.approx(1.5)
    assert found.stages.publish_s + found.stages.fetch_s == pytest.approx(0.5, rel=0.02)
    assert found.stages.score_s + 24 * found.stages.score_trajectory_s == pytest.approx(0.26, rel=0.02)
    assert found.workload.used_share == 1.0
    assert found.stages.cache_block == 128


def test_the_shapes_of_episodes_are_read(folders):
    run = read_run(folders["sync"], cores=CORES)
    assert sorted(run.episodes) == [1, 2, 3]  # the first step is cold
    first, second = run.groups[0][0]
    assert (first[0].agent, first[0].prompt_tokens, first[0].common_tokens) == ("asker", 20, 20)
    assert (second[0].agent, second[0].prompt_tokens, second[0].common_tokens) == ("answerer", 30, 9)
    assert second[0].answer_s > 0


def test_turns_that_overlap_are_one_round(folders, tmp_path):
    folder = tmp_path / "parallel"
    folder.mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        (folder / name).write_text((folders["sync"] / name).read_text())
    rows = [json.loads(line) for line in (folders["sync"] / "episodes.jsonl").read_text().splitlines()]
    for row in rows:
        row["duration_s"] = 1.0 + max(t["turns"][0]["generate_s"] for t in row["trajectories"].values())
        row["trajectories"]["asker"]["turns"][0]["generate_s"] += 1.0
    (folder / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert {len(rounds) for group in read_run(folder).groups for rounds in group} <= {1, 2}
    assert any(len(rounds) == 1 and len(rounds[0]) == 2 for group in read_run(folder).groups for rounds in group)


def test_an_asynchronous_run_says_how_much_stages_hinder_each_other(folders):
    both = measure([read_run(folders[name], cores=CORES) for name in ("sync", "async")])
    measured = read_run(folders["async"], cores=CORES)
    steps = simulate(measured.plan, both.stages, both.workload, steps=6)[1:]
    assert np.mean([step.step_s for step in steps]) == pytest.approx(measured.step_s, rel=0.1)
    assert both.core_share == 1.0
    with pytest.raises(ValueError, match="no measured run has max_staleness=0"):
        measure([measured])


def test_cores_that_are_worth_less_together_are_found(tmp_path):
    weak = dataclasses.replace(
        TRUE, engine=dataclasses.replace(TRUE.engine, cores=1.4), learner=dataclasses.replace(TRUE.learner, cores=1.4)
    )
    alone = written(tmp_path / "alone", config(), stages=weak, cores=1.4)
    crowded = config(max_staleness=2, engine=fa.EngineConfig(threads=2), learner=fa.LearnerConfig(threads=2))
    ahead = written(tmp_path / "ahead", crowded, steps=7, stages=weak, cores=1.4)
    found = measure([read_run(folder, cores=2.0) for folder in (alone, ahead)])
    assert found.core_share == pytest.approx(0.7, abs=0.11)
    one_thread = config(engine=fa.EngineConfig(threads=1), learner=fa.LearnerConfig(threads=1))
    quarter = read_run(written(tmp_path / "one", one_thread, stages=weak, cores=1.4), cores=2.0)
    predicted = simulate(planned(one_thread, found, Hardware(cores=2.0)), found.stages, found.workload, steps=4)[1:]
    assert np.mean([step.step_s for step in predicted]) == pytest.approx(quarter.step_s, rel=0.12)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"env": ["forge/Other-v0"]}, "different environments: forge/Other-v0; forge/Relay-v0"),
        ({"trainer": {"learner_procs": 2}}, "different values of learner_procs: 1; 2"),
    ],
)
def test_runs_of_different_things_are_refused(folders, tmp_path, changes, told):
    other = tmp_path / "other"
    other.mkdir()
    for name in ("metrics.jsonl", "episodes.jsonl"):
        (other / name).write_text((folders["sync"] / name).read_text())
    settings = yaml.safe_load((folders["sync"] / "config.yaml").read_text())
    settings["trainer"] |= changes.pop("trainer", {})
    (other / "config.yaml").write_text(yaml.safe_dump(settings | changes))
    with pytest.raises(ValueError, match=told):
        measure([read_run(folders["sync"]), read_run(other)])


def test_a_folder_without_a_run_is_refused(folders, tmp_path):
    with pytest.raises(RunFolderError, match=r"has no config\.yaml"):
        read_run(tmp_path)
    short = tmp_path / "short"
    short.mkdir()
    for name in ("config.yaml", "episodes.jsonl"):
        (short / name).write_text((folders["sync"] / name).read_text())
    (short / "metrics.jsonl").write_text((folders["sync"] / "metrics.jsonl").read_text().splitlines()[0] + "\n")
    with pytest.raises(RunFolderError, match="0 steps after the first 1"):
        read_run(short)


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("config.yaml", lambda text: text.replace("max_staleness:", "staleness:"), "'max_staleness'"),
        ("config.yaml", lambda text: text.replace("policies:", "players:"), "'policies'"),
        ("metrics.jsonl", lambda text: text.replace("groups/abstained", "groups/silent"), "'groups/abstained'"),
        ("metrics.jsonl", lambda text: text.replace("time/sync_s", "time/weights_s"), "'time/sync_s'"),
        ("episodes.jsonl", lambda text: text.replace("generate_s", "took_s"), "'generate_s'"),
    ],
)
def test_a_folder_of_another_version_says_what_it_lacks(folders, tmp_path, name, change, told):
    for file in ("config.yaml", "metrics.jsonl", "episodes.jsonl"):
        text = (folders["sync"] / file).read_text()
        (tmp_path / file).write_text(change(text) if file == name else text)
    with pytest.raises(RunFolderError, match=rf"{name} has no {told}: another version .* forge-agents train CONFIG"):
        read_run(tmp_path)


# ---- predictions


def test_a_larger_run_is_predicted_from_a_small_one(folders, tmp_path):
    larger = dataclasses.replace(
        config(), trainer=fa.GRPOConfig(group_size=8, groups_per_step=6, engine=fa.EngineConfig(max_num_seqs=16))
    )
    real = read_run(written(tmp_path / "larger", larger), cores=CORES)
    hardware = Hardware(cores=CORES)
    predicted = fa.simulate(larger, measured=[folders["sync"]], hardware=hardware)
    assert predicted.step_s == pytest.approx(real.step_s, rel=0.1)
    assert predicted.step_s == pytest.approx(
        predicted.collect_s + predicted.score_s + predicted.learn_s + predicted.sync_s
    )
    assert (predicted.steps, predicted.gpus, predicted.cost) == (40, 0, 0.0)
    assert predicted.hours == pytest.approx(40 * predicted.step_s / 3600)
    assert predicted.staleness == {0: 1.0}
    assert predicted == fa.simulate(larger, measured=[folders["sync"]], hardware=hardware)


def test_playing_ahead_on_gpus_hides_the_shorter_stage(folders):
    hardware = Hardware(gpus=2, learner_gpus=1, price_per_gpu_hour=3.0)
    alone, ahead = (
        fa.simulate(config(max_staleness=k), measured=[folders["sync"]], hardware=hardware) for k in (0, 1)
    )
    assert ahead.step_s < 0.8 * alone.step_s
    assert ahead.engines_idle < alone.engines_idle
    assert sum(ahead.staleness.values()) == pytest.approx(1.0)
    assert ahead.cost == pytest.approx(3.0 * ahead.gpu_hours)
    assert ahead.gpu_hours == pytest.approx(2 * ahead.hours)
    assert any("measured on a CPU" in one for one in ahead.assumptions)
    assert any("passes are of 2,048 positions" in one for one in ahead.assumptions)
    said = config(learner=fa.LearnerConfig(max_tokens_per_microbatch=2048))
    decided = fa.simulate(said, measured=[folders["sync"]], hardware=hardware).assumptions
    assert len(decided) == len(alone.assumptions) - 1  # it is the user's word


def test_the_fastest_split_is_chosen(folders):
    found = fa.simulate(config(), measured=[folders["sync"]], hardware=Hardware(gpus=6), steps=3)
    assert [one.hours for one in found.splits] == sorted(one.hours for one in found.splits)
    assert {one.learner_gpus for one in found.splits} == {1, 2, 3, 4, 5}
    assert _splits(512, 1)[:5] == [1, 2, 4, 8, 16]
    assert [512 - k for k in _splits(512, 1)[-5:]] == [16, 8, 4, 2, 1]
    assert max(_splits(512, 2)) == 510
    assert (found.step_s, found.learner_gpus) == (found.splits[0].step_s, found.splits[0].learner_gpus)


def test_an_engine_of_two_ranks_takes_two_gpus(folders):
    trainer = config().trainer
    two = dataclasses.replace(
        config(), trainer=dataclasses.replace(trainer, engine=dataclasses.replace(trainer.engine, tp=2))
    )
    six, four = Hardware(gpus=6, learner_gpus=2), Hardware(gpus=4, learner_gpus=2)
    found = fa.simulate(two, measured=[folders["sync"]], hardware=six, steps=3)
    same = fa.simulate(config(), measured=[folders["sync"]], hardware=four, steps=3)  # two replicas each
    assert (found.step_s, found.engine_gpus) == (same.step_s, 4)
    assert "every engine replica is 2 GPUs of the kind" in " ".join(found.assumptions)
    assert "an engine of 2 ranks is as fast as the measured ones of 1" in found.assumptions
    with pytest.raises(ValueError, match="1 engines of 2 ranks and a learner need 3 at least"):
        fa.simulate(two, measured=[folders["sync"]], hardware=Hardware(gpus=2), steps=3)


def test_no_engine_is_on_two_hosts(folders):
    def on(gpus, per_host, learner_gpus, ranks):
        return _engines_beside(learner_gpus, Hardware(gpus=gpus, gpus_per_host=per_host), ranks)

    assert (on(16, 8, 1, 3), on(16, 16, 1, 3)) == (4, 5)  # 7 and 8 GPUs hold two of three ranks each
    assert (on(16, 8, 8, 8), on(16, 8, 9, 8), on(20, 8, 8, 4)) == (1, 0, 3)
    trainer = config().trainer
    wide = dataclasses.replace(
        config(), trainer=dataclasses.replace(trainer, engine=dataclasses.replace(trainer.engine, tp=4))
    )
    found = fa.simulate(wide, measured=[folders["sync"]], hardware=Hardware(gpus=8, gpus_per_host=4), steps=3)
    assert {one.learner_gpus for one in found.splits} == {1, 2, 3, 4}
    with pytest.raises(ValueError, match=r"engine.tp=4: .* no split of 8 GPUs, 2 a host, leaves room for 1 beside"):
        fa.simulate(wide, measured=[folders["sync"]], hardware=Hardware(gpus=8, gpus_per_host=2), steps=3)


def test_each_learner_has_gpus_of_its_own_as_the_trainer_gives_them():
    def plan(on_gpu=True, **loras):
        policies = {
            name: dataclasses.asdict(fa.Policy("smollm2-135m-instruct", name=name, lora=lora))
            for name, lora in loras.items()
        }
        return plan_of(policies, settings_of(config())["trainer"], cores=math.inf, on_gpu=on_gpu)

    assert plan(hero=None, rival=None).learners == 2
    assert plan(hero=fa.LoRA(), rival=fa.LoRA()).learners == 1
    assert plan(hero=fa.LoRA(), rival=fa.LoRA(rank=4)).learners == 2  # of two shapes: they share an engine alone
    assert all(count % 2 == 0 for count in _splits(16, 2, 2)) and 14 in _splits(16, 2, 2)
    base, where = plan(hero=None, rival=None), Hardware(gpus=8, learner_scaling=1.0)
    measured = types.SimpleNamespace(run=types.SimpleNamespace(on_gpu=True, plan=base))
    found = _split(base, measured, where, 4)
    assert (found.learner_ranks, found.learner_speed, found.replicas) == (2, 2.0, 2)  # one GPU each was measured
    with pytest.raises(ValueError, match="learner_gpus=1 is less than one for each of 2 learners"):
        _split(base, measured, where, 1)


def test_threads_of_an_engine_are_those_of_all_its_ranks():
    def plan(tp):
        run = config(engine=fa.EngineConfig(tp=tp), max_staleness=1)
        return plan_of(settings_of(run)["policies"], settings_of(run)["trainer"], cores=8, on_gpu=False)

    assert (plan(1).engine_threads, plan(2).engine_threads) == (4, 4)  # half of the cores, whoever divides them


def test_more_gpus_learn_faster_by_the_stated_factor(folders):
    learn_s = [
        fa.simulate(
            config(), measured=[folders["sync"]], hardware=Hardware(gpus=9, learner_gpus=k, learner_scaling=0.75)
        ).learn_s
        for k in (1, 2, 4)
    ]
    fixed = 0.4 + 0.3  # of the step and of a pass; what the fit cannot tell apart moves between the parts
    assert learn_s[0] > learn_s[1] > learn_s[2] > fixed / 2
    variable = (learn_s[0] - learn_s[1]) / (1 - 1 / 1.5)
    assert learn_s[0] - learn_s[2] == pytest.approx(variable * (1 - 1 / 1.5**2), rel=0.05)


def test_evaluations_take_time(folders):
    every = fa.simulate(config(eval_every=10, eval_episodes=16), measured=[folders["sync"]])
    never = fa.simulate(config(), measured=[folders["sync"]])
    assert every.step_s == never.step_s
    assert every.hours > never.hours


@pytest.mark.parametrize(
    ("run", "hardware", "told"),
    [
        (lambda: dataclasses.replace(config(), env="forge/KuhnPoker-v0"), {}, "how long episodes are is only known"),
        (lambda: dataclasses.replace(config(), league=RunLeague()), {}, "leave league out"),
        (config, {"gpus": 1}, "1 engines and a learner need 2"),
        (config, {"cores": 0.0}, "cores=0.0 must be above 0"),
        (config, {"gpus": 4, "learner_gpus": 4}, "engines need at least one"),
        (config, {"gpus": -3}, "gpus=-3: say how many there are"),
        (config, {"gpus": 4, "learner_scaling": 0.2}, r"in \[0.5, 1\]"),
        (config, {"price_per_gpu_hour": -1.0}, "at least 0"),
    ],
)
def test_what_cannot_be_predicted_is_refused(folders, run, hardware, told):
    with pytest.raises(ValueError, match=told):
        fa.simulate(run(), measured=[folders["sync"]], hardware=Hardware(**hardware))


def test_policies_must_be_those_that_were_measured(found):
    solo = fa.Policy("smollm2-135m-instruct", name="solo")
    other = dataclasses.replace(config(), policies={"solo": solo}, policy_mapping="solo")
    with pytest.raises(ValueError, match="had the policies team, this one has solo"):
        planned(other, found, Hardware())
    frozen = dataclasses.replace(config().policies["team"], trainable=False)
    with pytest.raises(ValueError, match="no learner to simulate"):
        planned(dataclasses.replace(config(), policies={"team": frozen}), found, Hardware())


def test_adapters_of_one_model_share_an_engine():
    lora = fa.Policy("m", name="a", lora=fa.LoRA())
    policies = {name: dataclasses.asdict(dataclasses.replace(lora, name=name)) for name in "ab"}
    policies["c"] = dataclasses.asdict(fa.Policy("m", name="c", trainable=False))
    plan = plan_of(policies, dataclasses.asdict(fa.GRPOConfig()), cores=math.inf, on_gpu=True)
    assert plan.homes == {"a": "a", "b": "a", "c": "c"}
    assert plan.trained == {"a", "b"}
    assert not plan.share_prefixes


# ---- the command


def test_the_command_prints_json_and_tables(folders, tmp_path, capsys):
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump({
        "env": "forge/Relay-v0",
        "policies": {"team": {"model": "smollm2-135m-instruct", "sampling": {"max_tokens": 12}}},
        "trainer": {"group_size": 4, "groups_per_step": 3},
        "out_dir": str(folders["sync"]),
    }))  # fmt: skip
    words = ["simulate", str(file), "--simulated_steps", "2"]
    assert cli.main([*words, "--gpus", "3", "--trainer.max_staleness", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["gpus"], set(found["staleness"]), len(found["splits"])) == (3, {"0", "1"}, 2)
    assert cli.main([*words, "--measured", str(folders["sync"]), str(folders["async"]), "--gpus", "2", "--sweep"]) == 0
    said = capsys.readouterr().out
    assert "splits" in said
    assert "engines idle" in said
    assert cli.main([*words, "--out_dir", str(tmp_path / "none")]) == 1
    assert "nothing is measured" in capsys.readouterr().err
    assert cli.main([*words, "--out_dir", str(tmp_path / "none"), "--gpus", "4"]) == 1
    assert "Whether it fits into 4 GPUs needs none: --gpus 4 --model 8b" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*words, "--sweep"])
    assert "say how many with --gpus" in capsys.readouterr().err


def test_the_model_needs_no_torch():
    code = (
        "import sys, forge_trainers.forecast.simulation, forge_trainers.forecast.measured; "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "False"
