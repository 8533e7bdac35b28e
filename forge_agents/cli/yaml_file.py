"""YAML files of users: YAML 1.2 values, no duplicate keys, and errors with file, line and column."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from forge_agents import safe_yaml


class Switch(str):
    """A bare yes, no, on or off: a boolean in YAML 1.1, text in YAML 1.2. The type of the field decides."""

    __slots__ = ()

    @property
    def truth(self) -> bool:
        """Value in YAML 1.1."""
        return self.lower() in ("yes", "on", "true")


class ValueLoader(safe_yaml.BoundedLoader):
    """Loader of values and files for jsonargparse, which reads every plain `str` as YAML once more.

    Quoted text is a `Text`, which jsonargparse leaves alone. A bare yes, no, on or off is a boolean.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # same name as in PyYAML's class

    def construct_yaml_str(self, node: yaml.ScalarNode) -> str:
        """Return quoted text as `Text`."""
        text: str = super().construct_scalar(node)
        return Text(text) if node.style else text


class Text(str):
    """Quoted text."""

    __slots__ = ()


def plain(value: Any) -> Any:
    """Return values with `str` in place of `Text`. Settings objects are changed in place."""
    if isinstance(value, Text):
        return str(value)
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            object.__setattr__(value, field.name, plain(getattr(value, field.name)))
    return value


class YamlFile:
    """A mapping from a file, with the line of every key.

    Raises:
        ValueError: The file is not YAML, too large, no mapping, or has a duplicate key. The message begins with
            ``FILE:LINE:COLUMN``.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: dict[int, dict[Any, int]] = {}
        """Line of each key, by the id of its mapping. `values` keeps the mappings alive."""
        try:
            text = safe_yaml.read_bytes(path).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 at byte {error.start}. Save it as UTF-8") from error
        values = safe_yaml.load(text, name=str(path), loader=self._loader)
        if not isinstance(values, dict | None):
            problem = f"{path} holds no settings. Write keys with values, such as `steps: 100`"
            raise ValueError(problem)  # noqa: TRY004  # an error of the file, not of an argument
        self.values: dict[Any, Any] = values or {}

    def _loader(self, text: str) -> _Loader:
        loader = _Loader(text)
        loader.lines = self._lines
        return loader

    def place(self, mapping: Mapping[Any, Any], key: Any) -> str:
        """Return ``FILE:LINE`` of a key."""
        line = self._lines.get(id(mapping), {}).get(key)
        return str(self.path) if line is None else f"{self.path}:{line}"


class _Loader(safe_yaml.BoundedLoader):
    """Loader with the numbers and booleans of YAML 1.2 that refuses duplicate keys."""

    lines: dict[int, dict[Any, int]]
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # same name as in PyYAML's class

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        first: dict[Any, int] = {}
        for key_node, _ in node.value:
            is_merge = key_node.tag == "tag:yaml.org,2002:merge"
            key = key_node.value if is_merge else self.construct_object(key_node, deep=True)
            key, line = str(key) if isinstance(key, Switch) else key, key_node.start_mark.line + 1
            if isinstance(key, Hashable) and key in first:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is a duplicate of line {first[key]}. Keep one", key_node.start_mark
                )
            if isinstance(key, Hashable):
                first[key] = line
        mapping = super().construct_mapping(node, deep=deep)
        return {str(key) if isinstance(key, Switch) else key: value for key, value in mapping.items()}

    def construct_yaml_map(self, node: yaml.MappingNode) -> Any:
        mapping: dict[Any, Any] = {}
        yield mapping
        mapping.update(self.construct_mapping(node))
        lines = {key.value: key.start_mark.line + 1 for key, _ in node.value if isinstance(key, yaml.ScalarNode)}
        self.lines[id(mapping)] = lines


def _switch(loader: _Loader, node: yaml.ScalarNode) -> Switch:
    return Switch(node.value)


def _whole(loader: safe_yaml.BoundedLoader, node: yaml.ScalarNode) -> int:
    text = node.value.replace("_", "").lower()
    base = {"0x": 16, "0o": 8}.get(text.lstrip("+-")[:2], 10)
    return int(text, base)


_KINDS = (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("!switch", r"(?i:yes|no|on|off)", "yYnNoO"),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9][0-9_]*|[-+]?0x[0-9a-fA-F_]+|[-+]?0o[0-7_]+", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
)
"""Plain scalars that are not text: tag, pattern and first characters. This is the core schema of YAML 1.2 with merge
keys, underscores in numbers and exponents without a sign."""
for _tag, _forms, _first in _KINDS:
    for _kind, _name in ((_Loader, _tag), (ValueLoader, "tag:yaml.org,2002:bool" if _tag == "!switch" else _tag)):
        _kind.add_implicit_resolver(_name, re.compile(f"^(?:{_forms})$"), list(_first))
        _kind.add_constructor("tag:yaml.org,2002:int", _whole)
_Loader.add_constructor("!switch", _switch)
ValueLoader.add_constructor("tag:yaml.org,2002:str", ValueLoader.construct_yaml_str)
yaml.SafeDumper.add_representer(Text, yaml.SafeDumper.represent_str)  # for --print_config
_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_yaml_map)


class _Quoting(yaml.SafeDumper):
    """Quotes every text, so that it is read as text again."""


_Quoting.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


def as_text(values: Mapping[str, Any]) -> str:
    """Return settings as YAML that every loader reads identically."""
    return yaml.dump(dict(values), Dumper=_Quoting, sort_keys=False, allow_unicode=True, width=10_000)
