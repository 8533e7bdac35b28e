"""Experiment trackers of a run: TensorBoard, Weights & Biases or MLflow."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import math
import os
import re
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from forge_agents.errors import DISTRIBUTION, ForgeError, MissingExtraError, RunFolderError, StallError, did_you_mean
from forge_agents.files import check_plain_file
from forge_agents.imports import import_object
from forge_agents.runtime.threads import begin_in_thread

_log = logging.getLogger(__name__)

PROJECT = "forge-agents"
"""Default project or experiment, if ``WANDB_PROJECT`` or ``MLFLOW_EXPERIMENT_NAME`` is not set."""

OPEN_TIMEOUT_S = 120.0
"""Timeout in seconds for a tracker to open. W&B itself gives up after 90."""

TRACKER_TIMEOUT_S = 30.0
"""Timeout in seconds for a tracker to take a row."""

CLOSE_TIMEOUT_S = 300.0
"""Timeout in seconds for a tracker to close. Closing may be an upload over a slow connection."""

_MLFLOW_PARAMS, _MLFLOW_METRICS = 100, 1000
"""Maximum number of parameters and of metrics in one request to MLflow."""
_MAX_REFUSED = 5
"""Number of metrics that a tracker may refuse before it counts as unreachable."""


class Tracker(ABC):
    """Curves of one run in an experiment tracker. Methods raise the tracker's own errors, which cost only a warning.

    `GRPOConfig.tracker` takes a built-in name, or ``"package.module:Class"`` for a subclass of yours. A new built-in
    tracker is a subclass in this file with its name in `_TRACKERS`.
    """

    settings: ClassVar[str] = "its own settings"
    """Settings that opening the tracker depends on, for an error message."""
    extra: ClassVar[str] = ""
    """Extra of this project that installs the tracker's package of the same name. Empty if it needs none."""
    names: TrackerNames | None = None
    """Names of metrics in the tracker. None: any name is allowed. A resumed run passes those of earlier rows first."""

    @abstractmethod
    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Open the curves of the run in `folder`, with its settings. A resumed run opens its own curves again."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one row. A resumed run may log a step again."""

    @abstractmethod
    def close(self) -> None:
        """End the session."""


def tracker_class(tracker: str) -> type[Tracker]:
    """The built-in tracker with this name, or the class ``package.module:Class``. Raises ValueError for others."""
    if ":" not in tracker:
        if tracker not in _TRACKERS:
            names, hint = ", ".join(_TRACKERS), did_you_mean(tracker, _TRACKERS)
            raise ValueError(f"tracker={tracker!r} is none of {names} and no 'package.module:Class'.{hint}")
        return _TRACKERS[tracker]
    value = import_object(tracker, "tracker")
    if not (isinstance(value, type) and issubclass(value, Tracker)):
        kind = f"tracker={tracker!r} is {value!r:.80}"
        raise ValueError(f"{kind}. Name a subclass of {__name__}.Tracker")  # noqa: TRY004
    return value


def check_installed(tracker: str) -> None:
    """Raise MissingExtraError with the install command if the tracker's package is missing."""
    extra = tracker_class(tracker).extra
    if extra and importlib.util.find_spec(extra) is None:
        raise MissingExtraError(f"tracker={tracker} needs a package: pip install '{DISTRIBUTION}[{extra}]'")


def open_tracker(tracker: str, folder: Path, config: Mapping[str, Any]) -> Tracker:
    """Open a tracker for a run. A resumed run continues its own curves. `config` is shown next to them.

    Raises StallError if the tracker does not open in time: its curves would be missing unnoticed.
    """
    check_installed(tracker)
    opened = tracker_class(tracker)
    opening = begin_in_thread(opened, folder, config, name=f"tracker {tracker}")
    try:
        return opening.result(OPEN_TIMEOUT_S)
    except TimeoutError as late:
        if opening.done():  # the tracker's own TimeoutError
            raise
        raise StallError(
            f"{tracker} did not open within {OPEN_TIMEOUT_S:g} s. Check that its server can be reached and that it "
            f"asks for no input ({opened.settings}), or leave out tracker={tracker}",
            who=tracker,
        ) from late


class TrackerNames:
    """Metric names in a tracker: forbidden characters become underscores, and different names stay different.

    `allowed` characters are given as in the brackets of a regular expression. Without `nested`, no name begins with
    another name and a slash, for trackers with a file per metric.
    """

    def __init__(self, allowed: str, *, longest: int = 250, nested: bool = True) -> None:
        self._forbidden, self._longest, self._nested = re.compile(f"[^{allowed}]"), longest, nested
        self._names: dict[str, str] = {}
        self._taken: set[str] = set()
        self._groups: set[str] = set()
        """Names before a slash of `_taken`."""

    def of(self, names: Iterable[str]) -> dict[str, str]:
        """Return the tracker's name of each metric. The time is linear in the number of names."""
        for name in sorted(names):
            if name not in self._names:
                clean = self._clean(name)
                if clean in self._taken:
                    clean = f"{clean[: self._longest - 9]}_{zlib.crc32(name.encode('utf-8', 'replace')):08x}"
                self._names[name] = clean
                self._taken.add(clean)
                self._groups.update(clean[:at] for at, letter in enumerate(clean) if letter == "/")
        return {name: self._names[name] for name in names}

    def _clean(self, name: str) -> str:
        parts = [part for part in self._forbidden.sub("_", name).split("/") if part.strip()]
        clean = "/".join("_" * len(part) if set(part) == {"."} else part for part in parts)[: self._longest] or "_"
        if self._nested:
            return clean
        first, *rest = clean.split("/")
        for part in rest:
            first += ("." if first in self._taken else "/") + part
        while first in self._groups:
            first += "_"
        return first


def _each(metrics: Mapping[str, float], take: Callable[[Mapping[str, float]], Any]) -> None:
    """Log a row. If the tracker refuses it, log each metric alone, and raise RuntimeError with the refused names."""
    try:
        take(metrics)
    except Exception as row_error:
        refused: dict[str, Exception] = {}
        for name, value in metrics.items():
            try:
                take({name: value})
            except Exception as error:  # noqa: BLE001  # any error of the tracker
                refused[name] = error
            if len(refused) in (_MAX_REFUSED, len(metrics)):  # the tracker is down
                raise row_error from None
        if refused:
            why = next(iter(refused.values()))
            names = ", ".join(refused)
            raise RuntimeError(f"{names} left out: {type(why).__name__}: {why}") from None


def _read_mark(mark: Path) -> str | None:
    """Return the tracker's id of the run in this folder, or None if there is none or the folder is a copy of the run's.

    Raises ForgeError for a text that no tracker writes, such as a path.
    """
    if not mark.exists():
        return None
    run, folder = _content_of(mark)
    original = Path(folder) / mark.name
    with contextlib.suppress(OSError, RunFolderError):  # the folder was moved
        if folder and not original.samefile(mark) and _content_of(original)[0] == run:
            _log.warning("%s is a copy of %s: new curves begin, and those of the original stay", mark.parent, folder)
            return None
    return run


def _content_of(mark: Path) -> tuple[str, str]:
    """Return the id in a mark and the run's folder. Marks of earlier versions have an empty folder.

    Raises ForgeError for a text that no tracker writes, and RunFolderError for a link or a pipe.
    """
    check_plain_file(mark)
    with mark.open("rb") as file:
        text = os.fsdecode(file.read(8192))
    if not (match := re.fullmatch(r"([A-Za-z0-9_-]{1,128})(?:\n(/[^\0]*))?", text)):
        raise ForgeError(f"{mark} holds {text[:40]!r}, which is no id of a run. Delete the file to start new curves")
    return match[1], match[2] or ""


def _write_mark(mark: Path, run: str) -> None:
    mark.write_bytes(os.fsencode(f"{run}\n{mark.parent.resolve()}"))


def _check_wandb_settings() -> None:
    """Refuse settings of W&B in the current folder that could send the user's key or run to another server or team.

    The folder may be a stranger's. Raises ForgeError.
    """
    safe = {"project", "mode", "disabled", *(["entity"] if os.environ.get("WANDB_ENTITY") else [])}
    for file in (Path(folder, "settings") for folder in (".wandb", "wandb")):
        lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
        keys = [line.partition("=")[0].strip() for line in lines if line.strip() and line[0] not in "[#;"]
        if unsafe := [key for key in keys if key not in safe]:
            raise ForgeError(
                f"{file.absolute()} sets {unsafe[0]!r:.80}, so W&B may send your key or run where it chooses. Remove "
                "the line. An entity may stay if you set WANDB_ENTITY, which counts in its place. For a server, set "
                "WANDB_BASE_URL or run `wandb login --host`"
            )


class _TensorBoard(Tracker):
    """Event files in ``FOLDER/tensorboard``, written in the calling thread, so that a full disk raises once."""

    settings = "it writes to the run folder"
    names: TrackerNames

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder = folder / "tensorboard"
        self.names = TrackerNames(r"-\w./", longest=500)
        self._file: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads files in the order of their names, and the clock may have been set back
            matches = (re.match(r"events\.out\.tfevents\.(\d{1,12})\.", entry.name) for entry in self._folder.iterdir())
            newest_s = max((int(match[1]) for match in matches if match), default=0)
            name = f"events.out.tfevents.{max(time.time(), newest_s + 1):.6f}.{os.getpid()}"
            self._file = (self._folder / name).open("wb", buffering=0)
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
            begun = SessionLog(status=SessionLog.START)  # hides what an earlier session logged from here on
            self._write(Event(wall_time=time.time(), step=step, session_log=begun))
        names = self.names.of(metrics)
        values = [Summary.Value(tag=names[name], simple_value=value) for name, value in metrics.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _write(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._file.write(record.getvalue())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _WandB(Tracker):
    """Run of Weights & Biases. ``WANDB_MODE=offline`` keeps it in the run folder."""

    settings = "WANDB_API_KEY, WANDB_BASE_URL. WANDB_MODE=offline needs no server"
    extra = "wandb"
    names: TrackerNames

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        _check_wandb_settings()
        mark = folder / "wandb.id"
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.resolve().name,
            dir=str(folder),
            config=dict(config),
            id=_read_mark(mark),
            resume="allow",
        )
        _write_mark(mark, self._run.id)
        self._run.define_metric("*", step_metric="step")  # W&B's own counter cannot go back when a run is resumed
        self.names = TrackerNames(r"-\w./")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        names = self.names.of(metrics)
        row = {names[name]: value for name, value in metrics.items()}
        _each(row, lambda some: self._run.log({"step": step, **some}))

    def close(self) -> None:
        self._run.finish()


class _MLflow(Tracker):
    """Run of MLflow, at ``MLFLOW_TRACKING_URI`` or MLflow's default location."""

    settings = "MLFLOW_TRACKING_URI"
    extra = "mlflow"
    names: TrackerNames

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        self.names = TrackerNames(r"-\w. /", nested=False)
        mark = folder / "mlflow.id"
        if earlier := _read_mark(mark):
            self._run: str = earlier
            self._client.update_run(self._run, status="RUNNING")
            _write_mark(mark, self._run)
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        existing = self._client.get_experiment_by_name(name)
        experiment = existing.experiment_id if existing else self._client.create_experiment(name)
        self._run = self._client.create_run(experiment, run_name=folder.resolve().name).info.run_id
        _write_mark(mark, self._run)
        settings = dict(leaves(config))
        names = TrackerNames(r"-\w. /").of(settings)
        params = [Param(names[key], str(value)[:500]) for key, value in settings.items()]  # MLflow's limit
        for start in range(0, len(params), _MLFLOW_PARAMS):
            self._client.log_batch(self._run, params=params[start : start + _MLFLOW_PARAMS])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = round(time.time() * 1000)
        names = self.names.of(metrics)
        rows = [(names[name], float(value)) for name, value in metrics.items() if math.isfinite(value)]

        def take(some: Mapping[str, float]) -> None:
            self._client.log_batch(self._run, metrics=[Metric(*one, now_ms, step) for one in some.items()])

        for start in range(0, len(rows), _MLFLOW_METRICS):
            _each(dict(rows[start : start + _MLFLOW_METRICS]), take)

    def close(self) -> None:
        self._client.set_terminated(self._run)


_TRACKERS: Mapping[str, type[Tracker]] = {"tensorboard": _TensorBoard, "wandb": _WandB, "mlflow": _MLflow}


def leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting with its dotted key. Items of a list of mappings are numbered."""
    if isinstance(value, list) and any(isinstance(part, Mapping | list) for part in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from leaves(part, f"{at}.{key}" if at else str(key))
    else:
        yield at, value
