"""The examples that train, with a tiny model and as short as they go."""

import inspect
import json

import pytest
from local_processes import use_local_processes

import forge_agents as fa

SHORT = {
    "custom_env": ["--steps=1"],
    "own_loss": ["--steps=1"],
    "think_then_answer": ["--steps=1", "--episodes=2"],
    "tool_use": ["--steps=1", "--episodes=2", "--control-steps=0"],
    "two_policies": ["--steps=1", "--episodes=2", "--control-steps=0", "--eval-every=1", "--groups=2", "--seeds=0",
                     "--kind=lora", "--share=role"],
    "self_play": ["--steps=3", "--episodes=2", "--control-steps=0", "--eval-every=3", "--samples=2", "--seeds=0"],
    "asynchronous": ["--steps=2", "--episodes=2", "--eval-every=1", "--seeds=0", "--staleness=1", "--task=sort"],
    "weaver_vs_gold": ["--steps=1", "--episodes=2", "--eval-every=1", "--seeds=0", "--arms=ours"],
    "algorithms": ["--steps=1", "--episodes=2", "--eval-every=1", "--seeds=0", "--arms=dapo"],
    "worlds": ["--steps=1", "--episodes=2", "--eval-every=1", "--seeds=0", "--control-steps=0"],
}  # fmt: skip
"""Arguments of each example, in addition to the model and a folder."""
WRITES = {
    "custom_env": {"metrics.jsonl": 1, "reward.png": None},
    "own_loss": {"metrics.jsonl": 1, "reward.png": None},
    "think_then_answer": {"think-0/metrics.jsonl": 1, "think-0/result.json": None, "think_then_answer.png": None},
    "tool_use": {"trained/metrics.jsonl": 1, "trained/result.json": None},
    "two_policies": {"lora-role-0/metrics.jsonl": 1, "lora-role-0/result.json": None, "two_policies.png": None},
    "self_play": {"divergence-0/metrics.jsonl": 3, "divergence-0/result.json": None, "self_play.png": None},
    "asynchronous": {"sort-staleness-1-0/metrics.jsonl": 2, "asynchronous.png": None},
    "weaver_vs_gold": {"ours-0/metrics.jsonl": 1, "weaver_vs_gold.png": None},
    "algorithms": {"dapo-0/metrics.jsonl": 1, "algorithms.png": None},
    "worlds": {"Codewords-v0-1/seed-0/trained/metrics.jsonl": 1, "Codewords-v0-1/seed-0/trained/result.json": None,
               "Codewords-v0-1/curves.png": None},
}  # fmt: skip
"""Files that each example writes, and the number of steps in metrics."""
SAYS = {
    "custom_env": ["Meeting-v0", "before training 0.", "after 1 steps 0."],
    "own_loss": ["ratio 1.00  pull 1.000"],
    "think_then_answer": ["reasons, then answers"],
    "tool_use": ["a call works"],
    "self_play": ["exploitability", "self-play with a divergence"],
    "weaver_vs_gold": ["(c) ensemble, no labels", "(e) gold answers"],
    "algorithms": ["DAPO with dynamic sampling"],
    "worlds": ["forge/Codewords-v0@1", "imitation, then GRPO"],
}
"""Output of examples with special messages."""
SURVEY = {"brief": {"auroc": 0.5, "accuracy": 0.5}}
GOLD = {"arm": "gold", "seed": 0, "before": [0.0, 0.1], "after": [0.5, 0.1], "curve": [[0, 0.0], [1, 0.5]],
        "survey_before": SURVEY, "survey_after": SURVEY}  # fmt: skip


@pytest.fixture(params=SHORT)
def example(request, load_example, monkeypatch):
    """The name of an example, and its module."""
    use_local_processes(monkeypatch)  # the example of the README and `rl_loop` have all kinds of processes
    return request.param, load_example(request.param)


@pytest.fixture(autouse=True)
def _wide_short_and_eager(monkeypatch):
    """Wide tables, engines without compilation, and small defaults."""
    monkeypatch.setenv("COLUMNS", "200")
    for function, changes in (
        (fa.EngineConfig.__init__, {"enforce_eager": True}),
        (fa.GRPOConfig.__init__, {"group_size": 4, "groups_per_step": 3}),
        (fa.GRPOTrainer.evaluate, {"episodes": 2}),
    ):
        defaults = inspect.unwrap(function).__kwdefaults__
        for name, value in changes.items():
            assert name in defaults
            monkeypatch.setitem(defaults, name, value)


@pytest.mark.timeout(900)
def test_an_example_trains_and_writes_what_it_says(example, tiny_llama, tmp_path, capsys):
    name, module = example
    # what is finished is not done again: three were taught, and the gold run is there
    taught = {"self_play": "taught", "think_then_answer": "imitated-think-0", "worlds": "Codewords-v0-1/imitated-0"}
    if name in taught:
        (tmp_path / taught[name]).mkdir(parents=True)
        (tmp_path / taught[name] / "export").symlink_to(tiny_llama)
    if name == "weaver_vs_gold":
        (tmp_path / "gold-0").mkdir()
        (tmp_path / "gold-0/result.json").write_text(json.dumps(GOLD))
    module.main([*SHORT[name], f"--model={tiny_llama}", f"--out={tmp_path}"])
    message = capsys.readouterr().out
    assert all(words in message for words in SAYS.get(name, ())), message
    for file, steps in WRITES[name].items():
        assert (tmp_path / file).stat().st_size > 0, file
        if steps is not None:
            rows = [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
            assert [row["step"] for row in rows] == list(range(1, steps + 1)), file


class Vowels(fa.TurnEnv):
    """Pays for every vowel, so that siblings of a model that knows nothing differ."""

    possible_agents = ["a", "b"]

    def setup(self, rng):
        self.word = "ab"[int(rng.integers(2))]

    def instructions(self, agent):
        return "Say it."

    def observe_text(self, agent):
        return self.word

    def act(self, agent, action):
        return fa.Outcome(rewards={agent: float(sum(c in "aeiou" for c in action))}, done=agent == "b")


@pytest.mark.timeout(900)
def test_loop_without_a_trainer_learns_and_publishes(load_example, tiny_llama, tmp_path, monkeypatch):
    module = load_example("rl_loop")
    fa.register("test/Vowels-v0", entry_point=Vowels)
    for name, value in {"ENV": "test/Vowels-v0", "ENV_ARGS": {}, "B": 2, "G": 4, "CONTEXT": 128}.items():
        monkeypatch.setattr(module, name, value)
    sampled_by = []

    def pack(samples):
        sampled_by.append({version for sample in samples for version in sample.versions if version >= 0})
        return batch_of(samples)

    batch_of = module.pack
    monkeypatch.setattr(module, "pack", pack)
    out = tmp_path / "run"
    module.main(["--model", str(tiny_llama), "--steps=2", "--episodes=4", f"--out={out}"])
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["version"] for row in rows] == [1, 2] and all(row["failed"] == 0 for row in rows)
    assert sampled_by == [{0}, {1}]  # the engine sampled step 1 from what step 0 published
    assert all(row["gap"] < 0.05 for row in rows)
    assert (out / "export" / "config.json").exists()
