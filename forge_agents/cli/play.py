"""One episode with a person at the terminal, in a seat or watching: ``forge-agents play``.

In: an environment's id, a seat, who sits in the others. Out: the episode, shown. Waits for the person, and for
engines and endpoints, which keep their own deadlines.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

from forge_agents.display import visible
from forge_agents.envs import registry
from forge_agents.episodes.play import play
from forge_agents.errors import PlayerLeftError, did_you_mean
from forge_agents.policy import AnyPolicy, Endpoint, Human, Oracle, Policy, Random, Sampling
from forge_agents.rollout.rollout import PlayableEnv, close
from forge_agents.rollout.terminal import Terminal, terminal
from forge_agents.settings import settings_class
from forge_agents.types import Episode, Turn


@settings_class
@dataclass(frozen=True, kw_only=True)
class PlayConfig:
    """A seat for a person, and who plays with them; at most one of `model`, `endpoint` and `opponent`."""

    env: str
    """Environment id; ``--env`` may be left out before it."""
    env_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment, such as --env_args.max_number 9."""
    seat: str = ""
    """The person's seat; empty takes the first, or none where the person watches."""
    watch: bool = False
    """Show every turn of the others as it is decided: thoughts, tool calls, and in a program who goes on from what."""
    model: str = ""
    """A model for all other seats: a built-in name, a Hugging Face id or a folder."""
    endpoint: str = ""
    """An OpenAI-compatible server for all other seats: its base, e.g. http://127.0.0.1:8000/v1."""
    endpoint_model: str = ""
    """What the server calls its model."""
    api_key_env: str = ""
    """Environment variable with the server's key."""
    opponent: Literal["random", "human", "oracle"] | None = None
    """Who takes all other seats where neither model nor endpoint does: random moves (the default), people at the same
    terminal, or the environment's oracle."""
    sampling: Sampling = field(default_factory=Sampling)
    """How the model's or the server's answers are drawn."""
    seed: int = 0
    """Of the episode."""

    def __post_init__(self) -> None:
        chosen = [name for name in ("model", "endpoint", "opponent") if getattr(self, name)]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} both take the other seats; choose one")
        if bool(self.endpoint) != bool(self.endpoint_model):
            raise ValueError("endpoint and endpoint_model belong together: the server, and what it calls its model")
        if self.api_key_env and not self.endpoint:
            raise ValueError("api_key_env is the key of an endpoint; give endpoint and endpoint_model too")

    @property
    def other(self) -> AnyPolicy:
        """Who sits in the other seats."""
        if self.model:
            return Policy(self.model, name="model", sampling=self.sampling, trainable=False)
        if self.endpoint:
            return Endpoint(
                self.endpoint, self.endpoint_model, api_key_env=self.api_key_env, sampling=self.sampling
            )
        if self.opponent == "oracle":
            return Oracle(seed=self.seed)
        return Human(name="other") if self.opponent == "human" else Random(seed=self.seed)


def play_in_terminal(config: PlayConfig) -> Episode:
    """Play one episode; show how it ended.

    Raises:
        ValueError: The environment has no such seat, or the endpoint's key is not set.
        UnknownIdError, ModelNotFoundError: There is no such environment or model.
        StallError, ActorDiedError: The model's engine did not start in time, or died.
    """
    env = registry.make(config.env, **config.env_args)
    try:
        seat = config.seat or ("" if config.watch else env.possible_agents[0])
        if seat and seat not in env.possible_agents:
            raise ValueError(
                f"{config.env} has no seat {seat!r}; its seats are {', '.join(env.possible_agents)}."
                f"{did_you_mean(seat, env.possible_agents)}"
            )
        other = config.other
        policies: dict[str, AnyPolicy] = {agent: Human() if agent == seat else other for agent in env.possible_agents}
        shown = terminal()
        you = f"you are {seat}. Type an action and press Enter; Ctrl-D leaves." if seat else "you watch."
        shown.show(f"{config.env}: {you}", "bold")

        def watch(turn: Turn) -> None:
            if turn.agent != seat:
                shown.show(f"\n{turn}")

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=RuntimeWarning, module=__name__)  # a failure is shown below
            episode = play(env, policies, seed=config.seed, watch=watch if config.watch else None)
        _show_end(shown, env, episode, watched=config.watch)
    finally:
        close(env, config.env)
    return episode


def _show_end(shown: Terminal, env: PlayableEnv, episode: Episode, *, watched: bool) -> None:
    from rich.table import Table

    if episode.error is not None:
        shown.show(f"\nthe episode ended early: {episode.error.message}", "red")
    elif episode.program_error:
        shown.show(f"\nthe program failed: {episode.program_error}", "red")
    elif not watched and isinstance(said := env.render(), str) and said.strip():
        shown.show(f"\nhow it went\n{said}", "dim")
    table = Table("seat", "who", "reward", title=f"{episode.end_reason} after {len(episode.turns)} turns")
    for agent, trajectory in episode.trajectories.items():
        table.add_row(visible(agent), trajectory.policy, f"{trajectory.reward:g}")
    shown.console.print(table, markup=False)


def left(episode: Episode) -> bool:
    """Whether a person ended `episode`."""
    return episode.error is not None and episode.error.kind == PlayerLeftError.__name__
