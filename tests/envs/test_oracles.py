"""Oracles earn the documented rewards at every level, from their own observations only."""

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest

import forge_agents as fa
from forge_agents.bench import exploitability
from forge_agents.envs import registry
from forge_agents.rollout.players import make_player
from forge_envs.oracles import games

PAGE = (Path(__file__).parents[2] / "docs" / "built-in-environments.md").read_text().partition("## Oracles")[2]
PAGE = PAGE.partition("\n## ")[0]
PROMISED = {
    f"forge/{name}-v0": [float(figure) for figure in figures.split(", ")]
    for name, figures in re.findall(r"^\| `(\w+)` \|.*\| ([\d., -]+) \|$", PAGE, re.MULTILINE)
}
"""Mean reward by level."""
SEEDS = 6


def earned(episode):
    """Return the measure of the table: reward over maximum reward, and for Village the win rate of the village."""
    assert episode.error is None, episode.error
    if "winner" in (info := next(iter(episode.trajectories.values())).info):
        return float(info["winner"] == "village")
    return float(np.mean(list(episode.rewards.values())))


def test_the_page_names_every_oracle_and_every_level():
    ids = [id_ for id_ in registry.ids_with_oracles() if id_.startswith("forge/")]
    assert sorted(PROMISED) == ids
    assert all(len(PROMISED[id_]) in (1, len(fa.spec(id_).levels)) for id_ in ids)


@pytest.mark.parametrize("id_", [id_ for id_ in PROMISED if id_ != "forge/Repair-v0"])  # that one needs a sandbox
def test_an_oracle_keeps_its_promise_at_every_level(id_):
    """Measured over a few seeds, so within statistical error, or exactly for rewards without variance."""
    count = len(fa.spec(id_).levels)
    levels = [f"{id_}@{level}" for level in range(1, count + 1)] or [id_]
    for level, promised in zip(levels, PROMISED[id_] * (count or 1), strict=False):
        games = [fa.play(level, fa.Oracle(), seed=seed) for seed in range(SEEDS)]
        most = getattr(fa.make(level), "max_reward", None) or 1.0
        rewards = [earned(game) / most for game in games]
        # as if one game more had been won by half: six without a win prove little
        chance = 0.0 if promised == 1 else 2 * np.sqrt((np.var(rewards, ddof=1) + 0.25 / SEEDS) / SEEDS)
        assert np.mean(rewards) >= promised - chance, level
        said_again(games[0], fa.spec(level))


def said_again(episode, spec):
    """Fail if a fresh player with the same observations of one agent answers differently."""
    for agent, trajectory in episode.trajectories.items():
        player = make_player(
            fa.Oracle(), agent=agent, episode_seed=episode.seed, instructions="", engines={}, spec=spec
        )

        async def say(player=player, turns=trajectory.turns):
            return [(await player.decide(turn.observation, {})).action for turn in turns]

        assert asyncio.run(say()) == [turn.action for turn in trajectory.turns], f"{agent} of {episode.env_id}"


def test_the_oracle_of_kuhn_poker_cannot_be_exploited():
    assert exploitability("forge/KuhnPoker-v0", lambda agent, seen, legal: games.chances(seen)) < 1e-9


def test_the_oracle_of_tic_tac_toe_never_loses():
    assert games.value("." * 9) == 0
    for agent in ("player_1", "player_2"):
        other = "player_2" if agent == "player_1" else "player_1"
        episodes = [fa.play("forge/TicTacToe-v0", {agent: fa.Oracle(), other: fa.Random()}, seed=n) for n in range(12)]
        rewards = [episode.rewards[agent] for episode in episodes]
        assert min(rewards) >= 0 and sum(rewards) >= 6


_MARKS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama": '{"name"'}


@pytest.mark.parametrize("tool_format", _MARKS)
@pytest.mark.parametrize("id_", ["forge/Tables-v0@3", "forge/ServiceDesk-v0@6", "forge/Library-v0@2"])
def test_oracles_use_the_tool_format_of_their_instructions(id_, tool_format):
    games = [fa.play(id_, fa.Oracle(), seed=seed, env_args={"tool_format": tool_format}) for seed in range(4)]
    assert [earned(game) for game in games] == [1.0] * 4
    agents = [trajectory for game in games for trajectory in game.trajectories.values()]
    calls = [turn.action for agent in agents for turn in agent.turns if turn.tool_calls]
    assert calls
    assert all(text.startswith(_MARKS[tool_format]) for text in calls)


def test_service_desk_oracle_handles_order_numbers_with_rules():
    settings = {"knows_numbers": True, "rules": 4}
    games = [fa.play("forge/ServiceDesk-v0", fa.Oracle(), seed=seed, env_args=settings) for seed in range(12)]
    assert [earned(game) for game in games] == [1.0] * 12


_ODD = ["", "I do not know.", "[1, 2]", '{"a": 1}', "[[" * 2000, "sure \u2028 CALL nothing(", "Ann Lee 417 east B 3 2"]


@pytest.mark.parametrize("id_", [id_ for id_ in PROMISED if id_ != "forge/Repair-v0"])
def test_oracle_continues_next_to_players_with_odd_texts(id_):
    level = f"{id_}@2" if fa.spec(id_).levels else id_
    agents = fa.make(level).possible_agents
    for agent in agents:
        for odd in _ODD:
            team = dict.fromkeys(agents, fa.Oracle()) | {agent: fa.Scripted(lambda _, odd=odd: odd)}
            assert fa.play(level, team, seed=3).error is None, (agent, odd)


def test_oracles_ignore_facts_quoted_by_partners():
    def again(seen):
        return f"take 1 {seen}"  # says what it read, as small models do

    for level in (1, 2, 3):
        agents = fa.make(f"forge/Commons-v0@{level}").possible_agents
        team = dict.fromkeys(agents, fa.Oracle()) | {agents[-1]: fa.Scripted(again)}
        quiet = dict.fromkeys(agents, fa.Oracle()) | {agents[-1]: fa.Scripted(lambda seen: "take 1")}
        result = [fa.play(f"forge/Commons-v0@{level}", each, seed=3).rewards[agents[0]] for each in (team, quiet)]
        assert result[0] == result[1]
    rows = fa.Scripted(lambda seen: "./././. go east")
    assert fa.play("forge/TreasureHunt-v0@2", {"left": fa.Oracle(), "right": rows}, seed=3).error is None
    says = fa.Scripted(lambda seen: "I have two complaints")
    loud = {"customer": says, "agent": fa.Oracle(), "supervisor": fa.Oracle()}
    assert fa.play("forge/ServiceDesk-v0@1", loud, seed=3).error is None
