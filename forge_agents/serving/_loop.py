"""The engine's thread: every call into vLLM happens here, on all ranks of the engine in one order.

In: requests and jobs from any thread. Out: answers, in clumps; the other ranks do the same in silence. Waits for work;
never while requests are unfinished.

Each rank is a whole vLLM engine, with a scheduler of its own and its part of the model (`external_launcher`). They come
to the same tokens because each is told the same at the same step. Only the first knows the time and the controller.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from forge_agents.serving import _vllm
from forge_agents.serving._wire import Answer, Request

if TYPE_CHECKING:
    import torch

    from forge_agents.serving.config import EngineConfig

T = TypeVar("T")
_IDLE = timedelta(days=365)
"""Ranks wait for the next call as long as nobody asks for anything; the end of the first one ends the wait."""
_CLOSE = "close"


class EngineThread:
    """Owns a vLLM engine. Jobs run between two steps.

    Args:
        deliver: Called on this thread with the answers of one step; never with none.
        died: Called on this thread, once, when a step or the build fails: the engine's state is unknown from then on.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        deliver: Callable[[list[Answer]], object],
        died: Callable[[BaseException], object],
    ) -> None:
        self.steps = 0
        self.generated_tokens = self.prompt_tokens = self.cached_tokens = 0
        self.engine: Any = None
        self.ranks: Any = None
        """Of the engine, this process's first."""
        self.ready: Future[None] = Future()
        self._config = config
        self._deliver = deliver
        self._died = died
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._requests: dict[str, Request] = {}
        self._context = 0
        self._promised: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._ended = False
        self._taken_up: dict[str, float] = {}
        """When the engine began to work on a request, by name; queued ones are absent."""
        self._tokens: dict[str, int] = {}
        """Sampled so far, of those that are worked on."""
        self._arrived: dict[str, float] = {}
        """When each request was queued, by name."""
        self._work: tuple[float, float | None] = 0.0, None
        """Seconds of all steps and jobs that are over, and when the present one began; one value, for two threads."""
        self._starved_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)
        self._thread.start()

    @property
    def unfinished(self) -> int:
        """Requests in the engine."""
        return len(self._requests)

    @property
    def still_s(self) -> float:
        """Seconds of the present step or job, or of steps that work on no request; 0 while there is nothing to do."""
        now = time.monotonic()
        return max((now - since for since in (self._work[1], self._starved_since) if since is not None), default=0.0)

    @property
    def busy_s(self) -> float:
        """Seconds in which it had something to do, since the start."""
        before, since = self._work
        return before + (time.monotonic() - since if since is not None else 0.0)

    def add(self, requests: list[Request]) -> None:
        """Queue requests; a refused one is answered with its error."""
        self._jobs.put(lambda: self._add(requests))

    def abort(self, request_ids: list[int]) -> None:
        """Drop requests nobody waits for any more; they are not answered."""
        self._jobs.put(lambda: self._abort(request_ids))

    def call(self, job: Callable[[], T]) -> Future[T]:
        """Run a job on the engine's thread, between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except Exception as error:  # noqa: BLE001  # the boundary: the caller's thread raises it
                future.set_exception(error)
            self._promised.discard(future)

        with self._lock:
            if self._ended:
                future.set_exception(RuntimeError("the engine's thread has ended"))
            else:
                self._promised.add(future)
                self._jobs.put(run)
        return future

    def close(self, timeout_s: float) -> None:
        """End the thread after the step that runs."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self.engine = _vllm.build(self._config)
            self.ranks = Ranks(self.engine, self._config.tp)
            self._context = _vllm.max_model_len(self.engine)
        except BaseException as error:  # noqa: BLE001  # the boundary: `ready` raises it in the actor
            self.ready.set_exception(error)
            return
        self.ready.set_result(None)
        try:
            while self._do_jobs():
                if self.engine.has_unfinished_requests():
                    self._begin()
                    self._step()
            self.ranks.close()
        except BaseException as error:  # noqa: BLE001  # the boundary: every waiting request fails with it
            self._died(error)
        finally:
            with self._lock:
                self._ended = True
            for future in tuple(self._promised):
                if not future.done():
                    future.set_exception(RuntimeError("the engine's thread has ended"))
            _vllm.close(self.engine)

    def _begin(self) -> None:
        self._work = self._work[0], time.monotonic()

    def _do_jobs(self) -> bool:
        """Run all queued jobs, waiting for the first if the engine is idle. False: the thread shall end."""
        wait = not self.engine.has_unfinished_requests()
        while True:
            self._work = self.busy_s, None
            try:
                job = self._jobs.get(block=wait)
            except queue.Empty:
                return True
            if job is None:
                return False
            self._begin()
            job()
            wait = False

    def _step(self) -> None:
        answers = []
        outputs = self.ranks.together("step")
        for output in outputs:
            arrived = self._arrived.get(output.request_id, 0.0)
            if output.finished and (request := self._forget(output.request_id)) is not None:
                try:
                    seconds = time.monotonic() - arrived
                    completion = _vllm.completion_of(output, request, self._context, seconds=seconds)
                except ValueError as error:  # this request failed; the others go on
                    answers.append(Answer(request_id=request.request_id, completion=None, error=str(error)))
                else:
                    self.generated_tokens += len(completion.token_ids)
                    self.prompt_tokens += len(request.prompt_ids)
                    self.cached_tokens += output.num_cached_tokens or 0
                    answers.append(Answer(request_id=request.request_id, completion=completion))
        self.steps += 1
        answers += self._give_up_late(bool(outputs))
        if answers:
            self._deliver(answers)

    def _give_up_late(self, progress: bool) -> list[Answer]:
        """End requests that took too long since they were taken up. `progress`: the step that is over ended some."""
        now, limit_s = time.monotonic(), self._config.answer_timeout_s
        self._tokens = _vllm.running(self.engine)
        for name in self._tokens:
            self._taken_up.setdefault(name, now)
        if progress or self._tokens or not self._requests:
            self._starved_since = None
        elif self._starved_since is None:
            self._starved_since = now
        late = {name: now - since for name, since in self._taken_up.items() if now - since > limit_s}
        answers = []
        for name, seconds in late.items():
            self.ranks.together("abort", [name])
            if (request := self._forget(name)) is not None:
                error = (
                    f"had {self._tokens.get(name, 0)} of at most {request.sampling.max_tokens} tokens of an answer "
                    f"{seconds:.0f} s after it began, and answer_timeout_s={limit_s:g}; raise it, lower max_tokens or "
                    "max_num_seqs, or give the engine more threads"
                )
                answers.append(Answer(request_id=request.request_id, completion=None, error=error, late=True))
        return answers

    def _forget(self, name: str) -> Request | None:
        self._taken_up.pop(name, None)
        self._arrived.pop(name, None)
        return self._requests.pop(name, None)

    def _add(self, requests: list[Request]) -> None:
        refused = []
        self.ranks.tell([("add", (str(request.request_id), request)) for request in requests])
        for request in requests:
            name = str(request.request_id)
            try:
                self.ranks.do("add", name, request)
            except ValueError as error:  # vLLM's verdict on this request; the others go on
                refused.append(Answer(request_id=request.request_id, completion=None, error=str(error)))
            else:
                self._requests[name], self._arrived[name] = request, time.monotonic()
        if refused:
            self._deliver(refused)

    def _abort(self, request_ids: list[int]) -> None:
        names = [str(request_id) for request_id in request_ids if str(request_id) in self._requests]
        if names:
            self.ranks.together("abort", names)
        for name in names:
            self._forget(name)


def follow(config: EngineConfig, ready: Future[None], died: Callable[[BaseException], object]) -> threading.Thread:
    """Be another rank of an engine, on a thread: build it, then do what the first rank does.

    Args:
        ready: Told when it is built, or why not.
        died: Called on that thread when a call fails afterwards.
    """

    def run() -> None:
        try:
            engine = _vllm.build(config)
            ranks = Ranks(engine, config.tp)
        except BaseException as error:  # noqa: BLE001  # the boundary: `ready` raises it in the actor
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            ranks.follow()
        except BaseException as error:  # noqa: BLE001  # the boundary: this process ends with it
            died(error)
        finally:
            _vllm.close(engine)

    thread = threading.Thread(target=run, name="vllm-engine", daemon=True)
    thread.start()
    return thread


# ---- ranks


class Ranks:
    """All ranks of an engine that has been built on each; on its thread, and first on all of them at the same time."""

    def __init__(self, engine: Any, tp: int) -> None:
        self._engine = engine
        self._group: Any = None
        if tp > 1:
            import torch.distributed as dist

            self._group = dist.new_group(backend="gloo", timeout=_IDLE)

    def tell(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        """On the first rank: let the others do calls that it is about to `do` itself, whatever becomes of each.

        Args:
            calls: Names of `_vllm`'s functions, and what they are given beside the engine.
        """
        if self._group is not None:
            import torch.distributed as dist

            dist.broadcast_object_list([list(calls)], src=0, group=self._group)

    def do(self, name: str, *given: Any) -> Any:
        """Do a call here."""
        return getattr(_vllm, name)(self._engine, *given)

    def together(self, name: str, *given: Any) -> Any:
        """On the first rank: do a call on all."""
        self.tell([(name, given)])
        return self.do(name, *given)

    def load(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """On the first rank: replace all weights on all. Tensors go one by one, and each rank keeps its part."""
        if self._group is None:
            self.do("load_tensors", tensors, version)
            return
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        self.tell([("load", (shapes, version))])
        self._load(_Travelling(shapes, self._group, tensors), version)

    def follow(self) -> None:
        """On the other ranks: do what the first one tells, until it closes.

        Raises:
            Exception: Of vLLM, or because the first rank is gone.
        """
        import torch.distributed as dist

        while True:
            told: list[Any] = [None]
            dist.broadcast_object_list(told, src=0, group=self._group)
            for name, given in told[0]:
                if name == _CLOSE:
                    return
                if name == "load":
                    shapes, version = given
                    self._load(_Travelling(shapes, self._group), version)
                    continue
                try:
                    self.do(name, *given)
                except ValueError:
                    if name != "add":  # a refused request is refused on all ranks, and the first answers it
                        raise

    def close(self) -> None:
        """On the first rank, in good health: end the others."""
        self.tell([(_CLOSE, ())])

    def _load(self, tensors: _Travelling, version: int) -> None:
        self.do("load_tensors", tensors, version)
        tensors.finish()


class _Travelling(Mapping[str, "torch.Tensor"]):
    """Tensors that go from the first rank to the others as they are looked through, once and in order.

    Args:
        own: The tensors, on the first rank.
    """

    def __init__(self, shapes: Mapping[str, Any], group: Any, own: Mapping[str, torch.Tensor] | None = None) -> None:
        self._shapes, self._group, self._own = shapes, group, own
        self._left = self._arriving()

    def __len__(self) -> int:
        return len(self._shapes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __getitem__(self, name: str) -> torch.Tensor:
        raise TypeError(f"{name} is on its way; look through items()")

    def items(self) -> Any:
        """Names and tensors, each as soon as all ranks have it."""
        return self._left

    def finish(self) -> None:
        """Take what nobody looked at, so that all ranks stay together."""
        for _ in self._left:
            continue

    def _arriving(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch
        import torch.distributed as dist

        for name, (shape, dtype) in self._shapes.items():
            tensor = torch.empty(shape, dtype=dtype) if self._own is None else self._own[name].contiguous()
            dist.broadcast(tensor.view(-1).view(torch.uint8), src=0, group=self._group)
            yield name, tensor
