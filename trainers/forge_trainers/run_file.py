"""Settings of a training run, as in a YAML file and flags, and their conversion to arguments of the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from typing import TYPE_CHECKING, Any, cast, get_type_hints

from forge_agents.envs import registry
from forge_agents.envs.oracles import oracle_of
from forge_agents.errors import did_you_mean
from forge_agents.files import user_path
from forge_agents.imports import import_object
from forge_agents.policy import KEYWORDS, AnyPolicy, Endpoint, Oracle, Policy, PolicyMapping
from forge_agents.runtime.hosts import MAX_PROCESSES, Hosts
from forge_agents.settings import settings_class, values_of
from forge_trainers.learner.config import ONE_FOR_ALL, LearnerConfig
from forge_trainers.offline.config import WarmStart
from forge_trainers.rl.config import GRPOConfig
from forge_trainers.rl.curriculum import Curriculum, CurriculumConfig
from forge_trainers.rl.rewards import engines_of, env_reward, models_of
from forge_trainers.rl.tasks import EnvLike, TaskSampler, check_weights
from forge_trainers.run.config import MAX_STEPS, check_at_least
from forge_trainers.selfplay.league import League, LeagueConfig
from forge_verifiers.core.verifier import reward_of

if TYPE_CHECKING:
    from forge_trainers.run.parts import OwnEngine, OwnModel


LearnerOverrides: type = make_dataclass(
    "LearnerOverrides",
    [(name, hint | None, None) for name, hint in get_type_hints(LearnerConfig).items() if name not in ONE_FOR_ALL],
    frozen=True,
    kw_only=True,
)
"""Learner settings of one policy: the fields of `LearnerConfig`. None keeps the trainer's value."""
LearnerOverrides.__module__ = __name__  # the command line's parser imports it from here
settings_class(LearnerOverrides)


@settings_class
@dataclass(frozen=True)
class RunPolicy(Policy):
    """Policy, as in a YAML file and flags."""

    learner: LearnerOverrides | None = field(  # type: ignore[valid-type]
        default=None, kw_only=True, hash=False
    )
    """Learner settings of this policy alone, overriding those of the trainer. null (default) overrides none."""

    def declared(self, name: str) -> Policy:
        """Return the policy with its key as name."""
        return Policy(**values_of(self) | {"name": name})


@settings_class
@dataclass(frozen=True, kw_only=True)
class RunLeague(LeagueConfig):
    """League, as in a YAML file and flags."""

    anchors: tuple[str, ...] = ()
    """Fixed opponents in addition to the start model, as in `policy_mapping`: policies with trainable: false,
    endpoints, "random", "oracle"."""
    held_out: tuple[str, ...] = ()
    """Opponents of evaluations, as in `policy_mapping`. Empty (default): the anchors."""

    @property
    def fixed(self) -> tuple[str, ...]:
        """Names of all fixed opponents, without duplicates."""
        return tuple(dict.fromkeys((*self.anchors, *self.held_out)))


@settings_class
@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Training run, as in a YAML file and flags."""

    env: str | list[str] | dict[str, float]
    """Environment id, a list of ids with equal weights, or weights by id."""
    env_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment."""
    curriculum: CurriculumConfig | None = None
    """Curriculum that chooses levels of `env`, or ids of its list, by success rate. null (default): equal weights."""
    policies: dict[str, RunPolicy] = field(default_factory=dict)
    """Policies by name, each with a model."""
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    """OpenAI-compatible servers by name. Endpoints are never trained."""
    policy_mapping: str | dict[str, str] = ""
    """Player for each agent: one for all, or a mapping from agent to player. A player is the name of a policy or
    endpoint, "random", "human" (at the terminal) or "oracle" (the environment's scripted policy). Empty (default): the
    only policy."""
    league: RunLeague | None = None
    """Self-play of the policy in `policy_mapping` against its snapshots and anchors. null (default): no league."""
    warm_start: dict[str, WarmStart] = field(default_factory=dict)
    """Supervised fine-tuning of policies before reinforcement learning, by policy."""
    reward: str | None = None
    """Reward as "package.module:object". null (default): the environment's own."""
    steps: int = 100
    """Number of optimizer steps of the run."""
    out_dir: str = "runs/default"
    """Run folder. A run in it is continued."""
    trainer: GRPOConfig = field(default_factory=GRPOConfig)
    """Settings of the trainer."""
    mesh: Hosts = field(default_factory=Hosts)
    """Hosts of the processes."""

    def __post_init__(self) -> None:
        if not self.policies:
            raise ValueError(
                "policies is empty. Name at least one, e.g. policies: {team: {model: smollm2-135m-instruct}}"
            )
        if isinstance(self.env, list | tuple):
            if not self.env or len(set(self.env)) < len(self.env):
                listed = ", ".join(map(str, self.env)) or "nothing"
                raise ValueError(f"env lists {listed}. Name one id or more, each once")
            object.__setattr__(self, "env", dict.fromkeys(self.env, 1.0))
        check_weights({self.env: 1.0} if isinstance(self.env, str) else cast("dict[str, float]", self.env))
        check_at_least(self, 1, "steps", most=MAX_STEPS)
        named = self._named()
        servers = {name: replace(endpoint, name=name) for name, endpoint in self.endpoints.items()}
        both = named.keys() & servers.keys()
        if both:
            raise ValueError(f"{min(both)!r} names a policy and an endpoint. Give each its own name")
        object.__setattr__(self, "policies", named)
        object.__setattr__(self, "endpoints", servers)
        if not self.policy_mapping:
            if len(named) + len(servers) > 1:
                raise ValueError(
                    f"policy_mapping is empty and there are {len(named) + len(servers)} policies. Map all agents"
                )
            object.__setattr__(self, "policy_mapping", next(iter(named)))
        candidates = tuple(self._candidates)
        for name in self._mapped_names:
            if name not in candidates:
                raise ValueError(
                    f"policy_mapping names {name!r}, known are {', '.join(candidates)}.{did_you_mean(name, candidates)}"
                )
        if self.league is not None:
            self._declared_league(self.league)
        for name in self.warm_start:
            if name not in named:
                near = did_you_mean(name, named)
                raise ValueError(f"warm_start names {name!r}, the policies are {', '.join(named)}.{near}")

    def _named(self) -> dict[str, Policy]:
        """Policies with their keys as names. Raises ValueError for other names and for wrong learner settings."""
        policies: Mapping[str, Policy] = self.policies
        for name, policy in policies.items():
            if policy.named and policy.name != name:
                raise ValueError(
                    f"policies.{name}.name={policy.name!r} has no effect, because a policy of a run is called by its "
                    f"key. Leave name out, or rename the key {name!r}"
                )
        named = {
            name: policy.declared(name) if isinstance(policy, RunPolicy) else replace(policy, name=name)
            for name, policy in policies.items()
        }
        for policy in named.values():
            self.trainer.learner_of(policy)
        return named

    @property
    def played(self) -> EnvLike:
        """The environments to train on: `env`, or its curriculum."""
        if self.curriculum is None:
            return cast("EnvLike", self.env)
        return Curriculum(
            env=self.env if isinstance(self.env, str) else tuple(self.env),
            **values_of(self.curriculum, CurriculumConfig),
        )

    @property
    def suite(self) -> str:
        """The environments, including their levels, as a suite for benchmarks."""
        if isinstance(played := self.played, Curriculum):
            return "+".join(played.env_ids)
        return self.env if isinstance(self.env, str) else "+".join(self.env)

    @property
    def players(self) -> PolicyMapping | League:
        """The player of each agent, one player for all agents, or the league."""
        if self.league is not None:
            return self._declared_league(self.league)
        players = self._candidates
        if isinstance(self.policy_mapping, dict):
            return {agent: players[name] for agent, name in self.policy_mapping.items()}
        return players[self.policy_mapping]

    @property
    def models(self) -> dict[str, Policy]:
        """Policies that play, by name. A league has another one, which plays the snapshots."""
        league = self.players
        if isinstance(league, League):
            players = (league.policy, league.served, *league.fixed)
        else:
            players = tuple(self._candidates[name] for name in self._mapped_names)
        return {player.name: player for player in players if isinstance(player, Policy)}

    @property
    def _mapped_names(self) -> tuple[str, ...]:
        return tuple(self.policy_mapping.values()) if isinstance(self.policy_mapping, dict) else (self.policy_mapping,)

    @property
    def _used_names(self) -> tuple[str, ...]:
        """Names of the players of agents, and of a league's fixed opponents."""
        return (*self._mapped_names, *(self.league.fixed if self.league is not None else ()))

    @property
    def _env_ids(self) -> tuple[str, ...]:
        return (self.env,) if isinstance(self.env, str) else tuple(self.env)

    def _declared_league(self, league: RunLeague) -> League:
        players = self._candidates
        if isinstance(self.policy_mapping, dict):
            raise ValueError("a league chooses the players. Set policy_mapping to the policy that learns")  # noqa: TRY004
        if not isinstance(player := players[self.policy_mapping], Policy):
            what = f"policy_mapping names {self.policy_mapping}: {type(player).__name__}"
            raise ValueError(f"a league needs a policy that learns, and {what}")  # noqa: TRY004
        settings = values_of(league, LeagueConfig)
        for what in ("anchors", "held_out"):
            for name in (names := getattr(league, what)):
                if name not in players:
                    near = did_you_mean(name, players)
                    raise ValueError(f"league.{what} names {name!r}, known are {', '.join(players)}.{near}")
            settings[what] = tuple(players[name] for name in names)
        return League(player, **settings)

    @property
    def idle(self) -> tuple[str, ...]:
        """A message for each declared policy or endpoint that no agent uses, with a suggestion of a similar name."""
        return tuple(
            f"{name} is declared, but no agent uses it.{did_you_mean(name, self._used_names)}"
            for name in (*self.policies, *self.endpoints)
            if name not in self._used_names
        )

    @property
    def _candidates(self) -> dict[str, AnyPolicy]:
        """Players that `policy_mapping` may name."""
        return {**KEYWORDS, **self.endpoints, **self.policies}

    def of_seeds(self, count: int) -> list[RunConfig]:
        """Return runs with consecutive seeds, each in a subfolder of ``out_dir``. For a count of 1, this run."""
        if count == 1:
            return [self]
        if count > MAX_PROCESSES:
            raise ValueError(f"seeds={count} must be at most {MAX_PROCESSES}")
        first, folder = self.trainer.seed, user_path(self.out_dir)
        return [
            replace(self, out_dir=str(folder / f"seed-{seed}"), trainer=replace(self.trainer, seed=seed))
            for seed in range(first, first + count)
        ]

    def warmed_up(self, *, train: bool = True) -> RunConfig:
        """Return this run with the models of `warm_start` in ``out_dir/warm-start``.

        With `train`, policies without an export are fine-tuned. Otherwise they keep their models.

        Raises RunFolderError if the settings of a finished warm start have changed.
        """
        if not self.warm_start:
            return self
        if train:
            self._check_oracles()
        # imports the learner, which takes seconds
        from forge_trainers.offline.sft import SFTTrainer, check_warm_start, keep_warm_start

        warm = dict(self.policies)
        for name, plan in self.warm_start.items():
            folder = user_path(self.out_dir) / "warm-start" / name
            export = folder / "export"
            agents = self._imitated_agents(name, plan)
            if not export.exists():  # exports are atomic
                if not train:
                    continue
                with SFTTrainer(replace(warm[name], learner=None), plan.trainer, folder, self.mesh) as trainer:
                    data = plan.dataset(agents)
                    trainer.fit(data, eval_dataset=plan.eval_data, epochs=plan.epochs, steps=plan.steps)
                if export.exists():
                    keep_warm_start(folder, name, warm[name], plan, agents)
            elif train:
                check_warm_start(folder, name, warm[name], plan, agents)
            warm[name] = replace(warm[name], model=str(export.absolute()))
        return replace(self, policies=warm)

    def _check_oracles(self) -> None:
        """Raise ValueError if a required oracle does not exist, before a warm start takes its time."""
        plays = any(isinstance(self._candidates[name], Oracle) for name in self._used_names)
        imitated = (plan.data for plan in self.warm_start.values() if plan.games)
        for env_id in (*(self._env_ids if plays else ()), *imitated):
            oracle_of(registry.spec(env_id), env_id)

    def _imitated_agents(self, name: str, plan: WarmStart) -> tuple[str, ...]:
        """Agents that policy `name` imitates: its agents in the run's environment, else all."""
        if plan.games is None or isinstance(self.policy_mapping, str):
            return ()
        if registry.spec(plan.data).name not in [registry.spec(env_id).name for env_id in self._env_ids]:
            return ()
        return tuple(agent for agent, player in self.policy_mapping.items() if player == name)

    def dry_run(self, *, gpus_per_host: int | None = None) -> list[str]:
        """Describe the processes that this run starts with and their resolved settings, line by line.

        `gpus_per_host` is the number of GPUs of this machine, and of hosts whose role ``mesh.gpus`` does not name.
        None: this machine's GPUs, and 8 of others. The environments are made, as a run does first. Raises as
        `TaskSampler`, `RunPlan` and `forge_trainers.run.dry_run.dry_run`.
        """
        from forge_trainers.rl.league_policies import policies_of
        from forge_trainers.rl.plan import RunPlan
        from forge_trainers.run.dry_run import dry_run  # imports Monarch, which takes a second

        sampler = TaskSampler(self.played, self.env_args, hosts=self.mesh)
        policies = policies_of(self.players, self.trainer, user_path(self.out_dir))
        reward = self.load_reward()
        plan = RunPlan(sampler, policies, self.trainer, env_reward if reward is None else reward_of(reward))
        plan.make_games()
        return dry_run(
            self.models | {name: policy for name, policy in plan.loaded.items() if name in self.models},
            self.trainer,
            self.mesh,
            out_dir=user_path(self.out_dir),
            gpus_per_host=gpus_per_host,
            judges=self.judges,
        )

    @property
    def judges(self) -> list[OwnEngine]:
        """Engines that the reward's judges start."""
        return engines_of(self.load_reward())

    @property
    def held(self) -> list[OwnModel]:
        """Models that the reward loads into the controller's process."""
        return models_of(self.load_reward())

    def load_reward(self) -> Any:
        """The reward object, or None for the environment's own."""
        return None if self.reward is None else import_object(self.reward, "reward")
