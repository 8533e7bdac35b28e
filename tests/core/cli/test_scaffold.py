import asyncio
import contextlib
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from refusals import raises

import forge_agents as fa
from forge_agents import imports
from forge_agents.cli import main as cli
from forge_agents.cli import scaffold
from forge_agents.cli.config import parse
from forge_agents.envs.registry import UnknownIdError
from forge_agents.errors import ForgeError
from forge_agents.imports import add_user_folder, restrict_modules
from forge_agents.policy import Random
from forge_agents.rollout.rollout import Rollout
from forge_trainers.run_file import RunConfig


def read(*words):
    return parse(RunConfig, words, prog="forge-agents train", description="")


@pytest.fixture(params=sorted(scaffold.TEMPLATES.keys() - {scaffold.ENV, scaffold.OPENENV, scaffold.VERIFIERS}))
def folder(request, tmp_path, monkeypatch):
    """A folder of each template, as `forge-agents` in that folder sees it."""
    made = scaffold.create(tmp_path / request.param, request.param)
    monkeypatch.chdir(made)
    monkeypatch.syspath_prepend(str(made))
    return made


def test_template_has_matching_environment_reward_and_settings(folder):
    run = read("train.yaml")
    assert set(yaml.safe_load((folder / "train.yaml").read_text())) >= {"env", "policies", "reward", "steps", "out_dir"}
    assert (folder / "README.md").read_text().count(run.env) >= 1
    if folder.name != "sft":  # it has the environment of "team"
        assert fa.check_env(run.env, episodes=1).ok
    mapping = run.policy_mapping
    assert set(run.policies) <= {mapping} if isinstance(mapping, str) else set(mapping.values())
    for name, plan in run.warm_start.items():
        assert name in run.policies and (folder / plan.data).exists()
    rollout = Rollout(make_env=lambda: fa.make(run.env), env_id=run.env, policies=Random())
    group = asyncio.run(rollout.group(seed=0, size=2))
    scores = run.load_reward()(group.trajectories)
    assert len(scores) == len(group.trajectories) and all(0 <= score <= 1.2 for score in scores)


def test_run_file_finds_modules_next_to_it_from_any_folder(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(folder)])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    add_user_folder(elsewhere)  # as the command line does
    for name in ("my_env", "my_reward"):
        (elsewhere / f"{name}.py").write_text("raise AssertionError('a namesake was imported')")
    (elsewhere / "chats.jsonl").write_text("")

    file = f"../{folder.name}/train.yaml"
    run = read(file)
    assert fa.make(run.env).possible_agents and run.load_reward() is not None
    assert run.out_dir.startswith("runs/")  # output goes to the current folder
    assert [plan.data for plan in run.warm_start.values()] in ([], [str(folder / "chats.jsonl")])
    if run.warm_start:
        mine = read(file, "--warm_start.team.data=mine.jsonl")
        assert mine.warm_start["team"].data == "mine.jsonl" and mine.warm_start["team"].epochs == 4


@pytest.mark.parametrize("name", ["metrics.jsonl", "plan.yaml", ".lock"])
def test_modules_in_the_folder_of_a_run_are_not_run(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    (run / "evil_reward.py").write_text("raise AssertionError('a module of a stranger was imported')")
    (run / "config.yaml").write_text("env: forge/Relay-v0\nreward: evil_reward:f\npolicies: {own: {model: m}}\n")
    (run / name).touch()
    refused = "the module evil_reward lies in the folder of a run, .*/run, whose code is not run. Move"
    raises(ValueError, refused, read("run/config.yaml").load_reward)
    (run / "gymnasium.py").touch()  # makes a flag for the installed package trust no file of the run
    raises(ValueError, refused, read("run/config.yaml", "--trust_module", "gymnasium").load_reward)
    assert str(run) not in sys.path
    raises(AssertionError, "of a stranger", read("run/config.yaml", "--trust_module", "evil_reward").load_reward)
    restrict_modules([])


@pytest.mark.parametrize(("current", "module"), [("run", "evil"), (".", "run.evil"), ("..", "project.run.evil")])
def test_current_folder_makes_no_module_of_a_run_importable(tmp_path, monkeypatch, current, module):
    monkeypatch.setattr(sys, "path", list(sys.path))
    run = tmp_path / "project" / "run"
    run.mkdir(parents=True)
    monkeypatch.chdir(run.parent / current)
    add_user_folder(Path.cwd())  # as the command line does
    (run / "evil.py").write_text("raise AssertionError('a module of a stranger was imported')")
    (run.parent / current / "of_user.py").write_text("f = len")
    (run / "metrics.jsonl").touch()
    config = run / "config.yaml"
    config.write_text(f"env: forge/Relay-v0\nreward: {module}:f\npolicies: {{own: {{model: m}}}}\n")
    raises(ValueError, f"the module {module} lies in the folder of a run", read(str(config)).load_reward)
    raises(AssertionError, "of a stranger", read(str(config), "--trust_module", module.split(".")[0]).load_reward)
    if current != "run":
        assert read(str(config), "--reward", "of_user:f").load_reward() is len
    restrict_modules([])


def test_current_folder_of_a_run_stands_for_no_package_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(imports, "_user_folders", [])
    monkeypatch.setattr(imports, "_run_folders", [])
    monkeypatch.chdir(tmp_path)
    add_user_folder(tmp_path)
    imports.import_user_module("forge_envs.teams.relay")
    (tmp_path / "not_installed.py").touch()
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "config.yaml").write_text("env: forge_envs.teams.relay:forge/Relay-v0\npolicies: {own: {model: m}}\n")
    run = read("config.yaml")
    fa.make(run.played)
    assert importlib.util.find_spec("not_installed") is None
    assert str(tmp_path) not in ":".join(imports.path_variables().values())
    read("config.yaml", "--trust_module", "not_installed")
    assert imports.import_user_module("not_installed")
    assert str(tmp_path) in ":".join(imports.path_variables().values())
    restrict_modules([])


def test_commands_without_a_file_import_nothing_from_a_run_in_the_current_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(imports, "_user_folders", [])
    monkeypatch.setattr(imports, "_run_folders", [])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("raise AssertionError('a module of a stranger was imported')")
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / name).touch()
    assert cli.main(["bench", "--suite", "evil:x/Y-v0"]) == 1
    assert "the module evil lies in the folder of a run" in capsys.readouterr().err
    assert str(tmp_path) not in ":".join(imports.path_variables().values())


@pytest.mark.parametrize("file", ["train.yaml", "config.yaml", "file/config.yaml"])
def test_project_may_have_checkpoints_of_another_program(file, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(imports, "_run_folders", [])
    monkeypatch.chdir(tmp_path)
    add_user_folder(tmp_path)
    folder = (tmp_path / file).parent
    (folder / "checkpoints/epoch-1").mkdir(parents=True)
    name = f"reward_{len(file)}_of_project"
    (folder / f"{name}.py").write_text("def f(trajectories): pass")
    (tmp_path / file).write_text(f"env: forge/Relay-v0\nreward: {name}:f\npolicies: {{own: {{model: m}}}}\n")
    assert read(file).load_reward().__name__ == "f"
    (folder / "checkpoints/step-000001").mkdir()
    raises(ValueError, f"the module {name} lies in the folder of a run, {folder}, whose", read(file).load_reward)


def test_tasks_next_to_a_run_file_are_found(tmp_path, monkeypatch):
    (tmp_path / "file").mkdir()
    (tmp_path / "file/rows.jsonl").write_text('{"question": "2 + 3?"}\n')
    (tmp_path / "file/train.yaml").write_text(
        "env: my/Crew-v0\nenv_args: {tasks: rows.jsonl, eval_tasks: elsewhere.jsonl}\npolicies: {own: {model: m}}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert read("file/train.yaml").env_args == {
        "tasks": str(tmp_path / "file/rows.jsonl"), "eval_tasks": "elsewhere.jsonl"
    }  # fmt: skip
    monkeypatch.chdir(tmp_path / "file")
    assert read("train.yaml").env_args["tasks"] == "rows.jsonl"


def test_model_next_to_a_run_file_is_found_and_hub_ids_are_kept(tmp_path, monkeypatch):
    (tmp_path / "file/mine").mkdir(parents=True)
    (tmp_path / "file/train.yaml").write_text(
        "env: forge/Relay-v0\npolicy_mapping: {a: own, b: hub}\n"
        "policies: {own: {model: mine}, hub: {model: smollm2-135m-instruct}}\n"
    )
    monkeypatch.chdir(tmp_path)
    models = {name: policy.model for name, policy in read("file/train.yaml").policies.items()}
    assert models == {"own": str(tmp_path / "file/mine"), "hub": "smollm2-135m-instruct"}


def test_template_conversations_match_the_game(tmp_path):
    root = scaffold.create(tmp_path, "sft")
    rows = [json.loads(line)["messages"] for line in (root / "chats.jsonl").read_text().splitlines()]
    assert len(rows) == 18 and all([m["role"] for m in row] == ["system", "user", "assistant"] for row in rows)
    assert all(row[0]["content"] in (root / "my_env.py").read_text() for row in rows)


def test_init_refuses_a_folder_with_files(tmp_path):
    (tmp_path / "note").write_text("mine")
    raises(ForgeError, "already exists", scaffold.create, tmp_path)
    raises(ForgeError, "Did you mean 'duel'", scaffold.create, tmp_path / "new", "dul")
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_package_for_verifiers_has_the_agents_of_its_environment(tmp_path):
    text = (
        scaffold.create(tmp_path / "relay-game", "verifiers", "forge/Relay-v0") / "relay_game/__init__.py"
    ).read_text()
    compile(text, "relay_game", "exec")
    assert 'ID = "forge/Relay-v0"\nPLAYERS = {"answerer": fa.Random()}' in text
    assert "    asker: vf.AgentConfig" in text and "player_" not in text


class Generic:
    """Stands for classes of verifiers, which are generic."""

    def __class_getitem__(cls, item):
        return cls

    def __init__(self, **fields):
        self.__dict__.update(fields)


def test_model_that_ends_its_interaction_in_a_game_loses_it(tmp_path, monkeypatch):
    names = ("EnvConfig", "AgentConfig", "SubprocessConfig", "TasksetConfig", "TaskData", "Task", "Taskset", "Env")
    v1 = SimpleNamespace(**dict.fromkeys((*names, "Harness", "HarnessConfig"), Generic))
    modules = {
        "verifiers": SimpleNamespace(v1=v1),
        "verifiers.v1": v1,
        "verifiers.v1.dialects": None,
        "verifiers.v1.dialects.chat": SimpleNamespace(message_to_wire=None),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(scaffold.create(tmp_path / "duel-game", "verifiers", "forge/KuhnPoker-v0")))
    game, asked, paid = importlib.import_module("duel_game"), [], []

    class Interaction:
        trace = SimpleNamespace(record_reward=lambda name, value: paid.append(value))

        async def turn(self, observation):
            asked.append(observation)
            return SimpleNamespace(terminated=True, last_reply="bet")

    @contextlib.asynccontextmanager
    async def interaction(task):
        yield Interaction()

    for seed in range(8):
        task = SimpleNamespace(data=SimpleNamespace(seed=seed), with_system_prompt=lambda text: text)
        asyncio.run(game.Game().run(task, SimpleNamespace(player_0=SimpleNamespace(interaction=interaction))))
    assert paid == [-1.0] * 8 and len(asked) == 8  # an empty answer is illegal in poker, and costs the ante


def test_agent_that_cannot_be_a_role_of_verifiers_is_refused(tmp_path):
    class Odd(fa.TurnEnv):
        possible_agents = ("player-0",)

    fa.register("odd/Names-v0", entry_point=Odd)
    raises(
        ForgeError,
        "not 'player-0', an agent of odd/Names-v0",
        scaffold.create,
        tmp_path / "x",
        "verifiers",
        "odd/Names-v0",
    )
    assert not (tmp_path / "x").exists()


def test_init_prints_the_next_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "team"]) == 0
    assert "next   cd team && forge-agents train train.yaml" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert cli.main(["init", "--template", "tools"]) == 0
    assert "next   forge-agents train train.yaml" in capsys.readouterr().out
    assert cli.main(["init"]) == 1
    assert "Choose another name" in capsys.readouterr().err


def test_environment_id_may_name_its_module(tmp_path, monkeypatch):
    (tmp_path / "lone_world.py").write_text(
        "import forge_agents as fa\nfa.register('lone/Relay-v0', entry_point='forge_envs.teams.relay:Relay')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert fa.spec("lone_world:lone/Relay-v0").id == "lone/Relay-v0"
    with pytest.raises(UnknownIdError, match="module 'lone_wrld'.*Run the command in the module's folder"):
        fa.make("lone_wrld:lone/Relay-v0")
