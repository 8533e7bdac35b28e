"""An engine process, as the controller sees it: requests and answers in batches, with a deadline for every wait."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from forge_agents.errors import ActorDiedError, ForgeError, LateAnswerError, StallError
from forge_agents.models.resolve import display_name
from forge_agents.policy import Sampling
from forge_agents.runtime import mesh, startup
from forge_agents.runtime import stalls as _stalls
from forge_agents.runtime.threads import BusyTime
from forge_agents.serving import _shapes, _vllm
from forge_agents.serving._wire import Answer, EngineInfo, Request
from forge_agents.serving.memory import check_kernels
from forge_agents.types import Completion

if TYPE_CHECKING:
    from forge_agents.runtime._monarch import ProcMesh, ReplyPort
    from forge_agents.runtime.heartbeat import Heartbeat
    from forge_agents.serving.config import EnginePlan
    from forge_agents.weights.store import WeightStoreRef

_POLL_S = 5.0
"""Maximum time between two answers of the actor."""
_OFFLOAD_S = 120.0
_INFO_S = 30.0
HEARTBEAT_TIMEOUT_S = 60.0
"""Default time after which a silent actor counts as dead, in seconds."""


class EngineProcess:
    """An engine in a process of its own. Create it with `start`. Call it from one event loop.

    Requests that arrive while a message is under way are sent together in the next message, and answers as well. So the
    number of messages follows the engine's steps, not the number of requests.
    """

    def __init__(
        self,
        config: EnginePlan,
        *,
        name: str,
        procs: ProcMesh,
        actor: Any,
        initial_info: EngineInfo,
        heartbeat: Heartbeat,
        ports: Mapping[str, ReplyPort] | None = None,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    ) -> None:
        self.name = name
        self.initial_info = initial_info
        """State after the start."""
        self.busy = BusyTime()
        """Seconds in which the engine had work, as reported with its answers."""
        self._config = config
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._procs = procs
        self._actor = actor
        self._ports = ports or {}
        """Reply ports of endpoints that are called often, one call at a time."""
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        self._outbox: list[Request] = []
        self._sending = False
        self._last_answer = time.monotonic()
        self._reported_busy_s = 0.0
        self._error: ActorDiedError | None = None
        self._death = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._heartbeat = heartbeat
        self._spawn(self._receive())
        self._spawn(self._watch())

    @classmethod
    async def start(
        cls,
        config: EnginePlan,
        *,
        name: str = "engine",
        store: WeightStoreRef | None = None,
        weights_name: str | None = None,
        role: Literal["engines", "judges"] = "engines",
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        timeout_s: float = 300.0,
    ) -> EngineProcess:
        """Start a process and build the engine in it. `role` decides the host. See `Hosts`.

        Other arguments are those of `EngineClient`.

        Raises:
            StallError: The engine was not ready in time.
            ModelNotFoundError: The model's files are incomplete.
            ValueError: The ranks cannot share the model's heads, or vLLM lacks a kernel for it on CPU.
            Exception: Any error of vLLM.
        """
        # Monarch loads here, not when this module is imported
        from forge_agents.runtime._monarch import ReplyPort
        from forge_agents.runtime.heartbeat import Heartbeat
        from forge_agents.serving._actor import EngineActor

        _shapes.expected_shapes(config.model)  # an incomplete model is cheaper to find here
        for lora in config.adapters.values():  # and so is an adapter that does not fit
            _shapes.adapter_shapes(config.model, lora)
        _vllm.check_ranks(config)
        if not any(slot.gpu for slot in mesh.preview_placement([(name, role, config.tp)])):
            check_kernels(Path(config.model), display_name(Path(config.model)), config, config.adapters)
        config = replace(config, enforce_eager=config.eager)  # as this process sees it, in every process
        env, threads, tp = _vllm.environment(config), config.threads, config.tp
        procs = mesh.spawn_procs(name, procs=tp, role=role, env=env, threads=threads)
        heartbeat = Heartbeat(procs, tp, name=name, heartbeat_timeout_s=heartbeat_timeout_s)
        compiled, ranks_text = "not " * (not config.compiled) + "compiled", f", {tp} ranks" * (tp > 1)
        details = f"{display_name(Path(config.model))}, {compiled}{ranks_text}"
        try:
            on = mesh.hardware_of(procs, threads=threads and threads * tp)
            with startup.track("engine", name, details, on=on):
                if tp > 1:
                    await heartbeat.guard(mesh.exchange_addresses(procs, timeout_s, who=name))
                actor_args = (config, store, weights_name or name, heartbeat_timeout_s)
                ranks: Any = procs.spawn("engine", EngineActor, *actor_args)
                info, *_ = await heartbeat.guard(mesh.call_all(ranks, tp, "start", timeout_s=timeout_s, who=name))
                actor = ranks.slice(rank=0) if tp > 1 else ranks
            heartbeat.start_timeout()
        except BaseException:
            heartbeat.end()
            await mesh.stop(procs, at_once=True)
            raise
        ports = {endpoint: ReplyPort() for endpoint in ("add", "poll")}
        return cls(
            config,
            name=name,
            procs=procs,
            actor=actor,
            initial_info=info,
            heartbeat=heartbeat,
            ports=ports,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and response together."""
        return self.initial_info.max_model_len

    @property
    def unfinished(self) -> int:
        """Number of requests without an answer."""
        return len(self._waiting)

    async def died(self) -> ActorDiedError:
        """Wait for the end of the engine, also by `stop`, and return its cause."""
        await self._death.wait()
        assert self._error is not None
        return self._error

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        seed: int | None = None,
        stop_token_ids: Sequence[int] = (),
        choices: Sequence[str] = (),
        json_schema: Mapping[str, Any] | None = None,
        top_logprobs: int = 0,
        adapter: str = "",
        timeout_s: float | None = None,
    ) -> Completion:
        """Complete one prompt.

        Args:
            prompt_ids: At least one token id. Must leave room in the context.
            sampling: Sampling settings, of which the engine uses neither the temperature schedule nor
                `max_reasoning_tokens`: players apply them.
            seed: Seed that makes the tokens of this request reproducible, whatever else the engine computes.
            stop_token_ids: Tokens that end the response, in addition to the model's end-of-turn tokens.
            choices: Texts of which the response is exactly one, unless `max_tokens` cuts it off. Empty allows any.
            json_schema: Schema of the JSON response, unless `max_tokens` cuts it off. None allows any text.
            top_logprobs: Number of most probable tokens to report at each position, 0 to 20.
            adapter: Name of the adapter that samples, in ``EnginePlan.adapters``. Empty for the model without one.
            timeout_s: Timeout in seconds, including the queue. None: the request may wait in the queue as long as the
                engine answers others, and ``EnginePlan.answer_timeout_s`` limits the time after that.

        With `choices` or `json_schema`, tokens are sampled from the model's distribution over the allowed tokens, and
        log-probabilities refer to that distribution.

        Returns:
            The sampled tokens, including those of a stop text, with log-probabilities of the distribution they were
            sampled from (at temperature 0, of the model's distribution after penalties and bad words). The finish
            reason is ``context`` if the response filled the context.

        Raises:
            ValueError: The prompt is empty, too long, or has ids outside the vocabulary, a sampling setting is out of
                range, the choices or the schema cannot be enforced, or the adapter does not exist.
            StallError: No completion within `timeout_s`. The request is dropped.
            LateAnswerError: The engine gave up after ``EnginePlan.answer_timeout_s``.
            ActorDiedError: The engine's process ended or vLLM failed.
        """
        prompt = self._check_prompt(prompt_ids)
        if self._error is not None:
            raise self._copy_of_error()
        request = Request(
            request_id=next(self._ids),
            prompt_ids=prompt,
            sampling=sampling,
            seed=seed,
            stop_token_ids=tuple(stop_token_ids),
            choices=_check_choices(choices, json_schema),
            json_schema="" if json_schema is None else json.dumps(json_schema),
            top_logprobs=top_logprobs,
            adapter=_vllm.adapter_number(self._config, adapter),
        )
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = future
        self._outbox.append(request)
        if not self._sending:
            self._sending = True
            self._spawn(self._send())
        try:
            if timeout_s is None:  # the engine gives up the request in time, or `_receive` gives up the engine
                with _stalls.waiting(self.name, "a completion", self._config.answer_timeout_s):
                    return await future
            return await mesh.with_deadline(future, timeout_s, who=self.name, what="a completion")
        except (StallError, asyncio.CancelledError):
            if self._error is None:
                self._spawn(self._abort(request.request_id))
            raise
        finally:
            self._waiting.pop(request.request_id, None)

    async def load_weights(
        self, version: int | None = None, *, adapter: str = "", timeout_s: float = 120.0
    ) -> dict[str, float]:
        """Load published weights between two steps: a `version`, or the latest.

        Requests in flight keep their tokens and continue with the new weights. The completion records which version
        sampled which token. An `adapter` is published under its own name; empty for the model's weights.

        Returns:
            ``version``; ``fetch_s``, ``load_s`` and their sum ``seconds``; ``bytes``, 0 if the engine has the version.

        Raises:
            UnknownIdError: The version does not exist. The message lists those that do.
            ValueError: The engine has no store or no such adapter, or the tensors do not fit the model.
            StallError, ActorDiedError: As in `generate`.
        """
        timings: dict[str, float] = await self._guarded_call(
            "load_weights", version, adapter, timeout_s=timeout_s, what="weight update"
        )
        return timings

    async def use_store(self, store: WeightStoreRef, *, timeout_s: float = 30.0) -> None:
        """Look for new weights in `store` from now on, in place of one that died."""
        await self._guarded_call("use_store", store, timeout_s=timeout_s, what="change of the store")

    async def sleep(self) -> None:
        """Offload weights to host memory. No request may come until `wake`. Calling it twice is safe.

        Raises:
            ValueError: Requests are under way.
            StallError, ActorDiedError: As in `generate`.
        """
        await self._guarded_call("sleep", timeout_s=_OFFLOAD_S, what="sleep")

    async def wake(self) -> None:
        """Load the weights back to the GPUs after `sleep`."""
        await self._guarded_call("wake", timeout_s=_OFFLOAD_S, what="wake")

    async def info(self) -> EngineInfo:
        """Current state of the engine."""
        info: EngineInfo = await self._guarded_call("info", timeout_s=_INFO_S, what="info")
        return info

    async def stop(self, *, timeout_s: float = 10.0) -> None:
        """End the engine and its process. Requests in flight fail. Calling it twice is safe."""
        healthy = self._error is None
        self._fail_all(f"{self.name} was stopped")
        self._heartbeat.end()
        for task in tuple(self._tasks):
            task.cancel()
        if healthy:
            with contextlib.suppress(StallError, ActorDiedError):
                await mesh.with_deadline(self._actor.close.choose(), timeout_s, who=self.name, what="close")
        await mesh.stop(self._procs, timeout_s=timeout_s, at_once=not healthy)  # a sick one may be reading weights

    async def _call(self, endpoint: str, *args: Any, timeout_s: float, what: str) -> Any:
        if self._error is not None:
            raise self._copy_of_error()
        method = getattr(self._actor, endpoint)
        port = self._ports.get(endpoint)
        call = method.choose(*args) if port is None else port.call(method, *args)
        return await mesh.with_deadline(call, timeout_s, who=self.name, what=what)

    async def _guarded_call(self, endpoint: str, *args: Any, timeout_s: float, what: str) -> Any:
        """As `_call`, but ends when a rank dies.

        In collective work, the other ranks fail a moment earlier. The error reports the death.
        """
        try:
            return await self._heartbeat.guard(self._call(endpoint, *args, timeout_s=timeout_s, what=what))
        except (ActorDiedError, StallError) as error:
            if (cause := self._heartbeat.error) is None:
                raise
            raise ActorDiedError(str(cause), self.name, getattr(cause, "place", "")) from error

    def _check_prompt(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        prompt, limit = tuple(prompt_ids), self.max_model_len
        if not prompt:
            raise ValueError("the prompt is empty. A model needs at least one token to continue")
        if len(prompt) >= limit:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and {self.name} holds {limit} of prompt and response together. "
                "Trim the conversation, or raise max_model_len"
            )
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self.initial_info.vocab_size:
            raise ValueError(
                f"token id {low if low < 0 else high} is outside the vocabulary of {self.name}, 0 to "
                f"{self.initial_info.vocab_size - 1}. Was the prompt made with another model's tokenizer?"
            )
        return prompt

    async def _send(self) -> None:
        try:
            while self._outbox:
                batch, self._outbox = self._outbox, []
                await self._call("add", batch, timeout_s=self._heartbeat_timeout_s, what="receipt of requests")
        except Exception as error:  # noqa: BLE001  # the boundary: otherwise requests would wait forever
            self._fail_all(f"{self.name} accepts no requests any more: {_text_of(error)}")
        finally:
            self._sending = False

    async def _receive(self) -> None:
        try:
            while True:
                timeout_s = self._heartbeat_timeout_s + _POLL_S
                answers: list[Answer]
                answers, busy_s = await self._call("poll", _POLL_S, timeout_s=timeout_s, what="heartbeat")
                self.busy.seconds += busy_s - self._reported_busy_s
                self._reported_busy_s = busy_s
                for answer in answers:
                    self._resolve(answer)
                self._check_progress(bool(answers))
        except (StallError, ActorDiedError) as error:
            self._fail_all(str(error))
        except Exception as error:  # noqa: BLE001  # the boundary, as above; the actor reports a failed step as RuntimeError
            self._fail_all(f"{self.name} has failed: {_text_of(error)}. Look at {mesh.log_hint(self.name)}")

    def _check_progress(self, answered: bool) -> None:
        """Raise StallError if requests wait and none was answered for longer than one answer may take.

        An engine always works on some requests and ends each within `answer_timeout_s`, however many are queued.
        """
        now = time.monotonic()
        if answered or not self._waiting:
            self._last_answer = now
        elif (silent_s := now - self._last_answer) > self._config.answer_timeout_s + self._heartbeat_timeout_s:
            raise StallError(
                f"{self.name} answered none of {len(self._waiting)} requests for {silent_s:.0f} s, although it "
                f"ends each after {self._config.answer_timeout_s:g} s. Look at {mesh.log_hint(self.name)}",
                self.name,
            )

    async def _watch(self) -> None:
        error = await self._heartbeat.lost()
        self._fail_all(str(error), getattr(error, "place", ""))

    def _resolve(self, answer: Answer) -> None:
        future = self._waiting.get(answer.request_id)
        if future is None or future.done():
            return
        if answer.completion is not None:
            future.set_result(answer.completion)
        elif answer.late:
            future.set_exception(LateAnswerError(f"{self.name} {answer.error}"))
        else:
            future.set_exception(ValueError(f"{self.name} refused the request: {answer.error}"))

    def _fail_all(self, reason: str, place: str = "") -> None:
        self._error = self._error or ActorDiedError(reason, self.name, place)
        self._death.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._copy_of_error())

    def _copy_of_error(self) -> ActorDiedError:
        """A copy for each waiting request, because each adds its own traceback."""
        assert self._error is not None
        return ActorDiedError(str(self._error), self.name, self._error.place)

    async def _abort(self, request_id: int) -> None:
        with contextlib.suppress(StallError, ActorDiedError, RuntimeError):  # `_receive` reports a dead engine
            await self._call("abort", [request_id], timeout_s=self._heartbeat_timeout_s, what="abort")

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _text_of(error: Exception) -> str:
    return str(error) if isinstance(error, (ForgeError, RuntimeError)) else f"{type(error).__name__}: {error}"


def _check_choices(choices: Sequence[str], json_schema: Mapping[str, Any] | None) -> tuple[str, ...]:
    if isinstance(choices, str):
        raise TypeError(f"choices={choices!r} is one text. Give a sequence of texts")
    if choices and json_schema is not None:
        raise ValueError("choices and json_schema were both given. A response can follow only one of them")
    if "" in choices:
        raise ValueError(f"choices={list(choices)} holds an empty text. A response has at least one token")
    return tuple(dict.fromkeys(choices))
