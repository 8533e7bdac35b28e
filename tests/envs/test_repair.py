import ast
import difflib
import json
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from team_play import play

import forge_agents as fa
from forge_agents.sandbox import Sandbox, SandboxUnavailable
from forge_agents.testing import check_env, check_levels
from forge_envs.teams import hidden_tests, repair, signs
from forge_envs.teams.repair import Repair
from forge_envs.teams.repair_tasks import FAULTS, FORMS, draw


def runs_code():
    try:
        Sandbox().require()
    except SandboxUnavailable:
        return False
    return True


pytestmark = pytest.mark.skipif(not runs_code(), reason="this machine has no sandbox")


@pytest.fixture
def quick(monkeypatch):
    """Runs sources that only functions of this module wrote here: a start of the sandbox takes 50 ms."""

    def given(sandbox, modules, calls):
        space = {}
        for source in modules.values():
            exec(re.sub(r"^from .*", "", source, flags=re.MULTILINE), space)
        lines = []
        for _, name, arguments in calls:
            try:
                lines.append(json.dumps(["ok", space[name](*arguments)]))
            except Exception as error:  # noqa: BLE001  # a fault may raise anything
                lines.append(json.dumps(["error", type(error).__name__]))
        return lines, type("Result", (), {"ok": True})

    monkeypatch.setattr(repair, "given", given)


def pattern(form):
    """A sentence of the manual, each blank a group."""
    text, seen = re.escape(form), set()
    for blank, what in (("a", r"\d+"), ("b", r"\d+"), ("c", r"\d+"), ("f", r"\w+"), ("g", r"\w+")):
        for mark in re.findall(re.escape(re.escape(f"{{{blank}}}")), text):
            text = text.replace(mark, f"(?P={blank})" if blank in seen else f"(?P<{blank}>{what})", 1)
            seen.add(blank)
    return text


def source_for(line):
    """The function that a line of the manual describes, from its words alone."""
    module, name, head, told = re.fullmatch(r"(\w+)\.(\w+)\((.+)\) returns (.+)\.", line).groups()
    for parameters, form, code in FORMS:
        if parameters == head and (found := re.fullmatch(pattern(form), told)):
            blanks = dict.fromkeys("abcfg", "0") | found.groupdict()
            if "{c}" in code and "c" not in found.groupdict():
                blanks["c"] = str(int(blanks["a"]) + int(blanks["b"]))
            body = code.format(**blanks).replace("\n", "\n    ")
            return module, name, ast.unparse(ast.parse(f"def {name}({head}):\n    {body}"))
    raise AssertionError(line)


class Team:
    """Plays all seats from their own observations; with probability `overlooks` the planner does not see a fault.

    A tester that `nods` ships what it did not test.
    """

    def __init__(self, *, overlooks=0.0, nods=False):
        self.overlooks, self.nods, self.rng = overlooks, nods, random.Random(0)

    def __call__(self, seen, agent):
        return getattr(self, agent)(seen)

    def planner(self, seen):
        if seen.startswith("Manual"):
            self.right = [source_for(line) for line in re.findall(r"^.+\) returns .+$", seen, re.MULTILINE)]
            self.modules, self.plan = re.search(r"^Modules: (.+)$", seen, re.MULTILINE)[1].split(", "), []
        else:
            self.compare(re.sub(r"^\d+\| ?", "", seen, flags=re.MULTILINE).split("\n"))
        if self.modules:
            self.module = self.modules.pop(0)
            return f'CALL show("{self.module}")'
        return json.dumps(self.plan[::-1])

    def compare(self, lines):
        for module, name, right in self.right:
            if module != self.module:
                continue
            start = next(at for at, line in enumerate(lines) if line.startswith(f"def {name}("))
            end = next((at for at in range(start, len(lines)) if not lines[at].strip()), len(lines))
            was, wanted = lines[start:end], right.split("\n")
            if was == wanted or self.rng.random() < self.overlooks:
                continue
            for tag, i, j, k, m in difflib.SequenceMatcher(None, was, wanted, autojunk=False).get_opcodes():
                if tag == "insert":
                    self.plan.append([module, start + i + 1, "\n".join([*wanted[k:m], was[i]])])
                elif tag != "equal":
                    assert j - i == m - k
                    self.plan += [[module, start + i + n + 1, wanted[k + n]] for n in range(j - i)]

    def editor(self, seen):
        if "The plan:" in seen:
            self.todo = json.loads(seen.partition("The plan:\n")[2])
        if self.todo and "reports" not in seen:
            module, line, text = self.todo.pop(0)
            return "CALL edit " + json.dumps({"module": module, "line": line, "text": text})
        return "done"

    def tester(self, seen):
        if self.nods or seen.startswith("All"):
            return "SHIP"
        return "CALL test()" if seen.startswith("The editor") else seen


def played(team, seed, **settings):
    env = Repair(**settings)
    return env, play(env, team, seed)


def at(level):
    return dict(fa.spec(f"forge/Repair-v0@{level}").kwargs)


def test_the_environment_keeps_the_contract(quick):
    check_env(lambda: Repair(revisions=0), episodes=2)


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
def test_a_team_that_reads_the_manual_always_earns_one(level, quick):
    for seed in range(8):
        env, reward = played(Team(), seed, **at(level))
        assert reward == 1.0, f"{seed}\n{env.repository.manual()}\n{env.files}\n{env.render()}"
        assert len(env.repository.broken) == at(level)["faults"] and len(env.files) == at(level)["modules"]


def test_the_sandbox_runs_what_was_edited():
    env, reward = played(Team(), 1, **at(3))
    assert reward == 1.0
    env.reset(seed=1)
    module = next(iter(env.files))
    assert "tests fail." in env.test() and " gives " in env.test()
    env.files = {**env.files, module: "while True: pass"}
    env._sandbox = replace(env._sandbox, limits=replace(env._sandbox.limits, wall_s=0.5))
    assert "gives nothing" in env.test() and "the limit wall_s was reached" in env.test()


def test_tests_and_faults_are_what_they_say(quick):
    kinds = set()
    for seed in range(30):
        env = Repair(modules=1, functions=3, kinds=[FAULTS[seed % 5]])
        env.reset(seed=seed)
        seen, hidden = env.repository.shown, env.repository.hidden
        assert "tests fail." in env.test() and not set(map(str, seen)) & set(map(str, hidden))
        assert len({test.name for test in hidden}) == 3
        kinds.add(FAULTS[seed % 5])
        (name,) = env.repository.broken
        right = next(each.right for each in env.repository.functions if each.name == name)
        assert ast.dump(ast.parse(right)) != ast.dump(ast.parse(env.repository.broken[name]))
    assert kinds == set(FAULTS)


@pytest.mark.parametrize(
    "say",
    [lambda seen: "", lambda seen: seen, lambda seen: "SHIP", lambda seen: 'CALL edit("rates", 2, "return n")',
     lambda seen: "CALL test()"],
    ids=["silence", "copying", "shipping", "an edit", "testing"],
)  # fmt: skip
def test_what_knows_nothing_earns_nothing(say, quick):
    for level in (1, 4):
        assert sum(played(lambda seen, _: say(seen), seed, **at(level))[1] for seed in range(5)) == 0


def test_each_level_is_harder_for_a_planner_that_overlooks_faults(quick):
    fa.register("tests/Repair-v0", entry_point=Repair, levels=fa.spec("forge/Repair-v0").levels)  # in this process
    means = check_levels("tests/Repair-v0", fa.Scripted(Team(overlooks=0.3, nods=True)), episodes=20)
    assert means[0] > 0.5 and means[-1] < 0.6


def test_only_the_planner_reads_the_manual_and_each_has_its_tools(quick):
    env = Repair()
    env.reset(seed=0)
    assert "returns" in env.observe("planner") and "returns" not in env.observe("editor") + env.observe("tester")
    env.step("CALL test()")
    assert "no tool is called 'test'; tools: show" in env.observe("planner")
    env.step("see to it")
    assert env.observe("editor").endswith("The plan:\nsee to it")
    env.step("CALL test()")
    assert "tools: show, edit" in env.observe("editor")


def test_edits_are_bounded_and_told(quick):
    env = Repair()
    env.reset(seed=0)
    (module,) = env.files
    before = env.files[module].split("\n")
    assert env.edit(module, 2, "pass\npass") == f"Line 2 of {module} was {before[1].strip()!r}."
    assert env.files[module].split("\n")[:4] == [before[0], "    pass", "    pass", before[2]]
    assert "It is no Python now: " in env.edit(module, 1, "def (") and f"{module}: It is no Python" in env.test()
    for wrong in ((module, 0, ""), (module, 999, ""), ("os", 1, ""), (module, 1, "x" * 9000)):
        with pytest.raises(ValueError, match="has no line|there is no module|8000 are allowed"):
            env.edit(*wrong)
    assert env.edits == 2


def test_a_machine_without_a_sandbox_is_told_at_reset(monkeypatch):
    def lacks(self):
        raise SandboxUnavailable("user namespaces do not work here")

    monkeypatch.setattr(Sandbox, "require", lacks)
    with pytest.raises(SandboxUnavailable, match="Repair runs what its seats edit.*user namespaces do not"):
        Repair().reset(seed=0)


def test_weak_signs_tell_good_work_from_bad(quick):
    good = fa.play(Repair(**at(2)), fa.Scripted(Team()), seed=2).trajectories
    nods = fa.play(Repair(**at(2)), fa.Scripted(Team(overlooks=1, nods=True)), seed=2).trajectories
    assert [repair.saw_tests_pass(each["tester"]) for each in (good, nods)] == [1, 0]
    assert repair.edited_little(good["editor"]) == 1 and repair.edited_little(nods["editor"]) is None
    assert repair.saw_tests_pass(good["planner"]) is None and signs.calls_work(good["editor"]) == 1


def test_draws_are_repeatable_and_differ():
    drawn = [draw(np.random.default_rng(seed), modules=2, functions=5, faults=2) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] and drawn[0].files() != drawn[2].files()


@pytest.mark.parametrize("wrong", [{"modules": 0}, {"modules": 4}, {"functions": 13}, {"faults": 4}, {"kinds": ["x"]}])
def test_settings_that_make_no_repository_are_told(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        Repair(**wrong)


def test_a_result_that_is_printed_is_none():
    sources = {"parts": "print('[\"ok\", 1]')\ndef trim(n):\n    print('[\"ok\", 1]')\n    return n"}
    assert hidden_tests.given(Sandbox(), sources, [("parts", "trim", [2])])[0] == ['["ok", 2]']
