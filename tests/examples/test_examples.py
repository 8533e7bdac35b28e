"""The short examples and the notebook; what needs an engine is in tests/e2e/test_examples.py."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import forge_agents as fa
from forge_agents.bench import Report
from forge_agents.envs import registry
from forge_agents.envs.registry import SuiteDefaults
from forge_agents.sandbox.sandbox import _why_no_namespaces
from forge_trainers.losses import list_losses

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "first_steps.ipynb"
SHOWN = """

import json
print(json.dumps(list(zip([t.agent for t in group.trajectories], reward(group.trajectories).tolist()))))
"""


def test_every_example_is_described_and_named_in_the_docs():
    listed = (EXAMPLES.parent / "docs" / "index.md").read_text()
    for path in sorted(EXAMPLES.iterdir()):
        if path.is_file():
            assert f"examples/{path.name}" in listed, path.name
    for path in EXAMPLES.glob("*.py"):
        assert f"python examples/{path.name}" in path.read_text().partition('"""\n\n')[0], path.name


def test_the_custom_environment_is_checked_and_random_play_is_what_chance_gives(load_example, capsys):
    module = load_example("custom_env")
    module.main(["--steps", "0"])
    said = capsys.readouterr().out
    # meeting in round 1, 2, 3 pays 1, 0.7, 0.4: 1/3 + 2/9 * 0.7 + 4/27 * 0.4 = 0.548
    assert float(said.split()[-1]) == pytest.approx(0.548, abs=0.09)
    env = module.Meeting()
    env.reset(seed=0)
    env.step({"left": "bridge", "right": "the market, I think"})
    assert env.observe("left").startswith("You went to the bridge, the other one to the market.")
    assert env.step({"left": "nowhere", "right": "nowhere"})[1] == {"left": 0.0, "right": 0.0}
    assert env.step({"left": "station", "right": "Station."})[1] == {"left": 0.4, "right": 0.4}


def test_the_plain_program_pays_both_for_the_right_number(load_example):
    module = load_example("plain_program")
    assert [module.right({"answer": 7}, said) for said in ("7 of 10", "17", "seven")] == [1.0, 0.0, 0.0]
    right = fa.Scripted(lambda seen, agent: "Five is meant." if agent == "planner" else "5")
    episode = next(
        found for seed in range(100) if (found := fa.play("my/Crew-v0", right, seed=seed)).rewards["planner"]
    )
    assert episode.trajectories["writer"].info["answer"] == 5 and episode.rewards == {"planner": 1.0, "writer": 1.0}
    assert "A friend says: Five is meant." in episode.turns[1].observation


def test_a_team_of_the_agents_sdk_hands_off_and_calls_its_tool(load_example):
    pytest.importorskip("agents")
    module = load_example("agents_sdk")
    planner, solver = (row["messages"] for row in module.demonstrations(1))
    assert [message["role"] for message in planner] == ["system", "user", "assistant"]
    assert [message["role"] for message in solver] == ["system", *("user", "assistant") * 3]
    assert planner[-1] == solver[2], "the solver reads the hand-off as the planner wrote it"
    a, b, c = map(int, re.findall(r"\d+", planner[1]["content"]))
    assert solver[-1]["content"] == f"It is {a * b + c}."

    said = {"planner": [planner[-1]], "solver": [solver[4], solver[6]]}
    answers = {seat: iter(message["content"] for message in messages) for seat, messages in said.items()}
    episode = fa.play("my/Team-v0", fa.Scripted(lambda seen, agent: next(answers[agent])), seed=2**30)
    assert episode.error is None and episode.rewards == {"planner": 1.0, "solver": 1.0}, str(episode)
    assert [turn.agent for turn in episode.turns] == ["planner", "solver", "solver"]


def test_a_graph_of_langgraph_calls_its_tool_in_the_seats_that_its_models_name(load_example):
    pytest.importorskip("langgraph")
    pytest.importorskip("langchain_openai")
    load_example("langgraph_team")

    def says(seen, agent):
        if agent == "planner":
            return "Multiply, then add."
        if seen.startswith("<tool_response>"):
            return "It is " + seen.split("\n")[1]
        a, b, c = re.findall(r"\d+", seen.rpartition("Anna")[2])[:3]
        return f'<tool_call>{{"name": "multiply_and_add", "arguments": {{"a": {a}, "b": {b}, "c": {c}}}}}</tool_call>'

    episode = fa.play("my/Graph-v0", fa.Scripted(says), seed=1)
    assert episode.error is None and episode.rewards == {"planner": 1.0, "solver": 1.0}, str(episode)
    assert [(turn.agent, turn.branch) for turn in episode.turns] == [("planner", 0), ("solver", 0), ("solver", 0)]


@pytest.mark.skipif(shutil.which("pi") is None, reason="npm install -g @mariozechner/pi-coding-agent")
def test_a_coding_command_line_writes_what_the_model_says_and_is_paid_where_that_runs(load_example):
    load_example("coding_cli")

    def says(seen, right):
        if seen.startswith("<tool_response>"):
            return "Done."
        a, b = map(int, re.findall(r"prints (\d+) \+ (\d+)", seen)[-1])
        wrote = {"path": "sum.py", "content": f"print({a} + {b + (not right)})"}
        return f"<tool_call>{json.dumps({'name': 'write', 'arguments': wrote})}</tool_call>"

    for right in (True, False):
        episode = fa.play("my/Coder-v0", fa.Scripted(lambda seen, right=right: says(seen, right)), seed=1)
        assert episode.error is None and episode.rewards == {"coder": float(right)}, str(episode)
        assert [turn.branch for turn in episode.turns] == [0, 0]


AGENT = """
import json, os, subprocess, sys, urllib.request as http
said = json.dumps({"model": "agent", "messages": [{"role": "user", "content": sys.stdin.read()}]}).encode()
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
answer = json.load(http.urlopen(http.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", said, head)))
subprocess.run(["bash", "-c", answer["choices"][0]["message"]["content"]])
"""
SORTS = {
    "instruction.md": "Sort the names of names.txt into sorted.txt.",
    "task.toml": "[verifier]\ntimeout_sec = 100.0\n",
    "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\nCOPY data \\\n ./  \n# no more\n",
    "environment/data/names.txt": "Cem\nAda\nBo\n",
    "environment/data/more/left": "1",
    "solution/solve.sh": "cat /app/more/left && sort names.txt > /app/sorted.txt && test ! -e /tests/test.sh",
    "tests/test.sh": (
        "cd /tmp; printf 'Ada\\nBo\\nCem\\n' | cmp - /app/sorted.txt && r=1 || r=0\n"
        "echo 7 > /logs/verifier/reward.txt; echo '{\"reward\": '$r', \"style\": 0.5}' > /logs/verifier/reward.json\n"
    ),
}


@pytest.mark.skipif(bool(_why_no_namespaces()), reason="needs user namespaces of Linux")
def test_harbor_tasks_that_need_no_container_are_paid_by_their_own_tests_and_others_are_named(load_example, tmp_path):
    changes = {
        "sorts": {},
        "asks": {"environment/docker-compose.yaml": "", "task.toml": "environment.mcp_servers = [{name = 'x'}]"},
        "builds": {"environment/Dockerfile": "FROM ubuntu:24.04\nRUN apt-get install -y nodejs\n"},
        "reads": {"environment/Dockerfile": "FROM x\nWORKDIR /app\nCOPY ../../sorts/tests .\n"},
        "system": {"environment/Dockerfile": "FROM x\nWORKDIR /usr/src\n"},
        "plants": {
            "environment/Dockerfile": "FROM x\nWORKDIR /logs/verifier\n",
            "solution/solve.sh": "echo 1 > reward.txt",
            "tests/test.sh": "true",
        },
        "deeper/text": {"tests/test.sh": "test -e sorted.txt && echo 0.5 > /logs/verifier/reward.txt"},
        "unsolved": {"solution/solve.sh": "true", "tests/test.sh": "echo no pytest >&2"},
    }
    for name, changed in changes.items():
        for path, text in {**SORTS, **changed}.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(text)
    module = load_example("harbor_tasks")
    kept, left_out = module.register(tmp_path, [sys.executable, "-c", AGENT])
    assert kept == ["sorts"] and sorted(left_out) == ["asks", "builds", "plants", "reads", "system", "unsolved"]
    assert left_out["builds"] == "ValueError: its Dockerfile needs a container: 'RUN apt-get install -y nodejs'"
    assert left_out["asks"].endswith("for its mcp_servers and docker-compose.yaml")
    assert "COPY ../../sorts" in left_out["reads"] and "'/usr' is readable" in left_out["system"]
    assert "earns 0.0 here, nothing done 0.0" in left_out["plants"]
    assert "earns 0.0 here, nothing done 0.0: 'no pytest" in left_out["unsolved"]
    cheats = "echo 1 > /logs/verifier/reward.json; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh"
    for answer, reward in ((SORTS["solution/solve.sh"], 1.0), ("true", 0.0), (cheats, 0.0)):
        episode = fa.play("my/Harbor-v0", fa.Scripted(lambda seen, answer=answer: answer), seed=1)
        assert episode.error is None and episode.rewards == {"agent": reward}, str(episode)
        assert episode.turns[0].observation == SORTS["instruction.md"]
    assert module.Task(tmp_path / "deeper/text").paid({"app/sorted.txt": b"", "app/deep": b"8"}) == 0.5


TASKSET = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in str(trace.last_reply))

class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for a in range(2, 9):
            yield SumTask(SumData(prompt=f"{a} * 7?", answer=str(a * 7)), self.config.task)

__all__ = ["Sums"]
"""


@pytest.mark.skipif(shutil.which("vf-validate") is None, reason="pip install 'verifiers>=0.4' somewhere on the path")
def test_a_taskset_of_verifiers_runs_in_its_own_python_and_pays_its_own_reward(load_example, tmp_path, monkeypatch):
    (tmp_path / "sums.py").write_text(TASKSET)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    python = Path(shutil.which("vf-validate")).parent / "python"
    load_example("verifiers_v1").register(str(python), "sums", 7)
    right = fa.Scripted(lambda seen: str(int(seen.split()[0]) * 7))
    for player, reward in ((right, 1.0), (fa.Scripted(lambda seen: "?"), 0.0)):
        episode = fa.play("my/Taskset-v0", player, seed=1)
        assert episode.error is None and episode.rewards == {"agent": reward}, str(episode)


def test_the_teacher_answers_right_and_its_trajectories_are_demonstrations(load_example):
    module = load_example("sft_then_grpo")
    shown = module.demonstrations(3)
    assert {t.agent for t in shown} == {"asker", "answerer"} and [t.reward for t in shown] == [1.0] * len(shown)


def test_the_thinker_is_shown_the_additions_and_only_its_answer_is_heard(load_example):
    module = load_example("think_then_answer")
    assert module.teacher("7 + 8 + 1 + 9 + 5") == "<think>7+8=15\n15+1=16\n16+9=25\n25+5=30</think>30"
    assert module.teacher("7 + 8 + 1 + 9 + 5", plain=True) == "30"
    thinking, plain = (module.demonstrations(3, 4, plain) for plain in (False, True))
    assert [t.reward for t in (*thinking, *plain)] == [1.0] * 8
    said = [[(t.turns[0].observation, t.turns[0].action) for t in shown] for shown in (thinking, plain)]
    assert said[0] == said[1] and len(set(said[0])) == 4, "both are shown the same questions"
    assert all(t.turns[0].reasoning.count("=") == 4 for t in thinking) and not any(t.turns[0].reasoning for t in plain)
    assert {t.turns[0].observation for t in module.demonstrations(4, 4)}.isdisjoint(dict(said[0]))


def test_the_benchmark_writes_its_reports_and_goes_on(load_example, tmp_path, capsys):
    module = load_example("benchmark")
    module.main(["--episodes", "4", "--out", str(tmp_path)])
    report = Report.load(tmp_path / "board.json")
    assert report.complete and {"cautious", "random"} <= set(report.players)
    assert all((tmp_path / f"board.{kind}").stat().st_size for kind in ("md", "html"))
    assert module.cautious("You hold K. Legal: call, fold") == "call"


def test_the_benchmark_of_all_suites_writes_a_report_each_and_one_overview(load_example, tmp_path, monkeypatch):
    module = load_example("benchmark_smollm2")
    monkeypatch.setattr(module, "SUITES", {"core-v1": (3, True), "short-v0": (2, False)})
    monkeypatch.setitem(registry._suites, "short-v0", (("forge/Negotiation-v0",), SuiteDefaults()))
    players = {"smollm2": fa.Random(), "trained": fa.Scripted(module.by_rule)}
    reports = module.play(players, tmp_path / "run", tmp_path)
    kinds = (".md", ".json", ".html")
    assert all((tmp_path / f"{suite}{kind}").stat().st_size for suite in reports for kind in kinds)
    success = {(cell.env, cell.player): cell.success.value for cell in reports["core-v1"].summary.cells}
    assert success["forge/Relay-v0", "trained"] == 1 and success["forge/Relay-v0", "smollm2"] == 0
    text = module.overview(reports, "1.0")
    assert "| core-v1 | 3 | 30 | 0." in text and "| short-v0 | 2 | 6 |" in text and "[JSON](short-v0.json)" in text
    again = module.play(players, tmp_path / "run", tmp_path)
    assert [report.timing["played"] for report in again.values()] == [0, 0]
    stopped = module.play(players, tmp_path / "other", tmp_path, minutes=0)
    assert "| core-v1, incomplete | 3 |" in module.overview(stopped, "0.0")


def test_the_benchmark_of_worlds_has_their_oracles_beside_models(load_example, tmp_path, monkeypatch):
    module = load_example("benchmark_worlds")
    assert all(fa.spec(world).oracle for suite in module.SUITES for world in fa.suite(suite))
    monkeypatch.setattr(module, "SUITES", ("short-v0",))
    monkeypatch.setitem(registry._suites, "short-v0", (("forge/Tables-v0@1",), SuiteDefaults()))
    monkeypatch.setattr(fa, "Policy", lambda *_, **__: fa.Random(), raising=False)
    module.main(["--trained", "x", "--seeds", "2", "--folder", str(tmp_path / "run"), "--out", str(tmp_path)])
    text = (tmp_path / "worlds.md").read_text()
    assert re.search(r"\| short-v0 \| 2 \| 18 \| 0.000 \[.*\] \| 0.000 \[.*\] \| 1.000 \[", text)
    assert "[JSON](short-v0.json)" in text and text.startswith("# Worlds: ")


@pytest.mark.parametrize(
    ("seen", "action"),
    [
        ("Calculate 9 - 12. Write the result as a number.", "-3"),
        ("Write this number again: -3", "-3"),
        ("State the final answer to the following arithmetic problem: 6 - 2 + 3 - 13 =", "<answer>-6</answer>"),
        ("Find the Greatest Common Divisor (GCD) of these numbers: 86, 129. Give only", "<answer>43</answer>"),
        ("Solve for j: 81*j + 24 = 996", "<answer>12</answer>"),
        ("Spell this word backward (example: sun -> nus): nursedom", "<answer>modesrun</answer>"),
        ("Your card: King. Moves: opponent bet. Your move: call or fold?", "call"),
        ("Starting round 2. Your card is: 'Q'\n[GAME] Your available actions are: '[call]', '[fold]'", "[fold]"),
        ("Current Pile:\n  pile 0: 3\n  pile 1: 4\n  pile 2: 5", "[0 2]"),
        ("Available Moves: '[1]', '[2]', '[3]'", "[2]"),
        ("The task: Return the words' first letters.", "pass"),
    ],
)
def test_the_script_of_the_benchmark_knows_what_it_claims(load_example, seen, action):
    assert load_example("benchmark_smollm2").by_rule(seen, "anyone") == action


def test_the_endpoint_plays_both_seats_and_a_failure_is_told(load_example, serve_chat, capsys):
    module = load_example("external_endpoint")
    server = serve_chat(lambda request: "bet")
    module.main(["--endpoint", server.url, "--model", "stub", "--episodes", "2"])
    assert "4 episodes, 0 failed" in capsys.readouterr().out and len(server.requests) >= 4
    down = serve_chat(lambda request: (403, {"error": "no such key"}))
    module.main(["--endpoint", down.url, "--model", "stub", "--episodes", "1"])
    assert "0 episodes, 2 failed, the first because" in capsys.readouterr().out


def test_the_loss_pulls_where_a_clip_would_not_and_fades(load_example, capsys):
    module = load_example("own_loss")
    module.main(["--steps", "0"])
    pulls = module.curve([0.5, 1.0, 1.25, 2.0])
    assert pulls[1] == pytest.approx(1.0) and pulls[2] == pytest.approx(0.948, abs=1e-3)
    assert 0 < pulls[0] < 0.1 and 0 < pulls[3] < 0.2
    assert "tempered" in list_losses()


def test_the_notebook_runs_cell_by_cell(tmp_path):
    book = json.loads(NOTEBOOK.read_text())
    assert book["nbformat"] == 4 and all(not cell.get("outputs") for cell in book["cells"])
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    last = cells.pop()
    assert last["metadata"]["tags"] == ["trains"]
    compile("".join(last["source"]), "last cell", "exec")
    program = tmp_path / "cells.py"
    program.write_text("\n\n".join("".join(cell["source"]) for cell in cells) + SHOWN)
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["hinter", 1.0], ["guesser", pytest.approx(1.1)]] * 2


class NoEngine:
    """Stands in for a trainer: what is trained pays better by every step, by how much is the environment's number."""

    made = []

    def __init__(self, policies, config, out_dir):
        self.policies, self.config, self.folder, self.done = policies, config, Path(out_dir), 0
        self.trained, self.measured = [], []
        NoEngine.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def fit(self, env, *, steps, env_args=None):
        self.trained.append(env)
        self.done = steps
        for name in {one.name for one in self.learners}:
            (self.folder / "export" / (name if len(self.learners) > 1 else "")).mkdir(parents=True, exist_ok=True)
        row = {"time/step_s": 2.0, "eval/reward": self.config.learner.lr * steps, "learner/grad_norm": 0.5 * steps}
        return SimpleNamespace(metrics=[{"step": n + 1, **row} for n in range(steps)])

    @property
    def learners(self):
        given = getattr(self.policies, "policy", self.policies)  # a league's
        seated = given.values() if isinstance(given, dict) else [given]
        return [one for one in seated if getattr(one, "trainable", False)]

    def evaluate(self, env, *, episodes, env_args=None):
        self.measured.append(env)
        reward = int(env[-1]) / 10 + (self.config.learner.lr or 0.0) * self.done
        return SimpleNamespace(reward=reward, ci=0.0, by_agent={"clerk": reward, "accountant": reward / 2})


def test_what_is_practised_is_compared_on_all_levels(load_example, tmp_path, monkeypatch, capsys):
    module = load_example("curriculum")
    monkeypatch.setattr(fa, "GRPOTrainer", NoEngine)
    monkeypatch.setattr(NoEngine, "made", [])
    words = ["--seeds", "0", "--steps", "4", "--eval-every", "2", "--lr", "0.01", "--levels", "1", "2"]
    module.main([*words, "--control-steps", "2", "--out", str(tmp_path)])
    levels = ["forge/Relay-v0@1", "forge/Relay-v0@2"]
    assert [run.trained[0] for run in NoEngine.made] == [
        fa.Curriculum(levels), dict.fromkeys(levels, 1.0), *levels, dict.fromkeys(levels, 1.0)
    ]  # fmt: skip
    assert all(run.measured == levels * (run.done // 2 + 1) for run in NoEngine.made)
    curves = {arm: json.loads((tmp_path / f"{arm}-0/result.json").read_text()) for arm in ("curriculum", "control")}
    assert curves["curriculum"]["curve"][-1] == pytest.approx([4, 0.14, 0.24]) and curves["curriculum"]["seconds"] == 8
    assert curves["control"]["curve"][-1] == [2, 0.1, 0.2]
    assert (tmp_path / "curriculum.png").stat().st_size and "control" in capsys.readouterr().out
    module.main([*words, "--out", str(tmp_path), "--control-steps", "2"])
    assert len(NoEngine.made) == 5, "what is finished is not repeated"


def test_seats_are_paid_for_their_own_sums_and_compared_by_role_or_all_alike(
    load_example, tmp_path, monkeypatch, capsys
):
    module = load_example("role_credit")
    fa.check_env(module.ENV_ID)  # raises where something is wrong
    env = fa.make(module.ENV_ID)
    env.reset(seed=3)
    sums = {agent: sum(numbers) for agent, numbers in env.unwrapped.numbers.items()}
    said = {"clerk": f"9, no: {sums['clerk']}", "accountant": f"{sums['accountant']} or 1"}
    players = {agent: fa.Scripted(lambda _, text=text: text) for agent, text in said.items()}
    assert fa.play(module.ENV_ID, players, seed=3).rewards == {"clerk": 1.0, "accountant": 0.0}
    monkeypatch.setattr(fa, "GRPOTrainer", NoEngine)
    monkeypatch.setattr(NoEngine, "made", [])
    words = ["--seeds", "1", "--steps", "4", "--eval-every", "2", "--lr", "0.1", "--out", str(tmp_path)]
    module.main(words)
    assert [run.config.credit.by for run in NoEngine.made] == [("seed", "role"), ("seed",)]
    found = json.loads((tmp_path / "seats-alike-1/result.json").read_text())
    assert found["curve"][-1] == [4, 0.4, {"clerk": 0.4, "accountant": 0.2}] and found["grad_norm"] == 2
    assert (tmp_path / "role_credit.png").stat().st_size and "0.00 to 0.20" in capsys.readouterr().out
    module.main(words)
    assert len(NoEngine.made) == 2, "what is finished is not repeated"


def test_each_agent_meets_each_customer_as_it_learned(load_example, tmp_path, monkeypatch):
    module = load_example("other_seat")
    monkeypatch.setattr(fa, "GRPOTrainer", NoEngine)
    monkeypatch.setattr(NoEngine, "made", [])
    for seed in (0, 1):
        (tmp_path / f"imitated-{seed}/export").mkdir(parents=True)
    module.main(["--seeds", "0", "1", "--steps", "2", "--out", str(tmp_path)])
    fixed, both, *meetings = NoEngine.made[:11]
    assert [one.name for one in fixed.learners] == ["agent"]
    assert {one.name for one in both.learners} == {"agent", "customer"}
    assert fixed.policies["customer"].model == both.policies["agent"].model == str(tmp_path / "imitated-0/export")
    start, alone, agent, customer = (
        str(tmp_path / place)
        for place in ("imitated-0/export", "fixed-0/export", "trained-0/export/agent", "trained-0/export/customer")
    )
    met = [
        (run.policies["agent"].model, getattr(run.policies["customer"], "model", run.policies["customer"].name))
        for run in meetings
    ]
    assert met == [(one, other) for one in (start, alone, agent) for other in (start, customer, "oracle")]
    assert not any(run.learners for run in meetings) and len(NoEngine.made) == 22


def test_the_league_and_the_mirror_differ_in_whom_they_meet_and_are_judged_by_minimax(
    load_example, tmp_path, monkeypatch, capsys
):
    module = load_example("league")
    monkeypatch.setattr(fa, "GRPOTrainer", NoEngine)
    monkeypatch.setattr(NoEngine, "made", [])
    (tmp_path / "taught/export").mkdir(parents=True)
    words = ["--seeds", "0", "1", "--steps", "4", "--control-steps", "2", "--out", str(tmp_path)]
    module.main(words)
    made = {run.folder.name: run for run in NoEngine.made}
    assert list(made) == ["league-0", "league-1", "mirror-0", "mirror-1", "control"]
    assert [run.policies.self_play for run in NoEngine.made] == [0.35, 0.35, 1.0, 1.0, 0.35]
    assert {run.policies.held_out for run in NoEngine.made} == {(fa.Oracle(),)}
    assert [run.config.learner.lr > 0 for run in NoEngine.made] == [True] * 4 + [False]
    assert [run.done for run in NoEngine.made] == [4] * 4 + [2]
    curve = json.loads((tmp_path / "mirror-1/result.json").read_text())["curve"]
    assert [row[:2] for row in curve] == [[0, 0.0]] + [[n + 1, pytest.approx(0.0012)] for n in range(4)]
    assert (tmp_path / "league.png").stat().st_size and "against minimax" in capsys.readouterr().out
    module.main(words)
    assert len(NoEngine.made) == 5, "what is finished is not repeated"


def test_a_board_reaches_the_model_as_nine_signs(load_example, tmp_path):
    module = load_example("league")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = module.untaught(tmp_path / "start")
    assert 500_000 < AutoModelForCausalLM.from_pretrained(folder).num_parameters() < 2_000_000
    env = fa.make(module.GAME)
    env.reset(seed=0)
    env.step("4")
    told = [{"role": "system", "content": "rules"}, {"role": "user", "content": env.observe(env.agent_selection)}]
    text = AutoTokenizer.from_pretrained(folder).apply_chat_template(told, tokenize=False, add_generation_prompt=True)
    assert text == "0361O7258<|im_start|>"
