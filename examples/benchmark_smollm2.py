"""SmolLM2-135M before and after training, a script or the oracles, and a random player, on suites of environments.

    python examples/benchmark_smollm2.py [--trained runs/mine/export] [--out runs/benchmark/reports] [--minutes 30]
    python examples/benchmark_smollm2.py --suites teams-v1 duels-v1 --minutes 60

Without --trained, a model is trained first: by GRPO on the three games of core-v1, or, with --suites, by imitation of
the oracles of all their environments. The script writes a report per suite (Markdown, JSON and one HTML file) to --out.
An interrupted benchmark continues when the script is called again.
"""

import operator
import re
import time
from math import gcd
from pathlib import Path

import _study

import forge_agents as fa
from forge_agents.bench import BenchLimits

SUITES = {"core-v1": 16, "reasoning-v1": 8, "text-games-v1": 1}
"""Number of seeds of each suite."""
SAMPLING = fa.Sampling(temperature=0.7, max_tokens=48)
ENGINE = fa.EngineConfig(max_model_len=4096, enforce_eager=True)
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def by_rule(seen, agent):
    """Scripted player with a rule for each of a dozen tasks. Passes in other tasks, and reads one observation only."""
    rules = (_number_task, _word_task, _card_task, _board_task)
    return next(filter(None, (rule(seen, agent) for rule in rules)), "pass")


def _number_task(seen, agent):
    numbers = [int(number) for number in re.findall(r"\d+", seen)]
    if sum_ := re.match(r"Calculate (\d+) (.) (\d+)", seen):
        return str(SIGNS[sum_[2]](int(sum_[1]), int(sum_[3])))
    if seen.startswith("Write this number again:"):
        return seen.rpartition(":")[2].strip()
    if chain := re.search(r"arithmetic problem: ([-+\d ]+) =$", seen):
        return f"<answer>{sum(int(n) for n in chain[1].replace('- ', '-').replace('+ ', '').split())}</answer>"
    if "Greatest Common Divisor" in seen:
        return f"<answer>{gcd(*numbers)}</answer>"
    if equation := re.match(r"(?:Solve for|Determine).*?(\d+)\*\w (.) (\d+) = (\d+)", seen):
        factor, sign, shift, total = int(equation[1]), equation[2], int(equation[3]), int(equation[4])
        return f"<answer>{(total - shift if sign == '+' else total + shift) // factor}</answer>"
    return ""


def _word_task(seen, agent):
    if names := re.match(r"Names: (.*)", seen):
        return "\n".join(sorted(names[1].split(", ")))
    if count := re.search(r'letter "(.)" appear in the text: "(.*)"', seen):
        return f"<answer>{count[2].count(count[1])}</answer>"
    if word := re.search(r"backward \(.*\): (\w+)", seen):
        return f"<answer>{word[1][::-1]}</answer>"
    if words := re.search(r"sort these words in (\w+) order .*: (.*)", seen):
        return f"<answer>{', '.join(sorted(words[2].split(', '), reverse=words[1] == 'descending'))}</answer>"
    return ""


def _card_task(seen, agent):
    """Kuhn poker of two libraries, and the prisoner's dilemma: bets and calls with a king, and defects."""
    if "[Cooperate]" in seen:
        return "[Defect]"
    if "Your move:" in seen:
        question = seen.rpartition("Your move:")[2]
        good, bad = ("bet", "check") if "bet" in question else ("call", "fold")
        return good if "King" in seen else bad
    if "Your available actions are:" in seen:
        options = re.findall(r"'\[(\w+)\]'", seen.rpartition("Your available actions are:")[2])
        preferred = ("bet", "call") if "card is: 'K'" in seen else ("check", "fold")
        return f"[{next((move for move in preferred if move in options), options[0])}]"
    return ""


def _board_task(seen, agent):
    if "Available Moves:" in seen:  # tic-tac-toe: the centre, corners, edges
        free = re.findall(r"'\[(\d)\]'", seen.rpartition("Available Moves:")[2])
        return f"[{min(free, key='402681357'.index)}]" if free else ""
    if "Current Pile" in seen:
        piles = [int(pile) for pile in re.findall(r"pile \d+: (\d+)", seen.rpartition("Current Pile")[2])]
        balance = piles[0] ^ piles[1] ^ piles[2]
        for place, pile in enumerate(piles):
            if pile > pile ^ balance:
                return f"[{place} {pile - (pile ^ balance)}]"
        return f"[{piles.index(max(piles))} 1]"
    if "0 1 2 3 4 5 6" in seen:  # connect four: the middle column that is free
        top = seen.rpartition("-------------")[2].split("\n")[1].split()
        return f"[col {next(column for column in (3, 2, 4, 1, 5, 0, 6) if top[column] == '.')}]"
    return ""


def train(model, folder, steps):
    """Return a model after GRPO on the games of core-v1. Training never draws seeds of benchmarks."""
    player = fa.Policy(model, name="trained", sampling=SAMPLING)
    config = fa.GRPOConfig(
        groups_per_step=6,
        group_size=8,
        max_resamples=0,
        learner=fa.LearnerConfig(lr=2e-5),
        engine=fa.EngineConfig(max_model_len=1024, enforce_eager=True),
    )
    games = {"forge/AlphabetSort-v0": 1.0, "forge/Relay-v0": 1.0, "forge/KuhnPoker-v0": 1.0}
    with fa.GRPOTrainer(player, config=config, out_dir=folder) as trainer:
        return trainer.fit(games, steps=steps).export


def imitate(model, folder, suites, games):
    """Return a model after one epoch of games of the oracle of each environment."""
    environments = [env_id for suite in suites for env_id in fa.suite(suite)]
    config = fa.SFTConfig(batch_size=16, learner=fa.LearnerConfig(lr=2e-5))

    def examples():
        return [episode for env_id in environments for episode in fa.demonstrations(env_id, games)]

    return _study.after_sft(fa.Policy(model, sampling=SAMPLING), folder, config, examples, epochs=1).model


def play(players, folder, out, *, suites, seeds=None, minutes=30.0):
    """Benchmark each suite and write its report into `out`. Returns the reports by suite."""
    reports, ends = {}, time.monotonic() + 60 * minutes
    for suite, number in suites.items():
        report = reports[suite] = fa.benchmark(
            players,
            suite,
            episodes=seeds or number,
            exploitability_samples=100 if suite == "core-v1" else 0,
            limits=BenchLimits(max_seconds=max(1e-6, ends - time.monotonic())),  # after the end no episode starts
            engine=ENGINE,
            out_dir=folder,
        )
        report.save(out / f"{suite}.json")
        report.markdown(out / f"{suite}.md")
        report.html(out / f"{suite}.html")
        print(f"{suite}: {len(report.records)} of {report.planned} episodes, {report.timing['seconds']:.0f} s")
        report.table()
    return reports


def main(words=None):
    parser = _study.parser(__doc__, steps=20, games=48, out=Path("runs/benchmark/reports"))
    parser.add_argument("--suites", nargs="+", default=[], help="suites whose environments have oracles")
    parser.add_argument("--trained", default="", help="folder or name of the trained model; by default one is trained")
    parser.add_argument("--seeds", type=int, help="number of seeds of every suite; default: 8, or that of the suite")
    parser.add_argument("--minutes", type=float, default=30.0, help="time limit, after which no episode starts")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark"), help="folder of episodes and training")
    args = parser.parse_args(words)
    suites = dict.fromkeys(args.suites, 8) or SUITES
    trained = args.trained
    if not trained and args.suites:
        trained = imitate(args.model, args.folder / "imitated", args.suites, args.games)
    elif not trained:
        trained = str(train(args.model, args.folder / "training", args.steps))
    players = {
        "smollm2": fa.Policy(args.model, sampling=SAMPLING),
        "trained": fa.Policy(trained, sampling=SAMPLING),
    }
    players |= {"oracle": fa.Oracle()} if args.suites else {"scripted": fa.Scripted(by_rule), "random": fa.Random()}
    play(players, args.folder, args.out, suites=suites, seeds=args.seeds, minutes=args.minutes)


if __name__ == "__main__":
    main()
