"""The options of ``forge-agents simulate``, and what it prints.

In: words. Out: a table or JSON on standard output. Waits for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields

from forge_agents.cli.config import schema_parser


def predict(words: Sequence[str], description: str) -> int:
    """Print a prediction. Returns the exit status."""
    from rich.console import Console

    import forge_agents as fa

    parser = schema_parser(fa.RunConfig, prog="forge-agents simulate", description=description)
    parser.add_argument(
        "--measured", nargs="+", type=str, default=[], help="Folders of short measured runs; default: that of out_dir."
    )
    parser.add_class_arguments(fa.Hardware, as_group=False)
    parser.add_argument("--simulated_steps", type=int, default=8, help="Warm steps that means are taken over.")
    parser.add_argument("--sweep", action="store_true", help="Show every split of the GPUs that was tried.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    if words and not words[0].startswith("-"):
        words = ["--config", *words]
    chosen = parser.parse_args(list(words))
    measured, steps, sweep, as_json = (chosen.pop(n) for n in ("measured", "simulated_steps", "sweep", "json"))
    chosen.pop("config", None)
    if sweep and not chosen.gpus:
        parser.error("--sweep tries splits of GPUs; say how many with --gpus")
    try:
        built = dict(parser.instantiate(chosen))
        hardware = fa.Hardware(**{field.name: built.pop(field.name) for field in fields(fa.Hardware)})
        run = fa.RunConfig(**built)
    except (TypeError, ValueError) as cause:  # the dataclasses' own checks
        parser.error(str(cause))
    found = fa.simulate(run, measured=measured, hardware=hardware, steps=steps)
    if as_json:
        print(json.dumps(found.json()))  # noqa: T201  # what was asked for
        return 0
    console = Console()
    if sweep:
        console.print(found.splits_table())
    console.print(found.table())
    for assumption in found.assumptions:
        console.print(f"assumed: {assumption}", highlight=False)
    return 0
