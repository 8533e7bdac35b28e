"""What `forge-agents bench` takes.

In: YAML and flags. Out: `BenchConfig`. Waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forge_agents.bench.limits import BenchLimits
from forge_agents.policy import Sampling
from forge_agents.serving.config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One benchmark."""

    players: dict[str, str] = field(default_factory=dict)
    """By name: random, human, package.module:function, http://host:port/v1#model, or a model."""
    suite: str = "core-v1"
    """A suite's name, or one environment's id."""
    episodes: int = 64
    """Seeds for every environment and line-up."""
    seed: int = 0
    """Chooses the episodes' seeds."""
    swap_seats: bool = True
    """Each of two players takes each seat."""
    samples: int = 1
    """Episodes of each seed, for pass@k."""
    exploitability_samples: int = 0
    """Answers of each model at every information set of games such as Kuhn and Leduc poker, for its exploitability; 0
    leaves it out."""
    sampling: Sampling = field(default_factory=Sampling)
    """Of all models."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Of all models."""
    limits: BenchLimits = field(default_factory=BenchLimits)
    """What may be spent; a benchmark that meets a limit goes on when it is run again."""
    out_dir: str = "runs/bench"
    """Folder of episodes.jsonl and, unless told otherwise, of board.json."""
    json: str = ""
    """File of the report; board.json in out_dir by default."""
    html: str = ""
    """File of the report as a page; none by default."""
    markdown: str = ""
    """File of the report as Markdown; none by default."""
