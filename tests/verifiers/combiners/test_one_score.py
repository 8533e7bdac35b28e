"""Verifiers that give one score or abstain vote by giving it, with every combiner."""

from __future__ import annotations

import numpy as np
import pytest

from forge_agents import Ensemble, Rule
from forge_agents.types import Trajectory, Turn
from forge_verifiers import combiners

from .regimes import Floats, auroc  # noqa: TID252 (tests are no installed package)


def votes(seed: int, *, accuracy: float = 0.75, spoken: float = 0.6, ordinary: int = 0, n: int = 600):
    """Three verifiers that accept or abstain, three that reject or abstain, then ordinary ones."""
    rng = np.random.default_rng([41, seed])
    y = rng.integers(0, 2, n)
    opinion = np.where(rng.random((n, 6)) < accuracy, y[:, None], 1 - y[:, None])
    side = np.array([1, 1, 1, 0, 0, 0])
    speaks = (opinion == side) & (rng.random((n, 6)) < spoken)
    extra = np.where(rng.random((n, ordinary)) < 0.7, y[:, None], 1 - y[:, None])
    return np.hstack([np.where(speaks, side, np.nan), extra]).astype(float), y


def fitted(name: str, s: Floats, y: np.ndarray) -> combiners.Combiner:
    labels = np.where(np.arange(len(y)) % 3 == 0, y, np.nan) if name == "logistic" else None
    return combiners.get(name).fit(s, np.arange(len(y)) // 6, labels)


@pytest.mark.parametrize("name", combiners.names())
@pytest.mark.parametrize("ordinary", [0, 1, 3])
@pytest.mark.parametrize(("accuracy", "spoken"), [(0.75, 0.6), (0.95, 0.9), (0.6, 0.3), (0.75, 0.1)])
def test_more_votes_for_a_response_never_lower_its_value(name, ordinary, accuracy, spoken) -> None:
    for seed in range(2):
        s, y = votes(seed, accuracy=accuracy, spoken=spoken, ordinary=ordinary)
        model = fitted(name, s, y)
        for level in (0.0, 1.0) if ordinary else (np.nan,):
            rows = np.full((7, 6 + ordinary), np.nan)  # three votes against, two, one, none, one for, two, three
            rows[:, 6:] = level
            for k in range(3):
                rows[: k + 1, 3 + k], rows[6 - k :, k] = 0.0, 1.0
            value = model.predict_proba(rows)
            assert (np.diff(value) >= -1e-9).all()
            assert value[-1] > value[0]


@pytest.mark.parametrize("seed", [15, 100, 208, 216, 271])
def test_rare_vote_for_a_response_does_not_lower_a_high_value(seed):
    """The few votes of the rule make its evidence uncertain, which moves P(correct) towards 0.5."""
    rng = np.random.default_rng(seed)
    n = int(rng.choice([32, 64, 128, 256]))
    y = rng.random(n) < rng.choice([0.3, 0.5, 0.8])
    graded = np.clip(0.5 + 0.5 * (y[:, None] - 0.5) + rng.normal(0, 0.2, (n, 4)), 0, 1)
    rate = rng.choice([0.02, 0.05, 0.1])
    vote = np.where(rng.random(n) < np.where(y, 1.2 * rate, rate), 1.0, np.nan)
    model = combiners.get("default").fit(np.column_stack([graded, vote]), np.arange(n) // 8)
    silent, accepted = (model.predict_proba(np.column_stack([graded, np.full(n, x)])) for x in (np.nan, 1.0))
    assert (accepted >= silent).all()


@pytest.mark.parametrize("name", combiners.names())
def test_one_score_verifiers_separate_right_from_wrong(name: str) -> None:
    s, y = votes(0)
    assert auroc(y, fitted(name, s, y).predict_proba(s)) > 0.8
    assert auroc(y, fitted(name, s[:, :3], y).predict_proba(s[:, :3])) > 0.7
    scaled = np.where(s == 1.0, 7.0, np.where(s == 0.0, -2.0, s))  # any number above or below 0.5 will do
    np.testing.assert_allclose(fitted(name, scaled, y).predict_proba(scaled), fitted(name, s, y).predict_proba(s))


@pytest.mark.parametrize("name", ["default", "mean", "majority", "dawid-skene", "weaver"])
def test_unqueried_verifier_casts_no_vote(name: str) -> None:
    s, _ = votes(1)
    asked = np.random.default_rng(0).random(s.shape) < 0.7
    model = combiners.get(name).fit(s, queried=asked)
    one, other = (model.predict_proba(np.where(asked, s, x), queried=asked) for x in (0.0, 1.0))
    assert (one == other).all()


@pytest.mark.parametrize("name", combiners.names())
def test_state_is_restored_bit_equal_with_the_meaning_of_abstentions(name: str) -> None:
    s, y = votes(2)
    model, loaded = fitted(name, s, y), combiners.get(name)
    loaded.load_state_dict(model.state_dict())
    assert (loaded.predict_proba(s) == model.predict_proba(s)).all()


def trajectory(row: int, scores: Floats) -> Trajectory:
    turn = Turn(agent="a", index=0, observation="", action=str(row), reward=0.0)
    return Trajectory(agent="a", policy="p", turns=(turn,), env_id="t", seed=row // 8, info={"votes": scores.tolist()})


def test_ensemble_of_one_score_rules_rewards_by_votes() -> None:
    s, y = votes(3, n=96)
    trajectories = [trajectory(row, scores) for row, scores in enumerate(s)]
    rules = [Rule(lambda t, k=k: t.info["votes"][k], name=f"rule {k}") for k in range(6)]
    for combine in ("default", "mean", "majority", "dawid-skene", "weaver"):
        paid = Ensemble(rules, combine).score(trajectories)
        heard = ~np.isnan(paid)
        assert heard.sum() > 80 and auroc(y[heard], paid[heard].astype(float)) > 0.75, combine
