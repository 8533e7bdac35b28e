"""Environments of verifiers 0.4 (PrimeIntellect), trained unchanged, each in the Python where it is installed.

An episode is one of the library's own, on one task of a taskset, with the taskset's tools and rewards. It is a process
of that Python, so that its libraries and ours need not agree.

    python examples/verifiers_v1.py PYTHON TASKSET [--tasks 100] [--steps 20] [--model NAME] [--out runs/verifiers_v1]
"""

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path


async def episode(taskset, number):
    """One episode, where verifiers is installed: its reward."""
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import load_environment

    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}  # a chat with tools, beside this process
    env = load_environment(vf.SingleAgentEnvConfig(taskset={"id": taskset}, agent=agent))
    task = next(iter(env.taskset.include(idx=[str(number)])))
    here = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        done = await env.run_episode(task, vf.ModelContext(model="agent", client=here))
    if not done.ok:
        sys.exit(str([*done.errors, *(error for trace in done.traces for error in trace.errors)]))
    return done.traces[0].reward


def register(python, taskset, tasks):
    import forge_agents as fa

    def reward(_, result):
        return 0.0 if result.exit_status else float(result.stdout.split()[-1])

    program = [python, str(Path(__file__).resolve()), "--episode", taskset]
    fa.register("my/Taskset-v0", entry_point=fa.Program, program=program, tasks=range(tasks), reward=reward)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("taskset")
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", default="runs/verifiers_v1")
    args = parser.parse_args()
    register(args.python, args.taskset, args.tasks)
    import forge_agents as fa

    with fa.GRPOTrainer(fa.Policy(args.model, name="agent"), out_dir=args.out) as trainer:
        print(trainer.fit("my/Taskset-v0", steps=args.steps).curve)


if __name__ == "__main__":
    print(asyncio.run(episode(sys.argv[2], json.load(sys.stdin)))) if "--episode" in sys.argv else main()
