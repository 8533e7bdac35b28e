"""What the README shows, run as it stands; only the model and the number of steps are smaller."""

import asyncio
import re
import runpy
from pathlib import Path

import pytest

import forge_agents as fa

README = Path(__file__).parents[2] / "README.md"
SMALL = "engine=fa.EngineConfig(enforce_eager=True, kv_cache_gb=0.1, max_model_len=512, threads=1)"


def block(mark):
    found = re.search(rf"<!-- run: {mark} -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found, f"the README has no block marked {mark}"
    return found.group(1)


@pytest.mark.timeout(300)
def test_the_custom_environment_passes_its_check_and_trains(tiny_models, tmp_path, monkeypatch):
    code = block("readme_train")
    assert len([line for line in code.splitlines() if line.strip()]) <= 25
    changes = {
        '"smollm2-135m-instruct"': repr(str(tiny_models(family="llama", dtype="bfloat16"))),
        "group_size=8": f"group_size=2, {SMALL}",
        "steps=20": "steps=1",
    }
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    script = tmp_path / "readme.py"
    script.write_text(code)
    monkeypatch.chdir(tmp_path)

    async def notebook():
        runpy.run_path(str(script), run_name="__main__")

    asyncio.run(notebook())  # a loop runs around it, as around the cells of one
    assert (tmp_path / "runs/guess/metrics.jsonl").exists()
    assert fa.check_env("my/Guess-v0").ok
