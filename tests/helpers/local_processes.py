"""Processes of a run as objects of the test's process: Transformers samples, and the learner has the real core."""

import asyncio
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from forge_agents.types import Completion, VersionSpan
from forge_trainers.learner.core import LearnerCore
from forge_trainers.learner.rates import with_rate
from forge_trainers.offline import trainer as offline
from forge_trainers.run import processes


class LocalLearner:
    """`Learner` without processes, on the same core. Publishes to the run's store."""

    name = "learner"

    def __init__(self, config, base=None, publisher=None):
        self.config, self.core = config, LearnerCore(config, base=base)
        self.busy_s, self.max_sample_tokens = 0.0, self.core.max_sample_tokens
        self.compute_dtype = self.core.config.compute_dtype
        self._publisher, self._dtype = publisher, getattr(torch, self.compute_dtype)

    @classmethod
    async def start_together(cls, plans, *, store=None, **_):
        learners = {}
        for name, plan in plans.items():
            base = next((learner.core for learner in learners.values()), None)
            dtype = getattr(torch, plan.dtype_on(cpu=True))
            publisher = None if store is None else store.publisher(name, dtype=dtype)
            learners[name] = cls(with_rate(replace(plan, threads=1)), base, publisher)
        return learners

    @property
    def version(self):
        return self.core.version

    async def lost(self):
        await asyncio.Event().wait()

    async def set_total_steps(self, total):
        self.core.set_total_steps(total)

    async def train_step(self, batch, *, temperature=None, **_):
        metrics = self.core.train_step(batch, temperature)
        self.busy_s += metrics["step_s"]
        return metrics

    async def logprobs(self, batch, **_):
        return self.core.logprobs(batch)

    async def publish(self, **_):
        await self._publisher.publish(self.version, partial(self.core.published, self._dtype))
        return self.version

    async def start_save(self, folder, **_):
        self.core.start_save(folder)

    async def finish_save(self, **_):
        return self.core.finish_save()

    async def load(self, folder, **_):
        return self.core.load(folder)

    async def export(self, folder, *, dtype=None, **_):
        self.core.export(folder, dtype)

    async def stop(self, **_):
        pass


class LocalEngine:
    """Samples a few tokens with the start model. Published weights change only the version that it reports."""

    max_tokens = 8
    on_device, answers, version = False, 0, 0
    pids, unfinished, busy_s = {}, {}, {"engine": 0.0}

    def __init__(self, folder, max_model_len):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.max_model_len = max_model_len

    async def generate(self, prompt_ids, sampling, *, seed=None, stop_token_ids=(), **_):
        room = min(sampling.max_tokens, self.max_tokens, self.max_model_len - len(prompt_ids))
        ends = {*stop_token_ids, self.model.config.eos_token_id}
        rng = torch.Generator().manual_seed(seed or 0)
        token_ids, logprobs, read, cache = [], [], list(prompt_ids), None
        while len(token_ids) < room and ends.isdisjoint(read if token_ids else ()):
            with torch.no_grad():
                output = self.model(torch.tensor([read]), past_key_values=cache, use_cache=True)
            logprobs_V = torch.log_softmax(output.logits[0, -1] / sampling.temperature, -1)
            read, cache = torch.multinomial(logprobs_V.exp(), 1, generator=rng).tolist(), output.past_key_values
            token_ids += read
            logprobs.append(float(logprobs_V[read[0]]))
        self.answers += 1
        return Completion(
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            finish_reason="length" if ends.isdisjoint(read) else "stop",
            versions=(VersionSpan(version=self.version, start=0, end=len(token_ids)),),
        )

    async def load_weights(self, version, **_):
        self.version = version
        return {}

    async def stop(self):
        pass


class Publisher:
    """Publishes nothing."""

    async def publish(self, version, tensors):
        pass


class LocalStore:
    """A weight store that holds nothing and lives as long as the run."""

    ref = SimpleNamespace(name="weights", publisher=lambda name, dtype: Publisher())

    def __init__(self):
        self.heartbeat = SimpleNamespace(error=None, lost=asyncio.Event().wait)

    @classmethod
    async def start(cls, **_):
        return cls()

    async def stop(self):
        pass


def use_local_learners(monkeypatch):
    """Let trainers start no processes of learners until the end of the test."""
    for module in (offline, processes):
        monkeypatch.setattr(module, "Learner", LocalLearner)


def use_local_processes(monkeypatch):
    """Let trainers start no processes until the end of the test."""

    async def start_engines(folders, plans, **_):
        return {name: LocalEngine(folder, plans[name].max_model_len) for name, folder in folders.items()}

    use_local_learners(monkeypatch)
    monkeypatch.setattr(processes, "WeightStore", LocalStore)
    monkeypatch.setattr(processes, "start_engines", start_engines)


def take_over(trainer, owner, *, local=True):
    """Give `trainer` the engines and the store of `owner`, and other learners, as if all had been started for it."""
    processes = owner._lifecycle.processes

    async def start_learners():
        await processes.fork(trainer.config, trainer.out_dir)
        with pytest.MonkeyPatch.context() as patched:
            if local:
                use_local_learners(patched)
            await processes.start_learners(processes.policies)

    share(trainer, owner)
    owner._loop.run(start_learners())


def share(trainer, owner):
    """Give `trainer` all processes of `owner`. The engines have the weights of the last trainer that had them."""
    trainer._loop, trainer._lifecycle.processes = owner._loop, owner._lifecycle.processes
    trainer._lifecycle.weights.is_current = False
