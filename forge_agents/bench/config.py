"""What `forge-agents bench` takes.

In: YAML and flags. Out: `BenchConfig`. Waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forge_agents.bench.entrants import named_players
from forge_agents.bench.limits import BenchLimits
from forge_agents.policy import AnyPolicy, Endpoint, Sampling
from forge_agents.serving.config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One benchmark."""

    players: dict[str, str] = field(default_factory=dict)
    """By name: random, human, package.module:function, http://host:port/v1#model, or a model."""
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    """OpenAI-compatible servers by name, with all that can be set: the variable that holds the key, requests at once,
    deadlines, budgets. They play beside `players`, each with its own `sampling`."""
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
    """Of all that `players` names."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Serves all models."""
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

    def __post_init__(self) -> None:
        both = self.players.keys() & self.endpoints.keys()
        if both:
            raise ValueError(f"{min(both)!r} names a player and an endpoint; give each its own name")

    def entrants(self) -> dict[str, AnyPolicy]:
        """All players by name, the endpoints last. Raises ValueError as `named_players`."""
        return named_players({**self.players, **self.endpoints}, self.sampling)
