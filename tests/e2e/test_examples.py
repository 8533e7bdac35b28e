"""The examples that train, each on the whole stack with a tiny model, as short as they go."""

import json

import pytest

SHORT = {
    "custom_env": ["--steps=1"],
    "own_loss": ["--steps=1"],
    "sft_then_grpo": ["--steps=1", "--episodes=4", "--batch=4", "--groups=1", "--siblings=2"],
    "tool_use": ["--steps=1", "--episodes=2", "--control-steps=0"],
    "two_policies": ["--steps=1", "--episodes=2", "--control-steps=0", "--eval-every=1", "--groups=2", "--seeds=0",
                     "--kind=lora", "--share=role"],
    "self_play": ["--steps=3", "--episodes=2", "--control-steps=0", "--eval-every=3", "--samples=2", "--seeds=0"],
    "asynchronous": ["--steps=2", "--episodes=2", "--eval-every=1", "--seeds=0", "--staleness=1"],
    "weaver_vs_gold": ["--steps=1", "--episodes=2", "--eval-every=1", "--seeds=0", "--arms=ours"],
    "algorithms": ["--steps=1", "--episodes=2", "--eval-every=1", "--seeds=0", "--arms=sft"],
}  # fmt: skip
"""What each is called with; all are also given the model and a folder."""
WRITES = {
    "custom_env": {"metrics.jsonl": 1, "reward.png": None},
    "own_loss": {"metrics.jsonl": 1, "reward.png": None},
    "sft_then_grpo": {"sft/metrics.jsonl": 2, "grpo/metrics.jsonl": 1, "grpo/export/config.json": None},
    "tool_use": {"trained/metrics.jsonl": 1, "tool_use.json": None},
    "two_policies": {"lora-role-0/metrics.jsonl": 1, "lora-role-0/result.json": None, "two_policies.png": None},
    "self_play": {"taught/metrics.jsonl": 20, "league-0/metrics.jsonl": 3, "self_play.png": None},
    "asynchronous": {"staleness-1-0/metrics.jsonl": 2, "asynchronous.png": None},
    "weaver_vs_gold": {"gold-0/metrics.jsonl": 1, "ours-0/metrics.jsonl": 1, "weaver_vs_gold.png": None},
    "algorithms": {"sft-0/sft/metrics.jsonl": 12, "sft-0/metrics.jsonl": 1, "algorithms.png": None},
}
"""What each leaves behind; of metrics the number of steps."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SHORT)
def test_an_example_trains_and_writes_what_it_says(name, load_example, tiny_llama, tmp_path):
    load_example(name).main([*SHORT[name], f"--model={tiny_llama}", f"--out={tmp_path}"])
    for file, steps in WRITES[name].items():
        assert (tmp_path / file).stat().st_size > 0, file
        if steps is not None:
            rows = [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
            assert [row["step"] for row in rows] == list(range(steps)), file
