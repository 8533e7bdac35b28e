import numpy as np
import pytest

from forge_agents import Ensemble, Rule
from forge_verifiers import Cascade, SelfConsistency, combiners

from .simulated import auroc, judge, judges, played, truth  # noqa: TID252 (tests are no installed package)


def hard(seed, **kwargs):
    """The expensive judge is worse, too, if the four cheap judges disagree."""
    rng = np.random.default_rng([8, seed])
    rows = played(seed, **kwargs)
    for t in rows:
        cheap = rng.random(4) < 0.78
        sure = 0.7 if cheap.sum() == 2 else 0.9
        fair = [*cheap, rng.random() < sure]
        t.info["votes"][:5] = [float(ok == t.info["truth"]) for ok in fair]
    return rows


def expensive(asked):
    def grade(trajectory):
        asked.append(trajectory)
        return trajectory.info["votes"][4]

    return Rule(grade, name="expensive", cost="expensive")


def cheap():
    return [judge(k) for k in range(4)]


def test_cascade_skips_the_expensive_judge_without_bias():
    requests, seen, spared = [], [], []
    cascade = Cascade(verified_share=0.2, undecided=(0.15, 0.85))
    ensemble = Ensemble([*cheap(), expensive(requests)], cascade=cascade, refit_every=4)
    for call in range(50):
        rows = hard(call, groups=16)
        before = len(requests)
        spared.append(ensemble.score(rows))
        seen += rows
        if call > 10:
            assert len(requests) - before < len(rows)
    gold, votes = truth(seen), np.array([t.info["votes"][:5] for t in seen])
    tpr, fpr = votes[gold, 4].mean(), votes[~gold, 4].mean()
    row = ensemble.report().verifiers[-1]
    assert row.tpr == pytest.approx(tpr, abs=0.06) and row.fpr == pytest.approx(fpr, abs=0.06)

    votes[votes[:, :4].sum(axis=1) != 2, 4] = np.nan  # without a sample it is heard on undecided rows only
    naive = combiners.get("default").fit(votes, np.array([t.seed for t in seen])).report()
    assert tpr - naive.tpr[4] > 0.1 and naive.fpr[4] - fpr > 0.1

    share = row.skipped / len(seen)
    assert row.skipped == len(seen) - len(requests) and share > 0.3
    full = Ensemble([*cheap(), expensive([])], refit_every=4)
    everybody = np.concatenate([full.score(hard(call, groups=16)) for call in range(50)])
    assert auroc(np.concatenate(spared), seen) > auroc(everybody, seen) - 0.03
    assert ensemble.report().skipped_fraction == pytest.approx(share / 5, abs=1e-6)


def test_only_fully_scored_rows_are_learned():
    cascade = Cascade(verified_share=0.25, warm_up_rows=64)
    ensemble = Ensemble([*cheap(), expensive([])], cascade=cascade)
    for call in range(20):
        ensemble.score(hard(call))
    scores = ensemble.state_dict()["window/scores"]
    assert not np.isnan(scores).any() and 64 + 8 * 8 < len(scores) < 64 + 80 * 8


def test_all_verifiers_are_called_before_the_first_fit():
    requests = []
    ensemble = Ensemble([*cheap(), expensive(requests)], cascade=Cascade(warm_up_rows=100))
    for call, rows in enumerate([64, 128]):
        ensemble.score(hard(call))
        assert len(requests) == rows
    ensemble.score(hard(3))
    assert len(requests) < 192


def test_evaluation_skips_calls_but_draws_no_sample():
    ensemble = Ensemble([*cheap(), expensive([])], cascade=Cascade(warm_up_rows=1))
    ensemble.score(hard(0))
    ensemble.learning = False
    before = ensemble.state_dict()
    ensemble.score(hard(1))
    after = ensemble.state_dict()
    assert {k for k in before if before[k].tobytes() != after[k].tobytes()} <= {
        "panel/counts",
        *(k for k in before if k.startswith("panel/cache/")),
    }


def test_verifiers_that_compare_receive_whole_groups():
    sizes = []

    class Watched(SelfConsistency):
        def assess(self, trajectories):
            sizes.append(np.unique([t.seed for t in trajectories], return_counts=True)[1])
            return super().assess(trajectories)

    ensemble = Ensemble([*judges(), Watched(cost="model")], cascade=Cascade(warm_up_rows=1, undecided=(0.3, 0.7)))
    for call in range(6):
        ensemble.score(played(call))
    assert all((size == 8).all() for size in sizes) and sum(map(len, sizes)) < 48


@pytest.mark.parametrize("panel", [judges(), [*cheap(), *cheap()][:2], [expensive([])]])
def test_cascade_with_one_cost_class_is_refused(panel):
    with pytest.raises(ValueError, match=f"all verifiers have cost='{panel[0].cost}'. Leave it out"):
        Ensemble(panel, cascade=Cascade())


def test_rows_without_cheap_scores_reach_the_expensive_verifier():
    requests = []
    quiet = [Rule(lambda t, k=k: None if t.info["luck"] < 0.5 else t.info["votes"][k], name=f"q{k}") for k in range(4)]
    ensemble = Ensemble([*quiet, expensive(requests)], cascade=Cascade(warm_up_rows=1, verified_share=0.01))
    for call in range(4):
        rows, before = hard(call), len(requests)
        scores = ensemble.score(rows)
        assert {id(t) for t in rows if t.info["luck"] < 0.5} <= {id(t) for t in requests[before:]}
        assert not np.isnan(scores).any()


def test_a_failed_call_is_no_evidence():
    """A judge whose abstentions mean "wrong" says nothing when it is down."""
    down = []

    def shaky(trajectory):
        if down:
            raise ConnectionError("down")
        return None if not trajectory.info["truth"] and trajectory.info["luck"] < 0.6 else trajectory.info["votes"][5]

    ensemble = Ensemble([*judges()[:4], Rule(shaky, name="shaky", cost="model")])
    for call in range(6):
        ensemble.score(played(call))
    down.append(True)
    ensemble.learning = False
    rows = [t for call in range(5) for t in played(50 + call)]
    four = Ensemble(judges()[:4])
    four.score(rows)
    assert abs(ensemble.score(rows).mean() - truth(rows).mean()) < 0.08
    assert auroc(ensemble.score(rows), rows) > auroc(four.score(rows), rows) - 0.02
