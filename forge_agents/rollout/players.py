"""Policies brought to life: one player decides for one seat through one episode.

In: a policy and, for a model, its engine and renderer. Out: decisions. Waits for engines and endpoints, which keep
their own deadlines, and for people.
"""

from __future__ import annotations

import copy
import hashlib
import random
import time
import warnings
import weakref
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from forge_agents.envs.env import CONVERSATION, writable
from forge_agents.envs.oracles import AgentFactory, oracle_of
from forge_agents.envs.reasoning import join_reasoning, split_response
from forge_agents.errors import EndpointError, StallError
from forge_agents.policy import (
    AnyPolicy,
    Context,
    Endpoint,
    Human,
    KeepReasoning,
    Oracle,
    Policy,
    Random,
    Sampling,
    Scripted,
)
from forge_agents.rollout.conversation import Conversation, Messages, left_out
from forge_agents.rollout.endpoint import client_of
from forge_agents.rollout.refusals import is_too_long
from forge_agents.rollout.rendering import Renderer
from forge_agents.rollout.terminal import terminal
from forge_agents.tools import parse_tool_calls
from forge_agents.types import Compaction, Completion, FinishReason, Message, ToolCall, Usage, VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a player thought and answered, with the tokens of a model: the part of a `Turn` that is its own.

    Calls that a player brings are not in its `action`: those of a family's own grammar, or that a server told apart.
    """

    action: str
    reasoning: str = ""
    raw_reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning_tokens: int = 0
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[VersionSpan, ...] = ()
    finish_reason: FinishReason = "scripted"
    stopped_by: str = ""
    """The text of `Sampling.stop` that ended the answer; empty where none did, or nobody knows."""
    usage: Usage | None = None
    generate_s: float = 0.0
    compaction: Compaction | None = None
    notes: Decision | None = None

    def about(self) -> dict[str, Any]:
        """What the hook ``about_answer`` of an environment is told, JSON-safe."""
        usage = self.usage or Usage(prompt_tokens=len(self.prompt_ids), completion_tokens=len(self.response_ids))
        return {
            "finish_reason": self.finish_reason,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "reasoning_tokens": self.reasoning_tokens,
            "notes_tokens": 0 if self.notes is None else len(self.notes.response_ids),
            "stopped_by": self.stopped_by,
            # a thought is its seat's own affair, whoever can decode it
            "token_ids": list(self.response_ids[self.reasoning_tokens :]),
            "logprobs": list(self.logprobs[self.reasoning_tokens :]),
            "tool_calls": [asdict(call) for call in self.tool_calls],
        }

    def published(self, tools: Sequence[Mapping[str, Any]]) -> Decision:
        """As an environment hears it: calls of `tools`, given as schemas, in their one form, whoever read them."""
        calls, thought = self.tool_calls, writable(self.reasoning)  # half an emoji, from an endpoint
        written = writable(self.raw_reasoning)
        action = writable(with_calls(self.action, calls))
        if tools and not calls:
            calls = tuple(parse_tool_calls(action, tools=tools))
        if (action, thought, written, calls) == (self.action, self.reasoning, self.raw_reasoning, self.tool_calls):
            return self  # most are: a copy costs 2 us
        return replace(self, action=action, reasoning=thought, raw_reasoning=written, tool_calls=calls)


def _said(text: str) -> Decision:
    """The decision of a player that no model makes, from all of its text."""
    thought, written, answer = split_response(text)
    return Decision(action=answer, reasoning=thought, raw_reasoning=written)


Player: TypeAlias = Callable[[str, Mapping[str, Any]], Awaitable[Decision]]
"""Decides for one seat through one episode: from the observation and the environment's `infos[agent]`."""
Compact: TypeAlias = Callable[[Sequence[tuple[str, str]]], Awaitable[str]]
"""What an environment says in place of turns of a seat, observation and answer of each; empty where it says nothing."""


class ContextFullError(Exception):
    """The conversation no longer fits the model's context: the episode ends, truncated."""


class Generator(Protocol):
    """What a player needs of an engine."""

    @property
    def max_model_len(self) -> int: ...  # noqa: D102

    async def generate(  # noqa: D102
        self,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        *,
        choices: Sequence[str] = (),
        seed: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> Completion: ...


class ModelPlayer:
    """A served model in a seat; keeps the seat's conversations.

    Args:
        constrain: Sample among the legal actions only.
        keep_reasoning: Which of its thoughts the model reads again.
        tools: Schemas of the tools that the seat may call.
        rng_key: Names this seat of this episode: what is sampled follows from it and the turn, whatever else the engine
            does. None: from the engine's own stream of random numbers.
        context: What is done when a conversation does not fit the engine's context any more.
        compact: Asked in a "window" for what takes the place of turns that are left out.
    """

    def __init__(
        self,
        engine: Generator,
        renderer: Renderer,
        sampling: Sampling,
        instructions: str,
        *,
        constrain: bool = False,
        keep_reasoning: KeepReasoning = "all",
        tools: Sequence[Mapping[str, Any]] = (),
        rng_key: str | None = None,
        context: Context = "end",
        compact: Compact | None = None,
    ) -> None:
        self._engine, self._renderer, self._sampling = engine, renderer, sampling
        self._constrain, self._rng_key, self._decisions, self._compact = constrain, rng_key, 0, compact
        self._tools = tools
        self._told = (("system", instructions),) if instructions else ()
        self._begun = Conversation(
            renderer,
            limit=engine.max_model_len,
            max_tokens=sampling.max_tokens + (sampling.max_reasoning_tokens or 0),
            context=context,
            keep_reasoning=keep_reasoning,
        )
        self._held: list[Conversation] = []  # as it stood after each decision
        self._main: int | None = None  # the last decision of the conversation that an environment need not name
        self._calls = 0

    async def decide(
        self, observation: str, info: Mapping[str, Any], *, own: Sampling | None = None, rng_key: str | None = None
    ) -> Decision:
        """Ask the engine, in the conversation that `forge_agents.envs.env.CONVERSATION` names, or the main one.

        Args:
            own: How this answer is drawn, where nobody learns from it; None: as the policy says.
            rng_key: What it follows from, in place of the player's own.

        Raises:
            ContextFullError: There is no room for an answer, whatever is left out.
        """
        told = info.get(CONVERSATION)
        if told is None:
            counted = info.get("tool_calls")  # of the episode so far, as a `ToolEnv` counts; or anything
            calls = counted if isinstance(counted, int) else 0
            after, only_results, self._calls = self._main, calls > self._calls, calls
            heard = (*(self._told if after is None else ()), ("user", observation))
        else:
            after, only_results = told["after"], bool(told.get("only_results"))
            heard = tuple((str(message["role"]), str(message["content"])) for message in told["messages"])
        talk = copy.copy(self._begun if after is None else self._held[after])
        prompt_ids = talk.prompt(heard, only_results=only_results)
        notes = compaction = None
        if talk.may_leave_out and talk.is_full(prompt_ids):
            number = talk.to_leave_out(heard)
            if number is None:
                raise self._no_room(prompt_ids)
            first = None if rng_key is None else f"{rng_key}/notes"
            notes = await self._notes(talk, first) if talk.context == "summarize" else None
            prompt_ids, compaction = await self._shortened(talk, number, heard, notes)
        if (room := talk.room(prompt_ids)) < 1:
            raise self._no_room(prompt_ids)
        legal = info.get("legal_actions") if self._constrain and told is None else None
        sampling = self._sampling if told is None else requested_sampling(own or self._sampling, told, self._engine)
        tools = self._tools if told is None else told.get("tools", self._tools)
        done = await self._answer(prompt_ids, sampling, room, tuple(legal or ()), tools=tools, rng_key=rng_key)
        talk.answered(heard, done.reasoning, self._answer_of(done, sampling), prompt_ids, done.response_ids)
        if told is None:
            self._main = len(self._held)
        self._held.append(talk)
        return replace(done, compaction=compaction, notes=notes)

    def forget(self, decision: int) -> None:
        """Keep no tokens of a decision, from 0, that nobody will go on from."""
        self._held[decision] = self._begun

    async def _answer(
        self,
        prompt_ids: tuple[int, ...],
        wanted: Sampling,
        room: int,
        choices: tuple[str, ...] = (),
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        rng_key: str | None = None,
    ) -> Decision:
        """What the model says, in at most `room` tokens."""
        started = time.perf_counter()
        if rng_key is None and self._rng_key is not None:
            rng_key = f"{self._rng_key}/{self._decisions}"
        self._decisions += 1
        limit = len(prompt_ids) + room
        if choices:  # one of them is an answer, also where the template has opened a thought
            done = await self._sample(prompt_ids, wanted, limit, rng_key, choices)
            thought, written, answer = "", "", self._renderer.text(done.token_ids, *wanted.stop)
        else:
            ask = self._respond if wanted.max_reasoning_tokens is None else self._think_and_answer
            done = await ask(prompt_ids, wanted, limit, rng_key)
            thought, written, answer = self._renderer.sections(done.token_ids, *wanted.stop)
        beside, calls = self._renderer.calls(done.token_ids, tools) if tools else ("", ())
        may_stop = wanted.stop and done.finish_reason == "stop"
        return Decision(
            action=beside if calls else answer,
            reasoning=thought,
            raw_reasoning=written,
            reasoning_tokens=self._renderer.thought_length(done.token_ids) if thought else 0,
            tool_calls=calls,
            prompt_ids=prompt_ids,
            response_ids=done.token_ids,
            logprobs=done.logprobs,
            versions=done.versions,
            finish_reason=done.finish_reason,
            stopped_by=self._renderer.stopped_by(done.token_ids, *wanted.stop) if may_stop else "",
            generate_s=done.seconds or time.perf_counter() - started,
        )

    def _answer_of(self, decision: Decision, wanted: Sampling) -> str:
        """The answer as the model wrote it, calls in its own grammar and all."""
        return self._renderer.parse(decision.response_ids, *wanted.stop)[1] if decision.tool_calls else decision.action

    async def _sample(
        self,
        prompt_ids: tuple[int, ...],
        wanted: Sampling,
        limit: int,
        rng_key: str | None,
        choices: tuple[str, ...] = (),
    ) -> Completion:
        """What the engine answers, in as many tokens as there is room for: `limit` with those of the prompt."""
        room = limit - len(prompt_ids)
        asked: dict[str, Any] = {"choices": choices} if choices else {}
        if rng_key is not None:
            asked["seed"] = sampling_seed(rng_key)
        if self._renderer.stop_ids:
            asked["stop_token_ids"] = self._renderer.stop_ids
        sampling = wanted
        if wanted.max_tokens > room or wanted.max_reasoning_tokens is not None:
            sampling = replace(wanted, max_tokens=min(wanted.max_tokens, room), max_reasoning_tokens=None)
        done = await self._engine.generate(prompt_ids, sampling, **asked)
        no_room = done.finish_reason == "length" and sampling.max_tokens < wanted.max_tokens
        return replace(done, finish_reason="context") if no_room else done

    async def _respond(
        self, prompt_ids: tuple[int, ...], wanted: Sampling, limit: int, rng_key: str | None
    ) -> Completion:
        """As `_sample`, but texts of `stop` that stand in a thought end nothing."""
        done = await self._sample(prompt_ids, wanted, limit, rng_key)
        stopped = wanted.stop and done.finish_reason == "stop"
        if not stopped or not (tag := self._renderer.stopped_thinking(done.token_ids)):
            return done
        for part, stop in (("thought", (tag,)), ("said", wanted.stop)):
            left, so_far = wanted.max_tokens - len(done.token_ids), (*prompt_ids, *done.token_ids)
            if left < 1 or len(so_far) >= limit:
                return replace(done, finish_reason="length" if left < 1 else "context")
            more = replace(wanted, stop=stop, max_tokens=left)
            name = None if rng_key is None else f"{rng_key}/{part}"
            done = _joined(done, (), await self._sample(so_far, more, limit, name))
            if done.finish_reason != "stop" or self._renderer.closing(done.token_ids):  # the turn ended in the thought
                return done
        return done

    async def _think_and_answer(
        self, prompt_ids: tuple[int, ...], wanted: Sampling, limit: int, rng_key: str | None
    ) -> Completion:
        """A thought within its budget, closed where it is not at its end by then, and the answer within its own."""
        thinking = replace(wanted, max_tokens=wanted.max_reasoning_tokens or wanted.max_tokens)
        done = await self._respond(prompt_ids, thinking, limit, rng_key)
        closed = self._renderer.closing(done.token_ids)
        at = len(done.token_ids) if closed else self._renderer.thought_length(done.token_ids)
        left = wanted.max_tokens - (len(done.token_ids) - at)
        if left < 0 or (left == 0 and done.finish_reason == "length"):
            return _first(done, at + wanted.max_tokens)
        if done.finish_reason != "length":
            return done
        so_far = (*prompt_ids, *done.token_ids, *closed)
        if len(so_far) >= limit:
            return replace(done, finish_reason="context")
        answering, name = replace(wanted, max_tokens=left), None if rng_key is None else f"{rng_key}/answer"
        more = await self._sample(so_far, answering, limit, name)
        return _joined(done, closed, more)

    async def _notes(self, talk: Conversation, rng_key: str | None) -> Decision | None:
        """The model's notes on all that it has read and said; None where there is no room left to ask for them."""
        prompt_ids = talk.ask_for_notes()
        room = min(talk.max_notes, self._engine.max_model_len - len(prompt_ids))
        # what ends an answer, such as a line's end, does not end notes
        free = replace(self._sampling, max_tokens=max(talk.max_notes, 1), max_reasoning_tokens=None, stop=())
        return await self._answer(prompt_ids, free, room, rng_key=rng_key) if room > 0 else None

    async def _shortened(
        self, talk: Conversation, number: int, heard: Messages, notes: Decision | None
    ) -> tuple[tuple[int, ...], Compaction]:
        """The prompt without the first `number` turns, with what is known of them in their place."""
        told = await self._compact(talk.texts(number)) if self._compact and talk.context == "window" else ""
        text = left_out(number, told or (notes.action if notes else ""), notes=not told)
        prompt_ids = talk.leave_out(number, text, heard)
        if told and talk.is_full(prompt_ids):
            raise ValueError(
                f"compact() returned {len(told)} characters, for which a context of {self._engine.max_model_len} "
                "tokens has no room; return a shorter text"
            )
        if notes and talk.room(prompt_ids) < 1:  # bytes that are no text take more tokens as the text in their place
            text = left_out(number)
            prompt_ids = talk.leave_out(number, text, heard)
        how: Literal["window", "summarize", "compact"] = "summarize" if talk.context == "summarize" else "window"
        return prompt_ids, Compaction(how="compact" if told else how, turns=number, text=text)

    def _no_room(self, prompt_ids: tuple[int, ...]) -> ContextFullError:
        return ContextFullError(
            f"prompt of {len(prompt_ids)} tokens fills the context of {self._engine.max_model_len}; "
            "raise max_model_len or shorten observations"
        )


def requested_sampling(own: Sampling, told: Mapping[str, Any], owner: object) -> Sampling:
    """How an answer is drawn: as the policy says, with the limits that its conversation sets.

    Args:
        own: The policy's.
        told: What the program's call says.
        owner: The engine or endpoint that answers; each of them warns once of a wish that it does not follow.
    """
    for name, value in (told.get("asked") or {}).items():
        if name == "seed":  # not shown: it may differ from call to call, and each text is a warning of its own
            why = "siblings have to differ; the run's own decides"
            _warn_once(owner, f"a program asks for a seed, which is not followed: {why}")
        elif value != getattr(own, name, {}):  # logit_bias has no field there
            _warn_once(
                owner,
                f"a program asks for {name}={value!r:.200} and is answered as the policy in the seat samples: that is "
                "what is trained; set it in the policy's fa.Sampling",
            )
    limit = min(own.max_tokens, told.get("max_tokens") or own.max_tokens)
    return replace(own, max_tokens=limit, stop=tuple(dict.fromkeys((*own.stop, *(told.get("stop") or ())))))


_MAX_WARNINGS = 50
_warned: weakref.WeakKeyDictionary[object, set[str]] = weakref.WeakKeyDictionary()
"""Warnings by who gave cause for them. Python's own memory of them is lost when any module changes its filters."""


def _warn_once(owner: object, text: str) -> None:
    seen = _warned.setdefault(owner, set())
    if text not in seen and len(seen) < _MAX_WARNINGS:
        seen.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _joined(done: Completion, put: tuple[int, ...], more: Completion) -> Completion:
    """One response of two requests, with what was `put` between, which nobody sampled."""
    before = len(done.token_ids) + len(put)
    later = (replace(span, start=before + span.start, end=before + span.end) for span in more.versions)
    return Completion(
        token_ids=(*done.token_ids, *put, *more.token_ids),
        logprobs=(*done.logprobs, *(0.0 for _ in put), *more.logprobs),
        finish_reason=more.finish_reason,
        versions=(*done.versions, *later),
        seconds=done.seconds + more.seconds,
    )


def _first(done: Completion, count: int) -> Completion:
    """The first `count` tokens of `done`, as if no more had been asked for."""
    spans = (replace(span, end=min(span.end, count)) for span in done.versions if span.start < count)
    ids, logprobs = done.token_ids[:count], done.logprobs[:count]
    return replace(
        done, token_ids=ids, logprobs=logprobs, finish_reason="length", versions=tuple(spans), top_logprobs=()
    )


def sampling_seed(rng_key: str) -> int:
    """The sampling seed, 32 bits, of a rng_key with this name."""
    return int.from_bytes(hashlib.sha256(rng_key.encode()).digest()[:4], "big")


def with_calls(text: str, calls: Sequence[ToolCall]) -> str:
    """An answer as an environment reads it: what was said, and the calls beside it in their one form."""
    if not calls:
        return text
    told = "\n".join(map(str, calls))
    both = f"{text}\n{told}" if text else told
    # where the words look like calls, something else would be read
    return both if parse_tool_calls(both) == parse_tool_calls(told) else told


class EndpointPlayer:
    """A model behind an endpoint in a seat; keeps the seat's conversation."""

    def __init__(
        self, endpoint: Endpoint, instructions: str, *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        endpoint.api_key()  # a key that is not set ends the run, not an episode
        self._endpoint, self._tools = endpoint, tools
        self._told = [Message(role="system", content=instructions)] if instructions else []
        self._held: list[list[Message]] = []  # by decision
        self._main: int | None = None

    async def decide(self, observation: str, info: Mapping[str, Any]) -> Decision:
        """Ask the endpoint.

        Raises:
            EndpointError: No answer, or none in time.
            ContextFullError: The server says that the conversation is too long for the model.
            BudgetError: Nothing is left to spend.
        """
        messages, sampling = [*self._told, Message(role="user", content=observation)], self._endpoint.sampling
        if told := info.get(CONVERSATION):
            before = [] if told["after"] is None else self._held[told["after"]]
            messages = [*before, *(Message(role=m["role"], content=m["content"]) for m in told["messages"])]
            sampling = requested_sampling(sampling, told, self._endpoint)
        elif self._main is not None:
            messages = [*self._held[self._main], messages[-1]]
        client = await client_of(self._endpoint)
        started = time.perf_counter()
        try:
            reply = await client.ask(messages, sampling)
        except StallError as late:  # of someone else's server: the episode's failure, not the run's
            raise EndpointError(str(late)) from None
        except EndpointError as error:
            if error.status in (400, 413, 422) and is_too_long(str(error)):
                raise ContextFullError(str(error)) from None
            raise
        thought, written, answer = split_response(reply.text.strip(), opening="" if reply.reasoning else None)
        if reply.reasoning:
            cut = reply.finish_reason == "length" and not reply.text
            written = join_reasoning(reply.reasoning, "", cut=cut) + written
        calls = reply.tool_calls if (told or {}).get("tools", self._tools) else ()
        self._main = self._main if told else len(self._held)
        self._held.append([*messages, Message(role="assistant", content=with_calls(answer, calls))])
        return Decision(
            action=answer,
            reasoning="\n\n".join(filter(None, (reply.reasoning, thought))),
            raw_reasoning=written,
            tool_calls=calls,
            finish_reason=reply.finish_reason,
            usage=reply.usage,
            generate_s=time.perf_counter() - started,
        )


def _human(agent: str, instructions: str) -> Player:
    """A person at the terminal, who is shown the instructions once; PlayerLeftError where the input ends."""
    unseen = [instructions]

    async def decide(observation: str, info: Mapping[str, Any]) -> Decision:
        started = time.perf_counter()
        legal = tuple(map(str, info.get("legal_actions") or ()))
        told = unseen.pop() if unseen else ""
        action = await terminal().ask(agent, observation, instructions=told, legal_actions=legal)
        return replace(_said(action), generate_s=time.perf_counter() - started)

    return decide


def _draws(policy: Random | Oracle, agent: str, episode_seed: int, episode_index: int) -> list[int]:
    """What the random choices of a seat in an episode follow from."""
    own = [] if policy.shared or not episode_index else [episode_index]
    return [policy.seed, episode_seed, zlib.crc32(agent.encode()), *own]


def _random(policy: Random, agent: str, episode_seed: int, episode_index: int) -> Player:
    """Uniform over `info["legal_actions"]`, or a short random text."""
    rng = np.random.default_rng(_draws(policy, agent, episode_seed, episode_index))

    async def decide(observation: str, info: Mapping[str, Any]) -> Decision:
        legal = info.get("legal_actions")
        if legal:
            return Decision(action=str(legal[int(rng.integers(len(legal)))]))
        letters = rng.integers(97, 123, size=int(rng.integers(1, 9)))
        return Decision(action="".join(map(chr, letters)))

    return decide


def _oracle(seat: AgentFactory, agent: str, draws: list[int]) -> Player:
    """The environment's own oracle, made when the seat first decides: its failure is the episode's."""
    seated: list[Callable[[str], str]] = []

    async def decide(observation: str, info: Mapping[str, Any]) -> Decision:
        if not seated:
            seated.append(seat(agent, info, random.Random(repr(draws))))
        action = seated[0](observation)
        if not isinstance(action, str):
            raise TypeError(f"the oracle returned {type(action).__name__} for {agent!r}; return a str")
        return _said(action)

    return decide


def _scripted(policy: Scripted, agent: str) -> Player:
    async def decide(observation: str, info: Mapping[str, Any]) -> Decision:
        return _said(policy(observation, agent))

    return decide


@dataclass(frozen=True, eq=False)
class PolicyEngine:
    """What samples for one policy: an engine, or one of its adapters, and the renderer of its prompts."""

    engine: Any
    """A `Generator`, such as an `EngineClient`."""
    renderer: Renderer
    adapter: str = ""
    """Name of the adapter in the engine; empty for the model's own weights."""

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and response together."""
        return int(self.engine.max_model_len)

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, **options: Any) -> Completion:
        """Complete a prompt with this policy's weights; see `EngineClient.generate`."""
        if self.adapter:
            options["adapter"] = self.adapter
        completion: Completion = await self.engine.generate(prompt_ids, sampling, **options)
        return completion

    async def load_weights(self, version: int | None = None, *, timeout_s: float = 120.0) -> dict[str, float]:
        """Load published weights of this policy; see `EngineClient.load_weights`."""
        timings: dict[str, float] = await self.engine.load_weights(version, adapter=self.adapter, timeout_s=timeout_s)
        return timings


def make_player(
    policy: AnyPolicy,
    *,
    agent: str,
    episode_seed: int,
    instructions: str,
    engines: Mapping[str, PolicyEngine],
    tools: Sequence[Mapping[str, Any]] = (),
    rng_key: str | None = None,
    episode_index: int = 0,
    compact: Compact | None = None,
    spec: object = None,
) -> Player:
    """A fresh player of `policy` for one seat of one episode.

    Args:
        engines: Engines of the model policies, by policy name.
        tools: Schemas of the tools that the seat may call.
        rng_key: Names the episode among all that are ever played; see `ModelPlayer`.
        episode_index: The episode's place in its group, from 0.
        compact: What the environment says of turns that a conversation has no room for.
        spec: The environment's `EnvSpec`, which names its oracle.

    Raises:
        ValueError: A model without an engine, or an oracle where the environment has none.
    """
    if isinstance(policy, Policy):
        if policy.name not in engines:
            raise ValueError(f"policy {policy.name!r} has no engine; running engines: {', '.join(engines) or 'none'}")
        engine = engines[policy.name]
        return ModelPlayer(
            engine,
            engine.renderer,
            policy.sampling,
            instructions,
            constrain=policy.constrain_actions,
            keep_reasoning=policy.keep_reasoning,
            tools=tools,
            rng_key=None if rng_key is None else f"{rng_key}/{agent}",
            context=policy.context,
            compact=compact,
        ).decide
    if isinstance(policy, Endpoint):
        return EndpointPlayer(policy, instructions, tools=tools).decide
    if isinstance(policy, Human):
        return _human(agent, instructions)
    if isinstance(policy, Random):
        return _random(policy, agent, episode_seed, episode_index)
    if isinstance(policy, Oracle):
        seat = oracle_of(spec, getattr(spec, "id", "an environment without an id"))
        return _oracle(seat, agent, _draws(policy, agent, episode_seed, episode_index))
    return _scripted(policy, agent)
