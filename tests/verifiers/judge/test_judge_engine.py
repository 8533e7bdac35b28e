"""Requests of a judge to a fake engine."""

import asyncio
import json
import math
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from transformers import AutoTokenizer

from forge_agents.errors import HostError
from forge_agents.policy import Endpoint
from forge_agents.runtime import mesh
from forge_agents.serving import EngineConfig, EngineProcess
from forge_agents.types import Completion
from forge_verifiers import Judge
from forge_verifiers.judge.clients import Conversation, EngineChat, Question

TEXTS = {1: "yes", 2: "no", 3: "The"}


class FakeEngine:
    """Prefers "The", but must answer "yes" if choices are given."""

    max_model_len = 100

    def __init__(self, free):
        self.free = free

    async def generate(self, prompt_ids, sampling, *, choices=(), json_schema=None, top_logprobs=0, timeout_s):
        shares = {1: 0.8, 2: 0.2} if choices else self.free
        logprobs = {token: math.log(share) for token, share in shares.items()}
        best = max(shares, key=shares.get)
        return Completion(
            token_ids=(best,), logprobs=(logprobs[best],), finish_reason="stop", versions=(), top_logprobs=(logprobs,)
        )


@pytest.mark.parametrize(
    ("free", "mass"), [({3: 1.0}, 0.0), ({3: 0.9, 1: 0.06, 2: 0.04}, 0.1), ({1: 0.9, 2: 0.1}, 1.0)]
)
def test_mass_of_the_choices_is_unconstrained(free, mass):
    chat = EngineChat("m", None, name="judge", timeout_s=1.0, start_timeout_s=1.0)
    chat._engine = FakeEngine(free)
    chat._renderer = SimpleNamespace(
        start=lambda *_: (9,),
        closing=lambda ids: (),
        answer=lambda text, cut: (),
        text=lambda ids: "".join(TEXTS[token] for token in ids),
    )
    question = Question(instructions="", text="?", choices=("yes", "no"), schema={}, max_tokens=4)
    reply = asyncio.run(chat.ask(question))
    assert reply.text == "yes" and reply.shares == {"yes": pytest.approx(0.8), "no": pytest.approx(0.2)}
    assert reply.mass == pytest.approx(mass)


@pytest.mark.parametrize(("context", "limits"), [(4000, [1840]), (400, [390, 395, 398])])
def test_answer_that_needs_more_tokens_than_characters_is_not_cut(context, limits):
    """A reason of 300 characters may have 1,800 tokens. If the context has no room for them, the text is shortened."""
    asked = []

    class Engine(FakeEngine):
        max_model_len = context

        async def generate(self, prompt_ids, sampling, **options):
            asked.append(sampling.max_tokens)
            reason = "length" if sampling.max_tokens < 396 else "stop"
            return Completion(token_ids=(2,), logprobs=(-0.5,), finish_reason=reason, versions=())

    chat = EngineChat("m", None, name="judge", timeout_s=1.0, start_timeout_s=1.0)
    chat._engine = Engine({})
    chat._renderer = SimpleNamespace(
        start=lambda instructions, text: (9,) * len(text),
        closing=lambda ids: (),
        answer=lambda text, cut: (),
        text=lambda ids: "".join(TEXTS[token] for token in ids),
    )
    chat.start = chat.stop = AsyncMock()
    question = Question(
        instructions="", text="x" * 10, choices=(), schema={}, max_tokens=340, token_limit=1840,
        shorter=lambda times: "x" * (10 >> times),
    )  # fmt: skip
    talk = Conversation(chat, name="judge", start_timeout_s=5.0)
    (reply,) = talk.ask([question])
    talk.close()
    assert reply.text == "no" and asked == limits


SWITCH = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"


@pytest.mark.parametrize(
    ("opening", "end"),
    [
        (SWITCH, "<think>\n\n</think>\n\n"),
        ("<think>\n", "<think>\n\n</think>\n\n"),
        ("{# <|channel|>analysis<|message|> #}", "<|channel|>final<|message|>"),
        ("", ""),
    ],
    ids=["switch", "always reasons", "gpt-oss", "never reasons"],
)
def test_models_that_reason_are_asked_for_the_answer_itself(opening, end, tiny_llama, tmp_path, monkeypatch):
    """Such a model would begin to reason, so that all choices would be unlikely and the judge would abstain."""
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    header = "<|im_start|>assistant\n"
    template = settings["chat_template"] + "{% if add_generation_prompt %}" + opening + "{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    prompts, engine = [], FakeEngine({1: 1.0})
    engine.max_model_len, generate = 10_000, engine.generate

    async def noted(prompt_ids, *args, **options):
        prompts.append(prompt_ids)
        return await generate(prompt_ids, *args, **options)

    async def start(*args, **options):
        return engine

    engine.generate = noted
    monkeypatch.setattr(EngineProcess, "start", start)
    chat = EngineChat(str(folder), None, name="judge", timeout_s=1.0, start_timeout_s=1.0)
    question = Question(instructions="Judge.", text="?", choices=("yes", "no"), schema={}, max_tokens=4)

    async def ask():
        await chat.start()
        await chat.ask(question)

    asyncio.run(ask())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(prompts) == 2 and {tokenizer.decode(ids).rpartition(header)[2] for ids in prompts} == {end}


def test_a_judge_has_one_engine():
    with pytest.raises(ValueError, match="replicas=2: a judge has one engine"):
        EngineChat("m", EngineConfig(replicas=2), name="judge", timeout_s=1.0, start_timeout_s=1.0)


def test_an_engine_starts_as_its_run_has_placed_it(monkeypatch):
    started = []

    async def start(config, **settings):
        started.append((config.gpu_memory_utilization, settings["name"], settings["role"]))

    monkeypatch.setattr(EngineProcess, "start", start)
    monkeypatch.setattr(mesh, "gpu_neighbors", lambda name, *_: [] if name == "judge-2" else ["hero"])
    judge = Judge("tiny-random", "Is it polite?", engine=EngineConfig(max_model_len=512))
    chat = judge.own_engine
    assert (chat.name, chat.model, chat.config.max_model_len) == ("judge", "tiny-random", 512)
    chat.place("judge-2", replace(chat.config, gpu_memory_utilization=0.3))
    asyncio.run(chat.start())
    chat.place("judge-2", chat.config)  # its GPU is its own
    asyncio.run(chat.start())
    assert started == [(0.3, "judge-2", "judges"), (None, "judge-2", "judges")]
    assert chat.config.gpu_memory_utilization is None  # another run may place it otherwise
    assert Judge(Endpoint("http://localhost", "m"), "Is it polite?").own_engine is None


def test_engine_that_needs_a_shared_gpu_raises(monkeypatch):
    monkeypatch.setattr(mesh, "gpu_neighbors", lambda *where: ["hero", "hero-learner"])
    chat = EngineChat("tiny-random", None, name="judge", timeout_s=1.0, start_timeout_s=1.0)
    with pytest.raises(HostError, match=r"would take 90% of a GPU .* hero, hero-learner.*gpus: {judges: 1}") as told:
        asyncio.run(chat.start())
    assert re.search(r"It needs \d\.\d GB at least \(weights .*one conversation of \d+ tokens", str(told.value))
