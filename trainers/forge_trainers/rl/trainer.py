"""GRPO over multi-agent episodes: `GRPOTrainer.fit`.

    play --> judge --> credit --> pack --> train --> publish --> record
      ^                                                |
      +----------------- weights, one version newer ---+

`_step` is that loop's body. In: seats, a reward, an environment. Out: better weights and a run folder. Waits for
engines, the reward and learners, each stage with a deadline. `max_staleness` lets playing and judging run ahead of the
learner; beside an evaluation the next step is played. `examples/rl_loop.py` is the same loop without a class.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from forge_agents.display import visible
from forge_agents.errors import ActorDiedError, EmptyBatchError, ModelNotFoundError, NotReadyError, StallError
from forge_agents.files import user_path
from forge_agents.policy import AnyPolicy, Policy, PolicyMapping
from forge_agents.rollout.players import PolicyEngine
from forge_agents.runtime import startup
from forge_agents.runtime.hosts import Hosts
from forge_agents.runtime.interrupts import Interrupt, LoopRunner
from forge_agents.runtime.mesh import with_deadline
from forge_agents.runtime.threads import all_or_first_error
from forge_agents.settings import named_arguments
from forge_agents.types import EpisodeBatch, EpisodeGroup, Reward
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.records.description import describe
from forge_trainers.records.run_folder import FitResult, RunFolder, check_resumable, hashes_of_models, read_rows
from forge_trainers.records.trackers import check_installed
from forge_trainers.rl.config import GRPOConfig
from forge_trainers.rl.credit import Baselines
from forge_trainers.rl.curriculum import Curriculum, Practice
from forge_trainers.rl.endings import Ending, Endings, most_of, nothing_played, where_it_failed, without_turns
from forge_trainers.rl.evaluation import (
    EvalResult,
    compares_groups,
    eval_metrics,
    eval_result,
    is_env_reward,
    policies_without_turns,
    reward_name,
    unchanged,
)
from forge_trainers.rl.pipeline import Background, Batch, Pipeline, Put, TakenGroups
from forge_trainers.rl.preflight import Preflight, Rest
from forge_trainers.rl.rewards import (
    JudgedGroup,
    check_env_rewards,
    engines_of,
    env_reward,
    group_spread,
    judge,
    models_of,
    rates,
    summarise,
)
from forge_trainers.rl.run_settings import run_settings
from forge_trainers.rl.seating import PlayGroup, check_trainable, seating_of, seats_at
from forge_trainers.rl.tasks import EnvLike, Task, TaskSampler
from forge_trainers.rl.update import StepSamples, credit_groups, pack_samples, train
from forge_trainers.run.checkpoints import Checkpoints, ProcessRandomness, RewardState
from forge_trainers.run.console import Display
from forge_trainers.run.learner_settings import rate_line, record_rates, resolved_settings, weak_rates
from forge_trainers.run.processes import Processes
from forge_trainers.run.supervision import Stopwatch, Watchdog, stalls_recorded
from forge_trainers.selfplay.league import League
from forge_verifiers.core.verifier import reward_of

_log = logging.getLogger(__name__)
T = TypeVar("T")


Judged: TypeAlias = tuple[list[JudgedGroup], float]
"""Groups with their rewards, and the seconds in which those of them were played that replace others."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What a step leaves."""

    judged: Sequence[JudgedGroup]
    samples: StepSamples
    metrics: Mapping[str, float]


class GRPOTrainer:
    """Trains the trainable policies of a team with GRPO, by default in DAPO's variant (arXiv 2503.14476).

    GRPO as published (arXiv 2402.03300) is ``fa.LearnerConfig(loss="grpo")``; other losses are chosen in the same way.

    Args:
        policies: One policy for all seats, a policy per seat, a function ``(agent, episode_seed) -> policy``, or a
            league: a policy that plays against its own past.
        reward: Trajectories to float ``[n]``, NaN where it abstains; or a function of one, or of its text, see
            `forge_verifiers.core.functions.parse_signature`. None is the environment's own reward.
        config: Settings.
        out_dir: The run's folder. Where it holds a run already, training continues from its newest checkpoint.
        mesh: Where processes run; None: on this host.

    Engines and learners start with the first call that needs them and stop with `close`, at the end of a ``with``
    block or of the program.
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
        self._hosts, self._given = mesh or Hosts(), policies
        self._seating = seating_of(policies, self.config, self.out_dir)
        players = policies.values() if isinstance(policies, Mapping) else [getattr(policies, "policy", policies)]
        for policy in players:
            if isinstance(policy, Policy):
                self.config.learner_of(policy)  # refuses overrides that do not hold
        self._processes: Processes | None = None
        self._live = asyncio.Semaphore(self.config.max_concurrent_episodes)
        self._scoring = asyncio.Lock()
        """Held while the reward is asked, by a step of training or an evaluation: it may have a state."""
        self._weights, self._synced = Background(), True  # engines start with the weights that learners start with
        self._reward_state, self._taken = RewardState(self.reward), TakenGroups()
        self._baselines, self._endings = Baselines(), Endings(self.config.max_empty_steps)
        self._skipped = Counter[str]()
        self._practice, self._randomness = Practice(), ProcessRandomness()
        self._say: Callable[[str], None] = _log.warning
        self._checkpoints = Checkpoints(
            self.out_dir / "checkpoints",
            keep=self.config.keep_checkpoints,
            keep_best=self.config.keep_best,
            parts={
                "reward": self._reward_state if self._reward_state.any else None,
                "taken": self._taken,
                "baselines": self._baselines,
                "curriculum": self._practice,
                "endings": self._endings,
                "league": self._seating,
                "random": self._randomness,
            },
            timeout_s=self.config.stage_timeout_s,
        )
        self._loop = LoopRunner(self._stop, self._checkpoints.standing)
        self._watch = Stopwatch()
        self._next_step: int | None = None
        self._announced_failure = self._over = False
        self._called = 0.0
        self._first_step_s: float | None = None
        """From when `fit` was `_called`."""
        self._tried: Rest | None = None
        """A preflight that is not over."""

    @named_arguments
    def fit(self, env: EnvLike, *, steps: int, env_args: dict[str, Any] | None = None) -> FitResult:
        """Train until the run has done `steps` optimiser steps, earlier sessions in `out_dir` included.

        Args:
            env: An id, an environment class, weights by id, or a `forge_agents.Curriculum` of levels.
            steps: Of the whole run. A learning rate that falls ends with them; a run that is continued with more
                goes on at the rate of the longer schedule.
            env_args: Arguments of the environment.

        Returns:
            What was done. Where nothing is left to learn because every episode earns the most there is, or the highest
            that was seen, the run is over before its steps are, saved and exported, and the result has the reason.

        Raises:
            ArgumentError: A curriculum cannot tell success from failure, or has nothing to choose from; or an
                `EnvReward` has a smaller range than the environment pays.
            PreflightError: An environment, a prompt or the reward fails at once; see `GRPOConfig.preflight`.
            EmptyBatchError: `max_empty_steps` in a row had no group to learn from; or in the first step, or that many
                in a row, every episode failed or nothing was sampled. The run is saved before; another call goes on
                with new seeds.
            DivergedError: Loss or gradient were not finite in more than `max_skipped_steps` steps in a row; the batches
                are kept in ``failed-batches``.
            MismatchError: Sampler and learner do not hold the same model; the batch is kept there too.
            KeyboardInterrupt: Ctrl-C; the step was finished and saved before.
            SystemExit: SIGTERM, with status 143; the same.
            RunFolderError: The disk has no room for a checkpoint, or the last one could not be written; one before it
                only costs a warning.
        """
        if steps < 1:
            raise ValueError(f"steps={steps} trains nothing; set at least 1")
        self._called, self._first_step_s = time.perf_counter(), None
        sampler = TaskSampler(env, env_args, hosts=self._hosts, practice=self._practice)
        check_env_rewards(self.reward, sampler.max_reward)
        if isinstance(env, Curriculum):
            env.check_tops(self._tops(sampler))
        return self._loop.run(self._fit(sampler, steps))

    @named_arguments
    def evaluate(
        self, env: EnvLike, *, episodes: int = 64, env_args: dict[str, Any] | None = None, reward: Reward | None = None
    ) -> EvalResult:
        """Play at least `episodes` held-out episodes with the current weights, at the policies' own sampling.

        A temperature that moves in training is at its end here. What the reward has learned stays as it is. Each
        episode has a seed of its own, unless the reward compares episodes of a group, as `SelfConsistency` does: then
        seeds are played `group_size` times.

        Args:
            env: As in `fit`.
            episodes: Number of episodes, at least 1.
            env_args: Arguments of the environment.
            reward: The reward that is measured; None is the reward of the run. The environment's own reward is in
                `EvalResult.env_reward` in any case.
        """
        if episodes < 1:
            raise ValueError(f"episodes={episodes} measures nothing; set at least 1")
        sampler = TaskSampler(env, env_args, hosts=self._hosts)
        measured = self.reward if reward is None else reward_of(reward)
        check_env_rewards(measured, sampler.max_reward)

        async def tried_and_played() -> EvalResult:
            self._check_resumable(sampler, part=True)
            await self._preflight(sampler, measured, learn=False)
            return await self._evaluate(sampler, episodes, measured)

        return self._loop.run(tried_and_played())

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Export the trained weights in Hugging Face format; one subfolder per policy where several are trained."""
        return self._loop.run(self._export(user_path(folder)))

    def fork(
        self, out_dir: str | os.PathLike[str], *, reward: Reward | None = None, config: GRPOConfig | None = None
    ) -> GRPOTrainer:
        """A trainer of the same policies from where they began, such as a control, which takes over the engines.

        They need not start a second time. Close it as any other; this one starts engines of its own where it is used
        again.

        Args:
            out_dir: The other run's folder.
            reward: What it learns from; None is this one's, with what it has learned so far.
            config: Its settings; None are this one's. What says how processes run is the same.

        Raises:
            ValueError: It is not.
            NotReadyError: The policies are a league, whose engines hold its own past.
        """
        if isinstance(self._given, League):
            raise NotReadyError("the engines of a league hold snapshots of its own run; make another trainer instead")
        made = GRPOTrainer(
            self._given, self.reward if reward is None else reward, config or self.config, out_dir, self._hosts
        )
        for name in ("engine", "learner_procs", "max_staleness", "colocate"):
            if (asked := getattr(made.config, name)) != (had := getattr(self.config, name)):
                raise ValueError(
                    f"{name}={asked!r} is not that of the processes that run, {had!r}; set it alike, or make another "
                    "trainer instead of fork()"
                )
        if self._processes is not None:
            self._loop.run(self._processes.fork(made.config, made.out_dir))
            made._processes, made._synced = self._processes, False
            made._loop, self._loop = self._loop, made._loop
            made._loop.hand_over(made._stop, made._checkpoints.standing)
            self._loop.hand_over(self._stop, self._checkpoints.standing)
            self._leave()
        return made

    def close(self) -> None:
        """Stop engines and learners."""
        self._loop.close()

    def __enter__(self) -> GRPOTrainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- one step: its stages, in order

    async def _step(self, step: int, batch: Batch[EpisodeGroup, Judged]) -> StepRecord:
        """One optimiser step; `batch` is played and judged on weights at most `max_staleness` versions old."""
        await self._play(step, batch)
        judged = await self._judge(batch)
        samples = self._credit(judged)
        batches = self._pack(samples)
        learned = await self._train(step, batches)
        await self._publish()
        return await self._record(step, judged, samples, learned)

    async def _play(self, step: int, batch: Batch[EpisodeGroup, Judged]) -> None:
        """Wait until the groups of the step are played; `_play_groups` plays them."""
        playing = self._running.unless_a_learner_dies(batch.groups)
        await self._while_it_plays(playing, f"collection of step {step + 1}")
        self._watch.lap("collect")

    async def _judge(self, batch: Batch[EpisodeGroup, Judged]) -> list[JudgedGroup]:
        """Those groups with their rewards, and others in place of some that teach nothing: see `_judge_groups`."""
        judged, resampled_s = await self._running.unless_a_learner_dies(batch.judged)
        self._watch.lap("score")
        if resampled_s:
            self._watch.part("resample", "score", resampled_s)
        return judged

    def _credit(self, judged: Sequence[JudgedGroup]) -> StepSamples:
        """Advantages of every turn, and the samples that trajectories make with them."""
        rule, room, size_of = self.config.credit_rule, self._running.room, self.config.size_of
        trained = self._running.learners.keys()
        samples = credit_groups(judged, rule, trained, self._baselines, room=room, size_of=size_of)
        self._watch.lap("score")
        return samples

    def _pack(self, samples: StepSamples) -> dict[str, EpisodeBatch]:
        """A batch for each policy that has something to learn."""
        return pack_samples(samples, max_bad_logprobs=self.config.max_bad_logprobs)

    async def _train(self, step: int, batches: Mapping[str, EpisodeBatch]) -> dict[str, float]:
        """Metrics of one optimiser step of each of those policies."""
        heat = {name: one.sampling.at_step(step).temperature for name, one in self._running.policies.items()}
        learners = self._running.learners
        metrics = await train(
            batches,
            learners,
            self.config,
            step=step + 1,
            folder=self.out_dir,
            temperatures=heat,
            skipped=self._skipped,
        )
        self._watch.lap("learn")
        if waited_s := max((value for name, value in metrics.items() if name.endswith("/save_wait_s")), default=0.0):
            self._watch.part("save", "learn", waited_s)
        return metrics

    async def _publish(self) -> None:
        """Send the learners' weights on their way to the engines; who must not sample from older ones waits."""
        await self._weights.start(self._sync)
        if self.config.max_staleness == 0:
            await self._weights.done()
        self._watch.lap("sync")

    async def _record(
        self, step: int, judged: Sequence[JudgedGroup], samples: StepSamples, learned: Mapping[str, float]
    ) -> StepRecord:
        """From here on the step counts as learned: for what is saved of reward and draws, groups owed, the league."""
        self._reward_state.settle(step)
        self._taken.settle(step)
        self._randomness.settle()
        self._next_step = step + 1
        learners = self._running.learners
        metrics = summarise(self._seating.measured(judged), learners)
        if not is_env_reward(self.reward):
            paid = await judge([item.group for item in judged])
            metrics["env_reward/mean"] = summarise(self._seating.measured(paid), learners)["reward/mean"]
        metrics |= group_spread(judged, self.config.groups_per_step) | samples.metrics(learners)
        metrics |= learned
        metrics |= await self._seating.record(step, judged, self._running)
        metrics |= await self._running.engines_memory()
        metrics |= self._watch.times | rates([item.group for item in judged], self._watch.total_s)
        return StepRecord(judged=judged, samples=samples, metrics=metrics)

    # ---- around it: sessions, restarts, the end

    async def _preflight(self, sampler: TaskSampler, reward: Reward, *, learn: bool) -> None:
        """Try in seconds what would fail later, unless what it would save a start of runs already."""
        running = self._processes is not None and (not learn or bool(self._processes.learners))
        if running or not self.config.preflight:
            return
        policies = self._models(sampler, part=not learn)
        with startup.show() as say:
            say(f"{', '.join(sampler.env_ids)} with {', '.join(policies) or 'no model'}; {self.out_dir}")
            if learn:
                check_installed(self.config.tracker)
                learning = [(one, self.config.learner_of(one)) for one in policies.values() if one.trainable]
                self._checkpoints.check_room(learning, say)
            self._tried = await Preflight(
                sampler=sampler,
                seated=self._seating.seated,
                models=policies,
                reward=reward,
                config=self.config,
                say=lambda text: say(visible(text)),
            ).run()

    async def _fit(self, sampler: TaskSampler, steps: int) -> FitResult:
        self._check_resumable(sampler)
        if (over := self._finished(sampler, steps)) is not None:
            return over
        await self._preflight(sampler, self.reward, learn=True)
        settings = self._settings(sampler, steps)
        run = RunFolder(self.out_dir, settings, tracker=self.config.tracker)
        with run, stalls_recorded(self.out_dir):
            while True:
                try:
                    return await self._session(sampler, steps, run)
                except (ActorDiedError, StallError) as error:
                    if self._processes is None or not await self._processes.stop_learners_after(error):
                        raise
                    self._next_step = None  # the newest checkpoint says where to go on

    def _settings(self, sampler: TaskSampler, steps: int) -> dict[str, Any]:
        """What config.yaml says of the run."""
        rates = {name: one.lr for name, one in self._resolved(self._models(sampler)).items() if one.lr is not None}
        players = self._seating.declared(sampler.seats)
        chosen = describe(self._given) if callable(self._given) and not isinstance(self._given, AnyPolicy) else None
        settings = run_settings(
            sampler,
            players,
            self.config,
            reward=self._reward_settings,
            seats=chosen,
            steps=steps,
            hosts=self._hosts,
        )
        return record_rates(settings, rates) | {"policy_mapping": self._sitting(sampler)} | self._seating.settings()

    def _check_resumable(self, sampler: TaskSampler, *, part: bool = False) -> None:
        """Refuse what the run in `out_dir` cannot go on with, before anything starts.

        Raises:
            RunFolderError: Another adapter, other start weights, other policies, or a reward with another state.
        """
        if self._processes is not None or not self._checkpoints.any():
            return
        trained = {name: one for name, one in self._models(sampler, part=part).items() if one.trainable}
        settings = {
            "method": "grpo",
            "policies": {name: dataclasses.asdict(policy) for name, policy in trained.items()},
            "weights": hashes_of_models(trained),
        }
        fixed = ["method", *(key for name in trained for key in (f"policies.{name}.lora", f"weights.{name}"))]
        check_resumable(self.out_dir, settings, fixed)
        self._checkpoints.check_resumable(trained)

    def _ranks_checkpoints(self, sampler: TaskSampler, trained: Collection[str]) -> bool:
        """Whether a higher held-out reward means better policies."""
        return not (is_env_reward(self.reward) and self._seating.is_zero_sum_self_play(sampler, trained))

    def _score(self, sampler: TaskSampler, metrics: Mapping[str, float]) -> float | None:
        """The held-out reward that checkpoints are ranked by; None without an evaluation, and where it ranks none."""
        reward = metrics.get("eval/reward")
        return reward if reward is not None and self._ranks_checkpoints(sampler, self._running.learners) else None

    def _tops(self, sampler: TaskSampler) -> dict[str, float | None]:
        """The most that can be earned, by environment; None where nobody says it."""
        return {env_id: most_of(self.reward, sampler.max_reward[env_id]) for env_id in sampler.env_ids}

    def _finished(self, sampler: TaskSampler, steps: int) -> FitResult | None:
        """What a run came to that has done its steps; None where something has to be started."""
        export, curve, rows = (self.out_dir / name for name in ("export", "reward.png", "metrics.jsonl"))
        if self._processes is not None or not (export.is_dir() and rows.exists()):
            return None
        trained = [name for name, policy in self._models(sampler).items() if policy.trainable]
        if not (done := self._checkpoints.finished(steps, trained)):
            return None
        self._over = True
        with startup.show() as say:
            say(f"{self.out_dir} has done {done} steps already: set steps above {done} to train on, or another out_dir")
        shown = curve if curve.exists() else None
        return FitResult(steps=done, metrics=read_rows(rows), out_dir=self.out_dir, export=export, curve=shown)

    async def _session(self, sampler: TaskSampler, steps: int, run: RunFolder) -> FitResult:
        """Train to the end of the run, or of a learner."""
        ending: Ending | None = None
        for kept in (self._endings, self._reward_state, self._taken):
            kept.begin()
        self._skipped.clear()
        pipeline = self._pipeline(sampler, steps, run)
        try:
            processes = await self._started(sampler, learn=True)
            first = self._next_step or 0
            await all_or_first_error(learner.set_total_steps(steps) for learner in processes.learners.values())
            run.rewind(first)
            run.keep_settings()
            tops = self._tops(sampler)
            display = Display("train", steps, first, processes.learners)
            watching = startup.show(display.say), Watchdog(self.config.block_timeout_s)
            with display, watching[0], Interrupt(display.say) as interrupt, watching[1]:
                self._announce_seats(display.say, sampler, processes, steps)
                if first:
                    display.say(f"goes on after step {first}")
                    if run.changed:
                        display.say(f"settings have changed: {run.changed}; config.previous.yaml has the old ones")
                self._watch = Stopwatch(processes.busy_s)
                for step in range(first, steps):
                    record = await self._step(step, pipeline.batch(step))
                    self._watch = Stopwatch(processes.busy_s)  # the next step begins here
                    ending = self._endings.after(
                        step, record.judged, record.samples, processes.learners, tops, last=step + 1 == steps
                    )
                    over, metrics = ending is not None or step + 1 == steps, dict(record.metrics)
                    metrics |= sampler.record(record.judged, processes.learners, tops)
                    evaluated = (ending is None or ending.well) and self._evaluates_after(step, over)
                    if evaluated:
                        if not (over or interrupt.requested):
                            pipeline.batch(step + 1)  # both are played on these weights: the next ones come after both
                        metrics |= await processes.unless_a_learner_dies(self._evaluation(sampler))
                        self._watch.lap("evaluate")
                    self._log(run, step, record.judged, record.samples, metrics)
                    display.step(step, metrics)
                    last = over or interrupt.requested
                    if await self._save(step, last, self._score(sampler, metrics)):
                        self._watch.lap("save")
                    if ending is not None:
                        display.say(ending.reason)
                        run.end(step + 1, ending.kind, ending.reason)
                        break
                    if last and not over:
                        interrupt.stop_if_requested(step + 1, self.out_dir)
            await self._weights.done()
            return await self._result(run, max(first, self._next_step or 0), ending)
        finally:
            self._say = _log.warning
            await pipeline.cancel()  # what was played ahead is played again, by the seeds of its step
            self._synced = await self._weights.cancel() and self._synced
            await self._checkpoints.settle()

    async def _save(self, step: int, last: bool, score: float | None) -> bool:
        """Write a checkpoint after `step` where one is due; whether it was. The last step's is all there then."""
        due = last or (step + 1) % self.config.checkpoint_every == 0 or self._checkpoints.is_best(score)
        if due:
            await self._checkpoints.start(step + 1, self._running.learners, score=score)
        if last:
            await self._checkpoints.finish()
        return due

    async def _result(self, run: RunFolder, steps: int, ending: Ending | None) -> FitResult:
        """Export what was learned, and say how the run ended.

        Raises:
            EmptyBatchError: Not well.
        """
        if ending is not None and ending.kind == "broken":
            raise EmptyBatchError(ending.reason)
        if ending is None and (remark := self._endings.remark(self._running.learners)):
            self._say(remark)
        export, curve = await self._export(self.out_dir / "export"), run.plot_rewards(self._running.learners)
        self._checkpoints.exported()
        if ending is not None and ending.kind == "uninformative":
            raise EmptyBatchError(
                f"{ending.reason}. What was learned before is in {export}; the same run goes on with new seeds"
            )
        reason = "" if ending is None else ending.reason
        return FitResult(
            steps=steps,
            metrics=run.metrics(),
            out_dir=self.out_dir,
            export=export,
            curve=curve,
            reason=reason,
            first_step_s=self._first_step_s,
        )

    # ---- playing and judging, which may run ahead of the step

    def _pipeline(self, sampler: TaskSampler, steps: int, run: RunFolder) -> Pipeline[EpisodeGroup, Judged]:
        staleness, size = self.config.max_staleness, self.config.groups_per_step

        async def play(step: int, put: Put[EpisodeGroup]) -> None:
            await self._play_groups(sampler, step, put, only=self._taken.missing(step, size))

        async def judge_them(step: int, groups: list[EpisodeGroup]) -> Judged:
            async with self._scoring:
                self._reward_state.judging(step)
                found = await self._judge_groups(sampler, step, groups, self._running.learners)
                self._reward_state.judged(step)
                run.keep_verifiers(step + 1, self.reward)
                return found

        return Pipeline(play, judge_them, staleness=staleness, steps=steps, size=size, taken=self._taken)

    async def _play_groups(
        self,
        sampler: TaskSampler,
        step: int,
        put: Put[EpisodeGroup] | None = None,
        *,
        count: int = 0,
        resample: int = 0,
        only: Collection[int] | None = None,
    ) -> list[EpisodeGroup]:
        """Play groups of one step: all, or `only` some, or `count` of its resample. `put` hears when each ends."""
        config = self.config
        await self._weights.done()  # samples of the weights before would be older than the pipeline reckons
        tasks = sampler.tasks(config.seed, step, count or config.groups_per_step, resample=resample)
        tasks = [task for task in tasks if only is None or task.number in only]
        if not tasks:
            return []
        where = f"{config.seed}/{step}/{resample}"  # a resumed run samples what it would have
        group = self._group(sampler, config.group_size, where, put, step)
        return await self._seating.play(tasks, group, self._running, step=step, resample=resample)

    async def _judge_groups(
        self, sampler: TaskSampler, step: int, groups: list[EpisodeGroup], trainable: Collection[str]
    ) -> Judged:
        """Judged groups, those that replace the ones that teach nothing, and for how long these were played."""
        config, judged = self.config, await judge(groups, self.reward, timeout_s=self.config.stage_timeout_s)
        playing_s = 0.0
        for resample in range(1, config.resamples + 1):
            # Without `_baselines`, whose running means may take in a step's rewards only once.
            found = credit_groups(judged, config.credit_rule, trainable, room=self._running.room)
            missing = config.groups_per_step - found.counts["used"]
            if not missing or nothing_played(judged, trainable):
                break
            playing = self._play_groups(sampler, step, count=missing, resample=resample)
            started = time.perf_counter()
            more = await self._while_it_plays(playing, f"resample of step {step + 1}")
            playing_s += time.perf_counter() - started
            judged += await judge(more, self.reward, timeout_s=config.stage_timeout_s)
        return judged, playing_s

    def _group(
        self,
        sampler: TaskSampler,
        size: int,
        where: str,
        put: Put[EpisodeGroup] | None = None,
        step: int | None = None,
    ) -> PlayGroup:
        """Plays `size` siblings of a task, of a step of training or none; `where` and the task name what is sampled."""

        async def play(task: Task, seats: PolicyMapping, served: Mapping[str, PolicyEngine]) -> EpisodeGroup:
            seats = seats if step is None else seats_at(seats, step)
            rollout = sampler.rollout(task, seats, served, max_turns=self.config.max_turns)
            group = await rollout.group(task.seed, size, limit=self._live, rng_key=f"{where}/{task.number}")
            self._announce_failure(group)
            if put is not None:
                put(task.number, group)
            return group

        return play

    async def _while_it_plays(self, playing: Awaitable[T], what: str) -> T:
        """What is played; many long episodes may take long, as long as engines answer."""
        what = f"{what} (no engine has answered meanwhile: stage_timeout_s)"
        heartbeat_timeout_s = self.config.stage_timeout_s
        return await with_deadline(
            playing, heartbeat_timeout_s, progress=lambda: self._running.answers, who="episodes", what=what
        )

    async def _sync(self, published: Callable[[], None] = lambda: None) -> None:
        await with_deadline(self._running.sync(published), self.config.stage_timeout_s, who="weights", what="return")

    # ---- evaluation and export

    def _evaluates_after(self, step: int, over: bool) -> bool:
        every = self.config.eval_every
        return bool(every) and (over or (step + 1) % every == 0)

    async def _evaluation(self, sampler: TaskSampler) -> dict[str, float]:
        """Metrics of the present weights; whoever waits for it leaves them as they are meanwhile."""
        found = eval_metrics(await self._evaluate(sampler, self.config.eval_episodes, self.reward))
        if samples := self.config.exploitability_samples:
            from forge_agents.bench.exploitability import exploited

            trained = {name: self._models(sampler)[name] for name in self._running.learners}
            asking = exploited(sampler.env_ids, trained, self._running.policy_engines, samples=samples)
            found |= await self._while_it_plays(asking, "exploitability")
        return found

    async def _evaluate(self, sampler: TaskSampler, episodes: int, reward: Reward) -> EvalResult:
        await self._started(sampler, learn=False)
        await self._weights.done()
        size = min(self.config.group_size, episodes) if compares_groups(reward) else 1
        group = self._group(sampler, size, f"{self.config.seed}/held-out")
        playing = self._seating.play_held_out(sampler.held_out(-(-episodes // size)), group, self._running)
        groups = await self._while_it_plays(playing, "evaluation")
        paid = scored = await judge(groups)
        if not is_env_reward(reward):
            async with self._scoring:
                with unchanged(reward):
                    scored = await judge(groups, reward, timeout_s=self.config.stage_timeout_s)
        trained = [name for name, policy in self._models(sampler, part=True).items() if policy.trainable]
        played = [episode for group in groups for episode in group.episodes if episode.error is None]
        if idle := policies_without_turns(played, trained):
            self._say(f"held-out episodes do not measure {', '.join(idle)}: {without_turns(played, idle)}")
        count = self._seating.measured
        return eval_result(groups, count(scored), count(paid), trained, idle=idle, scored_by=reward_name(reward))

    async def _export(self, folder: Path) -> Path:
        if self._processes is None and self._over:
            export = self.out_dir / "export"
            return Path(shutil.copytree(export, folder, copy_function=shutil.copyfile, dirs_exist_ok=True))
        learners = self._running.learners
        if not learners:
            raise NotReadyError("nothing has been trained yet; call fit first")
        await all_or_first_error(
            learner.export(folder if len(learners) == 1 else folder / name, timeout_s=self.config.stage_timeout_s)
            for name, learner in learners.items()
        )
        return folder

    # ---- processes and what is said of them

    async def _started(self, sampler: TaskSampler, *, learn: bool) -> Processes:
        """The running processes; where `out_dir` holds a run, with its weights.

        Learners start when something is learned, or has been, also where engines were taken over from another run.
        """
        policies = self._models(sampler, part=not learn)
        if learn and not any(policy.trainable for policy in policies.values()):
            raise ValueError("no seat holds a trainable policy; give at least one fa.Policy(..., trainable=True)")
        begins = self._next_step is None and (learn or self._checkpoints.any() or not self._synced)
        first_evaluation = self._processes is None and not learn and any(one.trainable for one in policies.values())
        with startup.show():
            if self._processes is None:
                self._processes = await Processes.start(
                    policies,
                    self.config,
                    folder=self.out_dir,
                    hosts=self._hosts,
                    learn=begins,
                    judges=engines_of(self.reward),
                    held=models_of(self.reward),
                )
            elif begins:
                await self._processes.start_learners()
        if self._tried is not None:  # before the reward's state is that of the run
            tried, self._tried = self._tried, None
            await tried()
        if begins:
            self._next_step = await self._checkpoints.restore(self._processes.learners)
            if self._next_step or self._processes.faults.all:  # engines may be ahead of a learner that died
                self._synced = False
        if first_evaluation:
            with startup.show() as say:
                done = self._next_step
                weights = f"the weights after step {done}" if done else "the start models, since there is no checkpoint"
                say(f"{self.out_dir}: evaluates {weights}")
        if not self._synced:
            await self._sync()
            self._synced = True
        return self._processes

    @property
    def _running(self) -> Processes:
        if self._processes is None:
            raise NotReadyError("nothing is running yet; call fit or evaluate first")
        return self._processes

    def _models(self, sampler: TaskSampler, *, part: bool = False) -> dict[str, Policy]:
        declared = self._seating.declared(sampler.seats, part=part)
        models = {name: policy for name, policy in declared.items() if isinstance(policy, Policy)}
        self._seating.check_oracles(sampler, declared)
        check_trainable(models, self.config.max_staleness)
        for policy in models.values():
            self.config.learner_of(policy)  # refuses overrides that do not hold
        return models

    def _resolved(self, policies: Mapping[str, Policy]) -> dict[str, LearnerConfig]:
        """Learner settings of trainable policies, rates resolved; empty if a model is missing: the start reports it."""
        try:
            return resolved_settings(policies, self.config)
        except ModelNotFoundError:
            return {}

    def _sitting(self, sampler: TaskSampler) -> dict[str, str]:
        """The model of each seat, also by the names that a program has for it; of several the one that learns."""
        models = self._models(sampler)
        found: dict[str, list[str]] = {}
        for name in sorted(models, key=lambda name: not models[name].trainable):
            for agent in self._seating.roles(sampler.seats).get(name, ()):
                found.setdefault(agent, []).append(name)
        sits = {
            agent: names[0]
            for agent, names in found.items()
            if len(names) == 1 or [models[name].trainable for name in names[:2]] == [True, False]
        }
        return sits | {name: sits[seat] for name, seat in sampler.asked_for.items() if seat in sits}

    def _announce_seats(
        self, say: Callable[[str], None], sampler: TaskSampler, processes: Processes, steps: int
    ) -> None:
        """Say who plays which agents, which share a learner, and how they are evaluated; later lines go to `say`."""
        self._say = say
        models = self._models(sampler)
        resolved = self._resolved(models)
        for name, agents in self._seating.roles(sampler.seats).items():
            learner = processes.learners.get(name)
            told = "is not trained" if learner is None else f"is trained by {learner.name}"
            if name in resolved:
                told += ", " + rate_line(resolved[name], chosen=self.config.learner_of(models[name]).lr is not None)
            say(f"{', '.join(agents)}: policy {name} {told}")
        for warning in weak_rates(resolved, steps):
            say(warning)
        if self.config.eval_every and not self._ranks_checkpoints(sampler, processes.learners):
            say(
                "all agents of a zero-sum game are trained, so the mean held-out reward (eval/reward) is constant and "
                "does not rank checkpoints: the newest counts as the best. Compare exported models with fa.benchmark"
            )
        if self.config.eval_every and not is_env_reward(self.reward):
            say(
                f"held-out episodes are scored by the run's reward, {reward_name(self.reward)} (eval/reward), and "
                "keep_best goes by it; eval/env_reward is what the environment pays"
            )

    def _announce_failure(self, group: EpisodeGroup) -> None:
        """Say at once that an episode failed, the first of this trainer's."""
        if group.failed and not self._announced_failure and group.failed[0].error is not None:
            self._announced_failure = True
            self._say(
                f"an episode of {group.env_id} failed: {where_it_failed(group.failed[0].error)}. Its trace is in "
                "episodes.jsonl; more failures are counted"
            )

    def _log(
        self, run: RunFolder, step: int, judged: Sequence[JudgedGroup], samples: StepSamples, metrics: dict[str, float]
    ) -> None:
        self._first_step_s = self._first_step_s or time.perf_counter() - self._called
        run.log(step + 1, metrics)
        rows = [
            (episode, item.episode_rewards(sibling), samples.advantages.get((number, sibling), {}))
            for number, item in enumerate(judged)
            for sibling, episode in enumerate(item.group.episodes)
        ]
        rows.sort(key=lambda row: row[0].error is None)  # what failed is worth reading first
        kept = rows[: self.config.keep_episodes]
        episodes, rewards, advantages = zip(*kept, strict=True) if kept else ((), (), ())
        run.keep_episodes(step + 1, episodes, rewards, advantages, trained=self._running.learners)

    async def _stop(self) -> None:
        processes = self._processes
        self._leave()
        if processes is not None:
            await processes.stop()

    def _leave(self) -> None:
        """The next call starts anew, maybe in another loop."""
        self._processes = None
        self._live, self._weights = asyncio.Semaphore(self.config.max_concurrent_episodes), Background()
        self._scoring = asyncio.Lock()
        self._next_step, self._synced = None, True
