"""What a run leaves on disk: settings, metrics, curves, sampled episodes.

In: a folder, metrics by step, episodes. Out: ``config.yaml``, ``metrics.jsonl``, a tracker's curves,
``episodes.jsonl``, ``verifiers.jsonl``, ``reward.png``. Waits for nothing.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import yaml

from forge_agents.errors import RunFolderError
from forge_agents.files import check_plain_files
from forge_agents.types import Episode
from forge_trainers.records.plots import draw_curve
from forge_trainers.records.trackers import Tracker, open_sink

_REWARDS = {"reward/mean": "training episodes", "eval/reward": "held-out seeds"}


class RunFolder:
    """One run's folder, held by one process at a time.

    Args:
        path: Created where absent.
        config: Resolved settings, JSON-safe; written to ``config.yaml``. A folder that already holds other settings
            keeps the old ones beside, as ``config.previous.yaml``.
        log_to: Where curves go beside ``metrics.jsonl``.

    Raises:
        RunFolderError: The folder cannot be written, holds links, or another process trains in it.
        MissingExtraError: The tracker is not installed.
    """

    def __init__(
        self, path: str | os.PathLike[str], config: Mapping[str, Any], *, log_to: Tracker = "tensorboard"
    ) -> None:
        self.path = Path(path)
        check_plain_files(self.path)  # what is written below would follow a link that somebody else has put there
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
        written = self.path / "config.yaml"
        text = yaml.safe_dump(dict(config), sort_keys=False)
        if written.exists() and written.read_text() != text:
            written.replace(self.path / "config.previous.yaml")
        _write_atomically(written, text)
        try:
            self._sink = open_sink(log_to, self.path, config)
        except BaseException:
            self._lock.close()
            raise

    def rewind(self, step: int) -> None:
        """Forget what was logged at `step` and later: a resumed run logs those steps again."""
        for name in ("metrics.jsonl", "episodes.jsonl", "verifiers.jsonl"):
            file = self.path / name
            if file.exists():
                kept = [row for row in read_rows(file) if row["step"] < step]
                _write_atomically(file, "".join(json.dumps(row) + "\n" for row in kept))
        (self.path / "ending.json").unlink(missing_ok=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row of metrics, to ``metrics.jsonl`` and the tracker. NaN and infinity are written as null."""
        clean = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._append("metrics.jsonl", [{"step": step, **clean}])
        self._sink.log(step, metrics)

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
            "episodes.jsonl",
            [
                {
                    "step": step,
                    "trained": learners,
                    "rewards": dict(reward),
                    "advantages": dict(own),
                    **dataclasses.asdict(episode),
                }
                for episode, reward, own in zip(episodes, rewards, learned, strict=True)
            ],
        )

    def end(self, step: int, kind: str, reason: str) -> None:
        """Say in ``ending.json`` why the run was over after `step`, before its steps were done."""
        said = {"step": step, "ending": kind, "reason": reason}
        _write_atomically(self.path / "ending.json", json.dumps(said, indent=2) + "\n")

    def keep_verifiers(self, step: int, reward: object) -> None:
        """Append what an ensemble believes of its verifiers: `reward`, or else the first among its parts, if any."""
        report = _report_of(reward)
        if report is not None:
            self._append("verifiers.jsonl", [{"step": step, **report.row()}])

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
        from matplotlib.figure import Figure  # without pyplot: no window system, no global state

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for metric, label in curves.items():
            group, _, rest = metric.partition("/")
            width = f"{group}/ci" if metric in _REWARDS else f"{group}_ci/{rest}"
            draw_curve(axes, rows, metric, width, label=label, marker="o" if group == "eval" else "")
        axes.set(xlabel="step", ylabel=f"mean {what}")
        axes.legend()
        axes.grid(alpha=0.3)
        target = self.path / f"{what}.png"
        figure.savefig(target, dpi=120)
        return target

    def close(self) -> None:
        """Release the folder."""
        self._sink.close()
        self._lock.close()

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        try:
            with (self.path / name).open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        except OSError as cause:
            raise RunFolderError(
                f"{self.path / name} cannot be written ({cause}); make room and run it again: it goes on from the "
                "newest checkpoint"
            ) from cause


def _report_of(reward: object) -> Any:
    """The first report with a ``row()`` that `reward` or a part of it gives; None where there is none."""
    report, parts = getattr(reward, "report", None), getattr(reward, "parts", None)
    found: Any = report() if callable(report) else None
    if hasattr(found, "row"):
        return found
    held = parts() if callable(parts) else None
    for part in held.values() if isinstance(held, Mapping) else ():
        found = _report_of(part)
        if found is not None:
            return found
    return None


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file; a last line that a kill cut short is dropped."""
    lines = file.read_text().splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise RunFolderError(f"{file}:{number} is not JSON; the file was edited or damaged") from None
    return rows


def _write_atomically(file: Path, text: str) -> None:
    draft = file.with_name(f".{file.name}.draft")
    draft.write_text(text)
    draft.replace(file)
