"""Suites of environments as a task of Inspect (UK AISI): every role of every environment, on the seeds of ``bench``.

    inspect eval examples/inspect_suite.py@suite -T suite=core-v1 -T episodes=20 -T partner=random --model openai/gpt-4o
    inspect eval examples/inspect_suite.py@suite -T partner=self,random,openai/gpt-4o --model openai/gpt-4o,openai/o3
    inspect eval examples/inspect_suite.py@poker --model openai/gpt-4o
    inspect view

A sample is one episode in which the model plays one agent, and each agent in turn. ``partner`` plays the others:
``self`` is the model, ``random`` and ``oracle`` are players of this project, and other names are models of Inspect.
With several models and partners, every model meets every partner (cross-play). The score is the agent's reward, with
mean and standard error by environment and partner. The log has the model's conversation. Install Inspect next to this
project: ``pip install inspect-ai``.

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
from forge_agents.bench.game_tree import ILLEGAL
from forge_agents.bench.plan import seeds_of
from forge_agents.rollout.episode import play

PARTNERS = {"random": fa.Random(), "oracle": fa.Oracle()}


class Conversation:
    """The model as a player: the conversation of one agent."""

    def __init__(self, env, agent, model):
        self.env, self.agent, self.model, self.messages = env, agent, model, []

    async def answer(self, observation):
        if not self.messages and (instructions := getattr(self.env, "instructions", None)):
            self.messages.append(ChatMessageSystem(content=instructions(self.agent)))
        self.messages.append(ChatMessageUser(content=observation))
        output = await self.model.generate(self.messages)
        self.messages.append(output.message)
        return output.completion


@solver
def episode():
    async def solve(state, generate):
        facts = state.metadata
        env, partner = fa.make(facts["env"]), facts["partner"]
        chats, players = {}, dict.fromkeys(env.possible_agents, PARTNERS.get(partner))
        for agent in env.possible_agents:
            if agent == facts["agent"] or partner not in PARTNERS:
                model = get_model() if partner == "self" or agent == facts["agent"] else get_model(partner)
                chats[agent] = Conversation(env, agent, model)
                players[agent] = fa.Scripted(chats[agent].answer, name="model")
        try:
            played = await play(env, players, seed=facts["seed"], max_turns=env.spec.max_turns or 1000)
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
        grouped(mean(), "pairing"),
        grouped(by_seed, "pairing", name_template="stderr of {group_name}", all_label="stderr of all"),
    ]
)
def reward():
    async def score(state, target):
        return Score(value=state.metadata["reward"])

    return score


@task
def suite(suite="core-v1", episodes=8, partner="self"):
    """All roles and environments of a suite, with each partner (one name, or a list)."""
    partners = [partner] if isinstance(partner, str) else partner
    for name in partners:
        if name not in {"self", *PARTNERS} and "/" not in name:
            raise ValueError(
                f"partner={name!r} is unknown. Choose self, random, oracle or a model such as openai/gpt-4o"
            )
    samples = []
    for env in fa.suite(suite):
        made = fa.make(env)
        alone = len(made.possible_agents) == 1
        for name in partners[:1] if alone else partners:
            pairing = env if alone or len(partners) == 1 else f"{env} with {name}"
            for agent in made.possible_agents:
                for seed in seeds_of(0, episodes, env):
                    facts = {"env": env, "agent": agent, "seed": seed, "partner": name, "pairing": pairing}
                    text = f"Play {agent} of {pairing}."
                    samples.append(Sample(id=f"{pairing} {agent} {seed}", input=text, metadata=facts))
        made.close()
    return Task(dataset=samples, solver=episode(), scorer=reward())


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
