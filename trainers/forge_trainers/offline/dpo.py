"""Direct preference optimization of one policy: `DPOTrainer.fit`.

Axes: n samples of a batch, P pairs, T tokens.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from forge_agents.policy import Policy
from forge_agents.runtime.hosts import Hosts
from forge_agents.settings import named_arguments
from forge_trainers.learner.client import Learner
from forge_trainers.offline.config import DPOConfig
from forge_trainers.offline.data import Pair, packed, read_pairs
from forge_trainers.offline.trainer import OfflineTrainer, learner_metrics

if TYPE_CHECKING:
    import torch

    from forge_agents.types import EpisodeBatch


class DPOTrainer(OfflineTrainer[Pair]):
    """Trains a policy to prefer the better of two answers, see `forge_trainers.offline.data.read_pairs`.

    The loss of a pair is ``-log sigmoid(m)``, ``m = beta * (log p(c) / p0(c) - log p(r) / p0(r))`` with the chosen c,
    the rejected r and the frozen start model p0 (DPO, arXiv 2305.18290, eq. 7). Its gradient is that of
    ``-beta * sigmoid(-m) * (log p(c) - log p(r))`` with a constant factor (section 4). A step therefore needs one
    forward pass for m and one training step for this sum over tokens. The log-probabilities of p0 are computed once,
    before the first step of a session.

    Args:
        policy: Model to train, which is also the start model.
        config: User settings.
        out_dir: Run folder. If it holds a run, training continues from the newest checkpoint.
        mesh: Hosts of the learner. None: this host.
    """

    config: DPOConfig
    method = "dpo"
    _gather = staticmethod(read_pairs)

    @named_arguments
    def __init__(
        self,
        policy: Policy,
        config: DPOConfig | None = None,
        out_dir: str | os.PathLike[str] = "runs/dpo",
        mesh: Hosts | None = None,
    ) -> None:
        super().__init__(policy, config or DPOConfig(), out_dir, mesh)
        self._start: dict[bytes, tuple[float, float]] = {}
        """Log-probability of chosen and rejected streams under the start model, by the content of the pair."""

    def _ready_for(self, items: Sequence[Pair]) -> bool:
        return all(pair.content in self._start for pair in items)

    async def _look_at_start(self, learner: Learner, items: Sequence[Pair]) -> None:
        for part in self._batches(items):
            sums_P2 = await self._sums(learner, part, _packed(part))
            for pair, (chosen, rejected) in zip(part, sums_P2.tolist(), strict=True):
                self._start[pair.content] = (chosen, rejected)

    async def _learn(self, learner: Learner, items: Sequence[Pair]) -> dict[str, float]:
        batch = _packed(items)
        margin_P = self._margins(items, await self._sums(learner, items, batch))
        pull_P = self.config.beta * (-margin_P).sigmoid()  # d -log sigmoid(m) = -sigmoid(-m) dm (section 4)
        pair_n, side_n = _owners(items)
        # the learner divides by the number of loss tokens; DPO needs the mean over pairs
        scale = float(batch["tokens"]["loss_mask"].sum()) / len(items)
        weight_n = scale * pull_P[pair_n] * (1 - 2 * side_n)
        weight_T = weight_n.float().repeat_interleave(batch["samples"]["length"])
        batch["tokens"]["advantages"] = weight_T * batch["tokens"]["loss_mask"]
        learned = await learner.train_step(batch, timeout_s=self.config.stage_timeout_s)
        metrics = {f"train/{name}": value for name, value in _metrics(margin_P).items()}
        return metrics | learner_metrics(learned, self.config)

    async def _measure(self, learner: Learner, items: Sequence[Pair]) -> dict[str, float]:
        import torch

        margins = [self._margins(part, await self._sums(learner, part, _packed(part))) for part in self._batches(items)]
        return _metrics(torch.cat(margins))

    async def _sums(self, learner: Learner, items: Sequence[Pair], batch: EpisodeBatch) -> torch.Tensor:
        """Return the summed log-probabilities of chosen and rejected answers: float64 [P, 2]."""
        import torch

        logprobs_T = await learner.logprobs(batch, timeout_s=self.config.stage_timeout_s)
        pair_n, side_n = _owners(items)
        owner_T = (2 * pair_n + side_n).repeat_interleave(batch["samples"]["length"])
        sums = torch.zeros(2 * len(items), dtype=torch.float64).index_add_(0, owner_T, logprobs_T.double())
        return sums.view(-1, 2)

    def _margins(self, items: Sequence[Pair], sums_P2: torch.Tensor) -> torch.Tensor:
        """Return the margin m of each pair, float64 [P]."""
        import torch

        gain_P2 = sums_P2 - torch.tensor([self._start[pair.content] for pair in items], dtype=torch.float64)
        return self.config.beta * (gain_P2[:, 0] - gain_P2[:, 1])  # eq. 7


def _packed(items: Sequence[Pair]) -> EpisodeBatch:
    return packed(stream for pair in items for stream in (*pair.chosen, *pair.rejected))


def _owners(items: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pair of each sample of `_packed`, and its side (0 chosen, 1 rejected): int64 [n]."""
    import torch

    owners = [
        (number, side)
        for number, pair in enumerate(items)
        for side, streams in enumerate((pair.chosen, pair.rejected))
        for _ in streams
    ]
    pair_n, side_n = torch.tensor(owners).unbind(1)
    return pair_n, side_n


def _metrics(margin_P: torch.Tensor) -> dict[str, float]:
    """Return ``loss``, ``accuracy`` (fraction of pairs with a positive margin) and mean ``margin``."""
    import torch

    return {
        "loss": float(-torch.nn.functional.logsigmoid(margin_P).mean()),
        "accuracy": float((margin_P > 0).double().mean()),
        "margin": float(margin_P.mean()),
    }
