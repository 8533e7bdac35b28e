"""Measures the memory, processor time and processes that one program and its children use.

The module runs in an isolated interpreter with only the standard library, and imports little of it.
"""
# Importing pathlib would take as long as everything else.
# ruff: noqa: PTH123, PTH208

from __future__ import annotations

import _socket
import errno
import os
import struct
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_CLOCK = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SHARED = b"/dev/zero (deleted)"
"""Name of shared anonymous memory in the list of a process's mappings."""
_GRANT_S = 1.0
"""Maximum time from a grant to the mapping."""
_MAPPING_BYTES = 256
"""Size of the kernel's own data of a mapping."""
_SOCKET_BYTES = 320 << 10
"""Maximum contents of one local or UDP socket. The program cannot raise the default buffers of 208 KiB."""


class Usage:
    """Usage of a tree of processes, updated by `look`.

    Memory is the sum of anonymous pages, swapped pages, page tables, shared anonymous mappings, the kernel's own data
    of all mappings and, in a network namespace, socket buffers. File pages are excluded, because they belong to the
    host's cache or to the limited folder.

    Args:
        proc: Descriptor of the host's /proc.
        namespaces: Whether the program has its own network, so that all its sockets can be counted.
        tcp: Whether it can open TCP sockets.
    """

    def __init__(self, proc: int, *, namespaces: bool, tcp: bool) -> None:
        self.proc, self.namespaces, self.tcp = proc, namespaces, tcp
        self.cpu_s = 0.0
        """Processor seconds of the living processes and of children that they have waited for."""
        self.sampled_cpu_s = 0.0
        """Estimated processor seconds of all processes, including children that no parent waited for."""
        self.memory_bytes = 0
        self.peak_bytes = 0
        self.processes = 0
        self.shared_bytes = 0
        """Bytes of shared anonymous mappings granted to the program. Pages stay in use after they leave all page
        tables, and no file of /proc shows them, so each grant counts until no such mapping is left."""
        self._granted: dict[int, float] = {}
        """Times of the latest grants by thread. The call continues at once, but the mapping exists a little later."""
        self._times: dict[str, float] = {}
        self._looked = time.monotonic()
        self._precise_from = 0.0

    def look(self, tree: Callable[[], list[str]], max_bytes: int) -> None:
        """Measure the processes `tree`. Memory is precise only if a quick upper bound exceeds `max_bytes`."""
        now = time.monotonic()
        elapsed, self._looked = now - self._looked, now
        times: dict[str, float] = {}
        anonymous, mappings, ticks, num = 0, 0, 0, 0
        for pid in (pids := tree()):
            fields = self.read(f"{pid}/stat").rpartition(b")")[2].split()
            if not fields:
                continue  # it ended in the meantime
            num += 1
            ticks += sum(map(int, fields[11:15]))  # its own time and that of children it has waited for
            self._sample(pid, times, elapsed, running=fields[0] == b"R")
            status = self._of_memory(pid, "status")
            anonymous += _anonymous(status)
            mappings += _kib(status, b"VmSize:") // _PAGE_BYTES
        self._times, self.processes = times, num
        self.cpu_s = max(self.cpu_s, ticks / _CLOCK)
        if now >= self._precise_from:
            self.memory_bytes = self._memory(pids, anonymous, mappings, tree, max_bytes)
            self.peak_bytes = max(self.peak_bytes, self.memory_bytes)

    def _sample(self, pid: str, times: dict[str, float], elapsed: float, *, running: bool) -> None:
        """Add the process's time since the last look to the estimate.

        If a parent ignores SIGCHLD, the kernel adds the time of its children to no process. A child that lives shorter
        than the interval between two looks is seen with a probability of its life over the interval. A new process
        is therefore charged the whole interval, times the share of its life that it had a processor. On average the
        sum is right.
        """
        try:
            spent = time.clock_gettime((~int(pid) << 3) | 2)  # clock_getcpuclockid of another process
        except OSError:
            return
        times[pid] = spent
        before = self._times.get(pid)
        if before is not None and before <= spent:
            self.sampled_cpu_s += spent - before
        elif not running:
            self.sampled_cpu_s += spent
        else:
            on_processor, waited = ([int(number) for number in self.read(f"{pid}/schedstat").split()[:2]] or [1, 0])[:2]
            self.sampled_cpu_s += max(spent, elapsed * on_processor / max(1, on_processor + waited))

    def _memory(
        self, pids: list[str], anonymous: int, mappings: int, tree: Callable[[], list[str]], max_bytes: int
    ) -> int:
        """Return the memory of processes with `anonymous` bytes and at most `mappings` mappings."""
        sockets, socket_bytes = self._sockets()
        if anonymous + self.shared_bytes + mappings * _MAPPING_BYTES + sockets * socket_bytes <= max_bytes:
            return anonymous + self.shared_bytes
        started = time.monotonic()
        precise = sum(map(self._proportional, pids))
        precise += _MAPPING_BYTES * sum(self._of_memory(pid, "maps").count(b"\n") for pid in pids)
        if self.shared_bytes and not self._maps_shared(tree):
            self.shared_bytes = 0
        if sockets:
            precise += self._buffers(sockets, socket_bytes) if self.tcp else sockets * socket_bytes
        now = time.monotonic()
        self._precise_from = now + 2 * (now - started)  # page table walks may take a third of the time
        return precise + self.shared_bytes

    def _proportional(self, pid: str) -> int:
        """Private pages, plus the process's part of pages that forked processes still share."""
        rollup, status = self._of_memory(pid, "smaps_rollup"), self._of_memory(pid, "status")
        if b"Pss_Anon:" not in rollup:
            return _anonymous(status)
        return _kib(rollup, b"Pss_Anon:") + _kib(rollup, b"SwapPss:") + _kib(status, b"VmPTE:")

    def _maps_shared(self, tree: Callable[[], list[str]]) -> bool:
        """Return whether a process has shared anonymous memory, or may have some soon."""
        now = time.monotonic()
        granted = {
            thread: at for thread, at in self._granted.items() if now - at < _GRANT_S and self.read(f"{thread}/stat")
        }
        self._granted = granted
        for _ in range(3):
            pids = set(tree())
            if granted or any(_SHARED in self._of_memory(pid, "maps", if_denied=_SHARED) for pid in pids):
                return True
            if pids.issuperset(tree()):
                return False
        return True  # a process that forks and ends hands its mappings on, possibly in between

    def _of_memory(self, pid: str, file: str, *, if_denied: bytes = b"") -> bytes:
        """Read a file of /proc that describes a process's memory, `if_denied` if it may not be read.

        If the first thread has ended, only the other threads show the memory. The newest one lives longest.
        """
        mark = b"\nVmRSS:" if file == "status" else b"\n"
        if mark in (text := self.read(f"{pid}/{file}", if_denied=if_denied)):
            return text
        texts = (self.read(f"{pid}/task/{thread}/{file}") for thread in reversed(self._threads(pid)))
        return next((other for other in texts if mark in other), text)

    def grant(self, tree: Callable[[], list[str]], thread: int, num_bytes: int, max_bytes: int) -> bool:
        """Return whether a thread may map `num_bytes` more of shared anonymous memory, and count them if so.

        Mappings count in whole pages, plus a page for the kernel's own data of each mapping.
        """
        num_bytes = (-(-num_bytes // _PAGE_BYTES) + 1) * _PAGE_BYTES
        self._granted.pop(thread, None)  # its previous call has returned
        if self.shared_bytes + num_bytes > max_bytes and not self._maps_shared(tree):
            self.shared_bytes = 0
        granted = self.shared_bytes + num_bytes <= max_bytes
        self.shared_bytes += num_bytes * granted
        if granted:
            self._granted[thread] = time.monotonic()
        return granted

    def _sockets(self) -> tuple[int, int]:
        """Number of sockets in our network namespace, including sockets in flight, and the most bytes of one."""
        if not self.namespaces:
            return 0, 0  # the network is the host's
        num = self._counted("sockstat", b"sockets:")
        if not self.tcp:
            return num, _SOCKET_BYTES
        most = (self.read(f"sys/net/ipv4/tcp_{way}mem").split()[-1:] for way in ("r", "w"))
        return num, sum(int(size[0]) if size else 32 << 20 for size in most)

    def _buffers(self, sockets: int, socket_bytes: int) -> int:
        """Bytes in the buffers of all sockets of our network namespace."""
        others = sockets - self._counted("sockstat", b"TCP:") - self._counted("sockstat6", b"TCP6:")
        try:
            return _tcp_bytes(2) + _tcp_bytes(10) + max(0, others) * _SOCKET_BYTES
        except OSError:  # this kernel does not list them
            return sockets * socket_bytes

    def _counted(self, file: str, name: bytes) -> int:
        """The first number after `name` in a table of the network, as in ``TCP: inuse 3 orphan 0``."""
        rows = (line.split() for line in self.read(f"self/net/{file}").splitlines())
        return next((int(row[2]) for row in rows if len(row) > 2 and row[0] == name), 0)

    def tree(self, roots: list[str]) -> list[str]:
        """Return the processes `roots` and all their descendants."""
        pids, waiting = [], list(roots)
        while waiting:
            pid = waiting.pop()
            pids.append(pid)
            waiting += self.children(pid)
        return pids

    def children(self, pid: str) -> list[str]:
        """Return the children of all threads of a process."""
        threads = self._threads(pid)
        return [child for thread in threads for child in self.read(f"{pid}/task/{thread}/children").decode().split()]

    def _threads(self, pid: str) -> list[str]:
        try:
            folder = os.open(f"{pid}/task", os.O_RDONLY, dir_fd=self.proc)
        except OSError:
            return []  # it ended in the meantime
        try:
            return os.listdir(folder)
        except OSError:
            return []
        finally:
            os.close(folder)

    def read(self, path: str, *, if_denied: bytes = b"") -> bytes:
        """Read a file of /proc. Empty if its process has ended."""
        try:
            with open(os.open(path, os.O_RDONLY, dir_fd=self.proc), "rb") as file:
                return file.read()
        except PermissionError:
            return if_denied
        except OSError:
            return b""


def _anonymous(status: bytes) -> int:
    """Bytes of anonymous and swapped pages and of page tables in a process's status."""
    resident = _kib(status, b"RssAnon:") or _kib(status, b"VmRSS:")
    return resident + _kib(status, b"VmSwap:") + _kib(status, b"VmPTE:")


def _kib(text: bytes, name: bytes) -> int:
    """Bytes from a line such as ``b"VmSwap:    12 kB"``, or 0 if it is missing.

    The first line of ``status`` is the program's own name for itself, which may contain `name`.
    """
    at = text.find(b"\n" + name)
    return int(text[at + len(name) + 1 :].split(None, 1)[0]) << 10 if at >= 0 else 0


def _tcp_bytes(family: int) -> int:
    """Bytes in the buffers of all TCP sockets of this network namespace, by the kernel's sock_diag."""
    with_memory, by_family, dump, failed = 1 << 6, 20, 0x301, 2
    request = struct.pack("=4BI48x", family, 6, with_memory, 0, 0xFFFFFFFF)
    num_bytes = 0
    channel = _socket.socket(_socket.AF_NETLINK, _socket.SOCK_DGRAM, 4)  # NETLINK_SOCK_DIAG
    try:
        channel.settimeout(1.0)
        channel.send(struct.pack("=IHHII", 16 + len(request), by_family, dump, 1, 0) + request)
        while True:
            answer, at = channel.recv(1 << 16), 0
            while at + 16 <= len(answer):
                length, kind = struct.unpack_from("=IH", answer, at)
                if kind == failed:
                    raise OSError(errno.EOPNOTSUPP, "the kernel lists no TCP sockets")
                if kind != by_family or length < 16:
                    return num_bytes
                num_bytes += _message_bytes(answer[at + 16 + 72 : at + length])
                at += (length + 3) & ~3
    finally:
        channel.close()


def _message_bytes(attributes: bytes) -> int:
    """Bytes from one socket's memory attribute: received, queued for sending, reserved, options and backlog."""
    at = 0
    while at + 4 <= len(attributes):
        length, kind = struct.unpack_from("=HH", attributes, at)
        if kind == 7 and length >= 36:  # INET_DIAG_SKMEMINFO
            received, _, _, _, reserved, queued, options, backlog = struct.unpack_from("=8I", attributes, at + 4)
            return int(received + reserved + queued + options + backlog)
        at += max(4, (length + 3) & ~3)
    return 0
