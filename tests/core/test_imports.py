"""Imports of big libraries leave the collector and the libraries as they were."""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from forge_agents import imports
from forge_agents.imports import with_lazy_package_names, without_garbage_collection, without_packages


@pytest.fixture(params=[True, False])
def collecting(request: pytest.FixtureRequest) -> Iterator[bool]:
    was = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if was else gc.disable)()


def test_garbage_collection_is_disabled_only_inside_the_block(collecting: bool):
    with without_garbage_collection():
        with without_garbage_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() == collecting


def test_failed_import_restores_garbage_collection(collecting: bool):
    with pytest.raises(ModuleNotFoundError), without_garbage_collection():
        importlib.import_module("forge_agents.no_such_module")
    assert gc.isenabled() == collecting


def test_hidden_packages_are_absent_only_inside_the_block(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    before = set(sys.modules)
    with without_packages("colorsys", "json"):
        assert importlib.util.find_spec("colorsys") is None
        assert importlib.import_module("json") is json  # was imported before
        with pytest.raises(ImportError):
            importlib.import_module("colorsys")
    assert set(sys.modules) == before
    assert importlib.import_module("colorsys").rgb_to_hsv(1, 1, 1) == (0, 0, 1)


def test_package_names_are_read_when_a_module_has_another_name_than_its_package(monkeypatch: pytest.MonkeyPatch):
    read, asked = metadata.packages_distributions, []
    counted = lambda: asked.append(1) or read()  # noqa: E731  # compared below
    monkeypatch.setattr(metadata, "packages_distributions", counted)
    with with_lazy_package_names():
        names = metadata.packages_distributions()
    assert metadata.packages_distributions is counted and asked == []
    every = read()
    assert names["torch"] == ["torch"] and names.get("huggingface_hub") == every["huggingface_hub"] and asked == []
    assert names["PIL"] == every["PIL"] == ["pillow"] and names.get("no_such_module", "none") == "none"
    assert dict(names).keys() == every.keys() and asked == [1]


def test_user_folders_join_the_path_last_when_a_module_of_the_user_is_named(tmp_path: Path):
    for name in ("current", "of_the_file"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "my_env.py").write_text(f"WHERE = {name!r}")
        imports.add_user_folder(tmp_path / name)
    before = list(sys.path)
    assert importlib.util.find_spec("my_env") is None
    assert imports.import_user_module("my_env").WHERE == "of_the_file"
    assert sys.path == [*before, str(tmp_path / "of_the_file"), str(tmp_path / "current")]


def test_a_child_process_searches_folders_in_the_same_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, last, named = (tmp_path / name for name in ("first", "last", "named"))
    for folder in (first, last, named):
        folder.mkdir()
    installed = sysconfig.get_path("purelib")
    monkeypatch.setattr(sys, "path", [str(first), installed, str(last)])
    monkeypatch.setattr(sys, "prefix", str(tmp_path))  # as a project in /usr/src of a Python in /usr
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    imports.add_user_folder(named)
    variables = imports.path_variables()
    assert variables["PYTHONPATH"] == str(first)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    sys.path[:] = [str(first), installed]
    imports.extend_path()
    assert sys.path == [str(first), installed, str(last), str(named)]
    assert os.environ["PYTHONPATH"] == str(first)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("<frozen importlib._bootstrap>", True),
        (json.__file__, True),
        (pytest.__file__, True),
        (f"{pytest.__file__}:12 main", True),  # a line of a stack
        (__file__, False),
        (str(Path(sys.base_prefix, "src", "project", "main.py")), False),  # a project below Python's prefix
    ],
)
def test_library_files_are_recognized_by_folder_and_not_by_prefix(path: str, expected: bool) -> None:
    assert imports.is_library(path) is expected


def test_overlapping_blocks_restore_the_names_of_packages():
    """They do in two threads that load a renderer each."""
    read, first, second = metadata.packages_distributions, with_lazy_package_names(), with_lazy_package_names()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert metadata.packages_distributions is read


@pytest.mark.parametrize(
    ("before", "after"), [(None, "/nonexistent"), ("", "/nonexistent"), (":lib:/a::/b;lib;:.", "/a:/b")]
)
def test_children_load_no_shared_libraries_of_the_current_folder(before: str | None, after: str) -> None:
    """opencv puts a folder and a colon before the former value, and an empty element is the current folder."""
    program = "import forge_agents, os\nfirst = os.environ['LD_LIBRARY_PATH']\nimport cv2\n"
    program += "print(first, os.environ['LD_LIBRARY_PATH'])"
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    environment |= {} if before is None else {"LD_LIBRARY_PATH": before}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    first, last = ended.stdout.split()
    assert first == after and all(folder.startswith("/") for folder in last.split(":"))


def test_folder_of_a_run_may_hold_the_virtual_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "_run_folders", [Path(sys.prefix).parent, Path(sys.base_prefix)])
    assert imports.import_user_module("gymnasium.spaces").__name__ == "gymnasium.spaces"


def test_modules_of_scripts_and_notebooks_are_found_after_a_run_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "_run_folders", [tmp_path])
    monkeypatch.setitem(sys.modules, "of_a_cell", ModuleType("of_a_cell"))
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    for name in ("of_a_cell", "__main__"):
        assert imports.import_user_module(name) is sys.modules[name]
