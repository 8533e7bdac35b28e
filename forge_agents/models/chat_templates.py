"""Renders chat templates in a process with limits.

A template is a program of a model's author. Jinja's sandbox keeps it from files, but not from endless loops and huge
values, which would stop the process that renders it. A single operation such as ``10 ** 10 ** 8`` cannot be interrupted
inside a process, and a loop may depend on what a message says. So templates are rendered in a worker, which the kernel
ends at its limits. The next rendering starts another worker.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forge_agents.errors import ForgeError

_MAX_CPU_S = 5.0
"""Maximum processor time of one rendering. A long conversation takes milliseconds."""
_MAX_MEMORY = 1 << 30
"""Maximum size of the worker in bytes."""
_DEADLINE_S = 60.0
"""Maximum wait for one rendering, if the machine is too busy to use up the processor time."""
_MAX_GROWTH = 8
"""Maximum size of a rendered text, as a multiple of its conversation, in addition to 1 MB."""
_INHERITED = ("LD_LIBRARY_PATH", "PATH", "TZ")
"""Variables of the worker. Credentials are none of them."""
_WORKERS: dict[int, _Worker] = {}
"""The worker by the id of the process that uses it, because a forked child must not use its parent's."""
_lock = threading.Lock()


class TemplateRefusalError(ForgeError, ValueError):
    """A chat template raised an error for a conversation."""


class TemplateLimitError(ForgeError, RuntimeError):
    """A chat template exceeded a limit of processor time, memory or size."""


def render(tokenizer: Any, messages: Sequence[Mapping[str, str]], **variables: bool | str) -> str:
    """Render a conversation as ``tokenizer.apply_chat_template(messages, tokenize=False, **variables)``.

    Raises:
        TemplateRefusalError: The template raised an error.
        TemplateLimitError: The template took more than 5 s of processor time or 1 GB of memory, or wrote far more than
            it read.
    """
    template = tokenizer.get_chat_template(None, None)
    num_chars = sum(len(text) for message in messages for text in message.values())
    try:
        text, refusal = _render_in_worker(template, {**tokenizer.special_tokens_map, **variables}, messages)
        if len(text) > (1 << 20) + _MAX_GROWTH * num_chars:
            raise TemplateLimitError(f"wrote {len(text):,} characters for a conversation of {num_chars:,}")
    except TemplateLimitError as reason:
        raise TemplateLimitError(
            f"the chat template of {tokenizer.name_or_path!r} {reason}. It may contain an endless loop. Repair "
            "chat_template.jinja in this folder (or chat_template in its tokenizer_config.json), or use another model"
        ) from None
    if refusal:
        roles = ", ".join(str(message["role"]) for message in messages[:20])
        raise TemplateRefusalError(
            f"the chat template of {tokenizer.name_or_path!r} refuses a conversation of {roles} ({refusal}). Use a "
            "model or a template that accepts it"
        )
    return text


def _render_in_worker(
    template: str, variables: Mapping[str, Any], messages: Sequence[Mapping[str, str]]
) -> tuple[str, str]:
    options = {"add_generation_prompt": False, "tools": None, "documents": None}
    values = json.dumps({**options, **variables, "messages": messages}).encode()
    with _lock:
        worker = _WORKERS.get(os.getpid())
        if worker is not None and worker.process.poll() is not None:  # the machine may have lacked memory
            worker.stop()
            worker = None
        worker = worker or _Worker()
        text, refusal = worker.ask(template.encode(errors="surrogatepass"), values)
    return text, refusal


class _Worker:
    """The process that renders the templates of this process."""

    def __init__(self) -> None:
        specs = map(find_spec, ("jinja2", "markupsafe"))
        folders = [str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin]
        program = Path(__file__).with_name("_chat_template_worker.py")
        self.channel, inner = socket.socketpair()
        self.channel.settimeout(_DEADLINE_S)
        self.answers = self.channel.makefile("rb")
        with inner:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(program), str(_MAX_CPU_S), str(_MAX_MEMORY), *folders],
                stdin=inner.fileno(),
                stdout=inner.fileno(),
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _INHERITED if name in os.environ},
                start_new_session=True,  # not ended by Ctrl-C; it ends when this process closes its channel
            )
        _WORKERS[os.getpid()] = self

    def ask(self, template: bytes, values: bytes) -> list[str]:
        """Text and error of a rendering. Ends the process unless it answers."""
        limit = (1 << 20) + _MAX_GROWTH * len(values)
        try:
            self.channel.sendall(b"".join(len(part).to_bytes(8, "big") + part for part in (template, values)))
            size = int.from_bytes(self._read(8), "big")
            if size > limit:
                raise TemplateLimitError(f"wrote {size:,} bytes for a conversation of {len(values):,} bytes")
            answer: list[str] = json.loads(self._read(size))
        except TimeoutError:
            self.stop()
            raise TemplateLimitError(f"did not end within {_DEADLINE_S:g} s") from None
        except (EOFError, OSError):
            reasons = {
                -signal.SIGPROF: f"did not end within {_MAX_CPU_S:g} s of processor time",
                1: f"needs more than {_MAX_MEMORY >> 30} GB of memory",
            }
            status = self.stop()
            raise TemplateLimitError(reasons.get(status, f"ended its process with status {status}")) from None
        except BaseException:
            self.stop()
            raise
        return answer

    def _read(self, size: int) -> bytes:
        data = self.answers.read(size)
        if len(data) < size:
            raise EOFError
        return data

    def stop(self) -> int:
        """End the process. Returns its status, which is its own if it has ended by itself."""
        _WORKERS.pop(os.getpid(), None)
        self.answers.close()
        self.channel.close()
        self.process.kill()
        return self.process.wait()


@atexit.register
def _stop() -> None:
    for worker in list(_WORKERS.values()):
        worker.stop()


def _renew_lock() -> None:
    """Replace the lock in a forked child, because a thread that only its parent has may hold it."""
    global _lock  # noqa: PLW0603  # one lock per process
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
