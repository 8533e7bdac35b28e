"""Copies from a device through pinned buffers, on a fake device that copies only when it is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forge_agents.weights._staging import Staging, for_device  # noqa: E402


class Lazy:
    """Copies as late as a device may: when somebody waits. Notes the order of what was asked of it."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.buffers: list[Any] = []

    def pinned(self, num_bytes: int) -> Any:
        self.buffers.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.buffers[-1]

    def start_copy(self, target_B: Any, source_B: Any) -> Callable[[], object]:
        number = len([one for one in self.said if one.startswith("start")])
        self.said.append(f"start {number}")

        def wait() -> None:
            self.said.append(f"wait {number}")
            target_B.copy_(source_B)

        return wait


def test_tensors_arrive_whole_through_two_buffers_and_the_device_is_always_a_copy_ahead() -> None:
    device = Lazy()
    staging = Staging(device, buffer_bytes=64)
    sources = [torch.randn(5, 7), torch.arange(3), torch.randn(4, 4).t(), torch.zeros(0), torch.tensor(2.5)]
    targets = [torch.full(tuple(source.shape), -1, dtype=source.dtype) for source in sources]
    for target, source in zip(targets, sources, strict=True):
        staging.copy(target, source)
    staging.finish()
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
    assert len(device.buffers) == 2
    ahead = [what for i in range(5) for what in (f"start {i + 1}", f"wait {i}")]
    assert device.said == ["start 0", *ahead, "wait 5"]
    staging.finish()


def test_a_source_lives_until_it_was_copied() -> None:
    device = Lazy()
    staging = Staging(device, buffer_bytes=64)
    target = torch.zeros(8)
    staging.copy(target, torch.ones(8))  # nobody else holds it
    staging.finish()
    assert bool((target == 1).all())


def test_what_is_published_through_buffers_is_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_agents.weights import Publisher, versions

    class Store:
        name, place, heartbeat_timeout_s = "weights", "elsewhere", 5.0

        def __init__(self) -> None:
            self.values: dict[str, Any] = {}

        async def client(self) -> Store:
            return self

        async def exists(self, key: str) -> bool:
            return key in self.values

        async def keys(self, prefix: str) -> list[str]:
            return [key for key in self.values if key.startswith(prefix)]

        async def put(self, key: str, value: Any) -> None:
            self.values[key] = value.clone() if "part" in key else value

        async def get(self, key: str) -> Any:
            return self.values[key]

    device = Lazy()
    monkeypatch.setattr(versions, "for_device", lambda kind: Staging(device, buffer_bytes=64))
    given = {"a": torch.randn(9, 5), "b": torch.randn(3, 3).t(), "steps": torch.arange(4)}
    store: Any = Store()
    publisher = Publisher(store, "hero")
    for version in (1, 2):
        asyncio.run(publisher.publish(given, version))
    kept = {key.rpartition(".")[0]: value for key, value in store.values.items()}  # without the publisher's own name
    layout, bytes_B = kept["hero.slot0.head"], kept["hero.slot0.rank0.part0"]
    for name, tensor in given.items():
        found = versions.view_of(bytes_B, layout.pieces[name])
        assert torch.equal(found, tensor.bfloat16() if tensor.is_floating_point() else tensor)
    assert len(device.buffers) == 2 and len(device.said) == 2 * 2 * (2 + 1 + 1)


def test_nothing_is_staged_on_the_cpu() -> None:
    assert for_device("cpu") is None
    assert isinstance(for_device("cuda"), Staging)
