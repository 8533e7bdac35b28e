"""Settings of a GRPO run.

In: what a user sets. Out: checked, frozen dataclasses. Waits for nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast, get_args

from forge_agents.errors import did_you_mean
from forge_agents.policy import AnyPolicy, Endpoint, Human, Policy, Random, Seats
from forge_agents.runtime.hosts import Hosts
from forge_agents.serving.config import EngineConfig
from forge_agents.types import Trajectory
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.losses.registry import Denominator, find_loss
from forge_trainers.offline.config import WarmStart
from forge_trainers.records.trackers import Tracker, check_tracker
from forge_trainers.rl.credit import Credit
from forge_trainers.selfplay.league import League, LeagueConfig


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """Group relative policy optimisation (arXiv 2402.03300) over multi-agent episodes."""

    group_size: int = 8
    """Siblings per group: episodes with one seed. At least 2 where `credit` compares them with each other."""
    groups_per_step: int = 8
    """Groups, so seeds, per optimiser step."""
    refills: int | None = None
    """Times a step may replace groups that teach nothing, and failed ones, by groups with other seeds, played on the
    present weights (DAPO's dynamic sampling, arXiv 2503.14476, eq. 11). 0 learns from what is left. None: as the
    learner's loss brings it, 3 for "dapo" and 0 for the others."""
    denominator: Denominator | None = None
    """Which trajectories count in the mean that a loss is: "sampled", also those of groups whose siblings earn the same
    (GRPO as published), or "used", those that teach. None: as the learner's loss brings it."""
    credit: Credit | None = None
    """How rewards become advantages. None: as the learner's loss was published; else it is given whole."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    """Optimiser, loss and precision."""
    learner_procs: int = 1
    """Processes of each learner; more than one shards it."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How models are served."""
    max_staleness: int = 0
    """Weight versions a sample may lie behind the learner that eats it. 0 waits for each update; 1 collects and judges
    the next step while the learner works; from 2 on slow groups may also come a step late."""
    max_live_episodes: int = 512
    """Episodes in flight at once."""
    max_turns: int = 64
    """Decisions after which an episode is cut off, where its environment sets no limit."""
    eval_every: int = 0
    """Steps between evaluations on held-out seeds; 0 evaluates never."""
    eval_episodes: int = 64
    """Held-out seeds of one evaluation."""
    exploitability_samples: int = 0
    """Free answers drawn at every information set at each evaluation, which then also says how much the best response
    wins from each trained policy: in games of two that can list their openings, such as forge/KuhnPoker-v0. 0 leaves
    it out."""
    checkpoint_every: int = 10
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept on disk."""
    keep_best: bool = True
    """Whether the checkpoint of highest held-out reward stays on disk as well. One is then written at every evaluation,
    see `eval_every`, that is the best so far."""
    keep_episodes: int = 4
    """Episodes of each step written to ``episodes.jsonl``."""
    log_to: Tracker = "tensorboard"
    """Where curves go beside ``metrics.jsonl``: "tensorboard" writes files in the run's folder; "wandb" and "mlflow"
    are extras to install, and read their own environment variables."""
    max_logprob_gap: float = 0.2
    """Mean absolute difference between the sampler's and the learner's log-probability of the sampled tokens above
    which the run ends: the two no longer hold the same model. Looked at where every sample is of the learner's own
    version, as the first step's always are. bfloat16 against bfloat16 shows 0.02 to 0.042 on average over a step."""
    max_bad_logprobs: float = 0.01
    """Share of a policy's sampled tokens in a step whose log-probability may be NaN, infinite or positive; they are
    masked. More end the run. In [0, 1]."""
    max_empty_steps: int = 5
    """Steps in a row without one group to learn from, after which the run ends, saved and exported, with the reason:
    well where every episode earns the most there is or the highest that was seen, with an `EmptyBatchError`
    elsewhere."""
    seed: int = 0
    """Of environments, sampling and initialisation. Training seeds lie below 2**31, held-out seeds above."""
    start_timeout_s: float = 600.0
    """Deadline for engines and learners to start."""
    stage_timeout_s: float = 1800.0
    """Deadline of each stage of a step: judging, learning, weight return; of collecting, the longest time without an
    answer of an engine, so that many long episodes may take longer."""
    block_timeout_s: float = 120.0
    """Seconds that an environment without isolation, or a scripted player, may hold the controller's thread at once;
    then it is interrupted and its episode fails."""
    silence_s: float = 60.0
    """Seconds after which an engine, a learner or the weight store that says nothing counts as dead."""
    max_respawns: int = 8
    """Dead processes that a session may replace; one more death, or two at one place, end it with
    `RespawnLimitError`."""

    def __post_init__(self) -> None:
        check_tracker(self.log_to)
        if self.group_size < 2 and self.credit_rule.needs_siblings:
            raise ValueError(f"group_size={self.group_size} gives every advantage 0; set group_size >= 2")
        for name in (
            "groups_per_step",
            "learner_procs",
            "max_live_episodes",
            "max_turns",
            "eval_episodes",
            "checkpoint_every",
            "keep_checkpoints",
            "max_empty_steps",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.denominator not in (None, *get_args(Denominator)):
            raise ValueError(f"denominator={self.denominator!r} must be one of {get_args(Denominator)}, or None")
        for name in ("refills", "max_staleness", "eval_every", "keep_episodes", "max_respawns"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        if self.exploitability_samples < 0 or (self.exploitability_samples and not self.eval_every):
            raise ValueError(
                f"exploitability_samples={self.exploitability_samples} with eval_every={self.eval_every}: at least 0, "
                "and above 0 only with evaluations, where it is measured"
            )
        if not self.max_logprob_gap > 0:
            raise ValueError(f"max_logprob_gap={self.max_logprob_gap} must be above 0; inf switches the guard off")
        if not 0 <= self.max_bad_logprobs <= 1:
            raise ValueError(f"max_bad_logprobs={self.max_bad_logprobs} must be in [0, 1]; 1 switches the guard off")
        for name in ("start_timeout_s", "stage_timeout_s", "block_timeout_s", "silence_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive: every wait has a deadline")

    @property
    def credit_rule(self) -> Credit:
        """`credit`, or that of the learner's loss."""
        return self.credit or find_loss(self.learner.loss).credit

    @property
    def max_refills(self) -> int:
        """`refills`, or those of the learner's loss."""
        return find_loss(self.learner.loss).refills if self.refills is None else self.refills

    @property
    def size_of(self) -> Callable[[Trajectory], int] | None:
        """What a trajectory that teaches nothing adds to the denominator of the learner's loss; None: nothing."""
        rule = self.denominator or find_loss(self.learner.loss).denominator
        return self._size if rule == "sampled" else None

    def _size(self, trajectory: Trajectory) -> int:
        """Tokens or sequences."""
        tokens = [len(turn.response_ids) for turn in trajectory.turns]
        if find_loss(self.learner.loss).reduction == "token":
            return sum(tokens)
        return sum(map(bool, tokens)) if self.learner.sequence == "turn" else int(any(tokens))


@dataclass(frozen=True, kw_only=True)
class RunLeague(LeagueConfig):
    """A league, as YAML and flags say it."""

    anchors: tuple[str, ...] = ()
    """Fixed opponents beside the start model, by the names that `seats` could use: policies with trainable: false,
    endpoints, "random"."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run, as YAML and flags say it."""

    env: str | dict[str, float]
    """Environment id, or weights by id."""
    env_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment."""
    policies: dict[str, Policy] = field(default_factory=dict)
    """Models by name."""
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    """OpenAI-compatible servers by name; never trained."""
    seats: str | dict[str, str] = ""
    """Who sits in every seat, or by seat: the name of a policy or an endpoint, "random" for random play, "human" for a
    person at the terminal. Empty: the only policy."""
    league: RunLeague | None = None
    """Self-play: the policy that `seats` names plays against snapshots of itself and anchors. null: the seats are as
    they are."""
    warm_start: dict[str, WarmStart] = field(default_factory=dict)
    """What policies, by name, learn from conversations or episodes before they play."""
    reward: str | None = None
    """Reward as "package.module:object"; null is the environment's own."""
    steps: int = 100
    """Optimiser steps of the run."""
    out_dir: str = "runs/default"
    """The run's folder; a run in it is continued."""
    trainer: GRPOConfig = field(default_factory=GRPOConfig)
    """Settings of the trainer."""
    mesh: Hosts = field(default_factory=Hosts)
    """Where processes run."""

    def __post_init__(self) -> None:
        if not self.policies:
            raise ValueError(
                "policies is empty; name at least one, e.g. policies: {team: {model: smollm2-135m-instruct}}"
            )
        named = {name: replace(policy, name=name) for name, policy in self.policies.items()}
        servers = {name: replace(endpoint, name=name) for name, endpoint in self.endpoints.items()}
        both = named.keys() & servers.keys()
        if both:
            raise ValueError(f"{min(both)!r} names a policy and an endpoint; give each its own name")
        object.__setattr__(self, "policies", named)
        object.__setattr__(self, "endpoints", servers)
        if not self.seats:
            if len(named) + len(servers) > 1:
                raise ValueError(
                    f"seats is empty and there are {len(named) + len(servers)} policies; say who sits where"
                )
            object.__setattr__(self, "seats", next(iter(named)))
        known = tuple(self._players)
        for name in self.seats.values() if isinstance(self.seats, dict) else (self.seats,):
            if name not in known:
                raise ValueError(f"seats names {name!r}, known are {', '.join(known)}.{did_you_mean(name, known)}")
        if self.league is not None:
            self._declared_league(self.league)
        for name in self.warm_start:
            if name not in named:
                near = did_you_mean(name, named)
                raise ValueError(f"warm_start names {name!r}, the policies are {', '.join(named)}.{near}")

    @property
    def seated(self) -> Seats | League:
        """The seats with their policies, or the league."""
        if self.league is not None:
            return self._declared_league(self.league)
        players = self._players
        if isinstance(self.seats, dict):
            return {seat: players[name] for seat, name in self.seats.items()}
        return players[self.seats]

    def _declared_league(self, league: RunLeague) -> League:
        players = self._players
        if isinstance(self.seats, dict):
            raise ValueError("a league seats everybody itself; let seats name the policy that learns")  # noqa: TRY004
        for name in league.anchors:
            if name not in players:
                near = did_you_mean(name, players)
                raise ValueError(f"league.anchors names {name!r}, known are {', '.join(players)}.{near}")
        settings = {one.name: getattr(league, one.name) for one in fields(LeagueConfig)}
        anchors = tuple(players[name] for name in league.anchors)
        return League(cast("Policy", players[self.seats]), anchors=anchors, **settings)

    @property
    def _players(self) -> dict[str, AnyPolicy]:
        """Whom `seats` may name."""
        return {"random": Random(), "human": Human(), **self.endpoints, **self.policies}

    def warmed_up(self, *, train: bool = True) -> RunConfig:
        """This run with the models that `warm_start` makes, in folders below ``out_dir/warm-start``.

        Args:
            train: Policies whose export is not there yet are fine-tuned here and now; False leaves them as they are.
        """
        if not self.warm_start:
            return self
        from forge_trainers.offline.sft import SFTTrainer  # the learner's parts load here, not when settings are read

        warm = dict(self.policies)
        for name, plan in self.warm_start.items():
            folder = Path(self.out_dir) / "warm-start" / name
            export = folder / "export"
            if not export.exists():  # it appears when complete
                if not train:
                    continue
                with SFTTrainer(warm[name], plan.trainer, folder, self.mesh) as trainer:
                    trainer.fit(plan.data, eval_dataset=plan.eval_data, epochs=plan.epochs, steps=plan.steps)
            warm[name] = replace(warm[name], model=str(export.absolute()))
        return replace(self, policies=warm)

    def load_reward(self) -> Any:
        """The reward object, or None for the environment's own."""
        if self.reward is None:
            return None
        module, _, name = self.reward.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as cause:
            raise ValueError(
                f"reward {self.reward!r} cannot be imported ({cause}); write 'package.module:object'"
            ) from cause
