"""Process group, device mesh and model of one learner rank.

In: a `LearnerConfig`. Out: `Built`: the parallelised TorchTitan model with the folder's weights. Waits for the other
ranks, at most `collective_timeout_s` seconds each time.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from forge_agents.errors import ModelNotFoundError
from forge_trainers.learner import titan
from forge_trainers.learner.attention import PackedAttention
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.experts import num_experts
from forge_trainers.learner.lora import adapted, is_adapter, lower_base
from forge_trainers.learner.model_spec import read_config, spec_from_config

_FLOATS = ("F64", "F32", "BF16", "F16")
"""Types of stored weights, as safetensors calls them."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Where this process stands among the ranks."""

    device: torch.device
    dims: Any
    """TorchTitan's ``ParallelDims``."""
    parallelism: Any
    """TorchTitan's ``ParallelismConfig``."""
    dp_rank: int
    dp_size: int
    tp_size: int

    def context(self) -> AbstractContextManager[None]:
        """What the forward and backward passes run in."""
        context: AbstractContextManager[None] = titan.dist_utils.get_spmd_context(parallel_dims=self.dims)()
        return context

    @property
    def loss_mesh(self) -> Any:
        """The mesh over which losses add up; None on one data-parallel rank."""
        return self.dims.get_optional_mesh("loss")


def join_ranks(config: LearnerConfig) -> Ranks:
    """Set threads, join the process group and lay out the mesh.

    One rank by itself needs no environment. Several need RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises:
        ValueError: The parallel degrees do not multiply to the number of ranks.
    """
    check_device(config)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 1) // world_size))
    index = "" if titan.DEVICE_TYPE == "cpu" else f":{os.environ.get('LOCAL_RANK', '0')}"
    device = torch.device(titan.DEVICE_TYPE + index)
    titan.device_utils.device_module.set_device(device)
    if not dist.is_initialized():
        if world_size == 1:
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        else:
            timeout = math.ceil(config.collective_timeout_s)
            titan.dist_utils.init_distributed(
                titan.CommConfig(init_timeout_seconds=timeout, trace_buf_size=0), enable_cpu_backend=config.cpu_offload
            )
    world_size = dist.get_world_size()
    shard = config.dp_shard if config.dp_shard > 0 else max(1, world_size // (config.dp_replicate * config.tp))
    if shard * config.dp_replicate * config.tp != world_size:
        raise ValueError(
            f"dp_replicate={config.dp_replicate} x dp_shard={config.dp_shard} x tp={config.tp} does not make "
            f"world_size={world_size}; their product must"
        )
    if shard * config.tp % config.ep:
        raise ValueError(
            f"ep={config.ep} does not divide dp_shard x tp = {shard} x {config.tp}; experts are spread over those ranks"
        )
    parallelism = titan.ParallelismConfig(
        # TorchTitan's default backend needs a nightly torch; this one runs on the release, on CPU and on GPU
        spmd_backend="partial_dtensor",
        data_parallel_replicate_degree=config.dp_replicate,
        data_parallel_shard_degree=shard,
        tensor_parallel_degree=config.tp,
        enable_sequence_parallel=config.sequence_parallel,
        expert_parallel_degree=config.ep,
        # one rank has no others to ask: it keeps the compute copies for the backward pass, unless memory is short
        fsdp_reshard_after_forward="never" if shard == 1 and config.activation_checkpointing != "full" else "default",
    )
    dims = titan.ParallelDims.from_config(parallelism, world_size)
    titan.dist_utils.set_spmd_backend(parallelism.spmd_backend)
    dims.build_mesh()
    titan.dist_utils.set_determinism(dims, device, titan.DebugConfig(seed=config.seed), distinct_seed_mesh_dims=["pp"])
    batch_mesh = dims.get_optional_mesh("batch")
    dp_rank, dp_size = (batch_mesh.get_local_rank(), batch_mesh.size()) if batch_mesh is not None else (0, 1)
    return Ranks(device=device, dims=dims, parallelism=parallelism, dp_rank=dp_rank, dp_size=dp_size, tp_size=config.tp)


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model ready to run, with what belongs to it."""

    model: Any
    """TorchTitan decoder that returns hidden states; its ``lm_head`` is called apart."""
    adapter: Any
    """Converts state dicts between TorchTitan's and Hugging Face's names."""
    architecture: Any
    """TorchTitan's configuration of the model."""
    vocab_size: int
    max_seq_len: int
    hidden_size: int


def build_model(config: LearnerConfig, ranks: Ranks, *, trainable: bool = True) -> Built:
    """Build the model of `config.model`, parallelise it and load its weights.

    Args:
        config: Which model, and how it computes.
        ranks: From `join_ranks`.
        trainable: True stores weights in float32; False stores a frozen copy in the compute type.

    Raises:
        ModelNotFoundError: Files are missing or half written.
        ValueError: The architecture is not supported.
    """
    hf_config = read_config(config.model)
    check_weights(Path(config.model))
    check_degrees(config, hf_config)
    max_seq_len = int(min(config.max_sample_tokens or math.inf, hf_config["max_position_embeddings"]))
    attention = PackedAttention if titan.DEVICE_TYPE == "cpu" else titan.VarlenAttention
    spec = spec_from_config(
        hf_config, inner_attention=attention.Config(), max_seq_len=max_seq_len, fuse_qkv=config.lora is None
    )
    spec.model.update_from_config(config=SimpleNamespace(parallelism=ranks.parallelism))
    if config.lora is not None:
        spec.model = adapted(spec.model, config.lora)
    dtype = "float32" if trainable else config.compute_dtype
    with torch.device("meta"), titan.device_utils.set_default_dtype(titan.TORCH_DTYPE_MAP[dtype]):
        model = spec.model.build()
    if config.lora is not None:
        lower_base(model, titan.TORCH_DTYPE_MAP[config.compute_dtype])
    model = spec.parallelize_fn(
        model,
        parallel_dims=ranks.dims,
        training=titan.TrainingConfig(
            dtype=dtype,
            mixed_precision_param=config.compute_dtype,
            mixed_precision_reduce=config.reduce_dtype,
            enable_cpu_offload=config.cpu_offload,
            seq_len=max_seq_len,
            max_norm=config.max_grad_norm,
        ),
        parallelism=ranks.parallelism,
        compile_config=titan.CompileConfig(enable=config.compile, components=["model"]),
        ac_config=_checkpointing(config) if trainable else None,
        dump_folder=config.dump_folder or tempfile.gettempdir(),
    )
    for module in fsdp_modules(model):
        # TorchTitan's gradient_divide_factor=1.0 makes FSDP ask for PREMUL_SUM, which gloo lacks; SUM is the same sum
        module.set_force_sum_reduction_for_comms(True)
        if ranks.dp_size == 1:  # the same factor, without a division that copies every gradient
            module.set_gradient_divide_factor(None)  # type: ignore[arg-type]
    if config.ep > 1 and spec.model.enable_weight_tying:
        # TorchTitan prefetches the first block whenever this unit starts, and with tied weights the head is part of it:
        # after a pass without backward the block would be used again as it was, although its weights have changed
        model.tok_embeddings.set_modules_to_forward_prefetch([])
    model.to_empty(device="cpu" if config.cpu_offload else ranks.device)
    with torch.no_grad(), ranks.context():
        model.init_states(buffer_device=ranks.device if config.cpu_offload else None)
    model._skip_lm_head = True
    model.train()
    if config.lora is None:  # else what is not an adapter is frozen already
        model.requires_grad_(trainable)
    adapter = spec.state_dict_adapter(spec.model, str(config.model))
    load_hf_weights(model, adapter, Path(config.model))
    return Built(
        model=model,
        adapter=adapter,
        architecture=spec.model,
        vocab_size=hf_config["vocab_size"],
        max_seq_len=max_seq_len,
        hidden_size=hf_config["hidden_size"],
    )


def _checkpointing(config: LearnerConfig) -> Any:
    """TorchTitan's configuration of what is recomputed; None for nothing."""
    match config.activation_checkpointing:
        case "selective":
            return titan.SelectiveAC.Config()
        case "full":
            return titan.FullAC.Config()
        case "memory_budget":
            return titan.MemoryBudgetAC.Config(memory_budget=config.memory_budget)
    return None


def check_device(config: LearnerConfig) -> None:
    """Raise ValueError for what cannot run, or helps nobody, without an accelerator."""
    if titan.DEVICE_TYPE != "cpu":
        return
    if config.compile:
        raise ValueError("compile=True is for GPUs: on CPU each new row would be compiled anew; leave it False")
    if config.cpu_offload:
        raise ValueError("cpu_offload=True is for GPUs: on CPU the weights are in the host's memory; leave it False")


def check_degrees(config: LearnerConfig, hf_config: Mapping[str, Any]) -> None:
    """Raise ValueError where a parallel degree does not divide what it splits."""
    heads = hf_config["num_attention_heads"]
    split = {
        "num_attention_heads": (heads, "tp", config.tp),
        "num_key_value_heads": (hf_config.get("num_key_value_heads") or heads, "tp", config.tp),
        "vocab_size": (hf_config["vocab_size"], "tp", config.tp),
        "num_experts": (num_experts(hf_config), "ep", config.ep),
    }
    for name, (size, degree, ranks) in split.items():
        if size % ranks:
            raise ValueError(f"{degree}={ranks} does not divide the model's {name}={size}; choose a divisor")
    if config.ep > 1 and not num_experts(hf_config):
        raise ValueError(f"ep={config.ep} spreads experts, and {hf_config['architectures'][0]} has none; leave it 1")
    if num_experts(hf_config) and config.tp > 1 and config.ep == 1 and config.sequence_parallel:
        raise ValueError(
            f"tp={config.tp} with sequence_parallel and without ep: TorchTitan 0.3.0 then computes wrong gradients of "
            "what goes into experts; set ep, or sequence_parallel=False"
        )


def fsdp_modules(model: torch.nn.Module) -> Iterator[FSDPModule]:
    """The modules whose parameters are sharded as units."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def free_unsharded(model: torch.nn.Module) -> None:
    """Drop the compute copies of the weights after a forward pass without backward pass.

    The next forward pass would use them although the weights have changed since.
    """
    for module in fsdp_modules(model):
        module.reshard()


@torch.no_grad()
def load_hf_weights(model: Any, adapter: Any, folder: Path) -> None:
    """Load the safetensors of a Hugging Face model folder into a TorchTitan model."""
    state = model.state_dict()
    kept = {name: value for name, value in state.items() if is_adapter(name)}
    wanted = adapter.to_hf(state)
    have = check_weights(folder)
    if missing := sorted(wanted.keys() - have.keys()):
        raise ModelNotFoundError(
            f"{folder} lacks {len(missing)} of {len(wanted)} tensors, first {missing[0]!r}; weights and config.json "
            "do not belong together"
        )
    for name, value in wanted.items():
        if tuple(value.shape) != have[name]:
            raise ModelNotFoundError(
                f"{folder} holds {name} with shape {list(have[name])} and its config.json says {list(value.shape)}; "
                "they do not belong together"
            )
    state_dict_loader.load(wanted, storage_reader=adapter.get_hf_storage_reader(str(folder)))
    model.load_state_dict(kept | adapter.from_hf(dict(wanted)), strict=True)


def check_weights(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors in a folder's safetensors files, by name.

    Raises:
        ModelNotFoundError: There is no such file, or one is cut short.
        ValueError: The weights are quantised.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelNotFoundError(f"{folder} holds no .safetensors file; download the model again")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118  (it is no mapping)
                    tensor = handle.get_slice(name)
                    shapes[name] = tuple(tensor.get_shape())
                    if tensor.get_dtype() not in _FLOATS:
                        raise ValueError(
                            f"{file} holds {name} as {tensor.get_dtype()}; the learner trains weights of {_FLOATS}"
                        )
        except (SafetensorError, OSError) as error:
            raise ModelNotFoundError(
                f"{file} cannot be read ({error}); it is half written, download it again"
            ) from error
    return shapes


def whole_if_experts(tensor: torch.Tensor) -> torch.Tensor:
    """A layer's stacked experts, gathered: TorchTitan's adapter would name those of this rank only."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) and tensor.ndim == 3 else tensor


def plain_if_whole(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor on a mesh of one rank as the plain tensor it holds."""
    if isinstance(tensor, DTensor) and tensor.device_mesh.size() == 1:
        return tensor.to_local()
    return tensor
