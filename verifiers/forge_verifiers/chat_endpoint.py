"""A judge's model behind an OpenAI-compatible endpoint.

In: questions. Out: replies, with the probabilities of the choices where the server tells them. Waits for the server:
a bounded number of requests at a time, each with a deadline that includes its retries.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from forge_agents.errors import StallError
from forge_verifiers.chat import Question
from forge_verifiers.judge_answers import Reply, shares_of

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_LOG = logging.getLogger(__name__)
_OPTIONAL = {"response_format": ("response_format",), "logprobs": ("logprobs", "top_logprobs")}
"""What some servers refuse, as their error names it: the fields to leave out from then on."""


@runtime_checkable
class EndpointLike(Protocol):
    """Where a model answers."""

    @property
    def url(self) -> str: ...  # noqa: D102
    @property
    def model(self) -> str: ...  # noqa: D102


@dataclass(frozen=True)
class Endpoint:
    """A model behind an OpenAI-compatible server.

    Args:
        url: Base of its API, e.g. ``http://127.0.0.1:8000/v1``.
        model: What the server calls the model.
    """

    url: str
    model: str
    api_key_env: str = ""
    """Environment variable that holds the key; empty for a server that asks for none."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url={self.url!r} is no HTTP address; give the API's base, e.g. http://127.0.0.1:8000/v1")
        if not self.model:
            raise ValueError("model='' names no model; give the name that the server knows it by")


class EndpointChat:
    """Asks an endpoint.

    Requests that the server turns away for load (429), with an error of its own (5xx) or a lost connection are sent
    again, after a wait that doubles from 0.5 s to 8 s or is what the server asks for. A server that does not know
    structured output or log-probabilities is asked without; replies must then be nothing but the choice.

    Args:
        endpoint: Has `url`, `model` and, where a key is needed, `api_key_env`.
        concurrency: Requests under way at the same time.
        retries: Times that one request is sent again.
        timeout_s: Seconds for one question, its retries included.
    """

    def __init__(self, endpoint: EndpointLike, *, concurrency: int, retries: int, timeout_s: float) -> None:
        self._endpoint, self._concurrency = endpoint, concurrency
        self._retries, self._timeout_s = retries, timeout_s
        self._refused: set[str] = set()
        self._client: AsyncOpenAI | None = None
        self._places = asyncio.Semaphore()

    async def start(self) -> None:
        """Look up the key.

        Raises:
            ValueError: Its environment variable is not set.
        """
        from openai import AsyncOpenAI

        variable = str(getattr(self._endpoint, "api_key_env", ""))
        key = os.environ.get(variable, "") if variable else "none"
        if not key:
            raise ValueError(f"environment variable {variable!r} is not set; it must hold the key for the endpoint")
        self._places = asyncio.Semaphore(self._concurrency)  # belongs to the running loop
        self._client = AsyncOpenAI(
            base_url=self._endpoint.url,
            api_key=key,
            max_retries=self._retries,
            timeout=None,  # `ask` keeps the deadline, over all retries
        )

    async def ask(self, question: Question) -> Reply:
        """The answer.

        Raises:
            StallError: None in time.
            openai.OpenAIError: The server's refusal, after the retries.
        """
        from openai import BadRequestError

        async with self._places:
            try:
                async with asyncio.timeout(self._timeout_s):
                    while True:
                        try:
                            return _reply(await self._create(question), question.choices)
                        except BadRequestError as error:
                            self._leave_out(error)
            except TimeoutError as error:
                raise StallError(
                    f"{self._endpoint.model} at {self._endpoint.url} gave no answer within {self._timeout_s:g} s"
                ) from error

    async def stop(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def longest_s(self, questions: int) -> float:
        """They go in rounds of `concurrency`."""
        return self._timeout_s * math.ceil(questions / self._concurrency)

    async def _create(self, question: Question) -> Any:
        assert self._client is not None
        fields: dict[str, Any] = {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "verdict", "strict": True, "schema": dict(question.schema)},
            }
        }
        if question.choices:
            fields |= {"logprobs": True, "top_logprobs": 20}
        left_out = {field for refused in self._refused for field in _OPTIONAL[refused]}
        return await self._client.chat.completions.create(
            model=self._endpoint.model,
            messages=[
                {"role": "system", "content": question.instructions},
                {"role": "user", "content": question.text},
            ],
            temperature=0.0,
            max_tokens=question.max_tokens,
            **{field: value for field, value in fields.items() if field not in left_out},
        )

    def _leave_out(self, error: Exception) -> None:
        """Do without the feature that the server's error names; raise the error if it names none that was asked for."""
        named = next((feature for feature in _OPTIONAL if feature in str(error)), None)
        if named is None or named in self._refused:
            raise error
        self._refused.add(named)
        _LOG.warning("%s at %s is asked without %s: %s", self._endpoint.model, self._endpoint.url, named, error)


def _reply(response: Any, choices: tuple[str, ...]) -> Reply:
    choice = response.choices[0]
    text = choice.message.content or ""
    usage = response.usage
    return Reply(
        text=text,
        shares=shares_of(_alternatives(text, choice), choices),
        prompt_tokens=usage.prompt_tokens if usage else 0,
        completion_tokens=usage.completion_tokens if usage else 0,
    )


def _alternatives(text: str, choice: Any) -> dict[str, float]:
    """Probabilities of the tokens where the verdict begins, in ``{"answer": "yes"}`` or the bare ``yes``."""
    tokens = choice.logprobs.content if choice.logprobs else None
    if not tokens:
        return {}
    at = len(text) - len(text.lstrip())
    if text.lstrip().startswith("{"):
        at = text.find('"', text.find(":")) + 1
    end = 0
    for token in tokens:
        end += len(token.token)
        if end > at:
            found: dict[str, float] = {}
            for entry in token.top_logprobs:
                found[entry.token] = found.get(entry.token, 0.0) + math.exp(entry.logprob)
            return found
    return {}
