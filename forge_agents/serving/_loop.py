"""The engine's thread: all calls into vLLM, in the same order on all ranks.

Each rank is a whole vLLM engine with its own scheduler and its part of the model (`external_launcher`). The ranks
sample the same tokens because each receives the same calls at the same step. Only the first rank reads clocks and talks
to the controller.
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

    from forge_agents.serving.config import EnginePlan

T = TypeVar("T")
_IDLE = timedelta(days=365)
"""Timeout of the wait for the next call. The end of the first rank's process ends the wait earlier."""
_CLOSE = "close"


class EngineThread:
    """Owns a vLLM engine and runs jobs between its steps.

    `deliver` is called on this thread with the answers of a step, if there are any, and `on_death` once if a step
    fails: the engine's state is unknown from then on.
    """

    def __init__(
        self,
        config: EnginePlan,
        *,
        deliver: Callable[[list[Answer]], object],
        on_death: Callable[[BaseException], object],
    ) -> None:
        self.steps = 0
        self.generated_tokens = self.prompt_tokens = self.cached_tokens = 0
        self.engine: Any = None
        self.ranks: Any = None
        self.ready: Future[None] = Future()
        """Done when the engine is built."""
        self._config = config
        self._deliver = deliver
        self._on_death = on_death
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._requests: dict[str, Request] = {}
        self._max_model_len = 0
        self._pending: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._ended = False
        self._began: dict[str, float] = {}
        """Time when the engine began to compute a request, by name. Queued requests are absent."""
        self._num_tokens: dict[str, int] = {}
        """Tokens sampled so far for requests that are computed."""
        self._arrived: dict[str, float] = {}
        """Time when a request was queued, by name."""
        self._work: tuple[float, float | None] = 0.0, None
        """Seconds of past steps and jobs, and the start of the present one, one value, because two threads use it."""
        self._starved_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)
        self._thread.start()

    @property
    def unfinished(self) -> int:
        """Number of requests in the engine."""
        return len(self._requests)

    @property
    def stalled_s(self) -> float:
        """Duration of the present step or job, or of a series of steps that compute no request, or 0 if idle."""
        now = time.monotonic()
        return max((now - since for since in (self._work[1], self._starved_since) if since is not None), default=0.0)

    @property
    def busy_s(self) -> float:
        """Seconds in which the engine had work, since the start."""
        before, since = self._work
        return before + (time.monotonic() - since if since is not None else 0.0)

    def add(self, requests: list[Request]) -> None:
        """Queue requests. A refused one is answered with its error."""
        self._jobs.put(lambda: self._add(requests))

    def abort(self, request_ids: list[int]) -> None:
        """Drop requests without an answer."""
        self._jobs.put(lambda: self._abort(request_ids))

    def call(self, job: Callable[[], T]) -> Future[T]:
        """Run a job on the engine's thread, between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except Exception as error:  # noqa: BLE001  # the boundary: the caller's thread raises it
                future.set_exception(error)
            self._pending.discard(future)

        with self._lock:
            if self._ended:
                future.set_exception(RuntimeError("the engine's thread has ended"))
            else:
                self._pending.add(future)
                self._jobs.put(run)
        return future

    def close(self, timeout_s: float) -> None:
        """End the thread after the present step."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self.engine = _vllm.build(self._config)
            self.ranks = Ranks(self.engine, self._config.tp)
            self._max_model_len = _vllm.max_model_len(self.engine)
        except BaseException as error:  # noqa: BLE001  # the boundary: `ready` raises it in the actor
            self.ready.set_exception(error)
            return
        self.ready.set_result(None)
        try:
            while self._do_jobs():
                if self.engine.has_unfinished_requests():
                    self._start_work()
                    self._step()
            self.ranks.close()
        except BaseException as error:  # noqa: BLE001  # the boundary: every waiting request fails with it
            self._on_death(error)
        finally:
            with self._lock:
                self._ended = True
            for future in tuple(self._pending):
                if not future.done():
                    future.set_exception(RuntimeError("the engine's thread has ended"))
            _vllm.close(self.engine)

    def _start_work(self) -> None:
        self._work = self._work[0], time.monotonic()

    def _do_jobs(self) -> bool:
        """Run all queued jobs. If the engine is idle, wait for the first. Returns False if the thread should end."""
        wait = not self.engine.has_unfinished_requests()
        while True:
            self._work = self.busy_s, None
            try:
                job = self._jobs.get(block=wait)
            except queue.Empty:
                return True
            if job is None:
                return False
            self._start_work()
            job()
            wait = False

    def _step(self) -> None:
        answers = []
        outputs = self.ranks.call("step")
        for output in outputs:
            arrived = self._arrived.get(output.request_id, 0.0)
            if output.finished and (request := self._forget(output.request_id)) is not None:
                answers.append(self._answer(request, output, time.monotonic() - arrived))
        self.steps += 1
        answers += self._give_up_late(bool(outputs))
        if answers:
            self._deliver(answers)

    def _answer(self, request: Request, output: Any, seconds: float) -> Answer:
        try:
            completion = _vllm.completion_of(output, request, self._max_model_len, seconds=seconds)
        except ValueError as error:  # only this request failed
            return Answer(request_id=request.request_id, completion=None, error=str(error))
        self.generated_tokens += len(completion.token_ids)
        self.prompt_tokens += len(request.prompt_ids)
        self.cached_tokens += output.num_cached_tokens or 0
        return Answer(request_id=request.request_id, completion=completion)

    def _give_up_late(self, progress: bool) -> list[Answer]:
        """End requests that have been computed for too long. `progress`: whether the last step ended some."""
        now, limit_s = time.monotonic(), self._config.answer_timeout_s
        self._num_tokens = _vllm.running(self.engine)
        for name in self._num_tokens:
            self._began.setdefault(name, now)
        if progress or self._num_tokens or not self._requests:
            self._starved_since = None
        elif self._starved_since is None:
            self._starved_since = now
        late = {name: now - since for name, since in self._began.items() if now - since > limit_s}
        answers = []
        for name, seconds in late.items():
            self.ranks.call("abort", [name])
            if (request := self._forget(name)) is not None:
                error = (
                    f"had {self._num_tokens.get(name, 0)} of at most {request.sampling.max_tokens} tokens of an answer "
                    f"{seconds:.0f} s after it began, and answer_timeout_s={limit_s:g}. Lower max_tokens or "
                    "max_num_seqs, give the engine more threads, or in training raise stage_timeout_s above "
                    f"{3 * limit_s:g}"
                )
                answers.append(Answer(request_id=request.request_id, completion=None, error=error, late=True))
        return answers

    def _forget(self, name: str) -> Request | None:
        self._began.pop(name, None)
        self._arrived.pop(name, None)
        return self._requests.pop(name, None)

    def _add(self, requests: list[Request]) -> None:
        refused = []
        self.ranks.send([("add", (str(request.request_id), request)) for request in requests])
        for request in requests:
            name = str(request.request_id)
            try:
                self.ranks.call_here("add", name, request)
            except ValueError as error:  # vLLM refuses only this request
                refused.append(Answer(request_id=request.request_id, completion=None, error=str(error)))
            else:
                self._requests[name], self._arrived[name] = request, time.monotonic()
        if refused:
            self._deliver(refused)

    def _abort(self, request_ids: list[int]) -> None:
        names = [str(request_id) for request_id in request_ids if str(request_id) in self._requests]
        if names:
            self.ranks.call("abort", names)
        for name in names:
            self._forget(name)


def follow(config: EnginePlan, ready: Future[None], on_death: Callable[[BaseException], object]) -> threading.Thread:
    """Run another rank of an engine on a thread: build it, then repeat the first rank's calls.

    `ready` is done when the engine is built, or has the error. `on_death` is called there if a call fails later.
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
            on_death(error)
        finally:
            _vllm.close(engine)

    thread = threading.Thread(target=run, name="vllm-engine", daemon=True)
    thread.start()
    return thread


class Ranks:
    """All ranks of a built engine. Used on the engine's thread, and created on all ranks at the same time."""

    def __init__(self, engine: Any, tp: int) -> None:
        self._engine = engine
        self._group: Any = None
        if tp > 1:
            import torch.distributed as dist

            self._group = dist.new_group(backend="gloo", timeout=_IDLE)

    def send(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        """On the first rank: make the others do calls that it does itself with `call_here`, whether they fail or not.

        `calls` are names of functions of `_vllm`, with their arguments after the engine.
        """
        if self._group is not None:
            import torch.distributed as dist

            dist.broadcast_object_list([list(calls)], src=0, group=self._group)

    def call_here(self, name: str, *args: Any) -> Any:
        """Call a function of `_vllm` on this rank."""
        return getattr(_vllm, name)(self._engine, *args)

    def call(self, name: str, *args: Any) -> Any:
        """On the first rank: call a function of `_vllm` on all ranks."""
        self.send([(name, args)])
        return self.call_here(name, *args)

    def load(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """On the first rank: replace all weights on all ranks, tensor by tensor. Every rank keeps its part."""
        if self._group is None:
            self.call_here("load_tensors", tensors.items(), version)
            return
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        self.send([("load", (shapes, version))])
        self._load(shapes, version, tensors)

    def follow(self) -> None:
        """On the other ranks: repeat the first rank's calls until it closes.

        Raises:
            Exception: Any error of vLLM, or the end of the first rank.
        """
        import torch.distributed as dist

        while True:
            message: list[Any] = [None]
            dist.broadcast_object_list(message, src=0, group=self._group)
            for name, args in message[0]:
                if name == _CLOSE:
                    return
                if name == "load":
                    self._load(*args)
                    continue
                try:
                    self.call_here(name, *args)
                except ValueError:
                    if name != "add":  # a refused request is refused on all ranks, and the first one answers it
                        raise

    def close(self) -> None:
        """On the first rank, while all is well: end the others."""
        self.send([(_CLOSE, ())])

    def _load(self, shapes: Mapping[str, Any], version: int, source: Mapping[str, torch.Tensor] | None = None) -> None:
        tensors = self._broadcast(shapes, source)
        self.call_here("load_tensors", tensors, version)
        for _ in tensors:  # receive the tensors that vLLM did not read, so that all ranks stay in step
            continue

    def _broadcast(
        self, shapes: Mapping[str, Any], source: Mapping[str, torch.Tensor] | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, each as soon as all ranks have received it from the first rank, which has the `source`."""
        import torch
        import torch.distributed as dist

        for name, (shape, dtype) in shapes.items():
            tensor = torch.empty(shape, dtype=dtype) if source is None else source[name].contiguous()
            dist.broadcast(tensor.view(-1).view(torch.uint8), src=0, group=self._group)
            yield name, tensor
