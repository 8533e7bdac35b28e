"""Several engines as one: requests survive the death of an engine, weights roll, conversations come home."""

import asyncio
import os
import signal
import time

import pytest
import torch

import forge_agents as fa
from forge_agents.errors import ActorDiedError
from forge_agents.policy import Sampling
from forge_agents.rollout.episode import play
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.rollout.rendering import Renderer
from forge_agents.runtime.faults import Faults
from forge_agents.serving import EngineClient
from forge_agents.serving.config import EnginePlan
from forge_agents.weights import Publisher, WeightStore

pytestmark = pytest.mark.timeout(900)

PROMPTS = [[65 + i, 66, 67] for i in range(8)]


def small(model, replicas, **changes):
    return EnginePlan(
        model=str(model),
        enforce_eager=True,
        kv_cache_gb=0.02,
        threads=1,
        max_model_len=256,
        replicas=replicas,
        **changes,
    )


async def answers(engines, max_tokens=24):
    sampling = Sampling(max_tokens=max_tokens)
    asked = (engines.generate(prompt, sampling, seed=seed) for seed, prompt in enumerate(PROMPTS))
    return await asyncio.gather(*asked)


async def crew(task, client):
    """A program of three calls, each after the one before."""
    said = []
    for question in ("ab", "cd", "ef"):
        said.append({"role": "user", "content": question})
        reply = await client.chat.completions.create(model="agent", messages=said)
        said.append({"role": "assistant", "content": reply.choices[0].message.content})
    return 1.0


async def programs(engines, model):
    """Return the answers to two concurrent programs, call by call."""
    served = {"hero": PolicyEngine(engines, Renderer.of(model))}
    hero = fa.Policy(str(model), name="hero", sampling=Sampling(max_tokens=40))
    envs = [fa.Program(crew) for _ in range(2)]
    try:
        episodes = await asyncio.gather(
            *(play(env, {"agent": hero}, seed=0, engines=served, rng_key=str(at)) for at, env in enumerate(envs))
        )
    finally:
        for env in envs:
            env.close()
    assert [episode.rewards for episode in episodes] == [{"agent": 1.0}] * 2, episodes
    return [[turn.response_ids for turn in episode.turns] for episode in episodes]


def tokens(completions):
    return [completion.token_ids for completion in completions]


def test_killed_replica_and_update_lose_no_request(run, tiny_llama, tiny_models, tmp_path):
    from safetensors.torch import load_file

    async def main():
        store = await WeightStore.start(name="replica store")
        faults = Faults(max_respawns=2, file=tmp_path / "faults.jsonl")
        asked = small(tiny_llama, 2, on_update="restart")
        engines = await EngineClient(asked, name="hero", store=store.ref, faults=faults).start()
        first = await answers(engines, 200)
        assert set(engines.pids) == {"hero-0", "hero-1"}

        new = load_file(tiny_models(family="llama", seed=5) / "model.safetensors")
        await Publisher(store.ref, "hero", dtype=torch.float32).publish(3, new)
        timings = await engines.load_weights(3)
        assert timings["version"] == 3 and timings["bytes"] == sum(tensor.nbytes for tensor in new.values())
        undisturbed = await answers(engines, 200)
        assert tokens(undisturbed) != tokens(first)
        assert {span.version for completion in undisturbed for span in completion.versions} == {3}

        told = await programs(engines, tiny_llama)
        assert [len(calls) for calls in told] == [3, 3]

        busy = asyncio.ensure_future(answers(engines, 200))
        asking = asyncio.ensure_future(programs(engines, tiny_llama))
        await asyncio.sleep(0.05)
        assert all(engines.unfinished.values())
        victim = engines.pids["hero-0"]
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        killed = time.time()
        assert tokens(await busy) == tokens(undisturbed)  # each request once, with the tokens it would have had
        assert await asking == told  # nor does a program notice

        deadline = time.monotonic() + 200
        while None in engines.pids.values() or faults.all[0].recovered_at is None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert len(faults.all) == 1 and faults.all[0].who == "hero-0"
        assert faults.all[0].noticed_at - killed < 30  # by its end, not by its silence
        assert {info.version for info in (await engines.infos()).values()} == {3}
        assert engines.pids["hero-0"] != victim
        assert tokens(await answers(engines, 200)) == tokens(undisturbed)
        assert (tmp_path / "faults.jsonl").read_text().count("\n") == 2

        back = load_file(tiny_llama / "model.safetensors")
        await Publisher(store.ref, "hero", dtype=torch.float32).publish(4, back)
        busy = asyncio.ensure_future(answers(engines, 200))
        await asyncio.sleep(0.05)
        assert all(engines.unfinished.values())
        await engines.load_weights(4)
        again = await busy  # what an update interrupts is written again: no answer is of two versions
        own = [completion.versions[0].version for completion in again]
        assert all(len(completion.versions) == 1 for completion in again) and 4 in own
        whole = {3: tokens(undisturbed), 4: tokens(first)}
        assert tokens(again) == [whole[version][place] for place, version in enumerate(own)]

        await engines.stop()
        with pytest.raises(ActorDiedError, match="hero was stopped"):
            await answers(engines)
        await store.stop()

    run(main())
