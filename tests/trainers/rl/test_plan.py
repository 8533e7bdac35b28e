"""Settings of a GRPO run in config.yaml, and changes of a resumed run."""

import asyncio
import dataclasses
import json
from types import SimpleNamespace

import fake_run
import pytest
import yaml
from fake_processes import Processes, collect_with, group
from plain_env import Plain

import forge_agents as fa
import forge_verifiers as fv
from forge_agents.bench import exploitability, uniform
from forge_agents.errors import ArgumentError, RunFolderError
from forge_envs.games.poker import KuhnPoker
from forge_trainers.rl.league_policies import policies_of
from forge_trainers.rl.plan import RunPlan
from forge_trainers.rl.policy_mapping import RunPolicies
from forge_trainers.rl.rewards import EnvTurnReward, env_reward
from forge_trainers.rl.tasks import TaskSampler
from forge_trainers.rl.trainer import GRPOTrainer
from forge_trainers.run.checkpoints import Checkpoints
from forge_verifiers.core.verifier import reward_of

fa.register("settings/Duel-v0", entry_point=f"{__name__}:Duel", levels=[{"size": 1}, {"size": 2}])


class Duel(Plain):
    possible_agents = ["player_0", "player_1"]

    def __init__(self, size=1, **kwargs):
        super().__init__(**kwargs)
        self.size = size


def in_tens(trajectories):
    return [10 + float(t.turns[0].action) for t in trajectories]


def in_tenths(trajectories):
    return [float(t.turns[0].action) / 10 for t in trajectories]


class Halved(fa.Credit):
    def advantages(self, rewards_n, noise_n=None):
        result = super().advantages(rewards_n, noise_n)
        return None if result is None else result / 2


def reward(trajectories):
    return [t.reward for t in trajectories]


def other_reward(trajectories):
    return [2 * t.reward for t in trajectories]


async def collect(collector, step, numbers, put, attempt):
    for number in numbers:
        put(number, group(0.1 * number, 0.5, seed=number, env_id=collector._plan.sampler.env_ids[0]))
    await asyncio.sleep(0)


def fit(
    folder, *, steps=2, env=Duel, env_args=None, reward=reward, rival=None, lora=None, model="tiny-random", **settings
):
    team = fa.Policy(model, name="team", lora=lora)
    config = fa.GRPOConfig(groups_per_step=2, max_resamples=0, checkpoint_every=1, preflight=False, **settings)
    with GRPOTrainer(
        {"player_0": team, "player_1": rival or fa.Random(name="rival")}, reward, config, folder
    ) as trainer:

        async def start(plan, *, learn):
            lifecycle = trainer._lifecycle
            lifecycle.processes = lifecycle.processes or Processes()
            lifecycle.next_step = await trainer._checkpoints.restore(lifecycle.processes.learners)
            return lifecycle.processes

        trainer._lifecycle.start = start
        collect_with(trainer, collect)
        trainer.fit(env, steps=steps, env_args=env_args)
    return yaml.safe_load((folder / "config.yaml").read_text())


def test_config_records_reward_environment_players_and_packages(tmp_path):
    result = fit(
        tmp_path,
        env_args={"size": 3},
        rival=fa.Scripted(lambda text: "x", name="rival"),
        credit=Halved(min_spread=0.1),
    )
    assert result["reward"]["function"] == f"{__name__}:reward" and result["reward"]["source"]
    assert result["env_args"] == {"size": 3} and result["steps"] == 2 and result["method"] == "grpo"
    assert result["environments"]["Duel"]["class"] == f"{__name__}:Duel"
    assert result["trainer"]["credit"]["class"] == f"{__name__}:Halved"
    assert result["trainer"]["credit"]["min_spread"] == 0.1
    assert result["players"]["rival"]["fn"]["function"].endswith("<lambda>")
    assert result["loss"]["name"] == "dapo" and result["packages"]["torch"] and result["weights"]["team"]


def test_groups_of_one_episode_need_a_rule_that_compares_none(tmp_path):
    credit = fa.Credit(by=("role",), baseline="rae", scale="none")
    with fake_run.trainer(tmp_path, group_size=1, credit=credit) as run:
        run.fit(fake_run.Draws, steps=1)
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())["trainer"]
    assert written["group_size"] == 1 and written["credit"]["baseline"] == "rae"
    assert {field.name for field in dataclasses.fields(fa.GRPOConfig)} == written.keys()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"credit": fa.Credit(by=("role",))}, "groups_per_step=1 give every advantage 0"),
        ({"credit": fa.Credit(by=("role",), baseline="rae", scale="batch_std")}, "groups_per_step=1 give every advan"),
        ({"engine": fa.EngineConfig(on_update="restart")}, "engine.on_update='restart' has no effect with max_stal"),
    ],
)
def test_settings_with_which_no_run_learns_or_that_do_nothing_are_refused(settings, message):
    settings = {"group_size": 1, "credit": fa.Credit(baseline="none", scale="none"), **settings}
    with pytest.raises(ValueError, match=message):
        fa.GRPOConfig(groups_per_step=1, **settings)
    enough = fa.GRPOConfig(groups_per_step=2, max_staleness=1, **settings)
    assert enough.group_size == 1 and enough.credit == settings["credit"]


def test_config_records_the_environment_reward(tmp_path):
    result = fit(tmp_path, reward=None, env={"settings/Duel-v0@1": 1.0, "settings/Duel-v0@2": 3.0}, credit=fa.Credit())
    assert result["reward"] is None and result["env_args"] == {}
    levels = result["environments"]
    assert levels["settings/Duel-v0@2"]["weight"] == 3.0
    assert levels["settings/Duel-v0@2"]["arguments"] == {"size": 2}
    assert result["trainer"]["credit"]["baseline"] == "mean", "a rule of ours needs no class"


@pytest.mark.parametrize(
    ("change", "resets"),
    [
        ({}, False),
        ({"checkpoint_every": 2, "learner": fa.LearnerConfig(lr=3e-6)}, False),
        ({"reward": in_tenths}, True),
        ({"eval_episodes": 7}, True),
        ({"policies": dataclasses.replace(fake_run.TEAM, sampling=fa.Sampling(max_tokens=5))}, True),
    ],
)
def test_best_checkpoint_is_chosen_among_equally_measured_ones(tmp_path, capsys, change, resets):
    async def export(folder):
        folder.mkdir(exist_ok=True)
        return folder

    settings = {"eval_every": 1, "keep_checkpoints": 9, "checkpoint_every": 1, "reward": in_tens}
    for steps, more in ((3, {}), (6, change)):
        with fake_run.trainer(tmp_path, **settings | more) as run:
            run._lifecycle.export = export
            run.fit(fake_run.Draws, steps=steps)
    rewards = {row["step"]: row["eval/reward"] for row in map(json.loads, (tmp_path / "metrics.jsonl").open())}
    compared = [step for step in rewards if step > 3 or not resets]
    best = max(compared, key=lambda step: (rewards[step], step))
    assert Checkpoints(tmp_path / "checkpoints", keep=9).best().name == f"step-00000{best}"
    assert ("do not count for the best checkpoint" in capsys.readouterr().out) == resets


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"reward": other_reward}, f"reward.function: {__name__}:reward -> {__name__}:other_reward"),
        ({"reward": None}, f"reward.function: {__name__}:reward -> None"),
        ({"env_args": {"size": 2}}, "env_args.size: None -> 2"),
        ({"credit": Halved()}, f"trainer.credit.class: None -> {__name__}:Halved"),
        ({"rival": fa.Random(name="rival", seed=7)}, "players.rival.seed: 0 -> 7"),
        ({"learner": fa.LearnerConfig(lr=3e-6)}, "trainer.learner.lr: 2e-05 -> 3e-06"),
    ],
)
def test_changed_setting_of_a_resumed_run_is_reported(tmp_path, capsys, change, told):
    fit(tmp_path)
    capsys.readouterr()
    fit(tmp_path, steps=3, **change)
    output = capsys.readouterr().out.replace("2.0e-05", "2e-05").replace("3.0e-06", "3e-06")
    assert told in output and "config.previous.yaml has the old ones" in output
    capsys.readouterr()
    fit(tmp_path, steps=4, **change)
    assert told not in capsys.readouterr().out, "the record is that of the last session"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora": fa.LoRA(rank=8)}, r"policies\.team\.lora\.rank is 4 .* and 8 in this call"),
        ({"lora": fa.LoRA(rank=4, alpha=64)}, r"policies\.team\.lora\.alpha is 32"),
        ({"lora": None}, r"policies\.team\.lora"),
    ],
)
def test_different_adapter_is_refused(tmp_path, change, message):
    fit(tmp_path, lora=fa.LoRA(rank=4))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    with pytest.raises(RunFolderError, match=message):
        fit(tmp_path, steps=4, **change)
    with pytest.raises(RunFolderError, match=message):
        fit(tmp_path, **change)  # also if the run is finished
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    assert before == after, "nothing is rewritten"


def test_run_with_the_same_adapter_continues(tmp_path):
    fit(tmp_path, lora=fa.LoRA(rank=4))
    fit(tmp_path, steps=3, lora=fa.LoRA(rank=4))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_changed_file_of_tasks_is_reported(tmp_path, capsys):
    tasks = tmp_path / "tasks.jsonl"
    for steps, text in ((2, '"a"'), (3, '"a"'), (4, '"b"')):
        tasks.write_text(text)
        capsys.readouterr()
        fit(tmp_path / "run", steps=steps, env_args={"size": str(tasks)})
        assert ("env_args.size" in capsys.readouterr().out) == (steps == 4)


def test_different_start_weights_are_refused(tmp_path, tiny_llama, tiny_qwen3):
    fit(tmp_path / "run", model=str(tiny_llama))
    (tmp_path / "moved").symlink_to(tiny_llama)
    fit(tmp_path / "run", steps=3, model=str(tmp_path / "moved"))
    with pytest.raises(RunFolderError, match=r"policies\.team\.model is"):
        fit(tmp_path / "run", steps=4, model=str(tiny_qwen3))


def test_reward_with_a_different_state_is_refused(tmp_path):
    def ensemble(*names):
        return fa.Ensemble([fa.Rule(lambda t, name=name: abs(t.reward) ** len(name), name=name) for name in names])

    fit(tmp_path, reward=ensemble("a", "bb"))
    fit(tmp_path, reward=ensemble("a", "bb"), steps=3)
    before = (tmp_path / "config.yaml").read_text()
    with pytest.raises(RunFolderError, match="the state of reward in"):
        fit(tmp_path, reward=ensemble("a", "other"), steps=4)
    assert (tmp_path / "config.yaml").read_text() == before


def test_run_of_another_method_is_refused(tmp_path):
    fit(tmp_path)
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**config, "method": "sft"}))
    with pytest.raises(RunFolderError, match="method is sft"):
        fit(tmp_path, steps=3)


def test_console_metrics_and_checkpoints_number_steps_equally(tmp_path, capsys):
    fit(tmp_path, steps=3)
    numbers = {
        name: [json.loads(line)["step"] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "episodes.jsonl")
    }
    assert numbers["metrics.jsonl"] == [1, 2, 3] and sorted(set(numbers["episodes.jsonl"])) == [1, 2, 3]
    assert "train 3/3" in capsys.readouterr().out
    checkpoints = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert checkpoints == ["step-000002", "step-000003"]
    fit(tmp_path, steps=4)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert "continuing after step 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "matters"),
    [
        ({"league": {"held_out": ["b"], "anchors": ["a"], "snapshot_every": 9}}, False),
        ({"league": {"held_out": ["a"], "anchors": ["a"], "snapshot_every": 1}}, True),
        ({"weights": {"team": "2", "rival": "1"}}, False),
        ({"weights": {"team": "1", "rival": "2"}}, True),
        ({"environments": {"t": {"weight": 2.0, "class": "m:T"}}}, False),
        ({"environments": {"t": {"weight": 1.0, "class": "m:T", "source": "1"}}}, True),
        ({"players": {"x": {"class": "m:X", "seed": 1}}}, True),
        ({"steps": 7, "trainer": {"seed": 3}}, False),
    ],
)
def test_measure_of_held_out_rewards_has_what_they_depend_on(change, matters):
    settings = {
        "environments": {"t": {"weight": 1.0, "class": "m:T"}},
        "policies": {"team": {"model": "m", "learner": None}, "rival": {"model": "m", "learner": None}},
        "weights": {"team": "1", "rival": "1"},
        "players": {"x": {"class": "m:X", "seed": 0}},
        "league": {"held_out": ["b"], "anchors": ["a"], "snapshot_every": 1},
    }
    plan = SimpleNamespace(trained=["team"], config=fa.GRPOConfig())
    assert (RunPlan.measure(plan, settings) != RunPlan.measure(plan, settings | change)) == matters


@pytest.mark.parametrize(
    ("metrics", "score"),
    [
        ({"eval/reward": 0.5, "eval/failed": 2.0, "eval/abstained": 1.0}, 0.5),
        ({"eval/reward": 1.0, "eval/failed": 2.0, "eval/abstained": 2.0}, None),
        ({"eval/reward": 1.0, "eval/failed": 4.0}, None),
        ({"eval/reward": 0.5, "eval/exploitability": 0.25}, -0.25),
        ({"eval/reward": 0.5, "eval/exploitability/a": 0.25, "eval/exploitability/b": 0.5}, -0.375),
        ({"train/loss": 0.5}, None),
    ],
)
def test_best_checkpoint_has_the_lowest_exploitability_or_a_reward_of_nearly_all_episodes(metrics, score):
    plan = SimpleNamespace(trained=["a", "b"], ranks_checkpoints=True, config=fa.GRPOConfig(eval_episodes=64))
    assert RunPlan.checkpoint_score(plan, metrics) == score


def test_self_play_in_a_zero_sum_game_ranks_checkpoints_only_by_exploitability(tmp_path):
    def scores(samples):
        config = fa.GRPOConfig(eval_every=1, exploitability_samples=samples)
        sampler, policies = TaskSampler("forge/KuhnPoker-v0"), policies_of(fa.Policy("m"), config, tmp_path)
        plan = RunPlan(sampler, policies, config, env_reward)
        return plan.ranks_checkpoints, plan.checkpoint_score({"eval/reward": 0.0, "eval/failed": 0.0})

    assert scores(0) == (False, None) and scores(8)[0]


class Bluff(KuhnPoker):
    """Kuhn poker in which every chip counts as `worth`."""

    def __init__(self, *, worth=1):
        super().__init__()
        self.worth = worth

    def _over(self, winner, chips, illegal=None):
        return super()._over(winner, chips * self.worth, illegal)


@pytest.mark.parametrize("as_class", [False, True])
def test_exploitability_is_that_of_the_game_with_the_arguments_of_the_run(as_class):
    fa.register("plan-test/Bluff-v0", max_turns=3)(Bluff)
    config = fa.GRPOConfig(eval_every=1, exploitability_samples=8)
    sampler = TaskSampler(Bluff if as_class else "plan-test/Bluff-v0", {"worth": 3})
    plan = RunPlan(sampler, RunPolicies(fa.Policy("m")), config, env_reward)
    plan.make_games()
    assert [exploitability(game, uniform) for game in plan.games] == [pytest.approx(3 * 11 / 24)]


@pytest.mark.parametrize(
    ("env", "sampling", "message"),
    [
        ("forge/TicTacToe-v0", {}, "forge/TicTacToe-v0 cannot list its openings"),
        (Duel, {}, "Duel cannot list its openings"),
        ("forge/KuhnPoker-v0", {"max_reasoning_tokens": 8}, "needs a second request per answer"),
    ],
)
def test_run_whose_exploitability_cannot_be_measured_is_refused_before_it_starts(tmp_path, env, sampling, message):
    """Otherwise it would end at its first evaluation, with an error."""
    config = fa.GRPOConfig(eval_every=5, exploitability_samples=8, preflight=False)
    policy = fa.Policy("m", sampling=fa.Sampling(**sampling))
    trainer = fa.GRPOTrainer(policy, config=config, out_dir=tmp_path)
    with trainer, pytest.raises(ArgumentError, match=f"exploitability cannot be measured: .*{message}"):
        trainer.fit(env, steps=10)


def test_checkpoints_of_earlier_versions_keep_their_measure():
    """A resumed run without a league still compares its best checkpoint with those before the update."""
    settings = {
        "environments": {"t": {"weight": 1.0, "class": "m:T"}},
        "policies": {"team": {"model": "m", "learner": None}},
        "weights": {"team": "1"},
    }
    plan = SimpleNamespace(trained=["team"], config=fa.GRPOConfig(eval_episodes=64))
    assert RunPlan.measure(plan, settings) == "02aab47b520dcb5f"
    exploited = fa.GRPOConfig(eval_episodes=64, eval_every=1, exploitability_samples=8)
    assert RunPlan.measure(SimpleNamespace(trained=["team"], config=exploited), settings) != "02aab47b520dcb5f"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"policy_mapping": {"player_0": "team", "player_2": "random"}},
            "no agent 'player_2'. The agents are player_0",
        ),
        ({"policy_mapping": {"player_0": "team"}}, "agent 'player_1' has no policy. Policies were given for player_0"),
        ({"env_args": {"sise": 2}}, "got an unexpected keyword argument 'sise'"),
        ({"reward": f"{__name__}:in_ten"}, "has no attribute 'in_ten'"),
        (
            {"trainer": fa.GRPOConfig(eval_every=1, exploitability_samples=1)},
            "settings/Duel-v0 cannot list its openings",
        ),
    ],
)
def test_dry_run_refuses_settings_that_the_run_would_refuse(settings, message):
    run = fa.RunConfig(env="settings/Duel-v0", policies={"team": fa.Policy("tiny-random")}, **settings)
    with pytest.raises((TypeError, ValueError), match=message):
        run.dry_run()


@pytest.mark.parametrize("turns", ["to_go", "return"])
def test_sums_of_turn_rewards_need_a_reward_of_turns(turns):
    """The advantages would be those of the total reward, without a discount."""

    def plan(reward):
        config = fa.GRPOConfig(credit=fa.Credit(turns=turns, discount=0.5))
        return RunPlan(TaskSampler(Duel), RunPolicies(fa.Policy("tiny-random", name="team")), config, reward)

    per_turn = EnvTurnReward()
    for reward in (per_turn, fa.MultiReward({"a": env_reward, "b": per_turn}), fv.PerTurn(fa.EnvReward())):
        assert plan(reward).credit.discount == 0.5
    for reward, name in ((env_reward, "environment"), (lambda trajectories: [0.0] * len(trajectories), "<lambda>")):
        with pytest.raises(ValueError, match=rf"credit.turns='{turns}' has no effect: the reward '.*{name}' gives one"):
            plan(reward_of(reward))
