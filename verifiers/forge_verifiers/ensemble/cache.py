"""Verdicts that were already paid for, by content.

In: a trajectory, a verifier's number. Out: the score it gave to the same content before. Waits for nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np

from forge_agents.types import Trajectory
from forge_verifiers.core.verifier import State

_DIGEST_BYTES = 16


def content_key(trajectory: Trajectory) -> bytes:
    """16 bytes that stand for everything in a trajectory that a verifier may read.

    That is the task, the agent, its instructions, what it saw and said, rewards and infos; not tokens,
    log-probabilities, weights versions and timings.
    """
    turns = [(t.observation, t.action, t.reward, t.terminated, t.truncated, dict(t.info)) for t in trajectory.turns]
    content = (
        trajectory.env_id,
        trajectory.seed,
        trajectory.agent,
        trajectory.instructions,
        trajectory.early_reward,
        dict(trajectory.info),
        turns,
    )
    text = json.dumps(content, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


class ScoreCache:
    """The last `max_rows` verdicts, least recently used out first. Abstentions are not kept: they may be passing.

    Args:
        max_rows: Verdicts held, all verifiers together; 0 holds none.
    """

    def __init__(self, max_rows: int) -> None:
        if max_rows < 0:
            raise ValueError(f"cache_rows={max_rows} must be at least 0; 0 switches the cache off")
        self.max_rows = max_rows
        self._scores: OrderedDict[tuple[int, bytes], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._scores)

    def get(self, verifier: int, key: bytes) -> float | None:
        """The score that verifier number `verifier` gave to this content, or None."""
        score = self._scores.get((verifier, key))
        if score is not None:
            self._scores.move_to_end((verifier, key))
        return score

    def put(self, verifier: int, key: bytes, score: float) -> None:
        """Keeps a score; NaN is left out."""
        if np.isnan(score) or not self.max_rows:
            return
        self._scores[verifier, key] = score
        self._scores.move_to_end((verifier, key))
        if len(self._scores) > self.max_rows:
            self._scores.popitem(last=False)

    def state_dict(self) -> State:
        """Everything held, oldest use first."""
        keys = b"".join(key for _, key in self._scores)
        return {
            "verifiers": np.array([verifier for verifier, _ in self._scores], np.int64),
            "keys": np.frombuffer(keys, np.uint8).reshape(-1, _DIGEST_BYTES).copy(),
            "scores": np.array(list(self._scores.values()), np.float32),
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restores what `state_dict` returned, at most `max_rows` of it."""
        rows = zip(state["verifiers"].tolist(), state["keys"], state["scores"].tolist(), strict=True)
        self._scores.clear()
        for verifier, key, score in rows:
            self.put(verifier, key.astype(np.uint8).tobytes(), score)
