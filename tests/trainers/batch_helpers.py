"""Samples for tests of batches and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forge_trainers.batch.packing import Sample


def sample_of(token_ids: Sequence[int], sampled: int | Sequence[bool], **fields: Any) -> Sample:
    """A sample whose last `sampled` tokens, or those of a mask, are in the loss."""
    n = len(token_ids)
    mask = (False,) * (n - sampled) + (True,) * sampled if isinstance(sampled, int) else tuple(sampled)
    versions = tuple(0 if is_sampled else -1 for is_sampled in mask)
    defaults = {"logprobs": (0.0,) * n, "advantage": 0.0, "versions": versions, "group": 0}
    return Sample(token_ids=tuple(token_ids), loss_mask=mask, **{**defaults, **fields})
