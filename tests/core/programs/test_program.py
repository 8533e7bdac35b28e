import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import warnings
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import openai
import pytest
from process_checks import ended_within, holds_within
from pydantic import BaseModel
from refusals import raises

import forge_agents as fa
from forge_agents.envs.wrappers import ObservationWindow
from forge_agents.errors import ActorDiedError, ForgeError
from forge_agents.programs.gateway import gateway
from forge_agents.rollout.episode import play
from forge_agents.rollout.players import Decision, requested_sampling
from forge_agents.rollout.rollout import Rollout
from forge_agents.sandbox import Sandbox, SandboxLimits
from forge_agents.sandbox.sandbox import _why_no_namespaces

from .helpers import played, result_of  # noqa: TID252 (tests are no installed package)

needs_namespaces = pytest.mark.skipif(bool(_why_no_namespaces()), reason="needs user namespaces of Linux")


def say(model, text, **more):
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


async def crew(task, client):
    plan = await client.chat.completions.create(**say("planner", f"Plan {task}."))
    answer = await client.chat.completions.create(**say("solver", plan.choices[0].message.content))
    return answer.choices[0].message.content


def plain(task, client):
    return client.chat.completions.create(**say("agent", str(task))).choices[0].message.content


class Found(BaseModel):
    said: str


CURL = (
    'curl -s $OPENAI_BASE_URL/chat/completions -H "Authorization: Bearer $OPENAI_API_KEY" '
    """-d '{"model": "agent", "messages": [{"role": "user", "content": "-"}]}'"""
)
CREW = {"agents": ("planner", "solver"), "tasks": range(10), "reward": lambda task, result: float(result == "solved")}


def test_each_call_is_a_turn_and_all_agents_get_the_reward():
    episode = played(crew, **CREW)
    assert [(turn.agent, turn.observation) for turn in episode.turns] == [
        ("planner", f"Plan {episode.trajectories['solver'].info['task']}."),
        ("solver", "solved"),
    ]
    assert episode.rewards == {"planner": 1.0, "solver": 1.0} and episode.end_reason == "terminated"
    info = episode.trajectories["planner"].info
    assert (info["result"], info["calls"]) == ("solved", 2) and "conversation" not in json.dumps(episode.as_json())


@pytest.mark.parametrize(
    ("result", "reward"),
    [
        (np.float32(0.5), 0.5),
        (np.True_, 1.0),
        (np.array(0.5), 0.5),
        (Fraction(1, 2), 0.5),
        (Decimal("0.5"), 0.5),
        ({"agent": np.float32(0.5)}, 0.5),
        ({"agent": Decimal("0.5")}, 0.5),
        ({"agent": "an answer of this seat"}, 0.0),  # for verifiers to judge, too
        ({"answer": "42"}, 0.0),  # for verifiers to judge
        ("0.5", 0.0),
    ],
)
def test_number_of_any_library_is_the_reward(result, reward):
    def program(task, client):
        plain(task, client)
        return result

    assert played(program).rewards == played(program, reward=lambda task, given: reward).rewards == {"agent": reward}


def test_endlessly_nested_result_is_stored_as_text():
    def program(task, client):
        said = json.loads(plain(task, client))
        return said if task < 2000 else [said, *said]

    for depth, saved in ((90, list), (600, str)):
        deep = "[" * depth + "]" * depth
        episode = played(program, fa.Scripted(lambda seen, deep=deep: deep), tasks=[depth])
        result = json.loads(episode.to_json())["trajectories"]["agent"]["info"]["result"]
        assert type(result) is saved and (result == deep or json.dumps(result) == deep)
    below = []
    for _ in range(100_000):  # Python 3.12 and newer print more than 5000 levels
        below = [below]
    info = played(lambda task, client: [plain(task, client), below]).trajectories["agent"].info
    assert info["result"].startswith("unprintable list (maximum recursion")
    long = played(lambda task, client: int(plain(10, client)) ** 5000, fa.Scripted(lambda seen: seen), tasks=[10],
                  reward=lambda task, result: float(result % 10 == 0))  # fmt: skip
    assert long.rewards == {"agent": 1.0} and "unprintable int" in result_of(long)


def test_rewards_by_agent_must_be_numbers():
    assert played(plain, reward=lambda task, result: {}).rewards == {"agent": 0.0}
    for odd in ({"agent": "x"}, {"agent": float("nan")}, {"agnet": 1.0}):
        assert played(plain, reward=lambda task, result, odd=odd: odd).error is not None


@pytest.mark.parametrize(
    "result",
    [
        "NaN", "-Infinity", "1e999", "1" + "0" * 400, '{"agent": NaN}', '{"agent": 1, "agnet": 2}',
        '{"agent": 1, "log": "x"}', '{"agent": {"a": NaN}}', '{"agent": {"a": 1%s}}' % ("0" * 400),
    ],
)  # fmt: skip
def test_result_that_is_no_reward_is_a_failure_of_the_program(result):
    """A model can write it, so it is no error of the environment, with which the episode would be played again."""

    def program(task, client):
        messages = [{"role": "user", "content": "Hello."}]
        headers = {"X-Session-ID": "a"}
        reply = client.chat.completions.create(model="agent", messages=messages, extra_headers=headers)
        return json.loads(reply.choices[0].message.content)

    episode = played(program, result, error_reward=-1.0)
    assert episode.error is None and episode.rewards == {"agent": -1.0}
    assert episode.program_error.startswith(("ValueError", "OverflowError"))


@pytest.mark.parametrize(("error_reward", "warned"), [(0.0, True), (-1.0, False)])
def test_reward_below_that_of_a_failure_is_warned_about_once(error_reward, warned, caplog, monkeypatch):
    monkeypatch.setattr("forge_agents.programs.program._warned", set())
    for _ in range(2):
        played(lambda task, client: plain(0, client), reward=lambda task, result: -1.0, error_reward=error_reward)
    messages = [record.getMessage() for record in caplog.records]
    assert [f"paid a reward of -1, and error_reward={error_reward:g} is more" in text for text in messages] == [
        True
    ] * warned


def test_program_gets_a_copy_of_its_task_without_reserved_infos():
    task = {"words": ["a"], "answer": 7, "success": True, "error": "of the data"}
    task["conversation"] = {"session_rewards": [5.0]}  # which a program's environment sets itself

    def program(task, client):
        task["words"].append(plain(0, client))
        return len(task["words"]) + task.pop("answer")

    for _ in range(2):
        episode = played(program, tasks=[task], reward=lambda task, result: result + len(task))
        assert episode.rewards == {"agent": 14.0}
    info = episode.trajectories["agent"].info
    assert info["answer"] == 7 and info["task"] == task and not {"success", "error"} & info.keys()
    assert episode.trajectories["agent"].session_rewards is None


def misspells(task, result):
    return resutl == "42"  # noqa: F821


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        (lambda task, result: None, "returned None. Return a number"),
        (lambda task, result: np.nan, "is nan, which is no reward. Return finite numbers"),
        (lambda task, result: {"agent": np.inf}, "is {'agent': inf}, which is no reward. Return finite numbers"),
        (lambda task, result: {"agnt": 1}, "has rewards of 'agnt'.*Did you mean 'agent'"),
        (misspells, r"failed with NameError: .*'resutl'.* \(.*test_program.py:\d+\)"),
    ],
)
def test_failing_reward_function_is_named(reward, told):
    error = played(plain, reward=reward).error
    assert re.search(rf"reward= of .*{told}", error.message), error.message


@pytest.mark.parametrize(
    ("result", "reward", "told"),
    [
        (None, lambda task, result: float(len(result)), "TypeError: object of type 'NoneType' has no len()"),
        (None, lambda task, result: float(result.strip() == "42"), "AttributeError: 'NoneType' object has no"),
        ("no number", lambda task, result: float(int(result) == 42), "ValueError: invalid literal for int()"),
        ("{}", lambda task, result: float(json.loads(result)["answer"]), "KeyError: 'answer'"),
        ("", lambda task, result: float(result.split()[-1] == "42"), "IndexError: list index out of range"),
        ("0", lambda task, result: 1 / int(result), "ZeroDivisionError: division by zero"),
    ],
)
def test_result_that_the_reward_fails_on_earns_the_reward_of_a_failure(result, reward, told):
    """A model could make its episode disappear with an answer that no reward function expects."""

    def program(task, client):
        plain(task, client)
        return result

    episode = played(program, reward=reward, error_reward=-1.0)
    assert episode.error is None and episode.rewards == {"agent": -1.0}
    assert episode.program_error.startswith(told)
    assert re.search(r"\(.*test_program.py:\d+\), raised by reward=", episode.program_error)


def test_rejection_after_an_answer_is_no_error_of_the_environment():
    """A model could cause one, because the key is in the environment of the commands that it writes."""

    def program(task, client):
        with contextlib.suppress(openai.BadRequestError):
            client.chat.completions.create(**say("agent", "-", n=3))
        plain(task, client)
        return task or client.chat.completions.create(**say("nobody", "?"))

    episode = played(program, error_reward=-1.0)
    assert (episode.rewards, episode.error) == ({"agent": -1.0}, None)
    assert "had refused a request: this episode has no model 'nobody'" in episode.program_error
    assert played(program, tasks=[1]).rewards == {"agent": 1.0}


def test_command_that_fails_after_a_rejection_has_its_reward():
    again = """
import urllib.error
request.data = json.dumps({**body, "model": "nobody"}).encode()
try:
    urllib.request.urlopen(request)
except urllib.error.HTTPError as refused:
    print(refused.read().decode(), file=sys.stderr)
sys.exit(7)
"""
    words = [sys.executable, "-c", COMMAND.replace("print(", f"{again}\nprint(")]
    episode = played(words, tasks=[{"question": "Well?"}], reward=lambda task, result: -result.exit_status)
    assert (episode.rewards, episode.error) == ({"agent": -7.0}, None)
    assert episode.program_error.endswith(
        "had refused a request: this episode has no model 'nobody'. Send one of agent."
    )


def test_request_with_more_text_than_an_observation_fails_no_episode():
    def program(task, client):
        first = client.chat.completions.create(**say("agent", "-"))
        schema = {"enum": [1] * 1_900_000, "description": "x" * 4_300_000}  # its JSON has 8.1 MB, its text 10 MB
        tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
        body = {**say("agent", "-"), "tools": [tool]}
        data = json.dumps(body, separators=(",", ":")).encode()
        assert 8_000_000 < len(data) < 8 << 20
        request = urllib.request.Request(f"{client.base_url}chat/completions", data)
        request.add_header("authorization", f"Bearer {client.api_key}")
        request.add_header("content-type", "application/json")
        with pytest.raises(urllib.error.HTTPError, match="413"):
            urllib.request.urlopen(request)
        return -1.0 if first else 0.0

    episode = played(program)
    assert (episode.rewards, episode.error) == ({"agent": -1.0}, None)


@pytest.mark.parametrize("ends", ["raises", "is cut", "returns"])
def test_entry_of_a_task_is_never_the_result(ends):
    def program(task, client):
        client.chat.completions.create(**say("agent", "-"))
        if ends == "is cut":
            client.chat.completions.create(**say("agent", "-"))
        if ends == "raises":
            raise ValueError("no answer")
        return {"said": "6"}

    episode = played(program, tasks=[{"question": "-", "answer": "5", "result": "5"}], max_turns=1)
    info = episode.trajectories["agent"].info
    assert info["result"] == ({"said": "6"} if ends == "returns" else None)
    assert info["answer"] == "5" and info["task"]["result"] == "5"


def test_fork_with_calls_in_another_order_is_rejected():
    first = iter(["planner", "solver"])

    def program(task, client):
        one = next(first)
        for seat in (one, "solver" if one == "planner" else "planner"):
            client.chat.completions.create(**say(seat, "-"))

    env = fa.Program(program, agents=("planner", "solver"))
    try:
        env.reset(seed=0)
        env.step("said by the planner")
        raises(ForgeError, "asked solver where it had asked planner", env.fork)
    finally:
        env.close()


retry_ended = threading.Event()


def retry(ask):
    """Ask for ever, whatever the errors."""
    try:
        while True:
            with contextlib.suppress(Exception):
                ask()
    finally:
        retry_ended.set()


def in_its_thread(task, client):
    retry(lambda: client.chat.completions.create(**say("agent", "-")))


def through_urllib(task, client):
    headers = {"authorization": f"Bearer {client.api_key}", "content-type": "application/json"}
    url, body = f"{client.base_url}chat/completions", json.dumps(say("agent", "-")).encode()
    retry(lambda: urllib.request.urlopen(urllib.request.Request(url, body, headers)).read())


async def in_a_thread_that_a_task_waits_for(task, client):
    with openai.OpenAI() as plain_client:
        waiting = asyncio.create_task(asyncio.to_thread(in_its_thread, task, plain_client))
        await asyncio.shield(waiting)


async def in_a_task_that_is_left_behind(task, client):
    async def ask():
        try:
            while True:
                with contextlib.suppress(Exception):
                    await client.chat.completions.create(**say("agent", "-"))
        finally:
            retry_ended.set()

    await asyncio.shield(asyncio.create_task(ask()))


@pytest.mark.parametrize(
    "program",
    [in_its_thread, through_urllib, in_a_thread_that_a_task_waits_for, in_a_task_that_is_left_behind],
)
def test_program_that_retries_after_every_error_ends_with_its_episode(program):
    """Each cut-off episode left a thread that asked for ever. The event loop that programs share goes on."""
    retry_ended.clear()
    episode = played(program, max_turns=3)
    assert episode.trajectories["agent"].info["cut"] == "it made more than 3 calls"
    assert retry_ended.wait(60)
    assert played(crew, **CREW).rewards == {"planner": 1.0, "solver": 1.0}


@pytest.mark.parametrize("answers", [0, 1])
def test_fork_with_other_messages_is_rejected(answers):
    """Answers would otherwise be given to other questions, and alternatives scored by them."""
    texts = iter(["first", "second", "second", "first"])

    def program(task, client):
        for _ in range(2):
            client.chat.completions.create(**say("agent", next(texts)))

    env = fa.Program(program)
    try:
        env.reset(seed=0)
        for _ in range(answers):
            env.step("answer to the first")
        texts = iter(["second", "first"])
        raises(ForgeError, "ran again and sent agent other messages", env.fork)
    finally:
        env.close()


def test_plain_function_runs_in_a_thread_and_returns_the_reward():
    at_once = threading.Barrier(3, timeout=100)

    def meets(task, client):
        client.chat.completions.create(**say("agent", "-"))
        at_once.wait()
        return {"agent": 0.25}

    async def three():
        envs = [fa.Program(meets) for _ in range(3)]
        try:
            return await asyncio.gather(*(play(env, {"agent": fa.Scripted(lambda seen: "-")}, seed=0) for env in envs))
        finally:
            for env in envs:
                env.close()

    assert [episode.rewards for episode in asyncio.run(three())] == [{"agent": 0.25}] * 3


FIRST_EPISODES = """
import asyncio
import forge_agents as fa
from forge_agents.rollout.episode import play

def program(task, client):
    client.chat.completions.create(model="agent", messages=[{"role": "user", "content": "Hello"}])
    return 1.0

async def main():
    envs = [fa.Program(program, tasks=range(20)) for _ in range(10)]
    plays = (play(env, {"agent": fa.Scripted(lambda _: "x")}, seed=seed) for seed, env in enumerate(envs))
    print([episode.rewards.get("agent", str(episode.error)) for episode in await asyncio.gather(*plays)])

asyncio.run(main())
"""


def test_first_plain_programs_of_a_process_start_together():
    words = [sys.executable, "-W", "ignore", "-c", FIRST_EPISODES]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() == str([1.0] * 10)


def test_task_depends_on_the_seed_and_its_entries_are_infos():
    tasks = [{"question": f"q{n}", "answer": n} for n in range(50)]
    infos = [played(plain, seed=seed, tasks=tasks).trajectories["agent"].info for seed in (1, 1, 2)]
    assert infos[0] == infos[1] != infos[2]
    assert infos[0]["answer"] == infos[0]["task"]["answer"]
    drawn = played(plain, tasks=lambda rng: int(rng.integers(10**6))).trajectories["agent"].info["task"]
    assert drawn == played(plain, tasks=lambda rng: int(rng.integers(10**6))).trajectories["agent"].info["task"]


def test_program_that_fails_on_an_answer_gets_the_error_reward():
    def trips(task, client):
        return json.loads(plain(task, client))

    episode = played(trips, error_reward=-1.0)
    assert episode.error is None and episode.rewards == {"agent": -1.0}
    assert "JSONDecodeError" in episode.trajectories["agent"].info["error"]
    assert "JSONDecodeError" in episode.program_error
    assert f"the program failed: {episode.program_error}" in str(episode) + episode._repr_html_()


def test_first_error_of_an_exception_group_is_reported():
    async def team(task, client):
        async def part(number):
            await client.chat.completions.create(**say("agent", str(number)))
            raise KeyError(number)

        async with asyncio.TaskGroup() as parts:
            for number in range(2):
                parts.create_task(part(number))

    assert re.match(r"KeyError: \d \(.*test_program.py:\d+\)", played(team).program_error)


def test_observation_window_around_a_program_is_rejected():
    windowed = ObservationWindow(fa.Program(plain), 40)
    windowed.reset(seed=0)
    try:
        raises(ForgeError, "whole messages, which cannot be shortened", windowed.observe, "agent")
    finally:
        windowed.close()


def test_exit_status_is_shown_in_the_printed_episode():
    episode = played(["sh", "-c", f"{CURL}; echo no disk >&2; exit 3"])
    assert episode.error is None and episode.rewards == {"agent": 0.0}
    assert "the program failed: it exited with 3, and it printed last 'no disk'" in str(episode)
    assert played(["sh", "-c", CURL]).program_error == ""


def test_error_shows_the_command_without_credentials():
    words = [sys.executable, "-c", "import time; time.sleep(600)", "--api-key", "hunter2", "postgres://me:hunter2@db"]
    message = played(words, timeout_s=1.0).error.message
    assert "--api-key '(hidden)'" in message and "hunter2" not in message


def test_command_with_relative_paths_gets_advice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CREW", str(tmp_path))
    Path("crew.py").write_text("print('here')")
    Path("bin").mkdir()
    for words in ("python crew.py", "sh $CREW/crew.py", "./crew.py"):
        assert f"write {tmp_path}/crew.py, or send the file by files=" in played(words).error.message
    assert f"for its module crew put {tmp_path} on PYTHONPATH" in played("python -m crew").error.message
    for words, files in (("sh bin", {}), ("sh crew.py", {"crew.py": b"exit 1"})):
        assert "folder of its own" not in played(words, files=lambda task, files=files: files).error.message


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"models": ["gpt-4o"]}, "Give agents by model name, as in {'gpt-4o': 'agent'}"),
        ({"reward": "exact"}, "reward='exact' is not a function"),
        ({"reward": lambda result: 1.0}, "reward <lambda> must take (task, result)"),
        ({"tasks": lambda: 3}, "tasks <lambda> must take (rng)"),
        ({"reward": crew}, "reward= is async. Give a function"),
        ({"timeout_s": "60"}, "timeout_s='60' is not a number"),
        ({"max_sampled_tokens": "9"}, "max_sampled_tokens='9' is not a number"),
    ],
)
def test_arguments_of_wrong_types_are_rejected(wrong, told):
    raises(TypeError, re.escape(told), fa.Program, plain, **wrong)


def test_reward_function_with_swapped_arguments_is_rejected():
    for reward in (lambda result, task: 1.0, lambda result, answer: 1.0, lambda completion, task: 1.0):
        raises(TypeError, r"It is called with \(task, result\), in this order", fa.Program, plain, reward=reward)
    for reward in (lambda task, result: 1.0, lambda row, answer: 1.0, lambda task, *more: 1.0, lambda *both: 1.0, max):
        fa.Program(plain, reward=reward)


def test_tasks_without_numbered_items_are_rejected():
    class Table:
        def __len__(self):
            return 3

        def __getitem__(self, column):
            raise KeyError(column)

    assert re.search(r"tasks\[\d\] of .*, a Table, failed with KeyError", played(plain, tasks=Table()).error.message)


def test_verifiers_read_fields_of_tasks_and_results():
    @dataclass
    class Task:
        answer: str
        parts: tuple[Found, ...]

    def program(task, client):
        return [Found(said=plain(task.answer, client))]

    info = played(program, tasks=[Task("7", (Found(said="-"),))]).trajectories["agent"].info
    assert (info["answer"], info["parts"], info["result"]) == ("7", [{"said": "-"}], [{"said": "solved"}])


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (lambda task, client: "nothing", "ended before it asked any model: it returned 'nothing'"),
        (lambda task, client: 1 / 0, "ended before it asked any model: it raised ZeroDivisionError"),
        (lambda task, client: crew(str(task), client), "function that returned a coroutine. Write it as async"),
        (lambda task, client: client.chat.completions.create(**say("gpt-5", "-")), "this episode has no model 'gpt-5'"),
        ("sh -c 'echo thanks; echo no key >&2; exit 3'", "it exited with 3, and it printed last 'no key'"),
    ],
)
def test_failure_without_a_model_is_an_environment_error(program, says):
    episode = played(program)
    assert episode.error.where == "reset" and says in episode.error.message


def test_unknown_model_after_other_calls_is_named():
    async def two(task, client):
        await client.chat.completions.create(**say("planner", "-"))
        await client.chat.completions.create(**say("gpt-5", "-"))
        return 1.0

    episode = played(two, agents=("planner", "solver"))
    assert "this episode has no model 'gpt-5'" in episode.program_error
    assert played(two, agents=("planner", "solver"), models={"gpt-5": "solver"}).rewards["solver"] == 1.0
    raises(ValueError, "'editor'", fa.Program, two, models={"gpt-5": "editor"})


@pytest.mark.parametrize("kind", ["async", "blocks the loop", "thread"])
def test_hanging_program_is_reported_with_its_line(kind, monkeypatch):
    done, hangs, next_of = threading.Event(), threading.Event(), fa.Program._next

    def impatient(env):
        if env._answers and env._program is not crew:
            assert hangs.wait(60)
            env._timeout_s = 0.5
        return next_of(env)

    monkeypatch.setattr(fa.Program, "_next", impatient)

    async def sleeps(task, client):
        await client.chat.completions.create(**say("agent", "-"))
        hangs.set()
        if kind == "async":
            await asyncio.sleep(60)
        else:
            done.wait(60)

    def waits(task, client):
        plain(task, client)
        hangs.set()
        done.wait(60)

    try:
        episode = played(waits if kind == "thread" else sleeps)
        error = episode.trajectories["agent"].info["error"]
        assert "no call and no end of the program within 0.5 s" in error and "test_program.py" in error
        assert ("blocks the event loop" in error) is (kind == "blocks the loop")
        assert played(crew, **CREW).rewards["solver"] == 1.0
    finally:
        done.set()


def test_program_without_a_call_times_out(monkeypatch, tmp_path):
    begun, next_of = tmp_path / "begun", fa.Program._next

    def impatient(env):
        while not begun.exists():
            time.sleep(0.01)
        begun.unlink()
        env._timeout_s = 0.3
        return next_of(env)

    monkeypatch.setattr(fa.Program, "_next", impatient)

    async def never(task, client):
        begun.touch()
        await asyncio.sleep(60)

    episode = played(never)
    assert (episode.error.where, episode.error.kind) == ("reset", "TimeoutError")
    assert "It stands at" in episode.error.message and "test_program.py" in episode.error.message
    episode = played(f"sh -c 'echo Retrying; touch {begun}; sleep 60'")
    assert "and it printed last 'Retrying'" in episode.error.message


def test_calls_and_tokens_are_limited():
    ended = []

    async def endless(task, client):
        try:
            while True:
                await client.chat.completions.create(**say("agent", "-"))
        finally:
            ended.append(True)

    episode = played(endless, max_turns=5, error_reward=-1.0)
    assert (len(episode.turns), episode.end_reason) == (5, "truncated")
    assert episode.rewards == {"agent": -1.0}, "a model that cannot solve a task gains nothing by using up its calls"
    assert "more than 5 calls" in episode.trajectories["agent"].info["cut"]
    assert holds_within(60, lambda: ended)


def test_token_limit_includes_reasoning_and_notes():
    def endless(task, client):
        while True:
            plain(task, client)

    notes = Decision(action="", response_ids=(1,) * 5, logprobs=(-1.0,) * 5)
    first = Decision(action="", response_ids=(1,) * 4, logprobs=(-1.0,) * 4, reasoning_tokens=3, notes=notes)
    env = fa.Program(endless, max_sampled_tokens=10)
    env.reset(seed=0)
    for about, over in ((first.about(), False), ({"completion_tokens": 1}, True)):
        env.about_answer("agent", about)
        env.step("x")
        assert env.truncations["agent"] == over
    assert env.infos["agent"]["cut"] == "10 tokens were sampled"


@pytest.mark.parametrize("kind", ["async", "thread"])
def test_concurrent_programs_get_their_own_answers(kind):
    count, agents = 50, ("planner", "solver")
    meet, together = threading.Barrier(count, timeout=600), asyncio.Barrier(count)

    async def crew(task, client):
        plan = await client.chat.completions.create(**say("planner", f"Plan {task}."))
        await together.wait()  # all of them hold a connection by now
        answer = await client.chat.completions.create(**say("solver", plan.choices[0].message.content))
        return float(answer.choices[0].message.content == f"<<Plan {task}.>>")

    def crew_of_threads(task, client):
        plan = client.chat.completions.create(**say("planner", f"Plan {task}."))
        meet.wait()
        answer = client.chat.completions.create(**say("solver", plan.choices[0].message.content))
        return float(answer.choices[0].message.content == f"<<Plan {task}.>>")

    async def many():
        program = crew if kind == "async" else crew_of_threads
        envs = [fa.Program(program, agents=agents, tasks=range(1000), timeout_s=600.0) for _ in range(count)]
        policies = dict.fromkeys(agents, fa.Scripted(lambda seen: f"<{seen}>"))
        try:
            return await asyncio.gather(*(play(env, policies, seed=n) for n, env in enumerate(envs)))
        finally:
            for env in envs:
                env.close()

    episodes = asyncio.run(many())
    assert all(episode.error is None and episode.rewards == {"planner": 1.0, "solver": 1.0} for episode in episodes)


@pytest.mark.parametrize("fails", [False, True])
def test_episodes_of_a_dead_gateway_are_played_again(fails):
    died = []

    async def survives(task, client):
        await client.chat.completions.create(**say("agent", "one"))
        if len(died) < 2:  # an episode each
            died.append(gateway())
            died[-1]._thread.call(died[-1]._thread._loop.stop)
            died[-1]._thread._thread.join(60)
            if fails:
                raise OSError("no answer")
        await client.chat.completions.create(**say("agent", "two"))
        return 1.0

    def group(retries):
        rollout = Rollout(
            make_env=lambda: fa.Program(survives, timeout_s=600.0),
            env_id="-",
            policies=fa.Scripted(lambda seen: "-"),
            retries=retries,
        )
        return asyncio.run(rollout.group(0, 1)).episodes[0]

    lost = group(0)
    assert (lost.error.where, lost.error.kind, len(lost.turns)) == ("step", "NotReadyError", 1)
    assert "the gateway has ended" in lost.error.message
    again = group(1)
    assert again.error is None and again.rewards == {"agent": 1.0} and len(again.turns) == 2
    assert not died[0].alive and gateway() not in died
    raises(OSError, r"refused|reset", socket.create_connection, ("127.0.0.1", died[0].port), 2)


def test_episode_leaves_the_event_loop_only_to_wait():
    class Noted(fa.Program):
        async def off_loop(self, where, call, *args, **kwargs):
            def noted():
                here = threading.current_thread() is threading.main_thread()
                requests.append((where, "here" if here else "beside"))
                return call(*args, **kwargs)

            return await super().off_loop(where, noted)

    requests = []
    rollout = Rollout(make_env=lambda: Noted(crew, **CREW), env_id="-", policies=fa.Scripted(lambda seen: "solved"))
    episode = asyncio.run(rollout.group(0, 1)).episodes[0]
    assert episode.error is None and len(episode.turns) == 2
    assert [where for where, thread in requests if thread == "beside"] == ["reset", "step", "step"]
    assert requests[-1] == ("close", "here") and ("observe", "here") in requests  # it had ended


@pytest.mark.parametrize("kind", ["function", "command"])
def test_dead_engine_ends_its_programs(kind, tmp_path):
    ended_well, tokens = threading.Event(), []

    async def two(task, client):
        tokens.append((str(client.base_url), client.api_key))
        try:
            while True:
                await client.chat.completions.create(**say("agent", "-"))
        finally:
            ended_well.set()

    answers = iter(["first"])

    def decide(seen):
        if (answer := next(answers, None)) is None:
            raise ActorDiedError("engine m died")
        return answer

    twice = COMMAND.replace("sys.exit", "urllib.request.urlopen(request); sys.exit")
    noted = f"import os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n{twice}"
    program = two if kind == "function" else [sys.executable, "-c", noted]
    rollout = Rollout(
        make_env=lambda: fa.Program(program, tasks=[{"question": "-"}], timeout_s=600.0),
        env_id="-",
        policies=fa.Scripted(decide),
    )
    with pytest.raises(ActorDiedError, match="engine m died"):  # the run replaces it and plays the group again
        asyncio.run(rollout.group(0, 1))
    if kind == "command":
        assert ended_within([int((tmp_path / "pid").read_text())], 60)
        return
    assert ended_well.wait(60)
    from openai import APIStatusError, OpenAI

    ((url, token),) = tokens
    with OpenAI(base_url=url, api_key=token, max_retries=0) as late, pytest.raises(APIStatusError, match="is over"):
        late.chat.completions.create(**say("agent", "-"))


COMMAND = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = {"model": "agent", "messages": [{"role": "user", "content": task["question"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("answer.txt", "w").write(said)
print("thought about it")
sys.exit(0 if said == "solved" else 3)
"""


def test_command_line_is_scored_by_status_or_files():
    words, tasks = [sys.executable, "-c", COMMAND], [{"question": "Well?"}]
    episode = played(words, tasks=tasks)
    assert episode.rewards == {"agent": 1.0} and episode.turns[0].observation == "Well?"
    assert result_of(episode) == {"exit_status": 0, "stdout": "thought about it\n", "stderr": ""}
    folders = []

    def judged(task, finished):
        folders.append(finished.folder)
        return float((finished.folder / "answer.txt").read_text() == "wrong") + finished.exit_status

    wrong = fa.Scripted(lambda seen: "wrong")
    assert played(words, wrong, tasks=tasks, reward=judged).rewards == {"agent": 4.0}
    assert not folders[0].exists()
    with pytest.raises(ForgeError, match="before it asked any model.*no-such-program-here.*No such file"):
        fa.Program("no-such-program-here").reset(seed=0)


# Leaves a process of its session and one of a session of its own, which lost its parent, and says which.
LEAVES = """
import os, subprocess, sys, time
left = [subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL).pid]
ours, theirs = os.pipe()
if os.fork() == 0:
    os.setsid()
    if (pid := os.fork()) == 0:
        os.execlp("sleep", "sleep", "600")
    os.write(theirs, str(pid).encode())
    os._exit(0)
os.wait()
left.append(int(os.read(ours, 99)))
open(sys.argv[1], "w").write(" ".join(map(str, left)))
"""


@pytest.mark.parametrize("how", ["hangs", "ends", "is killed"])
def test_command_ends_with_all_its_descendants(tmp_path, how, monkeypatch):
    file, next_of = tmp_path / "left", fa.Program._next

    def impatient(env):
        if how == "hangs" and env._answers:
            assert holds_within(60, lambda: file.exists() and file.read_text())
            env._timeout_s = 0.5
        return next_of(env)

    monkeypatch.setattr(fa.Program, "_next", impatient)
    farewell = "import signal; signal.signal(15, lambda *_: open(sys.argv[1] + '-told', 'w').close())"
    last = {"hangs": "time.sleep(600); time.sleep(600)", "ends": "sys.exit(7)", "is killed": "os.kill(os.getpid(), 9)"}
    script = COMMAND.replace('sys.exit(0 if said == "solved" else 3)', f"{farewell}\n{LEAVES}\n{last[how]}")
    episode = played([sys.executable, "-c", script, str(file)], tasks=[{"question": "-"}])
    left = [int(pid) for pid in file.read_text().split()]
    assert len(left) == 2 and ended_within(left, 60) and (tmp_path / "left-told").exists() == (how == "hangs")
    info = episode.trajectories["agent"].info
    assert episode.error is None and episode.rewards == {"agent": 0.0}
    assert (
        "within 0.5 s. It stands at process" in info["error"]
        if how == "hangs"
        else (info["result"]["exit_status"] == {"ends": 7, "is killed": -9}[how])
    )


def test_commands_end_with_the_process_that_runs_their_episodes(tmp_path):
    script = f"{LEAVES}\n{COMMAND}"  # nobody answers its call
    ours = f"""
import os, sys
import forge_agents as fa
from forge_agents.sandbox import Sandbox
from forge_agents.sandbox import SandboxLimits
fa.Program([sys.executable, "-c", {script!r}, {str(tmp_path / "left")!r}], tasks=[{{"question": "-"}}]).reset(seed=0)
os.kill(os.getpid(), 9)
"""
    there = {**os.environ, "TMPDIR": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", ours], timeout=300, check=False, env=there).returncode == -9
    left = [int(pid) for pid in (tmp_path / "left").read_text().split()]
    assert len(left) == 2 and ended_within(left, 60)
    assert holds_within(60, lambda: not list(tmp_path.glob("forge-program-*")))


def test_command_finds_its_files_and_invalid_files_are_named():
    script = COMMAND.replace("sys.exit", "print(open('a/b.bin', 'rb').read()); sys.exit")
    command = [sys.executable, "-c", script]
    episode = played(command, tasks=[{"question": "?"}], files=lambda task: {"a/b.bin": b"\xff"})
    assert "b'\\xff'" in result_of(episode)["stdout"]
    for wrong, said in (({"a": "b"}, "returned {'a': 'b'}. Return bytes by relative path"), ({"/a": b""}, "must be")):
        with pytest.raises((ForgeError, ValueError), match=re.escape(said)):
            fa.Program(command, files=lambda task, wrong=wrong: wrong).reset(seed=0)
    raises(TypeError, "A function has no folder", fa.Program, plain, files=dict)


def test_deeply_nested_folders_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    deep = "for _ in range(1500): os.mkdir('d'); os.chdir('d')"
    script = COMMAND.replace("print(", f"\nimport os\n{deep}\nprint(")
    assert played([sys.executable, "-c", script], tasks=[{"question": "-"}]).rewards == {"agent": 1.0}
    assert not list(tmp_path.iterdir())


def test_folder_with_readonly_folders_is_removed():
    folder = Path(tempfile.mkdtemp())
    (folder / "work" / "mod" / "x").mkdir(parents=True)
    (folder / "work" / "mod" / "x" / "a.go").write_text("-")
    for path, mode in (("work/mod/x", 0o555), ("work/mod", 0o000), ("work", 0o777), (".", 0o777)):
        (folder / path).chmod(mode)
    nobody = ""
    if os.geteuid() == 0:  # whom no mode keeps from anything
        for path, _, _ in [*os.walk(folder)]:
            os.chown(path, 65534, 65534)
        nobody = "import os; os.setuid(65534); "
    words = "from forge_agents.sandbox.sandbox import remove_folder; from pathlib import Path; "
    words = f"{words}{nobody}remove_folder(Path({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", words], check=True, timeout=300)
    assert not (folder / "work").exists()
    shutil.rmtree(folder, ignore_errors=True)  # where it lies belongs to another


def test_endless_output_fills_neither_disk_nor_memory(monkeypatch):
    from forge_agents.sandbox import sandbox

    monkeypatch.setattr(sandbox, "FREE_FILE_MB", 1)
    script = COMMAND.replace("print(", "print('x' * 10**7); open('big', 'w').write('y' * 10**7); print(")
    result = result_of(played([sys.executable, "-c", script], tasks=[{"question": "-"}]))
    assert result["exit_status"] == 1 and result["stdout"] == "x" * 1999 + "\n"
    assert "File too large" in result["stderr"]


def test_ignored_sampling_settings_are_warned_about():
    def requested(**request):
        return requested_sampling(policy, request, engine)

    policy, engine = fa.Sampling(temperature=1.0, max_tokens=50, stop=("a",)), type("Engine", (), {})()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")  # as where another module has changed the filters between two answers
        first, again = (requested(asked={"temperature": 0.2}, max_tokens=20, stop=["b", "a"]) for _ in range(2))
    assert first == again and (first.temperature, first.max_tokens, first.stop) == (1.0, 20, ("a", "b"))
    (warning,) = warned
    assert "asks for temperature=0.2, but the policy" in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert requested(asked={"temperature": 1, "presence_penalty": 0, "logit_bias": {}}, max_tokens=90) == policy
    with pytest.warns(RuntimeWarning, match="asks for a seed, which is not followed"):
        assert requested(asked={"seed": 7}) == policy


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ((lambda task: 1,), TypeError, "must take"),
        ((3,), TypeError, "a function"),
        (("",), ValueError, "empty command line"),
        (("python a.py && python b.py",), ValueError, r"but && is for one. Give \["),
        (("python a.py 'a && b' >out.txt",), ValueError, r"but >out.txt is for one"),
        (("python a.py 2>&1 | tee out",), ValueError, "but 2>&1 is for one"),
        (("cd crew; python main.py",), ValueError, "but crew; is for one"),
        (("python a.py&",), ValueError, "but a.py& is for one"),
        (("python a.py>out.txt",), ValueError, "but a.py>out.txt is for one"),
        (("find . -exec cat {} ; && b",), ValueError, "but && is for one"),
        (("echo a ; find .",), ValueError, "but ; is for one"),
    ],
)
def test_invalid_program_is_rejected_at_once(arguments, error, says):
    raises(error, says, fa.Program, *arguments)


@pytest.mark.parametrize(
    "command",
    [
        "sh -c 'a > b; c'", 'python -c "1 > 0 and 2"', r"python a.py \> 'x' http://h/?a=1&b=2", "'-->'",
        "find . -exec cat {} ;", r"find . -exec cat {} \;", "find . -okdir sh -c 'a; b' ; -exec rm {} ; -print",
    ],
)  # fmt: skip
def test_shell_characters_are_allowed_in_quotes_and_words(command):
    assert fa.Program(command).possible_agents == ["agent"]


def test_task_with_lone_surrogates_reaches_a_command():
    with pytest.raises(ForgeError, match="it printed last 'half an emoji: \\ufffd'"):
        fa.Program(["cat"], tasks=["half an emoji: \ud83d"]).reset(seed=0)


def test_unpicklable_argument_is_reported_before_a_worker_starts():
    fa.register("test/Sent-v0", entry_point=fa.Program, program=crew, reward=lambda task, result: 1.0)
    with pytest.raises(ForgeError, match="one of its arguments cannot be sent there.*lambda"):
        fa.make("test/Sent-v0", isolation="process")


def test_programs_pass_the_environment_checks():
    fa.register("test/Crew-v0", entry_point=fa.Program, program=crew, **CREW)
    report = fa.check_env("test/Crew-v0", episodes=2)
    assert report.ok


def test_command_line_gets_no_secret_variables(monkeypatch):
    secret = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "ANTHROPIC_AUTH_TOKEN", "DB_PASSWORD")
    for name in (*secret, "RIVAL_KEY", "DB_PASS", "MYSQL_PWD", "GH_PAT", "GPG_PASSPHRASE", "SSHPASS", "APIKEY_2"):
        monkeypatch.setenv(name, "do-not-tell")
    for name in ("DATABASE_URL", "SSH_AUTH_SOCK", "DOCKER_AUTH_CONFIG", "NPM_AUTH"):
        monkeypatch.setenv(name, "do-not-tell")
    monkeypatch.setenv("SETTING", "postgres://me:do-not-tell@db/x")
    for name in ("PLAIN", "MAX_TOKENS", "TOKENIZERS_PARALLELISM", "KEYBOARD"):
        monkeypatch.setenv(name, f"told-{name}")
    script = COMMAND.replace("sys.exit", "import os; print(*os.environ.values()); sys.exit")
    episode = played([sys.executable, "-c", script], tasks=[{"question": "Well?"}])
    printed = result_of(episode)["stdout"]
    assert printed.count("told-") == 4 and "do-not-tell" not in printed


# What it reaches for; each name that it prints was out of reach.
REACHES = """
import json, os, socket, sys
def connected(host, port):
    return socket.create_connection((host, int(port)), 2)
given, parent, other = sys.argv[1:]
attempts = {
    "a file of the host": lambda: open(given + "/secret"),
    "the system's settings": lambda: open("/etc/passwd"),
    "writing to itself": lambda: open(__file__, "a"),
    "our environment": lambda: os.environ["PLAIN"],
    "another server of the host": lambda: connected("127.0.0.1", other),
    "the internet": lambda: connected("192.0.2.1", 80),
    "local sockets": lambda: socket.socket(socket.AF_UNIX),
    "our process": lambda: os.kill(int(parent), 0),
}
for name, attempt in attempts.items():
    try:
        attempt()
    except (OSError, KeyError):
        continue
    print("reached", name)
import httpx, openai
"""


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A folder of the host with a secret, a folder with a program, a server."""
    (tmp_path / "secret").write_text("secret")
    monkeypatch.setenv("PLAIN", "told")
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "crew.py").write_text(REACHES + COMMAND.replace("import json, os, sys, ", "import "))
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield tmp_path, str(os.getpid()), str(server.getsockname()[1])


@needs_namespaces
def test_isolated_command_reaches_only_the_models(outside):
    folder, parent, port = outside
    words = ["python", str(folder / "code" / "crew.py"), str(folder), parent, port]
    saved = {}

    def judged(task, finished):
        left = (path for path in finished.folder.rglob("*") if path.is_file())
        saved.update({str(path.relative_to(finished.folder)): path.read_text() for path in left})
        return float(finished.exit_status == 0)

    box = Sandbox(import_paths=(str(folder / "code"),), folders=("/app",))
    given = {"tasks": [{"question": "Well?"}], "files": lambda task: {"app/asked": task["question"].encode()}}
    episode = played(words, **given, sandbox=box, reward=judged)
    result = result_of(episode)
    assert result == {"exit_status": 0, "stdout": "thought about it\n", "stderr": ""}
    assert saved == {"answer.txt": "solved", "app/asked": "Well?"}
    assert episode.rewards == {"agent": 1.0} and episode.turns[0].observation == "Well?"
    free = result_of(played([sys.executable, *words[1:]], tasks=[{"question": "Well?"}]))
    reached = {"a file of the host", "our environment", "another server of the host", "local sockets", "our process"}
    assert {f"reached {name}" for name in reached} <= set(free["stdout"].splitlines())


@needs_namespaces
@pytest.mark.parametrize(
    ("does", "limits", "limit"),
    [
        ("x = bytearray(1 << 30)", {}, "MemoryError"),
        ("for _ in range(4):\n    if os.fork() == 0: held = bytearray(60 << 20); break\ntime.sleep(600)",
         {"memory_mb": 150}, "memory_mb"),
        ("while True: pass", {"cpu_s": 1}, "cpu_s"),
        ("open('big', 'wb').write(bytes(2 << 20))", {"file_mb": 1}, "File too large"),
    ],
)  # fmt: skip
def test_limits_of_an_isolated_command_are_enforced_and_named(does, limits, limit):
    box = Sandbox(limits=SandboxLimits(**limits))
    words = ["python", "-c", COMMAND.replace("sys.exit", f"\nimport time\n{does}\nsys.exit")]
    episode = played(words, tasks=[{"question": "-"}], sandbox=box)
    result = result_of(episode)
    assert episode.rewards == {"agent": 0.0} and result["exit_status"] != 0
    assert result.get("limit") == limit or limit in result["stderr"]


@needs_namespaces
@pytest.mark.parametrize("shared", [True, False])
def test_isolated_command_imports_nothing_from_its_working_folder(shared, tmp_path):
    code = (
        "import site, subprocess, sys\n"
        "from pathlib import Path\n"
        "user = Path(site.getusersitepackages())\n"
        "user.mkdir(parents=True)\n"
        "Path('in').mkdir()\n"
        "for file in ('colorsys.py', user / 'usercustomize.py'):\n"  # as a model's command could
        "    Path(file).write_text('import os; os._exit(9)')\n"
        "Path('in/child.py').write_text('import colorsys')\n"
        "import colorsys\n"
        "assert subprocess.run([sys.executable, 'in/child.py']).returncode == 0\n"
        "print(colorsys.__file__)\n"
    )
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    (tmp_path / "agent.py").write_text(COMMAND.replace("sys.exit", f"\n{code}\nsys.exit"))
    box = Sandbox(import_paths=(str(tmp_path),)) if shared else Sandbox()
    given = {} if shared else {"files": lambda task: {"code/agent.py": (tmp_path / "agent.py").read_bytes()}}
    words = ["python", str(tmp_path / "agent.py") if shared else "code/agent.py"]
    episode = played(words, tasks=[{"question": "-"}], sandbox=box, **given)
    assert not episode.error, episode.error
    result = result_of(episode)
    assert result["exit_status"] == 0, result
    assert result["stdout"].splitlines()[-1].endswith("/colorsys.py") and "/box" not in result["stdout"]


def test_command_does_not_run_without_isolation(monkeypatch):
    from forge_agents.sandbox import sandbox

    monkeypatch.setattr(sandbox, "_why_no_namespaces", lambda: "user namespaces do not work here")
    with pytest.raises(sandbox.SandboxUnavailable, match="To isolate a command line, allow user namespaces"):
        fa.Program("true", sandbox=Sandbox(allow_weaker=True)).reset(seed=0)
    raises(TypeError, "A function runs in this process", fa.Program, plain, sandbox=Sandbox())


def test_command_that_cannot_start_leaves_nothing(monkeypatch, tmp_path):
    from forge_agents.sandbox import sandbox

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sandbox.subprocess, "Popen", lambda *words, **options: open("/no/such/file"))  # noqa: PTH123, SIM115
    env = fa.Program(["sleep", "600"])
    with pytest.raises(FileNotFoundError):
        env.reset(seed=0)
    env.close()
    assert not list(tmp_path.iterdir())


def test_missing_client_library_is_reported_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    for program in (crew, plain):
        episode = played(program, agents=("planner", "solver", "agent"), timeout_s=600.0)
        assert "openai" in episode.error.message


def test_failed_fork_does_not_affect_the_original(monkeypatch):
    env = fa.Program(plain)
    env.reset(seed=0)
    monkeypatch.setattr(fa.Program, "_start", lambda twin: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        env.fork()
    monkeypatch.undo()
    env.step("answered")
    assert env.terminations["agent"] and env.infos["agent"]["result"] == "answered"
    env.close()


def test_clients_share_one_default_tls_context():
    from forge_agents.programs import running

    context = running._http_settings()["verify"]
    assert context is running._http_settings()["verify"] and context.verify_mode is ssl.CERT_REQUIRED
    assert context.cert_store_stats() == ssl.create_default_context().cert_store_stats()
