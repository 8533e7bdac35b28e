"""One rollout of a PrimeIntellect environment, in its own loop, which stops wherever it asks for the model's words.

In: an environment, a row of its data set, the model's words. Out: prompts, then the rubric's score. Waits for the
environment and its rubric, with a deadline for each answer.

A rollout is a coroutine of the library. It runs in one daemon thread that all rollouts share, and its "client", the
library's interface to models, hands every request over here.
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
"""What a coroutine gets beyond its own deadline before the thread it runs in is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The rollout asks for the model's next message."""

    prompt: Sequence[Any]
    """The conversation so far: messages of the library."""
    tools: Sequence[Any]
    """What the model may call: tools of the library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The rollout is over and scored."""

    output: dict[str, Any]
    """What the library writes about a rollout."""
    errors: Sequence[str]
    """Errors that the library only logs, such as those of reward functions."""


class Rollout:
    """A rollout that was not started yet. Copies play the same words again, to the same place.

    Args:
        env: An environment of the library; rollouts and their copies share it.
        row: A row of its data set.
        seed: Seeds the global generators as the environment finds them.
        timeout_s: Seconds for each answer of the environment.
    """

    def __init__(self, env: Any, row: dict[str, Any], *, seed: int, timeout_s: float) -> None:
        self._env, self._row, self._seed, self._timeout_s = env, row, seed, timeout_s
        self._randomness = Randomness(seed)
        self._said: list[Any] = []
        self._errors: list[str] = []
        self._task: asyncio.Task[Any] | None = None

    def start(self) -> Request | End:
        """Run to the first request.

        Raises:
            TimeoutError: The environment took longer than the deadline.
            Exception: Whatever the environment raised.
        """
        _listen()
        self._thread = _running_thread()
        return self._advance(self._begin())

    def answer(self, response: Any) -> Request | End:
        """Give the model's message (a `Response` of the library) and run on; raises as `start` does."""
        self._said.append(response)
        return self._advance(self._go_on(response))

    def stop(self) -> None:
        """Give the rollout up. The environment's own cleaning up runs."""
        if self._task is None or self._task.done() or not self._thread.alive:
            return
        if self._thread.held:
            self.abandon()
        else:
            self._thread.result(_cancelled(self._task, self._timeout_s), self._timeout_s)

    def abandon(self) -> None:
        """As `stop`, without waiting for it."""
        if self._task is not None and not self._task.done():
            self._thread.call(self._task.cancel)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rollout:
        copied = Rollout(self._env, self._row, seed=self._seed, timeout_s=self._timeout_s)
        if self._task is not None and not self._task.done():
            copied.start()
            for response in self._said:
                copied.answer(response)
        return copied

    def _advance(self, work: Coroutine[Any, Any, Request | End]) -> Request | End:
        with self._randomness.contained():
            return self._thread.result(work, self._timeout_s)

    async def _begin(self) -> Request | End:
        self._requests: asyncio.Queue[tuple[Request, asyncio.Future[Any]]] = asyncio.Queue()
        self._task = asyncio.create_task(self._play())
        return await self._until_asked()

    async def _go_on(self, response: Any) -> Request | End:
        self._reply.set_result(response)
        return await self._until_asked()

    async def _play(self) -> Any:
        _errors.set(self._errors)
        # Metrics are spread over the output and may overwrite a field of the same name; columns are written last.
        columns = ["reward", "metrics", "stop_condition"]
        return await self._env.run_rollout(self._row, _seat()(self._requests), "seat", {}, state_columns=columns)

    async def _until_asked(self) -> Request | End:
        assert self._task is not None
        asked = asyncio.create_task(self._requests.get())
        done, _ = await asyncio.wait({asked, self._task}, timeout=self._timeout_s, return_when="FIRST_COMPLETED")
        if asked in done:
            request, self._reply = asked.result()
            return request
        asked.cancel()
        if not done:
            await _cancelled(self._task, self._timeout_s)
            raise TimeoutError(f"the environment gave no answer within {self._timeout_s:g} s")
        return End(output=dict(self._task.result()), errors=tuple(self._errors))


async def _cancelled(task: asyncio.Task[Any], timeout_s: float) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=timeout_s)
    if task.done() and not task.cancelled():
        task.exception()  # looked at, or asyncio complains


@cache
def _seat() -> Any:
    """The library's interface to models, whose model is the seat."""
    import verifiers as vf

    class Seat(vf.Client):  # type: ignore[misc]  # ships no types
        """Hands each request over and waits for the answer; messages need no translation."""

        def setup_client(self, config: Any) -> Any:
            raise TypeError("a seat is made from a queue of requests")

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
            """Every text is an answer."""

        async def from_native_response(self, response: Any) -> Any:
            return response

        async def close(self) -> None:
            """Nothing is open."""

    return Seat


# ---- the thread


class _Thread(LoopThread):
    """Which may be given up."""

    held = False
    """Whether code in it has missed a deadline without giving the loop back: nothing new starts in it."""

    def result(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        try:  # the coroutine's own deadlines come first
            return self.run(work, timeout_s=2 * timeout_s + _LATE_S, what="an answer")
        except StallError:
            self.held = True
            raise TimeoutError(f"the environment has held its event loop for more than {timeout_s:g} s") from None


_lock = threading.Lock()
_threads: list[_Thread] = []


def _running_thread() -> _Thread:
    """The shared thread; a new one where none runs, as after a fork, or where code that hangs holds the old one."""
    with _lock:
        if not _threads or _threads[-1].held or not _threads[-1].alive:
            _threads[:] = [_Thread("verifiers rollouts")]
        return _threads[-1]


# ---- errors that the library only logs

_errors: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("errors of a rollout", default=None)


_ACTOR = re.compile(r"^(?:\[actor=\S*\] ?)+")
"""What Monarch, once it runs, puts before every message, once per handler."""


class _Listener(logging.Handler):
    """Notes the errors that the library logs within a rollout.

    Other records go where Python puts them in the absence of handlers, unless there are others.
    """

    def emit(self, record: logging.LogRecord) -> None:
        noted, last = _errors.get(), logging.lastResort
        if noted is not None and record.levelno >= logging.ERROR:
            noted.append(_ACTOR.sub("", " ".join(record.getMessage().split()))[:300])
        elif last is not None and record.levelno >= last.level and _logger.handlers == [self]:
            last.handle(record)


_logger = logging.getLogger("verifiers")
_listener = _Listener()


def _listen() -> None:
    if _listener not in _logger.handlers:
        _logger.addHandler(_listener)
