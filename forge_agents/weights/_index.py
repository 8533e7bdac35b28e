"""Which versions of one set of weights exist: the small object in the store that writers change and readers look at.

In: nothing. Out: values without behaviour beyond their own next state. Waits for nothing.
``docs/decisions/weights.md`` says why a reader that follows this protocol never reads two versions mixed.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from forge_agents.runtime.machine import memory_domain


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One version that exists."""

    version: int
    slot: int
    stamp: int
    """No two publications of one publisher have the same, not even of one version."""
    pages: str = ""
    """Of its publisher: the bytes lie in keys that no other writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One that writes or reads, as others know it."""

    place: str
    pid: int

    def has_ended(self) -> bool:
        """Whether it is known to have ended; one at another place may have."""
        return self.place == memory_domain() and not psutil.pid_exists(self.pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One version on its way."""

    version: int
    writer: Process
    pages: str = ""
    """As in `Entry`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Which versions exist."""

    entries: tuple[Entry, ...] = ()
    """Those that may be read, in the order of publication: the last one is the latest."""
    leaving: Entry | None = None
    """One that is still whole, for who reads it already: nobody else may begin to."""
    stamp: int = 0
    """Rises with each change of bytes: odd from a version's first to its last, even while nobody writes."""
    write: Write | None = None
    """What is being written, or was when its writer ended in the middle."""

    @property
    def versions(self) -> tuple[int, ...]:
        """Those that may be read."""
        return tuple(entry.version for entry in self.entries)

    def latest(self) -> Entry | None:
        """What was published last; None before the first."""
        return self.entries[-1] if self.entries else None

    def of(self, version: int) -> Entry | None:
        """Where a version lies; None where it may not be read."""
        return next((entry for entry in self.entries if entry.version == version), None)

    def holds(self, entry: Entry) -> bool:
        """Whether the bytes of an entry are as they were published."""
        return entry in self.entries or entry == self.leaving

    def announced(self, num_slots: int, write: Write) -> tuple[int, Index]:
        """A slot to write next, and the index from which on nobody begins to read what lies there."""
        kept = self.entries[max(0, len(self.entries) - num_slots + 1) :]
        taken = {entry.slot for entry in kept}
        slot = next(slot for slot in range(num_slots) if slot not in taken)
        there = [*self.entries, *([self.leaving] if self.leaving else [])]  # if a writer ended once it was announced
        leaving = next((entry for entry in there if entry.slot == slot), None)
        return slot, Index(entries=kept, leaving=leaving, stamp=self.stamp, write=write)

    def begun(self) -> Index:
        """The index before the first byte changes."""
        return Index(entries=self.entries, stamp=self.stamp + 1 + self.stamp % 2, write=self.write)

    def written(self, slot: int) -> Index:
        """The index once `slot` holds what was being written."""
        assert self.write is not None
        others = tuple(entry for entry in self.entries if entry.version != self.write.version)
        entry = Entry(version=self.write.version, slot=slot, stamp=self.stamp + 1, pages=self.write.pages)
        return Index(entries=(*others, entry), stamp=self.stamp + 1)
