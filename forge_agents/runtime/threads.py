"""Blocking calls beside the event loop, in threads that never keep the program alive.

In: a function. Out: its result. Waits for it; give the wait a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(call: Callable[..., T], *args: Any, name: str) -> T:
    """As `asyncio.to_thread`, but a call that never returns is left behind when the program ends, not waited for.

    Args:
        call: What to run.
        args: Its arguments.
        name: The thread's, for a picture of a stall.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():  # nobody waits any more
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = call(*args)
        except BaseException as caught:  # noqa: BLE001  # the boundary: the caller's thread raises it
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done
