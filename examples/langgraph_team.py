"""A LangGraph graph is trained unchanged: a planner and an agent with a calculator, with a policy each.

Only the address of the models is different from any other graph: the program receives it. Needs
``pip install 'forge-agents-rl[langgraph]'``.

    python examples/langgraph_team.py [--steps 20] [--model NAME] [--out runs/langgraph]
"""

import _team
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

import forge_agents as fa


def graph(**address):
    planner, solver = (ChatOpenAI(model=name, **address) for name in _team.AGENTS)

    async def plan(state):
        return {"messages": [await planner.ainvoke([("system", _team.PLANNER), *state["messages"]])]}

    agent = create_agent(solver, [_team.multiply_and_add], system_prompt=_team.SOLVER)
    return StateGraph(MessagesState).add_sequence([("plan", plan), ("solve", agent)]).add_edge(START, "plan").compile()


async def program(task, client):
    result = await graph(base_url=str(client.base_url), api_key=client.api_key).ainvoke(
        {"messages": [task["question"]]}
    )
    return result["messages"][-1].text


ENV = "my/Graph-v0"
fa.register(ENV, entry_point=fa.Program, program=program, agents=_team.AGENTS, tasks=_team.tasks, reward=_team.right)

if __name__ == "__main__":
    _team.main(ENV, __doc__, "runs/langgraph")
