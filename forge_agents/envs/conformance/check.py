"""Does an environment keep the contract? Plays it with sensible and absurd texts and looks.

In: an environment id, class or factory. Out: a `ConformanceReport`, or `ConformanceError` listing what failed, where
and how to mend it; for the command line a table or JSON. Waits for the environment, and for one other process, with a
deadline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from pettingzoo import AECEnv, ParallelEnv
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge_agents.envs.conformance.checks import (
    CHECKS,
    OF_A_WRAPPED,
    OF_THE_FUNCTIONS,
    SAYS_NONE,
    Case,
    Check,
)
from forge_agents.envs.conformance.play import (
    BreachError,
    NotApplicableError,
    line_of_error,
    line_of_method,
    own_files,
)
from forge_agents.envs.foreign import turn_based
from forge_agents.envs.registry import make
from forge_agents.envs.spec import EnvSpec
from forge_agents.envs.wrappers import WrappedEnv
from forge_agents.errors import ForgeError, UnknownIdError

Level: TypeAlias = Literal["full", "adapter"]
"""How much is asked: "full" of an environment of this framework, "adapter" of unchanged code of others."""

ADAPTER = "adapter"
"""Tag of ids that are checked at the level "adapter"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    check: str
    ok: bool
    """False if the contract is broken."""
    skipped: bool = False
    """Whether the check could not be made, so that nothing is known; `message` says why."""
    message: str = ""
    """What was seen; for a skipped check, why."""
    where: str = ""
    """``file:line name`` of the code at fault, where it is known."""
    fix: str = ""
    """What to do; empty where nothing is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceReport:
    """The results of all checks of one environment or verifier."""

    name: str
    """The environment's id or class, or the verifier's name."""
    findings: tuple[Finding, ...]
    level: Level = "full"
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failures

    @property
    def passed(self) -> tuple[Finding, ...]:
        """The checks that were made and passed."""
        return tuple(f for f in self.findings if f.ok and not f.skipped)

    @property
    def skipped(self) -> tuple[Finding, ...]:
        """The checks that were not made; their messages say why."""
        return tuple(f for f in self.findings if f.skipped)

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The checks that failed."""
        return tuple(f for f in self.findings if not f.ok)

    def grouped(self) -> list[tuple[tuple[str, ...], Finding]]:
        """The findings in their order, those of checks that failed alike as one, with the names of the checks."""
        groups: dict[tuple[str, ...], list[Finding]] = {}
        for finding in self.findings:
            alike = (finding.check,) if finding.ok else (finding.message, finding.where, finding.fix)
            groups.setdefault(alike, []).append(finding)
        return [(tuple(each.check for each in group), group[0]) for group in groups.values()]

    def __str__(self) -> str:
        counts = f"{len(self.passed)} passed, {len(self.failures)} failed, {len(self.skipped)} skipped"
        lines = [f"{self.name}: {len(self.findings)} checks, {counts}"]
        for checks, finding in self.grouped():
            check = ", ".join(checks) + f" ({len(checks)} checks)" * (len(checks) > 1)
            lines.append(f"  {_outcome(finding):<4} {check:<20} {finding.message}".rstrip())
            if finding.where:
                lines.append(f"       at:  {finding.where}")
            if finding.fix:
                lines.append(f"       fix: {finding.fix}")
        return "\n".join(lines)


def _outcome(finding: Finding) -> str:
    return "skip" if finding.skipped else "ok" if finding.ok else "FAIL"


class ConformanceError(ForgeError, AssertionError):
    """An environment or a verifier breaks the contract. `report` has the findings."""

    def __init__(self, report: ConformanceReport) -> None:
        super().__init__(str(report))
        self.report = report


class _OutOfTimeError(BaseException):
    """Not an Exception, so that no check takes it for the environment's."""


def check_env(
    env: str | Callable[..., Any],
    *,
    episodes: int | None = None,
    seed: int = 0,
    level: Level | None = None,
    checks: Collection[str] | None = None,
    timeout_s: float = 600.0,
    raise_on_failure: bool = True,
    **kwargs: Any,
) -> ConformanceReport:
    """Check that an environment keeps the contract.

    The checks of the level "full": PettingZoo's own ``api_test`` and ``seed_test``, of a parallel environment also
    ``parallel_api_test`` and ``parallel_seed_test``; an end; every number of seats that `min_agents` allows; texts
    within their spaces and observing without side effects; finite rewards; JSON-safe infos; the same seed and actions
    give the same episode, also beside another live environment, and in another process; no use of the global random
    generators of Python, numpy and, where imported, torch; empty, huge and odd actions never raise; no action that is
    listed as legal is called illegal. Where the environment has a ``fork``, or a wrapper that lives on copies, a copy
    and a ``snapshot`` continue like the original, and neither notices the other. Where it has a method
    ``secrets(agent)`` (texts that this agent must not be able to read now), none of them is in what it reads, unless
    an agent wrote it. Where it has ``swap_secrets(agent, rng)`` (which replaces all that the agent does not know), what
    the agent reads does not change by a letter.

    Of an environment that `wrap` made, a finding says whether it lies in the functions around the game or in the game.

    The level "adapter" plays random episodes and checks spaces and determinism in one process.

    Args:
        env: An id, an environment class, or a function that makes a fresh environment.
        episodes: Episodes that each check plays; None for 8, and at the level "adapter" 20.
        seed: Seeds the episodes and the texts played.
        level: None for "adapter" where the id is tagged so, else "full".
        checks: Names of the checks to run; None for all of the level.
        timeout_s: Seconds for all checks together; enforced in a main thread, where signals can interrupt a check.
        raise_on_failure: Whether a failed check raises.
        **kwargs: Constructor arguments.

    Raises:
        ConformanceError: A check failed; the message lists all findings and how to mend them.
        UnknownIdError: No environment has the id.
        TypeError: `env` is none of the three, or makes no environment of PettingZoo.
    """
    if episodes is not None and episodes < 1:
        raise ValueError(f"episodes={episodes} checks nothing; set episodes >= 1")
    if level not in (None, *get_args(Level)) or not timeout_s > 0:
        raise ValueError(f"level={level!r} must be one of {', '.join(get_args(Level))}, timeout_s={timeout_s} above 0")
    if isinstance(env, str):
        build, name = functools.partial(make, env, **kwargs), env
    elif callable(env):
        build, name = functools.partial(env, **kwargs), getattr(env, "__name__", type(env).__name__)
    else:
        raise TypeError(f"check_env takes an id, a class or a function making an environment, got {type(env).__name__}")
    sample = build()  # an unknown id or a wrong argument is the caller's mistake, not a finding
    if not isinstance(sample, (AECEnv, ParallelEnv)):
        raise TypeError(
            f"{name} made a {type(sample).__name__}, which is no PettingZoo environment; fa.wrap makes one of "
            "Gymnasium's"
        )
    spec = sample.spec if isinstance(env, str) else EnvSpec(id="checked/Class-v0", entry_point=env, kwargs=kwargs)
    about = _about(sample, spec.load())
    sample.close()
    level = level or ("adapter" if ADAPTER in spec.tags else "full")
    seeds = range(seed, seed + (episodes or (8 if level == "full" else 20)))
    case = Case(build=build, create=lambda: turn_based(build()), spec=spec, seeds=seeds, **about)
    each = CHECKS[level]
    if unknown := [check for check in checks or () if check not in each]:
        known = ", ".join(each)
        raise ValueError(f"no check {unknown[0]!r} at level {level!r}; known are {known}")
    chosen = {name: check for name, check in each.items() if checks is None or name in checks}
    started = time.perf_counter()
    findings = _run_all(chosen, case, timeout_s)
    seconds = round(time.perf_counter() - started, 3)
    report = ConformanceReport(name=name, findings=findings, level=level, seconds=seconds)
    if raise_on_failure and not report.ok:
        raise ConformanceError(report)
    return report


def _about(sample: Any, built: Any) -> dict[str, Any]:
    """Whose code an environment is, as `Case` says it.

    Args:
        built: What the spec names, also where the environment lives in a worker process.
    """
    wrapped = sample.unwrapped
    if not isinstance(wrapped, WrappedEnv):
        cls = built if isinstance(built, type) else type(wrapped)
        return {"cls": cls, "files": own_files(cls)}
    game = type(wrapped.env.unwrapped)
    package = game.__module__.partition(".")[0]
    folders = [f"{folder}/" for folder in getattr(sys.modules.get(package), "__path__", ())]
    file = str(getattr(sys.modules.get(game.__module__), "__file__", ""))
    return {
        "cls": game,
        "files": wrapped.source_files | own_files(type(wrapped)),
        "inside": f"{wrapped.env} of {package}",
        "folder": folders[0] if folders else file,
    }


def _run_all(each: Mapping[str, Check], case: Case, timeout_s: float) -> tuple[Finding, ...]:
    findings: list[Finding] = []
    try:
        with _deadline(timeout_s):
            for name, check in each.items():
                findings.append(_run(name, check, case))
    except _OutOfTimeError:
        late, *rest = list(each)[len(findings) :]
        fix = "let act and observe_text return at once, or give the check more time"
        findings.append(Finding(check=late, ok=False, message=f"not done when {timeout_s:g} s were over", fix=fix))
        why = f"the {timeout_s:g} s were over"
        findings += [Finding(check=name, ok=True, skipped=True, message=why) for name in rest]
    return tuple(findings)


def _run(name: str, check: Check, case: Case) -> Finding:
    try:
        return Finding(check=name, ok=True, message=check(case) or "")
    except NotApplicableError as why:
        return Finding(check=name, ok=True, skipped=True, message=str(why))
    except BreachError as broken:
        fix = OF_A_WRAPPED.get(name, broken.fix) if case.inside else broken.fix
        by_functions = bool(case.inside) and name in OF_THE_FUNCTIONS
        where = broken.where or ("" if by_functions else line_of_method(case.cls, broken.method))
        finding = Finding(check=name, ok=False, message=str(broken), where=where, fix=fix)
        if broken.__cause__ is None:
            return finding
        error: BaseException = broken
    except Exception as raised:  # noqa: BLE001  # whatever an environment raises is a finding about it
        fix = f"mend what raises; {SAYS_NONE if case.inside else 'run the check with a debugger on the message above'}"
        finding = Finding(check=name, ok=False, message=f"{type(raised).__name__}: {raised}", fix=fix)
        error = raised
    where, theirs = line_of_error(case.files, error, case.folder)
    if theirs:
        fix = (
            f"this is code of {case.inside}, not yours: where an action led there, let text_to_action refuse it "
            "(return None or raise ValueError); else derive a class from the game that mends it"
        )
        finding = dataclasses.replace(finding, fix=fix)
    return dataclasses.replace(finding, where=where or ("" if case.inside else finding.where))


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise _OutOfTimeError in this thread, if it is the main one, when the seconds are over."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise _OutOfTimeError

    handler = signal.signal(signal.SIGALRM, stop)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, interval)
        signal.signal(signal.SIGALRM, handler)


# ---- on the command line


def report_all(
    ids: Sequence[str], *, as_json: bool, brief: bool, episodes: int | None, seed: int, timeout_s: float
) -> int:
    """Check, as `check_env`, and print one id after another. Returns how many failed.

    Args:
        as_json: Whether each id is a line of JSON: id, ok, level, seconds, checks (their number), passed, failed,
            skipped, findings (those that failed, were skipped or say something).
        brief: Whether a table has one row per id instead of one per check.
        timeout_s: Seconds for each id.
    """
    failed, table = 0, Table("environment", "level", "result", "seconds", "finding")
    for env_id in ids:
        report = _examine(env_id, episodes=episodes, seed=seed, timeout_s=timeout_s)
        failed += not report.ok
        if as_json:
            said = [dataclasses.asdict(f) for f in report.findings if not f.ok or f.message]
            facts = {"id": report.name, "ok": report.ok, "level": report.level, "seconds": report.seconds}
            facts |= {name: len(found) for name, found in _counted(report).items()}
            sys.stdout.write(json.dumps({**facts, "checks": len(report.findings), "findings": said}) + "\n")
            sys.stdout.flush()
        elif brief:
            worst = report.failures[0] if report.failures else None
            counts = ", ".join(f"{len(found)} {name}" for name, found in _counted(report).items() if found)
            verdict = Text.assemble(Text("ok", "green") if report.ok else Text("FAIL", "bold red"), f" ({counts})")
            table.add_row(Text(env_id), report.level, verdict, f"{report.seconds:.1f}", _cell(worst))
        else:
            counts = ", ".join(f"{len(found)} {name}" for name, found in _counted(report).items())
            title = f"{report.name}: {counts}; {report.seconds:.1f} s"
            own = Table("check", "result", "finding", title=title, title_justify="left")
            for names, finding in report.grouped():
                own.add_row("\n".join(names), _verdict(finding), _cell(finding))
            Console().print(own)
    if brief and not as_json:
        Console().print(table)
        sys.stdout.write(f"{len(ids) - failed} of {len(ids)} environments keep the contract\n")
    return failed


def _examine(env_id: str, *, episodes: int | None, seed: int, timeout_s: float) -> ConformanceReport:
    """The report of an id; one that cannot be made is a finding, so that the others are checked as well.

    Raises:
        UnknownIdError: Nothing is registered under the id.
    """
    started = time.perf_counter()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # an environment that prints must not spoil the report
            return check_env(env_id, episodes=episodes, seed=seed, timeout_s=timeout_s, raise_on_failure=False)
    except UnknownIdError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever keeps an environment from being made is a finding about it
        fix = "mend what raises, or install what is missing"
        finding = Finding(check="made", ok=False, message=f"{type(error).__name__}: {error}", fix=fix)
        seconds = round(time.perf_counter() - started, 3)
        return ConformanceReport(name=env_id, findings=(finding,), seconds=seconds)


def _counted(report: ConformanceReport) -> dict[str, tuple[Finding, ...]]:
    return {"passed": report.passed, "failed": report.failures, "skipped": report.skipped}


def _verdict(finding: Finding) -> Text:
    return Text(_outcome(finding), {"ok": "green", "FAIL": "bold red", "skip": "yellow"}[_outcome(finding)])


def _cell(finding: Finding | None) -> Text:
    """What was seen, where, and what to do; never markup, for some of it was written by models."""
    if finding is None:
        return Text()
    lines = (finding.message, finding.where and f"at {finding.where}", finding.fix and f"fix: {finding.fix}")
    return Text("\n".join(line for line in lines if line))
