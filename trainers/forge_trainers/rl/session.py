"""A session of training: the step, and everything around it, from the start of the processes to the end of the run."""

from __future__ import annotations

import logging
import time
from collections import Counter

from forge_agents.errors import ActorDiedError, EmptyBatchError, ForgeError, StallError
from forge_agents.runtime import startup
from forge_agents.runtime.interrupts import Interrupt
from forge_agents.runtime.threads import all_or_first_error
from forge_agents.runtime.watchdog import Watchdog
from forge_agents.types import EpisodeGroup, Reward
from forge_trainers.records.run_folder import FitResult, RunFolder
from forge_trainers.rl.config import GRPOConfig
from forge_trainers.rl.credit import Baselines
from forge_trainers.rl.curriculum import Progress
from forge_trainers.rl.evaluation import Evaluator
from forge_trainers.rl.failures import MANY_FULL_CONTEXTS, explain_full_contexts
from forge_trainers.rl.lifecycle import Lifecycle
from forge_trainers.rl.metrics import step_metrics
from forge_trainers.rl.plan import RunPlan
from forge_trainers.rl.policy_mapping import RunPolicies
from forge_trainers.rl.prefetch import Prefetch, TakenGroups
from forge_trainers.rl.report import log_step
from forge_trainers.rl.reward_state import RewardState
from forge_trainers.rl.rewards import all_rewards
from forge_trainers.rl.role_guard import RoleGuard, role_metrics
from forge_trainers.rl.samples import StepSamples, check_trained, compute_advantages, make_samples, pack_samples
from forge_trainers.rl.scoring import Scorer
from forge_trainers.rl.stopping import StoppingCriteria, StopReason
from forge_trainers.rl.tasks import ProcessRandomness
from forge_trainers.rl.train_step import train
from forge_trainers.run.console import Display
from forge_trainers.run.supervision import Stopwatch
from forge_verifiers.ensemble.ensemble import Ensemble

_log = logging.getLogger(__name__)


class RunState:
    """State of rewards, baselines, curriculum, league and random generators.

    Groups that were collected and scored ahead do not count until they are trained on: a resumed run collects them
    again.
    """

    def __init__(self, reward: Reward, policies: RunPolicies, config: GRPOConfig) -> None:
        ensembles = [part for part in all_rewards(reward) if isinstance(part, Ensemble)]
        self.reward, self.taken = RewardState(reward, ensembles), TakenGroups()
        self.baselines, self.progress = Baselines(), Progress()
        self.stopping, self.randomness = StoppingCriteria(config.max_empty_steps), ProcessRandomness()
        self.parts: dict[str, object] = {
            "reward": self.reward if self.reward.exists else None,
            "taken": self.taken,
            "baselines": self.baselines,
            "curriculum": self.progress,
            "stopping": self.stopping,
            "league": policies,
            "random": self.randomness,
        }
        """The parts of a checkpoint, by name."""
        self.skipped = Counter[str]()
        """Number of consecutive steps in which each policy skipped a batch. Not saved."""
        self.first_step_s: float | None = None
        """Seconds from the call of `fit` to the end of its first step. Not saved."""

    def begin(self) -> None:
        """Start a session: forget what was collected ahead and never trained on."""
        self.stopping.reset()
        self.reward.begin()
        self.taken.begin()
        self.skipped.clear()

    def settle(self, step: int) -> None:
        """Count `step` as trained: from here on, checkpoints include its rewards, groups and random draws."""
        if self.parts["reward"] is not None:
            self.reward.settle(step)
        self.taken.settle(step)
        self.randomness.settle()


class Session:
    """A sequence of steps with the same learners: to the end of the run, or until a learner is lost.

    `called` is the time of the call of `fit`, for `FitResult.first_step_s`.
    """

    def __init__(
        self, plan: RunPlan, lifecycle: Lifecycle, state: RunState, run: RunFolder, *, steps: int, called: float
    ) -> None:
        self.plan, self._config, self._lifecycle, self._state = plan, plan.config, lifecycle, state
        self._run, self._folder, self._num_steps, self._called = run, lifecycle.folder, steps, called
        self.processes = lifecycle.running
        self.collector = lifecycle.collector(plan)
        self.scorer = Scorer(plan, self.collector, lifecycle, state.reward, None if plan.uses_env_reward else run)
        self.prefetch = Prefetch(
            self.collector.collect,
            self.scorer.score,
            staleness=plan.config.max_staleness,
            steps=steps,
            size=plan.config.groups_per_step,
            taken=state.taken,
        )
        self.evaluator = Evaluator(plan, self.collector, lifecycle, state.reward)
        self._unsaved: int | None = None
        """Number of complete steps if the last is in no checkpoint, until the next one changes learners or state."""

    async def step(self, step: int, watch: Stopwatch) -> tuple[list[EpisodeGroup], StepSamples, dict[str, float]]:
        """Do one optimizer step. Returns its groups with advantages, its samples, and its metrics.

        `watch` measures the stages. Raises as soon as a learner is lost, also while episodes are collected.
        """
        config, processes, trained = self._config, self.processes, self.plan.trained
        batch, until_loss = self.prefetch.batch(step), processes.unless_a_learner_dies
        await self.collector.while_engines_answer(until_loss(batch.collected), f"collection of step {step + 1}")
        watch.lap("collect")
        groups = await until_loss(batch.scored)
        watch.lap("score")
        if resample_s := self.scorer.resample_s.pop(step, 0.0):
            watch.move(resample_s, source="score", target="resample")
        check_trained(groups, trained)
        self._unsaved = None
        groups = compute_advantages(groups, self.plan.credit, trained, self._state.baselines)
        samples = make_samples(
            groups,
            trained,
            max_tokens=processes.max_sample_tokens,
            size_of=self.plan.size_of,
            keep=self.plan.regularized,
        )
        watch.lap("score")
        batches = pack_samples(samples)
        learned = await train(
            batches,
            processes.learners,
            config,
            step=step + 1,
            folder=self._folder,
            temperatures={name: p.sampling.at_step(step).temperature for name, p in processes.policies.items()},
            skipped=self._state.skipped,
        )
        watch.lap("learn")
        if save_s := max((value for name, value in learned.items() if name.endswith("/save_wait_s")), default=0.0):
            watch.move(save_s, source="learn", target="save")
        await self._lifecycle.weights.publish(processes)
        watch.lap("sync")
        self._state.settle(step)
        self._lifecycle.next_step = step + 1
        league = await self.plan.policies.record(step, groups, processes)
        metrics = await step_metrics(self.plan, groups, samples, processes=processes, times=watch.times)
        return groups, samples, metrics | learned | league

    async def train(self) -> FitResult:
        """Do all steps from the newest checkpoint on, then export the weights."""
        first, learners = self._lifecycle.next_step or 0, self.processes.learners
        try:
            await all_or_first_error(learner.set_total_steps(self._num_steps) for learner in learners.values())
            self._run.rewind(first)
            self._run.keep_settings()
            display = Display("train", self._num_steps, first, learners)
            with display, startup.show(display.say), Interrupt(display.say) as interrupt, Watchdog():
                self._lifecycle.messages.say = display.say
                self._lifecycle.messages.announce(self.plan, learners, self._num_steps)
                display.resumed(first, self._run.changed)
                if others := self._lifecycle.checkpoints.other_measures():
                    display.say(
                        f"held-out rewards of {', '.join(others)} do not count for the best checkpoint, because they "
                        "were measured with other settings of environments, policies, reward or eval_episodes"
                    )
                try:
                    reason = await self._steps(range(first, self._num_steps), display, interrupt)
                except Exception as error:
                    await self._save_complete_steps(error)
                    raise
            await self._lifecycle.weights.done()
            return await self._result(max(first, self._lifecycle.next_step or 0), reason)
        finally:
            await self.prefetch.cancel()  # a resumed run collects these groups again

    async def _steps(self, steps: range, display: Display, interrupt: Interrupt) -> StopReason | None:
        """Do the steps, each with evaluation, records and checkpoint when due. Returns why the run ended early."""
        plan, learners, watch = self.plan, self.processes.learners, Stopwatch(self.processes.busy_s)
        keep_episodes, guard = self._config.keep_episodes, RoleGuard(self._run.metrics())
        warned_of_contexts = False
        for step in steps:
            groups, samples, metrics = await self.step(step, watch)
            watch = Stopwatch(self.processes.busy_s)  # the next step begins here
            last = step + 1 == steps.stop
            reason = self._state.stopping.after(step, groups, samples, plan.trained, plan.max_rewards, last=last)
            last = last or reason is not None
            metrics |= plan.sampler.record(groups, plan.trained, plan.max_rewards)
            metrics |= role_metrics(groups, plan.rewarded)  # distillation has no gradient from advantages
            warnings = guard.after(metrics, groups, plan.max_rewards)
            if metrics["out_of_context"] > MANY_FULL_CONTEXTS and not warned_of_contexts:
                warned_of_contexts = True
                warnings.append(explain_full_contexts(groups))
            for warning in warnings:
                display.say(f"warning: {warning}")
                self._run.warn(step + 1, warning)
            if (reason is None or reason.is_success) and self.evaluator.is_due(step, last=last):
                if not (last or interrupt.requested):
                    self.prefetch.batch(step + 1)  # on the same weights; the learner waits for both
                metrics |= await self.processes.unless_a_learner_dies(self.evaluator.metrics())
                watch.lap("evaluate")
            self._state.first_step_s = self._state.first_step_s or time.perf_counter() - self._called
            log_step(self._run, step, groups, samples, metrics, learners=learners, keep_episodes=keep_episodes)
            display.step(step, metrics)
            score = plan.checkpoint_score(metrics) if plan.config.eval_every else None
            stopping = interrupt.requested  # a signal that arrives during the checkpoint ends the next step
            saved = await self._checkpoint(step, last=last or stopping, score=score)
            self._unsaved = None if saved else step + 1
            if saved:
                watch.lap("save")
            if reason is not None:
                display.say(reason.reason)
                self._run.end(step + 1, reason.kind, reason.reason)
                return reason
            if stopping and not last:
                interrupt.stop_if_requested(step + 1, self._folder)
        return None

    async def _checkpoint(self, step: int, *, last: bool, score: float | None) -> bool:
        """Start a checkpoint after `step` if one is due, and wait for the last one. Returns whether it was due."""
        checkpoints = self._lifecycle.checkpoints
        due = last or (step + 1) % self._config.checkpoint_every == 0 or checkpoints.is_best(score)
        if due:
            await checkpoints.start(step + 1, self.processes.learners, score=score)
        if last:
            await checkpoints.finish()
        return due

    async def _save_complete_steps(self, error: Exception) -> None:
        """Write a checkpoint if the newest one misses a step. `error` ends the session."""
        learners = self.processes.learners
        lost = isinstance(error, ActorDiedError | StallError) and error.who in {each.name for each in learners.values()}
        if self._unsaved is None or lost:
            return
        try:
            await self._lifecycle.checkpoints.save(self._unsaved, learners)
        except ForgeError as cause:
            _log.warning("step %d was not saved: %s", self._unsaved, cause)
        else:
            self._lifecycle.messages.say(f"step {self._unsaved} was saved. The same call continues after it")

    async def _result(self, steps: int, reason: StopReason | None) -> FitResult:
        """Export the weights and return the result. Raises EmptyBatchError if the run ended without success."""
        learners = self.processes.learners
        if reason is not None and reason.kind == "broken":
            raise EmptyBatchError(reason.reason)
        if reason is None and (summary := self._state.stopping.summary(learners)):
            self._lifecycle.messages.say(summary)
        export = await self._lifecycle.export(self._folder / "export")
        curve = self._run.plot_rewards(learners)
        self._lifecycle.checkpoints.exported()
        if reason is not None and reason.kind == "uninformative":
            raise EmptyBatchError(
                f"{reason.reason}. The weights are exported to {export}. Another call continues the run with new seeds"
            )
        return FitResult(
            steps=steps,
            metrics=self._run.metrics(),
            out_dir=self._folder,
            export=export,
            curve=curve,
            reason="" if reason is None else reason.reason,
            first_step_s=self._state.first_step_s,
        )
