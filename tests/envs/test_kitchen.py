import pytest
from team_play import begin, shown, with_oracle

import forge_agents as fa
from forge_agents.testing import check_levels
from forge_envs.oracles.kitchen import Oracle
from forge_envs.teams.kitchen import LAYOUTS, Kitchen

NAME = "forge/Kitchen-v0"


class Slips(Oracle):
    """Makes a random step in three of ten rounds."""

    slips = 0.3


def begun(layout="O.1P / D.2S", **settings):
    return begin(Kitchen(**{"layout": layout, "swap": False, "onions": 1, **settings}))


def steps(env, *pairs):
    for ann, ben in pairs:
        env.step({"cook_0": ann, "cook_1": ben})
    return env


def test_a_soup_from_the_onion_to_the_window():
    env = steps(begun(cooking=1, orders=2), ("west", "west"), ("west", "west"), ("east", "wait"), ("east", "wait"))
    assert env.hands == {"cook_0": "", "cook_1": "dish"}
    assert env.observe("cook_0") == (
        "O.AP\nDB.S\nann holds nothing, ben holds dish. Pot: cooks for 1 more. Served: 0 of 2. Rounds left: 46."
    )
    steps(env, ("south", "wait"))
    assert "Pot: ready." in env.observe("cook_1") and "OB" not in env.observe("cook_1")
    steps(env, ("wait", "north"), ("wait", "east"), ("wait", "east"), ("wait", "wait"))
    assert env.hands["cook_1"] == "soup" and env.in_pot == 0
    steps(env, ("west", "south"), ("wait", "east"))
    assert env.served == 1 and env.hands["cook_1"] == "" and env.agents
    steps(env, *[("wait", "wait")] * 39)
    assert env.agents == [] and env.infos["cook_0"] == {"served": 1, "rounds": 50, "success": False, "forfeits": []}


@pytest.mark.parametrize(
    ("moves", "places"),
    [
        (("south", "north"), ((0, 2), (1, 2))),  # they would change places
        (("west", "wait"), ((0, 1), (1, 2))),
        (("wait", "north"), ((0, 2), (1, 2))),  # somebody stands there
        (("west", "north"), ((0, 1), (0, 2))),  # somebody stood there
        (("north", "south"), ((0, 2), (1, 2))),  # out of the map
        (("go WEST, please", "west or north"), ((0, 1), (1, 2))),
    ],
)
def test_cooks_do_not_walk_through_each_other(moves, places):
    env = steps(begun(), moves)
    assert tuple(env.places.values()) == places
    assert ("illegal" in env.infos["cook_1"]) == (moves[1] == "west or north")
    meet = steps(begun("O1.2P / D..=S"), ("east", "west"))
    assert [*meet.places.values()] == [(0, 1), (0, 3)]


def test_map_is_flipped_and_cooks_start_on_the_drawn_sides():
    seen = {}
    for seed in range(40):
        env = begin(begun(LAYOUTS["wall"], swap=True), seed)
        rows = env.observe("cook_0").split("\n")[:3]
        bare = tuple(row.replace("A", ".").replace("B", ".") for row in rows)
        sides = [env.places[cook][1] < 2 for cook in ("cook_0", "cook_1")]
        assert sides in ([True, False], [False, True])
        seen.setdefault(bare, set()).add(sides[0])
    whole = ("O.=.P", "..=..", "D.=.S")
    turned = {whole, whole[::-1], tuple(row[::-1] for row in whole), tuple(row[::-1] for row in whole[::-1])}
    assert seen == {each: {True, False} for each in turned}


def test_two_soups_for_the_last_order_are_one_success():
    env = begun("D1.O / =PS= / D2.O", cooking=0, orders=1, rounds=60)
    for away in ("south", "north"):  # first ann, then ben
        pairs = [(move, "wait") for move in ("east", "east", "west", away, "west", away, "east")]
        steps(env, *(pairs if away == "south" else [pair[::-1] for pair in pairs]))
    assert env.hands == {"cook_0": "soup", "cook_1": "soup"}
    _, rewards, _, _, infos = env.step({"cook_0": "south", "cook_1": "north"})
    assert rewards == {"cook_0": 1.0, "cook_1": 1.0}  # 2.0, without success
    assert infos["cook_0"]["served"] == 1 and infos["cook_0"]["success"]


def test_a_counter_hands_things_over_one_at_a_time():
    env = steps(begun(LAYOUTS["wall"]), ("north", "wait"), ("east", "wait"), ("east", "west"))
    assert env.counters == {(1, 2): "onion"} and "\n.AoB.\n" in env.observe("cook_1")
    steps(env, ("wait", "west"))
    assert env.hands == {"cook_0": "", "cook_1": "onion"} and env.counters == {}
    steps(env, ("east", "west"), ("east", "west"))
    assert env.hands == {"cook_0": "onion", "cook_1": ""}, "cook_0, who is first, takes it a round later"


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5, 6])
def test_cooks_who_plan_serve_all_given_time(level):
    assert [shown(NAME, seed, level=level, rounds=200)[1] for seed in range(3)] == [1, 1, 1]


def test_levels_are_a_ladder_for_cooks_who_slip():
    means = check_levels(with_oracle(NAME, Slips), fa.Oracle(), episodes=24)
    assert means[0] > 0.9 and means[-1] < 0.6


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5, 6])
def test_games_of_a_level_begin_in_many_ways(level):
    env = fa.make(f"{NAME}@{level}")
    begins = set()
    for seed in range(60):
        env.reset(seed=seed)
        begins.add(env.observe("cook_0"))
    assert len(begins) >= 40


def test_single_cook_is_slower_or_fails_if_both_are_needed():
    alone = {"cook_0": fa.Oracle(), "cook_1": fa.Scripted(lambda seen: "wait")}
    for layout, least in (("room", 1), ("wall", 0)):
        games = (fa.play(NAME, alone, seed=seed, env_args={"layout": layout}) for seed in range(6))
        assert max(game.rewards["cook_0"] for game in games) == least
