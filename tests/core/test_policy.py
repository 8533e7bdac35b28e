import dataclasses
import pickle

import pytest
from refusals import raises

import forge_agents as fa
from forge_agents.policy import candidate_policies, policies_by_name, resolve_policies, with_unique_names

HERO = fa.Policy("m", name="hero")
RIVAL = fa.Policy("m", name="rival", trainable=False)


def test_policies_are_resolved_by_agent_and_seed():
    assert resolve_policies(HERO, ["a", "b"], seed=0) == {"a": HERO, "b": HERO}
    mapping = lambda agent, seed: HERO if (agent == "a") == (seed % 2 == 0) else RIVAL  # noqa: E731
    assert resolve_policies(mapping, ["a", "b"], seed=3) == {"a": RIVAL, "b": HERO}
    assert set(policies_by_name(lambda agent, seed: (HERO, RIVAL)[seed % 2], ["a"])) == {"hero", "rival"}


WRAP = r"wrap it: fa\.Scripted\(function\)"


@pytest.mark.parametrize(
    ("mapping", "error", "message"),
    [
        ({"a": HERO}, ValueError, "agent 'b' has no policy. Policies were given for a"),
        ({"b": HERO, "ask": HERO}, ValueError, "no agent 'ask'.*Did you mean 'asker'"),
        ({"a": "hero", "b": HERO, "asker": HERO}, TypeError, "the policy of agent 'a' is str"),
        ({"a": lambda seen: seen, "b": HERO, "asker": HERO}, TypeError, WRAP),
        (lambda seen: seen, TypeError, WRAP),
        (lambda seen, agent: "my move", TypeError, WRAP),
        ("random", TypeError, r"got str 'random': write fa\.Random\(\)"),
        ("oracle", TypeError, r"got str 'oracle': write fa\.Oracle\(\)"),
        ("m", TypeError, r"got str 'm': write fa\.Policy\('m'\)"),
    ],
)
def test_invalid_policy_mapping_is_rejected(mapping, error, message):
    raises(error, message, resolve_policies, mapping, ["a", "b", "asker"], seed=0)


def test_two_policies_with_one_name_are_rejected():
    with pytest.raises(ValueError, match="two different policies are called 'hero'"):
        policies_by_name({"a": HERO, "b": fa.Policy("other", name="hero")}, ["a", "b"])


def names(seats):
    return {agent: policy.name for agent, policy in with_unique_names(seats).items()}


def test_agents_share_weights_by_object_or_explicit_name_only():
    one, other = fa.Policy("m"), fa.Policy("m")
    assert one == other and one.name == "policy" and not one.named
    assert names({"a": one, "b": one}) == {"a": "policy", "b": "policy"}
    assert names({"a": one, "b": other}) == {"a": "a", "b": "b"}
    assert names({"a": one, "b": other, "c": one}) == {"a": "a", "b": "b", "c": "a"}
    same = {"a": fa.Policy("m", name="x"), "b": fa.Policy("m", name="x")}
    assert names(same) == {"a": "x", "b": "x"}
    assert names({"a": fa.Policy("m", name="policy"), "b": one}) == {"a": "policy", "b": "b"}
    assert names({"a": fa.Policy("m", name="b"), "b": one, "c 1": other}) == {"a": "b", "b": "b-2", "c 1": "c-1"}
    frozen = dataclasses.replace(one, trainable=False)
    assert len(set(names({"a": one, "b": frozen}).values())) == 2
    assert with_unique_names(HERO) is HERO
    assert not pickle.loads(pickle.dumps(one)).named


def test_function_must_not_return_unnamed_models():
    with pytest.raises(ValueError, match="returned 128 different fa.Policy objects without a name"):
        candidate_policies(lambda agent, seed: fa.Policy("m"), ["a", "b"])
    one = fa.Policy("m")
    assert candidate_policies(lambda agent, seed: one, ["a", "b"]) == {"a": [one], "b": [one]}
    assert candidate_policies(lambda agent, seed: (HERO, RIVAL)[seed % 2], ["a"]) == {"a": [HERO, RIVAL]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": float("nan")}, "nan"),
        ({"top_p": 0}, "top_p=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"top_k": -1}, r"top_k=-1 is outside \[0, inf\]; 0 keeps every token"),
        ({"top_k": 2.5}, "top_k=2.5 must be a whole number"),
        ({"max_tokens": 64.5}, "max_tokens=64.5 must be a whole number"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"presence_penalty": 3}, "presence_penalty=3"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"stop": ("a", "")}, "stop=.* must contain only non-empty texts"),
        ({"bad_words": ("a",) * 65}, "bad_words has 65 texts. Engines accept at most 64"),
        ({"bad_words": (7,)}, "bad_words=.* must contain only non-empty texts"),
        ({"initial_temperature": 0, "temperature_steps": 3}, "initial_temperature=0 is outside"),
        ({"temperature": 2.1}, r"temperature=2.1 is outside \[0, 2\]"),
        ({"initial_temperature": 1.5}, "set both"),
        ({"temperature_steps": 5}, "set both"),
    ],
)
def test_invalid_sampling_is_rejected(settings, message):
    raises(ValueError, message, fa.Sampling, **settings)


def test_stop_is_a_sequence_of_texts():
    raises(TypeError, r"stop='END' is .* text. Write stop=\('END',\)", fa.Sampling, stop="END")


def test_temperature_schedule_is_linear_and_then_constant():
    sampling = fa.Sampling(temperature=0.6, initial_temperature=1.4, temperature_steps=4, max_tokens=9)
    steps = [sampling.at_step(step) for step in (0, 1, 3, 4, 5, 1000)]
    assert [sampling.temperature for sampling in steps] == pytest.approx([1.4, 1.2, 0.8, 0.6, 0.6, 0.6])
    assert {(sampling.initial_temperature, sampling.max_tokens) for sampling in steps} == {(None, 9)}
    assert fa.Sampling(temperature=0.7).at_step(3).temperature == 0.7


def test_logit_settings_omit_defaults():
    assert fa.Sampling(temperature=0.3, stop=("a",), max_tokens=3).logit_settings == {}
    settings = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 1.0, "frequency_penalty": -1.0}
    settings |= {"repetition_penalty": 1.2, "bad_words": ("no",)}
    assert fa.Sampling(**settings).logit_settings == settings


def test_endpoint_rejects_a_temperature_schedule():
    with pytest.raises(ValueError, match="an endpoint has a constant temperature"):
        fa.Endpoint("http://h/v1", "m", sampling=fa.Sampling(initial_temperature=1.2, temperature_steps=3))


def test_name_must_be_usable_as_a_file_name():
    raises(ValueError, "'a/b'", fa.Policy, "m", name="a/b")


def test_scripted_takes_one_or_two_arguments_and_must_return_text():
    assert fa.Scripted(lambda observation: observation.upper())("x", "a") == "X"
    assert fa.Scripted(lambda observation, agent: agent + observation)("x", "a") == "ax"
    assert fa.Scripted(str)("x", "a") == "x"  # the class has no signature
    for function in (lambda: "x", lambda observation, agent, seed: "x"):
        with pytest.raises(TypeError, match=r"the function of Scripted, <lambda> must take \(observation"):
            fa.Scripted(function)
    with pytest.raises(TypeError, match="returned int for 'a'"):
        fa.Scripted(lambda observation: 3)("x", "a")
