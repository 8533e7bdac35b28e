"""What flows between the stages: frozen, complete at construction, defined once.

In: nothing. Out: the types that environments, policies, verifiers and learners hand to each other. Waits for nothing.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from forge_agents.display import visible

if TYPE_CHECKING:
    import numpy as np
    from tensordict import TensorDict

_Told: TypeAlias = tuple[str, list[tuple[str, str]]]
FinishReason: TypeAlias = Literal["stop", "length", "context", "scripted"]
"""Why a response ended: end-of-turn token, `max_tokens`, no room left in the context, or not made by a model."""

Where: TypeAlias = Literal["make", "reset", "observe", "step", "policy", "reward"]
"""What failed in an episode."""

EndReason: TypeAlias = Literal["terminated", "truncated", "turn_limit", "context", "error"]
"""Why an episode ended: the game was over, or cut itself off, or had its turns, or filled a context, or failed."""

EpisodeBatch: TypeAlias = "TensorDict"
"""What a learner eats: token streams, packed end to end. A TensorDict with two entries.

``tokens``, batch size ``[T]``, one row per token of any sample:
    ``ids`` int64; ``loss_mask`` bool, True where the policy sampled the token; ``logprobs`` float32, the sampler's,
    0 where masked; ``advantages`` float32, 0 where masked; ``versions`` int64, the weights that sampled the token,
    -1 where masked; ``turn`` int64, the number of its turn in the trajectory, -1 where masked.
``samples``, batch size ``[n]``, one row per training sample:
    ``start`` and ``length`` int64, its span in ``tokens``; ``group`` int64, equal for siblings, whose common first
    tokens may be computed once; ``trajectory`` int64, equal for samples of one trajectory.

Built by `forge_trainers.batch.packing.pack`.
"""


class _Kept:
    """What stored episodes hold; pydantic, which reads them, refuses a field that is not known here."""

    __slots__ = ()
    __pydantic_config__: ClassVar = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message as a chat template takes it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    """Who speaks, where the template distinguishes speakers."""
    tool_call_id: str | None = None
    """The call that a ``tool`` message answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan(_Kept):
    """Tokens ``start`` to ``end`` (exclusive) of a response were sampled by weights ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One response of a served model to one prompt."""

    token_ids: tuple[int, ...]
    """Sampled tokens, the end-of-turn token included where the model wrote it."""
    logprobs: tuple[float, ...]
    """The sampler's natural-log probability of each token, under the distribution it was drawn from."""
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    """Which weights sampled which tokens, in order. Tokens in none of them were put there and not sampled: those that
    close a thought whose budget is spent."""
    top_logprobs: tuple[Mapping[int, float], ...] = ()
    """Per token, the most probable ids there with their natural-log probabilities; empty where nobody asked."""
    seconds: float = field(default=0.0, compare=False)
    """From the request's arrival at the engine to the last token; 0 where nobody measured."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"{len(self.token_ids)} tokens arrived with {len(self.logprobs)} logprobs; send one per token"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall(_Kept):
    """What somebody asked for. Its `str` is the form in which an environment reads it, whoever wrote it and however."""

    name: str
    """Empty where it could not be read."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """JSON values by name."""
    error: str | None = None
    """Why the call could not be read, for the model; None if it could."""

    def __str__(self) -> str:
        content = {"arguments": dict(self.arguments)} if self.error is None else {"error": self.error}
        return f"<tool_call>\n{json.dumps({'name': self.name, **content}, ensure_ascii=False)}\n</tool_call>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage(_Kept):
    """Tokens of one request, as an endpoint counts them."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction(_Kept):
    """Turns that a model does not read any more, because its context has no room for them."""

    how: Literal["window", "summarise", "compact"]
    """By `Policy.context`; "compact" where an environment's hook of this name wrote the text."""
    turns: int
    """How many of the seat's turns in this branch, from the first on; what it observed in the very first stays."""
    text: str
    """What the model reads in their place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard(_Kept):
    """What a conversation goes on with, where a seat holds several."""

    messages: tuple[tuple[str, str], ...] = ()
    """Role and text of each; empty where that is the observation and nothing else."""
    only_results: bool = False
    """Whether they are nothing but the results of the seat's own tool calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(_Kept):
    """One decision of one agent."""

    agent: str
    index: int
    """Place in the episode's global order of turns, from 0."""
    observation: str
    """What the agent read before it decided."""
    action: str
    """What it answered, as the environment received it."""
    thought: str = ""
    """Its reasoning before the answer, without tags. No other agent is shown it; `response` holds it for verifiers."""
    reasoning_text: str = ""
    """The start of the response, up to the answer, exactly as the policy wrote it: the reasoning in its tags, including
    a tag that the prompt has opened. Empty where the policy wrote no such tags."""
    thought_tokens: int = 0
    """How many tokens the response begins with that are the thought, its tags included; 0 where no model thought."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls in its answer, where the environment gives the seat tools; which of them ran is the game's say."""
    reward: float
    """Environment reward from this decision up to the agent's next one. Finite."""
    terminated: bool = False
    """The game ended for this agent before its next decision."""
    truncated: bool = False
    """A limit cut the game off before its next decision."""
    policy: str = ""
    """Name of the policy that decided."""
    branch: int = 0
    """Which of the seat's conversations it belongs to, numbered from 0 as they begin; the main one is 0 unless another
    (a side question, a call of a program that does not go on from the call before) was begun first. Their turns may lie
    between each other in any order. A turn goes on from the last turn of its own branch, and of no other. All branches
    are one trajectory: `index`, rewards and advantages know nothing of them."""
    forked_from: int | None = None
    """Of a branch's first turn, the `index` of the seat's turn whose conversation it goes on from. None where it begins
    a conversation, and in all later turns."""
    heard: Heard | None = None
    """What its conversation goes on with; None where the main one goes on with the observation."""
    prompt_ids: tuple[int, ...] = ()
    """Tokens the model read; empty where no model decided."""
    response_ids: tuple[int, ...] = ()
    """Tokens the model sampled, never re-tokenised, and those that closed its thought; empty where no model decided."""
    logprobs: tuple[float, ...] = ()
    """The sampler's log-probability of each response token; 0 of one that was not sampled."""
    versions: tuple[VersionSpan, ...] = ()
    """Which weights sampled which response tokens; those in none were put there, and nothing is learned from them."""
    finish_reason: FinishReason = "scripted"
    generate_s: float = 0.0
    """Seconds from the request to the response, queueing included; of a served model as its engine counts them."""
    compaction: Compaction | None = None
    """What was left out before this turn; `prompt_ids` are then a history written anew. None where nothing was."""
    notes: Turn | None = None
    """Notes that the policy wrote before this turn, when its context was full: `observation` is what it was asked,
    `action` the notes. Nobody else hears of them, and they have no reward of their own: they are trained as a part of
    this turn, with its number and advantage. None where there are none."""
    usage: Usage | None = None
    """Tokens of an endpoint's answer, which brings none of them along; None elsewhere, or where it does not say."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """The environment's `infos[agent]` after this decision, JSON-safe."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(
                f"reward of agent {self.agent!r} is {self.reward}; environments must return finite rewards"
            )
        if len(self.response_ids) != len(self.logprobs):
            raise ValueError(
                f"{len(self.response_ids)} response tokens with {len(self.logprobs)} logprobs; send one per token"
            )

    def __str__(self) -> str:
        return "\n".join(_lines(*self._told()))

    def _told(self) -> _Told:
        """What people are shown: a heading, and labelled texts below it."""
        said = [] if self.compaction is None else [("forgets", self.compaction.text)]
        said += [("reads", self.observation), *([("thinks", self.thought)] if self.thought else [])]
        said.append(("answers", self.action))
        called = (call for call in self.tool_calls if call.error is None)
        said += [("calls", f"{call.name} {json.dumps(call.arguments, ensure_ascii=False)}") for call in called]
        said += [("cut off", _CUT[self.finish_reason])] if self.finish_reason in _CUT else []
        said += [("reward", f"{self.reward:+g}")] if self.reward else []
        left = "" if self.forked_from is None else f" from turn {self.forked_from + 1}"
        beside = f", branch {self.branch}{left}" if self.branch or left else ""
        return f"{self.index + 1}. {self.agent} ({self.policy}{beside})", said

    @property
    def response(self) -> str:
        """All that the policy wrote: its reasoning, in tags, and the answer.

        A turn that has a `thought` and no `reasoning_text`, such as an imported one, shows the thought in ``<think>``.
        """
        thought = f"<think>\n{self.thought}\n</think>\n\n" if self.thought else ""
        return (self.reasoning_text or thought) + self.action

    @property
    def parts(self) -> tuple[Turn, ...]:
        """All that a model wrote for it, in order: the notes, where there are any, and the turn itself."""
        return (self,) if self.notes is None else (self.notes, self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory(_Kept):
    """One agent's view of one episode."""

    agent: str
    policy: str
    turns: tuple[Turn, ...]
    early_reward: float = 0.0
    """Environment reward that arrived before the agent's first decision."""
    instructions: str = ""
    """The seat's system prompt; empty where the environment gives none."""
    env_id: str = ""
    seed: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)
    """The environment's last `infos[agent]`, JSON-safe. Gold answers for verifiers live here."""

    @property
    def reward(self) -> float:
        """Total environment reward of the agent."""
        return math.fsum((self.early_reward, *(turn.reward for turn in self.turns)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeError(_Kept):
    """Why an episode failed: a failed episode is data."""

    where: Where
    kind: str
    """Class name of the exception."""
    message: str
    trace: str = ""


FORMAT = 1
"""Of a stored episode; raised whenever what a field means changes."""
_OF_THE_RUN = ("format", "step", "trained", "rewards", "advantages")
"""What stands beside the episode in a line of a run's ``episodes.jsonl``."""
_CUT = {"length": "by max_tokens", "context": "by the end of the context"}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Episode(_Kept):
    """What happened, from reset to the last turn.

    ``print(episode)`` and a notebook show it as a conversation, in which control characters and the like of what
    models and environments wrote are spelled out.
    """

    env_id: str
    seed: int
    trajectories: Mapping[str, Trajectory]
    """By agent, in the order of `possible_agents`; agents that never decided have no turns."""
    error: EpisodeError | None = None
    end_reason: EndReason = "terminated"
    duration_s: float = 0.0

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns in the order they happened."""
        return tuple(sorted((t for traj in self.trajectories.values() for t in traj.turns), key=lambda t: t.index))

    @property
    def rewards(self) -> dict[str, float]:
        """Total environment reward by agent."""
        return {agent: trajectory.reward for agent, trajectory in self.trajectories.items()}

    @property
    def program_error(self) -> str:
        """Why the program of an `fa.Program` failed after its first call, which is no `error`; empty if it did not.

        It raised, was late, or exited with another status than 0.
        """
        said = (trajectory.info.get("program_error") for trajectory in self.trajectories.values())
        return str(next(filter(None, said), ""))

    def as_json(self) -> dict[str, Any]:
        """Plain values, as a line of a run's ``episodes.jsonl`` holds them."""
        return {"format": FORMAT, **asdict(self)}

    def to_json(self) -> str:
        """The whole episode on one line, tokens and all, as `from_json` reads it.

        Numbers that are not finite, such as log-probabilities of -inf, are written as Python's ``json`` writes them.
        """
        return json.dumps(self.as_json())

    @classmethod
    def from_json(cls, stored: str | bytes | Mapping[str, Any]) -> Episode:
        """The episode that `to_json` wrote, equal to it; or that of a line of a run's ``episodes.jsonl``.

        Args:
            stored: The text, or what ``json.loads`` makes of it.

        Raises:
            ValueError: It is no episode, one of another format, or one with fields that are not known here.
        """
        from pydantic import ValidationError

        try:
            row = stored if isinstance(stored, Mapping) else json.loads(stored)
        except (ValueError, RecursionError) as cause:
            raise ValueError(f"this is no episode: it is not JSON ({cause})") from None
        if not isinstance(row, Mapping):
            raise ValueError(f"this is no episode: a JSON {type(row).__name__}")  # noqa: TRY004  # content of a file
        if row.get("format", FORMAT) != FORMAT:
            raise ValueError(
                f"an episode of format {row['format']!r}; this version of forge_agents reads {FORMAT}: read it with "
                "the version that wrote it"
            )
        try:
            found: Episode = _reader().validate_python({name: row[name] for name in row if name not in _OF_THE_RUN})
        except ValidationError as cause:
            first = cause.errors(include_url=False, include_context=False)[0]
            at = ".".join(map(str, first["loc"])) or "it"
            raise ValueError(f"this is no episode as this version writes it: {visible(at)}: {first['msg']}") from None
        return found

    def __repr__(self) -> str:
        return (
            f"Episode(env_id={self.env_id!r}, seed={self.seed}, {len(self.turns)} turns, rewards={self.rewards}, "
            f"end_reason={self.end_reason!r})"
        )

    def __str__(self) -> str:
        lines = [f"{visible(self.env_id) or 'episode'}, seed {self.seed}"]
        for heading, said in self._told():
            lines += ["", *_lines(heading, said)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = []
        for heading, said in self._told():
            rows.append(f'<tr><td colspan="2" style="text-align:left"><pre><b>{_escaped(heading)}</b></pre></td></tr>')
            rows += [
                f'<tr><td style="vertical-align:top"><pre>{_escaped(label)}</pre></td><td style="text-align:left">'
                f'<pre style="white-space:pre-wrap">{_escaped(text)}</pre></td></tr>'
                for label, text in said
            ]
        title = _escaped(f"{self.env_id or 'episode'}, seed {self.seed}")
        return f"<div><pre><b>{title}</b></pre><table>{''.join(rows)}</table></div>"

    def _told(self) -> Iterator[_Told]:
        """What people are shown: a heading, and labelled texts below it."""
        told: dict[str, list[str]] = {}
        for agent, trajectory in self.trajectories.items():
            told.setdefault(trajectory.instructions, []).append(agent)
        for instructions, agents in told.items():
            if instructions:
                yield ", ".join(agents), [("is told" if len(agents) == 1 else "are told", instructions)]
        yield from (turn._told() for turn in self.turns)
        if self.error is not None:
            said = [("because", f"{self.error.kind}: {self.error.message}")]
            yield f"failed in {self.error.where}", [*said, ("trace", self.error.trace.rstrip())]
        earned = [(agent, f"{t.reward:+g} ({t.policy})") for agent, t in self.trajectories.items()]
        if self.program_error:
            earned.append(("because", f"the program failed: {self.program_error}"))
        ended = f"{self.end_reason} after {len(self.turns)} turn{'' if len(self.turns) == 1 else 's'}"
        yield ended + (": a conversation outgrew its model's context" if self.end_reason == "context" else ""), earned


def _lines(heading: str, said: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield visible(heading)
    width = max([8, *(len(visible(label)) for label, _ in said)])
    for label, text in said:
        for number, line in enumerate(visible(text).split("\n")):
            yield f"  {'' if number else visible(label):<{width}} {line}".rstrip()


def _escaped(text: str) -> str:
    return html.escape(visible(text))


@cache
def _reader() -> Any:
    """Builds an episode of plain values, and checks the type of each."""
    from pydantic import TypeAdapter

    return TypeAdapter(Episode)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeGroup:
    """G siblings: same environment, same seed, same opponents. GRPO compares them with each other."""

    env_id: str
    seed: int
    episodes: tuple[Episode, ...]

    def __post_init__(self) -> None:
        strangers = [e for e in self.episodes if (e.env_id, e.seed) != (self.env_id, self.seed)]
        if strangers:
            raise ValueError(
                f"group of {self.env_id} seed {self.seed} was given an episode of {strangers[0].env_id} seed "
                f"{strangers[0].seed}; siblings share both"
            )

    @property
    def failed(self) -> tuple[Episode, ...]:
        """Episodes that carry an error."""
        return tuple(e for e in self.episodes if e.error is not None)

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """All trajectories, episode by episode."""
        return tuple(t for e in self.episodes for t in e.trajectories.values())


def total_tokens(turns: Sequence[Turn]) -> int:
    """Number of sampled tokens in `turns`, notes included."""
    return sum(len(part.response_ids) for turn in turns for part in turn.parts)


Reward: TypeAlias = "Callable[[Sequence[Trajectory]], np.ndarray]"
"""Trajectories to float32 ``[n]``; NaN where it cannot tell. Any verifier is one.

A reward that has a method ``assess`` is asked through it. It returns an object with ``scores``, the same ``[n]``;
``noise``, None or the standard deviation of each; and ``turns``, None or a score per turn of each trajectory. Every
verifier of ours has one.
"""
