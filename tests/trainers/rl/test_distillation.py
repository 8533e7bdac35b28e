"""Distillation in a run: settings, samples, refusals, memory and resuming."""

import asyncio
import json
import re
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_run import TEAM, Draws, trainer

import forge_agents as fa
from forge_agents.cli.config import parse
from forge_agents.errors import RunFolderError
from forge_agents.models.sizes import ModelSize
from forge_agents.models.tiny import tiny_model
from forge_agents.runtime.faults import Faults
from forge_trainers.learner.memory import checkpoint_bytes, learner_bytes
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.rl.plan import RunPlan
from forge_trainers.rl.policy_mapping import RunPolicies
from forge_trainers.rl.report import Messages
from forge_trainers.rl.rewards import env_reward
from forge_trainers.rl.tasks import TaskSampler
from forge_trainers.run.dry_run import dry_run
from forge_trainers.run.parts import check_models
from forge_trainers.run.plan import compute_processes, resolve, shared_settings, teachers_of
from forge_trainers.run.processes import Processes


class Constant(Draws):
    """Every episode earns the same."""

    def act(self, agent, action):
        return fa.Outcome(rewards={agent: 0.0}, done=True)


def distill(reference, **changes):
    return fa.LearnerConfig(**{"loss": "distill", "reference": reference, "kl_coef": 1.0, **changes})


def test_all_trajectories_count_although_their_rewards_are_equal(tmp_path, tiny_llama):
    settings = {"group_size": 1, "groups_per_step": 4, "learner": distill(str(tiny_llama)), "max_resamples": None}
    with trainer(tmp_path, **settings) as run:
        assert run.config.resamples == 0
        rows = run.fit(Constant, steps=3).metrics
    assert [(row["groups/used"], row["groups/zero_variance"], row["groups/resampled"]) for row in rows] == [
        (4, 0, 0)
    ] * 3
    assert {row["reward/mean"] for row in rows} == {0.0}


@pytest.mark.parametrize("term", [{"kl_coef": 0.5}, {"entropy_coef": 0.1}, {}])
@pytest.mark.parametrize("normalization", ["sampled", "used"])
def test_deterministic_policy_is_still_pulled_by_divergence_and_entropy_bonus(tmp_path, term, normalization):
    learner = fa.LearnerConfig(**term)
    with trainer(tmp_path, learner=learner, loss_normalization=normalization, max_resamples=0) as run:
        (row,) = run.fit(Constant, steps=1).metrics
    assert row["groups/used"] == 0 < row["groups/zero_variance"]
    assert ("learner/version" in row) == (bool(term) and normalization == "sampled")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"loss": "distill"},
            "consists of the divergence from a teacher, and reference='start' with kl_coef=0 has none",
        ),
        ({"loss": "distill", "kl_coef": 1.0, "reference": 5}, "Set reference to a model, or to one for each agent"),
        ({"loss": "distill", "reference": "m"}, "and kl_coef=1"),
        ({"reference": 0, "kl_coef": 1.0}, 'must be "start", a number of steps of at least 1, the name or folder of a'),
        ({"reference": TEAM, "kl_coef": 1.0}, "reference=Policy("),
        ({"reference": {"a": TEAM}, "kl_coef": 1.0}, "a mapping from agents to such names"),
        ({"reference": "", "kl_coef": 1.0}, "must be"),
        ({"reference": {}, "kl_coef": 1.0}, "must be"),
        ({"reference": {"a": 3}, "kl_coef": 1.0}, "must be"),
    ],
)
def test_references_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        fa.LearnerConfig(**settings)


@pytest.mark.parametrize(
    ("config", "learner", "message"),
    [
        (fa.GRPOConfig, {"reference": "m"}, "learner.reference='m' has no effect: kl_coef=0"),
        (fa.GRPOConfig, distill("m", clip=(0.1, 0.2)), "loss='distill' has no probability ratio"),
        (fa.GRPOConfig, distill("m", correction="mask"), "loss='distill' has no probability ratio"),
        (fa.SFTConfig, {"reference": "m", "kl_coef": 1.0}, "a teacher is compared on samples of the policy"),
    ],
)
def test_settings_without_effect_are_refused(config, learner, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config(learner=learner)


@pytest.mark.parametrize("reference", [2.5, True, ["m"]])
def test_reference_of_another_type_is_refused(reference):
    message = re.escape(f"reference={reference!r} must be a whole number, a text or a mapping")
    with pytest.raises((TypeError, ValueError), match=message):
        fa.LearnerConfig(reference=reference, kl_coef=1.0)


def test_estimator_is_exact_for_teachers_only():
    assert fa.LearnerConfig(kl_coef=0.1).loss_settings.kl == "k3"
    assert fa.LearnerConfig(kl_coef=0.1, reference=3).loss_settings.kl == "k3"
    assert fa.LearnerConfig(kl_coef=0.1, reference={"a": "m"}).loss_settings.kl == "exact"
    assert fa.LearnerConfig(kl_coef=0.1, reference="m", kl="k2").loss_settings.kl == "k2"


def test_credit_that_no_loss_reads_is_refused():
    sampler, policies = TaskSampler(Draws), RunPolicies(TEAM)
    for credit in (fa.Credit(), fa.Credit(baseline="counterfactual")):
        config = fa.GRPOConfig(learner=distill("m"), credit=credit)
        with pytest.raises(ValueError, match="has no effect: loss='distill' reads no advantages"):
            RunPlan(sampler, policies, config, env_reward)
    added = fa.GRPOConfig(learner=distill("m", loss="dapo"), credit=fa.Credit(scale="none"))  # the loss and a teacher
    assert RunPlan(sampler, policies, added, env_reward).credit.scale == "none"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ({"b": "m"}, "policy 'team': learner.reference names 'b'. The agents are a."),
        ({"a": "m", "aa": "m"}, "names 'aa'. The agents are a. Did you mean 'a'?"),
    ],
)
def test_teachers_of_unknown_agents_are_refused(reference, message):
    config = fa.GRPOConfig(learner=distill(reference))
    with pytest.raises(ValueError, match=re.escape(message)):
        RunPlan(TaskSampler(Draws), RunPolicies(TEAM), config, env_reward)


class Two(Draws):
    possible_agents = ("a", "b")


def test_distillation_has_no_measures_of_roles(tmp_path, tiny_llama):
    """Their gradient is that of advantages, which the loss does not read."""
    with trainer(tmp_path, learner=distill(str(tiny_llama)), max_resamples=None) as run:
        rows = run.fit(Two, steps=2).metrics
    assert [name for row in rows for name in row if name.startswith("roles/")] == []


def test_balanced_roles_count_only_policies_that_learn_from_advantages():
    learner = {"loss": "distill", "reference": "m", "kl_coef": 1.0}
    policies = {"a": TEAM, "b": replace(TEAM, name="other", learner=learner)}
    config = fa.GRPOConfig(credit=fa.Credit(balance_roles=True), max_resamples=0, loss_normalization="used")
    with pytest.raises(ValueError, match=re.escape("plays one agent of each environment at most (a)")):
        RunPlan(TaskSampler(Two), RunPolicies(policies), config, env_reward)


def test_agent_without_a_teacher_is_refused():
    config = fa.GRPOConfig(learner=distill({"a": "m"}))
    with pytest.raises(ValueError, match="policy 'team' plays b, and learner.reference has teachers of a only"):
        RunPlan(TaskSampler(Two), RunPolicies(TEAM), config, env_reward)
    apart = {"a": TEAM, "b": replace(TEAM, name="other", trainable=False)}
    RunPlan(TaskSampler(Two), RunPolicies(apart), config, env_reward)
    both = fa.GRPOConfig(learner=distill({"a": "m", "b": "m"}))
    with pytest.raises(ValueError, match="names a teacher of 'b', which no policy that learns plays"):
        RunPlan(TaskSampler(Two), RunPolicies(apart), both, env_reward)
    RunPlan(TaskSampler(Two), RunPolicies({"a": TEAM, "b": replace(TEAM, name="other")}), both, env_reward)


def test_learner_loads_the_teachers_of_its_own_agents_only():
    """Each teacher is a model in memory. Adapters that share a learner have the teachers of all of them."""
    config = fa.GRPOConfig(learner=distill({"a": "m", "b": "n"}))

    def loaded(policies, **options):
        plan = RunPlan(TaskSampler(Two), RunPolicies(policies), config, env_reward, **options)
        return {name: dict(config.learner_of(policy).teachers) for name, policy in plan.loaded.items()}

    both = {"a": "m", "b": "n"}
    apart = {"a": TEAM, "b": replace(TEAM, name="other")}
    assert loaded(apart) == {"team": {"a": "m"}, "other": {"b": "n"}}
    assert loaded(TEAM) == {"team": both} and loaded(apart, partial=True) == {"team": both, "other": both}
    adapters = {agent: replace(policy, lora=fa.LoRA(rank=2)) for agent, policy in apart.items()}
    assert loaded(adapters) == {"team": both, "other": both}


def test_fork_has_the_reference_of_its_own_settings(tiny_llama, tmp_path, monkeypatch):
    """Learners with one of several teachers kept it in a fork, which then learned from it or was refused."""
    started = []

    async def start(self, plans):
        started.append({name: (plan.reference, plan.lr) for name, plan in plans.items()})
        return {}

    monkeypatch.setattr(Processes, "_start_learners", start)
    team = replace(TEAM, model=str(tiny_llama))
    sampler, policies = TaskSampler(Two), RunPolicies({"a": team, "b": replace(team, name="other")})

    def plan_of(learner):
        return RunPlan(sampler, policies, fa.GRPOConfig(learner=learner, max_resamples=0), env_reward)

    first = plan_of(distill({"a": str(tiny_llama), "b": str(tiny_llama)}, lr=1e-3))
    folders = dict.fromkeys(first.loaded, tiny_llama)
    processes = Processes(
        policies=first.loaded,
        config=first.config,
        plan=resolve(first.loaded, folders, first.config, out_dir=tmp_path),
        folder=tmp_path,
        store=SimpleNamespace(heartbeat=SimpleNamespace(error=None)),
        faults=Faults(max_respawns=1, file=tmp_path / "faults.jsonl"),
        hosts=fa.Hosts(),
    )
    asyncio.run(processes.start_learners())
    assert started == [{"team": ({"a": str(tiny_llama)}, 1e-3)}, {"other": ({"b": str(tiny_llama)}, 1e-3)}]
    for learner in (fa.LearnerConfig(lr=0.0), fa.LearnerConfig(lr=1e-4, kl_coef=0.1, reference=40)):
        plan = plan_of(learner)
        started.clear()
        asyncio.run(processes.fork(plan.config, tmp_path / "fork"))
        asyncio.run(processes.start_learners(plan.loaded))
        assert started == [{name: (learner.reference, learner.lr)} for name in ("team", "other")]
        assert processes.plan.learners["other"].reference == learner.reference


def test_samples_carry_their_agent_to_the_learner(tmp_path, tiny_llama):
    class TwoPlayers(Two):
        def act(self, agent, action):
            self.said += 1
            return fa.Outcome(rewards={agent: 0.0}, done=self.said == 4)

    reference = {"a": str(tiny_llama), "b": str(tiny_llama)}
    with trainer(tmp_path, group_size=1, groups_per_step=3, learner=distill(reference)) as run:
        learner = run._lifecycle.processes.learners["team"]
        train_step, batches = learner.train_step, []

        async def seen(batch, **options):
            batches.append(batch)
            return await train_step(batch, **options)

        learner.train_step = seen
        run.fit(TwoPlayers, steps=1)
    numbers = batches[0]["samples"]["agent"].tolist()
    assert sorted(numbers) == sorted([zlib.crc32(b"a"), zlib.crc32(b"b")] * 3)


def test_start_names_teachers_and_those_with_another_chat_template(tiny_llama, tmp_path):
    other = shutil.copytree(tiny_llama, tmp_path / "other")
    (other / "chat_template.jinja").write_text("{{ messages }}")
    config = fa.GRPOConfig(learner=distill({"a": str(tiny_llama), "b": str(other)}))
    team = replace(TEAM, model=str(tiny_llama))

    def announced(policies):
        plan, messages, lines = RunPlan(TaskSampler(Two), RunPolicies(policies), config, env_reward), Messages(), []
        messages.say = lines.append
        messages.announce(plan, {}, 10)
        return lines

    lines = announced(team)
    assert f"policy team learns from the teacher {tiny_llama} as a" in lines
    assert f"policy team learns from the teacher {other} as b, whose chat template differs. The teacher reads" in str(
        lines
    )
    lines = [line for line in announced({"a": team, "b": replace(team, name="other")}) if "learns from" in line]
    assert [line.split()[1::6][0] for line in lines] == ["team", "other"], "each as the agent that it plays"


def test_changed_teacher_is_refused_when_a_run_is_resumed(tmp_path, tiny_llama, tiny_qwen3):
    def run(folder, steps):
        with trainer(tmp_path / "run", learner=distill({"a": str(folder)})) as training:
            training._lifecycle.processes = None if steps > 1 else training._lifecycle.processes
            return training.fit(Draws, steps=steps)

    run(tiny_llama, 1)
    moved = shutil.copytree(tiny_llama, tmp_path / "moved")
    with trainer(tmp_path / "run", learner=distill({"a": str(moved)})) as training:
        plan = RunPlan(TaskSampler(Draws), training._policies, training.config, env_reward)
        plan.check_resumable(tmp_path / "run", training._checkpoints)
        alone = replace(training.config, learner=fa.LearnerConfig())
        plan = RunPlan(TaskSampler(Draws), training._policies, alone, env_reward)
        with pytest.raises(RunFolderError, match=r"the teacher of a in .* team is a model .* and absent in this call"):
            plan.check_resumable(tmp_path / "run", training._checkpoints)
    with pytest.raises(RunFolderError, match="the teacher of a in learner.reference of policy team is a model"):
        run(tiny_qwen3, 2)


# ---- processes


def policy(folder, name="team", **settings):
    return fa.Policy(str(folder), name=name, **settings)


def test_teachers_are_counted_once_each_in_the_memory_of_a_learner(tiny_llama, tiny_qwen3):
    size, other = ModelSize.of(tiny_llama), ModelSize.of(tiny_qwen3)
    reference = {"a": str(tiny_llama), "b": str(tiny_qwen3), "c": str(tiny_llama)}

    def parts(ranks=1, **changes):
        return learner_bytes(size, LearnerPlan.of(distill(reference, **changes)), ranks=ranks)

    assert parts()["teachers"] == 2 * (size.weights + other.weights) and "reference" not in parts()
    assert parts(compute_dtype="float32")["teachers"] == 4 * (size.weights + other.weights)
    assert parts(ranks=2)["teachers"] == size.weights + other.weights
    assert parts()["logits"] == 2 * parts(kl="k2")["logits"]
    assert learner_bytes(size, LearnerPlan(kl_coef=0.1))["reference"] == 2 * size.weights
    assert checkpoint_bytes(distill(reference)) == checkpoint_bytes(fa.LearnerConfig())


def test_folders_of_teachers_reach_the_learner(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_llama, "teacher")
    config = fa.GRPOConfig(learner=distill({"a": "teacher", "b": "tiny-random"}))
    policies = {"team": policy(tiny_llama), "other": policy(tiny_llama, "other", trainable=False)}
    assert teachers_of(policies.values(), config) == ["teacher", "tiny-random"]
    plan = resolve(policies, dict.fromkeys(policies, tiny_llama), config, out_dir=tmp_path)
    teachers = plan.learners["team"].teachers
    assert teachers["a"] == str(tmp_path / "teacher") and Path(teachers["b"]).is_absolute()


def test_dry_run_names_teachers_that_are_not_on_this_machine(tiny_llama):
    config = fa.GRPOConfig(learner=distill({"a": "nobody/has-this", "b": str(tiny_llama)}))
    lines = "\n".join(dry_run({"team": policy(tiny_llama)}, config, fa.Hosts()))
    assert "Model nobody/has-this is not on this machine" in lines
    assert f"reference: {tiny_llama}" in "\n".join(
        dry_run({"team": policy(tiny_llama)}, fa.GRPOConfig(learner=distill(str(tiny_llama))), fa.Hosts())
    )


def test_adapters_that_share_a_learner_have_the_same_teachers(tiny_llama):
    lora, config = fa.LoRA(rank=4), fa.GRPOConfig(learner=distill("m"))
    first = policy(tiny_llama, lora=lora)
    assert shared_settings([first, policy(tiny_llama, "other", lora=lora)], config).teachers == {"": "m"}
    other = policy(tiny_llama, "other", lora=lora, learner={"reference": "n"})
    with pytest.raises(ValueError, match="learner.reference is 'm' for one and 'n' for the other"):
        shared_settings([first, other], config)


def test_unsuitable_teachers_are_refused_before_anything_starts(tiny_llama, tmp_path):
    def fails(folder, **settings):
        config = fa.GRPOConfig(learner=distill(str(folder)), engine=fa.EngineConfig(max_model_len=128, **settings))
        policies, folders = {"team": policy(tiny_llama)}, {"team": tiny_llama}
        with pytest.raises(ValueError) as caught:  # noqa: PT011  # the test looks at it
            check_models(compute_processes(policies, folders, config))
        with pytest.raises(ValueError, match=re.escape(str(caught.value))):
            dry_run(policies, config, fa.Hosts())
        return str(caught.value)

    short = tiny_model(tmp_path / "short", settings={"max_position_embeddings": 64})
    assert fails(short) == (
        f"team-learner has samples of up to 128 tokens, and the teacher {short} a context of 64. Set "
        "engine.max_model_len to at most 64"
    )
    small = tiny_model(tmp_path / "small", settings={"vocab_size": 260})
    assert f"team-learner cannot learn from the teacher {small}: the teacher {small} has embeddings of 260" in fails(
        small
    )
    large = tiny_model(tmp_path / "large", settings={"vocab_size": 320})
    assert "has logits of 320 tokens" in fails(large) and "Set kl='k2'" in fails(large)
    other = tiny_model(tmp_path / "other")
    settings = json.loads((other / "tokenizer.json").read_text())
    settings["model"]["vocab"] = {token: number for token, number in settings["model"]["vocab"].items() if number != 7}
    (other / "tokenizer.json").write_text(json.dumps(settings))
    message = fails(other)
    assert f"team-learner cannot learn from the teacher {other}" in message and str(tiny_llama) in message
    assert "1 of 264 tokens differ" in message and "is token 7 of the first and is missing in the second" in message


def test_settings_file_and_flags_name_teachers(tmp_path):
    file = tmp_path / "run.yaml"
    learner = "{loss: distill, kl_coef: 1.0, reference: {a: runs/x/export/a, b: owner/model}}"
    file.write_text(f"env: forge/Relay-v0\npolicies: {{team: {{model: m}}}}\ntrainer: {{learner: {learner}}}\n")

    def reference(*flags):
        return parse(
            fa.RunConfig, [str(file), *flags], prog="forge-agents train", description=""
        ).trainer.learner.reference

    assert reference() == {"a": "runs/x/export/a", "b": "owner/model"}
    assert reference("--trainer.learner.reference", "runs/y") == "runs/y"
    assert reference("--trainer.learner.reference", "5", "--trainer.learner.loss", "dapo") == 5
