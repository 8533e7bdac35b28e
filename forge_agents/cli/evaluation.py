"""Commands that evaluate: ``eval``, ``bench`` and ``play``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forge_agents.cli.registry import command, make_parser, parse_settings, print_next, print_visible, repeat
from forge_agents.files import user_path

if TYPE_CHECKING:
    from forge_agents.bench.report import Report


@command("eval", "forge-agents eval train.yaml", "forge-agents eval train.yaml --trainer.eval_episodes 256")
def evaluate(argv: Sequence[str]) -> int:
    """Evaluate the policies of a run's file on held-out seeds."""
    import forge_agents as fa

    run = parse_settings("eval", fa.RunConfig, argv).warmed_up(train=False)
    with fa.GRPOTrainer(run.players, run.load_reward(), run.trainer, run.out_dir, run.mesh) as trainer:
        result = trainer.evaluate(run.played, episodes=run.trainer.eval_episodes, env_args=run.env_args)
    print_visible(f"reward {result.reward:.4f} +/- {result.ci:.4f} (95 %), scored by {result.scored_by}")
    if result.scored_by != "environment":
        print(f"environment's reward {result.env_reward:.4f} +/- {result.env_ci:.4f} (95 %)")
    abstained = f", {result.abstained} without a reward" if result.abstained else ""
    players = Counter(episode.failed_policy for episode in result.episodes if episode.failed_policy)
    by = f" ({', '.join(f'{number} by {name}' for name, number in players.items())})" if players else ""
    print(f"{len(result.episodes)} episodes, {result.failed} failed{by}{abstained}")
    by_env = result.by_env if len(result.by_env) > 1 else {}
    for name, reward in {**by_env, **result.by_agent, **result.by_policy}.items():
        print_visible(f"  {name}: {reward:.4f}")
    return int(result.failed == len(result.episodes))  # no episode was measured


@command(
    "bench",
    "forge-agents bench --players.random random --suite duel-v0 --episodes 16",
    "forge-agents bench --players.before smollm2-135m-instruct --players.after runs/relay/export --html board.html",
    "forge-agents bench forge/Relay-v0 --cross_play runs/relay/seed-0 runs/relay/seed-1 random",
    "forge-agents bench merge mine/board.json theirs/board.json --html all.html",
)
def bench(argv: Sequence[str]) -> int:
    """Compare players on a suite, or merge reports (bench merge)."""
    import forge_agents as fa
    from forge_agents.bench.plan import BenchConfig
    from forge_agents.bench.play import BOARD
    from forge_agents.cli.config import with_flag

    if argv and argv[0] == "merge":
        return _merge(argv[1:])
    is_file = not argv or argv[0].endswith((".yaml", ".yml")) or user_path(argv[0]).is_file()
    argv_with_lists = join_lists(argv, ("--cross_play", "--partners"))
    config = parse_settings("bench", BenchConfig, with_flag("--config" if is_file else "--suite", argv_with_lists))
    report = fa.benchmark(
        config.entrants(),
        config.suite,
        episodes=config.episodes,
        seed=config.seed,
        swap_agents=config.swap_agents,
        samples=config.samples,
        exploitability_samples=config.exploitability_samples,
        partners=config.partners,
        limits=config.limits,
        engine=config.engine,
        out_dir=config.out_dir,
    )
    board = Path(config.json or user_path(config.out_dir) / BOARD)
    _write(report, board, html=config.html, markdown=config.markdown)
    if report.complete:
        print_next(repeat("bench", ["merge", str(board), "OTHER.json", "--html", "all.html"]))
    else:
        print_next(f"{repeat('bench', argv)}   (plays the missing episodes)")
    return 0 if report.complete else 1


def _merge(argv: Sequence[str]) -> int:
    from forge_agents.bench import tables
    from forge_agents.bench.merge import board, leaderboard
    from forge_agents.files import write_atomic

    parser = make_parser("bench")
    parser.prog += " merge"
    parser.description = "Merge reports of one suite and one seed, or show reports of several suites on one page."
    parser.add_argument("reports", nargs="+", type=str, help="JSON files that `forge-agents bench` wrote.")
    parser.add_argument("--out", type=str, default="", help="JSON file for the merged report.")
    parser.add_argument("--html", type=str, default="", help="HTML file for it.")
    parser.add_argument("--markdown", type=str, default="", help="Markdown file for it.")
    parser.add_argument("--suites", type=str, default="", help="Markdown file with a table per suite, instead.")
    options = parser.parse_args(list(argv))
    if options.suites:
        if options.out or options.html or options.markdown:
            parser.error("--suites cannot be combined with --out, --html or --markdown")
        suites = board(*options.reports)
        tables.show(suites)
        print_visible(
            f"page   {write_atomic(options.suites, tables.as_markdown(suites), replaces=f'# {suites.title}')}"
        )
        return 0
    _write(leaderboard(*options.reports), options.out, html=options.html, markdown=options.markdown)
    return 0


def _write(report: Report, out: str | Path, *, html: str, markdown: str) -> None:
    report.table()
    if out:
        print_visible(f"report {report.save(out)}")
    if html:
        print_visible(f"page   {report.html(html)}")
    if markdown:
        report.markdown(markdown)
        print_visible(f"text   {markdown}")


def join_lists(argv: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Join all values that follow one of `flags` to one JSON list, because a shell pattern expands to several words."""
    joined: list[str] = []
    values_of: dict[str, list[str]] = {}
    flag = ""
    for word in argv:
        name, equals, value = word.partition("=")
        flag = (name if name in flags else "") if word.startswith("-") else flag
        if name in flags:
            values_of.setdefault(name, []).extend([value] if equals else [])
        else:
            (values_of[flag] if flag else joined).append(word)
    for name, values in values_of.items():
        plain = values and not values[0].startswith("[")
        joined += [name, *([json.dumps(values, ensure_ascii=False)] if plain else values)]
    return joined


@command(
    "play",
    "forge-agents play forge/KuhnPoker-v0",
    "forge-agents play forge/KuhnPoker-v0 --agent player_1 --model smollm2-135m-instruct --sampling.temperature 0.7",
    "forge-agents play forge/Relay-v0 --endpoint http://127.0.0.1:8000/v1 --endpoint_model mine --api_key_env KEY",
    "forge-agents play forge/LeducPoker-v0 --opponent human --seed 3",
    "forge-agents play forge/Relay-v0 --env_args.max_number 9",
    "forge-agents play forge/Fireworks-v0@2 --opponent oracle",
    "forge-agents play forge/Relay-v0 --watch true --model smollm2-135m-instruct",
)
def play(argv: Sequence[str]) -> int:
    """Act for an agent in the terminal, or watch an episode."""
    from forge_agents.cli.config import with_flag
    from forge_agents.cli.play import PlayConfig, left, play_in_terminal

    episode = play_in_terminal(parse_settings("play", PlayConfig, with_flag("--env", argv)))
    return 0 if episode.error is None or left(episode) else 1
