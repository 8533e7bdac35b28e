"""LoRA on CPU: one matrix product per adapter and step. Imported by name, in engine processes only: it imports vLLM.

vLLM 0.32's CPU kernels gather the adapter's matrices once per token, and treat a token without adapter (slot -1) as a
token of the last slot. ``docs/decisions/computation.md`` has measurements.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class GroupedLoRA(PunicaWrapperCPU):  # type: ignore[misc]
    """vLLM's wrapper with another product for linear layers, the only layers that have adapters here."""

    _groups: list[tuple[int, torch.Tensor | None]]

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Group the tokens of the next step by adapter."""
        super().update_metadata(*args, **kwargs)
        slots_T = self.token_lora_indices
        slots = slots_T.unique().tolist()
        self._groups = [
            (slot, None if len(slots) == 1 else (slots_T == slot).nonzero()[:, 0]) for slot in slots if slot >= 0
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

        A is [slots, 1, rank, in] and B [slots, 1, out, rank] per slice. `scale` is 1, because vLLM multiplies it into B
        when it loads an adapter.
        """
        for slot, rows_T in self._groups:
            inputs = x if rows_T is None else x[rows_T]
            start = 0
            for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                change = (inputs @ a[slot, 0].T) @ b[slot, 0].T
                if scale != 1.0:
                    change *= scale
                part = y[:, start : start + width]
                if rows_T is None:
                    part += change
                else:
                    part[rows_T] += change
                start += width
