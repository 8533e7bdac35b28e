import numpy as np
import pytest
from team_play import act, begin

from forge_envs.teams.treasure_hunt import DIRECTIONS, TreasureHunt


def hunt(rocks=(), place=(0, 0), treasure=(0, 3), **kwargs):
    """A 4 x 4 map by hand."""
    env = begin(TreasureHunt(**kwargs))
    env.rocks, env.place, env.treasure = frozenset(rocks), place, treasure
    env.shortest = env.distance(place)
    return env


def totals(env, texts):
    told, texts = dict.fromkeys(env.possible_agents, 0.0), iter(texts)
    for agent in env.agent_iter(200):
        _, reward, terminated, truncated, _ = env.last()
        told[agent] += reward
        env.step(None if terminated or truncated else next(texts, ""))
    return told


def test_each_agent_sees_its_half():
    env = hunt(rocks=[(1, 0), (1, 3)], treasure=(2, 2))
    assert env.observe("left") == "T.??\n#.??\n..??\n..??\nPartner: (nothing yet)\nRounds left: 16"
    assert env.observe("right").startswith("T?..\n??.#\n??X.\n??..\n")
    env.step("I see a  rock.\nLet us go east")
    assert "Partner: I see a rock. Let us go east\n" in env.observe("right")


@pytest.mark.parametrize(
    ("texts", "place"),
    [
        (["go east", "Go: EAST!"], (0, 1)),
        (["go **east**", "go to the east"], (0, 1)),
        (["go east", "go north-east"], (0, 0)),
        (["go east", "go west"], (0, 0)),
        (["go north", "go north"], (0, 0)),  # the edge
        (["go south", "go south"], (0, 0)),  # a rock
        (["east", "east"], (0, 0)),  # no move
        (["go south? no, go east", "ok, go east"], (0, 1)),  # the last one counts
    ],
)
def test_the_team_steps_only_together_and_where_it_can(texts, place):
    env = hunt(rocks=[(1, 0)])
    for text in texts:
        env.step(text)
    assert env.place == place and env.rounds == 1


def test_the_reward_is_the_shortest_path_over_the_rounds():
    assert totals(hunt(), ["go east"] * 6) == {"left": 1.0, "right": 1.0}
    env = hunt()
    assert totals(env, ["go east", "what?", *["go east"] * 6]) == {"left": 0.75, "right": 0.75}
    detour = hunt(rocks=[(0, 2), (1, 2)])
    assert detour.shortest == 7
    ways = ["south", "south", "east", "east", "east", "north", "north"]
    assert totals(detour, [f"go {way}" for way in ways for _ in "12"])["left"] == 1.0


def test_failed_hunt_earns_partial_credit():
    env = hunt(max_rounds=8, partial_credit=0.5)
    told = totals(env, ["go east", "go east"])
    assert told == pytest.approx({"left": 0.5 / 3, "right": 0.5 / 3})
    env = hunt(max_rounds=8)
    assert totals(env, ["go east"] * 2) == {"left": 0.0, "right": 0.0}


def test_every_map_can_be_solved_in_time():
    env = TreasureHunt(size=5, rocks=0.5, max_rounds=10)
    for seed in range(200):
        env.reset(seed=seed)
        assert 1 <= env.shortest <= 10 and not {env.place, env.treasure} & env.rocks
    env.reset(seed=3)
    while env.agents and not any(env.terminations.values()):
        row, column = env.place
        ahead = {way: (row + down, column + across) for way, (down, across) in DIRECTIONS.items()}
        ahead = {way: square for way, square in ahead.items() if env._free(square)}
        best = min(ahead, key=lambda way: (env.distance(ahead[way]) is None, env.distance(ahead[way])))
        act(env, f"go {best}", f"go {best}")
    assert env.rewards == {"left": 1.0, "right": 1.0}


def test_observations_do_not_depend_on_the_hidden_half():
    changed = 0
    for seed in range(20):
        env = begin(TreasureHunt(size=5), seed)
        twin = env.fork()
        twin.swap_secrets("left", np.random.default_rng(seed))
        assert env.observe("left") == twin.observe("left")
        changed += env.observe("right") != twin.observe("right")
    assert changed > 15


def test_a_long_text_without_a_direction_is_read_at_once():
    env = begin(TreasureHunt())
    env.step("I think we should go" + "\n" * 500_000)  # hours, were each blank tried as the first
    assert env.agent_selection == "right"
