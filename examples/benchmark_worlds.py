"""Benchmark of the environments' oracles, SmolLM2-135M, and the same model after imitating the oracles, on two suites.

    python examples/benchmark_worlds.py [--games 48] [--seeds 8] [--out runs/benchmark/reports] [--minutes 60]

Without --trained, a model first imitates games of the oracles of all ten environments. Then each player plays every
agent with itself and with each other player: `teams-v1` has partners that the player never met, `duels-v1` has rivals.
The script writes a report per suite (Markdown, JSON and HTML) and the summary worlds.md to --out. An interrupted
benchmark continues when the script is called again.
"""

import argparse
import time
from pathlib import Path

from benchmark_smollm2 import overview, play

import forge_agents as fa

SUITES = ("teams-v1", "duels-v1")
SAMPLING = fa.Sampling(temperature=0.7)
ENGINE = fa.EngineConfig(max_model_len=4096)
ABOUT = """\
# Worlds: `python examples/benchmark_worlds.py`

SmolLM2-135M-Instruct, the same after imitating games of the worlds' oracles, and these oracles, in every seat beside
themselves and each other."""


def imitated(model, folder, games):
    """A model after games of every world's oracle, seen once; benchmarks never play their seeds."""
    if not (folder / "export").exists():
        worlds = [world for suite in SUITES for world in fa.suite(suite)]
        episodes = [episode for world in worlds for episode in fa.demonstrations(world, games)]
        config = fa.SFTConfig(batch_size=16, learner=fa.LearnerConfig(lr=2e-5))
        with fa.SFTTrainer(fa.Policy(model, name="trained", sampling=SAMPLING), config, out_dir=folder) as trainer:
            trainer.fit(episodes, epochs=1)
    return folder / "export"


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="the model before it imitates")
    parser.add_argument("--trained", default="", help="folder or name of the trained model; by default one imitates")
    parser.add_argument("--games", type=int, default=48, help="of each world's oracle, which are imitated")
    parser.add_argument("--seeds", type=int, default=8, help="of every suite")
    parser.add_argument("--minutes", type=float, default=60.0, help="of playing, after which no episode is begun")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark-worlds"), help="of what was played")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark/reports"), help="of the reports")
    args = parser.parse_args(words)
    started = time.monotonic()
    trained = args.trained or str(imitated(args.model, args.folder / "imitated", args.games))
    parts = [f"imitation {(time.monotonic() - started) / 60:.1f}"]
    players = {
        "smollm2": fa.Policy(args.model, sampling=SAMPLING),
        "trained": fa.Policy(trained, sampling=SAMPLING),
        "oracle": fa.Oracle(),
    }
    suites = dict.fromkeys(SUITES, (args.seeds, True))
    reports = play(players, args.folder, args.out, suites=suites, minutes=args.minutes, engine=ENGINE)
    parts += [f"{suite} {report.timing['seconds'] / 60:.1f}" for suite, report in reports.items()]
    text = overview(reports, f"{(time.monotonic() - started) / 60:.1f} ({', '.join(parts)})", ABOUT)
    (args.out / "worlds.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
