"""Codewords: a spymaster's one-word clue leads a guesser to words on a board, after Codenames."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Sequence

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv
from forge_envs.shared import check_ranges

KINDS = {
    "animal": {"farm": "cow goat hen pig sheep", "ocean": "crab seal shark squid whale",
               "jungle": "gorilla jaguar parrot python tiger"},
    "food": {"fruit": "apple cherry grape pear plum", "vegetable": "bean carrot leek onion turnip",
             "sweet": "cake fudge honey toffee wafer"},
    "house": {"cooking": "kettle ladle oven plate spoon", "sleep": "blanket mattress pillow pyjamas quilt",
              "washing": "bucket shower soap sponge towel"},
    "travel": {"road": "bus lorry taxi tram van", "boat": "barge canoe ferry raft yacht",
               "flight": "airship glider helicopter parachute rocket"},
    "job": {"hospital": "doctor nurse patient surgeon ward", "school": "chalk exam lesson pupil teacher",
            "court": "judge jury lawyer verdict witness"},
    "nature": {"space": "comet moon planet star sun", "weather": "cloud fog frost hail storm",
               "forest": "birch fern moss oak pine"},
    "music": {"string": "banjo cello guitar harp violin", "percussion": "bongo cymbal drum gong tambourine",
              "brass": "bugle cornet horn trombone trumpet"},
    "sport": {"ball": "cricket golf hockey rugby tennis", "winter": "bobsleigh curling skates ski sledge",
              "combat": "boxing fencing judo karate wrestling"},
}  # fmt: skip
"""Words by theme and kind. No word is part of another one, or of a theme or kind."""
_CLUE = re.compile(r"\W*(?:clue\W+)?([^\W\d_]+)\W+([1-9])\W*", re.IGNORECASE)
_FORM = "a clue is one word and a number from 1 to 9, such as: colour 2"
_TRIES = 2


class Codewords(TurnEnv):
    """A team of a spymaster and a guesser with limited rounds, or two teams against each other.

    The board has the words of each team, neutral words and traps. Only spymasters know which is which. In each round a
    team's spymaster gives a clue, one word and a number from 1 to 9, and its guesser names words of the board. Up to
    that number of words are uncovered, in the order of the text, until a word is not the team's or all of the team's
    words are found. A trap ends the game.

    A clue must not contain, or be part of, a word that is still covered. Other texts are refused with the reason, and
    the second refusal ends the round. A guesser's text without a word of the board passes.
    Clues are not checked for meaning, so two trained policies may find a code of letters for the words' places.

    With one team, both agents get ``max(0, found - wrong) / words to find``, and 0 after a trap. With two teams, the
    team whose words are all found first wins, a team that uncovers a trap loses, and after the last round the team with
    fewer words left wins. Winners get 1, losers -1. At the end infos contain ``found`` and ``wrong`` (of the agent's
    team), ``trap`` (the team that uncovered one, or None), ``key`` (the owner of each word) and ``success``.

    Args:
        teams: 1, with agents ``master`` and ``guesser``, or 2, with ``red_master``, ``red_guesser``, ``blue_master``
            and ``blue_guesser``. Red begins.
        groups: Number of kinds of a team's words, 1 to 4. With two teams at most 3.
        size: Number of words per kind, 1 to 5.
        others: Number of neutral words, 1 to 20.
        near: Number of neutral words of the same theme, but another kind, as a team's words.
        traps: Number of traps, 0 to 3. Traps are near words if there are any.
        spare: Number of rounds of a team beyond one per group.
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
        check_ranges(teams=(teams, 1, 2), groups=(groups, 1, 5 - teams), size=(size, 1, 5), others=(others, 1, 20))
        check_ranges(near=(near, 0, others), traps=(traps, 0, 3), spare=(spare, 0, None))
        self._teams = ("red", "blue") if teams == 2 else ("",)
        sides = [tuple(_agent(team, role) for role in ("master", "guesser")) for team in self._teams]
        self.possible_agents = tuple(itertools.chain(*sides))
        self.sides = sides if teams == 2 else ()
        self._groups, self._size, self._others, self._near, self._traps = groups, size, others, near, traps
        self._rounds = groups + spare

    # ---- the board

    def setup(self, rng: np.random.Generator) -> None:
        themes = [str(theme) for theme in rng.permutation(list(KINDS))]
        team_words: list[str] = []
        near: list[str] = []
        num_themes = len(self._teams) * self._groups
        for theme in themes[:num_themes]:
            first, *other_kinds = (str(kind) for kind in rng.permutation(list(KINDS[theme])))
            team_words += _shuffled(rng, [KINDS[theme][first]])[: self._size]
            near += _shuffled(rng, [KINDS[theme][kind] for kind in other_kinds])
        near = [str(word) for word in rng.permutation(near)]
        far = _shuffled(rng, [words for theme in themes[num_themes:] for words in KINDS[theme].values()])
        traps = (near[self._near :] if self._near else far[self._others :])[: self._traps]
        words_per_team = self._groups * self._size
        key = {word: self._teams[index // words_per_team] for index, word in enumerate(team_words)}
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
        """Return the words that a team still has to find."""
        return [word for word in self.hidden if self.key[word] == team]

    # ---- texts

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
        listed = {name: ", ".join(self.left(owner)) for name, owner in lines.items() if owner is not None}
        return "\n".join(f"{name}: {words}." for name, words in listed.items() if words)

    def secrets(self, agent: str) -> tuple[str, ...]:
        """Return a spymaster's list, for guessers."""
        return (self._key_of(self._team(agent)),) if agent.endswith("guesser") else ()

    def swap_secrets(self, agent: str, rng: np.random.Generator) -> None:
        """Permute the owners of the covered words, for a guesser."""
        if agent.endswith("guesser"):
            owners = rng.permutation([self.key[word] for word in self.hidden])
            self.key |= {word: str(owner) for word, owner in zip(self.hidden, owners, strict=True)}

    # ---- the game

    def act(self, agent: str, action: str) -> Outcome:
        team = self._team(agent)
        if agent.endswith("master"):
            clue, fault = self._parse_clue(action)
            if clue is not None:
                self.clue, self.refused = clue, []
                return Outcome(next=_agent(team, "guesser"))
            self.refused.append(fault)
            info = {agent: {"illegal": fault}}
            if len(self.refused) < _TRIES:
                return Outcome(next=agent, info=info)
            return self._end_round(team, "no clue", info)
        assert self.clue is not None
        named = dict.fromkeys(word for word in re.findall(r"\w+", action.casefold()) if word in self.hidden)
        info = {agent: {} if named else {"illegal": "no word of the board"}}
        results = []
        for word in list(named)[: self.clue[1]]:
            self.hidden.remove(word)
            self.wrong[team] += self.key[word] != team
            results.append(f"{word} {'yes' if self.key[word] == team else self.key[word]}")
            if self.key[word] != team or not self.left(team):
                break
        trapped = team if results and results[-1].endswith(" trap") else None
        result = f"{self.clue[0]} {self.clue[1]}: {', '.join(results) or 'passed'}"
        return self._end_round(team, result, info, trapped)

    def _parse_clue(self, text: str) -> tuple[tuple[str, int] | None, str]:
        """Return the clue, or None and the reason."""
        match = _CLUE.fullmatch(unicodedata.normalize("NFKC", text[:200]))
        if match is None or not match[1].isascii():  # letters of other scripts may look like a word of the board
            return None, f"{_FORM}; something else was written"
        word = match[1].casefold()
        same = next((other for other in self.hidden if other in word or word in other), None)
        if same is not None:
            return None, f"a clue may not contain, or be part of, a word of the board: {same}"
        return (word, int(match[2])), ""

    def _end_round(
        self, team: str, result: str, infos: dict[str, dict[str, str]], trapped: str | None = None
    ) -> Outcome:
        """End a team's round, and the game if it is decided."""
        self.last_round = f"Last round{f' of {team}' if team else ''}: {result}."
        self.played[team] += 1
        self.clue, self.refused = None, []
        other = self._other(team)
        all_found = any(not self.left(t) for t in self._teams)
        out_of_time = self.played[other if other is not None else team] == self._rounds
        if not all_found and trapped is None and not out_of_time:
            return Outcome(next=_agent(team if other is None else other, "master"), info=infos)
        scores = self._scores(trapped)
        final: dict[str, dict[str, object]] = {}
        for agent in self.agents:
            side = self._team(agent)
            num_found = self._groups * self._size - len(self.left(side))
            won = scores[side] > 0 if other is not None else num_found == self._groups * self._size and trapped is None
            final[agent] = {
                **infos.get(agent, {}), "found": num_found, "wrong": self.wrong[side], "trap": trapped,
                "key": dict(self.key), "success": won, "forfeits": [],
            }  # fmt: skip
        return Outcome(rewards={agent: scores[self._team(agent)] for agent in self.agents}, done=True, info=final)

    def _scores(self, trapped: str | None) -> dict[str, float]:
        """Return the reward of each team."""
        left = {team: len(self.left(team)) for team in self._teams}
        if len(left) == 1:
            total = self._groups * self._size
            right = 0 if trapped is not None else max(0, total - left[""] - self.wrong[""])
            return {"": right / total}
        lead = {team: left["red"] + left["blue"] - 2 * left[team] for team in left}
        if trapped is not None:
            lead = {team: -1 if team == trapped else 1 for team in left}
        return {team: float(np.sign(difference)) for team, difference in lead.items()}

    def _team(self, agent: str) -> str:
        return agent.rpartition("_")[0]

    def _other(self, team: str) -> str | None:
        return next((other for other in self._teams if other != team), None)


def _agent(team: str, role: str) -> str:
    return f"{team}_{role}" if team else role


def _shuffled(rng: np.random.Generator, lists: Sequence[str]) -> list[str]:
    """Return all words of some lists in random order."""
    return [str(word) for word in rng.permutation([word for words in lists for word in words.split()])]
