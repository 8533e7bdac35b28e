import pytest
from team_play import act, begin

from forge_envs.games.poker import LeducPoker


def dealt(first, second, public):
    env = begin(LeducPoker())
    env.cards, env.public = {"player_0": first, "player_1": second}, public
    return env


def won(env, moves):
    """player_0's chips. player_1's are the opposite."""
    for move in moves.split():
        env.step(move)
    assert env.rewards["player_0"] == -env.rewards["player_1"] and all(env.terminations.values())
    return env.rewards["player_0"]


@pytest.mark.parametrize(
    ("cards", "moves", "chips"),
    [
        ((2, 1, 0), "call call call call", 1),  # king over queen, antes only
        ((1, 2, 0), "call call call call", -1),
        ((2, 1, 1), "call call call call", -1),  # a pair beats the king
        ((2, 2, 0), "call raise call raise call", 0),  # the same rank
        ((0, 1, 0), "raise raise call raise raise call", 13),  # 1 + 2 + 2 + 4 + 4
        ((0, 1, 2), "raise raise call raise raise call", -13),
        ((0, 2, 1), "raise fold", 1),
        ((0, 2, 1), "call raise fold", -1),
        ((0, 2, 1), "raise raise fold", -3),
        ((2, 0, 1), "raise call raise fold", 3),
        ((0, 2, 1), "call call raise raise fold", -5),
    ],
)
def test_lines_pay_what_the_rules_say(cards, moves, chips):
    assert won(dealt(*cards), moves) == chips


def test_the_agents_read_what_they_may():
    env = dealt(2, 0, 1)
    env.step("raise")
    assert env.observe("player_1") == (
        "Your card: Jack. Public card: hidden. Round 1: opponent raise. Paid: you 1, opponent 3. "
        "Your move: call or raise or fold?"
    )
    env.step("raise")
    assert env.infos["player_0"]["legal_actions"] == ["call", "fold"], "two raises are all"
    env.step("call")
    assert (
        env.agent_selection == "player_0"
        and "Public card: Queen. Round 1: you raise, opponent raise" in env.observe("player_0")
    )
    act(env, "check", "check")
    assert env.infos["player_0"]["cards"] == {"player_0": "King", "player_1": "Jack", "public": "Queen"}
    assert env.infos["player_1"]["moves"] == [["raise", "raise", "call"], ["call", "call"]]


@pytest.mark.parametrize("text", ["", "fold", "raise or call", "re-raised", "I fold"])
def test_illegal_text_folds(text):
    env = dealt(2, 0, 1)
    env.step(text)
    assert (
        env.rewards == {"player_0": -1, "player_1": 1}
        and env.infos["player_0"]["illegal"]
        and not env.infos["player_1"]["illegal"]
    )
