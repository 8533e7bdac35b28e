"""TRL's GRPO step on the same prompts, at the fastest of the settings that it offers on this machine."""

from __future__ import annotations

import importlib.metadata
import resource
import tempfile
import time
import zlib
from typing import Any

from perf_common import Options

SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"bf16": False},
    "bfloat16 autocast": {"bf16": True},
    "bfloat16 weights": {"bf16": False, "model_init_kwargs": {"dtype": "bfloat16"}},
}
"""The fastest one on a CPU depends on the processor, so all are tried."""
_VLLM = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
GPU_SETTINGS: dict[str, dict[str, Any]] = {
    "vLLM, bfloat16 autocast": {"bf16": True, **_VLLM},
    "vLLM, bfloat16 weights": {"bf16": False, "model_init_kwargs": {"dtype": "bfloat16"}, **_VLLM},
    "bfloat16 weights": SETTINGS["bfloat16 weights"],
}
"""TRL may not know this version of vLLM: a setting that fails is reported with its error."""


def run_trl(options: Options) -> dict[str, Any]:
    """Measure TRL's second step with each of `SETTINGS`, generation included, start-up and loading left out.

    Returns:
        `cpu_s` and `wall_s`: the least of all settings. `fastest`: the setting with the least
        `cpu_s`, on a GPU `wall_s`. `by_setting`:
        all measurements.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    settings, one, unit = (GPU_SETTINGS, _try, "wall_s") if on_gpu else (SETTINGS, _measure, "cpu_s")
    tried = {name: one(options, values) for name, values in settings.items()}
    by_setting = {name: result for name, result in tried.items() if "error" not in result}
    if not by_setting:
        raise RuntimeError(f"TRL ran with none of its settings: {tried}")
    least = {unit: min(result[unit] for result in by_setting.values()) for unit in ("wall_s", "cpu_s")}
    return {
        "version": importlib.metadata.version("trl"),
        **least,
        "fastest": min(by_setting, key=lambda name: by_setting[name][unit]),
        "by_setting": tried,
        "configuration": "one batch, no gradient checkpointing; "
        + ("generation as the setting says" if on_gpu else "generation by transformers (TRL has no vLLM on CPU)"),
    }


def _try(options: Options, settings: dict[str, Any]) -> dict[str, Any]:
    try:
        return _measure(options, settings)
    except Exception as error:  # noqa: BLE001  (the other settings still count)
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _measure(options: Options, settings: dict[str, Any]) -> dict[str, Any]:
    import torch
    from datasets import Dataset  # type: ignore[import-untyped,unused-ignore]
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            self.steps: list[tuple[float, float]] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self._start = time.perf_counter(), _cpu_s()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.steps.append((time.perf_counter() - self._start[0], _cpu_s() - self._start[1]))

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        return [zlib.crc32(str(completion).encode()) / 2**32 for completion in completions]

    clock = Clock()
    prompts = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in options.prompts]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=len(prompts) * options.siblings,
            num_generations=options.siblings,
            max_completion_length=options.step_tokens,
            max_steps=2,
            learning_rate=1e-6,
            use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **settings,
        )
        trainer = GRPOTrainer(
            model=options.model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(prompts),
            callbacks=[clock],
        )
        trainer.train()
    seconds, cpu_s = clock.steps[-1]
    return {
        "wall_s": round(seconds, 2),
        "cpu_s": round(cpu_s, 2),
        "cpu_s_of_steps": [round(cpu, 2) for _, cpu in clock.steps],
        "weights_dtype": str(trainer.model.dtype),
    }


def _cpu_s() -> float:
    """CPU seconds of this process and of its ended children."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
