"""Does a verifier keep the contract? Asks it about a gold answer and a wrong one and looks.

In: a verifier, trajectories. Out: a `ConformanceReport`, or `ConformanceError`. Waits for the verifier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from forge_agents.testing import ConformanceError, ConformanceReport, Finding
from forge_agents.types import Trajectory
from forge_verifiers.core.functions import told
from forge_verifiers.core.verifier import COSTS, Composable, range_of, verifier_of

_MEND = "mend what raises; return NaN for a trajectory that cannot be judged"


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
    """Check that a verifier keeps the contract.

    The checks: name, family and cost; one float32 score per trajectory, in the verifier's range ([0, 1], unless it is a
    weighted sum) or NaN, also for none at all; the same scores when asked again and when the order changes; every gold
    trajectory scores above every wrong one, and 1
    where the verifier says that it is `exact`. Where it has a method ``extracted``, as rules that read answers do, the
    report tells what it read.

    Args:
        verifier: What is checked, a verifier or a function. It is asked about all trajectories together, so one that
            compares siblings can be checked, too.
        gold: One or more trajectories that are right.
        wrong: One or more that are wrong.
        raise_on_failure: Whether a failed check raises.

    Raises:
        ConformanceError: A check failed; the message lists all findings and how to mend them.
        ValueError: `gold` or `wrong` is empty.
    """
    golds = [gold] if isinstance(gold, Trajectory) else list(gold)
    wrongs = [wrong] if isinstance(wrong, Trajectory) else list(wrong)
    if not golds or not wrongs:
        raise ValueError(f"{len(golds)} gold and {len(wrongs)} wrong trajectories arrived; send at least one of each")
    everything = [*golds, *wrongs]

    if callable(verifier) and not hasattr(verifier, "score"):
        verifier = verifier_of(verifier)

    def ask(trajectories: Sequence[Trajectory]) -> np.ndarray:
        failed = verifier.assess(trajectories).failed if isinstance(verifier, Composable) else {}
        for row, why in failed.items():
            raise _BreachError(f"fails on trajectory {row}: {why}", _MEND)
        return np.asarray(verifier.score(trajectories))

    checks: dict[str, Callable[[], str | None]] = {
        "declared": lambda: _declared(verifier),
        "shape and range": lambda: _shape_and_range(verifier, ask(everything), len(everything)),
        "no trajectories": lambda: _shape_and_range(verifier, ask([]), 0),
        "repeatable": lambda: _alike(
            ask(everything), ask(everything), "then", "let equal trajectories get equal scores"
        ),
        "order": lambda: _alike(
            ask(everything), ask(everything[::-1])[::-1], "asked in reverse", "let the order of trajectories not matter"
        ),
        "gold": lambda: _gold(verifier, ask(everything), everything, len(golds)),
    }
    name = str(getattr(verifier, "name", type(verifier).__name__))
    report = ConformanceReport(name=name, findings=tuple(_run(check, call) for check, call in checks.items()))
    if raise_on_failure and not report.ok:
        raise ConformanceError(report)
    return report


def _run(check: str, call: Callable[[], str | None]) -> Finding:
    try:
        seen = call() or ""
    except _BreachError as broken:
        return Finding(check=check, ok=False, message=str(broken), fix=broken.fix)
    except Exception as error:  # noqa: BLE001  # whatever a verifier raises is a finding about it
        return Finding(check=check, ok=False, message=told(error), fix=_MEND)
    return Finding(check=check, ok=True, message=seen)


def _declared(verifier: Any) -> None:
    name, family, cost = (getattr(verifier, key, "missing") for key in ("name", "family", "cost"))
    if not isinstance(name, str) or not name or not hasattr(verifier, "name"):
        raise _BreachError(f"name is {name!r}", "give it an attribute name: a text that is not empty")
    if not hasattr(verifier, "family") or not (family is None or isinstance(family, str)):
        raise _BreachError(f"family is {family!r}", "give it an attribute family: a text, or None")
    if cost not in COSTS:
        raise _BreachError(f"cost is {cost!r}", f"give it an attribute cost, one of {', '.join(COSTS)}")


def _shape_and_range(verifier: Any, scores: np.ndarray, n: int) -> None:
    if scores.shape != (n,) or scores.dtype != np.float32:
        raise _BreachError(
            f"{scores.dtype} of shape {scores.shape} for {n} trajectories",
            "return a numpy float32 array with one score per trajectory",
        )
    low, high = range_of(verifier)
    outside = scores[~np.isnan(scores) & ~((scores >= low) & (scores <= high + 1e-5))]
    if len(outside):
        raise _BreachError(f"a score of {outside[0]}", f"scale scores to [{low:g}, {high:g}]; NaN abstains")


def _alike(first: np.ndarray, second: np.ndarray, when: str, fix: str) -> None:
    if not np.allclose(first, second, atol=1e-4, equal_nan=True):
        raise _BreachError(f"{first}, {when} {second}", fix)


def _gold(verifier: Any, scores: np.ndarray, trajectories: Sequence[Trajectory], num_gold: int) -> str:
    read = _read(verifier, trajectories, num_gold)
    gold, wrong = float(scores[:num_gold].min()), float(scores[num_gold:].max())  # NaN where one abstains
    if getattr(verifier, "exact", False) and not gold >= 1 - 1e-4:
        seen = f"a gold answer scores {gold:.4g}{read}"
        raise _BreachError(seen, "score it 1, or say that it only grades: exact=False")
    if not gold > wrong + 1e-4:
        seen = f"a gold answer scores {gold:.4g} and a wrong answer scores {wrong:.4g}{read}"
        raise _BreachError(seen, "score what is wrong lower than what is right")
    return read.removeprefix("; ")


def _read(verifier: Any, trajectories: Sequence[Trajectory], num_gold: int) -> str:
    """The answers that a verifier which reads them found in the texts."""
    if not hasattr(verifier, "extracted"):
        return ""
    read = [repr(verifier.extracted(trajectory))[:60] for trajectory in trajectories]
    return f"; read {', '.join(read[:num_gold])} as gold and {', '.join(read[num_gold:])} as wrong"
