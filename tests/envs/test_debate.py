import pytest
from team_play import act, begin

from forge_agents.envs.env import may_be_silent
from forge_envs.teams.debate import Debate

QUESTION = ("Is water wet?", True, "It was touched.")


def debate(truth=True, **kwargs):
    return begin(Debate(questions=[(QUESTION[0], truth, QUESTION[2])], **kwargs))


def test_only_debaters_read_the_evidence():
    env = debate()
    assert env.observe("pro") == "Question: Is water wet?\nEvidence: It was touched."
    act(env, "It  is\nwet.", "It is not.")
    assert env.agent_selection == "judge"
    assert env.observe("judge") == "Question: Is water wet?\nyes side: It is wet.\nno side: It is not."
    assert "answer is yes" in env.instructions("pro") and "answer is no" in env.instructions("con")


def test_debater_with_a_full_context_does_not_end_the_debate():
    env = debate()
    assert may_be_silent(env)
    act(env, "", "It is not.")
    assert env.observe("judge") == "Question: Is water wet?\nyes side: \nno side: It is not."
    env.step("no")
    assert env.rewards == {"pro": -1, "con": 1, "judge": 0}


@pytest.mark.parametrize(
    ("truth", "verdict", "rewards"),
    [
        (True, "Yes.", (1, -1, 1)),
        (True, "no", (-1, 1, 0)),
        (False, "Not yes but NO", (-1, 1, 1)),
        (False, "yes", (1, -1, 0)),
        (True, "perhaps, nobody knows", (0, 0, 0)),
        (True, "Yes. 97 has no divisor from 2 to 9.", (1, -1, 1)),
        (False, "**No**: the yes side gave no evidence, yes", (-1, 1, 1)),
        (True, "The answer is yes, as no divisor was named", (1, -1, 1)),
        (True, "No doubt the answer is yes", (1, -1, 1)),
        (True, "Based on the arguments, the answer is yes, because 97 has no divisor.", (1, -1, 1)),
        (True, "I find for the yes side, since 97 has no divisor.", (1, -1, 1)),
        (True, "97 is a prime number, so yes. The no side gave no factor.", (1, -1, 1)),
    ],
)
def test_rewards(truth, verdict, rewards):
    env = debate(truth)
    for text in ("a", "b", verdict):
        env.step(text)
    assert tuple(env.rewards.values()) == rewards and tuple(env.rewards) == ("pro", "con", "judge")
    assert env.infos["judge"]["illegal"] == (rewards[0] == 0)
    assert env.infos["pro"]["answer"] == ("yes" if truth else "no")


def test_speakers_alternate_and_arguments_are_cut():
    env = debate(rounds=2, max_argument_chars=5)
    order = []
    for _ in range(4):
        order.append(env.agent_selection)
        env.step("x" * 100)
    assert order == ["pro", "con", "pro", "con"] and env.agent_selection == "judge"
    assert env.observe("judge").count("x") == 20


def test_the_questions_are_true_and_balanced():
    env, primes = Debate(), 0
    for seed in range(200):
        env.reset(seed=seed)
        number = int(env.question.split()[1])
        assert env.truth == all(number % d for d in range(2, number)) and 7 <= number < 1000
        primes += env.truth
    assert 70 < primes < 130
