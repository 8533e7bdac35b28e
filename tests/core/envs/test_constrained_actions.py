import asyncio

import pytest
from fake_models import Tokens, completion
from plain_env import Plain

import forge_agents as fa
from forge_agents.envs.env import listed_actions
from forge_agents.rollout.episode import play
from forge_agents.rollout.policy_engine import PolicyEngine


class Listed(Plain):
    """Lists its legal actions in the first turn only."""

    def setup(self, rng):
        self.turns = 0

    def legal_actions(self, agent):
        return ["left", "right"] if self.turns == 0 else None

    def act(self, agent, action):
        self.turns += 1
        return fa.Outcome(done=self.turns == 2)


class Engine:
    max_model_len = 100

    def __init__(self):
        self.asked = []

    async def generate(self, prompt_ids, sampling, *, choices=()):
        self.asked.append(choices)
        return completion(7)


class Left(Tokens):
    def text(self, response_ids):  # a choice is an answer whole, whatever the template has opened
        return "left"


def asked(policy):
    engine = Engine()
    served = {policy.name: PolicyEngine(engine, Left())}
    episode = asyncio.run(play(Listed(), {"a": policy}, seed=0, engines=served))
    assert episode.error is None
    return engine.asked


def test_constrained_policy_requests_listed_legal_actions():
    assert asked(fa.Policy("m", trainable=False, constrain_actions=True)) == [("left", "right"), ()]
    assert asked(fa.Policy("m")) == [(), ()]


def test_a_constrained_policy_cannot_be_trained(tmp_path):
    with pytest.raises(ValueError, match="'policy' is trainable and constrains its actions.*constrained distribution"):
        fa.GRPOTrainer(fa.Policy("m", constrain_actions=True), None, fa.GRPOConfig(), tmp_path)


def test_legal_actions_in_an_info_are_no_text():
    assert listed_actions({"legal_actions": ["go", "stay"]}) == ("go", "stay") and listed_actions({}) == ()
    with pytest.raises(TypeError, match="has the text 'go' as its legal_actions. Give a list of texts"):
        listed_actions({"legal_actions": "go"})
