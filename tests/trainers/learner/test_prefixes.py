"""Attention over shared prefixes with a GPU's kernel equals attention over whole samples, forward and backward.

There is no GPU here. PyTorch's variable-length attention runs as it is; below it, in place of FlashAttention, is the
same algorithm written out for the CPU, whose backward pass knows of the forward pass what the kernel's knows: each
query's output and log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import Library

from forge_agents.types import EpisodeBatch
from forge_trainers.batch.layout import Span, build_row
from forge_trainers.learner import core as learner_core
from forge_trainers.learner import model as learner_model
from forge_trainers.learner import prefixes, titan
from forge_trainers.learner.core import LearnerCore
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.learner.prefixes import PrefixAttention, attend, plan_prefixes

Blocks = list[tuple[int, list[int]]]


def dense_scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    """[N, m, s], the last query at the last key where `causal`, as the kernel has it."""
    scores = torch.einsum("mnh,snh->nms", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    m, s = scores.shape[1:]
    later = torch.ones(m, s, dtype=torch.bool).triu(s - m + 1)
    return scores.masked_fill(later, float("-inf")) if causal else scores


def pieces(ends_q: torch.Tensor, ends_k: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    for i in range(ends_q.numel() - 1):
        yield slice(int(ends_q[i]), int(ends_q[i + 1])), slice(int(ends_k[i]), int(ends_k[i + 1]))


def forward(  # noqa: PLR0917  (PyTorch's arguments)
    q: Any, k: Any, v: Any, ends_q: Any, ends_k: Any, max_q: int, max_k: int, dropout: float, causal: bool,
    debug: bool, *, scale: float, window_size_left: int, window_size_right: int, **_: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    assert (window_size_left, window_size_right) == (-1, 0 if causal else -1)
    assert max(ends_q.diff()) == max_q and max(ends_k.diff()) == max_k and ends_q.dtype == torch.int32
    assert ends_q[-1] == len(q) and ends_k[-1] == len(k) == len(v)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.promote_types(q.dtype, torch.float32))
    for at, to in pieces(ends_q, ends_k):
        scores = dense_scores(q[at].to(lse.dtype), k[to].to(lse.dtype), causal, scale)
        lse[:, at] = scores.logsumexp(-1)
        values = v[to].to(lse.dtype).repeat_interleave(q.shape[1] // k.shape[1], 1)
        out[at] = torch.einsum("nms,snh->mnh", scores.softmax(-1), values).to(out.dtype)
    none = torch.empty(0)
    return out, lse, none, none.clone(), none.clone()


def backward(  # noqa: PLR0917  (PyTorch's arguments)
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, ends_q: Any, ends_k: Any, max_q: int, max_k: int,
    dropout: float, causal: bool, rng: Any, unused: Any, *, scale: float, **_: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    times, kind = q.shape[1] // k.shape[1], lse.dtype
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for at, to in pieces(ends_q, ends_k):
        q_, g, o = (x[at].to(kind) for x in (q, grad, out))
        k_, v_ = (x[to].to(kind).repeat_interleave(times, 1) for x in (k, v))
        probs = (dense_scores(q_, k[to].to(kind), causal, scale) - lse[:, at, None]).exp()
        dprobs = torch.einsum("mnh,snh->nms", g, v_)
        dscores = probs * (dprobs - (g * o).sum(-1).T[..., None]) * scale
        dq[at] = torch.einsum("nms,snh->mnh", dscores, k_).to(q.dtype)
        for into, of, what in ((dk, dscores, q_), (dv, probs, g)):
            each = torch.einsum("nms,mnh->snh", of, what)
            into[to] = each.unflatten(1, (-1, times)).sum(2).to(into.dtype)
    return dq, dk, dv


@pytest.fixture(scope="module", autouse=True)
def kernel() -> Iterator[None]:
    library = Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield
    library._destroy()


def row_of(blocks: Blocks) -> tuple[list[Span], list[list[int]]]:
    """Spans of blocks given as (prefix length, own lengths), and the row positions of each whole sample."""
    spans, samples, at = list[Span](), list[list[int]](), 0
    for prefix, owns in blocks:
        start = at
        if prefix:
            spans.append(Span(start=at, length=prefix))
            samples.append([*range(at, at + prefix)])
            at += prefix
        for own in owns:
            seen = {"prefix_start": start, "prefix_length": prefix} if prefix else {}
            spans.append(Span(start=at, length=own, **seen))
            samples.append([*range(start, start + prefix), *range(at, at + own)])
            at += own
    return spans, samples


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, samples: list[list[int]], scale: float) -> torch.Tensor:
    """Plain causal attention of one sample after the other, each with its own copy of the prefix."""
    out = torch.zeros_like(q)
    for sample in samples:
        parts = (x[sample].transpose(0, 1)[None] for x in (q, k, v))
        found = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True, scale=scale)
        out = out.index_copy(0, torch.tensor(sample, dtype=torch.int64), found[0].transpose(0, 1))
    return out


blocks = st.lists(
    st.tuples(st.integers(0, 40), st.lists(st.integers(0, 25), min_size=1, max_size=5)), min_size=1, max_size=4
).filter(lambda found: sum(prefix + sum(owns) for prefix, owns in found) > 0)


@settings(max_examples=60, deadline=None)
@given(blocks=blocks, heads=st.sampled_from([(4, 4), (6, 2), (4, 1)]), kind=st.sampled_from(["float64", "float32"]),
       seed=st.integers(0, 999))  # fmt: skip
def test_shared_prefixes_give_the_outputs_and_gradients_of_whole_samples(
    blocks: Blocks, heads: tuple[int, int], kind: str, seed: int
) -> None:
    spans, samples = row_of(blocks)
    size, (num_queries, num_keys) = sum(span.length for span in spans), heads
    draw = torch.Generator().manual_seed(seed)
    shapes = ((size, n, 8) for n in (num_queries, num_keys, num_keys, num_queries))
    *inputs, grad = (torch.randn(shape, generator=draw, dtype=getattr(torch, kind)) for shape in shapes)
    inputs = [x.requires_grad_() for x in inputs]
    ours = attend(*inputs, plan_prefixes(spans, "cpu"), scale=0.7)
    theirs = whole(*inputs, samples, 0.7)
    for a, b in zip(
        (ours, *torch.autograd.grad(ours, inputs, grad)),
        (theirs, *torch.autograd.grad(theirs, inputs, grad)),
        strict=True,
    ):
        assert a.dtype == b.dtype
        assert (a - b).norm() <= (1e-12 if kind == "float64" else 1e-5) * b.norm()


def test_in_bfloat16_merging_rounds_no_more_than_the_kernel_does() -> None:
    spans, samples = row_of([(40, [3, 7, 30]), (0, [9]), (64, [1, 2, 25])])
    torch.manual_seed(0)
    exact = [torch.randn(spans[-1].start + 25, n, 16).bfloat16().double().requires_grad_() for n in (4, 2, 2)]
    rounded = [x.detach().bfloat16().requires_grad_() for x in exact]
    grad = torch.randn(len(exact[0]), 4, 16).bfloat16()
    ours, theirs = attend(*rounded, plan_prefixes(spans, "cpu")), whole(*exact, samples, 0.25)
    for a, b in zip(
        (ours, *torch.autograd.grad(ours, rounded, grad)),
        (theirs, *torch.autograd.grad(theirs, exact, grad.double())),
        strict=True,
    ):
        assert (a - b).norm() < 2**-8 * b.norm()


def test_a_prefix_is_one_sequence_however_many_see_it() -> None:
    spans, _ = row_of([(5, [3, 0, 2]), (0, [4]), (6, [1, 1])])
    plan = plan_prefixes([*spans, Span(start=22, length=3)], "cpu")
    assert plan.spans.cu_seq_q.tolist() == [0, 5, 8, 10, 14, 20, 21, 22, 25]
    assert plan.prefixes.cu_seq_q.tolist() == [0, 5, 7] and plan.prefixes.cu_seq_k.tolist() == [0, 5, 11]
    assert (plan.prefixes.max_q, plan.prefixes.max_k) == (5, 6)
    assert plan.query_C is not None and plan.query_C.tolist() == [5, 6, 7, 8, 9, 20, 21]
    assert plan.key_P is not None and plan.key_P.tolist() == [*range(5), *range(14, 20)]
    assert plan_prefixes([Span(start=0, length=4)], "cpu")[1:] == (None, None, None)


def test_where_nothing_is_shared_it_is_titans_own_attention() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(1, 30, n, 8) for n in (4, 2, 2)]
    positions = torch.cat([torch.arange(12), torch.arange(18)])[None]
    metadata = titan.create_varlen_metadata_for_document(positions)
    options = {"scale": 0.5, "enable_gqa": True}
    theirs = titan.VarlenAttention.Config().build()(*inputs, attention_masks=metadata, **options)
    plan = plan_prefixes([Span(start=0, length=12), Span(start=12, length=18)], "cpu")
    ours = PrefixAttention.Config().build()(*inputs, attention_masks=plan, **options)
    assert torch.equal(ours, theirs) and ours.dtype == torch.float32


@pytest.mark.parametrize("recomputed", ["none", "selective", "full"])
def test_a_learner_with_it_learns_what_it_would_without_sharing(
    tiny_llama: Path, random_batch: Callable[..., EpisodeBatch], monkeypatch: pytest.MonkeyPatch, recomputed: Any
) -> None:
    monkeypatch.setattr(learner_model, "PackedAttention", PrefixAttention)
    monkeypatch.setattr(learner_core, "plan_attention", lambda spans: plan_prefixes(spans, "cpu"))
    monkeypatch.setattr(prefixes, "_KERNEL_DTYPE", torch.float32)
    batch = random_batch()
    found = []
    for share in (True, False):
        core = LearnerCore(
            LearnerPlan(model=str(tiny_llama), compute_dtype="float32", threads=1, lr=1e-3, share_prefixes=share,
                          activation_checkpointing=recomputed, max_tokens_per_microbatch=200)
        )  # fmt: skip
        before = core.logprobs(batch)
        metrics = core.train_step(batch)
        found.append((before, metrics, core.logprobs(batch)))
    (before, metrics, after), (before_alone, alone, after_alone) = found
    assert metrics["positions"] < 0.7 * alone["positions"]
    assert (before - before_alone).norm() < 1e-5 * before_alone.norm()
    assert metrics["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)
    assert (after - after_alone).norm() < 1e-4 * after_alone.norm()
    assert (after - before).norm() > 1e-3 * before.norm()


def test_a_compiled_block_may_hold_it(random_batch: Callable[..., EpisodeBatch]) -> None:
    spans, _ = row_of([(12, [3, 7]), (5, [4, 4])])
    torch.manual_seed(0)
    inputs = [torch.randn(35, n, 8, requires_grad=True) for n in (4, 2, 2)]
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    plan = plan_prefixes(spans, "cpu")
    eager, ours = (call(*inputs, plan, scale=0.5) for call in (attend, compiled))
    grad = torch.randn_like(eager)
    for a, b in zip(
        (ours, *torch.autograd.grad(ours, inputs, grad)),
        (eager, *torch.autograd.grad(eager, inputs, grad)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_padding_and_ranks_without_samples_are_spans_of_their_own(random_batch: Callable[..., EpisodeBatch]) -> None:
    row = build_row(random_batch(), [], multiple_of=16)
    assert plan_prefixes(row.spans, "cpu").spans.cu_seq_q.tolist() == [0, 16]


def test_sliding_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="does not support sliding windows, and this model has one of 8 positions"):
        PrefixAttention.Config(window_size=(7, 0)).build()
