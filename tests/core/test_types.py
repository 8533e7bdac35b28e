"""Episodes as text, HTML and stored JSON."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

import forge_agents as fa
from forge_agents.types import Compaction, EpisodeError, NewMessages, ToolCall, Usage, VersionSpan

HOSTILE = "\x1b[2J<script>alert(1)</script>\u202e\n3. p9 (cheat)\n  reward   +9"
TURN = fa.Turn(
    agent="a",
    index=0,
    observation="Which digit?",
    action=HOSTILE,
    reasoning="Nine <script>\x1b[2J",
    raw_reasoning="<think>Nine <script>",
    reasoning_tokens=1,
    reward=1.5,
    terminated=True,
    truncated=True,
    policy="p",
    tool_calls=(ToolCall(name="look", arguments={"at": [1.5, "\ud83d"]}), ToolCall(name="", error="no")),
    branch=1,
    session=1,
    forked_from=4,
    new_messages=NewMessages(messages=(("system", "\u202e"), ("user", "Which digit?")), only_results=True),
    prompt_ids=(1, 2),
    response_ids=(3, 4),
    logprobs=(-0.1 - 0.2, -math.inf),
    versions=(VersionSpan(version=2, start=0, end=2),),
    finish_reason="length",
    generate_s=0.1,
    usage=Usage(prompt_tokens=3, completion_tokens=4),
    compaction=Compaction(how="window", turns=1, text="[gone]"),
    notes=fa.Turn(agent="a", index=0, observation="Write notes.", action="none", reward=0.0),
    info={"legal_actions": ["1", None], "deep": {"a": [1.5, True]}, "half": "\ud83d"},
)
SEAT = fa.Trajectory(
    agent="a", policy="p", turns=(TURN,), initial_reward=0.25, instructions="Reply.", env_id="e", seed=7,
    info={"b": 1}, session_rewards=(1.5, 2.0),
)  # fmt: skip
EPISODE = fa.Episode(
    env_id="my/Game-v0",
    seed=2**70,
    trajectories={"a": SEAT, "z": fa.Trajectory(agent="z", policy="q", turns=())},
    error=EpisodeError(where="step", kind="KeyError", message="'x'", trace="Traceback\n  here\n"),
    end_reason="error",
    duration_s=0.5,
)


def test_stored_episode_is_equal_to_the_original():
    again = fa.Episode.from_json(EPISODE.to_json())
    assert again == EPISODE and "\n" not in EPISODE.to_json()
    turn = again.trajectories["a"].turns[0]
    assert isinstance(turn.usage, Usage) and isinstance(turn.versions[0], VersionSpan) and type(turn.logprobs) is tuple
    assert list(again.trajectories) == ["a", "z"]
    for field in fa.Turn.__dataclass_fields__:  # none is at its default, so that none can be lost unseen
        assert getattr(fa.Turn(agent="", index=1, observation="", action="", reward=0.0), field) != getattr(TURN, field)


def test_line_of_a_run_is_an_episode(tmp_path):
    from forge_trainers.records.run_folder import RunFolder

    run = RunFolder(tmp_path, {})
    run.keep_episodes(3, [EPISODE], [{"a": math.nan}], [{"a": [0.5]}], trained=["p"])
    run.close()
    line = (tmp_path / "episodes.jsonl").read_text()
    assert fa.Episode.from_json(line) == fa.Episode.from_json(line.encode()) == EPISODE
    old = json.loads(line)
    del old["format"]  # as runs wrote it before it had one
    assert fa.Episode.from_json(old) == EPISODE


def _changed(**fields):
    return {**EPISODE.as_json(), **fields}


def _changed_turn(**fields):
    return _changed(trajectories={"a": {**AGENT_ROW, "turns": [{**AGENT_ROW["turns"][0], **fields}]}})


AGENT_ROW = EPISODE.as_json()["trajectories"]["a"]


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "a JSON list"),
        ({}, "env_id: Field required"),
        (_changed(format=1), "format 1, but this version of forge_agents reads format 2"),
        (_changed(novel=1), "novel: Unexpected"),
        (_changed(end_reason="bored"), "end_reason: Input should be 'terminated'"),
        (_changed_turn(novel=1), r"trajectories.a.turns.0.novel: Unexpected"),
        (_changed_turn(reward="much"), r"turns.0.reward: Input should be a valid number"),
        (_changed_turn(reward=math.nan), "rewards"),
        (_changed_turn(logprobs=[]), "2 tokens with 0 logprobs"),
        (_changed_turn(usage={"prompt_tokens": 1}), "usage.completion_tokens: Field required"),
        (_changed(trajectories={"\x1b[2J": 1}), r"trajectories.\\x1b\[2J"),
    ],
)
def test_stored_value_of_another_format_is_rejected(stored, message):
    with pytest.raises(ValueError, match=message) as caught:
        fa.Episode.from_json(stored)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


def test_printed_episode_escapes_control_characters():
    text = str(EPISODE)
    assert text.splitlines()[0] == f"my/Game-v0, seed {2**70}"
    assert "a\n  prompt   Reply." in text
    assert "1. a (p, branch 1 from turn 5, session 1)\n  forgets  [gone]\n  reads    Which digit?\n" in text
    assert "\n  thinks   Nine" in text
    assert "\n  answers  \\x1b[2J<script>" in text
    assert "cut off  by max_tokens" in text and "\n  reward   +1.5\n" in text
    assert "failed in step\n  because  KeyError: 'x'\n  trace    Traceback\n             here\n" in text
    assert text.endswith("error after 1 turn\n  a        +1.75 (p), the mean of sessions: +1.5, +2\n  z        +0 (q)")
    assert all(char == "\n" or char.isprintable() for char in text)
    assert not re.search(r"^(3\. p9|  reward   \+9)", text, re.MULTILINE), "an answer cannot pass for a turn"
    assert repr(EPISODE).startswith("Episode(env_id='my/Game-v0'") and len(repr(EPISODE)) < 200


@pytest.mark.parametrize(
    ("info", "reasons"), [({"illegal": True}, 0), ({"error": np.zeros(2)}, 0), ({"error": "no such move"}, 1)]
)
def test_printed_reasons_are_texts_and_no_marks(info, reasons):
    trajectories = {"a": replace(EPISODE.trajectories["a"], info=info)}
    text = str(replace(EPISODE, error=None, trajectories=trajectories))
    assert text.count("because") == text.count("\n  because  no such move") == reasons


def test_notebook_output_escapes_markup():
    page = EPISODE._repr_html_()
    assert "&lt;script&gt;alert(1)" in page and "\x1b" not in page and "\u202e" not in page
    named = replace(EPISODE, env_id="<img src=x>", trajectories={"<b>": replace(SEAT, agent="<b>", policy="<i>")})
    assert set(re.findall(r"<(\w+)", page + named._repr_html_())) == {"pre"}


def test_episode_without_turns_is_printed():
    assert str(fa.Episode(env_id="", seed=1, trajectories={})) == "episode, seed 1\n\nterminated after 0 turns"
    full = fa.Episode(env_id="", seed=1, trajectories={}, end_reason="context")
    assert str(full).endswith("context after 0 turns: a conversation outgrew its model's context")


def test_turns_are_read_once_for_all_sessions():
    class Counted(tuple):
        reads = 0

        def __iter__(self):
            Counted.reads += 1
            return super().__iter__()

    turns = [fa.Turn(agent="a", index=n, observation="", action="", reward=0.0, session=n % 3) for n in range(9)]
    whole = fa.Trajectory(agent="a", policy="p", turns=Counted(turns), session_rewards=(1.0, 2.0, 3.0, *[0.0] * 1000))
    Counted.reads = 0
    parts = whole.sessions
    assert Counted.reads < 10 and len(parts) == 1003
    assert [[turn.index for turn in part.turns] for part in parts[:4]] == [[0, 3, 6], [1, 4, 7], [2, 5, 8], []]
    assert [part.reward for part in parts[:4]] == [1.0, 2.0, 3.0, 0.0]
