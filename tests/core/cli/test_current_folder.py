"""Only commands that may name a user's module import modules from the current folder."""

import subprocess
import sys
from pathlib import Path

import pytest

LIBRARIES = (
    "jinja2", "jsonargparse", "monarch", "numpy", "psutil", "rich", "ruamel", "safetensors", "starlette", "torch",
    "torchstore", "transformers", "uvicorn", "vllm", "yaml",
)  # fmt: skip


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "forge_agents", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that exists once a module of the current folder, ``tmp_path / "current"``, was imported."""
    marker = tmp_path / "imported"
    for library in LIBRARIES:
        package = tmp_path / "current" / library
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"open({str(marker)!r}, 'a').write({library!r})")
    (tmp_path / "current" / "config.yaml").write_text("routing: [1, {a: b}]\n")
    (tmp_path / "current" / "metrics.jsonl").write_text('{"step": 1}\n')
    return marker


@pytest.mark.parametrize("words", ["view . --out page.html", "serve .", "export ."])
def test_other_commands_import_nothing_from_the_current_folder(words, marker, tmp_path):
    run(tmp_path / "current", *words.split())
    assert not marker.exists()


WORLD = """
import forge_agents as fa
from my_helper import REWARD

class Greeting(fa.TurnEnv):
    possible_agents = ("guest",)

    def setup(self, rng):
        pass

    def instructions(self, agent):
        return "Say hello."

    def observe_text(self, agent):
        return "Well?"

    def act(self, agent, action):
        return fa.Outcome(rewards={agent: REWARD}, done=True)

fa.register("my/Greeting-v0", entry_point="my_greeting:Greeting")
"""


def test_user_module_is_found_in_the_current_folder(tmp_path):
    (tmp_path / "my_greeting.py").write_text(WORLD)
    (tmp_path / "my_helper.py").write_text("REWARD = 1.0")
    checked = run(tmp_path, "check", "my_greeting:my/Greeting-v0", "--episodes", "1")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("template", ["openenv", "verifiers"])
def test_template_refuses_a_module_that_its_project_could_not_import(template, tmp_path):
    (tmp_path / "my_helper.py").write_text("REWARD = 0.5\n")
    (tmp_path / "my_greeting.py").write_text(WORLD)
    done = run(tmp_path, "init", "server", "--template", template, "--env", "my_greeting:my/Greeting-v0")
    assert done.returncode == 1 and not (tmp_path / "server").exists()
    assert "could not import 'my_greeting' of 'my_greeting:my/Greeting-v0'" in done.stderr
    assert "`forge-agents init NAME --template env`" in done.stderr
