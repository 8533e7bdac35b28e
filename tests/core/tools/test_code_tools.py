import copy
import sys
import time

import pytest

import forge_agents as fa
from forge_agents.sandbox import Sandbox, SandboxLimits
from forge_agents.sandbox.sandbox import _why_no_namespaces
from forge_agents.tools import ToolCall, run_tool
from forge_agents.tools.code import Workspace
from forge_agents.tools.env import ToolEnv

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or bool(_why_no_namespaces()), reason="needs user namespaces of Linux"
)
SMALL = Sandbox(limits=SandboxLimits(wall_s=20, file_mb=1, disk_mb=2, files=8))


def use(box, name, **arguments):
    return run_tool(box.tools(), ToolCall(name=name, arguments=arguments))


def test_files_persist_between_calls_and_programs():
    box = Workspace()
    assert use(box, "list_files").content == "(no files)"
    assert use(box, "write_file", path="lib/tools.py", text="def f(x): return x + 1\n").content == "23 bytes written"
    program = "from lib.tools import f\nprint(f(41))\nopen('out.txt', 'w').write('é')"
    assert use(box, "python", code=program).content == "42"
    assert use(box, "read_file", path="./out.txt").content == "é"
    assert use(box, "list_files").content == "       23  lib/tools.py\n        2  out.txt"
    use(box, "python", code="import os; os.remove('out.txt')")
    assert box.files == {"lib/tools.py": b"def f(x): return x + 1\n"}


def test_result_contains_errors_and_limits():
    box = Workspace(Sandbox(limits=SandboxLimits(wall_s=20)))
    assert use(box, "python", code="x = 1").content == "(nothing was printed)"
    assert "ZeroDivisionError" in use(box, "python", code="print('a'); 1 / 0").content
    assert use(box, "python", code="raise SystemExit(3)").content == "(ended with exit code 3)"
    box = Workspace(Sandbox(limits=SandboxLimits(wall_s=60, output_kb=1)))
    endless = "open('kept', 'w').write('1')\nwhile True: print(end='x')"
    assert use(box, "python", code=endless).content == f"{'x' * 1024}\n(ended: the limit output_kb was reached)"
    assert box.files == {"kept": b"1"}


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "", ".", "a\0b", "x" * 300])
def test_paths_outside_the_folder_are_rejected(path):
    box = Workspace()
    for name, arguments in (("write_file", {"text": "x"}), ("read_file", {})):
        result = use(box, name, path=path, **arguments)
        assert not result.ok and "must be relative" in result.content
    assert box.files == {}


def test_links_and_invalid_names_are_dropped():
    box = Workspace()
    box.run(
        "import os\nos.symlink('/program.py', 'link'); os.symlink('/usr', 'folder')\n"
        "open(b'\\xff', 'w'); os.mkdir('empty'); open('plain', 'w').write('p'); os.chmod('plain', 0)"
    )
    assert box.files == {"plain": b"p"}
    assert not use(box, "read_file", path="link").ok
    deep = "import os\nfor _ in range(900):\n    os.mkdir('d' * 9); os.chdir('d' * 9)\n    open('f', 'w')"
    files = Workspace(Sandbox(limits=SandboxLimits(wall_s=20, files=2000))).run(deep).files
    assert len(files) == 19 and max(map(len, files)) < 200


def test_folder_size_is_bounded():
    box = Workspace(SMALL)
    assert "no room" in use(box, "write_file", path="a", text="x" * (1 << 20) + "x").content
    for name in "ab":
        assert use(box, "write_file", path=name, text="x" * (1 << 20)).ok
    assert "no room" in use(box, "write_file", path="c", text="x").content
    assert use(box, "write_file", path="b", text="").ok
    for name in "cdefg":
        box.put(name, b"")
    assert "8 files in 0 folders" in use(box, "write_file", path="h", text="").content
    assert "cannot be a file next to" in use(box, "write_file", path="a/b", text="").content
    assert "File too large" in use(box, "python", code="open('x', 'wb').write(bytes(2 << 20))").content


@pytest.mark.parametrize(
    "program",
    [
        "for i in range(499):\n    with open(f'f{i}', 'wb') as file: file.truncate(4097)",
        "import os\nfor i in range(60):\n    os.makedirs(f'{i}/a/b/c/d'); open(f'{i}/a/b/c/d/x', 'w').close()",
    ],
    ids=["pages", "folders"],
)
def test_no_program_can_leave_a_folder_that_the_next_run_cannot_have(program):
    box = Workspace(Sandbox(limits=SandboxLimits(wall_s=60, disk_mb=2, files=400)))
    for _ in range(2):
        box.run(program)
        assert 40 < len(box.files) < 360
        assert use(box, "python", code="print(6 * 7)").content == "42"


def test_many_files_take_linear_time():
    names = [f"{'a/' * 60}{number}" for number in range(3000)]
    started = time.thread_time()
    box = Workspace(Sandbox(limits=SandboxLimits(disk_mb=300, files=20_000)), dict.fromkeys(names, b""))
    assert time.thread_time() - started < 3 and len(box.files) == 3000  # 60 s if each looks at all others
    with pytest.raises(ValueError, match="'a/a' cannot be a file next to 'a/a/a/"):
        box.put("a/a", b"")


def test_copies_of_an_environment_have_separate_files():
    class Desk(ToolEnv):
        possible_agents = ("clerk",)

        def setup(self, rng):
            self.box = Workspace(files={"n": str(rng.integers(10)).encode()})

        def tools(self, agent):
            return self.box.tools()

        def instructions(self, agent):
            return self.tool_help(agent)

        def observe_text(self, agent):
            return "Go on."

        def act(self, agent, action):
            return fa.Outcome(rewards={agent: float("n" in self.box.files)}, done=True)

    env = Desk()
    env.reset(seed=1)
    twin = copy.deepcopy(env)
    code = "import os; os.remove('n'); print(7 * 6)"
    call = f'<tool_call>{{"name": "python", "arguments": {{"code": "{code}"}}}}</tool_call>'
    env.step(call)
    assert "42" in str(env.last()[0])
    assert env.box.files == {} and list(twin.box.files) == ["n"]
    env.reset(seed=1)
    assert list(env.box.files) == ["n"]
