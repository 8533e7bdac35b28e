"""Parsers of settings classes: flags override a YAML file, and the file overrides the defaults."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from jsonargparse import ArgumentParser, DefaultHelpFormatter, _loaders_dumpers, set_parsing_settings

from forge_agents.cli import completion, keys
from forge_agents.cli.help import ALL_FLAG, has_short_help, short_help, usage
from forge_agents.cli.schema import FileSettings, check_entries, converted_flags, name_entries
from forge_agents.cli.yaml_file import ValueLoader, YamlFile, as_text, plain
from forge_agents.display import visible_error
from forge_agents.errors import did_you_mean
from forge_agents.files import user_path
from forge_agents.imports import add_user_folder, exclude_run_folder, holds_run, restrict_modules
from forge_agents.settings import field_hints

T = TypeVar("T")

set_parsing_settings(
    docstring_parse_attribute_docstrings=True,
    # A file would otherwise call any function with arguments of its choice: `{class_path: os.system, init_args: ...}`
    # in place of any value.
    instantiate_subclass_spec_in_any=False,
    import_path_denylist=["*", "forge_agents.__main__"],
    import_path_allowlist=["forge_agents", "forge_envs", "forge_trainers", "forge_verifiers"],
)

_loaders_dumpers.yaml_default_loader = ValueLoader  # type: ignore[assignment]  # its own loader, in C, has no bounds


class _Formatter(DefaultHelpFormatter):
    """Keeps the lines of the examples after the options."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("examples:\n") else super()._fill_text(text, width, indent)


_READ = ("data", "eval_data", "model", "tasks", "eval_tasks")
"""Keys whose values may be files or folders that are read."""
_FLAGS_ONLY = ("config", "help", "print_config", "send_key", "trust_host", "trust_module")
"""Flags that are no keys of files."""
_OWNERS = {"policies": "train", "warm_start": "train", "policy": "sft", "players": "bench"}
"""Commands by keys that their files have, and no others'."""


class Parser(ArgumentParser):
    """A parser whose errors name similar keys and whose help ends with examples."""

    def __init__(self, *, examples: Sequence[str] = (), **kwargs: Any) -> None:
        self.settings_kind: type | None = None
        self.settings_files: list[Mapping[str, Any]] = []
        self._show_all = False
        epilog = "\n  ".join(("examples:", *examples)) if examples else None
        if has_short_help(prog := kwargs.get("prog", "")):
            kwargs["usage"] = usage(prog)
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, epilog=epilog, **kwargs)

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse a command line, or complete its words if the shell asks for that."""
        if completion.completion_requested():
            completion.offer_values(self)
        if args and isinstance(args[0], list):
            self._show_all = ALL_FLAG in args[0]
            words = ["--help" if word == ALL_FLAG else self._named(word) for word in args[0]]
            if self.settings_kind is not None:
                words = self._with_files(words, self.settings_kind)
            args = (words, *args[1:])
        return super().parse_args(*args, **kwargs)

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Return the main settings, or all of them with ``--help-all``."""
        if self._show_all or self.settings_kind is None or not has_short_help(self.prog):
            return str(super().format_help(*args, **kwargs))
        settings = (*field_hints(self.settings_kind), "help", "print_config")
        names = [action.dest for action in self._actions]
        return short_help(self, [name for name in names if name.partition(".")[0] not in settings])

    def _with_files(self, words: Sequence[str], kind: type) -> list[str]:
        """Return the words with the content of each ``--config`` file in place of its name. Unknown keys are errors."""
        arguments: list[str] = []
        files: list[Mapping[str, Any]] = []
        try:
            for number, word in enumerate(words):
                if word == "--config" and words[number + 1 :]:
                    continue
                is_file = word.startswith("--config=") or (number and words[number - 1] == "--config")
                if is_file:
                    files.append(self._file(word.removeprefix("--config="), kind))
                arguments.append(f"--config={as_text(files[-1])}" if is_file else word)
            flags = converted_flags(arguments, kind, list(self._option_string_actions))
            check_entries(files, flags, kind)
            self.settings_files = files
        except (ValueError, OSError) as cause:
            self.error(f"{cause.filename}: {cause.strerror}" if isinstance(cause, OSError) else str(cause))
        return flags

    def _file(self, name: str, kind: type) -> dict[str, Any]:
        """Return the settings of a file as its fields hold them."""
        file = YamlFile(user_path(name))
        flags = {flag.removeprefix("--") for flag in self._flags()}
        also = [*{name.partition(".")[0] for name in flags.difference(_FLAGS_ONLY)}]
        for key, owner in _OWNERS.items():
            if key in file.values and key not in (*field_hints(kind), *also):
                raise ValueError(
                    f"{file.place(file.values, key)}: {key!r} is of files for `forge-agents {owner}`."
                    f"{did_you_mean(key, field_hints(kind))}"
                )
        values = FileSettings(kind, file.place).converted(file.values, also=also)
        keys.check_paths(values, file.path.parent)
        _find_beside(file.path, values)
        return values

    def _flags(self) -> list[str]:
        return [option for option in self._option_string_actions if option.startswith("--")]

    def _named(self, word: str) -> str:
        """Return ``--out_dir`` for ``--out`` if the command has only the former."""
        flag, equals, value = word.partition("=")
        flags = self._option_string_actions
        return ("--out_dir" if flag == "--out" not in flags and "--out_dir" in flags else flag) + equals + value

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Exit with status 2 and a message that says what to write instead."""
        if not self.exit_on_error and ex is not None:
            raise ex
        message = (_about_value(message) or _of_settings(message) or message).strip()
        unknown = re.search(r"unrecognized arguments: (--[\w.]+)(?!.* Did you mean)", message)
        hint = did_you_mean(unknown.group(1), self._flags()) if unknown else ""
        end = "" if message.endswith(("?", ".")) else "."
        # the message may quote a stranger's file
        self.exit(2, f"{self.prog}: {visible_error(message)}{end}{visible_error(hint)}\nSee {self.prog} --help\n")


def add_fields(parser: Parser, kind: type) -> None:
    """Add the fields of a settings class as flags, nested ones with dots, and ``--config FILE`` with the same keys."""
    parser.add_argument("--config", action="config", help="YAML file with the same keys. Flags override it.")
    for flag, text in (
        (keys.FLAG, "VARIABLE@HOST for each API key that the YAML file may send to a host other than its provider's."),
        (keys.HOST_FLAG, "Each host that the YAML file may name for processes of the run. Hosts can run code here."),
        (keys.MODULE_FLAG, "Each installed module whose functions and classes the YAML file may name."),
    ):
        parser.add_argument(flag, nargs="+", type=str, default=[], help=text)
    parser.add_class_arguments(kind, as_group=False)
    parser.settings_kind = kind


def built(parser: Parser, kind: Callable[..., T], values: Any) -> T:
    """Return what `kind` makes of parsed values. An error of the settings classes is shown like a wrong flag."""
    values.pop("config", None)
    agreed, trusted = values.pop("send_key"), values.pop("trust_host")
    restrict_modules(parser.settings_files, values.pop("trust_module"))
    if isinstance(kind, type):
        name_entries(values, kind)
    try:
        settings = kind(**plain(dict(parser.instantiate(values))))
        keys.check(settings, parser.settings_files, agreed, trusted)
    except (TypeError, ValueError) as cause:
        parser.error(str(cause))
    return settings


def _find_beside(file: Path, values: dict[str, Any]) -> None:
    """Find the modules, data and models that a file names in the folder of the file.

    Modules in the folder of a run are refused, because the run may be a stranger's.
    """
    folder, current = file.parent.resolve(), Path.cwd()
    if folder != current:
        add_user_folder(folder)
    if holds_run(folder):
        exclude_run_folder(folder)
    if folder == current:
        return

    def look(values: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                look(value)
            elif key in _READ and value and isinstance(value, str) and (folder / value).exists():
                values[key] = str(folder / value)

    look(values)


def with_flag(flag: str, words: Sequence[str]) -> list[str]:
    """Return the words. A first word that is no flag is the value of `flag`."""
    return [flag, *words] if words and not words[0].startswith("-") else list(words)


def parse(kind: type[T], words: Sequence[str], *, prog: str, description: str, examples: Sequence[str] = ()) -> T:
    """Return an instance of `kind` from a command line, whose first word may be a YAML file. Exits on errors."""
    settings_kind: type = kind  # mypy takes no type[T] for hashable
    parser = _parser_of(settings_kind, prog, description, tuple(examples))
    return built(parser, kind, parser.parse_args(with_flag("--config", words)))


@functools.cache
def _parser_of(kind: type, prog: str, description: str, examples: Sequence[str]) -> Parser:
    """A parser for settings. Its construction takes longer than a command line, so it is kept for the next one."""
    parser = Parser(prog=prog, description=description, examples=examples)
    add_fields(parser, kind)
    return parser


def _of_settings(message: str) -> str:
    """Return the error of a settings class that jsonargparse lists among errors of other types, or an empty text."""
    errors = message.partition("Errors:\n")[2].partition("\nGiven value type:")[0]
    texts = [text.strip() for text in re.split(r"^ *- ", errors, flags=re.MULTILINE)]
    return next((text for text in texts if text and not text.startswith("Expected a ")), "")


_KINDS = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "NoneType": "null",
    "dict": "a mapping", "list": "a list", "tuple": "a list",
}  # fmt: skip
"""Names of Python's types in a settings file."""


def _about_value(message: str) -> str:
    """Return jsonargparse's message about a value of another type in the terms of a settings file, or an empty text."""
    names = re.findall(r'Parser key "([^"]+)":', message)
    innermost = message.rpartition("Parser key ")[2]
    is_union = "Subtypes:" in innermost
    value = re.search(f"(?:{'Given' if is_union else 'Got'} value|path string): (.*)", innermost)
    if not names or value is None:
        return ""
    errors = innermost.partition("Errors:")[2] if is_union else innermost
    errors = re.split("(?:Given|Got) value", errors)[0]  # errors of the types around it follow
    kinds = [_KINDS.get(name, name) for name in re.findall(r"Expected a <class '([\w.]+)'>", errors)]
    words = re.findall(r"Expected a typing.Literal\[(.*?)\]", errors)
    kinds = ["a mapping of settings"] * ("subclass of" in errors or "dot import path" in errors) + words + kinds
    if not kinds:
        return ""
    if missing := re.search(r"the following arguments are required: ([\w, ]+)", errors):
        return f"{'.'.join(names)} has no {missing.group(1)}. Add it"
    text = value.group(1).strip().removesuffix(".")
    return f"{'.'.join(names)} is {text[:200]}. Expected {' or '.join(dict.fromkeys(kinds))}"
