"""Who plays better, and how sure is that? A script, a random player, and models if you name some.

    python examples/benchmark.py [--episodes 64] [--model before=smollm2-135m-instruct --model after=runs/kuhn/export]

plays Kuhn and Leduc poker, prints the table and writes board.json, board.md and board.html into --out. Calling it again
plays only what is missing.
"""

import argparse
from pathlib import Path

import forge_agents as fa


def cautious(observation):
    """Folds to bets with anything but the best card."""
    if "call" not in observation.lower():
        return "check"
    return "call" if "King" in observation or " K" in observation else "fold"


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64, help="seeds of each environment")
    parser.add_argument("--model", action="append", default=[], metavar="NAME=ID", help="one more player, a model")
    parser.add_argument("--out", type=Path, default=Path("runs/board"))
    args = parser.parse_args(words)
    players = {"cautious": fa.Scripted(cautious), "random": fa.Random(seed=0)}
    for named in args.model:
        name, _, model = named.partition("=")
        players[name] = fa.Policy(model, name=name, trainable=False, sampling=fa.Sampling(max_tokens=8))
    report = fa.benchmark(
        players, suite=["forge/KuhnPoker-v0", "forge/LeducPoker-v0"], episodes=args.episodes, out_dir=args.out
    )
    report.table()
    report.markdown(args.out / "board.md")
    print(f"page {report.html(args.out / 'board.html')}")


if __name__ == "__main__":
    main()
