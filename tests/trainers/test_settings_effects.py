"""The number of settings of a GRPO run, and the test file that uses each. That file shows the effect, not this one."""

import dataclasses
import re
from pathlib import Path

import pytest

import forge_agents as fa

TESTS = Path(__file__).parent.parent
RUN, LEARNER = "trainers/run/test_", "trainers/learner/test_"
RL, LOSSES, SERVING = "trainers/rl/test_", "trainers/losses/test_", "core/serving/test_"
EFFECTS = {
    fa.GRPOConfig: {
        "learner_procs": RUN + "placement", "max_staleness": RL + "evaluation", "colocate": RUN + "placement",
        "seed": RUN + "processes", "stage_timeout_s": RUN + "processes",
        "heartbeat_timeout_s": "core/runtime/test_heartbeat",
        "group_size": RL + "evaluation", "groups_per_step": "e2e/test_trainer", "max_resamples": RL + "stopping",
        "loss_normalization": RL + "rewards", "credit": RL + "plan",
        "max_concurrent_episodes": RL + "evaluation", "eval_every": RL + "evaluation",
        "eval_episodes": RL + "evaluation", "exploitability_samples": "core/bench/test_model_strategy",
        "checkpoint_every": RL + "stopping", "keep_checkpoints": RL + "evaluation", "keep_episodes": RL + "resume",
        "tracker": RL + "preflight", "max_logprob_gap": RL + "train_step",
        "max_empty_steps": RL + "stopping", "preflight": RL + "preflight",
    },
    fa.LearnerConfig: {
        "lr": LEARNER + "rates", "warmup_steps": LEARNER + "schedule", "lr_decay": LEARNER + "schedule",
        "lr_min_ratio": LEARNER + "schedule",
        "weight_decay": LEARNER + "learner_core", "betas": LEARNER + "learner_core",
        "num_iterations": LEARNER + "minibatches", "num_minibatches": LEARNER + "minibatches",
        "max_grad_norm": LEARNER + "minibatches", "compute_dtype": LEARNER + "learner_core",
        "optimizer_state_dtype": LEARNER + "memory_options", "max_tokens_per_microbatch": LEARNER + "learner_core",
        "loss": LOSSES + "algorithms", "clip": LOSSES + "algorithms", "sequence": LOSSES + "algorithms",
        "correction": LOSSES + "algorithms", "kl": LOSSES + "algorithms", "kl_coef": LOSSES + "algorithms",
        "reference": LEARNER + "learner_core",
        "entropy_coef": LOSSES + "algorithms", "threads": RUN + "threads", "tp": LEARNER + "learner_core",
        "dp_replicate": LEARNER + "memory", "ep": LEARNER + "memory",
        "activation_checkpointing": LEARNER + "memory_options", "compile": LEARNER + "memory_options",
        "cpu_offload": LEARNER + "memory_options",
    },
    fa.EngineConfig: {
        "dtype": SERVING + "engine_memory", "max_model_len": SERVING + "engine_memory",
        "max_num_seqs": SERVING + "engine_memory", "kv_cache_gb": SERVING + "engine_memory",
        "gpu_memory_utilization": SERVING + "fleet", "enforce_eager": SERVING + "serving_adapters",
        "threads": RUN + "threads", "replicas": SERVING + "replicas", "tp": SERVING + "fleet",
        "routing": SERVING + "routing", "on_update": SERVING + "replicas",
    },
}  # fmt: skip
"""Test file of each setting, by settings class."""


@pytest.mark.parametrize("kind", EFFECTS)
def test_every_setting_is_used_by_the_test_file_that_is_listed(kind):
    names = {field.name for field in dataclasses.fields(kind)} - {"learner", "engine"}
    assert EFFECTS[kind].keys() == names
    for name, file in EFFECTS[kind].items():
        assert re.search(rf"\b{name}\b", (TESTS / f"{file}.py").read_text()), f"{file}.py does not use {name}"


def test_a_grpo_run_has_at_most_60_settings():
    assert sum(map(len, EFFECTS.values())) <= 60
