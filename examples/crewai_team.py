"""A crew of CrewAI is trained unchanged: a planner and a solver with a calculator, each with a policy.

Only the address of the models differs from any other crew: the program receives it. Needs ``pip install crewai``.

    python examples/crewai_team.py [--steps 20] [--model NAME] [--out runs/crewai]
"""

import argparse
import re

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

import forge_agents as fa


@tool
def multiply_and_add(a: int, b: int, c: int) -> int:
    """Work out a * b + c."""
    return a * b + c


def member(role, goal, client, tools=()):
    llm = LLM(model=f"openai/{role}", base_url=str(client.base_url), api_key=client.api_key)
    return Agent(role=role, goal=goal, backstory="You are brief.", llm=llm, tools=list(tools))


def program(task, client):
    planner = member("planner", "Say in one line what has to be worked out.", client)
    solver = member("solver", "Use your tool, then answer with the number.", client, [multiply_and_add])
    plan = Task(description=task["question"], expected_output="a line", agent=planner)
    solve = Task(description=task["question"], expected_output="a number", agent=solver)
    return Crew(agents=[planner, solver], tasks=[plan, solve]).kickoff().raw


def tasks(rng):
    a, b, c = (int(n) for n in rng.integers(2, 30, 3))
    return {"question": f"Anna has {a} boxes of {b} eggs and {c} more. How many eggs?", "answer": a * b + c}


def right(task, result):  # the last number of the answer
    return float(re.findall(r"\d+", result)[-1:] == [str(task["answer"])])


AGENTS = ("planner", "solver")
fa.register("my/Crew-v0", entry_point=fa.Program, program=program, agents=AGENTS, tasks=tasks, reward=right)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", default="runs/crewai")
    args = parser.parse_args()
    team = {agent: fa.Policy(args.model, name=agent, lora=fa.LoRA()) for agent in AGENTS}
    with fa.GRPOTrainer(team, out_dir=args.out) as trainer:
        print(trainer.fit("my/Crew-v0", steps=args.steps).curve)
