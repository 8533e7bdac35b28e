"""Tasks of Inspect (UK AISI), trained unchanged, each in the Python where Inspect is installed.

An episode is one sample: its solver, tools and scorer run in a process of that Python, and its model is the agent. The
reward is the value of the first scorer, with "C" as 1, "P" as 0.5, and "I" and "N" as 0.

    python examples/inspect_task.py PYTHON TASK [--samples 100] [--steps 20] [--model NAME] [--out runs/inspect_task]

TASK is what ``inspect eval`` takes: ``inspect_evals/gsm8k``, or the absolute path of a file, ``/home/me/sums.py@sums``.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path


def episode(task, number):
    """One sample, where Inspect is installed: its score."""
    from inspect_ai import eval as evaluate
    from inspect_ai.model import get_model
    from inspect_ai.scorer import value_to_float

    file = Path(task.partition("@")[0])
    if file.is_file():  # Inspect looks below the current folder only
        os.chdir(file.parent)
        task = task.removeprefix(f"{file.parent}/")
    here = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    model = get_model("openai/agent", responses_api=False, **here)
    with tempfile.TemporaryDirectory() as logs, contextlib.redirect_stdout(sys.stderr):
        (log,) = evaluate(task, model=model, limit=(number, number + 1), display="none", log_dir=logs)
        if log.status != "success":
            sys.exit(str(log.error and log.error.message))
        return value_to_float()(next(iter(log.samples[0].scores.values())).value)


def register(python, task, samples):
    import forge_agents as fa

    def reward(_, result):
        return 0.0 if result.exit_status else float(result.stdout.split()[-1])

    program = [python, str(Path(__file__).resolve()), "--episode", task]
    fa.register("my/Task-v0", entry_point=fa.Program, program=program, tasks=range(samples), reward=reward)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("task")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", default="runs/inspect_task")
    args = parser.parse_args()
    register(args.python, args.task, args.samples)
    import forge_agents as fa

    with fa.GRPOTrainer(fa.Policy(args.model, name="agent"), out_dir=args.out) as trainer:
        print(trainer.fit("my/Task-v0", steps=args.steps).curve)


if __name__ == "__main__":
    print(episode(sys.argv[2], json.load(sys.stdin))) if "--episode" in sys.argv else main()
