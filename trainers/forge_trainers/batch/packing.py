"""From trajectories to the learner's batch: token-exact samples, packed end to end."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forge_agents.errors import EmptyBatchError
from forge_agents.imports import without_garbage_collection
from forge_agents.types import EpisodeBatch, Trajectory, Turn

with without_garbage_collection():
    import torch
    from tensordict import TensorDict

# T tokens of all samples, n samples, L tokens of one sample
_TOKEN_DTYPES = {
    "ids": torch.int64,
    "loss_mask": torch.bool,
    "logprobs": torch.float32,
    "advantages": torch.float32,
    "versions": torch.int64,
    "turn": torch.int64,
}
_SAMPLE_DTYPES = dict.fromkeys(("start", "length", "group", "trajectory", "agent"), torch.int64)
_MAX_LOGPROB = 1e-3
"""Log-probability of 1, plus rounding error."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A stream of L tokens to learn from. Sequences are converted to arrays."""

    token_ids: np.ndarray
    """int64 ``[L]``: prompt and response tokens in order, at least two."""
    loss_mask: np.ndarray
    """bool ``[L]``, True where the policy sampled the token. False for the first token, which has no
    prediction."""
    logprobs: np.ndarray
    """float32 ``[L]``, the sampler's log-probability (natural logarithm) of each token, or 0 where masked."""
    advantage: float | np.ndarray
    """Advantage: one number for the sample, or float32 ``[L]``."""
    versions: np.ndarray
    """int64 ``[L]``, version of the weights that sampled each token, or -1 where masked."""
    group: int
    """Number of the group. Samples of one group may share the computation of a common prefix."""
    trajectory: int | None = None
    """Number of the trajectory, at least 0. None: the sample is a trajectory by itself."""
    agent: int = 0
    """CRC-32 of the agent's name, by which the learner finds the agent's teacher. 0 if unknown."""
    turns: np.ndarray | None = None
    """int64 ``[L]``, number of each token's turn in the trajectory, -1 where masked. None: all tokens are one turn."""
    bad_logprobs: int = 0
    """Number of sampled tokens that are masked because their log-probability is invalid."""

    def __post_init__(self) -> None:
        if len(self.token_ids) < 2:
            raise ValueError(f"a sample of {len(self.token_ids)} tokens has nothing to predict. Pass at least 2")
        for name, dtype in _COLUMNS.items():
            values = getattr(self, name)
            if values is None or (name == "advantage" and np.ndim(values) == 0):
                continue
            if len(values) != len(self.token_ids):
                raise ValueError(
                    f"{name} has {len(values)} entries for {len(self.token_ids)} tokens. Pass one per token"
                )
            object.__setattr__(self, name, np.asarray(values, dtype))
        if self.loss_mask[0]:
            raise ValueError("the first token is in the loss, but no token precedes it. The prompt is empty")
        if self.token_ids.min() < 0:
            raise ValueError(f"token id {self.token_ids.min()} is negative")
        for name in ("logprobs", "advantage"):
            values = np.atleast_1d(getattr(self, name))
            if (bad := ~np.isfinite(values)).any():
                raise ValueError(f"{name}[{bad.argmax()}] is {values[bad][0]}. Every value must be finite")
        if self.logprobs.max() > _MAX_LOGPROB:
            raise ValueError(f"logprob {self.logprobs.max()} is positive. Pass natural-log probabilities")

    @property
    def advantages(self) -> np.ndarray:
        """Advantage of each token, 0 where masked: float32 ``[L]``."""
        return np.where(self.loss_mask, self.advantage, 0.0).astype(np.float32)


_COLUMNS = {
    "token_ids": np.int64,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "advantage": np.float32,
    "versions": np.int64,
    "turns": np.int64,
}


def samples_from(
    trajectory: Trajectory, advantages_per_turn: Sequence[float], group: int, *, number: int | None = None
) -> list[Sample]:
    """Cut a trajectory into training samples, without tokenizing anything again.

    If the prompt of a turn begins with prompt and response of the turn before in its branch, the turn continues that
    sample: the new part of the prompt is masked, and the response is in the loss. Otherwise (first turn of a branch,
    trimmed context, rewritten history) the turn starts a new sample, and sampled tokens that its prompt repeats are
    masked. So each sampled token is in the loss of exactly one sample. Notes are a part of their turn, before the
    response. Turns without response tokens (scripted, empty) are skipped. Tokens whose log-probability is NaN,
    infinite or positive are masked and counted. Tokens that no model sampled, such as those that end the reasoning, are
    masked as well.

    Args:
        trajectory: Observations and responses of one agent.
        advantages_per_turn: One finite number per turn of the trajectory.
        group: Number of the group.
        number: Number of the trajectory in the batch. None makes every sample a trajectory of its own.

    Returns:
        Samples in the order of their first turn. Empty if no turn has response tokens.

    Raises:
        ValueError: Lengths differ, an advantage is not finite, or a response has no prompt.
    """
    if len(advantages_per_turn) != len(trajectory.turns):
        raise ValueError(
            f"{len(advantages_per_turn)} advantages for the {len(trajectory.turns)} turns of agent "
            f"{trajectory.agent!r}. Pass one per turn"
        )
    streams: list[tuple[np.ndarray, list[tuple[int, int, Turn]]]] = []  # ids; number, start and source of each response
    newest: dict[int, int] = {}  # index of the current stream of each branch
    for number_of_turn, turn in enumerate(trajectory.turns):
        for part in turn.parts:
            if not len(part.response_ids):
                continue
            prompt = np.asarray(part.prompt_ids, np.int64)
            at = newest.get(turn.branch)
            if at is None or not np.array_equal(prompt[: len(streams[at][0])], streams[at][0]):
                at = newest[turn.branch] = len(streams)
                streams.append((prompt, []))
            ids = np.concatenate([prompt, np.asarray(part.response_ids, np.int64)])
            streams[at] = (ids, [*streams[at][1], (number_of_turn, len(prompt), part)])
    agent = zlib.crc32(trajectory.agent.encode())
    return [
        Sample(
            token_ids=ids, group=group, trajectory=number, agent=agent, **_columns(ids, responses, advantages_per_turn)
        )
        for ids, responses in streams
    ]


def _columns(
    ids: np.ndarray, responses: Sequence[tuple[int, int, Turn]], advantages: Sequence[float]
) -> dict[str, Any]:
    """Return fields of a `Sample` of tokens `ids`. `responses` lists turn number, start and source of each."""
    mask, bad = np.zeros(len(ids), np.bool_), 0
    logprobs, advantage = np.zeros((2, len(ids)), np.float32)
    versions, numbers = np.full((2, len(ids)), -1)
    for number, start, turn in responses:
        place = slice(start, start + len(turn.response_ids))
        turn_logprobs = np.asarray(turn.logprobs, np.float32)
        sampled = np.full(len(turn_logprobs), not turn.versions)
        for span in turn.versions:
            versions[place][span.start : span.end] = span.version
            sampled[span.start : span.end] = True
        valid = (turn_logprobs > -np.inf) & (turn_logprobs <= _MAX_LOGPROB)  # False for NaN
        bad += int((sampled & ~valid).sum())
        valid &= sampled
        mask[place], logprobs[place] = valid, np.where(valid, turn_logprobs, 0.0)
        advantage[place], numbers[place] = advantages[number], number
    return {
        "loss_mask": mask,
        "logprobs": logprobs,
        "advantage": advantage,
        "versions": versions,
        "turns": numbers,
        "bad_logprobs": bad,
    }


def pack(samples: Sequence[Sample]) -> EpisodeBatch:
    """Concatenate samples into the learner's batch.

    Returns:
        A TensorDict as `forge_agents.types.EpisodeBatch` describes it.

    Raises:
        EmptyBatchError: There are no samples, or no token is in the loss.
    """
    if not any(sample.loss_mask.any() for sample in samples):
        raise EmptyBatchError(f"{len(samples)} samples without a token to learn from. The policy sampled nothing")
    columns = {
        "ids": [sample.token_ids for sample in samples],
        "loss_mask": [sample.loss_mask for sample in samples],
        "logprobs": [sample.logprobs for sample in samples],
        "advantages": [sample.advantages for sample in samples],
        "versions": [sample.versions for sample in samples],
        "turn": [np.zeros(len(s.token_ids), np.int64) if s.turns is None else s.turns for s in samples],
    }
    tokens = {name: torch.from_numpy(np.concatenate(arrays)) for name, arrays in columns.items()}
    for name, masked in (("logprobs", 0.0), ("versions", -1), ("turn", -1)):
        tokens[name] = torch.where(tokens["loss_mask"], tokens[name], masked)
    lengths_n = torch.tensor([len(sample.token_ids) for sample in samples])
    free = itertools.count(1 + max((s.trajectory for s in samples if s.trajectory is not None), default=-1))
    batch = TensorDict(
        {
            "tokens": TensorDict(tokens, batch_size=[int(lengths_n.sum())]),
            "samples": TensorDict(
                {
                    "start": lengths_n.cumsum(0) - lengths_n,
                    "length": lengths_n,
                    "group": torch.tensor([sample.group for sample in samples]),
                    "trajectory": torch.tensor([next(free) if s.trajectory is None else s.trajectory for s in samples]),
                    "agent": torch.tensor([sample.agent for sample in samples]),
                },
                batch_size=[len(samples)],
            ),
        },
        batch_size=[],
    )
    check_batch(batch)
    return batch


def minibatches(batch: EpisodeBatch, number: int) -> list[EpisodeBatch]:
    """Split a batch into at most `number` minibatches of whole groups, in order and equal numbers as far as possible.

    Groups without a token in the loss are left out. If `number` is 1, the result is the batch itself.
    """
    if number == 1:
        return [batch]
    tokens, samples = batch["tokens"], batch["samples"]
    group_T = samples["group"].repeat_interleave(samples["length"])
    groups = list(dict.fromkeys(group_T[tokens["loss_mask"]].tolist()))
    return [_of_groups(batch, part) for part in np.array_split(groups, min(number, len(groups)))] if groups else [batch]


def _of_groups(batch: EpisodeBatch, groups: np.ndarray) -> EpisodeBatch:
    tokens, samples = batch["tokens"], batch["samples"]
    in_n = torch.isin(samples["group"], torch.as_tensor(groups))
    in_T = in_n.repeat_interleave(samples["length"])
    chosen = samples[in_n].clone()
    chosen["start"] = chosen["length"].cumsum(0) - chosen["length"]
    return TensorDict({"tokens": tokens[in_T], "samples": chosen}, batch_size=[])


def check_batch(batch: EpisodeBatch, *, vocab_size: int | None = None, max_length: int | None = None) -> None:
    """Check an `EpisodeBatch` before it reaches the model, whose ids are below `vocab_size`. None: no check.

    Raises:
        TypeError: `batch` is a sequence, such as a list of samples.
        ValueError: A column is missing, has another dtype or length, or holds NaN or infinity; samples do not tile the
            tokens; a first token is in the loss; an id is out of range; or a sample has more than `max_length` tokens.
    """
    if isinstance(batch, Sequence):
        raise TypeError(f"a {type(batch).__name__} is not a batch. Build one with forge_trainers.batch.packing.pack")
    for part, dtypes in (("tokens", _TOKEN_DTYPES), ("samples", _SAMPLE_DTYPES)):
        if batch.get(part) is None:
            raise ValueError(f"the batch has no {part!r}. Build it with forge_trainers.batch.packing.pack")
        for name, dtype in dtypes.items():
            column = batch[part].get(name)
            if column is None or column.dtype != dtype or column.ndim != 1:
                got = "missing" if column is None else f"{column.dtype} with shape {tuple(column.shape)}"
                raise ValueError(f"batch[{part!r}, {name!r}] is {got}. Expected a flat tensor of {dtype}")
    tokens, samples = batch["tokens"], batch["samples"]
    start_n, length_n = samples["start"], samples["length"]
    ends_n = length_n.cumsum(0)
    num_tokens = tokens["ids"].numel()
    if not torch.equal(start_n, ends_n - length_n) or int(ends_n[-1]) != num_tokens or int(length_n.min()) < 2:
        raise ValueError(
            f"start and length of the samples must tile the {num_tokens} tokens, and each sample needs 2 or more"
        )
    for name in ("logprobs", "advantages"):
        bad = (~torch.isfinite(tokens[name])).nonzero()
        if bad.numel():
            at = int(bad[0])
            raise ValueError(f"{name} of token {at} is {tokens[name][at].item()}. Every value must be finite")
    if bool(tokens["loss_mask"][start_n].any()):
        raise ValueError("the first token of a sample is in the loss, but no token precedes it")
    highest = int(tokens["ids"].max())
    if int(tokens["ids"].min()) < 0 or (vocab_size is not None and highest >= vocab_size):
        raise ValueError(
            f"token ids span {int(tokens['ids'].min())}..{highest}, but the model knows 0..{(vocab_size or 0) - 1}. "
            "Sampler and learner use different models"
        )
    longest = int(length_n.max())
    if max_length is not None and longest > max_length:
        raise ValueError(
            f"a sample has {longest} tokens, at most {max_length} fit. Raise max_sample_tokens (up to the model's "
            "context) or limit the episode"
        )
