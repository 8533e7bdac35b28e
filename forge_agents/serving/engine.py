"""The controller's side of a served model.

In: prompts as tokens, from thousands of tasks. Out: completions. Waits for the engine's actor, always with a deadline.
"""

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
from forge_agents.serving import _vllm
from forge_agents.serving._wire import Answer, EngineInfo, Request
from forge_agents.serving.memory import check_head_size
from forge_agents.types import Completion

if TYPE_CHECKING:
    from forge_agents.runtime._monarch import ProcMesh, ReplyPort
    from forge_agents.runtime.heartbeat import Heartbeat
    from forge_agents.serving.config import EngineConfig
    from forge_agents.weights.store import WeightStoreRef

_POLL_S = 5.0
"""The actor answers at least this often."""
_MOVE_S = 120.0
_INFO_S = 30.0
HEARTBEAT_TIMEOUT_S = 60.0
"""An actor that is silent for longer counts as dead, where nothing else is said."""


class Engine:
    """One served model in a process of its own. Make one with `start`; call it from one event loop.

    Requests that arrive while a message is under way travel in the next one, and so do answers; the number of
    messages follows the engine's steps, not the number of requests.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        name: str,
        procs: ProcMesh,
        actor: Any,
        facts: EngineInfo,
        heartbeat: Heartbeat,
        ports: Mapping[str, ReplyPort] | None = None,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    ) -> None:
        self.name = name
        self.facts = facts
        """Its state when it had started."""
        self._config = config
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._procs = procs
        self._actor = actor
        self._ports = ports or {}
        """By endpoint. For endpoints that are called often, and of which one call at a time is under way."""
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        self._outbox: list[Request] = []
        self._sending = False
        self._last_answer = time.monotonic()
        self.busy = BusyTime()
        """Counts the seconds in which the engine has had something to do, as it tells them with its answers."""
        self._busy_s = 0.0
        self._dead: ActorDiedError | None = None
        self._death = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._heartbeat = heartbeat
        self._spawn(self._receive())
        self._spawn(self._await_end())

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        name: str = "engine",
        store: WeightStoreRef | None = None,
        weights_name: str | None = None,
        role: Literal["engines", "judges"] = "engines",
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        timeout_s: float = 300.0,
    ) -> Engine:
        """Start a process and build the engine in it.

        Args:
            name: Said in errors and logs.
            store: Where `load_weights` finds new weights; None for a model that never changes.
            weights_name: What the publisher calls them; None for `name`.
            role: Whose host it starts on; see `Hosts`.
            heartbeat_timeout_s: An engine that says nothing, or takes no step with requests, for longer is dead.
            timeout_s: Deadline. Eager engines of small models take some 10 s, compiled ones 40 s the first time.

        Raises:
            StallError: The engine was not ready in time.
            ModelNotFoundError: The model's files are not whole.
            ValueError: Ranks cannot share the model's heads, or vLLM computes none of their size on CPU.
            Exception: What vLLM raised.
        """
        # Monarch loads here, not when this module is imported
        from forge_agents.runtime._monarch import ReplyPort
        from forge_agents.runtime.heartbeat import Heartbeat
        from forge_agents.serving._actor import EngineActor

        _vllm.expected_shapes(config.model)  # a half-written model is cheaper to find here
        for lora in config.adapters.values():  # and so is an adapter that does not fit
            _vllm.adapter_shapes(config.model, lora)
        _vllm.check_ranks(config)
        if not any(seat.gpu for seat in mesh.preview_placement([(name, role, config.tp)])):
            check_head_size(Path(config.model), display_name(Path(config.model)))
        config = replace(config, enforce_eager=config.eager)  # as this process sees it, in every process
        env, threads, tp = _vllm.environment(config), config.threads, config.tp
        procs = mesh.spawn_procs(name, procs=tp, role=role, env=env, threads=threads)
        heartbeat = Heartbeat(procs, tp, name=name, heartbeat_timeout_s=heartbeat_timeout_s)
        compiled = "compiled" if config.compiled else "not compiled"
        what = f"{display_name(Path(config.model))}, {compiled}{f', {tp} ranks' * (tp > 1)}"
        try:
            on = mesh.hardware_of(procs, threads=threads and threads * tp)
            with startup.track("engine", name, what, on=on):
                if tp > 1:
                    await heartbeat.guard(mesh.exchange_addresses(procs, timeout_s, who=name))
                ranks: Any = procs.spawn(
                    "engine", EngineActor, config, store, weights_name or name, heartbeat_timeout_s
                )
                ready = mesh.call_all(ranks, tp, "start", timeout_s=timeout_s, who=name)
                facts, *_ = await heartbeat.guard(ready)
                actor = ranks.slice(rank=0) if tp > 1 else ranks
            heartbeat.start_timeout()
        except BaseException:
            heartbeat.end()
            await mesh.stop(procs, at_once=True)  # as in `stop`, and nothing of it is worth a wait
            raise
        ports = {endpoint: ReplyPort() for endpoint in ("add", "poll")}
        return cls(
            config,
            name=name,
            procs=procs,
            actor=actor,
            facts=facts,
            heartbeat=heartbeat,
            ports=ports,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and response together."""
        return self.facts.max_model_len

    @property
    def unfinished(self) -> int:
        """Requests that have no answer yet."""
        return len(self._waiting)

    async def died(self) -> ActorDiedError:
        """Wait for the engine's end; returns what was seen of it. One that is stopped has ended as well."""
        await self._death.wait()
        assert self._dead is not None
        return self._dead

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
            prompt_ids: At least one token id, and room left in the context.
            sampling: How tokens are drawn; `temperature` counts, wherever a schedule is. `max_reasoning_tokens` is no
                business of an engine: a player asks twice.
            seed: Makes this request's tokens repeatable, whatever else the engine does at the time.
            stop_token_ids: Tokens that end the response beside the model's own end-of-turn tokens.
            choices: The response is exactly one of these texts, unless `max_tokens` cuts it short; empty allows any.
            json_schema: The response is JSON that fits this schema, unless `max_tokens` cuts it short; None allows any.
            top_logprobs: At each place, also report so many of the most probable tokens; 0 to 20.
            adapter: The one of ``EngineConfig.adapters`` that samples, and whose versions the completion names; empty
                is the model without one.
            timeout_s: Deadline, time in the queue included. None: the request may wait in the queue for as long as the
                engine answers others, and ``EngineConfig.answer_timeout_s`` counts from when it is taken up.

        Under `choices` or `json_schema` tokens are drawn from the model's distribution over what the text so far
        allows, and logprobs are of that distribution.

        Returns:
            The sampled tokens, those of a stop text included; logprobs are of the distribution they were drawn from,
            after all that bends it (at temperature 0: of the model's distribution after penalties and bad words). A
            response that no context is left for ends as ``context``.

        Raises:
            ValueError: The prompt is empty, too long, or holds ids outside the vocabulary; sampling is out of range;
                the choices or the schema cannot be enforced; there is no such adapter.
            StallError: No completion in `timeout_s`; the request is dropped.
            LateAnswerError: The engine gave it up after ``EngineConfig.answer_timeout_s``.
            ActorDiedError: The engine's process ended or vLLM failed.
        """
        prompt = self._checked(prompt_ids)
        if self._dead is not None:
            raise self._copy_of_end()
        request = Request(
            request_id=next(self._ids),
            prompt_ids=prompt,
            sampling=sampling,
            seed=seed,
            stop_token_ids=tuple(stop_token_ids),
            choices=_checked_choices(choices, json_schema),
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
            if timeout_s is None:  # the engine gives the request up in time, or `_receive` the engine
                with _stalls.waiting(self.name, "a completion", self._config.answer_timeout_s):
                    return await future
            return await mesh.with_deadline(future, timeout_s, who=self.name, what="a completion")
        except (StallError, asyncio.CancelledError):
            if self._dead is None:
                self._spawn(self._abort(request.request_id))
            raise
        finally:
            self._waiting.pop(request.request_id, None)

    async def load_weights(
        self, version: int | None = None, *, adapter: str = "", timeout_s: float = 120.0
    ) -> dict[str, float]:
        """Put published weights into the live engine, between two steps.

        Requests in flight go on under the new weights: they keep their tokens, and their completion says which
        version sampled which.

        Args:
            version: Which one; None for the latest.
            adapter: Which of ``EngineConfig.adapters``, published under its own name; empty are the model's weights.

        Returns:
            ``version``; seconds ``fetch_s``, ``load_s`` and ``seconds`` for both; ``bytes``, 0 where the engine has it.

        Raises:
            UnknownIdError: No such version; the message says which exist.
            ValueError: The engine has no store or no such adapter, or the tensors do not fit the served model.
            StallError, ActorDiedError: As in `generate`.
        """
        what = "weight update"
        timings: dict[str, float] = await self._together(
            "load_weights", version, adapter, timeout_s=timeout_s, what=what
        )
        return timings

    async def use_store(self, store: WeightStoreRef, *, timeout_s: float = 30.0) -> None:
        """From now on find new weights in `store`, which took the place of one that died."""
        await self._call("use_store", store, timeout_s=timeout_s, what="change of the store")

    async def sleep(self) -> None:
        """Leave the GPUs: weights go to the host's memory, and no request may come until `wake`. Twice is no error.

        Raises:
            ValueError: Requests are under way.
            StallError, ActorDiedError: As in `generate`.
        """
        await self._together("sleep", timeout_s=_MOVE_S, what="sleep")

    async def wake(self) -> None:
        """Come back to the GPUs after `sleep`."""
        await self._together("wake", timeout_s=_MOVE_S, what="wake")

    async def info(self) -> EngineInfo:
        """The engine's state."""
        info: EngineInfo = await self._call("info", timeout_s=_INFO_S, what="info")
        return info

    async def stop(self, *, timeout_s: float = 10.0) -> None:
        """End the engine and its process; requests in flight fail. Twice is no error."""
        healthy = self._dead is None
        self._fail_all(f"{self.name} was stopped")
        self._heartbeat.end()
        for task in tuple(self._tasks):
            task.cancel()
        if healthy:
            with contextlib.suppress(StallError, ActorDiedError):
                await mesh.with_deadline(self._actor.close.choose(), timeout_s, who=self.name, what="close")
        await mesh.stop(self._procs, timeout_s=timeout_s, at_once=not healthy)  # it may be reading weights

    async def _call(self, endpoint: str, *args: Any, timeout_s: float, what: str) -> Any:
        if self._dead is not None:
            raise self._copy_of_end()
        method = getattr(self._actor, endpoint)
        port = self._ports.get(endpoint)
        call = method.choose(*args) if port is None else port.call(method, *args)
        return await mesh.with_deadline(call, timeout_s, who=self.name, what=what)

    async def _together(self, endpoint: str, *args: Any, timeout_s: float, what: str) -> Any:
        """`_call`, of what all ranks do: it breaks off in one a moment before the end of another is seen."""
        try:
            return await self._heartbeat.guard(self._call(endpoint, *args, timeout_s=timeout_s, what=what))
        except (ActorDiedError, StallError) as error:
            if (lost := self._heartbeat.error) is None:
                raise
            raise ActorDiedError(str(lost), self.name, getattr(lost, "place", "")) from error

    def _checked(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        prompt = tuple(prompt_ids)
        if not prompt:
            raise ValueError("the prompt is empty; a model needs at least one token to continue")
        if len(prompt) >= self.facts.max_model_len:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and {self.name} holds {self.facts.max_model_len} of prompt and "
                "response together; trim the conversation, or raise max_model_len"
            )
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self.facts.vocab_size:
            raise ValueError(
                f"token id {low if low < 0 else high} is outside the vocabulary of {self.name}, 0 to "
                f"{self.facts.vocab_size - 1}; was the prompt made with another model's tokenizer?"
            )
        return prompt

    async def _send(self) -> None:
        try:
            while self._outbox:
                batch, self._outbox = self._outbox, []
                await self._call("add", batch, timeout_s=self._heartbeat_timeout_s, what="receipt of requests")
        except Exception as error:  # noqa: BLE001  # the boundary: nobody else hears of it, and who waits would for ever
            self._fail_all(f"{self.name} takes no requests any more: {_told(error)}")
        finally:
            self._sending = False

    async def _receive(self) -> None:
        try:
            while True:
                answers: list[Answer]
                answers, busy_s = await self._call(
                    "poll", _POLL_S, timeout_s=self._heartbeat_timeout_s + _POLL_S, what="sign of life"
                )
                self.busy.seconds += busy_s - self._busy_s
                self._busy_s = busy_s
                for answer in answers:
                    self._resolve(answer)
                self._check_progress(bool(answers))
        except (StallError, ActorDiedError) as error:
            self._fail_all(str(error))
        except Exception as error:  # noqa: BLE001  # the same; a RuntimeError is the actor's word on a failed step
            self._fail_all(f"{self.name} has failed: {_told(error)}. Look at {mesh.log_hint(self.name)}")

    def _check_progress(self, answered: bool) -> None:
        """Raise StallError where requests wait and none was answered for longer than the engine allows the longest.

        It always works on some, and ends each within `answer_timeout_s`, however many are queued.
        """
        now = time.monotonic()
        if answered or not self._waiting:
            self._last_answer = now
        elif (silent_s := now - self._last_answer) > self._config.answer_timeout_s + self._heartbeat_timeout_s:
            raise StallError(
                f"{self.name} answered none of {len(self._waiting)} requests for {silent_s:.0f} s, although "
                f"answer_timeout_s={self._config.answer_timeout_s:g} ends each. Look at {mesh.log_hint(self.name)}",
                self.name,
            )

    async def _await_end(self) -> None:
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
        self._dead = self._dead or ActorDiedError(reason, self.name, place)
        self._death.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._copy_of_end())

    def _copy_of_end(self) -> ActorDiedError:
        """For one who waits: each adds a traceback of its own."""
        assert self._dead is not None
        return ActorDiedError(str(self._dead), self.name, self._dead.place)

    async def _abort(self, request_id: int) -> None:
        with contextlib.suppress(StallError, ActorDiedError, RuntimeError):  # `_receive` reports a dead engine
            await self._call("abort", [request_id], timeout_s=self._heartbeat_timeout_s, what="abort")

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, (ForgeError, RuntimeError)) else f"{type(error).__name__}: {error}"


def _checked_choices(choices: Sequence[str], json_schema: Mapping[str, Any] | None) -> tuple[str, ...]:
    if isinstance(choices, str):
        raise TypeError(f"choices={choices!r} is one text; give a sequence of texts")
    if choices and json_schema is not None:
        raise ValueError("choices and json_schema were both given; a response can follow one of them")
    if "" in choices:
        raise ValueError(f"choices={list(choices)} holds an empty text; a response has at least one token")
    return tuple(dict.fromkeys(choices))
