"""Matching of requests with the conversations that they continue."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeAlias, TypeVar

from forge_agents.programs.calls import ChatMessage, ChatRequest, continued_digest

T = TypeVar("T")
Key: TypeAlias = tuple[str, bytes]
"""Agent with its session, and digest of the conversation."""


class BranchIndex(Generic[T]):
    """Finds the answer that a request continues, among the answers of an episode.

    Programs send the whole conversation with each request and no id. If a request contains an answer of ours, the
    model's prompt must continue with the tokens that were sampled for it, because text may tokenize differently and
    training needs the exact tokens. So each answer is stored under a digest of its agent, session, tool description and
    all messages up to and including the answer. A request continues the last of its assistant messages whose digest is
    known: everything before that message is then known to be equal, and only what follows is new. A history that the
    program has edited has another digest from the edit on. The request continues an answer before the edit, which
    starts a branch, or none at all.

    Digests use `ChatMessage.js_key`, because clients re-encode the JSON of tool calls. Among answers with the same
    digest, the first that no request has continued yet is chosen, so parallel conversations with equal text do not
    share one branch.
    """

    def __init__(self) -> None:
        self._answers: dict[Key, OrderedDict[T, None]] = {}
        self._unused: dict[Key, OrderedDict[T, None]] = {}
        """Answers that no request has continued. Plain dicts would search for their first item in linear time."""

    def match(self, agent: str, request: ChatRequest) -> tuple[T | None, tuple[ChatMessage, ...], Key]:
        """Return the answer that a request continues, the messages after that answer, and the request's key."""
        owner = f"{agent}\0{request.session}"
        key = owner, request.digests[-1][1]
        answers = ((position, (owner, digest)) for position, digest in reversed(request.digests))
        num_known, known = next((answer for answer in answers if answer[1] in self._answers), (0, key))
        if not num_known:
            return None, request.messages, key
        if known in self._unused:
            parent, _ = self._unused[known].popitem(last=False)
            if not self._unused[known]:
                del self._unused[known]
        else:
            parent = next(reversed(self._answers[known]))
        return parent, request.messages[num_known:], key

    def add(self, request_key: Key, message: ChatMessage, answer: T) -> Key:
        """Store the answer to the request with this key. Returns the key of the answer."""
        owner, digest = request_key
        key = owner, continued_digest(digest, message)
        for answers in (self._answers, self._unused):
            answers.setdefault(key, OrderedDict())[answer] = None
        return key

    def remove(self, key: Key, answer: T) -> None:
        """Remove an answer, so no later request continues it."""
        for answers in (self._answers, self._unused):
            if key in answers:
                answers[key].pop(answer, None)
                if not answers[key]:
                    del answers[key]
