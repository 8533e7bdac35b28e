"""Gated delta rule and causal convolution over packed rows in plain PyTorch (Gated DeltaNet, arXiv 2412.06464).

Each value head has a state S, a matrix that maps keys to values. A token decays the state, corrects the value of its
key, and reads the value of its query::

    S = exp(g) S;  S = S + beta k (v - k S);  o = q S

Tokens are computed in chunks. The correction of a token depends on those of earlier tokens of its chunk, which is a
triangular system. A chunk needs the state at the end of the chunk before it: of the same span, or of the shared prefix
that the span continues. Chunks with equally many chunks before them, a level, are computed together.

Axes: T positions of the row, n chunks of c slots, K key heads, R value heads per key head, V = K R value heads, H size
of a key, J size of a value, D = 2 K H + V J channels, W width of the convolution, h = c + W - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from forge_trainers.batch.layout import Span
from forge_trainers.learner.memory import DELTA_HEADS

_CHUNK = 32
"""Number of slots of a chunk. With 16 or 64, long samples take as long, and short ones have more padding with 64."""
_EPS = 1e-6
"""Added to the squared norm of queries and keys, as in transformers, fla and vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaPlan:
    """Order of computation of a row, made once and used by every layer."""

    slot_nh: torch.Tensor
    """int64 [n, h], row position of each slot, after those of the W - 1 tokens before the chunk. T for padding and for
    what precedes a sample. Chunks are sorted by level."""
    place_T: torch.Tensor
    """int64 [T], index of each position among the n c slots."""
    before: tuple[torch.Tensor, ...]
    """int64 of each level but the first: for each of its chunks, the chunk before it, as index into the level before.
    """

    def to(self, device: torch.device) -> DeltaPlan:
        """The plan on `device`."""
        before = tuple(index.to(device) for index in self.before)
        return replace(self, slot_nh=self.slot_nh.to(device), place_T=self.place_T.to(device), before=before)


def plan_delta(spans: Sequence[Span], width: int) -> DeltaPlan:
    """Divide the spans of a row, which tile its positions, into chunks. `width` is that of the convolution.

    Raises:
        ValueError: A span continues a part of a span, whose state at this point is not computed.
    """
    ends = {(span.start, span.length): span for span in spans}
    if partial := [part for span in spans for part in span.seen if part not in ends]:
        raise ValueError(f"positions {partial[0]} (start, length) precede a span and are no whole span of the row")
    num_positions = sum(span.length for span in spans)
    levels: list[list[tuple[torch.Tensor, int]]] = []  # slots of each chunk, and the index of the chunk before it
    last: dict[tuple[int, int], tuple[int, int]] = {}  # level and index of the last chunk of a span
    for span in sorted(spans, key=lambda span: len(span.seen)):
        level, index = last[span.seen[-1]] if span.seen else (-1, -1)
        seen = [torch.arange(start, start + length) for start, length in span.seen]
        own = torch.arange(span.start, span.start + span.length)
        past = torch.cat([own.new_full((width - 1,), num_positions), *seen])[-(width - 1) :]
        padded = torch.cat([past, own, own.new_full((-len(own) % _CHUNK,), num_positions)])
        for slots in padded.unfold(0, _CHUNK + width - 1, _CHUNK):
            level += 1
            if level == len(levels):
                levels.append([])
            levels[level].append((slots, index))
            index = len(levels[level]) - 1
        last[span.start, span.length] = level, index
    slot_nh = torch.stack([slots for level in levels for slots, _ in level])
    place_T = torch.empty(num_positions + 1, dtype=torch.int64)
    slots = slot_nh[:, width - 1 :].flatten()
    place_T[slots] = torch.arange(len(slots))
    return DeltaPlan(
        slot_nh=slot_nh,
        place_T=place_T[:-1],
        before=tuple(torch.tensor([index for _, index in level]) for level in levels[1:]),
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch does not type it
def mix(  # noqa: PLR0917  (the tensors of a layer)
    x_TD: torch.Tensor, conv_DW: torch.Tensor, g_TV: torch.Tensor, beta_TV: torch.Tensor, plan: DeltaPlan,
    heads: tuple[int, int], sizes: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    """Convolution, SiLU and gated delta rule: [T, V, J], of the dtype of `x_TD`.

    The computation is in float32. Nothing but its inputs is kept for the backward pass, which repeats it.

    Args:
        x_TD: Queries, keys and values before the convolution.
        conv_DW: Weights of the convolution, one filter per channel.
        g_TV: Logarithm of the decay, at most 0.
        beta_TV: Rate of the correction, in (0, 1).
        plan: The row's plan.
        heads: K and V.
        sizes: H and J.
    """
    (num_keys, num_values), (key_size, value_size) = heads, sizes
    count = next(n for n in range(min(DELTA_HEADS, num_keys), 0, -1) if num_keys % n == 0)
    values = num_values // num_keys * count
    widths = [count * key_size] * (2 * num_keys // count) + [values * value_size] * (num_keys // count)
    x_parts, conv_parts = (torch.split(tensor, widths, dim=dim) for tensor, dim in ((x_TD, 1), (conv_DW, 0)))
    outputs = []
    for i, (g, beta) in enumerate(
        zip(torch.split(g_TV, values, dim=1), torch.split(beta_TV, values, dim=1), strict=True)
    ):
        of_heads = slice(i, None, num_keys // count)  # their queries, keys and values
        x, conv = torch.cat(x_parts[of_heads], dim=1), torch.cat(conv_parts[of_heads])
        outputs.append(_Mix.apply(x, conv, g, beta, plan, (count, values), sizes))  # type: ignore[no-untyped-call]
    return torch.cat(outputs, dim=1)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        *tensors, plan, heads, sizes = args
        ctx.save_for_backward(*tensors)
        ctx.rest = plan, heads, sizes
        with _disable_current_modes():  # selective activation checkpointing would keep every product
            return _mixed(*args)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[:4], strict=True)
        inputs = [x.detach().requires_grad_(need) for x, need in needed]
        with torch.enable_grad():
            output = _mixed(*inputs, *ctx.rest)
        gradients = iter(torch.autograd.grad(output, [x for x in inputs if x.requires_grad], grad))
        return *(next(gradients) if x.requires_grad else None for x in inputs), None, None, None


def _mixed(  # noqa: PLR0917
    x_TD: torch.Tensor, conv_DW: torch.Tensor, g_TV: torch.Tensor, beta_TV: torch.Tensor, plan: DeltaPlan,
    heads: tuple[int, int], sizes: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    num_keys, num_values = heads
    key_size, value_size = sizes
    mixed_ncD = _Convolution.apply(_gathered(x_TD, plan.slot_nh), conv_DW)  # type: ignore[no-untyped-call]
    x_ncD = F.silu(mixed_ncD).to(x_TD.dtype).float()  # rounded, as in the sampler
    channels = [num_keys * key_size, num_keys * key_size, num_values * value_size]
    query, key, value = torch.split(x_ncD, channels, dim=-1)
    q_nKcH, k_nKcH = (_normalized(_unflatten(x, num_keys, key_size).transpose(1, 2)) for x in (query, key))
    v_nKRcJ = _unflatten(value, num_keys, -1, value_size).permute(0, 2, 3, 1, 4)
    # padding has neither decay nor correction
    g_nKRc, beta_nKRc = (
        _unflatten(_gathered(x, plan.slot_nh[:, -_CHUNK:]).float(), num_keys, -1).permute(0, 2, 3, 1)
        for x in (g_TV, beta_TV)
    )
    out_nKRcJ = _delta_rule(q_nKcH * key_size**-0.5, k_nKcH, v_nKRcJ, g_nKRc, beta_nKRc, plan.before)
    out = out_nKRcJ.permute(0, 3, 1, 2, 4).reshape(-1, num_values, value_size)
    return out[plan.place_T].to(x_TD.dtype)


class _Convolution(torch.autograd.Function):
    """Causal convolution of the slots of each chunk, [n, c, D] in float32, with less memory traffic than autograd's."""

    @staticmethod
    def forward(ctx: Any, x_nhD: torch.Tensor, conv_DW: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_nhD, conv_DW)
        wide, weights = x_nhD.float(), conv_DW.float().unbind(-1)
        result = wide[:, :_CHUNK] * weights[0]
        for w, weight in enumerate(weights[1:], start=1):
            result.addcmul_(wide[:, w : w + _CHUNK], weight)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x_nhD, conv_DW = ctx.saved_tensors
        x_grad = grad.new_zeros(x_nhD.shape)
        for w, weight in enumerate(conv_DW.float().unbind(-1)):
            x_grad[:, w : w + _CHUNK].addcmul_(grad, weight)
        if not ctx.needs_input_grad[1]:
            return x_grad.to(x_nhD.dtype), None
        product = torch.empty_like(grad)
        wide = x_nhD.float()
        sums = [torch.mul(wide[:, w : w + _CHUNK], grad, out=product).sum((0, 1)) for w in range(conv_DW.shape[1])]
        return x_grad.to(x_nhD.dtype), torch.stack(sums, dim=-1).to(conv_DW.dtype)


def _gathered(x_TD: torch.Tensor, slot_nh: torch.Tensor) -> torch.Tensor:
    return F.pad(x_TD, (0, 0, 0, 1)).index_select(0, slot_nh.flatten()).view(*slot_nh.shape, -1)


def _unflatten(x: torch.Tensor, *sizes: int) -> torch.Tensor:
    return x.reshape(*x.shape[:-1], *sizes)


def _normalized(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def _delta_rule(  # noqa: PLR0917
    q_nKcH: torch.Tensor, k_nKcH: torch.Tensor, v_nKRcJ: torch.Tensor, g_nKRc: torch.Tensor, beta_nKRc: torch.Tensor,
    before: Sequence[torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """The rule in chunks (arXiv 2412.06464, eq. 8 to 10): [n, K, R, c, J]."""
    decay_nKRc = g_nKRc.cumsum(-1)  # logarithm of the decay since the chunk's start
    later = torch.ones(g_nKRc.shape[-1], g_nKRc.shape[-1], dtype=torch.bool, device=g_nKRc.device).triu(1)
    between_nKRcc = (decay_nKRc[..., None] - decay_nKRc[..., None, :]).masked_fill(later, float("-inf")).exp()
    scores_nKRcc = (q_nKcH @ k_nKcH.mT)[:, :, None] * between_nKRcc
    k_nKRcH, beta_nKRc1, since_start = k_nKcH[:, :, None], beta_nKRc[..., None], decay_nKRc.exp()[..., None]
    system_nKRcc = (k_nKcH @ k_nKcH.mT)[:, :, None] * between_nKRcc * beta_nKRc1
    # corrections of the state at the chunk's end, without and by the state at its start
    right = torch.cat([v_nKRcJ * beta_nKRc1, k_nKRcH * (beta_nKRc1 * since_start)], dim=-1)
    solution = torch.linalg.solve_triangular(system_nKRcc, right, upper=False, unitriangular=True)
    fresh_nKRcJ, stale_nKRcH = solution.split([v_nKRcJ.shape[-1], k_nKcH.shape[-1]], dim=-1)
    query = q_nKcH[:, :, None] * since_start
    until_end = k_nKRcH * (decay_nKRc[..., -1:] - decay_nKRc).exp()[..., None]
    whole = decay_nKRc[..., -1].exp()[..., None, None]
    counts = [len(q_nKcH) - sum(map(len, before)), *map(len, before)]
    (new, _, scores, _, keys, _), *levels = zip(
        *(torch.split(x, counts) for x in (fresh_nKRcJ, stale_nKRcH, scores_nKRcc, query, until_end, whole)),
        strict=True,
    )
    outputs, state = [scores @ new], keys.mT @ new
    for index, (fresh, stale, scores, queries, keys, decay) in zip(before, levels, strict=True):
        state = state[index]
        new = fresh - stale @ state
        outputs.append(queries @ state + scores @ new)
        state = state * decay + keys.mT @ new
    return torch.cat(outputs)
