"""Response times of the viewer with 100,000 stored episodes, in headless Chromium.

python tests/perf/measure_viewer.py [--episodes 100000]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "core" / "viewer"))

from viewer_runs import Server, episode, metrics, write_lines

WORDS = ("knight", "queen", "bishop", "rook", "pawn", "check", "castle", "mate", "draw", "resign", "fork", "pin",
         "skewer", "gambit", "endgame", "tempo")  # fmt: skip
TIMES = 7
ACT = """async ([address, shown]) => {
  const text = () => document.querySelector(shown)?.textContent;
  const [before, started] = [text(), performance.now()];
  location.hash = address;
  dispatchEvent(new PopStateEvent('popstate'));
  while (text() === before) await new Promise((done) => setTimeout(done, 2));
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
  return (performance.now() - started) / 1000;
}"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--episodes", type=int, default=100_000)
    count = parser.parse_args().episodes
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        num_bytes = write_run(run, count)
        result = {"measure": "viewer", "episodes": count, "MB": round(num_bytes / 1e6), **measure(run, count)}
        result["load"] = os.getloadavg()[0]
        sys.stdout.write(json.dumps(result) + "\n")


def write_run(run: Path, count: int) -> int:
    """Episodes that differ in seed, step, words and reward. Returns their bytes."""
    write_lines(run / "metrics.jsonl", metrics(200))
    rng = random.Random(0)
    lines = []
    for _ in range(500):
        message = " ".join(rng.choices(WORDS, k=40))
        error = "illegal square" if rng.random() < 0.02 else None
        row = episode(
            seed=987654321, step=123456, words=message, reward=rng.uniform(-1, 1), error=error, ids=tuple(range(60))
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
            result: dict[str, Any] = {"while_indexing": paint(browser.new_page(), server.url, "")}
            while server.get("api/runs")[2]["runs"][0]["episodes"]["episodes"] < count:
                assert time.perf_counter() - started < 600, "the index takes more than ten minutes"
                time.sleep(0.2)
            result["index_s"] = round(time.perf_counter() - started, 1)
            result["first_paint"] = paint(browser.new_page(), server.url, "")
            page = browser.new_page()
            result["episodes_tab"] = paint(page, server.url, "#view=episodes")
            result |= acts(page, count)
        finally:
            server.close()
            browser.close()
    return result


def paint(page: Page, url: str, address: str) -> dict[str, float]:
    """Seconds to the first contentful paint, and until the page shows its data."""
    started, cpu = time.perf_counter(), cpu_seconds()
    page.goto(url + address)
    page.wait_for_selector(".episodes li, figure.chart" if address else "figure.chart", timeout=60_000)
    spent = {"data_shown_s": round(time.perf_counter() - started, 3), "cpu_s": round(cpu_seconds() - cpu, 3)}
    entry = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    return {"first_contentful_s": round(page.evaluate(entry) / 1000, 3), **spent}


def acts(page: Page, count: int) -> dict[str, dict[str, float]]:
    """Turning pages, filters, searches, opening: medians, each until the page shows it."""
    view = "#view=episodes"
    near = [f"{view}&offset={50 * (at + 1)}" for at in range(TIMES)]
    far = [f"{view}&offset={count - 50 * (at + 2)}" for at in range(TIMES)]
    sorted_far = [f"{view}&sort=lowest reward&offset={count // 2 + 50 * at}" for at in range(TIMES)]
    filters = [f"{view}&{one}" for one in ("error=any error", "reward_from=0.5", "step_from=100&step_to=110")]
    searches = [f"{view}&text={text}" for text in ("skewer", '"check mate"', "gambit tempo end", "illegal")]
    opened = [f"{view}&n={n}&colour=logprob" for n in range(100, 100 + TIMES)]
    return {
        "next_page": timed(page, near, ".pager"),
        "far_page": timed(page, far, ".pager"),
        "by_reward_far_page": timed(page, sorted_far, ".pager"),
        "filter": timed(page, filters, ".pager"),
        "search": timed(page, searches, ".pager"),
        "open": timed(page, opened, ".facts"),
    }


def timed(page: Page, addresses: list[str], shown: str) -> dict[str, float]:
    """Median seconds from an act until what it changes is drawn, and CPU-seconds of server and browser together."""
    seconds, cpus = [], []
    for address in addresses:
        cpu = cpu_seconds()
        seconds.append(page.evaluate(ACT, [address, shown]))
        cpus.append(cpu_seconds() - cpu)
    return {"s": round(statistics.median(seconds), 3), "cpu_s": round(statistics.median(cpus), 3)}


def cpu_seconds() -> float:
    """Memory of this process with the server, and of the browser's processes."""
    ticks = 0
    for child in [*psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            ticks += sum(child.cpu_times()[:2])
    return time.process_time() + ticks


if __name__ == "__main__":
    main()
