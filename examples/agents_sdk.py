"""A team of the OpenAI Agents SDK, trained as it is: a planner hands off to a solver that has a calculator.

Nothing in the two agents knows that they are trained; each trains an adapter of its own, and both are paid when the
last number of the answer is right. The hand-off is a tool call, and so is the calculator's; a model of this size makes
neither unasked, so it first imitates a script that plays both seats. Needs ``pip install 'forge-agents-rl[agents]'``.

    python examples/agents_sdk.py [--seed 0] [--steps 20] [--lr 5e-4] [--out runs/agents_sdk]

With --lr 0 it is a control, which must not move. Every call shows all runs that are finished in the folder, in a table
and in ``agents_sdk.png``; a finished run is not repeated, and an interrupted one goes on.
"""

import argparse
import json
import re
from pathlib import Path

from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool
from rich.console import Console
from rich.table import Table

import forge_agents as fa
from forge_trainers.records.plots import draw_arms

ENV_ID = "my/Team-v0"
SEATS = ("planner", "solver")
ARMS = {"trained": "an adapter for each role", "control": "learning rate 0"}


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


fa.register(ENV_ID, entry_point=fa.Program, program=team, agents=SEATS, tasks=tasks, reward=right)


def teacher(seat, said):
    """What a good team says next, in the form that the models read and write."""
    if seat == "planner":
        return '<tool_call>\n{"name": "transfer_to_solver", "arguments": {}}\n</tool_call>'
    if result := re.fullmatch(r"<tool_response>\n(\d+)\n</tool_response>", said[-1]["content"]):
        return f"It is {result[1]}."
    a, b, c = re.findall(r"\d+", next(m["content"] for m in said if m["role"] == "user"))
    return f'<tool_call>\n{{"name": "multiply_and_add", "arguments": {{"a": {a}, "b": {b}, "c": {c}}}}}\n</tool_call>'


def demonstrations(count):
    """Conversations of all seats where the teacher plays; training and tests draw other tasks."""
    env, found = fa.make(ENV_ID), []
    for number in range(count):
        env.reset(seed=2**30 + number)
        talks = {seat: [] for seat in SEATS}
        while "conversation" in env.infos[seat := env.agent_selection]:
            talks[seat] += env.infos[seat]["conversation"]["messages"]
            talks[seat].append({"role": "assistant", "content": teacher(seat, talks[seat])})
            env.step(talks[seat][-1]["content"])
        found += [{"messages": talks[seat]} for seat in SEATS]
    env.close()
    return found


def imitate(folder, asked):
    """The model after it has imitated the teacher."""
    export = folder / "export"
    if not export.exists():
        config = fa.SFTConfig(batch_size=8, learner=fa.LearnerConfig(lr=1e-4, warmup_steps=3))
        with fa.SFTTrainer(fa.Policy(asked.model, name="team"), config, out_dir=folder) as trainer:
            trainer.fit(demonstrations(asked.shown))
    return str(export.absolute())


def run(arm, asked):
    """Imitation, then play. Returns held-out reward by step."""
    model = imitate(asked.out / f"imitated-{asked.shown}", asked) if asked.shown else asked.model
    sampling = fa.Sampling(max_tokens=64)
    lora = fa.LoRA(rank=8, alpha=16, targets=("q_proj", "k_proj", "v_proj", "o_proj"))  # on a CPU all layers are slow
    policies = {seat: fa.Policy(model, name=seat, sampling=sampling, lora=lora) for seat in SEATS}
    config = fa.GRPOConfig(
        seed=asked.seed,
        groups_per_step=2,
        max_resamples=0,
        learner=fa.LearnerConfig(lr=asked.lr, warmup_steps=2),
        engine=fa.EngineConfig(max_model_len=640, enforce_eager=True),
        eval_every=asked.eval_every,
        eval_episodes=asked.episodes,
        checkpoint_every=asked.eval_every,
        keep_checkpoints=1,
    )
    folder = asked.out / f"{arm}-{asked.seed}"
    first = folder / "before.json"  # of a run that goes on, too
    with fa.GRPOTrainer(policies, config=config, out_dir=folder) as trainer:
        if not first.exists():
            found = trainer.evaluate(ENV_ID, episodes=2 * asked.episodes)
            first.parent.mkdir(parents=True, exist_ok=True)
            first.write_text(json.dumps([found.reward, found.ci]))
        rows = trainer.fit(ENV_ID, steps=asked.steps).metrics
        after = trainer.evaluate(ENV_ID, episodes=2 * asked.episodes)
    before = json.loads(first.read_text())
    curve = [[0, before[0]]] + [[row["step"], row["eval/reward"]] for row in rows if "eval/reward" in row]
    return {"arm": arm, "seed": asked.seed, "before": before, "after": [after.reward, after.ci], "curve": curve}


def show(results, folder):
    """A table and a picture of all runs."""
    table = Table("run", "seed", "before", "after")
    for one in results:
        rewards = (f"{mean:.3f} ± {half:.3f}" for mean, half in (one["before"], one["after"]))
        table.add_row(ARMS[one["arm"]], str(one["seed"]), *rewards)
    Console().print(table)
    curves = {label: [one["curve"] for one in results if one["arm"] == arm] for arm, label in ARMS.items()}
    arms = {label: [c[: min(map(len, many))] for c in many] for label, many in curves.items() if many}
    title = "A team of the OpenAI Agents SDK, hand-off and calculator"
    draw_arms(arms, folder / "agents_sdk.png", title=title, value="right answers, held out")


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of training")
    parser.add_argument("--shown", type=int, default=40, help="tasks that the teacher shows; 0: no imitation")
    parser.add_argument("--steps", type=int, default=20, help="of GRPO")
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate of GRPO")
    parser.add_argument("--eval-every", type=int, default=5, help="steps between points of the curve")
    parser.add_argument("--episodes", type=int, default=32, help="held-out tasks of a point; twice as many at the ends")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, default=Path("runs/agents_sdk"), help="folder of the runs")
    asked = parser.parse_args(words)
    arm = "trained" if asked.lr else "control"
    saved = asked.out / f"{arm}-{asked.seed}" / "result.json"
    if not saved.exists():
        result = run(arm, asked)
        saved.write_text(json.dumps(result))
    show([json.loads(file.read_text()) for file in sorted(asked.out.glob("*/result.json"))], asked.out)


if __name__ == "__main__":
    main()
