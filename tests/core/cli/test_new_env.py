import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from refusals import raises

from forge_agents.cli import main as cli
from forge_agents.cli.scaffold import create
from forge_agents.errors import ForgeError


def run(*words, cwd, **variables):
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | variables, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_new_project_installs_and_passes_its_test(tmp_path, capsys):
    assert cli.main(["init", str(tmp_path / "word-duel"), "--template", "env"]) == 0
    assert f"{tmp_path / 'word-duel'}/word_duel" in capsys.readouterr().out
    project, site = tmp_path / "word-duel", tmp_path / "site"
    run("-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=project)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    output = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=project, PYTHONPATH=str(site))
    assert "2 passed" in output
    game = (site / "word_duel" / "game.py").read_text()
    body = game[game.index("class ") :]
    assert "class WordDuel(fa.TurnEnv)" in game and len([line for line in body.splitlines() if line.strip()]) <= 30


@pytest.mark.parametrize("name", ["1st", "a b", "a--b", "a-", "dünn"])
def test_invalid_project_name_is_refused(name, tmp_path):
    raises(ForgeError, "cannot name a project", create, tmp_path / name, "env")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["json", "class", "forge-envs", "NumPy"])
def test_project_name_of_an_existing_package_is_refused(name, tmp_path):
    raises(ForgeError, "would hide an existing one", create, tmp_path / name, "env")


def test_existing_folder_is_not_overwritten(tmp_path):
    (tmp_path / "my_env").mkdir()
    create(tmp_path / "my_env", "env")
    raises(ForgeError, "already exists", create, tmp_path / "my_env", "env")


def test_project_is_named_after_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my-duel").mkdir()
    monkeypatch.chdir(tmp_path / "my-duel")
    assert cli.main(["init", "--template", "env"]) == 0
    assert "class MyDuel(fa.TurnEnv)" in Path("my_duel/game.py").read_text()


# ---- plugins, as they are installed


PLUGIN = """
from forge_agents.envs.registry import register
register("{name}/Kuhn-v0", entry_point="forge_envs.games.poker:KuhnPoker")
"""


def installed(site: Path, name: str, source: str) -> None:
    """Write a module and its metadata with an entry point, as an installer does."""
    (site / f"{name}.py").write_text(source)
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[forge_agents.envs]\n{name} = {name}\n")


def test_installed_plugins_are_found_and_a_broken_one_is_named(tmp_path):
    installed(tmp_path, "good_plugin", PLUGIN.format(name="good_plugin"))
    installed(tmp_path, "bad_plugin", "raise ImportError('no licence')\n")
    code = (
        "import warnings; warnings.simplefilter('always');"
        "from forge_agents.cli import main as cli; import forge_agents as fa;"
        "assert cli.main(['list', '--tag', 'zero-sum']) == 0;"
        "env = fa.make('good_plugin/Kuhn'); env.reset(seed=0); print(env.last()[0]);"
        "cli.main(['check', 'bad_plugin/Game-v0'])"
    )
    command, env = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=300)
    assert "KuhnPoker" in done.stdout and "Your card" in done.stdout
    warned = [line for line in done.stderr.splitlines() if "failed to load" in line]
    assert "plugin 'bad_plugin' (bad_plugin) failed to load: ImportError: no licence" in warned[0]
    assert "Plugin 'bad_plugin' failed to load: ImportError: no licence" in warned[-1]
