"""A policy that trains against its own past: what a user declares, and the plan of a step's games.

In: a policy, anchors, settings. Out: who sits where, and what the games say. Waits for nothing; whoever seats players
(`forge_trainers.rl.seating`) plays them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

import numpy as np

from forge_agents.errors import did_you_mean
from forge_agents.policy import AnyPolicy, Policy
from forge_agents.settings import settings_class
from forge_agents.types import Episode, EpisodeGroup
from forge_trainers.selfplay.matchmaking import Matchmaking, Standings


@settings_class
@dataclass(frozen=True, kw_only=True)
class LeagueConfig:
    """How a policy's opponents are made and met."""

    snapshot_every: int = 5
    """Steps between two snapshots of the policy that join its opponents."""
    opponents: Matchmaking = "pfsp"
    """How opponents are drawn: the newest snapshot ("latest"), all alike ("uniform"), the hardest most often ("pfsp"),
    those of equal strength most often by win rate ("pfsp_even") or by rating ("near")."""
    pool: int = 8
    """Snapshots kept, the start model included; at least 2. Each takes the model's size on disk. When one more comes,
    the one that the policy beats most surely leaves."""
    self_play: float = 0.35
    """Chance that the policy sits in all seats of a group itself, and learns in all, 0 to 1; AlphaStar's main agents
    had 0.35. At 1 it only ever meets itself as it is (mirror self-play)."""
    opponents_per_step: int = 2
    """Opponents drawn for one step. Snapshots take turns in one engine, so each costs a change of its weights."""

    def __post_init__(self) -> None:
        for name, least in (("snapshot_every", 1), ("pool", 2), ("opponents_per_step", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} of the league must be at least {least}")
        if self.opponents not in get_args(Matchmaking):
            known = get_args(Matchmaking)
            near = did_you_mean(str(self.opponents), known)
            raise ValueError(f"opponents={self.opponents!r}; choose one of {', '.join(known)}.{near}")
        if not 0 <= self.self_play <= 1:
            raise ValueError(f"self_play={self.self_play} of the league is a chance, 0 to 1")


@settings_class
@dataclass(frozen=True)
class League(LeagueConfig):
    """Self-play: a trainable policy against snapshots of itself and fixed opponents. Takes the place of seats.

    In every group of siblings the policy sits in all seats, or in one seat with one opponent in all others; seats are
    swapped from group to group. Opponents never learn.

    Args:
        policy: The policy that learns.
    """

    policy: Policy
    anchors: tuple[AnyPolicy, ...] = field(default=(), kw_only=True)
    """Fixed opponents that never leave, beside the start model, which is always one."""
    held_out: tuple[AnyPolicy, ...] = field(default=(), kw_only=True)
    """Opponents that only evaluations meet, such as a game's oracle; without any these are the anchors, without those
    the start model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given: object = self.policy
        if not isinstance(given, Policy) or not given.trainable:
            what = f"policy {given.name!r} does not" if isinstance(given, Policy) else f"got {type(given).__name__}"
            raise ValueError(f"a league needs a policy that learns, {what}; give fa.Policy(..., trainable=True)")
        for what in ("anchors", "held_out"):
            object.__setattr__(self, what, tuple(getattr(self, what)))
            for fixed in getattr(self, what):
                if not isinstance(fixed, AnyPolicy):
                    raise TypeError(f"{what} must hold policies, got {type(fixed).__name__}; for example fa.Random()")
                if isinstance(fixed, Policy) and fixed.trainable:
                    raise ValueError(f"{fixed.name!r} of {what} is trainable, and must not be: trainable=False")

    @property
    def fixed(self) -> tuple[AnyPolicy, ...]:
        """All opponents that stay as they are: anchors and held-out ones, each once."""
        return (*self.anchors, *(one for one in self.held_out if one not in self.anchors))

    @property
    def start(self) -> str:
        """Name of the start model among the opponents."""
        return self.snapshot_name(0)

    @property
    def engine(self) -> str:
        """Name of the engine that snapshots take turns in."""
        return f"{self.policy.name}-opponent"

    def snapshot_name(self, version: int) -> str:
        """Name of the snapshot of these weights among the opponents."""
        return f"{self.policy.name}-{version:06d}"

    def frozen(self, name: str) -> Policy:
        """The policy under another name, as an opponent."""
        return replace(self.policy, name=name, lora=None, learner=None, trainable=False)

    def settings(self) -> dict[str, Any]:
        """What a run's config.yaml says of the league."""
        return {
            **{one.name: getattr(self, one.name) for one in fields(LeagueConfig)},
            "anchors": [anchor.name for anchor in self.anchors],
            "held_out": [rival.name for rival in self.held_out],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Who sits where in one group."""

    opponent: str
    """Name of the opponent; empty where the policy plays itself."""
    seat: str
    """The policy's seat; empty where it has all."""

    def players(self, agents: Iterable[str], policy: str) -> dict[str, str]:
        """Names of the players by seat; `policy` is that of the one who learns."""
        return {agent: policy if agent == self.seat or not self.opponent else self.opponent for agent in agents}


def draw_matches(
    standings: Standings, league: LeagueConfig, agents: Sequence[str], count: int, *, key: Sequence[int]
) -> list[Match]:
    """The games of a step: a function of its arguments, so that a resumed run plays what it would have played.

    Args:
        agents: The seats, at least two.
        count: Groups to play.
        key: Seeds the draw: seed of the run, step, resample.
    """
    if len(agents) < 2:
        raise ValueError(f"a league needs an opponent's seat; the environment has {', '.join(agents)} alone")
    rng = np.random.default_rng(list(key))
    everyone = standings.opponents
    drawn = rng.choice(len(everyone), size=league.opponents_per_step, p=standings.chances(league.opponents))
    against = int((rng.random(count) >= league.self_play).sum())
    alone = [Match(opponent="", seat="")] * (count - against)
    return _swapped([everyone[at].name for at in drawn], agents, against, first=sum(key)) + alone


def evaluation_matches(league: League, agents: Sequence[str], count: int) -> list[Match]:
    """Held-out games, from all seats in turn: against `held_out`, or else the anchors, or else the start model."""
    rivals = [rival.name for rival in league.held_out or league.anchors] or [league.start]
    return _swapped(rivals, agents, count, first=0)


def _swapped(names: Sequence[str], agents: Sequence[str], count: int, *, first: int) -> list[Match]:
    """Opponents in turn, and the policy against each of them in every seat in turn."""
    met: Counter[str] = Counter()
    matches = []
    for number in range(count):
        name = names[number % len(names)]
        seat = agents[(first + names.index(name) + met[name]) % len(agents)]
        met[name] += 1
        matches.append(Match(opponent=name, seat=seat))
    return matches


def results_of(groups: Iterable[EpisodeGroup], policy: str) -> dict[str, list[float]]:
    """What `policy` got of its games, by opponent: 1 a win, 0.5 a draw, 0 a loss.

    The environment's reward decides: the mean over the policy's seats against that over the others. Games against
    itself, and those that failed, are left out. A forfeit counts as it is paid: left out, a rival that always forfeits
    would seem unbeaten and be met most often.
    """
    found: dict[str, list[float]] = {}
    for group in groups:
        for episode in group.episodes:
            seats = _sides(episode, policy)
            if seats is None or episode.error is not None:
                continue
            opponent, mine, theirs = seats
            own, other = (float(np.mean([episode.rewards[agent] for agent in side])) for side in (mine, theirs))
            found.setdefault(opponent, []).append(0.5 if own == other else float(own > other))
    return found


def own_seats(group: EpisodeGroup, policy: str) -> list[str]:
    """The seats of `policy` in a group against an opponent; none where it plays itself."""
    sides = _sides(group.episodes[0], policy)
    return [] if sides is None else sides[1]


def _sides(episode: Episode, policy: str) -> tuple[str, list[str], list[str]] | None:
    """The opponent's name, the policy's agents and the opponent's; None where there are not two sides."""
    mine = [agent for agent, one in episode.trajectories.items() if one.policy == policy]
    theirs = [agent for agent in episode.trajectories if agent not in mine]
    return (episode.trajectories[theirs[0]].policy, mine, theirs) if mine and theirs else None


def table(standings: Standings, league: League) -> dict[str, Any]:
    """The league as ``league.json`` shows it: opponents by falling rating."""
    chances = dict(zip((one.name for one in standings.opponents), standings.chances(league.opponents), strict=True))
    rows: list[Mapping[str, Any]] = [
        {
            "name": one.name,
            "kind": "anchor" if one.version < 0 else "start" if one.pinned else "snapshot",
            "version": one.version if one.version >= 0 else None,
            "rating": one.mu,
            "rating_sigma": one.sigma,
            "games": one.games,
            "win_rate": one.win_rate,
            "chance": float(chances[one.name]),
        }
        for one in sorted(standings.opponents, key=lambda one: -one.mu)
    ]
    return {
        "policy": league.policy.name,
        "rating": standings.mu,
        "rating_sigma": standings.sigma,
        "opponents": rows,
    }
