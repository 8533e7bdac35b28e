"""Dining philosophers: a team shares forks, and each member needs two of them to eat."""

from __future__ import annotations

import re

import numpy as np

from forge_agents.envs.env import Outcome, ParallelTurnEnv
from forge_envs.shared import check_ranges

_MOVE = re.compile(r"\b(?:take\s+(?:the\s+)?(left|right)|(release|wait))\b", re.IGNORECASE)


class DiningPhilosophers(ParallelTurnEnv):
    """Two to eight philosophers at a round table, after Dijkstra's problem of five, with one fork between neighbors.

    In each round all agents act simultaneously and write "take left", "take right", "release" (both forks) or "wait".
    A fork that two agents take in the same round stays on the table. An agent that has both forks eats a meal and puts
    them back. The others read the texts after the round. If every agent takes its left fork, nobody eats until one
    releases it.

    The goal of each agent is 1 to `meals` meals. All agents get the same reward at the end: the mean over agents of the
    fraction of its meals that an agent has eaten. Further meals do not count. An attempt costs nothing, so waiting
    earns 0, the minimum, and serving everyone earns 1. The game ends when all have eaten, or after `rounds` rounds.

    A text without exactly one move waits and sets ``illegal`` in infos. At the end infos contain ``eaten`` and
    ``goals`` (meals by agent), ``rounds`` (number played), ``deadlock`` (each agent holds one fork) and ``success``
    (all have eaten).

    Args:
        num_players: 2 to 8.
        meals: Largest goal of an agent, 1 to 5.
        rounds: Maximum number of rounds, 2 to 60. One meal takes at least two.
        max_message_chars: Maximum length of a text as the others read it. Longer ones are cut.
    """

    max_reward = 1.0

    def __init__(self, *, num_players: int = 3, meals: int = 1, rounds: int = 8, max_message_chars: int = 60) -> None:
        super().__init__()
        check_ranges(num_players=(num_players, 2, 8), meals=(meals, 1, 5), rounds=(rounds, 2, 60))
        check_ranges(max_message_chars=(max_message_chars, 1, None))
        self.possible_agents = tuple(f"philosopher_{number}" for number in range(num_players))
        self._meals, self._rounds, self._max_message_chars = meals, rounds, max_message_chars

    def setup(self, rng: np.random.Generator) -> None:
        goals = rng.integers(1, self._meals + 1, len(self.possible_agents)).tolist()
        self.goals = dict(zip(self.possible_agents, goals, strict=True))
        self.eaten = dict.fromkeys(self.possible_agents, 0)
        self.holders: list[str] = [""] * len(self.possible_agents)
        """Holder of each fork. Fork n is to the left of philosopher n. Empty: on the table."""
        self.round = 0
        self.last_round: list[str] = []

    def forks(self, agent: str) -> dict[str, int]:
        """Return the numbers of the left and the right fork of an agent."""
        number = self.possible_agents.index(agent)
        return {"left": number, "right": (number + 1) % len(self.possible_agents)}

    def instructions(self, agent: str) -> str:
        return (
            f"You are {agent}, one of {len(self.possible_agents)} philosophers at a round table with one fork between "
            "neighbors. Who has the left and the right fork eats and puts both back. All act at once, and a fork that "
            "two take stays on the table. Everyone shall eat all meals. Write one move: take left, take right, release "
            "or wait. The others read your text after the round."
        )

    def observe_text(self, agent: str) -> str:
        forks = (
            f"{side} fork: {'yours' if self.holders[fork] == agent else self.holders[fork] or 'free'}"
            for side, fork in self.forks(agent).items()
        )
        meals = f"You have eaten {self.eaten[agent]} of {self.goals[agent]}."
        now = f"Round {self.round + 1} of {self._rounds}. {', '.join(forks)}. {meals}"
        return "\n".join((*self.last_round, now))

    def act_all(self, actions: dict[str, str]) -> Outcome:
        moves = {agent: parse_move(text) for agent, text in actions.items()}
        wishes: dict[int, list[str]] = {}
        for agent, move in moves.items():
            if move in ("left", "right") and not self.holders[fork := self.forks(agent)[move]]:
                wishes.setdefault(fork, []).append(agent)
        releasing = {agent for agent, move in moves.items() if move == "release"}
        self.holders = ["" if holder in releasing else holder for holder in self.holders]
        for fork, agents in wishes.items():
            self.holders[fork] = agents[0] if len(agents) == 1 else ""
        self.round += 1
        self.last_round = [
            f"{agent}: {' '.join(text.split())[: self._max_message_chars]}" for agent, text in actions.items()
        ]
        for agent in actions:
            if self.holders.count(agent) == 2:
                self.eaten[agent] += 1
                self.holders = ["" if holder == agent else holder for holder in self.holders]
        fractions = [min(1.0, self.eaten[agent] / goal) for agent, goal in self.goals.items()]
        illegal = {agent: {"illegal": "not exactly one move"} for agent, move in moves.items() if not move}
        if min(fractions) < 1 and self.round < self._rounds:
            return Outcome(info=illegal)
        facts = {
            "eaten": dict(self.eaten), "goals": dict(self.goals), "rounds": self.round,
            "deadlock": sorted(self.holders) == sorted(actions), "success": min(fractions) == 1,
        }  # fmt: skip
        info = {agent: {**illegal.get(agent, {}), **facts} for agent in actions}
        return Outcome(rewards=dict.fromkeys(actions, float(np.mean(fractions))), done=True, info=info)


def parse_move(text: str) -> str:
    """Return "left", "right", "release" or "wait". Empty unless the text has exactly one move."""
    moves = {(side or word).casefold() for side, word in _MOVE.findall(text)}
    return moves.pop() if len(moves) == 1 else ""
