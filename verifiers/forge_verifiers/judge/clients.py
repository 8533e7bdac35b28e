"""Clients of a judge's model (an engine or an endpoint) for calls from synchronous code in any thread."""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from forge_agents.errors import (
    ActorDiedError,
    EndpointError,
    ForgeError,
    HostError,
    ModelNotFoundError,
    StallError,
)
from forge_agents.policy import Endpoint, Sampling
from forge_agents.runtime.threads import LoopThread
from forge_agents.types import Message
from forge_verifiers.judge.prompts import Reply, choice_in, choice_of_token, choice_start, shares_of

if TYPE_CHECKING:
    from pathlib import Path

    from forge_agents.rollout.endpoint import ChatReply, EndpointClient
    from forge_agents.rollout.rendering import Renderer
    from forge_agents.serving import EngineConfig, EngineProcess
    from forge_agents.types import Completion

_LOG = logging.getLogger(__name__)
_SLACK_S = 30.0
"""Added to a model's own timeouts."""
_MAX_HALVINGS = 8
"""How often the texts of a question that is too long are cut to half their length."""
_TOO_LONG = re.compile(
    r"context|too (?:long|large)|exceed|reduce|max\w*[ _](?:\w+[ _]){0,3}(?:len|tokens)", re.IGNORECASE
)
"""Matches the refusal of a question that exceeds the context of an endpoint's model."""
_REASONING_TOKENS = 4096
"""Tokens for the reasoning of a model behind an endpoint, in addition to those of its answer."""
_TOP = 20
"""Number of alternatives requested per token."""
_CONTROL_TOKENS = re.compile(r"</?[^<>\s]+>")
"""Matches tokens that may follow an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question to a model, decoded greedily."""

    instructions: str
    """The system prompt."""
    text: str
    """The user's message."""
    choices: tuple[str, ...]
    """Possible answers, or empty if only `schema` constrains the answer."""
    schema: Mapping[str, Any]
    """JSON schema of the answer."""
    max_tokens: int
    """Number of tokens that an answer usually takes at most. Without room for them a question is too long."""
    token_limit: int = 0
    """Number of tokens that any answer takes at most, if that is more."""
    shorter: Callable[[int], str] | None = None
    """Returns the text with parts of it cut to half their length, a given number of times."""


class QuestionTooLongError(ForgeError, ValueError):
    """A question exceeds the context of the model."""


class Chat(Protocol):
    """A model that answers questions. All calls come from one event loop."""

    async def start(self) -> None:
        """Start the model."""

    async def ask(self, question: Question) -> Reply:
        """Answer one question. Raises QuestionTooLongError if a shorter one may be answered."""

    async def stop(self) -> None:
        """Release all resources."""

    def max_duration_s(self, questions: int) -> float:
        """Upper bound in seconds for this number of concurrent questions."""


class Conversation:
    """A model on its own thread and event loop, started by the first question and restarted if it dies."""

    def __init__(self, chat: Chat, *, name: str, start_timeout_s: float) -> None:
        self.chat, self._name, self._start_timeout_s = chat, name, start_timeout_s
        self._thread: LoopThread | None = None
        self._replaced: weakref.WeakSet[LoopThread] = weakref.WeakSet()
        """Threads of models that died, whose questions are asked again."""
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the model unless it is running."""
        self._running()

    def ask(self, questions: Sequence[Question]) -> list[Reply | BaseException]:
        """The reply to each question, or its error. All questions run concurrently, each with its own timeout.

        A model that dies is restarted once, and unanswered questions are repeated. Judges that share the model may
        ask at the same time: the first that notices the death restarts the model for all.
        """
        thread = self._running()
        replies = self._ask(thread, questions)
        lost = [k for k, reply in enumerate(replies) if isinstance(reply, ActorDiedError)]
        if lost:
            self._replace(thread, replies[lost[0]])
            for k, reply in zip(lost, self._ask(self._running(), [questions[k] for k in lost]), strict=True):
                replies[k] = reply
        return replies

    def max_duration_s(self, questions: int) -> float:
        """Upper bound in seconds of `ask`: start, answers and stop, and the same after a restart."""
        return 2 * (self._start_timeout_s + self.chat.max_duration_s(questions) + 4 * _SLACK_S)

    def close(self) -> None:
        """Stop the model if it is running. The next question starts it again."""
        with self._lock:
            self._stop()

    def _replace(self, dead: LoopThread, error: object) -> None:
        """Stop the model of a thread unless another judge has done so."""
        with self._lock:
            if self._thread is dead:
                _LOG.warning("the model of %s died and is restarted: %s", self._name, error)
                self._replaced.add(dead)
                self._stop()

    def _stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        atexit.unregister(self.close)
        try:
            thread.run(self.chat.stop(), timeout_s=_SLACK_S, what="stop")
        finally:
            thread.close()

    def _ask(self, thread: LoopThread, questions: Sequence[Question]) -> list[Reply | BaseException]:
        limit_s = self.chat.max_duration_s(len(questions)) + _SLACK_S

        async def answer(question: Question) -> Reply:
            try:
                return await asyncio.wait_for(self._ask_fitting(question), limit_s)
            except StallError:  # the model's own timeout, which has more details
                raise
            except TimeoutError as error:
                raise StallError(f"{self._name} gave no answer within {limit_s:g} s") from error

        async def all_at_once() -> list[Reply | BaseException]:
            return await asyncio.gather(*map(answer, questions), return_exceptions=True)

        try:
            return thread.run(all_at_once(), timeout_s=limit_s + _SLACK_S, what=f"{len(questions)} questions")
        except ActorDiedError as error:
            if thread not in self._replaced:  # closed by the user
                raise
            return [error] * len(questions)

    async def _ask_fitting(self, question: Question) -> Reply:
        """Ask, and shorten a question that is too long for the model: a long text must not evade its grade.

        Texts are cut to characters first, but one character may have four tokens.
        """
        times = 0
        while True:
            try:
                return await self.chat.ask(question)
            except QuestionTooLongError as error:
                times += 1
                if question.shorter is None or times > _MAX_HALVINGS:
                    raise
                _LOG.warning("%s. %s is asked with half of each text", error, self._name)
                question = replace(question, text=question.shorter(times))

    def _running(self) -> LoopThread:
        with self._lock:
            if self._thread is None:
                thread = LoopThread(self._name)
                try:
                    thread.run(self.chat.start(), timeout_s=self._start_timeout_s + _SLACK_S, what="start")
                except BaseException:
                    thread.close()
                    raise
                self._thread = thread
                atexit.register(self.close)
            return self._thread


class EndpointChat:
    """A model behind an endpoint. Without structured output or log-probabilities, replies must be exactly a choice."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._client: EndpointClient | None = None
        self._reasoning_tokens = 0  # servers count them in max_tokens; known after the first answer of such a model

    async def start(self) -> None:
        """Read the key. Raises ValueError if its environment variable is not set."""
        from forge_agents.rollout.endpoint import EndpointClient

        self._client = EndpointClient(self._endpoint)

    async def ask(self, question: Question) -> Reply:
        """Answer one question. Raises as `EndpointClient.ask`, and EndpointError if there is nothing but reasoning."""
        limit = question.max_tokens + self._reasoning_tokens
        reply = await self._ask(question, limit)
        if _only_reasons(reply) and limit == question.max_tokens:
            limit += _REASONING_TOKENS
            try:
                reply = await self._ask(question, limit)
            except QuestionTooLongError as error:
                raise EndpointError(
                    f"{self._no_answer(question.max_tokens)} More tokens were refused: {error}"
                ) from error
            used = math.inf if reply.usage is None else reply.usage.completion_tokens
            if not _only_reasons(reply) and used > question.max_tokens:  # a single empty reply was no reasoning
                self._reasoning_tokens = _REASONING_TOKENS
        elif reply.text and reply.finish_reason == "length" and question.token_limit > question.max_tokens:
            limit += question.token_limit - question.max_tokens
            reply = await self._ask(question, limit)
        if _only_reasons(reply):
            raise EndpointError(self._no_answer(limit))
        shares, mass = shares_of(_alternatives(reply.text, reply.logprobs, question.choices), question.choices)
        return Reply(
            text=reply.text,
            shares=shares,
            mass=mass,
            prompt_tokens=reply.usage.prompt_tokens if reply.usage else 0,
            completion_tokens=reply.usage.completion_tokens if reply.usage else 0,
        )

    def _no_answer(self, limit: int) -> str:
        return (
            f"{self._endpoint.model} reasoned for {limit} tokens and did not answer. Serve it without reasoning, or "
            "take another judge."
        )

    async def _ask(self, question: Question, max_tokens: int) -> ChatReply:
        assert self._client is not None
        schema = {"name": "verdict", "strict": True, "schema": dict(question.schema)}
        optional: dict[str, Mapping[str, Any]] = {
            "response_format": {"response_format": {"type": "json_schema", "json_schema": schema}}
        }
        if question.choices:
            optional["logprobs"] = {"logprobs": True, "top_logprobs": _TOP}
        try:
            return await self._client.ask(
                [Message(role="system", content=question.instructions), Message(role="user", content=question.text)],
                Sampling(temperature=0.0, max_tokens=max_tokens),
                optional=optional,
            )
        except EndpointError as error:
            if error.status in (400, 413, 422) and _TOO_LONG.search(str(error)):
                raise QuestionTooLongError(str(error)) from error
            raise

    async def stop(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def max_duration_s(self, questions: int) -> float:
        """Questions run in rounds of `concurrency`. The first ones may be asked twice, see `ask`."""
        return 2 * self._endpoint.timeout_s * math.ceil(questions / self._endpoint.concurrency)


def _only_reasons(reply: ChatReply) -> bool:
    """Whether the limit was reached inside the reasoning. Blanks are an answer: a text can make a judge write them."""
    return reply.finish_reason == "length" and not reply.text


def _alternatives(text: str, tokens: Sequence[Mapping[str, Any]], choices: tuple[str, ...]) -> dict[str, float]:
    """Probabilities of the alternatives to the token at which the choice in a reply begins, or empty if it is unknown.

    Reasoning, a code fence or other keys may stand before the choice, and their tokens say nothing about it. Servers
    that separate the reasoning from the text list its tokens as well.
    """
    start, choice = choice_start(text, choices), choice_in(text, choices)
    if start < 0:
        return {}
    joined = "".join(token["token"] for token in tokens)
    if (offset := joined.rfind(text)) < 0:  # tokens before the choice may be parts of a character, which have no text
        text, start = text[start:], 0
        offset = joined.rfind(text)
        if offset < 0 or _CONTROL_TOKENS.sub("", joined[offset + len(text) :]).strip():
            return {}
    end = 0
    for token in tokens:
        end += len(token["token"])
        if end > offset + start:
            if choice_of_token(token["token"], choices) != choice:
                break
            shares: dict[str, float] = {}
            for entry in token.get("top_logprobs") or ():
                shares[entry["token"]] = shares.get(entry["token"], 0.0) + math.exp(entry["logprob"])
            return shares
    return {}


class EngineChat:
    """A model (a built-in name, a folder or a hub id) on an engine in its own process.

    `timeout_s` is that of one question, queue included.
    """

    def __init__(
        self, model: str, config: EngineConfig | None, *, name: str, timeout_s: float, start_timeout_s: float
    ) -> None:
        if config is not None and config.replicas > 1:
            raise ValueError(f"engine.replicas={config.replicas}: a judge has one engine. Leave replicas out")
        self.model, self.name, self._config = model, name, config
        self._name, self._placed = name, config
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._engine: EngineProcess | None = None
        self._renderer: Renderer | None = None

    @property
    def config(self) -> EngineConfig:
        """Settings that the user gave."""
        from forge_agents.serving import EngineConfig

        return self._config or EngineConfig()

    @property
    def running(self) -> bool:
        """True if the engine has started."""
        return self._engine is not None

    def place(self, name: str, config: EngineConfig) -> None:
        """Set the process name, unique in the run, and the settings with the GPU share that a run assigned."""
        self._name, self._placed = name, config

    async def start(self) -> None:
        """Start the engine. Raises HostError if it would take most of a GPU that other processes use."""
        from forge_agents.models import resolve as models
        from forge_agents.runtime import mesh
        from forge_agents.serving import EnginePlan, EngineProcess
        from forge_agents.serving.memory import USUAL_SHARE

        folder = models.resolve(self.model)
        self._renderer = _renderer_of(folder)
        config = EnginePlan.of(self._placed or self.config, model=str(folder))
        divides = config.gpu_memory_utilization is None
        others = mesh.gpu_neighbors(self._name, "judges", config.tp) if divides else []
        if others:
            raise HostError(
                f"the engine of {self._name} would take {USUAL_SHARE:.0%} of a GPU that it shares with "
                f"{', '.join(others)}. A run counts the judges of its reward, and those that your own function "
                f"declares: my_reward.judges = [my_judge]. {_memory_needed(folder, config)}Or give judges their own "
                "GPU (mesh.gpus: {judges: 1}), ask an endpoint, or divide it once more: "
                "Judge(engine=fa.EngineConfig(gpu_memory_utilization=0.2)), and so much less in "
                "trainer.engine.gpu_memory_utilization"
            )
        self._engine = await EngineProcess.start(
            config, name=self._name, role="judges", timeout_s=self._start_timeout_s
        )

    async def ask(self, question: Question) -> Reply:
        """The answer, constrained to the choices or the schema."""
        engine, renderer = self._engine, self._renderer
        assert engine is not None
        assert renderer is not None
        # the constraint leaves no room for reasoning: a model that was about to reason would not mean its choice
        header = renderer.closing(()) or renderer.answer("", cut=True)
        prompt_ids = (*renderer.start(question.instructions, question.text), *header)
        if len(prompt_ids) + question.max_tokens > engine.max_model_len:
            raise QuestionTooLongError(
                f"a question of {len(prompt_ids)} tokens and {question.max_tokens} for the answer exceed the "
                f"{engine.max_model_len} that {self._name} holds. Lower max_chars or raise the engine's max_model_len"
            )
        limit = min(max(question.max_tokens, question.token_limit), engine.max_model_len - len(prompt_ids))
        completion = await engine.generate(
            prompt_ids,
            Sampling(temperature=0.0, max_tokens=limit),
            choices=question.choices,
            json_schema=None if question.choices else question.schema,
            top_logprobs=_TOP if question.choices else 0,
            timeout_s=self._timeout_s,
        )
        if completion.finish_reason == "length" and limit < question.token_limit:
            raise QuestionTooLongError(
                f"a question of {len(prompt_ids)} tokens and its answer exceed the {engine.max_model_len} that "
                f"{self._name} holds. Lower max_chars or max_reason_chars, or raise the engine's max_model_len"
            )
        mass = math.nan
        if question.choices:  # under the constraint they sum to 1, so ask what the model would say without it
            free = await engine.generate(
                prompt_ids, Sampling(temperature=0.0, max_tokens=1), top_logprobs=_TOP, timeout_s=self._timeout_s
            )
            mass = shares_of(_first(free, renderer), question.choices)[1]
        return Reply(
            text=renderer.text(completion.token_ids),
            shares=shares_of(_first(completion, renderer), question.choices)[0],
            mass=mass,
            prompt_tokens=len(prompt_ids),
            completion_tokens=len(completion.token_ids),
        )

    async def stop(self) -> None:
        """Stop the engine."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.stop()

    def max_duration_s(self, questions: int) -> float:
        """All questions share the engine's queue and run twice."""
        return 2 * self._timeout_s


def _renderer_of(folder: Path) -> Renderer:
    """The renderer of a model, with reasoning turned off if the chat template has a switch."""
    from forge_agents.rollout.rendering import Renderer

    try:
        return Renderer.of(folder, thinking="off")
    except ValueError:
        return Renderer.of(folder)


def _first(completion: Completion, renderer: Renderer) -> dict[str, float]:
    """Probabilities of alternatives for the first token, by text, or empty if nothing was sampled."""
    shares: dict[str, float] = {}
    for token, logprob in completion.top_logprobs[0].items() if completion.top_logprobs else ():
        text = renderer.text((token,))
        shares[text] = shares.get(text, 0.0) + math.exp(logprob)
    return shares


def _memory_needed(folder: Path, config: EngineConfig) -> str:
    """A sentence on the memory that an engine needs, or empty if its model's size is unknown."""
    from forge_agents.models import resolve as models
    from forge_agents.models.sizes import ModelSize
    from forge_agents.serving.memory import Footprint

    try:
        engine = Footprint(size=ModelSize.of(folder), dtype=models.dtype_of(folder), tp=config.tp)
    except ModelNotFoundError:
        return ""
    needs = engine.needs(config)
    parts = ", ".join(f"{part} {count / 1e9:.1f}" for part, count in needs.items())
    return f"It needs {sum(needs.values()) / 1e9:.1f} GB at least ({parts}). "
