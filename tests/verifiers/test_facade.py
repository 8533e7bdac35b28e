import subprocess
import sys

import pytest

import forge_verifiers
from forge_agents.testing import ConformanceError, check_verifier
from forge_agents.types import Trajectory
from forge_verifiers import Rule


def test_every_public_name_exists():
    assert sorted(forge_verifiers.__all__) == forge_verifiers.__all__
    for name in forge_verifiers.__all__:
        assert getattr(forge_verifiers, name) is not None
    with pytest.raises(AttributeError, match="Ensemble"):
        _ = forge_verifiers.Ensembel


def test_importing_it_imports_nothing_heavy():
    code = "import sys, forge_verifiers; sys.exit(any(m in sys.modules for m in ('numpy', 'torch', 'scipy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("gold", "wrong", "finding"), [(0.9, 0.0, "gold answer scores"), (1.0, 1.0, "wrong answer scores")]
)
def test_the_check_finds_a_verifier_that_cannot_tell(gold, wrong, finding):
    verifier = Rule(lambda t: wrong if t.seed else gold, name="v")
    with pytest.raises(ConformanceError, match=finding):
        check_verifier(
            verifier, Trajectory(agent="a", policy="p", turns=()), Trajectory(agent="a", policy="p", turns=(), seed=1)
        )
