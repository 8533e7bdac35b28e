"""Commons: players harvest a common stock that regrows."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np

from forge_agents.envs.env import Outcome, ParallelTurnEnv
from forge_envs.shared import check_ranges

NAMES = ("ann", "ben", "cat", "dan", "eve", "fay")
"""Names of ``player_0``, ``player_1``, ... in texts."""
_TAKE = re.compile(
    r"\btake[\s:*_`\"\u201c\u201d]{1,9}([0-9]{1,3}(?:,[0-9]{3}){1,2}|[0-9]{1,9})(?![\d_]|[.,][0-9]|\s?[%/])",
    re.IGNORECASE,
)
_SUCCESS = 0.8


class Commons(ParallelTurnEnv):
    """Two to six players with a common lake, the dilemma of Hardin, "The Tragedy of the Commons" (1968).

    The lake starts full. Its capacity differs between episodes. In each season all players act simultaneously and write
    how many fish they take, such as "take 12". The others read the text after the season, with the catches. If the
    requests exceed the stock, each player gets the same fraction of its request, rounded down, and the lake is empty.
    The remaining stock is multiplied by `regrowth`, rounded down, up to the capacity. An empty lake ends the game.

    Each player is rewarded at the end for its own catch, on a linear scale: 0 for an equal share of the first stock (or
    less), and 1 for an equal share of the best total of all seasons. One player can get more at the others' expense.
    The mean over players is at most 1, unless it regrows so little that to take all at once pays more. The optimum
    leaves ``capacity / regrowth`` in each season and nothing in the last.

    A text without exactly one number to take takes nothing and sets ``illegal`` in infos. At the end infos contain
    ``catch`` (by agent), ``best`` (optimal total), ``seasons`` (number played) and ``success`` (a reward of at least
    0.8).

    Args:
        num_players: 2 to 6.
        regrowth: Growth factor, above 1 and at most 4.
        seasons: Maximum number of seasons, 2 to 20.
        max_message_chars: Maximum length of a text as the others read it. Longer ones are cut.
    """

    def __init__(
        self,
        *,
        num_players: int = 3,
        regrowth: float = 2.0,
        seasons: int = 8,
        max_message_chars: int = 120,
    ) -> None:
        super().__init__()
        check_ranges(num_players=(num_players, 2, len(NAMES)), seasons=(seasons, 2, 20))
        check_ranges(max_message_chars=(max_message_chars, 1, None))
        if not 1 < regrowth <= 4:
            raise ValueError(f"regrowth={regrowth} must be above 1 and at most 4")
        self.possible_agents = tuple(f"player_{number}" for number in range(num_players))
        self._names = dict(zip(self.possible_agents, NAMES, strict=False))
        self._regrowth, self._seasons, self._max_message_chars = regrowth, seasons, max_message_chars

    def setup(self, rng: np.random.Generator) -> None:
        # over two orders of magnitude, so that no fixed number is good in many episodes
        self.holds = round(10 ** float(rng.uniform(1, 3))) * len(self.possible_agents)
        self.stock = self.holds
        self.season = 0
        self.caught = dict.fromkeys(self.possible_agents, 0)
        self.last_season: list[str] = []

    @property
    def best(self) -> float:
        """Optimal total catch of an episode."""
        # Leave only as many fish as can regrow to the capacity, and none in the last season.
        return (self._seasons - 1) * self.holds * (1 - 1 / self._regrowth) + self.holds

    def instructions(self, agent: str) -> str:
        return (
            f"You are {self._names[agent]}. {len(self.possible_agents)} seats fish in one lake and each wants much for "
            f"itself. Each season all take fish at once; then what is left grows {self._regrowth:g}-fold, up to what "
            "the lake holds. An empty lake stays empty. You may talk in the same text; the others read it after the "
            "season. Write how many you take, such as: take 5"
        )

    def observe_text(self, agent: str) -> str:
        left = self._seasons - self.season
        lake = f"The lake has {self.stock} fish and holds {self.holds} ({len(self.caught)} seats)."
        return "\n".join((*self.last_season, f"Seasons left: {left}. {lake} You have {self.caught[agent]}."))

    def act_all(self, actions: dict[str, str]) -> Outcome:
        requests = {agent: parse_request(text) for agent, text in actions.items()}
        total = sum(number or 0 for number in requests.values())
        fraction = min(Fraction(1), Fraction(self.stock, total or 1))
        catches = {agent: int((number or 0) * fraction) for agent, number in requests.items()}
        left = max(0, self.stock - total)
        self.stock = min(self.holds, int(left * Fraction(str(self._regrowth))))  # exact: 1.4 times 45 is 63
        self.season += 1
        self.last_season = [
            f"{self._names[agent]} took {catches[agent]} and said: {' '.join(text.split())[: self._max_message_chars]}"
            for agent, text in actions.items()
        ]
        for agent, number in catches.items():
            self.caught[agent] += number
        illegal = {"illegal": "not exactly one number to take"}
        info: dict[str, dict[str, Any]] = {a: illegal if number is None else {} for a, number in requests.items()}
        if self.stock and self.season < self._seasons:
            return Outcome(info=info)
        zero, best = self.holds / len(self.caught), self.best / len(self.caught)
        rewards = {agent: max(0.0, (caught - zero) / (best - zero)) for agent, caught in self.caught.items()}
        facts = {"catch": dict(self.caught), "best": self.best, "seasons": self.season, "forfeits": []}
        info = {agent: {**info[agent], **facts, "success": reward >= _SUCCESS} for agent, reward in rewards.items()}
        return Outcome(rewards=rewards, done=True, info=info)


def parse_request(text: str) -> int | None:
    """Return the number of fish that a text takes. None unless there is exactly one."""
    numbers = set(_TAKE.findall(text))
    return int(numbers.pop().replace(",", "")) if len(numbers) == 1 else None
