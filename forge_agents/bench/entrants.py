"""The players of a benchmark: policies, words that name them, and teams with a policy for each agent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from forge_agents import safe_yaml
from forge_agents.errors import did_you_mean
from forge_agents.files import user_path
from forge_agents.imports import import_user_module
from forge_agents.policy import KEYWORDS, AnyPolicy, Endpoint, Policy, Sampling, Scripted


@dataclass(frozen=True)
class Team:
    """A policy for each agent, as one player."""

    policies: Mapping[str, AnyPolicy] = field(hash=False)
    """By agent. Agents with equal entries share a policy, and so an engine's weights."""
    name: str = field(default="team", kw_only=True)
    from_run: bool = field(default=False, kw_only=True)
    """Whether a run recorded it, which also records other names of its agents."""


Player: TypeAlias = AnyPolicy | Team
PlayerLike: TypeAlias = Player | str | Mapping[str, AnyPolicy | str]
"""A policy, words as `read_player` takes them, or one of both for each agent."""


def policies_of(player: Player) -> list[AnyPolicy]:
    """The policies that a player is made of."""
    return [*player.policies.values()] if isinstance(player, Team) else [player]


def policy_at(player: Player, agent: str) -> AnyPolicy:
    """Who decides for an agent that a player has taken."""
    return player.policies[agent] if isinstance(player, Team) else player


def check_agents(players: Mapping[str, Player], agents: Mapping[str, Sequence[str]]) -> None:
    """Raise ValueError where a team lacks an agent of an environment, or has one that no environment has.

    Args:
        players: By name.
        agents: By environment.
    """
    known = list(dict.fromkeys(agent for own in agents.values() for agent in own))
    for name, player in players.items():
        if not isinstance(player, Team):
            continue
        policies = player.policies
        for agent in policies:
            if agent not in known and not player.from_run:
                raise ValueError(
                    f"player {name!r} has a policy for {agent!r}, and the agents are {', '.join(known)}."
                    f"{did_you_mean(agent, known)}"
                )
        for env_id, own in agents.items():
            if missing := [agent for agent in own if agent not in policies]:
                raise ValueError(
                    f"player {name!r} has no policy for agent {missing[0]!r} of {env_id}, only for "
                    f"{', '.join(policies)}; give a policy for each agent, since players take every agent in turn"
                )


def named_players(players: Mapping[str, PlayerLike], sampling: Sampling | None = None) -> dict[str, Player]:
    """The players as policies and teams that carry their names.

    Args:
        players: Policies, words as `read_player` takes them, or a mapping from agent to one of both.
        sampling: Of models given as words.

    Raises:
        ValueError: No players, a name or words that make no sense, or an endpoint whose key is not set.
        TypeError: Something that is no player.
    """
    if not isinstance(players, Mapping):
        raise TypeError(f'players must be a mapping such as {{"random": fa.Random()}}, got {type(players).__name__}')
    if not players:
        raise ValueError('no players were given; pass some by name, e.g. {"random": fa.Random()}')
    found: dict[str, Player] = {}
    taken = set(players)
    for name, given in players.items():
        player = read_player(given, sampling) if isinstance(given, str) else given
        if isinstance(player, Mapping):
            player = Team({agent: _member(name, agent, each, sampling) for agent, each in player.items()})
        if isinstance(player, Team):
            found[name] = _named_team(name, player, taken)
        else:
            found[name] = replace(_checked(f"player {name!r}", player), name=name)
        for policy in policies_of(found[name]):
            if isinstance(policy, Endpoint):
                policy.api_key()
    return found


def _member(name: str, agent: object, given: object, sampling: Sampling | None) -> AnyPolicy:
    if not isinstance(agent, str):
        raise TypeError(f"player {name!r} is a mapping with the key {agent!r}; its keys must be names of agents")
    player = read_player(given, sampling) if isinstance(given, str) else given
    if isinstance(player, Team) and agent in player.policies:
        return player.policies[agent]
    return _checked(f"agent {agent!r} of player {name!r}", player)


def _checked(what: str, player: object) -> AnyPolicy:
    if not isinstance(player, AnyPolicy):
        raise TypeError(
            f"{what} is a {type(player).__name__}; use fa.Policy, fa.Endpoint, fa.Human, fa.Random, fa.Oracle, "
            'fa.Scripted, words such as "random" or a model\'s name, or a mapping from agent to one of these'
        )
    return player


def _named_team(name: str, team: Team, taken: set[str]) -> Team:
    """The team, whose policies are called by its name and an agent's; `taken` are names that nobody else may have."""
    if not team.policies:
        raise ValueError(f"player {name!r} is an empty mapping; give a policy for each agent")
    named: list[tuple[AnyPolicy, AnyPolicy]] = []
    policies: dict[str, AnyPolicy] = {}
    for agent, policy in team.policies.items():
        twin = next((new for old, new in named if old == policy), None)
        if twin is None:
            base = own = f"{name}-{re.sub(r'[^A-Za-z0-9_-]+', '-', agent)}"
            number = 1
            while own in taken:
                number += 1
                own = f"{base}-{number}"
            taken.add(own)
            twin = replace(policy, name=own)
            named.append((policy, twin))
        policies[agent] = twin
    return replace(team, policies=policies, name=name)


def read_player(words: str, sampling: Sampling | None = None) -> Player:
    """A player from words.

    ``random``; ``human``; ``oracle``; ``package.module:function``, a scripted player; ``http://host:port/v1#model``, a
    model behind an endpoint; anything else is a model: a built-in name, a Hugging Face id, a folder, or the folder of a
    run, which stands for what it exported: one model, or a team with a model for each of the run's agents. The folder
    in a run that holds the exported models stands for the same.

    Raises:
        ValueError: The function cannot be imported, the address names no model, or the run exported none.
    """
    sampling = sampling or Sampling()
    if words in KEYWORDS:
        return KEYWORDS[words]
    if words.startswith(("http://", "https://")):
        url, _, model = words.partition("#")
        if not model:
            raise ValueError(f"player {url!r} names no model; write it after a #, e.g. {url}#my-model")
        return Endpoint(url, model, sampling=sampling)
    module, colon, function = words.partition(":")
    if not colon:
        return _model_or_run(words, sampling)
    try:
        home = import_user_module(module)
    except ImportError as error:
        raise ValueError(f"player {words!r}: {module} cannot be imported: {error}") from None
    if not hasattr(home, function):
        raise ValueError(f"player {words!r}: {module} has no {function!r}.{did_you_mean(function, dir(home))}")
    return Scripted(getattr(home, function))


def called(players: Sequence[str]) -> dict[str, str]:
    """Players in words by names that are made of the ends of the words, as many as tell them apart.

    Raises:
        ValueError: One is there twice, or two differ in nothing that a name can have.
    """
    ends = [[part for part in re.split(r"[^A-Za-z0-9_.-]+", words) if part not in ("", "export")] for words in players]
    for length in range(1, max(map(len, ends), default=0) + 1):
        names = ["-".join(parts[-length:]).replace(".", "-").strip("-_") or "player" for parts in ends]
        named = dict(zip(names, players, strict=True))
        if len(named) == len(players):
            return named
    if len(set(players)) < len(players):
        raise ValueError(f"cross_play takes each player once, got {', '.join(players)}")
    if players:
        raise ValueError(
            f"players of cross_play cannot be told apart by name, got {', '.join(players)}; use --players.NAME for each"
        )
    return {}


def _model_or_run(words: str, sampling: Sampling) -> Player:
    """The model that words name, or what a run exported: the words are the run's folder or that of its models."""
    folder = user_path(words)
    run, export = (folder, folder / "export") if (folder / "export").is_dir() else (folder.parent, folder)
    if (folder / "config.json").exists():
        return Policy(words, sampling=sampling)
    if (export / "config.json").exists():
        return Policy(str(export), sampling=sampling)
    models = {child.parent.name: str(child.parent) for child in sorted(export.glob("*/config.json"))}
    if not models and (run == folder or (folder / "checkpoints").is_dir()):
        raise ValueError(
            f"player {words!r} is a run that has exported no model yet. It exports when it ends; to export a "
            f"checkpoint, run: forge-agents export {words} --out {folder / 'export'}"
        )
    if not models:
        return Policy(words, sampling=sampling)
    policies = {agent: Policy(models[name], sampling=sampling) for agent, name in _agents_of(run) if name in models}
    if not policies:
        raise ValueError(
            f"player {words!r} stands for {len(models)} models, and {run / 'config.yaml'} does not say which "
            f"agents they play; give a mapping from agent to model, of {', '.join(models.values())}"
        )
    return Team(policies, from_run=True)


def _agents_of(run: Path) -> Iterator[tuple[str, str]]:
    """Agents and names of their policies, as the settings of a run record them; none where they cannot be read."""
    try:
        settings: Any = safe_yaml.read(run / "config.yaml")
    except (OSError, ValueError):
        return
    seats = settings.get("policy_mapping") if isinstance(settings, dict) else None
    for agent, name in seats.items() if isinstance(seats, dict) else ():
        if isinstance(agent, str) and isinstance(name, str):
            yield agent, name
