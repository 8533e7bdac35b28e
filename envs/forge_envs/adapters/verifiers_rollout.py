"""A rollout of a PrimeIntellect environment in the library's own loop, which stops at every model request.

A rollout is a coroutine of the library in a shared daemon thread. The library's interface to models, its "client",
passes every request to `Rollout`. Every wait has a timeout.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import re
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from forge_agents.errors import StallError
from forge_agents.runtime.threads import LoopThread
from forge_envs.adapters.contained import Randomness

T = TypeVar("T")
_LATE_S = 5.0
"""Extra seconds after a coroutine's own timeout before its thread is abandoned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Request for the model's next message: the conversation so far, and the available tools."""

    prompt: Sequence[Any]
    tools: Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """End of a scored rollout: the library's output, and errors that it only logs, as those of reward functions."""

    output: dict[str, Any]
    errors: Sequence[str]


class Rollout:
    """A rollout, to be started by `start`. Copies repeat the same responses up to the same point.

    Args:
        env: Environment of the library, shared by all rollouts.
        row: Row of its data set.
        seed: Seed of the global generators inside the environment.
        timeout_s: Maximum seconds for each answer of the environment.
    """

    def __init__(self, env: Any, row: dict[str, Any], *, seed: int, timeout_s: float) -> None:
        self._env, self._row, self._seed, self._timeout_s = env, row, seed, timeout_s
        self._randomness = Randomness(seed)
        self._responses: list[Any] = []
        self._errors: list[str] = []
        self._task: asyncio.Task[Any] | None = None

    def start(self) -> Request | End:
        """Run to the first request. Raises TimeoutError after `timeout_s`, and what the environment raises."""
        _install_log_handler()
        self._thread = _shared_thread()
        return self._advance(self._begin())

    def answer(self, response: Any) -> Request | End:
        """Pass the model's message (a `Response` of the library) and run to the next request. Raises as `start`."""
        self._responses.append(response)
        return self._advance(self._resume(response))

    def stop(self) -> None:
        """Cancel the rollout and wait for the environment's cleanup."""
        if self._task is None or self._task.done() or not self._thread.alive:
            return
        if self._thread.blocked:
            self.abandon()
        else:
            self._thread.result(_cancel(self._task, self._timeout_s), self._timeout_s)

    def abandon(self) -> None:
        """Cancel the rollout without waiting."""
        if self._task is not None and not self._task.done():
            self._thread.call(self._task.cancel)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rollout:
        copied = Rollout(self._env, self._row, seed=self._seed, timeout_s=self._timeout_s)
        if self._task is not None and not self._task.done():
            copied.start()
            for response in self._responses:
                copied.answer(response)
        return copied

    def _advance(self, work: Coroutine[Any, Any, Request | End]) -> Request | End:
        with self._randomness.contained():
            return self._thread.result(work, self._timeout_s)

    async def _begin(self) -> Request | End:
        self._requests: asyncio.Queue[tuple[Request, asyncio.Future[Any]]] = asyncio.Queue()
        self._task = asyncio.create_task(self._play())
        return await self._next_request()

    async def _resume(self, response: Any) -> Request | End:
        self._reply.set_result(response)
        return await self._next_request()

    async def _play(self) -> Any:
        _errors.set(self._errors)
        # Metrics may overwrite output fields of the same name, but columns are written last.
        columns = ["reward", "metrics", "stop_condition"]
        client = _client_class()(self._requests)
        return await self._env.run_rollout(self._row, client, "seat", {}, state_columns=columns)

    async def _next_request(self) -> Request | End:
        assert self._task is not None
        waiting = asyncio.create_task(self._requests.get())
        done, _ = await asyncio.wait({waiting, self._task}, timeout=self._timeout_s, return_when="FIRST_COMPLETED")
        if waiting in done:
            request, self._reply = waiting.result()
            return request
        waiting.cancel()
        if not done:
            await _cancel(self._task, self._timeout_s)
            raise TimeoutError(f"the environment gave no answer within {self._timeout_s:g} s")
        return End(output=dict(self._task.result()), errors=tuple(self._errors))


async def _cancel(task: asyncio.Task[Any], timeout_s: float) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=timeout_s)
    if task.done() and not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not warn


@cache
def _client_class() -> Any:
    """Return the library's interface to models, implemented by a queue of requests."""
    import verifiers as vf

    class QueueClient(vf.Client):  # type: ignore[misc]  # ships no types
        """Puts each request into a queue and waits for the answer. Messages need no conversion."""

        def setup_client(self, config: Any) -> Any:
            raise TypeError("this client is created from a queue of requests")

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> Any:
            return messages, {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
        ) -> Any:
            reply = asyncio.get_running_loop().create_future()
            await self.client.put((Request(prompt=tuple(prompt), tools=tuple(tools or ())), reply))
            return await reply

        async def raise_from_native_response(self, response: Any) -> None:
            """Accept every text."""

        async def from_native_response(self, response: Any) -> Any:
            return response

        async def close(self) -> None:
            """Do nothing: there is no connection."""

    return QueueClient


# ---- the thread


class _Thread(LoopThread):
    """A thread that is abandoned when an environment blocks its event loop."""

    blocked = False
    """Whether code has blocked the loop beyond its timeout. Nothing new starts in a blocked thread."""

    def result(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        try:  # the coroutine's own timeouts expire first
            return self.run(work, timeout_s=2 * timeout_s + _LATE_S, what="an answer")
        except StallError:
            self.blocked = True
            raise TimeoutError(f"the environment has blocked its event loop for more than {timeout_s:g} s") from None


_lock = threading.Lock()
_threads: list[_Thread] = []


def _shared_thread() -> _Thread:
    """Return the shared thread, or a new one if there is none (as after a fork) or it is blocked."""
    with _lock:
        if not _threads or _threads[-1].blocked or not _threads[-1].alive:
            _threads[:] = [_Thread("verifiers rollouts")]
        return _threads[-1]


# ---- logged errors

_errors: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("errors of a rollout", default=None)
_ACTOR = re.compile(r"^(?:\[actor=\S*\] ?)+")
"""Prefix that Monarch adds to every message, once per handler."""


class _ErrorHandler(logging.Handler):
    """Collects the errors that the library logs during a rollout.

    Other records go to Python's last resort, unless the logger has further handlers.
    """

    def emit(self, record: logging.LogRecord) -> None:
        errors, last = _errors.get(), logging.lastResort
        if errors is not None and record.levelno >= logging.ERROR:
            errors.append(_ACTOR.sub("", " ".join(record.getMessage().split()))[:300])
        elif last is not None and record.levelno >= last.level and _logger.handlers == [self]:
            last.handle(record)


_logger = logging.getLogger("verifiers")
_handler = _ErrorHandler()


def _install_log_handler() -> None:
    if _handler not in _logger.handlers:
        _logger.addHandler(_handler)
