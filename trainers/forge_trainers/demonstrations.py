"""What is imitated: conversations and episodes as token streams, with the answers marked.

In: rows of conversations, files of them, episodes, run folders. Out: `Demonstration`s. Waits for nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from forge_agents.errors import did_you_mean
from forge_agents.rendering import Renderer
from forge_agents.types import Episode, EpisodeGroup, Message, Trajectory
from forge_trainers.episode_files import EPISODES, read_episodes

if TYPE_CHECKING:
    from forge_trainers.judging import Reward
    from forge_trainers.packing import Sample
    from forge_trainers.sft_config import SFTConfig

Dataset: TypeAlias = "str | os.PathLike[str] | Iterable[Mapping[str, Any] | Episode | EpisodeGroup | Trajectory]"
"""A finite source of conversations: a JSONL file, the folder of a run, or any iterable, such as a Hugging Face dataset.

A row is a mapping with ``messages``, a list of ``{"role", "content"}`` of which every assistant message is learned, or
with ``prompt`` and ``completion``, each a text or such a list, of which only the completion is learned; other keys are
not read. Of an episode the trajectories of the policy that learns are taken; a trajectory given itself always is.
"""

_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demonstration:
    """One token stream to imitate."""

    ids: np.ndarray
    """int32 ``[L]``."""
    mask: np.ndarray
    """bool ``[L]``, True at the tokens of answers, their end-of-turn tokens included."""
    source: str
    """Where it comes from, as errors say it."""

    def sample(self, weight: float = 1.0) -> Sample:
        """What the learner takes; `weight` multiplies the loss of its tokens."""
        from forge_trainers.packing import Sample

        n = len(self.ids)
        return Sample(
            token_ids=tuple(self.ids.tolist()),
            loss_mask=tuple(self.mask.tolist()),
            logprobs=(0.0,) * n,
            advantage=weight,
            versions=(-1,) * n,
            group=0,  # conversations of a batch that begin alike share the computation of that
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """A data set, ready to be packed."""

    items: Sequence[Demonstration]
    counts: Mapping[str, int]
    """What became of what arrived: ``learned``, and why others were left out."""

    @property
    def digest(self) -> str:
        """Equal for equal token streams in the same order."""
        found = hashlib.sha256()
        for item in self.items:
            found.update(len(item.ids).to_bytes(8, "little") + item.ids.tobytes() + item.mask.tobytes())
        return found.hexdigest()


def read_demonstrations(
    data: Dataset, renderer: Renderer, config: SFTConfig, *, policy: str, room: int, reward: Reward | None = None
) -> Demonstrations:
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
    counts: Counter[str] = Counter(learned=0)
    items: list[Demonstration] = []
    played: list[_Played] = []
    for source, thing in _items(data):
        if isinstance(thing, Mapping):
            items.append(_from_row(source, thing, renderer))
        else:
            played += _played(source, thing, policy, counts)
    if played:
        chosen = _best(_rewarded(played, reward), config, counts)
        items += [item for one in chosen for item in _from_trajectory(one, renderer)]
    elif not items and not counts["failed"] and not counts["other policies"]:
        raise ValueError("the dataset is empty; give at least one conversation or episode")
    kept = []
    for item in items:
        if len(item.ids) <= room:
            kept.append(item)
        elif config.too_long == "drop":
            counts["too long"] += 1
        else:
            raise ValueError(
                f"{item.source} has {len(item.ids)} tokens, the learner takes at most {room}; raise "
                "learner.max_tokens_per_microbatch (up to the model's context), shorten it, or set too_long='drop'"
            )
    counts["learned"] = len(kept)
    if not kept:
        left = ", ".join(f"{number} {why}" for why, number in counts.items() if number)
        raise ValueError(
            f"nothing is left to learn ({left}). other policies: none of the episodes' trajectories is of {policy!r}, "
            "so name the policy as in the episodes or pass trajectories; below min_reward: lower it"
        )
    return Demonstrations(items=kept, counts={why: number for why, number in counts.items() if number})


# ---- rows of conversations


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


def _from_row(source: str, row: Mapping[str, Any], renderer: Renderer) -> Demonstration:
    if row.get("messages") is not None:
        messages, learned_from = _messages(source, "messages", row["messages"]), 0
    elif row.get("prompt") is not None and row.get("completion") is not None:
        prompt = _messages(source, "prompt", row["prompt"], text_is="user")
        messages = prompt + _messages(source, "completion", row["completion"], text_is="assistant")
        learned_from = sum(role == "assistant" for role, _ in prompt)
    else:
        known = ("messages", "prompt", "completion")
        near = next((hint for key in row if (hint := did_you_mean(str(key), known))), "")
        keys = ", ".join(map(str, row))
        raise ValueError(f"{source} has the keys {keys}; expected 'messages', or 'prompt' and 'completion'.{near}")
    if sum(role == "assistant" for role, _ in messages) <= learned_from:
        raise ValueError(f"{source} has no assistant message to learn; it has {', '.join(r for r, _ in messages)}")
    return _rendered(source, messages, renderer, learned_from)


def _rendered(
    source: str, messages: Sequence[tuple[str, str]], renderer: Renderer, learned_from: int = 0
) -> Demonstration:
    """`messages` with all answers marked but the first `learned_from`."""
    try:
        said = renderer.dialogue(messages)
    except ValueError as cause:
        raise ValueError(f"{source}: {cause}") from cause
    ids = [token for heard, answer in said for token in (*heard, *answer)]
    mask = [
        learn
        for number, (heard, answer) in enumerate(said)
        for learn in (*[False] * len(heard), *[number >= learned_from] * len(answer))
    ]
    return _stream(source, ids, mask)


def _stream(source: str, ids: Sequence[int], mask: Sequence[bool]) -> Demonstration:
    return Demonstration(ids=np.array(ids, np.int32), mask=np.array(mask, np.bool_), source=source)


def _messages(source: str, key: str, value: Any, *, text_is: str = "") -> list[tuple[str, str]]:
    """Role and text of each message; a text stands for one message where `text_is` says of whom."""
    if isinstance(value, str) and text_is:
        return [(text_is, value)]
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        wanted = "a text or a list of messages" if text_is else "a list of messages"
        raise ValueError(f"{source}: {key!r} is {type(value).__name__}; expected {wanted}")  # noqa: TRY004  # content of a row
    return [_message(f"{source}, {key}[{number}]", message) for number, message in enumerate(value)]


def _message(source: str, message: Any) -> tuple[str, str]:
    if isinstance(message, Message):
        return message.role, message.content
    if not isinstance(message, Mapping):
        found = type(message).__name__
        raise ValueError(f"{source} is {found}; expected {{'role', 'content'}}")  # noqa: TRY004  # content of a row
    for key in ("role", "content"):
        if key not in message:
            near = next((f" Is {other!r} meant?" for other in message if did_you_mean(str(other), [key])), "")
            raise ValueError(f"{source} has no {key!r}; its keys are {', '.join(map(str, message))}.{near}")
    role, content = message["role"], message["content"]
    if role not in _ROLES:
        raise ValueError(f"{source} has the role {role!r}, known are {', '.join(_ROLES)}.{_near_role(role)}")
    if message.get("tool_calls"):
        raise ValueError(f"{source} holds 'tool_calls', which are not read; write calls into the content as text")
    if not isinstance(content, str) or (role == "assistant" and not content.strip()):
        what = "empty" if isinstance(content, str) else f"of type {type(content).__name__}"
        raise ValueError(f"{source} has a content that is {what}; expected text")
    return str(role), content


def _near_role(role: Any) -> str:
    other_names = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
    meant = other_names.get(str(role))
    return f" Did you mean {meant!r}?" if meant else did_you_mean(str(role), _ROLES)


# ---- episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """An episode of a run's folder and the rewards that its agents were trained on."""

    episode: Episode
    rewards: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    """A trajectory that may be learned."""

    source: str
    trajectory: Trajectory
    reward: float
    """NaN where it is not known."""


def _played(source: str, thing: Any, policy: str, counts: Counter[str]) -> list[_Played]:
    """The trajectories to learn of an episode, a group of them, or a trajectory itself."""
    if isinstance(thing, Trajectory):
        return [_Played(source=source, trajectory=thing, reward=thing.reward)]
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
        _Played(
            source=f"{source}, agent {trajectory.agent!r}",
            trajectory=trajectory,
            reward=float(rewards.get(trajectory.agent, float("nan"))),
        )
        for trajectory in own
    ]


def _rewarded(played: Sequence[_Played], reward: Callable[[Sequence[Trajectory]], np.ndarray] | None) -> list[_Played]:
    if reward is None:
        return list(played)
    scores = np.asarray(reward([one.trajectory for one in played]), np.float32)
    if scores.shape != (len(played),):
        raise ValueError(f"the reward returned shape {scores.shape} for {len(played)} trajectories; return one each")
    return [
        _Played(source=one.source, trajectory=one.trajectory, reward=float(score))
        for one, score in zip(played, scores, strict=True)
    ]


def _best(played: Sequence[_Played], config: SFTConfig, counts: Counter[str]) -> list[_Played]:
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


def _from_trajectory(one: _Played, renderer: Renderer) -> list[Demonstration]:
    """Its own tokens where the learner reads them as the actions that were played, else its text."""
    from forge_trainers.packing import samples_from

    trajectory = one.trajectory
    if all(turn.response_ids and renderer.text(turn.response_ids) == turn.action for turn in trajectory.turns):
        samples = samples_from(trajectory, [1.0] * len(trajectory.turns), 0)
        return [_stream(one.source, sample.token_ids, sample.loss_mask) for sample in samples]
    messages = [("system", trajectory.instructions)] if trajectory.instructions else []
    for turn in trajectory.turns:
        messages += [("user", turn.observation), ("assistant", turn.action)]
    return [_rendered(one.source, messages, renderer)]
