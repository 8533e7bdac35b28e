"""Reward quality with a bad verifier in the ensemble, before and after. pytest -s prints it."""

import io
import logging
import math

import numpy as np
import pytest

from forge_agents import Ensemble, Rule
from forge_verifiers import Cascade, HackingAlarm, Prior, SoftMinimum

from .simulated import Hanging, auroc, best_of, dead, judge, judges, played  # noqa: TID252 (no installed package)

ROWS = [t for call in range(5) for t in played(call)]


def against(trajectory):
    """Right where it does not matter, wrong where the honest judges are split."""
    split = abs(sum(trajectory.info["votes"]) - 3) <= 1
    return float(trajectory.info["truth"] != split)


def ring(size, **kwargs):
    return [Rule(against, name=f"ring{k}", **kwargs) for k in range(size)]


BAD = {
    "dead": lambda: [Rule(dead, name="bad", cost="expensive")],
    "hanging": lambda: [Hanging()],
    "constant": lambda: [Rule(lambda t: 1.0, name="bad")],
    "nan": lambda: [Rule(lambda t: math.nan, name="bad")],
    "some nan": lambda: [Rule(lambda t: math.nan if t.info["luck"] < 0.5 else t.info["votes"][5], name="bad")],
    "inverted": lambda: [Rule(lambda t: 1.0 - t.info["votes"][5], name="bad")],
    "noise": lambda: [Rule(lambda t: t.info["luck"], name="bad")],
    "against": lambda: ring(1),
    "ring of two": lambda: ring(2),
    "declared ring of three": lambda: ring(3, family="ring"),
}
WORST_AUROC = {"against": 0.05, "ring of two": 0.03, "declared ring of three": 0.05}  # a declared ring is one voice


@pytest.mark.parametrize("kind", BAD)
def test_bad_verifier_costs_little_accuracy(kind, caplog):
    caplog.set_level(logging.CRITICAL)
    bad = BAD[kind]()
    ensemble = Ensemble([*judges(), *bad])
    before, after = Ensemble(judges()).score(ROWS), ensemble.score(ROWS)
    quality = [(auroc(s, ROWS), best_of(s, ROWS)) for s in (before, after)]
    print(f"{kind}: AUROC, best of 8 {quality[0]} before, {quality[1]} after")  # noqa: T201
    assert quality[0][0] > 0.95 and quality[0][1] > 0.93
    assert quality[1][0] > quality[0][0] - WORST_AUROC.get(kind, 0.012)
    assert quality[1][1] > quality[0][1] - 0.06
    row = ensemble.report().verifiers[-1]
    assert (row.errors, row.timeouts) == {"dead": (1, 0), "hanging": (0, 1)}.get(kind, (0, 0))
    if kind != "some nan":
        counts = {"dead": (0, 0, 320), "hanging": (0, 0, 320), "nan": (0, 320, 0)}
        assert (row.scored, row.abstained, row.failed) == counts.get(kind, (320, 0, 0))
    assert ("no route" in row.last_error) == (kind == "dead")
    if isinstance(bad[0], Hanging):
        ensemble.score(ROWS)  # the hanging call is not repeated
        assert ensemble.report().verifiers[-1].last_error.startswith("skipped")
        bad[0].release.set()


@pytest.mark.parametrize(("kind", "lost"), [("inverted", 0.02), ("ring of two", 0.1), ("declared ring of three", 0.1)])
def test_bad_verifiers_cost_a_plain_mean_more(kind, lost):
    """The bounds above mean something: an ensemble that cannot tell good from bad breaks them."""
    verifiers = [Rule(v.function, name=v.name) for v in BAD[kind]()]
    mean = auroc(Ensemble([*judges(), *verifiers], "mean").score(ROWS), ROWS)
    assert mean < auroc(Ensemble(judges(), "mean").score(ROWS), ROWS) - lost


def test_after_a_policy_shift_quality_is_back_within_six_refits():
    ensemble = Ensemble(judges(), max_rows=512)
    for call in range(20):
        ensemble.score(played(call))
    test = [t for call in range(5) for t in played(900 + call, shift=True)]
    oracle = auroc(Ensemble(judges()).score(test), test)

    def now():
        ensemble.learning = False
        result = auroc(ensemble.score(test), test)
        ensemble.learning = True
        return result

    stale, version = now(), ensemble.version
    course = []
    for call in range(6):
        ensemble.score(played(100 + call, shift=True))
        course.append(now())
    print(f"AUROC {stale:.3f} after the shift, {course} by refit, {oracle:.3f} if fitted to it")  # noqa: T201
    assert stale < oracle - 0.08 and course[-1] > oracle - 0.03 and ensemble.version == version + 6


def everything(**kwargs):
    expensive = Rule(lambda t: t.info["votes"][5], name="expensive", cost="expensive")
    return Ensemble(
        [*judges()[:5], expensive],
        refit_every=2,
        max_rows=300,
        cascade=Cascade(warm_up_rows=100, verified_share=0.4),
        alarm=HackingAlarm(on_alarm="log", window=16),
        lower_bound=SoftMinimum(),
        priors={"expensive": Prior.of(0.8, strength=20)},
        cache_rows=100,
        **kwargs,
    )


def test_killed_and_resumed_ensemble_is_bit_equal():
    one, other = everything(), everything()
    for call in range(8):
        one.score(played(call, hacked=min(0.6, 0.05 * call)))
    file = io.BytesIO()
    np.savez(file, **one.state_dict())
    file.seek(0)
    with np.load(file, allow_pickle=False) as state:
        other.load_state_dict(dict(state))
    for call in range(6, 18):  # the cache knows some of the first
        rows = played(call, hacked=min(0.6, 0.05 * call))
        assert one.score(rows).tobytes() == other.score(rows).tobytes(), call
    left, right = one.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    assert [k for k in left if left[k].tobytes() != right[k].tobytes()] == []
    assert int(left["panel/draws"]) > 5 and len(left["panel/cache/scores"]) == 100 and one.alarms == other.alarms
    assert left["panel/counts"][5:, -1].min() > 0  # both remembered and skipped


def minority():
    """Two judges of correctness against four that agree with each other on something else."""
    rng = np.random.default_rng(0)
    rows = [t for call in range(5) for t in played(call)]
    for t in rows:
        other = rng.random() < 0.5
        t.info["other"] = ((rng.random(4) < 0.75) == other).astype(float).tolist()
    strangers = [Rule(lambda t, k=k: t.info["other"][k], name=f"other{k}") for k in range(4)]
    return rows, [judge(4), judge(5), *strangers]


def test_a_strong_prior_lets_a_good_minority_win():
    rows, verifiers = minority()
    alone = auroc(judge(5).score(rows), rows)
    mean = auroc(Ensemble(verifiers, "mean").score(rows), rows)
    blind = auroc(Ensemble(verifiers).score(rows), rows)
    weak = auroc(Ensemble(verifiers, priors={"judge5": Prior(tpr=0.82, fpr=0.2, strength=10)}).score(rows), rows)
    told = Ensemble(verifiers, priors={"judge5": Prior(tpr=0.82, fpr=0.2, strength=1000)})
    strong = auroc(told.score(rows), rows)
    assert abs(blind - mean) < 0.02 and abs(weak - mean) < 0.02  # too little evidence, so the mean stays
    assert strong > alone + 0.05 > mean + 0.1
    report = told.report().verifiers
    assert report[1].tpr == pytest.approx(0.82, abs=0.04) and report[1].fpr == pytest.approx(0.2, abs=0.04)
    assert report[0].tpr - report[0].fpr > 0.3 > abs(report[2].tpr - report[2].fpr)


def test_prior_inverts_an_inverted_verifier():
    rows = ROWS
    flipped = Rule(lambda t: 1.0 - t.info["votes"][5], name="flipped")
    pair = [judge(0), flipped]
    blind = auroc(Ensemble(pair).score(rows), rows)
    told = auroc(Ensemble(pair, priors={"flipped": Prior(tpr=0.18, fpr=0.8, strength=50)}).score(rows), rows)
    assert blind < 0.65 and told > 0.85


def test_bad_priors_are_refused():
    with pytest.raises(ValueError, match="tpr=1"):
        Prior(tpr=1.0, fpr=0.1, strength=5)
    with pytest.raises(ValueError, match="strength=0"):
        Prior.of(0.8, strength=0)
    with pytest.raises(KeyError, match="judge6"):
        Ensemble(judges(), priors={"judge6": Prior.of(0.8, strength=5)})
    with pytest.raises(ValueError, match="no priors"):
        Ensemble(judges(), "mean", priors={"judge5": Prior.of(0.8, strength=5)})
    same = Ensemble([Rule(lambda t: 1.0, name="same")], priors={"same": Prior.of(0.9, strength=5)}).score(ROWS)
    assert len(np.unique(same)) == 1 and 0 < same[0] < 1
