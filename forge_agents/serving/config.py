"""Settings of an inference engine."""

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
_MIN_COMPILED_BYTES = 64_000_000
"""A tiny model samples 980 tokens/s compiled and 1,130 tokens/s eagerly; compilation takes 23 s of one processor."""


def is_too_small_to_compile(folder: Path) -> bool:
    """Whether a model decodes about as fast on this machine without compilation."""
    return not visible_gpus() and 0 < weight_bytes(folder) < _MIN_COMPILED_BYTES


@settings_class
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an inference engine (vLLM)."""

    model: str = ""
    """Folder of a Hugging Face model; its weights are version 0. A trainer sets the model of its policy."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of the computation. "auto" uses the type in the model's config."""
    max_model_len: int | None = None
    """Maximum number of tokens of prompt and response together. None uses the model's limit."""
    max_num_seqs: int = 64
    """Maximum number of sequences that are decoded at once. Further requests wait in a queue."""
    kv_cache_gb: float | None = None
    """Size of the KV cache on each rank, in 1e9 bytes. None: on a GPU, the memory that `gpu_memory_utilization` leaves.
    On CPU 1 GB, or more if one conversation of `max_model_len` needs it, or less if no more can be used."""
    gpu_memory_utilization: float | None = None
    """Fraction of the memory of each of its GPUs that the engine may use, in (0, 1]. None: 0.9 if the engine has its
    GPUs alone; otherwise the share that the trainer's placement leaves."""
    enforce_eager: bool | None = None
    """Whether to skip compilation. The first start of an architecture then takes 10 s instead of about 40 s
    (SmolLM2-135M, two cores), later starts little less than with compilation, and decoding runs at three quarters of
    the speed. None skips it for models of less than 64 MB on CPU, which decode as fast without."""
    threads: int | None = None
    """Number of CPU threads. None uses the libraries' default. On a host without accelerators, a trainer or several
    players divide the cores among the processes that compute at the same time."""
    adapters: Mapping[str, LoRA] = field(default_factory=dict)
    """LoRA adapters that the engine serves, by name. Each is zero until its weights are loaded, and the model's own
    weights never change. On CPU such an engine is not compiled. A trainer sets the adapters of its policies."""
    adapter_folders: Mapping[str, str] = field(default_factory=dict)
    """Folders with the first weights of adapters, in PEFT's format, by name. Other adapters begin at zero. An export
    has one in its folder ``adapter``."""
    answer_timeout_s: float = 600.0
    """Maximum time for one response, in seconds, without the time in the queue. A later response fails alone, with
    `LateAnswerError`, and its episode with it. A trainer allows at most half of its `stage_timeout_s`, which leaves
    time for a second attempt."""
    seed: int = 0
    """Random seed of requests without a seed of their own. A trainer sets its own `seed`, and its requests have
    seeds."""
    prefix_caching: bool = True
    """Whether prompts with the same beginning share its computation."""
    replicas: int = 1
    """Number of engines that serve the model. Each is a process, or `tp` processes."""
    tp: int = 1
    """Number of tensor-parallel ranks of each engine, on one host, with one process and one GPU each; for models that
    are too large for one GPU. It must divide the number of query heads, and divide the number of key heads or be a
    multiple of it. Each rank holds a part of every expert of a mixture."""
    sleeps: bool = False
    """Whether the weights can be offloaded to host memory while another process uses the GPUs. Set by trainers; see
    ``ProcessConfig.colocate``."""
    routing: str = "prefix"
    """Router of requests to replicas. "prefix" (default) returns a conversation to the replica whose cache holds it and
    sends a new one to the replica with the fewest requests. "load" always picks the replica with the fewest requests.
    "package.module:Class" is a custom `forge_agents.serving.routing.Router`."""
    on_update: Literal["continue", "restart"] = "continue"
    """Treatment of responses that a weight update interrupts. "continue" goes on with the new weights, and each token
    records its version. "restart" samples the response again until one version has sampled all of it."""

    @property
    def eager(self) -> bool:
        """Value of `enforce_eager`, or its default for this model and machine; see `compiled`."""
        if self.enforce_eager is not None:
            return self.enforce_eager
        return is_too_small_to_compile(Path(self.model))

    @property
    def compiled(self) -> bool:
        """Whether the engine is compiled on this machine. On CPU, vLLM never compiles an engine with adapters."""
        return not self.eager and (not self.adapters or bool(visible_gpus()))

    def __post_init__(self) -> None:
        if self.model and not Path(self.model, "config.json").is_file():
            raise ModelNotFoundError(
                f"model={self.model!r} is no folder with a config.json; give the folder of a Hugging Face model"
            )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}; choose {' or '.join(map(repr, choices))}")
        router_class(self.routing)
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len={self.max_model_len}; a prompt and a response need at least 2 tokens")
        for name in ("max_num_seqs", "replicas", "tp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; give at least 1")
        if self.kv_cache_gb is not None and self.kv_cache_gb <= 0:
            raise ValueError(f"kv_cache_gb={self.kv_cache_gb}; give a positive size, or None for the default")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization={self.gpu_memory_utilization} must be in (0, 1]; 0.9 is usual"
            )
        if not self.answer_timeout_s > 0:
            raise ValueError(f"answer_timeout_s={self.answer_timeout_s} must be positive: every wait has a timeout")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads={self.threads}; give at least 1, or None for the libraries' default")
