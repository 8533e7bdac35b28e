"""Two policies with adapters on one model, the environment that they learn, and what transformers says of them."""

import json

import torch
from safetensors.torch import load_file

import forge_agents as fa


class Cases(fa.TurnEnv):
    """Two seats in turn: one is paid for lowercase letters, the other for capitals."""

    possible_agents = ["low", "high"]

    def setup(self, rng):
        self.start = "".join(map(chr, rng.integers(97, 123, 3)))
        self.turn = 0

    def instructions(self, agent):
        return "abc"

    def observe_text(self, agent):
        return self.start

    def act(self, agent, action):
        expected = str.islower if agent == "low" else str.isupper
        self.turn += 1
        share = sum(map(expected, action)) / max(len(action), 1)
        return fa.Outcome(rewards={agent: share}, done=self.turn == 2)


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
