import math
import warnings

import numpy as np
import pytest

from forge_agents import Ensemble, Rule, check_verifier
from forge_agents.types import Trajectory, Turn
from forge_verifiers.combiners import NotFittedError
from forge_verifiers.distillation.model import MEASURES, NUM_HASHED, Distilled, distill, text_features

WORDS = [*"abcdefgh", "river", "stone", "blue", "seven", "answer", "maybe", "because", "equals", "then", "wind"]


def trajectory(text, *, seed=0, observation="what?", info=None):
    turn = Turn(agent="a", index=0, observation=observation, action=text, reward=0.0)
    return Trajectory(agent="a", policy="p", turns=(turn,), env_id="t", seed=seed, info=info or {})


def written(groups=60, siblings=8, seed=0):
    """Texts of random words. The good ones contain one of three words."""
    rng, out = np.random.default_rng(seed), []
    for group in range(groups):
        observation = " ".join(rng.choice(WORDS, 12))
        for _ in range(siblings):
            words, good = rng.choice(WORDS, 40).tolist(), bool(rng.random() < 0.5)
            if good:
                words.insert(int(rng.integers(40)), str(rng.choice(["proven", "sound", "checked"])))
            text = " ".join(words)
            out.append(trajectory(text, seed=group, observation=observation, info={"good": good}))
    return out


def soft(trajectories, seed=1):
    good = np.array([t.info["good"] for t in trajectories])
    return np.clip(np.where(good, 0.85, 0.15) + np.random.default_rng(seed).normal(0, 0.1, len(good)), 0, 1)


@pytest.fixture(scope="module")
def student():
    trajectories = written()
    return distill(soft(trajectories), trajectories, name="student", family="kin")


def test_distilled_rule_generalizes_to_other_groups(student):
    result = student.agreement
    assert (result.fitted, result.held_out) == (384, 96)
    assert result.auroc > 0.95 and result.correlation > 0.8 and result.calibration_error < 0.1
    assert result.per_s > 0 and math.isnan(result.speedup)
    fresh = written(seed=9)
    scores = student.score(fresh)
    good = np.array([t.info["good"] for t in fresh])
    assert np.median(scores[good]) > 0.7 and np.median(scores[~good]) < 0.3


def test_shuffled_posteriors_have_no_agreement():
    trajectories = written()
    mixed = np.random.default_rng(2).permutation(soft(trajectories))
    assert distill(mixed, trajectories).agreement.auroc == pytest.approx(0.5, abs=0.12)


def test_groups_are_held_out_whole():
    """A model that was trained on the group's other episodes could recognize the group."""
    rng = np.random.default_rng(0)
    trajectories = [
        trajectory(" ".join(rng.choice(WORDS, 20)), seed=group, observation=f"prompt{group}")
        for group in range(80)
        for _ in range(4)
    ]
    posteriors = np.repeat(rng.permutation(np.arange(80) % 2), 4) * 0.8 + 0.1
    assert distill(posteriors, trajectories, held_out=0.5).agreement.auroc == pytest.approx(0.5, abs=0.15)


def test_it_keeps_the_contract_of_verifiers(student):
    like = written(groups=1, seed=9)
    good, bad = ([t for t in like if t.info["good"] is kind] for kind in (True, False))
    assert check_verifier(student, good[0], bad[0]).ok  # though its score is never quite 1
    assert student.score([]).shape == (0,)
    assert (student.name, student.family, student.cost) == ("student", "kin", "cheap")


def test_trajectory_without_turns_gets_nan(student):
    silent = Trajectory(agent="a", policy="p", turns=())
    scores = student.score([silent, trajectory("proven")])
    assert np.isnan(scores[0]) and not np.isnan(scores[1])


@pytest.mark.parametrize("text", ["", " ", "\ud800 lone", "\x00\x1b", "é日本" * 5000, "7" * 30000, "a\n" * 20000])
def test_hostile_text_has_a_bounded_score(student, text):
    score = student.score([trajectory(text, observation=text)])
    assert 0 <= score[0] <= 1


def test_scores_are_bit_equal_after_loading(student, tmp_path):
    probes = written(groups=3, seed=5)
    state = student.state_dict()
    assert all(value.dtype != object for value in state.values())
    other = Distilled()
    other.load_state_dict(state)
    student.save(tmp_path / "d.safetensors")
    loaded = Distilled.load(tmp_path / "d.safetensors")
    expected = student.score(probes).tobytes()
    assert other.score(probes).tobytes() == expected == loaded.score(probes).tobytes()
    assert (loaded.name, loaded.family) == ("student", "kin")
    assert repr(loaded.agreement) == repr(other.agreement) == repr(student.agreement)
    assert loaded.state_dict().keys() == state.keys()


def test_scores_do_not_depend_on_the_batch(student):
    probes = written(groups=100, seed=6)
    together = student.score(probes)
    assert student.score(probes[600:601])[0] == pytest.approx(together[600], abs=1e-6)


def test_distill_does_not_train_the_ensemble():
    def noisy(strength, seed):
        rng = np.random.default_rng(seed)
        return lambda t: float(np.clip(0.5 + (t.info["good"] - 0.5) * strength + rng.normal(0, 0.3), 0, 1))

    ensemble = Ensemble([Rule(noisy(0.3 + k / 10, k), name=f"j{k}") for k in range(5)])
    trajectories = written()
    ensemble.score(trajectories)
    held = ensemble.state_dict()["window/scores"].tobytes()
    student = distill(ensemble, trajectories)
    assert ensemble.version == 1 and ensemble.learning and ensemble.state_dict()["window/scores"].tobytes() == held
    assert student.agreement.auroc > 0.85
    assert student.agreement.speedup == student.agreement.per_s / student.agreement.ensemble_per_s


def test_abstentions_and_empty_trajectories_are_left_out():
    trajectories = [*written(), Trajectory(agent="a", policy="p", turns=())]
    posteriors = np.append(soft(trajectories[:-1]), 0.5)
    posteriors[:100] = np.nan
    result = distill(posteriors, trajectories).agreement
    assert result.fitted + result.held_out == 380


def test_constant_posterior_is_learned_and_has_no_ranking():
    result = distill(np.full(80, 0.9), written(groups=10)).agreement
    assert math.isnan(result.auroc) and math.isnan(result.correlation) and result.calibration_error < 0.02


def test_wrong_arguments_are_refused():
    trajectories = written(groups=6)
    with pytest.raises(ValueError, match=r"\(3,\) posteriors"):
        distill([0.1, 0.2, 0.3], trajectories)
    with pytest.raises(ValueError, match="probabilities"):
        distill(np.full(48, 2.0), trajectories)
    with pytest.raises(ValueError, match="held_out=1"):
        distill(np.full(48, 0.5), trajectories, held_out=1)
    with pytest.raises(ValueError, match="4 groups"):
        distill(np.full(32, 0.5), trajectories[:32])
    with pytest.raises(ValueError, match="0 groups"):
        distill([], [])


def test_one_training_group_is_enough_and_does_not_warn():
    trajectories = written(groups=5, siblings=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = distill(soft(trajectories), trajectories, held_out=0.9).agreement
    assert (result.fitted, result.held_out) == (4, 16)


def test_without_weights_there_is_no_score_and_nothing_to_save(tmp_path):
    with pytest.raises(NotFittedError, match="distill"):
        Distilled().score([trajectory("x")])
    with pytest.raises(NotFittedError):
        Distilled().save(tmp_path / "x")
    assert Distilled().state_dict() == {}


def test_foreign_state_is_refused(student, tmp_path):
    state = student.state_dict()
    with pytest.raises(ValueError, match="Distill again"):
        Distilled().load_state_dict({**state, "format": np.array("hashed-text-1")})
    with pytest.raises(ValueError, match="'hashed'"):
        Distilled().load_state_dict({**state, "hashed": np.zeros(3)})
    with pytest.raises(ValueError, match="'bias'"):
        Distilled().load_state_dict({key: value for key, value in state.items() if key != "bias"})
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(ValueError, match="no safetensors"):
        Distilled.load(tmp_path / "junk")


def test_features_are_the_same_in_every_process():
    hashed, measures = text_features([trajectory("Answer: 42 rivers", observation="How many rivers in 42?")])
    assert hashed.shape == (1, NUM_HASHED) and measures.shape == (1, len(MEASURES))
    assert hashed.multiply(hashed).sum() == pytest.approx(5, abs=0.2)  # five kinds of length 1
    assert int(hashed.indices.astype(np.int64).sum()) == 1722007
    named = dict(zip(MEASURES, measures[0].tolist(), strict=True))
    assert named["numbers of the observation"] == 1 and named["digits"] == pytest.approx(2 / 17)
    assert named["words of the observation"] == 0.5 and named["cut off"] == 0
