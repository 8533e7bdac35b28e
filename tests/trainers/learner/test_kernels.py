"""FlashAttention version that TorchTitan requests on GPUs with a newer version than PyTorch's."""

from __future__ import annotations

import pytest

from forge_trainers.learner import titan  # before torchtitan.tools.utils, which takes the device that it finds

assert titan.DEVICE_TYPE
from torchtitan.tools import utils  # noqa: E402


@pytest.mark.parametrize(
    ("newest", "module", "name"),
    [((9, 0), "flash_attn_interface.py", "FA3"), ((10, 0), "flash_attn/cute.py", "FA4")],
    ids=["hopper", "blackwell"],
)
def test_newest_installed_flash_attention_is_chosen(monkeypatch, tmp_path, newest, module, name):
    monkeypatch.setattr(utils, "has_cuda_capability", lambda major, minor: (major, minor) <= newest)
    assert utils.get_cuda_flash_attention_impl() is None, "PyTorch's own"
    (tmp_path / module).parent.mkdir(exist_ok=True)
    (tmp_path / module).touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert utils.get_cuda_flash_attention_impl() == name
