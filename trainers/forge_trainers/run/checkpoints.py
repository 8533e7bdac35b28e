"""Checkpoints of a run: learners, other stateful parts, and the step to continue from.

A checkpoint is a folder ``step-NNNNNN``. The folder is complete when it holds ``experiment.json``. Training continues
while its files are written.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from zipfile import BadZipFile

import numpy as np

from forge_agents.errors import ActorDiedError, ForgeError, RunFolderError, StallError
from forge_agents.files import (
    CHECKPOINT_MARK,
    CHUNK_BYTES,
    Checksums,
    check_plain_files,
    complete_checkpoints,
    find_damage,
)
from forge_agents.http_body import bounded_json
from forge_agents.models import resolve as models
from forge_agents.policy import Policy
from forge_agents.runtime.mesh import with_deadline
from forge_agents.runtime.threads import all_or_first_error
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.memory import checkpoint_bytes
from forge_trainers.records.run_folder import read_arrays

if TYPE_CHECKING:
    from forge_trainers.learner.client import Learner

_log = logging.getLogger(__name__)
_EXPORTED = "exported"
"""File in the checkpoint from which the run's export was made."""

_MIN_CHUNK_BYTES = 1 << 20
"""Minimum size of a chunk with a checksum. Checking millions of small ones would take minutes and gigabytes."""

_DAMAGE = (OSError, RuntimeError, ValueError, KeyError, EOFError, BadZipFile)
"""Errors of reading a damaged checkpoint."""


@runtime_checkable
class Stateful(Protocol):
    """Object with a state to save, such as a verifier ensemble: arrays by name, none of them of objects."""

    def state_dict(self) -> Mapping[str, np.ndarray]: ...  # noqa: D102
    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Content of ``experiment.json``."""

    step: int
    """Number of steps done."""
    policies: list[str]
    """Names of the learners, sorted."""
    score: float | None = None
    """Mean held-out reward of these weights, or minus their exploitability. None if it was not measured."""
    measure: str = ""
    """Hash of what the score depends on besides the weights. Empty in checkpoints of earlier versions."""
    files: dict[str, list[int]] = field(default_factory=dict)
    """Size in bytes and CRC-32 of every chunk of each other file, by path."""
    chunk_bytes: int = 0
    """Size of a chunk in bytes. 0: each file is one chunk."""
    compute_dtypes: dict[str, str] = field(default_factory=dict)
    """Dtype in which each learner computed: "bfloat16" or "float32"."""

    @classmethod
    def read(cls, folder: Path) -> Mark:
        """Read the mark of a checkpoint. Raises ValueError if it is damaged."""
        check_plain_files(folder)
        text = (folder / CHECKPOINT_MARK).read_text()
        try:
            values = bounded_json(text)
            policies = [str(name) for name in values["policies"]]
            mark = cls(**{**values, "step": int(values["step"]), "policies": policies})
            paths = {name: PurePosixPath(name) for name in (*mark.policies, *mark.files)}  # opened later
            outside = [n for n, p in paths.items() if not p.parts or p.is_absolute() or ".." in p.parts or "\0" in n]
            if problem := mark._problem():
                raise TypeError(problem)
        except (ArithmeticError, KeyError, TypeError, RecursionError) as cause:
            raise ValueError(f"{CHECKPOINT_MARK} is damaged: {cause!r}") from cause
        if outside:
            raise ValueError(f"{CHECKPOINT_MARK} is damaged: {outside[0][:80]!r} leads out of the folder")
        if folder.name != f"step-{mark.step:06d}":
            raise ValueError(f"{CHECKPOINT_MARK} is that of step {mark.step}")
        return mark

    def _problem(self) -> str:
        """Return which value no run writes, or an empty text."""
        values: dict[str, Any] = vars(self)  # of a stranger
        score, chunk_bytes, files = values["score"], values["chunk_bytes"], values["files"]
        sums = files.values() if isinstance(files, dict) else [None]
        dtypes = values["compute_dtypes"]
        known = {"bfloat16", "float32"}
        valid = {
            "score": score is None or (type(score) in (int, float) and math.isfinite(score)),
            "measure": isinstance(values["measure"], str),
            "chunk_bytes": type(chunk_bytes) is int and (chunk_bytes == 0 or chunk_bytes >= _MIN_CHUNK_BYTES),
            "files": all(isinstance(each, list) and each and all(type(n) is int for n in each) for each in sums),
            "compute_dtypes": isinstance(dtypes, dict) and known.issuperset(map(str, dtypes.values())),
        }
        return next((f"{name} is {values[name]!r:.80}" for name, is_valid in valid.items() if not is_valid), "")


class Checkpoints:
    """The newest `keep` checkpoints of a run, and with `keep_best` the one of the highest score.

    `parts` are saved and restored next to the learners, by name, if they are `Stateful`. `timeout_s` bounds writing and
    reading.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        keep_best: bool = False,
        parts: Mapping[str, object] | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self._folder, self._keep, self._keep_best, self._timeout_s = folder, keep, keep_best, timeout_s
        self._parts = {name: part for name, part in (parts or {}).items() if isinstance(part, Stateful)}
        self.measure = ""
        """Hash of what the scores of this session depend on besides the weights, such as environment and reward. Only
        scores with the same hash are compared. Empty: the hash of the newest checkpoint."""
        self._writing: asyncio.Task[None] | None = None
        self._first: dict[str, dict[str, np.ndarray]] = {}

    def any(self) -> bool:
        """Return whether there is a complete checkpoint."""
        return bool(self.complete())

    def best(self) -> Path | None:
        """Return the newest checkpoint of the highest score, or None if none has a comparable score."""
        scores = self._scores()
        return max(scores, key=lambda folder: (scores[folder], folder)) if scores else None

    def other_measures(self) -> list[str]:
        """Return the names of checkpoints whose scores cannot be compared with those of this session."""
        scores = self._scores()
        return [
            folder.name for folder, mark in self._marks().items() if mark.score is not None and folder not in scores
        ]

    def complete(self) -> list[Path]:
        """Return the complete checkpoints, newest first."""
        return complete_checkpoints(self._folder)

    def standing(self) -> str:
        """Return a message for a stopped run: its saved state, and how to continue."""
        saved = self.complete()
        if not saved:
            return f"stopped before a step was saved in {self._folder.parent}. The same call starts from the beginning"
        step = saved[0].name.rpartition("-")[2].lstrip("0")
        return f"stopped. {self._folder.parent} holds the run after step {step}. The same call continues from there"

    def exported(self) -> None:
        """Note that the run's export was made from the newest checkpoint."""
        for newest in self.complete()[:1]:
            with contextlib.suppress(OSError):  # without the file, the next call exports again
                (newest / _EXPORTED).touch()

    def finished(self, steps: int, learners: Collection[str]) -> int:
        """Load the parts of the newest checkpoint if it is exported and has `steps` or more. Returns its steps or 0."""
        for folder in self.complete()[:1]:
            try:
                mark = Mark.read(folder)
                if mark.step >= steps and mark.policies == sorted(learners) and (folder / _EXPORTED).exists():
                    self._load_parts(folder)
                    return mark.step
            except _DAMAGE as cause:  # `restore` reports it in detail
                _log.warning("checkpoint %s does not load (%s)", folder, cause)
        return 0

    def check_resumable(self, learners: Collection[str]) -> None:
        """Raise RunFolderError if the newest checkpoint has other learners, or states that do not fit the parts.

        Damaged checkpoints are skipped here, because `restore` falls back to the one before.
        """
        for folder in self.complete()[:1]:
            try:
                mark = Mark.read(folder)
                parts = {name: sums for name, sums in mark.files.items() if "/" not in name}
                if find_damage(folder, parts, chunk_bytes=mark.chunk_bytes):
                    return
                states = {name: read_arrays(folder / f"{name}.npz") for name in self._parts}
            except _DAMAGE:
                return
            _check_policies(folder, mark, learners)
            for name, state in states.items():
                self._check_part(folder, name, state)

    def _check_part(self, folder: Path, name: str, state: Mapping[str, np.ndarray] | None) -> None:
        """Load the state of a part as a test, and restore the part."""
        part = self._parts[name]
        before = {key: np.array(value) for key, value in part.state_dict().items()}
        try:
            if state is not None:
                part.load_state_dict(state)
                part.load_state_dict(before)
        except (ArithmeticError, LookupError, TypeError, ValueError) as cause:
            raise RunFolderError(
                f"the state of {name} in {folder} does not fit this call: {cause!s:.1000}. Use the reward and settings "
                "that the run was trained with, or choose another out_dir"
            ) from cause

    def check_room(self, policies: Iterable[tuple[Policy, LearnerConfig]], say: Callable[[str], None]) -> None:
        """Raise RunFolderError if the disk has no space for one checkpoint and the final export.

        Warns with `say` if there is space for one checkpoint, but not for all that are kept.
        """
        checkpoint = export = 0
        for policy, learner in policies:
            model = models.resolve(policy.model)
            export += models.weight_bytes(model)
            if policy.lora is None:  # adapters are small
                checkpoint += models.weight_count(model) * checkpoint_bytes(learner)
        disk = self._folder.absolute()
        while not disk.exists():
            disk = disk.parent
        free = shutil.disk_usage(disk).free
        if free < checkpoint + export:
            raise RunFolderError(
                f"{disk} has {free / 1e9:.1f} GB free. One checkpoint takes {checkpoint / 1e9:.1f} GB and the export "
                f"{export / 1e9:.1f} GB. Free some space, or choose another out_dir"
            )
        needed = (self._keep + self._keep_best + 1 - len(self.complete())) * checkpoint + export
        if free < needed:
            say(
                f"{disk} has {free / 1e9:.1f} GB free, and all checkpoints that are kept take {needed / 1e9:.1f} GB: "
                "lower keep_checkpoints, or free some space"
            )

    def is_best(self, score: float | None) -> bool:
        """Return whether a checkpoint with `score` would be kept as the best."""
        return score is not None and self._keep_best and score >= max(self._scores().values(), default=-math.inf)

    async def start(self, step: int, learners: Mapping[str, Learner], *, score: float | None = None) -> None:
        """Copy the state after `step` steps and begin to write it, after the previous checkpoint.

        If that failed, the run continues with a warning, because this checkpoint is the next attempt.
        """
        try:
            await self.finish()
        except RunFolderError as cause:
            _log.warning("%s; training continues", cause)
        copied = asyncio.Event()
        self._writing = asyncio.ensure_future(self._write(step, learners, score, copied))
        copying = asyncio.ensure_future(copied.wait())
        await asyncio.wait({self._writing, copying}, return_when=asyncio.FIRST_COMPLETED)
        copying.cancel()

    async def finish(self) -> None:
        """Wait until the checkpoint of `start` is on disk. Raises RunFolderError if it could not be written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    async def save(self, step: int, learners: Mapping[str, Learner], *, score: float | None = None) -> None:
        """Write a checkpoint: `start` and `finish`."""
        await self.start(step, learners, score=score)
        await self.finish()

    async def settle(self) -> None:
        """End the checkpoint that is being written: wait for it, or drop it if the run was cancelled."""
        task = asyncio.current_task()
        if self._writing is not None and task is not None and task.cancelling():
            self._writing.cancel()
        try:
            await self.finish()
        except (ForgeError, asyncio.CancelledError) as cause:
            _log.warning("the last checkpoint was not finished: %s", cause)

    async def restore(self, learners: Mapping[str, Learner]) -> int:
        """Load the newest undamaged checkpoint. Newer, damaged ones are renamed ``damaged-NNNNNN``.

        Without a checkpoint, parts get the state that they had at the first call. Returns the step to continue from.
        Raises ForgeError if no checkpoint loads, or they hold other policies.
        """
        damaged: dict[Path, BaseException] = {}
        for folder in self.complete():
            try:
                checking = asyncio.to_thread(checked_mark, folder)
                mark = await with_deadline(checking, self._timeout_s, who=str(folder), what="the check of its sums")
                if mark.policies == sorted(learners):
                    await all_or_first_error(
                        learner.load(folder / name, timeout_s=self._timeout_s) for name, learner in learners.items()
                    )
                    self._load_parts(folder)
            except (StallError, ActorDiedError):
                raise
            except _DAMAGE as cause:
                if not (folder / CHECKPOINT_MARK).exists():  # a run in another process has deleted it for a newer one
                    return await self.restore(learners)
                _log.warning("checkpoint %s does not load (%s). Trying the one before", folder, cause)
                damaged[folder] = cause
                continue
            _check_policies(folder, mark, learners)
            for newer in damaged:  # the run will write their steps again
                name = newer.name.replace("step", "damaged")
                names = itertools.chain((name,), (f"{name}.{number}" for number in itertools.count(2)))
                newer.replace(next(p for p in map(self._folder.joinpath, names) if not p.exists()))
            return mark.step
        if damaged:
            raise ForgeError("no checkpoint loads: " + "; ".join(f"{path}: {error}" for path, error in damaged.items()))
        for name, state in self._first.items():
            self._parts[name].load_state_dict(state)
        self._first = {name: {k: np.array(v) for k, v in p.state_dict().items()} for name, p in self._parts.items()}
        return 0

    async def _write(
        self, step: int, learners: Mapping[str, Learner], score: float | None, copied: asyncio.Event
    ) -> None:
        # The draft is renamed after all files and, last, the mark are written: a kill leaves no partial checkpoint.
        draft, final = self._folder / f".draft-{step:06d}", self._folder / f"step-{step:06d}"
        opened: int | None = None
        try:
            for old in self._folder.glob(".draft-*"):
                shutil.rmtree(old, ignore_errors=True)
                if old.is_symlink() or old.is_file():  # of a stranger
                    old.unlink()
            draft.mkdir(parents=True)
            opened = os.open(draft, os.O_RDONLY)  # an open folder keeps its inode number, even if it is deleted
            sums: dict[str, list[int]] = {}
            for name, part in self._parts.items():
                buffer, checksums = io.BytesIO(), Checksums()
                np.savez(buffer, allow_pickle=False, **part.state_dict())
                checksums.add(buffer.getbuffer())
                (draft / f"{name}.npz").write_bytes(buffer.getbuffer())
                sums[f"{name}.npz"] = checksums.all
            await all_or_first_error(
                learner.start_save(draft / name, timeout_s=self._timeout_s) for name, learner in learners.items()
            )
            copied.set()
            written = await all_or_first_error(
                learner.finish_save(timeout_s=self._timeout_s) for learner in learners.values()
            )
            for learner, files in zip(learners, written, strict=True):
                sums |= {f"{learner}/{name}": checksum for name, checksum in files.items()}
            finite = score if score is not None and math.isfinite(score) else None
            mark = Mark(
                step=step,
                policies=sorted(learners),
                score=finite,
                measure=self.measure,
                files=sums,
                chunk_bytes=CHUNK_BYTES,
                compute_dtypes={name: learner.compute_dtype for name, learner in learners.items()},
            )
            if not _is_same(draft, opened):  # the run folder was moved, and another run has begun there
                raise FileNotFoundError(f"{draft} was replaced")
            await asyncio.to_thread(_put_in_place, draft, final, mark)
            best = self.best() if self._keep_best else None
            for old in self.complete()[self._keep :]:
                if old != best:
                    _delete(old)
        except StallError:
            raise
        except OSError as cause:
            if opened is not None and _is_same(draft, opened):
                shutil.rmtree(draft, ignore_errors=True)
            newest = next(iter(self.complete()), None)
            raise RunFolderError(
                f"the checkpoint of step {step} cannot be written ({cause}); "
                + (f"the newest is {newest}" if newest else "there is none yet")
                + ". Free some space, make the folder writable, and leave it in place until the run has ended"
            ) from cause
        finally:
            if opened is not None:
                os.close(opened)

    def _load_parts(self, folder: Path) -> None:
        states = {name: read_arrays(folder / f"{name}.npz") for name in self._parts}
        for name, state in states.items():
            if state is None:
                _log.warning("checkpoint %s holds no %s, which starts from its initial state", folder, name)
            else:
                self._parts[name].load_state_dict(state)

    def _scores(self) -> dict[Path, float]:
        """Return the comparable scores of all readable complete checkpoints."""
        marks = self._marks()
        measure = self.measure or next((mark.measure for mark in marks.values()), "")
        return {
            folder: mark.score
            for folder, mark in marks.items()
            if mark.score is not None and mark.measure in ("", measure)
        }

    def _marks(self) -> dict[Path, Mark]:
        """Return the marks of the readable complete checkpoints, newest first."""
        marks = {}
        for folder in self.complete():
            try:
                marks[folder] = Mark.read(folder)
            except _DAMAGE as cause:
                _log.warning("checkpoint %s: %s", folder, cause)
        return marks


def _check_policies(folder: Path, mark: Mark, learners: Collection[str]) -> None:
    if mark.policies != sorted(learners):
        raise RunFolderError(
            f"{folder} holds the policies {mark.policies!s:.500}, this run trains {sorted(learners)}. Choose another "
            "out_dir"
        )


def _is_same(folder: Path, opened: int) -> bool:
    """Return whether a folder is there and is the one that was opened as `opened`, so that no other replaced it."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(folder.stat(), os.fstat(opened))
    return False


def _put_in_place(draft: Path, final: Path, mark: Mark) -> None:
    """Write the mark of a draft and rename it. After a power cut the checkpoint is whole or has no mark."""
    with (draft / CHECKPOINT_MARK).open("w") as file:
        json.dump(asdict(mark), file)
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(final, ignore_errors=True)
    draft.rename(final)


def _delete(folder: Path) -> None:
    """Delete a checkpoint. After a kill meanwhile, the next checkpoint deletes the rest, as it deletes drafts."""
    with contextlib.suppress(OSError):
        folder = folder.rename(folder.with_name(f".draft-{folder.name}"))
    shutil.rmtree(folder, ignore_errors=True)


def checked_mark(folder: Path) -> Mark:
    """Return the mark of a checkpoint. Raises ValueError or OSError if a file does not have its checksum."""
    mark = Mark.read(folder)
    if damage := find_damage(folder, mark.files, chunk_bytes=mark.chunk_bytes):
        raise ValueError(damage)
    return mark
