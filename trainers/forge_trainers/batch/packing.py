"""From trajectories to the learner's batch: token-exact samples, packed end to end.

In: trajectories with one advantage per turn. Out: `Sample` and `EpisodeBatch`. Waits for nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict

from forge_agents.errors import EmptyBatchError
from forge_agents.types import EpisodeBatch, Trajectory, Turn

# T tokens of all samples, n samples
_TOKEN_DTYPES = {
    "ids": torch.int64,
    "loss_mask": torch.bool,
    "logprobs": torch.float32,
    "advantages": torch.float32,
    "versions": torch.int64,
    "turn": torch.int64,
}
_MOST_LOGPROB = 1e-3
"""Of a probability of 1, with what rounding adds."""
_SAMPLE_DTYPES = {"start": torch.int64, "length": torch.int64, "group": torch.int64, "trajectory": torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One token stream to learn from."""

    token_ids: tuple[int, ...]
    """All tokens, prompt and responses, in order; at least two."""
    loss_mask: tuple[bool, ...]
    """True where the policy sampled the token. Never True at the first token, which nothing predicts."""
    logprobs: tuple[float, ...]
    """The sampler's natural-log probability of each token; 0 where masked."""
    advantage: float | tuple[float, ...]
    """How much better than its siblings: one number for the sample, or one per token (0 where masked)."""
    versions: tuple[int, ...]
    """Version of the weights that sampled each token; -1 where masked."""
    group: int
    """Equal for siblings, whose common first tokens may be computed once."""
    trajectory: int | None = None
    """Equal for the samples of one trajectory, at least 0; None for a sample that is a trajectory of its own."""
    turns: tuple[int, ...] | None = None
    """Number of each token's turn in its trajectory, -1 where masked; None where all is one turn."""
    bad_logprobs: int = 0
    """Sampled tokens that are masked because what the sampler gave is not the logarithm of a probability."""

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        if n < 2:
            raise ValueError(f"a sample of {n} tokens has nothing to predict; send at least 2")
        columns = {"loss_mask": self.loss_mask, "logprobs": self.logprobs, "versions": self.versions}
        if isinstance(self.advantage, tuple):
            columns["advantage"] = self.advantage
        if self.turns is not None:
            columns["turns"] = self.turns
        for name, column in columns.items():
            if len(column) != n:
                raise ValueError(f"{name} has {len(column)} entries for {n} tokens; send one per token")
        if self.loss_mask[0]:
            raise ValueError("the first token is in the loss, but no token precedes it; the prompt is empty")
        if min(self.token_ids) < 0:
            raise ValueError(f"token id {min(self.token_ids)} is negative")
        _check_finite("logprobs", self.logprobs)
        _check_finite("advantage", self.advantages)
        if max(self.logprobs) > _MOST_LOGPROB:
            raise ValueError(f"logprob {max(self.logprobs)} is positive; send natural-log probabilities")

    @property
    def advantages(self) -> tuple[float, ...]:
        """The advantage of each token, 0 where masked."""
        if isinstance(self.advantage, tuple):
            return tuple(a if m else 0.0 for a, m in zip(self.advantage, self.loss_mask, strict=True))
        return tuple(self.advantage if m else 0.0 for m in self.loss_mask)


def _check_finite(name: str, values: Sequence[float]) -> None:
    for at, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"{name}[{at}] is {value}; every value must be finite")


def samples_from(
    trajectory: Trajectory, advantages_per_turn: Sequence[float], group: int, *, number: int | None = None
) -> list[Sample]:
    """Turn one agent's episode into training samples without re-tokenising anything.

    A turn whose prompt begins with the previous prompt + response continues that sample: the new part of the prompt
    is masked, the response is in the loss. A turn whose prompt does not (context trimmed, history rewritten) starts a
    sample of its own. Turns without response tokens (scripted, empty) teach nothing and are passed over. A token whose
    log-probability is NaN, infinite or positive is masked and counted: its ratio to the learner's has no value.

    Args:
        trajectory: What one agent saw and said.
        advantages_per_turn: One finite number per turn of the trajectory.
        group: Number of the sibling group.
        number: Of this trajectory among all of the batch; None makes every sample a trajectory of its own.

    Returns:
        Samples in the order of their first turn; empty where no turn has response tokens.

    Raises:
        ValueError: Lengths differ, an advantage is not finite, or a response has no prompt before it.
    """
    if len(advantages_per_turn) != len(trajectory.turns):
        raise ValueError(
            f"{len(advantages_per_turn)} advantages for the {len(trajectory.turns)} turns of agent "
            f"{trajectory.agent!r}; send one per turn"
        )
    streams: list[_Stream] = []
    for index, (turn, advantage) in enumerate(zip(trajectory.turns, advantages_per_turn, strict=True)):
        if not turn.response_ids:
            continue
        if not streams or not streams[-1].is_continued_by(turn):
            streams.append(_Stream())
        streams[-1].append(turn, float(advantage), index)
    return [stream.sample(group, number) for stream in streams]


class _Stream:
    """A sample under construction."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._advantages: list[float] = []
        self._versions: list[int] = []
        self._turns: list[int] = []
        self._bad_logprobs = 0

    def is_continued_by(self, turn: Turn) -> bool:
        return list(turn.prompt_ids[: len(self._ids)]) == self._ids

    def append(self, turn: Turn, advantage: float, index: int) -> None:
        new_prompt = turn.prompt_ids[len(self._ids) :]
        versions = [-1] * len(turn.response_ids)
        for span in turn.versions:
            versions[span.start : span.end] = [span.version] * (span.end - span.start)
        good = [-math.inf < logprob <= _MOST_LOGPROB for logprob in turn.logprobs]
        self._bad_logprobs += good.count(False)
        logprobs = [logprob if use else 0.0 for logprob, use in zip(turn.logprobs, good, strict=True)]
        self._extend(new_prompt, [False] * len(new_prompt), [0.0] * len(new_prompt), 0.0, [-1] * len(new_prompt))
        self._extend(turn.response_ids, good, logprobs, advantage, versions)
        self._turns += [-1] * len(new_prompt) + [index] * len(turn.response_ids)

    def _extend(
        self,
        ids: Sequence[int],
        mask: Sequence[bool],
        logprobs: Sequence[float],
        advantage: float,
        versions: Sequence[int],
    ) -> None:
        self._ids += ids
        self._mask += mask
        self._logprobs += logprobs
        self._advantages += [advantage] * len(ids)
        self._versions += versions[: len(ids)]

    def sample(self, group: int, trajectory: int | None) -> Sample:
        return Sample(
            token_ids=tuple(self._ids),
            loss_mask=tuple(self._mask),
            logprobs=tuple(self._logprobs),
            advantage=tuple(self._advantages),
            versions=tuple(self._versions),
            group=group,
            trajectory=trajectory,
            turns=tuple(self._turns),
            bad_logprobs=self._bad_logprobs,
        )


def pack(samples: Sequence[Sample]) -> EpisodeBatch:
    """Lay samples end to end in the learner's batch.

    Returns:
        A TensorDict as `forge_agents.types.EpisodeBatch` describes it.

    Raises:
        EmptyBatchError: There is no sample, or no token is in the loss.
    """
    if not any(any(sample.loss_mask) for sample in samples):
        raise EmptyBatchError(f"{len(samples)} samples with no token to learn from; nothing was sampled by the policy")
    lengths_n = torch.tensor([len(sample.token_ids) for sample in samples])
    mask_T = torch.tensor([m for s in samples for m in s.loss_mask])
    turns = [t for s in samples for t in (s.turns or (0,) * len(s.token_ids))]
    free = itertools.count(1 + max((s.trajectory for s in samples if s.trajectory is not None), default=-1))
    batch = TensorDict(
        {
            "tokens": TensorDict(
                {
                    "ids": torch.tensor([t for s in samples for t in s.token_ids]),
                    "loss_mask": mask_T,
                    "logprobs": torch.tensor([x for s in samples for x in s.logprobs]) * mask_T,
                    "advantages": torch.tensor([a for s in samples for a in s.advantages]),
                    "versions": torch.where(mask_T, torch.tensor([v for s in samples for v in s.versions]), -1),
                    "turn": torch.where(mask_T, torch.tensor(turns), -1),
                },
                batch_size=[int(lengths_n.sum())],
            ),
            "samples": TensorDict(
                {
                    "start": lengths_n.cumsum(0) - lengths_n,
                    "length": lengths_n,
                    "group": torch.tensor([sample.group for sample in samples]),
                    "trajectory": torch.tensor([next(free) if s.trajectory is None else s.trajectory for s in samples]),
                },
                batch_size=[len(samples)],
            ),
        },
        batch_size=[],
    )
    check_batch(batch)
    return batch


def check_batch(batch: EpisodeBatch, *, vocab_size: int | None = None, max_length: int | None = None) -> None:
    """Check an `EpisodeBatch` before it reaches the model.

    Args:
        batch: What `pack` returned, or the like.
        vocab_size: Token ids must be below it.
        max_length: No sample may be longer, in tokens.

    Raises:
        ValueError: A column is missing, has another dtype or length, holds NaN or infinity, spans do not tile the
            tokens, a first token is in the loss, or an id or length is out of range.
    """
    for part, dtypes in (("tokens", _TOKEN_DTYPES), ("samples", _SAMPLE_DTYPES)):
        if batch.get(part) is None:
            raise ValueError(f"the batch has no {part!r}; build it with forge_trainers.batch.packing.pack")
        for name, dtype in dtypes.items():
            column = batch[part].get(name)
            if column is None or column.dtype != dtype or column.ndim != 1:
                got = "nothing" if column is None else f"{column.dtype} with shape {tuple(column.shape)}"
                raise ValueError(f"batch[{part!r}, {name!r}] is {got}; expected a flat tensor of {dtype}")
    tokens, samples = batch["tokens"], batch["samples"]
    start_n, length_n = samples["start"], samples["length"]
    ends_n = length_n.cumsum(0)
    num_tokens = tokens["ids"].numel()
    if not torch.equal(start_n, ends_n - length_n) or int(ends_n[-1]) != num_tokens or int(length_n.min()) < 2:
        raise ValueError(f"start and length of the samples must tile the {num_tokens} tokens, each sample >= 2 tokens")
    for name in ("logprobs", "advantages"):
        bad = (~torch.isfinite(tokens[name])).nonzero()
        if bad.numel():
            at = int(bad[0])
            raise ValueError(f"{name} of token {at} is {tokens[name][at].item()}; every value must be finite")
    if bool(tokens["loss_mask"][start_n].any()):
        raise ValueError("the first token of a sample is in the loss, but no token precedes it")
    highest = int(tokens["ids"].max())
    if int(tokens["ids"].min()) < 0 or (vocab_size is not None and highest >= vocab_size):
        raise ValueError(
            f"token ids span {int(tokens['ids'].min())}..{highest}, but the model knows 0..{(vocab_size or 0) - 1}; "
            "sampler and learner use different models"
        )
    longest = int(length_n.max())
    if max_length is not None and longest > max_length:
        raise ValueError(
            f"a sample has {longest} tokens, at most {max_length} fit; raise max_sample_tokens (up to the model's "
            "context) or limit the episode"
        )
