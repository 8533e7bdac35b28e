import subprocess
import sys

import pytest

from forge_agents import cli


def test_help_lists_every_command(capsys):
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)


def test_unknown_command_suggests_the_nearest(capsys):
    assert cli.main(["trian"]) == 2
    assert "Did you mean 'train'" in capsys.readouterr().err


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main([command, "--help"])
    assert exit_.value.code == 0
    assert f"forge-agents {command}" in capsys.readouterr().out


def test_list_shows_environments_by_tag(capsys):
    assert cli.main(["list", "--tag", "zero-sum"]) == 0
    text = capsys.readouterr().out
    assert "KuhnPoker" in text and "Relay" not in text


def test_check_of_an_unknown_id_fails_with_a_suggestion(capsys):
    assert cli.main(["check", "forge/KuhnPokr-v0"]) == 1
    assert "forge/KuhnPoker-v0" in capsys.readouterr().err


def test_the_facade_imports_nothing_heavy():
    code = "import sys, forge_agents; print([m for m in ('torch', 'vllm', 'monarch', 'numpy') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_every_public_name_exists():
    import forge_agents as fa

    assert sorted(fa.__all__) == sorted(set(fa.__all__))
    for name in fa.__all__:
        assert getattr(fa, name) is not None


def test_a_misspelt_name_suggests_the_nearest():
    import forge_agents as fa

    with pytest.raises(AttributeError, match="Did you mean 'Policy'"):
        fa.Polcy  # noqa: B018
