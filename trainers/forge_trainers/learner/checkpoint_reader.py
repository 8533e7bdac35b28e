"""Reads checkpoints of torch's distributed format without running what they hold.

In: a folder that anybody may have written. Out: tensors and plain values. Waits for the disk.

PyTorch unpickles a checkpoint's ``.metadata`` and every value in it that is no tensor, and a pickle may call anything.
Here the first is read by an unpickler that knows the classes of that file only, the others by ``weights_only``.
"""

from __future__ import annotations

import io
import pickle
import stat
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

_DCP = "torch.distributed.checkpoint"
_CLASSES = frozenset(
    (f"{_DCP}.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
) | {(f"{_DCP}.filesystem", "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout")}


class Reader(FileSystemReader):
    """`FileSystemReader` for folders that nobody vouches for."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What lies where.

        Raises:
            pickle.UnpicklingError: The file names something other than tensors and places in this folder.
        """
        folder = Path(self.path)
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise pickle.UnpicklingError(f"{folder / '.metadata'} describes no checkpoint")
        for name in {str(place.relative_path) for place in found.storage_data.values()}:
            if name != Path(name).name or not stat.S_ISREG((folder / name).lstat().st_mode):
                raise pickle.UnpicklingError(f"{folder / '.metadata'} names {name!r}, which is no file of this folder")
        found.storage_meta = StorageMeta(load_id=self.load_id)
        return found


class Planner(DefaultLoadPlanner):
    """`DefaultLoadPlanner` that reads values which are no tensors as tensors are read: without calling anything."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """One value of the state."""
        packed = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), packed)  # nothing but plain values comes through
        packed.seek(0)
        super().load_bytes(read_item, packed)


class _Unpickler(pickle._Unpickler):
    """Knows the classes that PyTorch writes into ``.metadata``, and lets their attributes be."""

    dispatch = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name == "PosixPath":  # where it was written; not used
            return PurePosixPath
        if (module, name) in _CLASSES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the checkpoint's .metadata asks for {module}.{name}, which no checkpoint needs")

    def load_build(self) -> None:
        if isinstance(self.stack[-2], type):  # type: ignore[attr-defined]  # a state would change the class for all
            raise pickle.UnpicklingError("the checkpoint's .metadata changes a class")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build  # type: ignore[assignment]  # of the same class, for mypy of the base
