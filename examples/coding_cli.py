"""A coding agent from npm is trained unchanged: ``pi`` writes a program and is rewarded if the program runs.

``pi`` reads the address of its models from a file in its home folder, which is the folder of the episode. Other agents
read OPENAI_BASE_URL or ANTHROPIC_BASE_URL, which are set as well. Needs Node and ``npm install -g
@mariozechner/pi-coding-agent``. The agent runs the model's commands with your permissions. Put the whole run into a
container if that matters.

    python examples/coding_cli.py [--steps 20] [--model NAME] [--out runs/coding_cli]
"""

import argparse
import re

import forge_agents as fa
from forge_agents.sandbox import Sandbox

# runs in the folder of the episode; the model has the name of the agent
START = """
export HOME="$PWD/.home"; mkdir -p "$HOME/.pi/agent"
cat > "$HOME/.pi/agent/models.json" <<END
{"providers": {"gym": {"baseUrl": "$OPENAI_BASE_URL", "apiKey": "OPENAI_API_KEY", "api": "openai-completions",
 "models": [{"id": "coder", "name": "coder", "input": ["text"], "contextWindow": 32768, "maxTokens": 1024}]}}}
END
exec pi --offline --provider gym --model coder --print "$(cat)" < /dev/null
"""


def tasks(rng):
    """A sum that the program has to print."""
    a, b = (int(n) for n in rng.integers(100, 1000, 2))
    return f"Write a file sum.py, a Python program that prints {a} + {b}."


def runs(task, result):
    """1 where the file that was left behind prints the sum, in the sandbox."""
    a, b = (int(number) for number in re.findall(r"\d+", task))
    file = result.folder / "sum.py"
    if file.is_symlink() or not file.is_file() or file.stat().st_size > 10_000:
        return 0.0
    return float(Sandbox().run(file.read_text(errors="replace")).stdout.split() == [str(a + b)])


command = ["/bin/sh", "-c", START]
fa.register("my/Coder-v0", entry_point=fa.Program, program=command, agents=("coder",), tasks=tasks, reward=runs)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", default="runs/coding_cli")
    args = parser.parse_args()
    with fa.GRPOTrainer(fa.Policy(args.model, name="coder"), out_dir=args.out) as trainer:
        print(trainer.fit("my/Coder-v0", steps=args.steps).curve)
