"""Training data as token streams: conversations, pairs and episodes, with the tokens of answers marked."""

from __future__ import annotations

import copy
import hashlib
import itertools
import logging
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np

from forge_agents.envs.reasoning import join_reasoning
from forge_agents.episodes.stored import EPISODES, load_episodes
from forge_agents.files import user_path
from forge_agents.jsonl import json_objects
from forge_agents.policy import KeepReasoning, Oracle
from forge_agents.rollout.conversation import Conversation, Messages
from forge_agents.rollout.rendering import ControlTokenError, Renderer
from forge_agents.types import Episode, EpisodeGroup, NewMessages, Trajectory, Turn
from forge_trainers.offline.rows import RowMessage, RowReader
from forge_verifiers.core.verifier import group_key, reward_of

if TYPE_CHECKING:
    from forge_agents.types import EpisodeBatch, Reward
    from forge_trainers.offline.config import DPOConfig, OfflineConfig, SFTConfig

Dataset: TypeAlias = "str | os.PathLike[str] | Iterable[Mapping[str, Any] | Episode | EpisodeGroup | Trajectory]"
"""A finite source of conversations: a JSONL file, the folder of a run, or any iterable, such as a Hugging Face dataset.

A row is a mapping with ``messages``, a list of ``{"role", "content"}`` whose assistant messages are trained on, or with
``prompt`` and ``completion``, each a text or such a list, of which the completion is trained on. A message may hold the
reasoning before its answer under ``reasoning_content``, ``reasoning`` or ``thinking``. A row may have a ``system``
prompt. An answer with ``weight``, ``loss``, ``train`` or ``loss_mask`` of 0 is context only. Other keys that may change
the training data are refused, and metadata are ignored. From an episode, the trajectories of the trained policy are
used, or all if oracles alone played it. A `Trajectory` is always used. Each of its sessions with rewards of their own
(`Trajectory.sessions`) counts as a trajectory.
"""

T = TypeVar("T", bound="Demonstration | Pair")
_MAX_WAITING = 4096
"""Maximum number of turns of a trajectory that later turns continue from at the same time. Each holds a prompt."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demonstration:
    """A token stream to imitate."""

    ids: np.ndarray
    """Token ids, int32 ``[L]``."""
    mask: np.ndarray
    """bool ``[L]``, True for tokens of answers, including end-of-turn tokens."""
    source: str
    """Origin of the stream, for error messages."""

    @property
    def content(self) -> bytes:
        """Hash of 32 bytes, equal for equal streams."""
        return hashlib.sha256(self.ids.tobytes() + self.mask.tobytes()).digest()

    @property
    def longest(self) -> int:
        """Number of tokens."""
        return len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """Two answers to one prompt, or two episodes of one seed, of which one is better."""

    chosen: tuple[Demonstration, ...]
    """Token streams of the better one. Several if an episode's history was rewritten."""
    rejected: tuple[Demonstration, ...]

    @property
    def content(self) -> bytes:
        """Hash of 32 bytes, equal for equal pairs."""
        parts = (*(s.content for s in self.chosen), b"/", *(s.content for s in self.rejected))
        return hashlib.sha256(b"".join(parts)).digest()

    @property
    def longest(self) -> int:
        """Number of tokens of the longest stream."""
        return max(stream.longest for stream in (*self.chosen, *self.rejected))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered(Generic[T]):
    """A data set, ready to be packed."""

    items: Sequence[T]
    counts: Mapping[str, int]
    """Counts of items: ``learned``, ``rendered from text``, and reasons why others were left out."""

    @property
    def digest(self) -> str:
        """Equal for equal items in the same order."""
        return hashlib.sha256(b"".join(item.content for item in self.items)).hexdigest()


def packed(streams: Iterable[Demonstration]) -> EpisodeBatch:
    """Pack streams into a batch for the learner, with weight 1 for every token of an answer."""
    from forge_trainers.batch.packing import Sample, pack  # loads torch, which reading settings does not need

    return pack(
        [
            Sample(
                token_ids=stream.ids,
                loss_mask=stream.mask,
                logprobs=np.zeros(len(stream.ids)),
                advantage=1.0,
                versions=np.full(len(stream.ids), -1),
                group=0,  # equal beginnings of conversations in a batch are computed once
            )
            for stream in streams
        ]
    )


def read_demonstrations(
    data: Dataset,
    renderer: Renderer,
    config: SFTConfig,
    *,
    policy: str,
    room: int,
    reward: Reward | None = None,
    keep_reasoning: KeepReasoning = "all",
    only_newest: bool = False,
) -> Gathered[Demonstration]:
    """Read, filter and tokenize `data`.

    Episodes keep their tokens if the learner's tokenizer decodes them to the same text. Episodes of scripts, people or
    models of another vocabulary are rendered from their text, as the trained model would have read it. A history that
    was rewritten, because reasoning or turns were dropped or it was forked, becomes several streams. Each answer is
    trained on in one of them.

    Args:
        data: See `Dataset`.
        renderer: Renderer of the trained model.
        config: Filters.
        policy: Name of the policy whose trajectories are used.
        room: Maximum number of tokens of a stream.
        reward: Reward that episodes are filtered by. None: the environment's own reward, or in a run folder the reward
            that the run was trained on.
        keep_reasoning: Reasoning that the trained model reads again, if text is rendered.
        only_newest: Whether the trained model reads only instructions and newest observation of an episode whose text
            is rendered. Rows keep all their messages.

    Raises:
        ValueError: No data are left, or a row is malformed, has no answer, or is too long. The message names it.
        TypeError: `data` or a row has an unknown type.
    """
    reader = _Reader(renderer, config, policy, room, keep_reasoning, only_newest=only_newest)
    selection = {"min_reward": config.min_reward, "best_per_group": config.best_per_group}
    rows, played = reader.read(data, reward, selection)
    conversations = [(source, reader.rows.conversation(source, row)) for source, row in rows]
    items = [item for source, messages in conversations if messages for item in reader.rendered(source, messages)]
    reader.report_rows()
    for item in _best(played, config, reader.counts):
        items += reader.streams(item)
    return reader.gathered([item for item in items if reader.fits(item)])


def read_pairs(
    data: Dataset,
    renderer: Renderer,
    config: DPOConfig,
    *,
    policy: str,
    room: int,
    reward: Reward | None = None,
    keep_reasoning: KeepReasoning = "all",
    only_newest: bool = False,
) -> Gathered[Pair]:
    """Read pairs from `data`.

    A row has ``chosen`` and ``rejected``, each a text or a list of messages, and ``prompt``, unless both begin with it.
    Each agent's best and worst trajectory of one environment and seed make a pair. Sessions with rewards of their own
    are compared if they also begin with the same messages. Pairs of equal answers are left out.

    Arguments and errors are those of `read_demonstrations`. `reward` compares episodes.
    """
    reader = _Reader(renderer, config, policy, room, keep_reasoning, only_newest=only_newest)
    rows, played = reader.read(data, reward, {"min_difference": config.min_difference or None})
    sides = [(source, reader.rows.sides(source, row)) for source, row in rows]
    pairs = [
        Pair(
            chosen=reader.rendered(f"{source}, chosen", both[0]),
            rejected=reader.rendered(f"{source}, rejected", both[1]),
        )
        for source, both in sides
        if both is not None
    ]
    reader.report_rows()
    for better, worse in _extremes(played, config, reader.counts):
        chosen, rejected = reader.streams(better), reader.streams(worse)
        if chosen and rejected:
            pairs.append(Pair(chosen=chosen, rejected=rejected))
    pairs = [pair for pair in pairs if reader.fits(*pair.chosen, *pair.rejected)]
    different = [pair for pair in pairs if [s.content for s in pair.chosen] != [s.content for s in pair.rejected]]
    reader.counts["pairs of equal answers"] += len(pairs) - len(different)
    return reader.gathered(different)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    """A trajectory that may be trained on."""

    source: str
    trajectory: Trajectory
    reward: float
    """NaN if it is unknown."""
    begin: object = None
    """First messages, if this is one session of a trajectory with rewards by session."""


class _Reader:
    """Reads one data set, and counts what is left out."""

    def __init__(
        self,
        renderer: Renderer,
        config: OfflineConfig,
        policy: str,
        room: int,
        keep_reasoning: KeepReasoning,
        *,
        only_newest: bool,
    ) -> None:
        self._renderer, self._config, self._policy, self._room = renderer, config, policy, room
        self._keep_reasoning, self._only_newest = keep_reasoning, only_newest
        self.rows, self.counts = RowReader(), Counter[str]()

    def read(
        self, data: Dataset, reward: Reward | None, selection: Mapping[str, object]
    ) -> tuple[list[tuple[str, Mapping[str, Any]]], list[_Played]]:
        """Return the rows of `data` with their origins, and the trajectories of its episodes.

        `selection` has the settings that select episodes, for an error if there are none.
        """
        rows: list[tuple[str, Mapping[str, Any]]] = []
        played: list[_Played] = []
        for source, thing in _items(data):
            if isinstance(thing, Mapping):
                rows.append((source, thing))
            else:
                played += self._trajectories(source, thing)
        if not rows and not played and not self.counts:
            raise ValueError("the dataset is empty. Give at least one conversation or episode")
        if reward is not None and played:
            scores = np.asarray(reward_of(reward)([item.trajectory for item in played]), np.float32)
            if scores.shape != (len(played),):
                raise ValueError(
                    f"the reward returned shape {scores.shape} for {len(played)} trajectories. Return one each"
                )
            played = [replace(item, reward=float(score)) for item, score in zip(played, scores, strict=True)]
        used = [name for name, value in {**selection, "reward": reward}.items() if value is not None]
        if rows and not played and not self.counts and used:
            raise ValueError(
                f"{used[0]} selects episodes, and the data are rows. Leave it out, or select the rows before"
            )
        return rows, played

    def _trajectories(self, source: str, thing: Any) -> list[_Played]:
        """Return the trajectories of an episode, a group of episodes, or a trajectory that may be trained on."""
        if isinstance(thing, Trajectory):
            return _sessions(source, thing, thing.reward, thing.session_rewards)
        if isinstance(thing, EpisodeGroup):
            return [
                item
                for number, episode in enumerate(thing.episodes)
                for item in self._trajectories(f"{source}, episode {number}", episode)
            ]
        if isinstance(thing, Episode):
            thing = thing, thing.rewards, {agent: t.session_rewards for agent, t in thing.trajectories.items()}
        episode, rewards, session_rewards = thing
        if episode.error is not None:
            self.counts["failed"] += 1
            return []
        is_oracle = all(t.policy == Oracle.name for t in episode.trajectories.values())
        members = [t for t in episode.trajectories.values() if (is_oracle or t.policy == self._policy) and t.turns]
        if not members:
            self.counts["other policies"] += 1
        return [
            item
            for trajectory in members
            for item in _sessions(
                f"{source}, agent {trajectory.agent!r}",
                trajectory,
                float(rewards.get(trajectory.agent, math.nan)),
                session_rewards.get(trajectory.agent),
            )
        ]

    def report_rows(self) -> None:
        """Add the counts of rows, and warn about ignored keys."""
        self.counts.update(self.rows.counts)
        if self.rows.unread:
            names = ", ".join(map(repr, sorted(self.rows.unread)[:20]))
            _log.warning("rows and messages have keys that are not read: %s", names)

    def rendered(self, source: str, messages: Sequence[RowMessage]) -> tuple[Demonstration, ...]:
        """Return the token streams of a row, without messages after the last trained answer."""
        turns: list[Turn] = []
        learned: list[bool] = []
        waiting: list[tuple[str, str]] = []
        for message in messages:
            if message.role != "assistant":
                waiting.append((message.role, message.text))
                continue
            if not turns and not waiting:
                raise ValueError(f"{source}: it begins with an answer. Put the question or the instructions before it")
            new = NewMessages(messages=tuple(waiting), only_results=all(by == "tool" for by, _ in waiting))
            turns.append(
                Turn(agent="", index=len(turns), observation="", action=message.text, reward=0.0, new_messages=new)
            )
            learned.append(message.learned)
            waiting.clear()
        last = max((number for number, is_learned in enumerate(learned) if is_learned), default=-1)
        spoken = Trajectory(agent="", policy="", turns=tuple(turns[: last + 1]))
        return _rerendered(source, spoken, self._renderer, self._keep_reasoning, room=self._room, learned=learned)

    def streams(self, item: _Played) -> tuple[Demonstration, ...]:
        """Return the streams of a trajectory: its tokens if the learner decodes them to the same text, else its text.

        A trajectory with control tokens in its text is left out and counted. A warning names the first one.
        """
        trajectory = item.trajectory
        if all(len(turn.response_ids) and _reads_alike(turn, self._renderer) for turn in trajectory.turns):
            return _marked(item.source, trajectory)
        try:
            keep, newest = self._keep_reasoning, self._only_newest
            streams = _rerendered(item.source, trajectory, self._renderer, keep, room=self._room, only_newest=newest)
        except ControlTokenError as cause:
            if not self.counts["control tokens in a text"]:
                _log.warning("%s. It is left out, like every other episode with one", cause)
            self.counts["control tokens in a text"] += 1
            return ()
        self.counts["rendered from text"] += 1
        return streams

    def fits(self, *streams: Demonstration) -> bool:
        """Return whether no stream is too long. Otherwise count it and warn once, or raise, depending on `too_long`."""
        long = next((item for item in streams if len(item.ids) > self._room), None)
        if long is None:
            return True
        message = (
            f"{long.source} has {len(long.ids)} tokens, the learner takes at most {self._room}. Raise "
            "max_sample_tokens (up to the model's context) or shorten it"
        )
        if self._config.too_long == "error":
            raise ValueError(message)
        if not self.counts["too long"]:
            _log.warning("%s. It is left out, like every other that is too long", message)
        self.counts["too long"] += 1
        return False

    def gathered(self, items: Sequence[T]) -> Gathered[T]:
        """Return the data set. Raises ValueError if nothing is left of it."""
        excluded = {reason: number for reason, number in self.counts.items() if number}
        if not items:
            remedies = {
                "other policies": f" No trajectory of the episodes is of {self._policy!r}: name the policy as in the "
                "episodes, or pass trajectories.",
                "too long": " Raise max_sample_tokens, up to the model's context.",
                "pairs of equal answers": " Give pairs whose answers differ.",
            }
            advice = "".join(text for reason, text in remedies.items() if reason in excluded)
            raise ValueError(
                f"nothing is left to learn ({', '.join(f'{number} {reason}' for reason, number in excluded.items())})."
                f"{advice or ' The settings exclude all data.'}"
            )
        return Gathered(items=items, counts={"learned": len(items), **excluded})


def _items(data: Dataset) -> Iterator[tuple[str, Any]]:
    """Yield rows or episodes with their origins. From a run folder also the rewards that were trained on."""
    if isinstance(data, str | os.PathLike):
        yield from _items_of_file(user_path(data))
        return
    if isinstance(data, Mapping):
        raise TypeError(
            f"the dataset is a mapping with the keys {', '.join(map(str, data))}. Pass one of its values, such as "
            "dataset['train']"
        )
    if isinstance(data, Episode | EpisodeGroup | Trajectory):
        data = [data]
    if not isinstance(data, Iterable):
        raise TypeError(f"a dataset is a path or an iterable of rows, got {type(data).__name__}")
    for number, row in enumerate(data):
        if not isinstance(row, Mapping | Episode | EpisodeGroup | Trajectory):
            raise TypeError(
                f"row {number} is a {type(row).__name__}. Expected a mapping with 'messages', or an fa.Episode, "
                "EpisodeGroup or Trajectory"
            )
        yield f"row {number}", row


def _items_of_file(path: Path) -> Iterator[tuple[str, Any]]:
    if path.is_dir():
        table = load_episodes(path)
        for row, episode in zip(table, table.episodes(), strict=True):
            trained = zip(row["agents"], row["trained_rewards"], strict=True)
            rewards = {agent: reward for agent, reward in trained if reward is not None}
            session_rewards = dict(zip(row["agents"], row["trained_session_rewards"], strict=True))
            yield f"episode {row['episode']} of {path / EPISODES}", (episode, rewards, session_rewards)
        return
    if not path.is_file():
        problem = "is neither a JSONL file nor the folder of a run" if path.exists() else "does not exist"
        raise ValueError(
            f"{path.absolute()} {problem}. For the games of an environment's oracle, use fa.demonstrations(id, games), "
            "or set `games` next to `data: id` in a file"
        )
    yield from json_objects(path)


def _sessions(
    source: str, trajectory: Trajectory, reward: float, session_rewards: Sequence[float] | None
) -> list[_Played]:
    """Return a trajectory, or each of its sessions if these have rewards of their own, NaN if these are unknown."""
    if trajectory.session_rewards is None:
        return [_Played(source=source, trajectory=trajectory, reward=reward)]
    parts = trajectory.sessions
    rewards = session_rewards if session_rewards and len(session_rewards) == len(parts) else [math.nan] * len(parts)
    return [
        _Played(
            source=f"{source}, session {number}",
            trajectory=part,
            reward=reward,
            begin=(part.instructions, part.turns[0].observation, part.turns[0].new_messages),
        )
        for number, (part, reward) in enumerate(zip(parts, rewards, strict=True))
        if part.turns
    ]


def _marked(source: str, trajectory: Trajectory) -> tuple[Demonstration, ...]:
    """Return the streams of a trajectory in its own tokens, with its answers marked."""
    from forge_trainers.batch.packing import samples_from

    return tuple(
        Demonstration(ids=sample.token_ids.astype(np.int32), mask=sample.advantages > 0, source=source)
        for sample in samples_from(trajectory, [1.0] * len(trajectory.turns), 0)
        if sample.advantages.any()
    )


def _best(played: Sequence[_Played], config: SFTConfig, counts: Counter[str]) -> list[_Played]:
    """Return the trajectories that pass `min_reward` and `best_per_group`, in order. NaN rewards pass no bound."""
    if config.min_reward is None and config.best_per_group is None:
        return list(played)
    scored = [item for item in played if not np.isnan(item.reward)]
    counts["without reward"] += len(played) - len(scored)
    good = [item for item in scored if config.min_reward is None or item.reward >= config.min_reward]
    counts["below min_reward"] += len(scored) - len(good)
    if config.best_per_group is None:
        return good
    # sorted is stable, so the earlier of equal rewards is kept
    siblings = _siblings([(group_key(item.trajectory),) for item in good])
    best = [sorted(members, key=lambda n: -good[n].reward)[: config.best_per_group] for members in siblings]
    chosen = sorted(number for members in best for number in members)
    counts["not among the best"] += len(good) - len(chosen)
    return [good[number] for number in chosen]


def _extremes(played: Sequence[_Played], config: DPOConfig, counts: Counter[str]) -> list[tuple[_Played, _Played]]:
    """Return the best and worst trajectory of each agent and seed, the earlier of equal ones."""
    scored = [item for item in played if not np.isnan(item.reward)]
    counts["without reward"] += len(played) - len(scored)
    pairs = []
    for members in _siblings([(group_key(item.trajectory), item.begin) for item in scored]):
        best, worst = (scored[end(members, key=lambda n: scored[n].reward)] for end in (max, min))
        if best.reward - worst.reward > config.min_difference:
            pairs.append((best, worst))
        else:
            counts["groups without a difference"] += 1
    return pairs


def _siblings(keys: Iterable[object]) -> Iterable[list[int]]:
    """Return the indices of equal keys."""
    groups: dict[object, list[int]] = {}
    for number, key in enumerate(keys):
        groups.setdefault(key, []).append(number)
    return groups.values()


def _reads_alike(turn: Turn, renderer: Renderer) -> bool:
    """Return whether the learner's tokenizer decodes the tokens of `turn` to its prompt and answer."""
    try:
        return _decodes_alike(turn, renderer)
    except OverflowError:  # a token below 0 or above 32 bits, which no tokenizer has
        return False


def _decodes_alike(turn: Turn, renderer: Renderer) -> bool:
    if renderer.parse(turn.response_ids) == (turn.reasoning, turn.action):
        return True
    # The action may be only a part of the text: after a stop text, for a choice of a game, or for rewritten calls. In
    # these cases the decoded prompt shows whether the tokens are the learner's.
    named = [call.name for call in turn.tool_calls if call.name]
    text = renderer.text(turn.response_ids)
    if (turn.action or turn.reasoning) not in text and not (named and all(name in text for name in named)):
        return False
    try:
        renderer.answer(text, cut=True)  # reward and reader see the action only, so the rest opens no role
    except ControlTokenError:
        return False
    messages = turn.new_messages.messages if turn.new_messages is not None else ()
    return renderer.reads(turn.prompt_ids, messages[-1][1] if messages else turn.observation)


@dataclass(slots=True, eq=False)
class _Stream:
    ids: tuple[int, ...] = ()
    """Tokens, the first ones if the stream is too long."""
    length: int = 0
    answers: list[tuple[int, int]] = field(default_factory=list)
    """Start and end of each answer to learn."""


class _Streams:
    """Builds the token streams of a trajectory, turn by turn. A stream of more than `room` tokens has only a length."""

    def __init__(self, source: str, room: int) -> None:
        self._source, self._room = source, room
        self._open: dict[int, tuple[int, _Stream]] = {}
        """Number and stream of each branch that goes on."""
        self._closed: dict[int, Demonstration] = {}
        self._count = itertools.count()

    def add(
        self, branch: int, prompt_ids: tuple[int, ...], num_cut: int, response_ids: tuple[int, ...], learned: bool
    ) -> None:
        """Add an answer. `prompt_ids` are the first tokens of the prompt without `num_cut` others.

        If they begin with the stream of the branch, the answer continues it.
        """
        if not response_ids:
            return
        _, stream = self._open.get(branch, (0, None))
        if stream is None or prompt_ids[: len(stream.ids)] != stream.ids:
            self.close(branch)
            stream = _Stream()
            self._open[branch] = next(self._count), stream
        if not prompt_ids:
            raise ValueError("the prompt is empty. Put the question or the instructions before the answer")
        start = len(prompt_ids) + num_cut
        stream.length = start + len(response_ids)
        stream.ids = (prompt_ids + response_ids)[: self._room + 1]
        if learned:
            stream.answers.append((start, stream.length))

    def close(self, branch: int) -> None:
        """End the stream of a branch."""
        number, stream = self._open.pop(branch, (0, None))
        if stream is None or not stream.answers:
            return
        if stream.length > self._room:  # arrays without memory
            ids, mask = np.broadcast_to(np.int32(0), stream.length), np.broadcast_to(np.True_, stream.length)
        else:
            ids, mask = np.asarray(stream.ids, np.int32), np.zeros(stream.length, np.bool_)
            for start, stop in stream.answers:
                mask[start:stop] = True
        self._closed[number] = Demonstration(ids=ids, mask=mask, source=self._source)

    def result(self) -> tuple[Demonstration, ...]:
        """End all streams, and return them in the order of their first answers."""
        for branch in list(self._open):
            self.close(branch)
        return tuple(self._closed[number] for number in sorted(self._closed))


def _rerendered(
    source: str,
    trajectory: Trajectory,
    renderer: Renderer,
    keep_reasoning: KeepReasoning,
    *,
    room: int,
    learned: Sequence[bool] | None = None,
    only_newest: bool = False,
) -> tuple[Demonstration, ...]:
    """Return the streams of a trajectory in tokens of the trained model, as it would have read and written them.

    A short file may have many long prompts, as each turn may continue from any earlier one. Therefore each prompt has
    at most `room` tokens and one more, and is kept only while later turns continue from it.

    Args:
        learned: Whether each turn is learned. None: all are.
        only_newest: Whether each observation begins a conversation, apart from results of the agent's own tool calls.
            Notes and omitted turns of another policy are then left out.
    """

    def written(turn: Turn) -> tuple[int, ...]:
        cut = turn.finish_reason in ("length", "context")
        return renderer.answer(join_reasoning(turn.reasoning, turn.action, cut=cut), cut=cut)

    begun = Conversation(renderer, limit=sys.maxsize, max_tokens=1, keep_reasoning=keep_reasoning)
    waiting: dict[int, tuple[Conversation, tuple[int, ...], int]] = {}
    """By turn that a later one continues: the conversation, its last prompt, and the number of tokens that it lacks."""
    streams = _Streams(source, room)
    try:
        origins = _origins(trajectory.turns, only_newest=only_newest)
        last_use = {after: number for number, (after, _) in enumerate(origins) if after is not None}
        branch_ends = {turn.branch: number for number, turn in enumerate(trajectory.turns)}
        for number, (turn, (after, only_results)) in enumerate(zip(trajectory.turns, origins, strict=True)):
            new_messages = _new_messages(turn, "" if after is not None else trajectory.instructions)
            earlier, last_prompt, num_cut = (begun, (), 0) if after is None else waiting[after]
            talk = copy.copy(earlier)
            is_learned = learned is None or learned[number]
            prompt_ids = talk.prompt(new_messages, only_results=only_results)
            may_fill = turn.new_messages is not None or not only_newest  # otherwise its prompts never fill the context
            if turn.notes is not None and may_fill:
                streams.add(turn.branch, talk.ask_for_notes(), num_cut, written(turn.notes), is_learned)
            if turn.compaction is not None and after is not None and may_fill:
                prompt_ids = talk.drop_turns(turn.compaction.turns, turn.compaction.text, new_messages)
            if prompt_ids[: len(last_prompt)] != last_prompt:  # rendered again, so nothing is cut
                num_cut = 0
            response_ids = written(turn)
            streams.add(turn.branch, prompt_ids, num_cut, response_ids, is_learned)
            if after is not None and last_use[after] == number:
                del waiting[after]
            if number in last_use:
                if len(waiting) == _MAX_WAITING:
                    raise ValueError(f"more than {_MAX_WAITING} turns are continued by later ones")
                first_ids = prompt_ids[: room + 1]
                talk.add_turn(new_messages, *renderer.parse(response_ids), first_ids, response_ids)
                waiting[number] = talk, first_ids, num_cut + len(prompt_ids) - len(first_ids)
            if branch_ends[turn.branch] == number:
                streams.close(turn.branch)
    except ControlTokenError as cause:
        raise ControlTokenError(f"{source}: {cause}") from cause
    except ValueError as cause:
        raise ValueError(f"{source}: {cause}") from cause
    return streams.result()


def _new_messages(turn: Turn, instructions: str) -> Messages:
    """Return the messages that an agent reads before a turn, with `instructions` if it is the first turn."""
    if turn.new_messages is not None and (turn.new_messages.messages or not turn.observation):
        return turn.new_messages.messages
    system = (("system", instructions),) if instructions and turn.new_messages is None else ()
    return (*system, ("user", turn.observation))


def _origins(turns: Sequence[Turn], *, only_newest: bool = False) -> list[tuple[int | None, bool]]:
    """Return for each turn the number of the turn that it continues, and whether only results of tools came since."""
    origins: list[tuple[int | None, bool]] = []
    main, calls = None, 0
    has_calls = any(turn.tool_calls for turn in turns)  # otherwise the environment reads them in a form of its own
    last: dict[int, int] = {}  # last turn of each branch
    numbers = {turn.index: number for number, turn in enumerate(turns)}
    for number, turn in enumerate(turns):
        after: int | None
        if turn.new_messages is None:
            counted = turns[number - 1].info.get("tool_calls") if number else 0
            made = counted if isinstance(counted, int) else 0
            called = not has_calls or (main is not None and bool(turns[main].tool_calls))
            only_results = made > calls and called
            after = None if only_newest and not only_results else main
            main, calls = number, made
        else:
            after, only_results = last.get(turn.branch), turn.new_messages.only_results
            if turn.forked_from is not None:
                after = numbers.get(turn.forked_from, number)
        last[turn.branch] = number
        if after is not None and after >= number:
            raise ValueError(f"turn {turn.index} goes on from turn {turn.forked_from}, which is not before it")
        origins.append((after, only_results))
    return origins
