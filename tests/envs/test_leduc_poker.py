import copy
import itertools
from collections import Counter

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.sparse import block_array, coo_array
from team_play import act, begin

from forge_envs.games.poker import LeducPoker

DECK = [0, 0, 1, 1, 2, 2]


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


# ---- the known numbers of the game, from the environment's own moves


def tree(env):
    """Return all lines from here: agent, observation and subtrees by move, or the chips of player_0."""
    if any(env.terminations.values()):
        return env.rewards["player_0"]
    agent = env.agent_selection
    children = {}
    for move in env.infos[agent]["legal_actions"]:
        fork = copy.deepcopy(env)
        fork.step(move)
        children[move] = tree(fork)
    return agent, str(env.observe(agent)), children


def test_the_value_of_the_game_is_the_known_one():
    """-0.0856 chips for player_0, solved: the sequence form as a linear program (Koller, Megiddo, von Stengel)."""
    sequences = {"player_0": {(): 0}, "player_1": {(): 0}}
    parents = {"player_0": {}, "player_1": {}}
    payoffs = {}

    def walk(node, chance, at):
        if not isinstance(node, tuple):
            pair = sequences["player_0"][at["player_0"]], sequences["player_1"][at["player_1"]]
            payoffs[pair] = payoffs.get(pair, 0.0) + chance * node
            return
        agent, seen, children = node
        parents[agent][seen] = (at[agent], list(children))
        for move, child in children.items():
            sequences[agent].setdefault((seen, move), len(sequences[agent]))
            walk(child, chance, {**at, agent: (seen, move)})

    for deal, count in Counter(itertools.permutations(DECK, 3)).items():
        walk(tree(dealt(*deal)), count / 120, {"player_0": (), "player_1": ()})

    def constraints(agent):
        rows, columns, values = [0], [0], [1.0]
        for row, (seen, (before, moves)) in enumerate(parents[agent].items(), 1):
            rows += [row] * (len(moves) + 1)
            columns += [sequences[agent][before], *(sequences[agent][seen, move] for move in moves)]
            values += [-1.0, *[1.0] * len(moves)]
        shape = len(parents[agent]) + 1, len(sequences[agent])
        return coo_array((values, (rows, columns)), shape=shape)

    (i, j), value = zip(*payoffs, strict=True), list(payoffs.values())
    chips = coo_array((value, (i, j)), shape=(len(sequences["player_0"]), len(sequences["player_1"])))
    first, second = constraints("player_0"), constraints("player_1")
    # player_0's plan x maximises v_0 with F^T v <= A^T x and E x = e.
    bound = np.zeros(second.shape[0])
    bound[0] = -1.0
    upper = block_array([[-chips.T, second.T]])
    equal = block_array([[first, coo_array((first.shape[0], second.shape[0]))]])
    start = np.zeros(first.shape[0])
    start[0] = 1.0
    solved = linprog(
        np.concatenate([np.zeros(first.shape[1]), bound]),
        A_ub=upper.tocsr(),
        b_ub=np.zeros(upper.shape[0]),
        A_eq=equal.tocsr(),
        b_eq=start,
        bounds=[(0, None)] * first.shape[1] + [(None, None)] * second.shape[0],
    )
    assert solved.success and -solved.fun == pytest.approx(-0.0856064, abs=1e-6)
