"""Examples of environments, programs, players and benchmarks, without an engine."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import forge_agents as fa
from forge_agents.bench import Report
from forge_agents.cli import scaffold
from forge_agents.envs import registry
from forge_agents.envs.registry import SuiteDefaults
from forge_agents.sandbox.sandbox import _why_no_namespaces
from forge_trainers.losses import list_losses

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "first_steps.ipynb"


def test_every_example_is_described_and_listed_in_the_docs():
    page = (EXAMPLES.parent / "docs" / "index.md").read_text()
    for path in sorted(EXAMPLES.iterdir()):
        if path.is_file() and not path.name.startswith("_"):
            assert f"examples/{path.name}" in page, path.name
            if path.suffix == ".py":
                text = path.read_text().partition('"""\n\n')[0]
                assert re.search(rf"(python|inspect eval) examples/{path.name}", text), path.name


def test_custom_environment_passes_its_checks_and_random_play_earns_chance(load_example, capsys):
    module = load_example("custom_env")
    module.main(["--steps", "0"])
    # meeting in round 1, 2, 3 pays 1, 0.7, 0.4: 1/3 + 2/9 * 0.7 + 4/27 * 0.4 = 0.548
    assert float(capsys.readouterr().out.split()[-1]) == pytest.approx(0.548, abs=0.09)
    env = module.Meeting()
    env.reset(seed=0)
    env.step({"left": "bridge", "right": "the market, I think"})
    assert env.observe("left").startswith("You went to the bridge, the other one to the market.")
    assert env.step({"left": "nowhere", "right": "nowhere"})[1] == {"left": 0.0, "right": 0.0}
    assert env.step({"left": "station", "right": "Station."})[1] == {"left": 0.4, "right": 0.4}


# ---- programs


def test_plain_program_rewards_both_agents_for_the_right_number(load_example):
    module = load_example("plain_program")
    assert [module.right({"answer": 7}, text) for text in ("7 of 10", "17", "seven")] == [1.0, 0.0, 0.0]
    player = fa.Scripted(lambda _, agent: "Five is meant." if agent == "planner" else "5")
    episodes = (fa.play("my/Crew-v0", player, seed=seed) for seed in range(100))
    episode = next(episode for episode in episodes if episode.rewards["planner"])
    assert episode.trajectories["writer"].info["answer"] == 5 and episode.rewards == {"planner": 1.0, "writer": 1.0}
    assert "A friend says: Five is meant." in episode.turns[1].observation


def test_team_of_the_agents_sdk_hands_off_and_calls_its_tool(load_example):
    pytest.importorskip("agents")
    module = load_example("agents_sdk")
    planner, solver = (row["messages"] for row in module.demonstrations(1))
    assert [message["role"] for message in planner] == ["system", "user", "assistant"]
    assert [message["role"] for message in solver] == ["system", *("user", "assistant") * 3]
    assert planner[-1] == solver[2], "the solver reads the hand-off as the planner wrote it"
    a, b, c = map(int, re.findall(r"\d+", planner[1]["content"]))
    assert solver[-1]["content"] == f"It is {a * b + c}."

    messages = {"planner": [planner[-1]], "solver": [solver[4], solver[6]]}
    answers = {agent: iter(message["content"] for message in texts) for agent, texts in messages.items()}
    episode = fa.play("my/Team-v0", fa.Scripted(lambda _, agent: next(answers[agent])), seed=2**30)
    assert episode.error is None and episode.rewards == {"planner": 1.0, "solver": 1.0}, str(episode)
    assert [turn.agent for turn in episode.turns] == ["planner", "solver", "solver"]


@pytest.mark.parametrize(
    ("example", "library", "env"),
    [
        ("langgraph_team", "langchain_openai", "my/Graph-v0"),
        ("crewai_team", "crewai", "my/Crew-v0"),
        ("ag2_team", "ag2", "my/Team-v0"),
    ],
)
def test_team_of_a_library_calls_its_tool_and_each_model_is_an_agent(load_example, example, library, env):
    pytest.importorskip(library)
    load_example(example)

    def answer(observation, agent):
        if agent == "planner":
            return "Multiply, then add."
        if observation.startswith("<tool_response>"):
            return "It is " + observation.split("\n")[1]
        a, b, c = re.findall(r"\d+", observation.rpartition("Anna")[2])[:3]
        return f'<tool_call>{{"name": "multiply_and_add", "arguments": {{"a": {a}, "b": {b}, "c": {c}}}}}</tool_call>'

    episode = fa.play(env, fa.Scripted(answer), seed=1)
    assert episode.error is None and episode.rewards == {"planner": 1.0, "solver": 1.0}, str(episode)
    assert [(turn.agent, turn.branch) for turn in episode.turns] == [("planner", 0), ("solver", 0), ("solver", 0)]


@pytest.mark.skipif(shutil.which("pi") is None, reason="npm install -g @mariozechner/pi-coding-agent")
@pytest.mark.parametrize("right", [True, False])
def test_coding_command_line_is_rewarded_if_its_file_prints_the_sum(load_example, right):
    load_example("coding_cli")

    def answer(observation):
        if observation.startswith("<tool_response>"):
            return "Done."
        a, b = map(int, re.findall(r"prints (\d+) \+ (\d+)", observation)[-1])
        arguments = {"path": "sum.py", "content": f"print({a} + {b + (not right)})"}
        return f"<tool_call>{json.dumps({'name': 'write', 'arguments': arguments})}</tool_call>"

    episode = fa.play("my/Coder-v0", fa.Scripted(answer), seed=1)
    assert episode.error is None and episode.rewards == {"coder": float(right)}, str(episode)
    assert [turn.branch for turn in episode.turns] == [0, 0]


AGENT = """
import json, os, subprocess, sys, urllib.request as http
body = json.dumps({"model": "agent", "messages": [{"role": "user", "content": sys.stdin.read()}]}).encode()
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
answer = json.load(http.urlopen(http.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)))
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
        "echo '{\"reward\": '$r', \"style\": 0.5}' > /logs/verifier/reward.json\n"
    ),
}


@pytest.mark.skipif(bool(_why_no_namespaces()), reason="needs user namespaces of Linux")
def test_harbor_tasks_without_containers_are_scored_by_their_own_tests(load_example, tmp_path):
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
        "deeper/code": {
            "solution/solve.sh": "echo 'touch /app/right' > code.sh",
            "tests/test.sh": "cd /app; bash code.sh; test -e right && r=1 || r=0; echo $r > /logs/verifier/reward.txt",
        },
        "parts": {"task.toml": ".".join(["a"] * 10_001) + " = 1"},  # quadratic time
        "unsolved": {"solution/solve.sh": "true", "tests/test.sh": "echo no pytest >&2"},
    }
    for name, changed in changes.items():
        for path, text in {**SORTS, **changed}.items():
            file = tmp_path / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    for name, linked in (
        ("tells", "instruction.md"),
        ("shows", "tests"),
    ):  # of a stranger's repository: git keeps links
        shutil.copytree(tmp_path / "sorts", tmp_path / name)
        secret = tmp_path / "secret" / linked
        secret.parent.mkdir(exist_ok=True)
        (tmp_path / name / linked).rename(secret)
        (tmp_path / name / linked).symlink_to(secret)
    shutil.copytree(tmp_path / "sorts", tmp_path / "huge")
    with (tmp_path / "huge" / "tests" / "data.bin").open("wb") as sparse:
        sparse.truncate(1 << 40)
    module = load_example("harbor_tasks")
    tasks, left_out = module.register(tmp_path, [sys.executable, "-c", AGENT])
    assert tasks == ["sorts"]
    names = ["asks", "builds", "huge", "parts", "plants", "reads", "shows", "system", "tells", "unsolved"]
    assert sorted(left_out) == names
    assert left_out["shows"].endswith("lead to other folders: ['tests']") and "['instruction.md']" in left_out["tells"]
    assert left_out["builds"] == "ValueError: its Dockerfile needs a container: 'RUN apt-get install -y nodejs'"
    assert left_out["huge"].endswith("its files have more than the 512 MB of a sandbox")
    assert left_out["parts"].endswith("its task.toml has more than 20000 bytes")
    (tmp_path / "deeper/text/task.toml").write_text("verifier.timeout_sec = 1e9")
    assert module.Task(tmp_path / "deeper/text").limits["wall_s"] == 3600
    assert left_out["asks"].endswith("for its mcp_servers and docker-compose.yaml")
    assert "COPY ../../sorts" in left_out["reads"] and "'/usr' is readable" in left_out["system"]
    assert "earns 0.0 here, nothing done 0.0" in left_out["plants"]
    assert "earns 0.0 here, nothing done 0.0: 'no pytest" in left_out["unsolved"]
    cheats = "echo 1 > /logs/verifier/reward.json; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh"
    for answer, reward in ((SORTS["solution/solve.sh"], 1.0), ("true", 0.0), (cheats, 0.0)):
        episode = fa.play("my/Harbor-v0", fa.Scripted(lambda _, answer=answer: answer), seed=1)
        assert episode.error is None and episode.rewards == {"agent": reward}, str(episode)
        assert episode.turns[0].observation == SORTS["instruction.md"]
    assert module.Task(tmp_path / "deeper/text").paid({"app/sorted.txt": b"", "app/deep": b"8"}) == 0.5
    code = module.Task(tmp_path / "deeper/code")
    written = [b"touch right", b"true", b"echo 1 > /logs/verifier/reward.json"]
    assert [code.paid({"app/code.sh": text}) for text in written] == [1.0, 0.0, 0.0]
    reward = "/logs/verifier/reward.txt"
    kills = f"echo 1 > {reward}; kill -9 $PPID"
    stays = f"(for n in $(seq 200); do sleep 0.1; grep -q 0 {reward} && echo 1 > {reward}; done) >/dev/null 2>&1 &"
    assert [code.paid({"app/code.sh": text.encode()}) for text in (kills, stays)] == [0.0, 0.0]
    for text in ("NaN", "1e300", "-1", "[]", "{", '"x"', '{"reward": "nan"}'):
        assert module.reward_in([text]) == 0.0, text
    assert [module.reward_in(texts) for texts in (["0.5"], ['{"reward": 1}'], [], ["1", "1"])] == [0.5, 1.0, 0.0, 0.0]


TASKSET = """
import os
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        os.system("echo a line on standard output")
        return float(self.data.answer in str(trace.last_reply))

class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for a in range(2, 9):
            yield SumTask(SumData(prompt=f"{a} * 7?", answer=str(a * 7)), self.config.task)

__all__ = ["Sums"]
"""


@pytest.fixture
def in_verifiers(load_example, tmp_path, monkeypatch):
    """Return a function that starts an environment of verifiers and registers it."""
    if shutil.which("vf-validate") is None:
        pytest.skip("pip install 'verifiers>=0.4' somewhere on the path")
    (tmp_path / "sums.py").write_text(TASKSET)
    ours = (ROOT / folder for folder in ("", "envs", "verifiers", "trainers"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, tmp_path / "relay-game", *ours))))
    module, programs = load_example("verifiers_v1"), []
    python = Path(shutil.which("vf-validate")).parent / "python"

    def start(taskset, env_id="", needs=(), tasks=range(7)):
        command = [python, "-c", f"import {', '.join(needs or ['sys'])}"]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip(f"install forge_agents without an extra, and {', '.join(needs)}, next to verifiers")
        programs.append(module.Verifiers(str(python), taskset, env_id))
        module.register(programs[-1], tasks)
        return programs[-1]

    yield start
    for program in programs:
        program.close()


def test_verifiers_taskset_runs_in_its_own_python_with_its_own_reward(in_verifiers):
    assert in_verifiers("sums").roles == {"agent": True}
    right = fa.Scripted(lambda observation: str(int(observation.split()[0]) * 7))
    for player, reward in ((right, 1.0), (fa.Scripted(lambda _: "?"), 0.0)):
        episode = fa.play("my/Verifiers-v0", player, seed=1)
        assert episode.error is None and episode.rewards == {"agent": reward}, str(episode)


def test_traces_of_one_role_of_verifiers_have_their_own_rewards(in_verifiers):
    assert in_verifiers("sums", "best-of-n").roles == {"agent": True}
    answers = iter("???")
    player = fa.Scripted(lambda observation: next(answers, str(int(observation.split()[0]) * 7)))
    episode = fa.play("my/Verifiers-v0", player, seed=1)
    assert episode.rewards == {"agent": 0.25}, str(episode)
    assert episode.trajectories["agent"].session_rewards == (0.0, 0.0, 0.0, 1.0)


def test_roles_of_verifiers_are_agents(in_verifiers):
    assert in_verifiers("telling").roles == {"teller": True, "guesser": True}
    guesses = iter(["{}", "It is {}."])

    def play(observation, agent):
        digit = re.findall(r"\d", observation)[-1]
        return f"Say {digit}." if agent == "teller" else next(guesses).format(digit)

    episode = fa.play("my/Verifiers-v0", fa.Scripted(play), seed=1)
    assert [turn.agent for turn in episode.turns] == ["teller", "guesser", "guesser"]
    assert re.fullmatch(r"Your partner says: Say \d\.\nAnswer with the digit only\.", episode.turns[2].observation)
    assert episode.rewards == {"teller": pytest.approx(0.5 / 6 + 0.5 / 2), "guesser": pytest.approx((1 + 0.5 / 8) / 2)}
    assert episode.trajectories["guesser"].session_rewards == (1.0, 0.5 / 8)


def test_roles_that_verifiers_does_not_train_are_frozen(in_verifiers):
    assert in_verifiers("sums", "user-sim").roles == {"assistant": True, "user": False}


def test_roles_of_verifiers_that_are_frozen_have_no_adapter(load_example):
    team = load_example("verifiers_v1").policies({"writer": True, "critic": False}, "tiny-random", 4, fa.Sampling())
    assert team["writer"].trainable and team["writer"].lora.rank == 4
    assert not team["critic"].trainable and team["critic"].lora is None


def test_task_that_a_taskset_of_verifiers_lacks_is_named(in_verifiers):
    in_verifiers("sums", tasks=[50])
    with pytest.warns(RuntimeWarning, match="the taskset has no task 50. Pass fewer --tasks"):
        fa.play("my/Verifiers-v0", fa.Scripted(lambda _: "?"), seed=1)


RATED = """
import sums
import verifiers.v1 as vf

import forge_agents as fa
import forge_verifiers as fv

brief = fa.Rule(lambda completion: len(completion) < 9, name="brief")
outside = fv.TextReward(fa.Ensemble([fv.Numeric(), fv.Repetition(), brief]))

async def verified(task, trace):
    (value,) = outside([task.prompt_text], [trace.last_reply], answer=[task.answer])
    return {} if value is None else value

class RatedConfig(vf.TasksetConfig):
    task: vf.TaskConfig = vf.TaskConfig(rewards={"verified": {"fn": "rated:verified"}})

class Rated(vf.Taskset[sums.SumTask, RatedConfig]):
    load = sums.Sums.load

__all__ = ["Rated"]
"""


def test_ensemble_is_a_reward_of_a_taskset_of_verifiers(in_verifiers, tmp_path):
    (tmp_path / "rated.py").write_text(RATED)
    in_verifiers("rated", needs=["jsonschema", "sklearn"])
    right = fa.Scripted(lambda observation: str(int(observation.split()[0]) * 7))
    rewards = []
    for player in (right, fa.Scripted(lambda _: "I am not sure about it, but I guess 3.")):
        episode = fa.play("my/Verifiers-v0", player, seed=1)
        assert episode.error is None, str(episode)
        rewards.append(episode.rewards["agent"])
    assert rewards[0] >= 1.5, "right, and the probability of the ensemble"
    assert 0 < rewards[1] < 0.5


@pytest.mark.parametrize("roles", [("asker",), ("asker", "answerer")])
def test_written_package_is_an_environment_of_verifiers(in_verifiers, tmp_path, roles):
    module = scaffold.create(tmp_path / "relay-game", "verifiers", "forge_envs:forge/Relay-v0")
    module = module / "relay_game" / "__init__.py"
    text = module.read_text()
    if roles == ("asker",):
        changed = text.replace("fa.Random()}", "fa.Oracle()}")
    else:
        field = next(line for line in text.splitlines() if line.startswith("    asker:"))
        changed = text.replace('"answerer": fa.Random()', "").replace(
            field, f"{field}\n{field}".replace("asker", "answerer", 1)
        )
    assert changed != text
    module.write_text(changed)
    assert in_verifiers("relay_game", needs=["cachetools", "pettingzoo", "psutil"]).roles == dict.fromkeys(roles, True)

    def act(observation):
        if sums := re.search(r"Calculate (.*)\. Write", observation):
            return f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{sums[1]}"}}}}</tool_call>'
        return re.findall(r"-?\d+", observation)[-1]

    episode = fa.play("my/Verifiers-v0", fa.Scripted(act), seed=1)
    assert episode.error is None and episode.rewards == dict.fromkeys(roles, 1.0), str(episode)
    assert [turn.agent for turn in episode.turns] == ["asker", *roles]
    assert episode.turns[0].observation.startswith("[system]\nYou are a calculator.")
    lines = (tmp_path / "relay-game" / "README.md").read_text().splitlines()
    command = next(line for line in lines if "vf-validate" in line).split()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout[done.stdout.index("{") :])["outcomes"]["valid"] == 4, done.stdout + done.stderr


INSPECT_TASKS = """
from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import Score, includes, mean, model_graded_qa, scorer
from inspect_ai.solver import generate, system_message

def sums_with(scorer, **options):
    data = MemoryDataset([Sample(input=f"{a} * 7?", target=str(a * 7)) for a in range(2, 9)])
    data.shuffle()
    solver = [system_message("Answer with a number."), generate()]
    return Task(dataset=data, solver=solver, scorer=scorer, **options)

@task
def sums():
    return sums_with(includes(), epochs=2)

@task
def graded():
    return sums_with(model_graded_qa())

@scorer(metrics=[mean()])
def parts():
    async def score(state, target):
        return Score(value={"right": 1.0, "brief": 0.5})
    return score

@task
def several():
    return sums_with(parts())

@task
def options():
    data = MemoryDataset([Sample(input="Which?", choices=list("abcdefghij"), target="C") for _ in range(5)])
    data.shuffle_choices()
    return Task(dataset=data, solver=generate(), scorer=includes())
"""


@pytest.fixture
def in_inspect(load_example, tmp_path):
    """Return a function that registers a task of Inspect."""
    if shutil.which("inspect") is None:
        pytest.skip("pip install inspect-ai openai somewhere on the path")
    (tmp_path / "tasks.py").write_text(INSPECT_TASKS)
    python = str(Path(shutil.which("inspect")).parent / "python")
    register = load_example("inspect_task").register
    return lambda name, numbers=range(7), **options: register(python, f"{tmp_path}/tasks.py@{name}", numbers, **options)


def test_inspect_task_runs_in_its_own_python_with_its_own_score(in_inspect):
    in_inspect("sums")
    right = fa.Scripted(lambda observation: str(int(re.search(r"(\d) \* 7", observation)[1]) * 7))
    seen = set()
    for player, reward in ((right, 1.0), (fa.Scripted(lambda _: "?"), 0.0)):
        episode = fa.play("my/Task-v0", player, seed=1)
        assert episode.error is None and episode.rewards == {"agent": reward}, str(episode)
        assert episode.turns[0].observation.startswith("[system]\nAnswer with a number.")
        seen |= {turn.observation for turn in episode.turns}
        assert len(episode.turns) == 1, "an episode is one epoch"
    assert len(seen) == 1, "episodes of a group have the same sample"


def test_scorer_of_inspect_asks_a_frozen_grader(in_inspect):
    def act(observation, agent):
        return "GRADE: I" if agent == "grader" else "GRADE: C"

    in_inspect("graded", grader="tiny-random")
    episode = fa.play("my/Task-v0", fa.Scripted(act), seed=1)
    assert episode.error is None and episode.rewards["agent"] == 0.0, str(episode)
    assert [turn.agent for turn in episode.turns] == ["agent", "grader"]


@pytest.mark.parametrize(
    ("task", "problem"),
    [("graded", "the scorer asked the agent. Pass --grader"), ("several", r"value is {'right': 1.0, 'brief': 0.5}")],
)
def test_inspect_task_without_a_reward_is_an_error_of_the_environment(in_inspect, task, problem):
    in_inspect(task)
    with pytest.warns(RuntimeWarning, match=problem):
        assert problem in fa.play("my/Task-v0", fa.Scripted(lambda _: "GRADE: C"), seed=1).error.message


def test_inspect_task_with_another_order_in_each_process_is_refused(in_inspect):
    in_inspect("options", range(1))
    player = fa.Scripted(lambda _: "C")
    assert fa.play("my/Task-v0", player, seed=1).error is None
    with pytest.warns(RuntimeWarning, match="sample 0 differs between episodes"):
        assert fa.play("my/Task-v0", player, seed=1).error is not None


def test_samples_that_an_inspect_task_lacks_are_named(in_inspect):
    in_inspect("sums", range(30, 31))
    with pytest.warns(RuntimeWarning, match="the task has 7 samples. Pass their number with --samples"):
        fa.play("my/Task-v0", fa.Scripted(lambda _: "C"), seed=1)


# ---- players and benchmarks


def test_suite_runs_as_a_task_of_inspect(load_example, tmp_path):
    inspect_ai = pytest.importorskip("inspect_ai")
    from inspect_ai.model import ModelOutput, ModelUsage, get_model

    def echo(messages, tools, tool_choice, config):
        output = ModelOutput.from_content("mock", re.search(r"\d+|$", messages[-1].text)[0])
        output.usage = ModelUsage()
        return output

    task = load_example("inspect_suite").suite("core-v1", episodes=2, partner="oracle")
    model = get_model("mockllm/model", custom_outputs=echo)
    (log,) = inspect_ai.eval(task, model=model, display="none", log_dir=str(tmp_path))
    assert log.status == "success", log.error
    metrics = {name: metric.value for name, metric in log.results.scores[0].metrics.items()}
    assert {"forge/Relay-v0", "forge/KuhnPoker-v0", "all", "stderr of all"} <= set(metrics)
    assert metrics["stderr of forge/Relay-v0"] == pytest.approx(0), "the mean of both roles is 1/2 for each seed"
    relay = [sample for sample in log.samples if sample.metadata["env"] == "forge/Relay-v0"]
    rewards = {(sample.metadata["agent"], sample.scores["reward"].value) for sample in relay}
    assert rewards == {("asker", 0.0), ("answerer", 1.0)}, "the answerer repeats the oracle's number"
    assert [message.role for message in relay[-1].messages] == ["system", "user", "assistant"]


def test_models_of_inspect_meet_every_partner(load_example, tmp_path, monkeypatch):
    inspect_ai = pytest.importorskip("inspect_ai")
    from inspect_ai.model import ModelOutput, ModelUsage, get_model

    asked = Counter()

    def model(name):
        def answer(messages, tools, tool_choice, config):
            asked[name] += 1
            output = ModelOutput.from_content("mock", "call")
            output.usage = ModelUsage()
            return output

        return get_model(f"mockllm/{name}", custom_outputs=answer)

    module, models = load_example("inspect_suite"), {name: model(name) for name in ("one", "other")}
    monkeypatch.setattr(module, "get_model", lambda name="mockllm/one": models[name.removeprefix("mockllm/")])
    task = module.suite("core-v1", episodes=4, partner=["self", "mockllm/other", "random"])
    kuhn = [sample for sample in task.dataset if sample.metadata["env"] == "forge/KuhnPoker-v0"]
    task = inspect_ai.Task(dataset=kuhn, solver=task.solver, scorer=task.scorer)
    (log,) = inspect_ai.eval(task, model=models["one"], display="none", log_dir=str(tmp_path))
    rows = {}
    for sample in log.samples:
        rows.setdefault(sample.metadata["partner"], []).append(sample.scores["reward"].value)
    assert {name: len(row) for name, row in rows.items()} == {"self": 8, "mockllm/other": 8, "random": 8}
    assert sum(rows["self"]) == 0, "both roles of a seed sum to zero in play against itself"
    assert rows["mockllm/other"] == rows["self"] and asked["other"] >= 4, "the other plays alike"
    metrics = {name: metric.value for name, metric in log.results.scores[0].metrics.items()}
    assert metrics["forge/KuhnPoker-v0 with random"] == pytest.approx(sum(rows["random"]) / 8)
    with pytest.raises(ValueError, match="partner='gpt' is unknown"):
        module.suite(partner="gpt")


def test_game_that_a_failing_model_leaves_has_no_score_in_inspect(load_example, tmp_path):
    inspect_ai = pytest.importorskip("inspect_ai")
    from inspect_ai.model import get_model

    def fail(messages, tools, tool_choice, config):
        raise ValueError("content filter: refused")

    task = load_example("inspect_suite").suite("core-v1", episodes=1, partner="random")
    model = get_model("mockllm/model", custom_outputs=fail)
    (log,) = inspect_ai.eval(task, model=model, display="none", log_dir=str(tmp_path), fail_on_error=False)
    assert log.samples and not any(sample.scores for sample in log.samples if sample.error)
    assert all("content filter" in sample.error.message for sample in log.samples)


def test_empty_answer_of_a_team_earns_nothing(load_example):
    right, task = load_example("_team").right, {"answer": 42}
    assert [right(task, result) for result in (None, "", "no", "41", "6 * 7 = 42")] == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(("word", "lost", "illegal"), [("I call", 7 / 6, 0.5), ("hm", 1.0, 1.0)])
def test_poker_of_inspect_measures_exploitability(load_example, tmp_path, word, lost, illegal):
    inspect_ai = pytest.importorskip("inspect_ai")
    from inspect_ai.model import ModelOutput, ModelUsage, get_model

    def answer(messages, tools, tool_choice, config):
        output = ModelOutput.from_content("mock", word)
        output.usage = ModelUsage()
        return output

    task = load_example("inspect_suite").poker(answers=2)
    model = get_model("mockllm/model", custom_outputs=answer)
    (log,) = inspect_ai.eval(task, model=model, display="none", log_dir=str(tmp_path))
    assert log.status == "success", log.error
    metrics = {name: metric.value for name, metric in log.results.scores[0].metrics.items()}
    assert metrics == {"exploitability": pytest.approx(lost), "illegal": pytest.approx(illegal)}
    assert len(log.samples) == 24


def test_benchmark_writes_its_reports(load_example, tmp_path):
    module = load_example("benchmark")
    module.main(["--episodes", "4", "--out", str(tmp_path)])
    report = Report.load(tmp_path / "board.json")
    assert report.complete and {"cautious", "random"} <= set(report.players)
    assert all((tmp_path / f"board.{kind}").stat().st_size for kind in ("md", "html"))
    assert module.cautious("You hold K. Legal: call, fold") == "call"


def test_benchmark_of_suites_writes_a_report_each_and_continues(load_example, tmp_path, monkeypatch):
    module = load_example("benchmark_smollm2")
    monkeypatch.setitem(registry._suites, "short-v0", (("forge/Negotiation-v0",), SuiteDefaults()))
    players = {"smollm2": fa.Random(), "trained": fa.Scripted(module.by_rule)}
    suites = {"core-v1": 3, "short-v0": 2}
    reports = module.play(players, tmp_path / "run", tmp_path, suites=suites)
    kinds = (".md", ".json", ".html")
    assert all((tmp_path / f"{suite}{kind}").stat().st_size for suite in reports for kind in kinds)
    assert [len(report.records) for report in reports.values()] == [30, 8]
    success = {(cell.env, cell.player): cell.success.value for cell in reports["core-v1"].summary.cells}
    assert success["forge/Relay-v0", "trained"] == 1 and success["forge/Relay-v0", "smollm2"] == 0
    repeated = module.play(players, tmp_path / "run", tmp_path, suites=suites)
    assert [report.timing["played"] for report in repeated.values()] == [0, 0]
    stopped = module.play(players, tmp_path / "other", tmp_path, suites=suites, minutes=0)
    assert not any(report.complete for report in stopped.values())


def test_benchmark_of_suites_with_oracles_has_them_as_players(load_example, tmp_path, monkeypatch):
    module = load_example("benchmark_smollm2")
    monkeypatch.setitem(registry._suites, "short-v0", (("forge/Tables-v0@1",), SuiteDefaults()))
    monkeypatch.setattr(fa, "Policy", lambda *_, **__: fa.Random(), raising=False)
    folders = ["--folder", str(tmp_path / "run"), "--out", str(tmp_path)]
    module.main(["--suites", "short-v0", "--trained", "x", "--seeds", "2", *folders])
    rates = {player: rate.value for player, rate in Report.load(tmp_path / "short-v0.json").summary.overall.items()}
    assert rates == {"smollm2": 0.0, "trained": 0.0, "oracle": 1.0}


@pytest.mark.parametrize(
    ("observation", "action"),
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
def test_script_of_the_benchmark_solves_its_tasks(load_example, observation, action):
    assert load_example("benchmark_smollm2").by_rule(observation, "anyone") == action


def test_benchmark_has_models_behind_servers_as_players(load_example, serve_chat, tmp_path):
    module = load_example("benchmark")
    refuse = lambda request: (403, {"error": "no such key"})  # noqa: E731
    servers = {"rival": serve_chat(lambda request: "bet"), "down": serve_chat(refuse)}
    words = ["--episodes", "1", "--out", str(tmp_path)]
    for name, server in servers.items():
        words += ["--model", f"{name}={server.url}#stub"]
    module.main(words)
    report = Report.load(tmp_path / "board.json")
    errors = {bool(record.error) for record in report.records if "down" in record.lineup.values()}
    assert True in errors and not report.complete and servers["rival"].requests
    assert not any(record.error for record in report.records if "down" not in record.lineup.values())


def test_custom_loss_has_a_gradient_at_every_ratio(load_example):
    module = load_example("own_loss")
    module.main(["--steps", "0"])
    gradients = module.curve([0.5, 1.0, 1.25, 2.0])
    assert gradients[1:3] == pytest.approx([1.0, 0.948], abs=1e-3)
    assert 0 < gradients[0] < 0.1 and 0 < gradients[3] < 0.2
    assert "tempered" in list_losses()


def test_notebook_runs_cell_by_cell(tmp_path):
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4 and all(not cell.get("outputs") for cell in notebook["cells"])
    *cells, last = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert "trainer.fit" in last
    compile(last, "last cell", "exec")
    rewards = "[[t.agent, r] for t, r in zip(group.trajectories, reward(group.trajectories).tolist())]"
    program = tmp_path / "cells.py"
    program.write_text("\n\n".join([*cells, f"import json\nprint(json.dumps({rewards}))"]))
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["hinter", 1.0], ["guesser", pytest.approx(1.1)]] * 2


def test_role_guard_announces_the_collapse_that_balanced_roles_prevent(load_example):
    module = load_example("role_guard")
    for balanced in (False, True):
        rows, warnings = module.train(0, credit=fa.Credit(balance_roles=balanced), lr=2.0, steps=50)
        rewards = [row["reward/answerer"] for row in rows]
        collapsed = module.collapse(rewards, sum(rewards[:5]) / 5)
        if balanced:
            assert warnings == [] and collapsed is None and sum(rewards[-5:]) / 5 > 0.4
        else:
            assert warnings[0][1].startswith("role writer captures its policy") and warnings[0][0] + 5 <= collapsed


def test_table_learns_to_share_forks(load_example, monkeypatch):
    module = load_example("philosophers")
    monkeypatch.setattr(module, "LEVELS", [f"{module.GAME}@{level}" for level in (1, 2)])
    before, after = module.train(0, levels=module.LEVELS, lr=6.0, steps=20)
    assert before < 0.6 and after > before + 0.2
