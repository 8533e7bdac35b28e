"""Players, one per agent and episode: models that keep conversations, people, random and scripted policies."""

from __future__ import annotations

import copy
import functools
import math
import random
import time
import warnings
import weakref
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from forge_agents.envs.env import CONVERSATION, RIVAL_TAGS, listed_actions, writable
from forge_agents.envs.oracles import AgentFactory, oracle_of
from forge_agents.envs.reasoning import join_reasoning, split_response
from forge_agents.errors import EndpointError, StallError
from forge_agents.models.control_tokens import defused
from forge_agents.policy import (
    AnyPolicy,
    Endpoint,
    Human,
    Oracle,
    Policy,
    Random,
    Sampling,
    Scripted,
)
from forge_agents.rollout.conversation import Conversation, Messages, omission
from forge_agents.rollout.endpoint import ChatReply, client_of
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.rollout.refusals import is_too_long
from forge_agents.rollout.terminal import terminal
from forge_agents.runtime.threads import in_thread
from forge_agents.tools import parse_tool_calls
from forge_agents.types import Compaction, FinishReason, Message, ToolCall, Usage, VersionSpan

_MAX_INLINE_CHARS = 1 << 14
"""Maximum length of new messages that are tokenized in the event loop. Tokenizing takes up to 6 us per character, and
all other episodes of the process wait. Switching to a thread takes 0.1 ms."""
_MESSAGE_CHARS = 64  # of text take as long as the chat template of one message


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A player's answer with its reasoning and tokens: the fields of a `Turn` that come from the player.

    `action` does not contain `tool_calls` that were written in the grammar of a model family or parsed by a server.
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
    """Text of `Sampling.stop` that ended the answer. Empty if none did or it is unknown."""
    usage: Usage | None = None
    generate_s: float = 0.0
    compaction: Compaction | None = None
    notes: Decision | None = None
    conversation: Mapping[str, Any] | None = None
    """Conversation of the decision, as in `forge_agents.envs.env.CONVERSATION`. None: the main one, or the one that the
    environment names."""

    def about(self) -> dict[str, Any]:
        """JSON-safe facts for the environment's hook ``about_answer``."""
        usage = self.usage or Usage(prompt_tokens=len(self.prompt_ids), completion_tokens=len(self.response_ids))
        return {
            "finish_reason": self.finish_reason,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "reasoning_tokens": self.reasoning_tokens,
            "notes_tokens": 0 if self.notes is None else len(self.notes.response_ids),
            "stopped_by": self.stopped_by,
            # reasoning is private, and its tokens could be decoded
            "token_ids": list(self.response_ids[self.reasoning_tokens :]),
            "logprobs": list(self.logprobs[self.reasoning_tokens :]),
            "tool_calls": [asdict(call) for call in self.tool_calls],
        }

    def published(self, tools: Sequence[Mapping[str, Any]] | None) -> Decision:
        """The decision as an environment receives it: with calls of `tools` (schemas) in the common form."""
        calls, reasoning = self.tool_calls, writable(self.reasoning)  # an endpoint may send half a surrogate pair
        raw = writable(self.raw_reasoning)
        action = writable(with_calls(self.action, calls))
        if tools and not calls:
            calls = tuple(parse_tool_calls(action, tools=tools))
        if (action, reasoning, raw, calls) == (self.action, self.reasoning, self.raw_reasoning, self.tool_calls):
            return self  # the usual case: a copy costs 2 us
        return replace(self, action=action, reasoning=reasoning, raw_reasoning=raw, tool_calls=calls)


def _from_text(text: str) -> Decision:
    reasoning, raw, answer = split_response(text)
    return Decision(action=answer, reasoning=reasoning, raw_reasoning=raw)


Compact: TypeAlias = Callable[[Sequence[tuple[str, str]]], Awaitable[str]]
"""Summarizes turns of an agent (observation and answer of each) for the environment. May return an empty text."""


class ContextFullError(Exception):
    """The conversation no longer fits the model's context. The episode ends, or goes on with an empty answer."""


class Player:
    """Decides for one agent through one episode. Players without a memory define only `decide`."""

    async def decide(self, observation: str, info: Mapping[str, Any]) -> Decision:
        """Answer an observation. `info` is the environment's `infos[agent]`."""
        raise NotImplementedError

    def state(self) -> Any:
        """Return a copy of the memory, for `resume`."""
        return None

    def resume(self, state: Any) -> None:
        """Continue where another player of the policy had `state`, with random numbers of its own."""


class ModelPlayer(Player):
    """A model that plays one agent and keeps the agent's conversations.

    Args:
        engine: The policy's engine and renderer.
        policy: The policy, with its settings.
        instructions: System prompt. Empty for none.
        tools: Schemas of the tools that the agent may call. None if the environment names none for any agent.
        rng_key: Key from which the seed of every request is derived, together with the number of the decision. Samples
            then do not depend on what else the engine computes, so a resumed run samples the same tokens. None uses
            the engine's own random stream.
        compact: Called with ``context="window"`` for a text in place of dropped turns.
    """

    def __init__(
        self,
        engine: PolicyEngine,
        policy: Policy,
        instructions: str,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        rng_key: str | None = None,
        compact: Compact | None = None,
    ) -> None:
        self._engine, self._renderer, self._sampling = engine, engine.renderer, policy.sampling
        self._constrain, self._rng_key, self._num_requests = policy.constrain_actions, rng_key, 0
        self._compact, self._tools = compact, tools
        self._instructions = (("system", instructions),) if instructions else ()
        self._only_newest = policy.context == "newest"
        self._empty = Conversation(
            engine.renderer,
            limit=engine.max_model_len,
            max_tokens=policy.sampling.max_tokens + (policy.sampling.max_reasoning_tokens or 0),
            context=policy.context,
            keep_reasoning=policy.keep_reasoning,
        )
        self._conversations: list[Conversation] = []
        """State of the conversation after each decision. Unchanged by one for which the context has no room."""
        self._last_main: int | None = None
        """Last decision of the main conversation. No environment has to name the decision."""
        self._num_calls, self._called = 0, False
        """Tool calls of the episode before the last decision of the main conversation, and whether it has any."""

    async def decide(
        self,
        observation: str,
        info: Mapping[str, Any],
        *,
        override: Sampling | None = None,
        rng_key: str | None = None,
    ) -> Decision:
        """Answer in the conversation that `forge_agents.envs.env.CONVERSATION` names, or in the main one.

        Args:
            observation: New observation. Ignored if `info` names a conversation.
            info: The environment's `infos[agent]`.
            override: Sampling settings of this answer, if it is not trained on, or None for the policy's.
            rng_key: Key of this answer in place of the player's own.

        Raises:
            ContextFullError: There is no room for an answer, even without all turns that may be dropped.
        """
        request = info.get(CONVERSATION)
        after, messages, only_results = self._new_messages(observation, info, request)
        number, earlier = len(self._conversations), self._empty if after is None else self._conversations[after]
        self._conversations.append(earlier)
        conversation = copy.copy(earlier)
        num_chars, limit = sum(len(text) for _, text in messages), self._engine.max_model_len
        if len(messages) > limit:  # each has tokens around it
            raise ContextFullError(f"{len(messages)} messages fill the context of {limit} tokens. Send fewer")
        if num_chars > _MAX_INLINE_CHARS and num_chars > (most := limit * self._renderer.max_token_chars):
            raise ContextFullError(
                f"messages of {num_chars} characters fill the context of {limit} tokens, which have at most {most}. "
                "Raise max_model_len or shorten observations"
            )
        if num_chars + _MESSAGE_CHARS * len(messages) <= _MAX_INLINE_CHARS and not self._renderer.may_be_slow:
            prompt_ids = conversation.prompt(messages, only_results=only_results)
        else:
            render = functools.partial(conversation.prompt, messages, only_results=only_results)
            prompt_ids = await in_thread(render, name="tokenizer")
        prompt_ids, compaction, notes = await self._fit(conversation, prompt_ids, messages, rng_key)
        if (room := conversation.room(prompt_ids)) < 1:
            raise self._no_room(prompt_ids)
        legal: tuple[str, ...] = ()
        sampling, tools = self._sampling, self._tools
        if request is None:
            legal = listed_actions(info) if self._constrain else ()
        else:
            sampling = requested_sampling(override or self._sampling, request, self._engine)
            tools = request.get("tools", self._tools)
        decision = await self._answer(prompt_ids, sampling, room, legal, tools=tools, rng_key=rng_key)
        answer = decision.action  # with calls in the model's own grammar
        if decision.tool_calls:
            answer = self._renderer.parse(decision.response_ids, *sampling.stop)[1]
        conversation.add_turn(messages, decision.reasoning, answer, prompt_ids, decision.response_ids)
        self._conversations[number] = conversation
        chosen = None
        if request is None:
            self._last_main = number
            calls = decision.tool_calls or (parse_tool_calls(decision.action, tools=tools) if tools else ())
            self._called = bool(calls)
            if self._only_newest:
                new = [{"role": role, "content": text} for role, text in messages]
                chosen = {"after": after, "messages": new, "only_results": only_results}
        return replace(decision, compaction=compaction, notes=notes, conversation=chosen)

    def state(self) -> Any:
        """Return the state of the conversations."""
        return list(self._conversations), self._last_main, self._num_calls, self._called

    def resume(self, state: Any) -> None:
        """Continue the conversations of another player."""
        conversations, self._last_main, self._num_calls, self._called = state
        self._conversations = list(conversations)

    @property
    def num_decisions(self) -> int:
        """Number of decisions so far, including those that failed."""
        return len(self._conversations)

    def forget(self, decision: int) -> None:
        """Free the tokens of a decision, counted from 0, from which no conversation will continue."""
        self._conversations[decision] = self._empty

    def _new_messages(
        self, observation: str, info: Mapping[str, Any], request: Mapping[str, Any] | None
    ) -> tuple[int | None, Messages, bool]:
        """The decision to continue from, the new messages, and whether they are only results of tool calls."""
        if request is not None:
            messages = tuple((str(message["role"]), str(message["content"])) for message in request["messages"])
            return request["after"], messages, bool(request.get("only_results"))
        total = info.get("tool_calls")  # of the episode so far, as counted by a `ToolEnv`; or any other value
        num_calls = total if isinstance(total, int) else 0
        only_results = num_calls > self._num_calls and self._last_main is not None
        # all agents may have one count
        only_results, self._num_calls = only_results and (self._called or self._tools is None), num_calls
        after = None if self._only_newest and not only_results else self._last_main
        instructions = self._instructions if after is None else ()
        return after, (*instructions, ("user", observation)), only_results

    async def _fit(
        self, conversation: Conversation, prompt_ids: tuple[int, ...], messages: Messages, rng_key: str | None
    ) -> tuple[tuple[int, ...], Compaction | None, Decision | None]:
        """Drop turns if the context is full. Returns the prompt, what was dropped, and the model's notes on it."""
        if not (conversation.may_drop_turns and conversation.is_full(prompt_ids)):
            return prompt_ids, None, None
        number = await in_thread(conversation.num_turns_to_drop, messages, name="tokenizer")
        if number is None:
            raise self._no_room(prompt_ids)
        notes_key = None if rng_key is None else f"{rng_key}/notes"
        notes = await self._notes(conversation, notes_key) if conversation.context == "summarize" else None
        prompt_ids, compaction = await self._drop_turns(conversation, number, messages, notes)
        return prompt_ids, compaction, notes

    async def _answer(
        self,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        room: int,
        choices: tuple[str, ...] = (),
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        rng_key: str | None = None,
    ) -> Decision:
        start = time.perf_counter()
        if rng_key is None and self._rng_key is not None:
            rng_key = f"{self._rng_key}/{self._num_requests}"
        self._num_requests += 1
        limit = len(prompt_ids) + room
        if choices:  # a choice is an answer, even if the template has opened a reasoning tag
            completion = await self._engine.sample(prompt_ids, sampling, limit, rng_key, choices)
            reasoning, raw, answer = "", "", self._renderer.text(completion.token_ids, *sampling.stop)
        else:
            completion = await self._engine.respond(prompt_ids, sampling, limit, rng_key)
            reasoning, raw, answer = self._renderer.sections(completion.token_ids, *sampling.stop)
        text, calls = self._renderer.calls(completion.token_ids, tools) if tools else ("", ())
        stopped = sampling.stop and completion.finish_reason == "stop"
        return Decision(
            action=text if calls else answer,
            reasoning=reasoning,
            raw_reasoning=raw,
            reasoning_tokens=self._renderer.thought_length(completion.token_ids) if reasoning else 0,
            tool_calls=calls,
            prompt_ids=prompt_ids,
            response_ids=completion.token_ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            stopped_by=self._renderer.stopped_by(completion.token_ids, *sampling.stop) if stopped else "",
            generate_s=completion.seconds or time.perf_counter() - start,
        )

    async def _notes(self, conversation: Conversation, rng_key: str | None) -> Decision | None:
        """The model's notes on the conversation so far, or None if there is no room left to ask for them."""
        prompt_ids = conversation.ask_for_notes()
        room = min(conversation.max_notes, self._engine.max_model_len - len(prompt_ids))
        # stop texts of answers, such as a line break, must not end notes
        sampling = replace(
            self._sampling, max_tokens=max(conversation.max_notes, 1), max_reasoning_tokens=None, stop=()
        )
        return await self._answer(prompt_ids, sampling, room, rng_key=rng_key) if room > 0 else None

    async def _drop_turns(
        self, conversation: Conversation, number: int, messages: Messages, notes: Decision | None
    ) -> tuple[tuple[int, ...], Compaction]:
        """The prompt without the first `number` turns, with the environment's summary or the notes in their place."""
        summary = ""
        if self._compact and conversation.context == "window":
            summary = await self._compact(conversation.texts(number))
        text = omission(number, summary or (notes.action if notes else ""), notes=not summary)
        prompt_ids = await in_thread(conversation.drop_turns, number, text, messages, name="tokenizer")
        if summary and conversation.is_full(prompt_ids):
            raise ValueError(
                f"compact() returned {len(summary)} characters, for which a context of {self._engine.max_model_len} "
                "tokens has no room. Return a shorter text"
            )
        if notes and conversation.room(prompt_ids) < 1:  # invalid bytes take more tokens as replacement characters
            text = omission(number)
            prompt_ids = await in_thread(conversation.drop_turns, number, text, messages, name="tokenizer")
        how: Literal["window", "summarize", "compact"] = (
            "summarize" if conversation.context == "summarize" else "window"
        )
        return prompt_ids, Compaction(how="compact" if summary else how, turns=number, text=text)

    def _no_room(self, prompt_ids: tuple[int, ...]) -> ContextFullError:
        return ContextFullError(
            f"prompt of {len(prompt_ids)} tokens fills the context of {self._engine.max_model_len}. "
            "Raise max_model_len or shorten observations"
        )


def requested_sampling(policy_sampling: Sampling, request: Mapping[str, Any], owner: object) -> Sampling:
    """Sampling settings of an answer: the policy's, with the limits that a program's request sets.

    `owner`, the engine or endpoint that answers, warns once about a setting that it does not follow.
    """
    for name, value in (request.get("asked") or {}).items():
        if name == "seed":  # the value is not shown: it may differ in every request, and each text is a warning
            reason = "episodes of a group must differ, so the run's own seeds decide"
            _warn_once(owner, f"a program asks for a seed, which is not followed: {reason}")
        elif value != getattr(policy_sampling, name, {}):  # logit_bias has no field there
            _warn_once(
                owner,
                f"a program asks for {name}={value!r:.200}, but the policy's own sampling settings apply, because they "
                "are trained. Set it in the policy's fa.Sampling",
            )
    limit = min(policy_sampling.max_tokens, request.get("max_tokens") or policy_sampling.max_tokens)
    stop = tuple(dict.fromkeys((*policy_sampling.stop, *(request.get("stop") or ()))))
    return replace(policy_sampling, max_tokens=limit, stop=stop)


_MAX_WARNINGS = 50
_warned: weakref.WeakKeyDictionary[object, set[str]] = weakref.WeakKeyDictionary()
"""Warnings by owner. Python's own registry is cleared whenever any module changes the filters."""


def _warn_once(owner: object, text: str) -> None:
    shown = _warned.setdefault(owner, set())
    if text not in shown and len(shown) < _MAX_WARNINGS:
        shown.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def with_calls(text: str, calls: Sequence[ToolCall]) -> str:
    """An answer as an environment reads it: its text and its calls in the common form."""
    if not calls:
        return text
    calls_text = "\n".join(map(str, calls))
    both = f"{text}\n{calls_text}" if text else calls_text
    # if the text itself looks like calls, other calls would be parsed
    return both if parse_tool_calls(both) == parse_tool_calls(calls_text) else calls_text


class EndpointPlayer(Player):
    """A model behind an endpoint that plays one agent and keeps the agent's conversations.

    Where the agent has rivals, which could fill its context by long messages, the oldest turns are left out once the
    server reports that the conversation is too long.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        instructions: str,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        has_rivals: bool = False,
    ) -> None:
        endpoint.api_key()  # a missing key ends the run, not an episode
        self._endpoint, self._tools, self._has_rivals = endpoint, tools, has_rivals
        self._instructions = [_message("system", instructions)] if instructions else []
        self._conversations: list[list[Message]] = []
        """Messages after each decision. Unchanged by one for which the context has no room."""
        self._last_main: int | None = None
        self._num_dropped = 0
        """Turns of the main conversation that are left out."""

    def state(self) -> Any:
        """Return the state of the conversations."""
        return list(self._conversations), self._last_main, self._num_dropped

    def resume(self, state: Any) -> None:
        """Continue the conversations of another player."""
        conversations, self._last_main, self._num_dropped = state
        self._conversations = list(conversations)

    async def decide(self, observation: str, info: Mapping[str, Any]) -> Decision:
        """Ask the endpoint.

        Raises:
            EndpointError: No answer, or none in time.
            ContextFullError: The server reports that the conversation is too long for the model.
            BudgetError: The budget is spent.
        """
        request: Mapping[str, Any] | None = info.get(CONVERSATION)
        sampling = self._endpoint.sampling
        number = len(self._conversations)
        if request:
            before = [] if request["after"] is None else self._conversations[request["after"]]
            messages = [*before, *(_message(m["role"], m["content"]) for m in request["messages"])]
            sampling = requested_sampling(sampling, request, self._endpoint)
        else:
            before = self._instructions if self._last_main is None else self._conversations[self._last_main]
            messages = [*before, _message("user", observation)]
        self._conversations.append(before)
        start, known = time.perf_counter(), self._num_dropped
        while (reply := await self._ask(messages, sampling, may_drop=not request)) is None:
            self._num_dropped += math.ceil((self._num_turns(messages) - self._num_dropped) / 2)
        compaction = None
        if self._num_dropped > known:
            text = omission(self._num_dropped)
            compaction = Compaction(how="window", turns=self._num_dropped, text=text)
        reasoning, raw, answer = split_response(reply.text.strip(), opening="" if reply.reasoning else None)
        if reply.reasoning:
            raw = join_reasoning(reply.reasoning, "", cut=reply.finish_reason == "length" and not reply.text) + raw
        calls = reply.tool_calls if (request or {}).get("tools", self._tools) else ()
        self._last_main = self._last_main if request else number
        self._conversations[number] = [*messages, Message(role="assistant", content=with_calls(answer, calls))]
        return Decision(
            action=answer,
            reasoning="\n\n".join(filter(None, (reply.reasoning, reasoning))),
            raw_reasoning=raw,
            tool_calls=calls,
            finish_reason=reply.finish_reason,
            usage=reply.usage,
            generate_s=time.perf_counter() - start,
            compaction=compaction,
        )

    async def _ask(self, messages: list[Message], sampling: Sampling, *, may_drop: bool) -> ChatReply | None:
        """Ask for an answer. Returns None if the conversation is too long, but further turns may be left out."""
        number = self._num_dropped if may_drop else 0
        try:
            return await (await client_of(self._endpoint)).ask(self._without_turns(messages, number), sampling)
        except StallError as late:  # a remote server's failure concerns the episode, not the run
            raise EndpointError(str(late)) from None
        except EndpointError as error:
            if error.status not in (400, 413, 422) or not is_too_long(str(error)):
                raise
            if may_drop and self._has_rivals and number < self._num_turns(messages):
                return None
            raise ContextFullError(str(error)) from None

    def _num_turns(self, messages: list[Message]) -> int:
        """Number of earlier turns of the main conversation, each an observation and an answer."""
        return (len(messages) - len(self._instructions)) // 2

    def _without_turns(self, messages: list[Message], number: int) -> list[Message]:
        """The conversation without its first `number` turns. The first observation stays, as in `Policy.context`."""
        if not number:
            return messages
        first = len(self._instructions)
        newer = messages[first + 2 * number :]
        joined = "\n\n".join((messages[first].content, omission(number), newer[0].content))
        return [*messages[:first], replace(newer[0], content=joined), *newer[1:]]


def _message(role: Any, text: str) -> Message:
    """A message for an endpoint. Only its own answers keep control tokens."""
    return Message(role=role, content=text if role == "assistant" else defused(text))


class _HumanPlayer(Player):
    """A person at the terminal, who reads the instructions before the first observation."""

    def __init__(self, agent: str, instructions: str) -> None:
        self._agent, self._unseen = agent, instructions

    async def decide(self, observation: str, info: Mapping[str, Any]) -> Decision:
        start = time.perf_counter()
        legal = listed_actions(info)
        text, self._unseen = self._unseen, ""
        if (illegal := info.get("illegal")) and not text:
            text = "Your last action was illegal" + (f": {illegal}" if isinstance(illegal, str) else "")
        action = await terminal().ask(self._agent, observation, instructions=text, legal_actions=legal)
        return replace(_from_text(action), generate_s=time.perf_counter() - start)


def _seeds(policy: Random | Oracle, agent: str, episode_seed: int, episode_index: int) -> list[int]:
    """Seeds of the random choices of an agent in an episode. With ``shared``, all episodes of a group have the same."""
    index = [] if policy.shared or not episode_index else [episode_index]
    return [policy.seed, episode_seed, zlib.crc32(agent.encode()), *index]


class _RandomPlayer(Player):
    """A random legal action, or random letters if no actions are listed."""

    def __init__(self, seeds: list[int]) -> None:
        self._rng = np.random.default_rng(seeds)

    async def decide(self, observation: str, info: Mapping[str, Any]) -> Decision:
        if legal := listed_actions(info):
            return Decision(action=legal[int(self._rng.integers(len(legal)))])
        letters = self._rng.integers(97, 123, size=int(self._rng.integers(1, 9)))
        return Decision(action="".join(map(chr, letters)))


class _OraclePlayer(Player):
    """The environment's oracle, created at the first decision, so that its failure is the episode's."""

    def __init__(self, oracle: AgentFactory, agent: str, seeds: list[int]) -> None:
        self._oracle, self._agent, self._rng = oracle, agent, random.Random(repr(seeds))
        self._created: Callable[[str], str] | None = None

    async def decide(self, observation: str, info: Mapping[str, Any]) -> Decision:
        if self._created is None:
            self._created = self._oracle(self._agent, info, self._rng)
        action = self._created(observation)
        if not isinstance(action, str):
            raise TypeError(f"the oracle returned {type(action).__name__} for {self._agent!r}. Return a str")
        return _from_text(action)

    def state(self) -> Any:
        """Return a copy of the oracle and its random generator."""
        return copy.deepcopy((self._created, self._rng))

    def resume(self, state: Any) -> None:
        """Continue as a copy of the oracle, with this player's random numbers."""
        created, rng = state
        self._created = copy.deepcopy(created, {id(rng): self._rng})


class _ScriptedPlayer(Player):
    def __init__(self, policy: Scripted, agent: str) -> None:
        self._policy, self._agent = policy, agent

    async def decide(self, observation: str, info: Mapping[str, Any]) -> Decision:
        return _from_text(await self._policy.decide(observation, self._agent))


def make_player(
    policy: AnyPolicy,
    *,
    agent: str,
    episode_seed: int,
    instructions: str,
    engines: Mapping[str, PolicyEngine],
    tools: Sequence[Mapping[str, Any]] | None = None,
    rng_key: str | None = None,
    episode_index: int = 0,
    compact: Compact | None = None,
    spec: object = None,
) -> Player:
    """Create a player of `policy` for one agent of one episode. `spec` of the environment names its oracle.

    Raises:
        ValueError: A model has no engine, or the environment has no oracle.
    """
    has_rivals = not RIVAL_TAGS.isdisjoint(getattr(spec, "tags", ()))
    if isinstance(policy, Policy):
        if policy.name not in engines:
            raise ValueError(f"policy {policy.name!r} has no engine. Running engines: {', '.join(engines) or 'none'}")
        engine = engines[policy.name]
        key = None if rng_key is None else f"{rng_key}/{agent}"
        if policy.context == "end" and has_rivals:  # a rival could fill the context by long messages
            policy = replace(policy, context="window")
        return ModelPlayer(engine, policy, instructions, tools=tools, rng_key=key, compact=compact)
    if isinstance(policy, Endpoint):
        return EndpointPlayer(policy, instructions, tools=tools, has_rivals=has_rivals)
    if isinstance(policy, Human):
        return _HumanPlayer(agent, instructions)
    if isinstance(policy, Random):
        return _RandomPlayer(_seeds(policy, agent, episode_seed, episode_index))
    if isinstance(policy, Oracle):
        oracle = oracle_of(spec, getattr(spec, "id", "an environment without an id"))
        return _OraclePlayer(oracle, agent, _seeds(policy, agent, episode_seed, episode_index))
    return _ScriptedPlayer(policy, agent)
