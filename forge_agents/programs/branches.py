"""Matching of requests with the conversations that they continue."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Generic, TypeVar

from forge_agents.programs.calls import ChatMessage, ChatRequest

T = TypeVar("T")


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
        self._answers: dict[bytes, OrderedDict[T, None]] = {}
        self._unused: dict[bytes, OrderedDict[T, None]] = {}
        """Answers that no request has continued. Plain dicts would search for their first item in linear time."""

    def match(self, agent: str, request: ChatRequest) -> tuple[T | None, tuple[ChatMessage, ...], bytes]:
        """Return the answer that a request continues, the messages after that answer, and the request's digest."""
        digest = hashlib.blake2b(f"{agent}\0{request.session}\0{request.instructions}".encode()).digest()
        known, num_known = b"", 0
        for position, message in enumerate(request.messages, 1):
            digest = hashlib.blake2b(digest + message.js_key).digest()
            if message.role == "assistant" and digest in self._answers:
                known, num_known = digest, position
        if not known:
            return None, request.messages, digest
        if known in self._unused:
            parent, _ = self._unused[known].popitem(last=False)
            if not self._unused[known]:
                del self._unused[known]
        else:
            parent = next(reversed(self._answers[known]))
        return parent, request.messages[num_known:], digest

    def add(self, request_digest: bytes, message: ChatMessage, answer: T) -> bytes:
        """Store the answer to the request with this digest. Returns the digest of the answer."""
        digest = hashlib.blake2b(request_digest + message.js_key).digest()
        for answers in (self._answers, self._unused):
            answers.setdefault(digest, OrderedDict())[answer] = None
        return digest

    def remove(self, digest: bytes, answer: T) -> None:
        """Remove an answer, so no later request continues it."""
        for answers in (self._answers, self._unused):
            if digest in answers:
                answers[digest].pop(answer, None)
                if not answers[digest]:
                    del answers[digest]
