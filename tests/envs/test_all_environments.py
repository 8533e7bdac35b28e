"""Properties of all built-in environments: contract, wrong settings, hostile and empty answers, private reasoning."""

import asyncio
import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forge_agents as fa
from forge_agents.envs.conformance.checks import CHECKS
from forge_agents.envs.workers import env as workers
from forge_agents.rollout.rollout import Rollout
from forge_agents.testing import check_env
from forge_envs.teams import service_desk
from forge_envs.teams.kitchen import STEPS

ALL = [name for name in fa.list_envs() if name.startswith("forge/")]
CONTRACT = {
    "KuhnPoker": 20, "LeducPoker": 4, "Relay": 20, "AlphabetSort": 20, "TreasureHunt": 4, "Negotiation": 4, "Debate": 4,
    "Library": 4, "Library@6": 4, "Tables": 4, "Codewords": 4, "Codewords@6": 4, "CodewordsDuel": 4,
    "Village@4": 1, "Fireworks": 3, "Fireworks@5": 3, "Commons": 3, "Kitchen": 2, "ServiceDesk@4": 2,
    "DiningPhilosophers": 3, "TicTacToe": 4, "ConnectFour": 4,
}  # fmt: skip
"""Number of episodes per check. Repair is checked with its own tests."""


def id_of(name):
    name, at, level = name.partition("@")
    return f"forge/{name}-v0{at}{level}"


@pytest.fixture(autouse=True, scope="module")
def _no_worker_is_left():
    yield
    workers.shutdown()


@pytest.mark.parametrize("name", CONTRACT)
def test_contract_is_kept(name):
    here = [check for check in CHECKS["full"] if check != "other process"]
    assert check_env(id_of(name), episodes=CONTRACT[name], checks=here, isolation="none").ok


EPISODES = f"""
import json
import forge_agents as fa
from forge_agents.envs.conformance.play import play, turn_based
for name, seeds in {[(id_of(name), seeds) for name, seeds in CONTRACT.items()]}:
    env = turn_based(fa.make(name, isolation="none"))
    print(name, json.dumps([step for seed in range(seeds) for step in play(env, seed)]))
"""


def test_another_process_plays_the_same_episodes(capsys):
    """One process plays all environments. `check_env` starts one for each."""
    words, env = [sys.executable, "-c", EPISODES], {**os.environ, "PYTHONHASHSEED": "1"}
    other = subprocess.run(words, env=env, capture_output=True, text=True, check=True, timeout=200)
    exec(EPISODES, {})
    assert other.stdout.splitlines() == capsys.readouterr().out.splitlines()


def telling(name, told):
    """A subclass of the environment whose observations end with ``told(env, agent)``."""
    base = type(fa.make(id_of(name), isolation="none"))

    def observe_text(self, agent):
        return base.observe_text(self, agent) + told(self, agent)

    return type("Telling", (base,), {"observe_text": observe_text})


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Codewords", lambda env, agent: " " * env.hidden.index(env.left("")[0])),
        ("Fireworks", lambda env, agent: env.hands[agent][0].card[0] if env.hands[agent] else ""),
        ("Fireworks", lambda env, agent: " " * env.deck[-1][1] if env.deck else ""),
        ("Village", lambda env, agent: env.victim),
        ("Village", lambda env, agent: " " * [*env.roles.values()].index("wolf")),
    ],
)
def test_observation_that_depends_on_a_secret_is_found(name, told):
    report = check_env(telling(name, told), checks=("information sets",), raise_on_failure=False)
    assert [finding.check for finding in report.failures] == ["information sets"]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("AlphabetSort", [{"num_names": 1}, {"turns": 0}, {"num_added": 0}, {"sharpness": 0.0}]),
        ("Codewords", [{"teams": 3}, {"groups": 5}, {"groups": 4, "teams": 2}, {"size": 6}, {"others": 0}, {"near": 9},
                       {"traps": 4}, {"spare": -1}]),
        ("Commons", [{"num_players": 1}, {"num_players": 7}, {"regrowth": 1}, {"seasons": 1},
                     {"max_message_chars": 0}]),
        ("Debate", [{"rounds": 0}, {"below": 10}, {"below": 10**12}, {"max_argument_chars": 0}]),
        ("DiningPhilosophers", [{"num_players": 1}, {"num_players": 9}, {"meals": 0}, {"rounds": 1},
                                {"max_message_chars": 0}]),
        ("Fireworks", [{"num_players": 5}, {"colours": 6}, {"ranks": 1}, {"hand": 6}, {"hints": 0}, {"fuses": 0}]),
        ("Kitchen", [{"onions": 4}, {"orders": 0}, {"rounds": 0}, {"cooking": -1}]),
        ("Library", [{"hops": 0}, {"hops": 7}, {"towns": 3}, {"hits": 0}, {"max_note_chars": 0}]),
        ("Negotiation", [{"selfish": 2}, {"max_rounds": 0}, {"max_message_chars": 0}]),
        ("Relay", [{"operators": "/"}, {"operators": ""}, {"max_number": 0}, {"partial_credit": 2.0},
                   {"max_message_chars": 0}, {"call_reward": -1.0}]),
        ("Repair", [{"modules": 0}, {"modules": 4}, {"functions": 13}, {"faults": 4}, {"kinds": ["x"]}]),
        ("ServiceDesk", [{"kinds": 0}, {"rules": 7}, {"wishes": 4}, {"customers": 0}]),
        ("Tables", [{"level": 0}, {"level": 7}, {"orders": 9}, {"revisions": -1}, {"max_message_chars": 0}]),
        ("TreasureHunt", [{"size": 1}, {"size": 13}, {"rocks": 0.6}, {"max_rounds": 3}, {"partial_credit": 2},
                          {"max_message_chars": 0}]),
        ("Village", [{"num_players": 4}, {"num_players": 8}, {"wolves": 3}, {"days": 0}, {"talks": 4},
                     {"max_message_chars": 0}]),
    ],
)  # fmt: skip
def test_setting_out_of_range_is_named(name, wrong):
    for arguments in wrong:
        with pytest.raises(ValueError, match=f"{next(iter(arguments))}=.* must be"):
            fa.make(id_of(name), isolation="none", **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "AlphabetSort", "num_names": 500}, "number of names, 504, <= "),
        ({"name": "Debate", "questions": []}, "questions is empty"),
        ({"name": "Fireworks", "colours": 1, "ranks": 2}, "4 cards are too few for 2 hands of 3"),
        ({"name": "Kitchen", "layout": "boot"}, "Did you mean 'booth'"),
        ({"name": "Kitchen", "layout": "O1 / 2P"}, "is no map"),
        ({"name": "Kitchen", "layout": "O.1P / D.2SS"}, "rows of one length"),
        ({"name": "Kitchen", "layout": "O.1P / D.2X"}, "is no map"),
    ],
)
def test_settings_that_do_not_fit_together_are_explained(arguments, message):
    with pytest.raises(ValueError, match=message):
        fa.make(id_of(arguments.pop("name")), **arguments)


def totals(env, seed, texts):
    """Play texts in order, then empty ones. Returns the sum of rewards by agent."""
    env.reset(seed=seed)
    rewards, texts = dict.fromkeys(env.possible_agents, 0.0), iter(texts)
    for agent in env.agent_iter(300):
        observation, reward, terminated, truncated, _ = env.last()
        assert env.observation_space(agent).contains(str(observation))
        rewards[agent] += reward
        env.step(None if terminated or truncated else next(texts, ""))
    assert env.agents == []
    return list(rewards.values())


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2*3"}}</tool_call>'


@pytest.mark.parametrize(
    ("name", "arguments", "moves", "allowed"),
    [
        ("KuhnPoker", {}, ["check", "bet", "call", "fold"], lambda a, b: a == -b and abs(a) in (1, 2)),
        ("LeducPoker", {}, ["call", "raise", "fold", "Check!", "I bet."], lambda a, b: a == -b and abs(a) <= 13),
        ("TicTacToe", {}, list("0123456"), lambda a, b: (a, b) in ((-1, 1), (1, -1), (-1, 0), (0, -1), (0, 0))),
        ("ConnectFour", {}, list("0123456"), lambda a, b: (a, b) in ((-1, 1), (1, -1), (-1, 0), (0, -1), (0, 0))),
        ("AlphabetSort", {}, ["Abel", "Zeno"], lambda total: 0 <= total <= 3),
        ("Negotiation", {"selfish": 0.5}, ["take 1 book", "take 2 hats, 1 ball", "accept"],
         lambda a, b: 0 <= min(a, b) <= max(a, b) <= 1),
        ("Debate", {"rounds": 2}, ["yes", "no"], lambda pro, con, judge: pro == -con and judge in (0, 1)),
        ("TreasureHunt", {"size": 3, "partial_credit": 0.5}, [f"go {way}" for way in STEPS],
         lambda a, b: a == b and 0 <= a <= 1),
        ("Relay", {}, [CALL, "<tool_call>{"], lambda a, b: a == b and a in (0, 1)),
    ],
)  # fmt: skip
def test_any_texts_end_with_rewards_of_the_rules(name, arguments, moves, allowed):
    env = fa.make(id_of(name), isolation="none", **arguments)

    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.text(max_size=40) | st.sampled_from(moves), max_size=20), st.integers(0, 2**32 - 1))
    def check(texts, seed):
        assert allowed(*totals(env, seed, texts))

    check()


KNOW_NOTHING = {
    "Library": ((1, 3), 20, 0.05, ("lamps [1] [2] [3]", "Oder", "1900 [1]", "bells boats chairs Aube Oder Rega")),
    "Tables": ((1, 5), 15, 0.21, ("APPROVE", "0", "1", "Ulm", "January", 'CALL sql("SELECT 1")')),
    "Codewords": ((1, 3), 30, 0.03, ("animal 9", "farm 2, moon, judge")),
    "Fireworks": ((1, 3), 20, 0.2, ("play 1", "discard 1", "hint ben red", "hint ann 1", "play 1 discard 1")),
    "Commons": ((1, 2), 20, 0.25, ("take 0", "take 1", "take 5", "take 20", "take 100", "take 1 take 2")),
    "DiningPhilosophers": ((1, 2, 5), 5, 0.0, ("take left", "take right", "release", "wait", "take left, take right")),
    "Kitchen": ((1, 2), 4, 0.0, (*STEPS, "wait")),
    "ServiceDesk": ((1, 5), 5, 0.0, ("BYE", "CALL cancel(417)", 'CALL refuse("Ada Berg", 1)', "supervisor: please")),
}
"""Levels, number of seeds, largest mean reward, and fixed answers."""


@pytest.mark.parametrize("name", KNOW_NOTHING)
def test_fixed_and_copied_answers_earn_next_to_nothing(name):
    levels, seeds, most, texts = KNOW_NOTHING[name]
    for level in levels:
        for text in ("", "{observation}", *texts):
            player = fa.Scripted(lambda observation, text=text: text.replace("{observation}", observation))
            episodes = [fa.play(id_of(f"{name}@{level}"), player, seed=seed) for seed in range(seeds)]
            assert np.mean([list(episode.rewards.values()) for episode in episodes]) <= most, (level, text)


def test_agents_with_good_partners_earn_nothing_by_fixed_or_copied_answers():
    partners = {"customer": fa.Scripted(service_desk.customer), "supervisor": fa.Scripted(service_desk.supervisor)}
    for text in ("", "BYE", "CALL cancel(417)", 'CALL refuse("Ada Berg", 1)', "supervisor: please"):
        team = {"agent": fa.Scripted(lambda _, text=text: text), **partners}
        for level in (1, 5):
            games = [fa.play(id_of(f"ServiceDesk@{level}"), team, seed=seed) for seed in range(5)]
            assert sum(game.rewards["agent"] for game in games) == 0
    copying = {"master": fa.Oracle(), "guesser": fa.Scripted(lambda observation: observation)}
    assert sum(fa.play(id_of("Codewords"), copying, seed=seed).rewards["guesser"] for seed in range(30)) < 6


# ---- reasoning


def marker(agent):
    return f"only {agent} thinks this"


@pytest.mark.parametrize("env_id", ALL)
def test_no_agent_reads_the_reasoning_of_another(env_id):
    def answer(observation, agent):
        words = re.findall(r"\w+", observation) or ["no"]
        sample = " ".join(choices.sample(words, min(3, len(words))))
        text = choices.choice([sample, "offer 3", "I pass.", "bet", "check"])
        return f"<think>{marker(agent)}\nCALL look()</think> {text}"

    rollout = Rollout(make_env=lambda: fa.make(env_id), env_id=env_id, policies=fa.Scripted(answer), max_turns=60)
    num_turns = 0
    for seed in range(4):
        choices = random.Random(seed)
        (episode,) = asyncio.run(rollout.group(seed, 1)).episodes
        assert episode.error is None, episode.error
        for turn in episode.turns:
            assert turn.reasoning.startswith(marker(turn.agent)) and "think" not in turn.action
        for reader, trajectory in episode.trajectories.items():
            texts = [trajectory.instructions, str(trajectory.info)]
            texts += [turn.observation + str(turn.info) for turn in trajectory.turns]
            assert not any(marker(agent) in "".join(texts) for agent in episode.trajectories), reader
        num_turns += len(episode.turns)
    assert num_turns >= 4
