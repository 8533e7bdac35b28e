"""Tries in seconds, before any engine starts, what would fail once they run: environments, prompts and the reward.

In: a run's environments, seats, reward and settings. Out: nothing, a `PreflightError` that names file and line, and
lines about what was seen or left out. Waits for a few seconds of random play; a reward that takes longer goes on while
engines start.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from forge_agents.envs.env import TextGame
from forge_agents.envs.seeds import HELD_OUT_FROM
from forge_agents.errors import PreflightError
from forge_agents.models import resolve as models
from forge_agents.policy import AnyPolicy, Oracle, Policy, Random, Scripted
from forge_agents.rollout.conversation import Conversation
from forge_agents.rollout.rendering import Renderer
from forge_agents.runtime.mesh import dividing_gpus, with_deadline
from forge_agents.runtime.threads import in_thread
from forge_agents.types import Episode, EpisodeGroup, Reward, Trajectory, Turn
from forge_trainers.rl.config import GRPOConfig
from forge_trainers.rl.endings import raised_in, where_it_failed, where_it_raised, without_turns
from forge_trainers.rl.rewards import EnvTurnReward, asked, env_reward, parts_of
from forge_trainers.rl.tasks import Task, TaskSampler
from forge_trainers.run.checkpoints import ProcessRandomness, Stateful
from forge_trainers.run.supervision import Watchdog
from forge_verifiers.core.functions import describe_function, info_keys, name_of
from forge_verifiers.core.verifier import Composable, ScoreError, assessed, declared_judges

Rest: TypeAlias = Callable[[], Awaitable[None]]
SEED = HELD_OUT_FROM - 1
"""Of the episodes that are played, the largest that training may draw, and once in billions does: there are games that
take none of more bits."""
SEEDS = 8
"""Seeds, counted down, with which an environment may fail before its first decision; one may fail with some."""
SIBLINGS = 2
"""Episodes of each environment."""
BUDGET_S = 3.0
"""Seconds of play after which nothing more is begun, and seconds that a reward is waited for."""
_MISTAKES = ("ImportError", "ModuleNotFoundError", "NameError", "NotImplementedError", "UnboundLocalError")
"""No text that a player writes brings these about, nor what a game returns against the contract of its base, which that
raises; others count as data, as they do in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What is tried."""

    sampler: TaskSampler
    seated: Callable[[Sequence[str], int], Mapping[str, AnyPolicy]]
    """Who sits where in an episode, of its seats and seed."""
    models: Mapping[str, Policy]
    """Those that get an engine, by name."""
    reward: Reward
    config: GRPOConfig
    say: Callable[[str], None]
    """Shows a line."""

    async def run(self) -> Rest | None:
        """Try all of it.

        Returns:
            None, or the rest, where the reward is not done: call it before anybody else asks the reward.

        Raises:
            PreflightError: An environment fails before its first decision with every seed, or by a mistake that no
                action brings about; no first prompt fits the context; the reward does not return one number per
                trajectory, or raises by such a mistake.
            StallError: An environment held the thread for `block_timeout_s`.
        """
        started, randomness = time.monotonic(), ProcessRandomness()
        before = randomness.state_dict()
        try:
            with Watchdog(self.config.block_timeout_s):
                groups = await self._play(started + BUDGET_S)
            rest = await self._ask(groups)
        finally:
            randomness.load_state_dict(before)  # training draws what it would have drawn
        count, seconds = sum(len(group.episodes) for group in groups), time.monotonic() - started
        if count:
            self.say(f"preflight: {count} episode{'s' * (count != 1)} of random players took {seconds:.1f} s")
        self._check_prompts(groups)
        return rest

    # ---- random play

    async def _play(self, until: float) -> list[EpisodeGroup]:
        """A group of each environment for which there is time, with random players for models, people and servers."""
        groups, late = [], []
        for env_id in self.sampler.env_ids:
            if time.monotonic() > until:
                late.append(env_id)
            elif env_id in self.sampler.isolated:
                self.say(f"preflight: {env_id} plays in worker processes and is left out")
            elif self.sampler.make_s[env_id] > BUDGET_S:
                self.say(f"preflight: making {env_id} takes {self.sampler.make_s[env_id]:.0f} s; it is left out")
            else:
                groups += await self._group_of(env_id, until)
        if late:
            self.say(f"preflight: time is up; {len(late)} environments are left out, the first of them {late[0]}")
        return groups

    async def _group_of(self, env_id: str, until: float) -> list[EpisodeGroup]:
        """One group, of the first seed with which the environment comes to a decision; none where time is up.

        Raises:
            PreflightError: It does so with none of several seeds, or fails by a mistake.
        """
        first = ""
        for seed in range(SEED, SEED - SEEDS, -1):
            if (group := await self._group(env_id, seed, until)) is None:  # time is up
                return []
            errors = [episode.error for episode in group.episodes if episode.error is not None]
            if not errors:
                self._tell_of_programs(env_id, group)
                self._tell_of_idle(env_id, group)
                return [group]
            all_failed, first = len(errors) == len(group.episodes), where_it_failed(errors[0])
            told = f"{len(errors)} of {len(group.episodes)} episodes of random players failed in {env_id}"
            if all_failed and (errors[0].kind in _MISTAKES or raised_in(errors[0]) == inspect.getsourcefile(TextGame)):
                raise PreflightError(f"{told}: {first}")
            if not all_failed or any(episode.turns for episode in group.episodes):
                advice = ". Let the game answer whatever is written: an episode that fails teaches nothing"
                self.say(f"preflight: {told}, as a model's may: {first}{advice * (errors[0].where == 'step')}")
                return [group]
        raise PreflightError(f"{env_id} fails before any decision, with all of {SEEDS} seeds: {first}")

    def _tell_of_idle(self, env_id: str, group: EpisodeGroup) -> None:
        """Name the trainable policies that had no turn, and who ended the episodes before."""
        for name, policy in self.models.items():
            own = [trajectory for trajectory in group.trajectories if trajectory.policy == name]
            if policy.trainable and own and not any(trajectory.turns for trajectory in own):
                told = without_turns(group.episodes, [name])
                self.say(f"preflight: {env_id}: {told}. Random players stand in for models here")

    def _tell_of_programs(self, env_id: str, group: EpisodeGroup) -> None:
        """What programs raised, which ends an episode with a reward like any other.

        Raises:
            PreflightError: All did, by a mistake that no answer brings about.
        """
        raised = [episode.program_error for episode in group.episodes if episode.program_error]
        if not raised:
            return
        told = f"the program of {env_id} failed in {len(raised)} of {len(group.episodes)} episodes of random players"
        if len(raised) == len(group.episodes) and raised[0].partition(":")[0] in _MISTAKES:
            raise PreflightError(f"{told}: {raised[0]}")
        self.say(f"preflight: {told}, as it may with a model's answers: {raised[0]}")

    async def _group(self, env_id: str, seed: int, until: float) -> EpisodeGroup | None:
        agents = self.sampler.seats[env_id]
        seats = {
            agent: policy if isinstance(policy, Scripted | Oracle) else Random(name=policy.name)
            for agent, policy in self.seated(agents, seed).items()
        }
        task = Task(env_id=env_id, seed=seed, agents=agents, number=0)
        rollout = self.sampler.rollout(task, seats, {}, max_turns=self.config.max_turns)
        episodes: list[Episode] = []
        limit = asyncio.timeout(until - time.monotonic())
        try:
            with warnings.catch_warnings():  # random players stand in for models, whose text may well be legal
                warnings.filterwarnings("ignore", message=".* does not always list legal actions")
                async with limit:  # one by one: what blocks the thread is asked once before the time is looked at
                    for _ in range(SIBLINGS):
                        await asyncio.sleep(0)
                        episodes += (await rollout.group(seed, 1)).episodes
        except TimeoutError:
            if not limit.expired():
                raise
            advice = ""
            if env_id not in self.sampler.isolated:
                advice = '; while it computes or sleeps all others wait, unless it has isolation="process"'
            self.say(
                f"preflight: {env_id} is slow; {len(episodes)} of {SIBLINGS} episodes ended in {BUDGET_S:g} s{advice}"
            )
        return EpisodeGroup(env_id=env_id, seed=seed, episodes=tuple(episodes)) if episodes else None

    # ---- prompts

    def _check_prompts(self, groups: Sequence[EpisodeGroup]) -> None:
        """First prompts, as the models will read them, against their context; and one that follows."""
        played = [trajectory for group in groups for trajectory in group.trajectories if trajectory.turns]
        for name, policy in self.models.items():
            own = [trajectory for trajectory in played if trajectory.policy == name]
            if not own:
                continue
            folder = models.resolve(policy.model)
            room = self.config.engine.max_model_len or models.context_of(folder)
            try:
                renderer = Renderer.of(folder, thinking=policy.thinking)
            except ValueError as cause:
                raise PreflightError(f"policy {name} cannot play: {cause}") from cause
            counts = [len(self._rendered(renderer, trajectory, policy)) for trajectory in own]
            if room is None:
                continue
            most, wanted = max(counts), policy.sampling.max_tokens
            where = own[counts.index(most)]
            told = len(renderer.start(where.instructions, "")) - len(renderer.start("", ""))
            of = f"of {where.agent} in {where.env_id}: {most} tokens, of which {told}"
            if min(counts) >= room:
                raise PreflightError(
                    f"no first prompt of policy {name} leaves room for an answer in its context of {room} tokens. The "
                    f"longest is that {of} are instructions. Raise engine.max_model_len, or shorten instructions and "
                    "observations"
                )
            if most + wanted > room:
                self.say(
                    f"preflight: the context of {name} holds {room} tokens; the longest first prompt is that {of} are "
                    f"instructions, which leaves {max(0, room - most) or 'none'} of max_tokens={wanted} for the first "
                    "answer"
                )
            talk = Conversation(renderer, limit=room, max_tokens=wanted, context=policy.context)
            if policy.context != "end" and most + talk.least_free > room:
                self.say(
                    f"preflight: when the {room} tokens of {name} are used up, context={policy.context!r} cannot go on "
                    f"and episodes end out of context: the longest first prompt, which is kept, is that {of} are "
                    f"instructions, and {talk.least_free} must stay free. Raise engine.max_model_len, or shorten both"
                )

    def _rendered(self, renderer: Renderer, trajectory: Trajectory, policy: Policy) -> tuple[int, ...]:
        """The first prompt."""
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

    async def _ask(self, groups: Sequence[EpisodeGroup]) -> Rest | None:
        """Ask the reward's parts that cost little, each of which is put back as it was."""
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        if not trajectories or self.reward is env_reward or isinstance(self.reward, EnvTurnReward):
            return None
        parts = list(parts_of(self.reward))
        due = [(part, within) for part, within in parts if _is_cheap(part)]
        if len(due) < len(parts):
            names = ", ".join(_name(part) for part, _ in parts if not _is_cheap(part))
            self.say(f"preflight: not asked, because they need a model or a sandbox: {names}")

        def ask() -> None:
            with dividing_gpus():  # a function may ask a judge that it does not name
                for part, within in due:
                    _try(part, trajectories, within=within, say=self.say)

        asking = asyncio.ensure_future(in_thread(ask, name="preflight of the reward"))
        await asyncio.wait({asking}, timeout=BUDGET_S)
        if asking.done():
            asking.result()
            return None
        self.say(f"preflight: the reward is not done after {BUDGET_S:g} s; it goes on while engines start")
        who, timeout_s = f"reward {_name(self.reward)}", self.config.stage_timeout_s
        asking.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may come to ask for it
        return partial(with_deadline, asking, timeout_s, who=who, what="scoring")


def _name(reward: Any) -> str:
    return str(getattr(reward, "name", None) or name_of(reward))


def _is_cheap(part: Any) -> bool:
    return getattr(part, "cost", "cheap") == "cheap" and not declared_judges(part)


def _try(part: Any, trajectories: Sequence[Trajectory], *, within: bool, say: Callable[[str], None]) -> None:
    """Ask one part, and put it back as it was.

    Args:
        part: A verifier, or any reward.
        trajectories: All that were played.
        within: It is an ensemble's, which takes a call that raises for a verifier that says nothing.
        say: Shows a line.
    """
    name = _name(part)
    state = copy.deepcopy(part.state_dict()) if isinstance(part, Stateful) else None
    try:
        found = assessed(part, trajectories) if isinstance(part, Composable) else asked(part, trajectories, name)
        of = f"{len(trajectories)} trajectories of random play"
        if found.failed and isinstance(part, Composable):  # of others `asked` has told it
            say(f"preflight: reward {name} fails on {len(found.failed)} of {of}: {next(iter(found.failed.values()))}")
        elif not found.failed and np.isnan(found.scores).all():
            say(f"preflight: reward {name} abstains from all {of}, whose info has {info_keys(trajectories[0])}")
    except Exception as error:
        what = f"reward {name}" if isinstance(part, Composable) else f"reward {describe_function(part)}"
        if _scores_one(part, trajectories[0]):
            raise PreflightError(
                f"{what} scores one trajectory, and is asked about the list of all: call its parameter `trajectory`, "
                f"or return a number each. It said: {where_it_raised(error)}"
            ) from error
        if _is_mistake(error) and not (within and not isinstance(error, ScoreError)):
            raise PreflightError(f"{what} fails: {where_it_raised(error)}") from error
        say(f"preflight: {what} fails on random play, and may on a model's: {where_it_raised(error)}")
    finally:
        if state is not None:
            part.load_state_dict(state)


def _is_mistake(error: Exception) -> bool:
    """Whether it is not for what was played: no number each, a name or an attribute that nothing has."""
    if isinstance(error, ScoreError | NameError | ImportError | NotImplementedError):
        return True
    if isinstance(error, AttributeError):
        of = error.obj[0] if isinstance(error.obj, list | tuple) and error.obj else error.obj
        return isinstance(of, Trajectory | Turn)  # and not a list that a player wrote as JSON
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    return innermost == inspect.getsourcefile(asked)


def _scores_one(reward: Any, trajectory: Trajectory) -> bool:
    """Whether a function that is asked about all gives a number for one trajectory."""
    if callable(getattr(reward, "assess", None)):
        return False
    try:
        found = reward(trajectory)
        return found is not None and np.ndim(np.asarray(found, np.float64)) == 0
    except Exception:  # noqa: BLE001  # a stranger's function; its own error has been kept
        return False
