"""What travels between an `Engine` and its actor.

In: nothing. Out: requests, answers and states, picklable. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from forge_agents.policy import Sampling
from forge_agents.types import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to complete."""

    request_id: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    choices: tuple[str, ...] = ()
    """The response is one of these texts; empty for any text."""
    json_schema: str = ""
    """JSON text of the schema that the response fits; empty for any text."""
    adapter: int = 0
    """Number of the adapter that samples; 0: the model without one."""
    top_logprobs: int = 0
    """Most probable tokens to report at each place, beside the sampled one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of one request."""

    request_id: int
    completion: Completion | None
    error: str = ""
    """Why there is no completion."""
    late: bool = False
    """The engine gave it up after ``EngineConfig.answer_timeout_s``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """An engine's state."""

    pid: int
    vocab_size: int
    """Number of token ids that the model embeds."""
    max_model_len: int
    """Tokens of prompt and response together."""
    version: int
    """Of the model's own weights that sample now."""
    adapters: Mapping[str, int]
    """Versions of the adapters that sample now, by name."""
    generated_tokens: int
    """Since the start, of requests that ended."""
    prompt_tokens: int
    """The same, of their prompts."""
    cached_tokens: int
    """Those of the prompts whose keys and values were there already."""
    unfinished: int
    """Requests in the engine."""
    steps: int
    rss_bytes: int
    """Resident memory of the engine's process."""
    peak_rss_bytes: int
    peak_device_bytes: int
    """Most that torch has allocated on the first rank's accelerator; 0 on CPU."""
    device_used_bytes: int
    """Of that accelerator, by all processes now; 0 on CPU."""
    start_s: float
    """Seconds that the engine took to build."""
    last_update: Mapping[str, float] = field(default_factory=dict)
    """Timings of the last weight update, as `Engine.load_weights` returned them."""
