import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forge_agents.cli import main as cli
from forge_agents.cli.registry import COMMANDS
from forge_agents.serving.config import EnginePlan


def test_unknown_command_suggests_the_nearest(capsys):
    assert cli.main(["trian"]) == 2
    assert "Did you mean 'train'" in capsys.readouterr().err


def test_unknown_flag_suggests_a_flag_to_copy(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--dry_run"])
    assert "Did you mean '--dry-run'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["list"], ["list", "forge/KuhnPoker-v0"], ["check", "--all"]])
def test_unknown_tag_is_an_error_that_names_the_tags(words, capsys):
    assert cli.main([*words, "--tag", "zero-summ"]) == 1
    output = capsys.readouterr()
    assert "has the tag 'zero-summ'. Their tags are " in output.err and "Did you mean 'zero-sum'?" in output.err
    assert not output.out


def test_check_of_unknown_id_fails_with_a_suggestion(capsys):
    assert cli.main(["check", "forge/KuhnPokr-v0"]) == 1
    assert "forge/KuhnPoker-v0" in capsys.readouterr().err


def test_unknown_environment_argument_is_a_one_line_error(capsys):
    assert cli.main(["play", "forge/Relay-v0", "--env_args.bad", "1"]) == 1
    output = capsys.readouterr().err
    assert output.startswith("forge-agents play: forge/Relay-v0: got an unexpected keyword argument 'bad'. It takes: ")
    assert output.count("\n") == 1


def test_control_characters_in_errors_are_escaped(monkeypatch, capsys, tmp_path):
    def fails(words):
        raise ValueError("got \x1b[2J\u202eevil\nand a second line")

    monkeypatch.setitem(cli.COMMANDS, "list", fails)
    assert cli.main(["list"]) == 1
    assert capsys.readouterr().err == "forge-agents list: got \\x1b[2J\\u202eevil\nand a second line\n"


def test_control_characters_in_logs_and_warnings_are_escaped():
    program = (
        "import logging, warnings\n"
        "from forge_agents.cli import main as cli\n"
        "def speaks(words):\n"
        "    logging.getLogger('forge_agents.x').warning('file %s\\nand', 'a\\x1b]0;b\\x07')\n"
        "    warnings.warn('model \\x1b[2J')\n"
        "    return 0\n"
        "cli.COMMANDS['list'] = speaks\n"
        "cli.main(['list'])\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stderr == "file a\\x1b]0;b\\x07\nand\n<string>:5: UserWarning: model \\x1b[2J\n"


@pytest.mark.parametrize(("command", "key"), [("sft", "policies"), ("bench", "policies"), ("train", "policy")])
def test_file_of_another_command_is_refused(tmp_path, capsys, command, key):
    file = tmp_path / "run.yaml"
    file.write_text(f"{key}:\n  team:\n    model: tiny-random\n")
    with pytest.raises(SystemExit, match="2"):
        cli.main([command, str(file)])
    printed = capsys.readouterr().err
    assert f"{key!r} is of files for `forge-agents {'sft' if key == 'policy' else 'train'}`" in printed
    assert ("Did you mean 'policies'" in printed) == (command == "train")


def test_dry_run_names_players_that_no_agent_uses(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    policies = "{team: {model: tiny-random}, rival: {model: tiny-random}}"
    file.write_text(f"env: forge/Relay-v0\npolicies: {policies}\npolicy_mapping: team\nout_dir: {tmp_path}/run\n")
    assert cli.main(["train", str(file), "--dry-run"]) == 0
    assert "rival is declared, but no agent uses it." in "".join(capsys.readouterr())


def save_before_training():
    import forge_agents as fa

    with fa.GRPOTrainer(fa.Random()) as trainer:
        trainer.save("model")


def serve_a_folder_without_a_model():
    EnginePlan(model="nowhere")


def read_tools_without_the_package():
    from forge_agents.tools.mcp import mcp_tools

    with mcp_tools("http://127.0.0.1:1/"):
        pass


def write_below_a_file():
    Path(__file__, "page.html").write_text("")


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (save_before_training, "nothing is running yet. Call fit or evaluate first"),
        (serve_a_folder_without_a_model, "model='nowhere' is no folder with a config.json. Give the folder of"),
        (read_tools_without_the_package, "MCP tools need the package mcp. Run: pip install"),
        (write_below_a_file, f"{Path(__file__, 'page.html')}: Not a directory"),
    ],
)
def test_user_errors_are_one_line(mistake, message, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.setitem(cli.COMMANDS, "try", lambda words: mistake())
    assert cli.main(["try"]) == 1
    assert capsys.readouterr().err.startswith(f"forge-agents try: {message}")


@pytest.mark.parametrize("mistake", [TypeError, RuntimeError, ImportError, OSError, KeyError, AssertionError])
def test_bugs_keep_their_traceback(mistake, monkeypatch):
    def broken(words):
        raise mistake("of our own")

    monkeypatch.setitem(cli.COMMANDS, "try", broken)
    with pytest.raises(mistake, match="of our own"):
        cli.main(["try"])


def test_every_public_name_exists():
    import forge_agents as fa

    assert sorted(fa.__all__) == sorted(set(fa.__all__)) and len(fa.__all__) <= 55
    for name in fa.__all__:
        assert getattr(fa, name) is not None


def test_the_facade_leaks_no_other_name():
    code = "import forge_agents as fa; print(dir(fa) == sorted(fa.__all__), [n for n in vars(fa) if n[0] != '_'])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "True []"


def test_misspelled_name_suggests_the_nearest():
    import forge_agents as fa

    with pytest.raises(AttributeError, match="Did you mean 'Policy'"):
        fa.Polcy  # noqa: B018


def test_warning_of_this_project_is_one_line_without_code(tmp_path):
    (tmp_path / "my_plain.py").write_text(
        "import warnings, forge_agents as fa\nwarnings.warn('mine', stacklevel=1)\n"
        "@fa.register('my/Plain-v0')\nclass Plain(fa.TurnEnv):\n    possible_agents = ['a', 'b']\n"
        "    def setup(self, rng): pass\n    def instructions(self, agent): return ''\n"
        "    def observe_text(self, agent): return '?'\n"
        "    def act(self, agent, action): return fa.Outcome(done=True, info={agent: {'illegal': 'x'}})\n"
    )
    words = ["bench", "my_plain:my/Plain-v0", "--players.random", "random", "--episodes", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "forge_agents", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "warning: my/Plain-v0 does not always list legal actions" in done.stderr
    assert "episode.py" not in done.stderr and "_warn_of_illegal_text" not in done.stderr
    assert "my_plain.py:2: UserWarning: mine" in done.stderr, "the user's own warnings keep their place"


def test_command_runs_without_a_standard_output():
    command = f"{sys.executable} -m forge_agents --version >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("command", "status"), [("train", 1), ("list", 0)])
def test_training_that_stops_at_a_closed_pipe_is_no_success(monkeypatch, command, status):
    def run(_):
        sys.stdout.write("text of a reward")
        sys.stdout.flush()

    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setitem(COMMANDS, command, run)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert cli.main([command]) == status
        monkeypatch.undo()


def test_another_broken_pipe_is_no_success(monkeypatch):
    def run(_):
        raise BrokenPipeError(errno.EPIPE, "a pipe to another program")

    monkeypatch.setitem(COMMANDS, "list", run)
    with pytest.raises(BrokenPipeError):
        cli.main(["list"])


def test_failure_is_no_success_without_an_error_stream():
    words = [sys.executable, "-m", "forge_agents", "train", "missing.yaml"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stderr.close()
        assert process.wait(60) != 0


def test_closed_pipe_ends_the_help_without_a_traceback():
    words = [sys.executable, "-m", "forge_agents", "--help"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait(60) == 0
