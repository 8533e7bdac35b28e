import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from team_play import act, begin

from forge_envs.teams.negotiation import Negotiation, pareto_frontier, points_of, possible_values, read_offer


def talks(**kwargs):
    """3 books, 2 hats, 1 ball. player_0 likes books, player_1 hats and the ball."""
    env = begin(Negotiation(**kwargs))
    env.items, env.values = (3, 2, 1), {"player_0": (3, 0, 1), "player_1": (0, 3, 4)}
    return env


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_the_frontier_is_what_no_deal_beats(seed):
    env = begin(Negotiation(), seed)
    first, second = env.values.values()
    assert env.infos["player_0"]["values"] == list(first)
    frontier = pareto_frontier(env.items, first, second)
    shares = itertools.product(*(range(n + 1) for n in env.items))
    for share in shares:
        rest = tuple(n - taken for n, taken in zip(env.items, share, strict=True))
        point = points_of(share, first), points_of(rest, second)
        beaten = any(p[0] >= point[0] and p[1] >= point[1] and p != point for p in frontier)
        assert (point in frontier) != beaten
    assert {points_of(env.items, values) for values in (first, second)} == {10} and first != second
    assert all(a or b for a, b in zip(first, second, strict=True)) and 5 <= sum(env.items) <= 9


def test_all_values_are_found():
    assert possible_values((3, 3, 3)) == []
    assert len(possible_values((1, 1, 1))) == 66  # non-negative solutions of a + b + c = 10


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("I take 2 books and 1 hat", (2, 1, 0)),
        ("You like hats? Fine: TAKE 3 Books", (3, 0, 0)),
        ("take 0 books", (0, 0, 0)),
        ("take 4 books", None),
        ("take 1 book, 1 book", None),
        ("take -1 book", None),
        ("take 1.5 books", None),
        ("2 books for me", None),
        ("take books", None),
        ("take " + "9" * 3000 + " books", None),
        ("mistake 2 books", None),
        ("I take 2 books. You take 1 hat and 1 ball.", (2, 0, 0)),
        ("I take 2 books and 1 hat; player_1 gets 1 ball", (2, 1, 0)),
        ("You take 1 ball, I take 2 books", (2, 0, 0)),
        ("I don't want to take 2 books", None),
        ("I can't take 1 book. I take 2 books", (2, 0, 0)),
    ],
)
def test_offers_are_read(text, taken):
    assert read_offer(text, (3, 2, 1)) == taken


def test_a_deal_pays_the_share_of_the_surplus():
    env = talks()
    env.step("I take 3 books")
    assert "offer: partner has 3 books, 0 hats, 0 balls; you have 0 books, 2 hats, 1 ball." in env.observe("player_1")
    env.step("Good, I accept")
    assert env.rewards == {"player_0": 1.0, "player_1": 1.0}
    assert env.infos["player_1"]["points"] == {"player_0": 9, "player_1": 10} and env.infos["player_1"]["on_frontier"]
    assert env.infos["player_0"]["deal"] == {"player_0": [3, 0, 0], "player_1": [0, 2, 1]}

    env = talks(selfish=0.5)
    env.step("take 1 book, 2 hats")  # player_0 3, player_1 0 + 4
    env.step("accept")
    assert env.rewards == pytest.approx({"player_0": 0.5 * 7 / 19 + 0.15, "player_1": 0.5 * 7 / 19 + 0.2})
    assert not env.infos["player_0"]["on_frontier"]


def test_own_or_missing_offer_cannot_be_accepted():
    env = talks(max_rounds=2)
    act(env, "accept", "take 2 hats", "hm", "accept")
    assert env.rewards == {"player_0": 0.0, "player_1": 0.0} and env.infos["player_0"]["deal"] is None
    assert all(env.terminations.values())


@pytest.mark.parametrize(
    ("said", "closes"),
    [("I accept.", True), ("Thank you, I accept", True), ("Not ideal, but I accept!", True),
     ("Thank you - I accept", True), ("I agree with you and accept", True), ("You have a deal: accept", True),
     ("What you propose is fair so I accept", True), ("I won't argue: accept", True), ("Not bad: I accept", True),
     ("I don't think I can accept that", False), ("You should accept my offer", False), ("Never will I accept", False),
     ("If you accept, I take less next time", False), ("I can't accept that.", False),
     ("I can\u2019t accept that", False),
     ("I will not accept your offer", False), ("Will you accept mine?", False),
     ("Please accept my first offer.", False), ("I refuse to accept that.", False), ("Why should I accept?", False),
     ("I would accept if you gave me 2 hats.", False), ("Before I accept, tell me your values.", False),
     ("There is no way I accept this", False), ("I'm happy to accept.", True), ("Okay, I will accept that.", True)],
)  # fmt: skip
def test_who_does_not_accept_has_no_deal(said, closes):
    env = talks()
    act(env, "take 3 books", said)
    assert all(env.terminations.values()) == closes


def test_the_last_offer_is_the_one_accepted():
    env = talks()
    for text in ("take 3 books", "take 3 books", "I accept"):
        env.step(text)
    assert env.infos["player_0"]["deal"] == {"player_0": [0, 2, 1], "player_1": [3, 0, 0]}
