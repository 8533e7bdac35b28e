"""Run a training example of the README or of a guide as it is written, and measure it on held-out seeds.

    python recipes/documented.py readme_train quick_start [--seed 0] [--control] [--out runs/documented]

An example is the Python block after `<!-- run: NAME -->` in `README.md` or `docs/*.md`, together with the blocks before
it on the same page. Only the seed is added, and with `--control` the learning rate is 0 and the run has two steps.
"""

import argparse
import json
import os
import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import forge_agents as fa

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(
    r"^(?:<!-- run: (\w+) -->\n)?(?:<!--[^\n]*-->\n)?```python([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
CONTROL_STEPS = 2
EPISODES = 128


def example(name: str) -> str:
    """The Python code of the example and of the blocks before it on its page.

    Raises:
        ValueError: No page has the marker.
    """
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        if f"<!-- run: {name} -->" not in text:
            continue
        blocks = []
        for mark, options, code in BLOCK.findall(text):
            if mark == name:
                return "\n".join([*blocks, code])
            if "no-run" not in options:
                blocks.append(code)
        raise ValueError(f"{page.name} has <!-- run: {name} -->, but no Python block follows on the next line")
    raise ValueError(f"neither README.md nor a page in docs/ has <!-- run: {name} -->")


def measured_trainer(name: str, seed: int, control: bool, folder: Path) -> type[fa.GRPOTrainer]:
    """The trainer class that the example gets: the seed is added, and `fit` is measured before and after."""
    arm = f"{name}-control" if control else name

    class MeasuredTrainer(fa.GRPOTrainer):
        def __init__(self, policies: Any, config: fa.GRPOConfig, out_dir: str) -> None:
            config = replace(config, seed=seed)
            if control:
                config = replace(config, learner=replace(config.learner, lr=0.0))
            super().__init__(policies, config=config, out_dir=folder / arm / out_dir)

        def fit(self, env: Any, *, steps: int, env_args: dict[str, Any] | None = None) -> Any:
            before = self.evaluate(env, episodes=EPISODES, env_args=env_args)
            result = super().fit(env, steps=CONTROL_STEPS if control else steps, env_args=env_args)
            after = self.evaluate(env, episodes=EPISODES, env_args=env_args)
            ends = {"before": [before.reward, before.ci], "after": [after.reward, after.ci]}
            record = {"arm": arm, "seed": seed, **ends}
            (folder / arm / "result.json").write_text(json.dumps(record))
            return result

    return MeasuredTrainer


def main(words: list[str] | None = None) -> None:
    """Run each example; a finished one is not repeated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help="marker of the example")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", action="store_true", help="learning rate 0, two steps")
    parser.add_argument("--out", type=Path, default=Path("runs/documented"), help="folder of the runs and results")
    options = parser.parse_args(words)
    out = options.out.absolute()
    for name in options.names:
        code = example(name)
        folder = out / f"{name}-control" if options.control else out / name
        if (folder / "result.json").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        script = folder / f"{name}_example.py"
        script.write_text(code, encoding="utf-8")
        os.chdir(folder)
        original, fa.GRPOTrainer = fa.GRPOTrainer, measured_trainer(name, options.seed, options.control, out)
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            fa.GRPOTrainer = original


if __name__ == "__main__":
    main()
