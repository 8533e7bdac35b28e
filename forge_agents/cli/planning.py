"""Commands that need no training: ``simulate`` predicts a run, ``doctor`` tests the installation."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from forge_agents.cli.registry import command, make_parser, print_visible
from forge_agents.imports import plugin_object

if TYPE_CHECKING:
    import forge_agents as fa
    from forge_agents.cli.config import Parser


_HARDWARE = "forge_trainers.forecast.simulate:Hardware"


@functools.cache
def _simulate_parser() -> Parser:
    import forge_agents as fa
    from forge_agents.cli.config import add_fields

    parser = make_parser("simulate")
    add_fields(parser, fa.RunConfig)
    parser.add_argument(
        "--measured", nargs="+", type=str, default=[], help="Folders of short measured runs (default: out_dir)."
    )
    parser.add_class_arguments(plugin_object(_HARDWARE), as_group=False)
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    parser.add_argument(
        "--model",
        nargs="?",
        const="",
        type=str,
        help="Report whether the run fits into --gpus instead. Needs no measured run. One model for every policy "
        "(0.6b, 8b, 32b, 70b, 30b-a3b, or any model name), or no value for the models of the policies.",
    )
    return parser


@command(
    "simulate",
    "forge-agents simulate train.yaml --measured runs/measured",
    "forge-agents simulate train.yaml --measured runs/measured runs/small --trainer.max_staleness 1 --json",
    "forge-agents simulate train.yaml --measured runs/measured --gpus 8 --trainer.learner_procs 4",
    "forge-agents simulate train.yaml --gpus 8 --model 8b",
    "forge-agents simulate train.yaml --gpus 8 --model --policies.solver.model 8b",
)
def simulate(argv: Sequence[str]) -> int:
    """Predict the time of a run, or whether it fits into GPUs."""
    from rich.console import Console

    import forge_agents as fa
    from forge_agents.cli.config import built, with_flag

    hardware_kind, parser = plugin_object(_HARDWARE), _simulate_parser()
    chosen = parser.parse_args(with_flag("--config", argv))
    measured, as_json, model = (chosen.pop(name) for name in ("measured", "json", "model"))
    _check_flags(parser, chosen, fits=model is not None, measured=measured)

    def both(**values: object) -> tuple[fa.RunConfig, Any]:
        machine = {field.name: values.pop(field.name) for field in fields(hardware_kind)}
        return fa.RunConfig(**values), hardware_kind(**machine)  # type: ignore[arg-type]

    run, hardware = built(parser, both, chosen)
    if model is not None:
        return _report_fit(run, model, hardware, as_json=as_json)
    prediction = fa.simulate(run, measured=measured, hardware=hardware)
    if as_json:
        print(json.dumps(prediction.json()))
        return 0
    console = Console()
    console.print(prediction.table())
    for assumption in prediction.assumptions:
        console.print(f"assumed: {assumption}", highlight=False)
    return 0


def _check_flags(parser: Parser, chosen: Any, *, fits: bool, measured: Sequence[str]) -> None:
    """Exit if flags of a memory check (`fits`) and of a prediction are combined, or --gpus is missing."""
    if fits and not chosen.gpus:
        parser.error("--model needs --gpus, the number of GPUs to fit the run into (at least 1)")
    if fits and measured:
        parser.error("--model only checks memory and cannot be combined with --measured")
    for name in ("gpu_gb", "host_gb"):
        if not fits and chosen[name] != parser.get_default(name):
            parser.error(f"--{name} needs --model")


def _report_fit(run: fa.RunConfig, model: str, hardware: Any, *, as_json: bool) -> int:
    """Print whether a run fits into GPUs, and what to change. Returns 0 if it fits as it is."""
    fit_gpus = plugin_object("forge_trainers.forecast.fit:fit_gpus")
    policies = run.models
    fit = fit_gpus(run.trainer, model, hardware, policies=policies, hosts=run.mesh, judges=run.judges, held=run.held)
    if as_json:
        print(json.dumps(fit.json()))
        return int(bool(fit.changes))
    if fit.changes:
        fully_trained = [name for name, policy in policies.items() if policy.trainable and policy.lora is None]
        print_visible(f"the run does not fit with these settings: {fit.problem}")
        print_visible(
            "it fits with " + ", ".join(_as_setting(key, value, fully_trained) for key, value in fit.changes.items())
        )
    for line in (*fit.lines(), "this project measured none of these sizes on a GPU", *fit.placement.doubts):
        print_visible(line)
    if fit.changes:
        return 1
    print(f"it fits into {hardware.gpus} GPU{'s' * (hardware.gpus != 1)} of {hardware.gpu_gb:g} GB")
    if fit.used < hardware.gpus:
        print(
            f"the run uses {fit.used} of them. trainer.learner_procs and trainer.engine.replicas set the numbers of "
            "processes"
        )
    return 0


def _as_setting(key: str, value: Any, fully_trained: Sequence[str]) -> str:
    """Return a change in the words of a run's file. An adapter is set for every policy that trains all weights."""
    if key == "Policy.lora":
        from forge_agents.policy import LORA_TARGETS

        targets = f", targets: [{', '.join(value.targets)}]" * (value.targets != LORA_TARGETS)
        adapter = f"{{rank: {value.rank}, alpha: {value.alpha:g}{targets}}}"
        return ", ".join(f"policies.{policy}.lora: {adapter}" for policy in fully_trained)
    return f"trainer.{key}: {value}"


@command(
    "doctor",
    "forge-agents doctor",
    "forge-agents doctor --fix --dry-run",
    "forge-agents doctor --gpu --model Qwen/Qwen3-0.6B --out_dir runs/check",
)
def doctor(argv: Sequence[str]) -> int:
    """Test the installation, complete it (--fix), or measure the GPUs (--gpu)."""
    parser = make_parser("doctor")
    parser.add_argument("--fix", action="store_true", help="Install and remove what pip and uv cannot resolve.")
    parser.add_argument("--dry-run", action="store_true", help="Print what --fix would do.")
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="Train three steps on the GPUs of this machine in every possible layout, and report speed and memory.",
    )
    parser.add_argument("--model", type=str, help="Model of --gpu (default: smollm2-135m-instruct).")
    parser.add_argument("--out_dir", type=str, help="Folder for the runs of --gpu (default: a new one in runs/).")
    options = parser.parse_args(list(argv))
    if options.fix and options.gpu:
        parser.error("--fix and --gpu are separate tasks. Give one of them")
    if options.dry_run and not options.fix:
        parser.error("--dry-run needs --fix")
    for name in ("model", "out_dir"):
        if getattr(options, name) is not None and not options.gpu:
            parser.error(f"--{name} needs --gpu")
    if options.fix:
        from forge_agents.cli import setup

        return setup.main(dry_run=options.dry_run)
    if options.gpu:
        gpu_check = plugin_object("forge_trainers.gpu_check:gpu_check")
        gpu_check(options.model or "smollm2-135m-instruct", options.out_dir or "")
        return 0
    from forge_agents.cli import doctor as checks

    return checks.main()
