"""Check of settings files and flags against the settings classes, and conversion of texts to the types of fields."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from forge_agents.cli.yaml_file import Switch
from forge_agents.errors import did_you_mean
from forge_agents.settings import alternatives, field_hints, is_mapping, meanings, nested_kind

Place = Callable[[Mapping[Any, Any], Any], str]
"""Returns the position of a key of a mapping."""
_WHOLE_NUMBER = re.compile(r"[-+]?\d+(?:\.\d*)?[eE]\+?\d{1,2}|[-+]?\d+\.0*")
"""Whole numbers in the form of floats, such as 1e5."""
_SWITCHES = ("yes", "no", "on", "off", "true", "false")


class UnknownKeyError(ValueError):
    """A key or flag that is no setting."""


def fitted(
    values: Mapping[Any, Any], kind: type, *, also: Sequence[str] = (), place: Place | None = None
) -> dict[str, Any]:
    """Return settings for `kind`, with known keys only and a bare yes, no, on or off converted for its field.

    Args:
        values: Content of a file.
        kind: A settings class.
        also: More keys that are allowed.
        place: Function that returns the position of a key. None: errors have no position.

    Raises:
        UnknownKeyError: A key is unknown; the error names the nearest keys.
    """
    return _Fitting(kind, place).mapping(values, kind, "", also=also)


class _Fitting:
    def __init__(self, root: type, place: Place | None) -> None:
        self._root, self._place = root, place

    def mapping(
        self, values: Mapping[Any, Any], kind: type, prefix: str, *, also: Sequence[str] = ()
    ) -> dict[str, Any]:
        hints = field_hints(kind)
        for key in values:
            if key not in hints and key not in also:
                position = "" if self._place is None else f"{self._place(values, key)}: "
                hint = advice(self._root, kind, prefix, str(key))
                raise UnknownKeyError(f"{position}{prefix}{key} is no setting.{hint}")
        return {key: self.value(each, hints.get(key, Any), f"{prefix}{key}") for key, each in values.items()}

    def value(self, value: Any, hint: Any, at: str) -> Any:
        members = alternatives(hint)
        if isinstance(value, Mapping):
            inner = nested_kind(hint)
            is_settings = any(isinstance(member, type) and member is inner for member in members)
            if inner is not None and is_settings:
                return self.mapping(value, inner, f"{at}.")
            entries = next((get_args(member)[1] for member in members if is_mapping(member) and get_args(member)), Any)
            return {str(key): self.value(each, entries, f"{at}.{key}") for key, each in value.items()}
        if isinstance(value, list):
            return [self.value(each, next(iter(get_args(members[0])), Any), at) for each in value]
        if isinstance(value, Switch | bool):
            return _switched(value, members)
        if isinstance(value, float) and value.is_integer() and int in members and float not in members:
            return int(value)  # such as 1e5, a float in YAML
        return value


def _switched(value: Switch | bool, members: Sequence[Any]) -> bool | str:
    """Return a boolean, or a bare word that YAML 1.1 reads as one, in the type of its field."""
    truth = value.truth if isinstance(value, Switch) else value
    words = [word for member in members if get_origin(member) is Literal for word in get_args(member)]
    if {"on", "off"} <= set(words):
        return "on" if truth else "off"
    if isinstance(value, bool) or bool in members or Any in members:
        return truth
    return str(value)


def fitted_flags(words: Sequence[str], kind: type, options: Sequence[str]) -> list[str]:
    """Return a command line whose flags are settings. yes and no become on and off if those are the choices.

    Args:
        words: Arguments of the command line.
        kind: Settings class of the flags.
        options: Other flags, with their dashes.

    Raises:
        UnknownKeyError: A flag is unknown; the error names the nearest flags.
    """
    other_flags = {option.removeprefix("--") for option in options}
    fitted_words: list[str] = []
    hint: Any = None
    for word in words:
        if word.startswith("--") and word != "--":
            name, equals, value = word.partition("=")
            flag = name.removeprefix("--").removesuffix("+")
            hint = _hint_of(flag, kind, other_flags)
            fitted_words.append(name + equals + (_fitted_word(value, hint) if equals else ""))
        else:
            fitted_words.append(_fitted_word(word, hint))
            hint = None
    return fitted_words


def check_entries(files: Sequence[Mapping[str, Any]], words: Sequence[str], kind: type) -> None:
    """Refuse an entry of a mapping, such as ``policies.NAME``, that lacks a required field.

    Args:
        files: Contents of the settings files.
        words: Flags of the command line, which may add entries and fields.
        kind: The settings class of both.

    Raises:
        UnknownKeyError: Names the entry, the fields that it lacks and the entries of the files.
    """
    flags = [word.removeprefix("--").partition("=")[0].split(".") for word in words if word.startswith("--")]
    for field, hint in field_hints(kind).items():
        inner = nested_kind(hint)
        if inner is None or [field] in flags or not any(map(is_mapping, alternatives(hint))):
            continue  # a flag of the whole field replaces all entries
        required = _required(inner)
        in_files = _keys_of_entries([file.get(field) for file in files], required)
        entries = {name: set(keys) for name, keys in in_files.items()}
        for flag in flags:
            if flag[0] == field and len(flag) > 1:
                entries.setdefault(flag[1], set()).update(flag[2:3] or required)
        for name, keys in entries.items():
            missing = [key for key in required if key not in keys]
            if not missing:
                continue
            flag_names = " and ".join(f"--{field}.{name}.{key}" for key in missing)
            hint_text = ""
            if in_files and name not in in_files:
                hint_text = f" {field} has {', '.join(sorted(in_files))}.{did_you_mean(name, in_files)}"
            raise UnknownKeyError(f"{field}.{name} has no {' and no '.join(missing)}; set {flag_names}.{hint_text}")


def name_entries(values: Any, kind: type) -> None:
    """Give entries such as ``policies.NAME`` that have an empty ``name`` their key as name, for errors to show it.

    Args:
        values: Parsed settings, whose entries are changed.
        kind: The settings class that they are for.
    """
    for field, hint in field_hints(kind).items():
        entries = values.get(field) if any(map(is_mapping, alternatives(hint))) else None
        inner = nested_kind(hint)
        if inner is None or not isinstance(entries, Mapping) or "name" not in field_hints(inner):
            continue
        for name, entry in entries.items():
            if getattr(entry, "name", None) == "":
                entry.name = name


def _keys_of_entries(mappings: Sequence[Any], required: Sequence[str]) -> dict[str, set[str]]:
    """Return the keys of each entry. An entry that is no mapping counts as complete; the parser checks it."""
    keys: dict[str, set[str]] = {}
    for mapping in mappings:
        for name, entry in mapping.items() if isinstance(mapping, Mapping) else ():
            keys.setdefault(name, set()).update(entry if isinstance(entry, Mapping) else required)
    return keys


def _required(kind: type) -> list[str]:
    """Return the fields of a settings class without a default."""
    missing = dataclasses.MISSING
    return [
        field.name
        for field in dataclasses.fields(kind)
        if field.init and field.default is missing and field.default_factory is missing
    ]


def _fitted_word(word: str, hint: Any) -> str:
    members = alternatives(hint)
    if int in members and float not in members and _WHOLE_NUMBER.fullmatch(word) and float(word).is_integer():
        return str(int(float(word)))
    if word.lower() not in _SWITCHES:
        return word
    fitted_value = _switched(Switch(word), alternatives(hint)) if hint is not None else word
    return fitted_value if isinstance(fitted_value, str) else word  # the parser reads booleans


def _hint_of(flag: str, kind: type, options: Collection[str]) -> Any:
    """Return the type of the setting that a flag names; None for a flag of the command."""
    here: Any = kind
    hint: Any = None
    parts = flag.split(".")
    for number, name in enumerate(parts):
        if is_mapping(here) or here is Any:
            hint = get_args(here)[1] if len(get_args(here)) > 1 else Any
            here = _inside(hint)
            continue
        if not dataclasses.is_dataclass(here) or not isinstance(here, type):
            before = ".".join(parts[:number])
            raise UnknownKeyError(f"unrecognized arguments: --{flag}, because --{before} has no settings")
        hints = field_hints(here)
        if name not in hints:
            if flag in options:
                return None
            prefix = "".join(f"{part}." for part in parts[:number])
            rest = "".join(f".{part}" for part in parts[number + 1 :])
            names = [*hints, *(() if number else {option.partition(".")[0] for option in options})]
            suggestion = advice(kind, here, prefix, name, flag=True, rest=rest, names=names)
            raise UnknownKeyError(f"unrecognized arguments: --{flag}.{suggestion}")
        hint = hints[name]
        here = _inside(hint)
    return hint


def _inside(hint: Any) -> Any:
    """Return the part of a field's type that has keys (a mapping or a settings class), or the type itself."""
    members = alternatives(hint)
    if nested := next((member for member in members if is_mapping(member)), None):
        return nested
    return nested_kind(hint) or hint


def advice(
    root: type, kind: type, prefix: str, name: str, *, flag: bool = False, rest: str = "", names: Sequence[str] = ()
) -> str:
    """Return a sentence that suggests replacements of an unknown key.

    Args:
        root: Settings class of the file.
        kind: Settings class that was expected to have the key.
        prefix: Dotted path of that class, with a dot at the end.
        name: The key.
        flag: Whether the suggestions are shown as flags.
        rest: Text after the name.
        names: Valid names. Empty: the fields of `kind`.
    """
    valid = list(names) or list(field_hints(kind))
    similar = meanings(name, valid, kind)
    if isinstance(similar, str):
        return f" {similar}"
    places = [prefix + place + rest for place in similar]
    if not places:
        elsewhere = meanings(name, (), root)
        places = [place + rest for place in elsewhere] if not isinstance(elsewhere, str) else []
    if places:
        return " Did you mean " + " or ".join(repr("--" * flag + place) for place in places) + "?"
    return f" {prefix.removesuffix('.') or 'It'} has {', '.join(sorted(valid))}."
