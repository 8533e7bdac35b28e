"""The number of files and functions of one training step in the controller, and the list of them in docs/a-step.md."""

import gc
import re
import sys
from pathlib import Path

import pytest
import scipy.special  # noqa: F401  # imported by the first step
import tensordict  # noqa: F401  # imported by the first step
from fake_run import Draws, trainer

import forge_trainers.batch.packing  # noqa: F401  # imported by the first step
from forge_trainers.rl.session import Session

ROOT = Path(__file__).parents[3]
SOURCES = tuple(f"{ROOT / name}/" for name in ("forge_agents", "envs", "verifiers", "trainers"))
PAGE = ROOT / "docs" / "a-step.md"


class Profile:
    """The product's functions that are entered, by file. Callers of the profiled code do not count."""

    def __init__(self):
        self.functions: dict[str, dict[str, None]] = {}
        self._callers = set()

    def __enter__(self):
        frame = sys._getframe()
        while frame is not None:
            self._callers.add(frame)
            frame = frame.f_back
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _event(self, frame, event, _):
        code = frame.f_code
        # Programs patch threads for the rest of a process, also of this one if other tests ran programs before. The
        # watchdog's timer runs during the step only on a busy machine.
        is_product = code.co_filename.startswith(SOURCES) and not code.co_name.startswith("<")
        is_product = is_product and not code.co_qualname.startswith(("_patch.", "Watchdog._tick"))
        if event == "call" and is_product and frame not in self._callers:
            file = str(Path(code.co_filename).relative_to(ROOT))
            self.functions.setdefault(file, {}).setdefault(code.co_qualname)


@pytest.fixture(scope="module")
def entered(tmp_path_factory):
    """Functions that the second step enters, by file in order."""
    step, profiles = Session.step, []

    async def profiled(self, number, watch):
        if number != 1:
            return await step(self, number, watch)
        with Profile() as profile:
            profiles.append(profile)
            return await step(self, number, watch)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Session, "step", profiled)
        with trainer(tmp_path_factory.mktemp("run")) as run:
            run.fit(Draws, steps=3)
    return profiles[0].functions


def test_step_enters_few_files_and_functions(entered):
    listing = "\n".join(f"{file}: {', '.join(names)}" for file, names in entered.items())
    assert len(entered) <= 25, listing
    assert sum(map(len, entered.values())) <= 150, listing


def test_page_lists_the_files_of_a_step(entered):
    listed = re.findall(r"^\d+\. `([\w/]+\.py)`", PAGE.read_text(), re.MULTILINE)
    assert set(entered) <= set(listed) and len(listed) <= 25
    assert all((ROOT / file).is_file() for file in listed)
    assert len(PAGE.read_text().split()) <= 400


def test_controller_keeps_no_objects_of_earlier_steps(tmp_path, monkeypatch):
    """One object per episode of a step would add 210 objects between the two counts."""
    counts = []
    step = Session.step

    async def counted(self, *args, **options):
        result = await step(self, *args, **options)
        if not counts:
            gc.freeze()  # collections visit only objects of later steps
        gc.collect()
        counts.append(len(gc.get_objects()))
        return result

    monkeypatch.setattr(Session, "step", counted)
    with trainer(tmp_path, keep_episodes=2) as run:
        run.fit(Draws, steps=60)
    early, late = min(counts[15:25]), min(counts[50:])
    assert late - early < 200, counts
