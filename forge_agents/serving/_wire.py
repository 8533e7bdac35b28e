"""Messages between the controller and an engine's actor; all picklable."""

from __future__ import annotations

from dataclasses import dataclass

from forge_agents.policy import Sampling
from forge_agents.types import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt to complete."""

    request_id: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    choices: tuple[str, ...] = ()
    """Texts of which the response is one. Empty for any text."""
    json_schema: str = ""
    """JSON schema of the response, as text. Empty for any text."""
    adapter: int = 0
    """Number of the adapter that samples, or 0 for the model without one."""
    top_logprobs: int = 0
    """Number of most probable tokens to report per position, in addition to the sampled token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result of one request."""

    request_id: int
    completion: Completion | None
    error: str = ""
    """Reason why there is no completion."""
    late: bool = False
    """Whether the engine gave up after ``EnginePlan.answer_timeout_s``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """State of an engine. Token counts are those of finished requests since the start."""

    pid: int
    vocab_size: int
    """Number of token ids that the model embeds."""
    max_model_len: int
    """Maximum number of tokens of prompt and response together."""
    version: int
    """Version of the model's own weights."""
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose keys and values were in the prefix cache."""
    unfinished: int
    """Number of requests in the engine."""
    steps: int
    peak_device_bytes: int
    """Peak memory that torch allocated on the first rank's accelerator, or 0 on CPU."""
    device_used_bytes: int
    """Memory in use on that accelerator by all processes, or 0 on CPU."""
