"""Checkpoints of strangers: what they ask to be run is not run."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
from enum import Enum
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

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
    with pytest.raises(RunFolderError, match=r"is refused: a value needs (posix|os)\.system, which no checkpoint does"):
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


def nested(depth: int) -> Any:
    """Lists that share their parts: 2**depth texts."""
    value = ["x"]
    for _ in range(depth):
        value = [value, value]
    return value


def tuple_as_key(depth: int) -> bytes:
    """A pickle of a dictionary whose key is a tuple of tuples that share their parts. Its hash takes 2**depth steps."""
    parts = (b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(depth))
    return b"\x80\x02}(X\x01\x00\x00\x00x\x85q\x00" + b"".join(parts) + b"Nu."


def index_of_indices() -> MetadataIndex:
    """An index with 3**3 parts."""
    index = MetadataIndex("a")
    for _ in range(3):
        outer = MetadataIndex("a")
        for name in ("fqn", "offset", "index"):
            object.__setattr__(outer, name, index)
        index = outer
    return index


def places(name: str, value: Any) -> Any:
    """A change of all places of values."""
    return lambda found: [setattr(place, name, value) for place in found.storage_data.values()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda found: setattr(found, "planner_data", Attribute(MetadataIndex, "__init__")),
            "reads an attribute, which no checkpoint does",
        ),
        (
            lambda found: setattr(found, "planner_data", Attribute(_MEM_FORMAT_ENCODING, "__init__")),
            "reads an attribute, which no checkpoint does",
        ),
        (places("relative_path", nested(60)), "stand for more than|nested more than 32 deep"),
        (lambda found: setattr(found, "planner_data", nested(20)), "stand for more than|nested more than 32 deep"),
        (
            lambda found: found.storage_data.update({index_of_indices(): next(iter(found.storage_data.values()))}),
            "an index that is no name with an offset",
        ),
        (places("relative_path", ["a"]), "names a compressed part, or no file"),
        (places("transform_descriptors", ("stream.zstd",)), "names a compressed part, or no file"),
        *(
            (places("relative_path", name), "no file of this folder")
            for name in ("../secret", "/dev/zero", "link", "pipe")
        ),
        (lambda found: setattr(found, "storage_data", None), "step"),
        (lambda found: setattr(found, "state_dict_metadata", {"model.w": None, "numbers.steps": 3}), "step"),
        (lambda found: found.storage_data.clear(), "step"),
    ],
)
def test_metadata_that_no_checkpoint_has_is_refused(saved, tmp_path, change, message):
    (tmp_path / "secret").write_bytes(next(saved.glob("*.distcp")).read_bytes())
    (saved / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(saved / "pipe")  # to open it would wait for ever
    rewritten(saved, change)
    with pytest.raises(RunFolderError, match=message):
        checkpoint.load(state(), saved)


def test_metadata_with_a_tuple_as_key_is_refused(saved):
    (saved / ".metadata").write_bytes(tuple_as_key(100))
    with pytest.raises(RunFolderError, match="it has a key of type tuple, which no checkpoint has"):
        checkpoint.load(state(), saved)


def same_hashes(*keys: Any) -> bytes:
    """A dict of keys with one hash: a kilobyte takes little time, ten megabytes hours."""
    return b"\x80\x02}(" + b"".join(pickle.dumps(key, 2)[2:-1] + b"N" for key in keys) + b"u."


MULTIPLES = [number * (2**61 - 1) for number in range(1, 102)]


@pytest.mark.parametrize("keys", [MULTIPLES, [(number,) for number in MULTIPLES]], ids=["int", "tuple"])
def test_metadata_with_many_keys_of_one_hash_is_refused(saved, keys):
    assert len(set(map(hash, keys))) == 1
    one_by_one = b"\x80\x02}" + b"".join(pickle.dumps(key, 2)[2:-1] + b"Ns" for key in keys) + b"."
    for content in (same_hashes(*keys), one_by_one):
        (saved / ".metadata").write_bytes(content)
        with pytest.raises(RunFolderError, match="is refused: more than 100 keys have the same hash"):
            checkpoint.load(state(), saved)
    (saved / ".metadata").write_bytes(same_hashes(*keys[:100]))
    with pytest.raises(RunFolderError, match="does not describe a checkpoint"):
        checkpoint.load(state(), saved)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.pkl", same_hashes(*MULTIPLES), "more than 100 keys have the same hash"),
        ("data/0", bytes(1_000_000), "bytes and stands for more. torch.save does not compress"),
        ("data.pkl", tuple_as_key(100), "it has a key of type tuple"),
        ("data.pkl", pickle.dumps(nested(25), 2), "stand for more than"),
        ("data.pkl", b"cbuiltins\nbytearray\n(L9999999999999L\ntR.", "a value needs builtins.bytearray"),
        ("data.pkl", pickle.dumps({frozenset("a"): 1}, 4), "it has a set"),
    ],
    ids=["hashes", "compressed", "key", "growth", "call", "set"],
)
@pytest.mark.parametrize("tensor", [True, False])
def test_values_that_stand_for_far_more_are_refused(saved, name, content, message, tensor):
    source = io.BytesIO()
    torch.save(torch.ones(3, dtype=torch.bfloat16), source)
    with ZipFile(source) as archive, ZipFile(saved / "evil.distcp", "w") as changed:
        for part in archive.infolist():
            compression = ZIP_DEFLATED if name == "data/0" else ZIP_STORED
            text = content if part.filename.endswith(f"/{name}") else archive.read(part)
            changed.writestr(part.filename, text, compression)
    place = ("evil.distcp", 0, (saved / "evil.distcp").stat().st_size)

    def change(found: Any) -> None:
        for index, info in found.storage_data.items():
            if (index.fqn == "model.w") == tensor:
                info.relative_path, info.offset, info.length = place

    rewritten(saved, change)
    with pytest.raises(RunFolderError, match=f"is refused: .*{message}"):
        checkpoint.load(state(), saved)


def test_values_of_all_kinds_are_read(tmp_path):
    values = {
        "numbers": [1, 2.5, None, True, (1, (2, "a"))], "bytes": b"ab", 3: {"nested": {4: [[5]]}},
        "random": torch.get_rng_state(), "shape": torch.Size([2]), "kind": torch.float16,
    }  # fmt: skip
    stored = {"a": values["numbers"], "b": values, "t": torch.arange(3)}
    state_dict_saver.save(stored, checkpoint_id=str(tmp_path / "step"), no_dist=True)
    result = checkpoint.load({"a": None, "b": values, "t": torch.zeros(3, dtype=torch.int64)}, tmp_path / "step")
    assert result["a"] == values["numbers"] and result["t"].tolist() == [0, 1, 2]
    assert {key: value for key, value in result["b"].items() if key != "random"} == {
        key: value for key, value in values.items() if key != "random"
    }
