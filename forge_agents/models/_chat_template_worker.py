"""Renders chat templates in a process with limits of memory and processor time. `chat_templates` starts it.

This file is a stand-alone program. Its arguments are both limits and the folders of the packages that it imports. A
request on standard input is a template and its variables (JSON), each after its length in 8 bytes. The answer on
standard output is ``[text, error]`` (JSON) after its length. The environment equals the one of transformers, see
``transformers.utils.chat_template_utils``.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import resource
import signal
import sys
from typing import Any

if __name__ == "__main__":
    sys.path += sys.argv[3:]

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class Generation(jinja2.ext.Extension):
    """The block ``{% generation %}`` that marks answers for training and writes its content."""

    tags = {"generation"}  # as the base class

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """A block with a scope of its own."""
        scope = jinja2.nodes.Scope(lineno=next(parser.stream).lineno)
        scope.body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return scope


def environment() -> jinja2.Environment:
    """The environment in which transformers renders chat templates."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    # Jinja's own filter escapes HTML
    def tojson(
        x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    result = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    result.filters["tojson"] = tojson
    result.globals["raise_exception"] = raise_exception
    result.globals["strftime_now"] = lambda form: dt.datetime.now().strftime(form)  # noqa: DTZ005
    return result


def main() -> None:
    """Answer requests until standard input ends."""
    cpu_s, memory = float(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    memory = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    compiled = functools.lru_cache(maxsize=64)(lambda source: environment().from_string(source.decode()))
    while size := sys.stdin.buffer.read(8):
        source = sys.stdin.buffer.read(int.from_bytes(size, "big"))
        variables = sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(8), "big"))
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal also ends one long call of a C function
        try:
            answer = [compiled(source).render(json.loads(variables)), ""]
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  # a template is a program
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            answer = ["", f"{kind}{error}"[:1000] or type(error).__name__]
        data = json.dumps(answer).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(len(data).to_bytes(8, "big") + data)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
