"""Which player is better, with confidence intervals: a script, a random player, and any models.

    python examples/benchmark.py [--episodes 64] [--model before=smollm2-135m-instruct --model after=runs/kuhn/export]
    python examples/benchmark.py --model rival=http://127.0.0.1:8000/v1#rival-7b

All players play Kuhn and Leduc poker. A model is a name, a folder, or an address of an OpenAI-compatible server (vLLM,
SGLang, llama.cpp, Ollama, hosted services) with the server's name of the model. The script prints the table and writes
board.json, board.md and board.html to --out. Calling it again plays only missing episodes, also those that failed.
"""

import argparse
from pathlib import Path

import forge_agents as fa


def cautious(observation):
    """Fold to bets with anything but the best card."""
    if "call" not in observation.lower():
        return "check"
    return "call" if "King" in observation or " K" in observation else "fold"


def player(name, model, args):
    """Return the player of a model here, or behind a server within a budget of tokens."""
    sampling = fa.Sampling(temperature=0.7, max_tokens=8)
    if "://" not in model:
        return fa.Policy(model, name=name, trainable=False, sampling=sampling)
    url, _, served = model.partition("#")
    budget = {"max_total_tokens": args.max_tokens, "retries": 1, "timeout_s": 30}
    return fa.Endpoint(url, served, name=name, api_key_env=args.key_variable, sampling=sampling, **budget)


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64, help="number of seeds of each environment")
    parser.add_argument("--model", action="append", default=[], metavar="NAME=ID", help="another player, a model")
    parser.add_argument("--key-variable", default="", help="environment variable with the key of a server")
    parser.add_argument("--max-tokens", type=int, default=100_000, help="budget of each model behind a server")
    parser.add_argument("--out", type=Path, default=Path("runs/board"))
    args = parser.parse_args(words)
    players = {"cautious": fa.Scripted(cautious), "random": fa.Random(seed=0)}
    for named in args.model:
        name, _, model = named.partition("=")
        players[name] = player(name, model, args)
    suite = ["forge/KuhnPoker-v0", "forge/LeducPoker-v0"]
    report = fa.benchmark(players, suite=suite, episodes=args.episodes, out_dir=args.out)
    report.table()
    report.markdown(args.out / "board.md")
    print(f"page {report.html(args.out / 'board.html')}")


if __name__ == "__main__":
    main()
