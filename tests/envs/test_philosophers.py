import itertools
import random

import numpy as np
import pytest
from team_play import begin

import forge_agents as fa
from forge_agents.testing import check_levels
from forge_envs.teams.philosophers import DiningPhilosophers, parse_move


def play(env, *rounds):
    """Play rounds of moves, one word per agent: l, r, x (release) or w. Returns the last rewards."""
    words = {"l": "take left", "r": "take right", "x": "release", "w": "wait"}
    for moves in rounds:
        _, rewards, *_ = env.step({a: words[move] for a, move in zip(env.possible_agents, moves, strict=True)})
    return rewards


def test_agent_with_both_forks_eats_and_puts_them_back():
    env = begin(DiningPhilosophers(num_players=3, rounds=8))
    play(env, "lww")
    assert env.holders == ["philosopher_0", "", ""] and env.eaten["philosopher_0"] == 0
    assert env.observe("philosopher_2").endswith(
        "Round 2 of 8. left fork: free, right fork: philosopher_0. You have eaten 0 of 1."
    )
    play(env, "rww")
    assert env.holders == ["", "", ""] and env.eaten["philosopher_0"] == 1


def test_fork_that_two_take_or_that_is_held_is_not_taken():
    env = begin(DiningPhilosophers(num_players=3))
    play(env, "rlw")  # both want fork 1
    assert env.holders == ["", "", ""]
    play(env, "lwr")  # both want fork 0
    play(env, "lww", "wwr")
    assert env.holders == ["philosopher_0", "", ""]
    play(env, "xwr")  # a fork that is released in this round was held when the round began
    assert env.holders == ["", "", ""]


@pytest.mark.parametrize("players", range(2, 9))
def test_deadlock_ends_only_by_a_release(players):
    env = begin(DiningPhilosophers(num_players=players, rounds=6))
    assert set(play(env, "l" * players, *["r" * players] * 5).values()) == {0.0}
    assert env.infos["philosopher_0"]["deadlock"] and not env.infos["philosopher_0"]["success"]
    env = begin(DiningPhilosophers(num_players=players, rounds=6))
    rewards = play(env, "l" * players, "x" + "w" * (players - 1), *["w" * (players - 1) + "r"] * 4)
    assert rewards["philosopher_0"] == pytest.approx(1 / players)
    assert not env.infos["philosopher_0"]["deadlock"]


def test_idling_is_the_minimum_and_serving_all_the_maximum():
    """Enumerates all plays of two agents: every one that eats earns more than waiting."""
    rewards = {}
    for plan in itertools.product(map("".join, itertools.product("lrw", repeat=2)), repeat=4):
        env = begin(DiningPhilosophers(num_players=2, rounds=4))
        for moves in plan:
            if env.agents:
                rewards[plan] = play(env, moves)["philosopher_0"]
        assert rewards[plan] == np.mean([min(1, n) for n in env.eaten.values()])
    assert set(rewards.values()) == {0.0, 0.5, 1.0} and rewards["ww", "ww", "ww", "ww"] == 0.0
    assert rewards["lw", "rw", "wl", "wr"] == 1.0


def test_goals_differ_between_seeds_and_further_meals_do_not_count():
    envs = [begin(DiningPhilosophers(meals=3), seed=seed) for seed in range(20)]
    assert {n for env in envs for n in env.goals.values()} == {1, 2, 3}
    env = begin(DiningPhilosophers(num_players=2, meals=1, rounds=6))
    assert play(env, *["lw", "rw"] * 3)["philosopher_1"] == 0.5 and env.eaten["philosopher_0"] == 3


@pytest.mark.parametrize(
    ("text", "move"),
    [("Take LEFT!", "left"), ("I take the right fork", "right"), ("release", "release"), ("relea\u017fe", "release"),
     ("wait, wait", "wait"),
     ("take left or wait", ""), ("left", ""), ("retake leftovers", ""), ("", "")],
)  # fmt: skip
def test_exactly_one_move_counts(text, move):
    assert parse_move(text) == move
    env = begin(DiningPhilosophers(num_players=2))
    env.step({"philosopher_0": text, "philosopher_1": "wait"})
    assert ("illegal" in env.infos["philosopher_0"]) == (move == "")


def test_levels_get_harder_for_random_players():
    moves, rng = ("take left", "take right", "release", "wait"), random.Random(0)
    means = check_levels("forge/DiningPhilosophers-v0", fa.Scripted(lambda seen: rng.choice(moves)), episodes=40)
    assert means[0] > 0.4 and means[-1] < 0.35
