"""One schema for dataclasses, YAML and flags.

In: a dataclass and command-line words. Out: a checked instance; flags override YAML, YAML overrides defaults. Waits
for nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from forge_agents.cli import completion
from forge_agents.errors import did_you_mean

T = TypeVar("T")

set_parsing_settings(docstring_parse_attribute_docstrings=True)


class _Formatter(DefaultHelpFormatter):
    """Keeps the lines of the examples after the options."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("examples:\n") else super()._fill_text(text, width, indent)


_READ = ("data", "eval_data", "model")
"""Keys whose values may be files or folders that are read."""
_OWNERS = {"policies": "train", "warm_start": "train", "policy": "sft", "players": "bench"}
"""Commands by keys that their files have, and no others'."""
_ONCE = {"--into": "--out", "--static": "--out"}
"""Flags by what they are called now."""


class Parser(ArgumentParser):
    """A parser whose errors name the nearest known keys.

    Args:
        examples: Command lines that help shows after the options.
        **kwargs: As jsonargparse takes them.
    """

    def __init__(self, *, examples: Sequence[str] = (), **kwargs: Any) -> None:
        epilog = "\n  ".join(("examples:", *examples)) if examples else None
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, epilog=epilog, **kwargs)

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
        known = [option.removeprefix("--") for option in self._option_string_actions if option.startswith("--")]
        hint = _suggestion(message, known)
        self.exit(2, f"{self.prog}: {message.strip()}.{hint}\nSee {self.prog} --help\n".replace("..", "."))


def add_fields(parser: Parser, kind: type) -> None:
    """Let `parser` take the fields of dataclass `kind`, nested ones with dots, and ``--config FILE`` with the same."""
    parser.add_argument("--config", action="config", help="YAML file with the same keys; flags override it.")
    parser.add_class_arguments(kind, as_group=False)


def built(parser: Parser, kind: Callable[..., T], values: Any) -> T:
    """What `kind` makes of parsed values; what the dataclasses themselves refuse is told as a wrong flag is."""
    for file in values.pop("config", None) or ():
        _find_beside(Path(file.absolute), values)
    try:
        return kind(**parser.instantiate(values))
    except (TypeError, ValueError) as cause:
        parser.error(str(cause))


def _find_beside(file: Path, values: Any) -> None:
    """Let the modules that a file names, and its data and models, be found beside it, in whatever folder it is read."""
    folder = file.parent.resolve()
    if folder == Path.cwd():
        return
    here = [at for at, entry in enumerate(sys.path) if entry in ("", str(Path.cwd()))]
    if str(folder) not in sys.path:
        sys.path.insert(min(here, default=len(sys.path)), str(folder))  # a namesake in this folder is not meant

    def look(values: Any, named: Mapping[str, Any]) -> None:
        for key, value in named.items():
            if isinstance(value, Mapping) and key in values and values[key]:
                look(values[key], value)
            elif key in _READ and value and isinstance(value, str) and values.get(key) == value:  # by no flag
                values[key] = str(folder / value) if (folder / value).exists() else value

    look(values, yaml.safe_load(file.read_text()) or {})


def with_flag(flag: str, words: Sequence[str]) -> list[str]:
    """The words, the first of which may be the value of `flag`, which was left out."""
    return [flag, *words] if words and not words[0].startswith("-") else list(words)


def parse(
    kind: type[T], words: Sequence[str], *, prog: str, description: str, examples: Sequence[str] = ()
) -> T:
    """Read an instance of `kind` from `words`, the first of which may be a YAML file.

    Raises:
        SystemExit: Unknown keys, wrong types or values; the message is printed.
    """
    parser = Parser(prog=prog, description=description, examples=examples)
    add_fields(parser, kind)
    return built(parser, kind, parser.parse_args(with_flag("--config", words)))


def _suggestion(message: str, known: Sequence[str]) -> str:
    unknown = re.search(
        r"(?:unrecognized arguments: --|does not accept (?:option|nested key) '|Option ')([\w.]+)", message
    )
    if unknown is None:
        return ""
    word = unknown.group(1)
    group = word.partition(".")[0]
    if group in _OWNERS and not any(key.partition(".")[0] == group for key in known):
        return f" {group!r} is of files for `forge-agents {_OWNERS[group]}`."
    dashes = "--" if unknown.group(0).endswith(f"--{word}") else ""  # a flag, no key of a file
    section, dot, name = word.rpartition(".")
    if beside := [key.rpartition(".")[2] for key in known if dot and key.rpartition(".")[0] == section]:
        near = did_you_mean(name, beside, cutoff=0.65)  # as a whole all keys there are alike
        near = re.sub(r"'(\w+)'", rf"'{dashes}{section}.\1'", near)
        return near or f" {section} has {', '.join(sorted(beside))}."
    near = did_you_mean(dashes + word, [dashes + key for key in known])
    if not near:  # a key without its group: compare last parts
        near = did_you_mean(word.rpartition(".")[2], [key.rpartition(".")[2] for key in known])
    return near
