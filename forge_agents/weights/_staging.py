"""From a device into the host's memory: through two pinned buffers, one filled while the other is emptied.

In: tensors, and where their bytes go. Out: the bytes, once `finish` has returned. Waits for the device.

The pages that processes share are not pinned, for all of a model would be, and copies from a device into such pages are
slower. `Device` is all that is asked of an accelerator; on CPU nothing is staged. Not run by us on one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

BUFFER_BYTES = 1 << 25
"""Of each of the two."""


class Device(Protocol):
    """What is asked of an accelerator."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Flat uint8 memory of the host that the device writes by itself."""

    def start_copy(self, target_B: torch.Tensor, source_B: torch.Tensor) -> Callable[[], object]:
        """Begin to copy from the device into pinned memory, after what was begun before. Returns what waits for it."""


class Cuda:
    """CUDA's, of the calling thread's current device."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """As `Device` says."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def start_copy(self, target_B: torch.Tensor, source_B: torch.Tensor) -> Callable[[], object]:
        """As `Device` says."""
        target_B.copy_(source_B, non_blocking=True)
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        wait: Callable[[], object] = done.synchronize
        return wait


class Staging:
    """Two buffers, and the copy that is on its way in one of them."""

    def __init__(self, device: Device, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._device, self._buffer_bytes = device, buffer_bytes
        self._buffers: list[torch.Tensor] = []
        self._turn = 0
        self._arrive: Callable[[], None] | None = None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a contiguous tensor of the device into one of the host, of the same bytes; the end may follow later."""
        target_B, source_B = target.view(-1).view(torch.uint8), source.contiguous().view(-1).view(torch.uint8)
        for start in range(0, target_B.numel(), self._buffer_bytes):
            self._begin(target_B[start : start + self._buffer_bytes], source_B[start : start + self._buffer_bytes])

    def finish(self) -> None:
        """Wait for the copy that is on its way."""
        arrive, self._arrive = self._arrive, None
        if arrive is not None:
            arrive()

    def _begin(self, target_B: torch.Tensor, source_B: torch.Tensor) -> None:
        if not self._buffers:
            self._buffers = [self._device.pinned(self._buffer_bytes) for _ in range(2)]
        pinned_B = self._buffers[self._turn][: source_B.numel()]
        self._turn = 1 - self._turn
        wait = self._device.start_copy(pinned_B, source_B)

        def arrive(source_B: torch.Tensor = source_B) -> None:  # which lives until it has been read
            wait()
            target_B.copy_(pinned_B)

        self.finish()  # of the other buffer, while the device fills this one
        self._arrive = arrive


def for_device(kind: str) -> Staging | None:
    """What brings tensors of a kind of device to the host; None where nothing is staged, as on CPU."""
    made: dict[str, Any] = {"cuda": Cuda}
    return Staging(made[kind]()) if kind in made else None
