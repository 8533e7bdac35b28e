import re

import numpy as np
import pytest

from forge_agents import Ensemble, Rule
from forge_agents.errors import UnknownIdError
from forge_verifiers import Cascade, HackingAlarm
from forge_verifiers.ensemble.ensemble import ScoreWindow

from .simulated import auroc, dead, judge, judges, played  # noqa: TID252 (tests are no installed package)

ROWS = [t for call in range(5) for t in played(call)]


def test_the_ensemble_beats_its_best_verifier_without_labels():
    best = max(auroc(verifier.score(ROWS), ROWS) for verifier in judges())
    assert auroc(Ensemble(judges()).score(ROWS), ROWS) > best + 0.02


def test_ensemble_abstains_if_all_verifiers_do():
    silent = Rule(lambda t: None if t.seed == 0 else t.info["votes"][0], name="half")
    scores = Ensemble([silent]).score(ROWS)
    assert np.isnan(scores[:8]).all() and not np.isnan(scores[8:]).any()
    assert np.isnan(Ensemble([Rule(dead, name="bad")]).score(ROWS)).all()


def test_no_trajectories_have_an_answer():
    ensemble = Ensemble(judges())
    assert ensemble.scores([]).shape == (0, 6) and ensemble.version == 0
    assert ensemble.score([]).shape == ensemble.assess([]).scores.shape == (0,)


@pytest.mark.parametrize("verifiers", [1, 2, 6])
def test_one_trajectory_and_few_verifiers_have_an_answer(verifiers):
    score = Ensemble(judges()[:verifiers]).score(played(0, groups=1, siblings=1))
    assert score.shape == (1,) and score.dtype == np.float32 and 0 <= score[0] <= 1


def test_refits_are_counted_and_can_be_stopped():
    ensemble = Ensemble(judges(), refit_every=2)
    versions = []
    for call in range(5):
        ensemble.score(played(call, groups=4))
        versions.append(ensemble.version)
    assert versions == [1, 1, 2, 2, 3]
    ensemble.learning = False
    before = ensemble.state_dict()
    ensemble.score(played(9))
    after = ensemble.state_dict()
    assert {k for k in before if before[k].tobytes() != after[k].tobytes()} == {"panel/counts"}


def test_foreign_state_is_refused():
    with pytest.raises(ValueError, match="same verifiers"):
        Ensemble(judges()).load_state_dict(Ensemble(judges()[:3]).state_dict())
    with pytest.raises(ValueError, match="lacks"):
        Ensemble(judges()).load_state_dict({})


def test_a_verifier_that_becomes_noise_loses_its_accuracy():
    def shifting(t):
        return t.info["votes"][5] if t.seed < 1_000_000 else t.info["luck"]

    ensemble = Ensemble([*judges()[:4], Rule(shifting, name="shifting")], max_rows=320)
    for call in range(5):
        ensemble.score(played(call))
    accuracy = ensemble.report().verifiers[-1].accuracy
    for call in range(10, 35):
        ensemble.score(played(call))
    assert ensemble.report().verifiers[-1].accuracy < accuracy - 0.15


def test_the_window_is_bounded_and_keeps_whole_groups():
    window = ScoreWindow(num_verifiers=1, max_rows=40)
    queried, unknown = np.ones((8, 1), bool), np.full(8, np.nan, np.float32)
    for call in range(30):
        window.add(np.full((8, 1), call, np.float32), np.repeat([0, 1], 4), unknown, queried)
        assert len(window.groups) <= 40
    assert set(np.unique(window.groups, return_counts=True)[1]) == {4}
    assert window.scores.max() == 29 and len(window.groups) == 40
    assert window.scores.min() < 25  # random groups leave, not the oldest
    window.add(
        np.zeros((100, 1), np.float32), np.zeros(100, np.intp), np.zeros(100, np.float32), np.ones((100, 1), bool)
    )
    assert len(window.groups) == 100 and len(np.unique(window.groups)) == 1


def test_few_labels_reach_the_combiner():
    labeled = Ensemble(judges(), "logistic", label=lambda t: t.info["truth"] if t.seed < 100_000 else None)
    assert auroc(labeled.score(ROWS), ROWS) > 0.85
    with pytest.raises(ValueError, match="labels"):
        Ensemble(judges(), "logistic").score(ROWS)


def test_report_shows_good_and_inverted_verifiers():
    ensemble = Ensemble([*judges(), Rule(lambda t: 1.0 - t.info["votes"][5], name="bad")])
    ensemble.score(ROWS)
    report = ensemble.report()
    accuracy = {row.name: row.accuracy for row in report.verifiers}
    assert accuracy["judge5"] > accuracy["judge0"] > 0.5 > accuracy["bad"]
    assert "judge5" in report.table() and report.version == 1 and report.window_rows == 320


def coins():
    def coin(k, t):
        return float(np.random.default_rng([k, int(1e6 * t.info["luck"])]).random() > 0.5)

    return [Rule(lambda t, k=k: coin(k, t), name=f"coin{k}") for k in range(5)]


@pytest.mark.parametrize(
    ("verifiers", "options", "warns"),
    [
        (coins(), {}, True),
        (coins(), {"anchors": ["coin0"]}, False),
        ([*coins()[1:], Rule(lambda t: 0.0, name="strict")], {"anchors": ["strict"]}, True),
        (
            [*coins()[1:], Rule(lambda t: 1.0 if t.info["votes"][0] else None, name="rule")],
            {"anchors": ["rule"]},
            False,
        ),
        (coins(), {"label": lambda t: t.info["truth"] if t.seed % 8 == 0 else None}, False),
        (coins(), {"combine": "mean"}, False),
        (judges(), {}, False),
        (judges()[3:], {}, False),
    ],
)
def test_undetermined_direction_warns_once_in_training(verifiers, options, warns, caplog):
    ensemble = Ensemble(verifiers, **options)
    for call in range(8):
        ensemble.score(played(call, groups=4))
    warnings = [text for text in caplog.messages if "which responses are correct" in text]
    assert len(warnings) == warns
    assert all("ensemble: on 128 rows none of 5 verifiers" in text for text in warnings)
    assert all("anchors=, or label=" in text for text in warnings)


def test_report_does_not_rest_on_an_anchor_that_never_varies():
    strict = Rule(lambda t: 0.0, name="strict")
    ensemble = Ensemble([*judges(), strict], anchors=["strict"])
    ensemble.score(ROWS)
    text = "and the anchor strict scores all of them the same: the direction rests on 6 verifiers"
    assert any(text in note for note in ensemble.report().notes)
    informed = Ensemble([*judges(), strict], anchors=["strict", "judge5"])
    informed.score(ROWS)
    assert "which responses count as correct follows the anchor judge5" in informed.report().notes


def test_mistakes_in_priors_and_labels_name_their_source():
    with pytest.raises(TypeError, match=r"the prior of 'judge0' is 0.8. Pass a Prior, such as Prior.of"):
        Ensemble(judges(), priors={"judge0": 0.8})
    for label, kind in ((lambda t: t.info["gold"], KeyError), (lambda t: "yes", ValueError)):
        with pytest.raises(kind) as raised:
            Ensemble(judges(), label=label).score(ROWS)
        assert raised.value.__notes__[0].startswith("in label= of 'ensemble', called with trajectory 0, of 'a' in t")
    for value in ("yes", 2.0, 0.7, [True]):
        with pytest.raises(ValueError, match=rf"^the label {re.escape(repr(value))} is none of True, False and None"):
            Ensemble(judges(), label=lambda t, value=value: value).score(ROWS)


@pytest.mark.parametrize(
    ("verifiers", "settings", "message"),
    [
        (Rule(dead, name="bad"), {}, "verifiers is of type Rule. Pass a list"),
        ([Rule(dead, name="b")], {"anchors": "b"}, "anchors is the string 'b'. Pass a list"),
        ([Rule(dead, name="b")], {"label": np.ones(3)}, "label is of type ndarray. Pass a function"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused(verifiers, settings, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        Ensemble(verifiers, **settings)


@pytest.mark.parametrize("combine", ["mean", "majority", "dawid-skene", "weaver", "default"])
@pytest.mark.parametrize("odd", [None, 0.5, 1.0])
def test_one_response_of_one_uninformative_verifier(combine, odd):
    (score,) = Ensemble([Rule(lambda t: odd, name="only")], combine).score(played(0, groups=1, siblings=1))
    assert np.isnan(score) if odd is None else 0 <= score <= 1


@pytest.mark.parametrize(
    ("verifiers", "options", "error", "message"),
    [
        (judges(), {"refit_every": 0}, ValueError, "refit_every="),
        (judges(), {"max_rows": 0}, ValueError, "max_rows="),
        (judges(), {"timeout_s": float("inf")}, ValueError, "timeout_s="),
        ([], {}, ValueError, "no verifiers"),
        ([judge(0), judge(0)], {}, ValueError, "two verifiers"),
        ([lambda x: 1], {}, TypeError, "Rule"),
        (judges(), {"anchors": ["judge11"]}, UnknownIdError, "judge1"),
        (judges(), {"combine": "wever"}, UnknownIdError, "combiner"),
    ],
)
def test_wrong_arguments_are_refused(verifiers, options, error, message):
    with pytest.raises(error, match=message):
        Ensemble(verifiers, **options)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        *((HackingAlarm, {"on_alarm": "shout"}), (HackingAlarm, {"window": 3}), (HackingAlarm, {"threshold": 0})),
        *((HackingAlarm, {"min_change": 2}), (HackingAlarm, {"max_shrinkage": 0}), (HackingAlarm, {"min_spread": 1})),
        *((Cascade, {"undecided": (0.9, 0.1)}), (Cascade, {"undecided": (-0.1, 0.5)}), (Cascade, {"warm_up_rows": 0})),
        (Cascade, {"verified_share": 0.0}),
    ],
)
def test_settings_are_checked(kind, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        kind(**wrong)
