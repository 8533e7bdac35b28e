"""Memory that a process may allocate, limited by the machine, a container, or a job's control group."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_agents.runtime import machine
from forge_agents.runtime.machine import available_bytes, total_bytes

GB = 1_000_000_000


def group(folder: Path, *, limit: str, used: int, version: int = 2, inactive: int = 0) -> None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    inactive_file = "inactive_file" if version == 2 else "total_inactive_file"
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{inactive_file} {inactive}\n")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    _, (_, *version_1) = two = machine._MEMORY_LIMITS
    monkeypatch.setattr(machine, "_MEMORY_LIMITS", ((tmp_path, *two[0][1:]), (tmp_path / "memory", *version_1)))
    monkeypatch.setattr(machine, "_GROUPS", tmp_path / "groups")
    return tmp_path


def test_container_limit_applies_at_the_root_group(root: Path) -> None:
    (root / "groups").write_text("0::/\n")
    group(root, limit=str(GB), used=GB // 2, inactive=1000)
    assert (total_bytes(), available_bytes()) == (GB, GB // 2 + 1000)


def test_tightest_limit_of_enclosing_groups_applies(root: Path) -> None:
    (root / "groups").write_text("0::/system.slice/slurmstepd.scope/job_7/step_0/user\n")
    job = root / "system.slice" / "slurmstepd.scope" / "job_7"
    group(job, limit=str(GB), used=900_000_000)
    group(job / "step_0", limit=str(GB // 2), used=100_000_000)
    group(job / "step_0" / "user", limit="max", used=100_000_000)
    group(root / "system.slice" / "another_job", limit="1000", used=0)
    assert total_bytes() == GB // 2
    assert available_bytes() == 100_000_000  # of the job; its step would have 400 MB


def test_version_1_groups_with_limits_apply(root: Path) -> None:
    (root / "groups").write_text("9:cpu:/low\n4:memory:/process/7\n0::/\n")
    group(root / "memory", limit="9223372036854771712", used=8 * GB, version=1)
    group(root / "memory" / "process" / "7", limit=str(GB), used=GB // 4, version=1, inactive=5)
    assert (total_bytes(), available_bytes()) == (GB, GB - GB // 4 + 5)


def test_machine_memory_applies_without_groups(root: Path) -> None:
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    assert total_bytes() == int(meminfo["MemTotal"].split()[0]) * 1024
    assert 0 < available_bytes() <= total_bytes()


@pytest.mark.parametrize(
    ("cpuinfo", "fast"),
    [
        ("flags\t\t: fpu avx2 avx512f\n", False),
        ("flags\t\t: fpu avx512_bf16 vaes\n", True),
        ("flags\t\t: amx_bf16\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("model name\t: avx512_bf16\n", False),
    ],
)
def test_bfloat16_is_fast_with_instructions_for_it(monkeypatch: pytest.MonkeyPatch, cpuinfo: str, fast: bool) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: cpuinfo)
    monkeypatch.setattr(machine, "processor_flags", machine.processor_flags.__wrapped__)
    assert machine.has_fast_bfloat16() is fast
