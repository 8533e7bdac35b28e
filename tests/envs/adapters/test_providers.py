import subprocess
import sys
from types import SimpleNamespace

from refusals import raises

import forge_agents as fa
from forge_agents.envs import registry
from forge_agents.errors import UnknownIdError


def test_listing_imports_no_library():
    libraries = ("textarena", "reasoning_gym", "rlcard", "openenv", "nltk", "sympy")
    code = f"import sys, forge_agents as fa; fa.list_envs(); print([m for m in {libraries} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "[]"


def test_every_namespace_is_listed_with_the_adapter_tag():
    ids = fa.list_envs("adapter")
    count = {space: sum(id_.startswith(f"{space}/") for id_ in ids) for space in ("textarena", "reasoning-gym")}
    assert count["textarena"] >= 199 and count["reasoning-gym"] >= 104  # and those that other tests have made by name
    assert sum(id_.startswith("pettingzoo/") for id_ in ids) >= 9
    assert {"gymnasium/FrozenLake-v1", "pettingzoo/chess-v6", "textarena/TicTacToe-v0"} <= set(ids)


def test_missing_library_lists_nothing_and_names_the_command(monkeypatch):
    monkeypatch.setattr(registry, "_providers", {})
    fa.list_envs()
    registry.provide("absent", entry_point="no_such:function", package="no_such_library", extra="textarena")
    fa.list_envs()
    raises(ImportError, r"absent/.*pip install 'forge-agents-rl\[textarena\]'", fa.make, "absent/Game-v0")
    registry.provide("foreign", entry_point="no_such:function", package="no_such_library")  # by another project
    raises(ImportError, r"foreign/.*'no_such_library': install the library that has it$", fa.make, "foreign/Game-v0")


def test_failed_listing_is_repeated_and_a_complete_one_is_not(monkeypatch):
    requests = []

    def ids(name):
        requests.append(name)
        if len(requests) == 1:
            raise RuntimeError("half a catalogue")

    monkeypatch.setattr(registry, "_providers", {})
    monkeypatch.setattr(registry, "_listed", set())
    monkeypatch.setitem(sys.modules, "catalogue", SimpleNamespace(ids=ids))
    registry.provide("shop", entry_point="catalogue:ids", package="json")
    raises(RuntimeError, "half a catalogue", fa.list_envs)
    for _ in range(2):
        fa.list_envs()
    assert requests == [None, None]


def test_a_namespace_has_one_owner(monkeypatch):
    monkeypatch.setattr(registry, "_providers", {})
    for _ in range(2):
        registry.provide("twice", entry_point="a:f", package="sys")
    raises(ValueError, "already offered by a:f", registry.provide, "twice", entry_point="b:f", package="sys")


def test_unknown_names_of_a_namespace_are_unknown_ids():
    raises(UnknownIdError, "textarena/TicTacToe-v0", fa.make, "textarena/TicTakToe-v0")


def test_library_spelling_of_a_variant_is_accepted():
    assert fa.spec("textarena/2048-v0-hard").id == "textarena/2048-hard-v0"
    assert fa.spec("textarena/2048-hard-v0").kwargs["game"] == "2048-v0-hard"
    assert fa.spec("reasoning-gym/leg_counting").id == "reasoning-gym/leg_counting-v0"
