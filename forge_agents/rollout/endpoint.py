"""Client of an OpenAI-compatible chat endpoint: bounded concurrency, budgets, and one timeout that includes retries."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from forge_agents.credentials import redact
from forge_agents.envs.env import writable
from forge_agents.errors import BudgetError, EndpointError, StallError
from forge_agents.http_body import ENCODINGS, BodyError, limit_cookies, read_bounded
from forge_agents.policy import Endpoint, Sampling
from forge_agents.rollout.refusals import LIMITS, has_error, named_field, parsed, status_of
from forge_agents.runtime.peers import check_connections
from forge_agents.tools.formats import MAX_CALLS, read_call
from forge_agents.types import Message, ToolCall, Usage

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_LOG = logging.getLogger(__name__)
_MAX_QUOTED_CHARS = 500
"""Maximum length of a server's message in an error."""
_SENT_STATUS = "forge_agents.sent_status"
"""Extension of a response: the original status, if the body holds an error with another one."""
_REPLY = "forge_agents.reply"
"""Extension of a response: its parsed body, which may have millions of values."""
_MAX_BODY_BYTES = 16 << 20
"""Maximum size of a response. 10,000 tokens with 20 alternatives each have 12 MiB."""
_MAX_REFUSAL_BYTES = 1 << 20
"""Maximum size of a refusal, which may quote the request."""
_MAX_TOKEN_CHARS = 64
"""Characters per token beyond which an answer is cut. Tokens have about four."""
_ALWAYS_CHARS, _MORE_REASONING = 8192, 65536
"""Characters that an answer may have whatever `max_tokens` is, and additional ones of its reasoning."""
_CONTENT_FIELDS = {"content", "reasoning_content", "reasoning", "refusal", "tool_calls"}
"""A message has at least one of these fields, unless it ended before its answer."""
_TEXT_PARTS = {"text": "text", "output_text": "text", "refusal": "refusal"}
"""Key of the text, by type of a content part."""
_MAX_TOKENS = 1 << 40
"""Maximum number of tokens of one request that is believed."""
_COUNTS = (("prompt", "input"), ("completion", "output"))
_LIMITS_REACHED = (
    "length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded", "incomplete",
)  # fmt: skip
"""Finish reasons of answers that a limit cut off."""
_refusals: contextvars.ContextVar[list[int]] = contextvars.ContextVar("_refusals")
"""HTTP statuses of refused attempts of the current request."""
_unsupported_fields: weakref.WeakKeyDictionary[Endpoint, set[str]] = weakref.WeakKeyDictionary()
"""Request fields that the server of an endpoint has refused, for the lifetime of the endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """Answer of an endpoint."""

    text: str
    finish_reason: Literal["stop", "length"]
    usage: Usage | None
    """Token counts of the server, or None if it reports none."""
    reasoning: str = ""
    """Reasoning that the server separates from the answer (``reasoning_content``, ``reasoning``)."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls that the server separates from the text."""
    logprobs: Sequence[Mapping[str, Any]] = ()
    """Per token of `text`, in the API's format: ``token``, ``logprob``, ``top_logprobs``. May be empty."""


class _RefusedError(Exception):
    def __init__(self, message: str, status: int, body: str) -> None:
        super().__init__(message)
        self.status, self.body = status, body


class EndpointClient:
    """Client of an endpoint. Belongs to the event loop on which it is first used."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._key = endpoint.api_key()
        self._label = f"{endpoint.model} at {redact(endpoint.url)}"
        self._slots = asyncio.Semaphore(endpoint.concurrency)
        self._refused_fields = _unsupported_fields.setdefault(endpoint, set())
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
        """Ask the model for a reply.

        A field that the server refuses by name is omitted from then on, with one warning.

        Args:
            messages: The conversation.
            sampling: Sampling settings. Defaults are not sent, except `max_tokens`.
            optional: Further fields of the request, by the name under which a server may refuse them.

        Raises:
            StallError: No reply in time. The message names the endpoint and its last refusal.
            EndpointError: The server refused, also after retries, or sent no valid completion.
            BudgetError: The run's budget is spent.
        """
        async with self._slots:
            self._count_request()
            statuses: list[int] = []
            _refusals.set(statuses)
            try:
                async with asyncio.timeout(self.endpoint.timeout_s):
                    return await self._reply(messages, sampling, optional or {})
            except TimeoutError:
                last = f". It last refused with status {statuses[-1]}" if statuses else ""
                raise StallError(
                    f"{self._label} gave no answer within {self.endpoint.timeout_s:g} s{last}"
                ) from None  # a library's exception may hold the key

    async def close(self) -> None:
        """Close the connections. Calling it twice is safe."""
        await self._client.close()

    async def _reply(
        self, messages: Sequence[Message], sampling: Sampling, optional: Mapping[str, Mapping[str, Any]]
    ) -> ChatReply:
        refusals: dict[str, _RefusedError] = {}
        while True:
            omitted = {*self._refused_fields, *refusals}  # concurrent requests may have added fields
            limit = LIMITS[LIMITS[0] in omitted]
            fields = _fields(sampling, optional) | {limit: {limit: sampling.max_tokens}}
            sent = {name: each for name, each in fields.items() if name not in omitted}
            try:
                body, parsed_body = await self._send(
                    messages, {key: value for each in sent.values() for key, value in each.items()}
                )
            except _RefusedError as refusal:
                name = named_field(refusal.body, sent) if refusal.status in (400, 422) else None
                if name is None:
                    raise EndpointError(str(refusal), refusal.status) from None
                refusals[name] = refusal
                continue
            self._omit(refusals)
            reply = _bounded(read_reply(parsed_body, body, self._label, self._quote), sampling.max_tokens)
            if "stop" in omitted:
                reply = _apply_stop(reply, sampling.stop)
            if reply.usage is not None:
                self._tokens += reply.usage.prompt_tokens + reply.usage.completion_tokens
            elif self.endpoint.max_total_tokens is not None:
                raise EndpointError(
                    f"{self._label} does not say how many tokens it used, so max_total_tokens="
                    f"{self.endpoint.max_total_tokens} cannot be kept. Set max_requests instead"
                )
            return reply

    async def _send(self, messages: Sequence[Message], fields: Mapping[str, Any]) -> tuple[str, Any]:
        from openai import APIConnectionError, APIStatusError, OpenAIError

        error: EndpointError | _RefusedError
        try:
            raw = await self._client.chat.completions.with_raw_response.create(
                model=self.endpoint.model,
                messages=[{"role": m.role, "content": writable(m.content)} for m in messages],  # type: ignore[misc]
                extra_body=dict(fields),
            )
            return str(raw.http_response.text), raw.http_response.extensions[_REPLY]
        except APIStatusError as refusal:
            error = self._refusal(refusal.response)
        except APIConnectionError as lost:
            error = EndpointError(f"{self._label} cannot be reached: {self._quote(str(lost.__cause__ or lost))}")
        except PermissionError as foreign:  # of `check_connections`
            error = EndpointError(f"{self._label}: {foreign}")
        except OpenAIError as failed:
            error = EndpointError(f"{self._label} failed: {self._quote(str(failed))}")
        raise error  # outside the handler, because the library's exception holds the request and with it the key

    def _refusal(self, response: Any) -> EndpointError | _RefusedError:
        body, status = response.text, response.status_code
        if 300 <= status < 400:
            place = self._quote(response.headers.get("location", ""))
            return EndpointError(f"{self._label} redirects to {place}, which is not followed. Check url", status)
        sent_status = response.extensions.get(_SENT_STATUS)
        if sent_status and not has_error(body):
            return _no_completion(self._label, self._quote(body))
        action = f"answered with status {sent_status} and an error" if sent_status else f"refused with status {status}"
        return _RefusedError(f"{self._label} {action}: {self._quote(body)}", status, body)

    def _omit(self, refusals: Mapping[str, _RefusedError]) -> None:
        """Omit fields from now on, after the server has answered without them.

        The answer is awaited because a refusal for another reason may name a field by chance, such as in a quotation.
        """
        for name, refusal in refusals.items():
            if name in self._refused_fields:
                continue
            self._refused_fields.add(name)
            note = f". The limit is sent as {LIMITS[1]}" if name == LIMITS[0] else ""
            note = ". The stop texts are applied to its answers" if name == "stop" else note
            line = "%s does not accept %s, which is omitted from now on%s: %s"
            _LOG.warning(line, self._label, name, note, refusal)

    def _count_request(self) -> None:
        limits = self.endpoint
        if limits.max_requests is not None and self._requests >= limits.max_requests:
            raise BudgetError(
                f"{self._label} was asked {self._requests} times, all that max_requests={limits.max_requests} allows. "
                "Raise it to continue"
            )
        if limits.max_total_tokens is not None and self._tokens >= limits.max_total_tokens:
            raise BudgetError(
                f"{self._label} used {self._tokens} tokens, max_total_tokens={limits.max_total_tokens} allows no more. "
                "Raise it to continue"
            )
        self._requests += 1

    def _quote(self, text: str) -> str:
        """The beginning of a server's message, on one line, without the key."""
        if self._key:
            text = text.replace(self._key, "***")
        return repr(text[:_MAX_QUOTED_CHARS] + ("..." if len(text) > _MAX_QUOTED_CHARS else ""))


def _fields(sampling: Sampling, optional: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Sampling fields by the name under which a server may refuse them, in the order in which they are omitted.

    If a server accepts only one of temperature and another field, as Anthropic's models do with top_p, the temperature
    stays.
    """
    fields = {name: dict(more) for name, more in optional.items()}
    fields |= {name: {name: value} for name, value in sampling.logit_settings.items()}
    if sampling.stop:
        fields["stop"] = {"stop": list(sampling.stop)}
    if sampling.temperature != Sampling.temperature:
        fields["temperature"] = {"temperature": sampling.temperature}
    return fields


def _apply_stop(reply: ChatReply, stop: Sequence[str]) -> ChatReply:
    ends = [at for text in stop if (at := reply.text.find(text)) >= 0]
    return replace(reply, text=reply.text[: min(ends)], finish_reason="stop") if ends else reply


def _bounded(reply: ChatReply, max_tokens: int) -> ChatReply:
    """Cut an answer that is far longer than `max_tokens` can be. All answers of an episode are kept in memory.

    Servers may ignore the limit, and reasoning may not count towards it.
    """
    most = _ALWAYS_CHARS + _MAX_TOKEN_CHARS * max_tokens
    calls, left = [], most
    for call in reply.tool_calls:
        left -= len(str(call))
        calls += [call] if left >= 0 else []
    cut = len(reply.text) > most or left < 0
    return replace(
        reply,
        text=reply.text[:most],
        reasoning=reply.reasoning[: most + _MORE_REASONING],
        tool_calls=tuple(calls),
        logprobs=reply.logprobs[:most],
        finish_reason="length" if cut else reply.finish_reason,
    )


def read_reply(reply: Any, body: str, label: str, quote: Callable[[str], str]) -> ChatReply:
    """Read the parsed body of a chat completion.

    Raises:
        EndpointError: The body holds no completion.
    """
    try:
        choice = reply["choices"][0]
        message = choice["message"]
        text, parts_reasoning = _split_parts(message.get("content") or message.get("refusal") or "")
        reasoning = message.get("reasoning_content") or message.get("reasoning") or parts_reasoning
        usage = reply.get("usage")
        counts = _read_usage(usage) if usage else None
        calls = [read_call(call["function"]) for call in message.get("tool_calls") or ()][:MAX_CALLS]
        logprobs = (choice.get("logprobs") or {}).get("content") or ()
        _check_logprobs(logprobs)
        # Gemini sends such a message if it ended inside its reasoning
        ended = message.get("role") == "assistant" and choice.get("finish_reason")
        if not isinstance(text, str) or not (_CONTENT_FIELDS & message.keys() or ended):
            raise TypeError("content is no text")
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError):
        raise _no_completion(label, quote(body)) from None
    cut = str(choice.get("finish_reason")).rpartition(".")[2].lower() in _LIMITS_REACHED
    reasoning = writable(reasoning).strip() if isinstance(reasoning, str) else ""
    return ChatReply(
        text=writable(text),
        finish_reason="length" if cut else "stop",
        usage=counts,
        reasoning=reasoning,
        tool_calls=tuple(calls),
        logprobs=logprobs,
    )


def _read_usage(usage: Mapping[str, Any]) -> Usage | None:
    """Token counts under the names of OpenAI's or Anthropic's API. None if they are missing or all 0."""
    read, written = (int(usage.get(f"{old}_tokens", usage.get(f"{new}_tokens")) or 0) for old, new in _COUNTS)
    if not (read or written):
        read = int(usage.get("total_tokens") or 0)
    if not (0 <= read <= _MAX_TOKENS and 0 <= written <= _MAX_TOKENS):
        raise ValueError("a number of tokens is negative or too large")
    return Usage(prompt_tokens=read, completion_tokens=written) if read or written else None


def _check_logprobs(tokens: Any) -> None:
    """Raise TypeError or LookupError unless each token has a text, and each alternative a text and a log-probability.

    Servers that round may report a little more than 0.
    """
    for token in tokens:
        for entry in (token, *(token.get("top_logprobs") or ())):
            if not isinstance(entry["token"], str):
                raise TypeError("a token is not text")
        if not all(entry["logprob"] <= 1.0 for entry in token.get("top_logprobs") or ()):  # also false for NaN
            raise TypeError("a log-probability is above 0")


def _split_parts(content: Any) -> tuple[Any, str]:
    """Text and reasoning of a message's content, which Mistral's models send in parts.

    Raises:
        TypeError: No part has text or reasoning.
    """
    if not isinstance(content, list):
        return content, ""
    if not any(part["type"] in (*_TEXT_PARTS, "thinking") for part in content):
        raise TypeError("content has no text")
    texts = [part[_TEXT_PARTS[part["type"]]] for part in content if part["type"] in _TEXT_PARTS]
    reasonings = [_split_parts(part["thinking"])[0] for part in content if part["type"] == "thinking"]
    return "".join(texts), "\n".join(reasonings)


def _no_completion(label: str, quoted: str) -> EndpointError:
    return EndpointError(
        f"{label} sent no valid chat completion: {quoted}. Check that url is the base of its API, usually .../v1"
    )


def _connections(endpoint: Endpoint, key: str) -> AsyncOpenAI:
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    async def note(response: Any) -> None:
        try:
            await read_bounded(response, _MAX_BODY_BYTES if response.is_success else _MAX_REFUSAL_BYTES)
        except BodyError as cause:
            raise EndpointError(f"{endpoint.model} at {redact(endpoint.url)}: {cause}. Check url") from None
        if response.is_success:
            response.extensions[_REPLY] = parsed(response.text)
            status = status_of(response.text, response.extensions[_REPLY])
            if status is not None:  # so that the client's own retries treat it as an error
                response.extensions[_SENT_STATUS] = response.status_code
                response.status_code = status
        if response.status_code >= 400:
            _refusals.get().append(response.status_code)

    client = AsyncOpenAI(
        base_url=endpoint.url,
        api_key=key or "none",
        max_retries=endpoint.retries,
        timeout=None,  # `ask` has one timeout for all retries
        # a redirect would send the conversation to another host, such as a service on this machine's loopback
        http_client=DefaultAsyncHttpxClient(
            event_hooks={"request": [check_connections] if key else [], "response": [note]},
            follow_redirects=False,
            headers={"accept-encoding": ENCODINGS},
        ),
    )
    limit_cookies(client._client)
    client.organization = client.project = None  # other servers must not learn the OpenAI account in the environment
    return client


_Lease: TypeAlias = AsyncGenerator[EndpointClient, None]
_leases: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Endpoint, tuple[EndpointClient, _Lease]]] = (
    weakref.WeakKeyDictionary()
)


async def client_of(endpoint: Endpoint) -> EndpointClient:
    """The shared client of `endpoint` on the running loop. The client closes with the loop.

    Raises:
        ValueError: The environment variable with the key is not set.
    """
    leases = _leases.setdefault(asyncio.get_running_loop(), {})
    if endpoint not in leases:
        lease = _until_the_loop_ends(endpoint)
        leases[endpoint] = (await anext(lease), lease)
    return leases[endpoint][0]


async def _until_the_loop_ends(endpoint: Endpoint) -> _Lease:
    """Yield a client and wait: when a loop ends, asyncio closes the generators that are still open on it."""
    client = EndpointClient(endpoint)
    try:
        yield client
    finally:
        _leases[asyncio.get_running_loop()].pop(endpoint)
        await client.close()
