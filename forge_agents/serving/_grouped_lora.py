"""LoRA on CPU: one product for all tokens of an adapter, instead of a copy of the adapter for every token.

In: activations and the adapters in their slots. Out: what the adapters add. Waits for nothing. Only the engine's
process imports this module, by its name: it imports vLLM.

vLLM 0.32's own CPU kernels gather the adapter's matrices once per token, and take a token without adapter (slot -1) for
one of the last slot; ``docs/decisions/computation.md`` has the speed.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class GroupedLoRA(PunicaWrapperCPU):  # type: ignore[misc]
    """vLLM's wrapper with another product for linear layers, the only ones that have adapters here."""

    _groups: list[tuple[int, torch.Tensor | None]]

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Sort the tokens of the next step by their adapters."""
        super().update_metadata(*args, **kwargs)
        slots_T = self.token_lora_indices
        found = slots_T.unique().tolist()
        self._groups = [
            (slot, None if len(found) == 1 else (slots_T == slot).nonzero()[:, 0]) for slot in found if slot >= 0
        ]

    def add_lora_linear(  # noqa: PLR0917  # vLLM's signature
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """``y[tokens, slice] += scale * x[tokens] A^T B^T`` for every adapter and every slice of a fused layer.

        Args:
            y: [T, sum of output_slices], changed in place.
            x: [T, in].
            lora_a_stacked: Of each slice, [slots, 1, rank, in].
            lora_b_stacked: Of each slice, [slots, 1, out, rank].
            scale: 1: vLLM multiplies it into B when it loads an adapter.
            output_slices: Widths of the slices.
        """
        for slot, rows_T in self._groups:
            mine = x if rows_T is None else x[rows_T]
            start = 0
            for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                change = (mine @ a[slot, 0].T) @ b[slot, 0].T
                if scale != 1.0:
                    change *= scale
                part = y[:, start : start + width]
                if rows_T is None:
                    part += change
                else:
                    part[rows_T] += change
                start += width
