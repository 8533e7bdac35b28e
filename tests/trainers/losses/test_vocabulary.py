"""Two ranks share a vocabulary: each keeps its part of the logits, and all comes out as on one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from forge_agents.models.sizes import ModelSize
from forge_trainers.learner.degrees import check_degrees
from forge_trainers.learner.plan import LearnerPlan

RANKS = """
import multiprocessing, sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forge_trainers.learner.config import LearnerConfig
from forge_trainers.losses.policy_loss import PolicyLoss, logprobs_of

TOKENS = 40


class Widest(TorchDispatchMode):
    # the most logits of one token that any plain tensor has
    found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, torch.Tensor) and not isinstance(one, DTensor) and TOKENS in one.shape[:-1]:
                self.found = max(self.found, one.shape[-1])
        return out


def rank_of(rank, meeting):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for vocabulary, temperature, dtype in ((96, 1.0, torch.float32), (51, 0.7, torch.float32), (64, 1, torch.bfloat16)):
        torch.manual_seed(vocabulary)
        hidden, head = torch.randn(1, TOKENS, 16), torch.randn(vocabulary, 16) / 2
        teacher = torch.randn(vocabulary, 16) / 2
        labels = torch.randint(vocabulary, (1, TOKENS))
        labels[0, :3] = torch.tensor([0, -(-vocabulary // 2) - 1, -(-vocabulary // 2)])  # at the cut and beside it
        columns = {
            "sampler_logprobs": -5 - torch.rand(1, TOKENS), "advantages": torch.randn(1, TOKENS),
            "valid": torch.arange(TOKENS)[None] < TOKENS - 4,
        }

        def step(hidden, head, ban, teacher):
            # log-probabilities, entropies, loss, metrics, gradients of the loss and of entropies
            hidden.requires_grad_(), head.requires_grad_()
            logits = (hidden @ head.mT).to(dtype)
            if ban is not None:
                logits = logits.masked_fill(ban, float("-inf"))
            policy = PolicyLoss(LearnerConfig(entropy_coef=0.1).loss_settings)
            policy.temperature = temperature
            loss, metrics = policy(logits, labels, 30.0, **columns)
            of_loss = torch.autograd.grad(loss, (hidden, head), retain_graph=True)
            logprobs, entropies = logprobs_of(logits, labels, temperature=temperature)
            of_entropy = torch.autograd.grad(entropies.sum(), (hidden, head), retain_graph=True)
            policy.reference_head = lambda hidden: (hidden @ teacher.mT).to(dtype)
            divergences = policy._exact_kl(logits, hidden) if ban is None else logprobs
            of_divergence = torch.autograd.grad((divergences * labels).sum(), (hidden, head))
            return [logprobs, entropies, loss, divergences, *metrics.values(), *of_loss, *of_entropy, *of_divergence]

        for banned in (False, True):  # all tokens of the first rank but those that were sampled
            ban = None
            if banned:
                ban = torch.zeros(1, TOKENS, vocabulary, dtype=torch.bool)
                ban[:, ::2, : vocabulary // 2] = True
                ban.scatter_(2, labels[..., None], False)
            expected = step(hidden.clone(), head.clone(), ban, teacher)
            own = distribute_tensor(head.clone(), mesh, [Shard(0)])
            assert own.to_local().shape[0] in {vocabulary // 2, -(-vocabulary // 2)}
            whole = DTensor.from_local(hidden.clone(), mesh, [Replicate()])
            own_ban = None if ban is None else distribute_tensor(ban, mesh, [Shard(2)])
            with Widest() as widest:
                found = step(whole, own, own_ban, distribute_tensor(teacher.clone(), mesh, [Shard(0)]))
                assert widest.found == own.to_local().shape[0], (widest.found, vocabulary)
            least = 1e-5 if dtype is torch.float32 else 5e-2
            for a, b in zip(found, expected, strict=True):
                a, most = a.full_tensor() if isinstance(a, DTensor) else a, max(1.0, float(b.abs().max()))
                torch.testing.assert_close(a / most, b / most, rtol=0, atol=least)
            if dtype is torch.bfloat16:  # nothing is rounded on the way from the same logits
                torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    dist.barrier()
    dist.destroy_process_group()


torch.set_num_threads(1)
ranks = [multiprocessing.get_context("fork").Process(target=rank_of, args=(rank, sys.argv[1])) for rank in range(2)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join(240)
sys.exit(any(rank.exitcode != 0 for rank in ranks))
"""


def test_vocabulary_that_ranks_cannot_share_evenly_is_refused():
    size = replace(ModelSize.named("8b"), vocab=50257)
    with pytest.raises(ValueError, match=r"learner\.tp=2 does not divide the model's vocab_size=50257"):
        check_degrees(LearnerPlan(tp=2), size)


@pytest.mark.slow
def test_ranks_that_share_a_vocabulary_never_see_all_of_it_and_compute_the_same(tmp_path):
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", RANKS, str(tmp_path / "meeting")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
