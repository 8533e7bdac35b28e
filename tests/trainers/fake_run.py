"""A run without processes that samples, learns and loads weights: fakes of engine, renderer and learner."""

import asyncio
import random

import fake_processes
from fake_models import Tokens
from plain_env import Plain

import forge_agents as fa
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.types import Completion, VersionSpan
from forge_trainers.rl.trainer import GRPOTrainer

TEAM = fa.Policy("m", name="team", sampling=fa.Sampling(max_tokens=4))


class Draws(Plain):
    """Two decisions. The reward is the sum of the digits and a random number."""

    def setup(self, rng):
        self.drawn, self.said = int(rng.integers(10)), 0

    def instructions(self, agent):
        return "Say a digit."

    def act(self, agent, action):
        self.said += 1
        return fa.Outcome(rewards={agent: float(action) + self.drawn / 10}, done=self.said == 2)


class Engine:
    """Samples a digit from the request's seed and the weight version, and counts concurrent requests."""

    max_model_len = 100

    def __init__(self):
        self.version = self.asking = self.most = 0

    async def generate(self, prompt_ids, sampling, *, choices=(), seed=None):
        self.asking += 1
        self.most = max(self.most, self.asking)
        version = self.version
        await asyncio.sleep(0.005)
        self.asking -= 1
        said = random.Random(f"{seed}/{version}").randrange(10)
        return Completion(
            token_ids=(said,),
            logprobs=(-1.0,),
            finish_reason="stop",
            versions=(VersionSpan(version=version, start=0, end=1),),
        )


class KillError(Exception):
    pass


class Learner(fake_processes.Learner):
    def __init__(self, dies_at):
        self.version, self.dies_at = 0, dies_at

    async def train_step(self, batch, **_):
        await asyncio.sleep(0.01)
        if self.version == self.dies_at:
            raise KillError
        self.version += 1
        return {"logprob_gap_mean": 0.0, "version": self.version}

    async def start_save(self, folder, **_):
        folder.mkdir()
        (folder / "version").write_text(str(self.version))

    async def load(self, folder, **_):
        self.version = int((folder / "version").read_text())


class Processes(fake_processes.Processes):
    def __init__(self, dies_at):
        super().__init__()
        self.learners, self.engine = {"team": Learner(dies_at)}, Engine()
        self.policy_engines = {"team": PolicyEngine(self.engine, Tokens())}

    async def sync(self, published):
        published()
        await asyncio.sleep(0.005)
        self.engine.version = self.learners["team"].version


def trainer(folder, *, dies_at=None, reward=None, policies=TEAM, **settings):
    own = {"group_size": 3, "groups_per_step": 2, "max_resamples": 0, "eval_episodes": 5, "preflight": False}
    made = GRPOTrainer(policies, reward, fa.GRPOConfig(**own | settings), folder)
    made._lifecycle.processes = Processes(dies_at)
    return made
