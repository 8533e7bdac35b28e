"""A league: settings of self-play against the policy's own past, and the matches of a step.

`forge_trainers.rl.league_policies` plays the matches.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np

from forge_agents.errors import did_you_mean
from forge_agents.policy import AnyPolicy, Policy, SnapshotPolicy
from forge_agents.settings import MAX_COUNT, settings_class, values_of
from forge_agents.types import Episode, EpisodeGroup, reward_scale
from forge_trainers.selfplay.matchmaking import Matchmaking, Standings

_MAX_ADAPTERS = 8
"""Maximum number of snapshots that an engine holds as adapters. Each takes memory. More play one after the other."""


@settings_class
@dataclass(frozen=True, kw_only=True)
class LeagueConfig:
    """Settings of a league: snapshots and matchmaking."""

    snapshot_every: int = 5
    """Number of steps between snapshots of the policy. Each snapshot joins the opponents."""
    opponents: Matchmaking = "pfsp"
    """Matchmaking: the newest snapshot ("latest"), all with equal probability ("uniform"), preferably the hardest
    ("pfsp"), or preferably those of equal strength, by win rate ("pfsp_even") or by rating ("near"). "regret" prefers
    those against which the policy earns least, by reward instead of by win rate."""
    pool: int = 8
    """Maximum number of snapshots, including the start model. At least 2. Each takes the model's size on disk. When the
    pool is full, the snapshot with the lowest win rate against the policy leaves."""
    self_play: float = 0.35
    """Probability that the policy plays all agents of a group and learns for all of them. In [0, 1]. AlphaStar's main
    agents used 0.35. 1 is mirror self-play."""
    opponents_per_step: int = 2
    """Number of opponents drawn for one step. Each snapshot costs a change of the weights of the engine that all share.
    With LoRA, the policy's engine has an adapter for each of up to 8, which play at the same time."""

    def __post_init__(self) -> None:
        for name, least in (("snapshot_every", 1), ("pool", 2), ("opponents_per_step", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} of the league must be at least {least}")
        if (number := max(self.pool, self.opponents_per_step)) > MAX_COUNT:
            raise ValueError(f"pool and opponents_per_step of the league must be at most {MAX_COUNT}, got {number}")
        if self.opponents not in get_args(Matchmaking):
            choices = get_args(Matchmaking)
            hint = did_you_mean(str(self.opponents), choices)
            raise ValueError(f"opponents={self.opponents!r}. Choose one of {', '.join(choices)}.{hint}")
        if not 0 <= self.self_play <= 1:
            raise ValueError(f"self_play={self.self_play} of the league is a probability, in [0, 1]")
        for name, default in (("opponents", "pfsp"), ("opponents_per_step", 2)):
            if self.self_play == 1 and (value := getattr(self, name)) != default:
                raise ValueError(
                    f"{name}={value!r} has no effect with self_play=1, which draws no opponents. Leave it out, or "
                    "lower self_play"
                )


@settings_class
@dataclass(frozen=True)
class League(LeagueConfig):
    """Self-play: a trainable policy against snapshots of itself and fixed opponents. Pass it in place of policies.

    In every group the policy plays all agents, or one agent against one opponent that plays all others. The policy's
    agent changes from group to group. Opponents do not learn.

    Args:
        policy: The policy that learns.
    """

    policy: Policy
    anchors: tuple[AnyPolicy, ...] = field(default=(), kw_only=True)
    """Fixed opponents that never leave, in addition to the start model."""
    held_out: tuple[AnyPolicy, ...] = field(default=(), kw_only=True)
    """Opponents of evaluations only, such as a game's scripted policy. Default: the anchors, or else the start
    model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        policy: object = self.policy
        if not isinstance(policy, Policy) or not policy.trainable:
            kind = f"policy {policy.name!r} does not" if isinstance(policy, Policy) else f"got {type(policy).__name__}"
            raise ValueError(f"a league needs a policy that learns, {kind}. Give fa.Policy(..., trainable=True)")
        for name in ("anchors", "held_out"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            for opponent in getattr(self, name):
                if not isinstance(opponent, AnyPolicy):
                    raise TypeError(f"{name} must hold policies, got {type(opponent).__name__}; e.g. fa.Random()")
                if isinstance(opponent, Policy) and opponent.trainable:
                    raise ValueError(f"{opponent.name!r} of {name} is trainable, and must not be: trainable=False")
                if re.fullmatch(rf"{re.escape(self.policy.name)}-\d{{6,}}", opponent.name):
                    raise ValueError(
                        f"{opponent.name!r} of {name} has a name of the league's snapshots. Give it another name="
                    )

    @property
    def fixed(self) -> tuple[AnyPolicy, ...]:
        """All fixed opponents: anchors and held-out ones, without duplicates."""
        return (*self.anchors, *(opponent for opponent in self.held_out if opponent not in self.anchors))

    @property
    def start(self) -> str:
        """Name of the start model among the opponents."""
        return self.snapshot_name(0)

    @property
    def engine(self) -> str:
        """Name of the policy that plays snapshots, and without LoRA of its engine."""
        return f"{self.policy.name}-opponent"

    def snapshot_name(self, version: int) -> str:
        """Return the name of the snapshot of a weight version."""
        return f"{self.policy.name}-{version:06d}"

    def frozen(self, name: str) -> Policy:
        """Return the policy as an opponent, under another name."""
        return replace(self.policy, name=name, lora=None, learner=None, trainable=False)

    @property
    def served(self) -> Policy:
        """The policy whose engine plays snapshots. With LoRA this is the policy's engine, with an adapter for each."""
        frozen = self.frozen(self.engine)
        if self.policy.lora is None:
            return frozen
        slots = 0 if self.self_play == 1 else min(self.opponents_per_step, self.pool - 1, _MAX_ADAPTERS)
        return SnapshotPolicy(**values_of(frozen), snapshot_lora=self.policy.lora, slots=slots)

    def settings(self) -> dict[str, Any]:
        """Return the league's settings for config.yaml."""
        return {
            **values_of(self, LeagueConfig),
            "anchors": [anchor.name for anchor in self.anchors],
            "held_out": [opponent.name for opponent in self.held_out],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The players of one group."""

    opponent: str
    """Name of the opponent. Empty if the policy plays itself."""
    agent: str
    """The policy's agent. Empty if the policy plays all agents."""

    def players(self, agents: Iterable[str], policy: str) -> dict[str, str]:
        """Return the name of the player of each agent. `policy` is the name of the policy that learns."""
        return {agent: policy if agent == self.agent or not self.opponent else self.opponent for agent in agents}


def draw_matches(
    standings: Standings, league: LeagueConfig, agents: Sequence[str], count: int, *, key: Sequence[int]
) -> list[Match]:
    """Draw the matches of a step. The result depends only on the arguments, so a resumed run repeats it.

    Args:
        standings: Opponents with ratings.
        league: Settings.
        agents: Agents of the environment, at least two.
        count: Number of groups.
        key: Seed of the draw: seed of the run, step, resampling round.
    """
    if len(agents) < 2:
        raise ValueError(f"a league needs an agent for the opponent. The environment has only {', '.join(agents)}")
    rng = np.random.default_rng(list(key))
    opponents = standings.opponents
    drawn = rng.choice(len(opponents), size=league.opponents_per_step, p=standings.probabilities(league.opponents))
    against = int((rng.random(count) >= league.self_play).sum())
    mirror = [Match(opponent="", agent="")] * (count - against)
    return _alternating([opponents[index].name for index in drawn], agents, against, first=sum(key)) + mirror


def evaluation_matches(league: League, agents: Sequence[str], count: int) -> list[Match]:
    """Return held-out matches, for all agents in turn: against `held_out`, or else the anchors, or else the start."""
    names = [opponent.name for opponent in league.held_out or league.anchors] or [league.start]
    return _alternating(names, agents, count, first=0)


def _alternating(names: Sequence[str], agents: Sequence[str], count: int, *, first: int) -> list[Match]:
    """Return matches against each opponent in turn, with the policy as each agent in turn against each of them."""
    counts: Counter[str] = Counter()
    matches = []
    for number in range(count):
        name = names[number % len(names)]
        agent = agents[(first + names.index(name) + counts[name]) % len(agents)]
        counts[name] += 1
        matches.append(Match(opponent=name, agent=agent))
    return matches


def margins_of(groups: Iterable[EpisodeGroup], policy: str) -> dict[str, list[float]]:
    """Return the reward of `policy` minus the opponent's in each game, by opponent.

    The rewards are the environment's, as means over the agents of a side. Games against itself and failed games are
    left out, except those that an opponent's failure ended, which are NaN: see `Standings.record`. A forfeit counts as
    it is paid.
    """
    margins: dict[str, list[float]] = {}
    groups = [*groups]
    rewards = [reward for group in groups for episode in group.episodes for reward in episode.rewards.values()]
    tolerance = 1e-9 * reward_scale(rewards)  # the mean of three rewards of 0.1 is not 0.1
    for group in groups:
        for episode in group.episodes:
            sides = _sides(episode, policy)
            if sides is None or (episode.error is not None and episode.failed_policy != sides[0]):
                continue
            opponent, *agents = sides
            if episode.error is not None:
                margins.setdefault(opponent, []).append(math.nan)
                continue
            mean, opponent_mean = (float(np.mean([episode.rewards[agent] for agent in side])) for side in agents)
            is_draw = math.isclose(mean, opponent_mean, abs_tol=tolerance)
            margins.setdefault(opponent, []).append(0.0 if is_draw else mean - opponent_mean)
    return margins


def policy_agents(group: EpisodeGroup, policy: str) -> list[str]:
    """Return the agents of `policy` in a group against an opponent, or none if it plays itself."""
    # an episode that failed at its start has no agents
    sides = next(filter(None, (_sides(episode, policy) for episode in group.episodes)), None)
    return [] if sides is None else sides[1]


def _sides(episode: Episode, policy: str) -> tuple[str, list[str], list[str]] | None:
    """Return the opponent's name, the policy's agents and the opponent's, or None if there are not two sides."""
    agents = [agent for agent, trajectory in episode.trajectories.items() if trajectory.policy == policy]
    others = [agent for agent in episode.trajectories if agent not in agents]
    return (episode.trajectories[others[0]].policy, agents, others) if agents and others else None


def table(standings: Standings, league: League) -> dict[str, Any]:
    """Return the content of ``league.json``: opponents by falling rating."""
    names = (opponent.name for opponent in standings.opponents)
    probabilities = dict(zip(names, standings.probabilities(league.opponents), strict=True))
    rows: list[Mapping[str, Any]] = [
        {
            "name": opponent.name,
            "kind": "anchor" if opponent.version < 0 else "start" if opponent.pinned else "snapshot",
            "version": opponent.version if opponent.version >= 0 else None,
            "rating": opponent.mu,
            "rating_sigma": opponent.sigma,
            "games": opponent.games,
            "win_rate": opponent.win_rate,
            "margin": opponent.margin,
            "chance": float(probabilities[opponent.name]),
        }
        for opponent in sorted(standings.opponents, key=lambda opponent: -opponent.mu)
    ]
    return {
        "policy": league.policy.name,
        "rating": standings.mu,
        "rating_sigma": standings.sigma,
        "opponents": rows,
    }
