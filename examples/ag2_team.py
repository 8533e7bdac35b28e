"""Two agents of AG2 are trained unchanged: a planner and a solver with a calculator, each with a policy.

Only the address of the models differs from any other team: the program receives it. Needs ``pip install ag2``.

    python examples/ag2_team.py [--steps 20] [--model NAME] [--out runs/ag2]
"""

import argparse
import re

from ag2 import Agent, tool
from ag2.config import OpenAIConfig

import forge_agents as fa


@tool
def multiply_and_add(a: int, b: int, c: int) -> int:
    """Work out a * b + c."""
    return a * b + c


def member(name, prompt, client, tools=()):
    config = OpenAIConfig(model=name, base_url=str(client.base_url), api_key=client.api_key)
    return Agent(name, prompt, config=config, tools=tools)


async def program(task, client):
    planner = member("planner", "Say in one line what has to be worked out.", client)
    solver = member("solver", "Use your tool, then answer with the number.", client, [multiply_and_add])
    plan = await planner.ask(task["question"])
    return (await solver.ask(f"{task['question']}\nPlan: {plan.body}")).body


def tasks(rng):
    a, b, c = (int(n) for n in rng.integers(2, 30, 3))
    return {"question": f"Anna has {a} boxes of {b} eggs and {c} more. How many eggs?", "answer": a * b + c}


def right(task, result):  # the last number of the answer
    return float(re.findall(r"\d+", result)[-1:] == [str(task["answer"])])


AGENTS = ("planner", "solver")
fa.register("my/Team-v0", entry_point=fa.Program, program=program, agents=AGENTS, tasks=tasks, reward=right)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", default="runs/ag2")
    args = parser.parse_args()
    team = {agent: fa.Policy(args.model, name=agent, lora=fa.LoRA()) for agent in AGENTS}
    with fa.GRPOTrainer(team, out_dir=args.out) as trainer:
        print(trainer.fit("my/Team-v0", steps=args.steps).curve)
