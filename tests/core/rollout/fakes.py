"""A game, engines and tokenizers that are easy to follow."""

import asyncio

import fake_models
from fake_models import Tokens

import forge_agents as fa
from forge_agents.models.tiny import _byte_vocab
from forge_agents.rollout.endpoint import client_of
from forge_agents.types import Completion, Message, VersionSpan

ASK = [Message(role="user", content="?")]


class Count(fa.TurnEnv):
    """Each of two agents answers with a number and earns it after the other has moved."""

    possible_agents = ["a", "b"]

    def setup(self, rng):
        self.numbers = []

    def instructions(self, agent):
        return f"You are {agent}."

    def observe_text(self, agent):
        return f"said {self.numbers}"

    def act(self, agent, action):
        self.numbers.append(int(action))
        return fa.Outcome(rewards={agent: float(action)}, done=len(self.numbers) == 4)


class Engine(Tokens):
    """An engine and a renderer: each answer is the token 7.

    Each request calls `on_request` with the sampling settings and the seed.
    """

    def __init__(self, max_model_len=1000, on_request=lambda sampling, seed: None, tokens=(7,)):
        self.max_model_len, self.on_request, self.tokens = max_model_len, on_request, tokens

    async def generate(self, prompt_ids, sampling, *, seed=None):
        self.on_request(sampling, seed)
        await asyncio.sleep(0)
        return fake_models.completion(*self.tokens, version=3)


class TextEngine:
    """An engine whose answers are texts with an end-of-turn token, one after another.

    `sampled` has all tokens with log-probabilities of which no two are equal, and `prompts` all prompts.
    """

    def __init__(self, tokenizer, texts=(), *, end=None, max_model_len=100_000):
        self.tokenizer, self.texts, self.max_model_len = tokenizer, list(texts), max_model_len
        self.end = tokenizer.eos_token if end is None else end
        self.sampled, self.prompts = [], []

    def next_text(self, prompt_ids):
        return self.texts[len(self.prompts)]

    def encode(self, text):
        return self.tokenizer.encode(text + self.end, add_special_tokens=False)

    async def generate(self, prompt_ids, sampling, **options):
        assert len(prompt_ids) + sampling.max_tokens <= self.max_model_len
        ids = tuple(self.encode(self.next_text(prompt_ids)))[: sampling.max_tokens]
        logprobs = tuple(-(len(self.sampled) + number + 1) / 1024 for number in range(len(ids)))
        self.prompts.append(prompt_ids)
        self.sampled += zip(ids, logprobs, strict=True)
        span = VersionSpan(version=len(self.prompts), start=0, end=len(ids))
        return Completion(token_ids=ids, logprobs=logprobs, finish_reason="stop", versions=(span,))


def trained_tokens(samples):
    """Id and log-probability of each token in the loss, in the order of sampling by a `TextEngine`."""
    columns = ((sample.token_ids[sample.loss_mask], sample.logprobs[sample.loss_mask]) for sample in samples)
    pairs = [pair for ids, logprobs in columns for pair in zip(ids.tolist(), logprobs.tolist(), strict=True)]
    return sorted(pairs, key=lambda pair: -pair[1])


def byte_tokenizer(special, plain, *, eos, template, bos=None):
    """A tokenizer of bytes and these control tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(vocab=_byte_vocab(), merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=eos, bos_token=bos, chat_template=template)


def ask_all(endpoint, times=1, **options):
    """The replies of an endpoint to `ASK`, all from one client."""

    async def run():
        client = await client_of(endpoint)
        return [await client.ask(ASK, endpoint.sampling, **options) for _ in range(times)]

    return asyncio.run(run())


def completion(content="3", **more):
    """The body of a chat completion."""
    return {"choices": [{"message": {"role": "assistant", "content": content}, **more}]}
