"""Checkpoints of strangers: what they ask to be run is not run."""

from __future__ import annotations

import os
import pickle
import pickletools
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, MetadataIndex

from forge_agents.errors import RunFolderError
from forge_trainers.learner import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.file}",))


def state(value: Any = 7) -> dict[str, Any]:
    numbers = {"steps": value, "groups": [{"lr": 0.5, "betas": (0.9, 0.99)}]}
    return {"model": {"w": torch.ones(3, dtype=torch.bfloat16)}, "numbers": numbers}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state_dict_saver.save(state(), checkpoint_id=str(tmp_path / "step"), no_dist=True)
    return tmp_path / "step"


def rewritten(folder: Path, change: Any) -> None:
    """Change what ``.metadata`` says."""
    result = pickle.loads((folder / ".metadata").read_bytes())
    change(result)
    (folder / ".metadata").write_bytes(pickle.dumps(result))


def test_saved_checkpoint_is_read(saved):
    expected = state(0)
    expected["model"]["w"].zero_()
    result = checkpoint.load(expected, saved)
    assert result["numbers"] == state()["numbers"] and result["model"]["w"].tolist() == [1, 1, 1]


class EarlyPickler(pickle.Pickler):
    """Writes a member of an enumeration as Python before 3.11.4 does."""

    def reducer_override(self, written: Any) -> Any:
        return (getattr, (type(written), written.name)) if isinstance(written, Enum) else NotImplemented


def test_metadata_of_an_early_python_3_11_is_read(saved):
    result = pickle.loads((saved / ".metadata").read_bytes())
    with (saved / ".metadata").open("wb") as file:
        EarlyPickler(file).dump(result)
    assert b"getattr" in (saved / ".metadata").read_bytes()
    expected = state(0)
    expected["model"]["w"].zero_()
    assert checkpoint.load(expected, saved)["model"]["w"].tolist() == [1, 1, 1]


class Attribute:
    """Unpickled, it is an attribute of something."""

    def __init__(self, of: Any, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (self.of, self.name))


@pytest.mark.parametrize("of", [MetadataIndex, _MEM_FORMAT_ENCODING])
def test_any_other_attribute_is_refused(saved, of):
    rewritten(saved, lambda found: setattr(found, "planner_data", Attribute(of, "__init__")))
    with pytest.raises(RunFolderError, match="reads an attribute, which no checkpoint does"):
        checkpoint.load(state(), saved)


def test_metadata_that_asks_for_a_call_is_refused(saved, tmp_path):
    (saved / ".metadata").write_bytes(pickle.dumps(Touch(tmp_path / "mark")))
    pickle.loads((saved / ".metadata").read_bytes())  # this is how PyTorch reads it
    assert (tmp_path / "mark").exists()
    (tmp_path / "mark").unlink()
    with pytest.raises(RunFolderError, match=r"is refused: .* needs \w+\.system"):
        checkpoint.load(state(), saved)
    assert not (tmp_path / "mark").exists()


def test_a_call_hidden_in_the_metadata_or_in_a_value_is_refused(saved, tmp_path):
    rewritten(saved, lambda found: setattr(found, "planner_data", Touch(tmp_path / "mark")))
    with pytest.raises(RunFolderError, match="is refused"):
        checkpoint.load(state(), saved)
    state_dict_saver.save(state(Touch(tmp_path / "mark")), checkpoint_id=str(tmp_path / "value"), no_dist=True)
    with pytest.raises(RunFolderError, match="does not fit"):
        checkpoint.load(state(), tmp_path / "value")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("opcode", [b"\x95", b"\x8d", b"\x8e", b"\x96"])  # frame, text, bytes, bytearray
def test_metadata_that_asks_for_more_memory_than_it_has_is_refused(saved, opcode):
    (saved / ".metadata").write_bytes(b"\x80\x05" + opcode + (1 << 46).to_bytes(8, "little") + b".")
    with pytest.raises(RunFolderError, match="is refused|does not fit"):
        checkpoint.load(state(), saved)


def test_metadata_that_changes_a_class_is_refused(saved):
    name = f"{MetadataIndex.__module__}\n{MetadataIndex.__qualname__}\n".encode()
    poison = b"\x80\x02c" + name + b"N}X\x06\x00\x00\x00poisonK\x01s\x86b."  # a class, its state, BUILD
    assert [op.name for op, *_ in pickletools.genops(poison)][-2:] == ["BUILD", "STOP"]
    (saved / ".metadata").write_bytes(poison)
    with pytest.raises(RunFolderError, match="changes a class"):
        checkpoint.load(state(), saved)
    assert not hasattr(MetadataIndex, "poison")


@pytest.mark.parametrize("name", ["../secret", "/dev/zero", "link", "pipe"])
def test_metadata_that_leads_out_of_the_folder_is_refused(saved, tmp_path, name):
    (file,) = saved.glob("*.distcp")
    file.rename(tmp_path / "secret")
    (saved / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(saved / "pipe")  # to open it would wait for ever

    def lead(found: Any) -> None:
        for place in found.storage_data.values():
            place.relative_path = name

    rewritten(saved, lead)
    with pytest.raises(RunFolderError, match="no file of this folder"):
        checkpoint.load(state(), saved)


def test_nonsense_is_an_error_that_names_the_folder(saved):
    for change in (
        lambda found: setattr(found, "storage_data", None),
        lambda found: setattr(found, "state_dict_metadata", {"model.w": None, "numbers.steps": 3}),
        lambda found: found.storage_data.clear(),
    ):
        kept = (saved / ".metadata").read_bytes()
        rewritten(saved, change)
        with pytest.raises(RunFolderError, match="step"):
            checkpoint.load(state(), saved)
        (saved / ".metadata").write_bytes(kept)
