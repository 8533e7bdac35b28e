"""A crew of CrewAI is trained unchanged: a planner and a solver with a calculator, with a policy each.

Only the address of the models differs from any other crew: the program receives it. Needs ``pip install crewai``.

    python examples/crewai_team.py [--steps 20] [--model NAME] [--out runs/crewai]
"""

import _team
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

import forge_agents as fa


def member(role, goal, client, tools=()):
    llm = LLM(model=f"openai/{role}", base_url=str(client.base_url), api_key=client.api_key)
    return Agent(role=role, goal=goal, backstory="You are brief.", llm=llm, tools=list(tools))


def program(task, client):
    planner = member("planner", _team.PLANNER, client)
    solver = member("solver", _team.SOLVER, client, [tool(_team.multiply_and_add)])
    plan = Task(description=task["question"], expected_output="a line", agent=planner)
    solve = Task(description=task["question"], expected_output="a number", agent=solver)
    return Crew(agents=[planner, solver], tasks=[plan, solve]).kickoff().raw


ENV = "my/Crew-v0"
fa.register(ENV, entry_point=fa.Program, program=program, agents=_team.AGENTS, tasks=_team.tasks, reward=_team.right)

if __name__ == "__main__":
    _team.main(ENV, __doc__, "runs/crewai")
