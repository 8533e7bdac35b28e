"""Renderers and answers of models whose tokens are easy to follow."""

from __future__ import annotations

from forge_agents.types import Completion, VersionSpan


class Tokens:
    """A renderer: prompts begin with 1 and 2, a 9 follows each answer, and the text of an answer is its numbers."""

    stop_ids: tuple[int, ...] = ()
    may_be_slow = False

    def begin(self, messages: object) -> tuple[int, ...]:
        return (1, 2)

    def go_on(self, prompt_ids: tuple[int, ...], response_ids: tuple[int, ...], messages: object) -> tuple[int, ...]:
        return (*prompt_ids, *response_ids, 9)

    def sections(self, response_ids: tuple[int, ...]) -> tuple[str, str, str]:
        return "", "", self.text(response_ids)

    def text(self, response_ids: tuple[int, ...]) -> str:
        return "".join(map(str, response_ids))


def completion(*token_ids: int, version: int = 1) -> Completion:
    """Return an answer of these tokens, all sampled by one version of the weights."""
    spans = (VersionSpan(version=version, start=0, end=len(token_ids)),) if token_ids else ()
    logprobs = (-0.5,) * len(token_ids)
    return Completion(token_ids=token_ids, logprobs=logprobs, finish_reason="stop", versions=spans)
