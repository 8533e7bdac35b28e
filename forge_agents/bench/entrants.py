"""Players of a benchmark: policies, their short forms as text, and teams with a policy for each agent."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from forge_agents.errors import UntrustedModuleError, did_you_mean, near_names
from forge_agents.files import outdated_export, user_path
from forge_agents.imports import check_origin, import_advice, import_user_module
from forge_agents.models.exports import settings_of, trained_prompts
from forge_agents.policy import KEYWORDS, AnyPolicy, Endpoint, Policy, Sampling, Scripted, unique_name

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Team:
    """A player with a policy for each agent."""

    policies: Mapping[str, AnyPolicy] = field(hash=False)
    """Policies by agent. Agents with equal policies share one, and so its engine."""
    name: str = field(default="team", kw_only=True)
    from_run: bool = field(default=False, kw_only=True)
    """Whether a run recorded the mapping. Such a mapping may also name agents of other environments."""


Player: TypeAlias = AnyPolicy | Team
PlayerLike: TypeAlias = Player | str | Mapping[str, AnyPolicy | str]
"""A policy, text as `read_player` takes it, or one of both for each agent."""


def policies_of(player: Player) -> list[AnyPolicy]:
    """Return the policies of a player."""
    return [*player.policies.values()] if isinstance(player, Team) else [player]


def policy_at(player: Player, agent: str) -> AnyPolicy:
    """Return the policy with which a player acts for an agent."""
    return player.policies[agent] if isinstance(player, Team) else player


def check_agents(players: Mapping[str, Player], agents: Mapping[str, Sequence[str]]) -> None:
    """Raise ValueError if a team lacks a policy for an agent, or has one that no environment in `agents` knows."""
    all_agents = list(dict.fromkeys(agent for names in agents.values() for agent in names))
    for name, player in players.items():
        if not isinstance(player, Team):
            continue
        policies = player.policies
        for agent in policies:
            if agent not in all_agents and not player.from_run:
                raise ValueError(
                    f"player {name!r} has a policy for {agent!r}, and the agents are {', '.join(all_agents)}."
                    f"{did_you_mean(agent, all_agents)}"
                )
        for env_id, names in agents.items():
            if missing := [agent for agent in names if agent not in policies]:
                raise ValueError(
                    f"player {name!r} has no policy for agent {missing[0]!r} of {env_id}, only for "
                    f"{', '.join(policies)}. Give a policy for each agent, because players take every agent in turn"
                )


def named_players(players: Mapping[str, PlayerLike], sampling: Sampling | None = None) -> dict[str, Player]:
    """Return policies and teams that carry the names of the players.

    Args:
        players: Policies, text as `read_player` takes it, or a mapping from agent to one of both.
        sampling: Sampling of models given as text.

    Raises:
        ValueError: There are no players, a name or text is invalid, or the key of an endpoint is not set.
        TypeError: A value is no player.
    """
    if not isinstance(players, Mapping):
        raise TypeError(f'players must be a mapping such as {{"random": fa.Random()}}, got {type(players).__name__}')
    if not players:
        raise ValueError(
            'no players were given. Pass some by name, e.g. {"random": fa.Random()}, or --players.random random on the '
            "command line"
        )
    named: dict[str, Player] = {}
    reserved = set(players)
    for name, value in players.items():
        player = read_player(value, sampling) if isinstance(value, str) else value
        if isinstance(player, Mapping):
            player = Team({agent: _member(name, agent, member, sampling) for agent, member in player.items()})
        if isinstance(player, Team):
            named[name] = _named_team(name, player, reserved)
        else:
            named[name] = replace(_checked(f"player {name!r}", player), name=name)
        for policy in policies_of(named[name]):
            if isinstance(policy, Endpoint):
                policy.api_key()
    return named


def _member(name: str, agent: object, value: object, sampling: Sampling | None) -> AnyPolicy:
    if not isinstance(agent, str):
        raise TypeError(f"player {name!r} is a mapping with the key {agent!r}. Its keys must be names of agents")
    player = read_player(value, sampling) if isinstance(value, str) else value
    if isinstance(player, Team) and agent in player.policies:
        return player.policies[agent]
    return _checked(f"agent {agent!r} of player {name!r}", player)


def _checked(label: str, player: object) -> AnyPolicy:
    if not isinstance(player, AnyPolicy):
        raise TypeError(
            f"{label} is a {type(player).__name__}. Use fa.Policy, fa.Endpoint, fa.Human, fa.Random, fa.Oracle, "
            'fa.Scripted, text such as "random" or a model\'s name, or a mapping from agent to one of these'
        )
    return player


def _named_team(name: str, team: Team, reserved: set[str]) -> Team:
    """Name each policy after the team and its agent, other than those in `reserved`. Equal policies become one."""
    if not team.policies:
        raise ValueError(f"player {name!r} is an empty mapping. Give a policy for each agent")
    renamed: list[tuple[AnyPolicy, AnyPolicy]] = []
    policies: dict[str, AnyPolicy] = {}
    for agent, policy in team.policies.items():
        new = next((new for old, new in renamed if old == policy), None)
        if new is None:
            new = replace(policy, name=unique_name(f"{name}-{agent}", reserved))
            renamed.append((policy, new))
        policies[agent] = new
    return replace(team, policies=policies, name=name)


def read_player(text: str, sampling: Sampling | None = None) -> Player:
    """Return the player that a text describes.

    - ``random``, ``human`` and ``oracle``;
    - ``package.module:function``: a scripted player;
    - ``http://host:port/v1#model``: a model behind an endpoint;
    - anything else is a model: a built-in name, a Hugging Face id or a folder. The folder of a run, or its folder of
      exported models, stands for the exported model, or for a team with a model for each of the run's agents. An
      exported model has the `thinking`, `keep_reasoning` and `context` of its training.

    Raises:
        UntrustedModuleError: A settings file names a function that is not the user's.
        ValueError: The function cannot be imported, the address names no model, or the run exported none.
    """
    sampling = sampling or Sampling()
    if text in KEYWORDS:
        return KEYWORDS[text]
    if text.startswith(("http://", "https://")):
        url, _, model = text.partition("#")
        if not model:
            raise ValueError(f"player {url!r} names no model. Write it after a #, e.g. {url}#my-model")
        return Endpoint(url, model, sampling=sampling)
    module_name, colon, function = text.partition(":")
    near = near_names(text, KEYWORDS, cutoff=0.8)
    if near and not user_path(text).exists():
        raise ValueError(f"player {text!r} is neither a folder nor a built-in model. Did you mean {near[0]!r}?")
    if not colon:
        return _model_or_run(text, sampling)
    try:
        module = import_user_module(module_name)
    except UntrustedModuleError:
        raise
    except ImportError as error:
        advice = import_advice(module_name, error, "Write 'package.module:function'")
        raise ValueError(f"player {text!r}: {module_name} cannot be imported ({error}). {advice}") from None
    if not hasattr(module, function):
        hint = did_you_mean(function, dir(module))
        raise ValueError(f"player {text!r}: {module_name} has no {function!r}.{hint}")
    return Scripted(check_origin(getattr(module, function), text, ours=False))


def short_names(players: Sequence[str]) -> dict[str, str]:
    """Return players given as text by short names: the ends of the texts, as long as needed to differ."""
    split = re.compile(r"[^A-Za-z0-9_.-]+").split
    parts_of = [[part for part in split(text) if part not in ("", "export")] for text in players]
    for length in range(1, max(map(len, parts_of), default=0) + 1):
        names = ["-".join(parts[-length:]).replace(".", "-").strip("-_") or "player" for parts in parts_of]
        named = dict(zip(names, players, strict=True))
        if len(named) == len(players):
            return named
    if len(set(players)) < len(players):
        raise ValueError(f"cross_play takes each player once, got {', '.join(players)}")
    if players:
        raise ValueError(
            f"players of cross_play cannot be told apart by name, got {', '.join(players)}. Use --players.NAME for each"
        )
    return {}


def _model_or_run(text: str, sampling: Sampling) -> Player:
    folder = user_path(text)
    run, export = (folder, folder / "export") if (folder / "export").is_dir() else (folder.parent, folder)
    if outdated := outdated_export(run):
        _log.warning("player %r: %s", text, outdated)
    if (folder / "config.json").exists():
        return _exported(text, sampling)
    if (export / "config.json").exists():
        return _exported(str(export), sampling)
    models = {config.parent.name: str(config.parent) for config in sorted(export.glob("*/config.json"))}
    if not models and (run == folder or (folder / "checkpoints").is_dir()):
        raise ValueError(
            f"player {text!r} is a run that has not exported a model yet. Models are exported at the end of training. "
            f"To export a checkpoint, run: forge-agents export {shlex.quote(text)} "
            f"--out {shlex.quote(str(folder / 'export'))}"
        )
    if not models:
        return Policy(text, sampling=sampling)
    policies = {agent: _exported(models[name], sampling) for agent, name in _agents_of(run) if name in models}
    if not policies:
        raise ValueError(
            f"player {text!r} has {len(models)} models, and {run / 'config.yaml'} does not say which agents they act "
            f"for. Give a mapping from agent to one of {', '.join(models.values())}"
        )
    return Team(policies, from_run=True)


def _exported(model: str, sampling: Sampling) -> Policy:
    """Return a policy with `model`. If a run has exported the model, its prompts are those of the training."""
    return Policy(model, sampling=sampling, **trained_prompts(model))


def _agents_of(run: Path) -> Iterator[tuple[str, str]]:
    """Yield the agents of a run with the names of their policies, or nothing if its settings cannot be read."""
    mapping = settings_of(run).get("policy_mapping")
    for agent, name in mapping.items() if isinstance(mapping, dict) else ():
        if isinstance(agent, str) and isinstance(name, str):
            yield agent, name
