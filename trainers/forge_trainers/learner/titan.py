"""The only module that imports TorchTitan (0.3.0). All other modules import TorchTitan's names from here.

The import takes seconds, so only the learner's process imports this module.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import torch._utils
import torch.distributed

from forge_agents.imports import without_garbage_collection
from forge_agents.runtime.ranks import join

T = TypeVar("T")


def _import_for_this_device() -> str:
    """Import `torchtitan.tools.utils` with the device type of this machine: ``"cpu"``, ``"cuda"``, ...

    TorchTitan determines the accelerator's name at import and falls back to ``"cuda"``, and its other modules copy the
    value. On a machine without accelerator they would all require CUDA.

    Raises:
        ImportError: TorchTitan was imported before and chose a device that does not exist.
    """
    name = "torchtitan.tools.utils"
    available_device_type: Callable[[], str | None] = torch._utils._get_available_device_type
    if available_device_type() is None and name not in sys.modules:
        torch._utils._get_available_device_type = lambda: "cpu"
        try:
            importlib.import_module(name)
        finally:
            torch._utils._get_available_device_type = available_device_type
    device_type = str(importlib.import_module(name).device_type)
    if available_device_type() is None and device_type != "cpu":
        raise ImportError(
            f"torchtitan was imported before forge_trainers and chose the device {device_type!r}, which this machine "
            "does not have. Import forge_trainers.learner.titan first"
        )
    return device_type


DEVICE_TYPE = _import_for_this_device()
"""Torch device type of the learner on this machine: ``"cpu"``, ``"cuda"``, ..."""

_KERNELS = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}
"""Packages with newer FlashAttention kernels. requirements/gpu.txt contains neither."""


def _choose_installed_flash_attention() -> None:
    """Make TorchTitan choose a FlashAttention version that is installed.

    TorchTitan requires FlashAttention 3 on Hopper and 4 on Blackwell, and building the attention fails without these
    packages. The fallback is PyTorch's kernel, FlashAttention 2.
    """
    utils: Any = importlib.import_module("torchtitan.tools.utils")
    newest: Callable[[], str | None] = utils.get_cuda_flash_attention_impl

    def installed() -> str | None:
        name = newest()
        try:
            return name if name and importlib.util.find_spec(_KERNELS[name]) else None
        except ModuleNotFoundError:  # the parent package is missing
            return None

    utils.get_cuda_flash_attention_impl = installed


_choose_installed_flash_attention()


@contextlib.contextmanager
def _compile_at_first_call() -> Iterator[None]:
    """Make `torch.compile` wait for the first call of the function.

    TorchTitan compiles its FlexAttention when it is imported. The compilation imports Inductor, for a sixth of a
    learner's start, and learners here use other kernels.
    """
    compile_now: Any = torch.compile

    def compile_later(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiled = functools.cache(functools.partial(compile_now, function, **options))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return call

    torch.compile = compile_later  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_now


# these imports must follow the choice of the device above
with without_garbage_collection(), _compile_at_first_call():
    from torchtitan.components.checkpointer.utils import canonical_fqn
    from torchtitan.components.lora import LoRAConverter
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.models.common import ComplexRoPE, Conv1d, CosSinRoPE, Embedding, FusedQKVLinear, Linear, RMSNorm
    from torchtitan.models.common.attention import GQAttention, VarlenAttention, create_varlen_metadata_for_document
    from torchtitan.models.common.config_utils import (
        make_ffn_config,
        make_gqa_config,
        make_moe_config,
        make_router_config,
        make_token_dispatcher_config,
    )
    from torchtitan.models.common.feed_forward import FeedForward
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config
    from torchtitan.models.common.param_init import skip_param_init
    from torchtitan.models.deepseek_v3 import DeepSeekV3Model, parallelize_deepseekv3
    from torchtitan.models.deepseek_v3.model import Attention as LatentAttention
    from torchtitan.models.deepseek_v3.model import DeepSeekV3TransformerBlock
    from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
    from torchtitan.models.gpt_oss import GptOssModel, parallelize_gptoss
    from torchtitan.models.gpt_oss.model import Attention as GptOssAttention
    from torchtitan.models.gpt_oss.model import GptOssTransformerBlock
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
    from torchtitan.models.llama3 import Llama3Model, Llama3StateDictAdapter, Llama3TransformerBlock, parallelize_llama
    from torchtitan.models.qwen3 import Qwen3Model, Qwen3StateDictAdapter, Qwen3TransformerBlock, parallelize_qwen3
    from torchtitan.models.utils import get_moe_model_nparams_and_flops
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.protocols.module import Module
    from torchtitan.protocols.state_dict_adapter import StateDictAdapter
    from torchtitan.tools import utils as device_utils


def with_own_config(module: type[T]) -> type[T]:
    """Class decorator: a configuration with the fields of the base class's, which builds the decorated class."""
    base: Any = module
    own: Any = dataclass(kw_only=True, slots=True)(type("Config", (base.Config,), {}))
    own._owner = module
    module.Config = own  # type: ignore[attr-defined]
    return module


def apply_parallelism(model: Any, parallelism: ParallelismConfig) -> None:
    """Adapt a model's settings to the ranks, without the import of TorchTitan's trainer.

    TorchTitan imports its trainer only to ask whether it was given the trainer's settings. The import includes
    `datasets` and pandas, for a quarter of a learner's start.
    """
    name = "torchtitan.trainer"
    absent = name not in sys.modules
    if absent:
        sys.modules[name] = module = ModuleType(name)
        vars(module)["Trainer"] = SimpleNamespace(Config=())  # nothing is an instance of ()
    try:
        model.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    finally:
        if absent:
            del sys.modules[name]


def join_ranks(timeout_s: float) -> None:
    """Create the process group of a learner's ranks.

    TorchTitan's `init_distributed` makes torch listen on all network interfaces, so this function replaces it.
    """
    torch.autograd.set_multithreading_enabled(False)  # recomputation in the backward pass needs this thread's mesh
    os.environ |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_FR_BUFFER_SIZE": "0"}  # no flight recorder
    backend = torch.distributed.Backend.default_device_backend_map[DEVICE_TYPE]
    # objects that ranks exchange are on the CPU
    join(backend if DEVICE_TYPE == "cpu" else f"{DEVICE_TYPE}:{backend},cpu:gloo", timeout_s)
