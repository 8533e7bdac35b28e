"""Values that every settings class refuses, and the error messages."""

import dataclasses
from typing import Literal, get_origin

import numpy as np
import pytest
from refusals import raises

import forge_agents as fa
from forge_agents.bench import BenchLimits
from forge_agents.bench.plan import BenchConfig
from forge_agents.cli.play import PlayConfig
from forge_agents.cli.serve import ServeConfig
from forge_agents.errors import ForgeError
from forge_agents.programs import Container
from forge_agents.sandbox import SandboxLimits
from forge_agents.settings import OTHER_NAMES, field_hints
from forge_trainers.demo import DemoConfig
from forge_trainers.forecast.simulate import Hardware
from forge_trainers.losses.registry import Correction
from forge_trainers.offline.config import SFTRunConfig, WarmStart

CLASSES = {
    fa.Sampling: {}, fa.LoRA: {}, fa.Policy: {"model": "m"}, fa.Endpoint: {"url": "http://h", "model": "m"},
    fa.Random: {}, fa.Oracle: {}, fa.Human: {}, fa.EngineConfig: {}, fa.Hosts: {}, fa.LearnerConfig: {},
    fa.GRPOConfig: {}, fa.SFTConfig: {}, fa.Credit: {}, fa.Overlong: {"max_tokens": 9, "cache_tokens": 3},
    fa.Curriculum: {"env": "x/Y-v0"}, fa.League: {"policy": fa.Policy("m")}, WarmStart: {"data": "d"},
    SFTRunConfig: {"policy": fa.Policy("m"), "data": "d"},
    fa.RunConfig: {"env": "e", "policies": {"p": {"model": "m"}}},
    DemoConfig: {}, Hardware: {}, BenchLimits: {}, BenchConfig: {},
    PlayConfig: {"env": "e"}, ServeConfig: {"checkpoint": "m"}, Container: {}, SandboxLimits: {},
}  # fmt: skip
of_each_class = pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
NUMBERS = (int, int | None, float, float | None)


def check_refused(kind, name, value, errors, match):
    raises(errors, match, kind, **CLASSES[kind] | {name: value})


@of_each_class
def test_values_of_other_types_are_refused(kind):
    for name, hint in field_hints(kind).items():
        for value in (True, float("nan"), [0.5]) if hint in NUMBERS else ():
            check_refused(kind, name, value, (TypeError, ValueError), f"^{name}=.* must be a")
        if hint in NUMBERS:
            check_refused(kind, name, "1e-5", TypeError, f"^{name}='1e-5' is a text. Give a number")
        for value in (float("inf"), -float("inf")) if hint in (int, int | None) else ():
            check_refused(kind, name, value, ValueError, f"^{name}={value} must be a whole number")
        if hint in (int, int | None):
            check_refused(kind, name, 2.5, ValueError, f"^{name}=2.5 must be a whole number")
        if hint in (int, float, bool, str):
            check_refused(kind, name, None, TypeError, f"{name}=None")
        for value in (None, 1, {}) if get_origin(hint) is Literal else ():
            check_refused(kind, name, value, TypeError, f"{name}={value}. Choose one of")
        for value in (1, "yes") if hint is bool else ():
            check_refused(kind, name, value, TypeError, f"{name}={value!r} must be True or False")


@of_each_class
def test_an_unknown_name_is_refused_with_the_known_ones(kind):
    name = dataclasses.fields(kind)[-1].name
    with pytest.raises(TypeError, match=f"{kind.__name__} has no setting '{name}x'.*Did you mean '{name}'"):
        kind(**CLASSES[kind], **{f"{name}x": 1})


@pytest.mark.parametrize(
    ("make", "meant"),
    [
        (lambda: fa.GRPOConfig(num_generations=8), "'group_size'"),
        (lambda: fa.GRPOConfig(learning_rate=1e-5), r"'learner=LearnerConfig\(lr=...\)'"),
        (lambda: fa.GRPOConfig(beta=0.1), r"'learner=LearnerConfig\(kl_coef=...\)'"),
        (lambda: fa.GRPOConfig(lr=1e-5), r"'learner=LearnerConfig\(lr=...\)'"),
        (lambda: fa.GRPOConfig(max_completion_length=9), r"'Sampling\(max_tokens=...\)'"),
        (lambda: fa.GRPOConfig(temperature=0.7), r"'Sampling\(temperature=...\)'"),
        (lambda: fa.GRPOConfig(per_device_train_batch_size=9), "'groups_per_step'"),
        (lambda: fa.SFTConfig(per_device_train_batch_size=9), "'batch_size'"),
        (lambda: fa.SFTConfig(learning_rate=1e-5), r"'learner=LearnerConfig\(lr=...\)'"),
        (lambda: fa.LearnerConfig(learning_rate=1e-5), "'lr'"),
        (lambda: fa.LearnerConfig(epsilon=0.2), "'clip'"),
        (lambda: fa.Sampling(max_new_tokens=9), "'max_tokens'"),
        (lambda: fa.Policy("m", temperature=1.0), r"'sampling=Sampling\(temperature=...\)'"),
        (lambda: fa.Policy("m", peft_config=None), "'lora'"),
        (lambda: fa.LoRA(r=4), "'rank'"),
        (lambda: fa.LoRA(lora_alpha=4), "'alpha'"),
        (lambda: fa.GRPOTrainer(fa.Policy("m"), reward_funcs=print), "`reward`"),
        (lambda: fa.GRPOTrainer(model="m"), "'policies'|Policy"),
        (lambda: fa.SFTTrainer(fa.Policy("m"), args=None), "`config`"),
    ],
)
def test_names_of_other_libraries_are_understood(make, meant):
    raises(TypeError, meant, make)


def test_every_meaning_of_another_name_is_a_setting():
    known = {base.__name__: set(field_hints(base)) for kind in CLASSES for base in kind.__mro__ if base is not object}
    for name, meant in OTHER_NAMES.items():
        for owner, field in () if isinstance(meant, str) else meant:
            assert field in known[owner], name


def test_nested_settings_may_be_a_mapping_which_is_checked():
    config = fa.GRPOConfig(learner={"lr": 1e-5, "betas": [0.9, 0.99]}, credit={"scale": "none"})
    assert config.learner == fa.LearnerConfig(lr=1e-5, betas=(0.9, 0.99)) and config.credit == fa.Credit(scale="none")
    assert fa.Policy("m", lora={"rank": 4}).lora == fa.LoRA(rank=4)
    for given, error in (({"lrr": 1}, "learner: LearnerConfig has no setting 'lrr'"), (3, "must be LearnerConfig")):
        raises(TypeError, error, fa.GRPOConfig, learner=given)
    raises(ValueError, "learner: lr=-1", fa.GRPOConfig, learner={"lr": -1})


def test_ordinary_values_of_other_types_are_taken(tmp_path):
    size = fa.GRPOConfig(group_size=8.0, seed=np.int64(3)).group_size
    assert (size, type(size)) == (8, int)
    assert fa.Sampling(stop=None).stop == () and fa.Sampling(stop=["a"]).stop == ("a",)
    assert fa.Sampling(temperature=1, max_tokens=np.int32(5)).max_tokens == 5
    assert fa.LearnerConfig(max_grad_norm=float("inf"), lr=np.float32(0.5)).lr == 0.5
    assert fa.Policy("m", thinking=False).thinking == "off" and fa.Policy("m", thinking=True).thinking == "on"
    assert fa.Policy(tmp_path).model == str(tmp_path)


@pytest.mark.parametrize("name", ["temperature", "seed", "model", "lora", "dump_folder"])
def test_settings_that_a_trainer_decides_are_no_learner_settings(name):
    raises(TypeError, f"LearnerConfig has no setting '{name}'", fa.LearnerConfig, **{name: 1})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: fa.GRPOConfig(learner={"lr_min_ratio": 0.1}), "Set lr_decay to 'linear'"),
        (lambda: fa.SFTConfig(learner={"lr_min_ratio": 0.2}), "Set lr_decay to 'linear'"),
        (lambda: fa.GRPOConfig(learner={"kl": "k1"}), "Set kl_coef above 0"),
        (lambda: fa.GRPOConfig(learner={"correction": {"high": 2.0}}), "no effect with how='ratio'"),
        (lambda: fa.GRPOConfig(learner={"correction": {"how": "truncate", "low": 0.1}}), "Set how='mask'"),
        (lambda: fa.SFTConfig(learner={"loss": "gspo"}), r"learner\.loss='gspo' has no effect: fine-tuning has"),
        (lambda: fa.DPOConfig(learner={"clip": (0.2, 0.3)}), "fine-tuning has its own"),
        (lambda: fa.Credit(rae_decay=0.5), "set that"),
        (lambda: fa.Credit(discount=0.5), "set that"),
        (lambda: fa.Hosts(kind="process", hosts={"engines": 1}, address="tcp://a:1"), "mesh has no effect"),
    ],
)
def test_a_setting_without_effect_is_refused(make, said):
    raises(ValueError, said, make)


TRUNCATED = {"correction": Correction(how="truncate", high=3.0)}


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda values: fa.GRPOConfig(max_staleness=1, learner=values).learner, TRUNCATED),
        (lambda values: fa.GRPOConfig(learner=values).learner, {"loss": "gspo", **TRUNCATED}),
        (lambda values: fa.GRPOConfig(learner=values).learner, {"lr_decay": "cosine", "lr_min_ratio": 0.1}),
        (lambda values: fa.SFTConfig(learner=values).learner, {"kl_coef": 0.1, "kl": "k1"}),
        (
            lambda values: fa.Credit(**values),
            {"baseline": "rae", "by": ("role",), "scale": "batch_std", "rae_decay": 0.5},
        ),
        (lambda values: fa.Credit(**values), {"turns": "to_go", "discount": 0.5}),
    ],
)
def test_settings_that_another_one_switches_on_are_taken(make, values):
    config = make(values)
    assert {name: getattr(config, name) for name in values} == values


UNFIT_VALUES = [object(), b"x"]
"""Values that no setting takes."""
ODD_VALUES = [None, [], ["x"], "x", -1, 0, 1.5, True, {}, {"a": 1}, (1, 2), 10**30, lambda: 1]


def refusal(kind, name, value):
    """Return the error message for a value, or None if it is taken."""
    try:
        kind(**{**CLASSES[kind], name: value})
    except (TypeError, ValueError, ForgeError) as error:
        return str(error)
    return None


@of_each_class
def test_odd_value_of_any_setting_is_taken_or_refused_by_its_own_error(kind):
    for field in dataclasses.fields(kind):
        for value in (*UNFIT_VALUES, *ODD_VALUES) if field.init else ():
            message = refusal(kind, field.name, value)
            assert message is not None or value in ODD_VALUES, f"{field.name}={value!r} is taken"
            assert field.name in (message or field.name), f"{field.name}={value!r}: {message}"


@pytest.mark.parametrize("value", [True, 2.5, [], b"mask"])
def test_correction_of_another_type_is_refused(value):
    raises(TypeError, r"^correction must be Correction\(...\)", fa.LearnerConfig, correction=value)


@pytest.mark.parametrize("kind", [fa.GRPOConfig, fa.SFTConfig])
@pytest.mark.parametrize("value", [float("inf"), 1e300])
def test_waits_have_a_timeout_that_threads_accept(kind, value):
    for name in ("stage_timeout_s", "heartbeat_timeout_s"):
        raises(ValueError, f"^{name}=.* must be positive and finite", kind, **{name: value})


def test_levels_of_a_curriculum_are_a_list():
    raises(TypeError, "env=5 must be a list", fa.Curriculum, env=5)


def test_empty_path_is_refused():
    raises(ValueError, "a path is empty", fa.GRPOTrainer, fa.Policy("m"), out_dir="")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fa.benchmark({}, "forge/KuhnPoker-v0", episodes=True), "episodes=True must be a whole number"),
        (lambda: fa.benchmark({}, "forge/KuhnPoker-v0", swap_agents="no"), "swap_agents='no' must be True or False"),
        (lambda: fa.benchmark({}, "forge/KuhnPoker-v0", limits=5), "limits must be BenchLimits"),
        (lambda: fa.benchmark({}, num_episodes=3), "Did you mean 'episodes'"),
        (lambda: fa.play("forge/KuhnPoker-v0", fa.Random(), max_turns=2.5), "max_turns=2.5 must be a whole number"),
        (lambda: fa.demonstrations("forge/Relay-v0", True), "games=True must be a whole number"),
        (lambda: fa.GRPOTrainer(fa.Policy("m")).fit("forge/Relay-v0", steps="3"), "steps='3' is a text"),
        (lambda: fa.GRPOTrainer(fa.Policy("m")).fit({"forge/Relay-v0": float("nan")}, steps=1), "finite weights"),
        (lambda: fa.GRPOTrainer(fa.Policy("m")).fit({"forge/Relay-v0": True}, steps=1), "finite weights"),
        (lambda: fa.GRPOTrainer(fa.Policy("m"), config=fa.SFTConfig()), r"must be GRPOConfig\(...\), got SFTConfig"),
    ],
)
def test_arguments_of_other_types_are_refused_by_name(call, message):
    raises((TypeError, ValueError), message, call)


def test_settings_of_a_call_may_be_mappings():
    assert fa.GRPOTrainer(fa.Policy("m"), config={"group_size": 4}).config == fa.GRPOConfig(group_size=4)


def test_text_in_place_of_a_policy_is_refused():
    with fa.GRPOTrainer({"asker": "m", "answerer": "m"}) as trainer, pytest.raises(TypeError, match="write fa.Policy"):
        trainer.fit("forge/Relay-v0", steps=1)


def test_unknown_choice_is_named_before_conflicts_with_other_settings():
    """By default, ``scale`` needs a baseline that compares episodes, which no unknown baseline does."""
    raises(ValueError, "baseline='coma'. Choose one of 'mean', .*'counterfactual'", fa.Credit, baseline="coma")
