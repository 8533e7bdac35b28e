"""Does an environment keep the contract? Plays it with sensible and absurd texts and looks.

In: an environment id, class or factory. Out: a `ConformanceReport`, or `ConformanceError` listing what failed and how
to mend it. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forge_agents import _conformance_checks as checks
from forge_agents._conformance_checks import Make
from forge_agents.errors import ForgeError
from forge_agents.registry import AnyEnv, make


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    check: str
    ok: bool
    message: str = ""
    """What was seen; for a check that was left out, why."""
    fix: str = ""
    """What to do; empty where nothing is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceReport:
    """The results of all checks of one environment."""

    env: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return not self.failures

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The checks that failed."""
        return tuple(f for f in self.findings if not f.ok)

    def __str__(self) -> str:
        lines = [f"{self.env}: {len(self.findings) - len(self.failures)} of {len(self.findings)} checks passed"]
        for finding in self.findings:
            lines.append(f"  {'ok  ' if finding.ok else 'FAIL'} {finding.check:<18} {finding.message}".rstrip())
            if finding.fix:
                lines.append(f"       fix: {finding.fix}")
        return "\n".join(lines)


class ConformanceError(ForgeError, AssertionError):
    """An environment breaks the contract. `report` has the findings."""

    def __init__(self, report: ConformanceReport) -> None:
        super().__init__(str(report))
        self.report = report


def check_env(
    env: str | Make, *, episodes: int = 8, seed: int = 0, raise_on_failure: bool = True, **kwargs: Any
) -> ConformanceReport:
    """Check that an environment keeps the contract.

    The checks: PettingZoo's own ``api_test`` and ``seed_test``; texts within their spaces and observing without side
    effects; finite rewards; JSON-safe infos; an end; the same seed and actions give the same episode, also beside
    another live environment; no use of the global random generators of Python and numpy; empty, huge and odd actions
    never raise; a ``copy.deepcopy`` continues like the original; and, where the environment has a method
    ``secrets(agent)`` (texts that this agent must not have been able to read so far), none of them is in what the
    agent observes, unless another agent wrote it.

    Args:
        env: An id, an environment class, or a function that makes a fresh environment.
        episodes: Episodes that each check plays.
        seed: Seeds the episodes and the texts played.
        raise_on_failure: Whether a failed check raises.
        **kwargs: Constructor arguments.

    Raises:
        ConformanceError: A check failed; the message lists all findings and how to mend them.
        UnknownIdError: No environment has the id.
        TypeError: `env` is none of the three.
    """
    if episodes < 1:
        raise ValueError(f"episodes={episodes} checks nothing; set episodes >= 1")
    create, name = _factory(env, kwargs)
    seeds = range(seed, seed + episodes)
    each: dict[str, Callable[[], str | None]] = {
        "pettingzoo api": lambda: checks.pettingzoo_api(create),
        "pettingzoo seed": lambda: checks.pettingzoo_seed(create),
        "ends": lambda: checks.ends(create, seeds),
        "spaces": lambda: checks.spaces(create, seeds),
        "observing": lambda: checks.observing(create, seeds),
        "rewards and infos": lambda: checks.rewards_and_infos(create, seeds),
        "determinism": lambda: checks.determinism(create, seeds),
        "global randomness": lambda: checks.global_randomness(create, seeds),
        "odd actions": lambda: checks.odd_actions(create, seed),
        "fork": lambda: checks.fork(create, seeds),
        "leak": lambda: checks.leak(create, seeds),
    }
    report = ConformanceReport(env=name, findings=tuple(_run(check, call) for check, call in each.items()))
    if raise_on_failure and not report.ok:
        raise ConformanceError(report)
    return report


def _factory(env: str | Make, kwargs: Mapping[str, Any]) -> tuple[Make, str]:
    if isinstance(env, str):
        found: Make = lambda: make(env, **kwargs)  # noqa: E731  # three factories, one shape
        found().close()  # an unknown id or argument is the caller's mistake, not a finding
        name = env
    elif callable(env):
        found, name = (lambda: env(**kwargs)), getattr(env, "__name__", type(env).__name__)
    else:
        raise TypeError(f"check_env takes an id, a class or a function making an environment, got {type(env).__name__}")
    return (lambda: _turn_based(found())), name


def _turn_based(env: Any) -> AnyEnv:
    from pettingzoo import ParallelEnv
    from pettingzoo.utils.conversions import parallel_to_aec

    return parallel_to_aec(env) if isinstance(env, ParallelEnv) else env


def _run(check: str, call: Callable[[], str | None]) -> Finding:
    try:
        return Finding(check=check, ok=True, message=call() or "")
    except checks.NotApplicableError as why:
        return Finding(check=check, ok=True, message=f"left out: {why}")
    except checks.BreachError as broken:
        return Finding(check=check, ok=False, message=str(broken), fix=broken.fix)
    except Exception as error:  # noqa: BLE001  # whatever an environment raises is a finding about it
        fix = "mend what raises; run the check with a debugger on the message above"
        return Finding(check=check, ok=False, message=f"{type(error).__name__}: {error}", fix=fix)
