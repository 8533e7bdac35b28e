"""A LangGraph graph is trained unchanged: a planner and an agent with a calculator, each with a policy.

Only the address of the models is different from any other graph: the program receives it. Needs
``pip install 'forge-agents-rl[langgraph]'``.

    python examples/langgraph_team.py [--steps 20] [--model NAME] [--out runs/langgraph]
"""

import argparse
import re

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

import forge_agents as fa


def multiply_and_add(a: int, b: int, c: int) -> int:
    """Work out a * b + c."""
    return a * b + c


def graph(**address):
    planner, solver = (ChatOpenAI(model=name, **address) for name in ("planner", "solver"))

    async def plan(state):
        system_message = ("system", "Say in one line what has to be worked out.")
        return {"messages": [await planner.ainvoke([system_message, *state["messages"]])]}

    agent = create_agent(solver, [multiply_and_add], system_prompt="Use your tool, then answer with the number.")
    return StateGraph(MessagesState).add_sequence([("plan", plan), ("solve", agent)]).add_edge(START, "plan").compile()


async def program(task, client):
    result = await graph(base_url=str(client.base_url), api_key=client.api_key).ainvoke(
        {"messages": [task["question"]]}
    )
    return result["messages"][-1].text


def tasks(rng):
    a, b, c = (int(n) for n in rng.integers(2, 30, 3))
    return {"question": f"Anna has {a} boxes of {b} eggs and {c} more. How many eggs?", "answer": a * b + c}


def right(task, result):  # the last number of the answer
    return float(re.findall(r"\d+", result)[-1:] == [str(task["answer"])])


AGENTS = ("planner", "solver")
fa.register("my/Graph-v0", entry_point=fa.Program, program=program, agents=AGENTS, tasks=tasks, reward=right)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", default="runs/langgraph")
    args = parser.parse_args()
    team = {agent: fa.Policy(args.model, name=agent, lora=fa.LoRA()) for agent in AGENTS}
    with fa.GRPOTrainer(team, out_dir=args.out) as trainer:
        print(trainer.fit("my/Graph-v0", steps=args.steps).curve)
