"""The examples that train, each on the whole stack with a tiny model, as short as they go."""

import json

import pytest

import forge_agents as fa

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
    "algorithms": ["--steps=1", "--episodes=2", "--eval-every=1", "--seeds=0", "--arms=dapo"],
}  # fmt: skip
"""What each is called with; all are also given the model and a folder."""
WRITES = {
    "custom_env": {"metrics.jsonl": 1, "reward.png": None},
    "own_loss": {"metrics.jsonl": 1, "reward.png": None},
    "sft_then_grpo": {"sft/metrics.jsonl": 2, "grpo/metrics.jsonl": 1, "grpo/export/config.json": None},
    "tool_use": {"trained/metrics.jsonl": 1, "tool_use.json": None},
    "two_policies": {"lora-role-0/metrics.jsonl": 1, "lora-role-0/result.json": None, "two_policies.png": None},
    "self_play": {"league-0/metrics.jsonl": 3, "league-0/league.json": None, "self_play.png": None},
    "asynchronous": {"staleness-1-0/metrics.jsonl": 2, "asynchronous.png": None},
    "weaver_vs_gold": {"ours-0/metrics.jsonl": 1, "weaver_vs_gold.png": None},
    "algorithms": {"dapo-0/metrics.jsonl": 1, "algorithms.png": None},
}
"""What each leaves behind; of metrics the number of steps."""
SAYS = {
    "custom_env": ["Meeting-v0", "before training 0.", "after 1 steps 0."],
    "own_loss": ["ratio 1.00  pull 1.000"],
    "sft_then_grpo": ["imitated 2 steps, loss", "played 1 steps, reward"],
    "tool_use": ["a call works"],
    "self_play": ["exploitability", "league"],
    "weaver_vs_gold": ["(c) ensemble, no labels", "(d) gold answers"],
    "algorithms": ["DAPO with refills"],
}
"""What those say that have words of their own for it."""
SURVEY = {"brief": {"auroc": 0.5, "accuracy": 0.5}}
GOLD = {"arm": "gold", "seed": 0, "before": 0.0, "after": 0.5, "ci": 0.1, "curve": [[0, 0.0], [1, 0.5]],
        "survey_before": SURVEY, "survey_after": SURVEY}  # fmt: skip


@pytest.fixture(autouse=True)
def _wide_and_eager(monkeypatch):
    """Tables are not cut off; no engine compiles, a judge's and a benchmark's neither."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setitem(fa.EngineConfig.__init__.__kwdefaults__, "enforce_eager", True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SHORT)
def test_an_example_trains_and_writes_what_it_says(name, load_example, tiny_llama, tmp_path, capsys):
    if name == "self_play":  # what is finished is not done again: it was taught, and the gold run is there
        (tmp_path / "taught").mkdir()
        (tmp_path / "taught/export").symlink_to(tiny_llama)
    if name == "weaver_vs_gold":
        (tmp_path / "gold-0").mkdir()
        (tmp_path / "gold-0/result.json").write_text(json.dumps(GOLD))
    load_example(name).main([*SHORT[name], f"--model={tiny_llama}", f"--out={tmp_path}"])
    said = capsys.readouterr().out
    assert all(words in said for words in SAYS.get(name, ())), said
    for file, steps in WRITES[name].items():
        assert (tmp_path / file).stat().st_size > 0, file
        if steps is not None:
            rows = [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
            assert [row["step"] for row in rows] == list(range(steps)), file
