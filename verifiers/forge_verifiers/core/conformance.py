"""`check_verifier`: runs a verifier on right and wrong trajectories and reports violations of its contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from forge_agents.envs.conformance.report import ConformanceError, ConformanceReport, Finding
from forge_agents.types import Trajectory
from forge_verifiers.core.functions import describe_error
from forge_verifiers.core.verifier import COSTS, Composable, range_of, verifier_of

_FIX_ERROR = "fix the error. Return NaN for a trajectory that cannot be scored"


class _BreachError(Exception):
    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


def check_verifier(
    verifier: Any,
    gold: Trajectory | Sequence[Trajectory],
    wrong: Trajectory | Sequence[Trajectory],
    *,
    raise_on_failure: bool = True,
) -> ConformanceReport:
    """Check that a verifier keeps its contract.

    The checks: name, family and cost; one float32 score per trajectory, in the verifier's range or NaN, also for no
    trajectories; equal scores for a repeated call and for another order; every gold trajectory scores above every wrong
    one, and 1 if the verifier is `exact`. If the verifier has a method ``extracted``, as rules that read answers
    have, the report shows the extracted answers.

    Args:
        verifier: A verifier or a function. All trajectories are scored in one call, so verifiers that compare the
            trajectories of a group can be checked.
        gold: One or more right trajectories.
        wrong: One or more wrong trajectories.
        raise_on_failure: Whether a failed check raises.

    Raises:
        ConformanceError: A check failed. The message lists all findings and how to fix them.
        ValueError: `gold` or `wrong` is empty.
    """
    golds = [gold] if isinstance(gold, Trajectory) else list(gold)
    wrongs = [wrong] if isinstance(wrong, Trajectory) else list(wrong)
    if not golds or not wrongs:
        raise ValueError(f"{len(golds)} gold and {len(wrongs)} wrong trajectories arrived. Pass at least one of each")
    trajectories = [*golds, *wrongs]
    if callable(verifier) and not hasattr(verifier, "score"):
        verifier = verifier_of(verifier)

    def score(rows: Sequence[Trajectory]) -> np.ndarray:
        failed = verifier.assess(rows).failed if isinstance(verifier, Composable) else {}
        for row, reason in failed.items():
            raise _BreachError(f"fails on trajectory {row}: {reason}", _FIX_ERROR)
        return np.asarray(verifier.score(rows))

    first = cache(partial(score, trajectories))  # a call may be expensive
    reverse = "make scores independent of the order of trajectories"
    checks: dict[str, Callable[[], str | None]] = {
        "declared": lambda: _check_attributes(verifier),
        "shape and range": lambda: _check_scores(verifier, first(), len(trajectories)),
        "no trajectories": lambda: _check_scores(verifier, score([]), 0),
        "repeatable": lambda: _check_equal(
            first(), score(trajectories), "then", "return equal scores for equal trajectories"
        ),
        "order": lambda: _check_equal(first(), score(trajectories[::-1])[::-1], "in reverse order", reverse),
        "gold": lambda: _check_gold(verifier, first(), trajectories, len(golds)),
    }
    name = str(getattr(verifier, "name", type(verifier).__name__))
    report = ConformanceReport(name=name, findings=tuple(_run(check, call) for check, call in checks.items()))
    if raise_on_failure and not report.ok:
        raise ConformanceError(report)
    return report


def _run(check: str, call: Callable[[], str | None]) -> Finding:
    try:
        message = call() or ""
    except _BreachError as breach:
        return Finding(check=check, ok=False, message=str(breach), fix=breach.fix)
    except Exception as error:  # noqa: BLE001  # every error of a verifier is a finding
        return Finding(check=check, ok=False, message=describe_error(error), fix=_FIX_ERROR)
    return Finding(check=check, ok=True, message=message)


def _check_attributes(verifier: Any) -> None:
    name, family, cost = (getattr(verifier, key, "missing") for key in ("name", "family", "cost"))
    if not isinstance(name, str) or not name or not hasattr(verifier, "name"):
        raise _BreachError(f"name is {name!r}", "add an attribute name, a non-empty string")
    if not hasattr(verifier, "family") or not (family is None or isinstance(family, str)):
        raise _BreachError(f"family is {family!r}", "add an attribute family, a string or None")
    if cost not in COSTS:
        raise _BreachError(f"cost is {cost!r}", f"add an attribute cost, one of {', '.join(COSTS)}")


def _check_scores(verifier: Any, scores: np.ndarray, n: int) -> None:
    if scores.shape != (n,) or scores.dtype != np.float32:
        raise _BreachError(
            f"{scores.dtype} of shape {scores.shape} for {n} trajectories",
            "return a numpy float32 array with one score per trajectory",
        )
    low, high = range_of(verifier)
    outside = scores[~np.isnan(scores) & ~((scores >= low) & (scores <= high + 1e-5))]
    if len(outside):
        raise _BreachError(f"a score of {outside[0]}", f"scale scores to [{low:g}, {high:g}]; NaN abstains")


def _check_equal(first: np.ndarray, second: np.ndarray, label: str, fix: str) -> None:
    if not np.allclose(first, second, atol=1e-4, equal_nan=True):
        raise _BreachError(f"{first}, {label} {second}", fix)


def _check_gold(verifier: Any, scores: np.ndarray, trajectories: Sequence[Trajectory], num_gold: int) -> str:
    answers = _extracted_answers(verifier, trajectories, num_gold)
    gold, wrong = float(scores[:num_gold].min()), float(scores[num_gold:].max())  # NaN if one abstains
    if getattr(verifier, "exact", False) and not gold >= 1 - 1e-4:
        message = f"a gold answer scores {gold:.4g}{answers}"
        raise _BreachError(message, "score it 1, or set exact=False for graded scores")
    if not gold > wrong + 1e-4:
        message = f"a gold answer scores {gold:.4g} and a wrong answer scores {wrong:.4g}{answers}"
        raise _BreachError(message, "score wrong answers below right ones")
    return answers.removeprefix("; ")


def _extracted_answers(verifier: Any, trajectories: Sequence[Trajectory], num_gold: int) -> str:
    if not hasattr(verifier, "extracted"):
        return ""
    answers = [repr(verifier.extracted(trajectory))[:60] for trajectory in trajectories]
    return f"; read {', '.join(answers[:num_gold])} as gold and {', '.join(answers[num_gold:])} as wrong"
