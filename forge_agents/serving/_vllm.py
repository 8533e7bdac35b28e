"""All calls into vLLM: build an engine, run requests, replace weights in place.

Everything runs on the engine's thread. Numbers and workarounds are those of vLLM 0.32 with the engine in this process.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import json
import logging
import math
import os
import sys
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from forge_agents.errors import ModelNotFoundError
from forge_agents.imports import with_lazy_package_names, without_garbage_collection, without_packages
from forge_agents.models import families
from forge_agents.models import resolve as models
from forge_agents.models.sizes import ModelSize, check_described
from forge_agents.policy import LoRA, Sampling
from forge_agents.runtime.group_ports import guard_groups
from forge_agents.runtime.machine import available_bytes, processor_flags, visible_gpus
from forge_agents.serving import _patches, memory
from forge_agents.serving._shapes import adapted_layers, adapter_shapes, expected_shapes
from forge_agents.serving._wire import Request
from forge_agents.serving.adapter_files import ADAPTER_FILE, read_adapter
from forge_agents.types import Completion, FinishReason, VersionSpan

if TYPE_CHECKING:
    import torch

    from forge_agents.serving.config import EnginePlan

QUIET_AND_LOCAL = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # its process group of one rank binds to loopback
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two engines would bind to the same cores
    "HF_HUB_OFFLINE": "1",  # models are folders here
    "PYTHONSAFEPATH": "1",  # vLLM starts `python -m vllm...`, which would find ./vllm.py first
}
"""Environment of every vLLM process that we start."""

ENVIRONMENT = {
    **QUIET_AND_LOCAL,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine and its weights live in the actor's process
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment of an engine's actor. Must exist before its Python starts."""

_UNUSED_PACKAGES = ("opentelemetry.exporter", "scipy", "sklearn")
"""Optional packages of vLLM and transformers that an engine never uses. Their import takes a tenth of its start."""
_COLLECTIVE_TIMEOUT_S = 600.0
"""Timeout of collectives between an engine's ranks, in seconds; torch's default for NCCL."""
_RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
_ROUNDED_AT_ONCE = 2**24
"""Number of weights that are rounded at once. On a GPU the work on them takes 200 MB next to the engine."""
_BASE = "0"
"""Key of the model's own weights among an engine's versions. Adapters have the keys "1" and so on."""


def environment(config: EnginePlan) -> dict[str, str]:
    """Environment of the actor's process, including `ENVIRONMENT`."""
    return {**ENVIRONMENT, **({"TORCHDYNAMO_DISABLE": "1"} if config.eager else {})}


def adapter_number(config: EnginePlan, adapter: str) -> int:
    """Number of an adapter in requests and versions, or 0 for "", the model without one.

    Raises:
        ValueError: The engine has no such adapter.
    """
    if adapter and adapter not in config.adapters:
        raise ValueError(f"this engine has no adapter {adapter!r}. It has {', '.join(config.adapters) or 'none'}")
    return 1 + list(config.adapters).index(adapter) if adapter else 0


@without_garbage_collection()
def build(config: EnginePlan) -> Any:
    """Build a vLLM engine in this process."""
    if config.eager and not visible_gpus():
        _patches.skip_inductor()
    with without_packages(*_unused_packages()), with_lazy_package_names():
        from vllm import LLMEngine

    gc.freeze()  # otherwise the collections that vLLM starts visit all objects of its modules, for 4 s
    check_described(Path(config.model), free_bytes=_free_bytes())
    _patch(config)
    if config.tp > 1:  # vLLM would have torch listen on all interfaces
        from vllm.platforms import current_platform

        from forge_agents.runtime.ranks import join

        join(current_platform.dist_backend, _COLLECTIVE_TIMEOUT_S)
    else:
        guard_groups(on_one_machine=True)
    engine = LLMEngine.from_engine_args(_engine_args(config))
    engine.set_weight_version(json.dumps({_BASE: 0}))
    # now, because a request keeps the adapter that existed when it was added
    for number, (name, lora) in enumerate(config.adapters.items(), 1):
        load_adapter(engine, number, lora, _initial_adapter(config, name), 0)
    _warm_up(engine)
    return engine


def _unused_packages() -> tuple[str, ...]:
    """Return packages to hide: none after an import of transformers, which remembers the packages that it found."""
    return () if "transformers" in sys.modules else _UNUSED_PACKAGES


def _free_bytes() -> float:
    """Free memory of the host on CPU. On GPU, PyTorch reports that an allocation is too large."""
    from vllm.platforms import current_platform

    return available_bytes() if current_platform.is_cpu() else math.inf


def _dtype(config: EnginePlan) -> str:
    # vLLM would take "auto" as bfloat16 for a float32 model
    return memory.dtype_in_use(Path(config.model), config)


def _engine_args(config: EnginePlan) -> Any:
    """VLLM's settings. Sampling and scheduling are set so that tokens depend on nothing but the request."""
    from vllm import EngineArgs
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    # vLLM caches states of recurrent layers only where it may compute a prompt in parts, which is impossible on CPU
    caching = config.prefix_caching and not (on_cpu and _is_recurrent(config.model))
    return EngineArgs(
        model=config.model,
        hf_overrides=_overrides(config.model),
        trust_remote_code=False,  # Python files of a model's folder never run
        # what was checked and what the learner loads, although a folder may hold Mistral's format as well
        config_format="hf",
        tokenizer_mode="hf",
        load_format="safetensors",
        dtype=_dtype(config),
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        enforce_eager=config.eager,
        enable_prefix_caching=caching,
        # prompts share whole blocks; on CPU vLLM's have 128 tokens, and its kernels take any multiple of 32
        block_size=32 if on_cpu else None,
        seed=config.seed,
        tensor_parallel_size=config.tp,
        # with several ranks, each process brings its own engine
        distributed_executor_backend="uni" if config.tp == 1 else "external_launcher",
        logprobs_mode="processed_logprobs",  # of the distribution that was sampled from
        # vLLM samples after each part of a prompt and undoes the sampling, which CPU generators cannot
        enable_chunked_prefill=not on_cpu,
        async_scheduling=False,  # no batch is under way while weights change
        # One backend serves all of an engine's constrained requests; "auto" may pick two and then fail.
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        disable_log_stats=True,
        enable_sleep_mode=config.sleeps and not on_cpu,
        **_memory_options(config),
        **_adapter_options(config),
    )


def _overrides(model: str) -> Any:
    """Change of config.json: vLLM has an architecture of its own for the text part of a model with images.

    Gemma 3's class expects the config of the text part alone, Qwen3.5's class finds it in the other.
    """
    config = models.read_json(Path(model, "config.json"))
    decoder = families.decoder_config(config)
    if decoder is config:
        return {}
    changes: dict[str, Any] = {"architectures": decoder["architectures"]}
    if families.is_recurrent(config):
        return changes
    changes["tie_word_embeddings"] = decoder["tie_word_embeddings"]
    if "quantization_config" in config:
        changes["quantization_config"] = config["quantization_config"]

    def text_part(whole: Any) -> Any:
        text = whole.get_text_config()
        text.update(changes)
        return text

    return text_part


def _initial_adapter(config: EnginePlan, adapter: str) -> dict[str, torch.Tensor]:
    """First weights of an adapter: those of its folder, as `read_adapter` reads them, or zeros."""
    import torch

    lora, folder = config.adapters[adapter], config.adapter_folders.get(adapter)
    if folder is None:
        return {name: torch.zeros(shape) for name, shape in adapter_shapes(config.model, lora).items()}
    return read_adapter(Path(folder, ADAPTER_FILE), Path(config.model), lora)


def _memory_options(config: EnginePlan) -> dict[str, Any]:
    """VLLM's memory settings. Omitted ones are measured by vLLM.

    Raises:
        ValueError: The host's memory does not hold one conversation.
    """
    from vllm.platforms import current_platform

    options: dict[str, Any] = {}
    if config.gpu_memory_utilization is not None or not current_platform.is_cpu():
        options["gpu_memory_utilization"] = config.gpu_memory_utilization or memory.USUAL_SHARE
    if config.kv_cache_gb is not None or current_platform.is_cpu():
        options["kv_cache_memory_bytes"] = cache_bytes(config, _dtype(config))
    return options


def cache_bytes(config: EnginePlan, dtype: str) -> int:
    """Size of the KV cache in host memory, in bytes.

    Raises:
        ValueError: One conversation does not fit into the free memory.
    """
    if config.kv_cache_gb is not None:
        return int(config.kv_cache_gb * 1e9)
    try:
        size = ModelSize.of(Path(config.model))
    except ModelNotFoundError:  # an architecture with other names for its sizes
        return 1_000_000_000
    context, item = config.max_model_len or size.context, 4 if dtype == "float32" else 2
    least = memory.kv_bytes(size, context, item=item, tp=config.tp)
    folder = Path(config.model)
    weights = models.weight_bytes(folder) * item // (4 if models.dtype_of(folder) == "float32" else 2)
    free = available_bytes() // config.tp - weights // config.tp
    per_token = size.kv_per_token(config.tp) * item
    if least > free:
        max_context = max(0, free) // per_token // 256 * 256
        raise ValueError(
            f"a conversation of max_model_len={context} tokens needs {least / 1e9:.1f} GB for keys and values "
            f"({per_token} bytes a token) and {max(0, free) / 1e9:.1f} GB of memory are free beside "
            f"the weights: set max_model_len to at most {max_context}, or free memory"
        )
    usual = memory.usual_kv_bytes(size, context=context, sequences=config.max_num_seqs, item=item, tp=config.tp)
    return max(least, min(usual, free))


def _adapter_options(config: EnginePlan) -> dict[str, Any]:
    if not config.adapters:
        return {}
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        wrapper = "forge_agents.serving._grouped_lora.GroupedLoRA"
        type(current_platform).get_punica_wrapper = classmethod(lambda cls: wrapper)
        _patches.keep_experts_of_cpu()
    return {
        "enable_lora": True,
        "max_loras": len(config.adapters),
        "max_lora_rank": memory.adapter_rank(config.adapters.values()),
        # vLLM would wrap the head too, whose product costs more than all others
        "lora_target_modules": sorted(
            {layer for lora in config.adapters.values() for layer in adapted_layers(config.model, lora)}
        ),
    }


# ---- patches of vLLM


def _patch(config: EnginePlan) -> None:
    """Patch vLLM in this process, before an engine is built."""
    from vllm.platforms import current_platform

    if _is_recurrent(config.model):
        _patches.register_recurrent()
    settings = models.read_json(Path(config.model, "config.json"))
    if families.architecture_of(settings) == "Gemma3ForConditionalGeneration":
        _patches.map_text_of_gemma()
    if families.has_sinks(settings):
        _patches.reload_experts_and_sinks()
    if current_platform.is_cpu():
        _patches.rotate_all_heads()
        _permit_tiles(_dtype(config))
        _use_gloo_between_ranks()
    if not config.eager:
        reuse_compiled()
    _forbid_words_after_space()
    logging.getLogger(_RELOAD_LOGGER).addFilter(_is_relevant)


def _permit_tiles(dtype: str) -> None:
    """Request AMX tile registers from the kernel. Without that, their first use ends the process by SIGILL.

    vLLM's attention uses them for bfloat16 on every processor that has them, but does not request them. In a large
    model, oneDNN's matrix products have requested them before. In a small one they have not.

    Raises:
        RuntimeError: The kernel refuses, as in some sandboxes and virtual machines.
    """
    import torch

    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx() and dtype == "bfloat16":
        raise RuntimeError(
            "this processor has AMX, and the kernel does not let this process use it, so vLLM's bfloat16 attention "
            'would end by SIGILL. Take EngineConfig(dtype="float32")'
        )


def reuse_compiled() -> None:
    """Make engines load code that earlier engines compiled: 3 s instead of 25 s to 3 minutes at every start.

    Call it in each of an engine's processes before anything is compiled.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _set_compile_cache()
        _compile_by_layer()
    _share_compiled()


def _compile_by_layer() -> None:
    """Make vLLM compile a model on CPU as on a GPU: the code between two attentions, once for all layers.

    On CPU it takes the whole model as one graph, for which Inductor writes the code of every layer again, and which
    cannot be loaded from the cache. One of the passes over the pieces uses kernels of CUDA, which CPU builds lack. The
    pass only avoids copies around those kernels.
    """
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = platform.check_and_update_config
    if original.__module__ == __name__:  # a second engine in this process
        return

    def check_and_update_config(cls: type, config: Any) -> None:
        compilation = config.compilation_config
        by_layer = compilation.mode is CompilationMode.VLLM_COMPILE
        original(config)
        if by_layer and compilation.mode is CompilationMode.DYNAMO_TRACE_ONCE:
            compilation.mode = CompilationMode.VLLM_COMPILE
            compilation.compile_sizes = []  # one code for batches of every size

    platform.check_and_update_config = classmethod(check_and_update_config)
    FixFunctionalizationPass.__call__ = lambda self, graph: None


def _set_compile_cache() -> None:
    """Use one cache folder per instruction set, number of threads and version of PyTorch.

    The C++ code depends on them, but vLLM's cache key does not contain them.
    """
    import torch
    from vllm import envs

    target = [torch.__version__, str(torch.get_num_threads()), *sorted(processor_flags())]
    prefix, root = "forge_agents-", Path(envs.VLLM_CACHE_ROOT)
    if root.name.startswith(prefix):  # set by an earlier engine of this process, or by its parent
        root = root.parent
    digest = hashlib.sha256(" ".join(target).encode()).hexdigest()[:16]
    os.environ["VLLM_CACHE_ROOT"] = str(root / f"{prefix}{digest}")


def _share_compiled() -> None:
    """Make models of one architecture share compiled code, whatever their folders are called.

    vLLM's cache key contains the folder, so each export of a training run would be compiled again. Here the names and
    shapes of the folder's tensors replace it. Config, types, lengths and adapters stay in the key. A quantized model
    keeps its folder, because scales of its weights may be constants in the code.
    """
    from vllm.config import ModelConfig

    original = ModelConfig.compute_hash
    if original.__module__ == __name__:  # a second engine in this process
        return

    def compute_hash(config: Any) -> str:
        anonymous = copy.copy(config)
        shapes = None if config.quantization else expected_shapes(config.model)
        if shapes is not None:
            anonymous.model = json.dumps(shapes, sort_keys=True)
        return str(original(anonymous))

    ModelConfig.compute_hash = compute_hash


def _forbid_words_after_space() -> None:
    """Forbid bad words after a space as well. vLLM does so only if the word has as many tokens there."""
    from vllm import SamplingParams

    original = SamplingParams.update_from_tokenizer
    if original.__module__ == __name__:  # a second engine in this process
        return

    def update_from_tokenizer(params: Any, tokenizer: Any) -> None:
        original(params, tokenizer)
        for word in params.bad_words:
            tokens = tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False)
            if tokens not in params._bad_words_token_ids:
                params._bad_words_token_ids.append(tokens)

    SamplingParams.update_from_tokenizer = update_from_tokenizer


def _is_relevant(record: logging.LogRecord) -> bool:
    """Filter vLLM's warnings about layers without weights of their own, such as rotary tables and tied heads.

    The warnings come with every version and would be the last lines of an engine that died, as if they were the reason.
    `_shapes.check_tensors` finds weights that are really missing.
    """
    return record.msg != "%s: Failed to load weights"


def _use_gloo_between_ranks() -> None:
    """Make the ranks of an engine on CPU use gloo instead of vLLM's shared memory.

    The shared memory has the same name for every engine that is started from outside. A second engine on the machine,
    or the successor of a killed one, therefore fails, and ranks whose peer died wait for it busily.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


# ---- requests


def _warm_up(engine: Any) -> None:
    """Trigger the compilation that vLLM does at the first request."""
    for name in ("warm-up-0", "warm-up-1"):
        add(engine, name, Request(request_id=-1, prompt_ids=(0,), sampling=Sampling(max_tokens=2)))
    while engine.has_unfinished_requests():
        engine.step()
    engine.reset_prefix_cache()


def max_model_len(engine: Any) -> int:
    """Maximum number of tokens of prompt and response together."""
    return int(engine.model_config.max_model_len)


def add(engine: Any, name: str, request: Request) -> None:
    """Queue a request under a unique name without a hyphen, after which vLLM adds its own suffix.

    Raises:
        ValueError: vLLM refuses the request.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    settings = sampling.logit_settings
    try:
        params = SamplingParams(
            temperature=sampling.temperature,
            **{name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()},
            max_tokens=sampling.max_tokens,
            seed=request.seed,
            stop=list(sampling.stop),
            stop_token_ids=list(request.stop_token_ids),
            logprobs=request.top_logprobs,  # 0: only that of the sampled token
            structured_outputs=_constraint(request),
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,  # in the text that is searched for stop texts
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = engine.renderer.render_cmpl([{"prompt_token_ids": list(request.prompt_ids)}])[0]
        engine.add_request(name, prompt, params, lora_request=_lora_request(request.adapter))
    except VLLMClientError as error:
        raise ValueError(str(error)) from error


def step(engine: Any) -> list[Any]:
    """Run one iteration. Returns vLLM's outputs of the requests that ended in it."""
    outputs: list[Any] = engine.step()
    return outputs


def abort(engine: Any, names: list[str]) -> None:
    """Drop requests."""
    engine.abort_request(names)


def running(engine: Any) -> dict[str, int]:
    """Number of tokens sampled so far, by name, for requests that are computed and not queued."""
    requests = engine.engine_core.engine_core.scheduler.running
    return {request.request_id.partition("-")[0]: int(request.num_output_tokens) for request in requests}


def sleep(engine: Any) -> None:
    """Offload the weights to host memory and drop the cache. On CPU the weights stay where they are."""
    engine.sleep(level=1)


def wake(engine: Any) -> None:
    """Load the weights back and allocate the cache."""
    engine.wake_up()


def _lora_request(number: int, folder: str = "loaded", **options: Any) -> Any:
    """VLLM's name of an adapter, None for the model without one. `folder` is read only when the adapter is loaded."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(str(number), number, folder, **options) if number else None


def _constraint(request: Request) -> Any:
    """VLLM's constraint of the response, or None for any text."""
    from vllm.sampling_params import StructuredOutputsParams

    if request.choices:  # vLLM's own `choice` does not escape line breaks
        texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in request.choices)
        return StructuredOutputsParams(grammar=f"root ::= {texts}")
    return StructuredOutputsParams(json=request.json_schema) if request.json_schema else None


def completion_of(output: Any, request: Request, context: int, *, seconds: float = 0.0) -> Completion:
    """Convert vLLM's output of a request that took `seconds`. `context` is the engine's `max_model_len`.

    Raises:
        ValueError: vLLM gave up this request.
    """
    sampled = output.outputs[0]
    token_ids = tuple(int(token) for token in sampled.token_ids)
    logprobs = tuple(float(at[token].logprob) for at, token in zip(sampled.logprobs, token_ids, strict=True))
    alternatives = tuple(
        {int(token): float(entry.logprob) for token, entry in at.items() if entry.logprob > -math.inf}
        for at in (sampled.logprobs if request.top_logprobs else ())
    )
    finish: FinishReason = "stop"
    if sampled.finish_reason == "length":
        full = len(token_ids) < request.sampling.max_tokens and len(request.prompt_ids) + len(token_ids) >= context
        finish = "context" if full else "length"
    elif sampled.finish_reason != "stop":
        raise ValueError(
            f"vLLM ended the request with {sampled.finish_reason!r} instead of 'stop' or 'length'. Its choices or "
            "its schema may not compile"
        )
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=finish,
        versions=_spans(sampled.weight_versions or (), str(request.adapter)),
        top_logprobs=alternatives,
        seconds=seconds,
    )


def _spans(vllm_spans: Iterable[Any], adapter: str) -> tuple[VersionSpan, ...]:
    """Version spans of one adapter, or of the model, from spans that contain the versions of all."""
    spans: list[VersionSpan] = []
    for span in vllm_spans:
        version, start = int(json.loads(span.version)[adapter]), int(span.start)
        if spans and spans[-1].version == version:  # another adapter changed
            start = spans.pop().start
        spans.append(VersionSpan(version=version, start=start, end=int(span.end)))
    return tuple(spans)


# ---- weights


def check_ranks(config: EnginePlan) -> None:
    """Raise ValueError if the model's heads cannot be divided among the ranks. The message lists possible numbers."""
    if config.tp > 1:
        memory.check_tp(ModelSize.of(Path(config.model)), config.tp, config.model)


def _is_recurrent(model: str) -> bool:
    return families.is_recurrent(models.read_json(Path(model, "config.json")))


def load_tensors(engine: Any, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
    """Replace all weights in place and drop all keys and values that were computed with the old ones.

    Running requests keep their tokens. Their keys and values are computed again.
    """
    import torch

    model = engine.model_executor.driver_worker.get_model()
    with torch.no_grad():
        _unpack_experts(model)
        if engine.model_config.dtype == torch.bfloat16:
            device = next(model.parameters()).device
            tensors = ((name, _rounded(name, tensor, device)) for name, tensor in tensors)
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors)})
        _repack_tied_heads(model)
    _set_version(engine, _BASE, version)


def _rounded(name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a float32 weight as bfloat16, rounded up or down with probabilities that keep its mean.

    A learner that computes in float32 starts at bfloat16 numbers. Rounding to nearest would undo its small updates. A
    weight is rounded by the same random number in each version and on each rank.
    """
    import torch

    if tensor.dtype != torch.float32 or families.is_exact(name):
        return tensor
    random = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    rounded = torch.empty(tensor.shape, dtype=torch.bfloat16, device=device)
    parts, targets = (torch.split(each.reshape(-1), _ROUNDED_AT_ONCE) for each in (tensor, rounded))
    for part, target in zip(parts, targets, strict=True):
        bits = torch.randint(0, 2**16, part.shape, generator=random, dtype=torch.int32, device=device)
        bits += part.to(device).view(torch.int32)  # bfloat16 has the upper 16 bits
        target.copy_(bits.bitwise_and_(-(2**16)).view(torch.float32))
    return rounded


def load_adapter(engine: Any, number: int, lora: LoRA, tensors: Mapping[str, torch.Tensor], version: int) -> None:
    """Replace one adapter in place, as `load_tensors`. `tensors` are in PEFT's layout, see `adapter_shapes`."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="forge-adapter-") as folder:  # vLLM loads adapters only from files
        save_file(dict(tensors), Path(folder, ADAPTER_FILE))
        layers = sorted({name.split(".")[-3] for name in tensors})
        settings = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "target_modules": layers}
        Path(folder, "adapter_config.json").write_text(json.dumps(settings))
        engine.add_lora(_lora_request(number, folder, load_inplace=True))
    _set_version(engine, str(number), version)


def _set_version(engine: Any, key: str, version: int) -> None:
    """Record the version that samples from now on, and drop all cached keys and values.

    vLLM copies this record into each completion at every change, so a response that was interrupted by an update says
    which version sampled which of its tokens.
    """
    engine.reset_prefix_cache(reset_running_requests=True)
    engine.set_weight_version(json.dumps({**json.loads(engine.get_weight_version()), key: version}))


def _unpack_experts(model: Any) -> None:
    """On CPU, vLLM packs experts when it creates their kernel, but its reload keeps the kernel of unpacked weights."""
    from vllm.platforms import current_platform

    for module in model.modules() if current_platform.is_cpu() else ():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None


def _repack_tied_heads(model: Any) -> None:
    """On CPU, vLLM samples from packed copies of the weights, but its reload keeps the old copy of a tied head."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and "cpu_linear" in module.__dict__ and module.weight.numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def close(engine: Any) -> None:
    """Free what the engine holds outside Python. Its process ends next, so vLLM's two garbage collections are left out.

    They visit all objects of all modules, which takes a tenth of an engine's start.
    """
    with contextlib.suppress(AttributeError), mock.patch.multiple(gc, collect=_nothing, unfreeze=_nothing):
        engine.engine_core.shutdown()


def _nothing(*_: object) -> int:
    return 0
