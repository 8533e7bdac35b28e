"""A Hugging Face folder as a TorchTitan model on this rank: process group and mesh, shape, weights.

In: a `LearnerConfig`. Out: `Ranks`, and `Built`: the parallelised model with the folder's weights.
Waits for the other ranks, at most `collective_timeout_s` seconds each time.

Llama runs on TorchTitan's Llama blocks. Every other family is a choice of options on its Qwen3 blocks: biases, norms of
queries and keys, frequencies, windows, experts.

Axes: R tokens sent to the experts of this rank, D hidden size, E experts, F hidden size of an expert.
"""

from __future__ import annotations

import math
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from forge_agents.errors import ModelNotFoundError
from forge_agents.models import families
from forge_agents.models import resolve as models
from forge_agents.models.sizes import ModelSize
from forge_trainers.learner import titan
from forge_trainers.learner.attention import PackedAttention
from forge_trainers.learner.checkpoint import is_alone
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.degrees import check_degrees, check_without_gpu, shards_of
from forge_trainers.learner.lean import Embedding, FeedForward, RMSNorm
from forge_trainers.learner.lora import adapted, is_adapter, lower_base
from forge_trainers.learner.prefixes import PrefixAttention

_ONES = {"weight": torch.nn.init.ones_}
_NORMAL = {"weight": partial(torch.nn.init.normal_, std=0.02), "bias": torch.nn.init.zeros_}
_BIASED = ("Qwen2ForCausalLM",)
"""Queries, keys and values have biases, whatever the config says."""
_NORMED = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Queries and keys are normalised a head at a time."""
_THETA = {"SmolLM3ForCausalLM": 2e6}
"""RoPE's base where a config leaves it out; 10,000 of all others."""
_ROWS_AT_ONCE = 1024
"""Of a gradient that are made float32 at a time."""
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

    def context(self) -> AbstractContextManager[None]:
        """What the forward and backward passes run in."""
        context: AbstractContextManager[None] = titan.dist_utils.get_spmd_context(parallel_dims=self.dims)()
        return context

    def use_device(self) -> None:
        """Make the rank's device the current one of this thread: each thread begins with the host's first."""
        titan.device_utils.device_module.set_device(self.device)

    @property
    def loss_mesh(self) -> Any:
        """The mesh over which losses add up; None on one data-parallel rank."""
        return self.dims.get_optional_mesh("loss")


def join_ranks(config: LearnerConfig) -> Ranks:
    """Set threads, join the process group and lay out the mesh.

    One rank by itself needs no environment. Several need what `forge_agents.runtime.ranks.RankSetup` sets.

    Raises:
        ValueError: The parallel degrees do not multiply to the number of ranks.
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
            titan.join_ranks(config.collective_timeout_s)
    world_size = dist.get_world_size()
    shard = shards_of(config, world_size)
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
    return Ranks(device=device, dims=dims, parallelism=parallelism, dp_rank=dp_rank, dp_size=dp_size)


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
    copies: ComputeCopies | None
    """What one rank by itself computes with; None where FSDP sees to it."""

    def computing(self) -> AbstractContextManager[None]:
        """What everything that computes with the weights of this moment runs in."""
        return nullcontext() if self.copies is None else self.copies.inside()


class ComputeCopies:
    """Weights in the type that a rank without others computes with, and float32 sums of their gradients.

    FSDP does the same for one rank, but casts and copies each weight twice in every microbatch, and each gradient
    three times: 7 % of a step on CPU.

    A gradient is added to its float32 sum, and gone, as soon as the backward pass has it. Copies and sums keep their
    memory from step to step: made anew among activations that come and go, they leave holes that nothing fits into.

    Args:
        model: Whose weights to take the place of; what is of this type already stays.
        dtype: The type.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self._places = [
            (module, name, weight)
            for module in model.modules()
            for name, weight in module.named_parameters(recurse=False)
            if weight.dtype != dtype
        ]
        self._dtype = dtype
        self._copies: dict[torch.nn.Parameter, torch.nn.Parameter] = {}

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Put copies of the weights, as they are now, in their place for as long as the context lasts."""
        for _, _, weight in self._places:
            if weight not in self._copies:  # tied ones have two places
                self._copies[weight] = self._copy(weight)
        with torch.no_grad():
            for weight, copy in self._copies.items():
                copy.copy_(weight)
        for module, name, weight in self._places:
            setattr(module, name, self._copies[weight])
        try:
            yield
        finally:
            for module, name, weight in self._places:
                setattr(module, name, weight)

    def _copy(self, weight: torch.nn.Parameter) -> torch.nn.Parameter:
        copy = torch.nn.Parameter(torch.empty_like(weight, dtype=self._dtype), requires_grad=weight.requires_grad)
        if weight.requires_grad:
            take = partial(_take_gradient, weight, torch.empty_like(weight))
            copy.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
        return copy


def _take_gradient(weight: torch.nn.Parameter, total: torch.Tensor, copy: torch.Tensor) -> None:
    """Move what a backward pass left at a weight's copy to the weight's own gradient, which lies in `total`."""
    found, copy.grad = copy.grad, None
    assert found is not None
    if weight.grad is None:
        weight.grad = total.copy_(found)
        return
    for start in range(0, len(total), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        total[rows].add_(found[rows])  # of which PyTorch first makes a float32 copy


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
    families.check_trainable(hf_config)
    check_weights(Path(config.model))
    check_degrees(config, ModelSize.from_config(hf_config))
    max_seq_len = int(min(config.max_sample_tokens or math.inf, hf_config["max_position_embeddings"]))
    spread = needs_fsdp(config)
    spec = spec_from_config(
        hf_config,
        inner_attention=_attention_of(config).Config(),
        max_seq_len=max_seq_len,
        fuse_qkv=config.lora is None,
        lean=not spread,
    )
    spec.model.update_from_config(config=SimpleNamespace(parallelism=ranks.parallelism))
    if config.lora is not None:
        spec.model = adapted(spec.model, config.lora)
    dtype = "float32" if trainable else config.compute_dtype
    with torch.device("meta"), titan.device_utils.set_default_dtype(titan.TORCH_DTYPE_MAP[dtype]):
        model = spec.model.build()
    if config.lora is not None:
        lower_base(model, titan.TORCH_DTYPE_MAP[config.compute_dtype])
    recompute = _recomputed(config) if trainable else None
    dump_folder = config.dump_folder or tempfile.gettempdir()
    if spread:
        training = titan.TrainingConfig(
            dtype=dtype,
            mixed_precision_param=config.compute_dtype,
            mixed_precision_reduce=config.reduce_dtype,
            enable_cpu_offload=config.cpu_offload,
            seq_len=max_seq_len,
            max_norm=config.max_grad_norm,
        )
        model = spec.parallelize_fn(
            model,
            parallel_dims=ranks.dims,
            training=training,
            parallelism=ranks.parallelism,
            compile_config=titan.CompileConfig(enable=config.compile, components=["model"]),
            ac_config=recompute,
            dump_folder=dump_folder,
        )
        _mend_fsdp(model, ranks, tied_experts=config.ep > 1 and spec.model.enable_weight_tying)
    elif recompute is not None:
        recompute.build(dump_folder=dump_folder).apply(model)
    model.to_empty(device="cpu" if config.cpu_offload else ranks.device)
    with torch.no_grad(), ranks.context():
        model.init_states(buffer_device=ranks.device if config.cpu_offload else None)
    _share_angles(model)
    model._skip_lm_head = True
    model.train()
    if config.lora is None:  # else what is not an adapter is frozen already
        model.requires_grad_(trainable)
    adapter = spec.state_dict_adapter(spec.model, str(config.model))
    load_hf_weights(model, adapter, Path(config.model))
    if trainable and config.compute_dtype == "bfloat16" and models.dtype_of(Path(config.model)) != "float16":
        spread_thresholds(model, config.seed)  # a float16 lies anywhere between two bfloat16 numbers
    return Built(
        model=model,
        adapter=adapter,
        architecture=spec.model,
        vocab_size=hf_config["vocab_size"],
        max_seq_len=max_seq_len,
        hidden_size=hf_config["hidden_size"],
        copies=None if spread else ComputeCopies(model, titan.TORCH_DTYPE_MAP[config.compute_dtype]),
    )


def _attention_of(config: LearnerConfig) -> Any:
    """TorchTitan's inner attention for rows as this device computes them."""
    if titan.DEVICE_TYPE == "cpu":
        return PackedAttention
    return PrefixAttention if config.share_prefixes else titan.VarlenAttention


def _recomputed(config: LearnerConfig) -> Any:
    """TorchTitan's settings of what the backward pass computes again; None: nothing."""
    match config.activation_checkpointing:
        case "selective":
            return titan.SelectiveAC.Config()
        case "full":
            return titan.FullAC.Config()
        case "memory_budget":
            return titan.MemoryBudgetAC.Config(memory_budget=config.memory_budget)
    return None


def _mend_fsdp(model: Any, ranks: Ranks, *, tied_experts: bool) -> None:
    """Set what TorchTitan leaves otherwise than this learner needs it."""
    for module in (m for m in model.modules() if isinstance(m, FSDPModule)):
        # TorchTitan's gradient_divide_factor=1.0 makes FSDP ask for PREMUL_SUM, which gloo lacks; SUM is the same sum
        module.set_force_sum_reduction_for_comms(True)
        if ranks.dp_size == 1:  # the same factor, without a division that copies every gradient
            module.set_gradient_divide_factor(None)  # type: ignore[arg-type]
    if tied_experts:
        # TorchTitan prefetches the first block whenever this unit starts, and with tied weights the head is part of it:
        # after a pass without backward the block would be used again as it was, although its weights have changed
        model.tok_embeddings.set_modules_to_forward_prefetch([])


def needs_fsdp(config: LearnerConfig) -> bool:
    """Whether weights are spread over ranks, or computed with in a way that TorchTitan brings with its FSDP units."""
    return titan.DEVICE_TYPE != "cpu" or dist.get_world_size() > 1 or config.compile


def sync_gradients(model: torch.nn.Module, *, now: bool) -> None:
    """Say whether the next backward pass adds up gradients over ranks, or leaves that to a later one."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)


def free_unsharded(model: torch.nn.Module) -> None:
    """Drop the compute copies of the weights after a forward pass without backward pass.

    The next forward pass would use them although the weights have changed since.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
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
    reader = adapter.get_hf_storage_reader(str(folder))
    state_dict_loader.load(wanted, storage_reader=reader, no_dist=is_alone())
    model.load_state_dict(kept | adapter.from_hf(dict(wanted)), strict=True)


@torch.no_grad()
def spread_thresholds(model: torch.nn.Module, seed: int) -> None:
    """Move each weight that is a bfloat16 number by less than half the distance to its neighbours, at random.

    Rounded to bfloat16 all are what they were. But where a model was stored in bfloat16, every weight begins in the
    middle of what is rounded to it, and nothing that is computed changes until an update has grown to half such a
    distance: dozens of steps for weights of 0.1 at a learning rate of 1e-5. Moved so, a weight that has changed by a
    tenth of the distance is rounded to the next number with a probability of a tenth (rounding to nearest cancels small
    updates: arXiv 2010.06192). Other weights, and zeros, stay; each rank computes the same.
    """
    for name, weight in model.named_parameters():
        if not weight.requires_grad or weight.dtype != torch.float32:
            continue
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        random = torch.Generator(local.device).manual_seed(zlib.crc32(titan.canonical_fqn(name).encode()) + seed)
        # the lower half of a float32's bits is what bfloat16 leaves out; 2^15 would be the middle between two numbers
        limits = 1 - 2**15, 2**15
        moves = torch.randint(*limits, weight.shape, generator=random, dtype=torch.int32, device=local.device)
        if isinstance(weight, DTensor):
            moves = distribute_tensor(moves, weight.device_mesh, weight.placements, src_data_rank=None).to_local()
            moves = moves.to(local.device)  # with `cpu_offload` the mesh is of GPUs, the weight is not
        bits = local.view(torch.int32)
        bits.add_(moves.masked_fill_((bits & 0xFFFF != 0) | (local == 0), 0))


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


# ---- the model's shape, from config.json


def read_config(folder: str | Path) -> dict[str, Any]:
    """``config.json`` of a model folder; raises ModelNotFoundError where there is none, or no JSON object in it."""
    return models.read_json(Path(folder) / "config.json")


def spec_from_config(
    config: Mapping[str, Any],
    *,
    inner_attention: Any,
    max_seq_len: int | None = None,
    fuse_qkv: bool = True,
    lean: bool = False,
) -> Any:
    """Build the TorchTitan ``ModelSpec`` of a Hugging Face configuration.

    Tied embeddings, a head_dim other than hidden_size / heads, RMSNorm's epsilon, RoPE scaling, layers without
    positions and sliding windows are taken over. The spec's state-dict adapter converts weights between both
    naming schemes.

    Args:
        config: The content of config.json.
        inner_attention: TorchTitan attention config, a ``VarlenAttention.Config`` or a subclass.
        max_seq_len: Longest position that will be asked for, in tokens; sizes the RoPE cache. None: the model's own
            ``max_position_embeddings``.
        fuse_qkv: Compute queries, keys and values as one product; adapters need them apart.
        lean: Take embeddings, norms and feed-forward layers of our own, which know no tensors spread over ranks.

    Raises:
        ValueError: The architecture or one of its options is not supported; the message lists what is.
    """
    families.check_trainable(config)
    name = config["architectures"][0]
    is_llama = name == "LlamaForCausalLM"
    dim, vocab_size = config["hidden_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or dim // config["num_attention_heads"]
    tied = bool(config.get("tie_word_embeddings", name == "SmolLM3ForCausalLM"))  # transformers leaves out defaults

    def norm(size: int) -> Any:
        kind = RMSNorm if lean else titan.RMSNorm
        return kind.Config(normalized_shape=size, eps=config.get("rms_norm_eps", 1e-6), param_init=_ONES)

    rope = _rope(config, LlamaRope if is_llama else Rope, head_dim, max_seq_len)
    still = replace(rope, frequencies=(0.0,) * len(rope.frequencies), factor=1.0)

    def feed_forward() -> Any:
        made = titan.make_ffn_config(
            dim=dim, hidden_dim=config["intermediate_size"], w1_param_init=_NORMAL, w2w3_param_init=_NORMAL
        )
        return FeedForward.Config(w1=made.w1, w2=made.w2, w3=made.w3) if lean else made

    def attention(layer: int) -> Any:
        own = rope if _has_positions(config, layer) else still
        qk_norm = norm(head_dim) if name in _NORMED else None
        return _attention(
            config, layer, inner_attention, head_dim=head_dim, rope=own, qk_norm=qk_norm, fuse_qkv=fuse_qkv
        )

    block = titan.Llama3TransformerBlock if is_llama else titan.Qwen3TransformerBlock
    layers = [
        block.Config(
            attention_norm=norm(dim),
            ffn_norm=norm(dim),
            attention=attention(layer),
            **({"moe": moe_config(config, param_init=_NORMAL["weight"])} if families.has_experts(config, layer) else
               {"feed_forward": feed_forward()}),
        )
        for layer in range(config["num_hidden_layers"])
    ]  # fmt: skip
    embedding_init = {"weight": titan.skip_param_init} if tied else _NORMAL
    model = (titan.Llama3Model if is_llama else titan.Qwen3Model).Config(
        dim=dim, vocab_size=vocab_size, enable_weight_tying=tied, norm=norm(dim), layers=layers,
        tok_embeddings=(Embedding if lean else titan.Embedding).Config(
            num_embeddings=vocab_size, embedding_dim=dim, param_init=embedding_init
        ),
        lm_head=titan.Linear.Config(in_features=dim, out_features=vocab_size, param_init=_NORMAL),
    )  # fmt: skip
    return titan.ModelSpec(
        name="llama3" if is_llama else "qwen3",
        flavor="hf",
        model=model,
        parallelize_fn=titan.parallelize_llama if is_llama else titan.parallelize_qwen3,
        pipelining_fn=titan.pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=titan.Llama3StateDictAdapter if is_llama else StateDictAdapter,
    )


def _attention(
    config: Mapping[str, Any], layer: int, inner: Any, *, head_dim: int, rope: Any, qk_norm: Any, fuse_qkv: bool
) -> Any:
    name, dim, num_heads = config["architectures"][0], config["hidden_size"], config["num_attention_heads"]
    if (window := _window(config, layer)) is not None:
        inner = replace(inner, window_size=(window - 1, 0))  # TorchTitan counts those before the query
    made = titan.make_gqa_config(
        dim=dim, n_heads=num_heads, n_kv_heads=config.get("num_key_value_heads") or num_heads, fuse_qkv=fuse_qkv,
        # TorchTitan derives head_dim and the default softmax scale from dim / heads when it is None
        head_dim=None if name == "LlamaForCausalLM" and head_dim == dim // num_heads else head_dim,
        rope=rope, qk_norm=qk_norm, wqkv_param_init=_NORMAL, wo_param_init=_NORMAL, inner_attention=inner,
    )  # fmt: skip
    if name in _BIASED:
        for part in ("wqkv",) if fuse_qkv else ("wq", "wkv"):
            setattr(made.qkv_linear, part, replace(getattr(made.qkv_linear, part), bias=True))
    return made


def _has_positions(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer turns its queries and keys by their position; some of SmolLM3 do not."""
    if config["architectures"][0] != "SmolLM3ForCausalLM":
        return True
    given = config.get("no_rope_layers")  # 1 where a layer has positions, as transformers writes it
    return bool(given[layer] if given else (layer + 1) % config.get("no_rope_layer_interval", 4))


def _window(config: Mapping[str, Any], layer: int) -> int | None:
    """Positions that a layer's queries see, their own included; None: all before them."""
    name = config["architectures"][0]
    window = config.get("sliding_window", None if name == "SmolLM3ForCausalLM" else 4096)  # transformers' defaults
    if not window or name == "LlamaForCausalLM":
        return None
    if name != "MistralForCausalLM" and not config.get("use_sliding_window"):
        return None
    if name in {"MistralForCausalLM", "Qwen3MoeForCausalLM"}:
        slides = True
    elif kinds := config.get("layer_types"):
        slides = kinds[layer] == "sliding_attention"
    elif name == "SmolLM3ForCausalLM":
        slides = not _has_positions(config, layer)
    else:
        slides = layer >= config.get("max_window_layers", 28)
    return int(window) if slides else None


def _rope(config: Mapping[str, Any], kind: Any, head_dim: int, max_seq_len: int | None) -> Any:
    given, own_limit = families.rope_of(config), config["max_position_embeddings"]
    default = _THETA.get(config["architectures"][0], 10000.0)
    theta = float(given.get("rope_theta") or config.get("rope_theta") or default)
    if max_seq_len is not None and max_seq_len > own_limit:
        raise ValueError(f"max_seq_len={max_seq_len} exceeds the model's {own_limit} positions; lower it")
    scaling, factor = given["rope_type"], 1.0
    if scaling == "default":
        frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    else:
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        settings = LlamaConfig(
            hidden_size=config["hidden_size"], num_attention_heads=config["num_attention_heads"], head_dim=head_dim,
            max_position_embeddings=own_limit, rope_parameters={**given, "rope_type": scaling, "rope_theta": theta},
        )  # fmt: skip
        frequencies, factor = ROPE_INIT_FUNCTIONS[scaling](settings, torch.device("cpu"))
    return kind.Config(
        dim=head_dim, max_seq_len=max_seq_len or own_limit, theta=theta, frequencies=tuple(frequencies.tolist()),
        factor=float(factor),
    )  # fmt: skip


def _angles(config: Any) -> torch.Tensor:
    """Of every position and pair of channels, float32 [positions, channels / 2]."""
    frequencies = torch.tensor(config.frequencies, dtype=torch.float32)
    return torch.outer(torch.arange(config.max_seq_len, dtype=torch.float32), frequencies)


class Rope(titan.CosSinRoPE):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan's rotation of halves, by given frequencies; those of 0 turn nothing."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.CosSinRoPE.Config):  # type: ignore[misc]  # torchtitan is untyped
        """As ``CosSinRoPE.Config``, whose scalings are not used."""

        frequencies: tuple[float, ...]
        """Radians a position of each pair of channels, scaled."""
        factor: float = 1.0
        """On cosines and sines, as YaRN has it."""

    def _precompute_cache(self) -> torch.Tensor:
        angles = _angles(self.config).repeat(1, 2)
        cache: torch.Tensor = torch.cat([angles.cos(), angles.sin()], dim=-1) * self.config.factor
        return cache


class LlamaRope(titan.ComplexRoPE):  # type: ignore[misc]  # torchtitan is untyped
    """As `Rope`, of neighbouring channels: TorchTitan orders the rows of Llama's weights so."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.ComplexRoPE.Config):  # type: ignore[misc]  # torchtitan is untyped
        """As `Rope.Config`."""

        frequencies: tuple[float, ...]
        factor: float = 1.0

    def _precompute_cache(self) -> torch.Tensor:
        angles = _angles(self.config)
        return torch.polar(torch.full_like(angles, self.config.factor), angles)


def _share_angles(model: torch.nn.Module) -> None:
    """Keep one table for all layers that turn alike: TorchTitan gives each its own, of all positions."""
    tables: dict[tuple[object, ...], torch.Tensor] = {}
    for module in model.modules():
        if isinstance(module, (Rope, LlamaRope)):
            config = module.config
            module.cache = tables.setdefault((type(module), config.frequencies, config.factor), module.cache)


class StateDictAdapter(titan.Qwen3StateDictAdapter):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan's names of Qwen3's weights, and of biases that others of that shape have."""

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self.from_hf_map |= {
            f"model.layers.{{}}.self_attn.{x}_proj.bias": f"layers.{{}}.attention.qkv_linear.w{x}.bias" for x in "qkv"
        }


class Experts(titan.GroupedExperts):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan's grouped experts in the type of their input; its own compute in bfloat16 whatever they are given."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.GroupedExperts.Config):  # type: ignore[misc]  # torchtitan is untyped
        """As ``GroupedExperts.Config``."""

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Each expert on its tokens, which `x_RD` holds sorted by expert: [R, D], the type of `x_RD`."""
        weights = (self.w1_EFD, self.w3_EFD, self.w2_EDF)
        gate, up, down = (w.to_local() if isinstance(w, DTensor) else w for w in weights)
        gate, up, down = (w.transpose(-2, -1) for w in (gate, up, down))
        ends_E = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
        # SwiGLU, W2 (silu(W1 x) * W3 x) (arXiv 2002.05202, eq. 6), each expert on its own rows
        hidden = F.silu(F.grouped_mm(x_RD, gate, offs=ends_E)) * F.grouped_mm(x_RD, up, offs=ends_E)
        return F.grouped_mm(hidden, down, offs=ends_E)


def moe_config(config: Mapping[str, Any], *, param_init: Any) -> Any:
    """The mixture of a Qwen3 layer: softmax over all experts, the best few weighted by it.

    There is no load balancing: neither TorchTitan's bias, which the model does not have, nor the auxiliary loss of
    pre-training.

    Args:
        config: The content of config.json.
        param_init: Initialises a weight in place.
    """
    dim, count, top_k = config["hidden_size"], families.num_experts(config), config["num_experts_per_tok"]
    return titan.make_moe_config(
        num_experts=count,
        load_balance_coeff=None,
        router=titan.make_router_config(
            dim=dim,
            num_experts=count,
            gate_param_init={"weight": param_init},
            top_k=top_k,
            score_func="softmax",
            route_norm=bool(config.get("norm_topk_prob", False)),
        ),
        routed_experts=titan.RoutedExperts.Config(
            inner_experts=Experts.Config(
                dim=dim,
                hidden_dim=config["moe_intermediate_size"],
                num_experts=count,
                param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), param_init),
            ),
            token_dispatcher=titan.make_token_dispatcher_config(
                num_experts=count, top_k=top_k, comm_backend="standard"
            ),
        ),
    )
