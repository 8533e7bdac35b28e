import numpy as np
import pytest

from forge_agents import Ensemble, Rule
from forge_verifiers import HackingAlarm, LowerConfidenceBound, SoftMinimum, combiners
from forge_verifiers.core.verifier import group_ids
from forge_verifiers.ensemble.alarms import AlarmMonitor, group_spread
from forge_verifiers.ensemble.posterior import on_log_odds_scale

from .simulated import auroc, judge, judges, played, truth  # noqa: TID252 (tests are no installed package)

ROWS = [t for call in range(5) for t in played(call)]


def test_soft_minimum_lies_between_minimum_and_mean():
    rewards = np.array([[0.2, 0.5], [0.8, 0.5], [0.5, 0.5]])
    least, most = rewards.min(axis=0), rewards.mean(axis=0)
    soft = SoftMinimum(beta=0.1)(rewards)
    assert soft[0] == pytest.approx(-0.1 * np.log(np.mean(np.exp(-rewards[:, 0] / 0.1))))
    assert least[0] < soft[0] < most[0] and soft[1] == pytest.approx(0.5)
    np.testing.assert_allclose(SoftMinimum(beta=1e-4)(rewards), least, atol=1e-3)
    np.testing.assert_allclose(SoftMinimum(beta=1e4)(rewards), most, atol=1e-3)


def test_soft_minimum_reduces_the_gain_from_fooling_one_verifier():
    """Only the confident judge accepts some wrong responses."""

    def big(t):
        fooled = not t.info["truth"] and t.info["luck"] < 0.15
        return 0.9 if fooled else (0.8 if t.info["truth"] else 0.1) + 0.1 * t.info["luck"]

    verifiers = [*judges()[:4], Rule(big, name="big")]
    fooled = np.array([not t.info["truth"] and t.info["luck"] < 0.15 for t in ROWS])
    plain, careful = (Ensemble(verifiers, lower_bound=p).score(ROWS) for p in (None, SoftMinimum(beta=0.02)))
    assert careful[fooled].mean() < 0.75 * plain[fooled].mean()
    assert careful[truth(ROWS)].mean() > 0.8 * plain[truth(ROWS)].mean()
    assert (careful <= plain + 0.1).all() and auroc(careful, ROWS) > auroc(plain, ROWS) - 0.02


def test_soft_minimum_leaves_out_whole_families():
    """Both of a fooled pair must be left out together, else each covers for the other."""
    verifiers = [judge(0), judge(1), *(judge(k, name=f"pair{k}") for k in (4, 5))]
    related = [*verifiers[:2], *(Rule(v.function, name=v.name, family="pair") for v in verifiers[2:])]
    rows = [t for t in ROWS if t.info["votes"][4] == t.info["votes"][5] == 1 and not any(t.info["votes"][:2])]
    alone, together = (Ensemble(v, lower_bound=SoftMinimum(beta=0.02)) for v in (verifiers, related))
    for ensemble in (alone, together):
        ensemble.score(ROWS)
        ensemble.learning = False
    assert together.score(rows).mean() < alone.score(rows).mean()


def test_lower_confidence_bound_subtracts_the_uncertainty():
    plain = Ensemble(judges()).assess(ROWS)
    bound = Ensemble(judges(), lower_bound=LowerConfidenceBound(deviations=2)).score(ROWS)
    np.testing.assert_allclose(bound, np.maximum(plain.scores - 2 * plain.noise, 0), atol=1e-6)
    assert plain.noise.shape == (320,) and plain.noise.min() >= 0 and plain.noise.max() > 0.01
    few = Ensemble(judges()).assess(ROWS[:64]).noise.mean()
    assert few > 1.5 * plain.noise.mean()


def test_log_odds_scale_keeps_the_order_and_the_differences_near_the_ends():
    plain, odds = (Ensemble(judges(), scale=scale).assess(ROWS) for scale in ("probability", "log_odds"))

    def expected(probability):
        inside = np.clip(probability, 1 / (1 + np.exp(8)), 1 / (1 + np.exp(-8))).astype(np.float64)
        return 0.5 + np.log(inside / (1 - inside)) / 16

    np.testing.assert_allclose(odds.scores, expected(plain.scores), atol=1e-3)
    low, high = expected(plain.scores - plain.noise), expected(plain.scores + plain.noise)
    np.testing.assert_allclose(odds.noise, (high - low) / 2, atol=1e-3)
    assert auroc(odds.scores, ROWS) == pytest.approx(auroc(plain.scores, ROWS), abs=1e-3)
    bounded = Ensemble(judges(), lower_bound=SoftMinimum()).score(ROWS)
    both = Ensemble(judges(), lower_bound=SoftMinimum(), scale="log_odds").score(ROWS)
    assert ((bounded > 0.5) == (both > 0.5)).all()


def test_noise_on_the_log_odds_scale_is_no_larger_than_a_score_in_0_1_permits():
    noise = Ensemble(judges(), lower_bound=LowerConfidenceBound(deviations=2), scale="log_odds").assess(ROWS).noise
    assert noise.min() >= 0 and 0.01 < noise.max() <= 0.5


@pytest.mark.parametrize("scale", ["probability", "log_odds"])
def test_alarm_seeks_equal_rewards_on_the_scale_of_the_rewards(monkeypatch, scale):
    calls = []
    monkeypatch.setattr(AlarmMonitor, "add", lambda self, **values: calls.append(values))
    scores = Ensemble(judges(), alarm=HackingAlarm(), scale=scale).score(ROWS)
    assert calls[0]["spread"] == group_spread(scores, group_ids(ROWS))
    assert calls[0]["reward"] == pytest.approx(Ensemble(judges()).score(ROWS).mean(), abs=1e-6)


def test_log_odds_point_to_few_correct_responses_among_well_formed_ones():
    """Eight verifiers tell well-formed responses from others more clearly than correct ones from wrong ones."""
    correlations, shares = [], []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        groups = np.repeat(np.arange(64), 8)
        kind = rng.choice(3, size=len(groups), p=(0.55, 0.33, 0.12))  # malformed, well-formed and wrong, correct
        accepted = np.array([0.1, 0.6, 0.92])[kind]
        scores = (rng.random((len(groups), 8)) < accepted[:, None]).astype(np.float32)
        probability = combiners.get("default").fit_predict(scores, groups).astype(np.float32)
        log_odds, _ = on_log_odds_scale(probability, None)
        correct = kind == 2
        mixed = [rows for g in range(64) if correct[rows := np.flatnonzero(groups == g)].any()]
        scales = (probability, log_odds)
        correlations.append([np.mean([np.corrcoef(p[rows], correct[rows])[0, 1] for rows in mixed]) for p in scales])
        shares.append(probability.mean() / correct.mean())
    differences = np.subtract(*np.transpose(correlations)[::-1])
    assert min(shares) > 2.5  # the combiner takes far too many for correct
    assert differences.min() > 0.03 and differences.mean() > 0.05


def test_log_odds_scale_keeps_abstentions_and_refuses_other_names():
    silent = Rule(lambda t: None, name="silent")
    assert np.isnan(Ensemble([silent, Rule(lambda t: None, name="mute")], scale="log_odds").score(ROWS)).all()
    with pytest.raises(ValueError, match="scale='odds' of an ensemble is none of probability, log_odds"):
        Ensemble(judges(), scale="odds")


def test_combiner_without_uncertainty_has_no_noise_and_no_bound():
    assert Ensemble(judges(), "mean").assess(ROWS).noise is None
    with pytest.raises(ValueError, match="combine='default'"):
        Ensemble(judges(), "mean", lower_bound=LowerConfidenceBound())
    assert Ensemble(judges(), "mean", lower_bound=SoftMinimum()).score(ROWS).shape == (320,)


def test_soft_minimum_of_one_verifier_is_its_posterior():
    one, plain = (Ensemble([judge(0)], lower_bound=p).score(ROWS) for p in (SoftMinimum(), None))
    np.testing.assert_allclose(one, plain, atol=1e-6)


@pytest.mark.parametrize("wrong", [lambda: SoftMinimum(beta=0), lambda: LowerConfidenceBound(deviations=-1)])
def test_settings_are_checked(wrong):
    with pytest.raises(ValueError, match="must be positive"):
        wrong()
