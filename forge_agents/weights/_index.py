"""The index of one set of weights: a small object in the store that writers replace and readers check (a seqlock)."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from forge_agents.runtime.machine import memory_domain


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One published version."""

    version: int
    slot: int
    stamp: int
    """Unique per publication, also when the same version is published again."""
    publisher: str = ""
    """Identifier of the publisher. It is part of the keys of the bytes, so two publishers never share a key."""


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
    """The versions of one set of weights. Each change is a new `Index` that replaces the last one in the store.

    A write goes through three states: `announce` (no reader may begin to read the slot), `begin_write` (its bytes
    change from now on; the stamp is odd), `commit` (the version exists; the stamp is even). A reader that finds its
    entry in the index before and after it read the bytes has read one version: every write in between would have
    removed the entry, and a stamp is never used twice. ``docs/decisions/training.md`` has the argument.
    """

    entries: tuple[Entry, ...] = ()
    """Versions that may be read, in order of publication."""
    retiring: Entry | None = None
    """Version that is about to be overwritten. Readers that hold a lease finish reading it; no other may begin."""
    stamp: int = 0
    """Increases with every write; odd while bytes change, also after a writer died."""
    write: Write | None = None
    """The write in progress, or one whose writer died."""

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions that may be read, in order of publication."""
        return tuple(entry.version for entry in self.entries)

    def latest(self) -> Entry | None:
        """The version published last; None before the first."""
        return self.entries[-1] if self.entries else None

    def of(self, version: int) -> Entry | None:
        """The entry of a version; None if it may not be read."""
        return next((entry for entry in self.entries if entry.version == version), None)

    def is_intact(self, entry: Entry) -> bool:
        """Whether the bytes of an entry are unchanged since it was published."""
        return entry in self.entries or entry == self.retiring

    def announce(self, num_slots: int, write: Write) -> tuple[int, Index]:
        """Choose the slot to write next. Returns it with the index that keeps new readers away from it."""
        remaining = self.entries[max(0, len(self.entries) - num_slots + 1) :]
        used = {entry.slot for entry in remaining}
        slot = next(slot for slot in range(num_slots) if slot not in used)
        # a writer that died after its announcement left its version in `retiring`
        intact = [*self.entries, *([self.retiring] if self.retiring else [])]
        retiring = next((entry for entry in intact if entry.slot == slot), None)
        return slot, Index(entries=remaining, retiring=retiring, stamp=self.stamp, write=write)

    def begin_write(self) -> Index:
        """The index to store before the first byte changes."""
        return Index(entries=self.entries, stamp=self.stamp + 1 + self.stamp % 2, write=self.write)

    def commit(self, slot: int) -> Index:
        """The index to store after the last byte was written to `slot`."""
        assert self.write is not None
        others = tuple(entry for entry in self.entries if entry.version != self.write.version)
        entry = Entry(version=self.write.version, slot=slot, stamp=self.stamp + 1, publisher=self.write.publisher)
        # A version that is published again leaves the index, but its old bytes stay until their slot is written next.
        superseded = next((entry for entry in self.entries if entry.version == self.write.version), None)
        return Index(entries=(*others, entry), retiring=superseded, stamp=self.stamp + 1)
