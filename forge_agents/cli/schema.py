"""Settings files and flags against the settings classes: unknown keys, and what a text means in its field."""

from __future__ import annotations

import dataclasses
import re
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from forge_agents.cli.yaml_file import Switch
from forge_agents.errors import did_you_mean
from forge_agents.settings import MAX_INTEGER, alternatives, field_hints, is_mapping, meanings, nested_kind

_WHOLE = re.compile(r"[-+]?\d+(?:\.\d*)?[eE]\+?\d{1,2}|[-+]?\d+\.0*")
"""Whole numbers that look like floats, such as 1e5."""
_MAX_ENTRIES = 1000
"""Maximum number of entries of a list, and of settings in a mapping, such as policies. The time to parse a list grows
with the square of its length."""
_SWITCHES = ("yes", "no", "on", "off", "true", "false")


class UnknownKeyError(ValueError):
    """A key or flag that no setting has."""


class FileSettings:
    """Settings of a file as the fields of a settings class hold them.

    Args:
        root: Settings class.
        place: Function that returns where a key of a mapping stands.
    """

    def __init__(self, root: type, place: Callable[[Mapping[Any, Any], Any], str]) -> None:
        self._root, self._place = root, place

    def converted(self, values: Mapping[Any, Any], *, also: Sequence[str] = ()) -> dict[str, Any]:
        """Return all settings. A bare yes, no, on or off becomes what its field holds.

        Raises:
            UnknownKeyError: A key is neither a field nor in `also`. The message names similar ones.
        """
        return self._mapping(values, self._root, "", also=also)

    def _mapping(
        self, values: Mapping[Any, Any], kind: type, prefix: str, *, also: Sequence[str] = ()
    ) -> dict[str, Any]:
        hints = field_hints(kind)
        for key in values:
            if key not in hints and key not in also:
                suggestion = _advice(self._root, kind, prefix, str(key))
                raise UnknownKeyError(f"{self._place(values, key)}: {prefix}{key} is no setting.{suggestion}")
        return {key: self._value(value, hints.get(key, Any), f"{prefix}{key}") for key, value in values.items()}

    def _value(self, value: Any, hint: Any, at: str) -> Any:
        members = alternatives(hint)
        if value is None and _is_settings(hint) and type(None) not in members:
            value = {}  # a section without keys
        if isinstance(value, Mapping):
            inner = nested_kind(hint)
            if inner is not None and inner in members:
                return self._mapping(value, inner, f"{at}.")
            if inner is not None:
                _check_length(value, at)
            entries = next((get_args(member)[1] for member in members if is_mapping(member) and get_args(member)), Any)
            return {str(key): self._value(entry, entries, f"{at}.{key}") for key, entry in value.items()}
        if isinstance(value, str | list) and not isinstance(value, Switch) and _is_settings(hint):
            # the parser would read a text as YAML, unseen by the checks of keys and of `api_key_env`
            what = "text" if isinstance(value, str) else "list"
            raise UnknownKeyError(f"{at} is the {what} {reprlib.repr(value)}. Expected a mapping of settings")
        if isinstance(value, list):
            if Any not in members:
                _check_length(value, at)
            return [self._value(item, next(iter(get_args(members[0])), Any), at) for item in value]
        if isinstance(value, Switch | bool):
            return _switched(value, members)
        if isinstance(value, float) and value.is_integer() and int in members and float not in members:
            return int(value)  # as 1e5, which YAML reads as a float
        if isinstance(value, int) and abs(value) > MAX_INTEGER and float in members:  # the parser would convert it
            raise ValueError(
                f"{at} is {reprlib.repr(value)}. It must be at most {MAX_INTEGER}, and not below -{MAX_INTEGER}"
            )
        return value


def _check_length(value: Collection[Any], at: str) -> None:
    if len(value) > _MAX_ENTRIES:
        raise ValueError(f"{at} has {len(value)} entries. Expected at most {_MAX_ENTRIES}")


def _is_settings(hint: Any) -> bool:
    """Whether a field holds a mapping or a settings class, and no text."""
    members = [member for member in alternatives(hint) if member is not type(None)]
    return bool(members) and all(is_mapping(member) or nested_kind(member) is member for member in members)


def _switched(value: Switch | bool, members: Sequence[Any]) -> bool | str:
    """Return a boolean, or a bare word that YAML 1.1 takes for one, as its field holds it."""
    truth = value.truth if isinstance(value, Switch) else value
    words = [word for member in members if get_origin(member) is Literal for word in get_args(member)]
    if {"on", "off"} <= set(words):
        return "on" if truth else "off"
    return truth if isinstance(value, bool) or bool in members or Any in members else str(value)


def converted_flags(words: Sequence[str], kind: type, options: Sequence[str]) -> list[str]:
    """Return a command line whose values fit the fields of a settings class: "no" becomes "off" where that is a choice.

    Raises:
        UnknownKeyError: A flag is neither a setting nor in `options`. The message names similar ones.
    """
    other_flags = {option.removeprefix("--") for option in options}
    converted: list[str] = []
    hint: Any = None
    for word in words:
        if word.startswith("--") and word != "--":
            name, equals, value = word.partition("=")
            hint = _hint_of(name.removeprefix("--").removesuffix("+"), kind, other_flags)
            converted.append(name + equals + (_converted_word(value, hint) if equals else ""))
        else:
            converted.append(_converted_word(word, hint))
            hint = None
    return converted


def check_entries(files: Sequence[Mapping[str, Any]], words: Sequence[str], kind: type) -> None:
    """Refuse an entry of a mapping in files and flags, such as ``policies.NAME``, that lacks a required field.

    Raises:
        UnknownKeyError: The message names the entry, its missing fields and the entries of the files.
    """
    flags = [word.removeprefix("--").partition("=")[0].split(".") for word in words if word.startswith("--")]
    for field, entry_kind in _entry_kinds(kind).items():
        if [field] in flags:
            continue  # a flag of the whole field replaces all entries
        required = _required(entry_kind)
        keys_of: dict[str, set[str]] = {}
        for entries in [file[field] for file in files if isinstance(file.get(field), Mapping)]:
            for name, entry in entries.items():  # the parser refuses an entry that is no mapping
                keys_of.setdefault(name, set()).update(entry if isinstance(entry, Mapping) else required)
        in_files = sorted(keys_of)
        for flag in flags:
            if flag[0] == field and len(flag) > 1:
                keys_of.setdefault(flag[1], set()).update(flag[2:3] or required)
        for name, keys in keys_of.items():
            if missing := [key for key in required if key not in keys]:
                flag_names = " and ".join(f"--{field}.{name}.{key}" for key in missing)
                hint = ""
                if in_files and name not in in_files:
                    hint = f" {field} has {', '.join(in_files)}.{did_you_mean(name, in_files)}"
                raise UnknownKeyError(f"{field}.{name} has no {' and no '.join(missing)}. Set {flag_names}.{hint}")


def name_entries(values: Any, kind: type) -> None:
    """Give entries such as ``policies.NAME`` with an empty ``name`` their key as name, for errors."""
    for field in _entry_kinds(kind):
        entries = values.get(field)
        for name, entry in entries.items() if isinstance(entries, Mapping) else ():
            if getattr(entry, "name", None) == "":
                entry.name = name


def _entry_kinds(kind: type) -> dict[str, type]:
    """Return the settings classes of the entries of mappings, such as ``policies``, by field."""
    kinds = {field: nested_kind(hint) for field, hint in field_hints(kind).items() if _is_mapping(hint)}
    return {field: inner for field, inner in kinds.items() if inner is not None}


def _is_mapping(hint: Any) -> bool:
    return any(map(is_mapping, alternatives(hint)))


def _required(kind: type) -> list[str]:
    """Return the fields of a settings class that have no default."""
    missing = dataclasses.MISSING
    return [
        field.name
        for field in dataclasses.fields(kind)
        if field.init and field.default is missing and field.default_factory is missing
    ]


def _converted_word(word: str, hint: Any) -> str:
    members = alternatives(hint)
    if int in members and float not in members and _WHOLE.fullmatch(word) and float(word).is_integer():
        return str(int(float(word)))
    if hint is None or word.lower() not in _SWITCHES:
        return word
    value = _switched(Switch(word), members)
    return value if isinstance(value, str) else word  # the parser reads booleans


def _hint_of(flag: str, kind: type, options: Collection[str]) -> Any:
    """Return the type of the setting that a flag names, or None for a flag of the command itself."""
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
            raise UnknownKeyError(f"unrecognized arguments: --{flag}, because --{before} holds no settings of its own")
        hints = field_hints(here)
        if name not in hints:
            if flag in options:
                return None
            prefix = "".join(f"{part}." for part in parts[:number])
            rest = "".join(f".{part}" for part in parts[number + 1 :])
            names = [*hints, *(() if number else {option.partition(".")[0] for option in options})]
            suggestion = _advice(kind, here, prefix, name, flag=True, rest=rest, names=names)
            raise UnknownKeyError(f"unrecognized arguments: --{flag}.{suggestion}")
        hint = hints[name]
        here = _inside(hint)
    return hint


def _inside(hint: Any) -> Any:
    """Return the part of a field's type that has keys, a mapping or a settings class. Otherwise the type."""
    mapping = next((member for member in alternatives(hint) if is_mapping(member)), None)
    return mapping or nested_kind(hint) or hint


def _advice(
    root: type, kind: type, prefix: str, name: str, *, flag: bool = False, rest: str = "", names: Sequence[str] = ()
) -> str:
    """Return a sentence with settings that an unknown key may have meant, of its place or else of the whole file.

    Args:
        root: Settings class of the file.
        kind: Settings class of the place of the key.
        prefix: Dotted place, with a dot at its end.
        flag: Show names as flags.
        rest: End of the flag after the name.
        names: Known names. Empty: the fields of `kind`.
    """
    keys = list(names) or list(field_hints(kind))
    matches = meanings(name, keys, kind)
    if isinstance(matches, str):
        return f" {matches}"
    places = [prefix + place + rest for place in matches]
    if not places:
        elsewhere = meanings(name, (), root)
        places = [place + rest for place in elsewhere] if not isinstance(elsewhere, str) else []
    if places:
        return " Did you mean " + " or ".join(repr("--" * flag + place) for place in places) + "?"
    return f" {prefix.removesuffix('.') or 'It'} has {', '.join(sorted(set(keys)))}."
