import json
import sys

import pytest
from plain_env import Plain

import forge_agents as fa
from forge_agents.cli import main as cli
from forge_agents.envs import registry


class Short(Plain):
    def setup(self, rng):
        sys.stdout.write("a game that prints\n")


class Raising(Short):
    def act(self, agent, action):
        raise ValueError(f"[red]{action}")


class Missing(Short):
    def __init__(self):
        raise ImportError("pip install 'forge-agents[missing]'")


@pytest.fixture
def own_ids(monkeypatch):
    registry.spec("forge/KuhnPoker-v0")  # the plugins are loaded before the registry is set aside
    monkeypatch.setattr(registry, "_specs", {})
    for cls, tags in ((Short, ("adapter", "fine")), (Raising, ("adapter",)), (Missing, ())):
        fa.register(f"t/{cls.__name__}-v0", tags=tags)(cls)
    monkeypatch.setattr(registry, "list_envs", lambda tag=None: sorted(
        id_ for id_, s in registry._specs.items() if tag is None or tag in s.tags
    ))  # fmt: skip


def test_json_is_a_line_per_id_whatever_breaks_or_prints(own_ids, capsys):
    assert cli.main(["check", "--all", "--json"]) == 1
    missing, raising, short = map(json.loads, capsys.readouterr().out.splitlines())
    assert missing["ok"] is False and "forge-agents[missing]" in missing["findings"][0]["message"]
    assert raising["id"] == "t/Raising-v0" and raising["level"] == "adapter"
    assert "act" in raising["findings"][0]["where"] and "ValueError" in raising["findings"][0]["message"]
    assert short["ok"] is True and short["checks"] == 4 and short["seconds"] >= 0
    assert (short["passed"], short["failed"], short["skipped"]) == (3, 0, 1)
    assert {f["check"]: f["message"] for f in short["findings"] if f["skipped"]} == {
        "reasoning": "no other agent that could read it"
    }


def test_tags_narrow_all_and_success_is_status_0(own_ids, capsys):
    assert cli.main(["check", "--all", "--tag", "fine"]) == 0
    text = capsys.readouterr().out
    assert "t/Short-v0" in text and "Raising" not in text and "1 of 1 environments passed all checks" in text


def test_one_id_gets_a_table_of_its_checks_without_markup(own_ids, capsys):
    assert cli.main(["check", "t/Raising-v0", "--episodes", "2"]) == 1
    text = capsys.readouterr().out
    assert all(word in text for word in ("plays", "FAIL", "[red]", "fix:", "test_conformance_report"))


@pytest.mark.parametrize("words", [["t/Hostile-v0"], ["--all"]])
def test_report_escapes_what_a_terminal_cannot_show(own_ids, words, capfd):
    @fa.register("t/Hostile-v0")
    class Hostile(Plain):
        def act(self, agent, action):
            raise ValueError("\x1b[2J \ud800")

    assert cli.main(["check", *words]) == 1
    text = capfd.readouterr().out
    assert r"ValueError: \x1b[2J \ud800" in text and "\x1b" not in text


@pytest.mark.parametrize("words", [[], ["t/Short-v0", "--all"], ["t/Short-v0", "--tag", "fine"]])
def test_ids_or_all(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["check", *words])
    assert stopped.value.code == 2 and "--all (which --tag filters" in capsys.readouterr().err
