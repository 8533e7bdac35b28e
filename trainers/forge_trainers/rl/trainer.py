"""GRPO over multi-agent episodes: `GRPOTrainer`.

A step collects and scores groups, computes advantages, packs batches, trains, and sends the new weights to the engines:
see `forge_trainers.rl.session.Session.step`. ``examples/rl_loop.py`` is the same loop without a class, and
``docs/a-step.md`` follows one step through the files.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_agents.errors import ActorDiedError, NotReadyError, StallError
from forge_agents.files import user_path
from forge_agents.policy import AnyPolicy, Policy, PolicyMapping
from forge_agents.runtime import startup
from forge_agents.runtime.hosts import Hosts
from forge_agents.runtime.interrupts import LoopRunner
from forge_agents.settings import named_arguments
from forge_agents.types import Reward
from forge_trainers.records.description import describe
from forge_trainers.records.run_folder import FitResult, RunFolder, check_begins, check_is_run, read_rows
from forge_trainers.rl.config import GRPOConfig
from forge_trainers.rl.curriculum import Curriculum
from forge_trainers.rl.evaluation import EvalResult, Evaluator
from forge_trainers.rl.league_policies import policies_of
from forge_trainers.rl.lifecycle import Lifecycle
from forge_trainers.rl.plan import RunPlan
from forge_trainers.rl.rewards import check_env_rewards, env_reward
from forge_trainers.rl.session import RunState, Session
from forge_trainers.rl.tasks import EnvLike, TaskSampler
from forge_trainers.run.checkpoints import Checkpoints
from forge_trainers.run.supervision import stalls_recorded
from forge_trainers.selfplay.league import League
from forge_verifiers.core.verifier import reward_of


class GRPOTrainer:
    """Trains the trainable policies of a team with GRPO, by default DAPO's variant (arXiv 2503.14476).

    Engines and learners start with the first call that needs them and stop at `close`, at the end of a ``with`` block,
    or at the end of the program.

    Args:
        policies: One policy for all agents, a policy per agent, a function ``(agent, episode_seed) -> policy``, or a
            league: a policy that plays against its own past.
        reward: Function from trajectories to float ``[n]``, NaN to abstain, or a function of one trajectory, or of its
            text, see `forge_verifiers.core.functions.parse_signature`. None is the environment's own reward.
        config: Settings. ``fa.LearnerConfig(loss="grpo")`` is GRPO as published (arXiv 2402.03300).
        out_dir: The run's folder. If it holds a run, training continues from the newest checkpoint.
        mesh: Where processes run. None is this host.
    """

    @named_arguments
    def __init__(
        self,
        policies: PolicyMapping | League,
        reward: Reward | None = None,
        config: GRPOConfig | None = None,
        out_dir: str | os.PathLike[str] = "runs/default",
        mesh: Hosts | None = None,
    ) -> None:
        self.reward = env_reward if reward is None else reward_of(reward)
        self._reward_settings = None if self.reward is env_reward else describe(reward)  # before it learns anything
        self.config, self.out_dir = config or GRPOConfig(), user_path(out_dir)
        self._hosts, self._given_policies = mesh or Hosts(), policies
        self._policies = policies_of(policies, self.config, self.out_dir)
        players = policies.values() if isinstance(policies, Mapping) else [getattr(policies, "policy", policies)]
        for policy in players:
            if isinstance(policy, Policy):
                self.config.learner_of(policy)  # refuses conflicting overrides
        self._state = RunState(self.reward, self._policies, self.config)
        self._checkpoints = Checkpoints(
            self.out_dir / "checkpoints",
            keep=self.config.keep_checkpoints,
            keep_best=True,
            parts=self._state.parts,
            timeout_s=self.config.stage_timeout_s,
        )
        self._lifecycle = Lifecycle(self.config, self.out_dir, self._hosts, self.reward, self._checkpoints)
        self._loop = LoopRunner(self._lifecycle.stop, self._checkpoints.standing)
        self._is_finished = False

    @named_arguments
    def fit(self, env: EnvLike, *, steps: int, env_args: dict[str, Any] | None = None) -> FitResult:
        """Train until the run has done `steps` optimizer steps, including those of earlier sessions in `out_dir`.

        Args:
            env: An id, an environment class, weights by id, or a `forge_agents.Curriculum` of levels.
            steps: Number of optimizer steps of the whole run. A learning rate schedule ends with them. A run that is
                continued with more steps follows the longer schedule.
            env_args: Arguments of the environment.

        Returns:
            Metrics and export. If every episode earns the maximum reward, or the highest reward seen, the run ends
            early, saved and exported, and the result has the reason.

        Raises:
            ArgumentError: A curriculum cannot tell success from failure or has no levels to choose from, or the range
                of an `EnvReward` is smaller than the environment's rewards.
            PreflightError: An environment, a prompt or the reward fails at once. See `GRPOConfig.preflight`.
            EmptyBatchError: `max_empty_steps` consecutive steps had no informative group, or, in the first step or in
                as many consecutive steps, every episode failed or nothing was sampled. The run is saved before.
                Another call continues with new seeds.
            DivergedError: Loss or gradient were not finite in two consecutive steps. The batches are saved to
                ``failed-batches``.
            MismatchError: Sampler and learner do not hold the same model. The batch is saved as well.
            KeyboardInterrupt: Ctrl-C. The step was finished and saved before.
            SystemExit: SIGTERM, with status 143; the same.
            RunFolderError: The disk has no room for a checkpoint, or the last checkpoint could not be written. Earlier
                ones only cause a warning.
        """
        if steps < 1:
            raise ValueError(f"steps={steps} trains nothing. Set at least 1")
        called, self._state.first_step_s = time.perf_counter(), None
        sampler = TaskSampler(env, env_args, hosts=self._hosts, progress=self._state.progress)
        check_env_rewards(self.reward, sampler.max_reward)
        plan = RunPlan(sampler, self._policies, self.config, self.reward)
        if isinstance(env, Curriculum):
            env.check_max_rewards(plan.max_rewards)
        return self._loop.run(self._fit(plan, steps, called))

    @named_arguments
    def evaluate(
        self,
        env: EnvLike,
        *,
        episodes: int | None = None,
        env_args: dict[str, Any] | None = None,
        reward: Reward | None = None,
    ) -> EvalResult:
        """Evaluate the current weights on at least `episodes` held-out episodes.

        Policies use their own sampling settings, with the final value of a temperature schedule. The state of the
        reward does not change. Each episode has its own seed, unless the reward compares episodes of a group, as
        `SelfConsistency` does: then each seed is used `group_size` times.

        Args:
            env: As in `fit`.
            episodes: Number of episodes, at least 1. None is `eval_episodes` of the config.
            env_args: Arguments of the environment.
            reward: Reward to measure. None is the reward of the run. `EvalResult.env_reward` has the environment's own
                reward in any case.
        """
        episodes = self.config.eval_episodes if episodes is None else episodes
        if episodes < 1:
            raise ValueError(f"episodes={episodes} measures nothing. Set at least 1")
        sampler = TaskSampler(env, env_args, hosts=self._hosts)
        measured = self.reward if reward is None else reward_of(reward)
        check_env_rewards(measured, sampler.max_reward)
        plan = RunPlan(sampler, self._policies, self.config, measured, partial=True)

        async def evaluated() -> EvalResult:
            self._check_resumable(plan)
            await self._lifecycle.preflight(plan, learn=False)
            await self._lifecycle.start(plan, learn=False)
            state = self._state.reward if reward is None else None
            return await Evaluator(plan, self._lifecycle.collector(plan), self._lifecycle, state).evaluate(episodes)

        return self._loop.run(evaluated())

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Export the trained weights in Hugging Face format, with one subfolder per policy if several are trained."""
        return self._loop.run(self._export(user_path(folder)))

    def fork(
        self, out_dir: str | os.PathLike[str], *, reward: Reward | None = None, config: GRPOConfig | None = None
    ) -> GRPOTrainer:
        """Return a trainer that starts from the same initial policies, such as a control run, and takes the engines.

        The engines do not start a second time. Close the new trainer as any other. This trainer, if used again, starts
        engines of its own.

        Args:
            out_dir: Folder of the new run.
            reward: Reward of the new run. None is this trainer's, with everything it has learned.
            config: Settings of the new run. None are this trainer's. Settings of the processes must be the same.

        Raises:
            ValueError: The settings of the processes differ.
            NotReadyError: The policies are a league, whose engines hold snapshots of its own run.
        """
        if isinstance(self._given_policies, League):
            raise NotReadyError("the engines of a league hold snapshots of its own run. Make another trainer instead")
        new = GRPOTrainer(
            self._given_policies, self.reward if reward is None else reward, config or self.config, out_dir, self._hosts
        )
        for name in ("engine", "learner_procs", "max_staleness", "colocate"):
            if (value := getattr(new.config, name)) != (current := getattr(self.config, name)):
                raise ValueError(
                    f"{name}={value!r} differs from {current!r} of the running processes. Use the same value, or make "
                    "another trainer instead of fork()"
                )
        processes = self._lifecycle.processes
        if processes is not None:
            self._loop.run(processes.fork(new.config, new.out_dir))
            new._lifecycle.processes, new._lifecycle.weights.is_current = processes, False
            new._loop, self._loop = self._loop, new._loop
            new._loop.hand_over(new._lifecycle.stop, new._checkpoints.standing)
            self._loop.hand_over(self._lifecycle.stop, self._checkpoints.standing)
            self._lifecycle.reset()
        return new

    def close(self) -> None:
        """Stop engines and learners."""
        self._loop.close()

    def __enter__(self) -> GRPOTrainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def _fit(self, plan: RunPlan, steps: int, called: float) -> FitResult:
        if not plan.trained:
            raise ValueError("no agent has a trainable policy. Give at least one fa.Policy(..., trainable=True)")
        self._check_resumable(plan)
        if not (self._lifecycle.next_step or self._checkpoints.any()):
            check_begins(self.out_dir)
        if (result := self._finished(plan, steps)) is not None:
            return result
        plan.make_games()
        await self._lifecycle.preflight(plan, learn=True)
        is_function = callable(self._given_policies) and not isinstance(self._given_policies, AnyPolicy)
        function = describe(self._given_policies) if is_function else None
        settings = plan.settings(reward=self._reward_settings, policy_function=function, steps=steps, hosts=self._hosts)
        self._checkpoints.measure, self._state.stopping.scoring = plan.measure(settings), plan.scoring(settings)
        run = RunFolder(self.out_dir, settings, tracker=self.config.tracker)
        with run, stalls_recorded(self.out_dir):
            while True:  # until the end of the run; again after the loss of a learner
                self._state.begin()
                try:
                    await self._lifecycle.start(plan, learn=True)
                    session = Session(plan, self._lifecycle, self._state, run, steps=steps, called=called)
                    return await session.train()
                except (ActorDiedError, StallError) as error:
                    lost = error
                finally:
                    self._lifecycle.messages.reset()
                    await self._lifecycle.weights.cancel()
                    await self._checkpoints.settle()
                if not await self._lifecycle.stop_lost_learners(lost):
                    raise lost

    def _check_resumable(self, plan: RunPlan) -> None:
        """Before anything starts, check that `out_dir` is no other program's, and that a run in it can continue."""
        check_is_run(self.out_dir)
        if self._lifecycle.next_step is None and self._checkpoints.any():  # also with the engines of another run
            plan.check_resumable(self.out_dir, self._checkpoints)

    def _finished(self, plan: RunPlan, steps: int) -> FitResult | None:
        """Return the result of a run that has done its steps, or None if something must be started."""
        export, curve, rows = (self.out_dir / name for name in ("export", "reward.png", "metrics.jsonl"))
        if self._lifecycle.processes is not None or not (export.is_dir() and rows.exists()):
            return None
        if not (done := self._checkpoints.finished(steps, plan.trained)):
            return None
        self._is_finished = True
        with startup.show() as say:
            say(f"{self.out_dir} has reached step {done} already: set steps above {done} to train, or another out_dir")
        image = curve if curve.exists() else None
        return FitResult(steps=done, metrics=read_rows(rows), out_dir=self.out_dir, export=export, curve=image)

    async def _export(self, folder: Path) -> Path:
        if self._lifecycle.processes is None and self._is_finished:
            from forge_trainers.learner.checkpoint import copy_exports  # imports torch

            await asyncio.to_thread(copy_exports, self.out_dir / "export", folder)
            return folder
        return await self._lifecycle.export(folder)
