"""The YAML files that users write."""

import json
import time

import pytest

import forge_agents as fa
from forge_agents.cli.config import parse
from forge_agents.cli.yaml_file import YamlFile

RUN = "env: forge/Relay-v0\npolicies:\n  team:\n    model: m\n"
CREDIT = """
import forge_agents as fa

class Halved(fa.Credit):
    def advantages(self, rewards_n, noise_n=None):
        found = super().advantages(rewards_n, noise_n)
        return None if found is None else found / 2

rule = fa.Credit(scale="none")
odd = 3
"""


@pytest.fixture
def run(tmp_path):
    def read(text, *words, kind=fa.RunConfig, name="train.yaml"):
        file = tmp_path / name
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return parse(kind, [str(file), *words], prog="forge-agents train", description="d")

    return read


@pytest.fixture
def refused(run, capsys):
    def read(*args, **kwargs):
        with pytest.raises(SystemExit) as stopped:
            run(*args, **kwargs)
        assert stopped.value.code == 2
        return capsys.readouterr().err

    return read


@pytest.mark.parametrize(
    ("word", "thinking"),
    [("off", "off"), ("on", "on"), ("no", "off"), ("yes", "on"), ("Off", "off"), ("false", "off"), ('"off"', "off")],
)
def test_thinking_accepts_yaml_booleans(run, word, thinking):
    assert run(f"{RUN}    thinking: {word}\n").policies["team"].thinking == thinking
    assert run(RUN, "--policies.team.thinking", word.strip('"')).policies["team"].thinking == thinking


@pytest.mark.parametrize(("word", "value"), [("yes", True), ("off", False), ("true", True), ("False", False)])
def test_booleans_may_be_yes_no_on_and_off(run, word, value):
    assert run(f"{RUN}trainer: {{preflight: {word}}}\n").trainer.preflight is value
    assert run(f"{RUN}env_args: {{shuffle: {word}}}\n").env_args == {"shuffle": value}


def test_names_may_be_words_that_yaml_reads_as_booleans(run):
    result = run(
        "env: e\npolicies:\n  on: {model: m}\n  no: {model: n, trainable: no}\npolicy_mapping: {a: on, no: no}\n"
    )
    assert sorted(result.policies) == ["no", "on"] and result.policy_mapping == {"a": "on", "no": "no"}
    assert result.policies["no"].trainable is False


def test_numbers_are_decimal_and_times_are_text(run):
    result = run(f"{RUN}steps: 010\ntrainer: {{learner: {{lr: 1e-5, max_grad_norm: .inf}}, seed: 1_000}}\n")
    assert (result.steps, result.trainer.learner.lr, result.trainer.seed) == (10, 1e-5, 1000)
    assert result.trainer.learner.max_grad_norm == float("inf")
    mesh = "mesh: {kind: slurm, hosts: {engines: 1}, time_limit: 01:30:00}\n"
    assert run(RUN + mesh).mesh.time_limit == "01:30:00"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{RUN}trainer:\n  seed: 1\ntrainer: {{}}\n", "train.yaml:7:1: 'trainer' is a duplicate of line 5"),
        (f"{RUN}    model: n\n", "train.yaml:5:5: 'model' is a duplicate"),
        (f"{RUN}trainer: {{seed: 1, seed: 2}}\n", "train.yaml:5:20: 'seed' is a duplicate"),
        (f"{RUN}env_args: {{a: 1, a: 2}}\n", "'a' is a duplicate"),
        (f"{RUN}steps: [1\n", "train.yaml:6:1: while parsing a flow sequence"),
        (f"{RUN}  steps: 3\n bad\n", "train.yaml:6"),
        (f"{RUN}\tsteps: 3\n", "train.yaml:5:1"),
        ("- env\n", "holds no settings"),
        (RUN.encode() + b"out_dir: \xff\n", "is not UTF-8 at byte"),
        (f"{RUN}reward: !!python/object:os.system x\n", "train.yaml:5:9: could not determine a constructor"),
    ],
)
def test_yaml_errors_have_file_line_and_column(refused, text, message):
    err = refused(text)
    assert message in err and "unicode string" not in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer:\n  num_generations: 4\n", "train.yaml:6: trainer.num_generations is no setting. Did you mean"),
        ("trainer: {num_generations: 4}\n", "Did you mean 'trainer.group_size'?"),
        ("trainer: {lr: 1}\n", "Did you mean 'trainer.learner.lr'?"),
        ("trainer: {learner: {learning_rate: 1}}\n", "Did you mean 'trainer.learner.lr'?"),
        ("    lora: {rnk: 3}\n", "policies.team.lora.rnk is no setting. Did you mean 'policies.team.lora.rank'?"),
        ("    max_new_tokens: 3\n", "Did you mean 'policies.team.sampling.max_tokens'?"),
        ("max_new_tokens: 3\n", "Did you mean 'policies.NAME.sampling.max_tokens' or"),
        ("trainer: {beta: 0.1}\n", "Did you mean 'trainer.learner.kl_coef'?"),
        ("trainer: {max_steps: 5}\n", "Give the number of optimizer steps as `steps`"),
        ("steps_: 5\n", "Did you mean 'steps'"),
    ],
)
def test_unknown_keys_suggest_the_nearest_setting(refused, text, message):
    err = refused(RUN + text)
    assert message in err and "Namespace" not in err and "Union" not in err


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--policies.team.lora.rnk", "Did you mean '--policies.team.lora.rank'?"),
        ("--policies.team.sampling.max_new_tokens", "Did you mean '--policies.team.sampling.max_tokens'?"),
        ("--policies.team.lr", "--policies.team.lr."),
        ("--trainer.num_generations", "Did you mean '--trainer.group_size'?"),
        ("--trainer.learning_rate", "Did you mean '--trainer.learner.lr'?"),
        ("--learning_rate", "Did you mean '--trainer.learner.lr'?"),
        ("--policy.team.model", "Did you mean '--policies.team.model'?"),
        ("--trainer.engine.block_size", "trainer.engine has dtype, enforce_eager,"),  # and nothing that is like it
        ("--steps.number", "--steps holds no settings of its own"),
        ("--trainer.learner.lr.x", "--trainer.learner.lr holds no settings of its own"),
    ],
)
def test_unknown_flags_suggest_the_nearest_setting(refused, flag, message):
    err = refused(RUN, flag, "3")
    assert message in err and err.count("\n") == 2 and "Namespace" not in err


def test_credit_is_imported_like_reward_and_loss(run, tmp_path, monkeypatch, refused):
    (tmp_path / "yaml_credit.py").write_text(CREDIT)
    monkeypatch.chdir(tmp_path.parent)
    result = run(f"{RUN}trainer: {{credit: 'yaml_credit:Halved'}}\n").trainer.credit
    assert type(result).__name__ == "Halved" and result.scale == "std"
    assert run(f"{RUN}trainer:\n  credit: yaml_credit:rule\n").trainer.credit == fa.Credit(scale="none")
    assert run(RUN, "--trainer.credit", "yaml_credit:rule").trainer.credit == fa.Credit(scale="none")
    assert run(f"{RUN}trainer: {{credit: {{scale: none}}}}\n").trainer.credit == fa.Credit(scale="none")
    assert "Did you mean 'Halved'?" in refused(f"{RUN}trainer: {{credit: yaml_credit:Halvd}}\n")
    assert "is int. Name a forge_agents.Credit" in refused(f"{RUN}trainer: {{credit: yaml_credit:odd}}\n")
    assert "cannot be imported" in refused(f"{RUN}trainer: {{credit: nowhere_at_all:x}}\n")


def test_byte_order_mark_empty_file_and_merge_keys_are_read(run, tmp_path):
    assert run(b"\xef\xbb\xbf" + RUN.encode()).env == "forge/Relay-v0"
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert YamlFile(tmp_path / "empty.yaml").values == {}
    anchored = f"{RUN}    sampling: &s {{temperature: 0.5}}\n"
    merged = run(f"{anchored}  rival:\n    model: n\n    sampling: {{<<: *s, top_p: 0.5}}\npolicy_mapping: team\n")
    assert merged.policies["rival"].sampling == fa.Sampling(temperature=0.5, top_p=0.5)


def test_nested_aliases_are_refused_quickly(refused):
    levels = "".join(f"  l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]\n" for n in range(1, 10))
    assert "more than 100,000 values" in refused(f"{RUN}env_args:\n  l0: &l0 [x]\n{levels}")


MERGED = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 25))


def test_a_long_run_of_digits_takes_linear_time(run):
    digits = "1" * 100_000 + "x"
    start = time.process_time()
    assert run(f"{RUN}env_args: {{text: {digits}}}\n").env_args == {"text": digits}
    assert time.process_time() - start < 60  # quadratic time is minutes


@pytest.mark.parametrize("bomb", [MERGED, "[" * 200_000, "9" * 5000, "!!int x", "&a [*a]"])
def test_texts_in_settings_are_bounded(run, refused, bomb):
    """jsonargparse reads the texts of a file as YAML again, in C, which crashes or does not end."""
    text = json.dumps(bomb)
    assert run(f"{RUN}env_args: {{text: {text}}}\n").env_args == {"text": bomb}
    assert "trainer.learner.lr" in refused(f"{RUN}trainer: {{learner: {{lr: {text}}}}}\n")


@pytest.mark.parametrize(
    ("count", "message"),
    [
        ("trainer: {engine: {replicas: 1000000000}}", "replicas=1000000000 must be at most 10000"),
        ("trainer: {engine: {tp: 1000000000}}", "tp=1000000000 must be at most 10000"),
        ("trainer: {learner_procs: 1000000000}", "learner_procs=1000000000 must be at least 1 and at most 10000"),
        ("trainer: {group_size: 1000000000000}", "group_size=1000000000000 times groups_per_step=8 must be at most"),
        ("trainer: {groups_per_step: 1000000000000}", "groups_per_step=1000000000000 must be at most 1000000"),
        ("trainer: {eval_episodes: 2000000}", "eval_episodes=2000000 must be at most 1000000"),
        ("trainer: {max_staleness: 1000000000000}", "0 episodes per step with max_staleness=1000000000000"),
        ("trainer: {max_resamples: 2000000}", "max_resamples=2000000 must be at most 1000000"),
        ("trainer: {engine: {max_num_seqs: 1000000000}}", "max_num_seqs=1000000000 must be at most 10000"),
        ("trainer: {engine: {threads: 1000000000}}", "threads=1000000000 must be at most 10000"),
        ("trainer: {learner: {threads: 1000000000}}", "threads=1000000000 of the learner must be at most 10000"),
        ("steps: 1000000000", "steps=1000000000 must be at most 10000000"),
        (f"steps: {'9' * 900}", "must be at most 9223372036854775807"),
        (f"trainer: {{learner: {{lr: {'9' * 900}}}}}", "trainer.learner.lr is 999"),
        (f"trainer: {{learner: {{entropy_coef: -{'9' * 900}}}}}", "trainer.learner.entropy_coef is -999"),
        ("league: {opponents_per_step: 1000000000000}", "of the league must be at most 1000000, got 1000000000000"),
        ("warm_start: {team: {data: forge/Relay-v0, games: 2000000}}", "games=2000000 must be at most 1000000"),
        ("warm_start: {team: {data: x, trainer: {batch_size: 2000000}}}", "batch_size=2000000 must be at most 1000000"),
        (f"env: [{'a, ' * 1000}a]", "env has 1001 entries. Expected at most 1000"),
        (f"endpoints: {{{', '.join(f'e{n}: {{}}' for n in range(1001))}}}", "endpoints has 1001 entries"),
    ],
    ids=str,
)
def test_numbers_of_processes_and_entries_are_bounded(refused, count, message):
    lines = RUN.partition("\n")[2] if count.startswith("env:") else RUN
    assert message in refused(f"{lines}{count}\n")


def test_arguments_of_an_environment_may_be_long(run):
    names, agents = list(map(str, range(3000))), {f"a{n}": "team" for n in range(3000)}
    result = run(f"{RUN}env_args: {{names: {json.dumps(names)}}}\npolicy_mapping: {json.dumps(agents)}\n")
    assert result.env_args == {"names": names} and result.policy_mapping == agents


def test_long_texts_in_errors_are_cut(refused):
    err = refused(f"{RUN}? {'a' * 1_000_000}\n: 1\n")
    assert "is no setting" in err and 4000 < len(err) < 5000


@pytest.mark.parametrize("text", ["010", "5", "1e3", "yes", "null", "a: b", "- a", "# a", "1:30", "[1, 2]", " 5 "])
def test_quoted_text_stays_text_in_arguments_of_an_environment(run, text):
    result = run(f"{RUN}env_args: {{a: {json.dumps(text)}, b: [{json.dumps(text)}]}}\n")
    assert result.env_args == {"a": text, "b": [text]} and type(result.env_args["a"]) is str
    flag = run(RUN, "--env_args.a", json.dumps(text))
    assert flag.env_args == {"a": text} and type(flag.env_args["a"]) is str


def test_block_of_text_stays_text(run):
    assert run(f"{RUN}env_args:\n  a: |\n    b: 1\n    c: 2\n").env_args == {"a": "b: 1\nc: 2\n"}


def test_times_are_no_numbers(run, refused):
    assert run(f"{RUN}env_args: {{a: 1:30}}\n").env_args == {"a": "1:30"}
    assert run(RUN, "--env_args.a", "1:30").env_args == {"a": "1:30"}
    assert "steps is 1:30. Expected a whole number" in refused(f"{RUN}steps: 1:30\n")
    assert "trainer.learner.lr is 1:30" in refused(RUN, "--trainer.learner.lr", "1:30")


def test_section_without_keys_has_the_defaults(run):
    assert run(f"{RUN}mesh:\ntrainer:\n  group_size: 4\n  learner:\n").trainer == fa.GRPOConfig(group_size=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: []\n", "trainer is the list []. Expected a mapping of settings"),
        ("trainer: {<<: {seed: 3}, <<: {seed: 5}}\n", "'<<' is a duplicate of line 5"),
        ("trainer: {credit: {overlong: {max_tokens: 9}}}\n", "trainer.credit.overlong has no cache_tokens"),
        ("steps: 0\n", "steps=0 must be at least 1"),
        ("warm_start: {team: {data: x, epochs: 0}}\n", "epochs=0 must be at least 1"),
    ],
)
def test_settings_without_a_meaning_are_refused(refused, text, message):
    assert message in refused(RUN + text)


@pytest.mark.parametrize("env", ["{}", "''", "{e: 0}", "{e: -1, f: 2}", "{e: .inf}"])
def test_environments_have_names_and_positive_weights(refused, env):
    assert "positive, finite weights" in refused(RUN.replace("forge/Relay-v0", env))


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("trainer: {credit: {baseline: counterfactual, samples: 0}}", [], "samples=0 must be at least 1 and at most"),
        ("trainer: {credit: {scale: none}}", ["--trainer.credit.turns", "to_go", "--trainer.credit.discount", "2"],
         "discount=2.0 must be in [0, 1]"),
        ("league: {opponents: regret}", ["--league.self_play", "1"], "opponents='regret' has no effect with self_play"),
    ],
)  # fmt: skip
def test_error_of_optional_settings_is_shown_alone(refused, text, words, message):
    error = refused(f"{RUN}{text}\n", *words)
    assert error.startswith(f"forge-agents train: {message}") and "Expected a" not in error and "Namespace" not in error


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [("decisions", "all", "'every', 'longest' or a whole number"), ("balance_roles", "2", "true or false")],
)
def test_types_of_the_settings_around_a_value_are_not_those_expected(refused, setting, value, expected):
    message = f"trainer.credit.{setting} is {value}. Expected {expected}.\n"
    assert message in refused(f"{RUN}trainer: {{credit: {{baseline: counterfactual, {setting}: {value}}}}}\n")
