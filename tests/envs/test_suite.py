import re
import sys
from pathlib import Path
from subprocess import run

import pytest

import forge_agents as fa
from forge_agents.bench.statistics import detectable_difference
from forge_agents.envs import registry
from forge_agents.errors import UnknownIdError

CORE = ("forge/KuhnPoker-v0", "forge/Relay-v0", "forge/AlphabetSort-v0")


def test_the_core_suite_holds_our_environments():
    assert registry.suite("core-v1") == CORE
    assert set(CORE) <= set(fa.list_envs())
    assert "forge/KuhnPoker-v0" in fa.list_envs(tag="zero-sum") and "forge/Relay-v0" not in fa.list_envs(tag="zero-sum")


def test_listing_imports_no_environment():
    ours = "[m for m in sys.modules if 'forge_envs.' in m and 'adapters' not in m]"
    code = f"import sys, forge_agents as fa; fa.list_envs(); print({ours})"
    assert run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize(("name", "of_one", "of_all"), [
    ("team-v0", 0.49, 0.22), ("teams-v1", 0.51, 0.16), ("duels-v1", 0.68, 0.36), ("diagnostics-v1", 0.73, 0.22)
])  # fmt: skip
def test_the_page_says_which_difference_a_suite_finds(name, of_one, of_all):
    """Four players have six pairs."""
    worlds, seeds = registry.suite(name), registry.suite_defaults(name).episodes
    assert detectable_difference(seeds, 6 * len(worlds)) == pytest.approx(of_one, abs=0.006)
    assert detectable_difference(seeds * len(worlds), 6) == pytest.approx(of_all, abs=0.006)
    page = (Path(__file__).parents[2] / "docs/benchmark.md").read_text()
    assert re.search(rf"^\| `{name}` \|.*\| {of_one} \| {of_all} \|$", page, re.MULTILINE)


def test_suites_separate_cooperative_and_competitive_environments():
    tags = {name: [fa.spec(world).tags for world in registry.suite(name)] for name in ("teams-v1", "duels-v1")}
    assert all("cooperative" in each for each in tags["teams-v1"])
    assert not any("cooperative" in each for each in tags["duels-v1"])
    assert all(len(fa.spec(world).levels) >= 5 for world in registry.suite("teams-v1"))
    for wrong, meant in (("teams-v2", "teams-v1"), ("duel-v1", "duels-v1"), ("diagnostic-v1", "diagnostics-v1")):
        with pytest.raises(UnknownIdError, match=f"Did you mean .*'{meant}'"):
            fa.suite(wrong)
