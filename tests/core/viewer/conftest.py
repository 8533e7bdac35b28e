"""Runs, servers and a headless browser for the tests of the viewer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from viewer_runs import Server, episode, metrics, write_lines


@pytest.fixture
def run_folder(tmp_path) -> Path:
    """A training run of three steps with six episodes, one of which failed."""
    folder = tmp_path / "first"
    rows = [episode(step=step, seed=10 + step, words=f"word{step}", reward=float(step - 1)) for step in range(3)]
    rows += [
        episode(step=2, seed=20, env="my/Other-v0", words="something else"),
        episode(step=2, seed=21, words="broken", error="no such square"),
        episode(step=2, seed=22, words="zebra crossing", ids=(104, 105, 33)),
    ]
    write_lines(folder / "episodes.jsonl", rows)
    write_lines(folder / "metrics.jsonl", metrics(3))
    (folder / "config.yaml").write_text("env: [my/Game-v0]\ntrainer: {max_staleness: 0, seed: 1}\n")
    return folder


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """``serve(folder, ...)``: a `Server` that ends with the test."""
    servers: list[Server] = []

    def start(*folders: Path) -> Server:
        servers.append(Server(list(folders)))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium that resolves no name but this machine's."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    installed = next(filter(None, map(shutil.which, names)), None)
    options = ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # Chromium refuses to be root otherwise
    with playwright.sync_playwright() as driver:
        if installed is None and not Path(driver.chromium.executable_path).exists():
            pytest.skip(f"no browser: none of {', '.join(names)} is installed")
        result = driver.chromium.launch(executable_path=installed, args=options)
        yield result
        result.close()
