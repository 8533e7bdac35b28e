"""The league of `self_play.py` with a table of numbers in the place of the model: what a model's share in it is.

A softmax over two actions at each of the 12 information sets of Kuhn poker meets itself and its past; snapshots,
matchmaking, results and credit are those that models have. Exploitability is exact: 0.458 chips a game for even play.

    python examples/self_play_table.py [--seeds 0 1 2] [--steps 100] [--out runs/self_play_table]

takes half a minute and writes ``self_play_table.png``.
"""

import argparse
import asyncio
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from self_play import CREDIT, GAME, draw, league_of

import forge_agents as fa
from forge_agents.bench import GameTree, exploitability
from forge_agents.rollout import Rollout, all_or_first_error
from forge_trainers.rl.credit import Scored
from forge_trainers.rl.rewards import env_reward
from forge_trainers.rl.scoring import score
from forge_trainers.selfplay.league import draw_matches, results_of
from forge_trainers.selfplay.matchmaking import Standings

AGENTS = ("player_0", "player_1")
EVERY = 10


class Tabular:
    """A softmax over two actions at every information set, in the place of a model."""

    def __init__(self, logits=None):
        self.logits = logits or {}

    def chances(self, agent, observation, legal):
        """A strategy, as `exploitability` takes it."""
        z = self.logits.setdefault(observation, np.zeros(len(legal)))
        chances = np.exp(z - z.max())
        return dict(zip(legal, (chances / chances.sum()).tolist(), strict=True))

    def copy(self):
        return Tabular({seen: z.copy() for seen, z in self.logits.items()})

    def player(self, name, rng):
        """A policy for a seat that plays by the table as it is when it is asked."""

        def act(observation, agent):
            chances = self.chances(agent, observation, legal_actions(observation))
            return str(rng.choice(list(chances), p=list(chances.values())))

        return fa.Scripted(act, name=name)

    def learn(self, turns, *, lr, entropy):
        """One step of policy gradient from pairs of a turn and its advantage, with a bonus for entropy."""
        gradient = {seen: np.zeros_like(z) for seen, z in self.logits.items()}
        for turn, advantage in turns:
            legal = legal_actions(turn.observation)
            chances = np.array(list(self.chances(turn.agent, turn.observation, legal).values()))
            gradient[turn.observation] += advantage * ((np.array(legal) == turn.action) - chances) / len(turns)
        for seen, z in self.logits.items():
            chances = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
            surprise = -np.log(chances)
            self.logits[seen] = z + lr * (gradient[seen] + entropy * chances * (surprise - chances @ surprise))


def legal_actions(observation):
    return ("call", "fold") if "call or fold" in observation else ("check", "bet")


async def train_table(seed, steps, *, lr=6.0, entropy=0.01, group_count=8, group_size=8):
    """The league with a table for a policy. Returns rows of step and exploitability, and the standings."""
    league = league_of(fa.Policy("none", name="player"))
    rng = np.random.default_rng(seed)
    tree, table = GameTree(GAME), Tabular()
    pool = {league.start: table.copy()}
    standings = Standings(start=league.start, pool=league.pool)
    curve = [[0, exploitability(tree, table.chances)]]
    for step in range(steps):
        players = {name: player.player(name, rng) for name, player in {**pool, "player": table}.items()}
        matches = draw_matches(standings, league, AGENTS, group_count, key=(seed, step, 0))
        groups = await all_or_first_error(
            Rollout(
                make_env=lambda: fa.make(GAME),
                env_id=GAME,
                policies={agent: players[player] for agent, player in match.players(AGENTS, "player").items()},
            ).group(int(rng.integers(2**31)), group_size)
            for match in matches
        )
        scored = await score(groups, env_reward, timeout_s=60)
        table.learn(turns_with_advantages(scored), lr=lr * (1 - step / steps), entropy=entropy)
        standings.record(results_of(groups, "player"))
        if (step + 1) % league.snapshot_every == 0:
            name = league.snapshot_name(step + 1)
            pool[name] = table.copy()
            for removed in standings.add(name, step + 1):
                del pool[removed.name]
        if (step + 1) % EVERY == 0:
            curve.append([step + 1, exploitability(tree, table.chances)])
    return curve, standings


def turns_with_advantages(groups):
    """Return the policy's turns, each with its advantage, without the opponents' turns."""
    trajectories, scored = [], []
    for number, group in enumerate(groups):
        for agent, rewards in group.rewards.items():
            for index, episode in enumerate(group.episodes):
                trajectory = episode.trajectories[agent]
                if trajectory.policy == "player" and trajectory.turns:
                    trajectories.append(trajectory)
                    reward, tokens = float(rewards[index]), [1] * len(trajectory.turns)
                    scored.append(Scored(seed=number, role=agent, reward=reward, response_tokens=tokens))
    zeros = np.zeros(3)
    return [
        pair
        for trajectory, advantages in zip(trajectories, CREDIT.assign(scored), strict=True)
        for pair in zip(trajectory.turns, zeros if advantages is None else advantages, strict=False)
    ]


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/self_play_table"), help="folder of the picture")
    args = parser.parse_args(words)
    curves = [asyncio.run(train_table(seed, args.steps))[0] for seed in args.seeds]
    table = Table("step", *(f"seed {seed}" for seed in args.seeds), title="exploitability, chips a game")
    for points in zip(*curves, strict=True):
        table.add_row(str(points[0][0]), *(f"{value:.3f}" for _, value in points))
    Console().print(table)
    title = "Self-play with a league in Kuhn poker, a table for a policy"
    draw({"league": curves}, args.out / "self_play_table.png", title)


if __name__ == "__main__":
    main()
