"""Pictures of the viewer and of a benchmark's page for the documentation, in headless Chromium.

In: folders of runs, a benchmark's report. Out: PNG files of at most 256 colours in docs/images. Waits for the browser,
with deadlines.

    python docs/_screens.py runs/first runs/second [--episode 3] [--board docs/results/benchmark/core-v1.json]

Of the runs, one should have a verifier report; the first gives the episode, its newest or number --episode.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from forge_agents.bench import Report
from forge_agents.viewer import save_page

if TYPE_CHECKING:
    from playwright.sync_api import Page

WIDTH, HEIGHT = 1180, 720
WAIT_MS = 60_000
VIEWS: dict[str, tuple[str, str, Literal["light", "dark"]]] = {
    "viewer-curves": ("#view=curves", "figure.chart canvas", "light"),
    "viewer-episode": ("#view=episodes&n={episode}&colour=logprob", ".turn", "light"),
    "viewer-timeline": ("#view=timeline", "figure.chart canvas", "dark"),
    "viewer-verifiers": ("#view=verifiers", "table, figure", "light"),
}
"""By name of the picture: address, what must be there before it is taken, theme."""


def main(words: Sequence[str] | None = None) -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("runs", nargs="*", type=Path, help="folders of runs; none leaves the viewer out")
    parser.add_argument("--episode", type=int, help="number in the first run, from 1; the newest by default")
    parser.add_argument("--board", type=Path, help="JSON of a benchmark's report")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images")
    asked = parser.parse_args(words)
    from playwright.sync_api import sync_playwright

    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    installed = next(filter(None, map(shutil.which, names)), None)
    options = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to be root otherwise
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=installed, args=options)
        size = {"width": WIDTH, "height": HEIGHT}
        if asked.runs:
            viewer = save_page(asked.runs, Path(folder) / "viewer.html", episodes=80).absolute().as_uri()
            episode = asked.episode or newest(asked.runs[0])
            for name, (address, shown, theme) in VIEWS.items():
                page = browser.new_page(viewport=size, color_scheme=theme)
                take(page, viewer + address.format(episode=episode), shown, asked.out / f"{name}.png")
        if asked.board:
            board = Report.load(asked.board).html(Path(folder) / "board.html").absolute().as_uri()
            take(browser.new_page(viewport=size), board, "table", asked.out / "benchmark.png")
        browser.close()


def newest(run: Path) -> int:
    """Number of the newest episode of a run, from 1."""
    return sum(1 for line in (run / "episodes.jsonl").read_text(encoding="utf-8").splitlines() if line)


def take(page: Page, address: str, shown: str, file: Path) -> None:
    """One picture, once `shown` is there."""
    from PIL import Image

    page.goto(address, timeout=WAIT_MS)
    page.locator(shown).first.wait_for(timeout=WAIT_MS)
    page.wait_for_timeout(300)  # drawn
    picture = Image.open(io.BytesIO(page.screenshot()))
    file.parent.mkdir(parents=True, exist_ok=True)
    picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)
    page.close()
    sys.stdout.write(f"{file} {file.stat().st_size / 1000:.0f} kB\n")


if __name__ == "__main__":
    main()
