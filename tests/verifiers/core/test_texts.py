"""Verifiers and ensembles as rewards of other libraries."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import forge_agents as fa
import forge_verifiers as fv
from forge_agents.errors import ArgumentError


def message(role, content):
    return [{"role": "system", "content": "Be brief."}, {"role": role, "content": content}]


def test_texts_are_scored_with_their_columns_and_without_reasoning():
    reward = fv.TextReward(fv.Numeric())
    completions = ["It is 42.", "<think>It is 42.</think>It is 41.", message("assistant", "42"), "It is 42."]
    answers = [42, 42, 42, None]
    result = reward(prompts=["6 * 7?"] * 4, completions=completions, answer=answers, trainer_state=SimpleNamespace())
    assert result == [1.0, 0.0, 1.0, None]
    assert reward.__name__ == "numeric" and fv.TextReward(fv.Numeric(), name="maths").__name__ == "maths"


def column(method):
    """A function that makes a column of a data frame or table: like an array, no sequence."""
    return lambda values: SimpleNamespace(**{method: lambda: values})


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, torch.tensor, column("tolist"), column("to_list"), column("to_pylist")]
)
def test_columns_may_be_sequences_arrays_or_tensors(kind):
    reward = fv.TextReward(fv.Numeric())
    assert reward(["6 * 7?"] * 2, ["It is 42.", "It is 41."], answer=kind([42, 42])) == [1.0, 0.0]


def test_parts_of_a_message_are_joined_and_one_without_text_is_empty():
    parts = [{"type": "text", "text": "It is "}, {"type": "image"}, {"type": "text", "text": "42."}]
    calls = [{"role": "assistant", "content": None, "tool_calls": []}]
    reward = fv.TextReward(lambda completion, prompt: len(completion) / 10 if prompt == "6 * 7?" else 0.0)
    assert reward([message("user", "6 * 7?")] * 2, [message("assistant", parts), calls]) == [pytest.approx(0.9), 0.0]


@pytest.mark.parametrize("role", ["tool", "user", "system"])
def test_only_the_assistant_answers(role):
    reward = fv.TextReward(fv.Numeric())
    calls = {"role": "assistant", "content": "", "tool_calls": []}
    other = {"role": role, "content": "42"}
    completions = [[calls, other], [calls, other, *message("assistant", "41")], [{"content": "42"}], []]
    assert reward([message("user", "6 * 7?")] * 4, completions, answer=[42] * 4) == [0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("content", [[{"type": "text", "text": None}, "42"], [{"type": "text", "text": "42"}, 3]])
def test_odd_parts_of_a_message_end_no_run(content):
    assert fv.TextReward(fv.Numeric())(["6 * 7?"], [message("assistant", content)], answer=[42]) == [1.0]


def test_error_for_all_completions_of_a_call_is_raised_only_before_the_first_score(caplog):
    reward = fv.TextReward(lambda completion: float(completion) / 100)
    with pytest.raises(ValueError, match="could not convert"):
        reward(["p"], ["x"])
    assert reward(["p", "p"], ["50", "x"]) == [0.5, None]
    assert reward(["p"], ["\x1b]52;x"]) == [None]
    assert "fails on all 1 completions: ValueError" in caplog.text and "\x1b" not in caplog.text


def test_equal_prompts_are_one_group_in_every_call():
    reward = fv.TextReward(fv.SelfConsistency())
    prompts = [message("user", "6 * 7?")] * 3 + [message("user", "6 * 8?")]
    assert reward(prompts, ["It is 42.", "It is 42.", "It is 41.", "It is 41."]) == [1.0, 1.0, 0.0, None]
    seeds = []
    remember = fv.TextReward(lambda trajectories: [seeds.append(t.seed) or 1.0 for t in trajectories])
    for _ in range(2):
        remember(prompts, ["a", "b", "c", "d"])
    assert len(set(seeds)) == 2 and seeds[:3] == seeds[4:7] and seeds[3] == seeds[7]


def test_ensemble_learns_over_calls():
    rng = np.random.default_rng(0)
    ensemble = fa.Ensemble([fa.Rule(lambda t, k=k: t.info["scores"][k], name=f"weak {k}") for k in range(5)])
    reward = fv.TextReward(ensemble)
    for step in range(3):
        truth = rng.random(64) < 0.5
        scores = [
            [float(t == (rng.random() < 0.8)) for _ in range(4)] + [float(t == (rng.random() < 0.5))] for t in truth
        ]
        prompts = [f"{step}/{row // 8}" for row in range(64)]
        result = reward(prompts, ["text"] * 64, scores=scores)
    assert np.mean((np.array(result) > 0.5) == truth) > 0.85
    assert ensemble.version == 3


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"prompts": ["a"], "completions": ["b", "c"]}, "prompts has 1 values for 2 completions"),
        ({"prompts": ["a"], "completions": ["b"], "answer": []}, "answer has 0 values for 1 completions"),
        ({"prompts": ["a"], "completions": ["42"], "answer": "42"}, "answer='42' is a single text. Pass a list"),
        ({"prompts": "42", "completions": "42"}, "prompts='42' is a single text"),
        ({"prompts": ["a"], "completions": [3]}, "a text arrived as 3"),
        ({"prompts": [[]], "completions": ["b"]}, r"a text arrived as \[\]"),
    ],
)
def test_wrong_texts_are_refused(arguments, problem):
    with pytest.raises(ArgumentError, match=problem):
        fv.TextReward(fv.Repetition())(**arguments)


@pytest.mark.slow
def test_trl_trains_with_an_ensemble(tiny_llama, tmp_path):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rows = [{"prompt": [{"role": "user", "content": f"{a} + 1?"}], "answer": str(a + 1)} for a in range(8)]
    ensemble = fa.Ensemble([fv.Numeric(), fv.Repetition(), fa.Rule(lambda completion: "a" in completion, name="a")])
    config = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=8, num_generations=4, max_completion_length=8,
        max_steps=2, use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", report_to=[],
        disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        str(tiny_llama), reward_funcs=fv.TextReward(ensemble), args=config, train_dataset=Dataset.from_list(rows)
    )
    trainer.train()
    assert ensemble.version == 2
    assert 0 < trainer.state.log_history[-1]["rewards/ensemble/mean"] < 1


def test_openenv_rubric():
    Rubric = pytest.importorskip("openenv.core.rubrics").Rubric

    class Sums(Rubric):
        def __init__(self, reward):
            super().__init__()
            self.reward = reward

        def forward(self, action, observation):
            return self.reward([observation.prompt], [action.message], answer=[observation.answer])[0]

    rubric, task = Sums(fv.TextReward(fv.Numeric())), SimpleNamespace(prompt="6 * 7?", answer="42")
    scores = [rubric(SimpleNamespace(message=text), task) for text in ("It is 42.", "It is 41.")]
    assert scores == [1.0, 0.0] and rubric.last_score == 0.0


def test_inspect_scorer(tmp_path):
    inspect_ai = pytest.importorskip("inspect_ai")
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ModelOutput, ModelUsage, get_model
    from inspect_ai.scorer import Score, mean, scorer

    @scorer(metrics=[mean()])
    def verified(reward):
        async def score(state, target):
            texts = [state.input_text], [state.output.completion]
            (value,) = await asyncio.to_thread(reward, *texts, answer=[target.text])
            return Score(value=float("nan") if value is None else value)

        return score

    output = ModelOutput.from_content("mock", "It is 42.")
    output.usage = ModelUsage()
    samples = [Sample(input="6 * 7?", target="42"), Sample(input="6 * 8?", target="48")]
    task = inspect_ai.Task(dataset=samples, scorer=verified(fv.TextReward(fv.Numeric())))
    model = get_model("mockllm/model", custom_outputs=[output, output])
    (log,) = inspect_ai.eval(task, model=model, display="none", log_dir=str(tmp_path))
    assert log.status == "success" and log.results.scores[0].metrics["mean"].value == 0.5
