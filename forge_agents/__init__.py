"""Train and benchmark teams of LLM agents.

The names that most programs need. Each is imported on first use, so ``import forge_agents`` is fast. Other public names
are in submodules such as `forge_agents.bench`, `forge_agents.sandbox` and `forge_verifiers`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_agents.bench.play import benchmark
    from forge_agents.envs.env import Outcome, ParallelTurnEnv, TurnEnv
    from forge_agents.envs.registry import list_envs, list_suites, make, register, register_suite, spec, suite
    from forge_agents.envs.wrappers import wrap
    from forge_agents.episodes.demonstrations import demonstrations
    from forge_agents.episodes.play import Engines, play
    from forge_agents.episodes.stored import load_episodes
    from forge_agents.policy import Endpoint, Human, LoRA, Oracle, Policy, Random, Sampling, Scripted
    from forge_agents.programs.gateway import Gateway
    from forge_agents.programs.program import Program
    from forge_agents.runtime.hosts import Hosts
    from forge_agents.serving.config import EngineConfig
    from forge_agents.testing import check_env
    from forge_agents.tools import tool
    from forge_agents.tools.env import ToolEnv
    from forge_agents.types import Episode, Trajectory, Turn
    from forge_trainers.forecast.simulate import simulate
    from forge_trainers.learner.config import LearnerConfig
    from forge_trainers.losses.registry import register_loss
    from forge_trainers.offline.config import DPOConfig, SFTConfig
    from forge_trainers.offline.dpo import DPOTrainer
    from forge_trainers.offline.sft import SFTTrainer
    from forge_trainers.rl.config import GRPOConfig
    from forge_trainers.rl.credit import Credit, Overlong
    from forge_trainers.rl.curriculum import Curriculum
    from forge_trainers.rl.rewards import MultiReward
    from forge_trainers.rl.trainer import GRPOTrainer
    from forge_trainers.run_file import RunConfig
    from forge_trainers.selfplay.league import League
    from forge_verifiers.core.conformance import check_verifier
    from forge_verifiers.core.verifier import EnvReward, Rule, Verifier
    from forge_verifiers.ensemble.ensemble import Ensemble

__version__ = "0.1.0"


def _search_no_libraries_here() -> None:
    """Leave no element in ``LD_LIBRARY_PATH`` by which child processes load shared libraries of their current folder.

    An empty element has this meaning, and opencv, which vLLM imports, appends the former value after a colon, also if
    there was none. So the variable always gets a value. Each process imports this package before vLLM.
    """
    import os
    import re

    folders = [folder for folder in re.split("[:;]", os.environ.get("LD_LIBRARY_PATH", "")) if folder.startswith("/")]
    os.environ["LD_LIBRARY_PATH"] = ":".join(folders) or "/nonexistent"


_search_no_libraries_here()


def _open_closed_streams() -> None:
    """Open the null device in place of each standard stream that the parent process closed, as some daemons do.

    Otherwise the next file or socket of this process gets the descriptor, and output is written to it. Monarch's
    processes end without these streams.
    """
    import os
    import sys

    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the system chooses the lowest free descriptor
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115  # for the life of the process


_open_closed_streams()

__all__ = [
    "Credit", "Curriculum", "DPOConfig", "DPOTrainer", "Endpoint", "EngineConfig", "Engines", "Ensemble", "EnvReward",
    "Episode", "GRPOConfig", "GRPOTrainer", "Gateway", "Hosts", "Human", "League", "LearnerConfig", "LoRA",
    "MultiReward", "Oracle", "Outcome", "Overlong", "ParallelTurnEnv", "Policy", "Program", "Random", "Rule",
    "RunConfig", "SFTConfig", "SFTTrainer", "Sampling", "Scripted", "ToolEnv", "Trajectory", "Turn", "TurnEnv",
    "Verifier", "__version__", "benchmark", "check_env", "check_verifier", "demonstrations", "list_envs",
    "list_suites", "load_episodes", "make", "play", "register", "register_loss", "register_suite", "simulate", "spec",
    "suite", "tool", "wrap",
]  # fmt: skip

if not TYPE_CHECKING:
    _MODULES = {
        "forge_agents.bench.play": "benchmark",
        "forge_agents.envs.env": "Outcome ParallelTurnEnv TurnEnv",
        "forge_agents.envs.registry": "list_envs list_suites make register register_suite spec suite",
        "forge_agents.envs.wrappers": "wrap",
        "forge_agents.episodes.demonstrations": "demonstrations",
        "forge_agents.episodes.play": "Engines play",
        "forge_agents.episodes.stored": "load_episodes",
        "forge_agents.policy": "Endpoint Oracle Human LoRA Policy Random Sampling Scripted",
        "forge_agents.programs.gateway": "Gateway",
        "forge_agents.programs.program": "Program",
        "forge_agents.runtime.hosts": "Hosts",
        "forge_agents.serving.config": "EngineConfig",
        "forge_agents.testing": "check_env",
        "forge_agents.tools": "tool",
        "forge_agents.tools.env": "ToolEnv",
        "forge_agents.types": "Episode Trajectory Turn",
        "forge_trainers.forecast.simulate": "simulate",
        "forge_trainers.learner.config": "LearnerConfig",
        "forge_trainers.losses.registry": "register_loss",
        "forge_trainers.offline.config": "DPOConfig SFTConfig",
        "forge_trainers.offline.dpo": "DPOTrainer",
        "forge_trainers.offline.sft": "SFTTrainer",
        "forge_trainers.rl.config": "GRPOConfig",
        "forge_trainers.rl.credit": "Credit Overlong",
        "forge_trainers.rl.curriculum": "Curriculum",
        "forge_trainers.rl.rewards": "MultiReward",
        "forge_trainers.rl.trainer": "GRPOTrainer",
        "forge_trainers.run_file": "RunConfig",
        "forge_trainers.selfplay.league": "League",
        "forge_verifiers.core.conformance": "check_verifier",
        "forge_verifiers.core.verifier": "EnvReward Rule Verifier",
        "forge_verifiers.ensemble.ensemble": "Ensemble",
    }

    def __getattr__(name):
        from importlib import import_module

        from forge_agents.errors import did_you_mean, missing_stack

        for module, names in _MODULES.items():
            if name in names.split():
                try:
                    value = globals()[name] = getattr(import_module(module), name)
                except ModuleNotFoundError as error:
                    raise missing_stack(f"forge_agents.{name}", error) from error
                return value

        raise AttributeError(f"module 'forge_agents' has no attribute {name!r}.{did_you_mean(name, __all__)}")

    def __dir__():
        return sorted(__all__)


del TYPE_CHECKING
