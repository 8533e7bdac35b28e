"""Commands that show runs, environments and models: ``view``, ``list`` and ``check``."""

from __future__ import annotations

from collections.abc import Sequence

from forge_agents.cli.registry import command, make_parser, print_visible
from forge_agents.errors import ArgumentError, did_you_mean
from forge_agents.files import user_path
from forge_agents.imports import plugin_object

_NAMES = "Suites or environment ids. module:NAME imports the module first, which registers the id."


@command(
    "view",
    "forge-agents view runs/guess",
    "forge-agents view runs/first runs/second",
    "forge-agents view runs/guess --out guess.html --episodes 50",
    "forge-agents view runs/sums --verifiers --out verifiers.html",
    "on another machine: ssh -L 8765:127.0.0.1:8765 HOST, then open the address that view printed there",
)
def view(argv: Sequence[str]) -> int:
    """Show runs in a browser, or what their verifiers learned."""
    parser = make_parser("view")
    parser.add_argument("runs", nargs="+", type=str, help="Folders of runs and benchmarks, or folders of such folders.")
    parser.add_argument("--port", type=int, help="Port on 127.0.0.1 (default: 8765, or a free one if it is in use).")
    parser.add_argument("--out", type=str, default="", help="Write one HTML file to share instead of serving.")
    parser.add_argument("--episodes", type=int, default=200, help="Number of newest episodes per run in that file.")
    parser.add_argument(
        "--verifiers",
        action="store_true",
        help="Print the verifier report of one run whose reward is an Ensemble, and write it to --out (default: "
        "verifiers.html in the run's folder).",
    )
    options = parser.parse_args(list(argv))
    if options.verifiers:
        if len(options.runs) > 1 or options.port is not None:
            parser.error("--verifiers takes one run and no --port")
        return _report_verifiers(options.runs[0], options.out)
    from forge_agents import viewer

    if options.out:
        print_visible(f"page   {viewer.save_page(options.runs, options.out, episodes=options.episodes)}")
    else:
        viewer.serve_page(options.runs, port=options.port)
    return 0


def _report_verifiers(run: str, out: str) -> int:
    history = plugin_object("forge_trainers.records.run_folder:verifier_history")(run)
    report = history[-1].report
    print(report.table())
    print_visible(f"page   {report.html(out or user_path(run) / 'verifiers.html')}")
    return 0


@command(
    "list",
    "forge-agents list",
    "forge-agents list --tag zero-sum",
    "forge-agents list core-v1",
    "forge-agents list --models",
    "forge-agents list --models Qwen/Qwen3-0.6B ./models/mine",
    "forge-agents list --models Qwen/Qwen3-0.6B --download",
    "forge-agents list --models openai/gpt-oss-20b --bfloat16 models/gpt-oss-20b",
)
def list_(argv: Sequence[str]) -> int:
    """List environments, suites and models. Download or convert a model."""
    parser = make_parser("list")
    parser.add_argument("names", nargs="*", default=[], help=_NAMES)
    parser.add_argument("--tag", type=str, help="List only environments with this tag.")
    parser.add_argument(
        "--models",
        nargs="*",
        type=str,
        help="Show model families, or the features of these models (names, folders or Hugging Face ids). Weights are "
        "not downloaded.",
    )
    parser.add_argument("--download", action="store_true", help="Download the weights of --models and print folders.")
    parser.add_argument("--ignore", type=str, nargs="*", default=[], help="File patterns that --download leaves out.")
    parser.add_argument(
        "--bfloat16",
        type=str,
        help="Write a copy of --models, a gpt-oss with experts in 4 bits, to this folder. The copy can be trained.",
    )
    options = parser.parse_args(list(argv))
    if options.models is not None and (options.names or options.tag):
        parser.error("--models cannot be combined with environments or --tag")
    if options.download and not options.models:
        parser.error("--download needs --models with at least one Hugging Face id")
    if options.ignore and not options.download:
        parser.error("--ignore needs --download")
    if options.bfloat16 is not None:
        if len(options.models or ()) != 1 or options.download:
            parser.error("--bfloat16 needs --models with one model, and no --download")
        from forge_agents.models.resolve import resolve

        write_bfloat16 = plugin_object("forge_trainers.learner.mxfp4:write_bfloat16")
        print_visible(str(write_bfloat16(resolve(options.models[0]), user_path(options.bfloat16))))
    elif options.download:
        from forge_agents.models.resolve import download

        for name in options.models:
            print_visible(str(download(name, ignore=tuple(options.ignore))))
    elif options.models is not None:
        _list_models(options.models)
    else:
        _list_environments(options.names, options.tag)
    return 0


def _list_environments(names: Sequence[str], tag: str | None) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    from forge_agents.envs import registry

    ids = _environment_ids(names) if names else registry.list_envs()
    ids = _with_tag(ids, tag) if tag is not None else ids
    rows = [
        (
            spec.id,
            ", ".join(spec.tags),
            str(spec.max_turns or ""),
            str(len(spec.levels) or ""),
            "oracle" * bool(spec.oracle),
        )
        for spec in map(registry.spec, ids)
    ]
    console = Console()
    if console.is_terminal:
        table = Table(Column("id", overflow="fold"), "tags", "turns", "levels", "oracle", title="environments")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:  # for programs: one line each, with tabs between fields
        print("\n".join("\t".join(row) for row in rows))
    for suite in [] if names or tag is not None else registry.list_suites():
        print_visible(f"suite {suite}")


def _with_tag(ids: Sequence[str], tag: str) -> list[str]:
    """Return the ids of environments with a tag. Raises ArgumentError if there is none."""
    from forge_agents.envs import registry

    tags = {id_: registry.spec(id_).tags for id_ in ids}
    if not (tagged := [id_ for id_ in ids if tag in tags[id_]]):
        known = sorted(set().union(*tags.values()))
        raise ArgumentError(
            f"none of {len(ids)} environments has the tag {tag!r}. Their tags are {', '.join(known)}."
            f"{did_you_mean(tag, known)}"
        )
    return tagged


def _environment_ids(names: Sequence[str]) -> list[str]:
    """Return the ids of environments and of the environments of suites, without duplicates."""
    from forge_agents.envs import registry
    from forge_agents.errors import UnknownIdError

    ids: dict[str, None] = {}
    for name in names:
        try:
            suite = registry.suite_name(name)
        except UnknownIdError:
            ids[registry.spec(name).id] = None  # its error names similar ids and suites
        else:
            ids |= dict.fromkeys(registry.suite(suite))
    return list(ids)


def _list_models(names: Sequence[str]) -> None:
    from forge_agents.models import families
    from forge_agents.models import resolve as models

    if not names:
        for family in families.FAMILIES:
            print(f"{family.models}\n  {', '.join(family.architectures)}")
            reason = family.untrainable_reason
            print(f"  {f'inference only: {reason}' if reason else 'inference and training'}")
        print("\nAll other models that vLLM serves can be used for inference.")
    for name in names:
        features = families.describe(families.inspect_model(models.config_folder(name)))
        print_visible("\n".join((name, *(f"  {key:13}{text}" for key, text in features))))


@command("check", "forge-agents check forge/KuhnPoker-v0", "forge-agents check --all --tag 2p --json")
def check(argv: Sequence[str]) -> int:
    """Test environments against the contract."""
    from forge_agents.envs import registry
    from forge_agents.envs.conformance.check import report_all

    parser = make_parser("check")
    parser.add_argument("ids", nargs="*", default=[], help=_NAMES)
    parser.add_argument("--all", action="store_true", help="Check every registered environment.")
    parser.add_argument("--tag", type=str, help="Check only environments with this tag (with --all).")
    parser.add_argument("--json", action="store_true", help="Print one JSON object per environment and line.")
    parser.add_argument("--episodes", type=int, help="Episodes per check (default: 8, and 20 for adapters).")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the episodes and of the actions.")
    parser.add_argument("--timeout_s", type=float, default=600.0, help="Maximum seconds per environment.")
    options = parser.parse_args(list(argv))
    if bool(options.ids) == options.all or (options.tag and not options.all):
        parser.error("give environment ids, or --all (which --tag filters)")
    ids = registry.list_envs() if options.all else [registry.spec(id_).id for id_ in _environment_ids(options.ids)]
    failed = report_all(
        _with_tag(ids, options.tag) if options.tag is not None else ids,
        as_json=options.json,
        brief=options.all,
        episodes=options.episodes,
        seed=options.seed,
        timeout_s=options.timeout_s,
    )
    return 1 if failed else 0
