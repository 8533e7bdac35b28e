import threading
import time

import numpy as np
import pytest

from forge_agents import Ensemble, Rule
from forge_agents.errors import UnknownIdError
from forge_agents.types import Trajectory
from forge_verifiers import Composable
from forge_verifiers.ensemble.ensemble import ScoreWindow


def played(seed=0, groups=40, siblings=8):
    """Trajectories with a hidden truth and six conditionally independent scores of different quality."""
    rng = np.random.default_rng(seed)
    out = []
    for group in range(groups):
        share = rng.beta(2, 2)
        for _ in range(siblings):
            truth = bool(rng.random() < share)
            votes = [float(np.clip(rng.normal(0.35 + 0.3 * truth, 0.35 - 0.03 * k), 0, 1)) for k in range(6)]
            info = {"truth": truth, "votes": votes, "luck": float(rng.random())}
            out.append(Trajectory(agent="a", policy="p", turns=(), env_id="t", seed=1000 * seed + group, info=info))
    return out


def weak(k, **kwargs):
    return Rule(lambda t: t.info["votes"][k], name=f"weak{k}", **kwargs)


def good():
    return [weak(k) for k in range(6)]


def auroc(scores, trajectories):
    truth = np.array([t.info["truth"] for t in trajectories])
    right, wrong = scores[truth], scores[~truth]
    return float((right[:, None] > wrong).mean() + 0.5 * (right[:, None] == wrong).mean())


class Hanging(Composable):
    name, family, cost = "bad", None, "model"

    def __init__(self):
        self.release = threading.Event()

    def max_duration_s(self, trajectories, default_s):
        return 0.3

    def score(self, trajectories):
        self.release.wait(30)
        return np.ones(len(trajectories), np.float32)


def dead(trajectory):
    raise ConnectionError("no route")


BAD = {
    "dead": lambda: Rule(dead, name="bad"),
    "hanging": Hanging,
    "constant": lambda: Rule(lambda t: 1.0, name="bad"),
    "silent": lambda: Rule(lambda t: None, name="bad"),
    "inverted": lambda: Rule(lambda t: 1.0 - t.info["votes"][5], name="bad"),
    "random": lambda: Rule(lambda t: t.info["luck"], name="bad"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_verifier_does_not_spoil_the_reward(kind):
    trajectories, bad = played(), BAD[kind]()
    before = auroc(Ensemble(good()).score(trajectories), trajectories)
    start = time.monotonic()
    ensemble = Ensemble([*good(), bad])
    after = auroc(ensemble.score(trajectories), trajectories)
    print(f"{kind}: AUROC {before:.3f} before, {after:.3f} after")  # noqa: T201  # shown by pytest -s
    assert before > 0.85 and after > before - 0.02
    assert time.monotonic() - start < 30
    row = ensemble.report().verifiers[-1]
    n = len(trajectories)
    assert (row.errors, row.timeouts) == {"dead": (1, 0), "hanging": (0, 1)}.get(kind, (0, 0))
    told = {"dead": (0, 0, n), "hanging": (0, 0, n), "silent": (0, n, 0)}.get(kind, (n, 0, 0))
    assert (row.scored, row.abstained, row.failed) == told
    assert ("no route" in row.last_error) == (kind == "dead")
    if isinstance(bad, Hanging):
        ensemble.score(trajectories)  # the hanging call is not repeated
        assert ensemble.report().verifiers[-1].last_error.startswith("skipped")
        bad.release.set()


def test_the_ensemble_beats_its_best_verifier_without_labels():
    trajectories = played(seed=3)
    best = max(auroc(v.score(trajectories), trajectories) for v in good())
    assert auroc(Ensemble(good()).score(trajectories), trajectories) > best + 0.02


def test_ensemble_abstains_if_all_verifiers_do():
    trajectories = played(groups=2)
    silent = Rule(lambda t: None if t.seed == 0 else t.info["votes"][0], name="half")
    scores = Ensemble([silent]).score(trajectories)
    assert np.isnan(scores[:8]).all() and not np.isnan(scores[8:]).any()
    assert np.isnan(Ensemble([Rule(dead, name="bad")]).score(trajectories)).all()
    assert Ensemble(good()).score([]).shape == (0,)


@pytest.mark.parametrize("verifiers", [1, 2, 6])
def test_one_trajectory_and_few_verifiers_have_an_answer(verifiers):
    score = Ensemble(good()[:verifiers]).score(played(groups=1, siblings=1))
    assert score.shape == (1,) and score.dtype == np.float32 and 0 <= score[0] <= 1


def test_refits_are_counted_and_can_be_stopped():
    ensemble = Ensemble(good(), refit_every=2)
    versions = []
    for seed in range(5):
        ensemble.score(played(seed, groups=4))
        versions.append(ensemble.version)
    assert versions == [1, 1, 2, 2, 3]
    ensemble.learning = False
    before = ensemble.state_dict()
    ensemble.score(played(9))
    after = ensemble.state_dict()
    changed = {k for k in before if before[k].tobytes() != after[k].tobytes()}
    assert changed == {"panel/counts"}


def test_state_continues_bit_equal():
    one, other = (Ensemble(good(), refit_every=2, max_rows=200) for _ in range(2))
    for seed in range(4):
        one.score(played(seed, groups=10))
    state = one.state_dict()
    assert all(value.dtype != object for value in state.values())
    other.load_state_dict(state)
    for seed in range(4, 8):
        assert one.score(played(seed, groups=10)).tobytes() == other.score(played(seed, groups=10)).tobytes()
    assert one.report().table() == other.report().table()


def test_foreign_state_is_refused():
    with pytest.raises(ValueError, match="same verifiers"):
        Ensemble(good()).load_state_dict(Ensemble(good()[:3]).state_dict())
    with pytest.raises(ValueError, match="lacks"):
        Ensemble(good()).load_state_dict({})


def test_a_policy_shift_is_followed():
    def shifting(t):  # the best judge turns into noise
        return t.info["votes"][5] if t.seed < 10_000 else t.info["luck"]

    ensemble = Ensemble([*good()[:4], Rule(shifting, name="shifting")], max_rows=640)
    for seed in range(4):
        ensemble.score(played(seed))
    trusted = ensemble.report().verifiers[-1].accuracy
    for seed in range(10, 22):
        ensemble.score(played(seed))
    assert ensemble.report().verifiers[-1].accuracy < trusted - 0.15


@pytest.mark.parametrize("forget", ["exponential", "window"])
def test_the_window_is_bounded_and_keeps_whole_groups(forget):
    window = ScoreWindow(num_verifiers=1, max_rows=40, forget=forget)
    everybody, unknown = np.ones((8, 1), bool), np.full(8, np.nan, np.float32)
    for call in range(30):
        window.add(np.full((8, 1), call, np.float32), np.repeat([0, 1], 4), unknown, everybody)
        assert len(window.groups) <= 40
    assert set(np.unique(window.groups, return_counts=True)[1]) == {4}
    assert window.scores.max() == 29 and len(window.groups) == 40
    assert (window.scores.min() == 25) == (forget == "window")
    window.add(
        np.zeros((100, 1), np.float32), np.zeros(100, np.intp), np.zeros(100, np.float32), np.ones((100, 1), bool)
    )
    assert len(window.groups) == 100 and len(np.unique(window.groups)) == 1


def test_few_labels_reach_the_combiner():
    trajectories = played()
    labelled = Ensemble(good(), "logistic", label=lambda t: t.info["truth"] if t.seed < 20 else None)
    assert auroc(labelled.score(trajectories), trajectories) > 0.85
    with pytest.raises(ValueError, match="labels"):
        Ensemble(good(), "logistic").score(trajectories)


def test_report_shows_good_and_inverted_verifiers():
    ensemble = Ensemble([*good(), BAD["inverted"]()])
    ensemble.score(played())
    report = ensemble.report()
    rows = {row["name"]: row for row in report.rows()}
    assert rows["weak5"]["accuracy"] > rows["weak0"]["accuracy"] > 0.5 > rows["bad"]["accuracy"]
    assert "weak5" in report.table() and report.version == 1 and report.window_rows == 320


def coins(k, **kwargs):
    return Rule(lambda t: float(np.random.default_rng([k, int(1e6 * t.info["luck"])]).random() > 0.5), name=f"coin{k}")


@pytest.mark.parametrize(
    ("verifiers", "options", "warns"),
    [
        ([coins(k) for k in range(5)], {}, True),
        ([coins(k) for k in range(5)], {"anchors": ["coin0"]}, False),
        ([coins(k) for k in range(5)], {"label": lambda t: t.info["truth"] if t.seed % 8 == 0 else None}, False),
        ([coins(k) for k in range(5)], {"combine": "mean"}, False),
        (good(), {}, False),
        (good()[3:], {}, False),
    ],
)
def test_undetermined_direction_warns_once_in_training(verifiers, options, warns, caplog):
    ensemble = Ensemble(verifiers, **options)
    for step in range(8):
        ensemble.score(played(step, groups=4))
    warnings = [text for text in caplog.messages if "which responses are correct" in text]
    assert len(warnings) == warns
    assert all("ensemble: on 128 rows none of 5 verifiers" in text for text in warnings)
    assert all("anchors=, or label=" in text for text in warnings)


def test_mistakes_in_priors_and_labels_name_their_source():
    with pytest.raises(TypeError, match=r"the prior of 'weak0' is 0.8; pass a Prior, such as Prior.of"):
        Ensemble(good(), priors={"weak0": 0.8})
    for label, kind in ((lambda t: t.info["gold"], KeyError), (lambda t: "yes", ValueError)):
        with pytest.raises(kind) as raised:
            Ensemble(good(), label=label).score(played())
        assert raised.value.__notes__[0].startswith("in label= of 'ensemble', called with trajectory 0, of 'a' in t")


def test_no_trajectories_have_an_answer():
    ensemble = Ensemble(good())
    assert ensemble.scores([]).shape == (0, 6) and ensemble.assess([]).scores.shape == (0,) and ensemble.version == 0


@pytest.mark.parametrize("combine", ["mean", "majority", "dawid-skene", "weaver", "default"])
@pytest.mark.parametrize("odd", [None, 0.5, 1.0])
def test_one_response_of_one_uninformative_verifier(combine, odd):
    (score,) = Ensemble([Rule(lambda t: odd, name="only")], combine).score(played(groups=1, siblings=1))
    assert np.isnan(score) if odd is None else 0 <= score <= 1


def test_wrong_arguments_are_refused():
    for kwargs in ({"refit_every": 0}, {"max_rows": 0}, {"forget": "never"}, {"timeout_s": float("inf")}):
        with pytest.raises(ValueError, match=f"{next(iter(kwargs))}="):
            Ensemble(good(), **kwargs)
    with pytest.raises(ValueError, match="no verifiers"):
        Ensemble([])
    with pytest.raises(ValueError, match="two verifiers"):
        Ensemble([weak(0), weak(0)])
    with pytest.raises(TypeError, match="Rule"):
        Ensemble([lambda x: 1])
    with pytest.raises(UnknownIdError, match="weak1"):
        Ensemble(good(), anchors=["weak11"])
    with pytest.raises(UnknownIdError, match="combiner"):
        Ensemble(good(), "wever")
