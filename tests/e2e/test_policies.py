"""Several trainable policies in one run: adapters on one engine, or whole models, each learning its own weights."""

import asyncio
import importlib
import json
import os
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from cases import Cases, adapted, greedy, seats
from local_processes import use_local_learners
from safetensors.torch import load_file

import forge_agents as fa
from forge_agents.serving.config import EnginePlan

pytestmark = pytest.mark.timeout(1800)

GREEDY = fa.Sampling(temperature=0.0, max_tokens=24)
PROMPTS = [[65, 66, 67], [200, 3, 9, 9, 9], list(range(40, 80))]


def config(lr, *, sleeps=False, **settings):
    engine = fa.EngineConfig(enforce_eager=True, kv_cache_gb=0.1, max_model_len=128, threads=1, **settings)
    return fa.GRPOConfig(
        groups_per_step=3,
        seed=1,
        checkpoint_every=4,
        learner=fa.LearnerConfig(lr=lr, threads=1, compute_dtype="float32"),
        engine=EnginePlan.of(engine, sleeps=sleeps),  # as the plan has it where GPUs are shared
    )


def each_learned(before, after):
    return all(after.by_agent[seat] > before.by_agent[seat] + 0.1 for seat in ("low", "high"))


def said_by(trainer):
    """Return each policy's answers to the prompts."""

    async def ask(engine):
        return await asyncio.gather(*(engine.generate(tuple(prompt), GREEDY) for prompt in PROMPTS))

    return {name: trainer._loop.run(ask(one)) for name, one in trainer._lifecycle.running.policy_engines.items()}


def test_adapter_and_full_policy_learn_with_separate_settings(tiny_models, tmp_path, monkeypatch):
    use_local_learners(monkeypatch)
    policies = seats(tiny_models(family="gpt_oss"), None)
    lora = fa.LoRA(rank=8, alpha=16, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    policies["low"] = replace(
        policies["low"], lora=lora, learner={"lr": 2e-2, "num_iterations": 2, "num_minibatches": 3}
    )
    policies["high"] = replace(policies["high"], learner=fa.LearnerConfig(lr=1e-2))
    with fa.GRPOTrainer(policies, config=config(0.0), out_dir=tmp_path) as trainer:  # the trainer's rate learns nothing
        before = trainer.evaluate(Cases, episodes=32)
        result = trainer.fit(Cases, steps=8)
        after = trainer.evaluate(Cases, episodes=32)
        assert len(trainer._lifecycle.running.engines) == 2
    assert each_learned(before, after)
    assert (result.export / "low-hero/adapter/adapter_model.safetensors").exists()
    folders = Path(policies["high"].model), result.export / "high-hero"
    start, full = (load_file(folder / "model.safetensors") for folder in folders)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(full[name].float(), start[name].float())
    rows = [row for row in result.metrics if "learner/low-hero/lr" in row and "learner/high-hero/lr" in row]
    assert rows and {(row["learner/low-hero/lr"], row["learner/high-hero/lr"]) for row in rows} == {(2e-2, 1e-2)}
    assert {row["learner/high-hero/optimizer_steps"] for row in rows} == {1}
    assert max(row["learner/low-hero/optimizer_steps"] for row in rows) == 6, "two passes over three groups"
    assert max(row["learner/low-hero/clip_fraction"] for row in rows) > 0
    recorded = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert recorded["policies"]["low-hero"]["learner"]["lr"] == 2e-2
    assert recorded["policies"]["high-hero"]["learner"] == {"lr": 1e-2} and recorded["trainer"]["learner"]["lr"] == 0


def test_two_adapters_on_one_engine_learn_separately(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "perf")
    ports_table = importlib.import_module("ports_table")
    policies, out = seats(tiny_llama, fa.LoRA(rank=8, alpha=16)), tmp_path / "run"
    with monkeypatch.context() as patched:
        use_local_learners(patched)
        completions, versions, after = two_adapters_learn(policies, out)

    # a second session continues with both adapters, in a learner of two ranks and on an engine of two ranks that
    # sleeps while they learn
    with listeners_seen(ports_table) as sockets:
        settings = replace(config(2e-2, tp=2, sleeps=True), learner_procs=2)
        with fa.GRPOTrainer(policies, config=settings, out_dir=out) as trainer:
            assert trainer.evaluate(Cases, episodes=8).by_agent == pytest.approx(after.by_agent, abs=0.2)
            for name, results in said_by(trainer).items():
                for one, two in zip(completions[name], results, strict=True):
                    assert (one.token_ids, one.versions) == (two.token_ids, two.versions)
                    np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-3)
            learners = trainer._lifecycle.running.learners
            assert {name: learner.version for name, learner in learners.items()} == versions
            assert len({learner.name for learner in learners.values()}) == 1
            programs_train_both_adapters(trainer, out)
    sockets |= ports_table.measured("view", tmp_path)
    assert all(one.is_local for one in sockets), "on one host, no run listens beyond the loopback interface"
    assert any(one.protocol == "tcp" and "learner" in one.owner for one in sockets), "gloo's, so the ranks were seen"


def two_adapters_learn(policies, out):
    """Return the answers of the engine after the training, the versions of the learners, and the last evaluation."""
    model = policies["low"].model
    with fa.GRPOTrainer(policies, config=config(2e-2), out_dir=out) as trainer:
        before = trainer.evaluate(Cases, episodes=32)
        result = trainer.fit(Cases, steps=8)
        after = trainer.evaluate(Cases, episodes=32)
        stack = trainer._lifecycle.running
        assert len(stack.engines) == 1
        completions = said_by(trainer)
        versions = {name: learner.version for name, learner in stack.learners.items()}
    assert each_learned(before, after)
    for row in result.metrics:
        for name in completions:
            # float32 sampler against float32 learner; a policy whose siblings all did the same has nothing to learn
            assert row.get(f"learner/{name}/logprob_gap_mean", 0.0) < 1e-3
    assert min(versions.values()) >= 4
    # what the engine samples after the updates is what the exported adapter says, token by token
    for name, results in completions.items():
        hf = adapted(model, result.export / name / "adapter")
        for prompt, completion in zip(PROMPTS, results, strict=True):
            tokens, logprobs = greedy(hf, prompt)
            assert completion.token_ids == tokens
            np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-3)
            assert [span.version for span in completion.versions] == [versions[name]]
    low, high = completions.values()
    assert [c.token_ids for c in low] != [c.token_ids for c in high]
    return completions, versions, after


@contextmanager
def listeners_seen(ports_table):
    """Yield the listening sockets of this process and its descendants, which are read twice a second."""
    sockets, done = set(), threading.Event()

    def watch():
        while not done.wait(0.5):
            sockets.update(ports_table.listeners(os.getpid()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield sockets
    finally:
        done.set()
        thread.join()


async def talk(task, client):
    """A program: one seat holds two conversations side by side, the other hears what came of the first."""

    async def ask(model, *said):
        roles = ("user", "assistant", "user")[: len(said)]
        messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
        reply = await client.chat.completions.create(model=model, messages=messages)
        return reply.choices[0].message.content

    first = await ask("low", "ab")
    other = await ask("low", "cd")
    low = [first, other, await ask("low", "ab", first, "ef")]
    high = await ask("high", "gh")
    return {"low": sum(map(str.islower, "".join(low))) / 30, "high": sum(map(str.isupper, high)) / 10}


def programs_train_both_adapters(trainer, folder):
    fa.register("test/Talk-v0", entry_point=fa.Program, program=talk, agents=("low", "high"))
    row = trainer.fit("test/Talk-v0", steps=9).metrics[-1]
    for name in ("low-hero", "high-hero"):  # the learner reads the tokens that the engine read, branches or not
        assert row[f"learner/{name}/logprob_gap_mean"] < 1e-3
    stored = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    episode = fa.Episode.from_json(next(row for row in stored if row["env_id"] == "test/Talk-v0"))
    first, other, more = episode.trajectories["low"].turns
    assert (first.branch, other.branch, more.branch) == (0, 1, 0)
    read = first.prompt_ids + first.response_ids
    assert more.prompt_ids[: len(read)] == read and other.prompt_ids[: len(read)] != read
