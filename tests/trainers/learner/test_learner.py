"""The learner in separate processes: agreement, also with a custom loss, failures and publishing."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from learner_helpers import config, near_sampler
from safetensors.torch import load_file

from forge_agents.errors import ActorDiedError, ModelNotFoundError
from forge_agents.runtime import mesh
from forge_agents.types import EpisodeBatch
from forge_agents.weights import Subscriber, WeightStore
from forge_trainers.learner.client import Learner
from forge_trainers.learner.core import LearnerCore
from forge_trainers.losses import registry
from forge_trainers.losses.registry import TokenInputs, TokenLoss, find_loss, register_loss

pytestmark = pytest.mark.slow


@dataclass
class Session:
    """Metrics by step of two processes with a custom loss, until one of them is killed."""

    one: LearnerCore
    """The same learner in this process, as it was at the start."""
    batches: list[EpisodeBatch]
    folder: Path
    """Digests of the checkpoint after two steps and of an export after three."""
    steps: list[dict[str, float]]
    logprobs: torch.Tensor
    fetched: list[tuple[int, bool]]
    """Versions that a subscriber got, and whether they equal the model's file."""
    errors: dict[str, BaseException]
    after_the_bad_batch: dict[str, float]
    until_noticed_s: float


@pytest.fixture(scope="module")
def session(
    tiny_llama: Path, random_batch: Callable[..., EpisodeBatch], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Session]:
    folder = tmp_path_factory.mktemp("two")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_losses", dict(registry._losses))
        gspo = find_loss("gspo").function

        @register_loss("mine", reduction="sequence_mean", clip=(0.05, 0.05), sequence_ratio=True)
        def mine(inputs: TokenInputs) -> TokenLoss:
            result = gspo(inputs)
            return TokenLoss(2.0 * result.loss_S, result.clipped_S)

        settings = config(tiny_llama, loss="mine", entropy_coef=0.1)
        one = LearnerCore(settings)
        batches = [near_sampler(random_batch(groups=4, seed=seed), one, seed) for seed in range(3)]
        stored = load_file(tiny_llama / "model.safetensors")

        async def run() -> Session:
            async with mesh.session():
                started = await Learner.start_together({"hero": settings}, name="hero", world_size=2, timeout_s=250)
                learner = started["hero"]
                with pytest.raises(RuntimeError) as unstored:
                    await learner.publish()
                store = await WeightStore.start(timeout_s=250)
                await learner.use_store(store.ref)
                subscriber, fetched = Subscriber(store.ref, "hero"), []

                async def compare() -> None:
                    async with subscriber.load() as weights:
                        same = weights.tensors.keys() == stored.keys() and all(
                            weights.tensors[name].equal(value) for name, value in stored.items()
                        )
                    fetched.append((weights.version, same))

                assert await learner.publish() == 0
                await compare()
                steps = [await learner.train_step(batch, timeout_s=250) for batch in batches[:2]]
                await learner.save(folder / "step-2", timeout_s=250)
                steps.append(await learner.train_step(batches[2], timeout_s=250))
                assert await learner.publish() == learner.version == 3
                await compare()
                await learner.export(folder / "export", timeout_s=250)
                logprobs = await learner.logprobs(batches[0])
                bad = random_batch()
                bad["tokens"]["logprobs"][25] = float("nan")
                with pytest.raises(ValueError) as refused:  # noqa: PT011  # the test looks at it
                    await learner.train_step(bad)
                after = await learner.train_step(random_batch())
                logs = mesh.log_folder("hero")
                assert logs is not None
                os.kill(int((logs / "1.pid").read_text()), signal.SIGKILL)
                started = time.monotonic()
                with pytest.raises((ActorDiedError, RuntimeError)):
                    await learner.train_step(random_batch(), timeout_s=250)
                noticed_s = time.monotonic() - started
                await learner.stop()
                await store.stop()
                errors = {"bad batch": refused.value, "no store": unstored.value}
                return Session(one, batches, folder, steps, logprobs, fetched, errors, after, noticed_s)

        yield asyncio.run(run())


def test_two_sharded_processes_compute_what_one_does_with_the_users_loss(session):
    one, two_logprobs = session.one, float(session.logprobs.sum())
    for batch, result in zip(session.batches, session.steps, strict=True):
        expected = one.train_step(batch)
        assert result["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        for name, rel in (("grad_norm", 1e-4), ("entropy", 1e-5), ("clip_fraction", 1e-4)):
            assert result[name] == pytest.approx(expected[name], rel=rel, abs=1e-6), name
    assert two_logprobs == pytest.approx(float(one.logprobs(session.batches[0]).sum()), rel=1e-5)
    exported = LearnerCore(config(session.folder / "export"))  # stored in bfloat16
    assert two_logprobs == pytest.approx(float(exported.logprobs(session.batches[0]).sum()), rel=1e-2)
    assert one.load(session.folder / "step-2") == 2  # what two ranks saved, one continues
    assert one.train_step(session.batches[2])["loss"] == pytest.approx(session.steps[2]["loss"], abs=1e-6)


def test_failures_come_back_at_once_and_by_name(session, tiny_llama, tmp_path):
    async def run() -> None:
        async with mesh.session():
            with pytest.raises(ModelNotFoundError, match="config.json is missing"):
                await Learner.start_together({"m": config(tmp_path)}, timeout_s=250)
            shutil.copytree(tiny_llama, tmp_path / "other")
            stored = json.loads((tiny_llama / "config.json").read_text())
            (tmp_path / "other" / "config.json").write_text(json.dumps({**stored, "architectures": ["Mystery"]}))
            with pytest.raises(ValueError, match="'Mystery' cannot be trained"):  # said by the learner's process
                await Learner.start_together({"m": config(tmp_path / "other")}, timeout_s=250)

    asyncio.run(run())
    assert "logprobs of token 25 is nan" in str(session.errors["bad batch"])
    assert session.after_the_bad_batch["version"] == 4
    assert "without a store" in str(session.errors["no store"])
    assert session.until_noticed_s < 100


def test_published_versions_reach_a_subscriber(session):
    """Two ranks publish their parts together. A learner that started without a store receives one."""
    assert session.fetched == [(0, True), (3, False)]
