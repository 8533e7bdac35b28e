"""What each word after ``forge-agents`` does, with the examples that its help shows.

In: the words after it. Out: lines on the terminal and an exit status. Waits for what the command does.
"""

from __future__ import annotations

import copy
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from forge_agents.files import check_contained, user_path

if TYPE_CHECKING:
    import forge_agents as fa
    from forge_agents.bench.report import Report
    from forge_agents.cli.config import Parser

T = TypeVar("T")
Command: TypeAlias = Callable[[Sequence[str]], int]
COMMANDS: dict[str, Command] = {}
"""By name, in the order in which help lists them."""
WITH_USER_MODULES = ("train", "sft", "eval", "simulate", "play", "bench", "list", "check")
"""Commands in whose words or files users name modules of their own; only these look for modules in the current folder.

The others work on runs, which may be a stranger's.
"""
EXAMPLES: dict[str, tuple[str, ...]] = {}
"""Command lines that the help of each command shows, by its name."""


def _command(name: str, *examples: str) -> Callable[[Command], Command]:
    def keep(run: Command) -> Command:
        COMMANDS[name], EXAMPLES[name] = run, examples
        return run

    return keep


def _parser(name: str) -> Parser:
    from forge_agents.cli.config import Parser

    return Parser(prog=f"forge-agents {name}", description=COMMANDS[name].__doc__, examples=EXAMPLES[name])


def _parse(name: str, kind: type[T], words: Sequence[str]) -> T:
    from forge_agents.cli.config import parse

    about = str(COMMANDS[name].__doc__)
    return parse(kind, words, prog=f"forge-agents {name}", description=about, examples=EXAMPLES[name])


@_command("demo", "forge-agents demo", "forge-agents demo --seed 1 --control_steps 0")
def demo(words: Sequence[str]) -> int:
    """Train two agents on the whole stack, beside a control: forge-agents demo [--seed 1]"""
    import forge_agents as fa

    return 0 if fa.demo(_parse("demo", fa.DemoConfig, words)) else 1


@_command("init", "forge-agents init my-team", "forge-agents init my-duel --template duel")
def init(words: Sequence[str]) -> int:
    """Write a folder to begin with: forge-agents init [DIR] [--template team]"""
    from forge_agents.cli.scaffold import TEMPLATES, create

    meanings = "; ".join(f"{name}: {meaning}" for name, meaning in TEMPLATES.items()) + "."
    parser = _parser("init")
    parser.add_argument("dir", nargs="?", type=str, default=".", help="The folder, new or empty; this one by default.")
    parser.add_argument("--template", choices=sorted(TEMPLATES), default="team", help=meanings)
    chosen = parser.parse_args(list(words))
    root = create(chosen.dir, chosen.template)
    print(f"wrote  {', '.join(str(root / file.name) for file in sorted(root.iterdir()))}")
    _say_next("forge-agents train train.yaml" if chosen.dir == "." else f"cd {root} && forge-agents train train.yaml")
    return 0


@_command(
    "train",
    "forge-agents train train.yaml",
    "forge-agents train train.yaml --steps 200 --trainer.learner.lr 1e-5 --out_dir runs/second",
    "forge-agents train train.yaml --trainer.tracker wandb",
    "forge-agents train --env forge/Relay-v0 --policies.team.model smollm2-135m-instruct",
    "forge-agents train train.yaml --seeds 3 --out_dir runs/population",
    "forge-agents train examples/slurm/train.yaml --dry-run",
    "forge-agents train train.yaml --dry-run --gpus_per_host 8",
)
def train(words: Sequence[str]) -> int:
    """Train a team: forge-agents train CONFIG.yaml [--steps 200] [--trainer.learner.lr 1e-5 ...]"""
    import forge_agents as fa
    from forge_agents.cli.config import add_fields, built, with_flag

    parser = _parser("train")
    add_fields(parser, fa.RunConfig)
    parser.add_argument("--dry-run", action="store_true", help="Only say which processes it would start, and where.")
    parser.add_argument(
        "--gpus_per_host",
        type=int,
        help="Of --dry-run: GPUs of this machine, and of each other host whose role mesh.gpus does not name; default: "
        "those that this machine has, and 8 of others.",
    )
    parser.add_argument("--seeds", type=int, default=1, help="So many runs one after the other, in folders of out_dir.")
    chosen = parser.parse_args(with_flag("--config", words))
    dry_run, gpus_per_host, seeds = (chosen.pop(name) for name in ("dry_run", "gpus_per_host", "seeds"))
    if seeds < 1:
        parser.error(f"--seeds {seeds} trains nothing; give at least 1")
    if gpus_per_host is not None and not dry_run:
        parser.error("--gpus_per_host is read by --dry-run alone: add that, or leave it out")
    if gpus_per_host is not None and gpus_per_host < 0:
        parser.error(f"--gpus_per_host {gpus_per_host}: give 0 or more")
    run = built(parser, fa.RunConfig, chosen)
    if dry_run:
        print("\n".join(run.rehearsal(gpus_per_host=gpus_per_host)))
        return 0
    check_contained(user_path(run.out_dir))  # a warm start and several seeds have folders of their own in it
    run = run.warmed_up()
    for name in run.warm_start:
        print(f"{name} starts from {run.policies[name].model}")
    for told in run.idle:
        print(told)
    rewards, models = _apart(run.load_reward(), seeds), []
    for one, reward in zip(run.of_seeds(seeds), rewards, strict=True):
        with fa.GRPOTrainer(one.seated, reward, one.trainer, one.out_dir, one.mesh) as trainer:
            result = trainer.fit(one.played, steps=one.steps, env_args=one.env_args)
        print(f"{result.steps} steps are in {result.out_dir}\ncurve  {result.curve}\nmodel  {result.export}")
        models.append(_trained_player(run, result))
    bench = f"{_with_modules(words)}forge-agents bench"
    if seeds > 1:
        _say_next(
            f"{bench} {shlex.join([run.suite, '--cross_play', *map(str, models)])}",
            f"forge-agents view {run.out_dir}",
        )
        return 0
    model = models[0]
    _say_next(
        _again("eval", words),
        f"{bench} --players.trained {model} --players.random random --suite {run.suite}",
        f"forge-agents view {run.out_dir}",
    )
    return 0


def _trained_player(run: fa.RunConfig, result: fa.FitResult) -> Path:
    """What a benchmark takes as the trained player: one model, or the run's folder for a team with several models."""
    folders = {name: result.export / name for name, policy in run.policies.items() if policy.trainable}
    exported = {name: folder for name, folder in folders.items() if folder.is_dir()}
    agents = run.policy_mapping.values() if isinstance(run.policy_mapping, dict) else ()
    if len(exported) > 1 and agents and set(agents) <= exported.keys():
        return result.out_dir
    return next(iter(exported.values()), result.export)


def _apart(reward: Any, count: int) -> list[Any]:
    """The reward of each of several runs: one that learns, such as an ensemble, must not know what others showed it."""
    try:
        return [reward] if count == 1 else [copy.deepcopy(reward) for _ in range(count)]
    except Exception as cause:
        raise ValueError(
            f"the reward cannot be copied for each seed ({cause}); train each by itself, with --trainer.seed and "
            "--out_dir"
        ) from cause


@_command(
    "sft",
    "forge-agents sft sums.yaml",
    "forge-agents sft --data chats.jsonl --policy.model smollm2-135m-instruct --out_dir runs/sft --epochs 3",
    "forge-agents sft --data forge/Codewords-v0@1 --games 96 --policy.model smollm2-135m-instruct",
)
def sft(words: Sequence[str]) -> int:
    """Fine-tune on conversations or episodes: forge-agents sft CONFIG.yaml [--data chats.jsonl --epochs 3 ...]"""
    import forge_agents as fa

    run = _parse("sft", fa.SFTRunConfig, words)
    with fa.SFTTrainer(run.policy, run.trainer, run.out_dir, run.mesh) as trainer:
        result = trainer.fit(run.dataset(), eval_dataset=run.eval_data, epochs=run.epochs, steps=run.steps)
    print(f"{result.steps} steps are in {result.out_dir}\ncurve  {result.curve}\nmodel  {result.export}")
    _say_next(f"forge-agents train CONFIG.yaml --policies.{run.policy.name}.model {result.export}")
    return 0


@_command(
    "import",
    "forge-agents import traces.jsonl --out chats.jsonl",
    "forge-agents import day1.json day2.json --model planner --out planner.jsonl",
    "forge-agents import traces.jsonl --pairs helpful --out pairs.jsonl",
)
def import_(words: Sequence[str]) -> int:
    """Make training data of recorded conversations: forge-agents import TRACES --out chats.jsonl [--pairs SCORE]"""
    from forge_agents.display import printable
    from forge_agents.programs.traces import import_traces

    parser = _parser("import")
    parser.add_argument(
        "traces", nargs="+", type=str, help="JSON files of spans (OpenTelemetry's), requests with responses, or chats."
    )
    parser.add_argument("--out", type=str, required=True, help="The JSONL file to write; it must not exist.")
    parser.add_argument("--model", type=str, help="Only the calls of the model or the agent with this name.")
    parser.add_argument(
        "--pairs", type=str, help="Write best and worst answers to the same, by the number that recordings call so."
    )
    chosen = parser.parse_args(list(words))
    said = 0

    def say(line: str) -> None:
        nonlocal said
        said += 1
        if said <= _MOST_SAID:
            print(printable(line), file=sys.stderr)

    try:
        done = import_traces(chosen.traces, chosen.out, model=chosen.model, pairs=chosen.pairs, say=say)
    finally:
        if said > _MOST_SAID:
            print(f"and {said - _MOST_SAID} more", file=sys.stderr)
    what = "pairs" if chosen.pairs else f"conversations with {done.answers} answers"
    print(f"wrote  {done.rows} {what} to {chosen.out}")
    for reason, count in done.left_out.items():
        print(f"  left out: {count} {printable(reason)}")
    if not chosen.pairs:
        _say_next(f"forge-agents sft --data {shlex.quote(chosen.out)} --policy.model MODEL --out_dir runs/sft")
    return 0


_MOST_SAID = 20
"""Lines of a file that cannot be read, each with its reason."""


@_command("eval", "forge-agents eval train.yaml", "forge-agents eval train.yaml --trainer.eval_episodes 256")
def evaluate(words: Sequence[str]) -> int:
    """Play held-out seeds: forge-agents eval CONFIG.yaml [--trainer.eval_episodes 128]"""
    import forge_agents as fa

    run = _parse("eval", fa.RunConfig, words).warmed_up(train=False)
    with fa.GRPOTrainer(run.seated, run.load_reward(), run.trainer, run.out_dir, run.mesh) as trainer:
        result = trainer.evaluate(run.played, episodes=run.trainer.eval_episodes, env_args=run.env_args)
    print(f"reward {result.reward:.4f} +/- {result.ci:.4f} (95 %), scored by {result.scored_by}")
    if result.scored_by != "environment":
        print(f"environment's own reward {result.env_reward:.4f} +/- {result.env_ci:.4f} (95 %)")
    said_nothing = f", {result.abstained} without a reward" if result.abstained else ""
    print(f"{len(result.episodes)} episodes, {result.failed} failed{said_nothing}")
    by_env = result.by_env if len(result.by_env) > 1 else {}
    for name, reward in {**by_env, **result.by_agent, **result.by_policy}.items():
        print(f"  {name}: {reward:.4f}")
    return int(result.failed == len(result.episodes))  # nothing was measured


@_command(
    "simulate",
    "forge-agents simulate train.yaml --measured runs/measured",
    "forge-agents simulate train.yaml --measured runs/measured runs/async --trainer.max_staleness 1 --json",
    "forge-agents simulate train.yaml --measured runs/measured --gpus 64 --learner_gpus 16",
    "forge-agents simulate train.yaml --measured runs/measured --gpus 512 --sweep --price_per_gpu_hour 2.5",
    "forge-agents simulate train.yaml --gpus 8 --model 8b",
    "forge-agents simulate train.yaml --gpus 8 --model solver=8b critic=0.6b",
    "forge-agents simulate train.yaml --gpus 8 --model",
)
def simulate(words: Sequence[str]) -> int:
    """Predict time and cost of a run, or whether it fits: forge-agents simulate CONFIG.yaml [--gpus 8 --model 8b]"""
    from rich.console import Console

    import forge_agents as fa
    from forge_agents.cli.config import add_fields, built, with_flag

    parser = _parser("simulate")
    add_fields(parser, fa.RunConfig)
    parser.add_argument(
        "--measured", nargs="+", type=str, default=[], help="Folders of short measured runs; default: that of out_dir."
    )
    parser.add_class_arguments(fa.Hardware, as_group=False)
    parser.add_argument("--simulated_steps", type=int, default=8, help="Warm steps that means are taken over.")
    parser.add_argument("--sweep", action="store_true", help="Show every split of the GPUs that was tried.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    parser.add_argument(
        "--model",
        nargs="*",
        type=str,
        help="Say whether the run fits into --gpus, without measuring: with this model for every policy (0.6b, 8b, "
        "32b, 70b, 30b-a3b, or as a policy names one), with one for some (solver=8b critic=0.6b), or, with nothing "
        "after it, with the file's own.",
    )
    parser.add_argument("--gpu_gb", type=float, default=80.0, help="Memory of each GPU, 1e9 bytes.")
    parser.add_argument("--host_gb", type=float, help="Free memory of each host, 1e9 bytes; default: not compared.")
    chosen = parser.parse_args(with_flag("--config", words))
    measured, steps, sweep, as_json = (chosen.pop(n) for n in ("measured", "simulated_steps", "sweep", "json"))
    model, gpu_gb, host_gb = (chosen.pop(name) for name in ("model", "gpu_gb", "host_gb"))
    asked = _models_asked(parser, model)
    if asked is not None and not chosen.gpus:
        parser.error("--model asks whether a run fits; say into how many GPUs with --gpus, at least 1")
    timed = {"measured": measured, "sweep": sweep, "learner_gpus": chosen.learner_gpus}
    if asked is not None and (unread := [name for name, value in timed.items() if value]):
        parser.error(f"--model asks whether a run fits, and nothing is measured or timed: leave out --{unread[0]}")
    for name, given in (("gpu_gb", gpu_gb), ("host_gb", host_gb)):
        if asked is None and given != parser.get_default(name):
            parser.error(f"--{name} is read where it is asked whether a run fits: add --model, or leave it out")
    if sweep and not chosen.gpus:
        parser.error("--sweep tries splits of GPUs; say how many with --gpus")

    def both(**values: object) -> tuple[fa.RunConfig, fa.Hardware]:
        machine = {field.name: values.pop(field.name) for field in fields(fa.Hardware)}
        return fa.RunConfig(**values), fa.Hardware(**machine)  # type: ignore[arg-type]

    run, hardware = built(parser, both, chosen)
    if asked is not None:
        gpus = fa.Gpus(count=hardware.gpus, memory_gb=gpu_gb, per_host=hardware.gpus_per_host, host_gb=host_gb)
        return _fit(run, asked, gpus, as_json=as_json)
    found = fa.simulate(run, measured=measured, hardware=hardware, steps=steps)
    if as_json:
        print(json.dumps(found.json()))
        return 0
    console = Console()
    if sweep:
        console.print(found.splits_table())
    console.print(found.table())
    for assumption in found.assumptions:
        console.print(f"assumed: {assumption}", highlight=False)
    return 0


def _models_asked(parser: Parser, words: Sequence[str] | None) -> str | dict[str, str] | None:
    """What ``--model`` says: one model for all, or models by policy; None where it is not there."""
    if words is None:
        return None
    if len(words) == 1 and "=" not in words[0]:
        return words[0]
    found: dict[str, str] = {}
    for word in words:
        name, equals, model = word.partition("=")
        if not (name and equals and model):
            said = " ".join(words)
            parser.error(f"--model {said}: give one model for all policies, or POLICY=MODEL for each of some")
        if name in found:
            parser.error(f"--model gives {name} two models, {found[name]} and {model}; give one")
        found[name] = model
    return found


def _fit(run: fa.RunConfig, model: str | dict[str, str], gpus: fa.Gpus, *, as_json: bool) -> int:
    """Say whether a run fits into GPUs, and what to change. 0: it does as it is."""
    from rich.console import Console

    import forge_agents as fa

    policies = run.models
    if isinstance(model, dict):
        model = run.with_snapshots(model)
    found = fa.fit_gpus(
        run.trainer, model, gpus, policies=policies, hosts=run.mesh, judges=run.judges, held=run.held
    )
    if as_json:
        print(json.dumps(found.json()))
        return int(bool(found.changes))
    if found.changes:
        learning = [name for name, one in policies.items() if one.trainable and one.lora is None]
        print(f"as it is set it does not fit: {found.problem}")
        print("it does with " + ", ".join(_as_set(key, value, learning) for key, value in found.changes.items()))
    Console().print(found.table())
    print("none of these bytes was measured on a GPU by this project")
    for doubt in found.placement.doubts:
        print(doubt)
    if found.changes:
        return 1
    print(f"it fits into {gpus.count} GPU{'s' * (gpus.count != 1)} of {gpus.memory_gb:g} GB")
    if found.used < gpus.count:
        print(
            f"{found.used} of them {'has' if found.used == 1 else 'have'} something to do: trainer.learner_procs and "
            "trainer.engine.replicas say how many there are of each"
        )
    return 0


def _as_set(key: str, value: Any, learning: Sequence[str]) -> str:
    """A change, as a run's file has it; an adapter is one of each policy that learns all weights."""
    if key == "Policy.lora":
        from forge_agents.policy import LORA_TARGETS

        only = f", targets: [{', '.join(value.targets)}]" * (value.targets != LORA_TARGETS)
        adapter = f"{{rank: {value.rank}, alpha: {value.alpha:g}{only}}}"
        return ", ".join(f"policies.{policy}.lora: {adapter}" for policy in learning)
    return f"trainer.{key}: {value}"


@_command(
    "export", "forge-agents export runs/guess", "forge-agents export runs/guess --checkpoint newest --out guess"
)
def export(words: Sequence[str]) -> int:
    """Write a checkpoint as a Hugging Face model: forge-agents export RUN [--checkpoint best] [--out FOLDER]"""
    import forge_agents as fa

    parser = _parser("export")
    parser.add_argument("run", type=str, help="Folder of a training run.")
    parser.add_argument("--checkpoint", type=str, default="best", help="best, newest, or a name such as step-000020.")
    parser.add_argument("--out", type=str, default="", help="A new folder; default: RUN/export-step-NNNNNN.")
    chosen = parser.parse_args(list(words))
    written = fa.export_checkpoint(chosen.run, checkpoint=chosen.checkpoint, out=chosen.out or None, say=print)
    found = [written] if (written / "config.json").exists() else sorted(written.iterdir())
    print("\n".join(f"model  {model}" for model in found))
    _say_next(f"forge-agents serve {found[0]}")
    return 0


@_command(
    "play",
    "forge-agents play forge/KuhnPoker-v0",
    "forge-agents play forge/KuhnPoker-v0 --seat p1 --model smollm2-135m-instruct --sampling.temperature 0.7",
    "forge-agents play forge/Relay-v0 --endpoint http://127.0.0.1:8000/v1 --endpoint_model mine --api_key_env KEY",
    "forge-agents play forge/LeducPoker-v0 --opponent human --seed 3",
    "forge-agents play forge/Relay-v0 --env_args.max_number 9",
    "forge-agents play forge/Fireworks-v0@2 --opponent oracle",
    "forge-agents play forge/Relay-v0 --watch true --model smollm2-135m-instruct",
)
def play(words: Sequence[str]) -> int:
    """Take a seat in the terminal, or watch: forge-agents play ENV [--seat p0] [--model ID | --opponent random]"""
    from forge_agents.cli.config import with_flag
    from forge_agents.cli.play import PlayConfig, left, play_in_terminal

    episode = play_in_terminal(_parse("play", PlayConfig, with_flag("--env", words)))
    return 0 if episode.error is None or left(episode) else 1


@_command(
    "bench",
    "forge-agents bench --players.random random --suite duel-v0 --episodes 16",
    "forge-agents bench --players.before smollm2-135m-instruct --players.after runs/relay/export --html board.html",
    "forge-agents bench forge/Relay-v0 --cross_play runs/relay/seed-0 runs/relay/seed-1 random",
)
def bench(words: Sequence[str]) -> int:
    """Benchmark players: forge-agents bench [CONFIG.yaml | SUITE] --players.NAME WHAT ... [--episodes 64]"""
    import forge_agents as fa
    from forge_agents.bench.plan import BenchConfig
    from forge_agents.bench.play import BOARD
    from forge_agents.cli.config import with_flag

    is_file = not words or words[0].endswith((".yaml", ".yml")) or user_path(words[0]).is_file()
    listed = with_flag("--config" if is_file else "--suite", _listed(words, ("--cross_play", "--partners")))
    chosen = _parse("bench", BenchConfig, listed)
    report = fa.benchmark(
        chosen.entrants(),
        chosen.suite,
        episodes=chosen.episodes,
        seed=chosen.seed,
        swap_seats=chosen.swap_seats,
        samples=chosen.samples,
        exploitability_samples=chosen.exploitability_samples,
        partners=chosen.partners,
        limits=chosen.limits,
        engine=chosen.engine,
        out_dir=chosen.out_dir,
    )
    board = Path(chosen.json or user_path(chosen.out_dir) / BOARD)
    _show(report, board, html=chosen.html, markdown=chosen.markdown)
    if report.complete:
        _say_next(f"forge-agents leaderboard {board} OTHER.json --html all.html")
    else:
        _say_next(f"{_again('bench', words)}   (plays what is missing)")
    return 0 if report.complete else 1


@_command(
    "leaderboard",
    "forge-agents leaderboard mine/board.json theirs/board.json --html all.html",
    "forge-agents leaderboard core.json teams.json --suites leaderboard.md",
)
def leaderboard(words: Sequence[str]) -> int:
    """Merge reports of benchmarks: forge-agents leaderboard A.json B.json [--out ALL.json] [--html PAGE]"""
    from forge_agents.bench import tables
    from forge_agents.bench.report import board
    from forge_agents.bench.report import leaderboard as merge
    from forge_agents.files import write_atomic

    parser = _parser("leaderboard")
    parser.add_argument("reports", nargs="+", type=str, help="Files that bench wrote, of one suite and one seed.")
    parser.add_argument("--out", type=str, default="", help="Write the merged report as JSON.")
    parser.add_argument("--html", type=str, default="", help="Write it as a page.")
    parser.add_argument("--markdown", type=str, default="", help="Write it as Markdown.")
    parser.add_argument("--suites", type=str, default="", help="Write a page of several suites in Markdown instead.")
    chosen = parser.parse_args(list(words))
    if chosen.suites:
        if chosen.out or chosen.html or chosen.markdown:
            parser.error("--suites writes its own page, in Markdown; leave --out, --html and --markdown away")
        found = board(*chosen.reports)
        tables.show(found)
        print(f"page   {write_atomic(chosen.suites, tables.as_markdown(found))}")
        return 0
    _show(merge(*chosen.reports), chosen.out, html=chosen.html, markdown=chosen.markdown)
    return 0


def _show(report: Report, out: str | Path, *, html: str, markdown: str) -> None:
    report.table()
    if out:
        print(f"report {report.save(out)}")
    if html:
        print(f"page   {report.html(html)}")
    if markdown:
        report.markdown(markdown)
        print(f"text   {markdown}")


@_command("list", "forge-agents list", "forge-agents list --tag zero-sum", "forge-agents list core-v1")
def list_environments(words: Sequence[str]) -> int:
    """List environments and suites: forge-agents list [SUITE | ID ...] [--tag 2p]"""
    from rich.console import Console
    from rich.table import Column, Table

    from forge_agents.envs import registry

    parser = _parser("list")
    parser.add_argument("names", nargs="*", help=_NAMES)
    parser.add_argument("--tag", type=str, help="Only environments with this tag.")
    chosen = parser.parse_args(list(words))
    ids = _named_ids(chosen.names) if chosen.names else registry.list_envs()
    specs = [one for one in map(registry.spec, ids) if chosen.tag is None or chosen.tag in one.tags]
    rows = [
        (one.id, ", ".join(one.tags), str(one.max_turns or ""), str(len(one.levels) or ""), "oracle" * bool(one.oracle))
        for one in specs
    ]
    console = Console()
    if console.is_terminal:
        table = Table(Column("id", overflow="fold"), "tags", "turns", "levels", "oracle", title="environments")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:  # for programs: a line each, fields between tabs
        print("\n".join("\t".join(row) for row in rows))
    for suite in [] if chosen.names else registry.list_suites():
        print(f"suite {suite}")
    return 0


_NAMES = "Suites or environment ids; module:NAME imports the module first, which registers it."


def _named_ids(names: Sequence[str]) -> list[str]:
    """Ids of environments, those of suites among them, each once."""
    from forge_agents.envs import registry
    from forge_agents.errors import UnknownIdError

    found: dict[str, None] = {}
    for name in names:
        try:
            suite = registry.suite_name(name)
        except UnknownIdError:
            found[registry.spec(name).id] = None  # its message names near ids and near suites
        else:
            found |= dict.fromkeys(registry.suite(suite))
    return list(found)


@_command("check", "forge-agents check forge/KuhnPoker-v0", "forge-agents check --all --tag 2p --json")
def check(words: Sequence[str]) -> int:
    """Check environments against the contract: forge-agents check ID|SUITE [...] | --all [--tag 2p] [--json]"""
    from forge_agents.envs import registry
    from forge_agents.envs.conformance.check import report_all

    parser = _parser("check")
    parser.add_argument("ids", nargs="*", help=_NAMES)
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
        registry.list_envs(chosen.tag) if chosen.all else [registry.spec(id_).id for id_ in _named_ids(chosen.ids)],
        as_json=chosen.json,
        brief=chosen.all,
        episodes=chosen.episodes,
        seed=chosen.seed,
        timeout_s=chosen.timeout_s,
    )
    return 1 if failed else 0


@_command("verifiers", "forge-agents verifiers report runs/sums --out verifiers.html")
def verifiers(words: Sequence[str]) -> int:
    """Show what a run learned of its verifiers: forge-agents verifiers report RUN [--out report.html]"""
    import forge_agents as fa

    parser = _parser("verifiers")
    parser.add_argument("action", choices=["report"], help="report: print the table, write the page.")
    parser.add_argument("run", help="The run's folder: out_dir of a training whose reward is an Ensemble.")
    parser.add_argument("--out", type=str, help="The HTML file; verifiers.html in the run's folder by default.")
    chosen = parser.parse_args(list(words))
    history = fa.verifier_history(chosen.run)
    report = history[-1].report
    print(report.table())
    print(report.html(chosen.out or user_path(chosen.run) / "verifiers.html", history))
    return 0


@_command(
    "view",
    "forge-agents view runs/guess",
    "forge-agents view runs/first runs/second",
    "forge-agents view runs/guess --out guess.html --episodes 50",
    "on another machine: ssh -L 8765:127.0.0.1:8765 HOST, then open the address that view printed there",
)
def view(words: Sequence[str]) -> int:
    """Look at runs in a browser: forge-agents view RUN [RUN ...] [--port 8765] [--out PAGE.html]"""
    parser = _parser("view")
    parser.add_argument("runs", nargs="+", type=str, help="Folders of runs and benchmarks, or folders of such folders.")
    parser.add_argument("--port", type=int, help="On 127.0.0.1; default: 8765, or another where that is in use.")
    parser.add_argument("--browser", action="store_true", help="Open the page in this machine's browser.")
    parser.add_argument("--out", type=str, default="", help="Write one HTML file to share instead of serving.")
    parser.add_argument("--episodes", type=int, default=200, help="Newest episodes of each run in that file.")
    chosen = parser.parse_args(list(words))
    from forge_agents import viewer

    if chosen.out:
        print(f"page   {viewer.save_page(chosen.runs, chosen.out, episodes=chosen.episodes)}")
    else:
        viewer.serve_page(chosen.runs, port=chosen.port, browser=chosen.browser)
    return 0


@_command(
    "serve",
    "forge-agents serve runs/guess",
    "forge-agents serve runs/duel --policy rival --port 8001",
    "FORGE_AGENTS_TOKEN=$(cat token) forge-agents serve smollm2-135m-instruct --kv_cache_gb 4",
    "forge-agents serve runs/guess -- --enable-auto-tool-choice --tool-call-parser hermes",
)
def serve(words: Sequence[str]) -> int:
    """Serve a model behind a token: forge-agents serve CHECKPOINT [--port 8000] [-- options of vllm serve]"""
    from forge_agents.cli.config import with_flag
    from forge_agents.cli.serve import ServeConfig
    from forge_agents.cli.serve import serve as run_server

    end = words.index("--") if "--" in words else len(words)
    config = _parse("serve", ServeConfig, with_flag("--checkpoint", words[:end]))
    return 1 if run_server(config, words[end + 1 :]) else 0


@_command("new-env", "forge-agents new-env word-duel", "forge-agents new-env word-duel --out projects")
def new_env(words: Sequence[str]) -> int:
    """Write a project with a two-seat game and its test: forge-agents new-env NAME [--out FOLDER]"""
    from forge_agents.cli.scaffold import create_project

    parser = _parser("new-env")
    parser.add_argument("name", type=str, help="Name of the project, such as word-duel.")
    parser.add_argument("--out", type=str, default=".", help="Where its folder is made.")
    chosen = parser.parse_args(list(words))
    root = create_project(chosen.name, chosen.out)
    print(f"wrote {root}\nnext   cd {root} && pip install -e . && pytest")
    return 0


@_command(
    "download", "forge-agents download Qwen/Qwen3-0.6B", "forge-agents download Qwen/Qwen3-0.6B --ignore '*.bin'"
)
def download(words: Sequence[str]) -> int:
    """Fetch a model: forge-agents download ID [--ignore '*.bin']"""
    from forge_agents.models import resolve as models

    parser = _parser("download")
    parser.add_argument("id", type=str, help="Hugging Face id or built-in name.")
    parser.add_argument("--ignore", type=str, nargs="*", default=[], help="File patterns to leave out.")
    chosen = parser.parse_args(list(words))
    print(models.download(chosen.id, ignore=tuple(chosen.ignore)))
    return 0


@_command("models", "forge-agents models", "forge-agents models Qwen/Qwen3-0.6B ./models/mine")
def list_models(words: Sequence[str]) -> int:
    """Say which models learn, talk, think and call tools: forge-agents models [MODEL ...]"""
    from forge_agents.models import families
    from forge_agents.models import resolve as models

    parser = _parser("models")
    parser.add_argument("model", nargs="*", help="Names, folders or hub ids; weights are not fetched. None: families.")
    chosen = parser.parse_args(list(words)).model
    if not chosen:
        for family in families.FAMILIES:
            print(f"{family.models}\n  {', '.join(family.architectures)}")
            print(f"  {f'plays; does not learn: {family.why_not}' if family.why_not else 'plays and learns'}")
        print("\nWhatever else vLLM serves plays, too.")
    for name in chosen:
        folder = models.config_folder(name)
        described = families.describe(families.inspect_model(folder))
        print("\n".join((name, *(f"  {what:9}{text}" for what, text in described))))
    return 0


@_command(
    "completion",
    'bash: eval "$(forge-agents completion bash)" in ~/.bashrc',
    'zsh:  eval "$(forge-agents completion zsh)" in ~/.zshrc, after compinit',
    "fish: forge-agents completion fish > ~/.config/fish/completions/forge-agents.fish",
)
def completion(words: Sequence[str]) -> int:
    """Complete words in the shell: forge-agents completion bash|zsh|fish"""
    from forge_agents.cli.completion import SHELLS, script

    parser = _parser("completion")
    parser.add_argument("shell", choices=SHELLS, help="Whose script is printed.")
    print(script(parser.parse_args(list(words)).shell))
    return 0


@_command("setup", "forge-agents setup --dry-run", "forge-agents setup")
def setup(words: Sequence[str]) -> int:
    """Complete an installation by pip or uv: forge-agents setup [--dry-run]"""
    from forge_agents.cli import setup as completing

    parser = _parser("setup")
    parser.add_argument("--dry-run", action="store_true", help="Only say what would be done.")
    return completing.main(dry_run=parser.parse_args(list(words)).dry_run)


@_command("gpu-check", "forge-agents gpu-check", "forge-agents gpu-check --model Qwen/Qwen3-0.6B --out_dir runs/check")
def gpu_check(words: Sequence[str]) -> int:
    """Run three steps on this machine's GPUs in each way that they allow, and tell speed and memory."""
    import forge_agents as fa

    parser = _parser("gpu-check")
    parser.add_argument("--model", type=str, default="smollm2-135m-instruct", help="As a policy names one.")
    parser.add_argument("--out_dir", type=str, default="", help="Folder of the runs; default: a new one under runs/.")
    chosen = parser.parse_args(list(words))
    fa.gpu_check(chosen.model, chosen.out_dir)
    return 0


@_command("doctor", "forge-agents doctor")
def doctor(words: Sequence[str]) -> int:
    """Try every part for real and say how to mend what fails: forge-agents doctor"""
    from forge_agents.cli import doctor as examination

    _parser("doctor").parse_args(list(words))
    return examination.main()


def _say_next(*commands: str) -> None:
    """What a person would do now."""
    for title, command in zip(("next  ", *["      "] * len(commands)), commands, strict=False):
        print(f"{title} {command}")


def _with_modules(words: Sequence[str]) -> str:
    """What goes before a command without the run's file, so that it finds the modules beside the file; mostly empty."""
    folder = Path(words[0]).parent if words and not words[0].startswith("-") else Path()
    return "" if folder == Path() else f"PYTHONPATH={shlex.quote(str(folder))} "


def _listed(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The words, with all that follows one of `flags` as one list: a pattern of the shell names many."""
    found: list[str] = []
    listed: dict[str, list[str]] = {}
    flag = ""
    for word in words:
        name, joined, value = word.partition("=")
        flag = (name if name in flags else "") if word.startswith("-") else flag
        if name in flags:
            listed.setdefault(name, []).extend([value] if joined else [])
        else:
            (listed[flag] if flag else found).append(word)
    for flag, values in listed.items():
        plain = values and not values[0].startswith("[")
        found += [flag, *([json.dumps(values, ensure_ascii=False)] if plain else values)]
    return found


def _again(command: str, words: Sequence[str]) -> str:
    """The same words for another command, or the same again."""
    return shlex.join(["forge-agents", command, *words])
