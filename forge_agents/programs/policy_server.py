"""Policies as a model server outside of episodes, for ``forge-agents serve``."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from forge_agents.envs.env import CONVERSATION
from forge_agents.errors import ActorDiedError, LateAnswerError, StallError
from forge_agents.policy import Policy, Sampling
from forge_agents.programs.branches import BranchIndex, Key
from forge_agents.programs.calls import ChatRequest, ChatResponse, RefusedError, abbreviate, make_response
from forge_agents.programs.gateway import Gateway, ModelCall, Session, _PendingCall
from forge_agents.rollout.players import ContextFullError, ModelPlayer
from forge_agents.rollout.policy_engine import PolicyEngine

_MAX_TOKENS = 20_000_000
"""Maximum number of tokens of all remembered conversations, full prompts included: some hundred megabytes."""
_TOKENS_PER_ANSWER = 128
"""Cost of a remembered answer in addition to its tokens: the objects of a short conversation take 3 KB."""
_MAX_CONVERSATION_TOKENS = _MAX_TOKENS // 8
"""Maximum for one conversation. One with endless branches would otherwise evict all others."""


@dataclass(slots=True, eq=False)
class _Conversation:
    agent: str
    player: ModelPlayer
    answers: OrderedDict[int, tuple[Key, int]] = field(default_factory=OrderedDict)
    """Key and tokens (prompt included) of each remembered answer by decision, the most recently used last."""
    tokens: int = 0


class PolicyServer(Session):
    """Answers all calls with its token by policies, as the calls would be answered in an episode.

    A model reads what it reads in training: tools and formats in the system prompt, no reasoning of others, and the
    sampled tokens of an answer that a call continues. Conversations are remembered up to a number of tokens. The least
    recently used are evicted first, and so are the least recently used answers of a conversation that exceeds its
    share. A call that continues an evicted answer is read as plain text.

    Unlike in episodes, sampling settings of a request are used. Other settings are the policy's, and the policy's token
    limit is the maximum.

    Create it in the event loop of the engines.

    Args:
        gateway: The server.
        models: Policy names by the model names that programs use.
        policies: Policies by name.
        engines: Engine and renderer of each policy, by policy name.
        token: API key. Empty creates one.
    """

    _scope, _closed_message = "this server", "the server is ending"

    def __init__(
        self,
        gateway: Gateway,
        models: Mapping[str, str],
        policies: Mapping[str, Policy],
        engines: Mapping[str, PolicyEngine],
        *,
        token: str = "",
    ) -> None:
        super().__init__(gateway, models, token=token)
        self._policies, self._policy_engines = policies, engines
        self._engine_loop = asyncio.get_running_loop()
        self._index: BranchIndex[tuple[_Conversation, int]] = BranchIndex()
        self._conversations: OrderedDict[_Conversation, None] = OrderedDict()  # least recently used first
        self._tokens = 0
        self._tasks: set[Future[None]] = set()
        self.failed: asyncio.Future[None] = self._engine_loop.create_future()
        """Ends with the error of an engine that cannot be restarted."""
        gateway.add(self)

    async def drain(self, timeout_s: float) -> None:
        """Reject new calls and wait for the current ones, at most `timeout_s` seconds."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(map(asyncio.wrap_future, list(self._tasks)), timeout=timeout_s)

    def submit(self, request: ChatRequest, loop: asyncio.AbstractEventLoop) -> _PendingCall:
        """Start answering a call. Runs in the gateway's loop."""
        pending = self._add_pending(request, loop)
        try:
            sampling = _requested_sampling(self._policies[pending.agent].sampling, request)
        except BaseException:  # otherwise it would count as pending forever
            self._pending.discard(pending)
            raise
        task = asyncio.run_coroutine_threadsafe(self._answer(pending, request, sampling), self._engine_loop)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        pending.response.add_done_callback(lambda _: task.cancel())  # the program may have disconnected
        return pending

    async def _answer(self, pending: _PendingCall, request: ChatRequest, sampling: Sampling) -> None:
        result: ChatResponse | RefusedError
        try:
            result = await self._respond(pending.agent, request, sampling)
        except ContextFullError as full:
            result = RefusedError(f"maximum context length: {full}", code="context_length_exceeded")
        except (LateAnswerError, StallError) as late:
            result = RefusedError(str(late), status=504, code="timeout")
        except ActorDiedError as died:
            if not self.failed.done():  # before the response, after which callers check it
                self.failed.set_exception(died)
            result = RefusedError(str(died), status=503, code="unavailable")
        except Exception as error:  # noqa: BLE001  # the boundary: the program gets the error
            result = RefusedError(f"failed: {abbreviate(error)}", status=500, code="failed")
        finally:  # before the response as well: an answered call is not pending
            self._pending.discard(pending)
        pending.resolve(result)

    async def _respond(self, agent: str, request: ChatRequest, sampling: Sampling) -> ChatResponse:
        parent, new_messages, key = self._index.match(agent, request)
        conversation, after = parent or (self._new_conversation(agent), None)
        if after is not None:  # move to the end, so that the root of many branches is not evicted first
            conversation.answers.move_to_end(after)
        number, self._num_calls = self._num_calls, self._num_calls + 1
        call = ModelCall(agent=agent, request=request, number=number, after=after, new_messages=new_messages)
        info = call.conversation()
        info.pop("asked", None)  # `sampling` contains it
        rng_key = str(request.sampling["seed"]) if "seed" in request.sampling else None
        index = conversation.player.num_decisions
        try:
            decision = await conversation.player.decide("", {CONVERSATION: info}, override=sampling, rng_key=rng_key)
        except BaseException:
            conversation.player.forget(index)
            raise
        decision = decision.published(info["tools"])
        response = make_response(request, number, decision.action, decision.about())
        tokens = len(decision.prompt_ids) + len(decision.response_ids) + _TOKENS_PER_ANSWER
        conversation.answers[index] = self._index.add(key, response.message, (conversation, index)), tokens
        self._remember(conversation, tokens)
        return response

    def _new_conversation(self, agent: str) -> _Conversation:
        return _Conversation(agent, ModelPlayer(self._policy_engines[agent], self._policies[agent], ""))

    def _remember(self, conversation: _Conversation, tokens: int) -> None:
        self._conversations[conversation] = None
        self._conversations.move_to_end(conversation)
        conversation.tokens += tokens
        self._tokens += tokens
        while conversation.tokens > _MAX_CONVERSATION_TOKENS and len(conversation.answers) > 1:
            self._evict_answer(conversation)
        while self._tokens > _MAX_TOKENS and len(self._conversations) > 1:
            oldest, _ = self._conversations.popitem(last=False)
            while oldest.answers:
                self._evict_answer(oldest)

    def _evict_answer(self, conversation: _Conversation) -> None:
        index, (key, tokens) = conversation.answers.popitem(last=False)
        conversation.tokens -= tokens
        self._tokens -= tokens
        self._index.remove(key, (conversation, index))
        conversation.player.forget(index)


def _requested_sampling(default: Sampling, request: ChatRequest) -> Sampling:
    known = {name: value for name, value in request.sampling.items() if hasattr(default, name)}
    if unknown := sorted(request.sampling.keys() - known - {"seed"}):
        raise RefusedError(f"{', '.join(unknown)} is not supported here. Leave it out")
    try:
        return replace(default, **known)
    except (TypeError, ValueError) as cause:
        raise RefusedError(str(cause)) from None
