"""Settings of inference engines: `EngineConfig` is the user's, `EnginePlan` adds what a run knows of one engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from forge_agents.errors import ModelNotFoundError
from forge_agents.models.families import has_latent
from forge_agents.models.resolve import read_json, weight_bytes
from forge_agents.policy import LoRA
from forge_agents.runtime.hosts import MAX_PROCESSES
from forge_agents.runtime.machine import visible_gpus
from forge_agents.serving.routing import router_class
from forge_agents.settings import settings_class, values_of

_TOO_SMALL_BYTES = 64_000_000
"""A tiny model decodes 980 tokens/s compiled and 1,130 not. Compilation takes 23 s of one core."""


def is_too_small_to_compile(folder: Path) -> bool:
    """Return whether a model decodes about as fast on this machine without compilation."""
    return not visible_gpus() and 0 < weight_bytes(folder) < _TOO_SMALL_BYTES


@settings_class
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of the vLLM engines that serve models."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of the computation. "auto" (default) is that of the model's config.json, but float32 in place of
    bfloat16 on a CPU without bfloat16 instructions (AVX512-BF16, AMX), where bfloat16 is many times slower."""
    max_model_len: int | None = None
    """Maximum number of tokens of prompt and response together, at least 2. None (default) is the model's context."""
    max_num_seqs: int = 64
    """Maximum number of sequences that an engine decodes at the same time. More wait in its queue."""
    kv_cache_gb: float | None = None
    """Size of the KV cache on each rank, in units of 1e9 bytes. None (default): on a GPU the part that
    `gpu_memory_utilization` leaves. On CPU 1, less if no more can be used, or more if one conversation of
    `max_model_len` tokens needs it."""
    gpu_memory_utilization: float | None = None
    """Fraction of the memory of each GPU that the engine may use, above 0 and at most 1. None (default): 0.9 on a GPU
    of its own. On a GPU that it shares with a learner or another engine, a trainer computes it."""
    enforce_eager: bool | None = None
    """Whether to skip compilation. An eager engine starts in 10 s instead of 40 s the first time (SmolLM2-135M, two
    cores), and decodes at three quarters of the speed. None (default) compiles, except models of less than 64 MB
    without a GPU, which decode as fast without."""
    threads: int | None = None
    """Number of CPU threads of each rank. None (default) divides the cores among all engines and learners that compute
    at the same time on a host without GPUs, and otherwise leaves the number to the libraries."""
    replicas: int = 1
    """Number of engines that serve each model, with `tp` processes each."""
    tp: int = 1
    """Number of tensor-parallel ranks of each engine, with a process and a GPU each, on one host. Must divide the
    model's query heads, and divide its key heads or be a multiple of them."""
    routing: str = "prefix"
    """Router that chooses the replica for a request. "prefix" (default): the replica whose cache holds the
    conversation. A new conversation goes to the one with the fewest requests. "load": always the one with the fewest
    requests. "package.module:Class": a custom `forge_agents.serving.routing.Router`. Needs several replicas."""
    on_update: Literal["continue", "restart"] = "continue"
    """Handling of completions that a weight update interrupts. "continue" (default): the new weights continue them, and
    each token records its version. "restart": completions are sampled again until one version has written all
    tokens. Needs a `max_staleness` above 0: otherwise updates wait for all completions."""

    def __post_init__(self) -> None:
        router_class(self.routing)
        if self.replicas == 1 and self.routing != EngineConfig.routing:
            raise ValueError(
                f"routing={self.routing!r} has no effect with replicas=1, which has nothing to choose from. Set "
                "replicas above 1, or leave routing out"
            )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len={self.max_model_len}. A prompt and a response need at least 2 tokens")
        for name in ("max_num_seqs", "replicas", "tp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("replicas", "tp", "max_num_seqs", "threads"):
            if (getattr(self, name) or 0) > MAX_PROCESSES:
                raise ValueError(f"{name}={getattr(self, name)} must be at most {MAX_PROCESSES}")
        if self.kv_cache_gb is not None and self.kv_cache_gb <= 0:
            raise ValueError(f"kv_cache_gb={self.kv_cache_gb} must be positive, or None for a size that fits")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization={self.gpu_memory_utilization} must be above 0 and at most 1")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads={self.threads} must be at least 1, or None for the default")


@settings_class
@dataclass(frozen=True, kw_only=True)
class EnginePlan(EngineConfig):
    """Settings of one engine's processes. Whoever starts an engine makes it with `of`."""

    model: str = ""
    """Folder of a Hugging Face model. Its weights are version 0."""
    adapters: Mapping[str, LoRA] = field(default_factory=dict)
    """Adapters that the engine serves next to the model, by name. Each is zero until its weights are loaded. The
    weights of the model itself never change then. On CPU such an engine is not compiled."""
    adapter_folders: Mapping[str, str] = field(default_factory=dict)
    """Folders with initial weights of adapters in PEFT's format, by name. An adapter without one starts at zero."""
    answer_timeout_s: float = 600.0
    """Timeout in seconds of one completion, counted from its start: time in the queue does not count. A completion that
    exceeds it fails with `LateAnswerError`. In a training run it is at most half of `stage_timeout_s`, so that there
    is time for a second attempt of the episode, and at least a third of it."""
    seed: int = 0
    """Random seed of requests that bring none."""
    sleeps: bool = False
    """Whether the weights can be offloaded to host memory while a learner uses the GPU."""
    prefix_caching: bool = True
    """Whether requests reuse the cached prefixes of others. False, with one request at a time, makes a resumed run
    repeat bit for bit: a cached prefix was computed in another batch, so its sums may differ in the last digit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model and not Path(self.model, "config.json").is_file():
            raise ModelNotFoundError(
                f"model={self.model!r} is no folder with a config.json. Give the folder of a Hugging Face model"
            )
        if not self.answer_timeout_s > 0:
            raise ValueError(f"answer_timeout_s={self.answer_timeout_s} must be positive")

    @classmethod
    def of(cls, config: EngineConfig, **values: Any) -> EnginePlan:
        """Return a plan with the settings of `config` and `values` for other fields."""
        return cls(**values_of(config) | values)

    @property
    def eager(self) -> bool:
        """`enforce_eager`, or the default for this model on this machine."""
        if self.enforce_eager is not None:
            return self.enforce_eager
        if not visible_gpus() and (file := Path(self.model, "config.json")).is_file() and has_latent(read_json(file)):
            return True  # see `check_kernels`
        return is_too_small_to_compile(Path(self.model))

    @property
    def compiled(self) -> bool:
        """Whether the engine is compiled: vLLM compiles no engine with adapters on CPU."""
        return not self.eager and (not self.adapters or bool(visible_gpus()))
