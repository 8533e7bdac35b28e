"""When a dearer verifier is worth asking.

In: what the cheaper ones made of each row. Out: the rows that stay open, and a sample in which everybody is asked.
Waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cascade:
    """Asks the next, dearer cost class only about rows that the cheaper ones leave undecided.

    Rows that were skipped are missing because of their scores, so not at random: judges that see only hard cases look
    worse than they are, and their silence looks like a verdict. So whole groups are drawn beforehand in which every
    verifier judges every row, and the ensemble learns from these alone. Until it has learned from `warm_up_rows` rows,
    and where all verifiers are of one cost class, everybody is asked.
    """

    undecided: tuple[float, float] = (0.1, 0.9)
    """A row is open while its P(correct) lies strictly between these two."""
    verified_share: float = 0.2
    """Share of groups, in (0, 1], in which everybody is asked."""
    warm_up_rows: int = 256
    """Fully judged rows before the first call is spared."""
    seed: int = 0
    """Of the draw of groups."""

    def __post_init__(self) -> None:
        low, high = self.undecided
        if not 0 <= low < high <= 1:
            raise ValueError(f"undecided={self.undecided} must be (low, high) with 0 <= low < high <= 1")
        if not 0 < self.verified_share <= 1:
            raise ValueError(
                f"verified_share={self.verified_share} must lie in (0, 1]: nothing can be learned without such groups"
            )
        if self.warm_up_rows < 1:
            raise ValueError(f"warm_up_rows={self.warm_up_rows} must be at least 1")

    def verified(self, groups: NDArray[np.intp], draw: int) -> Bools:
        """The rows [n] of the groups in which everybody is asked; `draw` numbers the draws of a run."""
        rng = np.random.default_rng([self.seed, draw])
        return np.asarray(rng.random(int(groups.max()) + 1)[groups] < self.verified_share)

    def open(self, posterior: NDArray[np.float64]) -> Bools:
        """The rows [n] on which the next cost class is asked; NaN is open."""
        low, high = self.undecided
        return ~((posterior <= low) | (posterior >= high))
