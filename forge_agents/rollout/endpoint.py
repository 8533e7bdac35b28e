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
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from forge_agents.envs.env import writable
from forge_agents.errors import BudgetError, EndpointError, StallError
from forge_agents.policy import Endpoint, Sampling
from forge_agents.tools.formats import MAX_CALLS, read_call
from forge_agents.types import Message, ToolCall, Usage

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_LOG = logging.getLogger(__name__)
_SHOWN = 500
"""Characters of what a server says that an error quotes."""
_LIMITS = ("max_tokens", "max_completion_tokens")
"""What the limit of a response is called: by most servers, and by those that refuse that name."""
_SAID = {"content", "reasoning_content", "reasoning", "tool_calls"}
"""Of these a message has at least one."""
_refusals: contextvars.ContextVar[list[int]] = contextvars.ContextVar("_refusals")
"""HTTP statuses of the tries so far of the request under way that the server refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """What an endpoint answered."""

    text: str
    finish_reason: Literal["stop", "length"]
    usage: Usage | None
    """As the server counts; None where it does not say."""
    thought: str = ""
    """What the model thought before, where the server tells it apart (``reasoning_content``, ``reasoning``)."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls that the server tells apart from the text."""
    logprobs: Sequence[Mapping[str, Any]] = ()
    """Per token of `text`, as the API has it: ``token``, ``logprob``, ``top_logprobs``; empty where there are none."""


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
        self._refused: set[str] = set()
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
            optional: Further fields of the request, by the word that names them in a server's refusal. Fields that the
                server refuses are left out from then on.

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
        while True:
            without = frozenset(self._refused)  # others add to it meanwhile
            fields: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
            fields[_LIMITS[_LIMITS[0] in without]] = sampling.max_tokens
            if sampling.stop:
                fields["stop"] = list(sampling.stop)
            if sampling.shaping:  # not all of them are OpenAI's: a server that knows one of them not may refuse it
                fields["extra_body"] = sampling.shaping
            for word, more in optional.items():
                if word not in without:
                    fields |= more
            try:
                reply = self._read(await self._send(messages, fields))
            except EndpointError as error:
                if error.status != 400:
                    raise
                self._do_without(error, [word for word in (*optional, _LIMITS[0]) if word not in without])
                continue
            if reply.usage is not None:
                self._tokens += reply.usage.prompt_tokens + reply.usage.completion_tokens
            elif self.endpoint.max_total_tokens is not None:
                raise EndpointError(
                    f"{self._who} does not say how many tokens it used, so max_total_tokens="
                    f"{self.endpoint.max_total_tokens} cannot be kept; set max_requests instead"
                )
            return reply

    async def _send(self, messages: Sequence[Message], fields: Mapping[str, Any]) -> str:
        """What the server answers, as it stands."""
        from openai import APIConnectionError, APIStatusError, OpenAIError

        error: EndpointError
        try:
            raw = await self._client.chat.completions.with_raw_response.create(
                model=self.endpoint.model,
                messages=[{"role": m.role, "content": writable(m.content)} for m in messages],  # type: ignore[misc]
                **fields,
            )
            return str(raw.http_response.text)
        except APIStatusError as refusal:
            error = EndpointError(
                f"{self._who} refused with status {refusal.status_code}: {self._quote(refusal.response.text)}",
                refusal.status_code,
            )
        except APIConnectionError as lost:
            error = EndpointError(f"{self._who} cannot be reached: {self._quote(str(lost.__cause__ or lost))}")
        except OpenAIError as failed:
            error = EndpointError(f"{self._who} failed: {self._quote(str(failed))}")
        raise error  # outside the handler: what the library raised holds the request and with it the key

    def _read(self, body: str) -> ChatReply:
        try:
            reply = json.loads(body)
            choice = reply["choices"][0]
            message = choice["message"]
            text = message.get("content") or ""  # none where the limit cut a thought off
            thought = message.get("reasoning_content") or message.get("reasoning") or ""
            usage = reply.get("usage")
            counts = None
            if usage:
                read, written = (int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
                counts = Usage(prompt_tokens=read, completion_tokens=written)
            calls = [read_call(call["function"]) for call in message.get("tool_calls") or ()][:MAX_CALLS]
            logprobs = (choice.get("logprobs") or {}).get("content") or ()
            if not isinstance(text, str) or not _SAID & message.keys():
                raise TypeError("content is no text")
        except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError):
            raise EndpointError(
                f"{self._who} answered what is no chat completion: {self._quote(body)}; check that url is the base of "
                "its API, usually .../v1"
            ) from None
        finish: Literal["stop", "length"] = "length" if choice.get("finish_reason") == "length" else "stop"
        thought = writable(thought).strip() if isinstance(thought, str) else ""
        return ChatReply(
            text=writable(text),
            finish_reason=finish,
            usage=counts,
            thought=thought,
            tool_calls=tuple(calls),
            logprobs=logprobs,
        )

    def _do_without(self, error: EndpointError, sent: Sequence[str]) -> None:
        """Do without the field of `sent` that a refusal names from now on; raise it if it names none."""
        named = next((word for word in sent if word in str(error)), None)
        if named is None or (named == _LIMITS[0] and _LIMITS[1] not in str(error)):
            raise error
        if named not in self._refused:
            self._refused.add(named)
            _LOG.warning("%s is asked without %s from now on: %s", self._who, named, error)

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


def _connections(endpoint: Endpoint, key: str) -> AsyncOpenAI:
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    async def note(response: Any) -> None:
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
