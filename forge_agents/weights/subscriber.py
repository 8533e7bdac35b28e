"""Fetch published weights.

In: a version, or the latest. Out: tensors handed to `apply`, all of one version. Waits for the store, with a deadline.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge_agents.errors import StallError, UnknownIdError, did_you_mean
from forge_agents.runtime import mesh
from forge_agents.weights._layout import Index, Layout
from forge_agents.weights.publisher import view_of
from forge_agents.weights.store import WeightStoreRef

if TYPE_CHECKING:
    import torch

_RETRY_S = 0.005
_ATTEMPTS = 3
"""At least, however long each takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchResult:
    """One fetch that ended."""

    version: int
    """What `apply` was given, or what the caller has already."""
    seconds: float
    """The whole fetch, `apply_s` included."""
    apply_s: float
    """Seconds inside `apply`."""
    bytes: int
    """Bytes handed to `apply`; 0 where the caller has the version."""


class Subscriber:
    """Reads versions of one set of weights; one a process and weights name.

    The bytes are copied into private memory, and handed over only if the index still holds the version after the
    copy; so a writer that takes the slot meanwhile is noticed, and `apply` never sees two versions mixed.

    Args:
        ref: The store.
        weights_name: As the publisher calls them.
        timeout_s: Deadline of each wait for the store, in which one part of the bytes travels at most; None: the
            store's `silence_s`.
    """

    def __init__(self, ref: WeightStoreRef, weights_name: str, *, timeout_s: float | None = None) -> None:
        self.weights_name = weights_name
        self._ref = ref
        self._timeout_s = ref.silence_s if timeout_s is None else timeout_s
        self._mapped: dict[tuple[int, int], torch.Tensor] = {}
        self._private: dict[int, torch.Tensor] = {}
        self._one_at_a_time = asyncio.Lock()

    async def fetch(
        self,
        apply: Callable[[Mapping[str, torch.Tensor], int], Awaitable[None] | None],
        *,
        version: int | None = None,
        have: Callable[[], int | None] = lambda: None,
    ) -> FetchResult:
        """Get one version and call ``apply(tensors by name, version)`` once, or not at all.

        Args:
            apply: Plain or async. The tensors are its own until it returns; the next fetch writes over them.
            version: Which one; None for the latest.
            have: Tells the version the caller has when its turn comes; the same one is not fetched again.

        Raises:
            UnknownIdError: No such weights or version; the message says which exist.
            StallError: No stable version could be read in time, or the store does not answer.
            ActorDiedError: The store's process ended.
        """
        async with self._one_at_a_time:
            started = time.perf_counter()
            client = await self._ref.client()
            deadline = time.monotonic() + self._timeout_s
            attempt = 0
            while True:
                attempt += 1
                index = await self._index(client)
                wanted, slot = self._choose(index, version)
                if wanted == have():
                    return FetchResult(version=wanted, seconds=time.perf_counter() - started, apply_s=0.0, bytes=0)
                tensors = await self._read(client, slot)
                if tensors is not None and (wanted, slot) in (await self._index(client)).versions:
                    break
                if time.monotonic() > deadline and attempt >= _ATTEMPTS:
                    raise StallError(
                        f"weights {self.weights_name!r} change faster than they can be read: no stable version in "
                        f"{attempt} attempts and {self._timeout_s:g} s; publish less often or with more slots"
                    )
                await asyncio.sleep(_RETRY_S)
            applying = time.perf_counter()
            outcome = apply(tensors, wanted)
            if inspect.isawaitable(outcome):
                await outcome
            ended = time.perf_counter()
            num_bytes = sum(tensor.nbytes for tensor in tensors.values())
            return FetchResult(version=wanted, seconds=ended - started, apply_s=ended - applying, bytes=num_bytes)

    async def versions(self) -> tuple[int, ...]:
        """Versions that exist now, in the order of publication."""
        client = await self._ref.client()
        return tuple(version for version, _ in (await self._index(client)).versions)

    def _choose(self, index: Index, version: int | None) -> tuple[int, int]:
        wanted = index.latest() if version is None else version
        slot = None if wanted is None else index.slot_of(wanted)
        if wanted is None or slot is None:
            exists = ", ".join(str(known) for known, _ in index.versions) or "none"
            raise UnknownIdError(
                f"weights {self.weights_name!r} have no version {'yet' if wanted is None else wanted}; "
                f"existing versions: {exists}. Older ones are freed; publish first, or ask for the latest with None"
            )
        return wanted, slot

    async def _index(self, client: Any) -> Index:
        try:
            index: Index = await self._get(client, "index")
        except KeyError:
            if not await self._wait(client.exists(f"{self.weights_name}.index"), "look-up of the index"):
                keys = await self._wait(client.keys(), "list of keys")
                names = sorted(key.removesuffix(".index") for key in keys if key.endswith(".index"))
                raise UnknownIdError(
                    f"no weights {self.weights_name!r} have been published; published: {', '.join(names) or 'none'}."
                    f"{did_you_mean(self.weights_name, names)}"
                ) from None
            raise
        return index

    async def _read(self, client: Any, slot: int) -> Mapping[str, torch.Tensor] | None:
        """Private copies of a slot's tensors; None where they vanished meanwhile."""
        from forge_agents.weights import _segments

        try:
            layout: Layout = await self._get(client, f"slot{slot}.head")
            for rank, num_bytes in enumerate(layout.rank_bytes):
                private_B = self._memory(rank, num_bytes)
                for number, (start, end) in enumerate(layout.parts(rank)):
                    source_B = await self._get(client, f"slot{slot}.rank{rank}.part{number}")
                    if source_B.numel() != end - start:
                        return None
                    if _segments.segment_of(source_B) is not None:
                        self._mapped[slot, rank] = source_B  # keeps the pages mapped for the next time
                    # in a thread, because the actor answers others meanwhile
                    await asyncio.to_thread(private_B[start:end].copy_, source_B)
        except (KeyError, _segments.SegmentGoneError):
            return None
        return {name: view_of(self._private[piece.rank], piece) for name, piece in layout.pieces.items()}

    def _memory(self, rank: int, num_bytes: int) -> torch.Tensor:
        import torch

        private_B = self._private.get(rank)
        if private_B is None or private_B.numel() != num_bytes:
            private_B = self._private[rank] = torch.empty(num_bytes, dtype=torch.uint8)
        return private_B

    async def _get(self, client: Any, key: str) -> Any:
        return await self._wait(client.get(f"{self.weights_name}.{key}"), f"get of {self.weights_name}.{key}")

    async def _wait(self, call: Any, what: str) -> Any:
        return await mesh.with_deadline(call, self._timeout_s, who=self._ref.name, what=what)
