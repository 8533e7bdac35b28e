import dataclasses
import pickle

import pytest

import forge_agents as fa
from forge_agents.policy import declared_policies, named_apart, players_of, seat_policies

HERO = fa.Policy("m", name="hero")
RIVAL = fa.Policy("m", name="rival", trainable=False)


def test_one_policy_sits_in_every_seat():
    assert seat_policies(HERO, ["a", "b"], seed=0) == {"a": HERO, "b": HERO}


def test_a_function_chooses_by_seat_and_seed():
    seats = seat_policies(lambda agent, seed: HERO if (agent == "a") == (seed % 2 == 0) else RIVAL, ["a", "b"], seed=3)
    assert seats == {"a": RIVAL, "b": HERO}


def test_seat_without_policy_is_named():
    with pytest.raises(ValueError, match="seat 'b' has no policy; policies were given for a"):
        seat_policies({"a": HERO}, ["a", "b"], seed=0)


def test_unknown_seat_suggests_the_nearest():
    with pytest.raises(ValueError, match="no seat 'answer'.*Did you mean 'answerer'"):
        seat_policies({"asker": HERO, "answer": HERO}, ["asker", "answerer"], seed=0)


def test_seat_with_something_else_is_refused():
    with pytest.raises(TypeError, match="seat 'a' holds str"):
        seat_policies({"a": "hero"}, ["a"], seed=0)  # type: ignore[dict-item]


@pytest.mark.parametrize("given", [lambda seen: seen, lambda seen, agent: "my move", {"a": lambda seen: seen}])
def test_a_function_that_answers_is_told_from_one_that_chooses_policies(given):
    with pytest.raises(TypeError, match=r"a function that answers what a player sees is fa\.Scripted"):
        seat_policies(given, ["a"], seed=0)


@pytest.mark.parametrize(
    ("word", "meant"), [("random", r"fa\.Random\(\)"), ("oracle", r"fa\.Oracle\(\)"), ("m", r"fa\.Policy\('m'\)")]
)
def test_a_word_for_a_player_is_answered_with_what_to_write(word, meant):
    with pytest.raises(TypeError, match=f"got str '{word}': write {meant}"):
        seat_policies(word, ["a"], seed=0)  # type: ignore[arg-type]


def test_two_policies_under_one_name_are_refused():
    with pytest.raises(ValueError, match="two different policies are called 'hero'"):
        declared_policies({"a": HERO, "b": fa.Policy("other", name="hero")}, ["a", "b"])


def names(seats):
    return {agent: policy.name for agent, policy in named_apart(seats).items()}


def test_seats_share_the_same_object_or_the_same_given_name_only():
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
    assert named_apart(HERO) is HERO
    assert not pickle.loads(pickle.dumps(one)).named


def test_a_function_may_not_make_models_without_names():
    with pytest.raises(ValueError, match="made 128 of fa.Policy without a name in 64 episodes; make each once"):
        players_of(lambda agent, seed: fa.Policy("m"), ["a", "b"])
    one = fa.Policy("m")
    assert players_of(lambda agent, seed: one, ["a", "b"]) == {"a": [one], "b": [one]}
    assert players_of(lambda agent, seed: (HERO, RIVAL)[seed % 2], ["a"]) == {"a": [HERO, RIVAL]}


def test_a_function_declares_all_its_policies():
    declared = declared_policies(lambda agent, seed: (HERO, RIVAL)[seed % 2], ["a"])
    assert set(declared) == {"hero", "rival"}


@pytest.mark.parametrize(
    ("wrong", "said"),
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
        ({"stop": ("a", "")}, "stop=.* holds what is no text, or an empty one"),
        ({"bad_words": ("a",) * 65}, "bad_words holds 65 texts; engines take at most 64"),
        ({"bad_words": (7,)}, "bad_words=.* holds what is no text"),
        ({"temperature_from": 0, "temperature_steps": 3}, "temperature_from=0 is outside"),
        ({"temperature_from": 1.5}, "set both"),
        ({"temperature_steps": 5}, "set both"),
    ],
)
def test_impossible_sampling_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        fa.Sampling(**wrong)


def test_whole_numbers_may_come_as_floats():
    limit = fa.Sampling(max_tokens=64.0, top_k=5.0).max_tokens
    assert (limit, type(limit)) == (64, int)


def test_stops_are_texts():
    assert fa.Sampling(stop=["a", "b"]).stop == ("a", "b")
    with pytest.raises(TypeError, match=r"stop='END' is one text; write stop=\('END',\)"):
        fa.Sampling(stop="END")


def test_a_temperature_moves_in_equal_steps_and_stays_where_it_ends():
    sampling = fa.Sampling(temperature=0.6, temperature_from=1.4, temperature_steps=4, max_tokens=9)
    steps = [sampling.at_step(step) for step in (0, 1, 3, 4, 5, 1000)]
    assert [one.temperature for one in steps] == pytest.approx([1.4, 1.2, 0.8, 0.6, 0.6, 0.6])
    assert {(one.temperature_from, one.max_tokens) for one in steps} == {(None, 9)}
    assert fa.Sampling(temperature=0.7).at_step(3).temperature == 0.7


def test_only_what_is_set_shapes_the_distribution():
    assert fa.Sampling(temperature=0.3, stop=("a",), max_tokens=3).shaping == {}
    given = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 1.0, "frequency_penalty": -1.0}
    given |= {"repetition_penalty": 1.2, "bad_words": ("no",)}
    assert fa.Sampling(**given).shaping == given


def test_the_temperature_of_an_endpoint_does_not_move():
    with pytest.raises(ValueError, match="the temperature of an endpoint does not move"):
        fa.Endpoint("http://h/v1", "m", sampling=fa.Sampling(temperature_from=1.2, temperature_steps=3))


def test_a_name_must_be_usable_as_a_file_name():
    with pytest.raises(ValueError, match="'a/b'"):
        fa.Policy("m", name="a/b")


def test_scripted_takes_one_or_two_arguments_and_must_return_text():
    assert fa.Scripted(lambda observation: observation.upper())("x", "a") == "X"
    assert fa.Scripted(lambda observation, agent: agent + observation)("x", "a") == "ax"
    with pytest.raises(TypeError, match="returned int for 'a'"):
        fa.Scripted(lambda observation: 3)("x", "a")
