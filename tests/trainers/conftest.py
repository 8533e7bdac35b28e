"""Batches for the learner's tests, and a learner without processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_processes import LocalLearner

from forge_agents.runtime import machine
from forge_agents.types import EpisodeBatch
from forge_trainers.batch.packing import Sample, pack
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.offline import trainer as offline
from forge_trainers.records import plots, run_folder

HERE = str(Path(__file__).parent)
sys.path[:0] = [HERE] if HERE not in sys.path else []

from batch_helpers import sample_of  # noqa: E402

VOCAB = 256


def _random_samples(
    *, groups: int = 3, siblings: int = 4, prompt: int = 20, longest: int = 16, seed: int = 0
) -> list[Sample]:
    """Groups that share a prompt, responses of 1 to `longest` tokens, plausible logprobs."""
    rng = torch.Generator().manual_seed(seed)
    samples = []
    for group in range(groups):
        prompt_ids = torch.randint(0, VOCAB, (prompt,), generator=rng).tolist()
        for _ in range(siblings):
            n = int(torch.randint(1, longest + 1, (), generator=rng))
            ids = (*prompt_ids, *torch.randint(0, VOCAB, (n,), generator=rng).tolist())
            logprobs = (0.0,) * prompt + tuple((-5.0 - torch.rand(n, generator=rng)).tolist())
            advantage = float(torch.randn((), generator=rng))
            samples.append(sample_of(ids, n, logprobs=logprobs, advantage=advantage, group=group))
    return samples


@pytest.fixture(scope="module", autouse=True)
def fast_bfloat16() -> Iterator[None]:
    """Defaults and estimates of memory in this process are those of a processor with bfloat16 instructions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "processor_flags", lambda: frozenset(["avx512_bf16"]))
        yield


_pictures: dict[str, bytes] = {}


class _Calls(list[tuple[str, Any, Any]]):
    """The calls of methods of axes."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **options: self.append((name, args, options))

    @property
    def kind(self) -> list[Any]:
        """The calls without their numbers: only whether there are several, and whether all are finite."""
        numbers = [[(np.size(x) > 1, bool(np.isfinite(x).all())) for x in args] for _, args, _ in self]
        return [(name, options, number) for (name, _, options), number in zip(self, numbers, strict=True)]


@contextmanager
def _picture_drawn_once(target: Path, **options: Any) -> Iterator[Any]:
    """Like ``plots.picture``, which takes a third of a short run. A picture with equal texts is copied."""
    calls = _Calls()
    yield calls
    if (key := repr((options, calls.kind))) not in _pictures:
        with plots.picture(target, **options) as axes:
            for name, args, more in calls:
                getattr(axes, name)(*args, **more)
        _pictures[key] = target.read_bytes()
    target.write_bytes(_pictures[key])


@pytest.fixture(scope="module", autouse=True)
def _curves_drawn_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs draw curves of one kind once. Tests of records draw them all."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name != "records":
            patch.setattr(run_folder, "picture", _picture_drawn_once)
        yield


@pytest.fixture(scope="session")
def random_batch() -> Callable[..., EpisodeBatch]:
    """``random_batch(groups=3, siblings=4, prompt=20, longest=16, seed=0)``: a batch for the tiny models."""
    return lambda **options: pack(_random_samples(**options))


@pytest.fixture
def learner_here(monkeypatch: pytest.MonkeyPatch) -> list[LocalLearner]:
    """Offline trainers start their learners in this process. Yields these learners in order."""
    started: list[LocalLearner] = []

    class Starter(LocalLearner):
        def __init__(self, config: LearnerPlan, *others: Any) -> None:
            super().__init__(config, *others)
            started.append(self)

    monkeypatch.setattr(offline, "Learner", Starter)
    return started
