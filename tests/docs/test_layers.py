import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
layers = runpy.run_path(str(ROOT / "docs" / "_layers.py"))
PAGE = (ROOT / "docs" / "concepts.md").read_text()


def test_packages_import_downwards_and_never_in_a_circle():
    assert layers["violations"](layers["module_graph"]()) == []


def test_the_layers_in_the_docs_are_current():
    assert layers["written"](PAGE) == PAGE, "run python docs/_layers.py --write"


def test_the_docs_describe_every_package_and_no_other():
    tree = PAGE.partition("## Packages")[2].split("```")[1]
    named = set(re.findall(r"(?<!\S)([\w/]+)/(?=[\s,])", tree))
    sources = {f"{folder}/{package}".lstrip("/") for package, folder in layers["SOURCES"].items()}
    packages = {name.partition(".")[2] for name in layers["ranks"]() if "." in name}
    assert named == packages | sources | {"examples", "recipes"}
    modules = tree.splitlines()[2].split("   ")[0].split()
    assert [(ROOT / "forge_agents" / f"{name}.py").is_file() for name in modules] == [True] * 5


def test_files_that_the_page_of_a_step_names_exist():
    files = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "a-step.md").read_text())
    assert len(set(files)) > 25 and all((ROOT / file).is_file() for file in files)


@pytest.mark.parametrize(
    ("module", "other", "message"),
    [
        ("forge_agents.errors", "forge_agents.runtime.mesh", "neither in a layer below forge_agents nor"),
        ("forge_agents.envs.env", "forge_agents.tools.definition", "forge_agents.tools is neither in a layer below"),
        ("forge_trainers.losses.registry", "forge_trainers.rl.trainer", "forge_trainers.rl is neither in"),
    ],
)
def test_an_import_of_the_same_or_a_higher_layer_is_reported(module, other, message):
    graph = layers["module_graph"]() | {module: {other}}
    lines = layers["violations"](graph)
    assert any(line.startswith(f"{module} imports {other}") and message in line for line in lines)


def test_a_circle_in_one_package_and_a_package_without_a_layer_are_reported():
    graph = {
        "forge_agents.bench.a": {"forge_agents.bench.b"},
        "forge_agents.bench.b": {"forge_agents.bench.a"},
        "forge_agents.attic.c": set(),
    }
    lines = layers["violations"](graph)
    assert any("in a circle: " in line and "forge_agents.bench.b" in line for line in lines)
    assert "forge_agents.attic has no layer; add it to LAYERS" in lines
    assert "there is no package forge_agents.cli; remove it from LAYERS" in lines


def test_imports_in_functions_and_for_types_count(tmp_path: Path):
    file = tmp_path / "m.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from forge_agents.serving import fleet\n"
        "def f():\n    import forge_agents.errors\n    from forge_agents.types import Turn\n"
        "def g():\n    import forge_agents as fa\n    fa.GRPOTrainer, fa.no_such_name\n"
        "    from forge_agents import benchmark\n"
    )
    modules = set(layers["imported"](file, layers["modules"]()))
    reexported = {"forge_trainers.rl.trainer", "forge_agents.bench.play"}
    assert modules == {"forge_agents.serving.fleet", "forge_agents.errors", "forge_agents.types"} | reexported
