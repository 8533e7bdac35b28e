"""What is imitated: data sets of conversations and episodes as token streams, with the answers marked.

In: rows of conversations, files of them, episodes, run folders. Out: `Demonstration`s. Waits for nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

from forge_agents.rollout.rendering import Renderer
from forge_agents.types import Episode, EpisodeGroup, Trajectory
from forge_trainers.offline.conversations import Demonstration, from_row, rendered, stream
from forge_trainers.records.run_folder import EPISODES, read_episodes

if TYPE_CHECKING:
    from forge_agents.types import Reward
    from forge_trainers.offline.config import OfflineConfig, SFTConfig

Dataset: TypeAlias = "str | os.PathLike[str] | Iterable[Mapping[str, Any] | Episode | EpisodeGroup | Trajectory]"
"""A finite source of conversations: a JSONL file, the folder of a run, or any iterable, such as a Hugging Face dataset.

A row is a mapping with ``messages``, a list of ``{"role", "content"}`` of which every assistant message is learned, or
with ``prompt`` and ``completion``, each a text or such a list, of which only the completion is learned; other keys are
not read. Of an episode the trajectories of the policy that learns are taken; a trajectory given itself always is.
"""

T = TypeVar("T", bound="Content")
_log = logging.getLogger(__name__)

class Content(Protocol):
    """What is learned at once: a conversation, or a pair of them."""

    @property
    def content(self) -> bytes: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered(Generic[T]):
    """A data set, ready to be packed."""

    items: Sequence[T]
    counts: Mapping[str, int]
    """What became of what arrived: ``learned``, ``rendered from text``, and why others were left out."""

    @property
    def digest(self) -> str:
        """Equal for equal items in the same order."""
        return hashlib.sha256(b"".join(item.content for item in self.items)).hexdigest()


def read_demonstrations(
    data: Dataset, renderer: Renderer, config: SFTConfig, *, policy: str, room: int, reward: Reward | None = None
) -> Gathered[Demonstration]:
    """Read, filter and tokenise `data`.

    Episodes are taken token by token where the learner's tokenizer reads their tokens as the text that was played;
    what a script, a person or a model of another vocabulary played is rendered from its text.

    Args:
        data: See `Dataset`.
        renderer: Of the model that learns.
        config: What is left out.
        policy: Name of the policy whose part in episodes is learned.
        room: Most tokens of one stream.
        reward: What episodes are filtered by; None is the environment's own reward, and in a run's folder the reward
            that the run trained on.

    Raises:
        ValueError: Nothing is left to learn; a row is malformed, has no answer, or is too long. The message names it.
        TypeError: `data` or a row of it is of no known kind.
    """
    counts: Counter[str] = Counter()
    rows, played = read_items(data, policy, counts)
    items = [from_row(source, row, renderer) for source, row in rows]
    for one in _best(rewarded(played, reward), config, counts):
        items += streams_of(one, renderer, counts)
    kept = [item for item in items if fits((item,), room, config, counts)]
    return gathered(kept, counts, policy)


def read_items(
    data: Dataset, policy: str, counts: Counter[str]
) -> tuple[list[tuple[str, Mapping[str, Any]]], list[Played]]:
    """The rows of `data`, each with where it comes from, and the trajectories to learn of its episodes.

    Args:
        counts: Episodes without any are counted here.
    """
    rows: list[tuple[str, Mapping[str, Any]]] = []
    played: list[Played] = []
    empty = True
    for source, thing in _items(data):
        empty = False
        if isinstance(thing, Mapping):
            rows.append((source, thing))
        else:
            played += _played(source, thing, policy, counts)
    if empty:
        raise ValueError("the dataset is empty; give at least one conversation or episode")
    return rows, played


def fits(streams: Sequence[Demonstration], room: int, config: OfflineConfig, counts: Counter[str]) -> bool:
    """Whether the learner has room for each of `streams`; else they are counted, the first is named, or an error."""
    for item in streams:
        if len(item.ids) > room:
            told = (
                f"{item.source} has {len(item.ids)} tokens, the learner takes at most {room}; raise "
                "learner.max_sample_tokens (up to the model's context) or shorten it"
            )
            if config.too_long == "error":
                raise ValueError(told)
            if not counts["too long"]:
                _log.warning("%s. It is left out, and so is every other that is too long", told)
            counts["too long"] += 1
            return False
    return True


def gathered(items: Sequence[T], counts: Counter[str], policy: str) -> Gathered[T]:
    """`items` with what became of the others; an error where there are none."""
    left = {why: number for why, number in counts.items() if number}
    if not items:
        raise ValueError(
            f"nothing is left to learn ({', '.join(f'{number} {why}' for why, number in left.items())}). "
            f"other policies: none of the episode's trajectories is of {policy!r}, so name the policy as in the "
            "episodes or pass trajectories; too long: raise learner.max_sample_tokens, up to the model's context; "
            "otherwise the settings leave nothing"
        )
    return Gathered(items=items, counts={"learned": len(items), **left})


def _items(data: Dataset) -> Iterator[tuple[str, Any]]:
    if isinstance(data, str | os.PathLike):
        yield from _files(Path(data))
        return
    if isinstance(data, Mapping):
        raise TypeError(
            f"the dataset is a mapping with the keys {', '.join(map(str, data))}; pass one of its values, such as "
            "dataset['train']"
        )
    if isinstance(data, Episode | EpisodeGroup | Trajectory):
        data = [data]
    if not isinstance(data, Iterable):
        raise TypeError(f"a dataset is a path or an iterable of rows, got {type(data).__name__}")
    for number, row in enumerate(data):
        if not isinstance(row, Mapping | Episode | EpisodeGroup | Trajectory):
            raise TypeError(
                f"row {number} is a {type(row).__name__}; expected a mapping with 'messages', or an fa.Episode, "
                "fa.EpisodeGroup or fa.Trajectory"
            )
        yield f"row {number}", row


def _files(path: Path) -> Iterator[tuple[str, Any]]:
    if path.is_dir():
        for number, (episode, rewards) in enumerate(read_episodes(path)):
            yield f"episode {number} of {path / EPISODES}", _Scored(episode=episode, rewards=rewards)
        return
    if not path.is_file():
        raise ValueError(f"{path} is neither a JSONL file nor the folder of a run")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as cause:
                raise ValueError(f"{path}:{number} is not JSON ({cause}); write one object per line") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number} is a JSON {type(row).__name__}; write one object per line")  # noqa: TRY004  # content of a file
            yield f"{path}:{number}", row


# ---- episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """An episode of a run's folder and the rewards that its agents were trained on."""

    episode: Episode
    rewards: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A trajectory that may be learned."""

    source: str
    trajectory: Trajectory
    reward: float
    """NaN where it is not known."""


def _played(source: str, thing: Any, policy: str, counts: Counter[str]) -> list[Played]:
    """The trajectories to learn of an episode, a group of them, or a trajectory itself."""
    if isinstance(thing, Trajectory):
        return [Played(source=source, trajectory=thing, reward=thing.reward)]
    if isinstance(thing, EpisodeGroup):
        return [
            one
            for number, episode in enumerate(thing.episodes)
            for one in _played(f"{source}, episode {number}", episode, policy, counts)
        ]
    episode, rewards = (thing.episode, thing.rewards) if isinstance(thing, _Scored) else (thing, thing.rewards)
    if episode.error is not None:
        counts["failed"] += 1
        return []
    own = [t for t in episode.trajectories.values() if t.policy == policy and t.turns]
    if not own:
        counts["other policies"] += 1
    return [
        Played(
            source=f"{source}, agent {trajectory.agent!r}",
            trajectory=trajectory,
            reward=float(rewards.get(trajectory.agent, float("nan"))),
        )
        for trajectory in own
    ]


def rewarded(played: Sequence[Played], reward: Reward | None) -> list[Played]:
    """`played` with what `reward` says of them; as they are where it is None."""
    if reward is None or not played:
        return list(played)
    scores = np.asarray(reward([one.trajectory for one in played]), np.float32)
    if scores.shape != (len(played),):
        raise ValueError(f"the reward returned shape {scores.shape} for {len(played)} trajectories; return one each")
    return [
        Played(source=one.source, trajectory=one.trajectory, reward=float(score))
        for one, score in zip(played, scores, strict=True)
    ]


def _best(played: Sequence[Played], config: SFTConfig, counts: Counter[str]) -> list[Played]:
    """Those that `min_reward` and `best_per_group` leave, in their order. A NaN reward reaches no bound."""
    if config.min_reward is None and config.best_per_group is None:
        return list(played)
    known = [one for one in played if not np.isnan(one.reward)]
    counts["without reward"] += len(played) - len(known)
    good = [one for one in known if config.min_reward is None or one.reward >= config.min_reward]
    counts["below min_reward"] += len(known) - len(good)
    if config.best_per_group is None:
        return good
    groups: dict[tuple[str, int, str], list[int]] = {}
    for number, one in enumerate(good):
        key = (one.trajectory.env_id, one.trajectory.seed, one.trajectory.agent)
        groups.setdefault(key, []).append(number)
    # sorted is stable: of equals the earlier stays
    chosen = sorted(
        number
        for members in groups.values()
        for number in sorted(members, key=lambda n: -good[n].reward)[: config.best_per_group]
    )
    counts["not among the best"] += len(good) - len(chosen)
    return [good[number] for number in chosen]


def streams_of(one: Played, renderer: Renderer, counts: Counter[str]) -> list[Demonstration]:
    """Its own tokens where the learner reads them as the actions that were played, else its text, which is counted."""
    from forge_trainers.batch.packing import samples_from

    trajectory = one.trajectory
    if all(turn.response_ids and renderer.text(turn.response_ids) == turn.action for turn in trajectory.turns):
        samples = samples_from(trajectory, [1.0] * len(trajectory.turns), 0)
        return [stream(one.source, sample.token_ids, sample.loss_mask) for sample in samples]
    counts["rendered from text"] += 1
    messages = [("system", trajectory.instructions)] if trajectory.instructions else []
    for turn in trajectory.turns:
        messages += [("user", turn.observation), ("assistant", turn.action)]
    return [rendered(one.source, messages, renderer)]
