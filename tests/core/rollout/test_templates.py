"""Chat templates as models are published with them, which TRL brings along, on tokenizers with their control tokens."""

import asyncio
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import forge_agents as fa
from forge_agents.models.tiny import _byte_vocab
from forge_agents.rollout.conversation import ASK_FOR_NOTES
from forge_agents.rollout.episode import play
from forge_agents.rollout.players import PolicyEngine
from forge_agents.rollout.rendering import Renderer
from forge_agents.types import Completion, VersionSpan
from forge_trainers.batch.packing import samples_from

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
"""What a model of the family writes at the end of its turn."""
EOS = {**dict.fromkeys(("phi3", "phi3_5", "glm4moe"), "<|endoftext|>"), **dict.fromkeys(("gemma", "gemma3"), "<eos>")}
"""What the tokenizer calls the end, where that is another token."""
CONTROL = re.compile(r"<\|\w+\|>|<\uff5c[^\uff5c>]+\uff5c>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>")


def tokenizer_of(name):
    """Bytes, and the control tokens of a template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    template = (TEMPLATES / f"{name}.jinja").read_text()
    eos = EOS.get(name) or CONTROL.findall(ENDS[name])[-1]
    special = sorted({*CONTROL.findall(template), *CONTROL.findall(ENDS[name]), eos, "<s>"})
    made = Tokenizer(models.BPE(vocab=_byte_vocab(), merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=eos, bos_token="<s>", chat_template=template)


@pytest.fixture(scope="module", params=ENDS)
def family(request):
    return request.param, tokenizer_of(request.param)


def test_answer_and_end_token_are_separated(family):
    name, tokenizer = family
    renderer, end = Renderer(tokenizer), ENDS[name]
    prompt = renderer.start("Be brief.", "one")
    assert renderer.reads(prompt, "Be brief.") and renderer.reads(prompt, "one")
    said, ended = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("two", f"two{end}"))
    assert renderer.text(ended[: len(said) + 1]) == renderer.text(said) == "two"
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


def test_engine_receives_end_tokens_of_the_template(family):
    name, tokenizer = family
    told = []

    class Records(Says):
        async def generate(self, prompt_ids, sampling, *, stop_token_ids=(), **asked):
            told.append(tuple(stop_token_ids))
            return await super().generate(prompt_ids, sampling, **asked)

    renderer = Renderer(tokenizer)
    served = {"policy": PolicyEngine(Records(renderer, ENDS[name]), renderer)}
    policy = fa.Policy("m", sampling=fa.Sampling(max_tokens=110))
    asyncio.run(play(Long(), {"a": policy}, seed=0, engines=served, max_turns=2))
    end_id = tokenizer.encode(ENDS[name], add_special_tokens=False)[-1]
    assert told and set(told) == {() if end_id == tokenizer.eos_token_id else (end_id,)}


class Says:
    """An engine that thinks every other time, and has room for a few turns behind a first prompt."""

    def __init__(self, renderer, end):
        self.renderer, self.end, self.sampled, self.prompts = renderer, renderer._encode(end), [], []
        self.max_model_len = 3 * len(renderer.start("Be brief.", "")) // 2 + 850

    async def generate(self, prompt_ids, sampling, **asked):
        assert len(prompt_ids) + sampling.max_tokens <= self.max_model_len
        thought = "<think>\nhidden\n</think>\n\n" if len(self.prompts) % 2 else ""
        asked = self.renderer.reads(prompt_ids[-400:], ASK_FOR_NOTES)
        text = "notes" if asked else f"{thought}{'word ' * 9}{len(self.prompts)}"
        ids = (*self.renderer.answer(text, cut=True), *self.end)[: sampling.max_tokens]
        self.prompts.append(prompt_ids)
        first = len(self.sampled)
        self.sampled += [(token, -(first + n + 1) / 1024) for n, token in enumerate(ids)]
        return Completion(
            token_ids=ids, logprobs=tuple(logprob for _, logprob in self.sampled[first:]), finish_reason="stop",
            versions=(VersionSpan(version=0, start=0, end=len(ids)),),
        )  # fmt: skip


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
    engine = Says(renderer, ENDS[name])
    policy = fa.Policy("m", keep_reasoning=keep_reasoning, context=context, sampling=fa.Sampling(max_tokens=110))
    served = {"policy": PolicyEngine(engine, renderer)}
    episode = asyncio.run(play(Long(), {"a": policy}, seed=0, engines=served))
    assert episode.error is None and episode.end_reason == ("context" if context == "end" else "terminated")
    turns = episode.trajectories["a"].turns
    assert all(turn.action.startswith("word") and "hidden" not in turn.action for turn in turns[:-1])
    assert all(turn.compaction is None for turn in turns) == (context == "end")
    samples = samples_from(episode.trajectories["a"], [1.0] * len(turns), 0)
    trained = [
        (int(token), float(logprob))
        for sample in samples
        for token, logprob in zip(sample.token_ids[sample.loss_mask], sample.logprobs[sample.loss_mask], strict=True)
    ]
    assert sorted(trained, key=lambda pair: -pair[1]) == engine.sampled
    for prompt, part in zip(engine.prompts, [part for turn in turns for part in turn.parts], strict=True):
        read = [*prompt, *part.response_ids]
        assert any(list(sample.token_ids[: len(read)]) == read for sample in samples)
