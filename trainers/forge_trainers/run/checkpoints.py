"""Checkpoints of a whole run: every learner, whatever else has learned, and the step to continue from; their export.

In: learners and parts with a state. Out: folders ``step-NNNNNN``, complete once they hold ``experiment.json``, and
models that others load. Waits for the learners and the disk; training goes on while files are written.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import logging
import math
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from zipfile import BadZipFile

import numpy as np

from forge_agents import safe_yaml
from forge_agents.errors import ActorDiedError, ForgeError, RunFolderError, StallError
from forge_agents.files import CHUNK_BYTES, Checksums, check_contained, check_plain_files, find_damage, user_path
from forge_agents.models import resolve as models
from forge_agents.policy import LoRA, Policy
from forge_agents.runtime.mesh import with_deadline
from forge_agents.runtime.threads import all_or_first_error
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.memory import moment_bytes
from forge_trainers.records.run_folder import CHECKPOINT_MARK, checkpoint_marks, read_arrays

if TYPE_CHECKING:
    from forge_trainers.learner.client import Learner

_log = logging.getLogger(__name__)
_EXPORTED = "exported"
"""The file in a checkpoint that says that the run's export was made of it."""

_DAMAGES = (OSError, RuntimeError, ValueError, KeyError, EOFError, BadZipFile)
"""What reading a checkpoint raises whose files are not as they were written."""


@runtime_checkable
class Stateful(Protocol):
    """What learns or remembers, such as a verifier ensemble: arrays by name, none of them of objects."""

    def state_dict(self) -> Mapping[str, np.ndarray]: ...  # noqa: D102
    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class _Mark:
    """What ``experiment.json`` says of its folder."""

    step: int
    """Steps done."""
    policies: list[str]
    """Names of the learners, sorted."""
    score: float | None = None
    """Mean held-out reward of these weights; None where it was not measured."""
    files: dict[str, list[int]] = field(default_factory=dict)
    """Size in bytes and CRC-32 of every chunk of every other file, by path."""
    chunk_bytes: int = 0
    """Size of a chunk; 0: the whole file is one."""

    @classmethod
    def read(cls, folder: Path) -> _Mark:
        """Raises ValueError where the file does not say what it should."""
        check_plain_files(folder)
        text = (folder / CHECKPOINT_MARK).read_text()
        try:
            found = json.loads(text)
            mark = cls(**{**found, "step": int(found["step"]), "policies": [str(name) for name in found["policies"]]})
            paths = {name: PurePosixPath(name) for name in (*mark.policies, *mark.files)}  # they are opened
            odd = [n for n, p in paths.items() if not p.parts or p.is_absolute() or ".." in p.parts or "\0" in n]
            math.isfinite(mark.score or 0.0)
        except (ArithmeticError, KeyError, TypeError, RecursionError) as cause:
            raise ValueError(f"{CHECKPOINT_MARK} is damaged: {cause!r}") from cause
        if odd:
            raise ValueError(f"{CHECKPOINT_MARK} is damaged: {odd[0][:80]!r} does not stay in the folder")
        return mark


class ProcessRandomness:
    """The random state of Python and NumPy in this process, for environments and rewards that draw from it."""

    def __init__(self) -> None:
        self._settled: dict[str, np.ndarray] | None = None

    def settle(self) -> None:
        """A step has been learned from: what is drawn from here on is drawn again after a resume."""
        self._settled = self._state()

    def state_dict(self) -> dict[str, np.ndarray]:
        """Both generators' states, as after the last step that was learned from."""
        return self._state() if self._settled is None else self._settled

    def _state(self) -> dict[str, np.ndarray]:
        _, words, normal = random.getstate()
        _, keys, place, has_normal, cached = np.random.get_state()  # noqa: NPY002  # the state that others draw from
        return {
            "python": np.array(words, dtype=np.uint64),
            "python_normal": np.array(math.nan if normal is None else normal),
            "numpy": np.asarray(keys),
            "numpy_place": np.array([place, has_normal]),
            "numpy_normal": np.array(cached),
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state_dict`."""
        self._settled = None
        normal = float(state["python_normal"])
        words = tuple(int(word) for word in state["python"])
        place, has_normal = (int(value) for value in state["numpy_place"])
        cached = float(state["numpy_normal"])
        random.setstate((3, words, None if math.isnan(normal) else normal))
        np.random.set_state(("MT19937", state["numpy"], place, has_normal, cached))  # noqa: NPY002


class RewardState:
    """The state of a reward after the last step that was learned from, whatever it has judged ahead since.

    Steps that were judged ahead are played and judged again after a resume, so their evidence must not be saved; and
    nobody may read a state that a judging thread is changing.

    Args:
        reward: Any; without a state there is nothing to do.
    """

    def __init__(self, reward: object) -> None:
        self._reward = reward if isinstance(reward, Stateful) else None
        self._judged: dict[int, dict[str, np.ndarray]] = {}
        self._learned: dict[str, np.ndarray] | None = None
        self._ahead: set[int] = set()

    @property
    def any(self) -> bool:
        """Whether the reward has a state."""
        return self._reward is not None

    def begin(self) -> None:
        """Begin a session: what was judged and never learned from is forgotten."""
        if self._ahead and self._learned is not None and self._reward is not None:
            self._reward.load_state_dict(self._learned)
        self._judged, self._ahead = {}, set()

    def judging(self, step: int) -> None:
        """The groups of `step` are about to be judged."""
        if not self._ahead:
            self._learned = self._state()
        self._ahead.add(step)

    def judged(self, step: int) -> None:
        """They have been, and those of the next are not yet."""
        self._judged[step] = self._state()

    def settle(self, step: int) -> None:
        """`step` has been learned from."""
        self._ahead.discard(step)
        self._learned = self._judged.pop(step, self._learned)

    def state_dict(self) -> dict[str, np.ndarray]:
        """As after the last step that was learned from."""
        return self._state() if self._learned is None or not self._ahead else self._learned

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state_dict`."""
        self._judged, self._learned, self._ahead = {}, None, set()
        if self._reward is not None:
            self._reward.load_state_dict(state)

    def _state(self) -> dict[str, np.ndarray]:
        """A copy: what is learned later must not change it."""
        return {} if self._reward is None else {k: np.array(v) for k, v in self._reward.state_dict().items()}


class Checkpoints:
    """The newest checkpoints of a run, and its best.

    Args:
        folder: Where they lie.
        keep: How many of the newest stay on disk, at least 1.
        keep_best: Whether the one of highest score stays as well.
        parts: What is saved and restored beside the learners, by name, where it is `Stateful`.
        timeout_s: Deadline of writing or reading one.
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
        self._writing: asyncio.Task[None] | None = None
        self._first: dict[str, dict[str, np.ndarray]] = {}

    def any(self) -> bool:
        """Whether there is a complete checkpoint."""
        return bool(self.complete())

    def best(self) -> Path | None:
        """The checkpoint of highest score, of equal ones the newest; None where none has a score."""
        scored = [(mark.score, folder) for folder, mark in self._marks().items() if mark.score is not None]
        return max(scored)[1] if scored else None

    def score(self, folder: Path) -> float | None:
        """Mean held-out reward of a checkpoint; None where it was not measured."""
        mark = self._marks().get(folder)
        return None if mark is None else mark.score

    def complete(self) -> list[Path]:
        """Complete checkpoints, newest first."""
        return [mark.parent for mark in checkpoint_marks(self._folder)]

    def standing(self) -> str:
        """What a run that was stopped has saved, and how to go on."""
        saved = self.complete()
        if not saved:
            return f"stopped before a step was saved in {self._folder.parent}; the same call begins anew"
        step = saved[0].name.rpartition("-")[2].lstrip("0")
        return f"stopped; {self._folder.parent} holds the run after step {step}, from which the same call goes on"

    def exported(self) -> None:
        """Note that the run's export holds the newest checkpoint."""
        for newest in self.complete()[:1]:
            (newest / _EXPORTED).touch()

    def finished(self, steps: int, learners: Collection[str]) -> int:
        """Where the newest checkpoint is exported and `steps` or more, load the parts and return its steps; else 0."""
        for folder in self.complete()[:1]:
            try:
                mark = _Mark.read(folder)
                if mark.step >= steps and mark.policies == sorted(learners) and (folder / _EXPORTED).exists():
                    self._load_parts(folder)
                    return mark.step
            except _DAMAGES as cause:  # `restore` will say more
                _log.warning("checkpoint %s does not load (%s)", folder, cause)
        return 0

    def check_resumable(self, learners: Collection[str]) -> None:
        """See that the newest checkpoint is of these learners and parts, before anything is started.

        A damaged checkpoint is left to `restore`, which takes the one before.

        Raises:
            RunFolderError: It holds other policies, or the state of a part does not fit, such as that of a reward with
                other verifiers.
        """
        for folder in self.complete()[:1]:
            try:
                mark = _Mark.read(folder)
                parts = {name: sums for name, sums in mark.files.items() if "/" not in name}
                if find_damage(folder, parts, chunk_bytes=mark.chunk_bytes):
                    return
                states = {name: read_arrays(folder / f"{name}.npz") for name in self._parts}
            except _DAMAGES:
                return
            _check_policies(folder, mark, learners)
            for name, state in states.items():
                self._check_part(folder, name, state)

    def _check_part(self, folder: Path, name: str, state: Mapping[str, np.ndarray] | None) -> None:
        """Load the state of a part and put the part back as it was."""
        part = self._parts[name]
        before = {key: np.array(value) for key, value in part.state_dict().items()}
        try:
            if state is not None:
                part.load_state_dict(state)
                part.load_state_dict(before)
        except (ValueError, KeyError, TypeError, IndexError) as cause:
            raise RunFolderError(
                f"the state of {name} in {folder} does not fit this call: {cause}. Give the run what it was trained "
                "with, or choose another out_dir"
            ) from cause

    def check_room(self, policies: Iterable[tuple[Policy, LearnerConfig]], say: Callable[[str], None]) -> None:
        """See that the disk holds what training `policies` writes: checkpoints, and the export at the end.

        Args:
            policies: Trainable policies with their learner settings.
            say: Shows a line, where there is room for the first checkpoint and not for all that are to be kept.

        Raises:
            RunFolderError: There is no room for one.
        """
        each = export = 0
        for policy, learner in policies:
            model = models.resolve(policy.model)
            export += models.weight_bytes(model)
            each += 0 if policy.lora else models.weight_count(model) * (4 + moment_bytes(learner))  # adapters are small
        there = self._folder.absolute()
        while not there.exists():
            there = there.parent
        free = shutil.disk_usage(there).free
        if free < each + export:
            raise RunFolderError(
                f"{there} has {free / 1e9:.1f} GB free; one checkpoint takes {each / 1e9:.1f} GB and the export "
                f"{export / 1e9:.1f} GB. Make room, or choose another out_dir"
            )
        wanted = (self._keep + self._keep_best + 1 - len(self.complete())) * each + export
        if free < wanted:
            say(
                f"{there} has {free / 1e9:.1f} GB free, and all checkpoints that are kept take {wanted / 1e9:.1f} GB: "
                "lower keep_checkpoints, or make room"
            )

    def policies(self, folder: Path) -> list[str]:
        """Names of the learners in a checkpoint; each has a folder there.

        Raises:
            RunFolderError: Its files are not as they were written.
        """
        try:
            return _checked(folder).policies
        except (OSError, ValueError) as cause:
            raise RunFolderError(f"checkpoint {folder} is damaged: {cause}") from cause

    def is_best(self, score: float | None) -> bool:
        """Whether a checkpoint with `score` would be kept as the best."""
        if score is None or not self._keep_best:
            return False
        scores = [mark.score for mark in self._marks().values() if mark.score is not None]
        return score >= max(scores, default=-math.inf)

    async def start(self, step: int, learners: Mapping[str, Learner], *, score: float | None = None) -> None:
        """Take the state after `step` steps, and begin to write it.

        Waits for the checkpoint before, if it is still being written. That it could not be written is a warning here,
        and the run goes on: this one is the next attempt.
        """
        try:
            await self.finish()
        except RunFolderError as cause:
            _log.warning("%s; training goes on", cause)
        taken = asyncio.Event()
        self._writing = asyncio.ensure_future(self._write(step, learners, score, taken))
        begun = asyncio.ensure_future(taken.wait())
        await asyncio.wait({self._writing, begun}, return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()

    async def finish(self) -> None:
        """Wait until what `start` began is on disk.

        Raises:
            RunFolderError: It could not be written; older ones are untouched.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    async def save(self, step: int, learners: Mapping[str, Learner], *, score: float | None = None) -> None:
        """`start` and `finish`."""
        await self.start(step, learners, score=score)
        await self.finish()

    async def settle(self) -> None:
        """End what is under way, whatever becomes of the run: wait for it, or drop it where the run was cancelled."""
        task = asyncio.current_task()
        if self._writing is not None and task is not None and task.cancelling():
            self._writing.cancel()
        try:
            await self.finish()
        except (ForgeError, asyncio.CancelledError) as cause:
            _log.warning("the last checkpoint was not finished: %s", cause)

    async def restore(self, learners: Mapping[str, Learner]) -> int:
        """Load the newest checkpoint that loads; newer, damaged ones are renamed ``damaged-NNNNNN``.

        Where there is none, parts are as they were when this was called first.

        Returns:
            The step to continue from; 0 where there is none.

        Raises:
            ForgeError: Checkpoints are there and none of them loads, or they hold other policies.
        """
        damaged: dict[Path, BaseException] = {}
        for folder in self.complete():
            try:
                checking = asyncio.to_thread(_checked, folder)
                mark = await with_deadline(checking, self._timeout_s, who=str(folder), what="the check of its sums")
                if mark.policies == sorted(learners):
                    await self._load(folder, learners)
            except (StallError, ActorDiedError):
                raise
            except _DAMAGES as cause:
                _log.warning("checkpoint %s does not load (%s); trying the one before", folder, cause)
                damaged[folder] = cause
                continue
            _check_policies(folder, mark, learners)
            for newer in damaged:  # the run will come to their steps again
                name = newer.name.replace("step", "damaged")
                names = itertools.chain((name,), (f"{name}.{number}" for number in itertools.count(2)))
                newer.replace(next(p for p in map(self._folder.joinpath, names) if not p.exists()))
            return mark.step
        if damaged:
            raise ForgeError("no checkpoint loads: " + "; ".join(f"{path}: {why}" for path, why in damaged.items()))
        for name, state in self._first.items():
            self._parts[name].load_state_dict(state)
        self._first = {name: {k: np.array(v) for k, v in p.state_dict().items()} for name, p in self._parts.items()}
        return 0

    async def _write(
        self, step: int, learners: Mapping[str, Learner], score: float | None, taken: asyncio.Event
    ) -> None:
        # Under a name that nobody looks for until all files and, last, the mark are there: a kill leaves no half one.
        draft, final = self._folder / f".draft-{step:06d}", self._folder / f"step-{step:06d}"
        try:
            for old in self._folder.glob(".draft-*"):
                shutil.rmtree(old, ignore_errors=True)
            draft.mkdir(parents=True)
            sums: dict[str, list[int]] = {}
            for name, part in self._parts.items():
                whole, own_sums = io.BytesIO(), Checksums()
                np.savez(whole, allow_pickle=False, **part.state_dict())
                own_sums.add(whole.getbuffer())
                (draft / f"{name}.npz").write_bytes(whole.getbuffer())
                sums[f"{name}.npz"] = own_sums.all
            await all_or_first_error(
                learner.start_save(draft / name, timeout_s=self._timeout_s) for name, learner in learners.items()
            )
            taken.set()
            written = await all_or_first_error(
                learner.finish_save(timeout_s=self._timeout_s) for learner in learners.values()
            )
            for learner, own in zip(learners, written, strict=True):
                sums |= {f"{learner}/{name}": found for name, found in own.items()}
            known = score if score is not None and math.isfinite(score) else None
            mark = _Mark(step=step, policies=sorted(learners), score=known, files=sums, chunk_bytes=CHUNK_BYTES)
            await asyncio.to_thread(_put_in_place, draft, final, mark)
            best = self.best() if self._keep_best else None
            for old in self.complete()[self._keep :]:
                if old != best:
                    shutil.rmtree(old, ignore_errors=True)
        except StallError:
            raise
        except OSError as cause:
            shutil.rmtree(draft, ignore_errors=True)
            kept = next(iter(self.complete()), None)
            raise RunFolderError(
                f"the checkpoint of step {step} cannot be written ({cause}); "
                + (f"the newest is {kept}" if kept else "there is none yet")
                + ". Make room, or the folder writable"
            ) from cause

    async def _load(self, folder: Path, learners: Mapping[str, Learner]) -> None:
        await all_or_first_error(
            learner.load(folder / name, timeout_s=self._timeout_s) for name, learner in learners.items()
        )
        self._load_parts(folder)

    def _load_parts(self, folder: Path) -> None:
        states = {name: read_arrays(folder / f"{name}.npz") for name in self._parts}
        for name, state in states.items():
            if state is None:
                _log.warning("checkpoint %s holds no %s, which starts afresh", folder, name)
            else:
                self._parts[name].load_state_dict(state)

    def _marks(self) -> dict[Path, _Mark]:
        """What can be read of the complete checkpoints, newest first."""
        found = {}
        for folder in self.complete():
            try:
                found[folder] = _Mark.read(folder)
            except (OSError, ValueError) as cause:
                _log.warning("checkpoint %s: %s", folder, cause)
        return found


def _check_policies(folder: Path, mark: _Mark, learners: Collection[str]) -> None:
    if mark.policies != sorted(learners):
        raise RunFolderError(
            f"{folder} holds the policies {mark.policies}, this run trains {sorted(learners)}; choose another out_dir"
        )


def _put_in_place(draft: Path, final: Path, mark: _Mark) -> None:
    """Give a draft its mark and its name; a power cut leaves the whole of it or no mark."""
    with (draft / CHECKPOINT_MARK).open("w") as file:
        json.dump(asdict(mark), file)
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(final, ignore_errors=True)
    draft.rename(final)


def _checked(folder: Path) -> _Mark:
    """The mark of a checkpoint whose files are as they were written.

    Raises:
        ValueError, OSError: They are not.
    """
    mark = _Mark.read(folder)
    try:
        wrong = find_damage(folder, mark.files, chunk_bytes=mark.chunk_bytes)
    except TypeError as cause:
        raise ValueError(f"{CHECKPOINT_MARK} is damaged: {cause!r}") from cause
    if wrong:
        raise ValueError(wrong)
    return mark


def export_checkpoint(
    run: str | os.PathLike[str],
    *,
    checkpoint: str = "best",
    out: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Write the weights of one checkpoint in Hugging Face format, without engines and without the run's ranks.

    Args:
        run: The folder of a training: what `GRPOTrainer`, `SFTTrainer` or `DPOTrainer` had as ``out_dir``.
        checkpoint: "best", of the highest held-out reward (the newest where none was measured); "newest"; or the name
            of one, such as "step-000020".
        out: The new folder; None is ``RUN/export-step-NNNNNN``.
        say: Called with a line that names the checkpoint and its held-out reward, before the export.

    Returns:
        The folder: a model, or a subfolder for each policy where several were trained.

    Raises:
        RunFolderError: There is no such run or checkpoint, it is damaged, or `out` exists.
    """
    from forge_trainers.learner.core import LearnerCore

    folder = user_path(run)
    check_contained(folder)
    policies, kept = _policies(folder), Checkpoints(folder / "checkpoints", keep=1)
    chosen = _chosen(kept, checkpoint, folder)
    target = user_path(out) if out else folder / f"export-{chosen.name}"
    if target.exists():
        raise RunFolderError(f"{target} is there already; name another folder with --out, or remove it")
    names = kept.policies(chosen)
    if say is not None:
        score = kept.score(chosen)
        reward = "no held-out reward" if score is None else f"held-out reward {score:.4f}"
        say(f"checkpoint  {chosen.name}, {reward}")
    for name in names:
        with tempfile.TemporaryDirectory() as dump:
            core = LearnerCore(_config(name, policies, dump))
            core.load(chosen / name)
            core.export(target if len(names) == 1 else target / name)
    return target


def _policies(folder: Path) -> Mapping[str, Any]:
    """Settings of the run's policies, by name."""
    file = folder / "config.yaml"
    try:
        settings = safe_yaml.read(file)
        found: Mapping[str, Any] = settings.get("policies") or {settings["policy"]["name"]: settings["policy"]}
    except OSError as cause:
        raise RunFolderError(f"{file} cannot be read ({cause}); give the folder of a training run") from cause
    except (ValueError, AttributeError, KeyError, TypeError) as cause:
        raise RunFolderError(f"{file} names no policies ({cause!r}); give the folder of a training run") from cause
    return found


def _chosen(kept: Checkpoints, which: str, folder: Path) -> Path:
    complete = {one.name: one for one in kept.complete()}
    if not complete:
        raise RunFolderError(f"{folder} holds no complete checkpoint; `checkpoint_every` says how often one is written")
    newest = next(iter(complete.values()))
    found = {"best": kept.best() or newest, "newest": newest, **complete}
    if which not in found:
        raise RunFolderError(f"{folder} has no checkpoint {which!r}; there are {', '.join(found)}")
    return found[which]


def _config(name: str, policies: Mapping[str, Any], dump: str) -> LearnerConfig:
    """What is needed to hold the weights; how they were learned does not matter any more."""
    try:
        policy = policies[name]
        adapter = policy.get("lora")
        lora = None if adapter is None else LoRA(**adapter)
        model = str(models.resolve(policy["model"]))
    except (KeyError, TypeError, AttributeError) as cause:
        raise RunFolderError(f"config.yaml says nothing of the policy {name!r} in the checkpoint: {cause!r}") from cause
    return LearnerConfig(model=model, lora=lora, dump_folder=dump)
