"""Live view of a training run: a progress bar in a terminal, otherwise one line per step."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from forge_agents import output
from forge_agents.display import visible

_SHOWN = (
    ("reward", "reward/mean", "{:.3f}"),
    ("env", "env_reward/mean", "{:.3f}"),
    ("held-out", "eval/reward", "{:.3f}"),
    ("held-out env", "eval/env_reward", "{:.3f}"),
    ("exploitability", "eval/exploitability", "{:.3f}"),
    ("used", "groups/used", "{:.0f}"),
    ("zero-variance", "groups/zero_variance", "{:.0f}"),
    ("failed", "groups/failed", "{:.0f}"),
    ("out of context", "out_of_context", "{:.0%}"),
    ("loss", "train/loss", "{:.4f}"),
    ("held-out loss", "eval/loss", "{:.4f}"),
    ("kl", "learner/kl", "{:.4f}"),
    ("gap", "learner/logprob_gap_mean", "{:.3f}"),
    ("tok/s", "tokens_per_s", "{:.0f}"),
    ("s/step", "time/step_s", "{:.1f}"),
)
_SHOWN_IF_ANY = (
    ("held-out failed", "eval/failed", "{:.0f}"),
    ("held-out abstained", "eval/abstained", "{:.0f}"),
    ("abstained", "groups/abstained", "{:.0f}"),
    ("credit tokens", "credit/tokens", "{:.0f}"),
    ("failed alternatives", "credit/failed", "{:.0f}"),
    ("cut off", "cut_off", "{:.0%}"),
    ("program failed", "program_failed", "{:.0%}"),
    ("too long", "dropped/too_long", "{:.0f}"),
    ("skipped", "learner/skipped", "{:.0f}"),
    ("bad logprobs", "dropped/bad_logprobs", "{:.2%}"),
)


class _Bar(Progress):
    """Leaves space at the right for the ^C that a terminal writes and that would break the bar."""

    def get_renderable(self) -> RenderableType:
        return _Narrow(super().get_renderable())


class _Narrow:
    """As wide as the console minus the space for ^C."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Constrain(self._shown, options.max_width - len("^C") - 1)


class Display:
    """Shows step, reward, counts of groups, KL, tokens per second and the remaining time.

    `total` and `done` count the steps of the whole run and of earlier sessions. The rewards and used groups of several
    trained `policies` are also shown one by one, because the mean over two sides of a game is no measure.
    """

    def __init__(self, title: str, total: int, done: int = 0, policies: Collection[str] = ()) -> None:
        several = policies if len(policies) > 1 else ()
        after = {  # the mean of all policies, then each policy
            "reward/mean": [(name, f"reward/{name}", "{:.3f}") for name in several],
            "eval/reward": [(f"held-out {name}", f"eval/reward/{name}", "{:.3f}") for name in several],
            "eval/exploitability": [
                (f"exploitability {name}", f"eval/exploitability/{name}", "{:.3f}") for name in several
            ],
            "groups/used": [(f"{name} used", f"groups/used/{name}", "{:.0f}") for name in several],
        }
        self._shown = [column for shown in _SHOWN for column in (shown, *after.get(shown[1], ()))]
        skipped = [(f"{name} skipped", f"learner/{name}/skipped", "{:.0f}") for name in several]
        self._shown_if_any = (*_SHOWN_IF_ANY, *skipped)
        self._console = output.console()
        self._title, self._total = title, total
        self._progress: Progress | None = None
        if self._console.is_interactive:  # a capable terminal
            self._progress = _Bar(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                # wraps, while the other columns keep their width
                TextColumn("{task.fields[metrics]}", markup=False, table_column=Column()),
                console=self._console,
            )
            self._task = self._progress.add_task(title, total=total, completed=done, metrics="")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished step."""
        failed = [(f"failed by {key[len('failed/') :]}", key, "{:.0f}") for key in metrics if key.startswith("failed/")]
        shown = [*self._shown, *(column for column in (*failed, *self._shown_if_any) if metrics.get(column[1]))]
        text = "  ".join(
            f"{label} {form.format(metrics[key])}"
            for label, key, form in shown
            # a NaN reward has no episodes: a policy played only itself, or none was finished. No reference: kl is 0
            if key in metrics
            and not (key.startswith(("reward/", "env_reward/")) and math.isnan(metrics[key]))
            and (metrics[key] or key != "learner/kl")
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=step + 1, metrics=text)
        else:
            self._print(f"{self._title} {step + 1}/{self._total}  {text}")

    def say(self, text: str) -> None:
        """Print a line above the bar, with control characters made visible: models may have written parts of it."""
        self._print(visible(text))

    def resumed(self, first: int, changed: str) -> None:
        """Print the step after which the run continues, if it does, and the settings that have changed since."""
        if first:
            self.say(f"continuing after step {first}")
            if changed:
                self.say(f"settings have changed: {changed}. config.previous.yaml has the old ones")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Display:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._progress is not None:
            self._progress.stop()
