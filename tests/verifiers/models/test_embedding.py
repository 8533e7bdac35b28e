"""Similarity of embeddings, against transformers itself."""

import math

import numpy as np
import pytest
import torch

from forge_agents import check_verifier
from forge_agents.types import Trajectory, Turn
from forge_verifiers import EmbeddingSimilarity


def said(text, answer=None, seed=0):
    turns = () if text is None else (Turn(agent="a", index=0, observation="q", action=text, reward=0.0),)
    info = {} if answer is None else {"answer": answer}
    return Trajectory(agent="a", policy="p", turns=turns, env_id="t", seed=seed, info=info)


def unit(folder, text):
    """float64 [width]: the mean hidden state of one text, of length 1."""
    from transformers import AutoModel, AutoTokenizer

    inputs = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    with torch.no_grad():
        mean = AutoModel.from_pretrained(folder).eval()(**inputs).last_hidden_state[0].mean(0)
    return (mean / mean.norm()).double().numpy()


def test_scores_are_cosines_to_the_nearest_reference(tiny_bert):
    folder = tiny_bert()
    answer, near, far = "the red fox", "the red dog", "12 + 30"
    cosines = [float(unit(folder, answer) @ unit(folder, text)) for text in (near, far)]
    verifier = EmbeddingSimilarity(folder, batch_tokens=30)
    played = [said(answer, near), said(answer, far), said(answer, [far, near]), said(answer, answer)]
    scores = verifier.score(played)
    np.testing.assert_allclose(scores, np.clip([*cosines, max(cosines), 1.0], 0, 1), atol=1e-5)
    assert abs(cosines[0] - cosines[1]) > 0.01
    assert verifier.usage.texts == 3


def test_the_floor_scores_zero(tiny_bert):
    folder = tiny_bert()
    cosine = float(unit(folder, "one") @ unit(folder, "three"))
    for floor in (-1.0, cosine - 0.1, cosine + 0.01):
        score = EmbeddingSimilarity(folder, floor=floor).score([said("one", "three")])[0]
        assert score == pytest.approx(max((cosine - floor) / (1 - floor), 0.0), abs=1e-5)


def test_group_answers_are_compared_with_the_mean_of_the_others(tiny_bert):
    folder = tiny_bert()
    texts = ["yes", "yes!", "quite something else"]
    vectors = [unit(folder, text) for text in texts]
    expected = []
    for k in range(3):
        others = sum(vectors[j] for j in range(3) if j != k)
        expected.append(float(vectors[k] @ others / np.linalg.norm(others)))
    played = [said(text, seed=1) for text in texts] + [said("alone", seed=2), said(None, seed=1)]
    scores = EmbeddingSimilarity(folder, against="group").score(played)
    np.testing.assert_allclose(scores[:3], np.clip(expected, 0, 1), atol=1e-5)
    assert np.isnan(scores[3:]).all()
    assert EmbeddingSimilarity(folder, against="group").score([said("x"), said("x")]).tolist() == [1.0, 1.0]
    assert EmbeddingSimilarity(folder, against="group").sees_groups
    assert not EmbeddingSimilarity(folder).sees_groups


def test_without_answer_or_reference_it_abstains(tiny_bert):
    verifier = EmbeddingSimilarity(tiny_bert())
    assert np.isnan(verifier.score([said("x"), said(None, "x"), said("x", ""), said("", "")])).all()
    assert verifier.score([]).shape == (0,)
    chosen = EmbeddingSimilarity(tiny_bert(), extract=lambda t: t.turns[0].action.partition(":")[2])
    assert chosen.score([said("Answer:x", "x"), said("no colon", "x")])[0] == pytest.approx(1.0, abs=1e-5)


def test_gold_answers_score_one_and_wrong_ones_less(tiny_bert):
    golds = [said("the red fox", "the red fox", seed=k) for k in range(2)] + [said("12", ["13", "12"])]
    assert check_verifier(EmbeddingSimilarity(tiny_bert()), golds, said("a dog", "the red fox")).ok


def test_wrong_arguments_are_refused(tiny_bert):
    for options in ({"against": "gold"}, {"floor": 1.0}, {"batch_tokens": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}="):
            EmbeddingSimilarity("m", **options)


@pytest.mark.parametrize("floor", [-1.0, 0.0, 0.5])
def test_empty_answer_scores_zero_and_changes_no_other_score(tiny_bert, floor):
    """A policy could otherwise avoid low scores by empty answers."""
    folder = tiny_bert()
    verifier = EmbeddingSimilarity(folder, floor=floor)
    assert verifier.score([said("", "x"), said(" \n", "x")]).tolist() == [0.0, 0.0]
    group = EmbeddingSimilarity(folder, against="group", floor=floor)
    others = group.score([said("yes"), said("yes!")])
    scores = group.score([said("yes"), said("yes!"), said(""), said(" ")])
    assert scores.tolist() == [*others.tolist(), 0.0, 0.0]
    np.testing.assert_array_equal(group.score([said("yes"), said("")]), [np.nan, 0.0])
    assert np.isnan(group.score([said(""), said("")])).all()


@pytest.mark.parametrize("against", ["reference", "group"])
def test_embedding_that_is_no_number_is_a_failure_and_changes_no_other_score(tiny_bert, monkeypatch, against):
    verifier = EmbeddingSimilarity(tiny_bert(), against=against)
    rows = [said("yes", "yes"), said("yes!", "yes"), said("overflow", "yes")]
    expected = verifier.score(rows[:2])
    original = verifier._vectors
    overflow = {"overflow": np.full(32, math.nan)}
    monkeypatch.setattr(verifier, "_vectors", lambda texts: original(texts) | overflow)
    result = verifier.assess(rows)
    np.testing.assert_allclose(result.scores, [*expected, math.nan], atol=1e-6)
    assert list(result.failed) == [2] and "NaN or infinity" in result.failed[2]
