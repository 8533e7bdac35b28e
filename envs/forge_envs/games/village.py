"""Village: wolves among villagers, nights and days, talk and votes; after Werewolf.

In: names at night and in votes, talk by day. Out: a reward for the side that wins. Waits for nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv

NAMES = ("anna", "bert", "cleo", "dora", "emil", "fred", "gina")
"""What the texts call ``player_0``, ``player_1``, ..."""
_NOBODY = "nobody"
_NAME = re.compile(rf"\b({'|'.join((*NAMES, _NOBODY))})\b", re.IGNORECASE)
_ASKED = {
    "wolf": "Whom do the wolves kill? Write one name.",
    "seer": "Whose nature do you look up? Write one name.",
    "healer": "Whom do you guard tonight? Write one name.",
    "talk": "Speak to all, in a sentence or two.",
    "vote": f"Who is to be sent away? Write one name, or {_NOBODY}.",
}


class Village(TurnEnv):
    """Five to seven seats, two sides, roles that only their holders know; after Davidoff's Mafia.

    Some seats are wolves, the others villagers, of which one may be a seer and one a healer. A night: each wolf names a
    villager, the last name counts; the seer learns of one seat whether it is a wolf; the healer guards one other seat,
    which then survives the night. A day: everybody alive speaks `talks` times, cut to `max_message_chars`, and
    everybody hears it; then all vote, none knowing the other votes, and who alone has the most votes is sent away. The
    role of who dies or is sent away becomes known. Wolves know each other and what wolves named tonight.

    Villagers win when no wolf is left, wolves when they are as many as the others; after `days` days nobody wins.
    Everybody on the winning side, alive or not, gets 1.0, the others 0.

    A text at night or in a vote counts if it names exactly one seat that may be named, otherwise it does nothing and
    infos say so under ``illegal``. When the game is over, infos hold the ``roles``, the ``winner`` ("village",
    "wolves" or None), the ``day`` and ``success``.

    Args:
        num_players: 5 to 7.
        wolves: 1 or 2.
        seer: Whether there is one.
        healer: Whether there is one.
        days: Days after which nobody wins, at least 1.
        talks: Times that everybody speaks in a day, 0 to 3.
        max_message_chars: Longer talk is cut.
    """

    max_reward = 1.0

    def __init__(
        self,
        *,
        num_players: int = 5,
        wolves: int = 1,
        seer: bool = True,
        healer: bool = False,
        days: int = 3,
        talks: int = 1,
        max_message_chars: int = 120,
    ) -> None:
        super().__init__()
        if not 5 <= num_players <= len(NAMES) or wolves not in (1, 2) or days < 1:
            raise ValueError(
                f"num_players={num_players} must be 5 to {len(NAMES)}, wolves={wolves} 1 or 2, days={days} at least 1"
            )
        if not 0 <= talks <= 3 or max_message_chars < 1:
            raise ValueError(f"talks={talks} must be 0 to 3 and max_message_chars={max_message_chars} at least 1")
        self.possible_agents = tuple(f"player_{number}" for number in range(num_players))
        self._names = dict(zip(self.possible_agents, NAMES, strict=False))
        special = ["wolf"] * wolves + ["seer"] * bool(seer) + ["healer"] * bool(healer)
        self._roles = special + ["villager"] * (num_players - len(special))
        self._days, self._talks, self._max_message_chars = days, talks, max_message_chars

    def setup(self, rng: np.random.Generator) -> str:
        dealt = rng.permutation(len(self._roles))
        self.roles = {seat: self._roles[int(place)] for seat, place in zip(self.possible_agents, dealt, strict=True)}
        self.alive = list(self.possible_agents)
        self.day = 0
        self.seen: dict[str, bool] = {}
        self.votes: dict[str, str] = {}
        self.victim = self.guarded = ""
        self.today: list[str] = []
        self.phase, self.queue = "night", self._night()
        return self.queue[0]

    # ---- what seats read

    def instructions(self, agent: str) -> str:
        roles = Counter(self._roles)
        listed = ", ".join(f"{count} {role}{'' if count == 1 else 's'}" for role, count in roles.items())
        side = "wolves as many as the others" if self.roles[agent] == "wolf" else "all wolves sent away"
        return (
            f"A village of {len(self._roles)}: {listed}, and only wolves know each other. By night the wolves kill "
            "one; a seer learns whether one seat is a wolf; a healer guards one. By day all speak, then vote whom to "
            f"send away. You are {self._names[agent]}, a {self.roles[agent]}. You win with {side}."
        )

    def observe_text(self, agent: str) -> str:
        gone = [seat for seat in self.possible_agents if seat not in self.alive]
        dead = ", ".join(f"{self._names[seat]} ({self.roles[seat]})" for seat in gone)
        time = "Day" if self.phase in ("talk", "vote") else "Night"
        lines = [f"{time} {self.day}. Alive: {self._listed(self.alive)}."]
        lines += [f"Gone: {dead}."] * bool(dead)
        lines += self.today
        lines.append(f"You are {self._names[agent]}, a {self.roles[agent]}. {self._knows(agent)}".rstrip())
        asked = self.roles[agent] if self.phase == "night" else self.phase
        return "\n".join([*lines, *([_ASKED[asked]] if agent == self.agent_selection and asked in _ASKED else [])])

    def _knows(self, agent: str) -> str:
        """What a seat knows alone, or with the other wolves."""
        if self.roles[agent] == "wolf":
            wolves = self._listed(seat for seat in self.possible_agents if self.roles[seat] == "wolf")
            named = f" Named tonight: {self._names[self.victim]}." if self.victim and self.phase == "night" else ""
            return f"Wolves: {wolves}.{named}"
        if self.roles[agent] == "seer" and self.seen:
            return " ".join(f"{self._names[seat]} is {'a' if wolf else 'no'} wolf." for seat, wolf in self.seen.items())
        if self.roles[agent] == "healer" and self.guarded:
            return f"You guarded {self._names[self.guarded]}."
        return ""

    def legal_actions(self, agent: str) -> tuple[str, ...] | None:
        if self.phase == "talk":
            return None
        others = [seat for seat in self.alive if seat != agent]
        if self.phase == "night" and self.roles[agent] == "wolf":
            others = [seat for seat in others if self.roles[seat] != "wolf"]
        return (*(self._names[seat] for seat in others), _NOBODY)

    def _listed(self, players: Iterable[str]) -> str:
        return ", ".join(self._names[player] for player in players)

    # ---- what seats must not read

    def secrets(self, agent: str) -> tuple[str, ...]:
        """The others' roles, as they read them."""
        return tuple(f"You are {self._names[seat]}, a {self.roles[seat]}" for seat in self.alive if seat != agent)

    def swap_secrets(self, agent: str, rng: np.random.Generator) -> None:
        """Deal the roles anew among those of whom `agent` knows nothing."""
        role = self.roles[agent]
        known = {agent, *(seat for seat in self.roles if seat not in self.alive)}
        known |= {seat for seat in self.roles if role == "wolf" == self.roles[seat]}
        known |= set(self.seen) if role == "seer" else set()
        unknown = [seat for seat in self.alive if seat not in known]
        dealt = [self.roles[unknown[int(place)]] for place in rng.permutation(len(unknown))]
        self.roles |= dict(zip(unknown, dealt, strict=True))
        if role != "seer":
            self.seen = {seat: self.roles[seat] == "wolf" for seat in self.seen if self.roles[seat] != "seer"}
        if role != "wolf" and self.victim:
            self.victim = str(rng.choice([seat for seat in self.alive if self.roles[seat] != "wolf"]))
        if role != "healer":
            self.guarded = str(rng.choice(self.alive)) if self.guarded else ""

    # ---- the game

    def act(self, agent: str, action: str) -> Outcome:
        info: dict[str, dict[str, object]] = {}
        if self.phase == "talk":
            self.today.append(f"{self._names[agent]}: {' '.join(action.split())[: self._max_message_chars]}")
        else:
            may = self.legal_actions(agent) or ()
            named = {name.casefold() for name in _NAME.findall(action)}
            target = named.pop() if len(named) == 1 else ""
            if target not in may:
                info = {agent: {"illegal": f"expected one of these: {', '.join(may)}"}}
            elif target != _NOBODY:
                self._name(agent, self.possible_agents[NAMES.index(target)])
        self.queue.pop(0)
        if self.queue:
            return Outcome(next=self.queue[0], info=info)
        return self._goes_on(info)

    def _name(self, agent: str, target: str) -> None:
        """Play a name."""
        if self.phase == "vote":
            self.votes[agent] = target
        elif self.roles[agent] == "wolf":
            self.victim = target
        elif self.roles[agent] == "seer":
            self.seen[target] = self.roles[target] == "wolf"
        else:
            self.guarded = target

    def _night(self) -> list[str]:
        """A night begins; returns who decides in it."""
        self.day += 1
        self.victim = self.guarded = ""
        return [seat for role in ("wolf", "seer", "healer") for seat in self.alive if self.roles[seat] == role]

    def _goes_on(self, info: dict[str, dict[str, object]]) -> Outcome:
        """The next part of the day, once all who were to decide have done so, or the end of the game."""
        turn = self.day % len(self.alive)
        everybody = self.alive[turn:] + self.alive[:turn]
        if self.phase == "night":
            died = "" if self.victim == self.guarded else self.victim
            self.today = [f"Last night {self._leaves(died)} died."]
            everybody = [seat for seat in everybody if seat != died]
            self.phase, self.queue = "talk", everybody * self._talks
        elif self.phase == "vote":
            votes = Counter(self.votes.get(seat, _NOBODY) for seat in everybody)
            (name, most), *others = votes.most_common()
            gone = "" if name == _NOBODY or any(count == most for _, count in others) else name
            told = ", ".join(f"{self._names[seat]} for {self._names[whom]}" for seat, whom in self.votes.items())
            self.today = [f"Votes: {told or 'none'}. So {self._leaves(gone)} was sent away."]
        else:
            self.queue = []
        wolves = sum(self.roles[seat] == "wolf" for seat in self.alive)
        winner = None if 0 < wolves < len(self.alive) - wolves else "wolves" if wolves else "village"
        if winner or (self.phase == "vote" and self.day == self._days):
            return self._end(winner, info)
        if self.phase == "vote":
            self.phase, self.queue = "night", self._night()
        elif not self.queue:
            self.phase, self.queue, self.votes = "vote", everybody, {}
        return Outcome(next=self.queue[0], info=info)

    def _leaves(self, name: str) -> str:
        """Who is out of the village now, as it is told."""
        self.alive = [seat for seat in self.alive if seat != name]
        return f"{self._names[name]} ({self.roles[name]})" if name else _NOBODY

    def _end(self, winner: str | None, info: dict[str, dict[str, object]]) -> Outcome:
        won = {seat: winner == ("wolves" if role == "wolf" else "village") for seat, role in self.roles.items()}
        facts: dict[str, object] = {"roles": dict(self.roles), "winner": winner, "day": self.day, "forfeits": []}
        ends = {seat: {**info.get(seat, {}), **facts, "success": right} for seat, right in won.items()}
        return Outcome(rewards={seat: float(right) for seat, right in won.items()}, done=True, info=ends)
