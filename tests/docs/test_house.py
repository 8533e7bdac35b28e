import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
house = runpy.run_path(str(ROOT / "docs" / "_house.py"))


def test_every_import_goes_down_and_none_in_a_circle():
    assert house["faults"](house["module_graph"]()) == []


def test_the_drawing_in_the_docs_is_todays():
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert house["written"](page) == page, "run python docs/_house.py --write"


def test_the_readme_names_every_room_and_no_other():
    tree = (ROOT / "README.md").read_text().partition("## Where things are")[2].split("```")[1]
    named = set(re.findall(r"(?<!\S)([\w/]+)/(?=[\s,])", tree))
    packages = {f"{folder}/{package}".lstrip("/") for package, folder in house["SOURCES"].items()}
    rooms = {room.partition(".")[2] for room in house["floors"]() if "." in room}
    assert named == rooms | packages | {"examples", "recipes", "workers", "conformance"}
    ground = tree.splitlines()[2].split("   ")[0].split()
    assert [(ROOT / "forge_agents" / f"{name}.py").is_file() for name in ground] == [True] * 5


def test_a_step_passes_through_ten_files_that_there_are():
    page = (ROOT / "docs" / "a-step.md").read_text()
    files = re.findall(r"^\| \d+ \| `([\w/]+\.py)` \|", page, re.MULTILINE)
    assert len(set(files)) == 10 and all((ROOT / file).is_file() for file in files)


@pytest.mark.parametrize(
    ("module", "other", "said"),
    [
        ("forge_agents.errors", "forge_agents.runtime.mesh", "does not stand below forge_agents"),
        ("forge_agents.envs.env", "forge_agents.weights.store", "forge_agents.weights does not stand below"),
        ("forge_trainers.losses.registry", "forge_trainers.rl.trainer", "forge_trainers.rl does not stand below"),
    ],
)
def test_an_arrow_up_or_along_a_floor_is_named(module, other, said):
    graph = house["module_graph"]() | {module: {other}}
    assert any(line.startswith(f"{module} imports {other}") and said in line for line in house["faults"](graph))


def test_a_circle_in_one_room_and_a_room_without_a_floor_are_named():
    graph = {
        "forge_agents.bench.a": {"forge_agents.bench.b"},
        "forge_agents.bench.b": {"forge_agents.bench.a"},
        "forge_agents.attic.c": set(),
    }
    found = house["faults"](graph)
    assert any("in a circle: " in line and "forge_agents.bench.b" in line for line in found)
    assert "forge_agents.attic stands on no floor; add it to FLOORS" in found
    assert "there is no room forge_agents.cli; take it out of FLOORS" in found


def test_imports_in_functions_and_for_types_count(tmp_path: Path):
    file = tmp_path / "m.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from forge_agents.serving import fleet\n"
        "def f():\n    import forge_agents.errors\n    from forge_agents.types import Turn\n"
        "def g():\n    import forge_agents as fa\n    fa.GRPOTrainer, fa.no_such_name\n"
        "    from forge_agents import verifier_history\n"
    )
    found = set(house["imported"](file, house["modules"]()))
    handed_on = {"forge_trainers.rl.trainer", "forge_trainers.records.run_folder"}
    assert found == {"forge_agents.serving.fleet", "forge_agents.errors", "forge_agents.types"} | handed_on
