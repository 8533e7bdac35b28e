"""Commands that hand a trained model on: ``export`` and ``serve``."""

from __future__ import annotations

from collections.abc import Sequence

from forge_agents.cli.registry import command, make_parser, parse_settings, print_next, print_visible, repeat
from forge_agents.imports import plugin_object


@command("export", "forge-agents export runs/guess", "forge-agents export runs/guess --checkpoint newest --out guess")
def export(argv: Sequence[str]) -> int:
    """Write a checkpoint as a Hugging Face model."""
    parser = make_parser("export")
    parser.add_argument("run", type=str, help="Folder of a training run.")
    parser.add_argument("--checkpoint", type=str, default="best", help="best, newest, or a name such as step-000020.")
    parser.add_argument("--out", type=str, default="", help="New folder (default: RUN/export-step-NNNNNN).")
    options = parser.parse_args(list(argv))
    export_checkpoint = plugin_object("forge_trainers.run.export:export_checkpoint")
    folder = export_checkpoint(options.run, checkpoint=options.checkpoint, out=options.out or None, say=print_visible)
    models = [folder] if (folder / "config.json").exists() else sorted(folder.iterdir())
    print_visible("\n".join(f"model  {model}" for model in models))
    print_next(repeat("serve", [str(folder)]))
    return 0


@command(
    "serve",
    "forge-agents serve runs/guess",
    "forge-agents serve runs/duel --policy rival --port 8001",
    "FORGE_AGENTS_TOKEN=$(cat token) forge-agents serve smollm2-135m-instruct --kv_cache_gb 4",
)
def serve(argv: Sequence[str]) -> int:
    """Serve a run or a model over the OpenAI protocol."""
    from forge_agents.cli.config import with_flag
    from forge_agents.cli.serve import ServeConfig
    from forge_agents.cli.serve import serve as run_server

    run_server(parse_settings("serve", ServeConfig, with_flag("--checkpoint", argv)))
    return 0
