"""A league on the whole stack: snapshots of a tiny model in the opponents' engine, or as adapters on the policy's."""

import asyncio
import functools
import json
import os
import signal
from dataclasses import replace

import pytest
from cases import Letters, share
from local_processes import take_over, use_local_learners

import forge_agents as fa

pytestmark = pytest.mark.timeout(900)


class Duel(Letters):
    """More lowercase letters win."""

    def act(self, agent, action):
        outcome = super().act(agent, action)
        lead = share(self.said[0]) - share(self.said[-1])
        return replace(outcome, rewards={"left": lead, "right": -lead} if outcome.done else {})


@functools.cache
def merged(folder, adapter, lora):
    """A Hugging Face model with the weights of `adapter`, if there is one."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = load_file(adapter) if adapter else {}
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            layer = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            change = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
            layer.weight.data += lora.alpha / lora.rank * change
    return model


def logprobs_of(folder, turn, adapter=None, lora=None):
    """Log-probabilities of a turn's response under a Hugging Face model, with the weights of `adapter` merged."""
    import torch

    ids = torch.tensor([[*turn["prompt_ids"], *turn["response_ids"]]])
    with torch.no_grad():
        logits = merged(folder, adapter, lora)(ids).logits[0, len(turn["prompt_ids"]) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, ids[0, -len(logits) :, None])[:, 0].tolist()


def trainer_of(policy, folder, league=None, **options):
    config = fa.GRPOConfig(
        **{"group_size": 4, "groups_per_step": 2, "checkpoint_every": 2, "keep_episodes": 8, "seed": 1, **options},
        max_resamples=0,
        learner=fa.LearnerConfig(lr=1e-2, threads=1, compute_dtype="float32"),
        engine=fa.EngineConfig(enforce_eager=True, kv_cache_gb=0.1, max_model_len=256, threads=1),
    )
    league = league or fa.League(policy, snapshot_every=1, opponents="latest", self_play=0.0)
    return fa.GRPOTrainer(league, config=config, out_dir=folder)


def test_opponents_have_the_weights_of_their_snapshots(tiny_llama, tmp_path, monkeypatch):
    use_local_learners(monkeypatch)
    policy = fa.Policy(str(tiny_llama), name="hero", sampling=fa.Sampling(max_tokens=6))
    with trainer_of(policy, tmp_path) as first:
        first.fit(Duel, steps=2)
        first.evaluate(Duel, episodes=4)
        saved = json.loads((tmp_path / "league.json").read_text())
        again = trainer_of(policy, tmp_path)
        take_over(again, first)
        rows, held_out = again.fit(Duel, steps=4).metrics, again.evaluate(Duel, episodes=4)
    table = json.loads((tmp_path / "league.json").read_text())
    games = {row["name"]: row["games"] for row in table["opponents"]}
    assert len(rows) == 4 and saved["step"] == 2 and table["step"] == 4
    assert games["hero-000000"] == 8, "the first step's, from before the restart"
    assert set(games) == {f"hero-{version:06d}" for version in range(5)}
    assert sum(row["league/load_s"] > 0 for row in rows) == 3, "the first opponent, the start model, is there already"
    assert held_out.failed == 0
    assert {one.trajectories["left"].policy for one in held_out.episodes} == {"hero", "hero-000000"}

    last = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()][-8:]
    turns = [turn for e in last for one in e["trajectories"].values() for turn in one["turns"]]
    theirs = [turn for turn in turns if turn["policy"] == "hero-000003"]
    assert len(theirs) == 8 and {turn["policy"] for turn in turns} == {"hero", "hero-000003"}
    assert {span["version"] for turn in theirs for span in turn["versions"]} == {3}
    turn = max(theirs, key=lambda one: len(one["response_ids"]))
    assert logprobs_of(tmp_path / "league/hero-000003", turn) == pytest.approx(turn["logprobs"], abs=2e-3)
    assert logprobs_of(tiny_llama, turn) != pytest.approx(turn["logprobs"], abs=2e-2)


LORA = fa.LoRA(rank=4, alpha=16)


def opponents_of(folder):
    """Turns of opponents in ``episodes.jsonl``, with their step."""
    rows = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    turns = [(row["step"], turn) for row in rows for one in row["trajectories"].values() for turn in one["turns"]]
    return [(step, turn) for step, turn in turns if turn["policy"] != "hero"]


def adapters_of(folder):
    """Files of the snapshots' adapters by name. The start model has none."""
    files = {path.name: path / "adapter/adapter_model.safetensors" for path in (folder / "league").iterdir()}
    return {"hero-000000": None, **files}


def test_adapters_of_a_population_play_on_the_policys_engine_also_after_a_restart(tiny_llama, tmp_path, monkeypatch):
    use_local_learners(monkeypatch)
    policy = fa.Policy(str(tiny_llama), name="hero", lora=LORA, sampling=fa.Sampling(max_tokens=6))
    settings = {"snapshot_every": 1, "opponents": "uniform", "self_play": 0.0, "pool": 8, "opponents_per_step": 7}
    options = {"group_size": 2, "groups_per_step": 8, "keep_episodes": 16, "checkpoint_every": 100}
    league = fa.League(policy, **settings)
    first = trainer_of(policy, tmp_path, league, **options)
    with first:
        before = first.fit(Duel, steps=10).metrics
        trainer = trainer_of(policy, tmp_path, league, **options)  # finds adapters of the first one in the engine
        take_over(trainer, first)
        rows = trainer.fit(Duel, steps=13).metrics
        assert len(rows) == 13 and rows[:10] == before
        processes = trainer._lifecycle.running
        assert list(processes.engines) == ["hero"] and len(processes.engines["hero"].pids) == 1, "as without a league"
        files = adapters_of(tmp_path)
        pool = [one.name for one in trainer._policies.standings.opponents]
        assert len(pool) == 8

        played = [(step, turn) for step, turn in opponents_of(tmp_path) if turn["policy"] in files]
        assert len({turn["policy"] for step, turn in played if step <= 10}) >= 6
        resumed = [turn for step, turn in played if step > 10]
        assert any(0 < int(turn["policy"][-6:]) <= 10 for turn in resumed), "a snapshot from before the restart"
        for turn in [*{turn["policy"]: turn for _, turn in played}.values(), *resumed]:
            assert {span["version"] for span in turn["versions"]} == {int(turn["policy"][-6:])}
            expected = logprobs_of(tiny_llama, turn, files[turn["policy"]], LORA)
            assert expected == pytest.approx(turn["logprobs"], abs=2e-3)

        async def generate(served):
            sampling = fa.Sampling(max_tokens=6, temperature=1.0)
            engines = [*served.values(), processes.policy_engines["hero"]]
            each = await asyncio.gather(*(engine.generate((5, 6, 7), sampling, seed=3) for engine in engines))
            return dict(zip([*served, "hero"], each, strict=True))

        async def population():
            snapshots = {one.name: one.version for one in trainer._policies.standings.opponents}
            served = await trainer._policies._engine.serve(snapshots, processes)
            together = await generate(served)
            for pid in processes.engines["hero"].pids.values():
                os.kill(pid, signal.SIGKILL)
            return together, await generate(served)

        together, restarted = trainer._loop.run(population())
    assert {span.version for name in pool for span in together[name].versions} == {int(name[-6:]) for name in pool}
    logprobs = {name: each.logprobs for name, each in together.items()}
    assert together["hero"].versions[0].version == 13
    assert logprobs["hero"] == pytest.approx(logprobs["hero-000013"], abs=1e-5), "its newest snapshot"
    for name in pool:
        assert restarted[name].versions == together[name].versions
        assert restarted[name].logprobs == pytest.approx(logprobs[name], abs=1e-5), "loaded by the next engine as well"
        turn = {"prompt_ids": (5, 6, 7), "response_ids": together[name].token_ids}
        assert logprobs_of(tiny_llama, turn, files[name], LORA) == pytest.approx(logprobs[name], abs=2e-3)
        others = [logprobs_of(tiny_llama, turn, files[other], LORA) for other in pool if other != name]
        assert all(other != pytest.approx(logprobs[name], abs=2e-3) for other in others)
