"""The YAML files that users write: one meaning for each text, no key twice, and errors with file, line and column."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from forge_agents import safe_yaml


class Switch(str):
    """A bare yes, no, on or off: YAML 1.1 reads a boolean, YAML 1.2 a text. The field that it is given to decides."""

    __slots__ = ()

    @property
    def truth(self) -> bool:
        """What YAML 1.1 reads."""
        return self.lower() in ("yes", "on", "true")


class YamlFile:
    """A mapping that was read from a file, with the line of every key.

    Raises:
        ValueError: The file is not YAML, is too large, holds no mapping, or a key twice. The message begins with
            ``FILE:LINE:COLUMN``.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: dict[int, dict[Any, int]] = {}
        """Line of each key, by the id of its mapping, all of which `values` holds."""
        try:
            text = safe_yaml.read_bytes(path).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 from byte {error.start} on; save it as UTF-8") from error
        values = safe_yaml.load(text, name=str(path), loader=self._loader)
        if not isinstance(values, dict | None):
            problem = f"{path} holds no settings; write keys with values, such as `steps: 100`"
            raise ValueError(problem)  # noqa: TRY004  # of the file, not of an argument
        self.values: dict[Any, Any] = values or {}

    def _loader(self, text: str) -> _Loader:
        loader = _Loader(text)
        loader.lines = self._lines
        return loader

    def place(self, mapping: Mapping[Any, Any], key: Any) -> str:
        """``FILE:LINE`` of a key."""
        line = self._lines.get(id(mapping), {}).get(key)
        return str(self.path) if line is None else f"{self.path}:{line}"


class _Loader(safe_yaml.BoundedLoader):
    """YAML 1.2's numbers and booleans, and no key twice."""

    lines: dict[int, dict[Any, int]]
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # as PyYAML's class has it

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        first: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            key, line = str(key) if isinstance(key, Switch) else key, key_node.start_mark.line + 1
            if isinstance(key, Hashable) and key in first:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is given twice, first in line {first[key]}; keep one", key_node.start_mark
                )
            if isinstance(key, Hashable):
                first[key] = line
        found = super().construct_mapping(node, deep=deep)
        return {str(key) if isinstance(key, Switch) else key: value for key, value in found.items()}

    def construct_yaml_map(self, node: yaml.MappingNode) -> Any:
        made: dict[Any, Any] = {}
        yield made
        made.update(self.construct_mapping(node))
        own = {key.value: key.start_mark.line + 1 for key, _ in node.value if isinstance(key, yaml.ScalarNode)}
        self.lines[id(made)] = own


def _switch(loader: _Loader, node: yaml.ScalarNode) -> Switch:
    return Switch(node.value)


def _whole(loader: _Loader, node: yaml.ScalarNode) -> int:
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
        r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
)
"""Bare texts that are no texts: their tag, all of their forms and their first characters. The core schema of YAML 1.2
with the merge key, underscores in numbers and exponents without a sign."""
for _tag, _forms, _first in _KINDS:
    _Loader.add_implicit_resolver(_tag, re.compile(f"^(?:{_forms})$"), list(_first))
_Loader.add_constructor("!switch", _switch)
_Loader.add_constructor("tag:yaml.org,2002:int", _whole)
_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_yaml_map)


class _Quoting(yaml.SafeDumper):
    """Writes every text in quotes, so that it is read as a text again."""


_Quoting.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


def as_text(values: Mapping[str, Any]) -> str:
    """Settings as a YAML text that every loader reads alike."""
    return yaml.dump(dict(values), Dumper=_Quoting, sort_keys=False, allow_unicode=True, width=10_000)
