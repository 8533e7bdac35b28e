"""SmolLM2-135M, the same after training, a script and a random player, on four suites of games and tasks.

    python examples/benchmark_smollm2.py [--trained runs/mine/export] [--out runs/benchmark/reports] [--minutes 30]

Without --trained, a model is trained first on the three games of core-v1. Each suite becomes a report (Markdown, JSON
and one HTML file) in --out, README.md there sums them up. Run it again after a kill: nothing is played twice.
"""

import argparse
import operator
import re
import time
from math import gcd
from pathlib import Path

import forge_agents as fa
from forge_agents.bench import BenchLimits

SUITES = {"core-v1": (16, True), "reasoning-v1": (8, True), "tools-v1": (3, False), "text-games-v1": (1, True)}
"""Seeds, and whether two players swap seats, which in the teams of three of tools-v1 quadruples the games."""
SAMPLING = fa.Sampling(temperature=0.7, max_tokens=48)
ENGINE = fa.EngineConfig(max_model_len=4096, enforce_eager=True)
EXPLOITABILITY_SAMPLES = 100
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def by_rule(seen, agent):
    """A rule each for a dozen tasks. It sees one observation, remembers nothing, and passes elsewhere."""
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
    """Kuhn poker of two makers, and the dilemma: bets and calls with a king, and defects."""
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
    """A model after GRPO on the games of core-v1; the seeds of benchmarks are never drawn in training."""
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


def play(players, folder, out, *, suites=None, seeds=None, minutes=30.0, engine=ENGINE):
    """A report of each suite, written into `out`; returns them by suite."""
    reports, ends = {}, time.monotonic() + 60 * minutes
    for suite, (number, swap_seats) in (suites or SUITES).items():
        left = max(1e-6, ends - time.monotonic())  # so little that no episode is begun
        report = reports[suite] = fa.benchmark(
            players,
            suite,
            episodes=seeds or number,
            swap_seats=swap_seats,
            exploitability_samples=EXPLOITABILITY_SAMPLES if suite == "core-v1" else 0,
            limits=BenchLimits(max_seconds=left),
            engine=engine,
            out_dir=folder,
        )
        report.save(out / f"{suite}.json")
        report.markdown(out / f"{suite}.md")
        report.html(out / f"{suite}.html")
        print(f"{suite}: {len(report.records)} of {report.planned} episodes, {report.timing['seconds']:.0f} s")
    return reports


ABOUT = """\
# Benchmark: `python examples/benchmark_smollm2.py`

SmolLM2-135M-Instruct, the same after training on the games of core-v1, a script of a few rules and a random
player, on the suites of games and tasks."""


def overview(reports, spent, about=ABOUT):
    """The page that sums them up."""
    names = tuple(next(iter(reports.values())).players)
    lines = [
        about,
        "Success, the mean over a suite's environments, with 95 % intervals over seeds. The",
        f"tables of a suite have every environment, its JSON has every episode. Minutes: {spent}.",
        "",
        f"| suite | seeds | episodes | {' | '.join(names)} | |",
        "|---|---|---|" + "---|" * (len(names) + 1),
    ]
    for suite, report in reports.items():
        rates = report.summary.overall.values()
        intervals = [f"{r.value:.3f} [{r.low:.3f}, {r.high:.3f}]" if r.n else "not known" for r in rates]
        links = f"[tables]({suite}.md), [page]({suite}.html), [JSON]({suite}.json)"
        title = suite if report.complete else f"{suite}, incomplete"
        cells = [title, report.settings["episodes"], len(report.records), *intervals, links]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "", *gains(reports)]) + "\n"


def gains(reports):
    """Effects of training: success in every suite, and rewards that differ significantly."""
    suites, gaps = {}, {}
    for suite, report in reports.items():
        for pair in (*report.summary.overall_pairs, *report.summary.pairs):
            if {pair.first, pair.second} == {"smollm2", "trained"}:
                if not pair.env:
                    suites[f"{suite}, p {pair.p_adjusted:.3f}"] = pair.reward
                elif pair.p_adjusted < 0.05:
                    gaps[pair.env] = pair.reward
    head = "| trained minus untrained: success, adjusted for all pairs of players | with 95 % interval |"
    lines = [head, "|---|---|", *_gaps(suites)]
    if gaps:
        head = "| reward, trained minus untrained (p < 0.05 after Holm) | with 95 % interval |"
        lines += ["", head, "|---|---|", *_gaps(dict(sorted(gaps.items())))]
    return lines


def _gaps(gaps):
    """Rows; the report has the untrained model first."""
    return [f"| {name} | {-gap.value:+.3f} [{-gap.high:+.3f}, {-gap.low:+.3f}] |" for name, gap in gaps.items()]


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="the model before training")
    parser.add_argument("--trained", default="", help="folder or name of the trained model; by default one is trained")
    parser.add_argument("--steps", type=int, default=20, help="of training")
    parser.add_argument("--seeds", type=int, help="of every suite, instead of each suite's own number")
    parser.add_argument("--minutes", type=float, default=30.0, help="after which no episode is begun")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark"), help="of what was played and trained")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark/reports"), help="of the reports")
    args = parser.parse_args(words)
    started = time.monotonic()
    trained = args.trained or str(train(args.model, args.folder / "training", args.steps))
    after_training = time.monotonic()
    players = {
        "smollm2": fa.Policy(args.model, sampling=SAMPLING),
        "trained": fa.Policy(trained, sampling=SAMPLING),
        "scripted": fa.Scripted(by_rule),
        "random": fa.Random(),
    }
    minutes = args.minutes - (after_training - started) / 60
    reports = play(players, args.folder, args.out, seeds=args.seeds, minutes=minutes)
    parts = [f"training {(after_training - started) / 60:.1f}"]
    parts += [f"{suite} {report.timing['seconds'] / 60:.1f}" for suite, report in reports.items()]
    text = overview(reports, f"{(time.monotonic() - started) / 60:.1f} ({', '.join(parts)})")
    (args.out / "README.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
