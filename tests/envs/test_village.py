import numpy as np
import pytest
from team_play import with_oracle

import forge_agents as fa
from forge_agents.testing import check_levels
from forge_envs.games.village import NAMES, Village
from forge_envs.oracles.games import Village as Oracle

ANNA, BERT, CLEO, DORA, EMIL, FRED, GINA = PLAYERS = [f"player_{number}" for number in range(7)]


class Doubts(Oracle):
    """A villager sometimes acts at random."""

    def villager(self, seen, asked, others):
        return self.rng.choice(others) if self.rng.random() < 0.2 else super().villager(seen, asked, others)


def begun(roles="wolf seer villager villager villager", seed=0, **settings):
    names = roles.split()
    env = Village(**{"num_players": len(names), "wolves": names.count("wolf"), "seer": "seer" in names,
                     "healer": "healer" in names, **settings})  # fmt: skip
    env.reset(seed=seed)
    env.roles = dict(zip(env.possible_agents, names, strict=True))
    env.queue = [agent for agent in env.alive if env.roles[agent] != "villager"]
    env.agent_selection = env.queue[0]
    return env


def say(env, *texts):
    """Play texts in order. Returns the agents that acted."""
    requests = []
    for text in texts:
        requests.append(env.agent_selection)
        env.step(text)
    return requests


def village_wins(env_id, players, seeds):
    result = [fa.play(env_id, players, seed=seed) for seed in seeds]
    return sum(episode.trajectories[ANNA].info["winner"] == "village" for episode in result) / len(seeds)


def test_a_night_and_a_day():
    env = begun("wolf seer healer villager villager")
    assert say(env, "emil", "anna", "dora") == [ANNA, BERT, CLEO]
    assert env.observe(BERT).splitlines()[:3] == [
        "Day 1. Alive: anna, bert, cleo, dora.", "Gone: emil (villager).", "Last night emil (villager) died.",
    ]  # fmt: skip
    assert "anna is a wolf." in env.observe(BERT) and "wolf" not in env.observe(DORA)
    assert say(env, *["anna  is a\nwolf"] * 4) == [BERT, CLEO, DORA, ANNA]
    assert env.observe(DORA).count(": anna is a wolf\n") == 4
    say(env, "I vote for Anna.", "anna")
    assert "Votes" not in env.observe(DORA) and env.votes == {BERT: ANNA, CLEO: ANNA}
    say(env, "nobody", "bert")
    assert env.rewards == {ANNA: 0, BERT: 1, CLEO: 1, DORA: 1, EMIL: 1}, "who is gone wins with its side"
    assert env.infos[EMIL]["winner"] == "village" and env.infos[ANNA]["success"] is False


def test_guarded_player_survives_and_tied_votes_remove_no_player():
    env = begun("wolf healer villager villager villager")
    say(env, "cleo", "cleo")
    assert "Last night nobody died." in env.observe(CLEO) and len(env.alive) == 5
    say(env, *["hm"] * 5)
    voters = say(env, "anna", "emil", "anna", "dora or anna", "emil")
    assert "illegal" in env.infos[voters[3]] and "illegal" not in env.infos[voters[0]]
    assert "So nobody was sent away." in env.observe(DORA) and env.phase == "night"
    first, second = (NAMES[PLAYERS.index(voter)] for voter in voters[:2])
    assert f"Votes: {first} for anna, {second} for emil" in env.observe(DORA)


def test_only_wolves_know_each_other_and_the_named_victim():
    env = begun("wolf wolf seer villager villager villager villager")
    assert "Wolves: anna, bert." in env.observe(ANNA) and env.legal_actions(BERT) == (*NAMES[2:], "nobody")
    say(env, "gina")
    assert "Named tonight: gina" in env.observe(BERT)
    assert not any("tonight" in env.observe(agent) for agent in PLAYERS[2:])
    say(env, "anna")
    assert "expected one of these: cleo" in env.infos[BERT]["illegal"] and env.victim == GINA


def test_no_winner_after_the_last_day_and_wolves_win_a_tie():
    env = begun(days=1)
    say(env, *["nobody"] * 2, *["..."] * 5, *["nobody"] * 5)
    assert set(env.rewards.values()) == {0} and env.infos[ANNA]["winner"] is None
    env = begun("wolf wolf villager villager villager")
    say(env, "emil", "emil")
    assert env.infos[EMIL]["winner"] == "wolves" and [env.rewards[n] for n in PLAYERS[:3]] == [1, 1, 0]


def test_village_that_uses_announcements_wins_more_often():
    seeds = range(40)
    assert village_wins("forge/Village-v0@1", fa.Oracle(), seeds) > 0.6
    for idle in (lambda seen: "", lambda seen: seen, lambda seen: "anna"):

        class Idle(Oracle):
            def __call__(self, seen, idle=idle):
                return super().__call__(seen) if ", a wolf" in seen else idle(seen)

        assert village_wins(f"{with_oracle('forge/Village-v0', Idle)}@1", fa.Oracle(), seeds) < 0.35
        both = [fa.play("forge/Village-v0", fa.Scripted(idle), seed=seed).rewards for seed in range(20)]
        assert sum(sum(rewards.values()) for rewards in both) / 100 < 0.35


def test_levels_get_harder_for_a_village_that_doubts():
    means = check_levels(with_oracle("forge/Village-v0", Doubts), fa.Oracle(), episodes=40)
    assert means[0] > 0.55 and means[-1] < 0.45


@pytest.mark.parametrize(("role", "index"), [("wolf", 0), ("seer", 1), ("healer", 2), ("villager", 3)])
def test_player_knows_only_what_its_role_reveals(role, index):
    env = begun("wolf seer healer villager villager villager wolf", num_players=7)
    say(env, "dora", "gina", "emil")
    agent, result = PLAYERS[index], set()
    for draw in range(150):
        twin = env.fork()
        twin.swap_secrets(agent, np.random.default_rng(draw))
        assert twin.observe(agent) == env.observe(agent) and twin.instructions(agent) == env.instructions(agent)
        assert sorted(twin.roles.values()) == sorted(env.roles.values()) and twin.roles[agent] == role
        result.add(tuple(name for name in PLAYERS if twin.roles[name] == "wolf"))
    fixed = {"wolf": 1, "seer": 5, "healer": 15, "villager": 15}[role]
    assert len(result) == fixed, "the pairs that it cannot tell apart"
