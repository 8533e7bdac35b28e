"""What an engine needs to know before it starts.

In: the user's choices. Out: `EngineConfig`. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from forge_agents.errors import ModelNotFoundError
from forge_agents.models.resolve import weight_bytes
from forge_agents.policy import LoRA
from forge_agents.runtime.machine import visible_gpus
from forge_agents.serving.routing import router_class
from forge_agents.settings import settings_class

_CHOICES = {
    "dtype": ("auto", "bfloat16", "float32"),
    "on_update": ("continue", "restart"),
}

_TOO_SMALL_BYTES = 64_000_000
"""A tiny model samples 980 tokens a second compiled and 1,130 not; to compile it takes 23 s of a processor."""


def is_too_small_to_compile(folder: Path) -> bool:
    """Whether a model decodes about as fast on this machine without the compilation that its engine would wait for."""
    return not visible_gpus() and 0 < weight_bytes(folder) < _TOO_SMALL_BYTES


@settings_class
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One served model."""

    model: str = ""
    """Folder with a Hugging Face model; its weights count as version 0. A trainer fills in its policy's."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """What the engine computes in; ``auto`` is what the model's config says."""
    max_model_len: int | None = None
    """Tokens of prompt and response together; None for the model's own limit."""
    max_num_seqs: int = 64
    """Sequences decoded at the same time; more wait in the queue."""
    kv_cache_gb: float | None = None
    """Memory for attention keys and values on each rank, 1e9 bytes. None: on a GPU what `gpu_memory_utilization`
    leaves; elsewhere 1 GB, less where no more can be used and more where one conversation of `max_model_len` needs
    it."""
    gpu_memory_utilization: float | None = None
    """Share of each of its GPUs' memory that the engine may use, above 0 and at most 1. None: 0.9 of a GPU that it has
    alone; beside a learner or another engine, what a trainer's placement leaves it."""
    enforce_eager: bool | None = None
    """Skip compilation: the first start of an architecture takes 10 s instead of some 40 (SmolLM2-135M on two
    cores), later ones, which load what was compiled, hardly less than compiled; decodes at three quarters of the speed.
    None: where it does not pay, without a GPU and for models of less than 64 MB, which decode as fast without."""
    threads: int | None = None
    """CPU threads; None leaves it to the libraries. A trainer, and players of several models, on one host without
    accelerator divide the cores among all that compute at the same time."""
    adapters: Mapping[str, LoRA] = field(default_factory=dict)
    """Adapters that the engine serves beside the model, by name; each is zero until its weights are loaded, and the
    model's own weights never change then. On CPU such an engine is not compiled. A trainer fills in its policies'."""
    adapter_folders: Mapping[str, str] = field(default_factory=dict)
    """Where adapters begin, as PEFT writes them, by name; those that are not named begin as zero. For models that are
    trained already: an export has one in its folder ``adapter``."""
    answer_timeout_s: float = 600.0
    """Seconds that the engine may work on one answer, from when it takes the request up: waiting for a place among
    `max_num_seqs` does not count. A later one fails alone, with `LateAnswerError`, and its episode with it. A trainer
    allows at most half of its `stage_timeout_s`, so that there is time for the episode's second attempt."""
    seed: int = 0
    """Of sampling, for requests that bring no seed of their own; a trainer gives it its own `seed`, and requests
    theirs."""
    prefix_caching: bool = True
    """Prompts that begin alike share the computed beginning."""
    replicas: int = 1
    """Engines that serve the model side by side, a process each, or `tp` processes."""
    tp: int = 1
    """Tensor-parallel ranks of each engine, a process and a GPU each, on one host; for models that are too large for a
    GPU. It divides the model's query heads, and divides its key heads or is a multiple of them."""
    ep: int = 1
    """Ranks over which whole experts of a mixture are spread: 1, anything else is refused. With `tp` each rank holds a
    part of every expert. A learner's experts are spread by ``LearnerConfig.ep``."""
    speculative: str = ""
    """How tokens are guessed, to be tried several at a time: not at all; anything else is refused. See the decision
    page 0032, which has what was tried."""
    sleeps: bool = False
    """Its weights can go to the host's memory while somebody else computes on its GPUs. A trainer that needs it says
    so; see ``ProcessConfig.colocate``."""
    routing: str = "prefix"
    """Which replica answers. "prefix": the one whose cache holds the conversation, a new conversation goes to the one
    with the fewest requests. "load": always the one with the fewest requests. "package.module:Class" is one of your
    own; see `forge_agents.serving.routing.Router`."""
    on_update: Literal["continue", "restart"] = "continue"
    """What becomes of an answer that new weights interrupt. "continue": the new weights go on where the old ones were,
    and each token names its version. "restart": it is asked again when it ends, until one version has written all."""

    @property
    def eager(self) -> bool:
        """`enforce_eager`, or what it means for this model here; see `compiled`."""
        if self.enforce_eager is not None:
            return self.enforce_eager
        return is_too_small_to_compile(Path(self.model))

    @property
    def compiled(self) -> bool:
        """Whether the engine is compiled here: vLLM compiles none that has adapters on CPU, whatever it is told."""
        return not self.eager and (not self.adapters or bool(visible_gpus()))

    def __post_init__(self) -> None:
        if self.model and not Path(self.model, "config.json").is_file():
            raise ModelNotFoundError(
                f"model={self.model!r} is no folder with a config.json; give the folder of a Hugging Face model"
            )
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}; choose {' or '.join(map(repr, known))}")
        router_class(self.routing)
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len={self.max_model_len}; a prompt and a response need 2 tokens at least")
        for name in ("max_num_seqs", "replicas", "tp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; give at least 1")
        self._refuse_what_does_not_work()
        if self.kv_cache_gb is not None and self.kv_cache_gb <= 0:
            raise ValueError(f"kv_cache_gb={self.kv_cache_gb}; give a positive size, or None for what fits")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization={self.gpu_memory_utilization} is a share, above 0 and at most 1; 0.9 is usual"
            )
        if not self.answer_timeout_s > 0:
            raise ValueError(f"answer_timeout_s={self.answer_timeout_s} must be positive: every wait has a deadline")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads={self.threads}; give at least 1, or None for the libraries' choice")

    def _refuse_what_does_not_work(self) -> None:
        if self.ep != 1:
            raise ValueError(
                f"ep={self.ep}: engines do not spread whole experts over ranks, because on CPU vLLM 0.32 reads beyond "
                "those of a rank, and on GPUs it was never run here; leave ep out and set tp, with which each rank "
                "holds a part of every expert (learner.ep spreads the learner's)"
            )
        if self.speculative:
            raise ValueError(
                f"speculative={self.speculative!r}: engines do not guess tokens ahead, because on CPU vLLM 0.32 then "
                "samples, and reports log-probabilities, at a temperature that nobody set; leave speculative out "
                "(docs/decisions/computation.md)"
            )
