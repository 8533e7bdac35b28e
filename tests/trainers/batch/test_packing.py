"""Samples keep the sampler's tokens, and invalid batches are refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from batch_helpers import sample_of

from forge_agents.errors import EmptyBatchError
from forge_agents.types import Trajectory, Turn, VersionSpan
from forge_trainers.batch.packing import Sample, check_batch, pack, samples_from


def turn(prompt: tuple[int, ...], response: tuple[int, ...], index: int = 0) -> Turn:
    return Turn(
        agent="a", index=index, observation="", action="", reward=0.0, prompt_ids=prompt, response_ids=response,
        logprobs=tuple(-0.1 * (i + 1) for i in range(len(response))),
        versions=(VersionSpan(version=7, start=0, end=len(response)),) if response else (),
    )  # fmt: skip


def trajectory(*turns: Turn) -> Trajectory:
    return Trajectory(agent="a", policy="p", turns=turns)


def sample(**changes: object) -> Sample:
    base = sample_of((1, 2, 3), 2, logprobs=(0.0, -1.0, -2.0), advantage=0.5)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_turn_that_extends_the_last_one_joins_its_sample():
    samples = samples_from(trajectory(turn((1, 2), (3, 4)), turn((1, 2, 3, 4, 5), (6,))), [1.0, -2.0], group=9)
    assert len(samples) == 1
    assert samples[0].token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert samples[0].loss_mask.tolist() == [False, False, True, True, False, True]
    np.testing.assert_array_equal(samples[0].logprobs, np.float32([0.0, 0.0, -0.1, -0.2, 0.0, -0.1]))
    assert samples[0].advantages.tolist() == [0.0, 0.0, 1.0, 1.0, 0.0, -2.0]
    assert samples[0].versions.tolist() == [-1, -1, 7, 7, -1, 7]
    assert samples[0].turns is not None and samples[0].turns.tolist() == [-1, -1, 0, 0, -1, 1]
    assert samples[0].group == 9


def test_rewritten_history_starts_a_new_sample():
    samples = samples_from(trajectory(turn((1, 2), (3,)), turn((1, 9, 3, 5), (6,))), [1.0, 2.0], group=0)
    assert [s.token_ids.tolist() for s in samples] == [[1, 2, 3], [1, 9, 3, 5, 6]]


def test_each_branch_continues_its_own_stream():
    side = dataclasses.replace(turn((1, 2, 3, 8), (9,)), branch=1)  # forks from the main conversation
    more = dataclasses.replace(turn((1, 2, 3, 8, 9, 4), (5,)), branch=1)
    played = trajectory(turn((1, 2), (3,)), side, turn((1, 2, 3, 4), (6,)), more)
    samples = samples_from(played, [1.0, 2.0, 3.0, 4.0], group=0)
    assert [s.token_ids.tolist() for s in samples] == [[1, 2, 3, 4, 6], [1, 2, 3, 8, 9, 4, 5]]
    assert [s.advantages.tolist() for s in samples] == [[0, 0, 1, 0, 3], [0, 0, 0, 0, 2, 0, 4]]
    assert [s.turns.tolist() for s in samples] == [[-1, -1, 0, -1, 2], [-1, -1, -1, -1, 1, -1, 3]]


def test_turns_without_a_response_are_skipped():
    samples = samples_from(trajectory(turn((1,), ()), turn((1, 2), (3,))), [5.0, 1.0], group=0)
    assert [s.token_ids.tolist() for s in samples] == [[1, 2, 3]]
    assert samples_from(trajectory(turn((), ())), [0.0], group=0) == []


def test_a_response_without_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt is empty"):
        samples_from(trajectory(turn((), (3, 4))), [1.0], group=0)


def test_advantages_must_match_the_turns():
    with pytest.raises(ValueError, match="2 advantages for the 1 turns"):
        samples_from(trajectory(turn((1,), (2,))), [1.0, 2.0], group=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": (0.0, float("nan"), -1.0)}, r"logprobs\[1\] is nan"),
        ({"advantage": float("inf")}, "advantage"),
        ({"advantage": (0.0, 1.0)}, "2 entries for 3 tokens"),
        ({"loss_mask": (False, True)}, "2 entries for 3 tokens"),
        ({"loss_mask": (True, True, True)}, "first token"),
        ({"logprobs": (0.0, 0.5, -1.0)}, "positive"),
        ({"token_ids": (1, -2, 3)}, "negative"),
        ({"token_ids": (1,)}, "at least 2"),
    ],
)
def test_a_malformed_sample_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        sample(**changes)


def test_packing_lays_samples_end_to_end():
    batch = pack([sample(), sample(token_ids=(4, 5, 6), advantage=(9.0, 1.0, 2.0), group=3)])
    assert batch["tokens"]["ids"].tolist() == [1, 2, 3, 4, 5, 6]
    assert batch["tokens"]["advantages"].tolist() == [0.0, 0.5, 0.5, 0.0, 1.0, 2.0]
    assert batch["tokens"]["versions"].tolist() == [-1, 0, 0, -1, 0, 0]
    assert batch["samples"]["start"].tolist() == [0, 3]
    assert batch["samples"]["length"].tolist() == [3, 3]
    assert batch["samples"]["group"].tolist() == [0, 3]


def test_a_batch_without_a_token_to_learn_from_is_refused():
    with pytest.raises(EmptyBatchError):
        pack([])
    with pytest.raises(EmptyBatchError):
        pack([sample(loss_mask=(False, False, False))])


@pytest.mark.parametrize(
    ("part", "column", "value", "message"),
    [
        ("tokens", "logprobs", torch.tensor([0.0, float("nan"), -1.0]), "logprobs of token 1 is nan"),
        ("tokens", "advantages", torch.tensor([0.0, float("inf"), 0.0]), "advantages of token 1 is inf"),
        ("tokens", "ids", torch.tensor([1, 2, 300]), "vocabulary|model knows"),
        ("tokens", "ids", torch.tensor([1, 2, 3], dtype=torch.int32), "int32"),
        ("tokens", "loss_mask", torch.tensor([True, True, True]), "first token"),
        ("samples", "length", torch.tensor([2]), "tile"),
    ],
)
def test_a_malformed_batch_is_refused(part, column, value, message):
    batch = pack([sample()])
    batch[part][column] = value
    with pytest.raises(ValueError, match=message):
        check_batch(batch, vocab_size=256)


def test_a_sample_longer_than_a_microbatch_is_refused():
    with pytest.raises(ValueError, match="at most 2 fit"):
        check_batch(pack([sample()]), max_length=2)


def test_unpacked_samples_are_refused():
    with pytest.raises(TypeError, match=r"a list is not a batch. Build one with forge_trainers\.batch\.packing\.pack"):
        check_batch([sample()])
