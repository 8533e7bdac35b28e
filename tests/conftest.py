"""What every test shares: few threads, no hub, tiny models, and a look for processes left behind."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SESSION_VARIABLE = "FORGE_AGENTS_TEST_SESSION"

# Set before any library is imported, because some read them only then.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ[SESSION_VARIABLE] = secrets.token_hex(8)  # children inherit it, grandchildren too


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_models(family="qwen3", tied=False)``: the folder of that tiny model, written once a session. Read-only."""
    from forge_agents.testing._tiny_model import tiny_model

    made: dict[tuple[tuple[str, object], ...], Path] = {}

    def folder(**options: object) -> Path:
        key = tuple(sorted(options.items()))
        if key not in made:
            made[key] = tiny_model(tmp_path_factory.mktemp("tiny"), **options)  # type: ignore[arg-type]
        return made[key]

    return folder


@pytest.fixture(scope="session")
def tiny_llama(tiny_models: Callable[..., Path]) -> Path:
    """A tiny Llama model, float32, tied embeddings. Read-only."""
    return tiny_models(family="llama")


@pytest.fixture(scope="session")
def tiny_qwen3(tiny_models: Callable[..., Path]) -> Path:
    """A tiny Qwen3 model, float32, tied embeddings. Read-only."""
    return tiny_models(family="qwen3")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A test run that leaves processes behind has failed, and cleans up after itself."""
    deadline = time.monotonic() + 15
    while (left := _left_behind()) and time.monotonic() < deadline:
        time.sleep(0.2)
    if not left:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    for pid, command in left.items():
        if reporter is not None:
            reporter.write_line(f"process left behind: {pid} {command}", red=True)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _left_behind() -> dict[int, str]:
    """Command lines of living processes, by id, that carry this session's mark."""
    mark = f"{SESSION_VARIABLE}={os.environ[SESSION_VARIABLE]}".encode()
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if mark not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it ended, or is somebody else's
            continue
        # Python's own tracker of shared memory ends with this process; zombies have no command line.
        if command and "multiprocessing.resource_tracker" not in command:
            found[int(folder.name)] = command
    return found
