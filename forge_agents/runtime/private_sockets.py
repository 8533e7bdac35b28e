"""Replaces the names of Monarch's Unix sockets, which every local user can reach, by files that only this user can.

Monarch 0.7 runs code for any process that connects to one of its sockets. Monarch binds most of them to abstract names.
Such names have no owner and no permissions, are listed in ``/proc/net/unix``, and are shared with every container on
the host's network. Other sockets lie in folders that other users may enter. Monarch has no setting for this, so
`use_private_sockets` redirects two functions that Monarch's shared library calls: ``bind``, where an abstract name
becomes a path in the private folder, and ``mkdir``. Peers learn the path from the bound socket.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import secrets
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge_agents.private_folder import LONGEST_NAME, private_folder

_LINK_MAP = 2  # RTLD_DI_LINKMAP in <dlfcn.h>
_STRTAB, _SYMTAB, _RELA, _RELASZ, _JMPREL, _PLTRELSZ, _RELACOUNT = 5, 6, 7, 8, 23, 2, 0x6FFFFFF9  # DT_... in <elf.h>
_POINTER = ctypes.sizeof(ctypes.c_void_p)
_MKDIR = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_uint, use_errno=True)
_BIND = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, use_errno=True)


class _LinkMap(ctypes.Structure):
    """Beginning of ``struct link_map`` in <link.h>."""

    _fields_ = (("base", ctypes.c_size_t), ("name", ctypes.c_char_p), ("dynamic", ctypes.c_size_t))


@functools.cache
def use_private_sockets(library: str) -> bool:
    """Bind the Unix sockets of a loaded library in private folders. Call this before the library binds any.

    Args:
        library: Path of the shared library.

    Returns:
        Whether the library's calls were found and redirected. False on systems other than 64-bit Linux.
    """
    return (
        sys.platform == "linux"
        and _POINTER == 8
        and all(_redirect(library, name, callback) for name, callback in (("bind", _BOUND), ("mkdir", _MADE)))
    )


def _redirect(library: str, name: str, callback: Any) -> bool:
    """Make a library call `callback` instead of a function of the C library."""
    address = ctypes.cast(getattr(_libc(), name), ctypes.c_void_p).value
    replacement = ctypes.cast(callback, ctypes.c_void_p).value
    slots = [slot for slot in _slots(library, name.encode()) if _word(slot) == address]
    return replacement is not None and bool(slots) and all(_write(slot, replacement) for slot in slots)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _bind(descriptor: int, address: int, length: int) -> int:
    """``bind(2)`` as the library calls it, from any thread. No Unix socket stays open to other users."""
    try:
        name = ctypes.string_at(address, length)
        if length >= 2 and struct.unpack_from("=H", name)[0] == socket.AF_UNIX:
            os.fchmod(descriptor, 0o600)  # becomes the mode of the path
            if name[2:3] == b"\0" or length == 2:
                name = name[:2] + _path(name[3:]) + b"\0"
        result: int = _libc().bind(descriptor, name, len(name))
    except OSError as error:
        ctypes.set_errno(error.errno or errno.EACCES)
        return -1
    return result


def _mkdir(path: bytes, mode: int) -> int:
    """``mkdir(2)`` as the library calls it. No other user may enter its folders, in which it also binds sockets."""
    result: int = _libc().mkdir(path, mode & 0o700)
    return result


_BOUND, _MADE = _BIND(_bind), _MKDIR(_mkdir)
"""C callbacks, to be kept as long as the library may call them."""


def _path(name: bytes) -> bytes:
    """The path that replaces an abstract name."""
    safe = name if name.isalnum() and len(name) <= LONGEST_NAME else secrets.token_hex(LONGEST_NAME // 2).encode()
    return os.fsencode(private_folder() / os.fsdecode(safe))


def _slots(library: str, function: bytes) -> Iterator[int]:
    """Addresses of the pointers through which a loaded library calls a function of another one."""
    handle, link_map = ctypes.CDLL(library)._handle, ctypes.POINTER(_LinkMap)()
    if ctypes.CDLL(None).dlinfo(ctypes.c_void_p(handle), _LINK_MAP, ctypes.byref(link_map)):
        return
    base, dynamic = link_map.contents.base, dict[int, int]()
    for at in range(link_map.contents.dynamic, sys.maxsize, 2 * _POINTER):
        if not (tag := _word(at)):
            break
        dynamic[tag] = _word(at + _POINTER)
    # the loader has added the base to these addresses unless it keeps the section read-only
    place = {tag: value + (base if value < base else 0) for tag, value in dynamic.items()}
    skipped = 24 * dynamic.get(_RELACOUNT, 0)  # relative relocations come first and name no function
    for table, size, start in ((_RELA, _RELASZ, skipped), (_JMPREL, _PLTRELSZ, 0)):
        for entry in range(place.get(table, 0) + start, place.get(table, 0) + dynamic.get(size, 0), 24):  # Elf64_Rela
            symbol = place[_SYMTAB] + 24 * (_word(entry + 8) >> 32)  # Elf64_Sym
            name = place[_STRTAB] + ctypes.c_uint32.from_address(symbol).value
            if ctypes.string_at(name, len(function) + 1) == function + b"\0":
                yield base + _word(entry)


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _write(slot: int, value: int) -> bool:
    """Store a pointer on a page that may be read-only, and restore the protection of the page."""
    page = slot - slot % mmap.PAGESIZE
    if _is_writable(page):
        ctypes.c_uint64.from_address(slot).value = value
        return True
    for protection in (mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ):
        if _libc().mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), protection):
            return False
        if protection & mmap.PROT_WRITE:
            ctypes.c_uint64.from_address(slot).value = value
    return True


def _is_writable(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split(maxsplit=1)[0].split("-"))
        if first <= address < last:
            return line.split()[1][1] == "w"
    return False
