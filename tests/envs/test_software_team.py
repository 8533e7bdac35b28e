import inspect
import re

import numpy as np
import pytest
from team_play import act

from forge_agents.sandbox import Sandbox, SandboxLimits, SandboxUnavailable
from forge_envs.teams.software_tasks import TASKS
from forge_envs.teams.software_team import SoftwareTeam, code_in


def runs_code():
    try:
        return bool(Sandbox().guarantees().full)
    except SandboxUnavailable:
        return False


needs_sandbox = pytest.mark.skipif(not runs_code(), reason="this machine has no sandbox")


def source(task):
    return re.sub(r"\A@_task\(.*?\)\n(?=def )", "", inspect.getsource(task.solution), flags=re.DOTALL)


def working_on(name, **kwargs):
    env = SoftwareTeam(tool_format="plain", **kwargs)
    seed = next(seed for seed in range(500) if _task_of(env, seed) == name)
    env.reset(seed=seed)
    return env


def _task_of(env, seed):
    env.reset(seed=seed)
    return env.task.name


def submit(env, code):
    act(env, "a plan", code, "SHIP it")
    return env.rewards["planner"], env.infos["coder"]


def test_there_are_many_tasks_with_different_names():
    assert len({task.name for task in TASKS}) == len(TASKS) >= 20
    assert len({task.description for task in TASKS}) == len(TASKS)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_hidden_tests_tell_solutions_apart(task):
    rng = np.random.default_rng(0)
    tests = [task.test(rng) for _ in range(30)]
    assert tests == [(a, r) for a, r in tests if a == tuple(a)] and len({repr(result) for _, result in tests}) > 1
    space = {}
    exec(source(task), space)
    assert all(space[task.name](*arguments) == result for arguments, result in tests)


@needs_sandbox
def test_right_code_earns_one_and_wrong_code_less():
    env = working_on("sum_even")
    reward, info = submit(env, f"Here:\n```python\n{source(env.task)}```")
    assert (reward, info["passed"], info["shipped"], info["why"]) == (1.0, 8, True, "")
    assert env.rewards == dict.fromkeys(env.possible_agents, 1.0)
    reward, info = submit(working_on("sum_even"), "def sum_even(numbers):\n    return 0")
    assert 0 <= reward < 1 and info["passed"] == reward * 8


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("def sum_even(numbers):\n    while True: pass", "the limit"),
        ("import sys\ndef sum_even(numbers):\n    print('[\"ok\", 0]')\n    sys.exit(0)", ""),
        ("raise SystemExit\ndef sum_even(numbers): pass", ""),
        ("def sum_even(numbers):\n    raise ValueError", ""),
    ],
)
def test_code_that_hangs_quits_or_fakes_earns_nothing(code, why):
    env = working_on("sum_even")
    env._sandbox = Sandbox(limits=SandboxLimits(wall_s=1.0))
    reward, info = submit(env, code)
    assert reward == 0 and why in info["why"]


@pytest.mark.parametrize("code", ["", "I cannot.", "def other(): pass", "def sum_even(", "(" * 3000, "\0"])
def test_what_is_no_code_costs_no_run(code, monkeypatch):
    monkeypatch.setattr(Sandbox, "run", None)
    reward, info = submit(working_on("sum_even"), code)
    assert reward == 0 and info["why"] == "no Python that defines sum_even"


@needs_sandbox
def test_the_tester_runs_the_code_and_the_coder_mends_it():
    env = working_on("reverse_text", revisions=1)
    env.step("turn the text around")
    assert env.observe("coder").endswith("The plan:\nturn the text around") and "def reverse_text(text):" in str(
        env.observe("coder")
    )
    env.step("def reverse_text(text):\n    return text")
    assert "reverse_text(" in env.observe("tester").split("Examples:")[1]
    env.step('CALL python("import solution; print(solution.reverse_text(\'ab\') * 2)")')
    assert (env.agent_selection, env.observe("tester")) == ("tester", "abab")
    env.step('CALL python {"code": "import nonsense"}')
    assert "ModuleNotFoundError" in env.observe("tester")
    env.step("It does nothing.")
    assert env.agent_selection == "coder" and "It does nothing." in env.observe("coder")
    env.step("```python\ndef reverse_text(text):\n    return text[::-1]\n```")
    env.step("Still not good, but there is no time left.")
    assert env.rewards["tester"] == 1.0 and env.infos["tester"]["shipped"] is False


def test_only_the_planner_knows_and_only_the_tester_runs():
    env = working_on("is_prime")
    assert "prime number" in env.observe("planner")
    env.step("CALL python(print(1))")
    assert env.agent_selection == "coder" and "prime number" not in env.observe("coder")
    assert "CALL python" not in env.instructions("coder") and "CALL python" in env.instructions("tester")


def test_the_last_block_is_the_code():
    assert code_in("a\n```python\nx\n```\nb\n```\ny\n```") == "y"
    assert code_in("```py\nopen") == "open" and code_in(" plain ") == "plain"
