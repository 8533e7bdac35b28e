"""Memory of an engine and a learner vs. the expectations of placement and ``forge-agents simulate``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measure_learner import Work, batch_of
from measure_memory import tensor_peak
from perf_common import Options, goal, in_child

WORK = Work(groups=1, siblings=1, seats=1, prompt=1792, turns=1, question=0, answer=256)
"""2,048 tokens in one microbatch, of one sample: attention on CPU then holds no scores, as on a GPU."""
WAYS: Mapping[str, Mapping[str, Any]] = {
    "all weights": {},
    "all weights, recomputed": {"activation_checkpointing": "full"},
    "an adapter": {"lora": True},
}


def measure(options: Options) -> list[dict[str, Any]]:
    """The record ``expected``."""
    result: dict[str, Any] = {"engine": in_child(run_engine, options, timeout_s=300)}
    result |= in_child(run_learners, options, timeout_s=900)
    ratios = {
        f"{who}: {part}": round(row["measured"][part] / row["expected"][part], 3)
        for who, row in result.items()
        for part in row["measured"]
    }
    goals = {
        "most_over_expected": goal(max(ratios.values()), 1.1, at_most=True),
        "least_over_expected": goal(min(ratios.values()), 0.9, at_most=False),
    }
    peer = "the arithmetic that places processes on GPUs"
    return [{"measure": "expected", **result, "peer": peer, "ratio": ratios, "goals": goals}]


def run_engine(options: Options) -> dict[str, dict[str, int]]:
    """Weights and cache of a vLLM engine in this process, which here keeps the weights that it packs on CPU."""
    import os

    from forge_agents.models.resolve import dtype_of
    from forge_agents.models.sizes import ModelSize
    from forge_agents.serving import _vllm
    from forge_agents.serving.config import EnginePlan
    from forge_agents.serving.memory import Footprint

    os.environ |= _vllm.ENVIRONMENT
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: pack(layer, remove_weight=False)
    config = EnginePlan(model=options.model, max_model_len=2048, max_num_seqs=16, enforce_eager=True)
    engine = _vllm.build(config)
    runner = engine.model_executor.driver_worker.worker.model_runner
    dtype = dtype_of(Path(options.model))
    expected = Footprint(size=ModelSize.of(Path(options.model)), dtype=dtype).fixed(config)
    return {
        "expected": {"weights": expected["weights"], "cache": _vllm.cache_bytes(config, dtype)},
        "measured": {"weights": _held(runner.get_model().parameters()), "cache": _held(runner.kv_caches)},
    }


def run_learners(options: Options) -> dict[str, dict[str, dict[str, int]]]:
    """Memory of one process, measured and expected."""
    return {f"learner, {name}": _learner(options.model, **dict(settings)) for name, settings in WAYS.items()}


def _learner(model: str, *, lora: bool = False, **settings: Any) -> dict[str, dict[str, int]]:
    from forge_agents.models.sizes import ModelSize
    from forge_agents.policy import LoRA
    from forge_trainers.learner import model as titan_model
    from forge_trainers.learner.core import LearnerCore
    from forge_trainers.learner.memory import learner_bytes
    from forge_trainers.learner.plan import LearnerPlan

    size = ModelSize.of(Path(model))
    config = LearnerPlan(model=model, share_prefixes=False, lora=LoRA() if lora else None, **settings)
    expected = dict(learner_bytes(size, config))
    expected["logits"] = learner_bytes(size, config, on_cpu=True)["logits"]  # the loss works row by row
    vars(titan_model)["needs_fsdp"] = lambda _: True  # the layers of a GPU, which keep more than those of a CPU
    core = LearnerCore(config)
    batch = batch_of(WORK, core, share=False)
    core.train_step(batch)
    states = [state for optimizer in core._optimizers for state in optimizer.state.values()]
    peak = tensor_peak(lambda: core.train_step(batch))
    return {
        "expected": {name: expected[name] for name in ("weights", "optimizer")}
        | {"peak": sum(expected.values()) - expected["overhead"]},
        "measured": {
            "weights": _held((*core.model.parameters(), *(core._adapter._away if core._adapter else ()))),
            "optimizer": _held(value for state in states for name, value in state.items() if name != "step"),
            "peak": peak,
        },
    }


def _held(tensors: Any) -> int:
    """Bytes of the memory behind them, each piece once."""
    storages = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
