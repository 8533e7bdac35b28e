"""Suites of environments as a task of Inspect (UK AISI): every role of every environment, on the seeds of ``bench``.

    inspect eval examples/inspect_suite.py -T suite=core-v1 -T episodes=20 -T partner=random --model openai/gpt-4o
    inspect view

A sample is one episode in which the model plays one agent. ``partner`` plays the others: ``self`` is the model, and
``random`` and ``oracle`` are players of this project. The score is the agent's reward, with mean and standard error by
environment. The log has the model's conversation. Install Inspect next to this project: ``pip install inspect-ai``.
"""

import asyncio

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageSystem, ChatMessageUser, get_model
from inspect_ai.scorer import Score, grouped, mean, scorer, stderr
from inspect_ai.solver import solver

import forge_agents as fa
from forge_agents.bench.plan import seeds_of

PARTNERS = {"random": fa.Random(), "oracle": fa.Oracle()}


class Conversation:
    """The model as a player: the conversation of one agent, continued from a thread."""

    def __init__(self, env, agent, loop):
        self.env, self.agent, self.loop, self.messages = env, agent, loop, []

    def __call__(self, observation):
        if not self.messages and (instructions := getattr(self.env, "instructions", None)):
            self.messages.append(ChatMessageSystem(content=instructions(self.agent)))
        self.messages.append(ChatMessageUser(content=observation))
        output = asyncio.run_coroutine_threadsafe(get_model().generate(self.messages), self.loop).result()
        self.messages.append(output.message)
        return output.completion


@solver
def play(partner):
    async def solve(state, generate):
        facts = state.metadata
        env = fa.make(facts["env"])
        loop, seats = asyncio.get_running_loop(), {}
        for agent in env.possible_agents:
            model = agent == facts["agent"] or partner == "self"
            seats[agent] = Conversation(env, agent, loop) if model else PARTNERS[partner]
        players = {a: fa.Scripted(p, name="model") if isinstance(p, Conversation) else p for a, p in seats.items()}
        try:
            episode = await asyncio.to_thread(fa.play, env, players, seed=facts["seed"])
        finally:
            env.close()
        state.messages = seats[facts["agent"]].messages
        state.metadata |= {"reward": episode.rewards.get(facts["agent"], 0.0), "error": str(episode.error or "")}
        return state

    return solve


@scorer(metrics=[grouped(mean(), "env"), grouped(stderr(), "env", name_template="stderr of {group_name}")])
def reward():
    async def score(state, target):
        return Score(value=state.metadata["reward"], explanation=state.metadata["error"])

    return score


@task
def suite(suite="core-v1", episodes=8, partner="self"):
    """All roles and environments of a suite."""
    if partner not in {"self", *PARTNERS}:
        raise ValueError(f"partner={partner!r} is unknown. Choose self, random or oracle")
    samples = []
    for env in fa.suite(suite):
        made = fa.make(env)
        for agent in made.possible_agents:
            for seed in seeds_of(0, episodes, env):
                facts = {"env": env, "agent": agent, "seed": seed}
                samples.append(Sample(id=f"{env} {agent} {seed}", input=f"Play {agent} of {env}.", metadata=facts))
        made.close()
    return Task(dataset=samples, solver=play(partner), scorer=reward())
