"""Ranges of episode seeds: training, evaluations, demonstrations and benchmarks never share a seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

HELD_OUT_FROM = 2**31
"""First seed of evaluations. Training uses the seeds below."""
DEMONSTRATIONS_FROM = 5 * 2**29
BENCHMARKS_FROM = 3 * 2**30
"""First seed of benchmarks, which use the seeds up to 2**32."""


def is_held_out(seed: int | None) -> bool:
    """Whether a seed belongs to evaluations or benchmarks, not to training or demonstrations. None, no seed: False."""
    return seed is not None and seed >= HELD_OUT_FROM and not DEMONSTRATIONS_FROM <= seed < BENCHMARKS_FROM


def index_of_seed(seed: int, count: int) -> int:
    """Map a seed to an index in ``range(count)``.

    Consecutive seeds visit every index once before any index repeats, in a new order each time.
    """
    epoch, position = divmod(seed % HELD_OUT_FROM, count)
    return int(np.random.default_rng([count, epoch]).permutation(count)[position])


def draw_seeds(key: Sequence[int], count: int, *, first: int, size: int) -> list[int]:
    """Return distinct seeds in ``range(first, first + size)``, made of `key`. A smaller `count` returns the first."""
    rng = np.random.default_rng(list(key))
    seeds: dict[int, None] = {}
    while len(seeds) < count:
        seeds.setdefault(first + int(rng.integers(size)))
    return list(seeds)
