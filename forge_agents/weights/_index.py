"""The index of one set of weights: a small object in the store that writers replace and readers check (a seqlock)."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from forge_agents.runtime.machine import memory_domain


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A published version."""

    version: int
    stamp: int
    """Unique per publication, also when the same version is published again."""
    publisher: str = ""
    """Identifier of the publisher, a part of the keys of the bytes, so that two publishers never share a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that writes or reads weights."""

    place: str
    pid: int

    def has_ended(self) -> bool:
        """Whether the process is known to have ended. Always False for a process on another host."""
        return self.place == memory_domain() and not psutil.pid_exists(self.pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """A version that is being written."""

    version: int
    writer: Process
    publisher: str = ""
    """As in `Entry`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The version of one set of weights. Each change is a new `Index` that replaces the last one in the store.

    A write goes through three states: `announce` (no reader may begin to read), `begin_write` (bytes change from now
    on; the stamp is odd), `commit` (the version exists; the stamp is even). A reader that finds its entry in the index
    before and after it read the bytes has read one version: every write in between would have removed the entry, and a
    stamp is never used twice.
    """

    entry: Entry | None = None
    """Version that may be read. None before the first and during a write."""
    retiring: Entry | None = None
    """Version that is about to be overwritten. Readers that hold a lease finish reading it. No other may begin."""
    stamp: int = 0
    """Increases with every write. Odd while bytes change, also after a writer died."""
    write: Write | None = None
    """The write in progress, or one whose writer died."""

    def is_intact(self, entry: Entry) -> bool:
        """Whether the bytes of an entry are unchanged since it was published."""
        return entry in (self.entry, self.retiring)

    def announce(self, write: Write) -> Index:
        """The index that keeps new readers away. A writer that died after it left its version in `retiring`."""
        return Index(retiring=self.entry or self.retiring, stamp=self.stamp, write=write)

    def begin_write(self) -> Index:
        """The index to store before the first byte changes."""
        return Index(stamp=self.stamp + 1 + self.stamp % 2, write=self.write)

    def commit(self) -> Index:
        """The index to store after the last byte was written."""
        assert self.write is not None
        entry = Entry(version=self.write.version, stamp=self.stamp + 1, publisher=self.write.publisher)
        return Index(entry=entry, stamp=self.stamp + 1)
