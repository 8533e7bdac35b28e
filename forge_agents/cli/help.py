"""Short help of commands with many settings: the settings that most users need, in groups."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

ALL_FLAG = "--help-all"
_RUN = {
    "Run": ("env", "env_args", "policies", "policy_mapping", "reward", "steps", "out_dir"),
    "Rollouts": (
        "trainer.group_size", "trainer.groups_per_step", "trainer.max_staleness", "trainer.max_resamples",
        "trainer.max_concurrent_episodes", "trainer.seed",
    ),
    "Learning": (
        "trainer.learner.loss", "trainer.learner.lr", "trainer.learner.warmup_steps", "trainer.learner.lr_decay",
        "trainer.learner.kl_coef", "trainer.learner.max_tokens_per_microbatch",
    ),
    "Evaluation and records": (
        "trainer.eval_every", "trainer.eval_episodes", "trainer.checkpoint_every", "trainer.tracker",
    ),
    "Hardware": (
        "trainer.engine.max_model_len", "trainer.engine.replicas", "trainer.engine.tp", "trainer.learner_procs",
        "mesh.kind",
    ),
}  # fmt: skip
_SHOWN: Mapping[str, Mapping[str, Sequence[str]]] = {
    "train": _RUN,
    "eval": {"Run": _RUN["Run"], "Evaluation": ("trainer.eval_episodes", "trainer.seed")},
    "simulate": {key: _RUN[key] for key in ("Run", "Rollouts", "Hardware")},
    "sft": {
        "Run": ("data", "games", "eval_data", "policy.model", "epochs", "steps", "out_dir"),
        "Learning": (
            "trainer.batch_size", "trainer.learner.lr", "trainer.learner.warmup_steps", "trainer.learner.lr_decay",
            "trainer.min_reward", "trainer.max_sample_tokens", "trainer.eval_share", "trainer.seed",
        ),
        "Records": ("trainer.eval_every", "trainer.checkpoint_every", "trainer.tracker"),
    },
}  # fmt: skip
_WIDTH, _INDENT = 100, 26


def has_short_help(prog: str) -> bool:
    """Return whether `prog`, such as ``forge-agents train``, shows only its main settings by default."""
    return prog.rpartition(" ")[2] in _SHOWN


def short_help(parser: argparse.ArgumentParser, own: Sequence[str]) -> str:
    """Return usage, main settings by group, the flags `own` of the command itself, and its examples."""
    actions = {action.dest: action for action in parser._actions}
    flags = [action for action in parser._actions if action.dest in own and action.help != argparse.SUPPRESS]
    groups = {title: [actions[name] for name in names if name in actions]
              for title, names in _SHOWN[parser.prog.rpartition(" ")[2]].items()}  # fmt: skip
    groups = {"Command": flags, **groups}
    shown = sum(map(len, groups.values()))
    hidden = sum(action.help != argparse.SUPPRESS and not _is_help(action) for action in parser._actions) - shown
    lines = [f"usage: {usage(parser.prog)}", "", *textwrap.wrap(parser.description or "", _WIDTH)]
    for title, members in groups.items():
        lines += ["", f"{title}:", *(line for action in members for line in _entry(action))]
    lines += ["", f"{hidden} more settings: {parser.prog} {ALL_FLAG}"]
    return "\n".join([*lines, "", parser.epilog or ""]).rstrip() + "\n"


def usage(prog: str) -> str:
    """Return the usage line of a command that takes a settings file and flags."""
    return f"{prog} [CONFIG.yaml] [--SETTING VALUE ...]"


def _entry(action: argparse.Action) -> list[str]:
    """Return a flag with the first sentence of its help and its default, or the sentence about a default of None."""
    flag = next(option for option in action.option_strings if option.startswith("--"))
    words = re.sub(r"\s+", " ", str(action.help or ""))
    text, *others = re.split(r"(?<=[.?]) (?=[A-Z\"`])", words)
    of_none = [sentence for sentence in others if action.default is None and sentence.startswith("None (default)")]
    text = ". ".join([text.rstrip("."), *of_none]).rstrip(".")
    text = text.replace("%(default)s", "").replace("%%", "%") + _default(action)
    lines = textwrap.wrap(text, _WIDTH - _INDENT)
    if len(flag) + 4 > _INDENT:
        return [f"  {flag}", *(f"{'':{_INDENT}}{line}" for line in lines)]
    return [f"  {flag:{_INDENT - 2}}{lines[0] if lines else ''}", *(f"{'':{_INDENT}}{line}" for line in lines[1:])]


def _default(action: argparse.Action) -> str:
    value: Any = action.default
    is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    shown = is_plain and value not in ("", argparse.SUPPRESS)
    return f" (default: {value})" if shown else ""


def _is_help(action: argparse.Action) -> bool:
    return any(option.endswith("help") or option in ("-h", ALL_FLAG) for option in action.option_strings)
