"""What each word after ``forge-agents`` does.

In: the words after it. Out: lines on the terminal and an exit status. Waits for what the command does.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_agents.bench.report import Report
    from forge_agents.cli.config import Parser
    from forge_agents.policy import Policy


def train(words: Sequence[str]) -> int:
    """Train a team: forge-agents train CONFIG.yaml [--steps 200] [--trainer.learner.lr 1e-5 ...]"""
    import forge_agents as fa
    from forge_agents.cli.config import parse

    run = parse(fa.RunConfig, words, prog="forge-agents train", description=str(train.__doc__))
    run = run.warmed_up()
    for name in run.warm_start:
        print(f"{name} starts from {run.policies[name].model}")
    with fa.GRPOTrainer(run.seated, run.load_reward(), run.trainer, run.out_dir, run.mesh) as trainer:
        result = trainer.fit(run.env, steps=run.steps, env_args=run.env_args)
    print(f"{result.steps} steps are in {result.out_dir}\ncurve  {result.curve}\nmodel  {result.export}")
    _say_next(
        _with_config("eval", words),
        f"forge-agents bench --players.trained {_one_model(result.export, run.policies)} --players.random random"
        f" --suite {_one_env(run.env)}",
        f"forge-agents view {result.out_dir}",
    )
    return 0


def sft(words: Sequence[str]) -> int:
    """Fine-tune on conversations or episodes: forge-agents sft CONFIG.yaml [--data chats.jsonl --epochs 3 ...]"""
    import forge_agents as fa
    from forge_agents.cli.config import parse

    run = parse(fa.SFTRunConfig, words, prog="forge-agents sft", description=str(sft.__doc__))
    with fa.SFTTrainer(run.policy, run.trainer, run.out_dir, run.mesh) as trainer:
        result = trainer.fit(run.data, eval_dataset=run.eval_data, epochs=run.epochs, steps=run.steps)
    print(f"{result.steps} steps are in {result.out_dir}\ncurve  {result.curve}\nmodel  {result.export}")
    _say_next(f"forge-agents train CONFIG.yaml --policies.{run.policy.name}.model {result.export}")
    return 0


def evaluate(words: Sequence[str]) -> int:
    """Play held-out seeds: forge-agents eval CONFIG.yaml [--trainer.eval_episodes 128]"""
    import forge_agents as fa
    from forge_agents.cli.config import parse

    run = parse(fa.RunConfig, words, prog="forge-agents eval", description=str(evaluate.__doc__))
    run = run.warmed_up(train=False)
    with fa.GRPOTrainer(run.seated, run.load_reward(), run.trainer, run.out_dir, run.mesh) as trainer:
        result = trainer.evaluate(run.env, episodes=run.trainer.eval_episodes, env_args=run.env_args)
    print(f"reward {result.reward:.4f} +/- {result.ci:.4f} (95 %)")
    said_nothing = f", {result.abstained} without a reward" if result.abstained else ""
    print(f"{len(result.episodes)} episodes, {result.failed} failed{said_nothing}")
    for name, reward in {**result.by_agent, **result.by_policy}.items():
        print(f"  {name}: {reward:.4f}")
    return int(result.failed == len(result.episodes))  # nothing was measured


def export(words: Sequence[str]) -> int:
    """Write a checkpoint as a Hugging Face model: forge-agents export RUN [--checkpoint best] [--out FOLDER]"""
    import forge_agents as fa

    parser = _parser("export", export)
    parser.add_argument("run", type=str, help="Folder of a training run.")
    parser.add_argument("--checkpoint", type=str, default="best", help="best, newest, or a name such as step-000020.")
    parser.add_argument("--out", type=str, default="", help="A new folder; default: RUN/export-step-NNNNNN.")
    chosen = parser.parse_args(list(words))
    written = fa.export_checkpoint(chosen.run, checkpoint=chosen.checkpoint, out=chosen.out or None)
    found = [written] if (written / "config.json").exists() else sorted(written.iterdir())
    print("\n".join(f"model  {model}" for model in found))
    _say_next(f"forge-agents serve {found[0]}")
    return 0


def demo(words: Sequence[str]) -> int:
    """Train two agents on the whole stack, beside a control: forge-agents demo [--seed 1]"""
    import forge_agents as fa
    from forge_agents.cli.config import parse

    return 0 if fa.demo(parse(fa.DemoConfig, words, prog="forge-agents demo", description=str(demo.__doc__))) else 1


def simulate(words: Sequence[str]) -> int:
    """Predict time and cost of a run: forge-agents simulate CONFIG.yaml --measured RUN [--gpus 512]"""
    from forge_agents.cli.simulate import predict

    return predict(words, str(simulate.__doc__))


def play(words: Sequence[str]) -> int:
    """Take a seat in the terminal: forge-agents play ENV [--seat p0] [--model ID | --opponent random]"""
    from forge_agents.cli.config import parse
    from forge_agents.cli.play import PlayConfig, left, play_in_terminal

    if words and not words[0].startswith("-"):
        words = ["--env", *words]
    config = parse(PlayConfig, words, prog="forge-agents play", description=str(play.__doc__))
    episode = play_in_terminal(config)
    return 0 if episode.error is None or left(episode) else 1


def bench(words: Sequence[str]) -> int:
    """Benchmark players: forge-agents bench [CONFIG.yaml] --players.NAME WHAT ... [--suite core-v1] [--episodes 64]"""
    import forge_agents as fa
    from forge_agents.bench.plan import BenchConfig
    from forge_agents.cli.config import parse

    chosen = parse(BenchConfig, words, prog="forge-agents bench", description=str(bench.__doc__))
    report = fa.benchmark(
        chosen.entrants(),
        chosen.suite,
        episodes=chosen.episodes,
        seed=chosen.seed,
        swap_seats=chosen.swap_seats,
        samples=chosen.samples,
        exploitability_samples=chosen.exploitability_samples,
        limits=chosen.limits,
        engine=chosen.engine,
        out_dir=chosen.out_dir,
    )
    report.table()
    saved = report.save(chosen.json or Path(chosen.out_dir) / "board.json")
    print(f"report {saved}")
    _write_pages(report, chosen.html, chosen.markdown)
    if report.complete:
        _say_next(f"forge-agents leaderboard {saved} OTHER.json --html all.html")
    else:
        _say_next(f"{_with_config('bench', words)}   (plays what is missing)")
    return 0 if report.complete else 1


def leaderboard(words: Sequence[str]) -> int:
    """Merge reports of benchmarks: forge-agents leaderboard A.json B.json [--out ALL.json] [--html PAGE]"""
    from forge_agents.bench.report import leaderboard as merge

    parser = _parser("leaderboard", leaderboard)
    parser.add_argument("reports", nargs="+", type=str, help="Files that bench wrote, of one suite and one seed.")
    parser.add_argument("--out", type=str, default="", help="Write the merged report as JSON.")
    parser.add_argument("--html", type=str, default="", help="Write it as a page.")
    parser.add_argument("--markdown", type=str, default="", help="Write it as Markdown.")
    chosen = parser.parse_args(list(words))
    report = merge(*chosen.reports)
    report.table()
    if chosen.out:
        print(f"report {report.save(chosen.out)}")
    _write_pages(report, chosen.html, chosen.markdown)
    return 0


def init(words: Sequence[str]) -> int:
    """Write a folder to begin with: forge-agents init [DIR] [--template team]"""
    from forge_agents.cli.init import TEMPLATES, create

    parser = _parser("init", init)
    parser.add_argument("dir", nargs="?", type=str, default=".", help="The folder, new or empty; this one by default.")
    parser.add_argument("--template", choices=sorted(TEMPLATES), default="team", help=_lines(TEMPLATES))
    chosen = parser.parse_args(list(words))
    root = create(chosen.dir, chosen.template)
    print(f"wrote  {', '.join(str(root / file.name) for file in sorted(root.iterdir()))}")
    _say_next("forge-agents train train.yaml" if chosen.dir == "." else f"cd {root} && forge-agents train train.yaml")
    return 0


def completion(words: Sequence[str]) -> int:
    """Complete words in the shell: forge-agents completion bash|zsh|fish"""
    from forge_agents.cli.completion import SHELLS, script

    parser = _parser("completion", completion)
    parser.add_argument("shell", choices=SHELLS, help="Whose script is printed.")
    print(script(parser.parse_args(list(words)).shell))
    return 0


def _lines(meanings: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {meaning}" for name, meaning in meanings.items()) + "."


def _write_pages(report: Report, html: str, markdown: str) -> None:
    if html:
        print(f"page   {report.html(html)}")
    if markdown:
        report.markdown(markdown)
        print(f"text   {markdown}")


def list_environments(words: Sequence[str]) -> int:
    """List environments and suites: forge-agents list [--tag 2p]"""
    from rich.console import Console
    from rich.table import Column, Table

    from forge_agents.envs import registry

    parser = _parser("list", list_environments)
    parser.add_argument("--tag", type=str, help="Only environments with this tag.")
    chosen = registry.list_envs(parser.parse_args(list(words)).tag)
    specs = [registry.spec(env_id) for env_id in chosen]
    rows = [(spec.id, ", ".join(spec.tags), str(spec.max_turns or "")) for spec in specs]
    console = Console()
    if console.is_terminal:
        table = Table(Column("id", overflow="fold"), "tags", "turns", title="environments")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:  # for programs: a line each, fields between tabs
        print("\n".join("\t".join(row) for row in rows))
    for suite in registry.list_suites():
        print(f"suite {suite}")
    return 0


def check(words: Sequence[str]) -> int:
    """Check environments against the contract: forge-agents check ID [ID ...] | --all [--tag 2p] [--json]"""
    from forge_agents.envs import registry
    from forge_agents.envs.conformance.check import report_all

    parser = _parser("check", check)
    parser.add_argument("ids", nargs="*", help="Environment ids.")
    parser.add_argument("--all", action="store_true", help="Every registered id.")
    parser.add_argument("--tag", type=str, help="Of --all, only ids with this tag.")
    parser.add_argument("--json", action="store_true", help="One JSON object per id and line.")
    parser.add_argument("--episodes", type=int, help="Episodes of each check; default: 8, of an adapter's id 20.")
    parser.add_argument("--seed", type=int, default=0, help="Seeds the episodes and the texts played.")
    parser.add_argument("--timeout_s", type=float, default=600.0, help="Seconds for each id.")
    chosen = parser.parse_args(list(words))
    if bool(chosen.ids) == chosen.all or (chosen.tag and not chosen.all):
        parser.error("name ids, or --all, which --tag narrows")
    failed = report_all(
        registry.list_envs(chosen.tag) if chosen.all else [registry.spec(env_id).id for env_id in chosen.ids],
        as_json=chosen.json,
        brief=chosen.all,
        episodes=chosen.episodes,
        seed=chosen.seed,
        timeout_s=chosen.timeout_s,
    )
    return 1 if failed else 0


def verifiers(words: Sequence[str]) -> int:
    """Show what a run learned of its verifiers: forge-agents verifiers report RUN [--out report.html]"""
    import forge_agents as fa

    parser = _parser("verifiers", verifiers)
    parser.add_argument("action", choices=["report"], help="report: print the table, write the page.")
    parser.add_argument("run", help="The run's folder: out_dir of a training whose reward is an Ensemble.")
    parser.add_argument("--out", type=str, help="The HTML file; verifiers.html in the run's folder by default.")
    chosen = parser.parse_args(list(words))
    history = fa.verifier_history(chosen.run)
    report = history[-1].report
    print(report.table())
    print(report.html(chosen.out or Path(chosen.run) / "verifiers.html", history))
    return 0


def view(words: Sequence[str]) -> int:
    """Look at runs in a browser: forge-agents view RUN [RUN ...] [--port 8765] [--out PAGE.html]"""
    from forge_agents import viewer

    parser = _parser("view", view)
    parser.add_argument("runs", nargs="+", type=str, help="Folders of runs and benchmarks, or folders of such folders.")
    parser.add_argument("--port", type=int, help="On 127.0.0.1; default: 8765, or another where that is in use.")
    parser.add_argument("--browser", action="store_true", help="Open the page in this machine's browser.")
    parser.add_argument("--out", type=str, default="", help="Write one HTML file to share instead of serving.")
    parser.add_argument("--episodes", type=int, default=200, help="Newest episodes of each run in that file.")
    chosen = parser.parse_args(list(words))
    if chosen.out:
        print(f"page   {viewer.save_page(chosen.runs, chosen.out, episodes=chosen.episodes)}")
    else:
        viewer.serve_page(chosen.runs, port=chosen.port, browser=chosen.browser)
    return 0


def serve(words: Sequence[str]) -> int:
    """Serve a model behind a token: forge-agents serve CHECKPOINT [--port 8000] [-- options of vllm serve]"""
    from forge_agents.cli.config import parse
    from forge_agents.cli.serve import ServeConfig
    from forge_agents.cli.serve import serve as become_server

    own = list(words)
    more = own[own.index("--") + 1 :] if "--" in own else []
    own = own[: own.index("--")] if "--" in own else own
    if own and not own[0].startswith("-"):
        own = ["--checkpoint", *own]
    config = parse(ServeConfig, own, prog="forge-agents serve", description=str(serve.__doc__))
    become_server(config, more)


def new_env(words: Sequence[str]) -> int:
    """Write a project with a two-seat game and its test: forge-agents new-env NAME [--out FOLDER]"""
    from forge_agents.cli.new_env import create

    parser = _parser("new-env", new_env)
    parser.add_argument("name", type=str, help="Name of the project, such as word-duel.")
    parser.add_argument("--out", type=str, default=".", help="Where its folder is made.")
    chosen = parser.parse_args(list(words))
    root = create(chosen.name, chosen.out)
    print(f"wrote {root}\nnext   cd {root} && pip install -e . && pytest")
    return 0


def download(words: Sequence[str]) -> int:
    """Fetch a model: forge-agents download ID [--ignore '*.bin']"""
    from forge_agents.models import resolve as models

    parser = _parser("download", download)
    parser.add_argument("id", type=str, help="Hugging Face id or built-in name.")
    parser.add_argument("--ignore", type=str, nargs="*", default=[], help="File patterns to leave out.")
    chosen = parser.parse_args(list(words))
    print(models.download(chosen.id, ignore=tuple(chosen.ignore)))
    return 0


def doctor(words: Sequence[str]) -> int:
    """Try every part for real and say how to mend what fails: forge-agents doctor"""
    from forge_agents.cli import doctor as examination

    _parser("doctor", doctor).parse_args(list(words))
    return examination.main()


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "demo": demo,
    "init": init,
    "train": train,
    "sft": sft,
    "eval": evaluate,
    "simulate": simulate,
    "export": export,
    "play": play,
    "bench": bench,
    "leaderboard": leaderboard,
    "list": list_environments,
    "check": check,
    "verifiers": verifiers,
    "view": view,
    "serve": serve,
    "new-env": new_env,
    "download": download,
    "completion": completion,
    "doctor": doctor,
}


def _say_next(*commands: str) -> None:
    """What a person would do now."""
    for title, command in zip(("next  ", *["      "] * len(commands)), commands, strict=False):
        print(f"{title} {command}")


def _with_config(command: str, words: Sequence[str]) -> str:
    """The same words for another command, or the same again."""
    return shlex.join(["forge-agents", command, *words])


def _one_model(export: Path, policies: Mapping[str, Policy]) -> Path:
    """The folder of one trained model in an export, which has a folder for each where there are several."""
    inside = [export / name for name, policy in policies.items() if policy.trainable and (export / name).is_dir()]
    return inside[0] if inside else export


def _one_env(env: str | Mapping[str, float]) -> str:
    return env if isinstance(env, str) else next(iter(env))


def _parser(name: str, run: Callable[[Sequence[str]], int]) -> Parser:
    from forge_agents.cli.config import Parser

    return Parser(prog=f"forge-agents {name}", description=run.__doc__)
