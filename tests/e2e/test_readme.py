"""The README's training example with a tiny model and one step. `recipes/documented.py` runs it unchanged."""

import asyncio
import importlib
import inspect
import json
import re
import runpy
from pathlib import Path

import pytest
from local_processes import use_local_processes

import forge_agents as fa

README = Path(__file__).parents[2] / "README.md"
SMALL = "engine=fa.EngineConfig(enforce_eager=True, kv_cache_gb=0.1, max_model_len=512, threads=1)"


def block(mark):
    result = re.search(rf"<!-- run: {mark} -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert result, f"the README has no block marked {mark}"
    return result.group(1)


def run_in_notebook(script, code):
    """Run the code while an event loop runs around it, as around the cells of a notebook."""

    async def notebook():
        runpy.run_path(str(script), run_name="__main__")

    script.write_text(code)
    asyncio.run(notebook())


@pytest.mark.timeout(900)
def test_the_custom_environment_passes_its_check_and_trains(tiny_models, tmp_path, monkeypatch):
    code = block("readme_train")
    assert len([line for line in code.splitlines() if line.strip()]) <= 25
    changes = {
        '"smollm2-135m-instruct"': repr(str(tiny_models(family="llama", dtype="bfloat16"))),
        "group_size=8": f"group_size=2, {SMALL}",
        "steps=10": "steps=1",
    }
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    monkeypatch.chdir(tmp_path)
    use_local_processes(monkeypatch)
    run_in_notebook(tmp_path / "readme.py", code)
    assert (tmp_path / "runs/guess/metrics.jsonl").exists()
    assert fa.check_env("my/Guess-v0").ok


@pytest.mark.timeout(3000)
def test_the_quick_start_learns_with_the_default_rate(tmp_path, monkeypatch, capsys):
    """The example but for half of its groups, four of its ten steps, an engine as small, and a short evaluation."""
    monkeypatch.setitem(inspect.unwrap(fa.GRPOTrainer.evaluate).__kwdefaults__, "episodes", 48)
    monkeypatch.syspath_prepend(str(README.parent / "recipes"))
    code = importlib.import_module("documented").example("quick_start")
    assert "steps=10" in code and "lr" not in code
    small = "GRPOConfig(groups_per_step=4, engine=fa.EngineConfig(enforce_eager=True, max_model_len=256), "
    monkeypatch.chdir(tmp_path)
    run_in_notebook(tmp_path / "quick_start.py", code.replace("steps=10", "steps=4").replace("GRPOConfig(", small))
    rows = [json.loads(line) for line in (tmp_path / "runs/echo/metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows]
    rewards.append(float(capsys.readouterr().out.split()[-1]))  # with the weights after the last step
    assert len(rewards) == 5 and {row["learner/lr"] for row in rows} == {2e-5}
    assert rewards[-1] > rewards[0] + 0.4, rewards  # measured: 0.08, 0.18, 0.47, 0.63, 0.75
