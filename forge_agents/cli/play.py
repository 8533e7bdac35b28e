"""One episode in the terminal (``forge-agents play``): a person acts for an agent, or watches."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

from forge_agents.display import visible
from forge_agents.envs import registry
from forge_agents.episodes.play import play
from forge_agents.errors import PlayerLeftError, did_you_mean
from forge_agents.models.exports import trained_prompts
from forge_agents.policy import AnyPolicy, Endpoint, Human, Oracle, Policy, Random, Sampling
from forge_agents.rollout.episode import PlayableEnv
from forge_agents.rollout.rollout import close
from forge_agents.rollout.terminal import Terminal, terminal
from forge_agents.settings import settings_class
from forge_agents.types import Episode, Turn


@settings_class
@dataclass(frozen=True, kw_only=True)
class PlayConfig:
    """Settings of `play`. At most one of `model`, `endpoint` and `opponent` can be given."""

    env: str
    """Environment id. May be the first argument, without ``--env``."""
    env_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment, such as --env_args.max_number 9."""
    agent: str = ""
    """Agent of the person. Empty: the first agent, or none with `watch`."""
    watch: bool = False
    """Show every turn of the other agents when it is decided, with reasoning and tool calls."""
    model: str = ""
    """Model for all other agents: a built-in name, a Hugging Face id or a folder."""
    endpoint: str = ""
    """Base address of an OpenAI-compatible server for all other agents, e.g. http://127.0.0.1:8000/v1."""
    endpoint_model: str = ""
    """Name of the server's model."""
    api_key_env: str = ""
    """Environment variable with the key of the server."""
    opponent: Literal["random", "human", "oracle"] | None = None
    """Player for all other agents without a model or endpoint: random moves (default), people at the same terminal, or
    the environment's oracle."""
    sampling: Sampling = field(default_factory=Sampling)
    """Sampling of the model or server."""
    seed: int = 0
    """Seed of the episode."""

    def __post_init__(self) -> None:
        players = [name for name in ("model", "endpoint", "opponent") if getattr(self, name)]
        if len(players) > 1:
            raise ValueError(f"{' and '.join(players)} are given for the other agents. Choose one")
        if bool(self.endpoint) != bool(self.endpoint_model):
            raise ValueError("endpoint and endpoint_model must be given together")
        if self.api_key_env and not self.endpoint:
            raise ValueError("api_key_env needs endpoint and endpoint_model")

    @property
    def other(self) -> AnyPolicy:
        """Player for the other agents."""
        if self.model:
            prompts = trained_prompts(self.model)
            return Policy(self.model, name="model", sampling=self.sampling, trainable=False, **prompts)
        if self.endpoint:
            return Endpoint(self.endpoint, self.endpoint_model, api_key_env=self.api_key_env, sampling=self.sampling)
        if self.opponent == "oracle":
            return Oracle(seed=self.seed)
        return Human(name="other") if self.opponent == "human" else Random(seed=self.seed)


def play_in_terminal(config: PlayConfig) -> Episode:
    """Play one episode and show its end. Raises ValueError if the environment has no such agent."""
    env = registry.make(config.env, **config.env_args)
    try:
        person = config.agent or ("" if config.watch else env.possible_agents[0])
        if person and person not in env.possible_agents:
            raise ValueError(
                f"{config.env} has no agent {person!r}. Its agents are {', '.join(env.possible_agents)}."
                f"{did_you_mean(person, env.possible_agents)}"
            )
        other = config.other
        policies: dict[str, AnyPolicy] = {agent: Human() if agent == person else other for agent in env.possible_agents}
        screen = terminal()
        role = f"you are {person}. Type an action and press Enter. Ctrl-D leaves." if person else "you watch."
        screen.show(f"{config.env}: {role}", "bold")

        def watch(turn: Turn) -> None:
            if turn.agent != person:
                screen.show(f"\n{turn}")

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=RuntimeWarning, module=__name__)  # failures are shown below
            episode = play(env, policies, seed=config.seed, watch=watch if config.watch else None)
        _show_end(screen, env, episode, watched=config.watch)
    finally:
        close(env, config.env)
    return episode


def _show_end(screen: Terminal, env: PlayableEnv, episode: Episode, *, watched: bool) -> None:
    from rich.table import Table

    if episode.error is not None:
        screen.show(f"\nthe episode ended early: {episode.error.message}", "red")
    elif episode.program_error:
        screen.show(f"\nthe program failed: {episode.program_error}", "red")
    elif not watched and isinstance(text := env.render(), str) and text.strip():
        screen.show(f"\nfinal state\n{text}", "dim")
    table = Table("agent", "policy", "reward", title=f"{episode.end_reason} after {len(episode.turns)} turns")
    for agent, trajectory in episode.trajectories.items():
        table.add_row(visible(agent), trajectory.policy, f"{trajectory.reward:g}")
    screen.console.print(table, markup=False)


def left(episode: Episode) -> bool:
    """Return whether a person left `episode`."""
    return episode.error is not None and episode.error.kind == PlayerLeftError.__name__
