"""Village: hidden wolves, nightly victims, discussions and votes, after Werewolf."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv
from forge_envs.shared import check_ranges

NAMES = ("anna", "bert", "cleo", "dora", "emil", "fred", "gina")
"""Names of ``player_0``, ``player_1``, ... in texts."""
_NOBODY = "nobody"
_NAME = re.compile(rf"\b({'|'.join((*NAMES, _NOBODY))})\b", re.IGNORECASE)
_QUESTIONS = {
    "wolf": "Whom do the wolves kill? Write one name.",
    "seer": "Whose nature do you look up? Write one name.",
    "healer": "Whom do you guard tonight? Write one name.",
    "talk": "Speak to all, in a sentence or two.",
    "vote": f"Who is to be sent away? Write one name, or {_NOBODY}.",
}


class Village(TurnEnv):
    """Five to seven players with secret roles on two sides, after Davidoff's Mafia.

    The players are wolves and villagers, and one villager may be a seer and one a healer. At night each wolf names a
    victim (the last name counts), the seer learns whether a player is a wolf, and the healer protects another player
    from the wolves. By day all live players speak `talks` times, then vote simultaneously. The player with the most
    votes is sent away, none in a tie. The roles of dead and removed players are revealed. Wolves know each other and
    the victim named so far.

    Villagers win when no wolf is left, and wolves when they are as many as the others. After `days` days nobody wins.
    All players of the winning side, alive or not, get 1, the others 0.

    At night and in votes, a text must contain exactly one permitted name. Otherwise it has no effect and sets
    ``illegal`` in infos. At the end infos contain ``roles``, ``winner`` ("village", "wolves" or None), ``day`` and
    ``success``.

    Args:
        num_players: 5 to 7.
        wolves: Number of wolves, 1 or 2.
        seer: Whether there is a seer.
        healer: Whether there is a healer.
        days: Maximum number of days. At least 1.
        talks: Number of times that each player speaks per day, 0 to 3.
        max_message_chars: Maximum length of a speech. Longer ones are cut.
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
        check_ranges(num_players=(num_players, 5, len(NAMES)), wolves=(wolves, 1, 2), days=(days, 1, None))
        check_ranges(talks=(talks, 0, 3), max_message_chars=(max_message_chars, 1, None))
        self.possible_agents = tuple(f"player_{number}" for number in range(num_players))
        self._names = dict(zip(self.possible_agents, NAMES, strict=False))
        special = ["wolf"] * wolves + ["seer"] * bool(seer) + ["healer"] * bool(healer)
        self._roles = special + ["villager"] * (num_players - len(special))
        self._days, self._talks, self._max_message_chars = days, talks, max_message_chars

    def setup(self, rng: np.random.Generator) -> str:
        dealt = rng.permutation(len(self._roles))
        self.roles = {agent: self._roles[int(i)] for agent, i in zip(self.possible_agents, dealt, strict=True)}
        self.alive = list(self.possible_agents)
        self.day = 0
        self.seen: dict[str, bool] = {}
        self.votes: dict[str, str] = {}
        self.victim = self.guarded = ""
        self.today: list[str] = []
        self.phase, self.queue = "night", self._start_night()
        return self.queue[0]

    # ---- texts

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
        removed = [player for player in self.possible_agents if player not in self.alive]
        dead = ", ".join(f"{self._names[player]} ({self.roles[player]})" for player in removed)
        time = "Day" if self.phase in ("talk", "vote") else "Night"
        lines = [f"{time} {self.day}. Alive: {self._list_names(self.alive)}."]
        lines += [f"Gone: {dead}."] * bool(dead)
        lines += self.today
        lines.append(f"You are {self._names[agent]}, a {self.roles[agent]}. {self._private_knowledge(agent)}".rstrip())
        question = _QUESTIONS.get(self.roles[agent] if self.phase == "night" else self.phase)
        return "\n".join([*lines, *([question] if question and agent == self.agent_selection else [])])

    def _private_knowledge(self, agent: str) -> str:
        """Return what an agent knows from its role."""
        if self.roles[agent] == "wolf":
            wolves = self._list_names(player for player in self.possible_agents if self.roles[player] == "wolf")
            named = f" Named tonight: {self._names[self.victim]}." if self.victim and self.phase == "night" else ""
            return f"Wolves: {wolves}.{named}"
        if self.roles[agent] == "seer" and self.seen:
            findings = self.seen.items()
            return " ".join(f"{self._names[player]} is {'a' if wolf else 'no'} wolf." for player, wolf in findings)
        if self.roles[agent] == "healer" and self.guarded:
            return f"You guarded {self._names[self.guarded]}."
        return ""

    def legal_actions(self, agent: str) -> tuple[str, ...] | None:
        if self.phase == "talk":
            return None
        others = [player for player in self.alive if player != agent]
        if self.phase == "night" and self.roles[agent] == "wolf":
            others = [player for player in others if self.roles[player] != "wolf"]
        return (*(self._names[player] for player in others), _NOBODY)

    def _list_names(self, players: Iterable[str]) -> str:
        return ", ".join(self._names[player] for player in players)

    def secrets(self, agent: str) -> tuple[str, ...]:
        """Return the other players' roles, as they read them."""
        others = (player for player in self.alive if player != agent)
        return tuple(f"You are {self._names[player]}, a {self.roles[player]}" for player in others)

    def swap_secrets(self, agent: str, rng: np.random.Generator) -> None:
        """Redistribute the roles that `agent` does not know."""
        role = self.roles[agent]
        fixed = {agent, *(player for player in self.roles if player not in self.alive)}
        fixed |= {player for player in self.roles if role == "wolf" == self.roles[player]}
        fixed |= set(self.seen) if role == "seer" else set()
        unknown = [player for player in self.alive if player not in fixed]
        dealt = [self.roles[unknown[int(i)]] for i in rng.permutation(len(unknown))]
        self.roles |= dict(zip(unknown, dealt, strict=True))
        if role != "seer":
            self.seen = {player: self.roles[player] == "wolf" for player in self.seen if self.roles[player] != "seer"}
        if role != "wolf" and self.victim:
            self.victim = str(rng.choice([player for player in self.alive if self.roles[player] != "wolf"]))
        if role != "healer":
            self.guarded = str(rng.choice(self.alive)) if self.guarded else ""

    # ---- rules

    def act(self, agent: str, action: str) -> Outcome:
        info: dict[str, dict[str, object]] = {}
        if self.phase == "talk":
            self.today.append(f"{self._names[agent]}: {' '.join(action.split())[: self._max_message_chars]}")
        else:
            legal = self.legal_actions(agent) or ()
            named = {name.casefold() for name in _NAME.findall(action)}
            name = named.pop() if len(named) == 1 else ""
            if name not in legal:
                info = {agent: {"illegal": f"expected one of these: {', '.join(legal)}"}}
            elif name != _NOBODY:
                self._choose(agent, self.possible_agents[NAMES.index(name)])
        self.queue.pop(0)
        if self.queue:
            return Outcome(next=self.queue[0], info=info)
        return self._next_phase(info)

    def _choose(self, agent: str, target: str) -> None:
        """Apply a player's choice of another player."""
        if self.phase == "vote":
            self.votes[agent] = target
        elif self.roles[agent] == "wolf":
            self.victim = target
        elif self.roles[agent] == "seer":
            self.seen[target] = self.roles[target] == "wolf"
        else:
            self.guarded = target

    def _start_night(self) -> list[str]:
        """Start a night. Returns the players who act in it, in order."""
        self.day += 1
        self.victim = self.guarded = ""
        return [player for role in ("wolf", "seer", "healer") for player in self.alive if self.roles[player] == role]

    def _next_phase(self, info: dict[str, dict[str, object]]) -> Outcome:
        """End a phase after its last action, and start the next one or end the game."""
        start = self.day % len(self.alive)
        order = self.alive[start:] + self.alive[:start]
        if self.phase == "night":
            died = "" if self.victim == self.guarded else self.victim
            self.today = [f"Last night {self._remove(died)} died."]
            order = [player for player in order if player != died]
            self.phase, self.queue = "talk", order * self._talks
        elif self.phase == "vote":
            votes = Counter(self.votes.get(player, _NOBODY) for player in order)
            (leader, maximum), *others = votes.most_common()
            exiled = "" if leader == _NOBODY or any(count == maximum for _, count in others) else leader
            pairs = self.votes.items()
            listed = ", ".join(f"{self._names[voter]} for {self._names[target]}" for voter, target in pairs)
            self.today = [f"Votes: {listed or 'none'}. So {self._remove(exiled)} was sent away."]
        else:
            self.queue = []
        wolves = sum(self.roles[player] == "wolf" for player in self.alive)
        winner = None if 0 < wolves < len(self.alive) - wolves else "wolves" if wolves else "village"
        if winner or (self.phase == "vote" and self.day == self._days):
            return self._end(winner, info)
        if self.phase == "vote":
            self.phase, self.queue = "night", self._start_night()
        elif not self.queue:
            self.phase, self.queue, self.votes = "vote", order, {}
        return Outcome(next=self.queue[0], info=info)

    def _remove(self, player: str) -> str:
        """Remove a player, if any. Returns its name and role for the report."""
        self.alive = [other for other in self.alive if other != player]
        return f"{self._names[player]} ({self.roles[player]})" if player else _NOBODY

    def _end(self, winner: str | None, info: dict[str, dict[str, object]]) -> Outcome:
        won = {agent: winner == ("wolves" if role == "wolf" else "village") for agent, role in self.roles.items()}
        facts: dict[str, object] = {"roles": dict(self.roles), "winner": winner, "day": self.day, "forfeits": []}
        final = {agent: {**info.get(agent, {}), **facts, "success": success} for agent, success in won.items()}
        return Outcome(rewards={agent: float(success) for agent, success in won.items()}, done=True, info=final)
