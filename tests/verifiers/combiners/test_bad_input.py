"""Wrong or degenerate input gives a clear error or a documented result, for every combiner."""

from __future__ import annotations

import numpy as np
import pytest

from forge_agents.errors import UnknownIdError
from forge_verifiers import combiners

from .regimes import votes  # noqa: TID252 (tests are no installed package)

LABEL_FREE = [name for name in combiners.names() if name != "logistic"]


def fresh(name: str):
    return combiners.get(name)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UnknownIdError, match="'weaver'"):
        combiners.get("weavr")


@pytest.mark.parametrize("name", combiners.names())
def test_wrong_shapes_and_infinities_are_errors(name: str) -> None:
    s, g, y = votes(0, n=64, m=4)
    for bad, message in (
        (s[:, 0], "shape"),
        (s[:, :0], "no verifier"),
        (s[:0], "no response"),
        (np.where(s > 0.5, np.inf, s), "infinite"),
        ([["a"]], "numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            fresh(name).fit(bad)
    with pytest.raises(ValueError, match="one id per response"):
        fresh(name).fit(s, g[:-1])
    with pytest.raises(ValueError, match="labels arrived with shape"):
        fresh(name).fit(s, g, y[:-1])
    with pytest.raises(ValueError, match="0, 1 or NaN"):
        fresh(name).fit(s, g, y + 1)
    model = fresh(name).fit(s, g, y)
    with pytest.raises(ValueError, match="3 verifiers"):
        model.predict_proba(s[:, :3])


@pytest.mark.parametrize("name", combiners.names())
def test_prediction_before_fit_raises(name: str) -> None:
    for call in (lambda m: m.predict_proba(np.zeros((2, 2))), lambda m: m.report(), lambda m: m.state_dict()):
        with pytest.raises(combiners.NotFittedError, match="Call fit"):
            call(fresh(name))


def test_state_of_another_combiner_is_refused() -> None:
    s, _, _ = votes(0, n=64)
    with pytest.raises(ValueError, match="same kind"):
        fresh("default").load_state_dict(fresh("mean").fit(s).state_dict())
    with pytest.raises(ValueError, match="num_verifiers"):
        fresh("mean").load_state_dict({"combiner": np.array("mean")})


def test_logistic_without_both_labels_raises() -> None:
    s, _, y = votes(0, n=64)
    with pytest.raises(ValueError, match="'default' combiner"):
        fresh("logistic").fit(s)
    with pytest.raises(ValueError, match="both classes"):
        fresh("logistic").fit(s, labels=np.where(y == 1, 1.0, np.nan))


@pytest.mark.parametrize("name", LABEL_FREE)
def test_one_response_gets_a_probability_and_none_gets_none(name: str) -> None:
    p = fresh(name).fit_predict([[0.2, 0.9, np.nan]])
    assert p.shape == (1,) and 0 <= p[0] <= 1
    s, _, _ = votes(0, n=64)
    assert fresh(name).fit(s).predict_proba(s[:0]).shape == (0,)


@pytest.mark.parametrize("name", ["mean", "default"])
def test_single_verifier_determines_the_ranking(name: str) -> None:
    s = np.linspace(-3, 5, 50)[:, None]
    p = fresh(name).fit_predict(s)
    assert (np.diff(p) >= 0).all() and p[-1] > 0.7 and p[0] < 0.3


@pytest.mark.parametrize("name", ["mean", "majority", "default"])
@pytest.mark.parametrize("constant", [np.nan, 1.0])
def test_abstaining_and_constant_verifiers_give_even_odds(name: str, constant: float) -> None:
    np.testing.assert_allclose(fresh(name).fit_predict(np.full((20, 3), constant)), 0.5, atol=1e-6)


def test_row_of_abstentions_gets_the_class_balance() -> None:
    s, _, y = votes(2, pi=0.2)
    rng = np.random.default_rng(0)
    s[rng.random(s.shape) < 0.1] = np.nan
    p = fresh("default").fit(s).predict_proba(np.full((1, s.shape[1]), np.nan))
    assert abs(p[0] - y.mean()) < 0.15


def test_scores_outside_the_fitted_range_are_clipped() -> None:
    s = np.random.default_rng(0).random((200, 5))
    for name in ("mean", "default"):
        model = fresh(name).fit(s)
        np.testing.assert_allclose(model.predict_proba(np.full((1, 5), 99.0)), model.predict_proba(s.max(0)[None]))


def test_families_and_anchors_must_fit_the_verifiers() -> None:
    s, _, _ = votes(0, n=64, m=4)
    with pytest.raises(ValueError, match="one per verifier"):
        combiners.get("default", families=["a"]).fit(s)
    with pytest.raises(ValueError, match="column numbers 0 to 3"):
        combiners.get("default", families={7: "a"}).fit(s)
    with pytest.raises(ValueError, match="anchor 4"):
        combiners.get("default", anchors=[4]).fit(s)
