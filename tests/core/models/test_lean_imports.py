"""transformers without what nobody needs: what it asks is answered as before, and patches end with the block."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from forge_agents.models import lean_imports


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """``installed(name)``: a package of that name now lies in a folder of the search path; returns its metadata's."""
    place = tmp_path / "site"
    place.mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "nowhere"), str(place)])
    monkeypatch.setenv("FORGE_AGENTS_CACHE", str(tmp_path / "cache"))

    def install(name: str) -> Path:
        folder = place / f"{name}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (folder / "top_level.txt").write_text(f"{name}\n")
        return folder

    return install


def test_package_list_is_cached_until_a_package_changes(installed: Callable[[str], Path]):
    requested = []

    def ask() -> dict[str, list[str]]:
        requested.append(1)
        importlib.invalidate_caches()
        return dict(importlib.metadata.packages_distributions())

    first = installed("one")
    for _ in range(2):
        assert lean_imports.packages_distributions(ask) == {"one": ["one"]} and len(requested) == 1
    installed("two")
    for _ in range(2):
        assert lean_imports.packages_distributions(ask) == {"one": ["one"], "two": ["two"]} and len(requested) == 2
    first.rename(first.with_name("one-2.dist-info"))  # as an upgrade does
    lean_imports.packages_distributions(ask)
    assert len(requested) == 3


@pytest.mark.parametrize("text", ["", "[]", "{", '{"places": []}', "a folder"])
def test_damaged_package_cache_is_replaced(text: str, installed: Callable[[str], Path], tmp_path: Path):
    installed("one")
    note = tmp_path / "cache" / "packages.json"
    note.parent.mkdir()
    note.mkdir() if text == "a folder" else note.write_text(text)
    result = lean_imports.packages_distributions(importlib.metadata.packages_distributions)
    assert result == {"one": ["one"]}
    assert note.is_dir() or json.loads(note.read_text())["packages"] == result


def test_lean_transformers_skips_optional_libraries(tmp_path: Path):
    """In a process of its own, where nobody has loaded it yet."""
    program = """
import importlib.metadata
asked = importlib.metadata.packages_distributions
from forge_agents.models.lean_imports import lean_transformers
with lean_transformers():
    from transformers.utils import import_utils, is_scipy_available, is_sklearn_available
    assert not is_scipy_available() and not is_sklearn_available()
import transformers.utils
assert transformers.utils.is_scipy_available is import_utils.is_scipy_available
assert transformers.utils.is_sklearn_available is import_utils.is_sklearn_available
assert importlib.metadata.packages_distributions is asked and import_utils.PACKAGE_DISTRIBUTION_MAPPING == asked()
"""
    environment = {**os.environ, "FORGE_AGENTS_CACHE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=300)


def test_scipy_signal_is_missing_only_inside_the_block(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "scipy.signal", raising=False)
    with lean_imports.without_scipy_signal(), pytest.raises(ImportError):
        importlib.import_module("scipy.signal")
    assert "scipy.signal" not in sys.modules
    loaded = ModuleType("scipy.signal")
    monkeypatch.setitem(sys.modules, "scipy.signal", loaded)
    with lean_imports.without_scipy_signal():
        assert importlib.import_module("scipy.signal") is loaded  # who has it keeps it
