"""Norms, SwiGLU and embeddings of our own against TorchTitan's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from forge_trainers.learner import lean, titan

_INIT = {"weight": partial(torch.nn.init.normal_, std=0.5)}


def layers(kind: str) -> tuple[Any, Any]:
    """TorchTitan's layer of 96 channels and ours, of the same weights."""
    if kind == "norm":
        theirs: Any = titan.RMSNorm.Config(normalized_shape=96, eps=1e-5, param_init=_INIT)
        ours: Any = lean.RMSNorm.Config(normalized_shape=96, eps=1e-5, param_init=_INIT)
    else:
        theirs = titan.make_ffn_config(dim=96, hidden_dim=128, w1_param_init=_INIT, w2w3_param_init=_INIT)
        ours = lean.FeedForward.Config(w1=theirs.w1, w2=theirs.w2, w3=theirs.w3)
    built = theirs.build(), ours.build()
    built[0].init_states()
    built[1].load_state_dict(built[0].state_dict())
    return built


def run(layer: Any, dtype: torch.dtype) -> tuple[list[torch.Tensor], int]:
    """Output and all gradients, and bytes kept for the backward pass that are not the layer's weights."""
    rng = torch.Generator().manual_seed(1)
    layer = layer.to(dtype)
    x = torch.randn(1, 50, 96, generator=rng).to(dtype).requires_grad_()
    own = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that no other tensor gets its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(x)
    y.backward(torch.randn(y.shape, generator=rng).to(dtype))
    return [y.detach(), x.grad, *(weight.grad for weight in layer.parameters())], sum(s.nbytes() for s in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["norm", "feed_forward"])
def test_lean_layers_compute_what_torchtitan_s_do_and_keep_less(kind, dtype):
    (expected, before), (result, after) = (run(layer, dtype) for layer in layers(kind))
    for ours, theirs in zip(result, expected, strict=True):
        assert ours.dtype == theirs.dtype == dtype
        close = 1e-6 if dtype == torch.float32 else 2**-8
        assert float((ours - theirs).float().norm()) <= close * float(theirs.float().norm())
    assert after < {"norm": 0.55, "feed_forward": 0.85}[kind] * before


def test_a_token_that_occurs_often_gets_the_sum_of_its_gradients():
    """In bfloat16, added one by one, 1,000 gradients of 0.25 make 64."""
    config = lean.Embedding.Config(num_embeddings=50, embedding_dim=8)
    layer, exact = config.build().to(torch.bfloat16), titan.Embedding.Config(num_embeddings=50, embedding_dim=8).build()
    ids = torch.cat([torch.full((1000,), 7), torch.arange(20)])[None]
    exact.weight.data.copy_(layer.weight)
    assert torch.equal(layer(ids), exact(ids).bfloat16())
    grad = torch.full((1, 1020, 8), 0.25)
    layer(ids).backward(grad.bfloat16())
    exact(ids).backward(grad)
    assert layer.weight.grad is not None and torch.equal(layer.weight.grad, exact.weight.grad.bfloat16())
    layer.weight.requires_grad_(False)
    assert not layer(ids).requires_grad
