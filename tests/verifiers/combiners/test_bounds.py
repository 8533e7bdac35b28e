"""The default is nowhere much worse than the better of the plain mean and Dawid and Skene."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest

from forge_verifiers import combiners

from .regimes import Case, Floats, accuracy, calibration_error, outvoted, votes  # noqa: TID252 (no installed package)


def told(
    accuracies: tuple[float, ...], *, n: int = 2000, k: int = 8, rates: tuple[float, float] = (1, 1), seed: int = 0
) -> Case:
    """Yes/no checks of these accuracies, independent given the truth. Prompts differ in difficulty."""
    rng = np.random.default_rng([21, n, len(accuracies), seed])
    y = (rng.random(n) < rng.beta(*rates, n // k + 1)[np.arange(n) // k]).astype(np.intp)
    right = rng.random((n, len(accuracies))) < accuracies
    return np.where(right, y[:, None], 1 - y[:, None]).astype(float), np.arange(n) // k, y


def with_columns(case: Case, *columns: Callable[[np.random.Generator, Case], Floats], seed: int = 0) -> Case:
    rng = np.random.default_rng([22, seed])
    return np.column_stack([case[0], *(column(rng, case) for column in columns)]), case[1], case[2]


def copy_of(k: int) -> Callable[[np.random.Generator, Case], Floats]:
    return lambda rng, case: np.where(rng.random(len(case[0])) < 0.02, 1 - case[0][:, k], case[0][:, k])


def style(rng: np.random.Generator, case: Case) -> Floats:
    """Near copies of a rule that looks at something else than correctness."""
    liking = np.random.default_rng(23).standard_normal(len(case[0]))
    return (liking + 0.5 * rng.standard_normal(len(liking)) > 0).astype(float)


def silent(rng: np.random.Generator, case: Case) -> Floats:
    return np.full(len(case[0]), np.nan)


def cluster(loads: tuple[float, ...], size: int, *, n: int = 2000, seed: int = 0) -> Case:
    """Graded verifiers, of which the first `size` share a spurious preference."""
    rng = np.random.default_rng([24, n, size, seed])
    y = (rng.random(n) < rng.beta(1, 1, n // 8 + 1)[np.arange(n) // 8]).astype(np.intp)
    own = np.where(np.arange(len(loads)) < size, 0.6, 1.0)
    liking = rng.standard_normal(n)[:, None] * np.sqrt(1 - own**2)
    z = np.array(loads) * (y[:, None] - 0.5) + liking + own * rng.standard_normal((n, len(loads)))
    return np.column_stack([np.exp(z[:, j]) if j % 2 else z[:, j] for j in range(len(loads))]), np.arange(n) // 8, y


REGIMES: dict[str, Callable[[int], Case]] = {
    "five good": lambda seed: told((0.95,) * 5, seed=seed),
    "three good": lambda seed: told((0.97,) * 3, seed=seed),
    "nearly perfect": lambda seed: told((0.999,) * 4, seed=seed),
    "two": lambda seed: told((0.95, 0.7), seed=seed),
    "good, 64 rows": lambda seed: told((0.95,) * 5, n=64, seed=seed),
    "good, 16 rows": lambda seed: told((0.95,) * 5, n=16, seed=seed),
    "good, hardly ever right": lambda seed: told((0.95,) * 5, rates=(0.1, 4.9), seed=seed),
    "all right": lambda seed: told((0.9, 0.95, 0.8, 0.85), n=512, rates=(1e6, 1e-3), seed=seed),
    "all wrong": lambda seed: told((0.95,) * 5, n=64, rates=(1e-3, 1e6), seed=seed),
    "one good, four noise": lambda seed: told((0.97, 0.52, 0.52, 0.52, 0.52), seed=seed),
    "groups of one": lambda seed: told((0.9, 0.85, 0.8, 0.7, 0.7), k=1, seed=seed),
    "copies of a good one": lambda seed: with_columns(
        told((0.98, 0.75), seed=seed), copy_of(0), copy_of(0), style, seed=seed
    ),
    "good, style cluster": lambda seed: with_columns(
        told((0.95, 0.93, 0.9), seed=seed), style, style, style, seed=seed
    ),
    "weaker, style cluster": lambda seed: with_columns(
        told((0.9, 0.8, 0.7, 0.65), seed=seed), style, style, style, seed=seed
    ),
    "one always silent": lambda seed: with_columns(told((0.95, 0.9, 0.8), seed=seed), silent, seed=seed),
    "good graded": lambda seed: cluster((3.5, 3.0, 3.0, 2.0), 0, seed=seed),
    "cluster against one": lambda seed: cluster((0.9, 0.9, 0.8, 0.8, 0.7, 2.5), 5, seed=seed),
    "cluster against two": lambda seed: cluster((0.9, 0.9, 0.8, 0.8, 0.7, 2.5, 2.0), 5, seed=seed),
}


def brier(y: np.ndarray, p: Floats) -> float:
    return float(np.mean((p - y) ** 2))


def pointing(y: np.ndarray, p: Floats, groups: np.ndarray) -> float:
    """Mean correlation of p with the truth within groups that hold both: how well advantages made of it point."""
    inside = [np.flatnonzero(groups == g) for g in np.unique(groups)]
    mixed = [rows for rows in inside if 0 < y[rows].mean() < 1]
    return float(np.mean([np.corrcoef(p[r], y[r])[0, 1] if p[r].std() > 1e-12 else 0.0 for r in mixed] or [1.0]))


UNDECIDABLE = "good, style cluster"
"""Three good verifiers and three that share a style, unrelated to each other: either side may be right."""


@pytest.mark.parametrize("name", [name for name in REGIMES if name != UNDECIDABLE])
def test_default_is_close_to_the_better_baseline(name: str) -> None:
    s, g, y = REGIMES[name](0)
    ours = combiners.get("default").fit_predict(s, g)
    simple = [combiners.get(kind).fit_predict(s, g) for kind in ("mean", "dawid-skene")]
    assert brier(y, ours) <= min(brier(y, p) for p in simple) + 0.01
    assert pointing(y, ours, g) >= max(pointing(y, p, g) for p in simple) - 0.02


def test_undecidable_clusters_keep_the_mean_and_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    for seed in range(3):
        s, g, y = REGIMES[UNDECIDABLE](seed)
        model, mean = combiners.get("default"), combiners.get("mean").fit_predict(s, g)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            model.fit(s, g)
            p = model.fit(s, g).predict_proba(s, g)
        assert np.corrcoef(p, mean)[0, 1] > 0.97 and brier(y, p) < brier(y, mean) + 0.03
        warned = [record.getMessage() for record in caplog.records if "copies" in record.getMessage()]
        groups = "[column 0, column 1, column 2] or [column 3, column 4, column 5]"
        assert len(warned) == 1 and groups in warned[0] and "five labels" in warned[0]
        for decided in ({"families": [None, None, None, "style", "style", "style"]}, {"anchors": [0]}):
            assert brier(y, combiners.get("default", **decided).fit_predict(s, g)) < 0.03, decided
        labels = np.where(np.arange(len(y)) % (len(y) // 5) == 0, y, np.nan)
        assert brier(y, combiners.get("default").fit_predict(s, g, labels)) < 0.1 < brier(y, mean)


def test_unrelated_cluster_inverts_no_verifier() -> None:
    """Two uncorrelated clusters have no relative sign, so both keep their direction."""
    for seed in range(6):
        s, g, y = REGIMES["weaker, style cluster"](seed)
        assert brier(y, combiners.get("default").fit_predict(s, g)) < 0.1, seed


def test_good_verifiers_stay_good_however_many_steps_are_seen() -> None:
    """Through an ensemble's window the fit sees the same verifiers on 64, 128, ... rows; it was flat from the fifth."""
    s, g, y = told((0.95,) * 5, n=1024)
    for rows in (64, 256, 320, 1024):
        p = combiners.get("default").fit_predict(s[:rows], g[:rows])
        assert brier(y[:rows], p) < 0.01, rows


def test_uncorrelated_scores_warn_once_and_use_the_mean(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    s = rng.random((400, 4))
    model = combiners.get("default")
    with caplog.at_level(logging.WARNING):
        p = [model.fit_predict(s), model.fit_predict(s)][0]
    assert len([r for r in caplog.records if "uncorrelated" in r.getMessage()]) == 1
    assert np.corrcoef(p, s.mean(axis=1))[0, 1] > 0.97


def pairs(seed: int) -> tuple[Floats, np.ndarray, np.ndarray]:
    """350 pairs, one answer right: five reward models that share a liking, one better judge asked in both orders."""
    rng = np.random.default_rng([25, seed])
    n = 700
    y = np.zeros(n, np.intp)
    y[np.arange(350) * 2 + rng.integers(0, 2, 350)] = 1
    sign, groups = 2 * y - 1, np.arange(n) // 2

    def per_pair() -> Floats:
        return np.repeat(rng.standard_normal(350), 2) * sign

    trap, liking = 0.35 * per_pair(), np.where(rng.random(n) < 0.5 + 0.17 * sign, 1.0, -1.0)
    models = [0.7 * liking + 0.15 * sign + trap + 0.7 * rng.standard_normal(n) for _ in range(5)]
    margin, first = per_pair(), np.where(np.arange(n) % 2, -1, 1)
    votes = [0.45 * sign + 0.5 * margin + 0.33 * per_pair() + trap + bias * first for bias in (0.3, -0.3)]
    return np.column_stack([*models, *(1 / (1 + np.exp(-5 * v)) for v in votes)]), groups, y


def paired(y: np.ndarray, p: Floats) -> float:
    """Share of pairs in which the right answer has the higher score. Ties count half."""
    more = np.sign(p[::2] - p[1::2]) * np.where(y[::2] == 1, 1, -1)
    return float(((more + 1) / 2).mean())


@pytest.mark.parametrize(
    ("families", "anchors", "error"),
    [(None, None, 0.15), (["rm"] * 5 + ["judge"] * 2, None, 0.08), (None, [5, 6], 0.1)],
)
def test_cluster_of_reward_models_does_not_outvote_a_judge(families, anchors, error) -> None:
    cases = [pairs(seed) for seed in range(4)]
    answers = [combiners.get("default", families=families, anchors=anchors).fit_predict(s, g) for s, g, _ in cases]
    truth = [y for _, _, y in cases]
    cluster = np.mean([paired(y, s[:, :5].mean(axis=1)) for s, _, y in cases])
    right = np.mean([paired(y, p) for y, p in zip(truth, answers, strict=True)])
    print(f"pairs: the cluster alone {cluster:.3f}, all {right:.3f}")  # noqa: T201
    assert right > cluster + 0.02 and right >= 0.76
    assert np.mean([calibration_error(y, p) for y, p in zip(truth, answers, strict=True)]) <= error


def test_report_notes_two_clusters_that_disagree() -> None:
    model = combiners.get("default").fit(*pairs(0)[:2])
    assert model.report().clusters.tolist() == [1, 1, 1, 1, 1, 2, 2]
    (note,) = model.report().notes(["a", "b", "c", "d", "e", "f", "g"])
    assert "two clusters disagree, a, b, c, d, e and f, g" in note
    for case in (votes(0), told((0.95,) * 5), told((0.99, 0.9, 0.8, 0.7, 0.6, 0.55))):
        assert not combiners.get("default").fit(case[0]).report().clusters.any()


def test_one_label_and_one_anchor_do_not_invert_the_model() -> None:
    for s, g, y in (told((0.95,) * 5), told((0.75,) * 5), votes(1), outvoted(0), told((0.9, 0.7))):
        plain = combiners.get("default").fit_predict(s, g)
        for value in (0.0, 1.0):
            label = np.where(np.arange(len(y)) == 7, value, np.nan)
            p = combiners.get("default").fit_predict(s, g, label)
            assert np.abs(np.delete(p - plain, 7)).mean() < 0.02
    s, g, y = told((0.9, 0.85, 0.8, 0.8, 0.75))
    plain = combiners.get("default").fit_predict(s, g)
    for k in range(5):
        anchored = combiners.get("default", anchors=[k]).fit_predict(s, g)
        assert np.abs(anchored - plain).mean() < 0.03 and accuracy(y, anchored) > accuracy(y, plain) - 0.01


def test_labels_reduce_the_share_of_the_mean_gradually() -> None:
    s, g, y = outvoted(1)
    shares = []
    for labelled in (0, 1, 5, 20, 100):
        labels = np.where(np.arange(len(y)) % (len(y) // labelled) == 0, y, np.nan) if labelled else None
        model = combiners.get("default", families=["rm"] * 5 + [None]).fit(s, g, labels)
        shares.append(float(model.state_dict()["0/mean_share"]))
    assert shares[0] == 1.0 and shares[1] > 0.9 and shares[-1] < 0.2
    assert (np.diff(shares) < 0).all()
