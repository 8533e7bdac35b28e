"""Checks pickles and archives of strangers before PyTorch reads them.

A pickle can repeat its parts, so that a few bytes stand for texts and keys that take forever to print or hash. An
archive can be compressed.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections import Counter
from collections.abc import Iterable
from enum import Enum, EnumMeta
from pathlib import PurePosixPath
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

_DCP = "torch.distributed.checkpoint"
_METADATA_CLASSES = frozenset(
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
_VALUE_CLASSES = frozenset(
    {("torch._utils", f"_rebuild_{name}") for name in ("tensor", "tensor_v2", "tensor_v3", "parameter")}
    | {("_codecs", "encode"), ("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout")}
)
"""Classes and functions of values. Checking a pickle does not call them."""
_PLAIN = (str, int, float, bool, bytes, type(None))
_MAX_DEPTH = 32
_MAX_EQUAL_HASHES = 100
"""Maximum number of keys of a dict with the same hash. Each new one is compared with all of them."""
_MAX_GROWTH = 64
"""Maximum number of values per byte of a pickle, with repeated parts counted each time."""


def read_metadata(data: bytes) -> Metadata:
    """Unpickle a checkpoint's ``.metadata``.

    Raises:
        UnpicklingError: The pickle asks for a call, is too large for its size, or describes no checkpoint.
    """
    metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise pickle.UnpicklingError(".metadata does not describe a checkpoint")
    _check_size(metadata, data)
    return metadata


def check_archive(file: IO[bytes], num_bytes: int) -> None:
    """Check a file of ``torch.save`` of `num_bytes`, which ``torch.load`` may then read with ``weights_only``.

    Raises:
        UnpicklingError: The file is compressed, or its pickle could take far more time or memory than its size.
        RuntimeError: The file is no archive of PyTorch.
    """
    reader = torch._C.PyTorchFileReader(file)
    if sum(map(reader.get_record_size, reader.get_all_records())) > num_bytes:
        raise pickle.UnpicklingError(f"a value has {num_bytes} bytes and stands for more. torch.save does not compress")
    data = reader.get_record("data.pkl")
    _check_size(_ValueUnpickler(io.BytesIO(data)).load(), data)


class _Unpickler(pickle._Unpickler):
    """Unpickler that hashes only plain keys."""

    dispatch = dict(pickle._Unpickler.dispatch)

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._hashes: dict[int, tuple[Any, Counter[int]]] = {}
        """Each dict, which keeps its id from being used again, and the number of its keys by hash."""

    def _check_key(self, key: Any) -> None:
        if not _is_plain(key):
            raise pickle.UnpicklingError(f"it has a key of type {type(key).__name__}, which no checkpoint has")

    def _check_keys(self, target: Any, keys: Iterable[Any]) -> None:
        hashes = self._hashes.setdefault(id(target), (target, Counter()))[1]
        for key in keys:
            self._check_key(key)
            hashes[hash(key)] += 1
            if hashes[hash(key)] > _MAX_EQUAL_HASHES:
                raise pickle.UnpicklingError(f"more than {_MAX_EQUAL_HASHES} keys have the same hash")

    def _set_item(self) -> None:
        self._check_keys(self.stack[-3], self.stack[-2:-1])  # type: ignore[attr-defined]
        super().load_setitem()  # type: ignore[misc]

    def _set_items(self) -> None:
        self._check_keys(self.metastack[-1][-1], self.stack[::2])  # type: ignore[attr-defined]
        super().load_setitems()  # type: ignore[misc]

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("it has a set or a class with other arguments, which no checkpoint has")

    dispatch |= {pickle.SETITEM[0]: _set_item, pickle.SETITEMS[0]: _set_items}  # type: ignore[dict-item]
    for _code in (
        pickle.DICT, pickle.EMPTY_SET, pickle.FROZENSET, pickle.ADDITEMS, pickle.NEWOBJ_EX, pickle.OBJ, pickle.INST
    ):  # fmt: skip
        dispatch[_code[0]] = _refuse  # type: ignore[assignment]


class _MetadataUnpickler(_Unpickler):
    """Unpickler that accepts only the classes that PyTorch writes to ``.metadata``, and does not modify them."""

    dispatch = dict(_Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name == "PosixPath":  # original location, not used
            return PurePosixPath
        if (module, name) in _METADATA_CLASSES:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # Python before 3.11.4 pickles members of enumerations like this
            return _member
        raise pickle.UnpicklingError(f"the checkpoint's .metadata needs {module}.{name}, which no checkpoint does")

    def _check_key(self, key: Any) -> None:
        if type(key) is not MetadataIndex:
            super()._check_key(key)
        elif not _is_valid_index(key):
            raise pickle.UnpicklingError("the checkpoint's .metadata has an index that is no name with an offset")

    def _build(self) -> None:
        if isinstance(self.stack[-2], type):  # type: ignore[attr-defined]  # would modify the class for the process
            raise pickle.UnpicklingError("the checkpoint's .metadata changes a class")
        super().load_build()  # type: ignore[misc]

    def _reduce(self) -> None:
        self._check_arguments()
        super().load_reduce()  # type: ignore[misc]

    def _new(self) -> None:
        self._check_arguments()
        super().load_newobj()  # type: ignore[misc]

    def _check_arguments(self) -> None:
        for argument in self.stack[-1]:  # type: ignore[attr-defined]
            if not (_is_plain(argument) or isinstance(argument, type)):  # an enumeration hashes its argument
                self._refuse()

    dispatch |= {pickle.BUILD[0]: _build, pickle.REDUCE[0]: _reduce, pickle.NEWOBJ[0]: _new}  # type: ignore[dict-item]


class _Stub:
    """Stands for a tensor or storage."""


class _ValueUnpickler(_Unpickler):
    """Unpickler of a file of ``torch.save`` that makes no tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return _empty_dict
        is_torch = module == "torch" and (
            name.endswith("Storage") or isinstance(getattr(torch, name, None), torch.dtype)
        )
        if not is_torch and (module, name) not in _VALUE_CLASSES:
            raise pickle.UnpicklingError(f"a value needs {module}.{name}, which no checkpoint does")
        return _stub

    def persistent_load(self, key: Any) -> _Stub:
        return _Stub()


def _stub(*_arguments: Any) -> _Stub:
    return _Stub()


def _empty_dict() -> dict[Any, Any]:
    return {}


def _member(kind: object, name: object) -> Enum:
    """``getattr`` restricted to members of enumerations."""
    if not (isinstance(kind, EnumMeta) and isinstance(name, str) and name in kind.__members__):
        raise pickle.UnpicklingError("the checkpoint's .metadata reads an attribute, which no checkpoint does")
    member: Enum = kind.__members__[name]
    return member


def _is_plain(value: Any) -> bool:
    """Return whether a value is a text, a number or a tuple of them, which is hashed quickly."""
    return type(value) in _PLAIN or (type(value) is tuple and all(type(item) in _PLAIN for item in value))


def _is_valid_index(index: MetadataIndex) -> bool:
    return type(index.fqn) is str and type(index.offset) in (torch.Size, type(None)) and _is_plain(index.index)


def _check_size(value: Any, data: bytes) -> None:
    """Check that the value of a pickle has few values for its size, with repeated parts counted each time."""
    limit, sizes = _MAX_GROWTH * len(data), dict[int, int]()

    def size_of(part: Any, depth: int) -> int:
        if type(part) in _PLAIN and depth <= _MAX_DEPTH:
            return 1
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            if isinstance(part, MetadataIndex) and not _is_valid_index(part):
                raise pickle.UnpicklingError("the checkpoint's .metadata has an index that is no name with an offset")
            inner = list(vars(part).values())
        elif isinstance(part, dict):
            inner = [*part, *part.values()]
        else:
            inner = list(part) if isinstance(part, list | tuple) else []
        if id(part) not in sizes:
            if depth > _MAX_DEPTH:  # also a value that contains itself
                raise pickle.UnpicklingError(f"it is nested more than {_MAX_DEPTH} deep, which no checkpoint is")
            sizes[id(part)] = 1 + sum(size_of(each, depth + 1) for each in inner)
        if sizes[id(part)] > limit:
            raise pickle.UnpicklingError(f"its {len(data)} bytes stand for more than {limit} values")
        return sizes[id(part)]

    size_of(value, 0)
