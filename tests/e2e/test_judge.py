"""A judge on an engine of its own, beside other engines and loops."""

import asyncio

import numpy as np
import pytest
import torch

from forge_agents.policy import Policy
from forge_agents.runtime import mesh
from forge_agents.serving import EngineConfig
from forge_agents.testing._echo import Echo
from forge_agents.types import Trajectory, Turn
from forge_verifiers import Judge, Pairs, Reasoned, Ruler, Scale, YesNo
from forge_verifiers.judge.prompts import documents, fence_key, instructions_for, question_of

RUBRIC = "Is it right?"
SMALL = EngineConfig(enforce_eager=True, kv_cache_gb=0.05, threads=1, max_model_len=2048, max_num_seqs=16)


def said(text, seed=0):
    turn = Turn(agent="a", index=0, observation="2 + 2?", action=text, reward=0.0)
    return Trajectory(agent="a", policy="p", turns=(turn,), env_id="t", seed=seed)


ANSWERS = [said(text) for text in ("4", "5", "twenty-two", "4")]


def expected_yes(model, judge, trajectory):
    """P(yes) among yes and no, from transformers. The tiny model's tokens are bytes."""
    from transformers import AutoModelForCausalLM

    from forge_agents.rollout.rendering import Renderer

    (document,), _ = documents(trajectory, "answer", 8000)
    text = question_of(document, judge.answer.ask, key=fence_key(7))
    prompt = Renderer.of(model).start(instructions_for(RUBRIC), text)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits_V = reference(torch.tensor([prompt])).logits[0, -1]
    return float(torch.sigmoid(logits_V[ord("y")] - logits_V[ord("n")]))


def test_judge_answers_in_every_way_next_to_another_session(run, tiny_llama):
    judge = Judge(Policy(str(tiny_llama)), RUBRIC, answer=YesNo(min_mass=0.0), engine=SMALL, seed=7)

    async def trainer():
        async with mesh.session():
            policy = mesh.spawn_procs("policy").spawn("echo", Echo)
            scored = asyncio.create_task(asyncio.to_thread(judge.score, ANSWERS))
            while not scored.done():  # the policy goes on while the judge starts and thinks
                assert await mesh.with_deadline(policy.pid.call_one(), 250, who="policy", what="pid") > 0
                await asyncio.sleep(0.05)
            scores = await scored
            await asyncio.to_thread(ask_in_every_other_way, judge)
            return scores

    try:
        scores = run(trainer())
        assert scores.tolist() == [pytest.approx(expected_yes(tiny_llama, judge, t), abs=1e-3) for t in ANSWERS]
        assert len(set(scores.round(5).tolist())) == 3
    finally:
        judge.close()


def ask_in_every_other_way(judge):
    assert (judge.usage.questions, judge.usage.repeated, judge.usage.failed) == (3, 1, 0)
    judge.answer = Scale(levels=4, min_mass=0.0)
    judge.view = "trajectory"
    marks = judge.score(ANSWERS)
    assert ((marks > 0) & (marks < 1)).all()  # expected marks, not whole ones
    judge.answer = Pairs(min_mass=0.0)
    assert set(judge.score(ANSWERS).tolist()) <= {0.0, 0.25, 0.5, 0.75, 1.0}
    judge.answer = Ruler()
    marks = judge.score(ANSWERS)
    assert marks[0] == marks[3] and set((10 * marks).round(4).tolist()) <= set(range(11))
    judge.answer = Reasoned(max_reason_chars=10)
    verdicts = judge.score(ANSWERS)
    assert set(verdicts.tolist()) <= {0.0, 1.0} and verdicts[0] == verdicts[3]
    assert judge.usage.nonsense == judge.usage.failed == 0
    judge.answer, judge.view = YesNo(min_mass=0.9), "answer"  # random weights favour no token so much
    assert np.isnan(judge.score(ANSWERS)).all() and judge.usage.nonsense == 3
    judge.answer, judge.view = YesNo(min_mass=0.0), "answer"
