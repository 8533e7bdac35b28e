"""Commands that start and train: ``demo``, ``init``, ``train``, ``sft`` and ``import``."""

from __future__ import annotations

import copy
import functools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_agents.cli.registry import command, make_parser, parse_settings, print_next, print_visible, repeat
from forge_agents.display import printable, visible
from forge_agents.files import check_contained, user_path
from forge_agents.imports import plugin_object

if TYPE_CHECKING:
    import forge_agents as fa
    from forge_agents.cli.config import Parser

_MAX_MESSAGES = 20
"""Number of unreadable rows that ``import`` reports one by one."""


@command("demo", "forge-agents demo", "forge-agents demo --seed 1 --control_steps 0")
def demo(argv: Sequence[str]) -> int:
    """Train two agents end to end, with a control run."""
    config, run = plugin_object("forge_trainers.demo:DemoConfig"), plugin_object("forge_trainers.demo:demo")
    return 0 if run(parse_settings("demo", config, argv)) else 1


@command(
    "init",
    "forge-agents init my-team",
    "forge-agents init my-duel --template duel",
    "forge-agents init word-duel --template env",
    "forge-agents init relay-server --template openenv --env forge/Relay-v0",
    "forge-agents init relay-game --template verifiers --env forge/Relay-v0",
)
def init(argv: Sequence[str]) -> int:
    """Create a folder from a template."""
    from forge_agents.cli.scaffold import ENV, OPENENV, TEMPLATES, VERIFIERS, create

    descriptions = "; ".join(f"{name}: {description}" for name, description in TEMPLATES.items()) + "."
    parser = make_parser("init")
    parser.add_argument("dir", nargs="?", type=str, default=".", help="New or empty folder (default: this one).")
    parser.add_argument("--template", choices=sorted(TEMPLATES), default="team", help=descriptions)
    parser.add_argument("--env", type=str, help="Environment of the templates openenv and verifiers.")
    options = parser.parse_args(list(argv))
    root = create(options.dir, options.template, options.env)
    print_visible(f"wrote  {', '.join(str(root / file.name) for file in sorted(root.iterdir()))}")
    commands = {
        ENV: "pip install -e . pytest && pytest",
        OPENENV: "python -m server.app",
        VERIFIERS: "pip install -e .",
    }
    then = commands.get(options.template, "forge-agents train train.yaml")
    print_next(then if options.dir == "." else f"cd {shlex.quote(str(root))} && {then}")
    return 0


@functools.cache
def _train_parser() -> Parser:
    import forge_agents as fa
    from forge_agents.cli.config import add_fields

    parser = make_parser("train")
    add_fields(parser, fa.RunConfig)
    parser.add_argument(
        "--dry-run", action="store_true", help="Only check the settings and print which processes the run would start."
    )
    parser.add_argument(
        "--gpus_per_host",
        type=int,
        help="GPUs per host for --dry-run, where mesh.gpus sets none (default: the GPUs of this machine, and 8 on "
        "every other host).",
    )
    parser.add_argument(
        "--seeds", type=int, default=1, help="Number of runs with consecutive seeds, each in a subfolder of out_dir."
    )
    return parser


@command(
    "train",
    "forge-agents train train.yaml",
    "forge-agents train train.yaml --steps 200 --trainer.learner.lr 1e-5 --out_dir runs/second",
    "forge-agents train train.yaml --trainer.tracker wandb",
    "forge-agents train --env forge/Relay-v0 --policies.team.model smollm2-135m-instruct",
    "forge-agents train train.yaml --seeds 3 --out_dir runs/population",
    "forge-agents train examples/slurm/train.yaml --dry-run",
    "forge-agents train train.yaml --dry-run --gpus_per_host 8",
)
def train(argv: Sequence[str]) -> int:
    """Train policies with GRPO."""
    import forge_agents as fa
    from forge_agents.cli.config import built, with_flag

    parser = _train_parser()
    chosen = parser.parse_args(with_flag("--config", argv))
    dry_run, gpus_per_host, seeds = (chosen.pop(name) for name in ("dry_run", "gpus_per_host", "seeds"))
    if seeds < 1:
        parser.error(f"--seeds is {seeds}. It must be at least 1")
    if gpus_per_host is not None and not dry_run:
        parser.error("--gpus_per_host needs --dry-run")
    if gpus_per_host is not None and gpus_per_host < 0:
        parser.error(f"--gpus_per_host is {gpus_per_host}. It must be at least 0")
    run = built(parser, fa.RunConfig, chosen)
    for message in run.idle:
        print_visible(message)
    if dry_run:
        print(visible("\n".join(run.dry_run(gpus_per_host=gpus_per_host))))  # the file may be a stranger's
        return 0
    check_contained(user_path(run.out_dir))  # a warm start and several seeds write to its subfolders
    run = run.warmed_up()
    for name in run.warm_start:
        print(visible(f"{name} starts from {run.policies[name].model}"))
    models = _train_seeds(run, seeds)
    bench = f"{_python_path(argv)}forge-agents bench"
    if seeds > 1:
        print_next(
            f"{bench} {shlex.join([run.suite, '--cross_play', *map(str, models)])}",
            repeat("view", [run.out_dir]),
        )
    else:
        print_next(
            repeat("eval", argv),
            f"{bench} --players.trained {shlex.quote(str(models[0]))} --players.random random "
            f"--suite {shlex.quote(run.suite)}",
            repeat("view", [run.out_dir]),
        )
    return 0


def _train_seeds(run: fa.RunConfig, seeds: int) -> list[Path]:
    """Train with consecutive seeds. Returns the trained players, one per seed."""
    import forge_agents as fa

    models = []
    for seeded, reward in zip(run.of_seeds(seeds), _copies(run.load_reward(), seeds), strict=True):
        with fa.GRPOTrainer(seeded.players, reward, seeded.trainer, seeded.out_dir, seeded.mesh) as trainer:
            result = trainer.fit(seeded.played, steps=seeded.steps, env_args=seeded.env_args)
        print(visible(f"{result.steps} steps are in {result.out_dir}\ncurve  {result.curve}\nmodel  {result.export}"))
        models.append(_trained_player(run, result.export, result.out_dir))
    return models


def _trained_player(run: fa.RunConfig, export: Path, out_dir: Path) -> Path:
    """Return the benchmark's player: one exported model, or the run's folder if each agent has a policy of its own."""
    folders = {name: export / name for name, policy in run.policies.items() if policy.trainable}
    exported = {name: folder for name, folder in folders.items() if folder.is_dir()}
    agents = run.policy_mapping.values() if isinstance(run.policy_mapping, dict) else ()
    if len(exported) > 1 and agents and set(agents) <= exported.keys():
        return out_dir
    return next(iter(exported.values()), export)


def _copies(reward: Any, count: int) -> list[Any]:
    """Return one reward per run: an ensemble learns from its run and must not be shared with another."""
    try:
        return [reward] if count == 1 else [copy.deepcopy(reward) for _ in range(count)]
    except Exception as cause:
        raise ValueError(
            f"the reward cannot be copied for each seed ({cause}). Start one run per seed, with --trainer.seed and "
            "--out_dir"
        ) from cause


def _python_path(argv: Sequence[str]) -> str:
    """Return an assignment of PYTHONPATH for commands that need modules next to the run's file, or an empty text."""
    folder = Path(argv[0]).parent if argv and not argv[0].startswith("-") else Path()
    return "" if folder == Path() else f"PYTHONPATH={shlex.quote(str(folder))} "


@command(
    "sft",
    "forge-agents sft sums.yaml",
    "forge-agents sft --data chats.jsonl --policy.model smollm2-135m-instruct --out_dir runs/sft --epochs 3",
    "forge-agents sft --data forge/Codewords-v0@1 --games 96 --policy.model smollm2-135m-instruct",
)
def sft(argv: Sequence[str]) -> int:
    """Fine-tune a policy on conversations or episodes."""
    import forge_agents as fa

    run = parse_settings("sft", plugin_object("forge_trainers.offline.config:SFTRunConfig"), argv)
    with fa.SFTTrainer(run.policy, run.trainer, run.out_dir, run.mesh) as trainer:
        result = trainer.fit(run.dataset(), eval_dataset=run.eval_data, epochs=run.epochs, steps=run.steps)
    print(visible(f"{result.steps} steps are in {result.out_dir}\ncurve  {result.curve}\nmodel  {result.export}"))
    print_next(f"forge-agents train CONFIG.yaml --policies.{run.policy.name}.model {shlex.quote(str(result.export))}")
    return 0


@command(
    "import",
    "forge-agents import traces.jsonl --out chats.jsonl",
    "forge-agents import day1.json day2.json --model planner --out planner.jsonl",
    "forge-agents import traces.jsonl --pairs helpful --out pairs.jsonl",
)
def import_(argv: Sequence[str]) -> int:
    """Convert recorded traffic to training data."""
    from forge_agents.programs.traces import import_traces

    parser = make_parser("import")
    parser.add_argument(
        "traces", nargs="+", type=str, help="JSON files of OpenTelemetry spans, requests with responses, or chats."
    )
    parser.add_argument("--out", type=str, required=True, help="New JSONL file.")
    parser.add_argument("--model", type=str, help="Convert only the calls of the model or agent with this name.")
    parser.add_argument(
        "--pairs",
        type=str,
        help="Name of a score in the recordings. If given, pairs of the best and the worst answer to each prompt are "
        "written (for DPO).",
    )
    options = parser.parse_args(list(argv))
    messages = 0

    def report(line: str) -> None:
        nonlocal messages
        messages += 1
        if messages <= _MAX_MESSAGES:
            print(printable(line), file=sys.stderr)

    try:
        result = import_traces(options.traces, options.out, model=options.model, pairs=options.pairs, say=report)
    finally:
        if messages > _MAX_MESSAGES:
            print(f"and {messages - _MAX_MESSAGES} more", file=sys.stderr)
    content = "pairs" if options.pairs else f"conversations with {result.answers} answers"
    print_visible(f"wrote  {result.rows} {content} to {options.out}")
    for reason, count in result.skipped.items():
        print(f"  left out: {count} {printable(reason)}")
    if not options.pairs:
        print_next(f"forge-agents sft --data {shlex.quote(options.out)} --policy.model MODEL --out_dir runs/sft")
    return 0
