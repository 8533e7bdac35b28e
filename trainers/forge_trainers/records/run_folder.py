"""Files of a run: settings, metrics, curves, episodes and failed batches, written and read back."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import tokenize
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from zipfile import BadZipFile, ZipFile

import numpy as np
import yaml

from forge_agents import safe_yaml
from forge_agents.bench.fingerprints import provenance
from forge_agents.display import visible
from forge_agents.episodes.stored import EPISODES, MAX_LINE_BYTES, MAX_LINE_COMMAS
from forge_agents.errors import ForgeError, RunFolderError
from forge_agents.files import (
    check_contained,
    check_dense,
    check_plain_file,
    check_plain_files,
    complete_checkpoints,
    lock_file,
    user_path,
    warn_of_other_writers,
)
from forge_agents.http_body import MAX_COMMAS, bounded_json
from forge_agents.models import resolve as models
from forge_agents.models.fingerprint import sampled_hash
from forge_agents.policy import Policy
from forge_agents.runtime.threads import begin_in_thread
from forge_agents.types import Episode, EpisodeBatch
from forge_trainers.records import trackers
from forge_trainers.records.plots import draw_curve, picture
from forge_trainers.records.trackers import leaves, open_tracker

if TYPE_CHECKING:
    from forge_verifiers.report.report import Snapshot

_log = logging.getLogger(__name__)
_VERIFIERS, _WARNINGS = "verifiers.jsonl", "warnings.jsonl"
_OWN, _CURVES = (".lock", "config.yaml", "plan.yaml", "data.sha256"), "events.out.tfevents"
"""Files that a run folder holds before the first step."""
_REPLACED = (
    "config.yaml", "plan.yaml", "metrics.jsonl", EPISODES, _VERIFIERS, _WARNINGS, "ending.json", "league.json",
    "reward.png", "loss.png", "checkpoints", "export", "league",
)  # fmt: skip
"""Files and folders that a run replaces or deletes."""
_RUN_KEYS = {
    "config.yaml": frozenset(("policies", "policy", "trainer", "packages")),
    "plan.yaml": frozenset(("engines", "learners")),  # which an evaluation writes before a run begins
}
"""Files of settings, and keys of which each has at least one."""
_MAX_CHANGES = 20
_MAX_NAMES = 10_000_000
"""Maximum number of characters in the dotted keys of settings together. A megabyte of long keys in each other, with
many values in the last, stands for far more."""
_MAX_STEP = 1 << 53
_REWARDS = {"reward/mean": "training episodes", "eval/reward": "held-out seeds"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """Result of `fit`."""

    steps: int
    """Number of steps of the run so far, including earlier sessions."""
    metrics: Sequence[dict[str, Any]] = dataclasses.field(repr=False)
    """A row per step, as in ``metrics.jsonl``."""
    out_dir: Path
    export: Path
    """Folder of the trained model, or of one subfolder per policy if several were trained."""
    curve: Path | None
    """``reward.png``, or ``loss.png`` of fine-tuning."""
    reason: str = ""
    """Reason why the run ended early: ``solved: ...``, or ``plateau: ...`` if every episode earned the highest reward
    seen and the maximum is unknown. Empty if all steps were done."""
    first_step_s: float | None = dataclasses.field(default=None, compare=False)
    """Seconds from the call to the end of its first step, including startup. None without a step or in fine-tuning."""


def _as_written(value: Any) -> Any:
    """Return a setting as it is read from a file: a tuple is a list there."""
    if isinstance(value, Mapping):
        return {key: _as_written(part) for key, part in value.items()}
    return [_as_written(part) for part in value] if isinstance(value, list | tuple) else value


def _by_key(settings: Any, at: str = "") -> dict[str, Any]:
    """Return settings of a file by dotted key. Raises ValueError if the keys have more than `_MAX_NAMES` characters."""
    result: dict[str, Any] = {}
    size = 0
    for key, value in leaves(settings, at):
        size += len(key)
        if size > _MAX_NAMES:
            raise ValueError(f"names of settings with more than {_MAX_NAMES // 1_000_000} million characters together")
        result[key] = value
    return result


def _changes(before: str, after: Mapping[str, Any]) -> str:
    """Return the settings in which a YAML text differs from `after`, at most `_MAX_CHANGES` of them."""
    try:
        old, new = _by_key(safe_yaml.load(before)), _by_key(_as_written(after))
    except ValueError:
        return "config.yaml could not be read"
    keys = [key for key in (new | old) if old.get(key) != new.get(key)]
    changes = [f"{key:.200}: {str(old.get(key))[:80]} -> {str(new.get(key))[:80]}" for key in keys[:_MAX_CHANGES]]
    return visible("; ".join([*changes, f"and {len(keys) - len(changes)} more"] if keys[len(changes) :] else changes))


def check_is_run(folder: Path) -> None:
    """Refuse a folder with links out of it, or without a run but with files of names that a run replaces or deletes.

    Raises:
        RunFolderError: There is such an entry, which another program, the user or a stranger has made.
    """
    check_contained(folder)  # files would be written and deleted through links
    if (folder / ".lock").exists():
        return
    names = [name for name in _REPLACED if (folder / name).exists()]
    if not names:
        return
    for name, keys in _RUN_KEYS.items():
        with contextlib.suppress(OSError, ValueError):
            settings = safe_yaml.read(folder / name)
            if isinstance(settings, dict) and not keys.isdisjoint(settings):
                return
    raise RunFolderError(
        f"{folder} is no folder of a run and has {', '.join(names)}, which a run would replace. Choose another out_dir"
    )


def check_begins(folder: Path) -> None:
    """Refuse to begin a run where a finished one was, whose checkpoints are gone: its records would be deleted.

    Raises:
        RunFolderError: There are metrics and an exported model.
    """
    if (folder / "metrics.jsonl").exists() and (folder / "export").exists():
        raise RunFolderError(
            f"{folder} has a finished run without its checkpoints, so that a run would begin anew and delete its "
            "records. Choose another out_dir, or remove the export"
        )


def check_resumable(folder: Path, settings: Mapping[str, Any], fixed: Iterable[str]) -> None:
    """Raise RunFolderError if a resumed run has other settings than ``config.yaml``, or a link leads out of the folder.

    `fixed` are dotted keys that must be equal, each with all keys below it. Keys that one of the two lacks are not
    compared. A folder that is no run's is refused by `check_is_run`.
    """
    check_is_run(folder)
    try:
        before = safe_yaml.read(folder / "config.yaml")
    except (OSError, ValueError):
        return  # no run, or a damaged record
    after = _as_written(settings)
    for key in fixed:
        pair = [_at(values, key) for values in (before, after)]
        if _ABSENT in pair:
            continue
        if None in pair:  # None against several settings
            old, new = ({key: value} for value in pair)
        else:
            try:
                old, new = (_by_key(value, key) for value in pair)
            except ValueError as cause:
                raise RunFolderError(f"{folder / 'config.yaml'} has {cause}. Choose another out_dir") from None
        if changed := next((name for name in (old | new) if old.get(name) != new.get(name)), None):
            setting, values = changed, [str(side.get(changed)) for side in (old, new)]
            if key.startswith("weights."):  # name the model instead of its hash
                policy = key.removeprefix("weights.")
                setting = f"policies.{policy}.model" if "policies" in after else "policy.model"
                names = [_at(side, setting) for side in (before, after)]
                values = [f"{name} (hash {value})" for name, value in zip(names, values, strict=True)]
            elif key.startswith("teachers."):
                agent, policy = changed.removeprefix(f"{key}."), key.removeprefix("teachers.")
                setting = f"the teacher of {agent} in learner.reference of policy {policy}"
                values = ["absent" if value == "None" else f"a model with hash {value}" for value in values]
            raise RunFolderError(
                visible(
                    f"{setting:.200} is {values[0]:.500} in the run in {folder} and {values[1]:.500} in this call. It "
                    f"cannot change when a run is resumed: set {setting:.200} back, or choose another out_dir"
                )
            )


_ABSENT = object()


def _at(values: Any, key: str) -> Any:
    """Return the value at a dotted key, or `_ABSENT`."""
    for name in key.split("."):
        if not isinstance(values, Mapping) or name not in values:
            return _ABSENT
        values = values[name]
    return values


def hashes_of_models(policies: Mapping[str, Policy]) -> dict[str, str]:
    """Return hashes of the start models by policy (`sampled_hash`), without models that are not complete here."""
    hashes: dict[str, str] = {}
    for name, policy in policies.items():
        with contextlib.suppress(ForgeError, OSError):
            if (folder := models.local_folder(policy.model)) is not None:
                models.check_complete(folder)
                warn_of_other_writers(folder)
                hashes[name] = sampled_hash(folder)
    return hashes


def installed_packages() -> dict[str, str]:
    """Return the versions of packages that influence a run's results, by name."""
    versions: dict[str, str] = provenance()["packages"]
    return versions


class RunFolder:
    """Folder of one run, locked by one process at a time.

    Steps are counted from 1 in files, on the console and in names of checkpoints: ``step-000003`` holds the weights
    after the third step.

    Args:
        path: Folder, created if it is missing.
        config: JSON-safe settings, written to ``config.yaml`` if the folder has none. `keep_settings` replaces others.
        tracker: Experiment tracker.

    Raises:
        RunFolderError: The folder cannot be written, holds links or another program's files, or another process trains
            in it.
        MissingExtraError: The tracker is not installed.
        StallError: The tracker does not open in time.
    """

    def __init__(
        self, path: str | os.PathLike[str], config: Mapping[str, Any], *, tracker: str = "tensorboard"
    ) -> None:
        self.path = user_path(path)
        self._odd: set[str] = set()
        """Metrics that are no numbers and were warned about."""
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self._was_empty = not (self.path.is_dir() and any(self.path.iterdir()))
        check_is_run(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock_file(self.path / ".lock")
        except BlockingIOError as cause:
            raise RunFolderError(
                f"another process is training in {self.path}. Choose another out_dir or stop it"
            ) from cause
        except OSError as cause:
            raise RunFolderError(f"run folder {self.path} cannot be used ({cause}). Choose another out_dir") from cause
        warn_of_other_writers(self.path)
        self._settings, written = yaml.safe_dump(dict(config), sort_keys=False), self.path / "config.yaml"
        self.changed = ""
        """Settings that differ from the last session's, as ``key: old -> new``."""
        try:
            if not written.exists():
                write_atomically(written, self._settings)
            elif (before := written.read_text(errors="replace")) != self._settings:
                self.changed = _changes(before, config)
            self._tracker, self._curves = tracker, open_tracker(tracker, self.path, config)
            if (names := self._curves.names) is not None:
                for row in self.metrics():  # names depend on their order
                    names.of(name for name in row if name != "step")
            self._tracking: Future[None] | None = None
        except BaseException:
            self._lock.close()
            self._leave_nothing()
            raise

    def keep_settings(self) -> None:
        """Replace the settings of an earlier session. The replaced file becomes ``config.previous.yaml``.

        Call it after the run has started, so that a refused call leaves the record unchanged.
        """
        written = self.path / "config.yaml"
        if (before := written.read_text(errors="replace")) != self._settings:
            write_atomically(self.path / "config.previous.yaml", before)  # a copy: the folder always has its settings
            write_atomically(written, self._settings)

    def rewind(self, steps: int) -> None:
        """Delete rows after `steps` steps: a resumed run logs them again."""
        self._check_in_place()
        for name in ("metrics.jsonl", EPISODES, _VERIFIERS, _WARNINGS):
            file = self.path / name
            if file.exists():
                draft = file.with_name(f".{name}.draft")
                rows = _rows(file, max_commas=MAX_LINE_COMMAS if name == EPISODES else MAX_COMMAS)
                try:
                    with _reported(file), draft.open("w") as kept:  # by line: episodes may be larger than memory
                        kept.writelines(f"{line.rstrip()}\n" for line, row in rows if row["step"] <= steps)
                except RunFolderError:
                    draft.unlink(missing_ok=True)  # on a full disk
                    raise
                draft.replace(file)  # outside of the block, which closes and so completes the draft
        (self.path / "ending.json").unlink(missing_ok=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row of metrics to ``metrics.jsonl`` and the tracker. NaN and infinity are written as null.

        A metric that is no number is written as null, with a warning.
        """
        numbers = {name: _number(value) for name, value in metrics.items()}
        if odd := [name for name, value in numbers.items() if value is None and name not in self._odd]:
            self._odd.update(odd)
            _log.warning("metrics that are no numbers are written as null: %s", ", ".join(odd))
        valid = {name: value for name, value in numbers.items() if value is not None}
        clean = {name: valid[name] if math.isfinite(valid.get(name, math.nan)) else None for name in metrics}
        self._append("metrics.jsonl", [{"step": step, **clean}])
        self._track(f"take step {step}", trackers.TRACKER_TIMEOUT_S, self._curves.log, step, valid)

    def _track(self, what: str, timeout_s: float, call: Callable[..., None], *args: Any, quiet: bool = False) -> None:
        """Call the tracker. Its errors only cost a warning, because ``metrics.jsonl`` has all rows."""
        if self._tracking is not None and not self._tracking.done():
            return
        self._tracking = begin_in_thread(call, *args, name=f"tracker {self._tracker}")
        try:
            self._tracking.result(timeout_s)
        except Exception as error:  # noqa: BLE001  # any error of the tracker, or the timeout
            why = f"{type(error).__name__}: {error}"
            if not self._tracking.done():
                why = f"no answer in {timeout_s:g} s. Until there is, it is given nothing more"
            _log.log(logging.DEBUG if quiet else logging.WARNING, "%s did not %s (%s)", self._tracker, what, why)

    def keep_episodes(
        self,
        step: int,
        episodes: Sequence[Episode],
        rewards: Sequence[Mapping[str, float]],
        advantages: Sequence[Mapping[str, Sequence[float]]] | None = None,
        alternatives: Sequence[Sequence[Mapping[str, Any]]] | None = None,
        *,
        session_rewards: Sequence[Mapping[str, Sequence[float]]] | None = None,
        trained: Iterable[str] = (),
    ) -> None:
        """Append whole episodes with their tokens and the rewards that their agents were trained on.

        `advantages` has those of each turn by agent, per episode, or None if nothing was learned. `alternatives` has
        the turn and the rewards of each alternative, per episode, or None if there are none. `session_rewards` has the
        rewards of each agent's sessions, per episode, or None if there are none.
        """
        facts = {"step": step, "trained": sorted(trained)}
        learned = advantages or [{}] * len(episodes)
        again = alternatives or [()] * len(episodes)
        by_session = session_rewards or [{}] * len(episodes)
        rows = [
            {**facts, "rewards": dict(reward), "advantages": dict(advantage), **episode.as_json()}
            | ({"alternatives": list(others)} if others else {})
            | ({"session_rewards": dict(sessions)} if sessions else {})
            for episode, reward, advantage, others, sessions in zip(
                episodes, rewards, learned, again, by_session, strict=True
            )
        ]
        self._append(EPISODES, rows)

    def end(self, step: int, kind: str, reason: str) -> None:
        """Write ``ending.json`` with the reason why the run ended early after `step`."""
        ending = {"step": step, "ending": kind, "reason": reason}
        write_atomically(self.path / "ending.json", json.dumps(ending, indent=2) + "\n")

    def warn(self, step: int, warning: str) -> None:
        """Append a warning to ``warnings.jsonl``. The viewer shows it."""
        self._append(_WARNINGS, [{"step": step, "warning": warning}])

    def keep_verifiers(self, step: int, reward: object) -> None:
        """Append an ensemble's estimates of its verifiers, if `reward` or one of its parts is an ensemble."""
        if (report := _report_of(reward)) is not None:
            self._append(_VERIFIERS, [{"step": step, **report.row()}])

    def metrics(self) -> list[dict[str, Any]]:
        """Return every row logged so far."""
        file = self.path / "metrics.jsonl"
        return read_rows(file) if file.exists() else []

    def plot_rewards(self, policies: Collection[str]) -> Path | None:
        """Draw ``reward.png``: the mean over trained policies, and each of several. None before the first step.

        The reward that a best response wins from them, if it is measured, has a curve, too.
        """
        several = policies if len(policies) > 1 else ()
        per_policy = {f"reward/{name}": f"{name}, training episodes" for name in several}
        exploited = {"eval/exploitability": "exploitability"}
        exploited |= {f"eval/exploitability/{name}": f"exploitability of {name}" for name in several}
        return self.plot(curves={**_REWARDS, **per_policy, **exploited})

    def plot(self, what: str = "reward", curves: Mapping[str, str] = _REWARDS) -> Path | None:
        """Draw `curves` (labels by metric) with their confidence intervals into ``WHAT.png``.

        Returns None before the first step, or with a warning if matplotlib fails.
        """
        rows = self.metrics()
        if not rows:
            return None
        target = self.path / f"{what}.png"
        try:
            with _reported(target), picture(target, size=(7, 4), xlabel="step", ylabel=f"mean {what}") as axes:
                for metric, label in curves.items():
                    group, _, rest = metric.partition("/")
                    width = f"{group}/ci" if metric in _REWARDS else f"{group}_ci/{rest}"
                    draw_curve(axes, rows, metric, width, label=label, marker="o" if group == "eval" else "")
        except RunFolderError:
            raise
        except Exception as error:  # noqa: BLE001  # an error of matplotlib is no reason to lose a run
            _log.warning("%s is not drawn (%s: %s)", target, type(error).__name__, error)
            return None
        return target

    def close(self, *, quiet: bool = False) -> None:
        """Release the folder. `quiet` leaves out warnings, because an error about the disk is reported already."""
        if self._tracking is not None and not self._tracking.done():
            _log.warning("%s is left open, because it does not answer", self._tracker)
        self._track("close", trackers.CLOSE_TIMEOUT_S, self._curves.close, quiet=quiet)
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Release the folder. Remove it if a call failed before it wrote anything else."""
        is_in_place = self._is_in_place()
        self.close(quiet=kind is not None and issubclass(kind, RunFolderError))
        if kind is not None and is_in_place:
            self._leave_nothing()

    def _leave_nothing(self) -> None:
        """Remove the files of `__init__` if the folder was empty before and holds nothing else."""
        files = [file for file in self.path.rglob("*") if not file.is_dir()] if self._was_empty else []
        if not files or any(file.name not in _OWN and not file.name.startswith(_CURVES) for file in files):
            return
        for file in files:
            file.unlink()
        for folder in (*sorted(self.path.rglob("*"), reverse=True), *self._made):
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()

    def _is_in_place(self) -> bool:
        """Return whether no other run has locked a folder at this path since the folder was moved or deleted."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._lock.fileno()), (self.path / ".lock").stat())
        return True

    def _check_in_place(self) -> None:
        if not self._is_in_place():
            raise RunFolderError(
                f"{self.path} was moved or deleted during this run, and another run has begun there. This run ends, so "
                "that their files do not mix. Leave the folder of a run in place until the run has ended"
            )

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._check_in_place()
        with _reported(self.path / name), (self.path / name).open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


@contextlib.contextmanager
def _reported(file: Path) -> Iterator[None]:
    """Raise RunFolderError with advice if `file` cannot be written in the block."""
    try:
        yield
    except OSError as cause:
        raise RunFolderError(
            f"{file} cannot be written ({cause}). Free some disk space and run it again: it continues from the newest "
            "checkpoint"
        ) from cause


def _number(value: Any) -> float | None:
    """Return a metric as a Python number, or None if it is no number."""
    if isinstance(value, int | float):
        return value
    try:
        return None if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        return None


def _report_of(reward: object) -> Any:
    """Return the first report with a ``row()`` of `reward` or one of its parts, or None."""
    report, parts = getattr(reward, "report", None), getattr(reward, "parts", None)
    result: Any = report() if callable(report) else None
    if hasattr(result, "row"):
        return result
    members = parts() if callable(parts) else None
    reports = (_report_of(part) for part in members.values()) if isinstance(members, Mapping) else ()
    return next((report for report in reports if report is not None), None)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read a JSONL file of a run, without an incomplete last line. Raises RunFolderError for other damage."""
    return [row for _, row in _rows(file)]


def _rows(file: Path, *, max_commas: int = MAX_COMMAS) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line and its object."""
    with file.open(encoding="utf-8", errors="replace") as lines:  # a power cut may leave any bytes at the end
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES), ""), 1):
            try:
                row = bounded_json(line, max_commas=max_commas)
            except (ValueError, RecursionError):  # ValueError also for numbers of more than 4,300 digits
                if lines.readline(1):
                    raise RunFolderError(f"{file}:{number} is not JSON. The file was edited or damaged") from None
                return
            if not isinstance(row, dict) or type(row.get("step")) is not int or abs(row["step"]) > _MAX_STEP:
                raise RunFolderError(f"{file}:{number} has no step number. The file was edited or damaged")
            yield line, row


def write_atomically(file: Path, text: str) -> None:
    """Replace the content of `file`: readers see the old text or the new one. Raises RunFolderError if it cannot."""
    draft = file.with_name(f".{file.name}.draft")
    with _reported(file):
        try:
            draft.unlink(missing_ok=True)  # it may be a link
            draft.write_text(text)
            draft.replace(file)
        except OSError:
            draft.unlink(missing_ok=True)
            raise


def verifier_history(folder: str | os.PathLike[str]) -> list[Snapshot]:
    """Read one snapshot of the verifiers per logged step, oldest first, at least one.

    The last report has the score rows of the newest checkpoint, if there is one.

    Raises:
        RunFolderError: The folder holds no run, a run without verifiers, or a damaged one.
    """
    from forge_verifiers.report.report import EnsembleReport, Evidence, Snapshot

    path = user_path(folder)
    check_plain_files(path)
    if not (path / "config.yaml").exists():
        raise RunFolderError(f"{path} is not a run folder: it has no config.yaml. Give the out_dir of a training run")
    if not (path / _VERIFIERS).exists():
        raise RunFolderError(
            f"the run in {path} has no verifiers: there is no {_VERIFIERS}. Training writes it if the reward is or "
            "contains an Ensemble"
        )
    metrics = read_rows(path / "metrics.jsonl") if (path / "metrics.jsonl").exists() else []
    rewards = {row["step"]: row.get("reward/mean") for row in metrics}
    snapshots = []
    for row in read_rows(path / _VERIFIERS):
        try:
            step, report = int(row["step"]), EnsembleReport.from_row(row)
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as cause:
            raise RunFolderError(f"{path / _VERIFIERS} has a line that is not a report: {cause}") from cause
        reward = rewards.get(step)
        snapshots.append(Snapshot(step=step, report=report, reward=math.nan if reward is None else reward))
    if not snapshots:
        raise RunFolderError(f"{path / _VERIFIERS} is empty: no step has finished yet. Wait for the first one")
    last, report = snapshots[-1], snapshots[-1].report
    names = [verifier.name for verifier in report.verifiers]
    saved = saved_reward(path / "checkpoints")
    for key, value in saved.items():  # the ensemble may be one part of the reward
        if (key == "names" or key.endswith("/names")) and value.tolist() == names:
            prefix = key.removesuffix("names")
            state = {k.removeprefix(prefix): v for k, v in saved.items() if k.startswith(prefix)}
            evidence = Evidence.from_state(state, [v.family for v in report.verifiers])
            snapshots[-1] = dataclasses.replace(last, report=dataclasses.replace(report, evidence=evidence))
            break
    return snapshots


def saved_reward(folder: Path) -> dict[str, np.ndarray]:
    """Read the state of the reward in the newest complete checkpoint in `folder`. Empty if none was saved."""
    for checkpoint in complete_checkpoints(folder):
        file = checkpoint / "reward.npz"
        try:
            if (arrays := read_arrays(file)) is not None:
                return arrays
        except (OSError, ValueError, BadZipFile) as cause:
            raise ForgeError(f"{file} cannot be read ({cause}). Delete that checkpoint") from cause
    return {}


def read_arrays(file: Path) -> dict[str, np.ndarray] | None:
    """Read a file of ``np.savez``, or None if it does not exist. Memory is bounded by the size of the file.

    Raises ValueError or BadZipFile if it is damaged or sparse, or holds compressed or overlapping parts. Such parts
    expand to more. Raises RunFolderError if it is a link or not a file.
    """
    if not file.exists():
        return None
    check_plain_file(file)  # a pipe would block
    check_dense(file)
    size = file.stat().st_size
    with ZipFile(file) as parts:
        if sum(part.file_size for part in parts.infolist()) > size:
            raise ValueError(f"{file.name} has {size} bytes and stands for more. np.savez does not compress")
    try:
        with np.load(file, allow_pickle=False) as saved:
            arrays = dict(saved)
    except MemoryError as cause:
        raise ValueError(f"{file.name} names an array that does not fit into memory") from cause
    except (ArithmeticError, LookupError, TypeError, tokenize.TokenError, zlib.error) as cause:  # a damaged header
        raise ValueError(f"{file.name} is damaged: {cause!r}") from cause
    for name, array in arrays.items():  # values without bytes would take memory as a list
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{file.name} holds {name[:80]!r}, which is no array")  # noqa: TRY004  # content of a file
        if array.dtype.names or math.prod(max(length, 1) for length in array.shape) > size:
            raise ValueError(f"{file.name} has {size} bytes and {name} the shape {array.shape} of {array.dtype}")
    return arrays


def dump_batch(batch: EpisodeBatch, file: str | os.PathLike[str], facts: Mapping[str, Any]) -> Path:
    """Write `batch` to `file`, and JSON-safe `facts` to a file of the same name with the ending ``.json``.

    The folder is created, and existing files are replaced. Raises OSError if the files cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    target = Path(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    flat = batch.flatten_keys(".")
    try:
        save_file({str(name): flat[name].contiguous() for name in flat.keys()}, target)  # noqa: SIM118  # no mapping
    except SafetensorError as cause:  # the disk is full
        target.unlink(missing_ok=True)
        raise OSError(str(cause)) from cause
    target.with_suffix(".json").write_text(json.dumps(dict(facts), indent=2) + "\n")
    return target


def load_batch(file: str | os.PathLike[str]) -> EpisodeBatch:
    """Read and check a batch of `dump_batch`. Raises RunFolderError, or ValueError if the file is not a batch."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from tensordict import TensorDict

    from forge_trainers.batch.packing import check_batch

    try:
        check_dense(Path(file))
        flat = load_file(file)
    except (OSError, ValueError, SafetensorError) as cause:
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
