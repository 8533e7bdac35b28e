"""What a run leaves on disk: settings, metrics, curves, sampled episodes, failed batches; and how it is read back.

In: a folder, metrics by step, episodes. Out: ``config.yaml``, ``metrics.jsonl``, a tracker's curves,
``episodes.jsonl``, ``verifiers.jsonl``, ``ending.json``, ``reward.png``. Waits for the disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self
from zipfile import BadZipFile, ZipFile

import numpy as np
import yaml

from forge_agents import safe_yaml
from forge_agents.bench.fingerprints import provenance
from forge_agents.display import visible
from forge_agents.episodes.stored import EPISODES
from forge_agents.errors import ForgeError, RunFolderError
from forge_agents.files import check_contained, check_plain_files, user_path
from forge_agents.models import resolve as models
from forge_agents.models.fingerprint import sampled_hash
from forge_agents.policy import Policy
from forge_agents.runtime.threads import begin_in_thread
from forge_agents.types import Episode, EpisodeBatch
from forge_trainers.records import trackers
from forge_trainers.records.plots import draw_curve, picture
from forge_trainers.records.trackers import Tracker, leaves, open_tracker

if TYPE_CHECKING:
    from forge_verifiers.report.report import Snapshot

_log = logging.getLogger(__name__)
_VERIFIERS = "verifiers.jsonl"
_OWN, _CURVES = (".lock", "config.yaml", "data.sha256"), "events.out.tfevents"
"""Files that each run's folder holds before anything has come of the run."""
_MOST_CHANGES = 20
CHECKPOINT_MARK = "experiment.json"
"""The file that a checkpoint holds once it is complete."""
_REWARDS = {"reward/mean": "training episodes", "eval/reward": "held-out seeds"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """What `fit` did."""

    steps: int
    """Steps of the run so far, earlier sessions included."""
    metrics: Sequence[dict[str, Any]] = dataclasses.field(repr=False)
    """One row per step, as in ``metrics.jsonl``."""
    out_dir: Path
    export: Path
    """Folder with the trained model, or one subfolder per policy where several were trained."""
    curve: Path | None
    """``reward.png``, or of supervised fine-tuning ``loss.png``."""
    reason: str = ""
    """Why the run was over before its steps were done: ``solved: ...``, or ``plateau: ...`` where every episode earned
    the highest reward that was seen and nobody knows whether more can be earned. Empty where all were done."""
    first_step_s: float | None = dataclasses.field(default=None, compare=False)
    """From the call until its first step was done, all starts included; None where it did no step, and of supervised
    fine-tuning."""


def _changes(before: str, after: str) -> str:
    """The settings in which two texts of YAML differ, the first of them."""
    try:
        old, new = (dict(leaves(safe_yaml.load(text))) for text in (before, after))
    except ValueError:
        return "config.yaml could not be read"
    keys = [key for key in (new | old) if old.get(key) != new.get(key)]
    told = [f"{key}: {str(old.get(key))[:80]} -> {str(new.get(key))[:80]}" for key in keys[:_MOST_CHANGES]]
    return visible("; ".join([*told, f"and {len(keys) - len(told)} more"] if keys[len(told) :] else told))


def check_resumable(folder: Path, settings: Mapping[str, Any], fixed: Iterable[str]) -> None:
    """Refuse to resume a run with another value of a setting that its checkpoints depend on.

    Args:
        folder: The run's folder, with or without a run.
        settings: Those of the new session, as for `RunFolder`.
        fixed: Dotted keys that must be as in ``config.yaml``, each with all keys below it. A key that one of the two
            does not have is not compared.

    Raises:
        RunFolderError: Names the first setting that differs, and both values; or a link that leads out of the folder.
    """
    check_contained(folder)
    try:
        before = safe_yaml.read(folder / "config.yaml")
    except (OSError, ValueError):
        return  # no run, or a damaged record, which says nothing
    after = yaml.safe_load(yaml.safe_dump(dict(settings)))  # a tuple is a list in the file
    for key in fixed:
        found = [_at(values, key) for values in (before, after)]
        if _ABSENT in found:
            continue
        if found[0] is None or found[1] is None:  # nothing against several settings
            old, new = ({key: value} for value in found)
        else:
            old, new = (dict(leaves(value, key)) for value in found)
        if changed := next((name for name in (old | new) if old.get(name) != new.get(name)), None):
            setting, values = changed, [str(side.get(changed)) for side in (old, new)]
            if key.startswith("weights."):  # a hash is no setting
                setting = _model_setting(after, key.removeprefix("weights."))
                names = [_at(side, setting) for side in (before, after)]
                values = [f"{name} (hash {value})" for name, value in zip(names, values, strict=True)]
            raise RunFolderError(
                visible(
                    f"{setting} is {values[0]} in the run in {folder} and {values[1]} in this call. It "
                    f"cannot change when a run is resumed: set {setting} back, or choose another out_dir"
                )
            )


def _model_setting(settings: Mapping[str, Any], policy: str) -> str:
    """The dotted key of the model of a policy, in the settings of a run with one policy or several."""
    return f"policies.{policy}.model" if "policies" in settings else "policy.model"


_ABSENT = object()


def _at(values: Any, key: str) -> Any:
    """The value at a dotted key; `_ABSENT` where there is none."""
    for name in key.split("."):
        if not isinstance(values, Mapping) or name not in values:
            return _ABSENT
        values = values[name]
    return values


def hashes_of_models(policies: Mapping[str, Policy]) -> dict[str, str]:
    """Hashes of the models that policies start from, by policy; see `sampled_hash`.

    A model that is not on this machine, or not completely, is left out: its weights are not known yet.
    """
    hashes: dict[str, str] = {}
    for name, policy in policies.items():
        with contextlib.suppress(ForgeError, OSError):
            if (folder := models.local_folder(policy.model)) is not None:
                models.check_complete(folder)
                hashes[name] = sampled_hash(folder)
    return hashes


def installed_packages() -> dict[str, str]:
    """Versions of the packages that decide what a run computes, by name."""
    found: dict[str, str] = provenance()["packages"]
    return found


class RunFolder:
    """One run's folder, held by one process at a time.

    Steps have one number everywhere, from 1: in its files, on the console and in the names of checkpoints. The row of
    step 3 says what the third step came to, and ``step-000003`` holds the weights after it.

    Args:
        path: Created where absent.
        config: Resolved settings, JSON-safe; written to ``config.yaml`` where there is none. Where the folder holds
            other settings, `keep_settings` replaces them.
        tracker: Where curves go beside ``metrics.jsonl``.

    Raises:
        RunFolderError: The folder cannot be written, holds links, or another process trains in it.
        MissingExtraError: The tracker is not installed.
        StallError: The tracker does not open in time.
    """

    def __init__(
        self, path: str | os.PathLike[str], config: Mapping[str, Any], *, tracker: Tracker = "tensorboard"
    ) -> None:
        self.path = user_path(path)
        self._odd: set[str] = set()
        """Metrics of which a warning has said that they are no numbers."""
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self._was_empty = not (self.path.exists() and any(self.path.iterdir()))
        check_contained(self.path)  # what is written and deleted below would follow links of somebody else
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = (self.path / ".lock").open("a")
        except OSError as cause:
            raise RunFolderError(f"run folder {self.path} cannot be used ({cause}); choose another out_dir") from cause
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            self._lock.close()
            raise RunFolderError(
                f"another process is training in {self.path}; choose another out_dir or stop it"
            ) from cause
        self._settings, written = yaml.safe_dump(dict(config), sort_keys=False), self.path / "config.yaml"
        self.changed = ""
        """Settings that differ from the last session's, ``key: old -> new``; empty where none does."""
        if not written.exists():
            write_atomically(written, self._settings)
        elif (before := written.read_text(errors="replace")) != self._settings:
            self.changed = _changes(before, self._settings)
        try:
            self._tracker, self._curves = tracker, open_tracker(tracker, self.path, config)
            self._tracking: Future[None] | None = None
        except BaseException:
            self._lock.close()
            self._leave_nothing()
            raise

    def keep_settings(self) -> None:
        """Replace the settings of an earlier session, which stay in ``config.previous.yaml``.

        Call it once the run has started: a call that was refused must leave the record of the run as it was.
        """
        written = self.path / "config.yaml"
        if written.read_text(errors="replace") != self._settings:
            written.replace(self.path / "config.previous.yaml")
            write_atomically(written, self._settings)

    def rewind(self, steps: int) -> None:
        """Forget what was logged after `steps` steps: a resumed run logs the later ones again."""
        for name in ("metrics.jsonl", EPISODES, _VERIFIERS):
            file = self.path / name
            if file.exists():
                draft = file.with_name(f".{name}.draft")
                with draft.open("w") as kept:  # line by line: a long run's episodes may be larger than the memory
                    kept.writelines(f"{line.rstrip()}\n" for line, row in _rows(file) if row["step"] <= steps)
                draft.replace(file)
        (self.path / "ending.json").unlink(missing_ok=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row of metrics, to ``metrics.jsonl`` and the tracker. NaN and infinity are written as null.

        A metric that is no number, such as one that a loss returned by mistake, is null with a warning.
        """
        numbers = {name: _number(value) for name, value in metrics.items()}
        if odd := [name for name, value in numbers.items() if value is None and name not in self._odd]:
            self._odd.update(odd)
            _log.warning("metrics that are no numbers are written as null: %s", ", ".join(odd))
        known = {name: value for name, value in numbers.items() if value is not None}
        clean = {name: known[name] if math.isfinite(known.get(name, math.nan)) else None for name in metrics}
        self._append("metrics.jsonl", [{"step": step, **clean}])
        self._track(f"take step {step}", trackers.TRACKER_TIMEOUT_S, self._curves.log, step, known)

    def _track(
        self, what: str, timeout_s: float, call: Callable[..., None], *args: Any, quiet: bool = False
    ) -> None:
        """Let the tracker take something; a curve is not worth a run, nor the wait for it: metrics.jsonl has it."""
        if not self._tracker_answers:
            return
        self._tracking = begin_in_thread(call, *args, name=f"tracker {self._tracker}")
        try:
            self._tracking.result(timeout_s)
        except Exception as error:  # noqa: BLE001  # its own, or the deadline's
            why = f"{type(error).__name__}: {error}"
            if not self._tracking.done():
                why = f"no answer in {timeout_s:g} s; until there is, it is given nothing more"
            _log.log(logging.DEBUG if quiet else logging.WARNING, "%s did not %s (%s)", self._tracker, what, why)

    @property
    def _tracker_answers(self) -> bool:
        return self._tracking is None or self._tracking.done()

    def keep_episodes(
        self,
        step: int,
        episodes: Sequence[Episode],
        rewards: Sequence[Mapping[str, float]],
        advantages: Sequence[Mapping[str, Sequence[float]]] | None = None,
        trained: Iterable[str] = (),
    ) -> None:
        """Append whole episodes, tokens and all, each with the `rewards` that its agents were trained on.

        Args:
            advantages: Per episode, by agent: of each turn's tokens. None where nothing was learned.
            trained: Policies that learn.
        """
        learners = sorted(trained)
        learned = advantages or [{}] * len(episodes)
        self._append(
            EPISODES,
            [
                {
                    "step": step,
                    "trained": learners,
                    "rewards": dict(reward),
                    "advantages": dict(own),
                    **episode.as_json(),
                }
                for episode, reward, own in zip(episodes, rewards, learned, strict=True)
            ],
        )

    def end(self, step: int, kind: str, reason: str) -> None:
        """Say in ``ending.json`` why the run was over after `step`, before its steps were done."""
        said = {"step": step, "ending": kind, "reason": reason}
        write_atomically(self.path / "ending.json", json.dumps(said, indent=2) + "\n")

    def keep_verifiers(self, step: int, reward: object) -> None:
        """Append what an ensemble believes of its verifiers: `reward`, or else the first among its parts, if any."""
        report = _report_of(reward)
        if report is not None:
            self._append(_VERIFIERS, [{"step": step, **report.row()}])

    def metrics(self) -> list[dict[str, Any]]:
        """Every row logged so far."""
        file = self.path / "metrics.jsonl"
        return read_rows(file) if file.exists() else []

    def plot_rewards(self, policies: Collection[str]) -> Path | None:
        """Draw ``reward.png``: the mean over trained policies, and each of several; None before any step."""
        own = {f"reward/{name}": f"{name}, training episodes" for name in policies if len(policies) > 1}
        return self.plot(curves={**_REWARDS, **own})

    def plot(self, what: str = "reward", curves: Mapping[str, str] = _REWARDS) -> Path | None:
        """Draw metrics by step into ``WHAT.png``; None before any step.

        Args:
            what: What the metrics measure.
            curves: Label by metric. The half-width of a mean is shaded, where there is one.
        """
        rows = self.metrics()
        if not rows:
            return None
        target = self.path / f"{what}.png"
        with picture(target, size=(7, 4), xlabel="step", ylabel=f"mean {what}") as axes:
            for metric, label in curves.items():
                group, _, rest = metric.partition("/")
                width = f"{group}/ci" if metric in _REWARDS else f"{group}_ci/{rest}"
                draw_curve(axes, rows, metric, width, label=label, marker="o" if group == "eval" else "")
        return target

    def close(self, *, quiet: bool = False) -> None:
        """Release the folder; `quiet`, because an error says already that the disk takes no more."""
        if not self._tracker_answers:
            _log.warning("%s is left open: it still has not answered", self._tracker)
        self._track("close", trackers.CLOSE_TIMEOUT_S, self._curves.close, quiet=quiet)
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Release the folder. Where nothing came of the run but an error, as of a call that was refused, remove it."""
        self.close(quiet=kind is not None and issubclass(kind, RunFolderError))
        if kind is not None:
            self._leave_nothing()

    def _leave_nothing(self) -> None:
        """Remove what `__init__` wrote if there was nothing before and there is nothing else."""
        files = [file for file in self.path.rglob("*") if not file.is_dir()] if self._was_empty else []
        if not files or any(file.name not in _OWN and not file.name.startswith(_CURVES) for file in files):
            return
        for file in files:
            file.unlink()
        for folder in (*sorted(self.path.rglob("*"), reverse=True), *self._made):
            with contextlib.suppress(OSError):  # somebody else uses it
                folder.rmdir()

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        try:
            with (self.path / name).open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        except OSError as cause:
            raise RunFolderError(
                f"{self.path / name} cannot be written ({cause}); make room and run it again: it goes on from the "
                "newest checkpoint"
            ) from cause


def _number(value: Any) -> float | None:
    """A metric as a Python number; None where it is none."""
    if isinstance(value, int | float):
        return value
    try:
        return None if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        return None


def _report_of(reward: object) -> Any:
    """The first report with a ``row()`` that `reward` or a part of it gives; None where there is none."""
    report, parts = getattr(reward, "report", None), getattr(reward, "parts", None)
    found: Any = report() if callable(report) else None
    if hasattr(found, "row"):
        return found
    held = parts() if callable(parts) else None
    each = (_report_of(part) for part in held.values()) if isinstance(held, Mapping) else ()
    return next((found for found in each if found is not None), None)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of one of a run's JSON-lines files; a last line that a kill cut short is dropped.

    Raises:
        RunFolderError: Another line is no JSON object with a step.
    """
    return [row for _, row in _rows(file)]


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line, and what it holds: an object with the number of a step."""
    with file.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):  # also a number of more than 4,300 digits
                if next(lines, None) is not None:
                    raise RunFolderError(f"{file}:{number} is not JSON; the file was edited or damaged") from None
                return
            if not isinstance(row, dict) or type(row.get("step")) is not int:
                raise RunFolderError(f"{file}:{number} has no number of a step; the file was edited or damaged")
            yield line, row


def write_atomically(file: Path, text: str) -> None:
    """Put `text` in the place of `file`: whoever reads it sees the old or the new."""
    draft = file.with_name(f".{file.name}.draft")
    draft.write_text(text)
    draft.replace(file)


def verifier_history(folder: str | os.PathLike[str]) -> list[Snapshot]:
    """One snapshot per logged step of a run, oldest first, at least one.

    The last report carries the score rows of the newest checkpoint, where there is one.

    Raises:
        RunFolderError: The folder holds no run, a run without verifiers, or a damaged one.
    """
    from forge_verifiers.report.report import EnsembleReport, Evidence, Snapshot

    path = user_path(folder)
    check_plain_files(path)
    if not (path / "config.yaml").exists():
        raise RunFolderError(f"{path} is no run folder: it has no config.yaml; give the out_dir of a training run")
    if not (path / _VERIFIERS).exists():
        raise RunFolderError(
            f"the run in {path} has no verifiers: there is no {_VERIFIERS}. Training writes it where the reward is or "
            "holds an Ensemble"
        )
    metrics = read_rows(path / "metrics.jsonl") if (path / "metrics.jsonl").exists() else []
    rewards = {row["step"]: row.get("reward/mean") for row in metrics}
    snapshots = []
    for row in read_rows(path / _VERIFIERS):
        try:
            step, found = int(row["step"]), EnsembleReport.from_row(row)
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as cause:
            raise RunFolderError(f"{path / _VERIFIERS} holds something that is not a report: {cause}") from cause
        reward = rewards.get(step)
        snapshots.append(Snapshot(step=step, report=found, reward=math.nan if reward is None else reward))
    if not snapshots:
        raise RunFolderError(f"{path / _VERIFIERS} is empty: no step of the run is finished yet; wait for the first")
    last, report = snapshots[-1], snapshots[-1].report
    names = [verifier.name for verifier in report.verifiers]
    saved = saved_reward(path / "checkpoints")
    for key, value in saved.items():  # the ensemble may be a part of the reward
        if (key == "names" or key.endswith("/names")) and value.tolist() == names:
            prefix = key.removesuffix("names")
            state = {k.removeprefix(prefix): v for k, v in saved.items() if k.startswith(prefix)}
            evidence = Evidence.from_state(state, [v.family for v in report.verifiers])
            snapshots[-1] = dataclasses.replace(last, report=dataclasses.replace(report, evidence=evidence))
            break
    return snapshots


def checkpoint_marks(folder: Path) -> list[Path]:
    """The mark of each complete checkpoint in `folder`, newest first, also past step 999999."""
    found = folder.glob(f"step-*/{CHECKPOINT_MARK}")
    return sorted(found, key=lambda mark: (len(mark.parent.name), mark.parent.name), reverse=True)


def saved_reward(folder: Path) -> dict[str, np.ndarray]:
    """What the reward had learned at the newest complete checkpoint in `folder`; empty where nothing was saved.

    Raises:
        ForgeError: It cannot be read.
    """
    files = (mark.with_name("reward.npz") for mark in checkpoint_marks(folder))
    newest = next((file for file in files if file.exists()), None)
    if newest is None:
        return {}
    try:
        return read_arrays(newest) or {}
    except (OSError, ValueError, BadZipFile) as cause:
        raise ForgeError(f"{newest} cannot be read ({cause}); delete that checkpoint") from cause


def read_arrays(file: Path) -> dict[str, np.ndarray] | None:
    """Read what ``np.savez`` wrote; None if there is no such file. Memory is bounded by the size of the file.

    Raises:
        ValueError, BadZipFile: The file is damaged, or holds compressed or overlapping parts, which stand for more.
        OSError: The file cannot be read.
    """
    if not file.exists():
        return None
    size = file.stat().st_size
    with ZipFile(file) as parts:
        if sum(part.file_size for part in parts.infolist()) > size:
            raise ValueError(f"{file.name} has {size} bytes and stands for more; np.savez does not compress")
    try:
        with np.load(file, allow_pickle=False) as saved:
            return dict(saved)
    except MemoryError as cause:
        raise ValueError(f"{file.name} names an array that no memory holds") from cause


def dump_batch(batch: EpisodeBatch, file: str | os.PathLike[str], facts: Mapping[str, Any]) -> Path:
    """Write `batch` to `file`, and `facts`, JSON-safe, beside it with the ending ``.json``.

    Args:
        file: Its folder is created; an existing file is replaced.

    Returns:
        `file`.
    """
    from safetensors.torch import save_file

    target = Path(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    flat = batch.flatten_keys(".")
    save_file({str(name): flat[name].contiguous() for name in flat.keys()}, target)  # noqa: SIM118  # no mapping
    target.with_suffix(".json").write_text(json.dumps(dict(facts), indent=2) + "\n")
    return target


def load_batch(file: str | os.PathLike[str]) -> EpisodeBatch:
    """The batch that `dump_batch` wrote, checked.

    Raises:
        RunFolderError: The file cannot be read.
        ValueError: It holds something else.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from tensordict import TensorDict

    from forge_trainers.batch.packing import check_batch

    try:
        flat = load_file(file)
    except (OSError, SafetensorError) as cause:
        raise RunFolderError(f"{os.fspath(file)} cannot be read as a batch ({cause})") from cause
    parts: dict[str, dict[str, Any]] = {"tokens": {}, "samples": {}}
    for name, column in flat.items():
        part, _, key = name.partition(".")
        parts.setdefault(part, {})[key] = column
    sizes = {part: [len(next(iter(columns.values())))] if columns else [0] for part, columns in parts.items()}
    batch = TensorDict(
        {part: TensorDict(columns, batch_size=sizes[part]) for part, columns in parts.items()},
        batch_size=[],
    )
    check_batch(batch)
    return batch
