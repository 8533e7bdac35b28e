"""Codewords: a spymaster's clue of one word leads a guesser to words on a board; after Codenames.

In: a clue such as "farm 2", then words of the board. Out: rewards by team. Waits for nothing.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Sequence

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv

KINDS = {
    "animal": {
        "farm": "cow goat hen pig sheep", "ocean": "crab seal shark squid whale",
        "jungle": "gorilla jaguar parrot python tiger",
    },
    "food": {
        "fruit": "apple cherry grape pear plum", "vegetable": "bean carrot leek onion turnip",
        "sweet": "cake fudge honey toffee wafer",
    },
    "house": {
        "cooking": "kettle ladle oven plate spoon", "sleep": "blanket mattress pillow pyjamas quilt",
        "washing": "bucket shower soap sponge towel",
    },
    "travel": {
        "road": "bus lorry taxi tram van", "boat": "barge canoe ferry raft yacht",
        "flight": "airship glider helicopter parachute rocket",
    },
    "job": {
        "hospital": "doctor nurse patient surgeon ward", "school": "chalk exam lesson pupil teacher",
        "court": "judge jury lawyer verdict witness",
    },
    "nature": {
        "space": "comet moon planet star sun", "weather": "cloud fog frost hail storm",
        "forest": "birch fern moss oak pine",
    },
    "music": {
        "string": "banjo cello guitar harp violin", "percussion": "bongo cymbal drum gong tambourine",
        "brass": "bugle cornet horn trombone trumpet",
    },
    "sport": {
        "ball": "cricket golf hockey rugby tennis", "winter": "bobsleigh curling skates ski sledge",
        "combat": "boxing fencing judo karate wrestling",
    },
}  # fmt: skip
"""Words by theme and kind: that they go together is what clues say. None is part of another, or of a theme or kind."""
_CLUE = re.compile(r"\W*(?:clue\W+)?([^\W\d_]+)\W+([1-9])\W*", re.IGNORECASE)
_FORM = "a clue is one word and a number from 1 to 9, such as: colour 2"
_TRIES = 2


class Codewords(TurnEnv):
    """A spymaster and a guesser against the clock, or two such teams against each other; after Codenames.

    On the board lie words that a team has to find, words of nobody and traps. Spymasters see which is which, guessers
    do not. In each round of a team its spymaster gives a clue, one word and a number from 1 to 9, and its guesser names
    words of the board. They are turned over in the order in which the text names them, as many as the clue's number,
    until one is not the team's, or none of the team's is left. A trap ends the game.

    A clue must not contain, or be part of, a word that still lies on the board. Any other text is refused with the
    reason; the second refusal costs the round. A guesser's text without a word of the board passes.

    With one team, both seats get ``max(0, found - wrong) / words to find``, and 0 after a trap. With two, the team
    whose words are all found first wins, whoever found them; who meets a trap loses; at the end of the rounds the team
    with fewer words left wins. Winners get 1, losers -1. At the end infos hold ``found`` and ``wrong`` (of the seat's
    team), ``trap`` (the team that met one, or None), ``key`` (what each word was) and ``success``.

    Args:
        teams: 1 or 2; with two, seats are called after their colour, and red begins.
        groups: Kinds of words that a team's are of, 1 to 4; of two teams at most 3.
        size: Words of each kind, 1 to 5.
        others: Words of nobody, 1 to 20.
        near: How many of them are of another kind of the same theme as a team's words.
        traps: Words that end the game, 0 to 3; near ones where there are any.
        spare: Rounds of a team beyond one for each of its groups.
    """

    max_reward = 1.0

    def __init__(
        self,
        *,
        teams: int = 1,
        groups: int = 2,
        size: int = 2,
        others: int = 4,
        near: int = 0,
        traps: int = 0,
        spare: int = 1,
    ) -> None:
        super().__init__()
        if teams not in (1, 2) or not 1 <= groups <= (4, 3)[teams - 1] or not 1 <= size <= 5:
            raise ValueError(f"teams={teams} must be 1 or 2, groups={groups} 1 to 4 (two teams: 3), size={size} 1 to 5")
        if not 1 <= others <= 20 or not 0 <= near <= others or not 0 <= traps <= 3 or spare < 0:
            raise ValueError(
                f"others={others} must be 1 to 20, near={near} 0 to others, traps={traps} 0 to 3 and spare={spare} at "
                "least 0"
            )
        self._teams = ("red", "blue") if teams == 2 else ("",)
        seats = [tuple(_seat(team, role) for role in ("master", "guesser")) for team in self._teams]
        self.possible_agents = tuple(itertools.chain(*seats))
        self.sides = seats if teams == 2 else ()
        self._groups, self._size, self._others, self._near, self._traps = groups, size, others, near, traps
        self._rounds = groups + spare

    # ---- the board

    def setup(self, rng: np.random.Generator) -> None:
        themes = [str(theme) for theme in rng.permutation(list(KINDS))]
        own: list[str] = []
        near: list[str] = []
        taken = len(self._teams) * self._groups
        for theme in themes[:taken]:
            first, *siblings = (str(kind) for kind in rng.permutation(list(KINDS[theme])))
            own += _drawn(rng, [KINDS[theme][first]])[: self._size]
            near += _drawn(rng, [KINDS[theme][kind] for kind in siblings])
        near = [str(word) for word in rng.permutation(near)]
        far = _drawn(rng, [words for theme in themes[taken:] for words in KINDS[theme].values()])
        traps = (near[self._near :] if self._near else far[self._others :])[: self._traps]
        each = self._groups * self._size
        key = {word: self._teams[place // each] for place, word in enumerate(own)}
        key |= dict.fromkeys((*near[: self._near], *far[: self._others - self._near]), "nobody")
        key |= dict.fromkeys(traps, "trap")
        self.key = {str(word): key[str(word)] for word in rng.permutation(list(key))}
        self.hidden = list(self.key)
        self.wrong = dict.fromkeys(self._teams, 0)
        self.played = dict.fromkeys(self._teams, 0)
        self.clue: tuple[str, int] | None = None
        self.refused: list[str] = []
        self.last_round = ""

    def left(self, team: str) -> list[str]:
        """The words that a team has still to find."""
        return [word for word in self.hidden if self.key[word] == team]

    # ---- what seats read

    def instructions(self, agent: str) -> str:
        if agent.endswith("master"):
            return (
                "You lead your guesser, who sees the words of the board and not whose they are, to your team's words. "
                "Give a clue that goes with some of them and with no other word: one word that is not on the board, "
                "and how many words it is for. Write nothing else, such as: colour 2"
            )
        return (
            "Your spymaster's clue is a word, and how many words of the board go with it. Write these words of the "
            "board, the surest first, and nothing else. A wrong word ends your turn."
        )

    def observe_text(self, agent: str) -> str:
        team = self._team(agent)
        last = f"{self.last_round}\n" if self.last_round else ""
        rounds = f"Rounds left: {self._rounds - self.played[team]}."
        if agent.endswith("guesser"):
            clue = f"{self.clue[0]} {self.clue[1]}" if self.clue else "(none yet)"
            board = f"Board: {', '.join(self.hidden)}.\nWords to find: {len(self.left(team))}."
            return f"{last}{board} {rounds}\nClue: {clue}"
        refused = f"\nRefused: {self.refused[-1]}" if self.refused and self._team(self.agent_selection) == team else ""
        return f"{last}{self._key_of(team)}\n{rounds}{refused}"

    def _key_of(self, team: str) -> str:
        lines = {"Your words": team, "The other team's": self._other(team), "Nobody's": "nobody", "Trap": "trap"}
        listed = {name: ", ".join(self.left(whose)) for name, whose in lines.items() if whose is not None}
        return "\n".join(f"{name}: {words}." for name, words in listed.items() if words)

    def secrets(self, agent: str) -> tuple[str, ...]:
        """What guessers must not read: a spymaster's list."""
        return (self._key_of(self._team(agent)),) if agent.endswith("guesser") else ()

    def swap_secrets(self, agent: str, rng: np.random.Generator) -> None:
        """Another key of the words that still lie, for a guesser."""
        if agent.endswith("guesser"):
            whose = rng.permutation([self.key[word] for word in self.hidden])
            self.key |= {word: str(one) for word, one in zip(self.hidden, whose, strict=True)}

    # ---- the game

    def act(self, agent: str, action: str) -> Outcome:
        team = self._team(agent)
        if agent.endswith("master"):
            clue, fault = self._read(action)
            if clue is not None:
                self.clue, self.refused = clue, []
                return Outcome(next=_seat(team, "guesser"))
            self.refused.append(fault)
            told = {agent: {"illegal": fault}}
            return Outcome(next=agent, info=told) if len(self.refused) < _TRIES else self._turned(team, "no clue", told)
        assert self.clue is not None
        named = dict.fromkeys(word for word in re.findall(r"\w+", action.casefold()) if word in self.hidden)
        told = {agent: {} if named else {"illegal": "no word of the board"}}
        results = []
        for word in list(named)[: self.clue[1]]:
            self.hidden.remove(word)
            self.wrong[team] += self.key[word] != team
            results.append(f"{word} {'yes' if self.key[word] == team else self.key[word]}")
            if self.key[word] != team or not self.left(team):
                break
        trapped = team if results and results[-1].endswith(" trap") else None
        return self._turned(team, f"{self.clue[0]} {self.clue[1]}: {', '.join(results) or 'passed'}", told, trapped)

    def _read(self, text: str) -> tuple[tuple[str, int] | None, str]:
        """A clue, or None and what is wrong with it."""
        found = _CLUE.fullmatch(unicodedata.normalize("NFKC", text[:200]))
        if found is None or not found[1].isascii():  # letters of other scripts may look like a word of the board
            return None, f"{_FORM}; something else was written"
        word = found[1].casefold()
        same = next((other for other in self.hidden if other in word or word in other), None)
        if same is not None:
            return None, f"a clue may not contain, or be part of, a word of the board: {same}"
        return (word, int(found[2])), ""

    def _turned(
        self, team: str, result: str, told: dict[str, dict[str, str]], trapped: str | None = None
    ) -> Outcome:
        """A team's round is over."""
        self.last_round = f"Last round{f' of {team}' if team else ''}: {result}."
        self.played[team] += 1
        self.clue, self.refused = None, []
        other = self._other(team)
        nothing_left = any(not self.left(each) for each in self._teams)
        out_of_time = self.played[other if other is not None else team] == self._rounds
        if not nothing_left and trapped is None and not out_of_time:
            return Outcome(next=_seat(team if other is None else other, "master"), info=told)
        scores = self._scores(trapped)
        info: dict[str, dict[str, object]] = {}
        for seat in self.agents:
            own = self._team(seat)
            found = self._groups * self._size - len(self.left(own))
            won = scores[own] > 0 if other is not None else found == self._groups * self._size and trapped is None
            info[seat] = {
                **told.get(seat, {}), "found": found, "wrong": self.wrong[own], "trap": trapped, "key": dict(self.key),
                "success": won, "forfeits": [],
            }  # fmt: skip
        return Outcome(rewards={seat: scores[self._team(seat)] for seat in self.agents}, done=True, info=info)

    def _scores(self, trapped: str | None) -> dict[str, float]:
        """Reward by team."""
        left = {team: len(self.left(team)) for team in self._teams}
        if len(left) == 1:
            most = self._groups * self._size
            right = 0 if trapped is not None else max(0, most - left[""] - self.wrong[""])
            return {"": right / most}
        ahead = {team: left["red"] + left["blue"] - 2 * left[team] for team in left}
        if trapped is not None:
            ahead = {team: -1 if team == trapped else 1 for team in left}
        return {team: float(np.sign(lead)) for team, lead in ahead.items()}

    def _team(self, seat: str) -> str:
        return seat.rpartition("_")[0]

    def _other(self, team: str) -> str | None:
        return next((each for each in self._teams if each != team), None)


def _seat(team: str, role: str) -> str:
    return f"{team}_{role}" if team else role


def _drawn(rng: np.random.Generator, lists: Sequence[str]) -> list[str]:
    """All words of some lists, in any order."""
    return [str(word) for word in rng.permutation([word for words in lists for word in words.split()])]
