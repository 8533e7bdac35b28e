"""The same seeds in another process: both ends of the check that no episode depends on the process it is played in.

In: a `Target`, seeds; in the child, the same as JSON. Out: transcripts. Waits for the child, with a deadline.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any

from forge_agents.envs import registry
from forge_agents.envs.conformance.play import BreachError, Make, NotApplicableError, Step, play, same
from forge_agents.envs.wrappers import turn_based
from forge_agents.errors import UnknownIdError

DEADLINE_S = 120.0
"""Seconds for the child to start and play."""
_FIX = "depend on nothing but the seed and the actions: no hash(), no order of a set, no id(), no clock, no files"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is checked, in words that another process understands."""

    id: str = ""
    """Registered id; empty for a class or function."""
    entry_point: str = ""
    """``"package.module:name"``; empty where a plugin registers the id."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Constructor arguments."""
    registration: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `register`, where importing the module does not register the id."""

    def make(self) -> Any:
        """A fresh environment."""
        if not self.id:
            build: Any = importlib.import_module(self.entry_point.partition(":")[0])
            for part in self.entry_point.partition(":")[2].split("."):
                build = getattr(build, part)
            return build(**self.kwargs)
        if self.entry_point:
            importlib.import_module(self.entry_point.partition(":")[0])
            try:
                registry.spec(self.id)
            except UnknownIdError:
                registry.register(self.id, entry_point=self.entry_point, **self.registration)
        return registry.make(self.id, **self.kwargs)


def target_of(env: str | Callable[..., Any], kwargs: Mapping[str, Any]) -> Target:
    """How another process finds `env`.

    Raises:
        NotApplicableError: It cannot, and why.
    """
    spec = registry.spec(env) if isinstance(env, str) else None
    build = spec.entry_point if spec is not None else env
    entry_point = build if isinstance(build, str) else _importable(build)
    registration: dict[str, Any] = {}
    if spec is not None:
        registration = {"max_turns": spec.max_turns, **spec.kwargs}
    target = Target(
        id="" if spec is None else spec.id, entry_point=entry_point, kwargs=kwargs, registration=registration
    )
    try:
        json.dumps(asdict(target))
    except (TypeError, ValueError) as error:
        raise NotApplicableError(f"an argument cannot be sent to another process: {error}") from error
    return target


def _importable(build: Any) -> str:
    module, name = getattr(build, "__module__", "?"), getattr(build, "__qualname__", "?")
    known: Any = sys.modules.get(module)
    for part in name.split("."):
        known = getattr(known, part, None)
    try:
        found = importlib.util.find_spec(module) if known is build and module != "__main__" else None
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin != getattr(sys.modules[module], "__file__", None):
        raise NotApplicableError(f"another process cannot import {name} of {module}; put it into a module of its own")
    return f"{module}:{name}"


def other_process(create: Make, env: str | Callable[..., Any], kwargs: Mapping[str, Any], seeds: range) -> None:
    """A fresh interpreter with another hash seed plays the same episodes."""
    target = target_of(env, kwargs)
    here = [[_fingerprint(step) for step in play(create(), seed)] for seed in seeds]
    asked = {"target": asdict(target), "path": sys.path, "seeds": list(seeds)}
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    try:
        child = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(asked).encode(),
            capture_output=True,
            timeout=DEADLINE_S,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BreachError(f"another process did not play {len(seeds)} episodes in {DEADLINE_S:g} s", _FIX) from None
    if child.returncode:
        last = child.stderr.decode(errors="replace").strip().splitlines()[-1:]
        fix = "let the module be imported, and the environment made, by a fresh interpreter"
        raise BreachError(f"another process failed: {' '.join(last)}", fix)
    for seed, one, other in zip(seeds, here, json.loads(child.stdout.splitlines()[-1]), strict=True):
        same(f"seed {seed}, in this process and in another", one, [tuple(step) for step in other], _FIX)


def _fingerprint(step: Step) -> Step:
    agent, observation, reward, terminated, truncated, info, action = step
    return agent, _digest(observation), reward, bool(terminated), bool(truncated), _digest(info), _digest(action)


def _digest(text: str) -> str:
    if len(text) <= 500:
        return text
    return f"{text[:500]}... sha256 {sha256(text.encode(errors='surrogatepass')).hexdigest()}"


def _main() -> None:
    asked = json.loads(sys.stdin.buffer.read())
    sys.path[:] = asked["path"]
    target = Target(**asked["target"])
    with contextlib.redirect_stdout(sys.stderr):  # an environment that prints is not what is asked about
        played = [[_fingerprint(step) for step in play(turn_based(target.make()), seed)] for seed in asked["seeds"]]
    sys.stdout.write("\n" + json.dumps(played) + "\n")


if __name__ == "__main__":
    _main()
