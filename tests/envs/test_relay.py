import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from team_play import act, begin

import forge_agents as fa
from forge_envs.teams.relay import Relay

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "%s"}}</tool_call>'


def asked(a=17, op="+", b=25, gold=42, **kwargs):
    """Start an episode with a fixed question."""
    env = begin(Relay(**{"message": "{message}", **kwargs}))
    env.question, env.gold = f"What is {a} {op} {b}?", gold
    return env


def test_both_agents_are_rewarded_for_the_right_number():
    env = asked()
    env.step("it is 42")
    assert env.agent_selection == "answerer" and env.observe("answerer") == "it is 42"
    env.step("42")
    assert env.rewards == {"asker": 1.0, "answerer": 1.0}
    assert env.infos["asker"]["correct"] is True and env.infos["answerer"]["message"] == "it is 42"


def test_calculator_calls_are_limited():
    env = asked(max_tool_calls=2)
    env.step(CALL % "17 + 25")
    shown = (env.agent_selection, env.observe("asker"), env.observe("answerer"))
    assert shown == ("asker", "<tool_response>\n42\n</tool_response>", "")
    env.step(CALL % "1 / 0")
    assert env.agent_selection == "asker" and "Error: division by zero" in env.observe("asker")
    env.step(CALL % "1 + 1")
    assert env.agent_selection == "answerer" and env.observe("answerer").startswith("<tool_call>")


def test_the_first_call_that_works_is_rewarded_once():
    env = asked(tool_format="plain", call_reward=0.2, max_tool_calls=4)
    assert "CALL calculator(" in env.instructions("asker") and "CALL" not in env.instructions("answerer")
    env.step("CALL calculator(1 +)")
    assert env.rewards == {"asker": 0.0, "answerer": 0.0}
    env.step("CALL calculator(17 + 25)")
    assert (env.rewards, env.observe("asker")) == ({"asker": 0.2, "answerer": 0.2}, "42")
    env.step("CALL calculator(17 + 25)")
    assert env.rewards["asker"] == 0.0
    act(env, "42", "42")
    assert env.rewards["asker"] == 1.0 and env.infos["asker"]["tool_calls"] == 3


def test_without_the_tool_a_call_is_a_message():
    env = asked(tool=False)
    assert "tool_call" not in env.instructions("asker")
    env.step(CALL % "1 + 1")
    assert env.agent_selection == "answerer"


def test_a_malformed_call_costs_a_call_and_explains_itself():
    env = asked()
    env.step("<tool_call>17 + 25</tool_call>")
    assert env.agent_selection == "asker" and "JSON" in env.observe("asker")


def test_messages_are_cut():
    env = asked(max_message_chars=5)
    env.step("  123456789  ")
    assert env.observe("answerer") == "12345"


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("42", 1),
        ("17 + 25 = 42.", 1),
        ("42 or 43", 0),
        ("41", 0),
        ("", 0),
        ("forty-two", 0),
        ("42.5", 0),
        ("-42", 0),
        ("0042", 1),
        ("4 2", 0),
        ("9" * 5000, 0),
        ("٤٢", 0),
    ],
)
def test_the_last_integer_counts(text, reward):
    env = asked()
    act(env, "?", text)
    assert env.rewards == {"asker": reward, "answerer": reward}


def test_thousands_and_minus_signs_are_read():
    env = asked(gold=1234)
    act(env, "?", "1,234")
    assert env.rewards["asker"] == 1
    env = asked(gold=2)
    act(env, "?", "5-3 = 5 -2")
    assert env.infos["asker"]["given"] == "-2"


@pytest.mark.parametrize(
    ("given", "reward"), [("42", 1.0), ("21", 0.25), ("63", 0.25), ("0", 0.0), ("999", 0.0), ("x", 0.0)]
)
def test_partial_credit_falls_linearly(given, reward):
    env = asked(partial_credit=0.5)
    act(env, "?", given)
    assert env.rewards["answerer"] == pytest.approx(reward)


def test_the_gold_is_in_infos_from_the_start_and_in_no_text():
    env = fa.make("forge/Relay-v0", max_number=90, question="{a}{op}{b}=?")
    for seed in range(50):
        env.reset(seed=seed)
        assert env.infos["answerer"]["answer"] == str(env.gold)
        for agent in env.possible_agents:
            seen = env.instructions(agent) + " " + env.observe(agent)
            assert str(env.gold) not in seen.replace("2 + 3", "").split()
        assert env.question not in env.observe("answerer")


@settings(deadline=None)
@given(st.sampled_from("+-*"), st.integers(1, 50), st.integers(0, 1000))
def test_questions_keep_within_their_limits(op, top, seed):
    env = begin(Relay(operators=op, max_number=top, question="What is {a} {op} {b}?"), seed)
    a, b = (int(word) for word in env.question[8:-1].split(f" {op} "))
    assert 1 <= min(a, b) <= max(a, b) <= top
    assert env.gold == {"+": a + b, "-": a - b, "*": a * b}[op] and env.gold >= 0


def test_wording_is_the_users():
    env = Relay(question="{a}{op}{b}=", asker="A", answerer="B", message="<{message}>", max_number=1)
    env.reset(seed=0)
    env_texts = (env.instructions("asker"), env.instructions("answerer"), env.observe("asker"))
    env.step("hi")
    assert (*env_texts, env.observe("answerer")) == ("A", "B", "1+1=", "<hi>")


@pytest.mark.parametrize(
    "question", ["{a:1000000000}", "{a.__class__} {b}", "{a!r}", "{0}", "{c}", "{a:{b}}", "{a", "{a} }"]
)
def test_questions_have_no_other_fields(question):
    with pytest.raises(ValueError, match=r"may contain \{a\}, \{op\} and \{b\}"):
        Relay(question=question)
    assert begin(Relay(question="{{{a}}}", max_number=1)).question == "{1}"
