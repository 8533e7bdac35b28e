"""Shared parts of the examples that compare runs: options, imitation of an oracle, measurements, a table and a plot.

Each run writes ``result.json`` with the held-out reward before and after training, and its curve. A finished run is
read from this file, and an interrupted run continues from its last checkpoint.
"""

import argparse
import json
from dataclasses import replace
from functools import partial

from rich.console import Console
from rich.table import Table

import forge_agents as fa
from forge_trainers.records.plots import draw_arms

HELP = {
    "seed": "seed of training",
    "seeds": "seeds of training, one run for each",
    "steps": "optimizer steps of each run",
    "control_steps": "steps of the control, which has learning rate 0; 0: no control",
    "lr": "learning rate",
    "eval_every": "steps between points of the curve",
    "episodes": "number of held-out seeds before training",
    "games": "number of the oracle's games to imitate first; 0: none",
    "epochs": "number of epochs of imitation",
    "imitation_lr": "learning rate of imitation",
    "max_tokens": "maximum number of tokens of an answer",
    "max_model_len": "maximum number of tokens of a conversation",
    "model": "model before training",
    "out": "folder of the runs",
}


def parser(description, **defaults):
    """Return a parser with an option for each default, whose type is that of the default."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"model": "smollm2-135m-instruct", **defaults}
    for name, default in defaults.items():
        many = {"nargs": "+"} if isinstance(default, list) else {}
        kind = type(default[0] if many else default)
        result.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=HELP[name], **many)
    return result


def imitated(policy, env, folder, *, games, epochs, seed, lr=2e-5, env_args=None):
    """Return the policy after it has imitated games of the oracle."""
    config = fa.SFTConfig(seed=seed, batch_size=16, learner=fa.LearnerConfig(lr=lr))
    examples = partial(fa.demonstrations, env, games, seed=seed, env_args=env_args)
    return after_sft(policy, folder, config, examples, epochs=epochs)


def after_sft(policy, folder, config, examples, **limits):
    """Return the policy after supervised fine-tuning in `folder` on ``examples()``, unless it is finished already."""
    export = folder / "export"
    if not export.exists():
        with fa.SFTTrainer(policy, config, out_dir=folder) as trainer:
            trainer.fit(examples(), **limits)
    return replace(policy, model=str(export.absolute()))


def saved(folder):
    """Return the result of a finished run, None if it is not finished."""
    file = folder / "result.json"
    return json.loads(file.read_text()) if file.exists() else None


def save(folder, result):
    """Write the result of a finished run and return it."""
    (folder / "result.json").write_text(json.dumps(result))
    return result


def train(policies, env, config, folder, *, steps, episodes, after=None, env_args=None, columns=(), **facts):
    """Evaluate, train and evaluate again in `folder`. Returns the result, also of a run that is finished already.

    Args:
        episodes: Number of held-out seeds before training.
        after: Number of held-out seeds after training. None uses twice as many.
        columns: Metrics of all steps to include in the result.
        **facts: Further entries of the result, such as ``arm`` and ``seed``.
    """
    if result := saved(folder):
        return result
    with fa.GRPOTrainer(policies, config=config, out_dir=folder) as trainer:
        sizes = {"episodes": episodes, "after": after}
        return measure(trainer, env, folder, steps=steps, env_args=env_args, columns=columns, **sizes, **facts)


def reward_before(trainer, env, folder, **options):
    """Return the reward before training and its interval. An interrupted run, which continues, has it in a file."""
    file = folder / "before.json"
    if not file.exists():
        evaluation = trainer.evaluate(env, **options)
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps([evaluation.reward, evaluation.ci]))
    return json.loads(file.read_text())


def measure(trainer, env, folder, *, steps, episodes, after=None, env_args=None, columns=(), **facts):
    """Evaluate, train and evaluate again with `trainer`, as `train`."""
    before = reward_before(trainer, env, folder, episodes=episodes, env_args=env_args)
    rows = trainer.fit(env, steps=steps, env_args=env_args).metrics
    evaluation = trainer.evaluate(env, episodes=after or 2 * episodes, env_args=env_args)
    result = {
        **facts,
        "before": before,
        "after": [evaluation.reward, evaluation.ci],
        "curve": [[0, before[0]]] + [[row["step"], row["eval/reward"]] for row in rows if "eval/reward" in row],
        "seconds": sum(row["time/step_s"] for row in rows),
    }
    return save(folder, result | {name: [row.get(name) for row in rows] for name in columns})


def show(results, labels, picture, *, title, value="reward on held-out seeds", columns=None, **options):
    """Print a table of runs and draw their curves.

    Args:
        results: Results of runs, with ``arm`` and ``seed``.
        labels: Descriptions by arm.
        picture: File of the plot.
        title: Title of table and plot.
        value: Label of the vertical axis.
        columns: Further columns: functions of a result that return the text of a cell, by heading.
        **options: Options of `draw_arms`.
    """
    columns = columns or {}
    table = Table("run", "seed", "before", "after", *columns, title=f"{title}, 95 %")
    for result in results:
        rewards = (f"{mean:.3f} ± {ci:.3f}" for mean, ci in (result["before"], result["after"]))
        cells = (cell(result) for cell in columns.values())
        table.add_row(labels[result["arm"]], str(result["seed"]), *rewards, *cells)
    Console().print(table)
    draw(results, labels, picture, title=title, value=value, **options)


def draw(results, labels, picture, *, title, value, **options):
    """Draw the curves of runs, one color for each arm. The curves of an arm are cut to the length of the shortest."""
    curves = {label: [result["curve"] for result in results if result["arm"] == arm] for arm, label in labels.items()}
    equal = {label: [curve[: min(map(len, seeds))] for curve in seeds] for label, seeds in curves.items() if seeds}
    draw_arms(equal, picture, title=title, value=value, **options)
    print(f"plot {picture}")
