"""Train and benchmark teams of LLM agents.

The public names of all four packages; each is imported when it is first used, so `import forge_agents` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_agents.bench.plan import BenchLimits
    from forge_agents.bench.play import benchmark
    from forge_agents.bench.report import Report
    from forge_agents.envs.env import Outcome, ParallelTurnEnv, TurnEnv
    from forge_agents.envs.registry import list_envs, list_suites, make, register, register_suite, spec, suite
    from forge_agents.envs.spec import EnvSpec
    from forge_agents.envs.wrappers import wrap
    from forge_agents.episodes.demonstrations import demonstrations
    from forge_agents.episodes.play import Engines, play
    from forge_agents.episodes.stored import EpisodeTable, load_episodes
    from forge_agents.policy import (
        AnyPolicy,
        Endpoint,
        Human,
        LoRA,
        Oracle,
        Policy,
        PolicyMapping,
        Random,
        Sampling,
        Scripted,
    )
    from forge_agents.programs.containers import Container
    from forge_agents.programs.gateway import Gateway
    from forge_agents.programs.program import Program
    from forge_agents.runtime.hosts import Hosts
    from forge_agents.sandbox import Sandbox, SandboxLimits
    from forge_agents.serving.config import EngineConfig
    from forge_agents.testing import check_env
    from forge_agents.tools import Tool, tool
    from forge_agents.tools.env import ToolEnv
    from forge_agents.types import Episode, EpisodeBatch, EpisodeGroup, Message, Trajectory, Turn
    from forge_trainers.demo import DemoConfig, demo
    from forge_trainers.forecast.fit import Gpus, fit_gpus
    from forge_trainers.forecast.simulate import Hardware, Prediction, simulate
    from forge_trainers.gpu_check import gpu_check
    from forge_trainers.learner.config import LearnerConfig
    from forge_trainers.losses.registry import Correction, list_losses, register_loss
    from forge_trainers.offline.config import DPOConfig, SFTConfig, SFTRunConfig, WarmStart
    from forge_trainers.offline.dpo import DPOTrainer
    from forge_trainers.offline.sft import SFTEval, SFTTrainer
    from forge_trainers.records.run_folder import FitResult, verifier_history
    from forge_trainers.rl.config import GRPOConfig
    from forge_trainers.rl.credit import Credit, Overlong
    from forge_trainers.rl.curriculum import Curriculum
    from forge_trainers.rl.evaluation import EvalResult
    from forge_trainers.rl.rewards import MultiReward
    from forge_trainers.rl.trainer import GRPOTrainer
    from forge_trainers.run.checkpoints import export_checkpoint
    from forge_trainers.run_file import RunConfig
    from forge_trainers.selfplay.league import League
    from forge_verifiers import Ensemble, EnvReward, Gate, Rule, Seat, SelfConsistency, Verifier, check_verifier

__version__ = "0.1.0"

_HOME = {
    "forge_agents.bench.plan": ("BenchLimits",),
    "forge_agents.bench.play": ("benchmark",),
    "forge_agents.bench.report": ("Report",),
    "forge_agents.envs.env": ("Outcome", "ParallelTurnEnv", "TurnEnv"),
    "forge_agents.envs.registry": ("list_envs", "list_suites", "make", "register", "register_suite", "spec", "suite"),
    "forge_agents.envs.spec": ("EnvSpec",),
    "forge_agents.envs.wrappers": ("wrap",),
    "forge_agents.episodes.demonstrations": ("demonstrations",),
    "forge_agents.episodes.play": ("Engines", "play"),
    "forge_agents.episodes.stored": ("EpisodeTable", "load_episodes"),
    "forge_agents.policy": (
        "AnyPolicy", "Endpoint", "Oracle", "Human", "LoRA", "Policy", "Random", "Sampling", "Scripted", "PolicyMapping",
    ),
    "forge_agents.programs.containers": ("Container",),
    "forge_agents.programs.gateway": ("Gateway",),
    "forge_agents.programs.program": ("Program",),
    "forge_agents.runtime.hosts": ("Hosts",),
    "forge_agents.sandbox": ("Sandbox", "SandboxLimits"),
    "forge_agents.serving.config": ("EngineConfig",),
    "forge_agents.testing": ("check_env",),
    "forge_agents.tools": ("Tool", "tool"),
    "forge_agents.tools.env": ("ToolEnv",),
    "forge_agents.types": ("Episode", "EpisodeBatch", "EpisodeGroup", "Message", "Trajectory", "Turn"),
    "forge_trainers.demo": ("DemoConfig", "demo"),
    "forge_trainers.forecast.fit": ("Gpus", "fit_gpus"),
    "forge_trainers.forecast.simulate": ("Hardware", "Prediction", "simulate"),
    "forge_trainers.gpu_check": ("gpu_check",),
    "forge_trainers.learner.config": ("LearnerConfig",),
    "forge_trainers.losses.registry": ("Correction", "list_losses", "register_loss"),
    "forge_trainers.offline.config": ("DPOConfig", "SFTConfig", "SFTRunConfig", "WarmStart"),
    "forge_trainers.offline.dpo": ("DPOTrainer",),
    "forge_trainers.offline.sft": ("SFTEval", "SFTTrainer"),
    "forge_trainers.records.run_folder": ("FitResult", "verifier_history"),
    "forge_trainers.rl.config": ("GRPOConfig",),
    "forge_trainers.rl.credit": ("Credit", "Overlong"),
    "forge_trainers.rl.curriculum": ("Curriculum",),
    "forge_trainers.rl.rewards": ("MultiReward",),
    "forge_trainers.rl.evaluation": ("EvalResult",),
    "forge_trainers.rl.trainer": ("GRPOTrainer",),
    "forge_trainers.run.checkpoints": ("export_checkpoint",),
    "forge_trainers.run_file": ("RunConfig",),
    "forge_trainers.selfplay.league": ("League",),
    "forge_verifiers": (
        "Ensemble", "EnvReward", "Gate", "Rule", "Seat", "SelfConsistency", "Verifier", "check_verifier",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "AnyPolicy",
    "BenchLimits",
    "Container",
    "Correction",
    "Credit",
    "Curriculum",
    "DPOConfig",
    "DPOTrainer",
    "DemoConfig",
    "Endpoint",
    "EngineConfig",
    "Engines",
    "Ensemble",
    "EnvReward",
    "EnvSpec",
    "Episode",
    "EpisodeBatch",
    "EpisodeGroup",
    "EpisodeTable",
    "EvalResult",
    "FitResult",
    "GRPOConfig",
    "GRPOTrainer",
    "Gate",
    "Gateway",
    "Gpus",
    "Hardware",
    "Hosts",
    "Human",
    "League",
    "LearnerConfig",
    "LoRA",
    "Message",
    "MultiReward",
    "Oracle",
    "Outcome",
    "Overlong",
    "ParallelTurnEnv",
    "Policy",
    "PolicyMapping",
    "Prediction",
    "Program",
    "Random",
    "Report",
    "Rule",
    "RunConfig",
    "SFTConfig",
    "SFTEval",
    "SFTRunConfig",
    "SFTTrainer",
    "Sampling",
    "Sandbox",
    "SandboxLimits",
    "Scripted",
    "Seat",
    "SelfConsistency",
    "Tool",
    "ToolEnv",
    "Trajectory",
    "Turn",
    "TurnEnv",
    "Verifier",
    "WarmStart",
    "__version__",
    "benchmark",
    "check_env",
    "check_verifier",
    "demo",
    "demonstrations",
    "export_checkpoint",
    "fit_gpus",
    "gpu_check",
    "list_envs",
    "list_losses",
    "list_suites",
    "load_episodes",
    "make",
    "play",
    "register",
    "register_loss",
    "register_suite",
    "simulate",
    "spec",
    "suite",
    "tool",
    "verifier_history",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        from forge_agents.errors import did_you_mean

        raise AttributeError(f"module 'forge_agents' has no attribute {name!r}.{did_you_mean(name, __all__)}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
