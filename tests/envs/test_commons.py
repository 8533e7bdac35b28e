import numpy as np
import pytest
from team_play import begin

import forge_agents as fa
from forge_agents.testing import check_levels
from forge_envs.oracles.teams import lake, leaving
from forge_envs.teams.commons import Commons, parse_request


def take(share):
    """An oracle that leaves a share of the lake's capacity."""
    return lambda seen, agent: leaving(share)(seen)


def greedy(seen, agent):
    return "take 999999"


def rewards(players, seed, **settings):
    """Play an episode from the agents' own observations. Returns their rewards in order."""
    env = Commons(**settings)
    seen, _ = env.reset(seed=seed)
    while env.agents:
        seen, got, *_ = env.step({agent: players[place](seen[agent], agent) for place, agent in enumerate(env.agents)})
    return list(got.values())


def mean(player, seeds=range(20), **settings):
    return float(np.mean([rewards([player] * settings.get("num_players", 3), seed, **settings) for seed in seeds]))


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
def test_sustainable_players_earn_the_optimum(level):
    settings = fa.spec(f"forge/Commons-v0@{level}").kwargs
    assert 0.85 < mean(take(1 / settings["regrowth"]), **settings) <= 1
    assert mean(greedy, **settings) == 0 and mean(take(0.95), **settings) < 0.5


def test_no_plan_earns_more_than_the_best():
    """Enumerates all plans of a small lake with equal shares."""
    env = begin(Commons(num_players=2, regrowth=2.0, seasons=3))

    def most(stock, left):
        if not left or not stock:
            return 0
        ahead = (2 * n + most(min(env.holds, int((stock - 2 * n) * 2.0)), left - 1) for n in range(stock // 2 + 1))
        return max(ahead)

    env.holds = 24
    assert most(24, 3) == env.best == 48


def test_greedy_player_earns_more_at_the_others_expense():
    prudent = take(0.5)
    alike, mixed = (np.mean([rewards([one, prudent, prudent], n) for n in range(20)], axis=0)
                    for one in (prudent, lambda seen, agent: f"take {lake(seen)[1] // 4}"))  # fmt: skip
    assert mixed[0] > alike[0] + 0.1 and max(mixed[1:]) < alike[1] - 0.1 and mixed.mean() < alike.mean()
    bold = np.mean([rewards([greedy, prudent, prudent], n) for n in range(20)], axis=0)
    assert bold[0] > 0 == bold[1] == bold[2], "most of the first stock"


def test_all_take_at_once_and_share_what_is_too_little():
    env = begin(Commons(num_players=3, regrowth=2.0))
    env.stock = env.holds = 10
    seen, *_ = env.step({"player_0": "I take 2", "player_1": "take 3!", "player_2": "hello\n all"})
    assert env.stock == 10 and env.infos["player_2"]["illegal"] and "illegal" not in env.infos["player_0"]
    assert seen["player_0"].splitlines()[:3] == [
        "ann took 2 and said: I take 2", "ben took 3 and said: take 3!", "cat took 0 and said: hello all",
    ]  # fmt: skip
    env.step({"player_0": "take 4", "player_1": "take 4", "player_2": "take 4"})
    assert env.caught == {"player_0": 5, "player_1": 6, "player_2": 3} and env.stock == 0 and env.agents == []


def test_levels_get_harder_for_a_fixed_strategy():
    means = check_levels("forge/Commons-v0", fa.Scripted(take(0.35)), episodes=20)
    assert means[0] > 0.7 and means[-1] < 0.5


@pytest.mark.parametrize(
    ("text", "number"),
    [("take 1,200", 1200), ("Take: 22", 22), ("I take **22**", 22), ("take 22.", 22), ("take 22, as agreed", 22),
     ("take `5`", 5), ('take "5"', 5), ("take\u00a05", 5), ("take 5%", None), ("take 5/10", None),
     ("take 12.5", None), ("take 5 or take 6", None), ("take 1,2000", None), ("mistake 5", None)],
)  # fmt: skip
def test_a_number_to_take_may_be_written_in_other_ways(text, number):
    assert parse_request(text) == number


def test_growth_is_what_its_decimals_say():
    env = begin(Commons(num_players=2, regrowth=1.4))
    env.holds, env.stock = 1000, 45
    env.step({"player_0": "nothing", "player_1": "nothing"})
    assert env.stock == 63, "in binary 45 x 1.4 is a little less"
