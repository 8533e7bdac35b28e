"""A team of the OpenAI Agents SDK is trained unchanged: a planner hands off to a solver with a calculator.

The two agents, each with its own adapter, do not know that they are trained. The team is rewarded if the last number
of the answer is right. The hand-off and the calculator are tool calls. A model of this size does not call tools by
itself, so it first imitates a script that plays both agents. Needs ``pip install 'forge-agents-rl[agents]'``.

    python examples/agents_sdk.py [--seed 0] [--steps 20] [--lr 5e-4] [--out runs/agents_sdk]

--lr 0 is the control. Every call shows all finished runs of the folder in a table and in ``agents_sdk.png``. Finished
runs are not repeated, and interrupted ones continue.
"""

import re
from pathlib import Path

import _study
from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool

import forge_agents as fa

ENV_ID = "my/Team-v0"
AGENTS = ("planner", "solver")
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


fa.register(ENV_ID, entry_point=fa.Program, program=team, agents=AGENTS, tasks=tasks, reward=right)


def teacher(agent, messages):
    """Return the next message of a good team, in the models' format."""
    if agent == "planner":
        return '<tool_call>\n{"name": "transfer_to_solver", "arguments": {}}\n</tool_call>'
    if result := re.fullmatch(r"<tool_response>\n(\d+)\n</tool_response>", messages[-1]["content"]):
        return f"It is {result[1]}."
    a, b, c = re.findall(r"\d+", next(m["content"] for m in messages if m["role"] == "user"))
    return f'<tool_call>\n{{"name": "multiply_and_add", "arguments": {{"a": {a}, "b": {b}, "c": {c}}}}}\n</tool_call>'


def demonstrations(count):
    """Return the conversations of both agents in which the teacher plays. Training and tests draw other tasks."""
    env, conversations = fa.make(ENV_ID), []
    for number in range(count):
        env.reset(seed=2**30 + number)
        messages = {agent: [] for agent in AGENTS}
        while "conversation" in env.infos[agent := env.agent_selection]:
            messages[agent] += env.infos[agent]["conversation"]["messages"]
            messages[agent].append({"role": "assistant", "content": teacher(agent, messages[agent])})
            env.step(messages[agent][-1]["content"])
        conversations += [{"messages": messages[agent]} for agent in AGENTS]
    env.close()
    return conversations


def run(arm, args):
    """Imitate, then train with GRPO."""
    start = fa.Policy(args.model, name="team", sampling=fa.Sampling(max_tokens=64))
    if args.shown:
        config = fa.SFTConfig(batch_size=8, learner=fa.LearnerConfig(lr=1e-4, warmup_steps=3))
        start = _study.after_sft(start, args.out / f"imitated-{args.shown}", config, lambda: demonstrations(args.shown))
    lora = fa.LoRA(rank=8, alpha=16, targets=("q_proj", "k_proj", "v_proj", "o_proj"))  # all layers are slow on a CPU
    policies = {agent: fa.Policy(start.model, name=agent, sampling=start.sampling, lora=lora) for agent in AGENTS}
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
    folder, sizes = args.out / f"{arm}-{args.seed}", {"episodes": 2 * args.episodes, "after": 2 * args.episodes}
    return _study.train(policies, ENV_ID, config, folder, steps=args.steps, arm=arm, seed=args.seed, **sizes)


def main(words=None):
    defaults = {"seed": 0, "steps": 20, "lr": 5e-4, "eval_every": 5, "episodes": 32}
    parser = _study.parser(__doc__, **defaults, out=Path("runs/agents_sdk"))
    parser.add_argument("--shown", type=int, default=40, help="number of demonstrations; 0: no imitation")
    args = parser.parse_args(words)
    run("trained" if args.lr else "control", args)
    results = [_study.saved(file.parent) for file in sorted(args.out.glob("*/result.json"))]
    title = "A team of the OpenAI Agents SDK, hand-off and calculator"
    _study.show(results, ARMS, args.out / "agents_sdk.png", title=title, value="right answers, held out")


if __name__ == "__main__":
    main()
