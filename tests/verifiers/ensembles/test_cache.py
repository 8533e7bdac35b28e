from dataclasses import replace

import numpy as np
import pytest

from forge_agents import Ensemble, Rule
from forge_agents.types import Compaction, NewMessages, ToolCall, Trajectory, Turn, Usage
from forge_verifiers import SelfConsistency
from forge_verifiers.ensemble.panel import ScoreCache, content_key


def said(text, *, seed=0, reward=0.0, info=None, **turn):
    one = Turn(agent="a", index=0, observation="?", action=text, reward=reward, **turn)
    return Trajectory(agent="a", policy="p", turns=(one,), env_id="t", seed=seed, info=info or {})


def counting(cost="model", name="judge", grade=lambda t: len(t.turns[-1].action) / 10):
    requests = []

    def judge(trajectory):
        requests.append(trajectory)
        return grade(trajectory)

    return Rule(judge, name=name, cost=cost), requests


def test_cache_key_covers_what_verifiers_may_read():
    base = said("x")
    others = [said("y"), said("x", seed=1), said("x", reward=1.0), said("x", info={"gold": 3})]
    others += [said("x", terminated=True), said("x", finish_reason="length")]
    others.append(said("x", tool_calls=(ToolCall(name="f"),)))
    others += [said("x", new_messages=NewMessages(messages=(("user", text),))) for text in "uv"]
    tokens = {"prompt_ids": (1,), "response_ids": (2, 3), "logprobs": (-1.0, -1.0)}
    short = said("x", **tokens)
    others += [short, said("x", **tokens, reasoning_tokens=1), said("x", notes=short.turns[0])]
    others += [said("x", notes=said("y").turns[0]), said("x", policy="p2"), said("x", session=1), said("x", branch=1)]
    others += [said("x", compaction=Compaction(how="window", turns=1, text=text)) for text in "uv"]
    others += [said("x", usage=Usage(prompt_tokens=1, completion_tokens=2)), said("x", prompt_ids=(1,))]
    others += [replace(base, policy="p2"), replace(base, session_rewards=(1.0,)), replace(base, instructions="brief")]
    assert len({*map(content_key, [base, *others])}) == 1 + len(others) == 24
    sampled = said("x", generate_s=2.0, prompt_ids=(4,), response_ids=(5, 6), logprobs=(-2.0, -1.0))
    assert content_key(sampled) == content_key(short) and len(content_key(base)) == 16


def test_cache_key_covers_any_info():
    zeros, other = np.zeros(2000), np.zeros(2000)
    other[1000] = 1  # its repr leaves this number out
    infos = [{"x": zeros}, {"x": other}, {(1, 2): zeros}, {(1, 2): other}, {1: "a", "b": 2}, {"x": lambda: 1}]
    keys = [content_key(said("x", info=info)) for info in infos]
    assert len(set(keys)) == len(infos)
    assert keys == [content_key(said("x", info=info)) for info in infos]


def test_equal_content_is_scored_once():
    judge, asked = counting()
    ensemble = Ensemble([judge])
    rows = [said("a"), said("bb"), said("a"), said("bb"), said("ccc")]
    first = ensemble.scores(rows)
    assert len(asked) == 3 and first[:, 0].tolist() == pytest.approx([0.1, 0.2, 0.1, 0.2, 0.3])
    assert np.array_equal(ensemble.scores([said("ccc"), said("dddd"), said("a")])[:, 0], np.float32([0.3, 0.4, 0.1]))
    assert len(asked) == 4
    (row,) = ensemble.report().verifiers
    assert (row.scored, row.cached) == (8, 4)


@pytest.mark.parametrize("cost", ["cheap", "model", "expensive"])
def test_only_expensive_scores_are_cached(cost):
    judge, asked = counting(cost)
    ensemble = Ensemble([judge])
    for _ in range(2):
        ensemble.scores([said("a")])
    assert len(asked) == (2 if cost == "cheap" else 1)


def test_verifiers_that_compare_are_never_cached():
    requests = []

    class Watched(SelfConsistency):
        def assess(self, trajectories):
            requests.append(len(trajectories))
            return super().assess(trajectories)

    ensemble = Ensemble([Watched(cost="expensive")])
    first = ensemble.scores([said("a"), said("a"), said("b")])
    second = ensemble.scores([said("a"), said("b"), said("b")])
    assert requests == [3, 3]
    assert first[:, 0].tolist() == [1, 1, 0] and second[:, 0].tolist() == [0, 1, 1]


def test_sum_with_a_comparing_verifier_is_never_cached():
    judge, _ = counting("expensive")
    assert (judge + SelfConsistency()).sees_groups and not (0.5 * judge).sees_groups
    assert Ensemble([judge]).sees_groups


def test_abstentions_and_failures_are_not_cached():
    shaky, asked = counting(grade=lambda t: None if len(asked) < 3 else 0.5)
    ensemble = Ensemble([shaky])
    assert np.isnan(ensemble.scores([said("a")])).all() and np.isnan(ensemble.scores([said("a")])).all()
    assert ensemble.scores([said("a")])[0, 0] == 0.5 and len(asked) == 3
    assert ensemble.scores([said("a")])[0, 0] == 0.5 and len(asked) == 3


def test_cache_evicts_the_least_recently_used_score():
    cache = ScoreCache(2)
    cache.put(0, b"a" * 16, 0.1)
    cache.put(0, b"b" * 16, 0.2)
    assert cache.get(0, b"a" * 16) == 0.1
    cache.put(1, b"a" * 16, 0.3)
    assert cache.get(0, b"b" * 16) is None and cache.get(0, b"a" * 16) == 0.1 and cache.get(1, b"a" * 16) == 0.3
    with pytest.raises(ValueError, match="cache_rows=-1"):
        ScoreCache(-1)


def test_a_cache_smaller_than_one_call_still_answers_every_row():
    judge, asked = counting()
    ensemble = Ensemble([judge], cache_rows=2)
    texts = ["a", "bb", "ccc", "dddd", "a"]
    for _ in range(2):
        assert ensemble.scores([said(t) for t in texts])[:, 0].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.1])
    off, asked = counting()
    Ensemble([off], cache_rows=0).scores([said("a"), said("a")])
    assert len(asked) == 2
