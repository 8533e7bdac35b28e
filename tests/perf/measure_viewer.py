"""How long a person waits for the viewer of 100,000 stored episodes, in headless Chromium.

In: a number of episodes. Out: one JSON line of seconds. Waits for the index and the browser, with deadlines.

    python tests/perf/measure_viewer.py [--episodes 100000]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "core" / "viewer"))

from viewer_runs import Server, episode, metrics, write_lines

WORDS = ("knight", "queen", "bishop", "rook", "pawn", "check", "castle", "mate", "draw", "resign", "fork", "pin",
         "skewer", "gambit", "endgame", "tempo")  # fmt: skip
TURN = "() => document.querySelector('.pager')?.textContent"
TIMES = 7


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--episodes", type=int, default=100_000)
    count = parser.parse_args().episodes
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        num_bytes = write_run(run, count)
        found = {"measure": "viewer", "episodes": count, "MB": round(num_bytes / 1e6), **measure(run, count)}
        sys.stdout.write(json.dumps(found) + "\n")


def write_run(run: Path, count: int) -> int:
    """Episodes that differ in seed, step, words and reward. Returns their bytes."""
    write_lines(run / "metrics.jsonl", metrics(200))
    rng = random.Random(0)
    lines = []
    for _ in range(500):
        said = " ".join(rng.choices(WORDS, k=40))
        error = "illegal square" if rng.random() < 0.02 else None
        row = episode(
            seed=987654321, step=123456, words=said, reward=rng.uniform(-1, 1), error=error, ids=tuple(range(60))
        )
        lines.append(json.dumps(row) + "\n")
    with (run / "episodes.jsonl").open("w") as file:
        for seed in range(count):
            line = lines[seed % 500].replace("987654321", str(seed))
            file.write(line.replace("123456", str(seed // 500)))
    return (run / "episodes.jsonl").stat().st_size


def measure(run: Path, count: int) -> dict[str, Any]:
    """Seconds: of the index, of first paints before and after it, of what a person then does."""
    executable = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=options)
        started = time.perf_counter()
        server = Server([run], index=False)
        try:
            found: dict[str, Any] = {"while_indexing": paint(browser.new_page(), server.url, "")}
            while server.get("api/runs")[2]["runs"][0]["episodes"]["episodes"] < count:
                assert time.perf_counter() - started < 600, "the index takes more than ten minutes"
                time.sleep(0.2)
            found["index_s"] = round(time.perf_counter() - started, 1)
            found["index_MB"] = round(server.runs[0].index.file.stat().st_size / 1e6)
            found["first_paint"] = paint(browser.new_page(), server.url, "")
            page = browser.new_page()
            found["episodes_tab"] = paint(page, server.url, "#view=episodes")
            found |= acts(page, count)
        finally:
            server.close()
            browser.close()
    return found


def paint(page: Page, url: str, address: str) -> dict[str, float]:
    """Seconds to the first contentful paint, and until the page shows its data."""
    started = time.perf_counter()
    page.goto(url + address)
    page.wait_for_selector(".episodes li, figure.chart" if address else "figure.chart", timeout=60_000)
    whole_s = time.perf_counter() - started
    entry = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    return {"first_contentful_s": round(page.evaluate(entry) / 1000, 3), "data_shown_s": round(whole_s, 3)}


def acts(page: Page, count: int) -> dict[str, float]:
    """Median seconds of turning pages, filters, searches, opening; each until the page shows it."""
    pages = iter(range(1, 1000))

    def timed(act: Callable[[], None], shown: str) -> float:
        before = page.evaluate(shown)
        started = time.perf_counter()
        act()
        while page.evaluate(shown) == before:
            assert time.perf_counter() - started < 60
        return time.perf_counter() - started

    def go(address: str) -> Callable[[], None]:
        return lambda: page.evaluate(
            f"location.hash = {json.dumps(address)}; dispatchEvent(new PopStateEvent('popstate'))"
        )

    def median(addresses: list[str], shown: str = TURN) -> float:
        return round(statistics.median(timed(go(address), shown) for address in addresses), 3)

    view = "#view=episodes"
    return {
        "next_page_s": median([f"{view}&offset={50 * next(pages)}" for _ in range(TIMES)]),
        "far_page_s": median([f"{view}&offset={count - 50 * (at + 2)}" for at in range(TIMES)]),
        "by_reward_far_page_s": median(
            [f"{view}&sort=lowest reward&offset={count // 2 + 50 * at}" for at in range(TIMES)]
        ),
        "filter_s": median([f"{view}&error=any error", f"{view}&reward_from=0.5", f"{view}&step_from=100&step_to=110"]),
        "search_s": median(
            [f"{view}&text={text}" for text in ("skewer", '"check mate"', "gambit tempo end", "illegal")]
        ),
        "open_s": median(
            [f"{view}&n={n}&colour=logprob" for n in range(100, 100 + TIMES)],
            "() => document.querySelector('.facts')?.textContent",
        ),
    }


if __name__ == "__main__":
    main()
