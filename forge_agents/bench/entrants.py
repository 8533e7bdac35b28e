"""Who takes part in a benchmark, from policies or from words.

In: players by name. Out: policies that carry their names. Waits for nothing, except imports of scripted players.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace

from forge_agents.errors import did_you_mean
from forge_agents.policy import AnyPolicy, Endpoint, Human, Policy, Random, Sampling, Scripted


def named_players(players: Mapping[str, AnyPolicy | str], sampling: Sampling | None = None) -> dict[str, AnyPolicy]:
    """The players as policies that carry their names.

    Args:
        players: Policies, or words as `read_player` takes them.
        sampling: Of models given as words.

    Raises:
        ValueError: No players, a name or words that make no sense, or an endpoint whose key is not set.
        TypeError: Something that is no player.
    """
    if not isinstance(players, Mapping):
        raise TypeError(f'players must be a mapping such as {{"random": fa.Random()}}, got {type(players).__name__}')
    if not players:
        raise ValueError('no players were given; pass some by name, e.g. {"random": fa.Random()}')
    found: dict[str, AnyPolicy] = {}
    for name, player in players.items():
        policy = read_player(player, sampling) if isinstance(player, str) else player
        if not isinstance(policy, AnyPolicy):
            raise TypeError(
                f"player {name!r} is a {type(policy).__name__}; use fa.Policy, fa.Endpoint, fa.Human, fa.Random, "
                'fa.Scripted, or words such as "random" or a model\'s name'
            )
        found[name] = replace(policy, name=name)
        if isinstance(policy, Endpoint):
            policy.api_key()
    return found


def read_player(words: str, sampling: Sampling | None = None) -> AnyPolicy:
    """A player from words.

    ``random``; ``human``; ``package.module:function``, a scripted player; ``http://host:port/v1#model``, a model behind
    an endpoint; anything else is a model: a built-in name, a Hugging Face id or a folder.

    Raises:
        ValueError: The function cannot be imported, or the address names no model.
    """
    sampling = sampling or Sampling()
    if words in ("random", "human"):
        return Random() if words == "random" else Human()
    if words.startswith(("http://", "https://")):
        url, _, model = words.partition("#")
        if not model:
            raise ValueError(f"player {url!r} names no model; write it after a #, e.g. {url}#my-model")
        return Endpoint(url, model, sampling=sampling)
    module, colon, function = words.partition(":")
    if not colon:
        return Policy(words, sampling=sampling)
    try:
        home = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"player {words!r}: {module} cannot be imported: {error}") from None
    if not hasattr(home, function):
        raise ValueError(f"player {words!r}: {module} has no {function!r}.{did_you_mean(function, dir(home))}")
    return Scripted(getattr(home, function))
