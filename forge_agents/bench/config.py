"""What `forge-agents bench` takes.

In: YAML and flags. Out: `BenchConfig`. Waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forge_agents.bench.entrants import named_players
from forge_agents.bench.limits import BenchLimits
from forge_agents.envs.registry import suite_defaults
from forge_agents.policy import AnyPolicy, Endpoint, Sampling
from forge_agents.serving.config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class BenchSampling:
    """How tokens are drawn: `Sampling`, its length the suite's where nothing is said."""

    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy. Range [0, 5]."""
    top_p: float = 1.0
    """Smallest set of tokens whose probability reaches it is kept. Range (0, 1]."""
    max_tokens: int | None = None
    """Most tokens of one response, at least 1; null: the suite's number, 64 of one environment."""
    stop: tuple[str, ...] = ()
    """Texts that end a response; the end-of-turn token always does."""

    def __post_init__(self) -> None:
        self._with(1)  # its checks

    def of_suite(self, suite: str) -> Sampling:
        """For the models of a benchmark of `suite`."""
        return self._with(suite_defaults(suite).max_tokens)

    def _with(self, max_tokens: int) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=max_tokens if self.max_tokens is None else self.max_tokens,
            stop=self.stop,
        )


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
    episodes: int | None = None
    """Seeds for every environment and line-up; null: the suite's number, 64 of one environment."""
    seed: int | None = None
    """Chooses the episodes' seeds; null: the suite's, 0 of one environment."""
    swap_seats: bool | None = None
    """Each of two players takes each seat; null: as the suite says, true of one environment."""
    samples: int = 1
    """Episodes of each seed, for pass@k."""
    exploitability_samples: int = 0
    """Answers of each model at every information set of games such as Kuhn and Leduc poker, for its exploitability; 0
    leaves it out."""
    sampling: BenchSampling = field(default_factory=BenchSampling)
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
        sampling = self.sampling.of_suite(self.suite)
        return named_players({**self.players, **self.endpoints}, sampling)
