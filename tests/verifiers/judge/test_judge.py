"""Judges behind an endpoint: what is sent, what comes back, and what goes wrong."""

import asyncio
import json
import math
import re
import time
from collections import Counter

import numpy as np
import pytest

from forge_agents import Ensemble, Rule, check_verifier
from forge_agents.errors import EndpointError, StallError
from forge_agents.policy import Endpoint
from forge_agents.types import Trajectory, Turn
from forge_verifiers import ForAgent, Gate, Judge, Pairs, PerTurn, Reasoned, Ruler, Scale


def said(*actions, seed=0, task="2 + 2?"):
    turns = tuple(Turn(agent="a", index=k, observation=task, action=text, reward=0.0) for k, text in enumerate(actions))
    return Trajectory(agent="a", policy="p", turns=turns, env_id="t", seed=seed)


def answers_in(request):
    """The fenced answers of a request, by label."""
    text = request["messages"][1]["content"]
    return dict(re.findall(r"<<<(answer(?: [AB0-9]+)?) [0-9a-f]{16}>>>\n(.*?)\n<<<end of answer", text, re.DOTALL))


def is_four(request):
    return "yes" if answers_in(request)["answer"].strip() == "4" else "no"


def longer(request):
    result = answers_in(request)
    return "A" if len(result["answer A"]) > len(result["answer B"]) else "B"


def test_gold_answers_score_one_and_wrong_ones_less(serve_chat):
    golds, wrongs = [said("4", seed=k) for k in range(3)], [said("5"), said("22")]
    for reply, answer in (
        (is_four, None),
        (lambda r: json.dumps({"answer": "5" if is_four(r) == "yes" else "2"}), Scale(levels=5)),
        (lambda r: json.dumps({"reason": "so", "pass": is_four(r) == "yes"}), Reasoned()),
    ):
        with Judge(serve_chat(reply).endpoint, "Is it right?", answer=answer) as judge:
            assert check_verifier(judge, golds, wrongs).ok
    with Judge(serve_chat(longer).endpoint, "Which is longer?", answer=Pairs()) as judge:
        assert check_verifier(judge, [said("44444"), said("44444")], [said("4"), said("444")]).ok


def lengths(request):
    """The score sheet of a judge that gives each text its length."""
    return json.dumps({label.split()[1]: min(len(text), 10) for label, text in answers_in(request).items()})


def test_ruler_scores_each_distinct_text_of_a_group_in_one_question(serve_chat):
    server = serve_chat(lengths)
    texts = [said("55"), said("1"), said("55"), said("999"), said("7", seed=1), said("7", seed=1), said("4444", seed=2)]
    with Judge(server.endpoint, "Which is longer?", answer=Ruler()) as judge:
        result = judge.assess([*texts, said("22", seed=2), said(seed=2)])
    expected = [0.2, 0.1, 0.2, 0.3, np.nan, np.nan, 0.4, 0.2, np.nan]  # one distinct text cannot be compared
    np.testing.assert_array_equal(result.scores, np.array(expected, np.float32))
    assert judge.usage.questions == 2 and not result.failed and judge.sees_groups
    first, second = sorted(server.requests, key=lambda request: len(request["messages"][1]["content"]), reverse=True)
    schema = first["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["1", "2", "3"] and schema["properties"]["3"]["enum"] == list(range(11))
    assert first["messages"][1]["content"].count("<<<task") == 1
    assert second["response_format"]["json_schema"]["schema"]["required"] == ["1", "2"]


@pytest.mark.parametrize(
    "reply",
    ['{"1": 3}', '{"1": 3, "2": 11}', '{"1": 3, "2": true}', '{"1": 3, "2": 1.5}', '{"1": 1, "2": 2, "3": 3}', "3"],
)
def test_ruler_abstains_for_a_group_unless_each_text_has_a_score(serve_chat, reply):
    with Judge(serve_chat(lambda request: reply).endpoint, "Which is longer?", answer=Ruler()) as judge:
        assert np.isnan(judge.score([said("1"), said("22")])).all()
    assert judge.usage.nonsense == 1


@pytest.mark.parametrize("refusal", [(400, "content filter"), "I cannot help with that."])
def test_one_text_does_not_cost_a_large_group_its_scores(serve_chat, refusal):
    server = serve_chat(lambda request: refusal if "BAD" in answers_in(request).values() else lengths(request))
    texts = [said("1" * length) for length in range(1, 8)] + [said("BAD")]
    with Judge(server.endpoint_with(retries=0), "Which is longer?", answer=Ruler(), seed=1) as judge:
        result = judge.assess(texts)
    known = ~np.isnan(result.scores)
    assert known.sum() == 6 and not known[-1], "the text and one other share the smallest group"
    np.testing.assert_array_equal(
        result.scores[known], (np.arange(1, 9, dtype=np.float32) / 10).astype(np.float32)[known]
    )
    assert len(result.failed) == (2 if refusal[0] == 400 else 0)


@pytest.mark.parametrize("answer", ["ruler", Ruler])
def test_answer_of_another_type_is_refused(serve_chat, answer):
    with pytest.raises(TypeError, match=r"Give an object such as fv.YesNo\(\), .* or fv.Ruler\(\)"):
        Judge(serve_chat(is_four).endpoint, "Is it right?", answer=answer)


def test_ruler_names_the_error_of_a_group_without_a_reply(serve_chat):
    def reply(request):
        return lengths(request) if "22" in answers_in(request).values() else (400, "refused")

    server = serve_chat(reply)
    with Judge(server.endpoint_with(retries=0), "Which is longer?", answer=Ruler()) as judge:
        result = judge.assess([said("1"), said("22"), said("1", seed=1), said("333", seed=1)])
    np.testing.assert_array_equal(result.scores, np.array([0.1, 0.2, np.nan, np.nan], np.float32))
    assert set(result.failed) == {2, 3} and "EndpointError" in result.failed[2]


@pytest.fixture
def thinker(serve_chat):
    """``thinker(n)``: a server whose model reasons for n tokens before each answer, counted in max_tokens."""

    def start(thought):
        def reply(request):
            used_up = request["max_tokens"] <= thought
            message = {"role": "assistant", "reasoning_content": "hm", "content": "" if used_up else is_four(request)}
            return {"choices": [{"index": 0, "finish_reason": "length" if used_up else "stop", "message": message}]}

        return serve_chat(reply)

    return start


def test_judges_may_reason_before_they_answer(thinker):
    server = thinker(1000)
    with Judge(server.endpoint_with(retries=0), "Is it right?") as judge:
        assert judge.score([said("4"), said("5")]).tolist() == [1.0, 0.0]
        asked = len(server.requests)
        assert judge.score([said("4", task="3 + 1?")]).tolist() == [1.0]
    assert len(server.requests) == asked + 1, "the limit that was too low is not tried again"


def test_blank_answers_do_not_raise_the_limit_of_others(serve_chat):
    def reply(request):
        blank = answers_in(request)["answer"] == "BLANK"
        message = {"role": "assistant", "content": "\n" * 12 if blank else is_four(request)}
        return {"choices": [{"index": 0, "finish_reason": "length" if blank else "stop", "message": message}]}

    server = serve_chat(reply)
    with Judge(server.endpoint_with(retries=0), "Is it right?") as judge:
        scores = [judge.score([said(text), said("4")]) for text in ("BLANK", "5")]
    np.testing.assert_array_equal(scores, np.array([[np.nan, 1], [0, 1]], np.float32))
    assert {request["max_tokens"] for request in server.requests} == {12}


def test_single_empty_reply_does_not_raise_the_limit_of_others(serve_chat):
    empty = []

    def reply(request):
        is_empty = answers_in(request)["answer"] == "4" and not empty
        empty.extend([1] * is_empty)
        message = {"role": "assistant", "content": "" if is_empty else is_four(request)}
        choice = {"index": 0, "finish_reason": "length" if is_empty else "stop", "message": message}
        return {"choices": [choice], "usage": {"prompt_tokens": 50, "completion_tokens": 6, "total_tokens": 56}}

    server = serve_chat(reply)
    with Judge(server.endpoint_with(retries=0), "Is it right?") as judge:
        scores = [judge.score([said(text)]).tolist() for text in ("4", "5", "44")]
    assert scores == [[1.0], [0.0], [0.0]]
    assert [request["max_tokens"] for request in server.requests] == [12, 12 + 4096, 12, 12]


def test_judge_that_only_reasons_is_an_error_with_advice(thinker):
    with (
        Judge(thinker(10_000).endpoint_with(retries=0), "Is it right?") as judge,
        pytest.raises(EndpointError, match=r"stub reasoned for \d{4} tokens and did not answer. Serve it without"),
    ):
        judge.score([said("4"), said("5")])


def test_the_request_holds_rubric_fence_and_schema(serve_chat):
    server = serve_chat(is_four)
    with Judge(server.endpoint, "Is it right?") as judge:
        assert judge.score([said("4"), said("5")]).tolist() == [1.0, 0.0]
    request = server.requests[0]
    assert request["messages"][0]["content"].endswith("Rubric:\nIs it right?")
    assert request["response_format"]["json_schema"]["schema"]["properties"]["answer"]["enum"] == ["yes", "no"]
    assert (request["temperature"], request["logprobs"], request["model"]) == (0.0, True, "stub")
    assert judge.cost == "model"


def with_logprobs(tokens, text=None):
    """A reply of `tokens`, each a mapping from alternatives to probabilities, the first of which was chosen.

    Args:
        text: The text of the reply. None: all tokens.
    """

    def entry(token, p):
        return {"token": token, "logprob": math.log(p), "bytes": None}

    content = [{**entry(*next(iter(t.items()))), "top_logprobs": [entry(*item) for item in t.items()]} for t in tokens]
    text = "".join(next(iter(t)) for t in tokens) if text is None else text
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text},
              "logprobs": {"content": content}}  # fmt: skip
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "stub", "choices": [choice]}


@pytest.mark.parametrize(
    "tokens",
    [
        [{"yes": 0.6, "no": 0.2, "?": 0.2}],
        [{" Yes": 0.6, "no": 0.2, "?": 0.2}, {".": 1.0}],
        [{'{"': 1.0}, {"answer": 1.0}, {'":': 1.0}, {' "': 0.9}, {"yes": 0.6, "no": 0.2}, {'"}': 1.0}],
        [{'{"answer': 1.0}, {'":': 1.0}, {' "yes': 0.3, '"no': 0.1}, {'"}': 1.0}],
    ],
)
def test_probabilities_of_the_verdicts_token_grade_the_score(serve_chat, tokens):
    with Judge(serve_chat(lambda request: with_logprobs(tokens)).endpoint, "Right?") as judge:
        assert judge.score([said("4")]).tolist() == [pytest.approx(0.75)]


YES, NO = {"yes": 0.9, "no": 0.1}, {"no": 0.75, "yes": 0.25}


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([{'{"': 1.0}, {"comment": 1.0}, {'": "': 1.0}, YES, {'", "answer": "': 1.0}, NO, {'"}': 1.0}], None),
        ([{'{"answer": "': 1.0}, NO, {'", "comment": "': 1.0}, YES, {'"}': 1.0}], None),
        ([{'{"answer": "': 1.0}, YES, {'", "answer": "': 1.0}, NO, {'"}': 1.0}], None),
        ([{"<think>": 0.8, "Yes": 0.2}, YES, {"</think>\n": 1.0}, NO], None),
        ([{"```": 0.8, "yes": 0.2}, {"json\n": 1.0}, {'{"answer": "': 1.0}, NO, {'"}\n```': 1.0}], None),
        ([{"**": 0.8, "yes": 0.2}, NO, {"**": 1.0}], None),
        ([{'"': 1.0}, NO, {'"': 1.0}], None),
        ([YES, {", but no.": 1.0}, {"</think>": 1.0}, NO], "no"),
        ([{"<|channel|>": 1.0}, {"final": 1.0}, {"<|message|>": 1.0}, NO, {"<|return|>": 1.0}], "no"),
        (
            [{"<think>": 1.0}, YES, {"": 1.0}, {"\ufffd": 1.0}, {"</think>": 1.0}, NO, {"<|end|>": 1.0}],
            "<think>yes\u00e9</think>no",
        ),
    ],
    ids=[
        "key before",
        "key after",
        "two answers",
        "reasoning",
        "fence",
        "bold",
        "quotes",
        "separated",
        "gpt-oss",
        "parts of a character",
    ],
)
def test_probabilities_before_or_after_the_verdict_do_not_count(serve_chat, tokens, text):
    """Many servers list the tokens of the reasoning, which they separate from the text."""
    with Judge(serve_chat(lambda request: with_logprobs(tokens, text)).endpoint, "Right?") as judge:
        assert judge.score([said("5")]).tolist() == [pytest.approx(0.25)]
    assert judge.usage.nonsense == 0


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([YES, {'{"answer": "no"}': 1.0}], None),
        ([{'{"answer": "': 1.0}, NO, {'", "more": {"answer": "': 1.0}, YES, {'"}}': 1.0}], None),
        ([YES], "no"),
        ([{"<think>": 1.0}, {"\ufffd": 1.0}, NO, {" way": 1.0}], "<think>\u00e9no way</think>no"),
    ],
    ids=["one token", "nested", "other text", "left out"],
)
def test_verdict_without_a_token_of_its_own_counts_as_it_is(serve_chat, tokens, text):
    reply = with_logprobs(tokens, text or "".join(next(iter(t)) for t in tokens).removeprefix("yes"))
    with Judge(serve_chat(lambda request: reply).endpoint, "Right?") as judge:
        assert judge.score([said("5")]).tolist() == [0.0]


def test_marks_after_a_fence_are_graded_by_their_own_token(serve_chat):
    tokens = [{"```\n": 0.9, "5": 0.1}, {"1": 0.75, "5": 0.25}, {"\n```": 1.0}]
    with Judge(serve_chat(lambda request: with_logprobs(tokens)).endpoint, "Right?", answer=Scale()) as judge:
        assert judge.score([said("5")]).tolist() == [pytest.approx(0.25)]


def test_equal_texts_are_asked_once_in_a_call(serve_chat):
    server = serve_chat(is_four)
    with Judge(server.endpoint, "Is it right?") as judge:
        scores = judge.score([said("4"), said("5"), said("4"), said("4", seed=7), said()])
    np.testing.assert_array_equal(scores, np.array([1, 0, 1, 1, np.nan], np.float32))
    assert len(server.requests) == 2
    assert (judge.usage.questions, judge.usage.repeated, judge.usage.trajectories) == (2, 2, 5)
    assert (judge.usage.prompt_tokens, judge.usage.completion_tokens) == (20, 4)


def test_several_prompts_share_a_model(serve_chat):
    server = serve_chat(lambda request: "yes" if "four" in request["messages"][0]["content"] else "no")
    with Judge(server.endpoint, "Is it four?") as first:
        second = Judge(first, "Is it five?", name="second")
        assert [judge.score([said("4")])[0] for judge in (first, second)] == [1.0, 0.0]
        assert second.usage.questions == 1
        with pytest.raises(ValueError, match="are set by 'judge'"):
            Judge(first, "Is it six?", timeout_s=3.0)


def test_every_turn_can_have_a_question_of_its_own(serve_chat):
    with Judge(serve_chat(is_four).endpoint, "Is it right?", view="turns") as judge:
        result = judge.assess([said("4", "5", "4", "4"), said("5"), said("4"), said()])
        np.testing.assert_array_equal(result.scores, [0.75, 0.0, 1.0, np.nan])
        assert [turns.tolist() for turns in result.turns] == [[1, 0, 1, 1], [0], [1], []]
        assert not judge.sees_groups


def test_turn_without_a_reply_costs_its_trajectory_the_score(serve_chat):
    def reply(request):
        return "yes" if is_four(request) == "yes" else (500, {"error": {"message": "refused"}})

    with Judge(serve_chat(reply).endpoint_with(retries=0), "Is it right?", view="turns") as judge:
        result = judge.assess([said("4", "bad"), said("4", "4")])
    np.testing.assert_array_equal(result.scores, [np.nan, 1.0])  # a mean of the other turns would be 1, too
    assert list(result.failed) == [0] and "refused" in result.failed[0]


def test_turn_that_confuses_the_judge_costs_its_trajectory_the_score(serve_chat):
    """A mean without the turn would be 1 for the first trajectory, and 0.5 for the same one with an ordinary turn."""

    def reply(request):
        return "I will not answer" if "evade" in answers_in(request)["answer"] else is_four(request)

    trajectories = [said("4", "evade"), said("4", "5"), said("4", "4"), said("evade")]
    with Judge(serve_chat(reply).endpoint, "Is it right?", view="turns") as judge:
        result = judge.assess(trajectories)
        np.testing.assert_array_equal(result.scores, [np.nan, 0.5, 1.0, np.nan])
        np.testing.assert_array_equal(np.concatenate(result.turns), [1, np.nan, 1, 0, 1, 1, np.nan])
        assert not result.failed
        last = Judge(judge, "Is it right?")
        for verifier in (last, Gate(Rule(lambda t: 1.0, name="passes"), last), ForAgent("a", last)):
            per_turn = PerTurn(verifier).assess(trajectories)
            np.testing.assert_array_equal(per_turn.scores, [np.nan, 0.5, 1.0, np.nan])
        chosen = Judge(judge, "Is it right?", view=lambda t: None if t.turns[-1].action == "5" else "4")
        np.testing.assert_array_equal(PerTurn(chosen).score(trajectories), [1.0, 1.0, 1.0, 1.0])


def test_text_that_the_endpoint_refuses_is_an_abstention_if_others_are_answered(serve_chat):
    """As a failure the text would have the mean score of its group in a sum, and be no evidence in an ensemble."""

    def reply(request):
        text = answers_in(request)["answer"]
        return (400, {"error": {"message": "content filter"}}) if text == "filtered" else is_four(request)

    with Judge(serve_chat(reply).endpoint_with(retries=0), "Is it right?") as judge:
        texts = [said("4"), said("4 "), said("5"), said("filtered")]
        result = judge.assess(texts)
        np.testing.assert_array_equal(result.scores, [1, 1, 0, np.nan])
        assert not result.failed and (judge.usage.nonsense, judge.usage.failed) == (1, 0)
        total = (judge + Rule(lambda t: 0.5, name="half")).score(texts)
        np.testing.assert_array_equal(total, [1.5, 1.5, 0.5, 0.5])
        single = judge.assess([said("4"), said("filtered")])  # nothing says that the text is the cause
        assert list(single.failed) == [1] and "content filter" in single.failed[1]


def test_nonsense_abstains_and_is_counted(serve_chat):
    def reply(request):
        return "As a language model" if is_four(request) == "no" else "yes"

    with Judge(serve_chat(reply).endpoint, "Is it right?") as judge:
        np.testing.assert_array_equal(judge.score([said("4"), said("5"), said("6")]), [1, np.nan, np.nan])
    assert (judge.usage.nonsense, judge.usage.failed) == (2, 0)


def test_unlikely_choices_differ_from_invalid_replies(serve_chat, caplog):
    held = with_logprobs([{"yes": 0.003, "no": 0.001, "As": 0.9}])
    with Judge(serve_chat(lambda request: held).endpoint, "Is it right?") as judge:
        assert np.isnan(judge.score([said("4")])).all()
    mass = "all choices together had a probability of 0.004, min_mass=0.01"
    assert f"1 of 1 replies are not exactly an answer, e.g. 'yes': {mass}" in caplog.text
    caplog.clear()
    with Judge(serve_chat(lambda request: "As a").endpoint, "Is it right?") as judge:
        judge.score([said("4")])
    assert caplog.text.rstrip().endswith("1 of 1 replies are not exactly an answer, e.g. 'As a'")


def test_text_that_the_judge_would_rather_continue_is_graded_if_most_are(serve_chat):
    """Otherwise a policy whose text makes the choices unlikely would not be graded for it."""
    likely, unlikely = (with_logprobs([{"yes": p, "no": 4 * p, "As": 0.5}]) for p in (0.08, 0.0008))
    with Judge(serve_chat(lambda r: unlikely if is_four(r) == "no" else likely).endpoint, "Is it right?") as judge:
        np.testing.assert_allclose(judge.score([said("4"), said("5")]), [0.2, np.nan])
        np.testing.assert_allclose(judge.score([said("4"), said("4 "), said("5")]), [0.2, 0.2, 0.2])


def test_pairs_are_compared_in_both_orders(serve_chat):
    server = serve_chat(longer)
    with Judge(server.endpoint, "Which is longer?", answer=Pairs()) as judge:
        scores = judge.score([said("1"), said("333"), said("22"), said("333"), said("9999", seed=1), said("8", seed=1)])
        assert scores.tolist() == [0.0, 1.0, 0.5, 1.0, 1.0, 0.0]
        assert judge.usage.questions == 8  # three different texts, then two
        assert judge.sees_groups  # so that no ensemble remembers its scores
        assert np.isnan(judge.score([said("1"), said("1"), said("2", seed=1)])).all()
    places = Counter(tuple(sorted(answers_in(request).items())) for request in server.requests)
    assert set(places.values()) == {1}


def test_position_bias_is_a_tie(serve_chat):
    with Judge(serve_chat(lambda request: "A").endpoint, "Which is better?", answer=Pairs()) as judge:
        assert judge.score([said("1"), said("22"), said("333")]).tolist() == [0.5, 0.5, 0.5]
        assert judge.usage.nonsense == 0


def test_text_without_valid_comparisons_abstains(serve_chat):
    def reply(request):
        return "neither" if "333" in answers_in(request).values() else longer(request)

    with Judge(serve_chat(reply).endpoint, "Which is longer?", answer=Pairs()) as judge:
        np.testing.assert_array_equal(judge.score([said("1"), said("22"), said("333")]), [0.0, 1.0, np.nan])
        assert judge.usage.nonsense == 4


@pytest.mark.parametrize("refusal", ["neither", "unlikely"])
def test_text_that_confuses_the_judge_where_it_would_lose_has_no_better_score(serve_chat, refusal):
    """ "22" is longer than "1" and loses against the others. Without these comparisons its score was 1."""

    def reply(request):
        lengths = {name[-1]: len(text) for name, text in answers_in(request).items()}
        letter = max(lengths, key=lengths.get)
        likely = 0.9
        if min(lengths.values()) == 2:
            if refusal == "neither":
                return refusal
            likely = 0.001
        return with_logprobs([{letter: likely, "As": 0.05}])

    texts = [said("1" * length) for length in (1, 2, 3, 4, 5)]
    with Judge(serve_chat(reply).endpoint, "Which is longer?", answer=Pairs()) as judge:
        scores = judge.score(texts)
        expected = [0, 1, 2, 3, 4] if refusal == "unlikely" else [0, 2.5, 1.5, 2.5, 3.5]
        np.testing.assert_allclose(scores, np.array(expected) / 4)
        assert judge.usage.nonsense == (6 if refusal == "neither" else 0)


def test_long_reason_is_not_cut_before_its_verdict(serve_chat):
    """A text could otherwise evade its verdict by a reason in a script whose characters have several tokens."""

    def reply(request):
        text = json.dumps({"reason": "x" * 700, "pass": False})
        if request["max_tokens"] >= 800:
            return text
        choice = {"index": 0, "message": {"role": "assistant", "content": text[:340]}, "finish_reason": "length"}
        return 200, {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}

    server = serve_chat(reply)
    with Judge(server.endpoint, "Is it right?", answer=Reasoned()) as judge:
        assert judge.score([said("5")]).tolist() == [0.0] and judge.usage.nonsense == 0
    assert [request["max_tokens"] for request in server.requests] == [340, 1840]


def test_load_and_server_errors_are_waited_out(serve_chat):
    tries = Counter()

    def reply(request):
        key = answers_in(request)["answer"]
        tries[key] += 1
        return (429 if key == "4" else 503, {"error": {"message": "busy"}}) if tries[key] == 1 else is_four(request)

    with Judge(serve_chat(reply).endpoint, "Is it right?") as judge:
        assert judge.score([said("4"), said("5")]).tolist() == [1.0, 0.0]
    assert tries == {"4": 2, "5": 2}


@pytest.mark.parametrize("pairs", [False, True])
def test_long_text_in_tokens_is_shortened_and_graded(serve_chat, pairs):
    """8,000 characters of a rare script are 32,000 tokens. A policy must not evade its grade by them."""

    def reply(request):
        text = request["messages"][1]["content"]
        if len(text.encode()) > 9000:
            return 400, {"error": {"message": "This model's maximum context length is 4096 tokens."}}
        first_is_long = "\U00012031" in text.partition("<<<end of answer A")[0]
        return ("A" if first_is_long else "B") if pairs else "no"

    answer, texts = (Pairs(), [said("\U00012031" * 9000), said("4")]) if pairs else (None, [said("\U00012031" * 9000)])
    with Judge(serve_chat(reply).endpoint, "Is it right?", answer=answer) as judge:
        result = judge.assess(texts)
    assert result.scores.tolist() == ([1.0, 0.0] if pairs else [0.0]) and not result.failed


def test_some_failures_abstain_and_all_failures_raise(serve_chat):
    def reply(request):
        return "yes" if is_four(request) == "yes" else (500, {"error": {"message": "out of order"}})

    with Judge(serve_chat(reply).endpoint_with(retries=0), "Is it right?") as judge:
        result = judge.assess([said("4"), said("5"), said()])
        np.testing.assert_array_equal(result.scores, [1, np.nan, np.nan])
        assert list(result.failed) == [1] and "out of order" in result.failed[1]
        assert judge.usage.failed == 1
        with pytest.raises(Exception, match="out of order"):
            judge.score([said("5")])


def test_opponents_are_drawn_reproducibly(serve_chat):
    server = serve_chat(longer)
    texts = [f"{k:02d}" for k in range(16)]

    def meetings(seed, order):
        del server.requests[:]
        with Judge(server.endpoint, "Which is longer?", answer=Pairs(opponents=2), seed=seed) as judge:
            judge.score([said(text) for text in order])
        return {frozenset(map(int, answers_in(request).values())) for request in server.requests}

    drawn = meetings(1, texts)
    assert drawn == meetings(1, texts[::-1]) and len(drawn) == 16
    assert drawn != meetings(2, texts)
    neighbours = [pair for pair in drawn if max(pair) - min(pair) in (1, 15)]
    assert len(neighbours) < 8  # in alphabetical order all 16 were


def test_a_comparison_that_failed_is_no_abstention(serve_chat):
    def reply(request):
        return (500, {"error": {"message": "out"}}) if "333" in answers_in(request).values() else longer(request)

    with Judge(serve_chat(reply).endpoint_with(retries=0), "Which is longer?", answer=Pairs()) as judge:
        result = judge.assess([said("1"), said("22"), said("333"), said("8", seed=1)])
    np.testing.assert_array_equal(result.scores, np.array([0, 1, np.nan, np.nan], np.float32))
    assert list(result.failed) == [2]


def test_a_slow_endpoint_is_named(serve_chat):
    server = serve_chat(lambda request: time.sleep(20) or "yes")
    with (
        Judge(server.endpoint_with(timeout_s=0.2, retries=0), "Right?") as judge,
        pytest.raises(StallError, match=r"stub at http://127.0.0.1:\d+/v1 gave no answer within 0.2 s"),
    ):
        judge.score([said("4")])


def test_concurrency_of_requests_is_limited(serve_chat):
    server = serve_chat(lambda request: server.wait_for_company(3) or is_four(request))
    with Judge(server.endpoint_with(concurrency=3), "Is it right?") as judge:
        judge.score([said(str(k)) for k in range(12)])
    assert server.most == 3


def test_a_server_without_structured_output_is_asked_without(serve_chat):
    def reply(request):
        for feature in ("response_format", "logprobs"):
            if feature in request:
                return 400, {"error": {"message": f"unknown field {feature}"}}
        return is_four(request)

    server = serve_chat(reply)
    with Judge(server.endpoint_with(concurrency=1), "Is it right?") as judge:
        assert judge.score([said("4"), said("5"), said("6")]).tolist() == [1.0, 0.0, 0.0]
    assert len(server.requests) == 5  # two refusals, once


def test_the_key_comes_from_the_environment(serve_chat, monkeypatch):
    server = serve_chat(is_four)
    judge = Judge(Endpoint(server.endpoint.url, "stub", api_key_env="JUDGE_KEY"), "Is it right?")
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ValueError, match="'JUDGE_KEY' is not set"):
        judge.score([said("4")])
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    with judge:
        judge.score([said("4")])
    assert server.headers_seen[0]["authorization"] == "Bearer s3cret"
    assert "s3cret" not in repr(vars(judge))


def test_a_judge_works_inside_a_running_loop_after_closing_and_in_an_ensemble(serve_chat):
    judge = Judge(serve_chat(is_four).endpoint, "Is it right?")

    async def main():
        return judge.score([said("4")]).tolist()

    assert asyncio.run(main()) == [1.0]
    judge.close()
    judge.close()
    ensemble = Ensemble([judge, Rule(lambda t: 0.5, name="half"), Rule(lambda t: len(t.turns[0].action) < 2)], "mean")
    assert ensemble.score([said("4"), said("55")])[0] > 0.5
    judge.close()


def test_seed_repeats_questions_and_judges_without_seed_share_no_fence(serve_chat):
    server = serve_chat(is_four)
    for seed in (None, None, 3, 3):
        with Judge(server.endpoint, "Is it right?", seed=seed) as judge:
            judge.score([said("4")])
            judge.score([said("4")])
            assert not judge.state_dict()  # an ensemble may remember its verdicts
    texts = [request["messages"][1]["content"] for request in server.requests]
    assert texts[0] == texts[1] and texts[2] == texts[3]
    assert len(set(texts)) == 3 and len(set(texts[4:])) == 1


def test_wrong_arguments_are_refused():
    endpoint = Endpoint("http://127.0.0.1:1/v1", "m")
    for options, message in (
        ({"view": "last"}, "view='last'"),
        ({"view": "turns", "answer": Pairs()}, "Pairs compares whole trajectories"),
        ({"view": "turns", "answer": Ruler()}, "Ruler compares whole trajectories"),
        ({"max_chars": 0}, "max_chars=0"),
        ({"timeout_s": math.inf}, "timeout_s=inf"),
        ({"engine": object()}, "has its own"),
        ({"timeout_s": 3.0}, "has its own"),
    ):
        with pytest.raises(ValueError, match=message):
            Judge(endpoint, "r", **options)
    with pytest.raises(TypeError, match="got int"):
        Judge(3, "r")
    with pytest.raises(ValueError, match="HTTP address"):
        Endpoint("localhost:8000", "m")
    with pytest.raises(ValueError, match="model"):
        Endpoint("http://localhost", "")
