"""HTTP details of the gateway: keys, request bodies, responses and error bodies."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

from forge_agents.http_body import too_many_values
from forge_agents.programs.calls import RefusedError
from forge_agents.programs.protocols.anthropic import THREAD_UNSUPPORTED

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BODY_BYTES = 8 << 20
"""Maximum size of a request: a conversation that fills a context of a million tokens."""
BODY_TIMEOUT_S = 30.0
"""Time limit for the arrival of a request's body."""
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
    500: "api_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
"""Anthropic's error types by status. OpenAI's clients accept any text."""


def error_body(error: RefusedError) -> dict[str, Any]:
    """Return the body of an error response that both OpenAI's and Anthropic's clients can read."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    body: dict[str, Any] = {"message": str(error), "type": kind, "code": error.code, "param": None}
    if error.code == THREAD_UNSUPPORTED:
        body["details"] = {"error_code": error.code}
    return {"type": "error", "error": body}


def invalid_key(*, given: bool) -> RefusedError:
    """Return the error for a request with a wrong key, or without one."""
    problem = "invalid API key" if given else "no API key"
    return RefusedError(
        f"{problem}: send the key that the program was given, or that forge-agents serve shows, as Authorization: "
        "Bearer KEY or as x-api-key. The key of an episode is invalid once the episode is over",
        status=401,
        code="invalid_api_key",
    )


def key_digest(token: str) -> bytes:
    """Return the digest under which a session is stored. The time of a lookup then reveals nothing about tokens."""
    return hashlib.sha256(token.encode()).digest()


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    """Return all values of a header."""
    return [value for header, value in scope["headers"] if header == name]


def read_keys(scope: Scope) -> list[bytes]:
    """Return all API keys of a request."""
    parts = [(value, *value.partition(b" ")) for value in header_values(scope, b"authorization")]
    tokens = [(token if scheme.lower() == b"bearer" else value).strip() for value, scheme, _, token in parts]
    return tokens + header_values(scope, b"x-api-key")


def session_id(scope: Scope) -> str:
    """Return the name by which a program tells its conversations with one model apart. Empty without the header."""
    return b", ".join(header_values(scope, b"x-session-id")).decode("latin-1")


async def read_body(receive: Receive, count_bytes: Callable[[int], None]) -> bytes:
    """Receive the body of a request. `count_bytes` gets the size of each part before it is kept."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RefusedError("the request ended early")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                count_bytes(len(parts[-1]))
                if size > MAX_BODY_BYTES:
                    raise RefusedError(
                        f"the body is larger than {MAX_BODY_BYTES} bytes. Send a shorter conversation",
                        status=413,
                        code="context_length_exceeded",
                    )
                if not message.get("more_body"):
                    break
    except TimeoutError:
        raise RefusedError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s", status=408) from None
    return b"".join(parts)


def parse_body(body: bytes) -> Any:
    """Parse the JSON of a request."""
    if too_many := too_many_values(body):
        raise RefusedError(f"the body has {too_many}. Send a shorter conversation", status=413)
    try:
        return json.loads(body.decode("utf-8-sig", "surrogatepass"))  # of bytes, it would read UTF-16 as well
    except (ValueError, RecursionError) as cause:
        raise RefusedError(f"the body is not JSON in UTF-8 ({str(cause)[:200]})") from None


def models_body(names: Mapping[str, str], scope: Scope) -> dict[str, Any]:
    """Return the list of models."""
    models = [model_body(name, scope) for name in names]
    if _is_anthropic(scope):
        return {"data": models, "has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}
    return {"object": "list", "data": models}


def model_body(name: str, scope: Scope) -> dict[str, Any]:
    """Return the description of a model."""
    if _is_anthropic(scope):
        details = {"display_name": name, "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
        return {"id": name, "type": "model", **details}
    return {"id": name, "object": "model", "created": 0, "owned_by": "agent"}


def _is_anthropic(scope: Scope) -> bool:
    """Return whether the client uses Anthropic's API, which has the same paths for models, but other bodies."""
    return bool(header_values(scope, b"anthropic-version"))


async def send_json(send: Send, status: int, body: Mapping[str, Any]) -> None:
    """Send a JSON response."""
    await send_text(send, status, b"application/json", json.dumps(body).encode())


async def send_text(send: Send, status: int, kind: bytes, text: bytes) -> None:
    """Send a response."""
    headers = [(b"content-type", kind), (b"content-length", str(len(text)).encode()), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})
