"""Chat templates as models are published with them, which TRL brings along, on tokenizers with their control tokens."""

import asyncio
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import forge_agents as fa
from forge_agents.rollout.conversation import ASK_FOR_NOTES
from forge_agents.rollout.episode import play
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.rollout.rendering import Renderer
from forge_trainers.batch.packing import samples_from

from .fakes import TextEngine, byte_tokenizer, trained_tokens  # noqa: TID252 (tests are no installed package)

found = find_spec("trl")
if found is None:
    pytest.skip("trl comes with the development packages", allow_module_level=True)
TEMPLATES = Path(found.submodule_search_locations[0], "chat_templates")

CHATML, LLAMA, PHI, GEMMA = "<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>"
DEEPSEEK, COHERE = "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|END_OF_TURN_TOKEN|>"
ENDS = {
    "qwen2_5": CHATML, "qwen3": CHATML, "qwen3_instruct_2507": CHATML, "qwen3_5_nothink": CHATML,
    "qwen3_5_think": CHATML, "qwen3_8": CHATML, "lfm2": CHATML, "nemotron_3_nano": CHATML,
    "llama3": LLAMA, "llama3_1": LLAMA, "llama3_2": LLAMA, "phi3": PHI, "phi3_5": PHI, "gemma": GEMMA,
    "gemma3": GEMMA, "deepseekv3": DEEPSEEK, "deepseek_r1_distill": DEEPSEEK, "cohere": COHERE,
    "cohere2": "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "glm4moe": "<|user|>", "gptoss": "<|return|>",
}  # fmt: skip
"""Token that ends a turn of the family's models."""
EOS = {**dict.fromkeys(("phi3", "phi3_5", "glm4moe"), "<|endoftext|>"), **dict.fromkeys(("gemma", "gemma3"), "<eos>")}
"""End token of the tokenizer if it differs."""
CONTROL = re.compile(r"<\|\w+\|>|<\uff5c[^\uff5c>]+\uff5c>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>")


def tokenizer_of(name):
    template = (TEMPLATES / f"{name}.jinja").read_text()
    eos = EOS.get(name) or CONTROL.findall(ENDS[name])[-1]
    special = sorted({*CONTROL.findall(template), *CONTROL.findall(ENDS[name]), eos, "<s>"})
    return byte_tokenizer(special, ("<think>", "</think>"), eos=eos, template=template, bos="<s>")


@pytest.fixture(scope="module", params=ENDS)
def family(request):
    return request.param, tokenizer_of(request.param)


def test_answer_and_end_token_are_separated(family):
    name, tokenizer = family
    renderer, end = Renderer(tokenizer), ENDS[name]
    prompt = renderer.start("Be brief.", "one")
    assert renderer.reads(prompt, "Be brief.") and renderer.reads(prompt, "one")
    said, ended = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("two", f"two{end}"))
    assert renderer.text(ended) == renderer.text(ended[: len(said) + 1]) == renderer.text(said) == "two"
    longer = renderer.extend(prompt, ended, "three")
    assert longer[: len(prompt) + len(ended)] == (*prompt, *ended)
    broken_off = tokenizer.decode(renderer.extend(prompt, said, "three"))
    text = tokenizer.decode(longer)
    if name == "gptoss":  # its template writes another token in the place of the one that models end with
        assert text == broken_off.replace("two<|end|>", "two<|return|>")
    else:
        assert text == broken_off, "the template adds what the model did not write, and nothing twice"


def test_written_answer_ends_as_the_familys_turns(family):
    name, tokenizer = family
    renderer, end = Renderer(tokenizer), ENDS[name]
    assert tokenizer.decode(renderer.answer("two")).endswith(f"two{end}")
    assert tokenizer.decode(renderer.answer("two", cut=True)).endswith("two")


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"


@pytest.mark.parametrize("text", ["<think>hm</think>two", f"{ANALYSIS}hm<|end|><|start|>assistant{FINAL}two"])
def test_answers_that_were_not_sampled_have_the_channels_of_gpt_oss(text):
    tokenizer = tokenizer_of("gptoss")
    renderer = Renderer(tokenizer)
    headers = f"{ANALYSIS}hm<|end|><|start|>assistant{FINAL}"
    assert tokenizer.decode(renderer.answer(text)) == f"{headers}two<|return|>"
    assert renderer.parse(renderer.answer(text)) == ("hm", "two")
    assert tokenizer.decode(renderer.answer("two")) == f"{FINAL}two<|return|>"
    assert tokenizer.decode(renderer.answer("<think>hm", cut=True)) == f"{ANALYSIS}hm"
    prompt, answer = renderer.start("", "one"), renderer.answer("two")
    answered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}], tokenize=False
    )
    assert tokenizer.decode((*prompt, *answer)) == answered


def test_effort_of_reasoning_is_set_where_the_template_has_it():
    tokenizer = tokenizer_of("gptoss")
    for effort in ("low", "medium", "high"):
        prompt = tokenizer.decode(Renderer(tokenizer, thinking=effort).start("", "one"))
        assert f"Reasoning: {effort}\n" in prompt
    assert "effort is set to low" in tokenizer.decode(Renderer(tokenizer_of("qwen3_8"), thinking="low").start("", "1"))
    with pytest.raises(ValueError, match=r"Unexpected reasoning effort high\. Supported types are xhigh"):
        Renderer(tokenizer_of("qwen3_8"), thinking="high")
    with pytest.raises(ValueError, match=r"thinking='low', .* no switch for it \(reasoning_effort\)"):
        Renderer(tokenizer_of("qwen3"), thinking="low")


def test_reasoning_that_was_not_sampled_has_the_tags_of_the_template():
    tokenizer = tokenizer_of("qwen2_5")
    for template_tag, expected in (("[THINK]", "[THINK]\nhm\n[/THINK]\n\ntwo"), ("<think>", "<think>hm</think>two")):
        tokenizer.chat_template = f"{{% set tag = '{template_tag}' %}}{TEMPLATES.joinpath('qwen2_5.jinja').read_text()}"
        assert tokenizer.decode(Renderer(tokenizer).answer("<think>hm</think>two")) == f"{expected}<|im_end|>"
        assert tokenizer.decode(Renderer(tokenizer).answer("two")) == "two<|im_end|>"


def test_engine_receives_end_tokens_of_the_template(family):
    name, tokenizer = family
    told = []

    class Records(Thinking):
        async def generate(self, prompt_ids, sampling, *, stop_token_ids=(), **asked):
            told.append(tuple(stop_token_ids))
            return await super().generate(prompt_ids, sampling, **asked)

    renderer = Renderer(tokenizer)
    served = {"policy": PolicyEngine(Records(renderer, ENDS[name]), renderer)}
    policy = fa.Policy("m", sampling=fa.Sampling(max_tokens=110))
    asyncio.run(play(Long(), {"a": policy}, seed=0, engines=served, max_turns=2))
    end_id = tokenizer.encode(ENDS[name], add_special_tokens=False)[-1]
    assert told and set(told) == {() if end_id == tokenizer.eos_token_id else (end_id,)}


class Thinking(TextEngine):
    """An engine that reasons in every other answer, and has room for a few turns after a first prompt."""

    def __init__(self, renderer, end):
        room = 3 * len(renderer.start("Be brief.", "")) // 2 + 850
        super().__init__(renderer._tokenizer, end=end, max_model_len=room)
        self.renderer = renderer

    def next_text(self, prompt_ids):
        reasoning = "<think>\nhidden\n</think>\n\n" if len(self.prompts) % 2 else ""
        wants_notes = self.renderer.reads(prompt_ids[-400:], ASK_FOR_NOTES)
        return "notes" if wants_notes else f"{reasoning}{'word ' * 9}{len(self.prompts)}"

    def encode(self, text):
        return (*self.renderer.answer(text, cut=True), *self.renderer._encode(self.end))


class Long(fa.TurnEnv):
    possible_agents = ("a",)

    def setup(self, rng):
        self.at = 0

    def instructions(self, agent):
        return "Be brief."

    def observe_text(self, agent):
        return f"<{self.at}>" + "." * 60

    def act(self, agent, action):
        self.at += 1
        return fa.Outcome(done=self.at == 16)


@pytest.mark.parametrize(
    ("keep_reasoning", "context"), [("all", "end"), ("all", "summarize"), ("turn", "window"), ("none", "summarize")]
)
def test_each_sampled_token_is_trained_once_after_its_prompt(family, keep_reasoning, context):
    name, tokenizer = family
    renderer = Renderer(tokenizer)
    engine = Thinking(renderer, ENDS[name])
    policy = fa.Policy("m", keep_reasoning=keep_reasoning, context=context, sampling=fa.Sampling(max_tokens=110))
    served = {"policy": PolicyEngine(engine, renderer)}
    episode = asyncio.run(play(Long(), {"a": policy}, seed=0, engines=served))
    assert episode.error is None and episode.end_reason == ("context" if context == "end" else "terminated")
    turns = episode.trajectories["a"].turns
    assert all(turn.action.startswith("word") and "hidden" not in turn.action for turn in turns[:-1])
    assert all(turn.compaction is None for turn in turns) == (context == "end")
    samples = samples_from(episode.trajectories["a"], [1.0] * len(turns), 0)
    assert trained_tokens(samples) == engine.sampled
    for prompt, part in zip(engine.prompts, [part for turn in turns for part in turn.parts], strict=True):
        read = [*prompt, *part.response_ids]
        assert any(list(sample.token_ids[: len(read)]) == read for sample in samples)
