"""Asking a model from synchronous code, on any thread: questions, and the conversation that carries them.

In: questions. Out: replies, or the error of each. Waits for the models, each wait with a deadline.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from forge_agents.errors import ActorDiedError, StallError
from forge_verifiers.judge.answers import Reply

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_SLACK_S = 30.0
"""Beyond a model's own deadlines: for the way there and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question to a model; the answer is greedy."""

    instructions: str
    """The system prompt."""
    text: str
    """The user's message."""
    choices: tuple[str, ...]
    """The answer is one of these; empty where `schema` alone says what it is."""
    schema: Mapping[str, Any]
    """The answer as JSON."""
    max_tokens: int


class Chat(Protocol):
    """A model that answers. All calls come from one event loop."""

    async def start(self) -> None:
        """Make ready."""

    async def ask(self, question: Question) -> Reply:
        """Answer, or raise."""

    async def stop(self) -> None:
        """Let go of everything."""

    def longest_s(self, questions: int) -> float:
        """Seconds that so many questions, asked at once, may take at most."""


class Conversation:
    """A model that starts when first asked, on an event loop and a thread of its own, and again after its death.

    Args:
        chat: The model.
        name: Said in errors.
        start_timeout_s: Seconds for it to start.
    """

    def __init__(self, chat: Chat, *, name: str, start_timeout_s: float) -> None:
        self._chat, self._name, self._start_timeout_s = chat, name, start_timeout_s
        self._thread: _LoopThread | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the model. Twice is no error."""
        self._running()

    def ask(self, questions: Sequence[Question]) -> list[Reply | BaseException]:
        """For every question its reply, or why there is none; all are asked at once, and each has its own deadline.

        A model that died is started again, once, and asked again what it did not answer.
        """
        found = self._ask(questions)
        left = [at for at, reply in enumerate(found) if isinstance(reply, ActorDiedError)]
        if left:
            _LOG.warning("the model of %s died and is started again: %s", self._name, found[left[0]])
            self.close()
            for at, reply in zip(left, self._ask([questions[at] for at in left]), strict=True):
                found[at] = reply
        return found

    def longest_s(self, questions: int) -> float:
        """Seconds that `ask` may take at most: a start, the answers and an end, and all again after a death."""
        return 2 * (self._start_timeout_s + self._chat.longest_s(questions) + 4 * _SLACK_S)

    def close(self) -> None:
        """Stop the model; the next question starts it again. Twice is no error."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return
        atexit.unregister(self.close)
        try:
            thread.run(self._chat.stop(), timeout_s=_SLACK_S, what="stop")
        finally:
            thread.close()

    def _ask(self, questions: Sequence[Question]) -> list[Reply | BaseException]:
        limit_s = self._chat.longest_s(len(questions)) + _SLACK_S

        async def answer(question: Question) -> Reply:
            try:
                return await asyncio.wait_for(self._chat.ask(question), limit_s)
            except StallError:  # the model's own, which says more
                raise
            except TimeoutError as error:
                raise StallError(f"{self._name} gave no answer within {limit_s:g} s") from error

        async def all_at_once() -> list[Reply | BaseException]:
            return await asyncio.gather(*map(answer, questions), return_exceptions=True)

        return self._running().run(all_at_once(), timeout_s=limit_s + _SLACK_S, what=f"{len(questions)} questions")

    def _running(self) -> _LoopThread:
        with self._lock:
            if self._thread is None:
                thread = _LoopThread(self._name)
                try:
                    thread.run(self._chat.start(), timeout_s=self._start_timeout_s + _SLACK_S, what="start")
                except BaseException:
                    thread.close()
                    raise
                self._thread = thread
                atexit.register(self.close)
            return self._thread


class _LoopThread:
    """An event loop on a thread of its own, for synchronous callers on any thread, inside another loop or not."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], *, timeout_s: float, what: str) -> T:
        """The result of `work`.

        Raises:
            StallError: It took longer than `timeout_s`.
            ActorDiedError: The thread was closed meanwhile.
            Exception: What `work` raised.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise ActorDiedError(f"{self._name} was closed during {what}") from None
        except TimeoutError as error:
            if future.done():  # what `work` raised
                raise
            raise StallError(f"{self._name} did not finish {what} within {timeout_s:g} s") from error
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel what still runs and end the thread."""
        with contextlib.suppress(concurrent.futures.CancelledError, TimeoutError):
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
