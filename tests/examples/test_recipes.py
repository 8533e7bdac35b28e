"""`recipes/run.py`: which results hold, what is repeated, and that each page shows the commands that are run."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recipes():
    spec = importlib.util.spec_from_file_location("recipes_run", ROOT / "recipes" / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["recipes_run"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def make(recipes, **changes):
    values = {"name": "toy", "commands": [], "expect": {"trained": {"after": [0.7, 1.0], "gain": [0.3, 1.0]}}}
    return recipes.Recipe(**(values | changes))


def write_result(folder, arm, seed, before, after):
    folder.mkdir(parents=True, exist_ok=True)
    result = {"arm": arm, "seed": seed, "before": [before, 0.1], "after": [after, 0.1]}
    (folder / "result.json").write_text(json.dumps(result))


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        (0.1, 0.9, ""),
        (0.4, 0.7, ""),
        (0.875, 0.812, "gain -0.063 outside [0.3, 1.0]"),  # imitation alone solved the task
        (0.1, 0.6, "after 0.6 outside [0.7, 1.0]"),
        (0.0, 0.2, "after 0.2 outside [0.7, 1.0]; gain 0.2 outside [0.3, 1.0]"),
        (None, 0.9, "gain None outside [0.3, 1.0]"),
    ],
)
def test_result_holds_if_it_lies_inside_every_interval(recipes, tmp_path, before, after, problem):
    write_result(tmp_path / "deep" / "trained", "trained", 0, before, after)
    (row,) = recipes.compare(make(recipes), 0, tmp_path)
    assert (row.before, row.after, row.problem) == (before, after, problem)


def test_missing_arm_and_result_of_another_seed_do_not_hold(recipes, tmp_path):
    write_result(tmp_path / "trained", "trained", 1, 0.1, 0.9)
    assert [row.problem for row in recipes.compare(make(recipes), 0, tmp_path)] == ["no result"]


def test_finished_commands_are_not_repeated_and_models_are_removed(recipes, tmp_path, monkeypatch):
    monkeypatch.setattr(recipes, "MODEL_BYTES", 10_000)
    script = tmp_path / "train.py"
    script.write_text("import sys; open(sys.argv[1] + '/calls', 'a').write(sys.argv[2]); "
                      "open(sys.argv[1] + '/model', 'w').write('x' * 10_001)")  # fmt: skip
    recipe = make(recipes, commands=[f"python {script} {{out}} {{seed}}"])
    out = tmp_path / "out"
    for _ in range(2):
        recipes.run(recipe, 7, out, Console(quiet=True))
    assert (out / "calls").read_text() == "7"
    assert not (out / "model").exists()
    recipes.run(make(recipes, commands=[f"python {script} {{out}} 1{{seed}}"]), 7, out, Console(quiet=True))
    assert (out / "calls").read_text() == "717"  # a changed command is another command


def test_failed_command_is_tried_again_and_the_next_is_not_started(recipes, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys; open(sys.argv[1] + '/calls', 'a').write(sys.argv[2]); sys.exit(int(sys.argv[2]))")
    recipe = make(recipes, commands=[f"python {script} {{out}} 3", f"python {script} {{out}} 0"])
    for _ in range(2):
        recipes.run(recipe, 0, tmp_path / "out", Console(quiet=True))
    assert (tmp_path / "out" / "calls").read_text() == "33"


def test_exit_code_tells_whether_all_results_hold(recipes, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipes.Recipe, "load_all", classmethod(lambda cls: [make(recipes)]))
    words = ["--compare-only", "--seeds", "0", "--out", str(tmp_path)]
    write_result(tmp_path / "toy" / "seed-0", "trained", 0, 0.1, 0.9)
    assert recipes.main(words) == 0
    write_result(tmp_path / "toy" / "seed-0", "trained", 0, 0.1, 0.5)
    assert recipes.main(words) == 1
    assert json.loads((tmp_path / "results.json").read_text())[0]["after"] == 0.5


def test_every_recipe_is_run_as_its_page_shows_it(recipes):
    pages = {page.parent.name for page in (ROOT / "recipes").glob("*/README.md")}
    assert pages == {recipe.name for recipe in recipes.Recipe.load_all()}
    for recipe in recipes.Recipe.load_all():
        page = (ROOT / "recipes" / recipe.name / "README.md").read_text().replace("\\\n    ", "")
        assert f"python recipes/run.py {recipe.name}" in page
        for command in recipe.commands:
            shown = command.format(seed=0, out="OUT").replace(" --out OUT", "").replace(" --out_dir OUT", "")
            assert shown in page, (recipe.name, shown)
        assert recipe.expect and all(low <= high for arm in recipe.expect.values() for low, high in arm.values())


def test_tables_of_all_pages_are_made_from_the_recorded_results(recipes):
    records = json.loads(recipes.RESULTS.read_text())
    assert recipes.overview(records) in (ROOT / "recipes" / "README.md").read_text()
    for name in {record["recipe"] for record in records}:
        assert recipes.results_of(name, records) in (ROOT / "recipes" / name / "README.md").read_text()


def test_overview_shows_the_control_of_the_first_arm(recipes, monkeypatch):
    expect = {"one": {}, "two": {}, "one-control": {}, "two-control": {}}
    toys = [make(recipes, name="a", expect=expect), make(recipes, name="b", expect={"gold": {}, "mean": {}})]
    monkeypatch.setattr(recipes.Recipe, "load_all", classmethod(lambda cls: toys))
    values = {"one": (0.1, 0.9), "one-control": (0.1, 0.2), "two-control": (-3.0, -3.0)}
    records = [{"recipe": "a", "arm": arm, "seed": 0, "before": b, "after": a} for arm, (b, a) in values.items()]
    records += [{"recipe": "b", "arm": "gold", "seed": seed, "before": 0.2, "after": 0.4} for seed in (0, 1)]
    rows = recipes.overview(records).splitlines()[2:]
    assert rows[0] == "| [a](a/README.md) | 0.100 | 0.900 | 1 | 0.100 to 0.200 |"
    assert rows[1] == "| [b](b/README.md) | 0.200 | 0.400 | 2 | none |"


def test_update_replaces_old_results_of_the_same_seed_and_keeps_the_rest(recipes, tmp_path, monkeypatch):
    folder = tmp_path / "recipes" / "relay"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text((ROOT / "recipes/relay/recipe.yaml").read_text())
    marks = "text\n<!-- results -->\nold\n<!-- end of results -->\nmore\n"
    for page in (folder / "README.md", folder.parent / "README.md"):
        page.write_text(marks)
    monkeypatch.setattr(recipes, "ROOT", tmp_path)
    monkeypatch.setattr(recipes, "RESULTS", folder.parent / "results.json")
    monkeypatch.setattr(recipes.Recipe, "load_all", classmethod(lambda cls: [cls.load(folder)]))
    arms = {"trained": 0.9, "control": 0.1}

    def rows(seed, after):
        values = {"recipe": "relay", "seed": seed, "before": 0.1, "problem": ""}
        return [recipes.Row(arm=arm, after=after.get(arm), **values) for arm in arms]

    recipes.update(rows(0, arms) + rows(1, arms), tmp_path, "a machine")
    recipes.update(rows(1, {"trained": 0.8}), tmp_path, "another machine")
    records = json.loads(recipes.RESULTS.read_text())
    afters = {(record["arm"], record["seed"]): (record["after"], record["machine"]) for record in records}
    assert afters == {
        ("trained", 0): (0.9, "a machine"),
        ("trained", 1): (0.8, "another machine"),
        ("control", 0): (0.1, "a machine"),
        ("control", 1): (0.1, "a machine"),
    }
    page = (folder / "README.md").read_text()
    assert "| trained | 0.100 to 0.900 | 0.100 to 0.800 | 0.75 to 1.0 |" in page
    assert page.startswith("text\n<!-- results -->\n| arm") and page.endswith("<!-- end of results -->\nmore\n")
    assert "| 0.100 | 0.850 | 2 | 0.100 to 0.100 |" in (folder.parent / "README.md").read_text()


@pytest.fixture
def documented(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    module = importlib.import_module("documented")
    yield module
    sys.modules.pop("documented")


@pytest.mark.parametrize("name", ["readme_train", "quick_start", "wrap_a_game"])
def test_documented_example_is_complete_and_trains_with_the_default_rate(documented, name):
    code = documented.example(name)
    compile(code, name, "exec")
    assert code.count("trainer.fit(") == 1 and "fa.register(" in code
    assert "lr=" not in code and "seed=" not in code.split("fa.GRPOTrainer")[1]


def test_documented_example_includes_the_blocks_before_it(documented, tmp_path, monkeypatch):
    monkeypatch.setattr(documented, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text("no example")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "guide.md"
    blocks = ["```python\na = 1\n```", "<!-- slow -->\n```python no-run\na = 2\n```", "```sh\nexit 1\n```"]
    end = "<!-- run: mine -->\n<!-- slow -->\n```python no-run\nb = a\n```\n```python\nc = 3\n```\n"
    page.write_text("\n\n".join([*blocks, end]))
    assert documented.example("mine").split("\n") == ["a = 1", "", "b = a", ""]
    with pytest.raises(ValueError, match=r"neither README\.md nor a page in docs/ has <!-- run: other -->"):
        documented.example("other")
    page.write_text("<!-- run: mine -->\n\n```python\nb = a\n```\n")
    with pytest.raises(ValueError, match=r"guide\.md has .* no Python block follows"):
        documented.example("mine")


def test_documented_example_is_measured_around_its_training(documented, tmp_path, monkeypatch):
    calls = []

    class Trainer:
        def __init__(self, policies, config, out_dir):
            calls.append((config.seed, config.learner.lr, out_dir))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def evaluate(self, env, episodes, env_args):
            calls.append(("evaluate", env, episodes, env_args))
            return SimpleNamespace(reward=0.25 * len(calls), ci=0.1)

        def fit(self, env, steps, env_args):
            calls.append(("fit", env, steps, env_args))
            return SimpleNamespace(metrics=[])

    code = (
        "import forge_agents as fa\n"
        "with fa.GRPOTrainer(1, config=fa.GRPOConfig(group_size=8), out_dir='r') as t:\n"
        "    t.fit('my/Game-v0', steps=9, env_args={'n': 2})\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(documented.fa, "GRPOTrainer", Trainer)
    monkeypatch.setattr(documented, "example", lambda name: code)
    documented.main(["toy", "--seed", "3", "--out", "out"])
    monkeypatch.chdir(tmp_path)
    documented.main(["toy", "--seed", "3", "--out", "out"])  # finished: not repeated
    monkeypatch.chdir(tmp_path)
    documented.main(["toy", "--seed", "3", "--control", "--out", "out"])
    held_out = ("evaluate", "my/Game-v0", documented.EPISODES, {"n": 2})
    out = tmp_path / "out"
    assert calls == [
        (3, None, out / "toy/r"), held_out, ("fit", "my/Game-v0", 9, {"n": 2}), held_out,
        (3, 0.0, out / "toy-control/r"), held_out, ("fit", "my/Game-v0", 2, {"n": 2}), held_out,
    ]  # fmt: skip
    result = json.loads((tmp_path / "out/toy/result.json").read_text())
    assert result == {"arm": "toy", "seed": 3, "before": [0.5, 0.1], "after": [1.0, 0.1]}
    assert json.loads((tmp_path / "out/toy-control/result.json").read_text())["arm"] == "toy-control"
    assert documented.fa.GRPOTrainer is Trainer
