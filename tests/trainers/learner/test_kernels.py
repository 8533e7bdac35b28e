"""Which FlashAttention TorchTitan asks for on a GPU that has a newer one than is installed."""

from __future__ import annotations

import importlib.util

import pytest

from forge_trainers.learner import titan


@pytest.mark.parametrize("newest", [(9, 0), (10, 0)], ids=["hopper", "blackwell"])
@pytest.mark.skipif(importlib.util.find_spec("flash_attn_interface") is not None, reason="FlashAttention 3 is here")
def test_without_its_package_it_is_pytorchs_kernel(monkeypatch: pytest.MonkeyPatch, newest: tuple[int, int]) -> None:
    from torchtitan.tools import utils

    assert titan.DEVICE_TYPE
    monkeypatch.setattr(utils, "has_cuda_capability", lambda major, minor: (major, minor) <= newest)
    assert utils.get_cuda_flash_attention_impl() is None
