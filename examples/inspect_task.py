"""Tasks of Inspect (UK AISI), trained unchanged, each in the Python where Inspect is installed.

An episode is one sample: its solver, tools and scorer run in a process of that Python, and its model is the agent. The
reward is the first scorer's value, with "C" as 1, "P" as 0.5, and "I" and "N" as 0. A scorer that asks a model needs
--grader: a frozen policy with the role "grader". Other roles are the agent. Random orders need a seed in the task.

    python examples/inspect_task.py PYTHON TASK [--samples 100] [--steps 20] [--grader NAME] [--out runs/inspect_task]

TASK is what ``inspect eval`` takes: ``inspect_evals/gsm8k``, or the absolute path of a file, ``/home/me/sums.py@sums``.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import random
import sys
import tempfile
from pathlib import Path


def episode(task, number, grader=""):
    """Run one sample where Inspect is installed, and return its question's hash and reward, or why it has none."""
    from inspect_ai import eval as evaluate
    from inspect_ai.model import get_model

    random.seed(0)  # of data sets that are shuffled without a seed
    file = Path(task.partition("@")[0])
    if file.is_file():  # Inspect looks below the current folder only
        os.chdir(file.parent)
        task = task.removeprefix(f"{file.parent}/")
    here = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    agent, *roles = (get_model(f"openai/{name}", responses_api=False, **here) for name in ("agent", grader) if name)
    options = {"model_roles": {"grader": roles[0]} if roles else {}, "epochs": 1, "limit": (number, number + 1)}
    with tempfile.TemporaryDirectory() as logs, contextlib.redirect_stdout(sys.stderr):
        (log,) = evaluate(task, model=agent, display="none", log_dir=logs, **options)
        if log.status == "success" and not log.samples:
            sys.exit(f"the task has {log.eval.dataset.samples} samples. Pass their number with --samples")
        sample = log.samples and log.samples[0]
        if error := log.error or sample.error:
            sys.exit(error.message)
        return {"question": question(sample), **score(sample)}


def question(sample):
    texts = sample.input if isinstance(sample.input, str) else [message.text for message in sample.input]
    return hashlib.sha256(repr((texts, sample.choices, sample.target)).encode()).hexdigest()


def score(sample):
    scoring = itertools.dropwhile(lambda event: getattr(event, "name", "") != "scorers", sample.events)
    if any(event.event == "model" and event.model == "openai/agent" for event in scoring):
        return {"problem": "the scorer asked the agent. Pass --grader NAME, and let the scorer ask the role 'grader'"}
    if not sample.scores:
        return {"problem": "the task has no scorer"}
    value = next(iter(sample.scores.values())).value
    try:
        reward = float({"C": 1, "P": 0.5, "I": 0, "N": 0}.get(value, value))
    except (TypeError, ValueError):
        reward = math.nan
    if not math.isfinite(reward):
        return {"problem": f"the first scorer's value is {value!r:.200}. Expected a finite number, or C, P, I or N"}
    return {"reward": reward}


def register(python, task, numbers, grader=""):
    import forge_agents as fa

    questions = {}

    def reward(number, result):
        if result.exit_status:  # the model may have caused it
            return 0.0
        sample = json.loads(result.stdout.splitlines()[-1])
        if "problem" in sample:
            raise RuntimeError(sample["problem"])
        if questions.setdefault(number, sample["question"]) != sample["question"]:
            raise RuntimeError(f"sample {number} differs between episodes. Let the task shuffle with a seed")
        return sample["reward"]

    program = [python, str(Path(__file__).resolve()), "--episode", task, grader and "grader"]
    agents = ("agent", "grader") if grader else ("agent",)
    shared = {"agents": agents, "tasks": numbers, "reward": reward, "timeout_s": 300}
    fa.register("my/Task-v0", entry_point=fa.Program, program=program, **shared)


def main():
    import _study

    parser = _study.parser(__doc__, steps=20, max_tokens=256, out="runs/inspect_task")
    parser.add_argument("python", help="the Python in which Inspect is installed")
    parser.add_argument("task", help="name or file of the task")
    parser.add_argument("--samples", type=int, default=100, help="number of samples; a fifth is held out")
    parser.add_argument("--grader", default="", help="model of scorers that ask one")
    args = parser.parse_args()
    register(args.python, args.task, range(args.samples), args.grader)
    import forge_agents as fa

    team = [fa.Policy(args.model, name="agent", sampling=fa.Sampling(max_tokens=args.max_tokens))]
    if args.grader:
        greedy = fa.Sampling(temperature=0.0, max_tokens=512)
        team.append(fa.Policy(args.grader, name="grader", trainable=False, sampling=greedy))
    with fa.GRPOTrainer({policy.name: policy for policy in team}, out_dir=args.out) as trainer:
        print(trainer.fit("my/Task-v0", steps=args.steps).curve)


if __name__ == "__main__":
    child = sys.argv[1:2] == ["--episode"]
    print(json.dumps(episode(sys.argv[2], json.load(sys.stdin), sys.argv[3]))) if child else main()
