"""The ranks of one engine: vLLM's calls that change it, on all of them in one order.

In: calls, on the first rank. Out: what they give there; the others do the same in silence. Waits for the first rank.

Each rank is a whole vLLM engine, with a scheduler of its own and its part of the model (`external_launcher`). They come
to the same tokens because each is told the same at the same step. Only the first knows the time and the controller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from forge_agents.serving import _vllm

if TYPE_CHECKING:
    import torch

_IDLE = timedelta(days=365)
"""Ranks wait for the next call as long as nobody asks for anything; the end of the first one ends the wait."""
_CLOSE = "close"


class Ranks:
    """All ranks of an engine that has been built on each; on its thread, and first on all of them at the same time.

    Args:
        engine: This rank's.
        tp: How many there are.
    """

    def __init__(self, engine: Any, tp: int) -> None:
        self._engine = engine
        self._group: Any = None
        if tp > 1:
            import torch.distributed as dist

            self._group = dist.new_group(backend="gloo", timeout=_IDLE)

    def tell(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        """On the first rank: let the others do calls that it is about to `do` itself, whatever becomes of each.

        Args:
            calls: Names of `_vllm`'s functions, and what they are given beside the engine.
        """
        if self._group is not None:
            import torch.distributed as dist

            dist.broadcast_object_list([list(calls)], src=0, group=self._group)

    def do(self, name: str, *given: Any) -> Any:
        """Do a call here."""
        return getattr(_vllm, name)(self._engine, *given)

    def together(self, name: str, *given: Any) -> Any:
        """On the first rank: do a call on all."""
        self.tell([(name, given)])
        return self.do(name, *given)

    def load(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """On the first rank: replace all weights on all. Tensors go one by one, and each rank keeps its part."""
        if self._group is None:
            self.do("load_tensors", tensors, version)
            return
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        self.tell([("load", (shapes, version))])
        self._load(_Travelling(shapes, self._group, tensors), version)

    def follow(self) -> None:
        """On the other ranks: do what the first one tells, until it closes.

        Raises:
            Exception: Of vLLM, or because the first rank is gone.
        """
        import torch.distributed as dist

        while True:
            told: list[Any] = [None]
            dist.broadcast_object_list(told, src=0, group=self._group)
            for name, given in told[0]:
                if name == _CLOSE:
                    return
                if name == "load":
                    shapes, version = given
                    self._load(_Travelling(shapes, self._group), version)
                    continue
                try:
                    self.do(name, *given)
                except ValueError:
                    if name != "add":  # a refused request is refused on all ranks, and the first answers it
                        raise

    def close(self) -> None:
        """On the first rank, in good health: end the others."""
        self.tell([(_CLOSE, ())])

    def _load(self, tensors: _Travelling, version: int) -> None:
        self.do("load_tensors", tensors, version)
        tensors.finish()


class _Travelling(Mapping[str, "torch.Tensor"]):
    """Tensors that go from the first rank to the others as they are looked through, once and in order.

    Args:
        shapes: Shape and type by name.
        group: The ranks.
        own: The tensors, on the first rank.
    """

    def __init__(self, shapes: Mapping[str, Any], group: Any, own: Mapping[str, torch.Tensor] | None = None) -> None:
        self._shapes, self._group, self._own = shapes, group, own
        self._left = self._arriving()

    def __len__(self) -> int:
        return len(self._shapes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __getitem__(self, name: str) -> torch.Tensor:
        raise TypeError(f"{name} is on its way; look through items()")

    def items(self) -> Any:
        """Names and tensors, each as soon as all ranks have it."""
        return self._left

    def finish(self) -> None:
        """Take what nobody looked at, so that all ranks stay together."""
        for _ in self._left:
            continue

    def _arriving(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch
        import torch.distributed as dist

        for name, (shape, dtype) in self._shapes.items():
            tensor = torch.empty(shape, dtype=dtype) if self._own is None else self._own[name].contiguous()
            dist.broadcast(tensor.view(-1).view(torch.uint8), src=0, group=self._group)
            yield name, tensor
