"""`check_env`: checks that an environment meets the framework's requirements, and reports of the results."""

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
from typing import Any, get_args

from pettingzoo import AECEnv, ParallelEnv

from forge_agents.display import visible
from forge_agents.envs.conformance.checks import (
    CHECKS,
    CHECKS_OF_FUNCTIONS,
    FIXES_OF_WRAP,
    REJECT_TEXT,
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
from forge_agents.envs.conformance.report import ConformanceError, ConformanceReport, Finding, Level
from forge_agents.envs.foreign import turn_based
from forge_agents.envs.registry import make
from forge_agents.envs.spec import EnvSpec
from forge_agents.envs.wrappers import WrappedEnv
from forge_agents.errors import UnknownIdError

ADAPTER = "adapter"
"""Tag of ids that are checked at the level "adapter"."""


class _OutOfTimeError(BaseException):
    """Not an Exception, so that no check mistakes it for an error of the environment."""


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
    """Check that an environment meets the requirements of the framework.

    The level "full" runs these checks:

    - PettingZoo's ``api_test`` and ``seed_test``, for parallel environments also the parallel versions.
    - Episodes end, with every number of agents that `min_agents` allows.
    - Observations are within their spaces, and observing has no side effects.
    - Rewards are finite, and infos are JSON-serializable.
    - The same seed and actions give the same episode, also next to another live environment and in another process.
    - The global random generators of Python, NumPy and torch (if imported) are not used.
    - Empty, huge and odd actions never raise. Actions listed as legal are accepted.
    - If the environment has ``fork``, or a wrapper that needs copies: copies and snapshots continue like the original.
    - If it has ``secrets(agent)``: the agent cannot read these texts unless an agent wrote them.
    - If it has ``swap_secrets(agent, rng)``: the agent's texts do not change when hidden information changes.
    - No agent can read another agent's reasoning.

    For environments made by `wrap`, a finding says whether the game or the functions around it are at fault. The level
    "adapter" plays random episodes and checks spaces, determinism in one process, and reasoning.

    Args:
        env: An id, an environment class, or a function that makes a fresh environment.
        episodes: Number of episodes per check. None uses 8, or 20 at the level "adapter".
        seed: Seed of the episodes and actions.
        level: None selects "adapter" for ids with that tag, otherwise "full".
        checks: Names of the checks to run. None runs all of the level.
        timeout_s: Maximum seconds of all checks together. Enforced only in a main thread, which signals can interrupt.
        raise_on_failure: Whether a failed check raises.
        **kwargs: Constructor arguments.

    Raises:
        ConformanceError: A check failed. The message lists all findings with remedies.
        UnknownIdError: No environment has the id.
        TypeError: `env` is none of the three, or does not make a PettingZoo environment.
    """
    if episodes is not None and episodes < 1:
        raise ValueError(f"episodes={episodes} checks nothing. Set episodes >= 1")
    if level not in (None, *get_args(Level)) or not timeout_s > 0:
        levels = ", ".join(get_args(Level))
        raise ValueError(f"level={level!r} must be one of {levels}, and timeout_s={timeout_s} must be above 0")
    if isinstance(env, str):
        build, name = functools.partial(make, env, **kwargs), env
    elif callable(env):
        build, name = functools.partial(env, **kwargs), getattr(env, "__name__", type(env).__name__)
    else:
        raise TypeError(f"check_env takes an id, a class or a function making an environment, got {type(env).__name__}")
    sample = build()  # an unknown id or wrong argument is an error of the caller, not a finding
    if not isinstance(sample, (AECEnv, ParallelEnv)):
        raise TypeError(
            f"{name} made a {type(sample).__name__}, which is not a PettingZoo environment. Convert Gymnasium "
            "environments by fa.wrap"
        )
    spec = sample.spec if isinstance(env, str) else EnvSpec(id="checked/Class-v0", entry_point=env, kwargs=kwargs)
    code = _locate_code(sample, spec.load())
    sample.close()
    level = level or ("adapter" if ADAPTER in spec.tags else "full")
    seeds = range(seed, seed + (episodes or (8 if level == "full" else 20)))
    case = Case(build=build, create=lambda: turn_based(build()), spec=spec, seeds=seeds, **code)
    available = CHECKS[level]
    if unknown := [check for check in checks or () if check not in available]:
        raise ValueError(f"no check {unknown[0]!r} at level {level!r}. The checks are {', '.join(available)}")
    selected = {name: check for name, check in available.items() if checks is None or name in checks}
    started = time.perf_counter()
    findings = _run_all(selected, case, timeout_s)
    seconds = round(time.perf_counter() - started, 3)
    report = ConformanceReport(name=name, findings=findings, level=level, seconds=seconds)
    if raise_on_failure and not report.ok:
        raise ConformanceError(report)
    return report


def _locate_code(sample: Any, entry_point: Any) -> dict[str, Any]:
    """Return the fields of `Case` about the code. `sample` may be a proxy of an instance in a worker process."""
    wrapped = sample.unwrapped
    if not isinstance(wrapped, WrappedEnv):
        cls = entry_point if isinstance(entry_point, type) else type(wrapped)
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


def _run_all(checks: Mapping[str, Check], case: Case, timeout_s: float) -> tuple[Finding, ...]:
    findings: list[Finding] = []
    try:
        with _timeout(timeout_s):
            for name, check in checks.items():
                findings.append(_run(name, check, case))
    except _OutOfTimeError:
        late, *rest = list(checks)[len(findings) :]
        fix = "make act and observe_text faster, or raise timeout_s"
        findings.append(Finding(check=late, ok=False, message=f"not finished after {timeout_s:g} s", fix=fix))
        reason = f"the checks took longer than {timeout_s:g} s"
        findings += [Finding(check=name, ok=True, skipped=True, message=reason) for name in rest]
    return tuple(findings)


def _run(name: str, check: Check, case: Case) -> Finding:
    try:
        return Finding(check=name, ok=True, message=check(case) or "")
    except NotApplicableError as reason:
        return Finding(check=name, ok=True, skipped=True, message=str(reason))
    except BreachError as breach:
        fix = FIXES_OF_WRAP.get(name, breach.fix) if case.inside else breach.fix
        by_functions = bool(case.inside) and name in CHECKS_OF_FUNCTIONS
        where = breach.where or ("" if by_functions else line_of_method(case.cls, breach.method))
        finding = Finding(check=name, ok=False, message=str(breach), where=where, fix=fix)
        if breach.__cause__ is None:
            return finding
        error: BaseException = breach
    except Exception as raised:  # noqa: BLE001  # any exception of an environment is a finding
        fix = f"fix the exception; {REJECT_TEXT if case.inside else 'run the check with a debugger'}"
        finding = Finding(check=name, ok=False, message=f"{type(raised).__name__}: {raised}", fix=fix)
        error = raised
    where, in_library = line_of_error(case.files, error, case.folder)
    if in_library:
        fix = (
            f"this is code of {case.inside}: if an action caused it, reject the action in text_to_action (return None "
            "or raise ValueError). Otherwise fix it in a class derived from the game"
        )
        finding = dataclasses.replace(finding, fix=fix)
    return dataclasses.replace(finding, where=where or ("" if case.inside else finding.where))


@contextlib.contextmanager
def _timeout(seconds: float) -> Iterator[None]:
    """Raise _OutOfTimeError in this thread after some seconds, if it is the main thread."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise _OutOfTimeError

    handler = signal.signal(signal.SIGALRM, stop)
    previous, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, previous, interval)
        signal.signal(signal.SIGALRM, handler)


# ---- on the command line


def report_all(
    ids: Sequence[str], *, as_json: bool, brief: bool, episodes: int | None, seed: int, timeout_s: float
) -> int:
    """Run `check_env` for every id and print the reports. Returns the number of environments that failed.

    With `as_json` a report is a line of JSON: id, ok, level, seconds, number of checks, passed, failed and skipped, and
    findings (failed, skipped or with a note). With `brief` only failures are printed. `timeout_s` applies to each id.
    """
    failed = 0
    for env_id in ids:
        report = _check(env_id, episodes=episodes, seed=seed, timeout_s=timeout_s)
        failed += not report.ok
        # an exception of the environment may quote what a model or a stranger wrote
        text = _as_json(report) if as_json else visible("\n".join(report.lines(failures_only=brief)))
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    if brief and not as_json:
        sys.stdout.write(f"{len(ids) - failed} of {len(ids)} environments passed all checks\n")
    return failed


def _as_json(report: ConformanceReport) -> str:
    facts = {"id": report.name, "ok": report.ok, "level": report.level, "seconds": report.seconds}
    facts |= {"checks": len(report.findings), "passed": len(report.passed), "failed": len(report.failures)}
    findings = [dataclasses.asdict(f) for f in report.findings if not f.ok or f.message]
    return json.dumps({**facts, "skipped": len(report.skipped), "findings": findings})


def _check(env_id: str, **settings: Any) -> ConformanceReport:
    """Check an id. An environment that cannot be made gives a failed report. An unknown id raises."""
    started = time.perf_counter()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # prints of the environment must not mix with the report
            return check_env(env_id, raise_on_failure=False, **settings)
    except UnknownIdError:
        raise
    except Exception as error:  # noqa: BLE001  # any exception while making an environment is a finding
        fix = "fix the exception, or install what is missing"
        finding = Finding(check="made", ok=False, message=f"{type(error).__name__}: {error}", fix=fix)
        seconds = round(time.perf_counter() - started, 3)
        return ConformanceReport(name=env_id, findings=(finding,), seconds=seconds)
