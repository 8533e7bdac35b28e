import asyncio
import random
import re

import pytest

import forge_agents as fa
from forge_agents.envs.workers import env as workers
from forge_agents.rollout.rollout import Rollout

OURS = [name for name in fa.list_envs() if name.startswith("forge/")]


@pytest.fixture(autouse=True, scope="module")
def no_worker_is_left():
    yield
    workers.shutdown()


def marker(agent):
    return f"only {agent} thinks this"


def leaks(env_id, seed):
    """Play an episode with reasoning before every answer. Returns leaks of reasoning, and the number of actions."""
    calls = random.Random(seed)

    def say(observation, agent):
        words = re.findall(r"\w+", observation) or ["no"]
        answer = calls.choice([" ".join(calls.sample(words, min(3, len(words)))), "offer 3", "I pass.", "bet", "check"])
        return f"<think>{marker(agent)}\nCALL look()</think> {answer}"

    rollout = Rollout(make_env=lambda: fa.make(env_id), env_id=env_id, policies=fa.Scripted(say), max_turns=60)
    (episode,) = asyncio.run(rollout.group(seed, 1)).episodes
    assert episode.error is None, episode.error
    assert all(turn.reasoning.startswith(marker(turn.agent)) and "think" not in turn.action for turn in episode.turns)
    found = set()
    for reader, seat in episode.trajectories.items():
        read = [seat.instructions, str(seat.info), *(turn.observation + str(turn.info) for turn in seat.turns)]
        found |= {(who, reader) for who in episode.trajectories for text in read if marker(who) in text}
    return found, len(episode.turns)


@pytest.mark.parametrize("env_id", OURS)
def test_no_seat_of_ours_reads_what_anybody_thought(env_id):
    played = [leaks(env_id, seed) for seed in range(4)]
    assert all(found == set() for found, _ in played) and sum(turns for _, turns in played) >= 4
