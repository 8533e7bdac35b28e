"""Starts, restores, hands over and stops the processes of a trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path

from forge_agents.display import visible
from forge_agents.errors import ActorDiedError, NotReadyError, StallError
from forge_agents.runtime import startup
from forge_agents.runtime.hosts import Hosts
from forge_agents.runtime.threads import all_or_first_error
from forge_agents.types import Reward
from forge_trainers.records.trackers import check_installed
from forge_trainers.rl.collect import Collector
from forge_trainers.rl.config import GRPOConfig
from forge_trainers.rl.plan import RunPlan
from forge_trainers.rl.preflight import FinishReward, Preflight
from forge_trainers.rl.report import Messages
from forge_trainers.rl.rewards import engines_of, models_of
from forge_trainers.rl.weight_sync import WeightSync
from forge_trainers.run.checkpoints import Checkpoints
from forge_trainers.run.processes import Processes


class Lifecycle:
    """The processes of a trainer, from the preflight check to the end, and what all calls of the trainer share."""

    def __init__(
        self, config: GRPOConfig, folder: Path, hosts: Hosts, reward: Reward, checkpoints: Checkpoints
    ) -> None:
        self.folder, self.checkpoints = folder, checkpoints
        self._config, self._hosts, self._reward = config, hosts, reward
        self.processes: Processes | None = None
        """None until something was started."""
        self.next_step: int | None = None
        """Step to continue from. None until a checkpoint was restored or training started."""
        self.weights = WeightSync(config.max_staleness, config.stage_timeout_s)
        self.messages = Messages()
        self._finish_reward: FinishReward | None = None
        """A reward call of the preflight check that is still running."""
        self.reset()

    def reset(self) -> None:
        """Forget the processes. The next call starts new ones, maybe in another event loop."""
        self.processes, self.next_step = None, None
        self.weights.reset()
        self.episode_limit = asyncio.Semaphore(self._config.max_concurrent_episodes)
        self.reward_lock = asyncio.Lock()
        """Held during a call of the reward, because rewards may have a state."""

    @property
    def running(self) -> Processes:
        """The running processes. Raises NotReadyError if nothing was started."""
        if self.processes is None:
            raise NotReadyError("nothing is running yet. Call fit or evaluate first")
        return self.processes

    async def preflight(self, plan: RunPlan, *, learn: bool) -> None:
        """Run the preflight check, unless the processes that it would save are running already."""
        running = self.processes is not None and (not learn or bool(self.processes.learners))
        if running or not self._config.preflight:
            return
        with startup.show() as say:
            say(f"{', '.join(plan.sampler.env_ids)} with {', '.join(plan.models) or 'no model'}; {self.folder}")
            if learn:
                check_installed(self._config.tracker)
                trained = [plan.models[name] for name in plan.trained]
                self.checkpoints.check_room([(policy, self._config.learner_of(policy)) for policy in trained], say)
            self._finish_reward = await Preflight(
                sampler=plan.sampler,
                mapping=plan.policies.mapping,
                models=plan.models,
                reward=plan.reward,
                config=self._config,
                say=lambda text: say(visible(text)),
            ).run()

    async def start(self, plan: RunPlan, *, learn: bool) -> Processes:
        """Return the running processes, with the weights of the run in the folder if there is one.

        Learners start if something is or was trained, also if the engines were taken over from another run.
        """
        needs_learners = learn or self.checkpoints.any() or not self.weights.is_current
        restores = self.next_step is None and needs_learners
        first_evaluation = self.processes is None and not learn and bool(plan.trained)
        with startup.show():
            if self.processes is None:
                self.processes = await Processes.start(
                    plan.loaded,
                    self._config,
                    folder=self.folder,
                    hosts=self._hosts,
                    learn=restores,
                    judges=engines_of(self._reward),
                    held=models_of(self._reward),
                )
            elif restores:
                await self.processes.start_learners(plan.loaded)
        processes = self.running
        if self._finish_reward is not None:  # before the reward gets the state of the run
            finish, self._finish_reward = self._finish_reward, None
            await finish()
        if restores:
            self.next_step = await self.checkpoints.restore(processes.learners)
            if self.next_step or processes.faults.all:  # engines may be ahead of a learner that died
                self.weights.is_current = False
        if first_evaluation:
            with startup.show() as say:
                done = self.next_step
                weights = f"the weights after step {done}" if done else "the start models (there is no checkpoint)"
                say(f"{self.folder}: evaluating {weights}")
        await self.weights.refresh(processes)
        return processes

    def collector(self, plan: RunPlan) -> Collector:
        """Return a collector for the running engines."""
        return Collector(plan, self.running, weights=self.weights, limit=self.episode_limit, messages=self.messages)

    async def export(self, folder: Path) -> Path:
        """Export the trained weights, with one subfolder per policy if several are trained."""
        learners = self.running.learners
        if not learners:
            raise NotReadyError("nothing has been trained yet. Call fit first")
        await all_or_first_error(
            learner.export(folder if len(learners) == 1 else folder / name, timeout_s=self._config.stage_timeout_s)
            for name, learner in learners.items()
        )
        return folder

    async def stop_lost_learners(self, error: ActorDiedError | StallError) -> bool:
        """After the loss of a learner, stop all of them. Returns whether training may continue from a checkpoint."""
        if self.processes is None or not await self.processes.stop_learners_after(error):
            return False
        self.next_step = None
        return True

    async def stop(self) -> None:
        """Stop all processes."""
        processes = self.processes
        self.reset()
        if processes is not None:
            await processes.stop()
