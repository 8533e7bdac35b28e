"""Default families of an ensemble."""

import numpy as np
import pytest

import forge_agents as fa
from forge_agents import Ensemble, Rule
from forge_verifiers import Exact, ForAgent, Gate, Judge, MathEqual, Numeric, PerTurn
from forge_verifiers.models.text_models import RewardModel


def test_default_families_of_verifiers() -> None:
    judge = Judge("some/model", "The answer is right.", name="a")
    endpoint = fa.Endpoint(url="http://127.0.0.1:9/v1", model="other")
    verifiers = [
        RewardModel("one", name="rm 1"),
        RewardModel("two", name="rm 2"),
        RewardModel("three", name="rm 3", family="mine"),
        judge,
        Judge("some/model", "The answer is short.", name="b"),
        Judge(judge, "The answer is kind.", name="c"),
        Judge(endpoint, "The answer is right.", name="d"),
        Exact(),
        ForAgent("solver", Numeric()),
        PerTurn(Gate(Rule(lambda t: 1.0, name="gate"), then=MathEqual())),
        MathEqual(name="other answer", answer_key="second"),
        Rule(lambda t: 0.5, name="rule"),
    ]
    ensemble = Ensemble(verifiers)
    models, judges, answers = "reward models", "judges on some/model", "answer in info['answer']"
    assert ensemble.families == (
        *(models, models, "mine", judges, judges, judges, None),
        *(answers, answers, answers, None, None),
    )
    assert [v.family for v in ensemble.report().verifiers] == list(ensemble.families)


class Column(Rule):
    """Scores from a column of a matrix."""


def columns(cls: type, matrix: np.ndarray, names: list[str], **kwargs) -> list[Rule]:
    result = []
    for k, name in enumerate(names):
        rule = cls(lambda t, k=k: float(matrix[t.info["row"], k]), name=name, **kwargs)
        result.append(rule)
    return result


@pytest.mark.parametrize("alike", [True, False])
def test_reward_models_without_family_weigh_as_one(alike: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Default families give the better judge its weight, and the report names both clusters."""
    from .combiners.regimes import calibration_error  # noqa: TID252
    from .combiners.test_bounds import paired, pairs  # noqa: TID252

    right, error = [], []
    for seed in range(3):
        matrix, groups, y = pairs(seed)
        scores = (matrix - matrix.min(axis=0)) / np.ptp(matrix, axis=0)
        verifiers = columns(Column, scores, [f"column {k}" for k in range(7)])
        for k, verifier in enumerate(verifiers):
            monkeypatch.setattr(type(verifier), "default_family", None)
            verifier.__dict__["default_family"] = ("reward models" if k < 5 else "judges on one") if alike else None
        ensemble = Ensemble(verifiers)
        rows = [
            fa.Trajectory(agent="a", policy="p", turns=(), env_id="t", seed=int(g), info={"row": i})
            for i, g in enumerate(groups)
        ]
        p = ensemble.score(rows).astype(float)
        right.append(paired(y, p))
        error.append(calibration_error(y, p))
    assert ensemble.families == (("reward models",) * 5 + ("judges on one",) * 2 if alike else (None,) * 7)
    assert np.mean(right) >= 0.77 and np.mean(error) <= (0.08 if alike else 0.15)
    assert "two clusters disagree" in ensemble.report().table()
