"""The preflight check: tries environments, prompts and the reward in seconds, before any engine starts."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from forge_agents.envs.env import TextGame
from forge_agents.envs.seeds import HELD_OUT_FROM
from forge_agents.errors import USER_ERRORS, PreflightError
from forge_agents.models import families
from forge_agents.models import resolve as models
from forge_agents.policy import AnyPolicy, Oracle, Policy, Random, Scripted
from forge_agents.rollout.conversation import Conversation
from forge_agents.rollout.rendering import Renderer
from forge_agents.runtime.mesh import dividing_gpus, with_deadline
from forge_agents.runtime.stalls import stack
from forge_agents.runtime.threads import in_thread
from forge_agents.runtime.watchdog import BLOCK_TIMEOUT_S, Watchdog
from forge_agents.types import Episode, EpisodeGroup, Reward, Trajectory, Turn
from forge_trainers.rl.config import GRPOConfig
from forge_trainers.rl.counterfactual import try_fork
from forge_trainers.rl.failures import describe_error, describe_exception, explain_idle, file_of
from forge_trainers.rl.rewards import assess, is_env_reward, leaf_rewards, reward_name
from forge_trainers.rl.tasks import ProcessRandomness, Task, TaskSampler
from forge_trainers.run.checkpoints import Stateful
from forge_verifiers.core.functions import describe_function, info_keys, name_of
from forge_verifiers.core.verifier import Composable, ScoreError, assessed, declared_judges

FinishReward: TypeAlias = Callable[[], Awaitable[None]]
"""Waits for a call of the reward that is still running."""
SEED = HELD_OUT_FROM - 1
"""Seed of the episodes: the largest training seed, almost never drawn in training. Some games accept no larger
seeds."""
SEEDS = 8
"""Number of seeds, counted down, with which an environment may fail before its first decision."""
EPISODES = 2
"""Number of episodes of each environment."""
BUDGET_S = 3.0
"""Time limit of random play, and of the wait for the reward."""
REPORT_S = 10.0
"""Time after which an environment that blocks the thread, so that `BUDGET_S` cannot end it, is reported."""
_MISTAKES = ("ImportError", "ModuleNotFoundError", "NameError", "NotImplementedError", "UnboundLocalError")
"""Errors that no text of a player can cause. Violations of a contract by a game count as mistakes, too. Its base class
raises them. Other errors may be caused by random actions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """A preflight check."""

    sampler: TaskSampler
    mapping: Callable[[Sequence[str], int], Mapping[str, AnyPolicy]]
    """Returns the policy of each agent, given the agents and the seed of an episode."""
    models: Mapping[str, Policy]
    """The policies that need an engine, by name."""
    reward: Reward
    config: GRPOConfig
    say: Callable[[str], None]
    """Shows a message."""

    async def run(self) -> FinishReward | None:
        """Run all checks. Returns a function that waits for the reward if it is still running, or None.

        Raises:
            PreflightError: An environment fails before its first decision with every seed, or by a mistake that no
                action can cause; no first prompt fits the context; the reward does not return one number per
                trajectory, or raises because of such a mistake.
            StallError: An environment blocked the event loop for `watchdog.BLOCK_TIMEOUT_S`.
        """
        started, randomness = time.monotonic(), ProcessRandomness()
        state = randomness.state_dict()
        try:
            with Watchdog():
                groups = await self._play(started + BUDGET_S)
            finish = await self._call_reward(groups)
        finally:
            randomness.load_state_dict(state)  # training draws the same random numbers as without the check
        count, seconds = sum(len(group.episodes) for group in groups), time.monotonic() - started
        if count:
            self.say(f"preflight: {count} episode{'s' * (count != 1)} of random players took {seconds:.1f} s")
        self._check_prompts(groups)
        return finish

    # ---- random play

    async def _play(self, until: float) -> list[EpisodeGroup]:
        """Collect a group of each environment while there is time, with random players in place of models."""
        groups, skipped = [], []
        for env_id in self.sampler.env_ids:
            if time.monotonic() > until:
                skipped.append(env_id)
            elif env_id in self.sampler.isolated:
                self.say(f"preflight: skipped {env_id}, which runs in worker processes")
            elif self.sampler.make_s[env_id] > BUDGET_S:
                self.say(f"preflight: skipped {env_id}, which takes {self.sampler.make_s[env_id]:.0f} s to construct")
            else:
                with _reporting_a_block(env_id, self.say):
                    groups += await self._first_group(env_id, until)
        if skipped:
            self.say(f"preflight: out of time, skipped {len(skipped)} environments, the first of them {skipped[0]}")
        return groups

    async def _first_group(self, env_id: str, until: float) -> list[EpisodeGroup]:
        """Collect one group with the first seed that reaches a decision, or none if there is no time left."""
        first = ""
        for seed in range(SEED, SEED - SEEDS, -1):
            if (group := await self._group(env_id, seed, until)) is None:  # out of time
                return []
            errors = [episode.error for episode in group.episodes if episode.error is not None]
            if not errors:
                if self.config.credit_rule.baseline == "counterfactual":
                    try_fork(partial(self.sampler.make, env_id), env_id, seed)
                self._report_programs(env_id, group)
                self._report_idle(env_id, group)
                return [group]
            all_failed, first = len(errors) == len(group.episodes), describe_error(errors[0])
            failure = f"{len(errors)} of {len(group.episodes)} episodes of random players failed in {env_id}"
            if all_failed and (errors[0].kind in _MISTAKES or file_of(errors[0]) == inspect.getsourcefile(TextGame)):
                raise PreflightError(f"{failure}: {first}")
            if not all_failed or any(episode.turns for episode in group.episodes):
                advice = ". Let the game accept any text: training drops groups with failed episodes"
                self.say(f"preflight: {failure}, as a model's may: {first}{advice * (errors[0].where == 'step')}")
                return [group]
        raise PreflightError(f"{env_id} fails before any decision, with all of {SEEDS} seeds: {first}")

    def _report_idle(self, env_id: str, group: EpisodeGroup) -> None:
        """Report trainable policies that had no turn, and who ended the episodes."""
        for name, policy in self.models.items():
            trajectories = [trajectory for trajectory in group.trajectories if trajectory.policy == name]
            if policy.trainable and trajectories and not any(trajectory.turns for trajectory in trajectories):
                reason = explain_idle(group.episodes, [name])
                self.say(f"preflight: {env_id}: {reason}. Random players take the place of models here")

    def _report_programs(self, env_id: str, group: EpisodeGroup) -> None:
        """Report errors of programs. Such errors end an episode with a reward like any other."""
        errors = [episode.program_error for episode in group.episodes if episode.program_error]
        if not errors:
            return
        failure = f"the program of {env_id} failed in {len(errors)} of {len(group.episodes)} episodes of random players"
        if len(errors) == len(group.episodes) and errors[0].partition(":")[0] in _MISTAKES:
            raise PreflightError(f"{failure}: {errors[0]}")
        self.say(f"preflight: {failure}, as it may with a model's answers: {errors[0]}")

    async def _group(self, env_id: str, seed: int, until: float) -> EpisodeGroup | None:
        agents = self.sampler.agents[env_id]
        policies = {
            agent: policy if isinstance(policy, Scripted | Oracle) else Random(name=policy.name)
            for agent, policy in self.mapping(agents, seed).items()
        }
        task = Task(env_id=env_id, seed=seed, agents=agents, number=0)
        rollout = self.sampler.rollout(task, policies, {})
        episodes: list[Episode] = []
        limit = asyncio.timeout(until - time.monotonic())
        try:
            with warnings.catch_warnings():  # random players take the place of models, whose text may well be legal
                warnings.filterwarnings("ignore", message=".* does not always list legal actions")
                async with limit:  # one by one: an environment that blocks the thread runs once before the time is up
                    for _ in range(EPISODES):
                        await asyncio.sleep(0)
                        episodes += (await rollout.group(seed, 1)).episodes
        except TimeoutError:
            if not limit.expired():
                raise
            advice = ""
            if env_id not in self.sampler.isolated:
                advice = '. While it computes or sleeps all other episodes wait, unless it has isolation="process"'
            self.say(
                f"preflight: {env_id} is slow; {len(episodes)} of {EPISODES} episodes ended in {BUDGET_S:g} s"
                f"{', so it is not checked' * (not episodes)}{advice}"
            )
        return EpisodeGroup(env_id=env_id, seed=seed, episodes=tuple(episodes)) if episodes else None

    # ---- prompts

    def _check_prompts(self, groups: Sequence[EpisodeGroup]) -> None:
        """Check that the first prompts of each model, and a later one, fit its context."""
        played = [trajectory for group in groups for trajectory in group.trajectories if trajectory.turns]
        for name, policy in self.models.items():
            if trajectories := [trajectory for trajectory in played if trajectory.policy == name]:
                self._check_prompts_of(name, policy, trajectories)

    def _check_prompts_of(self, name: str, policy: Policy, trajectories: Sequence[Trajectory]) -> None:
        folder = models.resolve(policy.model)
        context = self.config.engine.max_model_len or families.context_of(folder)
        try:
            renderer = Renderer.of(folder, thinking=policy.thinking)
        except ValueError as cause:
            raise PreflightError(f"policy {name} cannot play: {cause}") from cause
        counts = [len(self._first_prompt(renderer, trajectory)) for trajectory in trajectories]
        if context is None:
            return
        longest, answer = max(counts), policy.sampling.max_tokens
        example = trajectories[counts.index(longest)]
        instructions = len(renderer.start(example.instructions, "")) - len(renderer.start("", ""))
        prompt = f"{longest} tokens, {instructions} of them instructions ({example.agent} in {example.env_id})"
        if min(counts) >= context:
            raise PreflightError(
                f"no first prompt of policy {name} leaves room for an answer in its context of {context} tokens. The "
                f"longest has {prompt}. Raise engine.max_model_len, or shorten instructions and observations"
            )
        if longest + answer > context:
            self.say(
                f"preflight: the context of {name} holds {context} tokens. The longest first prompt has {prompt}, "
                f"which leaves {max(0, context - longest) or 'none'} of max_tokens={answer} for the first answer"
            )
        conversation = Conversation(renderer, limit=context, max_tokens=answer, context=policy.context)
        if conversation.drops_turns and longest + conversation.least_free > context:
            self.say(
                f"preflight: when the context of {name} ({context} tokens) is full, context={policy.context!r} cannot "
                f"continue and episodes end out of context: the longest first prompt, which is kept, has {prompt}, and "
                f"{conversation.least_free} tokens must stay free. Raise engine.max_model_len, or shorten both"
            )

    def _first_prompt(self, renderer: Renderer, trajectory: Trajectory) -> tuple[int, ...]:
        """Render the first prompt, and check that a second one can be rendered."""
        first, *later = trajectory.turns
        try:
            prompt = renderer.start(trajectory.instructions, first.observation)
            if later:
                renderer.extend(prompt, (renderer.eos_id,), later[0].observation)
        except ValueError as cause:
            raise PreflightError(
                f"the prompt of {trajectory.agent} in {trajectory.env_id} cannot be rendered: {cause}"
            ) from cause
        return prompt

    # ---- the reward

    async def _call_reward(self, groups: Sequence[EpisodeGroup]) -> FinishReward | None:
        """Call the cheap parts of the reward, and restore their state afterwards."""
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        if not trajectories or is_env_reward(self.reward):
            return None
        leaves = list(leaf_rewards(self.reward))
        cheap = [(leaf, in_ensemble) for leaf, in_ensemble in leaves if _is_cheap(leaf)]
        if len(cheap) < len(leaves):
            names = ", ".join(_name(leaf) for leaf, _ in leaves if not _is_cheap(leaf))
            self.say(f"preflight: skipped rewards that need a model or a sandbox: {names}")

        def call() -> None:
            with dividing_gpus():  # a function may call a judge that it does not declare
                for leaf, in_ensemble in cheap:
                    _try(leaf, trajectories, in_ensemble=in_ensemble, say=self.say)

        calling = asyncio.ensure_future(in_thread(call, name="preflight of the reward"))
        await asyncio.wait({calling}, timeout=BUDGET_S)
        if calling.done():
            calling.result()
            return None
        self.say(f"preflight: the reward takes more than {BUDGET_S:g} s. It continues while engines start")
        who, timeout_s = f"reward {reward_name(self.reward)}", self.config.stage_timeout_s
        calling.add_done_callback(lambda done: done.cancelled() or done.exception())  # the result may never be read
        return partial(with_deadline, calling, timeout_s, who=who, what="scoring")


@contextlib.contextmanager
def _reporting_a_block(env_id: str, say: Callable[[str], None]) -> Iterator[None]:
    """Report where this thread is if the block takes `REPORT_S`, because an environment may block it much longer."""
    thread = threading.get_ident()

    def report() -> None:
        place = "".join(stack(sys._current_frames().get(thread))[-1:])
        say(
            f"preflight: {env_id} has been running for {REPORT_S:g} s, now at {place}. Code that blocks is interrupted "
            f"after {BLOCK_TIMEOUT_S:g} s"
        )

    timer = threading.Timer(REPORT_S, report)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _name(reward: Any) -> str:
    return str(getattr(reward, "name", None) or name_of(reward))


def _is_cheap(leaf: Any) -> bool:
    return getattr(leaf, "cost", "cheap") == "cheap" and not declared_judges(leaf)


def _try(leaf: Any, trajectories: Sequence[Trajectory], *, in_ensemble: bool, say: Callable[[str], None]) -> None:
    """Call one part of the reward, and restore its state. In an ensemble, a call that raises is an abstention."""
    name = _name(leaf)
    state = copy.deepcopy(leaf.state_dict()) if isinstance(leaf, Stateful) else None
    try:
        is_verifier = isinstance(leaf, Composable)
        assessment = assessed(leaf, trajectories) if is_verifier else assess(leaf, trajectories, name)
        count = f"{len(trajectories)} trajectories of random play"
        if assessment.failed and is_verifier:  # failures of other rewards were logged by `assess`
            failed = assessment.failed
            say(f"preflight: reward {name} fails on {len(failed)} of {count}: {next(iter(failed.values()))}")
        elif not assessment.failed and np.isnan(assessment.scores).all():
            say(f"preflight: reward {name} abstains from all {count}, whose info has {info_keys(trajectories[0])}")
    except USER_ERRORS as error:
        subject = f"reward {name}" if isinstance(leaf, Composable) else f"reward {describe_function(leaf)}"
        if _scores_one(leaf, trajectories[0]):
            raise PreflightError(
                f"{subject} scores one trajectory, but gets a list of all: call its parameter `trajectory`, or return "
                f"one number per trajectory. It raised: {describe_exception(error)}"
            ) from error
        if _is_mistake(error) and not (in_ensemble and not isinstance(error, ScoreError)):
            raise PreflightError(f"{subject} fails: {describe_exception(error)}") from error
        say(f"preflight: {subject} fails on random play, and may on a model's: {describe_exception(error)}")
    finally:
        if state is not None:
            leaf.load_state_dict(state)


def _is_mistake(error: BaseException) -> bool:
    """Return whether an error does not depend on the trajectories, such as an unknown name or attribute."""
    if isinstance(error, ScoreError | NameError | ImportError | NotImplementedError):
        return True
    if isinstance(error, AttributeError):
        owner = error.obj[0] if isinstance(error.obj, list | tuple) and error.obj else error.obj
        return isinstance(owner, Trajectory | Turn)  # and not a list that a player wrote as JSON
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    return innermost == inspect.getsourcefile(assess)


def _scores_one(reward: Any, trajectory: Trajectory) -> bool:
    """Return whether a function for all trajectories returns a number for one trajectory."""
    if callable(getattr(reward, "assess", None)):
        return False
    try:
        value = reward(trajectory)
        return value is not None and np.ndim(np.asarray(value, np.float64)) == 0
    except Exception:  # noqa: BLE001  # a user's function; its first error is reported
        return False
