"""The engine of a policy: prompt tokens to response tokens, within the limits of reasoning, answer and context."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

from forge_agents.errors import MismatchError
from forge_agents.policy import Sampling
from forge_agents.rollout.rendering import Renderer
from forge_agents.types import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSnapshot:
    """Earlier weights of a policy that an engine, or one of its adapters, holds until others are loaded."""

    name: str
    version: int
    """Weight version of the policy, which turns record."""
    load: int
    """Version that the engine reports for these weights. It is unique, because after the loss of a learner other
    weights may get the name and the version of earlier ones."""

    def recorded(self, completion: Completion) -> Completion:
        """Return the completion with the snapshot's version.

        Raises:
            MismatchError: Other weights have sampled tokens.
        """
        if loads := sorted({span.version for span in completion.versions} - {self.load}):
            raise MismatchError(
                f"the engine sampled for {self.name} with weights of load {loads[0]}, and the snapshot was loaded as "
                f"{self.load}. Resume the run, and report this error"
            )
        return replace(completion, versions=tuple(replace(span, version=self.version) for span in completion.versions))


@dataclass(frozen=True, eq=False)
class PolicyEngine:
    """The sampler of one policy: an engine, or one of its adapters, and the renderer of the policy's prompts."""

    engine: Any
    """An `EngineClient`, or another object with `max_model_len` and `generate`, which takes a prompt, a `Sampling`, and
    the keywords ``choices``, ``seed`` and ``stop_token_ids`` if they are needed, and returns a `Completion`."""
    renderer: Renderer
    adapter: str = ""
    """Name of the adapter in the engine. Empty for the model's own weights."""
    snapshot: LoadedSnapshot | None = None
    """Weights that must sample. None: the newest that were loaded."""

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and response together."""
        return int(self.engine.max_model_len)

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, **options: Any) -> Completion:
        """Complete a prompt with this policy's weights. See `EngineClient.generate`."""
        if self.adapter:
            options["adapter"] = self.adapter
        completion: Completion = await self.engine.generate(prompt_ids, sampling, **options)
        return completion if self.snapshot is None else self.snapshot.recorded(completion)

    async def respond(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, limit: int, rng_key: str | None
    ) -> Completion:
        """Sample a response: reasoning, if the model writes any, and the answer.

        An engine ends a response at a stop text inside the reasoning as well, and knows no limit of the reasoning.
        Therefore a response may take several requests, which together have the tokens of one.

        Args:
            prompt_ids: Tokens of the prompt.
            sampling: Settings. Stop texts apply to the answer only.
            limit: Maximum number of tokens of prompt and response together.
            rng_key: Key of the seed. Requests after the first extend it. None uses the engine's own random stream.
        """
        if sampling.max_reasoning_tokens is not None:
            return await self._reason_and_answer(prompt_ids, sampling, limit, rng_key)
        completion = await self.sample(prompt_ids, sampling, limit, rng_key)
        stopped = sampling.stop and completion.finish_reason == "stop"
        if not stopped or not (tag := self.renderer.stopped_thinking(completion.token_ids)):
            return completion
        # continue the reasoning up to its closing tag, and then write the answer
        for part, stop in (("thought", (tag,)), ("said", sampling.stop)):  # parts of random keys: never rename
            left, so_far = sampling.max_tokens - len(completion.token_ids), (*prompt_ids, *completion.token_ids)
            if left < 1 or len(so_far) >= limit:
                return replace(completion, finish_reason="length" if left < 1 else "context")
            rest = replace(sampling, stop=stop, max_tokens=left)
            key = None if rng_key is None else f"{rng_key}/{part}"
            completion = _concatenate(completion, (), await self.sample(so_far, rest, limit, key))
            if completion.finish_reason != "stop" or self.renderer.closing(completion.token_ids):
                return completion  # the turn ended inside the reasoning
        return completion

    async def _reason_and_answer(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, limit: int, rng_key: str | None
    ) -> Completion:
        """Sample reasoning with its own token limit, close it at the limit, and sample the answer with its limit."""
        assert sampling.max_reasoning_tokens is not None
        reasoning = replace(sampling, max_tokens=sampling.max_reasoning_tokens, max_reasoning_tokens=None)
        completion = await self.respond(prompt_ids, reasoning, limit, rng_key)
        closing = self.renderer.closing(completion.token_ids)
        answer_start = len(completion.token_ids) if closing else self.renderer.thought_length(completion.token_ids)
        left = sampling.max_tokens - (len(completion.token_ids) - answer_start)
        if left < 0 or (left == 0 and completion.finish_reason == "length"):
            return _truncate(completion, answer_start + sampling.max_tokens)
        if completion.finish_reason != "length":
            return completion
        so_far = (*prompt_ids, *completion.token_ids, *closing)
        if len(so_far) >= limit:
            return replace(completion, finish_reason="context")
        key = None if rng_key is None else f"{rng_key}/answer"
        answer = await self.sample(so_far, replace(sampling, max_tokens=left), limit, key)
        return _concatenate(completion, closing, answer)

    async def sample(
        self,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        limit: int,
        rng_key: str | None,
        choices: tuple[str, ...] = (),
    ) -> Completion:
        """Do one request. Its arguments are those of `respond`. The engine may write only one of `choices`, if any."""
        room = limit - len(prompt_ids)
        options: dict[str, Any] = {"choices": choices} if choices else {}
        if rng_key is not None:
            options["seed"] = sampling_seed(rng_key)
        if self.renderer.stop_ids:
            options["stop_token_ids"] = self.renderer.stop_ids
        capped = sampling  # usually unchanged, and a copy is not free
        if sampling.max_tokens > room or sampling.max_reasoning_tokens is not None:
            capped = replace(sampling, max_tokens=min(sampling.max_tokens, room), max_reasoning_tokens=None)
        completion = await self.generate(prompt_ids, capped, **options)
        is_full = completion.finish_reason == "length" and capped.max_tokens < sampling.max_tokens
        return replace(completion, finish_reason="context") if is_full else completion

    async def load_weights(self, version: int | None = None, *, timeout_s: float = 120.0) -> dict[str, float]:
        """Load published weights of this policy. See `EngineClient.load_weights`."""
        timings: dict[str, float] = await self.engine.load_weights(version, adapter=self.adapter, timeout_s=timeout_s)
        return timings


def _concatenate(first: Completion, inserted: tuple[int, ...], second: Completion) -> Completion:
    """Return one completion with `inserted` tokens, which were not sampled, between two."""
    offset = len(first.token_ids) + len(inserted)
    spans = (replace(span, start=offset + span.start, end=offset + span.end) for span in second.versions)
    return Completion(
        token_ids=(*first.token_ids, *inserted, *second.token_ids),
        logprobs=(*first.logprobs, *(0.0 for _ in inserted), *second.logprobs),
        finish_reason=second.finish_reason,
        versions=(*first.versions, *spans),
        seconds=first.seconds + second.seconds,
    )


def _truncate(completion: Completion, count: int) -> Completion:
    """Return the first `count` tokens."""
    spans = (replace(span, end=min(span.end, count)) for span in completion.versions if span.start < count)
    return replace(
        completion,
        token_ids=completion.token_ids[:count],
        logprobs=completion.logprobs[:count],
        finish_reason="length",
        versions=tuple(spans),
        top_logprobs=(),
    )


def sampling_seed(rng_key: str) -> int:
    """Return the 32-bit sampling seed of a key."""
    return int.from_bytes(hashlib.sha256(rng_key.encode()).digest()[:4], "big")
