import subprocess
import sys

import pytest

import forge_verifiers
from forge_agents import Endpoint, Episode, Rule, check_verifier
from forge_agents.errors import ArgumentError
from forge_agents.testing import ConformanceError
from forge_agents.types import Trajectory
from forge_verifiers import Ensemble, Exact, Judge, MathEqual, Repetition, SelfConsistency


def test_every_public_name_exists():
    assert sorted(forge_verifiers.__all__) == forge_verifiers.__all__
    for name in forge_verifiers.__all__:
        assert getattr(forge_verifiers, name) is not None
        assert callable(getattr(forge_verifiers, name)) or name == "combiners"  # no subpackage hides a name
    assert len(forge_verifiers.__all__) <= 35
    with pytest.raises(AttributeError, match="SoftMinimum"):
        _ = forge_verifiers.SoftMinimun
    assert forge_verifiers.Rule is Rule and "Rule" not in forge_verifiers.__all__  # documented in forge_agents


def test_importing_it_imports_nothing_heavy():
    code = "import sys, forge_verifiers; sys.exit(any(m in sys.modules for m in ('numpy', 'torch', 'scipy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0


@pytest.mark.parametrize(
    "verifier",
    [
        Repetition(),
        MathEqual(),
        SelfConsistency(),
        Ensemble([Repetition(), Exact()]),
        0.5 * Repetition() + 0.5 * Exact(),
        Judge(Endpoint("http://127.0.0.1:9/v1", "m"), "Is it right?"),
    ],
    ids=lambda verifier: type(verifier).__name__,
)
def test_anything_but_a_list_of_trajectories_is_refused(verifier):
    trajectory = Trajectory(agent="a", policy="p", turns=())
    episode = Episode(env_id="e", seed=0, trajectories={"a": trajectory})
    for value, got in [(trajectory, "Trajectory"), (episode, "Episode"), ([episode], "Episode"), ("text", "str")]:
        with pytest.raises(ArgumentError, match=f"a list of trajectories, but got {got}"):
            verifier.score(value)


@pytest.mark.parametrize(
    ("gold", "wrong", "exact", "finding"),
    [
        (0.9, 0.0, True, "a gold answer scores 0.9"),
        (1.0, 1.0, True, "a wrong answer scores 1"),
        (0.6, 0.7, False, "a wrong answer scores 0.7"),
        (None, 0.0, False, "a gold answer scores nan"),
        (0.6, None, False, "a wrong answer scores nan"),
    ],
)
def test_the_check_finds_a_verifier_that_cannot_tell(gold, wrong, exact, finding):
    verifier = Rule(lambda t: wrong if t.seed else gold, name="v")
    object.__setattr__(verifier, "exact", exact)
    with pytest.raises(ConformanceError, match=finding):
        check_verifier(
            verifier, Trajectory(agent="a", policy="p", turns=()), Trajectory(agent="a", policy="p", turns=(), seed=1)
        )


def test_a_graded_verifier_need_not_be_sure():
    verifier = Rule(lambda t: 0.4 - 0.1 * t.seed, name="graded")
    rows = [Trajectory(agent="a", policy="p", turns=(), seed=seed) for seed in range(3)]
    report = check_verifier(verifier, rows[0], rows[1:])
    assert report.ok and report.name == "graded" and not verifier.exact and Exact().exact
