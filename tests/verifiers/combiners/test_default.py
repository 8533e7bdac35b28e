"""The default combiner: quality on known truth, and what it does when verifiers fail."""

from __future__ import annotations

import numpy as np
import pytest
from costs import costs_less_than
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from forge_verifiers import combiners
from forge_verifiers.combiners.em import isotonic

from . import regimes  # noqa: TID252 (tests are no installed package)
from .regimes import (  # noqa: TID252 (tests are no installed package)
    accuracy,
    auroc,
    best_of,
    calibration_error,
    cascade,
    clones,
    graded,
    outvoted,
    silent_truth,
    undecided,
    votes,
)


def default(scores, groups=None, labels=None, **kw):
    return combiners.get("default", **kw).fit_predict(scores, groups, labels)


def test_independent_votes_are_combined_as_well_as_crowd_kit_does() -> None:
    for seed in (0, 1):
        s, g, y = votes(seed, n=1000)
        assert accuracy(y, default(s, g)) >= accuracy(y, regimes.crowd_kit(s)) - 0.01


@pytest.mark.parametrize("pi", [0.05, 0.3, 0.95])
def test_class_balance_is_found_without_labels(pi: float) -> None:
    s, g, y = votes(3, pi=pi)
    model = combiners.get("default").fit(s, g)
    assert abs(model.report().class_balance - y.mean()) < 0.03
    assert calibration_error(y, model.predict_proba(s, g)) < 0.03


def test_near_copies_do_not_outvote_better_verifiers() -> None:
    for seed in (0, 1, 2):
        s, g, y = clones(seed)
        p = default(s, g)
        assert accuracy(y, p) >= 0.88
        assert accuracy(y, p) > accuracy(y, combiners.get("dawid-skene").fit_predict(s)) + 0.1


def test_report_counts_copies_once() -> None:
    report = combiners.get("default").fit(clones(0)[0]).report()
    assert 5.0 < report.effective_number < 7.5  # two clusters and four loners
    assert report.weight[:5].max() < 0.5 < report.weight[8:].min()


def test_graded_scores_of_any_scale_beat_the_mean() -> None:
    s, g, y = graded(0)
    p, mean = default(s, g), combiners.get("mean").fit_predict(s, g)
    assert accuracy(y, p) >= 0.86
    assert auroc(y, p) > auroc(y, mean) + 0.01
    assert best_of(y, p, g) >= best_of(y, mean, g)
    assert calibration_error(y, p) < 0.08


def test_any_increasing_map_of_a_score_gives_nearly_the_same_answer() -> None:
    s, g, _ = graded(1, prompts=60)
    twisted = np.sign(s) * np.abs(s) ** 3 * 7 - 2
    p, mean = ([combiners.get(name).fit_predict(x, g) for x in (s, twisted)] for name in ("default", "mean"))
    assert np.abs(p[0] - p[1]).max() < 0.06
    assert np.abs(mean[0] - mean[1]).max() > 0.12


def test_inverted_verifiers_are_detected() -> None:
    s, g, y = votes(4)
    s[:, :4] = 1 - s[:, :4]
    model = combiners.get("default").fit(s, g)
    report = model.report()
    assert (report.tpr[:4] < report.fpr[:4]).all()
    assert (report.tpr[4:] > report.fpr[4:]).all()
    assert auroc(y, model.predict_proba(s, g)) > 0.97


def test_informative_abstentions_are_used() -> None:
    s, g, y = silent_truth(0)
    assert auroc(y, default(s, g)) > auroc(y, combiners.get("dawid-skene").fit_predict(s)) + 0.01


def test_missing_scores_of_a_cascade_do_not_become_the_latent_class() -> None:
    for seed in (0, 1):
        s, g, y = cascade(seed)
        assert auroc(y, default(s, g)) > auroc(y, combiners.get("mean").fit_predict(s)) - 0.01


def test_five_correlated_models_do_not_outvote_a_better_judge() -> None:
    for seed in (0, 1):
        s, g, y = outvoted(seed)
        mean = combiners.get("mean").fit_predict(s)
        plain, tagged = default(s, g), default(s, g, families=["rm"] * 5 + ["judge"])
        anchored = default(s, g, anchors=[5])
        assert auroc(y, plain) > auroc(y, mean)
        assert auroc(y, tagged) > auroc(y, mean) + 0.05
        assert auroc(y, anchored) > auroc(y, mean) + 0.05
        assert best_of(y, tagged, g) >= best_of(y, mean, g)


@pytest.mark.parametrize("middle", [0.3, 0.5, 0.6])
@pytest.mark.parametrize("share", [0.03, 0.12, 0.5])
def test_responses_that_leave_all_verifiers_undecided_do_not_become_the_right_ones(share, middle) -> None:
    """Their scores agree, so with free evidence they would be the latent class, and right responses its opposite."""
    for seed in range(3):
        s, g, y = undecided(seed, share=share, middle=middle)
        p = default(s, g)
        wrong, right, hostile = (float(p[y == k].mean()) for k in range(3))
        assert hostile < 0.92, hostile
        assert right > max(0.75, hostile - 0.05), (right, hostile)
        assert wrong < 0.5, wrong


@pytest.mark.parametrize("increasing", [True, False])
def test_isotonic_regression_is_that_of_scipy(increasing) -> None:
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=(50, 7)), rng.integers(1, 9, (50, 7)).astype(float)
    flip = slice(None, None, 1 if increasing else -1)
    ours = isotonic(values[:, flip], weights[:, flip])[:, flip]
    theirs = [isotonic_regression(v, weights=w, increasing=increasing).x for v, w in zip(values, weights, strict=True)]
    assert np.allclose(ours, theirs)


@pytest.mark.parametrize("families", [None, [None, None, "kin", "kin"]])
def test_anchor_and_its_copy_count_once(families) -> None:
    """Their agreement must not prove the anchor right: two equals contradict it."""
    for seed in (0, 1):
        rng = np.random.default_rng(seed)
        y = (rng.random(400) < 0.5).astype(np.intp)
        s = np.where(rng.random((400, 3)) < 0.75, y[:, None], 1 - y[:, None]).astype(float)
        s = np.column_stack([s, s[:, 2]])
        model = combiners.get("default", families=families, anchors=[2]).fit(s)
        p = model.predict_proba(s)
        assert accuracy(y, p) > accuracy(y, s[:, 2]) + 0.02 and calibration_error(y, p) < 0.12
        assert model.report().effective_number < 3.3


def test_responses_to_a_prompt_inform_its_prior() -> None:
    s, g, y = graded(2, quirk=0.0)
    weak = s[:, :5]
    assert auroc(y, default(weak, g)) > auroc(y, default(weak)) + 0.005


def test_labels_fix_a_majority_that_is_wrong() -> None:
    s, g, y = votes(5)
    s[:, :8] = 1 - s[:, :8]
    labels = np.full(len(y), np.nan)
    labels[:60] = y[:60]
    assert auroc(y, default(s, g)) < 0.1
    assert auroc(y, default(s, g, labels)) > 0.95


def test_uncertainty_shrinks_with_more_rows() -> None:
    few, many = votes(6, n=60), votes(6, n=4000)
    spread = [combiners.get("default").fit(s, g).predict(s, g)[1].mean() for s, g, _ in (few, many)]
    assert spread[0] > 2 * spread[1] > 0


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(30, 200), m=st.integers(3, 8))
def test_order_of_responses_and_verifiers_does_not_matter(seed: int, n: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    s = votes(seed, n=n, m=m)[0] + rng.normal(0, 0.3, (n, m)) * (np.arange(m) % 2)
    s[rng.random(s.shape) < 0.1] = np.nan
    rows, columns = rng.permutation(n), rng.permutation(m)
    # Sums in another order differ in the last digits; EM's stopping rule may then differ by a round.
    np.testing.assert_allclose(default(s[rows]), default(s)[rows], atol=0.02)
    np.testing.assert_allclose(default(s[:, columns]), default(s), atol=0.05)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_finite_scores_give_probabilities(data: st.DataObject) -> None:
    n, m = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 5))
    number = st.one_of(st.just(np.nan), st.floats(-1e6, 1e6), st.sampled_from([0.0, 1.0]))
    s = np.array(data.draw(st.lists(st.lists(number, min_size=m, max_size=m), min_size=n, max_size=n)))
    g = np.array(data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)))
    model = combiners.get("default").fit(s, g)
    p, deviation = model.predict(s, g)
    assert p.shape == (n,)
    assert ((p >= 0) & (p <= 1)).all() and (p == model.predict_proba(s, g)).all()
    assert np.isfinite(deviation).all()


def test_higher_vote_of_good_verifiers_never_lowers_the_result() -> None:
    s, _, _ = votes(7)
    model = combiners.get("default").fit(s)
    lower, upper = s[:200].copy(), s[:200].copy()
    lower[:, 3], upper[:, 3] = 0.0, 1.0
    assert (model.predict_proba(upper) > model.predict_proba(lower)).all()


def test_dead_constant_and_noise_verifiers_do_no_harm() -> None:
    s, g, y = votes(8)
    rng = np.random.default_rng(8)
    n = len(s)
    junk = np.column_stack([np.full(n, np.nan), np.ones(n), rng.random(n)])
    before, after = auroc(y, default(s, g)), auroc(y, default(np.hstack([s, junk]), g))
    assert after > before - 0.003


def test_state_survives_bit_equal() -> None:
    s, g, _ = graded(3, prompts=40)
    model = combiners.get("default", families=["a"] * 4 + [None] * 10).fit(s, g)
    other = combiners.get("default")
    other.load_state_dict(model.state_dict())
    np.testing.assert_array_equal(other.predict(s, g), model.predict(s, g))


def test_groups_may_be_new_strings_at_prediction() -> None:
    s, g, _ = graded(4, prompts=40)
    model = combiners.get("default").fit(s, g)
    names = np.array([f"prompt {i}" for i in g])
    np.testing.assert_allclose(model.predict_proba(s, names), model.predict_proba(s, g), atol=1e-6)


def test_fit_and_predict_are_fast_and_linear() -> None:
    s, g, _ = graded(5, prompts=125)
    s = s[:, :12]
    many, ids = np.tile(s, (25, 1)), np.arange(25 * len(s)) // 16
    model = combiners.get("default").fit(s, g)

    def fit(rows: int) -> None:
        combiners.get("default").fit(s[:rows], g[:rows])

    def predict(rows: int) -> None:
        model.predict_proba(many[:rows], ids[:rows])

    assert costs_less_than(8, fit, 2000, 500), "4 times if linear, 16 if quadratic"
    assert costs_less_than(50, predict, len(many), len(s)), "25 times if linear, 625 if quadratic"
    assert costs_less_than(25, lambda rows: (predict if rows == len(many) else fit)(rows), len(many), len(s)), (
        "predicting a row takes less than fitting to it"
    )


def test_mean_accuracy_over_regimes_and_seeds() -> None:
    cases = [
        *(votes(seed, pi=pi) for seed in (10, 11) for pi in (0.1, 0.5, 0.9)),
        *(make(seed) for seed in (10, 11) for make in (clones, graded, silent_truth)),
    ]
    ours = [default(s, g) for s, g, _ in cases]
    theirs = [combiners.get("dawid-skene").fit_predict(s) for s, _, _ in cases]
    truth = [y for _, _, y in cases]
    area = [np.mean([auroc(y, p) for y, p in zip(truth, answers, strict=True)]) for answers in (ours, theirs)]
    brier = [
        np.mean([np.mean((p - y) ** 2) for y, p in zip(truth, answers, strict=True)]) for answers in (ours, theirs)
    ]
    error = np.mean([calibration_error(y, p) for y, p in zip(truth, ours, strict=True)])
    assert area[0] >= 0.978
    assert area[0] > area[1] + 0.02
    assert brier[0] <= 0.050 < brier[1]
    assert error <= 0.03
