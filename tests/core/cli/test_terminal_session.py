"""The commands in a pseudo-terminal."""

import os
import re
import sys

import pytest

pexpect = pytest.importorskip("pexpect")
LIMIT_S = 120


@pytest.fixture
def started(tmp_path):
    """``started("play", ...)``: `forge-agents` in a terminal of 24 lines and 80 columns, in an empty folder."""
    running = []

    def start(*words, **variables):
        environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
        child = pexpect.spawn(
            sys.executable,
            ["-m", "forge_agents.cli.main", *words],
            cwd=str(tmp_path),
            env={**environment, "TERM": "xterm-256color", **variables},
            dimensions=(24, 80),
            encoding="utf-8",
            timeout=LIMIT_S,
        )
        running.append(child)
        return child

    yield start
    for child in running:
        child.close(force=True)


def ended(child):
    """All that is left to read, and the exit status."""
    rest = child.read()
    child.wait()
    return rest, child.exitstatus


def test_person_creates_a_project_and_plays(started, tmp_path):
    output, status = ended(started("init", "mine", "--template", "duel"))
    assert status == 0 and "next   cd mine && forge-agents train train.yaml" in output
    child = started("play", "my_env:my/Duel-v0", "--seed", "1", PYTHONPATH=str(tmp_path / "mine"))
    child.expect_exact("you are player_0. Type an action and press Enter")
    child.expect_exact("player_0> ")
    child.sendline("show")
    output, status = ended(child)
    assert status == 0 and "terminated after 1 turns" in output


def test_ctrl_d_leaves_a_game(started):
    child = started("play", "forge/KuhnPoker-v0")
    child.expect_exact("player_0> ")
    child.sendeof()
    output, status = ended(child)
    assert status == 0 and "left: the input has" in output  # the rest is on the next line


def test_ctrl_c_ends_with_130(started):
    child = started("play", "forge/KuhnPoker-v0")
    child.expect_exact("player_0> ")
    child.sendintr()
    _, status = ended(child)
    assert status == 130


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_color_can_be_disabled(variables, coloured, started):
    child = started("play", "forge/KuhnPoker-v0", **variables)
    child.expect_exact("player_0> ")
    assert bool(re.search(r"\x1b\[[\d;]*3\dm", child.before)) is coloured
    child.sendeof()
    ended(child)
