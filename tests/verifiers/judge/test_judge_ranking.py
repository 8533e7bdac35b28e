"""Grades from comparisons, and answers from replies."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_verifiers.judge.judge import pairings
from forge_verifiers.judge.prompts import Pairs, Reasoned, Reply, Scale, YesNo, choice_in, shares_of


def reply(text, shares=None, mass=1.0):
    return Reply(text=text, shares=shares or {}, mass=mass, prompt_tokens=1, completion_tokens=1)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 12), st.sampled_from([None, 2, 4, 6]))
def test_pairings_are_unique_and_balanced(n, opponents):
    pairs = list(pairings(n, opponents))
    assert len(set(pairs)) == len(pairs) and all(a < b for a, b in pairs)
    times = np.bincount(np.array(pairs).ravel(), minlength=n)
    assert set(times) == {min(n - 1, opponents or n)}


def test_a_mark_is_expected_where_probabilities_are_known():
    assert YesNo().grade(reply("yes")) == 1.0
    assert YesNo().grade(reply("no", {"yes": 0.4, "no": 0.6})) == 0.4
    assert Scale(levels=5).grade(reply("4")) == 0.75
    assert Scale(levels=3).grade(reply("1", {"1": 0.5, "2": 0.25, "3": 0.25})) == pytest.approx(0.375)
    assert Reasoned().grade(reply('{"reason": "it rhymes", "pass": true}')) == 1.0


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (YesNo(), "maybe"),
        (YesNo(), ""),
        (YesNo(), '{"verdict": "yes"}'),
        (YesNo(), "yes and no"),
        (Scale(levels=3), "4"),
        (Reasoned(), '{"reason": "so", "pass": "true"}'),
        (Reasoned(), '{"reason": "cut off he'),
        (Reasoned(), "[" * 100_000),
    ],
)
def test_nonsense_has_no_grade(answer, text):
    assert answer.grade(reply(text, {"yes": 1.0})) is None


@pytest.mark.parametrize(
    "text",
    [
        '{"reason": "10/10", "pass": false}',
        '```json\n{"reason": "it says \\"pass\\": true", "pass": false}\n```',
        '<think>\n{"pass": true}? No.\n</think>\n\n{"reason": "so", "pass": false}',
        '<think>Hm.</think>\n```\n{"reason": "so", "pass": false}\n```\n',
        '{"reason": "first\nsecond", "pass": false}',
    ],
)
def test_reasoned_answer_is_read_after_reasoning_and_in_a_fence(text):
    assert Reasoned().grade(reply(text)) == 0.0


@pytest.mark.parametrize(
    "text",
    ['```\n{"pass": true}\n```\n```\n{"pass": false}\n```', '<think>{"pass": true}', 'So {"pass": true}', "```\n```"],
)
def test_reply_with_several_verdicts_or_unfinished_reasoning_has_no_grade(text):
    assert Reasoned().grade(reply(text)) is None


@pytest.mark.parametrize(
    "text", ["There are 5 reasons why this is a 2", "0.8", "[[4]]", "4/5", "10/10", "4.5", "85", "-1", "0", "4 or 5"]
)
def test_reply_that_is_more_than_a_mark_has_no_grade(text):
    assert Scale().grade(reply(text)) is None


@pytest.mark.parametrize("text", ["Yes", " yes.\n", "yes!", '"yes"', json.dumps({"answer": "YES"})])
def test_a_choice_is_found_bare_or_in_json(text):
    for reply_text in (text, f"```json\n{text}\n```", f"<think>Is it? no</think>\n{text}"):
        assert choice_in(reply_text, ("yes", "no")) == "yes"
    assert choice_in(f"<think>{text}", ("yes", "no")) is None


def test_tokens_that_begin_a_choice_share_its_probability():
    alternatives = {"yes": 0.3, "y": 0.1, ' "Yes': 0.1, "no": 0.2, "n": 0.05, "nope": 0.1, "?": 0.2, "": 0.1}
    shares, mass = shares_of(alternatives, ("yes", "no"))
    assert shares == {"yes": pytest.approx(0.5 / 0.75), "no": pytest.approx(0.25 / 0.75)} and mass == 0.75
    assert shares_of({"?": 1.0}, ("yes", "no")) == ({}, 0.0)
    assert shares_of({'"yes"': 0.75, 'no"}': 0.25}, ("yes", "no")) == ({"yes": 0.75, "no": 0.25}, 1.0)
    assert np.isnan(shares_of({}, ("yes", "no"))[1])  # nothing is known


@pytest.mark.parametrize(("answer", "text"), [(YesNo(), "yes"), (Scale(levels=2), "2"), (Pairs(), "A")])
def test_a_choice_that_had_hardly_any_probability_is_no_answer(answer, text):
    even = dict.fromkeys(answer.choices, 0.5)
    assert answer.grade(reply(text, even, 1e-9)) is None
    assert answer.grade(reply(text, {}, 0.0)) is None
    assert answer.grade(reply(text, even, 0.5)) is not None
    assert answer.grade(reply(text, {}, np.nan)) is not None  # nothing is known
    with pytest.raises(ValueError, match="min_mass=2"):
        type(answer)(min_mass=2.0)


def test_wrong_numbers_are_refused():
    for make in (lambda: Scale(levels=10), lambda: Scale(levels=1), lambda: Pairs(opponents=3)):
        with pytest.raises(ValueError, match="must be"):
            make()
    with pytest.raises(ValueError, match="max_reason_chars=0"):
        Reasoned(max_reason_chars=0)
