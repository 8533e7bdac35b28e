"""Ranges of episode seeds: training, evaluations, demonstrations and benchmarks never share a seed."""

from __future__ import annotations

import numpy as np

HELD_OUT_FROM = 2**31
"""Training draws seeds below. A trainer's own evaluations count up from here."""
DEMONSTRATIONS_FROM = 5 * 2**29
BENCHMARKS_FROM = 3 * 2**30
"""Seeds of benchmarks lie from here to 2**32."""


def is_held_out(seed: int) -> bool:
    """Whether an evaluation or a benchmark plays a seed, as opposed to training or demonstrations."""
    return seed >= HELD_OUT_FROM and not DEMONSTRATIONS_FROM <= seed < BENCHMARKS_FROM


def place_of(seed: int, count: int) -> int:
    """The place in a list of `count` entries that a seed stands for.

    Consecutive seeds go through the whole list before any entry comes again, each time in another order.
    """
    run, at = divmod(seed % HELD_OUT_FROM, count)
    return int(np.random.default_rng([count, run]).permutation(count)[at])
