"""The client of an OpenAI-compatible chat endpoint, in a seat or behind a judge.

In: chat messages. Out: replies. Waits for the server: a bounded number of requests at a time, each under one deadline
that includes its retries.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from forge_agents.envs.env import writable
from forge_agents.errors import BudgetError, EndpointError, StallError
from forge_agents.policy import Endpoint, Sampling
from forge_agents.rollout.refusals import LIMITS, has_error, named_field, status_of
from forge_agents.tools.formats import MAX_CALLS, read_call
from forge_agents.types import Message, ToolCall, Usage

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_LOG = logging.getLogger(__name__)
_SHOWN = 500
"""Characters of what a server says that an error quotes."""
_SENT_STATUS = "forge_agents.sent_status"
"""Extension of a response: the status that the server sent with a body that holds an error."""
_SAID = {"content", "reasoning_content", "reasoning", "refusal", "tool_calls"}
"""Of these a message has at least one, unless it ended before its answer."""
_refusals: contextvars.ContextVar[list[int]] = contextvars.ContextVar("_refusals")
"""HTTP statuses of the tries so far of the request under way that the server refused."""
_unsupported: weakref.WeakKeyDictionary[Endpoint, set[str]] = weakref.WeakKeyDictionary()
"""Fields of a request that the server of an endpoint has refused, as long as the endpoint lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """What an endpoint answered."""

    text: str
    finish_reason: Literal["stop", "length"]
    usage: Usage | None
    """As the server counts; None where it does not say."""
    reasoning: str = ""
    """What the model thought before, where the server tells it apart (``reasoning_content``, ``reasoning``)."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls that the server tells apart from the text."""
    logprobs: Sequence[Mapping[str, Any]] = ()
    """Per token of `text`, as the API has it: ``token``, ``logprob``, ``top_logprobs``; empty where there are none."""


class _RefusedError(Exception):
    """A refusal, with its HTTP status and the whole body of the server's answer."""

    def __init__(self, message: str, status: int, body: str) -> None:
        super().__init__(message)
        self.status, self.body = status, body


class EndpointClient:
    """Asks an endpoint; belongs to the event loop that it is first used on.

    Args:
        endpoint: Who is asked, how often at once, and what may be spent.

    Raises:
        ValueError: The environment variable with the key is not set.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._key = endpoint.api_key()
        self._who = f"{endpoint.model} at {endpoint.url}"
        self._places = asyncio.Semaphore(endpoint.concurrency)
        self._refused = _unsupported.setdefault(endpoint, set())
        self._requests = 0
        self._tokens = 0
        self._client = _connections(endpoint, self._key)

    async def ask(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        optional: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> ChatReply:
        """The model's reply.

        Args:
            sampling: Settings at their default are not sent, except the limit of tokens.
            optional: Further fields of the request, by the word that names them in a server's refusal.

        A field that the server refuses by name is left out from then on, which one line on the console says.

        Raises:
            StallError: None in time; names the endpoint and its last refusal.
            EndpointError: The server's refusal, after the retries, or an answer that is none.
            BudgetError: The budget of the run is spent.
        """
        async with self._places:
            self._spend()
            refusals: list[int] = []
            _refusals.set(refusals)
            try:
                async with asyncio.timeout(self.endpoint.timeout_s):
                    return await self._reply(messages, sampling, optional or {})
            except TimeoutError:
                last = f"; it last refused with status {refusals[-1]}" if refusals else ""
                raise StallError(
                    f"{self._who} gave no answer within {self.endpoint.timeout_s:g} s{last}"
                ) from None  # what libraries raise may hold the key

    async def close(self) -> None:
        """Close the connections. Twice is no error."""
        await self._client.close()

    async def _reply(
        self, messages: Sequence[Message], sampling: Sampling, optional: Mapping[str, Mapping[str, Any]]
    ) -> ChatReply:
        refusals: dict[str, _RefusedError] = {}
        while True:
            without = {*self._refused, *refusals}  # concurrent requests may have added to it
            limit = LIMITS[LIMITS[0] in without]
            fields = _fields(sampling, optional) | {limit: {limit: sampling.max_tokens}}
            sent = {name: each for name, each in fields.items() if name not in without}
            try:
                body = await self._send(messages, {key: value for each in sent.values() for key, value in each.items()})
            except _RefusedError as refusal:
                refusals[self._refused_field(refusal, sent)] = refusal
                continue
            self._leave_out(refusals)
            reply = read_reply(body, self._who, self._quote)
            if "stop" in without:
                reply = _cut(reply, sampling.stop)
            if reply.usage is not None:
                self._tokens += reply.usage.prompt_tokens + reply.usage.completion_tokens
            elif self.endpoint.max_total_tokens is not None:
                raise EndpointError(
                    f"{self._who} does not say how many tokens it used, so max_total_tokens="
                    f"{self.endpoint.max_total_tokens} cannot be kept; set max_requests instead"
                )
            return reply

    async def _send(self, messages: Sequence[Message], fields: Mapping[str, Any]) -> str:
        """The body of the server's answer."""
        from openai import APIConnectionError, APIStatusError, OpenAIError

        error: EndpointError | _RefusedError
        try:
            raw = await self._client.chat.completions.with_raw_response.create(
                model=self.endpoint.model,
                messages=[{"role": m.role, "content": writable(m.content)} for m in messages],  # type: ignore[misc]
                extra_body=dict(fields),
            )
            return str(raw.http_response.text)
        except APIStatusError as refusal:
            error = self._refusal(refusal.response)
        except APIConnectionError as lost:
            error = EndpointError(f"{self._who} cannot be reached: {self._quote(str(lost.__cause__ or lost))}")
        except OpenAIError as failed:
            error = EndpointError(f"{self._who} failed: {self._quote(str(failed))}")
        raise error  # outside the handler: what the library raised holds the request and with it the key

    def _refusal(self, response: Any) -> EndpointError | _RefusedError:
        body, status = response.text, response.status_code
        sent_status = response.extensions.get(_SENT_STATUS)
        if sent_status and not has_error(body):
            return _no_completion(self._who, self._quote(body))
        said = f"answered with status {sent_status} and an error" if sent_status else f"refused with status {status}"
        return _RefusedError(f"{self._who} {said}: {self._quote(body)}", status, body)

    def _refused_field(self, refusal: _RefusedError, sent: Mapping[str, Mapping[str, Any]]) -> str:
        """The field of `sent` that a refusal names. Raises EndpointError if it names none."""
        name = named_field(refusal.body, sent) if refusal.status in (400, 422) else None
        if name is None:
            raise EndpointError(str(refusal), refusal.status) from None
        return name

    def _leave_out(self, refusals: Mapping[str, _RefusedError]) -> None:
        """Leave out fields from now on, after the server has answered without them.

        A refusal for another reason may name a field by chance, for instance in the messages that it repeats.
        """
        for name, refusal in refusals.items():
            if name in self._refused:
                continue
            self._refused.add(name)
            instead = f"; the limit is sent as {LIMITS[1]}" if name == LIMITS[0] else ""
            instead = "; the stop texts are cut off here" if name == "stop" else instead
            line = "%s does not accept %s, which is left out from now on%s: %s"
            _LOG.warning(line, self._who, name, instead, refusal)

    def _spend(self) -> None:
        """Count one request. Raises BudgetError where nothing is left."""
        limits = self.endpoint
        if limits.max_requests is not None and self._requests >= limits.max_requests:
            raise BudgetError(
                f"{self._who} was asked {self._requests} times, all that max_requests={limits.max_requests} allows; "
                "raise it to go on"
            )
        if limits.max_total_tokens is not None and self._tokens >= limits.max_total_tokens:
            raise BudgetError(
                f"{self._who} used {self._tokens} tokens, max_total_tokens={limits.max_total_tokens} allows no more; "
                "raise it to go on"
            )
        self._requests += 1

    def _quote(self, said: str) -> str:
        """The beginning of what a server said, on one line, without the key."""
        if self._key:
            said = said.replace(self._key, "***")
        return repr(said[:_SHOWN] + ("..." if len(said) > _SHOWN else ""))


def _fields(sampling: Sampling, optional: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The fields about sampling by the word that names them in a refusal, in the order in which they are left out.

    If a server accepts either the temperature or another field of the two, as Anthropic's models do with top_p, the
    temperature stays.
    """
    fields = {name: dict(more) for name, more in optional.items()}
    fields |= {name: {name: value} for name, value in sampling.logit_settings.items()}
    if sampling.stop:
        fields["stop"] = {"stop": list(sampling.stop)}
    if sampling.temperature != Sampling.temperature:
        fields["temperature"] = {"temperature": sampling.temperature}
    return fields


def _cut(reply: ChatReply, stop: Sequence[str]) -> ChatReply:
    """A reply up to the first of the stop texts, which its server did not accept."""
    ends = [at for text in stop if (at := reply.text.find(text)) >= 0]
    return replace(reply, text=reply.text[: min(ends)], finish_reason="stop") if ends else reply


def read_reply(body: str, who: str, quote: Callable[[str], str]) -> ChatReply:
    """The reply in the body of a chat completion.

    Raises:
        EndpointError: The body holds no completion.
    """
    try:
        reply = json.loads(body)
        choice = reply["choices"][0]
        message = choice["message"]
        text, thinking = _parts(message.get("content") or message.get("refusal") or "")
        thought = message.get("reasoning_content") or message.get("reasoning") or thinking
        usage = reply.get("usage")
        counts = None
        if usage:
            read, written = (int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
            counts = Usage(prompt_tokens=read, completion_tokens=written)
        calls = [read_call(call["function"]) for call in message.get("tool_calls") or ()][:MAX_CALLS]
        logprobs = (choice.get("logprobs") or {}).get("content") or ()
        ended = message.get("role") == "assistant" and choice.get("finish_reason")  # in a thought, as of Gemini
        if not isinstance(text, str) or not (_SAID & message.keys() or ended):
            raise TypeError("content is no text")
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError):
        raise _no_completion(who, quote(body)) from None
    cut = str(choice.get("finish_reason")).lower() in ("length", "max_tokens")  # OpenAI's word, and others'
    thought = writable(thought).strip() if isinstance(thought, str) else ""
    return ChatReply(
        text=writable(text),
        finish_reason="length" if cut else "stop",
        usage=counts,
        reasoning=thought,
        tool_calls=tuple(calls),
        logprobs=logprobs,
    )


def _parts(content: Any) -> tuple[Any, str]:
    """Text and thought of a content, which Mistral's models give in parts."""
    if not isinstance(content, list):
        return content, ""
    texts = [part["text"] for part in content if part["type"] == "text"]
    thoughts = [_parts(part["thinking"])[0] for part in content if part["type"] == "thinking"]
    return "".join(texts), "\n".join(thoughts)


def _no_completion(who: str, quoted: str) -> EndpointError:
    return EndpointError(
        f"{who} answered what is no chat completion: {quoted}; check that url is the base of its API, usually .../v1"
    )


def _connections(endpoint: Endpoint, key: str) -> AsyncOpenAI:
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    async def note(response: Any) -> None:
        if response.is_success:
            await response.aread()
            status = status_of(response.text)
            if status is not None:  # the client's own retries then treat the answer as what it is
                response.extensions[_SENT_STATUS] = response.status_code
                response.status_code = status
        if response.status_code >= 400:
            _refusals.get().append(response.status_code)

    client = AsyncOpenAI(
        base_url=endpoint.url,
        api_key=key or "none",
        max_retries=endpoint.retries,
        timeout=None,  # `ask` keeps the deadline, over all retries
        http_client=DefaultAsyncHttpxClient(event_hooks={"response": [note]}),
    )
    client.organization = client.project = None  # the environment's OpenAI account is no other server's business
    return client


_Lease: TypeAlias = AsyncGenerator[EndpointClient, None]
_leases: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Endpoint, tuple[EndpointClient, _Lease]]] = (
    weakref.WeakKeyDictionary()
)


async def client_of(endpoint: Endpoint) -> EndpointClient:
    """The client that all players of `endpoint` on the running loop share; it closes with the loop.

    Raises:
        ValueError: The environment variable with the key is not set.
    """
    here = _leases.setdefault(asyncio.get_running_loop(), {})
    if endpoint not in here:
        lease = _until_the_loop_ends(endpoint)
        here[endpoint] = (await anext(lease), lease)
    return here[endpoint][0]


async def _until_the_loop_ends(endpoint: Endpoint) -> _Lease:
    """Yields a client and waits: when a loop ends, asyncio closes the generators that are still open on it."""
    client = EndpointClient(endpoint)
    try:
        yield client
    finally:
        _leases[asyncio.get_running_loop()].pop(endpoint)
        await client.close()
