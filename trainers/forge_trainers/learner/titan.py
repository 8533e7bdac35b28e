"""The only door to TorchTitan: every other module takes TorchTitan's names from here.

In: nothing. Out: the TorchTitan 0.3.0 names that the learner uses, and `DEVICE_TYPE`. Waits for nothing.
Importing this module imports torch and TorchTitan (seconds), so only the learner's process does.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch._utils
import torch.distributed

from forge_agents.imports import without_garbage_collection
from forge_agents.runtime.ranks import join


def _import_with_the_device_that_exists() -> str:
    """Import `torchtitan.tools.utils` so that it records the device this machine has.

    TorchTitan reads the accelerator's name at import, falls back to ``"cuda"`` where there is none, and its other
    modules copy the value. On a machine without accelerator everything would then ask for CUDA.

    Returns:
        ``"cpu"``, ``"cuda"`` or another torch device type.

    Raises:
        ImportError: TorchTitan was imported by someone else first and took a device that does not exist.
    """
    name = "torchtitan.tools.utils"
    found: Callable[[], str | None] = torch._utils._get_available_device_type
    if found() is None and name not in sys.modules:
        torch._utils._get_available_device_type = lambda: "cpu"
        try:
            importlib.import_module(name)
        finally:
            torch._utils._get_available_device_type = found
    device_type = str(importlib.import_module(name).device_type)
    if found() is None and device_type != "cpu":
        raise ImportError(
            f"torchtitan was imported before forge_trainers and chose the device {device_type!r}, which this machine "
            "does not have; import forge_trainers.learner.titan first"
        )
    return device_type


DEVICE_TYPE = _import_with_the_device_that_exists()
"""Torch device type of the learner on this machine: ``"cpu"``, ``"cuda"``, ..."""

_KERNELS = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}
"""Where PyTorch takes newer kernels of FlashAttention from; requirements/gpu.txt has neither."""


def _with_the_kernels_that_exist() -> None:
    """Have TorchTitan choose a FlashAttention that is installed.

    On Hopper it asks for FlashAttention 3 and on Blackwell for 4, whether there is one or not; a model's attention then
    fails to be built. Without the package it is PyTorch's own kernel, FlashAttention 2.
    """
    utils: Any = importlib.import_module("torchtitan.tools.utils")
    newest: Callable[[], str | None] = utils.get_cuda_flash_attention_impl

    def installed() -> str | None:
        name = newest()
        try:
            return name if name and importlib.util.find_spec(_KERNELS[name]) else None
        except ModuleNotFoundError:  # not even the package that would hold it
            return None

    utils.get_cuda_flash_attention_impl = installed


_with_the_kernels_that_exist()


def _compiled_when_called(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    if function is None:  # a decorator with options
        return functools.partial(_compiled_when_called, **options)
    compiled = functools.cache(functools.partial(_compile, function, **options))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


@contextmanager
def _without_what_takes_long() -> Iterator[None]:
    """Imports in two thirds of the time.

    TorchTitan has its FlexAttention compiled where it is defined, which loads Inductor whether or not anybody will call
    it.
    """
    torch.compile = _compiled_when_called  # type: ignore[assignment]
    try:
        with without_garbage_collection():
            yield
    finally:
        torch.compile = _compile


_compile = torch.compile

# these must follow the device choice above
with _without_what_takes_long():
    from torchtitan.components.checkpointer.utils import canonical_fqn
    from torchtitan.components.lora import LoRAConverter
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import (
        TORCH_DTYPE_MAP,
        CompileConfig,
        DebugConfig,
        ParallelismConfig,
        TrainingConfig,
    )
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import (
        VarlenAttention,
        VarlenAuxRequest,
        VarlenMetadata,
        create_varlen_metadata_for_document,
        current_flash_attention_impl,
        varlen_attn,
    )
    from torchtitan.models.common.config_utils import (
        make_ffn_config,
        make_gqa_config,
        make_moe_config,
        make_router_config,
        make_token_dispatcher_config,
    )
    from torchtitan.models.common.feed_forward import FeedForward
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.param_init import skip_param_init
    from torchtitan.models.llama3 import Llama3Model, Llama3StateDictAdapter, Llama3TransformerBlock, parallelize_llama
    from torchtitan.models.qwen3 import Qwen3Model, Qwen3StateDictAdapter, Qwen3TransformerBlock, parallelize_qwen3
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.protocols.module import Module
    from torchtitan.tools import utils as device_utils


def join_ranks(timeout_s: float) -> None:
    """Make the process group of a learner's ranks.

    TorchTitan's own `init_distributed` has torch listen on all network interfaces. What else it sets is set here.
    """
    torch.autograd.set_multithreading_enabled(False)  # recomputing in the backward pass needs this thread's mesh
    os.environ |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_FR_BUFFER_SIZE": "0"}  # no flight recorder
    backend = torch.distributed.Backend.default_device_backend_map[DEVICE_TYPE]
    # what ranks tell each other needs no device
    join(backend if DEVICE_TYPE == "cpu" else f"{DEVICE_TYPE}:{backend},cpu:gloo", timeout_s)
