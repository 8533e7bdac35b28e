"""Builds a Hugging Face model folder as a parallelized TorchTitan model on this rank.

Collectives wait for other ranks for at most `COLLECTIVE_TIMEOUT_S` seconds.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.fsdp import FSDPModule

from forge_agents.errors import ModelNotFoundError
from forge_agents.models import families
from forge_agents.models import resolve as models
from forge_agents.models.sizes import ModelSize, check_described
from forge_agents.runtime.machine import available_bytes
from forge_trainers.batch.layout import Span
from forge_trainers.learner import qwen3_5, titan
from forge_trainers.learner.architecture import GemmaTextPart, read_config, share_rope_tables, spec_from_config
from forge_trainers.learner.attention import PackedAttention, plan_attention
from forge_trainers.learner.checkpoint import is_alone
from forge_trainers.learner.degrees import check_degrees, check_without_gpu, shards_of
from forge_trainers.learner.delta import plan_delta
from forge_trainers.learner.lora import adapted, is_adapter, lower_base
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.learner.precision import ComputeCopies, dither_weights

_FLOATS = ("F64", "F32", "BF16", "F16")
"""Supported dtypes of stored weights, by their names in safetensors."""
COLLECTIVE_TIMEOUT_S = 300.0
"""Timeout in seconds of a collective call between ranks."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Device, mesh and data-parallel rank of this process."""

    device: torch.device
    dims: Any
    """TorchTitan's ``ParallelDims``."""
    parallelism: Any
    """TorchTitan's ``ParallelismConfig``."""
    dp_rank: int
    dp_size: int

    def context(self) -> AbstractContextManager[None]:
        """Context for forward and backward passes."""
        context: AbstractContextManager[None] = titan.dist_utils.get_spmd_context(parallel_dims=self.dims)()
        return context

    def use_device(self) -> None:
        """Make the rank's device current in this thread. New threads start with the host's first device."""
        titan.device_utils.device_module.set_device(self.device)

    @property
    def loss_mesh(self) -> Any:
        """Mesh over which losses are summed. None for a single data-parallel rank."""
        return self.dims.get_optional_mesh("loss")


def join_ranks(config: LearnerPlan) -> Ranks:
    """Set the number of threads, join the process group and build the mesh.

    Several ranks need the environment that `forge_agents.runtime.ranks.RankSetup` sets.

    Raises:
        ValueError: The parallel degrees do not divide the number of ranks.
    """
    if titan.DEVICE_TYPE == "cpu":
        check_without_gpu(config)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 1) // world_size))
    index = "" if titan.DEVICE_TYPE == "cpu" else f":{os.environ.get('LOCAL_RANK', '0')}"
    device = torch.device(titan.DEVICE_TYPE + index)
    titan.device_utils.device_module.set_device(device)
    if not dist.is_initialized():
        if world_size == 1:
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        else:
            titan.join_ranks(COLLECTIVE_TIMEOUT_S)
    world_size = dist.get_world_size()
    shard = shards_of(config, world_size)
    parallelism = titan.ParallelismConfig(
        # TorchTitan's default backend needs a nightly version of torch. This one runs on releases, on CPU and GPU.
        spmd_backend="partial_dtensor",
        data_parallel_replicate_degree=config.dp_replicate,
        data_parallel_shard_degree=shard,
        tensor_parallel_degree=config.tp,
        enable_sequence_parallel=True,
        expert_parallel_degree=config.ep,
        # Without sharding, the compute copies are kept for the backward pass, unless memory is short.
        fsdp_reshard_after_forward="never" if shard == 1 and config.activation_checkpointing != "full" else "default",
    )
    dims = titan.ParallelDims.from_config(parallelism, world_size)
    titan.dist_utils.set_spmd_backend(parallelism.spmd_backend)
    dims.build_mesh()
    titan.dist_utils.set_determinism(dims, device, titan.DebugConfig(seed=config.seed), distinct_seed_mesh_dims=["pp"])
    batch_mesh = dims.get_optional_mesh("batch")
    dp_rank, dp_size = (batch_mesh.get_local_rank(), batch_mesh.size()) if batch_mesh is not None else (0, 1)
    return Ranks(device=device, dims=dims, parallelism=parallelism, dp_rank=dp_rank, dp_size=dp_size)


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model that is ready to run."""

    model: Any
    """TorchTitan decoder that returns hidden states. Its ``lm_head`` is called separately."""
    adapter: Any
    """TorchTitan's converter between its state dicts and those of Hugging Face."""
    architecture: Any
    """TorchTitan's configuration of the model."""
    vocab_size: int
    max_seq_len: int
    hidden_size: int
    conv_width: int | None
    """Width of the convolution of recurrent layers. None: no such layers."""
    copies: ComputeCopies | None
    """Compute copies of the weights of a single rank. None if FSDP makes them."""

    def masks(self, spans: Sequence[Span], positions_1L: torch.Tensor) -> Any:
        """Attention masks of a row for the model's layers, from its spans, which tile the positions."""
        on_cpu = titan.DEVICE_TYPE == "cpu"
        masks = plan_attention(spans) if on_cpu else titan.create_varlen_metadata_for_document(positions_1L)
        if self.conv_width is None:
            return masks
        return qwen3_5.Masks(masks, plan_delta(spans, self.conv_width).to(positions_1L.device))

    def computing(self) -> AbstractContextManager[None]:
        """Context for computations with the current weights."""
        return nullcontext() if self.copies is None else self.copies.inside()


def build_model(config: LearnerPlan, ranks: Ranks, *, trainable: bool = True) -> Built:
    """Build the model of `config.model`, parallelize it and load its weights.

    Weights are stored in float32 for training, or as a frozen copy in the compute dtype if not `trainable`.

    Raises:
        ModelNotFoundError: Files are missing or incomplete.
        ValueError: The architecture is not supported.
    """
    hf_config = read_config(config.model)
    families.check_trainable(hf_config, config.max_sample_tokens)
    decoder = families.decoder_config(hf_config)
    check_weights(Path(config.model))
    check_described(Path(config.model), free_bytes=available_bytes() if titan.DEVICE_TYPE == "cpu" else math.inf)
    check_degrees(config, ModelSize.from_config(hf_config))
    max_seq_len = int(min(config.max_sample_tokens or math.inf, families.positions_of(hf_config) or math.inf))
    use_fsdp = needs_fsdp(config)
    spec = spec_from_config(
        hf_config,
        inner_attention=(PackedAttention if titan.DEVICE_TYPE == "cpu" else titan.VarlenAttention).Config(),
        max_seq_len=max_seq_len,
        fuse_qkv=config.lora is None,
        lean=not use_fsdp,
    )
    titan.apply_parallelism(spec.model, ranks.parallelism)
    if config.lora is not None:
        spec.model = adapted(spec.model, config.lora)
    dtype = "float32" if trainable else config.compute_dtype
    with torch.device("meta"), titan.device_utils.set_default_dtype(titan.TORCH_DTYPE_MAP[dtype]):
        model = spec.model.build()
    if config.lora is not None:
        lower_base(model, titan.TORCH_DTYPE_MAP[config.compute_dtype])
    recomputation = {"selective": titan.SelectiveAC, "full": titan.FullAC}.get(config.activation_checkpointing or "")
    checkpointing = recomputation.Config() if trainable and recomputation is not None else None
    if use_fsdp:
        model = _parallelized(model, spec, config, ranks, dtype=dtype, seq_len=max_seq_len, checkpointing=checkpointing)
    elif checkpointing is not None:
        checkpointing.build(dump_folder=_dump_folder(config)).apply(model)
    adapter = _load_weights(model, spec, config, ranks, trainable=trainable)
    return Built(
        model=model,
        adapter=adapter,
        architecture=spec.model,
        vocab_size=decoder["vocab_size"],
        max_seq_len=max_seq_len,
        hidden_size=decoder["hidden_size"],
        conv_width=families.recurrent_sizes(hf_config)[-1] if families.is_recurrent(hf_config) else None,
        copies=None if use_fsdp else ComputeCopies(model, titan.TORCH_DTYPE_MAP[config.compute_dtype]),
    )


def _parallelized(
    model: Any, spec: Any, config: LearnerPlan, ranks: Ranks, *, dtype: str, seq_len: int, checkpointing: Any
) -> Any:
    """Return the model with FSDP and the other parallelism of its ranks, and with activation checkpointing."""
    training = titan.TrainingConfig(
        dtype=dtype,
        mixed_precision_param=config.compute_dtype,
        mixed_precision_reduce="float32",
        enable_cpu_offload=config.cpu_offload,
        seq_len=seq_len,
        max_norm=config.max_grad_norm,
    )
    model = spec.parallelize_fn(
        model,
        parallel_dims=ranks.dims,
        training=training,
        parallelism=ranks.parallelism,
        compile_config=titan.CompileConfig(enable=config.compile, components=["model"]),
        ac_config=checkpointing,
        dump_folder=_dump_folder(config),
    )
    _configure_fsdp(model, ranks, tied_experts=config.ep > 1 and spec.model.enable_weight_tying)
    return model


def _dump_folder(config: LearnerPlan) -> str:
    return config.dump_folder or tempfile.gettempdir()


def _load_weights(model: Any, spec: Any, config: LearnerPlan, ranks: Ranks, *, trainable: bool) -> Any:
    """Load the weights of a parallelized model. Returns TorchTitan's converter of its state dicts."""
    folder = Path(config.model)
    model.to_empty(device="cpu" if config.cpu_offload else ranks.device)
    with torch.no_grad(), ranks.context():
        model.init_states(buffer_device=ranks.device if config.cpu_offload else None)
    share_rope_tables(model)
    model._skip_lm_head = True
    model.train()
    if config.lora is None:  # with an adapter, all other weights are frozen already
        model.requires_grad_(trainable)
    adapter = spec.state_dict_adapter(spec.model, None)  # a folder would only serve TorchTitan's own export
    load_hf_weights(model, adapter, folder)
    if trainable and config.compute_dtype == "bfloat16" and models.dtype_of(folder) != "float16":
        dither_weights(model, config.seed)  # float16 weights lie anywhere between bfloat16 numbers already
    return adapter


def _configure_fsdp(model: Any, ranks: Ranks, *, tied_experts: bool) -> None:
    """Change FSDP settings that do not suit the learner."""
    for module in (m for m in model.modules() if isinstance(m, FSDPModule)):
        # With TorchTitan's gradient_divide_factor=1.0 FSDP uses PREMUL_SUM, which gloo lacks. SUM gives the same
        # result.
        module.set_force_sum_reduction_for_comms(True)
        if ranks.dp_size == 1:  # avoids a division by 1 that copies every gradient
            module.set_gradient_divide_factor(None)  # type: ignore[arg-type]
    if tied_experts:
        # TorchTitan prefetches the first block when the embedding unit starts, and with tied weights the head is part
        # of this unit. After a pass without backward pass the stale block would be used although its weights have
        # changed.
        model.tok_embeddings.set_modules_to_forward_prefetch([])


def needs_fsdp(config: LearnerPlan) -> bool:
    """Whether the model needs FSDP: for several ranks, accelerators or compilation."""
    return titan.DEVICE_TYPE != "cpu" or dist.get_world_size() > 1 or config.compile


def sync_gradients(model: torch.nn.Module, *, now: bool) -> None:
    """Set whether the next backward pass sums gradients over ranks or leaves the sum to a later pass."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)


def free_unsharded(model: torch.nn.Module) -> None:
    """Free FSDP's compute copies of the weights after a forward pass without backward pass.

    Otherwise the next forward pass would use stale copies after the weights have changed.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def load_hf_weights(model: Any, adapter: Any, folder: Path) -> None:
    """Load the safetensors of a Hugging Face model folder into a TorchTitan model."""
    state = model.state_dict()
    adapter_state = {name: value for name, value in state.items() if is_adapter(name)}
    have = check_weights(folder)
    if isinstance(adapter, GemmaTextPart):
        adapter.is_published = any(name.startswith(families.PUBLISHED_TEXT) for name in have)
    requested = adapter.to_hf(state)
    if missing := sorted(requested.keys() - have.keys()):
        if missing[0].endswith(".experts.down_proj") and missing[0].replace("experts", "experts.0") + ".weight" in have:
            raise ModelNotFoundError(
                f"{folder} stores each expert apart. The learner reads mixtures of Qwen3.5 as they are published, with "
                f"all experts of a layer in one tensor, such as {missing[0]!r}. Load the model with transformers and "
                "save it by save_pretrained(FOLDER, save_original_format=False)"
            )
        raise ModelNotFoundError(
            f"{folder} lacks {len(missing)} of {len(requested)} tensors, such as {missing[0]!r}. Its weights do not "
            "match its config.json"
        )
    for name, value in requested.items():
        if tuple(value.shape) != have[name]:
            raise ModelNotFoundError(
                f"{folder} holds {name} with shape {list(have[name])}, which does not match its "
                f"config.json ({list(value.shape)})"
            )
    reader = adapter.get_hf_storage_reader(str(folder))
    state_dict_loader.load(requested, storage_reader=reader, no_dist=is_alone())
    model.load_state_dict(adapter_state | adapter.from_hf(dict(requested)), strict=True)


def unused_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a model folder that an export keeps and the learner does not compute."""
    config = read_config(folder)
    for file in models.weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in (name for name in tensors.keys() if families.is_unused(name, config)):  # noqa: SIM118
                yield name, tensors.get_tensor(name)


def check_weights(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors in a folder's safetensors files, by name.

    Raises:
        ModelNotFoundError: There is no safetensors file, or a file is truncated or damaged.
        ValueError: The weights are quantized.
    """
    files = models.weight_files(folder)
    if not files:
        raise ModelNotFoundError(f"{folder} holds no .safetensors file. Download the model again")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        for name, entry in models.safetensors_header(file).items():
            if entry["dtype"] not in _FLOATS:
                raise ValueError(f"{file} holds {name} as {entry['dtype']}. The learner supports the dtypes {_FLOATS}")
            shapes[name] = tuple(entry["shape"])
    return shapes
