"""Commons: a stock that grows back what is left of it, and seats that each take from it at the same time.

In: "take 12" and talk, in one text. Out: each seat's own gain, measured by the best that all could have. Waits for
nothing.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np

from forge_agents.envs.env import Outcome, ParallelTurnEnv

NAMES = ("ann", "ben", "cat", "dan", "eve", "fay")
"""What the texts call ``player_0``, ``player_1``, ..."""
_TAKE = re.compile(
    r"\btake[\s:*_`\"\u201c\u201d]{1,9}([0-9]{1,3}(?:,[0-9]{3}){1,2}|[0-9]{1,9})(?![\d_]|[.,][0-9]|\s?[%/])",
    re.IGNORECASE,
)
_SUCCESS = 0.8


class Commons(ParallelTurnEnv):
    """Two to six seats with one stock; the dilemma of Hardin, "The Tragedy of the Commons" (1968).

    The lake is full at first, with as many fish as it can hold, which is another number in every episode. In each
    season all seats say at once how much they take: "take 12" somewhere in the text, which the others read after the
    season, cut to `max_message_chars`, with what each took. If they ask for more than there is, everybody gets the same
    share of what it asked for, rounded down, and the lake is empty. What is left in the lake is multiplied by
    `regrowth`, rounded down, up to what it can hold. An empty lake ends the game.

    Rewards come at the end, each seat's for its own catch: 0 for no more than a share of the first stock, which all get
    who empty the lake at once, and 1 for an equal share of the best that all could take together over all seasons; in
    between and above it is linear, and never negative. So the mean over seats is at most 1, while one seat may get more
    at the others' cost. The best is to leave ``hold / regrowth`` in the lake each season and nothing in the last.

    A text without exactly one number to take takes nothing, and infos say so under ``illegal``. At the end infos hold
    ``catch`` by seat, ``best`` (of all seats together), ``seasons`` played, and ``success``: a reward of at least 0.8.

    Args:
        num_players: 2 to 6.
        regrowth: Above 1, to 4.
        seasons: 2 to 20.
        max_message_chars: Longer texts are cut for the others.
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
        counts_fit = 2 <= num_players <= len(NAMES) and 2 <= seasons <= 20 and max_message_chars >= 1
        if not counts_fit or not 1 < regrowth <= 4:
            raise ValueError(
                f"num_players={num_players} must be 2 to {len(NAMES)}, regrowth={regrowth} above 1, to 4, "
                f"seasons={seasons} 2 to 20 and max_message_chars={max_message_chars} at least 1"
            )
        self.possible_agents = tuple(f"player_{number}" for number in range(num_players))
        self._names = dict(zip(self.possible_agents, NAMES, strict=False))
        self._regrowth, self._seasons, self._max_message_chars = regrowth, seasons, max_message_chars

    def setup(self, rng: np.random.Generator) -> None:
        # over a factor of a hundred, so that no one number is good in many episodes
        self.holds = round(10 ** float(rng.uniform(1, 3))) * len(self.possible_agents)
        self.stock = self.holds
        self.season = 0
        self.caught = dict.fromkeys(self.possible_agents, 0)
        self.last_season: list[str] = []

    @property
    def best(self) -> float:
        """The most that all seats together can take in an episode."""
        # a fish left grows to `regrowth` fish, as long as there is room: all else is best taken now, and the last all
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
        own = f"You have {self.caught[agent]}."
        return "\n".join((*self.last_season, f"Seasons left: {left}. {lake} {own}"))

    def act_all(self, actions: dict[str, str]) -> Outcome:
        wanted = {seat: _wanted(text) for seat, text in actions.items()}
        total = sum(number or 0 for number in wanted.values())
        share = min(Fraction(1), Fraction(self.stock, total or 1))
        taken = {seat: int((number or 0) * share) for seat, number in wanted.items()}
        left = max(0, self.stock - total)
        self.stock = min(self.holds, int(left * Fraction(str(self._regrowth))))  # 1.4 times 45 are 63, as told
        self.season += 1
        self.last_season = [
            f"{self._names[seat]} took {taken[seat]} and said: {' '.join(text.split())[: self._max_message_chars]}"
            for seat, text in actions.items()
        ]
        for seat, number in taken.items():
            self.caught[seat] += number
        fault = {"illegal": "not exactly one number to take"}
        info: dict[str, dict[str, Any]] = {seat: fault if number is None else {} for seat, number in wanted.items()}
        if self.stock and self.season < self._seasons:
            return Outcome(info=info)
        seats = len(self.caught)
        nothing, best = self.holds / seats, self.best / seats
        rewards = {seat: max(0.0, (caught - nothing) / (best - nothing)) for seat, caught in self.caught.items()}
        facts = {"catch": dict(self.caught), "best": self.best, "seasons": self.season, "forfeits": []}
        info = {seat: {**info[seat], **facts, "success": reward >= _SUCCESS} for seat, reward in rewards.items()}
        return Outcome(rewards=rewards, done=True, info=info)


def _wanted(text: str) -> int | None:
    """The one number that a text takes."""
    named = set(_TAKE.findall(text))
    return int(named.pop().replace(",", "")) if len(named) == 1 else None
