"""Verifiers for other trainers with prompts and completions in place of trajectories."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forge_agents.display import printable
from forge_agents.envs.reasoning import split_response
from forge_agents.errors import ArgumentError
from forge_agents.types import Trajectory, Turn
from forge_verifiers.core.functions import describe_error
from forge_verifiers.core.verifier import verifier_of

_LOG = logging.getLogger(__name__)
_AGENT = "model"
"""Name of the only agent."""


class TextReward:
    """A verifier or ensemble as a reward function of prompts and completions, in the form that TRL calls.

    Completions of equal prompts form a group. Prompts and completions are strings or lists of messages. The last
    message of a prompt counts. The answer of a completion is its last message if the assistant wrote it, else empty: a
    completion that ends with a tool's result or another role's message has no answer. Reasoning is separated from the
    answer.

    Args:
        verifier: A verifier, an ensemble, or a function as for `forge_agents.Rule`.
        name: Name of the reward in the other trainer's records. None: that of the verifier.
    """

    def __init__(self, verifier: Any, name: str | None = None) -> None:
        self.verifier = verifier_of(verifier)
        self.__name__ = name or self.verifier.name
        self._has_scored = False

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Score n completions. `None` where the verifier abstains.

        Args:
            prompts: [n], equal for completions of one group.
            completions: [n].
            columns: Facts that the verifier reads, such as ``answer``: sequences, arrays, tensors or data frame columns
                of n values, by name. Others, such as TRL's ``trainer_state``, are ignored.

        Raises:
            ArgumentError: The numbers of prompts, completions and values of a column differ.
            Exception: The verifier raised on all completions, and it has scored none before. Later such an error gives
                `None`: a trainer may call with few completions, and unusual answers must not end its run.
        """
        trajectories = _trajectories(prompts, completions, columns)
        try:
            scores = self.verifier.score(trajectories)
        except Exception as error:
            if not self._has_scored:
                raise
            _LOG.warning("reward %s fails on all %d completions: %s", self.__name__, len(completions),
                         printable(describe_error(error)))  # fmt: skip
            return [None] * len(completions)
        self._has_scored = self._has_scored or bool(np.isfinite(scores).any())
        return [None if math.isnan(score) else float(score) for score in scores]


def _trajectories(prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]) -> list[Trajectory]:
    for name, values in {"prompts": prompts, "completions": completions, **columns}.items():
        if isinstance(values, str):
            raise ArgumentError(f"{name}={values!r:.80} is a single text. Pass a list with one value per completion")
    lists = {name: values for name, column in columns.items() if isinstance(values := _listed(column), Sequence)}
    for name, values in {"prompts": prompts, **lists}.items():
        if len(values) != len(completions):
            raise ArgumentError(
                f"{name} has {len(values)} values for {len(completions)} completions. Pass one for each"
            )
    result = []
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        reasoning, raw, answer = split_response(_answer_text(completion))
        turn = Turn(agent=_AGENT, index=0, observation=_last_text(prompt), action=answer, reasoning=reasoning,
                    raw_reasoning=raw, reward=0.0)  # fmt: skip
        info = {name: values[row] for name, values in lists.items()}
        result.append(Trajectory(agent=_AGENT, policy=_AGENT, turns=(turn,), seed=_number_of(prompt), info=info))
    return result


def _listed(column: Any) -> Any:
    """A list of an array, a tensor or a column of a table, which are no sequences. Other values are unchanged."""
    to_list = next((name for name in ("tolist", "to_list", "to_pylist") if hasattr(column, name)), "")
    return getattr(column, to_list)() if to_list else column


def _answer_text(completion: Any) -> str:
    """The text that the model wrote last, or nothing if the last message is of another role."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence) and not completion:
        return ""
    last = _last_message(completion)
    return _text_of(last) if last.get("role", "assistant") == "assistant" else ""


def _last_text(prompt: Any) -> str:
    """The text itself, or that of the last message."""
    return prompt if isinstance(prompt, str) else _text_of(_last_message(prompt))


def _last_message(messages: Any) -> Mapping[str, Any]:
    last = messages[-1] if isinstance(messages, Sequence) and messages else None
    if not isinstance(last, Mapping):
        raise ArgumentError(
            f"a text arrived as {messages!r:.200}. Pass a string or a list of messages with role and content"
        )
    return last


def _text_of(message: Mapping[str, Any]) -> str:
    """The text of a message, without images. A message that only calls tools has none."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    parts = [part if isinstance(part, str) else part.get("text") for part in content if isinstance(part, str | Mapping)]
    return "".join(part for part in parts if isinstance(part, str))


def _number_of(prompt: Any) -> int:
    """A number that tells prompts apart, the same in every call and process."""
    text = json.dumps(prompt, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=7).digest(), "big")
