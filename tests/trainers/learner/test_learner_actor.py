"""The start of one rank of a learner, and the order of its calls."""

from __future__ import annotations

import asyncio
import gc
import inspect
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from forge_trainers.learner import actor
from forge_trainers.learner.actor import LearnerActor
from forge_trainers.learner.plan import LearnerPlan


class Publisher:
    """Says to which store it published."""

    def __init__(self, store: str) -> None:
        self.store = store

    async def publish(self, *_: Any) -> dict[str, Any]:
        return {"store": self.store}


def test_publish_after_a_replaced_store_uses_the_new_one():
    publish, use_store = (inspect.unwrap(getattr(LearnerActor, name)._method) for name in ("publish", "use_store"))

    second = SimpleNamespace(publisher=lambda name, **_: Publisher("second"))

    async def order() -> dict[str, Any]:
        core = SimpleNamespace(version=3, published=list, config=LearnerPlan(compute_dtype="bfloat16"))
        learner: Any = SimpleNamespace(
            _name="hero-learner",
            _store="first",
            _publishers={"hero": Publisher("first")},
            _one_at_a_time=asyncio.Lock(),
            _thread=None,
            _core=lambda whose: core,
        )
        async with learner._one_at_a_time:  # as a step that takes long
            replaced = asyncio.ensure_future(use_store(learner, "hero", second))
            await asyncio.sleep(0)
            published = asyncio.ensure_future(publish(learner, "hero"))
            await asyncio.sleep(0)
        await replaced
        put: dict[str, Any] = await published
        return put

    assert asyncio.run(order()) == {"store": "second", "version": 3.0}


def test_garbage_collections_of_a_learner_do_not_visit_its_modules(monkeypatch):
    for name in ("keep_freed_memory", "limit_matmul_cache"):  # settings of the whole process
        monkeypatch.setattr(actor, name, lambda: None)
    module = [object()]
    assert any(each is module for each in gc.get_objects())
    LearnerActor({}, "hero", None, {})
    assert not any(each is module for each in gc.get_objects())


def test_start_of_a_run_imports_no_inductor_no_datasets_and_no_sklearn(tiny_llama):
    code = """
import sys
import forge_trainers.learner.actor
assert "torch" not in sys.modules
from forge_trainers.learner import core, titan
from forge_trainers.learner.plan import LearnerPlan
core.LearnerCore(LearnerPlan(model=sys.argv[1], threads=1))
print("torch" in sys.modules, "torch._inductor.compile_fx" in sys.modules, titan.torch.compile.__name__)
from pathlib import Path
from forge_agents.rollout.rendering import Renderer
Renderer.of(Path(sys.argv[1]))
print("datasets" in sys.modules, "torchtitan.trainer" in sys.modules, "sklearn" in sys.modules)
"""
    command = [sys.executable, "-c", code, tiny_llama]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split() == ["True", "False", "compile", "False", "False", "False"]
