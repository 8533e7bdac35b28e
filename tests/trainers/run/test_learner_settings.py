"""Learner settings of one policy: which hold, which are refused, and what reaches the learners."""

from pathlib import Path

import pytest

import forge_agents as fa
from forge_trainers.rl.trainer import GRPOTrainer
from forge_trainers.run.config import ProcessConfig
from forge_trainers.run.dry_run import dry_run
from forge_trainers.run.plan import compute_processes, shared_settings

LORA = fa.LoRA(rank=4)


def policy(name="red", **settings):
    return fa.Policy("m", name=name, **settings)


def test_only_the_fields_given_override_the_trainers():
    config = fa.GRPOConfig(learner=fa.LearnerConfig(lr=1e-5, warmup_steps=3, max_grad_norm=0.5))
    red = config.learner_of(policy(learner={"lr": 3e-4}))
    assert (red.lr, red.warmup_steps, red.max_grad_norm) == (3e-4, 3, 0.5)
    assert config.learner_of(policy()) == config.learner
    same = config.learner_of(policy(learner=fa.LearnerConfig(lr=3e-4)))
    assert same == red, "of a LearnerConfig what differs from the defaults"
    back = config.learner_of(policy(learner={"warmup_steps": 0}))
    assert back.warmup_steps == 0, "a mapping sets a field back to its default"


def test_overrides_apply_before_the_correction_for_staleness():
    config = fa.GRPOConfig(max_staleness=1)
    assert config.learner_of(policy()).correction == "truncate"
    assert config.learner_of(policy(learner={"correction": "mask"})).correction == "mask"


@pytest.mark.parametrize(
    ("learner", "error", "message"),
    [
        ({"lrr": 1e-4}, ValueError, "policy 'red': learner.lrr is no field of fa.LearnerConfig. Did you mean 'lr'"),
        ({"learning_rate": 1e-4}, ValueError, "learning_rate is no field of fa.LearnerConfig. Did you mean 'lr'?"),
        ({"beta": 0.1}, ValueError, "learner.beta is no field of fa.LearnerConfig. Did you mean 'kl_coef'?"),
        ({"lr": "1e-4"}, TypeError, "policy 'red': lr='1e-4' is a text"),
        ({"lr": -1.0}, ValueError, "policy 'red': lr=-1.0"),
        ({"model": "other"}, ValueError, "learner.model is no field of fa.LearnerConfig. Did you mean 'Policy(model"),
        ({"temperature": 0.5}, ValueError, "Did you mean 'Sampling(temperature=...)'"),
        ({"threads": 2}, ValueError, "share the host's cores"),
        ({"num_minibatches": 9}, ValueError, "more than groups_per_step=8"),
        ({"lr_min_ratio": 0.1}, ValueError, "policy 'red': learner.lr_min_ratio=0.1 has no effect"),
        ({"correction": "truncate", "clip": (0.2, 0.3)}, ValueError, "learner.clip=(0.2, 0.3) has no effect"),
        ({"correction": "none", "clip": (0.3, 0.2)}, ValueError, "learner.clip=(0.3, 0.2) has no effect"),
        ({"sequence": "turn"}, ValueError, "learner.sequence='turn' has no effect: loss='dapo'"),
        ({"loss": "grpo"}, ValueError, "max_resamples=0 and the trainer's loss 'dapo' max_resamples=3"),
    ],
)
def test_overrides_that_cannot_hold_are_refused_by_name(learner, error, message, tmp_path):
    with pytest.raises(error) as caught:
        GRPOTrainer({"player_0": policy(learner=learner), "player_1": fa.Random()}, out_dir=tmp_path)
    assert message in str(caught.value)
    with pytest.raises(error):
        GRPOTrainer(fa.League(policy(learner=learner)), out_dir=tmp_path)


@pytest.mark.parametrize(
    "learner",
    [
        {"clip": (0.2, 0.3)},
        {"correction": "ratio", "clip": (0.2, 0.3)},
        {"correction": "truncate", "clip": (0.2, 0.3), "num_iterations": 2},
        {"correction": "truncate", "clip": (0.2, 0.3), "num_minibatches": 2},
        {"correction": {"how": "mask", "level": "sequence"}, "sequence": "turn"},
    ],
)
def test_clips_and_sequences_that_act_are_taken(learner):
    assert fa.GRPOConfig().learner_of(policy(learner=learner))
    assert fa.GRPOConfig(learner=fa.LearnerConfig(**learner))


def test_override_may_switch_off_another_setting():
    config = fa.GRPOConfig(learner=fa.LearnerConfig(lr_decay="linear", lr_min_ratio=0.1))
    assert config.learner_of(policy(learner={"lr_decay": "none"})).lr_decay == "none"


def test_a_loss_of_its_own_needs_common_credit_and_normalization():
    config = fa.GRPOConfig(max_resamples=0, loss_normalization="used")
    assert config.learner_of(policy(learner={"loss": "grpo"})).loss == "grpo"
    with pytest.raises(ValueError, match="credit="):
        config.learner_of(policy(learner={"loss": "dr_grpo"}))


def test_frozen_policies_and_wrong_kinds_are_refused():
    with pytest.raises(ValueError, match=r"'red' has learner=.* trainable=False"):
        policy(learner={"lr": 1e-4}, trainable=False)
    with pytest.raises(TypeError, match="learner=.* must be a mapping"):
        policy(learner="lr: 1e-4")
    with pytest.raises(ValueError, match="Set learner of the SFTConfig instead"):
        fa.SFTTrainer(policy(learner={"lr": 1e-4}))


def test_two_policies_of_one_name_with_different_settings_are_refused(tmp_path):
    seats = {"player_0": policy(learner={"lr": 1e-4}), "player_1": policy(learner={"lr": 1e-5})}
    with pytest.raises(ValueError, match="two different policies are called 'red'"):
        GRPOTrainer(seats, out_dir=tmp_path)._policies.declared({"t": ("player_0", "player_1")})


def test_adapters_on_one_model_may_differ_in_rates_but_not_in_the_model():
    config = ProcessConfig()
    red, blue = policy(lora=LORA, learner={"lr": 1e-4}), policy("blue", lora=LORA, learner={"kl_coef": 0.1})
    assert shared_settings([red, blue], config).lr == 1e-4
    apart = policy("blue", lora=LORA, learner={"compute_dtype": "float32"})
    with pytest.raises(ValueError, match="'red' and 'blue' have adapters.*compute_dtype is 'auto' for one and"):
        compute_processes({"red": red, "blue": apart}, {"red": Path("m"), "blue": Path("m")}, config)


def test_each_learner_starts_with_its_policys_settings():
    policies = {
        "full": policy("full", learner={"lr": 1e-5}),
        "ad": policy("ad", lora=LORA, learner={"lr": 3e-4, "max_tokens_per_microbatch": 99}),
    }
    processes = compute_processes(policies, dict.fromkeys(policies, Path("m")), ProcessConfig())
    started = {each.name: each.learner for each in processes}
    assert (started["full-learner"].lr, started["ad-learner"].lr) == (1e-5, 3e-4)
    assert started["ad-learner"].max_tokens_per_microbatch == 99
    for degree in ("tp", "dp_replicate"):
        wrong = {"full": policy("full", learner={degree: 2})}
        with pytest.raises(ValueError, match=f"{degree}=2 of the learner does not divide learner_procs=1"):
            dry_run(wrong, ProcessConfig(), fa.Hosts())


def test_snapshots_of_a_league_have_no_learner_settings():
    assert fa.League(policy(learner={"lr": 1e-4})).frozen("past").learner is None


@pytest.mark.parametrize(
    ("engine", "chosen", "computed"),
    [("auto", None, "auto"), ("bfloat16", None, "bfloat16"), ("bfloat16", "float32", "float32")],
)
def test_learner_of_engines_in_bfloat16_computes_alike_unless_it_is_set(engine, chosen, computed):
    config = fa.GRPOConfig(engine=fa.EngineConfig(dtype=engine))
    settings = {} if chosen is None else {"compute_dtype": chosen}
    assert config.learner_of(policy(learner=settings)).compute_dtype == computed
