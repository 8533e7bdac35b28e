"""What is preferred to what: pairs of conversations or of episodes as token streams.

In: rows with a chosen and a rejected answer, episodes. Out: `Pair`s. Waits for nothing.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_agents.rollout.rendering import Renderer
from forge_trainers.offline.conversations import Demonstration, messages_of, rendered, wrong_keys
from forge_trainers.offline.demonstrations import (
    Dataset,
    Gathered,
    Played,
    fits,
    gathered,
    read_items,
    rewarded,
    streams_of,
)

if TYPE_CHECKING:
    from forge_agents.types import Reward
    from forge_trainers.offline.config import DPOConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """Two answers to the same, or two episodes of the same, of which one is better."""

    chosen: tuple[Demonstration, ...]
    """Token streams of the better one; several where an episode's history was rewritten."""
    rejected: tuple[Demonstration, ...]

    @property
    def content(self) -> bytes:
        """32 bytes, equal for equal pairs."""
        parts = (*(s.content for s in self.chosen), b"/", *(s.content for s in self.rejected))
        return hashlib.sha256(b"".join(parts)).digest()


def read_pairs(
    data: Dataset, renderer: Renderer, config: DPOConfig, *, policy: str, room: int, reward: Reward | None = None
) -> Gathered[Pair]:
    """Read `data` and pair it.

    A row has ``chosen`` and ``rejected``, each a text or a list of messages, and the ``prompt`` before both, unless
    they begin with it. Of the episodes with one environment and seed, each agent's best and worst are a pair.

    Args:
        data: As `forge_trainers.offline.demonstrations.Dataset`, but for the rows.
        renderer: Of the model that learns.
        config: What makes a pair.
        policy: Name of the policy whose part in episodes is learned.
        room: Most tokens of one stream.
        reward: What episodes are compared by; None is the environment's own reward, and in a run's folder the reward
            that the run trained on.

    Raises:
        ValueError: Nothing is left to learn; a row is malformed or too long. The message names it.
        TypeError: `data` or a row of it is of no known kind.
    """
    counts: Counter[str] = Counter()
    rows, played = read_items(data, policy, counts)
    pairs = [_from_row(source, row, renderer) for source, row in rows]
    pairs += [
        Pair(chosen=tuple(streams_of(best, renderer, counts)), rejected=tuple(streams_of(worst, renderer, counts)))
        for best, worst in _extremes(rewarded(played, reward), config, counts)
    ]
    kept = [pair for pair in pairs if fits((*pair.chosen, *pair.rejected), room, config, counts)]
    return gathered(kept, counts, policy)


def _from_row(source: str, row: Mapping[str, Any], renderer: Renderer) -> Pair:
    if row.get("chosen") is None or row.get("rejected") is None:
        raise wrong_keys(source, row, ("prompt", "chosen", "rejected"), "'prompt', 'chosen' and 'rejected'")
    given = row.get("prompt")
    prompt = [] if given is None else messages_of(source, "prompt", given, text_is="user")
    chosen, rejected = (
        prompt + messages_of(source, side, row[side], text_is="assistant") for side in ("chosen", "rejected")
    )
    common = 0
    while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
        common += 1
    learned_from = sum(role == "assistant" for role, _ in chosen[:common])
    for side, messages in (("chosen", chosen), ("rejected", rejected)):
        if sum(role == "assistant" for role, _ in messages) <= learned_from:
            raise ValueError(f"{source}: {side!r} has no assistant message of its own; there is nothing to prefer")
    return Pair(
        chosen=(rendered(f"{source}, chosen", chosen, renderer, learned_from),),
        rejected=(rendered(f"{source}, rejected", rejected, renderer, learned_from),),
    )


def _extremes(played: Sequence[Played], config: DPOConfig, counts: Counter[str]) -> list[tuple[Played, Played]]:
    """Best and worst of each agent among siblings; of equals the earlier."""
    groups: dict[tuple[str, int, str], list[Played]] = {}
    for one in played:
        if np.isnan(one.reward):
            counts["without reward"] += 1
            continue
        groups.setdefault((one.trajectory.env_id, one.trajectory.seed, one.trajectory.agent), []).append(one)
    found = []
    for members in groups.values():
        best, worst = max(members, key=lambda one: one.reward), min(members, key=lambda one: one.reward)
        if best.reward - worst.reward > config.min_difference:
            found.append((best, worst))
        else:
            counts["groups without a difference"] += 1
    return found
