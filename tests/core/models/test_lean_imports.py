"""transformers is imported without optional libraries, and the patches end with the block."""

from __future__ import annotations

import subprocess
import sys


def test_lean_transformers_skips_optional_libraries():
    program = """
from forge_agents.models.lean_imports import lean_transformers
with lean_transformers():
    from transformers.utils import import_utils, is_scipy_available, is_sklearn_available
    assert not is_scipy_available() and not is_sklearn_available()
import transformers.utils
assert transformers.utils.is_scipy_available is import_utils.is_scipy_available
assert transformers.utils.is_sklearn_available is import_utils.is_sklearn_available
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)  # transformers is not loaded there yet
