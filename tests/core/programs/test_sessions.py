"""Rewards by session: several conversations of one agent in an episode, each with its own reward."""

import asyncio
import uuid

import pytest

import forge_agents as fa

from .helpers import played  # noqa: TID252 (tests are no installed package)


def ask(client, text, session, model="solver"):
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    headers = {} if session is None else {"X-Session-ID": session}
    return client.chat.completions.create(model=model, messages=messages, extra_headers=headers)


async def best_of(task, client):
    async def attempt(name):
        reply = await ask(client, f"Say {name}.", name)
        return reply.choices[0].message.content

    await ask(client, "Plan.", None, "planner")
    names = ["b", "a", "c"]
    return dict(zip(names, await asyncio.gather(*map(attempt, names)), strict=True))


ECHO = fa.Scripted(lambda observation: observation.removeprefix("Say ").removesuffix("."))
TEAM = {"agents": ("planner", "solver"), "policy": ECHO}


def by_attempt(task, result):
    return {"planner": 0.25, "solver": {name: {"a": 1.0, "b": 0.5, "c": 0.0}[text] for name, text in result.items()}}


def test_sessions_sent_at_once_have_their_own_rewards():
    episode = played(best_of, **TEAM, reward=by_attempt)
    solver = episode.trajectories["solver"]
    assert episode.error is None and episode.rewards == {"planner": 0.25, "solver": 0.5}
    assert {part.turns[0].action: part.reward for part in solver.sessions} == {"a": 1.0, "b": 0.5, "c": 0.0}
    assert [turn.session for turn in solver.turns] == [turn.branch for turn in solver.turns] == [0, 1, 2]
    assert episode.trajectories["planner"].session_rewards is None
    assert "conversation" not in solver.info
    rewards = ", ".join(f"{reward:+g}" for reward in solver.session_rewards)
    assert f"+0.5 (scripted), the mean of sessions: {rewards}" in str(episode)
    assert fa.Episode.from_json(episode.to_json()) == episode


def test_result_may_hold_the_rewards_by_session():
    async def program(task, client):
        await best_of(task, client)
        return {"solver": {"a": 3, "b": False, "c": 0.0}}

    assert played(program, **TEAM).rewards == {"planner": 0.0, "solver": 1.0}


def test_mapping_in_a_result_is_no_reward_without_named_sessions():
    async def program(task, client):
        await ask(client, "Hello.", None)
        return {"solver": {"calls": 5}}

    episode = played(program, **TEAM)
    assert episode.error is None and episode.rewards == {"planner": 0.0, "solver": 0.0}


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ({"a": 1.0, "b": "good", "c": 0.0}, "is {'solver': {'a': 1.0, 'b': 'good', 'c': 0.0}}, which is no reward"),
        ({"a": 1.0, "b": float("nan"), "c": 0.0}, "nan"),
    ],
)
def test_rewards_by_session_that_are_no_numbers_are_refused(rewards, message):
    async def program(task, client):
        for name in "bac":
            await ask(client, "Hello.", name)

    episode = played(program, **TEAM, reward=lambda task, result: {"solver": rewards})
    assert episode.error is not None and message in episode.error.message, episode.error


@pytest.mark.parametrize(
    ("named", "paid", "message"),
    [
        ("bac", {"a": 1.0, "b": 0.5}, "names the sessions 'a', 'b' of 'solver', but its calls named 'b', 'a', 'c'"),
        ("a", {"a": 1.0, "b": 0.5}, "names the sessions 'a', 'b' of 'solver', but its calls named 'a'"),
        ("a", {}, "names the sessions none of 'solver', but its calls named 'a'. Return rewards of 'a' as well"),
        (["a", None], {"a": 1.0}, "names the sessions 'a' of 'solver', but its calls named 'a', ''. Every call"),
    ],
)
@pytest.mark.parametrize("as_result", [False, True])
def test_other_sessions_than_rewarded_are_a_failure_of_the_program(named, paid, message, as_result):
    """A command that a model wrote can cause them, so the episode counts as an error of the program would."""

    async def program(task, client):
        for name in named:
            await ask(client, "Hello.", name)
        return {"planner": 1.0, "solver": paid}

    reward = None if as_result else lambda task, result: {"planner": 1.0, "solver": paid}
    episode = played(program, **TEAM, reward=reward, error_reward=-1.0)
    assert episode.error is None and episode.rewards == {"planner": -1.0, "solver": -1.0}
    assert message in episode.program_error and message in episode.trajectories["solver"].info["error"]


def test_agent_without_calls_has_no_sessions():
    async def program(task, client):
        await ask(client, "Hello.", None, "planner")

    episode = played(program, **TEAM, reward=lambda task, result: {"planner": 1.0, "solver": {}})
    assert episode.rewards == {"planner": 1.0, "solver": 0.0} and episode.trajectories["solver"].sessions == ()


def test_session_continues_only_its_own_answers():
    async def program(task, client):
        history = [{"role": "user", "content": "Hello."}]
        for session in ("a", "b"):
            reply = await ask(client, history, session)
        history = [*history, {"role": "assistant", "content": reply.choices[0].message.content}]
        for session in ("b", "a", "c"):
            await ask(client, [*history, {"role": "user", "content": "Go on."}], session)

    episode = played(program, **TEAM, reward=lambda task, result: {"solver": {"a": 1.0, "b": 2.0, "c": 3.0}})
    turns = episode.trajectories["solver"].turns
    assert [(turn.session, turn.branch) for turn in turns] == [(0, 0), (1, 1), (1, 1), (0, 0), (2, 2)]
    parts = episode.trajectories["solver"].sessions
    assert [[turn.reward for turn in part.turns] for part in parts] == [[0.0, 1.0], [0.0, 2.0], [3.0]]


def test_fork_pays_the_same_sessions():
    env = fa.Program(best_of, agents=("planner", "solver"), reward=by_attempt)
    env.reset(seed=0)
    env.step("plan")
    copy = env.fork()
    for each in (env, copy):
        for _ in range(3):
            each.step("a")
        assert each.infos["solver"]["conversation"] == {"session_rewards": [1.0, 1.0, 1.0]}
        each.close()


def test_names_of_sessions_may_be_random_in_a_fork():
    async def program(task, client):
        for number in range(2):
            await ask(client, f"Say {number}.", uuid.uuid4().hex, "agent")
        return 1.0

    env = fa.Program(program)
    env.reset(seed=0)
    env.step("0")
    copy = env.fork()
    copy.step("1")
    assert copy.rewards == {"agent": 1.0}
    for each in (env, copy):
        each.close()


def test_failed_program_pays_no_sessions():
    async def program(task, client):
        await best_of(task, client)
        raise ValueError("no")

    episode = played(program, **TEAM, reward=by_attempt, error_reward=-1.0)
    assert episode.rewards == {"planner": -1.0, "solver": -1.0}
    assert episode.trajectories["solver"].session_rewards is None
