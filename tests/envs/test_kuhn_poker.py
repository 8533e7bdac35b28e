import itertools

import pytest
from team_play import begin

from forge_envs.games.poker import CARDS, KuhnPoker, LeducPoker

# Kuhn 1950: every way a hand can go, and player_0's chips where player_0 holds the higher card and where the lower.
LINES = {
    ("check", "check"): (1, -1),
    ("check", "bet", "call"): (2, -2),
    ("check", "bet", "fold"): (-1, -1),
    ("bet", "call"): (2, -2),
    ("bet", "fold"): (1, 1),
}


def dealt(first, second):
    env = begin(KuhnPoker())
    env.cards = {"player_0": first, "player_1": second}
    return env


def totals(env, actions):
    """Play the actions and sum the rewards that `last` reports to each player."""
    rewards, actions = dict.fromkeys(env.possible_agents, 0.0), iter(actions)
    for agent in env.agent_iter(10):
        _, reward, terminated, truncated, _ = env.last()
        rewards[agent] += reward
        env.step(None if terminated or truncated else next(actions))
    return rewards


@pytest.mark.parametrize("moves", LINES)
@pytest.mark.parametrize("cards", list(itertools.permutations(range(3), 2)))
def test_every_line_of_every_deal_pays_exactly(moves, cards):
    won = totals(dealt(*cards), moves)
    player_0 = LINES[moves][0 if cards[0] > cards[1] else 1]
    assert won == {"player_0": player_0, "player_1": -player_0}


@pytest.mark.parametrize("text", ["", "raise", "call", "check or bet", "I will not bet, I check", "checks", "bet" * 9])
def test_illegal_text_loses_the_ante_and_is_recorded(text):
    env = dealt(2, 0)
    env.step(text)
    assert env.terminations == {"player_0": True, "player_1": True}
    assert env.rewards == {"player_0": -1, "player_1": 1}
    assert (env.infos["player_0"]["illegal"], env.infos["player_1"]["illegal"]) == (True, False)


@pytest.mark.parametrize("text", ["bet", " BET.\n", "I bet!", "bet bet", "**Bet**"])
def test_a_move_may_stand_in_a_sentence(text):
    env = dealt(2, 0)
    env.step(text)
    assert env.moves == ["bet"] and env.agent_selection == "player_1"


def test_players_see_only_their_own_card_until_the_end():
    env = dealt(2, 0)
    assert env.observe("player_0") == "Your card: King. Moves: none. Your move: check or bet?"
    env.step("bet")
    assert env.observe("player_1") == "Your card: Jack. Moves: opponent bet. Your move: call or fold?"
    assert env.infos["player_1"]["legal_actions"] == ["call", "fold"] and "cards" not in env.infos["player_1"]
    env.step("fold")
    assert env.infos["player_1"] == {
        "cards": {"player_0": "King", "player_1": "Jack"},
        "moves": ["bet", "fold"],
        "illegal": False,
    }


def test_all_deals_occur_equally_often():
    env, deals = KuhnPoker(), []
    for seed in range(600):
        env.reset(seed=seed)
        deals.append((env.cards["player_0"], env.cards["player_1"]))
    assert all(60 < deals.count(deal) < 140 for deal in itertools.permutations(range(len(CARDS)), 2))


def test_openings_of_a_subclass_are_its_own_games():
    class Short(KuhnPoker):
        def instructions(self, agent):
            return "Poker."

    class Round(LeducPoker):
        def __init__(self, ante):
            super().__init__()
            self.ante = ante

    assert {opening.instructions("player_0") for _, opening in Short().openings()} == {"Poker."}
    rounds = [opening for _, opening in Round(3).openings()]
    assert {(type(opening), opening.ante) for opening in rounds} == {(Round, 3)}


@pytest.mark.parametrize("kind", [KuhnPoker, LeducPoker])
def test_openings_of_a_game_in_play_are_before_the_first_move(kind):
    game = kind()
    begin(game, seed=0)
    game.act("player_0", "bet")
    opening, other = (opening for _, opening in itertools.islice(game.openings(), 2))
    fresh = begin(kind(), seed=0).legal_actions("player_0")
    assert opening.legal_actions("player_0") == fresh
    opening.act("player_0", "bet")
    assert other.legal_actions("player_0") == fresh != opening.legal_actions("player_0")
