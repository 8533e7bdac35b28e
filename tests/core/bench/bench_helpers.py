"""Players, environments and short calls that the tests of benchmarks share."""

import asyncio
import contextlib
import json
from dataclasses import replace

from plain_env import Plain

import forge_agents as fa
from forge_agents.rollout.policy_engine import PolicyEngine

KUHN, SORT, TOE = "forge/KuhnPoker-v0", "forge/AlphabetSort-v0", "forge/TicTacToe-v0"


def passive(observation):
    """Kuhn poker player that never bets and always calls."""
    return "call" if "call" in observation else "check"


def bold(observation):
    return "call" if "call" in observation else "bet"


def first_free(observation):
    """Tic-tac-toe player that takes the first free square."""
    return observation.split("Free: ")[1][0]


PASSIVE, BOLD, FIRST_FREE = map(fa.Scripted, (passive, bold, first_free))


def play(folder, players=None, suite=KUHN, **options):
    """Benchmark without a progress bar: six episodes of Kuhn poker by default."""
    players = players or {"passive": PASSIVE, "bold": BOLD, "random": fa.Random()}
    return fa.benchmark(players, suite, out_dir=folder, **{"episodes": 6, "progress": False, **options})


def fake_fleet(make_engine, renderer, starts=None):
    """Return a replacement of `_fleet` whose engines are ``make_engine(name)``. `starts` records the models."""

    @contextlib.asynccontextmanager
    async def fleet(models, config):
        if starts is not None:
            starts.append(set(models))
        yield {name: PolicyEngine(make_engine(name), renderer) for name in models}

    return fleet


def exported(run, *models, **settings):
    """Make folders of models in the folder of a run, and write its settings if any are given."""
    for model in models:
        (run / model).mkdir(parents=True, exist_ok=True)
        (run / model / "config.json").write_text("{}")
    if settings:
        (run / "config.yaml").write_text(json.dumps(settings))
    return str(run)


class WordGame(Plain):
    """Each agent says a word, and ``reward(words)`` pays all of them."""

    possible_agents = ("ann", "ben")

    def setup(self, rng):
        self.words = []

    def reward(self, words):
        return 0.0

    def act(self, agent, action):
        self.words.append(action)
        if len(self.words) < len(self.possible_agents):
            return fa.Outcome()
        return fa.Outcome(rewards=dict.fromkeys(self.agents, self.reward(tuple(self.words))), done=True)


class ZeroSum(WordGame):
    """Both players choose one of `sides` without seeing the other's choice. player_0 wins if they agree."""

    possible_agents = ("player_0", "player_1")
    sides = ("heads", "help")

    def legal_actions(self, agent):
        return self.sides

    def openings(self):
        game = type(self)()
        game.reset(seed=0)
        return [(1.0, game)]

    def lead(self):
        """Return the reward of player_0."""
        return 1.0 if len(set(self.words)) == 1 else -1.0

    def act(self, agent, action):
        outcome = super().act(agent, action)
        rewards = {"player_0": self.lead(), "player_1": -self.lead()} if outcome.done else {}
        return replace(outcome, rewards=rewards)


def run_in_loop(function):
    """Call a function inside a running event loop, as a notebook does."""

    async def cell():
        return function()

    return asyncio.run(cell())
