"""One schema for dataclasses, YAML and flags.

In: a dataclass and command-line words. Out: a checked instance; flags override YAML, YAML overrides defaults. Waits
for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from forge_agents.cli import completion
from forge_agents.cli.examples import EXAMPLES
from forge_agents.errors import did_you_mean

T = TypeVar("T")

set_parsing_settings(docstring_parse_attribute_docstrings=True)


class _Formatter(DefaultHelpFormatter):
    """Keeps the lines of the examples after the options."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("examples:\n") else super()._fill_text(text, width, indent)


_ONCE = {"--into": "--out", "--static": "--out"}
"""Flags by what they are called now."""


class Parser(ArgumentParser):
    """A parser whose errors name the nearest known keys.

    Args:
        prog: ``forge-agents COMMAND``, whose examples are shown after the options; None for the parsers that
            jsonargparse makes for parts.
        **kwargs: As jsonargparse takes them.
    """

    def __init__(self, *, prog: str | None = None, **kwargs: Any) -> None:
        shown = EXAMPLES.get((prog or "").partition(" ")[2], ())
        epilog = "\n  ".join(("examples:", *shown)) if shown else None
        super().__init__(prog=prog, allow_abbrev=False, formatter_class=_Formatter, epilog=epilog, **kwargs)

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """As jsonargparse's; where the shell asks, words are completed instead."""
        if completion.asked():
            completion.offer_values(self)
        if args and isinstance(args[0], list):
            args = ([self._named(word) for word in args[0]], *args[1:])
        return super().parse_args(*args, **kwargs)

    def _named(self, word: str) -> str:
        """``--out`` is what a command writes, whatever its option is called here or was called before."""
        flag, equals, value = word.partition("=")
        known = self._option_string_actions
        flag = _ONCE.get(flag, flag) if flag not in known else flag
        return ("--out_dir" if flag == "--out" not in known and "--out_dir" in known else flag) + equals + value

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Exit with status 2 and a message that says what to write instead."""
        if not self.exit_on_error and ex is not None:
            raise ex
        hint = _suggestion(message, self._known_keys())
        self.exit(2, f"{self.prog}: {message.strip()}.{hint}\nSee {self.prog} --help\n".replace("..", "."))

    def _known_keys(self) -> list[str]:
        return [option.removeprefix("--") for option in self._option_string_actions if option.startswith("--")]


def schema_parser(kind: type[T], *, prog: str, description: str) -> Parser:
    """A parser whose keys are the fields of dataclass `kind`, nested ones with dots, plus ``--config FILE``."""
    parser = Parser(prog=prog, description=description)
    parser.add_argument("--config", action="config", help="YAML file with the same keys; flags override it.")
    parser.add_class_arguments(kind, as_group=False)
    return parser


def parse(
    kind: type[T], words: Sequence[str], *, prog: str, description: str
) -> T:
    """Read an instance of `kind` from `words`, the first of which may be a YAML file.

    Raises:
        SystemExit: Unknown keys, wrong types or values; the message is printed.
    """
    if words and not words[0].startswith("-"):
        words = ["--config", *words]
    parser = schema_parser(kind, prog=prog, description=description)
    values = parser.parse_args(list(words))
    values.pop("config", None)
    try:
        built: Any = parser.instantiate(values)
        return kind(**built)
    except (TypeError, ValueError) as cause:  # the dataclasses' own checks
        parser.error(str(cause))


def _suggestion(message: str, known: Sequence[str]) -> str:
    unknown = re.search(
        r"(?:unrecognized arguments: --|does not accept (?:option|nested key) '|Option ')([\w.]+)", message
    )
    if unknown is None:
        return ""
    word = unknown.group(1)
    near = did_you_mean(word, known)
    if not near:  # a key without its group: compare last parts
        near = did_you_mean(word.rpartition(".")[2], [key.rpartition(".")[2] for key in known])
    return near
