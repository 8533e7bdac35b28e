"""Reads untrusted YAML in bounded time and memory.

A kilobyte of aliases or merge keys that refer to each other stands for more values than any memory holds, and PyYAML's
safe loader builds all of them. Its loader in C also ends the process where lists are nested too deeply. The loader here
is in Python and counts before it builds anything.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import yaml

from forge_agents.display import visible

_MAX_BYTES = 10_000_000
_MAX_PARTS = 100_000
_MAX_DEPTH = 100
_TOO_DEEP = f"values are nested more than {_MAX_DEPTH} deep"
_MAX_DIGITS = 1_000
"""Maximum length of a number: converting one to an integer takes quadratic time."""
_MAX_KEY_DIGITS = 20
"""The same in a key. Python's hash of an integer is its remainder by 2^61 - 1, so that keys that are multiples of it
take quadratic time."""
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")

_NOT_IN_JSON = tuple(f"tag:yaml.org,2002:{name}" for name in ("binary", "omap", "pairs", "set"))
"""Tags of values that no setting needs, and that checks of settings would miss."""


class BoundedLoader(yaml.SafeLoader):
    """PyYAML's safe loader for texts of at most 100,000 values, nested at most 100 deep.

    A value counts as often as aliases and merge keys repeat it. Exceeding a bound raises `yaml.MarkedYAMLError`.
    """

    yaml_constructors = {  # same name as in PyYAML's class
        tag: constructor for tag, constructor in yaml.SafeLoader.yaml_constructors.items() if tag not in _NOT_IN_JSON
    }
    _parts = _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose one node, unless the text has too many already, or it is nested too deeply."""
        self._parts += 1
        self._depth += 1
        if self._parts > _MAX_PARTS:
            raise _error(f"more than {_MAX_PARTS:,} values", self.peek_event())  # type: ignore[no-untyped-call]
        if self._depth > _MAX_DEPTH:
            raise _error(_TOO_DEEP, self.peek_event())  # type: ignore[no-untyped-call]
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        """Compose the document and check its size, before anything is built from it."""
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            _check_size(node)
        return node

    def get_single_data(self) -> Any:
        """Build the document. All errors of the text are `yaml.YAMLError`."""
        try:
            return super().get_single_data()
        except RecursionError as error:
            raise yaml.YAMLError(_TOO_DEEP) from error
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
            # the constructors of numbers, dates and booleans take any text that has their tag, such as `!!int x`
            raise yaml.YAMLError(str(error)) from error


def load(text: str, *, name: str = "", loader: Callable[[str], BoundedLoader] = BoundedLoader) -> Any:
    """Read a YAML text of the file `name`.

    Raises:
        ValueError: The text is not YAML, or exceeds a bound of `BoundedLoader`. The message is one printable line and
            begins with ``NAME:LINE:COLUMN`` where the place is known.
    """
    where = name or "the text"
    if len(text) > _MAX_BYTES:
        raise _too_large(where)
    try:
        return yaml.load(text, Loader=loader)  # type: ignore[arg-type]  # noqa: S506  # a safe loader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise ValueError(visible(f"{where}{place}: {problem}")) from error
    except yaml.YAMLError as error:
        raise ValueError(visible(f"{where} cannot be read as YAML: {' '.join(str(error).split())}")) from error


def read(file: Path) -> Any:
    """Read a YAML file of at most 10 MB. Bytes that are not UTF-8 are replaced.

    Raises:
        ValueError: The file is not YAML, or too large.
        OSError: The file cannot be read.
    """
    with file.open("rb") as stream:
        return read_stream(stream, name=str(file))


def read_stream(stream: IO[bytes], *, name: str) -> Any:
    """Read an open file as `read` does. `name` names it in errors."""
    return load(_bounded(stream, name).decode("utf-8", errors="replace"), name=name)


def read_bytes(file: Path) -> bytes:
    """Return the content of a file of at most 10 MB.

    Raises:
        ValueError: The file is larger.
        OSError: The file cannot be read.
    """
    with file.open("rb") as stream:
        return _bounded(stream, str(file))


def _bounded(stream: IO[bytes], name: str) -> bytes:
    content = stream.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise _too_large(name)
    return content


def _too_large(name: str) -> ValueError:
    return ValueError(f"{name} has more than {_MAX_BYTES // 1_000_000} MB. A file of settings is smaller")


def _check_size(root: yaml.Node) -> None:
    sizes: dict[int, tuple[int, int]] = {}
    """Number of values and depth, by id of node."""
    ancestors: set[int] = set()
    waiting = [(root, False)]
    while waiting:
        node, children_done = waiting.pop()
        if children_done:
            ancestors.discard(id(node))
            sizes[id(node)] = _size(node, [sizes[id(child)] for child in _children(node)])
        elif id(node) in ancestors:
            raise _error("a value contains itself", node)
        elif id(node) not in sizes:
            ancestors.add(id(node))
            waiting += [(node, True), *((child, False) for child in _children(node))]


def _size(node: yaml.Node, children: list[tuple[int, int]]) -> tuple[int, int]:
    parts = 1 + sum(parts for parts, _ in children)
    depth = 1 + max((depth for _, depth in children), default=0)
    if parts > _MAX_PARTS:
        raise _error(f"more than {_MAX_PARTS:,} values, as aliases and merge keys repeat them", node)
    if depth > _MAX_DEPTH:
        raise _error(_TOO_DEEP, node)
    if isinstance(node, yaml.ScalarNode) and node.tag in _NUMBERS and len(node.value) > _MAX_DIGITS:
        raise _error(f"a number of more than {_MAX_DIGITS:,} characters", node)
    if isinstance(node, yaml.MappingNode):
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag in _NUMBERS and len(key.value) > _MAX_KEY_DIGITS:
                raise _error(f"a key that is a number of more than {_MAX_KEY_DIGITS} characters", key)
    return parts, depth


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _error(problem: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, at.start_mark)
