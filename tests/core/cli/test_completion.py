import os
import subprocess
import sys

import pytest

from forge_agents.cli import main as cli
from forge_agents.cli.completion import SHELLS, script


def completions(line, tmp_path):
    """Return the completions at the end of `line`."""
    out = tmp_path / "offered"
    variables = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(out),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    if (child := os.fork()) == 0:  # the library ends the process
        try:
            os.environ.update(variables)
            cli.main()
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    return [word.strip() for word in out.read_text().split("\n")]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("forge-agents ex", ["export"]),
        ("forge-agents train --trainer.learner.cli", ["--trainer.learner.clip"]),
        ("forge-agents play forge/KuhnPoker-v0 --opponent h", ["human"]),
        ("forge-agents bench --swap_agents f", ["false"]),
        ("forge-agents play forge/Kuhn", ["forge/KuhnPoker-v0"]),
        ("forge-agents check forge/KuhnPoker-v0 forge/Led", ["forge/LeducPoker-v0"]),
        ("forge-agents init --temp", ["--template"]),
    ],
)
def test_completion_offers_matching_words(line, offered, tmp_path):
    assert completions(line, tmp_path) == offered


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_completion_script(shell, capsys):
    assert cli.main(["--completion", shell]) == 0
    output = capsys.readouterr().out
    assert output.strip() == script(shell).strip() and "forge-agents" in output and "_ARGCOMPLETE" in output


def test_bash_completes_a_line(tmp_path):
    """Run the script in bash."""
    program = tmp_path / "forge-agents"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m forge_agents.cli.main "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(forge-agents --completion bash)"; COMP_LINE="forge-agents simu"; COMP_POINT=17; '
        "COMP_WORDS=(forge-agents simu); COMP_CWORD=1; compopt() { :; }; _python_argcomplete forge-agents; "
        'echo "${COMPREPLY[0]}"'
    )
    env = dict(os.environ, PATH=f"{tmp_path}:{os.environ['PATH']}")
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "simulate"
