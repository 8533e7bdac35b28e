"""One role captures a policy that two roles share; the role guard announces it, and ``balance_roles`` prevents it.

    python examples/role_guard.py [--seeds 0 1 2] [--steps 150]

The writer writes 40 tokens and is paid for each "filler" token, and in every fourth place for a "stop" token. The
answerer writes one token and is paid for the right one of four answers. A small softmax policy plays both roles. Its
logits are the sum of weights that the roles share and weights of the role's place or question. Advantages, measures and
warnings are those of `fa.GRPOTrainer`. Only the model is replaced, so that a run takes seconds. The control has lr=0.
The script prints the answerer's reward before and after training, the step of the first warning, and the step
from which on the answerer's mean reward of five steps stays below half of its start (collapse).
"""

import argparse
import json
from pathlib import Path

import numpy as np

import forge_agents as fa
from forge_agents.types import Episode, EpisodeGroup, Trajectory, Turn
from forge_trainers.rl.role_guard import RoleGuard, role_metrics
from forge_trainers.rl.samples import compute_advantages

FILLER, STOP, ANSWERS = 0, 1, 4
TOKENS, PLACES, LENGTH = 2 + ANSWERS, 4, 40
GROUPS, GROUP_SIZE = 16, 8


class SharedPolicy:
    """Softmax over 6 tokens. Logits are weights of all roles plus weights of a role's place or question."""

    def __init__(self):
        self.shared = np.zeros(TOKENS)
        self.own = {"writer": np.zeros((PLACES, TOKENS)), "answerer": np.zeros((ANSWERS, TOKENS))}

    def logprobs(self, role, places):
        """Log-probabilities ``[n, TOKENS]`` at n places."""
        logits = self.shared + self.own[role][places]
        logits -= logits.max(axis=1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def learn(self, groups, lr):
        """One step of gradient descent on the token-normalized policy loss, as ``loss="dapo"`` has it."""
        gradient = {"shared": np.zeros(TOKENS), **{role: np.zeros_like(own) for role, own in self.own.items()}}
        num_tokens = 0
        for group in groups:
            for role, rows in group.advantages.items():
                for episode, row in zip(group.episodes, rows, strict=True):
                    if row is None:
                        continue
                    turn = episode.trajectories[role].turns[0]
                    tokens, places = np.array(turn.response_ids), np.array(turn.prompt_ids)
                    step = row[0] * (np.eye(TOKENS)[tokens] - np.exp(self.logprobs(role, places)))
                    gradient["shared"] += step.sum(axis=0)
                    np.add.at(gradient[role], places, step)
                    num_tokens += len(tokens)
        if num_tokens:
            self.shared += lr * gradient["shared"] / num_tokens
            for role in self.own:
                self.own[role] += lr * gradient[role] / num_tokens


def trajectory(policy, role, places, pay, rng):
    """Sample a token at each place."""
    logprobs = policy.logprobs(role, places)
    tokens = (np.exp(logprobs).cumsum(axis=1) < rng.random((len(places), 1))).sum(axis=1)
    tokens = np.minimum(tokens, TOKENS - 1)
    turn = Turn(
        agent=role,
        index=int(role == "answerer"),
        observation="",
        action="",
        reward=float(pay(tokens)),
        policy="team",
        prompt_ids=tuple(places),
        response_ids=tuple(tokens.tolist()),
        logprobs=tuple(logprobs[range(len(tokens)), tokens].tolist()),
    )
    return Trajectory(agent=role, policy="team", turns=(turn,))


def collect(policy, rng):
    """The scored groups of a step."""
    groups = []
    places = np.arange(LENGTH) % PLACES
    for seed in range(GROUPS):
        question = int(rng.integers(ANSWERS))
        episodes = []
        for _ in range(GROUP_SIZE):
            both = (
                trajectory(policy, "writer", places, lambda t: np.mean(t == np.where(places == 0, STOP, FILLER)), rng),
                trajectory(policy, "answerer", [question], lambda t, q=question: t[0] == 2 + q, rng),
            )
            episodes.append(Episode(env_id="guard", seed=seed, trajectories={each.agent: each for each in both}))
        rewards = {role: np.array([e.rewards[role] for e in episodes], np.float32) for role in policy.own}
        groups.append(EpisodeGroup(env_id="guard", seed=seed, episodes=tuple(episodes), rewards=rewards))
    return groups


def train(seed, *, credit, lr, steps):
    """Train a new policy. Returns the metrics by step, and the warnings as pairs of step and text."""
    rng, policy, guard, rows, warnings = np.random.default_rng(seed), SharedPolicy(), RoleGuard(), [], []
    for step in range(1, steps + 1):
        groups = compute_advantages(collect(policy, rng), credit, {"team"})
        policy.learn(groups, lr)
        row = {f"reward/{role}": float(np.mean([g.rewards[role] for g in groups])) for role in policy.own}
        row |= role_metrics(groups, {"team"})
        rows.append(row)
        warnings += [(step, text) for text in guard.after(row, groups, {"guard": 1.0})]
    return rows, warnings


def collapse(rewards, start):
    """First step from which on the mean reward of five steps stays below half of its start, or None."""
    means = np.convolve(rewards, np.ones(5) / 5, "valid")
    above = np.flatnonzero(means >= start / 2)
    return None if above[-1] == len(means) - 1 else int(above[-1]) + 6


def main(words=None):
    """Train every arm with every seed, print a table and write ``role_guard.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--out", type=Path, help="JSON file of all curves")
    options = parser.parse_args(words)
    arms = {
        "shared": (fa.Credit(), options.lr),
        "balanced": (fa.Credit(balance_roles=True), options.lr),
        "control": (fa.Credit(), 0.0),
    }
    results = []
    for seed in options.seeds:
        for arm, (credit, lr) in arms.items():
            rows, warnings = train(seed, credit=credit, lr=lr, steps=options.steps)
            rewards = [row["reward/answerer"] for row in rows]
            before, after = float(np.mean(rewards[:5])), float(np.mean(rewards[-5:]))
            result = {"seed": seed, "arm": arm, "before": before, "after": after, "curve": rows}
            result |= {"warned": warnings[0][0] if warnings else None, "collapsed": collapse(rewards, before)}
            results.append(result)
            print(
                f"seed {seed} {arm:9} answerer {before:.3f} -> {after:.3f}  writer {rows[-1]['reward/writer']:.3f}  "
                f"first warning {result['warned']}  collapse {result['collapsed']}"
            )
            for step, text in warnings:
                print(f"  step {step}: {text}")
    if options.out:
        options.out.write_text(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
