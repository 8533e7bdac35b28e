"""Engines for real: tokens, logprobs, versions, updates in flight, and deaths."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from image_models import with_images
from process_checks import keeps_connections, ports_of
from safetensors.torch import save_file

import forge_agents as fa
from forge_agents.errors import ActorDiedError, ModelNotFoundError, StallError, UnknownIdError
from forge_agents.policy import LoRA, Sampling
from forge_agents.rollout.episode import play
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.rollout.rendering import Renderer
from forge_agents.runtime import mesh
from forge_agents.serving import EngineProcess, _vllm
from forge_agents.serving._shapes import adapter_shapes
from forge_agents.serving.config import EnginePlan
from forge_agents.types import Completion, VersionSpan
from forge_agents.weights import Publisher, WeightStore
from forge_trainers.batch.packing import samples_from

GREEDY = Sampling(temperature=0.0, max_tokens=24)
PROMPTS = [[65, 66, 67], [200, 3, 9, 9, 9], list(range(40, 80))]


def small(model):
    return EnginePlan(
        model=str(model), enforce_eager=True, kv_cache_gb=0.02, threads=1, max_model_len=256, max_num_seqs=16
    )


def weights_of(model):
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


BENCH = """
import gc
import sys
from forge_agents.runtime._monarch import Actor, endpoint
from forge_agents.serving import _vllm
from forge_agents.policy import Sampling
from forge_agents.serving._wire import Request

GREEDY = Sampling(temperature=0.0, max_tokens=24)

def answers(engine, prompts, adapter=0):
    requests = {str(i): Request(request_id=i, prompt_ids=tuple(p), sampling=GREEDY, adapter=adapter)
                for i, p in enumerate(prompts)}
    for name, request in requests.items():
        _vllm.add(engine, name, request)
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            completion = _vllm.completion_of(output, requests[output.request_id], 256)
            found[output.request_id] = (completion.token_ids, completion.logprobs)
    return [found[name] for name in requests]

class Bench(Actor):
    def __init__(self):
        self.engines = []  # vLLM tears its process groups down with the first engine that goes
        self.visited = []

    def build(self, config):
        gc.callbacks.append(self.count)
        self.engines.append(_vllm.build(config))
        gc.callbacks.remove(self.count)
        if len(self.engines) == 1:  # kernels of other families import it
            unused = {"torch._inductor.lowering", "opentelemetry.exporter", "pandas", "scipy", "sklearn"}
            self.imported = unused.intersection(sys.modules)
        from vllm.distributed import parallel_state
        if parallel_state._EP is None:  # made with the first engine of a process, and only where that has experts
            parallel_state._EP = parallel_state._TP
        return self.engines[-1]

    def count(self, phase, info):
        if phase == "start" and len(self.engines) == 0:  # later engines find the modules of the first one
            self.visited.append(len(gc.get_objects()))

    @endpoint
    async def first_start(self, config):
        if not self.engines:
            self.build(config)
        return max(self.visited), gc.get_freeze_count(), self.imported

    @endpoint
    async def fresh(self, config, prompts, adapter=0):
        return answers(self.build(config), prompts, adapter)

    @endpoint
    async def at_work(self, config, requests, steps):
        engine = self.build(config)
        for i in range(requests):
            _vllm.add(engine, str(i), Request(request_id=i, prompt_ids=(65,), sampling=GREEDY))
        for _ in range(steps):
            engine.step()
        engine.abort_request(["0"])
        return _vllm.running(engine)

    @endpoint
    async def update_and_restore(self, config, new, prompts):
        from safetensors.torch import load_file
        engine = self.build(config)
        seen = [answers(engine, prompts)]
        for version, folder in enumerate((new, config.model), 1):
            lent = load_file(folder + "/model.safetensors")
            _vllm.load_tensors(engine, lent.items(), version)
            for tensor in lent.values():  # pages that the learner writes over next
                tensor.zero_()
            seen.append(answers(engine, prompts))
        return seen
"""
"""Engines side by side in one process, because importing vLLM takes longer than building ten of them."""


@pytest.fixture(scope="module")
def bench(run, import_actors, tiny_llama):
    procs = mesh.spawn_procs("bench", env=_vllm.environment(small(tiny_llama)), threads=1)
    return procs.spawn("bench", import_actors("engine_bench", BENCH).Bench)


@pytest.fixture(scope="module")
def fresh(run, bench):
    """``fresh(model)``: the answers of a new engine, which are kept."""

    @functools.cache
    def ask(model):
        return run(mesh.with_deadline(bench.fresh.call_one(small(model), PROMPTS), 250, who="bench", what="answers"))

    return ask


@pytest.fixture(scope="module")
def updates(run, bench):
    """``updates(old, new)``: the answers of an engine with the old weights, the new ones, and the old ones."""

    def ask(old, new):
        asking = bench.update_and_restore.call_one(small(old), str(new), PROMPTS)
        return run(mesh.with_deadline(asking, 250, who="bench", what="updates"))

    return ask


@pytest.fixture(scope="module")
def store(run):
    return run(WeightStore.start(name="test store"))


@pytest.fixture(scope="module")
def engine(run, store, tiny_llama):
    return run(EngineProcess.start(small(tiny_llama), name="hero", store=store.ref))


def test_strangers_do_not_fill_an_engine_with_connections(engine):
    assert ports_of(engine.initial_info.pid) and not keeps_connections(engine.initial_info.pid)


async def answers(engine, sampling=GREEDY):
    return await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in PROMPTS))


def tokens_and_logprobs(completions):
    return [(completion.token_ids, completion.logprobs) for completion in completions]


def reference_logprobs(model, prompt, response, sampling):
    """float32 [response tokens]: log-probability of each, from transformers' logits, one token at a time."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits_TV = reference(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    result = []
    for at, token in enumerate(response):
        logits = logits_TV[at]
        said, expected = list(response[:at]), torch.tensor([*prompt, *response[:at]])
        for word in sampling.bad_words:
            *before, last = word.encode()
            if said[len(said) - len(before) :] == before:
                logits[last] = -torch.inf
        seen = logits[expected]
        logits[expected] = torch.where(seen > 0, seen / sampling.repetition_penalty, seen * sampling.repetition_penalty)
        counts = torch.bincount(torch.tensor(said, dtype=torch.int64), minlength=len(logits))
        logits -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
        probs = (logits / (sampling.temperature or 1.0)).softmax(-1)
        probs[probs < sampling.min_p * probs.max()] = 0.0
        if sampling.top_k:
            probs[probs < probs.sort(descending=True)[0][sampling.top_k - 1]] = 0.0
        ranked, order = (probs / probs.sum()).sort(descending=True)
        probs[order[ranked.cumsum(-1) - ranked >= sampling.top_p]] = 0.0
        result.append((probs / probs.sum())[token].log())
    return torch.stack(result)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.3, "top_p": 0.7},
        {"top_k": 3},
        {"temperature": 1.5, "min_p": 0.3},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
        {"presence_penalty": 1.5, "frequency_penalty": -1.0},
        {"temperature": 2.0, "repetition_penalty": 1.7, "bad_words": ("a", "bc")},
        {"temperature": 0.0, "top_k": 2, "repetition_penalty": 3.0},
    ],
    ids=str,
)
def test_logprobs_are_of_the_sampling_distribution(run, engine, tiny_llama, shape):
    sampling = Sampling(**shape, max_tokens=40)
    if not sampling.temperature:
        shape = {name: value for name, value in shape.items() if name != "top_k"}  # greedy takes the first of them all

    async def main():
        asked = (engine.generate(PROMPTS[2], one, seed=11) for one in (sampling, Sampling(max_tokens=40), sampling))
        return await asyncio.gather(*asked)

    completion, _, again = run(main())
    assert again == completion
    expected_T = reference_logprobs(tiny_llama, PROMPTS[2], completion.token_ids, Sampling(**shape))
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected_T, atol=1e-3, rtol=0)


class Telling(fa.TurnEnv):
    """The first seat says something to the second, twice."""

    possible_agents = ["teller", "listener"]

    def setup(self, rng):
        self.said: list[str] = []

    def instructions(self, agent):
        return f"You are the {agent}."

    def observe_text(self, agent):
        return self.said[-1] if self.said else "Begin."

    def act(self, agent, action):
        self.said.append(f"it said {action}")
        return fa.Outcome(done=len(self.said) == 4)


def test_reasoning_is_closed_at_its_limit_private_and_trained(run, engine, tiny_llama):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.chat_template += "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
    closed = tuple(b"\n</think>\n\n")
    sampling = Sampling(temperature=1.2, max_tokens=7, max_reasoning_tokens=11)
    policy = fa.Policy(str(tiny_llama), name="hero", sampling=sampling, keep_reasoning="none")
    seats = dict.fromkeys(Telling.possible_agents, policy)
    served = {"hero": PolicyEngine(engine, Renderer(tokenizer))}
    episode = run(play(Telling(), seats, seed=0, engines=served, rng_key="a thought"))
    assert episode.error is None and len(episode.turns) == 4
    again = run(play(Telling(), seats, seed=0, engines=served, rng_key="a thought"))
    assert [turn.response_ids for turn in again.turns] == [turn.response_ids for turn in episode.turns]
    put = 0
    for agent, trajectory in episode.trajectories.items():
        others = [turn for turn in episode.turns if turn.agent != agent]
        for turn in trajectory.turns:
            assert turn.reasoning and turn.reasoning_tokens <= len(turn.response_ids) <= 11 + len(closed) + 7
            for read in (other.prompt_ids for other in others):
                assert not any(read[at : at + 9] == turn.response_ids[:9] for at in range(len(read)))
        for sample, turn in zip(samples_from(trajectory, [1.0, 1.0], 0), trajectory.turns, strict=True):
            prompt, trained = list(turn.prompt_ids), sample.loss_mask[len(turn.prompt_ids) :]
            assert sample.token_ids.tolist() == [*prompt, *turn.response_ids]
            assert not sample.loss_mask[: len(prompt)].any()
            # a model may have ended its turn before
            cut = 11 if turn.response_ids[11 : 11 + len(closed)] == closed else 99
            put += cut == 11
            assert trained.tolist() == [not cut <= at < cut + len(closed) for at in range(len(turn.response_ids))]
            expected_T = reference_logprobs(tiny_llama, prompt, turn.response_ids, Sampling(temperature=1.2))
            found_T = torch.tensor(sample.logprobs[len(prompt) :])
            torch.testing.assert_close(found_T[trained], expected_T[torch.tensor(trained)], atol=1e-3, rtol=0)
    assert put >= 2


def test_bad_words_are_not_sampled(run, engine):
    letters = tuple(map(chr, range(97, 123)))

    async def main():
        free, without = await asyncio.gather(
            *(engine.generate(PROMPTS[1], Sampling(max_tokens=100, bad_words=words), seed=3) for words in ((), letters))
        )
        assert any(97 <= token < 123 for token in free.token_ids)
        assert not any(97 <= token < 123 for token in without.token_ids)

    run(main())


def test_seed_repeats_tokens_with_any_other_requests(run, engine):
    sampling = Sampling(max_tokens=16)

    async def main():
        alone = await engine.generate(PROMPTS[0], sampling, seed=5)
        crowd = await asyncio.gather(
            *(engine.generate(PROMPTS[1], sampling) for _ in range(6)), engine.generate(PROMPTS[0], sampling, seed=5)
        )
        assert crowd[-1].token_ids == alone.token_ids
        assert (await engine.generate(PROMPTS[0], sampling, seed=6)).token_ids != alone.token_ids

    run(main())


def test_concurrent_requests_are_batched(run, engine):
    async def main():
        before = await engine.info()
        sampling = Sampling(temperature=0.0, max_tokens=20)
        completions = await asyncio.gather(*(engine.generate(PROMPTS[0], sampling) for _ in range(32)))
        after = await engine.info()
        assert len({completion.token_ids for completion in completions}) == 1
        total = sum(len(completion.token_ids) for completion in completions)
        assert after.generated_tokens - before.generated_tokens == total
        assert after.steps - before.steps < 60  # 16 at a time; one by one would take 640
        assert after.pid == engine.initial_info.pid

    run(main())


def test_finish_reasons(run, engine):
    async def main():
        cut = await engine.generate(PROMPTS[0], Sampling(temperature=0.0, max_tokens=5))
        assert (cut.finish_reason, len(cut.token_ids)) == ("length", 5)
        no_room = await engine.generate([65] * 250, Sampling(temperature=0.0, max_tokens=50))
        assert (no_room.finish_reason, len(no_room.token_ids)) == ("context", 6)
        stopped = await engine.generate(PROMPTS[0], GREEDY, stop_token_ids=[cut.token_ids[2]])
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids == cut.token_ids[: cut.token_ids.index(cut.token_ids[2]) + 1]

    run(main())


def test_stop_text_ends_a_response(run, engine):
    async def main():
        sampled = await engine.generate(PROMPTS[1], Sampling(max_tokens=120), seed=1)
        place, letter = next((i, token) for i, token in enumerate(sampled.token_ids) if 33 <= token < 127)
        stopped = await engine.generate(PROMPTS[1], Sampling(max_tokens=120, stop=(chr(letter),)), seed=1)
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids == sampled.token_ids[: place + 1]

    run(main())


def text_of(completion):
    assert completion.token_ids[-1] == 258  # end of turn
    return bytes(completion.token_ids[:-1]).decode()


def test_response_is_one_of_the_choices(run, engine):
    choices = ("raise 1", "raise 10", 'say "no"\n\\', "é")
    sampling = Sampling(max_tokens=40)

    async def main():
        requests = (engine.generate(PROMPTS[0], sampling, choices=choices, seed=seed) for seed in range(60))
        free = engine.generate(PROMPTS[0], GREEDY)  # has no constraint, in the same batch
        *completions, unconstrained = await asyncio.gather(*requests, free)
        assert {text_of(completion) for completion in completions} == set(choices)
        assert len(unconstrained.token_ids) == GREEDY.max_tokens
        cut = await engine.generate(PROMPTS[0], Sampling(max_tokens=2), choices=["raise"])
        assert (bytes(cut.token_ids), cut.finish_reason) == (b"ra", "length")

    run(main())


def test_response_fits_the_schema(run, engine):
    schema = {
        "type": "object",
        "properties": {"move": {"enum": ["up", "down"]}, "sure": {"type": "boolean"}},
        "required": ["move", "sure"],
        "additionalProperties": False,
    }

    async def main():
        sampling = Sampling(max_tokens=60)
        completions = await asyncio.gather(
            *(engine.generate(PROMPTS[1], sampling, json_schema=schema, seed=seed) for seed in range(20))
        )
        answers = [json.loads(text_of(completion)) for completion in completions]
        assert {answer["move"] for answer in answers} == {"up", "down"}
        assert {answer["sure"] for answer in answers} == {True, False}

    run(main())


def test_probabilities_of_choices_are_renormalized(run, engine, tiny_llama):
    completion = run(
        engine.generate(PROMPTS[2], Sampling(max_tokens=4), choices=["a", "b", "c"], top_logprobs=3, seed=3)
    )
    expected = [reference_logprobs(tiny_llama, PROMPTS[2], (ord(letter),), Sampling()).item() for letter in "abc"]
    expected_3 = torch.tensor(expected).log_softmax(0)
    first = completion.top_logprobs[0]
    torch.testing.assert_close(torch.tensor([first[ord(letter)] for letter in "abc"]), expected_3, atol=1e-3, rtol=0)
    assert set(first) == {97, 98, 99}
    assert completion.logprobs[0] == first[completion.token_ids[0]]


def test_invalid_constraints_are_refused(run, engine):
    for constraint, message in (
        ({"choices": ["a", ""]}, "holds an empty text"),
        ({"choices": ["a"], "json_schema": {"type": "object"}}, "both given"),
        ({"json_schema": {"type": "unheard-of"}}, "hero refused the request"),
        ({"top_logprobs": 21}, "hero refused the request"),
    ):
        with pytest.raises(ValueError, match=message):
            run(engine.generate(PROMPTS[0], GREEDY, **constraint))
    with pytest.raises(TypeError, match="choices='abc' is one text"):
        run(engine.generate(PROMPTS[0], GREEDY, choices="abc"))
    assert run(engine.generate(PROMPTS[0], Sampling(max_tokens=2))).token_ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([65] * 256, "has 256 tokens and hero holds 256"),
        ([65, 264], "token id 264 is outside the vocabulary of hero, 0 to 263"),
        ([65, -1], "token id -1 is outside"),
    ],
)
def test_invalid_prompts_are_refused(run, engine, prompt, message):
    with pytest.raises(ValueError, match=message):
        run(engine.generate(prompt, GREEDY))


def test_refusal_of_vllm_fails_one_request(run, engine):
    odd_one = Sampling(max_tokens=4)
    object.__setattr__(odd_one, "top_p", 2.0)

    async def main():
        odd, good = await asyncio.gather(
            engine.generate(PROMPTS[0], odd_one), engine.generate(PROMPTS[0], GREEDY), return_exceptions=True
        )
        assert isinstance(odd, ValueError)
        assert "top_p" in str(odd)
        assert isinstance(good, Completion)

    run(main())


def test_slow_request_is_named_and_dropped(run, engine):
    async def main():
        with pytest.raises(StallError, match="hero did not finish a completion"):
            await engine.generate(PROMPTS[0], Sampling(max_tokens=200), timeout_s=0.02)
        await engine.generate(PROMPTS[0], Sampling(max_tokens=5))  # the drop was queued before it
        assert (await engine.info()).unfinished == 0

    run(main())


def test_invalid_updates_leave_the_engine_unchanged(run, store, engine, tiny_llama):
    async def main():
        before = tokens_and_logprobs(await answers(engine))
        version = (await engine.info()).version
        with pytest.raises(UnknownIdError, match="no weights 'hero' have been published"):
            await engine.load_weights()
        good = weights_of(tiny_llama)
        name = next(name for name in good if "down_proj" in name)
        publisher = Publisher(store.ref, "hero", dtype=torch.float32)
        await publisher.publish(1, {key: tensor for key, tensor in good.items() if key != name})
        with pytest.raises(ValueError, match=r"1 tensors are missing .*down_proj"):
            await engine.load_weights()
        await publisher.publish(2, {**good, name: good[name].t()})
        with pytest.raises(ValueError, match="has shape"):
            await engine.load_weights(2)
        assert tokens_and_logprobs(await answers(engine)) == before
        assert (await engine.info()).version == version

    run(main())


def test_request_in_flight_continues_with_new_weights(run, store, engine, tiny_models):
    new = tiny_models(family="llama", seed=1)
    sampling = Sampling(temperature=0.0, max_tokens=200)

    async def main():
        await Publisher(store.ref, "hero", dtype=torch.float32).publish(7, weights_of(new))
        old = (await engine.info()).version
        steps = (await engine.info()).steps
        running = asyncio.ensure_future(engine.generate(PROMPTS[0], sampling))
        while (await engine.info()).steps < steps + 20:  # noqa: ASYNC110  # the engine is another process
            await asyncio.sleep(0.001)
        timings = await engine.load_weights()
        assert timings["version"] == 7
        assert timings["bytes"] == sum(tensor.nbytes for tensor in weights_of(new).values())
        completion = await running
        first, second = completion.versions
        assert (first.version, second.version) == (old, 7)
        assert first.start == 0 < first.end == second.start < second.end == len(completion.token_ids)
        prefix = [*PROMPTS[0], *completion.token_ids[: first.end]]
        rest = await engine.generate(prefix, Sampling(temperature=0.0, max_tokens=second.end - second.start))
        assert rest.token_ids == completion.token_ids[first.end :]
        torch.testing.assert_close(rest.logprobs, completion.logprobs[first.end :], atol=1e-4, rtol=0)
        assert rest.versions == (VersionSpan(version=7, start=0, end=len(rest.token_ids)),)
        again = await engine.load_weights()
        assert again["bytes"] == 0

    run(main())


@pytest.mark.parametrize(
    ("family", "tied", "dtype"),
    [
        ("llama", True, "float32"),
        ("qwen3", True, "bfloat16"),
        ("qwen3_moe", True, "float32"),
        ("qwen2", False, "float32"),
        ("smollm3", True, "bfloat16"),
        ("mistral", False, "bfloat16"),
        ("phi3", False, "bfloat16"),
        ("gemma3", True, "bfloat16"),
        ("qwen3_5", True, "bfloat16"),
        ("qwen3_5_moe", False, "bfloat16"),
        ("gpt_oss", False, "bfloat16"),
        ("deepseek_v3", False, "bfloat16"),
        ("glm4_moe_lite", False, "float32"),
    ],
)
def test_updated_engine_equals_a_new_one(updates, fresh, tiny_models, *, family, tied, dtype):
    old, new = (tiny_models(family=family, tied=tied, dtype=dtype, seed=seed) for seed in (20, 21))
    before, after, restored = updates(old, new)
    assert before != fresh(new)
    assert after == fresh(new)
    assert restored == before
    for prompt, (tokens, logprobs) in zip(PROMPTS, fresh(new) if dtype == "float32" else (), strict=False):
        expected_T = reference_logprobs(new, prompt, tokens, Sampling())
        torch.testing.assert_close(torch.tensor(logprobs), expected_T, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "tied", "published"),
    [
        ("qwen3_5", True, True),
        ("qwen3_5_moe", False, True),
        ("gemma3", True, True),
        ("gemma3", True, False),
        ("gemma3", False, True),
    ],
)
def test_engine_serves_the_text_part_of_a_model_with_images(
    updates, fresh, tiny_models, tmp_path, *, family, tied, published
):
    texts = [tiny_models(family=family, tied=tied, dtype="bfloat16", seed=seed) for seed in (20, 21)]
    before, after, restored = updates(*(with_images(each, tmp_path / each.name, published=published) for each in texts))
    assert [before, after, restored] == [fresh(texts[0]), fresh(texts[1]), fresh(texts[0])]
    assert before != after


@pytest.mark.parametrize("published", [False, True])
def test_adapter_of_a_model_with_images_equals_that_of_its_text_part(
    run, bench, fresh, tiny_models, tmp_path, *, published
):
    text, lora = tiny_models(family="gemma3", seed=20), LoRA(rank=4)
    model = with_images(text, tmp_path / "model", published=published)
    rng = torch.Generator().manual_seed(0)
    shapes = sorted(adapter_shapes(str(text), lora).items())
    tensors = {name: 0.1 * torch.randn(shape, generator=rng) for name, shape in shapes}
    result = []
    for folder, prefix in ((text, "model.layers"), (model, "model.language_model.layers")):
        named = {name.replace("model.layers", prefix): tensor for name, tensor in tensors.items()}
        (adapter := tmp_path / prefix).mkdir()
        save_file(named, adapter / "adapter_model.safetensors")
        config = replace(small(folder), adapters={"a": lora}, adapter_folders={"a": str(adapter)})
        asking = bench.fresh.call_one(config, PROMPTS, 1)
        result.append(run(mesh.with_deadline(asking, 250, who="bench", what="answers")))
    assert result[0] == result[1] != fresh(text)


def test_engine_with_loaded_weights_equals_a_new_one(run, store, engine, fresh, tiny_models):
    new = tiny_models(family="llama", seed=22)

    async def main():
        learner = Publisher(store.ref, "hero", dtype=torch.float32)
        await learner.publish(30, weights_of(new))
        before = tokens_and_logprobs(await answers(engine))
        await engine.load_weights(30)
        await learner.publish(31, {name: torch.zeros_like(tensor) for name, tensor in weights_of(new).items()})
        after = await answers(engine)  # not of the pages, which hold the next version
        assert {span.version for completion in after for span in completion.versions} == {30}
        return before, tokens_and_logprobs(after)

    before, after = run(main())
    assert after == fresh(new) != before


def test_engine_start_imports_no_unused_library_and_collects_no_garbage(run, bench, tiny_llama):
    starting = bench.first_start.call_one(small(tiny_llama))
    visited, excluded, imported = run(mesh.with_deadline(starting, 250, who="bench", what="start"))
    assert imported == set()
    assert 0 < visited < excluded / 4  # objects of which a collection may have to visit all


def test_running_and_queued_requests_are_distinguished(run, bench, tiny_llama):
    config = replace(small(tiny_llama), max_num_seqs=2)
    asking = bench.at_work.call_one(config, 4, 5)
    working = run(mesh.with_deadline(asking, 250, who="bench", what="requests"))
    assert working == {"1": 5}


def test_two_ranks_are_one_engine_until_one_dies(run, store, engine, tiny_llama, tiny_models):
    """Equal to one rank before and after an update, in company and after a request that nobody waits for any more."""

    other = tiny_models(family="llama", seed=22)

    def alike(pair, alone):
        assert [one.token_ids for one in pair] == [one.token_ids for one in alone]
        for one, other in zip(pair, alone, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)

    async def main():
        pair = await EngineProcess.start(replace(small(tiny_llama), tp=2), name="pair", store=store.ref)
        await Publisher(store.ref, "hero", dtype=torch.float32).publish(31, weights_of(tiny_llama))
        await engine.load_weights(31)
        alike(await answers(pair), await answers(engine))
        drawn = [await each.generate([70, 71], Sampling(max_tokens=24), seed=5) for each in (pair, engine)]
        alike(drawn[:1], drawn[1:])
        chosen = await pair.generate([65], Sampling(max_tokens=20), choices=["yes", "no"])
        assert bytes(token for token in chosen.token_ids if token < 256) in (b"yes", b"no")
        with pytest.raises(ValueError, match="refused"):
            await pair.generate([65], Sampling(max_tokens=4), json_schema={"type": "nonsense"})
        with pytest.raises(StallError):
            await pair.generate([5], Sampling(temperature=0.0, max_tokens=200), timeout_s=0.02)
        version = 1
        await Publisher(store.ref, "pair", dtype=torch.float32).publish(version, weights_of(other))
        before = await answers(pair)
        timings = await pair.load_weights()
        assert timings["version"] == version
        after = await answers(pair)
        assert [one.token_ids for one in after] != [one.token_ids for one in before]
        assert {span.version for one in after for span in one.versions} == {version}
        await Publisher(store.ref, "pair", dtype=torch.float32).publish(2, weights_of(tiny_llama))
        await pair.load_weights()
        alike(await answers(pair), before)
        folder = mesh.log_folder("pair")
        assert folder is not None
        waiting = [asyncio.ensure_future(pair.generate([9], Sampling(max_tokens=240))) for _ in range(4)]
        await asyncio.sleep(0.05)
        os.kill(int((folder / "1.pid").read_text()), signal.SIGKILL)
        ends = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 120)
        assert all(isinstance(end, ActorDiedError) and "pair" in str(end) for end in ends)
        await pair.stop()

    run(main())


def test_unsupported_heads_are_refused_before_a_process_starts(run, tiny_llama, tiny_models):
    with pytest.raises(ValueError, match=r"tp=3 does not divide the 4 query and 2 key heads.*choose 1 or 2 or 4"):
        run(EngineProcess.start(replace(small(tiny_llama), tp=3), name="three"))
    with pytest.raises(ValueError, match=r"heads of 16 channels, and on CPU vLLM computes attention for 32, 48, 64"):
        run(EngineProcess.start(small(tiny_models(settings={"head_dim": 16})), name="narrow"))
    assert mesh.log_folder("three") is mesh.log_folder("narrow") is None


def test_incomplete_model_is_refused_before_a_process_starts(run, tiny_llama, tmp_path):
    broken = shutil.copytree(tiny_llama, tmp_path / "broken")
    whole = (broken / "model.safetensors").read_bytes()
    half = len(whole) // 2
    for size, message in ((half, f"half-written: {half} bytes arrived"), (100, "invalid header length")):
        (broken / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(ModelNotFoundError, match=message):
            run(EngineProcess.start(small(broken), name="broken"))
        assert mesh.log_folder("broken") is None


def test_killed_engine_fails_all_requests_before_their_timeout(run, engine):
    async def main():
        waiting = [
            asyncio.ensure_future(engine.generate([65, i], Sampling(max_tokens=240), timeout_s=900)) for i in range(40)
        ]
        await asyncio.sleep(0.05)
        os.kill(engine.initial_info.pid, signal.SIGKILL)
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)  # long before their own deadline
        deaths = [outcome for outcome in outcomes if isinstance(outcome, ActorDiedError)]
        assert len(deaths) > 20
        assert "hero died" in str(deaths[0])
        with pytest.raises(ActorDiedError, match="hero died"):
            await engine.generate(PROMPTS[0], GREEDY)
        await engine.stop()

    run(main())
