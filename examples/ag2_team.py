"""Two agents of AG2 are trained unchanged: a planner and a solver with a calculator, with a policy each.

Only the address of the models differs from any other team: the program receives it. Needs
``pip install 'ag2[openai]'``.

    python examples/ag2_team.py [--steps 20] [--model NAME] [--out runs/ag2]
"""

import _team
from ag2 import Agent, tool
from ag2.config import OpenAIConfig

import forge_agents as fa


def member(name, prompt, client, tools=()):
    config = OpenAIConfig(model=name, base_url=str(client.base_url), api_key=client.api_key)
    return Agent(name, prompt, config=config, tools=tools)


async def program(task, client):
    planner = member("planner", _team.PLANNER, client)
    solver = member("solver", _team.SOLVER, client, [tool(_team.multiply_and_add)])
    plan = await planner.ask(task["question"])
    return (await solver.ask(f"{task['question']}\nPlan: {plan.body}")).body


ENV = "my/Team-v0"
fa.register(ENV, entry_point=fa.Program, program=program, agents=_team.AGENTS, tasks=_team.tasks, reward=_team.right)

if __name__ == "__main__":
    _team.main(ENV, __doc__, "runs/ag2")
