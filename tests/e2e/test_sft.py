"""Supervised fine-tuning with a learner of two processes, and a model that others load."""

import pytest

import forge_agents as fa
from forge_agents.models import resolve as models

pytestmark = pytest.mark.timeout(900)


def test_export_of_a_sharded_learner_has_its_loss(tiny_llama, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [{"prompt": f"{i}?", "completion": f"{i}{i}!"} for i in range(24)]
    config = fa.SFTConfig(
        batch_size=8,
        learner_procs=2,
        eval_share=0.25,
        learner=fa.LearnerConfig(lr=3e-3, threads=1, compute_dtype="float32"),
    )
    with fa.SFTTrainer(fa.Policy(str(tiny_llama), name="hero"), config, tmp_path / "run") as trainer:
        before = trainer.evaluate(rows)
        result = trainer.fit(rows, steps=6)
        after = trainer.evaluate(rows)
    assert after.perplexity < 0.5 * before.perplexity
    assert result.metrics[-1]["eval/loss"] < before.loss
    assert [row["learner/version"] for row in result.metrics] == [1, 2, 3, 4, 5, 6]

    export = models.resolve(str(result.export))  # what `Policy(model)` does
    hf = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(export)
    total, tokens = 0.0, 0
    for row in rows:
        prompt = [{"role": "user", "content": row["prompt"]}]
        question = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        heard = tokenizer.encode(question, add_special_tokens=False)
        said = [*tokenizer.encode(row["completion"], add_special_tokens=False), tokenizer.eos_token_id]
        with torch.no_grad():
            logprobs = torch.log_softmax(hf(torch.tensor([[*heard, *said]])).logits[0].double(), -1)
        total -= float(logprobs[len(heard) - 1 : -1].gather(1, torch.tensor(said)[:, None]).sum())
        tokens += len(said)
    assert tokens == after.tokens
    assert total / tokens == pytest.approx(after.loss, rel=0.02)  # stored in bfloat16
