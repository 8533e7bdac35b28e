"""On a machine with a GPU: attention over shared prefixes with PyTorch's kernel equals that over whole samples."""

from __future__ import annotations

import pytest
import torch

from forge_agents.runtime.machine import visible_gpus
from forge_trainers.batch.layout import Span

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not visible_gpus(), reason="no GPU is visible here"),
]


@pytest.mark.parametrize("heads", [(8, 8), (14, 2)], ids=str)
def test_the_kernels_outputs_and_gradients_are_those_of_whole_samples(heads: tuple[int, int]) -> None:
    from forge_trainers.learner import titan
    from forge_trainers.learner.prefixes import PrefixAttention, plan_prefixes

    prefix, owns = 300, (70, 1, 513)
    spans, at = [Span(start=0, length=prefix)], prefix
    for own in owns:
        spans.append(Span(start=at, length=own, prefix_start=0, prefix_length=prefix))
        at += own
    spans.append(Span(start=at, length=40))
    torch.manual_seed(0)
    inputs = [
        torch.randn(1, at + 40, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (heads[0], heads[1], heads[1])
    ]
    grad = torch.randn_like(inputs[0])
    attention = PrefixAttention.Config().build()  # first: it may choose another implementation of the kernel
    enable_gqa = heads[0] != heads[1]
    ours = attention(*inputs, attention_masks=plan_prefixes(spans, "cuda"), enable_gqa=enable_gqa)

    theirs = torch.zeros_like(ours)
    plain = titan.VarlenAttention.Config().build()
    for span in spans:
        places = [*range(span.prefix_start, span.prefix_start + span.prefix_length)]
        places += range(span.start, span.start + span.length)
        place = torch.tensor(places, device="cuda")
        positions = torch.arange(len(places), device="cuda")[None]
        metadata = titan.create_varlen_metadata_for_document(positions)
        found = plain(*(x[:, place] for x in inputs), attention_masks=metadata, enable_gqa=enable_gqa)
        theirs = theirs.index_copy(1, place[span.prefix_length :], found[:, span.prefix_length :])
    for a, b in zip(
        (ours, *torch.autograd.grad(ours, inputs, grad)),
        (theirs, *torch.autograd.grad(theirs, inputs, grad)),
        strict=True,
    ):
        assert (a.float() - b.float()).norm() < 0.02 * b.float().norm()
