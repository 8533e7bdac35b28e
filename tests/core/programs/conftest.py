import pytest

from forge_agents.programs.protocols import common


@pytest.fixture(autouse=True)
def forget_warnings():
    """A process shows a limited number of warnings about requests, and each test expects its own."""
    common._warned.clear()
