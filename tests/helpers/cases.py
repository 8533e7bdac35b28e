"""Two policies with adapters on one model, the environment that they learn, and what transformers says of them."""

import json
from dataclasses import replace

import torch
from safetensors.torch import load_file

import forge_agents as fa


class Letters(fa.TurnEnv):
    """Two agents in turn read a few letters. Each earns the share of lowercase letters in its text."""

    possible_agents = ["left", "right"]
    start_chars = 3

    def setup(self, rng):
        self.start = "".join(map(chr, rng.integers(97, 123, self.start_chars)))
        self.said = []

    def instructions(self, agent):
        return "abc"

    def observe_text(self, agent):
        return self.start

    def act(self, agent, action):
        self.said.append(action)
        done = len(self.said) == len(self.possible_agents)
        return fa.Outcome(rewards={agent: share(action)}, done=done)


class Cases(Letters):
    """One agent is paid for lowercase letters, the other for capitals."""

    possible_agents = ["low", "high"]

    def act(self, agent, action):
        outcome = super().act(agent, action)
        return outcome if agent == "low" else replace(outcome, rewards={agent: share(action, str.isupper)})


def share(text, expected=lambda letter: "a" <= letter <= "z"):
    """The share of characters that are as expected."""
    return sum(map(expected, text)) / max(len(text), 1)


def seats(model, lora):
    sampling = fa.Sampling(max_tokens=8)
    return {seat: fa.Policy(str(model), name=f"{seat}-hero", sampling=sampling, lora=lora) for seat in ("low", "high")}


def adapted(model, adapter):
    """transformers' model with an adapter in PEFT's layout added to its weights."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    weights = load_file(adapter / "adapter_model.safetensors")
    for name, a_RI in weights.items():
        if name.endswith(".lora_A.weight"):
            layer = hf.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            change = weights[name.replace("lora_A", "lora_B")] @ a_RI
            layer.weight.data += settings["lora_alpha"] / settings["r"] * change
    return hf


def greedy(hf, prompt, max_tokens=24):
    ids, logprobs = list(prompt), []
    for _ in range(max_tokens):
        with torch.no_grad():
            row = torch.log_softmax(hf(torch.tensor([ids])).logits[0, -1], dim=-1)
        ids.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return tuple(ids[len(prompt) :]), logprobs
