"""A team of the OpenAI Agents SDK is trained unchanged: a planner hands off to a solver with a calculator.

The two agents do not know that they are trained. Each trains an adapter, and both are rewarded if the last number of
the answer is right. The hand-off and the calculator are tool calls. A model of this size does not call tools by itself,
so it first imitates a script that plays both agents. Needs ``pip install 'forge-agents-rl[agents]'``.

    python examples/agents_sdk.py [--seed 0] [--steps 20] [--lr 5e-4] [--out runs/agents_sdk]

--lr 0 is the control. Every call shows all finished runs of the folder in a table and in ``agents_sdk.png``. Finished
runs are not repeated, and interrupted ones continue.
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


instructions = ("Say what has to be worked out, then hand off.", "Use your tool, then answer with the number.")
solver = Agent(name="solver", model="solver", instructions=instructions[1], tools=[multiply_and_add])
planner = Agent(name="planner", model="planner", instructions=instructions[0], handoffs=[solver])


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


def teacher(seat, messages):
    """The next message of a good team, in the models' format."""
    if seat == "planner":
        return '<tool_call>\n{"name": "transfer_to_solver", "arguments": {}}\n</tool_call>'
    if result := re.fullmatch(r"<tool_response>\n(\d+)\n</tool_response>", messages[-1]["content"]):
        return f"It is {result[1]}."
    a, b, c = re.findall(r"\d+", next(m["content"] for m in messages if m["role"] == "user"))
    return f'<tool_call>\n{{"name": "multiply_and_add", "arguments": {{"a": {a}, "b": {b}, "c": {c}}}}}\n</tool_call>'


def demonstrations(count):
    """Conversations of all seats where the teacher plays; training and tests draw other tasks."""
    env, conversations = fa.make(ENV_ID), []
    for number in range(count):
        env.reset(seed=2**30 + number)
        talks = {seat: [] for seat in SEATS}
        while "conversation" in env.infos[seat := env.agent_selection]:
            talks[seat] += env.infos[seat]["conversation"]["messages"]
            talks[seat].append({"role": "assistant", "content": teacher(seat, talks[seat])})
            env.step(talks[seat][-1]["content"])
        conversations += [{"messages": talks[seat]} for seat in SEATS]
    env.close()
    return conversations


def imitate(folder, args):
    """The model after it has imitated the teacher."""
    export = folder / "export"
    if not export.exists():
        config = fa.SFTConfig(batch_size=8, learner=fa.LearnerConfig(lr=1e-4, warmup_steps=3))
        with fa.SFTTrainer(fa.Policy(args.model, name="team"), config, out_dir=folder) as trainer:
            trainer.fit(demonstrations(args.shown))
    return str(export.absolute())


def run(arm, args):
    """Imitation, then play. Returns held-out reward by step."""
    model = imitate(args.out / f"imitated-{args.shown}", args) if args.shown else args.model
    sampling = fa.Sampling(max_tokens=64)
    lora = fa.LoRA(rank=8, alpha=16, targets=("q_proj", "k_proj", "v_proj", "o_proj"))  # on a CPU all layers are slow
    policies = {seat: fa.Policy(model, name=seat, sampling=sampling, lora=lora) for seat in SEATS}
    config = fa.GRPOConfig(
        seed=args.seed,
        groups_per_step=2,
        max_resamples=0,
        learner=fa.LearnerConfig(lr=args.lr, warmup_steps=2),
        engine=fa.EngineConfig(max_model_len=640, enforce_eager=True),
        eval_every=args.eval_every,
        eval_episodes=args.episodes,
        checkpoint_every=args.eval_every,
        keep_checkpoints=1,
    )
    folder = args.out / f"{arm}-{args.seed}"
    first = folder / "before.json"  # of a run that goes on, too
    with fa.GRPOTrainer(policies, config=config, out_dir=folder) as trainer:
        if not first.exists():
            evaluation = trainer.evaluate(ENV_ID, episodes=2 * args.episodes)
            first.parent.mkdir(parents=True, exist_ok=True)
            first.write_text(json.dumps([evaluation.reward, evaluation.ci]))
        rows = trainer.fit(ENV_ID, steps=args.steps).metrics
        after = trainer.evaluate(ENV_ID, episodes=2 * args.episodes)
    before = json.loads(first.read_text())
    curve = [[0, before[0]]] + [[row["step"], row["eval/reward"]] for row in rows if "eval/reward" in row]
    return {"arm": arm, "seed": args.seed, "before": before, "after": [after.reward, after.ci], "curve": curve}


def show(results, folder):
    """A table and a picture of all runs."""
    table = Table("run", "seed", "before", "after")
    for result in results:
        rewards = (f"{mean:.3f} ± {half:.3f}" for mean, half in (result["before"], result["after"]))
        table.add_row(ARMS[result["arm"]], str(result["seed"]), *rewards)
    Console().print(table)
    curves = {label: [result["curve"] for result in results if result["arm"] == arm] for arm, label in ARMS.items()}
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
    args = parser.parse_args(words)
    arm = "trained" if args.lr else "control"
    saved = args.out / f"{arm}-{args.seed}" / "result.json"
    if not saved.exists():
        result = run(arm, args)
        saved.write_text(json.dumps(result))
    show([json.loads(file.read_text()) for file in sorted(args.out.glob("*/result.json"))], args.out)


if __name__ == "__main__":
    main()
