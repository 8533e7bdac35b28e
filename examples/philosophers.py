"""Dining philosophers learn to take turns: a table as the policy, with and without a curriculum.

    python examples/philosophers.py [--seeds 0 1 2] [--steps 150] [--lr 6]

The table has a softmax over the four moves for each agent, round, state of both forks, and whether the agent has eaten
enough. GRPO's advantages train it. The arms practice levels 1 to 6 by `fa.Curriculum`, level 6 alone, or nothing. The
script prints the mean reward at level 6 on held-out seeds before and after training.
"""

import argparse
import re
from collections import defaultdict

import numpy as np

import forge_agents as fa
from forge_agents.types import Episode, EpisodeGroup, Trajectory
from forge_trainers.rl.credit import Scored
from forge_trainers.rl.curriculum import Progress

GAME = "forge/DiningPhilosophers-v0"
LEVELS = [f"{GAME}@{level}" for level in (1, 2, 3, 4, 5, 6)]
MOVES = ("take left", "take right", "release", "wait")
GROUPS, GROUP_SIZE = 8, 8
_SEEN = re.compile(r"Round (\d+) of \d+\. left fork: (\S+), right fork: (\S+)\. You have eaten (\d+) of (\d+)\.$")


def state(agent, observation):
    """The row of the table for an observation."""
    number, left, right, eaten, goal = _SEEN.search(observation).groups()
    forks = tuple(fork if fork in ("free", "yours") else "taken" for fork in (left, right))
    return agent, int(number), *forks, int(eaten) >= int(goal)


def play(env, table, seed, rng):
    """Play an episode. Returns the reward, and for each agent its states, moves and probabilities."""
    seen, _ = env.reset(seed=seed)
    turns = {agent: [] for agent in env.possible_agents}
    while env.agents:
        actions = {}
        for agent in env.agents:
            row = state(agent, seen[agent])
            weights = np.exp(table[row] - table[row].max())
            probabilities = weights / weights.sum()
            move = int(np.searchsorted(probabilities.cumsum(), rng.random() * 0.999999))
            turns[agent].append((row, move, probabilities))
            actions[agent] = MOVES[move]
        seen, rewards, *_ = env.step(actions)
    return float(np.mean([*rewards.values()])), turns


def learn(table, episodes, lr):
    """One step on the advantages of ``fa.Credit()``. `episodes` has the level, group, reward and turns of each."""
    scored, turns = [], []
    for level, group, reward, by_agent in episodes:
        for agent, each in by_agent.items():
            tokens = [1] * len(each)
            scored.append(Scored(group=group, role=f"{level}/{agent}", reward=reward, response_tokens=tokens))
            turns.append(each)
    steps = defaultdict(lambda: np.zeros(len(MOVES)))
    for advantages, each in zip(fa.Credit().assign(scored), turns, strict=True):
        for advantage, (row, move, probabilities) in zip(() if advantages is None else advantages, each, strict=False):
            steps[row] += advantage * (np.eye(len(MOVES))[move] - probabilities)
    for row, step in steps.items():
        table[row] += lr * step / len(episodes)


def train(seed, *, levels, lr, steps):
    """Train a table. Returns the mean reward at the last level before and after."""
    rng, table = np.random.default_rng(seed), defaultdict(lambda: np.zeros(len(MOVES)))
    envs = {level: fa.make(level) for level in LEVELS}
    curriculum, progress = fa.Curriculum(LEVELS), Progress()

    def held_out():
        return float(np.mean([play(envs[LEVELS[-1]], table, 10**6 + n, rng)[0] for n in range(64)]))

    before = held_out()
    for step in range(steps):
        shares = progress.shares(curriculum) if len(levels) > 1 else [1.0]
        episodes, groups = [], []
        for number in range(GROUPS):
            level, task = levels[int(rng.choice(len(levels), p=shares))], step * GROUPS + number
            played = [(level, task, *play(envs[level], table, task, rng)) for _ in range(GROUP_SIZE)]
            episodes += played
            rewards = np.array([reward for _, _, reward, _ in played], np.float32)
            groups.append(recorded(level, task, rewards))
        progress.record(curriculum, groups, {"table"}, dict.fromkeys(LEVELS, 1.0))
        if lr:
            learn(table, episodes, lr)
    return before, held_out()


def recorded(level, seed, rewards):
    """A group as the curriculum reads it."""
    one = {"team": Trajectory(agent="team", policy="table", turns=())}
    episodes = tuple(Episode(env_id=level, seed=seed, trajectories=one) for _ in rewards)
    return EpisodeGroup(env_id=level, seed=seed, episodes=episodes, rewards={"team": rewards})


def main(words=None):
    """Train every arm with every seed, and print the rewards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=6.0)
    options = parser.parse_args(words)
    arms = {"curriculum": (LEVELS, options.lr), "level 6": (LEVELS[-1:], options.lr), "control": (LEVELS[-1:], 0.0)}
    for seed in options.seeds:
        for arm, (levels, lr) in arms.items():
            before, after = train(seed, levels=levels, lr=lr, steps=options.steps if lr else 1)
            print(f"seed {seed} {arm:10} {before:.3f} -> {after:.3f}", flush=True)


if __name__ == "__main__":
    main()
