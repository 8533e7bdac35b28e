"""A team of the OpenAI Agents SDK, trained as it is: a planner hands off to a solver that has a calculator.

Nothing in the two agents knows that they are trained; each trains an adapter of its own. The hand-off is a tool call,
and the default model practically never makes one unasked: choose a larger one, or imitate first. Needs
``pip install 'forge-agents-rl[agents]'``.

    python examples/agents_sdk.py [--steps 20] [--model NAME] [--out runs/agents_sdk]
"""

import argparse
import re

from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool

import forge_agents as fa


@function_tool
def multiply_and_add(a: int, b: int, c: int) -> int:
    """Work out a * b + c."""
    return a * b + c


told = ("Say what has to be worked out, then hand off.", "Use your tool, then answer with the number.")
solver = Agent(name="solver", model="solver", instructions=told[1], tools=[multiply_and_add])
planner = Agent(name="planner", model="planner", instructions=told[0], handoffs=[solver])


async def team(task, client):
    """The program: the SDK's own loop, with the client that it is given."""
    provider = OpenAIProvider(openai_client=client)
    settings = RunConfig(model_provider=provider, tracing_disabled=True)
    return (await Runner.run(planner, task["question"], run_config=settings, max_turns=6)).final_output


def tasks(rng):
    """A product and a sum."""
    a, b, c = (int(n) for n in rng.integers(2, 30, 3))
    return {"question": f"Anna has {a} boxes of {b} eggs and {c} more. How many eggs?", "answer": a * b + c}


def right(task, result):
    """1 where the last number of the answer is right."""
    return float(re.findall(r"\d+", str(result))[-1:] == [str(task["answer"])])


SEATS = ("planner", "solver")
fa.register("my/Team-v0", entry_point=fa.Program, program=team, seats=SEATS, tasks=tasks, reward=right)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", default="runs/agents_sdk")
    asked = parser.parse_args()
    sampling = fa.Sampling(max_tokens=64)
    policies = {seat: fa.Policy(asked.model, name=seat, sampling=sampling, lora=fa.LoRA()) for seat in SEATS}
    with fa.GRPOTrainer(policies, out_dir=asked.out) as trainer:
        print(trainer.fit("my/Team-v0", steps=asked.steps).curve)
