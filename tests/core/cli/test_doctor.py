import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_checks import holds_within

from forge_agents.cli import doctor
from forge_agents.cli.doctor import PROBES, Check, Probe, run_doctor
from forge_agents.models import resolve as models

PARTS = ("python", "C compiler", "model cache")


def probe(function: str, *, timeout_s: float = 60) -> Probe:
    return Probe("part", function, timeout_s, "the usual advice")


def check(function: str, **options: float) -> Check:
    return run_doctor([probe(function, **options)])[-1]


def test_working_part_shows_details():
    result = check("os:getpid")
    assert (result.ok, result.detail.isdigit(), result.fix) == (True, True, "")


def test_library_shows_its_version():
    assert check("import:pytest").detail == f"pytest {pytest.__version__}"


def test_missing_library_is_named_with_a_fix():
    result = check("import:no_such_library")
    assert not result.ok
    assert "no_such_library" in result.detail
    assert "make venv" in result.fix


@pytest.mark.parametrize(
    ("message", "cure"),
    [
        ("No module named 'torchstore'", "forge-agents doctor --fix"),
        ("RuntimeError: operator torchvision::nms does not exist", "forge-agents doctor --fix"),
        ("No module named 'vllm'", "pip install 'forge-agents-rl[cpu]' or"),
    ],
)
def test_packages_that_pip_cannot_resolve_have_a_specific_fix(message: str, cure: str):
    assert cure in next(fix for text, fix in doctor.KNOWN_FAILURES if text in message)


def test_built_in_model_is_checked(monkeypatch: pytest.MonkeyPatch):
    assert doctor.built_in_model().startswith("SmolLM2-135M-Instruct")
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(models.ModelNotFoundError, match="Run `forge-agents doctor --fix`"):
        doctor.built_in_model()


def test_hanging_part_is_reported():
    started = time.monotonic()
    result = check("signal:pause", timeout_s=1.5)
    assert (result.detail, result.fix) == ("no result within 2 s", "the usual advice")
    assert time.monotonic() - started < 60


def test_crashing_part_is_reported():
    assert check("os:abort").detail == "killed by SIGABRT"


def test_part_without_a_result_is_reported():
    assert check("sys:exit").detail == "the process ended without a result"


def test_later_parts_are_tested_after_a_failure():
    result = run_doctor([probe("os:abort"), probe("os:getpid")])
    assert [part.ok for part in result[len(PARTS) :]] == [False, True]


def test_unwritable_cache_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(models.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    result = {part.name: part for part in run_doctor([])}["model cache"]
    assert not result.ok
    assert models.CACHE_VARIABLE in result.fix


def test_missing_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = {part.name: part for part in run_doctor([])}["C compiler"]
    assert "build-essential" in result.fix


@pytest.mark.parametrize(("probes", "status"), [([], 0), ([probe("os:abort")], 1)])
def test_exit_status_is_1_if_a_part_fails(monkeypatch: pytest.MonkeyPatch, capsys, probes: list[Probe], status: int):
    monkeypatch.setattr(doctor, "run_doctor", lambda: run_doctor(probes))
    assert doctor.main() == status
    printed = capsys.readouterr().out
    assert ("the usual advice" in printed) == bool(status)
    assert f"{len(PARTS) + len(probes)} parts: {len(PARTS)} passed, {len(probes)} failed" in printed


def test_fix_of_several_parts_is_printed_once(monkeypatch: pytest.MonkeyPatch, capsys):
    result = [
        Check(name=name, ok=False, seconds=0.0, detail="gone", fix=fix)
        for name, fix in (("torch", "again"), ("actor", "localhost"), ("vllm", "again"))
    ]
    monkeypatch.setattr(doctor, "run_doctor", lambda: result)
    assert doctor.main() == 1
    assert capsys.readouterr().out.splitlines()[-3:-1] == ["torch, vllm (2): again", "actor: localhost"]


def test_ctrl_c_ends_the_process_of_a_part(tmp_path: Path):
    code = (
        "import signal\n"
        "from forge_agents.cli.doctor import Probe, _run\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # what runs in the background ignores it
        "_run(Probe('x', 'hangs:here', 60, 'none'))\n"
    )
    says = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    (tmp_path / "hangs.py").write_text(f"import os, time\n{says}\ntime.sleep(60)\n")
    started = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert holds_within(60, lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    started.send_signal(signal.SIGINT)
    started.wait(timeout=30)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.slow
def test_real_parts_work():
    real = [part for part in PROBES if not part.function.startswith("import:")]
    assert [part.name for part in real] == ["built-in model", "actor", "tensor", "engine step", "learner step"]
    assert all(doctor._probe(part.function) for part in real)  # here, where the libraries are imported already
