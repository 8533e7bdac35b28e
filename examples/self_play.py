"""Self-play in Kuhn poker: does a policy that only meets itself and its past get hard to exploit?

A 135M model learns which answers there are, each alike, and then plays a game of three cards against itself and
snapshots of itself, drawn by prioritised fictitious self-play. How much the best response wins from it is computed for
the whole game from its answers at every information set: 0.458 chips a game for even play, 0 at an equilibrium. Beside
it a control whose learning rate is 0, and a table of numbers in the place of the model, on the same league, matchmaking
and credit.

    python examples/self_play.py [--seeds 0 1 2] [--steps 40] [--out runs/self-play]
    python examples/self_play.py --tabular

The first trains a language model, ten minutes a run on two CPU cores, the second takes half a minute. Both write
``self_play.png`` or ``tabular.png``. Finished runs are not repeated, and an interrupted one goes on.
"""

import argparse
import asyncio
import json
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import t

import forge_agents as fa
from forge_agents.bench import GameTree, exploitability, uniform
from forge_agents.rollout import Rollout, all_or_first_error
from forge_trainers.credit import Scored
from forge_trainers.judging import env_reward, judge
from forge_trainers.league import draw_matches, results_of
from forge_trainers.matchmaking import Standings

GAME = "forge/KuhnPoker-v0"
AGENTS = ("p0", "p1")
CREDIT = fa.Credit(by=("seed", "role"), scale="none")
SAMPLES = 200
EVERY = 10


def league_of(policy):
    """The league of both experiments."""
    return fa.League(policy, snapshot_every=5, opponents="pfsp", pool=8, self_play=0.35)


def answers():
    """Conversations that end in a legal action: every action at every information set once."""
    tree = GameTree(GAME)
    rows = []
    for place in tree.places:
        prompt = [{"role": "system", "content": tree.instructions[place.agent]}]
        for seen, action in place.past:
            prompt += [{"role": "user", "content": seen}, {"role": "assistant", "content": action}]
        prompt.append({"role": "user", "content": place.observation})
        rows += [{"prompt": prompt, "completion": action} for action in place.legal]
    return rows


def taught(folder):
    """The folder of a model that has learned to answer so."""
    export = folder / "export"
    if not export.exists():
        config = fa.SFTConfig(batch_size=24, learner=fa.LearnerConfig(lr=5e-5, warmup_steps=3))
        with fa.SFTTrainer(fa.Policy("smollm2-135m-instruct", name="player"), config, out_dir=folder) as trainer:
            trainer.fit(answers(), steps=20)
    return export


def train(model, seed, steps, lr, folder):
    """One run with a model. Returns rows of step, exploitability, illegal answers and reward against the start."""
    saved = folder / "result.json"
    if saved.exists():
        return json.loads(saved.read_text())
    player = fa.Policy(str(model), name="player", sampling=fa.Sampling(temperature=1.0, max_tokens=8))
    config = fa.GRPOConfig(
        seed=seed,
        credit=CREDIT,
        learner=fa.LearnerConfig(lr=lr, warmup_steps=2, lr_decay="linear", entropy_coef=0.05),
        engine=fa.EngineConfig(max_model_len=384),
        eval_every=EVERY,
        eval_episodes=64,
        exploitability_samples=SAMPLES,
        checkpoint_every=EVERY,
    )
    with fa.GRPOTrainer(league_of(player), config=config, out_dir=folder) as trainer:
        rows = trainer.fit(GAME, steps=steps).metrics
    names = ("eval/exploitability", "eval/illegal", "eval/reward")
    curve = [[row["step"] + 1, *(row[name] for name in names)] for row in rows if names[0] in row]
    saved.write_text(json.dumps(curve))
    return curve


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


async def train_table(seed, steps, *, lr=6.0, entropy=0.01, groups=8, siblings=8):
    """The league with a table for a policy. Returns rows of step and exploitability, and the standings."""
    league = league_of(fa.Policy("none", name="player"))
    rng = np.random.default_rng(seed)
    tree, table = GameTree(GAME), Tabular()
    pool = {league.start: table.copy()}
    standings = Standings(start=league.start, pool=league.pool)
    curve = [[0, exploitability(tree, table.chances)]]
    for step in range(steps):
        players = {name: one.player(name, rng) for name, one in {**pool, "player": table}.items()}
        matches = draw_matches(standings, league, AGENTS, groups, key=(seed, step, 0))
        played = await all_or_first_error(
            Rollout(
                make_env=lambda: fa.make(GAME),
                env_id=GAME,
                seats={agent: players[name] for agent, name in match.players(AGENTS, "player").items()},
            ).group(int(rng.integers(2**31)), siblings)
            for match in matches
        )
        judged = await judge(played, env_reward, timeout_s=60)
        table.learn(lessons(judged), lr=lr * (1 - step / steps), entropy=entropy)
        standings.record(results_of(played, "player"))
        if (step + 1) % league.snapshot_every == 0:
            name = league.snapshot_name(step + 1)
            pool[name] = table.copy()
            for left in standings.add(name, step + 1):
                del pool[left.name]
        if (step + 1) % EVERY == 0:
            curve.append([step + 1, exploitability(tree, table.chances)])
    return curve, standings


def lessons(judged):
    """The policy's turns, each with its advantage; what opponents did is left out."""
    own, scored = [], []
    for number, item in enumerate(judged):
        for agent in item.rewards:
            for at, episode in enumerate(item.group.episodes):
                trajectory = episode.trajectories[agent]
                if trajectory.policy == "player" and trajectory.turns:
                    own.append(trajectory)
                    reward, tokens = float(item.rewards[agent][at]), [1] * len(trajectory.turns)
                    scored.append(Scored(seed=number, role=agent, reward=reward, response_tokens=tokens))
    advantages = CREDIT.assign(scored)
    zeros = np.zeros(3)
    return [
        pair
        for one, given in zip(own, advantages, strict=True)
        for pair in zip(one.turns, zeros if given is None else given, strict=False)
    ]


def mean_and_interval(curves):
    """Mean over seeds at each step, and the half-width of its 95 % interval by Student's t."""
    values = np.array(curves)[:, :, 1]
    if len(values) < 2:
        return values.mean(0), np.zeros(values.shape[1])
    return values.mean(0), t.ppf(0.975, len(values) - 1) * values.std(0, ddof=1) / np.sqrt(len(values))


def draw(arms, target, title):
    """Exploitability by step: thin lines are seeds, thick ones their mean with its interval."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    even = exploitability(GAME, uniform)
    axes.axhline(even, color="grey", linestyle="--", label="even play")
    for number, (label, curves) in enumerate(arms.items()):
        for curve in curves:
            axes.plot(*np.array(curve)[:, :2].T, color=f"C{number}", alpha=0.3, linewidth=1)
        mean, width = mean_and_interval(curves)
        steps = np.array(curves[0])[:, 0]
        axes.plot(steps, mean, color=f"C{number}", marker="o", label=label)
        axes.fill_between(steps, mean - width, mean + width, color=f"C{number}", alpha=0.15)
    axes.set(xlabel="step", ylabel="exploitability, chips a game", title=title)
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.grid(alpha=0.3)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40, help="optimiser steps of each run")
    parser.add_argument("--lr", type=float, default=5e-6, help="learning rate of the model")
    parser.add_argument("--control_steps", type=int, default=20, help="steps with learning rate 0, on the first seed")
    parser.add_argument("--tabular", action="store_true", help="a table of numbers in the place of the model")
    parser.add_argument("--out", type=Path, default=Path("runs/self-play"), help="folder of the runs")
    asked = parser.parse_args()
    console = Console()
    if asked.tabular:
        arms = {"league": [asyncio.run(train_table(seed, 100))[0] for seed in asked.seeds]}
        target, title = asked.out / "tabular.png", "Self-play with a league, a table for a policy"
    else:
        model, out = taught(asked.out / "taught"), asked.out
        arms = {
            "league": [train(model, seed, asked.steps, asked.lr, out / f"league-{seed}") for seed in asked.seeds],
            "learning rate 0": [train(model, asked.seeds[0], asked.control_steps, 0.0, out / "control")],
        }
        target, title = asked.out / "self_play.png", "Self-play with a league, SmolLM2-135M-Instruct"
    more = () if asked.tabular else ("illegal answers", "reward against the start")
    table = Table("run", "step", "exploitability", *more)
    for label, curves in arms.items():
        for seed, curve in zip(asked.seeds, curves, strict=False):
            for row in (curve[0], curve[len(curve) // 2], curve[-1]):
                table.add_row(f"{label}, seed {seed}", str(row[0]), *(f"{value:.3f}" for value in row[1:]))
    console.print(table)
    draw(arms, target, title)
    console.print(f"plot {target}")


if __name__ == "__main__":
    main()
