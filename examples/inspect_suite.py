"""Suites of environments as a task of Inspect (UK AISI): every role of every environment, on the seeds of ``bench``.

    inspect eval examples/inspect_suite.py@suite -T suite=core-v1 -T episodes=20 -T partner=random --model openai/gpt-4o
    inspect eval examples/inspect_suite.py@poker --model openai/gpt-4o
    inspect view

A sample is one episode in which the model plays one agent. ``partner`` plays the others: ``self`` is the model, and
``random`` and ``oracle`` are players of this project. The score is the agent's reward, with mean and standard error by
environment. The log has the model's conversation. Install Inspect next to this project: ``pip install inspect-ai``.

The second task measures how much the best opponent wins from the model. The task asks for 20 answers in every situation
of the game: 12 situations in Kuhn poker, and 288 in Leduc poker, ``-T env=forge/LeducPoker-v0``.
"""

import functools

from inspect_ai import Epochs, Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageUser, get_model
from inspect_ai.scorer import SampleScore, Score, grouped, mean, metric, scorer, stderr
from inspect_ai.solver import generate, solver

import forge_agents as fa
from forge_agents.bench import GameTree, actions_of, exploitability
from forge_agents.bench.exploitability import ILLEGAL
from forge_agents.bench.plan import seeds_of
from forge_agents.rollout.episode import play

PARTNERS = {"random": fa.Random(), "oracle": fa.Oracle()}


class Conversation:
    """The model as a player: the conversation of one agent."""

    def __init__(self, env, agent):
        self.env, self.agent, self.messages = env, agent, []

    async def answer(self, observation):
        if not self.messages and (instructions := getattr(self.env, "instructions", None)):
            self.messages.append(ChatMessageSystem(content=instructions(self.agent)))
        self.messages.append(ChatMessageUser(content=observation))
        output = await get_model().generate(self.messages)
        self.messages.append(output.message)
        return output.completion


@solver
def episode(partner):
    async def solve(state, generate):
        facts = state.metadata
        env = fa.make(facts["env"])
        models = env.possible_agents if partner == "self" else [facts["agent"]]
        chats = {agent: Conversation(env, agent) for agent in models}
        players = {agent: fa.Scripted(chat.answer, name="model") for agent, chat in chats.items()}
        others = {agent: PARTNERS[partner] for agent in env.possible_agents if agent not in chats}
        try:
            played = await play(env, players | others, seed=facts["seed"], max_turns=env.spec.max_turns or 1000)
        finally:
            env.close()
        state.messages = chats[facts["agent"]].messages
        if played.error is not None:  # an error of the sample: a model that fails before it loses has no score
            raise RuntimeError(f"the episode failed in {played.error.where}: {played.error.message}")
        state.metadata["reward"] = played.rewards.get(facts["agent"], 0.0)
        return state

    return solve


by_seed = stderr(cluster="seed")  # the roles of one seed are not independent


@scorer(
    metrics=[
        grouped(mean(), "env"),
        grouped(by_seed, "env", name_template="stderr of {group_name}", all_label="stderr of all"),
    ]
)
def reward():
    async def score(state, target):
        return Score(value=state.metadata["reward"])

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
    return Task(dataset=samples, solver=episode(partner), scorer=reward())


# ---- exploitability

game_tree = functools.cache(GameTree)


@metric(name="exploitability")
def exploited(env):
    """Mean winnings of the best opponents. Illegal answers cost what they cost in the game."""

    def compute(scores: list[SampleScore]):  # Inspect reads the annotation
        game, rows = game_tree(env), {score.sample_id: score.score.value for score in scores}
        if len(rows) < len(game.info_sets):
            return float("nan")  # --limit left out situations
        table = {}
        for number, info_set in enumerate(game.info_sets):
            table[info_set] = {**rows[number], ILLEGAL: max(0.0, 1 - sum(rows[number].values()))}
        return exploitability(game, table)

    return compute


@metric
def illegal():
    """Fraction of answers that are no legal action."""

    def compute(scores: list[SampleScore]):
        return 1 - sum(sum(score.score.value.values()) for score in scores) / len(scores)

    return compute


def choice(env):
    """The legal action that the answer means: 1 for it and 0 for the others."""

    @scorer(metrics=[exploited(env), illegal()])
    def chosen():
        async def score(state, target):
            info_set = list(game_tree(env).info_sets)[state.sample_id]
            (action,) = actions_of(game_tree(env), info_set, [("", state.output.completion)])
            return Score(value={move: float(move == action) for move in info_set.legal}, answer=action)

        return score

    return chosen()


@task
def poker(env="forge/KuhnPoker-v0", answers=20):
    """All situations of a game that lists its openings."""
    game, samples = game_tree(env), []
    for number, info_set in enumerate(game.info_sets):
        messages = [ChatMessageSystem(content=game.instructions[info_set.agent])]
        for observation, move in info_set.past:
            messages += [ChatMessageUser(content=observation), ChatMessageAssistant(content=move)]
        samples.append(Sample(id=number, input=[*messages, ChatMessageUser(content=info_set.observation)]))
    return Task(dataset=samples, solver=generate(), scorer=choice(env), epochs=Epochs(answers, "mean"))
