import random
import re
from collections import deque

import pytest

import forge_agents as fa
from forge_agents.testing import check_env, check_levels
from forge_envs.teams.kitchen import LAYOUTS, STEPS, Kitchen

FLOOR = ".AB"


class Cook:
    """Walks to what is needed next, from the map that a seat reads.

    It `slips`, goes anywhere, now and then: else two of a kind would stand in each other's way for ever.
    """

    def __init__(self, *, slips=0.1):
        self.slips, self.rng = slips, random.Random(0)

    def __call__(self, seen, agent):
        rows = seen.partition("\nann holds")[0].split("\n")
        self.map = {(r, c): sign for r, row in enumerate(rows) for c, sign in enumerate(row)}
        held = dict(re.findall(r"(ann|ben) holds (\w+)", seen))
        self.at = {sign: square for square, sign in self.map.items() if sign in "AB"}
        me, other = ("A", "B") if agent == "ann" else ("B", "A")
        free = [way for way, step in STEPS.items() if self.map.get(self.beside(self.at[me], step)) == "."]
        if free and self.rng.random() < self.slips:
            return self.rng.choice(free)
        goals = self.goals(held, seen, agent, me, other)
        way = self.way(self.at[me], goals, {self.at[other]}) or self.way(self.at[me], goals, set())
        if way and (self.map[self.beside(self.at[me], STEPS[way])] != other or not free):
            return way
        return self.rng.choice([*free, "wait"])

    def goals(self, held, seen, agent, me, other):
        mine, its = held[agent], next(thing for name, thing in held.items() if name != agent)
        k, n = map(int, (re.search(r"Pot: (\d) of (\d) onions", seen) or re.match("(0)(0)", "00")).groups())
        full, near, far = n == 0, self.reach(self.at[me]), self.reach(self.at[other])
        at = {sign: {s for s in near if self.map[s] == sign} for sign in "ODSP=ods"}
        if mine == "nothing":
            apart = not at["P"]
            ann_goes = agent == "ben" and its == "nothing" and not apart and at["P"] <= far
            lying = sum(sign == "o" for sign in self.map.values()) * apart
            if not full and k + lying + (its == "onion" or ann_goes) < n:
                return at["o"] or at["O"]
            if not full and not apart:
                return set()
            ready = its in ("dish", "soup") or ann_goes or (apart and "d" in self.map.values())
            return set() if ready else at["d"] or at["D"]
        if mine == "soup" and at["S"]:
            return at["S"]
        if at["P"] and mine in ("onion", "dish"):
            return at["P"] if (mine == "dish") == full else at["="]
        return {s for s in at["="] if s in far} or at["="]

    def reach(self, start):
        """What can be walked to from a square, cooks aside, and what can be used from there."""
        seen, queue = {start}, deque([start])
        while queue:
            square = queue.popleft()
            for step in STEPS.values():
                ahead = self.beside(square, step)
                if ahead in self.map and ahead not in seen:
                    seen.add(ahead)
                    queue.extend([ahead] * (self.map[ahead] in FLOOR))
        return seen

    def way(self, start, goals, blocked):
        """The first step of a shortest way to use one of `goals`."""
        queue, seen = deque([(start, "")]), {start, *blocked}
        while queue:
            square, first = queue.popleft()
            for name, step in STEPS.items():
                ahead = self.beside(square, step)
                if ahead in goals:
                    return first or name
                if self.map.get(ahead, "#") in FLOOR and ahead not in seen:
                    seen.add(ahead)
                    queue.append((ahead, first or name))
        return ""

    def beside(self, square, step):
        return square[0] + step[0], square[1] + step[1]


def cooked(cook, seed, **settings):
    env = Kitchen(**settings)
    seen, _ = env.reset(seed=seed)
    while env.agents:
        seen, rewards, *_ = env.step({agent: cook(seen[agent], agent) for agent in env.agents})
    return rewards["ann"] if rewards["ann"] == rewards["ben"] else None


def begun(layout="O.1P / D.2S", **settings):
    env = Kitchen(**{"layout": layout, "swap": False, "onions": 1, **settings})
    env.reset(seed=0)
    return env


def steps(env, *pairs):
    for ann, ben in pairs:
        env.step({"ann": ann, "ben": ben})
    return env


def test_the_environment_keeps_the_contract():
    check_env("forge/Kitchen-v0", episodes=2)


def test_a_soup_from_the_onion_to_the_window():
    env = steps(begun(cooking=1, orders=2), ("west", "west"), ("west", "west"), ("east", "wait"), ("east", "wait"))
    assert env.hands == {"ann": "", "ben": "dish"}
    assert env.observe("ann") == (
        "O.AP\nDB.S\nann holds nothing, ben holds dish. Pot: cooks for 1 more. Served: 0 of 2. Rounds left: 26."
    )
    steps(env, ("south", "wait"))
    assert "Pot: ready." in env.observe("ben") and "OB" not in env.observe("ben")
    steps(env, ("wait", "north"), ("wait", "east"), ("wait", "east"), ("wait", "wait"))
    assert env.hands["ben"] == "soup" and env.in_pot == 0
    steps(env, ("west", "south"), ("wait", "east"))
    assert env.served == 1 and env.hands["ben"] == "" and env.agents
    steps(env, *[("wait", "wait")] * 19)
    assert env.agents == [] and env.infos["ann"] == {"served": 1, "rounds": 30, "success": False}


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
    assert ("illegal" in env.infos["ben"]) == (moves[1] == "west or north")
    meet = steps(begun("O1.2P / D..=S"), ("east", "west"))
    assert [*meet.places.values()] == [(0, 1), (0, 3)]


def test_a_counter_hands_things_over_one_at_a_time():
    env = steps(begun(LAYOUTS["wall"]), ("north", "wait"), ("east", "wait"), ("east", "west"))
    assert env.counters == {(1, 2): "onion"} and "\n.AoB.\n" in env.observe("ben")
    steps(env, ("wait", "west"))
    assert env.hands == {"ann": "", "ben": "onion"} and env.counters == {}
    steps(env, ("east", "west"), ("east", "west"))
    assert env.hands == {"ann": "onion", "ben": ""}, "laid down while ann, who is first, found nothing; then taken"


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5, 6])
def test_cooks_who_plan_serve_all_given_time(level):
    settings = dict(fa.spec(f"forge/Kitchen-v0@{level}").kwargs)
    assert [cooked(Cook(), seed, **settings | {"rounds": 200}) for seed in range(3)] == [1, 1, 1]


def test_each_level_is_harder_for_cooks_who_slip():
    means = check_levels("forge/Kitchen-v0", fa.Scripted(Cook(slips=0.4)), episodes=12)
    assert means[0] > 0.6 and means[-1] < 0.5


@pytest.mark.parametrize("say", ["", "{seen}", *STEPS, "wait"])
def test_what_knows_nothing_serves_nothing(say):
    for level in (1, 2):
        settings = fa.spec(f"forge/Kitchen-v0@{level}").kwargs
        assert sum(cooked(lambda seen, _: say.format(seen=seen), n, **settings) for n in range(4)) == 0


def test_who_cooks_alone_beside_one_who_stands_is_slower_or_fails_where_both_are_needed():
    cook = Cook()
    for layout, least in (("room", 1), ("wall", 0)):
        alone = [cooked(lambda seen, agent: cook(seen, agent) if agent == "ann" else "wait", n, layout=layout)
                 for n in range(6)]  # fmt: skip
        assert max(alone) == least


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"layout": "boot"}, "Did you mean 'booth'"), ({"layout": "O1 / 2P"}, "is no map"),
        ({"layout": "O.1P / D.2SS"}, "rows of one length"), ({"layout": "O.1P / D.2X"}, "is no map"),
        ({"onions": 4}, "onions=4"), ({"orders": 0}, "orders=0"), ({"rounds": 0}, "rounds=0"),
        ({"cooking": -1}, "cooking=-1"),
    ],
)  # fmt: skip
def test_settings_that_make_no_kitchen_are_told(wrong, told):
    with pytest.raises(ValueError, match=told):
        Kitchen(**wrong)
