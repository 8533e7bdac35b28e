"""A judge's model served by an engine of our own.

In: questions. Out: replies, with the probabilities of the choices. Waits for the engine, with deadlines.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from forge_agents.policy import Sampling
from forge_verifiers.judge.answers import Reply, shares_of
from forge_verifiers.judge.clients.chat import Question

if TYPE_CHECKING:
    from forge_agents.rollout.rendering import Renderer
    from forge_agents.serving import Engine, EngineConfig
    from forge_agents.types import Completion

_TOP = 20
"""Most alternatives that the engine reports for a token."""


class EngineChat:
    """A model on an engine in a process of its own.

    Args:
        model: A built-in name, a folder or a hub id.
        config: The engine's limits, its model is filled in; None for the defaults.
        name: Said in errors and logs.
        timeout_s: Seconds for one question, the queue included.
        start_timeout_s: Seconds for the engine to start.
    """

    def __init__(
        self, model: str, config: EngineConfig | None, *, name: str, timeout_s: float, start_timeout_s: float
    ) -> None:
        self._model, self._config, self._name = model, config, name
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._engine: Engine | None = None
        self._renderer: Renderer | None = None

    async def start(self) -> None:
        """Start the engine.

        Raises:
            ModelNotFoundError: There is no such model.
            StallError: The engine was not ready in time.
        """
        from forge_agents.models import resolve as models
        from forge_agents.rollout.rendering import Renderer
        from forge_agents.serving import Engine, EngineConfig

        folder = models.resolve(self._model)
        self._renderer = Renderer.of(folder)
        config = replace(self._config or EngineConfig(), model=str(folder))
        self._engine = await Engine.start(
            config, name=self._name, role="judges", timeout_s=self._start_timeout_s
        )

    async def ask(self, question: Question) -> Reply:
        """The answer, constrained to the choices or else to the schema.

        Raises:
            ValueError: The question does not fit the model's context.
            StallError, ActorDiedError: As in `Engine.generate`.
        """
        engine, renderer = self._engine, self._renderer
        assert engine is not None
        assert renderer is not None
        prompt_ids = renderer.start(question.instructions, question.text)
        if len(prompt_ids) + question.max_tokens > engine.max_model_len:
            raise ValueError(
                f"a question of {len(prompt_ids)} tokens and {question.max_tokens} for the answer exceed the "
                f"{engine.max_model_len} that {self._name} holds; lower max_chars or raise the engine's max_model_len"
            )
        completion = await engine.generate(
            prompt_ids,
            Sampling(temperature=0.0, max_tokens=question.max_tokens),
            choices=question.choices,
            json_schema=None if question.choices else question.schema,
            top_logprobs=_TOP if question.choices else 0,
            timeout_s=self._timeout_s,
        )
        mass = math.nan
        if question.choices:  # probabilities under a constraint sum to 1: what the model would have said tells more
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

    def longest_s(self, questions: int) -> float:
        """All wait in the engine's queue together, twice."""
        return 2 * self._timeout_s


def _first(completion: Completion, renderer: Renderer) -> dict[str, float]:
    """Probabilities of the texts that the first token could have been; empty where nothing was sampled."""
    found: dict[str, float] = {}
    for token, logprob in completion.top_logprobs[0].items() if completion.top_logprobs else ():
        text = renderer.text((token,))
        found[text] = found.get(text, 0.0) + math.exp(logprob)
    return found
