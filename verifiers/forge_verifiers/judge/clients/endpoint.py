"""A judge's model behind an OpenAI-compatible endpoint.

In: questions. Out: replies, with the probabilities of the choices where the server tells them. Waits for the server, as
long as the endpoint says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge_agents.policy import Endpoint, Sampling
from forge_agents.types import Message
from forge_verifiers.judge.answers import Reply, shares_of
from forge_verifiers.judge.clients.chat import Question

if TYPE_CHECKING:
    from forge_agents.rollout.endpoint import EndpointClient


class EndpointChat:
    """Asks an endpoint.

    A server that does not know structured output or log-probabilities is asked without; replies must then be nothing
    but the choice.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._client: EndpointClient | None = None

    async def start(self) -> None:
        """Look up the key.

        Raises:
            ValueError: Its environment variable is not set.
        """
        from forge_agents.rollout.endpoint import EndpointClient

        self._client = EndpointClient(self._endpoint)

    async def ask(self, question: Question) -> Reply:
        """The answer.

        Raises:
            StallError, EndpointError, BudgetError: As in `EndpointClient.ask`.
        """
        assert self._client is not None
        schema = {"name": "verdict", "strict": True, "schema": dict(question.schema)}
        optional: dict[str, Mapping[str, Any]] = {
            "response_format": {"response_format": {"type": "json_schema", "json_schema": schema}}
        }
        if question.choices:
            optional["logprobs"] = {"logprobs": True, "top_logprobs": 20}
        reply = await self._client.ask(
            [Message(role="system", content=question.instructions), Message(role="user", content=question.text)],
            Sampling(temperature=0.0, max_tokens=question.max_tokens),
            optional=optional,
        )
        shares, mass = shares_of(_alternatives(reply.text, reply.logprobs), question.choices)
        return Reply(
            text=reply.text,
            shares=shares,
            mass=mass,
            prompt_tokens=reply.usage.prompt_tokens if reply.usage else 0,
            completion_tokens=reply.usage.completion_tokens if reply.usage else 0,
        )

    async def stop(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def longest_s(self, questions: int) -> float:
        """They go in rounds of `concurrency`."""
        return self._endpoint.timeout_s * math.ceil(questions / self._endpoint.concurrency)


def _alternatives(text: str, tokens: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Probabilities of the tokens where the verdict begins, in ``{"answer": "yes"}`` or the bare ``yes``."""
    at = len(text) - len(text.lstrip())
    if text.lstrip().startswith("{"):
        at = text.find('"', text.find(":")) + 1
    end = 0
    for token in tokens:
        end += len(token["token"])
        if end > at:
            found: dict[str, float] = {}
            for entry in token["top_logprobs"]:
                found[entry["token"]] = found.get(entry["token"], 0.0) + math.exp(entry["logprob"])
            return found
    return {}
