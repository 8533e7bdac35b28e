"""Statements about other libraries in docs/results/compatibility.md, checked in the installed packages."""

from importlib.metadata import PackageNotFoundError, distribution

import pytest


def source(package: str, path: str) -> str:
    """The text of a file of an installed package."""
    return distribution(package).locate_file(path).read_text(encoding="utf-8")


def python_files(package: str) -> list[str]:
    """The Python files of an installed package."""
    return [str(path) for path in distribution(package).files or () if str(path).endswith(".py")]


def require(package: str) -> None:
    """Skips the test if the environment lacks the package."""
    try:
        distribution(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")


def test_trl_trains_one_model_with_transformers_trainer():
    require("trl")
    trainer = source("trl", "trl/trainer/grpo_trainer.py")
    assert "environment_factory: EnvironmentFactory" in trainer and "tools: list[Callable]" in trainer
    assert 'model: "str | PreTrainedModel | PeftModel"' in trainer
    assert "class GRPOTrainer(_BaseTrainer)" in trainer and "from accelerate" in trainer and "use_vllm" in trainer
    assert "class _BaseTrainer(Trainer)" in source("trl", "trl/trainer/base_trainer.py")
    assert distribution("trl").metadata["License-Expression"] == "Apache-2.0"


def test_textarena_has_model_clients_and_no_trainer():
    require("textarena")
    agents = source("textarena", "textarena/agents/basic_agents.py")
    assert all(f"class {name}Agent" in agents for name in ("OpenAI", "HFLocal", "LlamaCpp"))
    texts = [source("textarena", path) for path in python_files("textarena")]
    assert not any("optim" in text and "backward(" in text for text in texts)


def test_torchtitan_rl_has_one_conversation_per_environment():
    controller = source("torchtitan", "torchtitan/experiments/rl/controller.py")
    environment = source("torchtitan", "torchtitan/experiments/rl/environment/message.py")
    assert "BSD 3-Clause" in distribution("torchtitan").metadata["License"]
    assert "from monarch.actor import" in controller and "torchstore" in controller
    assert "async def step(self, completion_message: Message)" in environment
    models = [path for path in python_files("torchtitan") if path.startswith("torchtitan/experiments/rl/models/")]
    assert any("vllm" in path for path in models)
