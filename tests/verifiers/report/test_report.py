import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from forge_agents import Ensemble, Rule
from forge_agents.errors import RunFolderError
from forge_agents.types import Trajectory
from forge_verifiers import combiners
from forge_verifiers.report.pictures import correlation_figure, labels
from forge_verifiers.report.reasons import direction, independent_votes, with_reasons
from forge_verifiers.report.report import EnsembleReport, Evidence, VerifierReport, deblurred, interval, page

HOSTILE = '</td></html><script>alert("$x$")</script>\x1b[31m\u202e[bold]\nnext'


def played(seed=0, groups=16, siblings=8):
    """Trajectories with a hidden truth and seven scores, the better the later."""
    rng, out = np.random.default_rng(seed), []
    for group in range(groups * siblings):
        truth = bool(rng.random() < 0.4)
        votes = [float(np.clip(rng.normal(0.35 + 0.3 * truth, 0.4 - 0.03 * k), 0, 1)) for k in range(7)]
        info = {"truth": truth, "votes": votes}
        out.append(
            Trajectory(agent="a", policy="p", turns=(), env_id="t", seed=100 * seed + group // siblings, info=info)
        )
    return out


def weak(k, **kwargs):
    return Rule(lambda t: t.info["votes"][k], **{"name": f"weak{k}", **kwargs})


def dead(trajectory):
    raise ConnectionError(f"no route to {HOSTILE}")


def judged(steps=3, label=None):
    ensemble = Ensemble(
        [*(weak(k, family="kin" if k > 4 else None) for k in range(7)), Rule(dead, name=HOSTILE, family=HOSTILE)],
        label=label,
        name=HOSTILE,
    )
    for step in range(steps):
        ensemble.score(played(step))
    return ensemble


@pytest.fixture(scope="module")
def hostile():
    ensemble = judged()
    return ensemble.report(), page(ensemble.report())


class Reader(HTMLParser):
    """Collects what a browser would act on."""

    def __init__(self):
        super().__init__()
        self.tags, self.open, self.targets, self.text = set(), [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag not in {"meta", "img"}:
            self.open.append(tag)
        self.targets += [value for name, value in attrs if name in {"src", "href"} or name.startswith("on")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_page_has_no_scripts_and_loads_nothing(hostile):
    reader = Reader()
    reader.feed(hostile[1])
    assert not reader.tags & {"script", "link", "iframe", "object", "svg", "a"} and reader.open == []
    assert len(reader.targets) == 2  # calibration, correlation
    assert all(target.startswith("data:image/svg+xml;base64,") for target in reader.targets)
    assert "default-src 'none'" in hostile[1]


def test_hostile_names_are_shown_as_text(hostile):
    text = hostile[1]
    assert "\x1b" not in text and "\u202e" not in text and "<script" not in text
    assert text.count("&lt;script&gt;alert(&#34;$x$&#34;)&lt;/script&gt;") >= 4  # title, heading, name, family
    table = hostile[0].table()
    assert "\x1b" not in table and "\u202e" not in table and "[bold]" in table


def test_figures_show_names_literally():
    ensemble = Ensemble([weak(0, name=r"_$\frac{1}$"), weak(1, name="日本"), weak(2)])
    ensemble.score(played())
    names = [v.name for v in ensemble.report().verifiers]
    assert labels(names) == [r"1  _$\frac{1}$", "2  \u25a1\u25a1", "3  weak2"]
    picture = correlation_figure(names, [None] * 3, np.eye(3))
    assert picture == correlation_figure(names, [None] * 3, np.eye(3))
    assert b"<text" not in picture and b"<script" not in picture


def test_map_of_many_verifiers_shows_the_first_forty():
    def picture(count):
        return correlation_figure([f"v{k}" for k in range(count)], [None] * count, np.eye(count))

    assert len(picture(400)) < 1.1 * len(picture(40))


@pytest.mark.parametrize("count", [300, 1500])
def test_page_of_many_verifiers_shows_the_first_forty(count, hostile):
    report = hostile[0]
    rows = [replace(report.verifiers[0], name=f"judge-{k:04d}", reason="r", note="") for k in range(count)]
    many = replace(report, verifiers=rows, evidence=None, notes=["n" * 100] * count, alarms=["a" * 100] * count)
    assert 150_000 < len(json.dumps(many.row())) < 1_200_000
    text = page(many)
    assert text.count("judge-00") == 2 * 40 and "judge-0040" not in text and len(text) < 100_000
    assert f"The first 40 of {count} verifiers." in text and "The first" not in hostile[1]


def test_the_page_holds_the_numbers(hostile):
    report, text = hostile
    best = report.verifiers[6]
    shown = [interval(*estimate) for estimate in best.estimates()]
    assert f"<td>{shown[1]}</td><td>{shown[2]}</td><td>{shown[3]}</td><td>384</td><td>384</td>" in text
    assert f"{report.effective} of 8" in text
    assert "<td class=bad>384</td><td class=bad>3</td><td>0</td>" in text  # three calls of the dead verifier


def test_the_table_names_rates_counts_and_failures():
    ensemble = Ensemble([weak(0), Rule(dead, name="dead")])
    ensemble.score(played())
    rows = {line.split()[0]: line.split() for line in ensemble.report().table().splitlines() if line.strip()}
    assert rows["dead"][-5:] == ["0", "0", "128", "1", "0"] and rows["weak0"][-5:] == ["128", "0", "0", "0", "0"]
    assert "no route" in ensemble.report().table() and "effective number" in ensemble.report().table()


def test_low_weights_have_reasons():
    rng = np.random.default_rng(7)
    coin = Rule(lambda t: float(rng.random()), name="coin")
    ensemble = Ensemble(
        [
            *(weak(k) for k in range(3, 7)),
            Rule(lambda t: t.info["votes"][6], name="twin"),
            Rule(lambda t: 1 - t.info["votes"][5], name="upside down"),
            Rule(lambda t: 0.25, name="constant"),
            Rule(lambda t: None, name="silent"),
            Rule(dead, name="dead"),
            coin,
        ]
    )
    unfitted = {v.name: v.reason for v in ensemble.report().verifiers}
    assert unfitted["weak3"] == "no scores: never called"
    for step in range(3):
        ensemble.score(played(step))
    report = ensemble.report()
    reasons = {v.name: v.reason for v in report.verifiers}
    assert [reasons[f"weak{k}"] for k in (4, 5, 6)] == ["", "", ""]
    assert reasons["twin"] == (
        "scores almost like 'weak6': correlation 1.00 [0.98, 1.00] in size on 384 common rows; the two share one weight"
    )
    assert reasons["upside down"].startswith("scores almost the reverse of 'weak5': correlation -1.00 [0.98, 1.00]")
    assert reasons["constant"] == "constant: scores 0.25 on all 384 rows that it answered"
    assert reasons["silent"] == "no scores: abstained on 384 trajectories"
    assert reasons["dead"] == "no scores: failed on 384 trajectories"
    assert re.match(r"(no better than|these rows do not distinguish it from) chance", reasons["coin"])
    assert "constant: constant: scores 0.25" in report.table() and reasons["coin"] in page(report)
    assert EnsembleReport.from_row(json.loads(json.dumps(report.row()))).verifiers[4].reason == reasons["twin"]


def row(name="x", **known):
    told = {"family": None, "cost": "cheap", "accuracy": 0.5, "tpr": 0.8, "fpr": 0.2, "weight": 1.0, "last_error": ""}
    told |= {"tpr_error": 0.03, "fpr_error": 0.03}
    counts = {"scored": 300, "abstained": 0, "errors": 0, "timeouts": 0}
    return VerifierReport(**{"name": name, **told, **counts, **known})


def noise_of(rows, m, kind="default"):
    """Random score rows of m verifiers behind a fit that nobody looks at."""
    scores = np.random.default_rng(0).random((rows, m)).astype(np.float32)
    nothing = {
        "queried": np.ones((rows, m), bool),
        "groups": np.zeros(rows, np.int64),
        "labels": np.full(rows, math.nan),
    }
    fitted = {"combiner": np.array(kind), **({"0/error_correlation": np.eye(m)} if kind == "default" else {})}
    return Evidence(scores=scores, **nothing, families=[None] * m, combiner=fitted)


CHANCE = "these rows do not distinguish it"
REVERSED = "worse than chance, so the ensemble counts its scores in reverse: TPR - FPR is -0.600 [-0.68, -0.52]"
FEW_ROWS = "too few rows to distinguish it from chance: TPR - FPR is 0.020 [-0.38, 0.42] on 30 rows"


@pytest.mark.parametrize(
    ("known", "fit", "reason"),
    [
        ({}, {}, ""),
        ({"tpr": 0.5, "fpr": 0.48, "tpr_error": 0.2}, {"rows": 30}, FEW_ROWS),
        ({"tpr": 0.2, "fpr": 0.8}, {}, REVERSED),
        ({"tpr": 0.2, "fpr": 0.8, "tpr_error": 0.4}, {}, CHANCE),
        ({"tpr": 0.2, "fpr": 0.8, "tpr_error": math.nan}, {}, CHANCE),
        ({"tpr": 0.8, "fpr": 0.2, "tpr_error": 0.4}, {}, CHANCE),
        ({"tpr": 0.5, "fpr": 0.48}, {}, "no better than chance, according to the others"),
        ({"tpr": 0.5, "fpr": 0.48, "tpr_error": 0.001, "fpr_error": 0.001}, {}, "hardly better than chance, according"),
        ({"tpr": 0.48, "fpr": 0.5, "tpr_error": 0.001, "fpr_error": 0.001}, {}, "hardly worse than chance, according"),
        ({"tpr": 0.2, "fpr": 0.8}, {"clusters": 1}, "contradicted by other: only an anchor or labels can decide"),
        ({"weight": 0.05}, {}, "its errors correlate with those of others: 20 of them weigh as"),
        ({"weight": 0.05}, {"kind": "logistic"}, "the combiner does not use it"),
        ({"weight": 0.0}, {"kind": "weaver"}, "left out by the combiner: it says yes of"),
        ({"tpr": math.nan, "fpr": math.nan}, {"kind": "mean"}, ""),
        ({"scored": 0, "skipped": 8}, {}, "no scores: skipped by a cascade on 8 trajectories"),
    ],
)
def test_each_cause_of_a_small_weight_has_a_reason(known, fit, reason):
    evidence, clusters = noise_of(fit.get("rows", 300), 3, fit.get("kind", "default")), fit.get("clusters", 0)
    result = with_reasons([row(**known), row("other"), row("third")], evidence, np.array([clusters, 2 * clusters, 0]))
    assert result[0].reason.startswith(reason) and (reason or not result[0].reason) and not result[1].reason


def test_clusters_need_no_anchor_if_there_is_one():
    clusters, rows = np.array([1, 2, 0]), [row(tpr=0.5, fpr=0.45, tpr_error=0.1), row("other"), row("third")]
    evidence = noise_of(300, 3, "default")
    assert with_reasons(rows, evidence, clusters)[0].reason.startswith("contradicted by other: only an anchor")
    reason = with_reasons(rows, evidence, clusters, has_reference=True)[0].reason
    assert reason.startswith("these rows do not distinguish it")
    verifiers = [weak(k) for k in range(7)]
    ensemble = Ensemble(verifiers, anchors=["weak6"])
    ensemble.score(played())
    fitted = replace(ensemble._combiner.report(), clusters=np.array([1, 1, 1, 1, 1, 2, 2]))
    ask, names = "only an anchor or labels can decide", [v.name for v in verifiers]
    assert ask in fitted.notes(names)[0] and ask not in fitted.notes(names, has_reference=True)[0]
    assert "weak4 and weak5, weak6; labels or anchors decide" in fitted.notes(names, has_reference=True)[0]


def test_accept_only_verifier_is_not_constant_if_abstentions_count():
    def accepts(trajectory):
        return 1.0 if trajectory.info["votes"][6] > 0.5 else None

    reasons = {}
    for combine in ("default", "mean"):
        ensemble = Ensemble([*(weak(k) for k in range(6)), Rule(accepts, name="accepts")], combine=combine)
        ensemble.score(played())
        reasons[combine] = {v.name: v for v in ensemble.report().verifiers}["accepts"]
    assert reasons["default"].reason == "" and reasons["default"].tpr - reasons["default"].fpr > 0.2
    assert reasons["mean"].reason.startswith("constant: scores 1 on all")


def test_a_warning_about_possible_copies_names_the_verifiers(caplog):
    rng = np.random.default_rng(0)
    sides = rng.random((200, 2)) > 0.5
    rows = [
        Trajectory(agent="a", policy="p", turns=(), env_id="t", seed=n // 4, info={"side": tuple(map(float, side))})
        for n, side in enumerate(sides)
    ]
    pairs = [Rule(lambda t, k=k: t.info["side"][k // 2], name=f"rule {'abcd'[k]}") for k in range(4)]
    Ensemble(pairs).score(rows)
    assert "verifiers [rule a, rule b] or [rule c, rule d] agree because they are right" in caplog.text


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [(0.652, 0.08, "0.652 [0.50, 0.81]"), (0.95, 0.1, "0.950 [0.75, 1.00]"), (0.5, math.nan, "0.500")],
)
def test_an_estimate_is_shown_with_its_95_percent_interval(value, error, shown):
    assert interval(value, error) == shown
    assert interval(-0.2, 0.1, low=-1.0) == "-0.200 [-0.40, -0.00]"


def test_a_verifier_is_called_worse_than_chance_only_by_a_clear_majority_or_labels():
    def reasons(*signs, **given):
        alone = np.zeros(len(signs), np.intp)
        return [one.reason for one in with_reasons(votes(*signs), noise_of(300, len(signs)), alone, **given)]

    assert reasons(1, 1, -1)[2].startswith("worse than chance") and reasons(1, 1, -1)[:2] == ["", ""]
    assert reasons(1, -1)[1].startswith("contradicted by v0: only an anchor")
    assert reasons(1, 1, -1, -1, -1)[4].startswith("contradicted by v0, v1: only an anchor")
    assert reasons(1, -1, has_reference=True)[1].startswith("worse than chance")


def votes(*signs):
    rates = {1: (0.8, 0.2), -1: (0.2, 0.8), 0: (0.5, 0.45)}
    return [row(f"v{k}", tpr=rates[sign][0], fpr=rates[sign][1], weight=0.5) for k, sign in enumerate(signs)]


def test_the_report_says_on_how_many_verifiers_the_direction_rests():
    def said(*signs, num_labels=0, anchors=(), evidence=None):
        some = evidence or noise_of(300, len(signs))
        return direction(votes(*signs), some, num_labels=num_labels, anchors=anchors)

    (text,) = said(1, 1, 1, -1, 0)
    assert "rests on 3 verifiers (worth 1.5 independent ones) better than chance against 1 verifier (worth 0.5" in text
    assert text.endswith("for 1 the data do not tell which")
    assert "no verifier is known to be better" in said(0, 0)[0]
    assert said(1, -1, num_labels=32) == ["which responses count as correct follows 32 labels"]
    assert "the anchor tests" in said(1, -1, num_labels=1, anchors=["tests"])[0]
    assert direction([row(tpr=math.nan, fpr=math.nan)], noise_of(300, 1), num_labels=0, anchors=[]) == []


def test_equal_verifiers_count_as_one_vote():
    some = noise_of(300, 3)
    twins = replace(some, scores=some.scores[:, [0, 0, 1]])
    rows = [row(f"v{k}") for k in range(3)]
    assert independent_votes(rows, some, [0, 1, 2]) == pytest.approx(3, abs=0.1)
    assert independent_votes(rows, twins, [0, 1]) == pytest.approx(1) and independent_votes(rows, twins, []) == 0
    assert independent_votes(rows, twins, [0, 1, 2]) == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize(("rows", "alike"), [(5, False), (12, False), (300, True)])
def test_equal_scores_on_few_rows_are_no_evidence_of_a_copy(rows, alike):
    scores = np.random.default_rng(0).integers(0, 2, (rows, 1)).repeat(2, axis=1).astype(np.float32)
    scores[:2] = [[0, 0], [1, 1]]
    nothing = {"queried": np.ones((rows, 2), bool), "groups": np.zeros(rows, np.int64), "labels": np.zeros(rows)}
    evidence = Evidence(scores=scores, **nothing, families=[None, None], combiner={"combiner": np.array("default")})
    second = with_reasons([row("first"), row("second")], evidence, np.zeros(2, np.intp))[1]
    assert second.rows == rows and ("almost like 'first'" in second.reason) == alike


def test_a_report_before_the_first_fit_has_a_table_and_a_page(tmp_path):
    report = Ensemble([weak(0)]).report()
    assert report.evidence is None and "\N{EN DASH}" in report.table()
    text = report.html(tmp_path / "new" / "r.html").read_text()
    assert "nothing was fitted yet" in text


def test_a_page_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="Choose another file"):
        Ensemble([weak(0)]).report().html(tmp_path / "file" / "r.html")


def test_alarms_are_shown_as_text_in_table_and_page():
    ensemble = Ensemble([weak(0), weak(1)])
    ensemble.score(played())
    assert "hacked" not in page(ensemble.report()) and "hacked" not in ensemble.report().table()
    alarmed = replace(ensemble.report(), alarms=(f"disagreement: {HOSTILE}",))
    assert "hacked: disagreement: </td>" in alarmed.table()
    assert "<li>disagreement: &lt;/td&gt;" in page(alarmed) and "<script" not in page(alarmed)
    assert EnsembleReport.from_row(json.loads(json.dumps(alarmed.row()))).alarms == (f"disagreement: {HOSTILE}",)


def test_rates_of_a_combiner_without_standard_errors_have_intervals(monkeypatch):
    monkeypatch.setattr(combiners, "_KINDS", dict(combiners._KINDS))

    @combiners.register
    class Silent(combiners.Default):
        """The default combiner, without its standard errors."""

        name = "test-without-errors"

        def _fit(self, *given):
            return {name: value for name, value in super()._fit(*given).items() if not name.endswith("_error")}

    ensemble = Ensemble([weak(k) for k in range(6)], "test-without-errors")
    for step in range(4):
        ensemble.score(played(step))
    for verifier in ensemble.report().verifiers:
        assert 0.01 < verifier.tpr_error < 0.2 and 0.01 < verifier.fpr_error < 0.2


def test_a_report_survives_json():
    ensemble = Ensemble([weak(0), weak(1), weak(2), Rule(dead, name="dead")])
    ensemble.score(played())
    report = ensemble.report()
    text = json.dumps(report.row(), allow_nan=False)
    assert '"tpr": null' in text and len(text) < 3000
    again = EnsembleReport.from_row(json.loads(text))
    assert again.row() == report.row() and np.isnan(again.verifiers[3].tpr)
    with pytest.raises(ValueError, match="'verifiers'"):
        EnsembleReport.from_row({"name": "x"})
    with pytest.raises(ValueError, match="combiner"):
        EnsembleReport.from_row({"name": "x", "verifiers": []})


def test_a_report_is_not_changed_by_what_is_scored_later():
    ensemble = Ensemble([weak(k) for k in range(4)], max_rows=128)
    ensemble.score(played(0))
    report = ensemble.report()
    before = report.evidence.posterior().tobytes()
    ensemble.score(played(1))
    assert report.evidence.posterior().tobytes() == before != ensemble.report().evidence.posterior().tobytes()


def evidence(n=4000, m=8, labels=None):
    rng = np.random.default_rng(0)
    truth = rng.random(n) < 0.4
    scores = np.clip(rng.normal(0.35 + 0.3 * truth[:, None], 0.35, (n, m)), 0, 1).astype(np.float32)
    return Evidence(
        scores=scores,
        queried=np.ones(scores.shape, bool),
        groups=np.arange(n) // 8,
        labels=np.where(labels(rng, truth), truth, np.nan).astype(np.float32) if labels else np.full(n, np.nan, "f4"),
        families=[None] * m,
        combiner=combiners.get("default").fit(scores).state_dict(),
    ), truth


def test_calibration_against_labels_counts_what_was_right():
    some, truth = evidence(labels=lambda rng, truth: rng.random(len(truth)) < 0.2)
    curve = some.calibration()
    expected = ~np.isnan(some.labels)
    assert curve.source == "labels" and curve.count.sum() == expected.sum()
    assert np.average(curve.observed, weights=curve.count) == pytest.approx(truth[expected].mean())
    assert curve.error < 0.06


def test_calibration_without_labels_is_a_check_of_the_halves():
    curve = evidence()[0].calibration()
    assert curve.source == "halves" and curve.error < 0.08
    assert (np.diff(curve.observed) > -0.1).all() and curve.observed[0] < 0.1 and curve.observed[-1] > 0.9


def test_too_few_independent_verifiers_check_nothing():
    curve = evidence(m=5)[0].calibration()
    assert curve.source == "none" and np.isnan(curve.error)
    kin, _ = evidence()
    kin = Evidence(**{f: getattr(kin, f) for f in kin.__slots__} | {"families": ["a"] * 4 + [None] * 4})
    assert kin.calibration().source == "none"


def test_too_many_verifiers_are_not_fitted_for_a_page(monkeypatch):
    monkeypatch.setattr("forge_verifiers.report.report._MAX_SOURCES", 7)
    monkeypatch.setattr(Evidence, "_refitted", None)
    assert evidence(m=8)[0].calibration().source == "none"


def test_a_blurred_posterior_is_made_unbiased():
    rng = np.random.default_rng(0)
    q = rng.beta(1, 2, 20000)
    truth = rng.random(20000) < q
    strong = rng.random(20000) < np.where(truth, 0.8, 0.1)  # rows chosen by somebody else
    assert deblurred(q)[strong].mean() == pytest.approx(truth[strong].mean(), abs=0.03)
    assert abs(q[strong].mean() - truth[strong].mean()) > 0.1


def test_correlations_are_those_of_common_rows():
    rng = np.random.default_rng(1)
    scores = rng.random((200, 4)).astype(np.float32)
    scores[:, 1] = 1 - scores[:, 0]
    scores[:, 3] = 0.5
    scores[rng.random((200, 4)) < 0.2] = np.nan
    some, _ = evidence(n=200, m=4)
    result = Evidence(**{f: getattr(some, f) for f in some.__slots__} | {"scores": scores}).correlation()
    both = ~np.isnan(scores[:, [0, 2]]).any(axis=1)
    assert result[0, 1] == pytest.approx(-1) and result[0, 0] == pytest.approx(1)
    assert result[0, 2] == pytest.approx(np.corrcoef(scores[both, 0], scores[both, 2])[0, 1], abs=1e-5)
    scores[:, 2] = 0.5 + 1e-5 * scores[:, 0]  # a reward model near saturation
    small = Evidence(**{f: getattr(some, f) for f in some.__slots__} | {"scores": scores}).correlation()
    assert small[0, 2] == pytest.approx(1, abs=1e-3)
    assert np.isnan(result[3]).all()


def test_evidence_needs_an_ensembles_state():
    ensemble = judged(1)
    assert Evidence.from_state(ensemble.state_dict(), [None] * 8).scores.shape == (128, 8)
    assert Evidence.from_state(Ensemble([weak(0)]).state_dict(), [None]) is None
    with pytest.raises(ValueError, match="window/scores"):
        Evidence.from_state({"x": np.zeros(1)}, [])


def test_other_combiners_make_a_page_with_few_labels():
    for name in ("mean", "logistic"):
        ensemble = Ensemble([weak(k) for k in range(6)], name, label=lambda t: t.info["truth"])
        ensemble.score(played(groups=10))
        text = page(ensemble.report())
        assert re.search(r"Expected calibration error 0\.\d{3} over 80 predictions", text), name


def votes_of(n, accuracies, *, abstains=0.0, adversary=False, seed=0):
    """Trajectories in groups of four with votes that are right as often as `accuracies` say.

    The last vote with `adversary` is a near-copy (97 % equal) of the one before.
    """
    rng, out = np.random.default_rng(seed), []
    for at in range(n):
        truth = bool(rng.random() < 0.5)
        votes = [float(truth == (rng.random() < accuracy)) for accuracy in accuracies]
        if adversary:
            votes.append(votes[-1] if rng.random() < 0.97 else 1 - votes[-1])
        shown = [None if abstains and rng.random() < abstains else vote for vote in votes]
        info = {"truth": truth, "votes": shown}
        out.append(Trajectory(agent="a", policy="p", turns=(), env_id="t", seed=at // 4, info=info))
    return out


def report_of(trajectories, label=None):
    ensemble = Ensemble([weak(k) for k in range(len(trajectories[0].info["votes"]))], label=label)
    ensemble.score(trajectories)
    return ensemble.report()


def covers(value, error, truth):
    return abs(value - truth) <= 1.96 * error


@pytest.mark.parametrize("seed", range(5))
def test_a_weak_judge_on_few_rows_has_a_wide_interval_and_no_verdict(seed):
    report = report_of(votes_of(40, (0.9, 0.8, 0.56), seed=seed))
    judge = report.verifiers[2]
    assert judge.rows == 40 and 1.96 * judge.accuracy_error > 0.1 and covers(judge.accuracy, judge.accuracy_error, 0.56)
    assert interval(judge.accuracy, judge.accuracy_error) in report.table() and "reverse" not in report.table()


@pytest.mark.parametrize("seed", range(3))
def test_verifiers_that_abstain_in_60_percent_get_no_verdict_that_is_wrong(seed):
    report = report_of(votes_of(600, (0.8, 0.65, 0.6), abstains=0.6, seed=seed))
    for verifier, accuracy in zip(report.verifiers, (0.8, 0.65, 0.6), strict=True):
        assert verifier.side >= 0 and "in reverse" not in verifier.reason
        assert covers(verifier.accuracy, verifier.accuracy_error, accuracy)


@pytest.mark.parametrize("seed", range(3))
def test_honest_verifiers_next_to_an_adversary_and_its_copy_are_not_called_inverted(seed):
    report = report_of(votes_of(600, (0.8, 0.65, 0.6, 0.25), adversary=True, seed=seed))
    assert all(verifier.side >= 0 and "in reverse" not in verifier.reason for verifier in report.verifiers[:3])
    assert any("no labels or anchors say which responses are correct" in note for note in report.notes)


def test_good_verifiers_on_many_rows_have_narrow_intervals_that_cover_the_truth():
    accuracies = (0.9, 0.8, 0.7, 0.25)
    report = report_of(votes_of(2000, accuracies))
    for verifier, accuracy in zip(report.verifiers, accuracies, strict=True):
        assert 1.96 * verifier.accuracy_error < 0.1
        assert abs(verifier.accuracy - accuracy) < 0.05
    assert [verifier.side for verifier in report.verifiers] == [1, 1, 1, -1]
    assert "in reverse" in report.verifiers[3].reason


GOOD = (0.9, 0.8, 0.7)


def test_quantity_without_a_known_error_has_no_interval():
    constant = Ensemble([Rule(lambda t: 0.5, name=name) for name in "abc"])
    constant.score([Trajectory(agent="a", policy="p", turns=(), env_id="t", seed=k) for k in range(40)])
    text = constant.report().table()
    assert "class balance 0.500 [0.00, 1.00], effective number 0.00 of 3" in text and "0.000 [" not in text
    few = report_of(votes_of(3, GOOD))
    assert f"effective number {few.effective_number:.2f} of 3" in few.table() and "[1.00, 1.00]" not in few.table()


def test_labels_of_one_class_are_named():
    report = report_of(votes_of(200, GOOD), lambda t: True if t.info["truth"] else None)
    text, count = report.table(), int(np.nansum(report.evidence.labels))
    assert (
        50 < count < 150
        and f"All {count} of the window are 1: unless the labeled responses are a random sample" in text
    )
    text = report_of(votes_of(200, GOOD), lambda t: t.info["truth"]).table()
    assert "follows 200 labels" in text and "random sample" not in text


def test_calibration_against_labels_has_intervals_at_rates_of_0_and_1():
    curve = report_of(votes_of(200, (0.95,) * 3), lambda t: t.info["truth"]).evidence.calibration()
    assert curve.source == "labels" and {0.0, 1.0} <= set(curve.observed)
    widths = curve.half_width[(curve.observed == 0) | (curve.observed == 1)]
    np.testing.assert_allclose(widths, 1.96**2 / (20 + 1.96**2), rtol=1e-3)  # Wilson's interval of 0 of 20
