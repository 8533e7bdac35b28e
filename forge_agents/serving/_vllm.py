"""The one door to vLLM: building an engine, asking it, changing its weights in place.

In: our configuration, requests and tensors. Out: a vLLM `LLMEngine` and our types. Runs on the engine's thread.

Numbers and traps are those of vLLM 0.32 with the engine in this process.
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
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_agents.errors import ModelNotFoundError
from forge_agents.models import resolve as models
from forge_agents.models.lean_imports import lean_transformers, without_scipy_signal
from forge_agents.models.sizes import ModelSize
from forge_agents.policy import LoRA, Sampling
from forge_agents.runtime.machine import available_bytes
from forge_agents.serving import memory
from forge_agents.serving._wire import Request
from forge_agents.types import Completion, FinishReason, VersionSpan

if TYPE_CHECKING:
    import torch

    from forge_agents.serving.config import EngineConfig

QUIET_AND_LOCAL = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # its process group of one binds to loopback
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two engines would bind to the same cores
    "HF_HUB_OFFLINE": "1",  # models are folders here
    "PYTHONSAFEPATH": "1",  # vLLM starts `python -m vllm...`, which would find ./vllm.py first
}
"""What every vLLM that we start has in its environment."""

ENVIRONMENT = {
    **QUIET_AND_LOCAL,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine and its weights live in the actor's process
    "TOKENIZERS_PARALLELISM": "false",
}
"""Must exist before the actor's Python starts."""

_COLLECTIVE_TIMEOUT_S = 600.0
"""Timeout of collectives between an engine's ranks, in seconds; torch's default for NCCL."""
_RELOADING = "vllm.model_executor.model_loader.reload.layerwise"
"""The logger of what replaces weights."""

_BASE = "0"
"""The model's own weights, among the versions of what an engine holds; adapters follow with "1" and so on."""


def environment(config: EngineConfig) -> dict[str, str]:
    """Variables of the actor's process, `ENVIRONMENT` among them."""
    return {**ENVIRONMENT, **({"TORCHDYNAMO_DISABLE": "1"} if config.eager else {})}


def adapter_number(config: EngineConfig, adapter: str) -> int:
    """How requests and versions name an adapter; "" is the model without one.

    Raises:
        ValueError: The engine has no such adapter.
    """
    if adapter and adapter not in config.adapters:
        raise ValueError(f"this engine has no adapter {adapter!r}; it has {', '.join(config.adapters) or 'none'}")
    return 1 + list(config.adapters).index(adapter) if adapter else 0


def build(config: EngineConfig) -> Any:
    """A vLLM engine in this process."""
    with lean_transformers():
        return _built(config)


def _built(config: EngineConfig) -> Any:
    with without_scipy_signal():
        from vllm import EngineArgs, LLMEngine
    from vllm.platforms import current_platform

    gc.freeze()  # vLLM asks for five whole collections on its way; what modules define is no garbage
    # vLLM would take "auto" as bfloat16 for a float32 model
    dtype = models.dtype_of(Path(config.model)) if config.dtype == "auto" else config.dtype
    if current_platform.is_cpu():
        _permit_tiles(dtype)
        _inspect_here()
        _share_no_names()
    reuse_compiled()
    _forbid_after_blanks()
    _count_no_ranks()
    logging.getLogger(_RELOADING).addFilter(_is_news)
    if config.tp > 1:  # vLLM would have torch listen on all interfaces
        from forge_agents.runtime.ranks import join

        join(current_platform.dist_backend, _COLLECTIVE_TIMEOUT_S)
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=config.model,
            trust_remote_code=False,  # Python files of a model's folder never run
            dtype=dtype,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            enforce_eager=config.eager,
            enable_prefix_caching=config.prefix_caching,
            # prompts share whole blocks; on CPU vLLM's have 128 tokens, and its kernels take any multiple of 32
            block_size=32 if current_platform.is_cpu() else None,
            seed=config.seed,
            tensor_parallel_size=config.tp,
            # one rank is alone; of several each process brings its own engine
            distributed_executor_backend="uni" if config.tp == 1 else "external_launcher",
            logprobs_mode="processed_logprobs",  # of the distribution that was sampled
            # vLLM samples after each part of a prompt and takes the draw back, which CPU generators cannot
            enable_chunked_prefill=not current_platform.is_cpu(),
            async_scheduling=False,  # no batch is under way while weights change
            # One backend serves all of an engine's constrained requests; "auto" may pick two and then fail.
            structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
            disable_log_stats=True,
            enable_sleep_mode=config.sleeps and not current_platform.is_cpu(),
            **_memory_options(config, dtype),
            **_adapter_options(config),
        )
    )
    engine.set_weight_version(json.dumps({_BASE: 0}))
    for number, (name, lora) in enumerate(config.adapters.items(), 1):  # a request keeps what it came with, so now
        load_adapter(engine, number, lora, _first_weights(config, name), 0)
    _warm_up(engine)
    return engine


def _first_weights(config: EngineConfig, adapter: str) -> dict[str, torch.Tensor]:
    """What an adapter begins with.

    Raises:
        ValueError: Its file is none, or of another shape.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    shapes = adapter_shapes(config.model, config.adapters[adapter])
    if adapter not in config.adapter_folders:
        return {name: torch.zeros(shape) for name, shape in shapes.items()}
    file = Path(config.adapter_folders[adapter], "adapter_model.safetensors")
    try:
        found: dict[str, torch.Tensor] = load_file(file)
    except (OSError, SafetensorError) as cause:
        raise ValueError(f"{file} cannot be read ({cause}); export the adapter again") from None
    check_tensors(found, shapes)
    return found


def _memory_options(config: EngineConfig, dtype: str) -> dict[str, Any]:
    """How much vLLM takes; what is left out it measures itself.

    Raises:
        ValueError: The host's memory does not hold one conversation.
    """
    from vllm.platforms import current_platform

    given: dict[str, Any] = {}
    if config.gpu_memory_utilization is not None or not current_platform.is_cpu():
        given["gpu_memory_utilization"] = config.gpu_memory_utilization or memory.USUAL_SHARE
    if config.kv_cache_gb is not None or current_platform.is_cpu():
        given["kv_cache_memory_bytes"] = cache_bytes(config, dtype)
    return given


def cache_bytes(config: EngineConfig, dtype: str) -> int:
    """Size of the cache in the host's memory.

    Raises:
        ValueError: One conversation does not fit into what is free.
    """
    if config.kv_cache_gb is not None:
        return int(config.kv_cache_gb * 1e9)
    try:
        size = ModelSize.of(Path(config.model))
    except ModelNotFoundError:  # an architecture whose sizes have other names
        return 1_000_000_000
    context, item = config.max_model_len or size.context, 4 if dtype == "float32" else 2
    least = memory.kv_bytes(size, context, item=item, tp=config.tp)
    free = available_bytes() // config.tp - models.weight_bytes(Path(config.model)) // config.tp
    each = size.kv_per_token(config.tp) * item
    if least > free:
        fits = max(0, free) // each
        raise ValueError(
            f"a conversation of max_model_len={context} tokens needs {least / 1e9:.1f} GB for keys and values "
            f"({each} bytes a token) and {max(0, free) / 1e9:.1f} GB of memory are free beside "
            f"the weights: set max_model_len to at most {fits // 256 * 256}, or free memory"
        )
    usual = memory.usual_kv_bytes(size, context=context, sequences=config.max_num_seqs, item=item, tp=config.tp)
    return max(least, min(usual, free))


def _adapter_options(config: EngineConfig) -> dict[str, Any]:
    if not config.adapters:
        return {}
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        wrapper = "forge_agents.serving._grouped_lora.GroupedLoRA"
        type(current_platform).get_punica_wrapper = classmethod(lambda cls: wrapper)
    return {
        "enable_lora": True,
        "max_loras": len(config.adapters),
        "max_lora_rank": memory.adapter_rank(config.adapters.values()),
        # vLLM would wrap the head too, whose product costs more than all others
        "lora_target_modules": sorted({target for lora in config.adapters.values() for target in lora.targets}),
    }


def _permit_tiles(dtype: str) -> None:
    """Ask the kernel for AMX's tile registers, without which their first use ends the process by SIGILL.

    vLLM's attention uses them for bfloat16 wherever the processor has them and asks for nothing; in a large model
    oneDNN's products have asked before it comes to that, in a small one they have not.

    Raises:
        RuntimeError: The kernel refuses, as some sandboxes and virtual machines make it do.
    """
    import torch

    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx() and dtype == "bfloat16":
        raise RuntimeError(
            "this processor has AMX, and the kernel does not let this process use it, so vLLM's bfloat16 attention "
            'would end by SIGILL; take EngineConfig(dtype="float32")'
        )


def reuse_compiled() -> None:
    """Let engines load what others compiled before; in each of an engine's processes, before it makes anything."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _keep_compiled()
        _compile_by_layer()
    _share_compiled()


def _compile_by_layer() -> None:
    """Let vLLM compile a model on CPU as on a GPU: what lies between two attentions, the same in every layer, once.

    There it takes the whole model as one graph, in which Inductor writes the code of every layer anew, and what it
    saves it cannot load again. Of the passes over its pieces one names kernels of CUDA, which a build for CPUs lacks;
    it makes no answer right, it spares copies around those kernels.
    """
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    platform = type(current_platform)
    update = platform.check_and_update_config
    if update.__module__ == __name__:  # a second engine in this process
        return

    def updated(cls: type, config: Any) -> None:
        compilation = config.compilation_config
        by_layer = compilation.mode is CompilationMode.VLLM_COMPILE
        update(config)
        if by_layer and compilation.mode is CompilationMode.DYNAMO_TRACE_ONCE:
            compilation.mode = CompilationMode.VLLM_COMPILE
            compilation.compile_sizes = []  # one code for batches of every size

    platform.check_and_update_config = classmethod(updated)
    FixFunctionalizationPass.__call__ = lambda self, graph: None


def _keep_compiled() -> None:
    """Keep what is compiled apart by what it was compiled for.

    vLLM's key leaves out what the C++ code was made for, so each instruction set, number of threads and version of
    PyTorch has a folder of its own.
    """
    import torch
    from vllm import envs

    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    made_for = [torch.__version__, str(torch.get_num_threads()), *sorted(flags[1].split() if flags else ())]
    mine, root = "forge_agents-", Path(envs.VLLM_CACHE_ROOT)
    if root.name.startswith(mine):  # of an engine before in this process, or of the process that started it
        root = root.parent
    digest = hashlib.sha256(" ".join(made_for).encode()).hexdigest()[:16]
    os.environ["VLLM_CACHE_ROOT"] = str(root / f"{mine}{digest}")


def _share_compiled() -> None:
    """Let models of one architecture share what was compiled, whatever their folders are called.

    vLLM's key names the folder, so that each export of a training would be compiled anew. Here names and shapes of the
    folder's tensors stand for it; the model's config, type and lengths, adapters and all else stay in the key.
    A quantized model keeps its folder, too: scales of its weights may be numbers in the code.
    """
    from vllm.config import ModelConfig

    compute_hash = ModelConfig.compute_hash
    if compute_hash.__module__ == __name__:  # a second engine in this process
        return

    def of_architecture(config: Any) -> str:
        alike = copy.copy(config)
        shapes = None if config.quantization else expected_shapes(config.model)
        if shapes is not None:
            alike.model = json.dumps(shapes, sort_keys=True)
        return str(compute_hash(alike))

    ModelConfig.compute_hash = of_architecture


def _inspect_here() -> None:
    """Let vLLM look at a model's class in this process; it would start one that imports all of vLLM for that.

    It does so to keep CUDA out of this one. What it finds it remembers, so only a model's first start is shorter.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def _forbid_after_blanks() -> None:
    """Let bad words be forbidden after a blank, too. vLLM does so only where that takes as many tokens as without."""
    from vllm import SamplingParams

    forbid = SamplingParams.update_from_tokenizer
    if forbid.__module__ == __name__:  # a second engine in this process
        return

    def forbidden(params: Any, tokenizer: Any) -> None:
        forbid(params, tokenizer)
        for word in params.bad_words:
            tokens = tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False)
            if tokens not in params._bad_words_token_ids:
                params._bad_words_token_ids.append(tokens)

    SamplingParams.update_from_tokenizer = forbidden


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line about new weights is worth a look.

    With each version vLLM warns of rotary tables and a tied head, which have no weights of their own; `check_tensors`
    looks for what is missing. Such lines were the last ones of an engine that died, as if they said why.
    """
    return record.msg != "%s: Failed to load weights"


def _count_no_ranks() -> None:
    """Leave out how many tokens are more probable than each sampled one, which nobody asks: a pass over all logits."""
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = lambda logprobs, sampled: sampled.new_zeros(len(sampled)).long()


def _share_no_names() -> None:
    """Let the ranks of an engine on CPU talk through gloo.

    vLLM's shared memory has the same name for every engine that is started from outside: a second one on the machine,
    or one that follows a killed one, fails, and ranks whose peer died wait for it with the processor busy.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def _warm_up(engine: Any) -> None:
    """Compile what vLLM compiles at the first request, so that no user's request waits for it."""
    for name in ("warm-up-0", "warm-up-1"):
        add(engine, name, Request(request_id=-1, prompt_ids=(0,), sampling=Sampling(max_tokens=2)))
    while engine.has_unfinished_requests():
        engine.step()
    engine.reset_prefix_cache()


def max_model_len(engine: Any) -> int:
    """Tokens of prompt and response together."""
    return int(engine.model_config.max_model_len)


def add(engine: Any, name: str, request: Request) -> None:
    """Queue a request under a unique name without a hyphen, behind which vLLM adds a word of its own.

    Raises:
        ValueError: vLLM refuses it.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind

    asked = request.sampling
    try:
        params = SamplingParams(
            temperature=asked.temperature,
            **{name: list(v) if isinstance(v, tuple) else v for name, v in asked.logit_settings.items()},
            max_tokens=asked.max_tokens,
            seed=request.seed,
            stop=list(asked.stop),
            stop_token_ids=list(request.stop_token_ids),
            logprobs=request.top_logprobs,  # 0: the sampled token's only
            structured_outputs=_constraint(request),
            detokenize=bool(asked.stop),
            skip_special_tokens=False,  # of the text that stop texts are looked for in
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = engine.renderer.render_cmpl([{"prompt_token_ids": list(request.prompt_ids)}])[0]
        engine.add_request(name, prompt, params, lora_request=_lora_request(request.adapter))
    except VLLMClientError as error:
        raise ValueError(str(error)) from error


def step(engine: Any) -> list[Any]:
    """One iteration. Returns what vLLM says of the requests that ended in it."""
    outputs: list[Any] = engine.step()
    return outputs


def abort(engine: Any, names: list[str]) -> None:
    """Drop requests."""
    engine.abort_request(names)


def running(engine: Any) -> dict[str, int]:
    """Requests that are being computed, not queued: tokens sampled so far, by the name they were added under."""
    requests = engine.engine_core.engine_core.scheduler.running
    return {request.request_id.partition("-")[0]: int(request.num_output_tokens) for request in requests}


def sleep(engine: Any) -> None:
    """Take weights to the host's memory, and forget the cache. On CPU they stay where they are."""
    engine.sleep(level=1)


def wake(engine: Any) -> None:
    """Bring the weights back, and make room for the cache."""
    engine.wake_up()


def _lora_request(number: int, folder: str = "loaded", **options: Any) -> Any:
    """What vLLM calls an adapter; None for the model without one. `folder` is read when it is loaded, not later."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(str(number), number, folder, **options) if number else None


def _constraint(request: Request) -> Any:
    """What the response must look like, in vLLM's words; None for any text."""
    from vllm.sampling_params import StructuredOutputsParams

    if request.choices:  # vLLM's own `choice` does not escape line breaks
        texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in request.choices)
        return StructuredOutputsParams(grammar=f"root ::= {texts}")
    return StructuredOutputsParams(json=request.json_schema) if request.json_schema else None


def completion_of(output: Any, request: Request, context: int, *, seconds: float = 0.0) -> Completion:
    """Our form of vLLM's output for a request that took `seconds`; `context` is the engine's `max_model_len`.

    Raises:
        ValueError: vLLM gave this request up.
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
        no_room = len(token_ids) < request.sampling.max_tokens and len(request.prompt_ids) + len(token_ids) >= context
        finish = "context" if no_room else "length"
    elif sampled.finish_reason != "stop":
        raise ValueError(
            f"vLLM ended the request with {sampled.finish_reason!r} instead of 'stop' or 'length'; its choices or "
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


def _spans(found: Iterable[Any], adapter: str) -> tuple[VersionSpan, ...]:
    """Versions of one adapter, or of the model, from spans that know the versions of all."""
    spans: list[VersionSpan] = []
    for span in found:
        version, start = int(json.loads(span.version)[adapter]), int(span.start)
        if spans and spans[-1].version == version:  # another adapter changed
            start = spans.pop().start
        spans.append(VersionSpan(version=version, start=start, end=int(span.end)))
    return tuple(spans)


def check_ranks(config: EngineConfig) -> None:
    """Refuse a number of ranks that the model's heads cannot be spread over.

    Raises:
        ValueError: They cannot; the message says what would do.
    """
    if config.tp > 1:
        memory.check_tp(ModelSize.of(Path(config.model)), config.tp, config.model)


def expected_shapes(model: str) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes that an update must bring: those in the folder's safetensors files; None without such files.

    A tied ``lm_head.weight`` is left out: it may come or not.

    Raises:
        ModelNotFoundError: A file is half-written or is no safetensors file.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path(model).glob("*.safetensors")):
        shapes |= {name: tuple(entry["shape"]) for name, entry in models.safetensors_header(path).items()}
    if json.loads(Path(model, "config.json").read_text()).get("tie_word_embeddings", False):
        shapes.pop("lm_head.weight", None)
    return shapes or None


def adapter_shapes(model: str, lora: LoRA) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an adapter's tensors in PEFT's layout, from the model folder's safetensors files.

    Raises:
        ValueError: The folder has no such files, or a target is no layer of the model.
    """
    found: dict[str, tuple[int, ...]] = {}
    missing = set(lora.targets)
    for name, shape in (expected_shapes(model) or {}).items():
        layer = name.removesuffix(".weight")
        target = layer.rpartition(".")[2]
        if target in lora.targets and len(shape) == 2:
            found[f"base_model.model.{layer}.lora_A.weight"] = (lora.rank, shape[1])
            found[f"base_model.model.{layer}.lora_B.weight"] = (shape[0], lora.rank)
            missing.discard(target)
    if missing:
        raise ValueError(f"{model} has no layers {sorted(missing)} for a LoRA adapter; leave them out of its targets")
    return found


def check_tensors(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]] | None) -> None:
    """Refuse an update that does not fit, before it touches the engine.

    Raises:
        ValueError: A tensor is missing, unknown, or of another shape.
    """
    if expected is None:
        return
    missing = sorted(expected.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - expected.keys() - {"lm_head.weight"})
    if missing or unknown:
        raise ValueError(
            f"the update does not fit the served model: {len(missing)} tensors are missing ({missing[:3]}), "
            f"{len(unknown)} are unknown ({unknown[:3]}); publish under Hugging Face names"
        )
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"tensor {name!r} has shape {tuple(tensors[name].shape)}; the served model has {shape}")


def load_tensors(engine: Any, tensors: Mapping[str, torch.Tensor], version: int) -> None:
    """Replace all weights in place, and forget every key and value computed with the old ones.

    Running requests keep their tokens; their keys and values are computed again.
    """
    import torch

    model = engine.model_executor.driver_worker.get_model()
    with torch.no_grad():
        _forget_packed_experts(model)
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors.items())})
        _repack_tied_heads(model)
    _note_version(engine, _BASE, version)


def load_adapter(engine: Any, number: int, lora: LoRA, tensors: Mapping[str, torch.Tensor], version: int) -> None:
    """Replace one adapter in place; as `load_tensors`, for its requests.

    Args:
        tensors: In PEFT's layout; see `adapter_shapes`.
    """
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="forge-adapter-") as folder:  # vLLM takes adapters from files only
        save_file(dict(tensors), Path(folder, "adapter_model.safetensors"))
        settings = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(lora.targets)}
        Path(folder, "adapter_config.json").write_text(json.dumps(settings))
        engine.add_lora(_lora_request(number, folder, load_inplace=True))
    _note_version(engine, str(number), version)


def _note_version(engine: Any, what: str, version: int) -> None:
    """Say which version samples from now on, and forget every key and value computed before."""
    engine.reset_prefix_cache(reset_running_requests=True)
    engine.set_weight_version(json.dumps({**json.loads(engine.get_weight_version()), what: version}))


def _forget_packed_experts(model: Any) -> None:
    """On CPU vLLM packs experts when it makes their kernel; its reload keeps the kernel and leaves them unpacked."""
    from vllm.platforms import current_platform

    for module in model.modules() if current_platform.is_cpu() else ():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None


def _repack_tied_heads(model: Any) -> None:
    """On CPU vLLM samples from packed copies of the weights; its reload leaves a tied head's copy as it was."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and "cpu_linear" in module.__dict__ and module.weight.numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def close(engine: Any) -> None:
    """Let the engine free what it holds outside Python."""
    with contextlib.suppress(AttributeError):
        engine.engine_core.shutdown()
