"""Reports of a run: console messages, and the records of a step in the run folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forge_agents.models import families
from forge_agents.models import resolve as models
from forge_agents.types import EpisodeGroup
from forge_trainers.records.run_folder import RunFolder
from forge_trainers.rl.counterfactual import recorded
from forge_trainers.rl.failures import describe_error
from forge_trainers.rl.rewards import reward_name
from forge_trainers.rl.samples import StepSamples
from forge_trainers.run.plan import rate_line, weak_rates
from forge_verifiers.core.composition import ForAgent
from forge_verifiers.ensemble.ensemble import Ensemble

if TYPE_CHECKING:
    from forge_trainers.rl.plan import RunPlan

_log = logging.getLogger(__name__)


class Messages:
    """Shows messages above the progress bar during training, and as log warnings otherwise."""

    def __init__(self) -> None:
        self.reset()
        self._reported_failure = self._reported_alternative = False

    def reset(self) -> None:
        """Show messages as log warnings."""
        self.say: Callable[[str], None] = _log.warning

    def report_failure(self, group: EpisodeGroup) -> None:
        """Report the first failed episode and the first failed alternative of a run at once."""
        if group.failed and not self._reported_failure and group.failed[0].error is not None:
            self._reported_failure = True
            player = f" by a failure of {name}" if (name := group.failed[0].failed_policy) else ""
            self.say(
                f"an episode of {group.env_id} failed{player}: {describe_error(group.failed[0].error)}. The traceback "
                "is in episodes.jsonl. Further failures are only counted"
            )
        failed = group.alternatives.group.failed if group.alternatives is not None else ()
        if failed and not self._reported_alternative and failed[0].error is not None:
            self._reported_alternative = True
            self.say(
                f"an alternative of {group.env_id} failed: {describe_error(failed[0].error)}. Its turn counts as not "
                "chosen. Further failures are only counted, in credit/failed"
            )

    def announce(self, plan: RunPlan, learners: Mapping[str, object], steps: int) -> None:
        """Show which policy plays which agents, which of them are trained, and how evaluations are scored."""
        config = plan.config
        for name, agents in plan.agents_by_policy.items():
            learner = learners.get(name)
            role = "frozen" if learner is None else f"trainable, learner {getattr(learner, 'name', name)}"
            if name in plan.learner_settings:
                chosen = config.learner_of(plan.models[name]).lr is not None
                role += ", " + rate_line(plan.learner_settings[name], chosen=chosen)
            self.say(f"{', '.join(agents)}: policy {name} ({role})")
        for line in _teacher_lines(plan):
            self.say(line)
        for warning in weak_rates(plan.learner_settings, steps):
            self.say(warning)
        if config.eval_every and not plan.ranks_checkpoints:
            self.say(
                "all agents of a zero-sum game are trained, so the mean held-out reward (eval/reward) is constant and "
                "does not rank checkpoints: the newest counts as the best. Compare exported models with fa.benchmark, "
                "or set exploitability_samples if the environment lists its openings"
            )
        if config.eval_every and not plan.uses_env_reward:
            ranks = "" if config.exploitability_samples else ", which the choice of the best checkpoint uses as well"
            self.say(
                f"held-out episodes are scored by the run's reward, {reward_name(plan.reward)} (eval/reward){ranks}. "
                "eval/env_reward is the environment's own reward"
            )
        if fixed := _fixed_agents_of_ensemble(plan, learners):
            self.say(
                f"the ensemble also learns from the texts of agents that are not trained: {', '.join(fixed)}. If these "
                "texts answer another question, make the reward forge_verifiers.ForAgent(AGENT, ensemble)"
            )


def _teacher_lines(plan: RunPlan) -> list[str]:
    """Lines about the teachers of each policy, with those whose prompts would look different."""
    lines = []
    for name, settings in plan.learner_settings.items():
        agents = ("", *plan.agents_by_policy.get(name, ()))
        for agent, teacher in settings.teachers.items():
            if agent not in agents:
                continue
            folder, role = models.local_folder(teacher), f" as {agent}" if agent else ""
            lines.append(f"policy {name} learns from the teacher {teacher}{role}")
            if folder is not None and families.chat_template(folder) != families.chat_template(Path(settings.model)):
                lines[-1] += ", whose chat template differs. The teacher reads prompts in the template of the policy"
    return lines


def _fixed_agents_of_ensemble(plan: RunPlan, learners: Mapping[str, object]) -> list[str]:
    """Agents that no trained policy plays, if the reward is an ensemble that scores their trajectories."""
    if not isinstance(plan.reward, Ensemble) or all(isinstance(each, ForAgent) for each in plan.reward.verifiers):
        return []
    by_policy = plan.agents_by_policy
    trained = {agent for name in learners for agent in by_policy.get(name, ())}
    return [agent for agents in by_policy.values() for agent in agents if agent not in trained]


def log_step(
    run: RunFolder,
    step: int,
    groups: Sequence[EpisodeGroup],
    samples: StepSamples,
    metrics: Mapping[str, float],
    *,
    learners: Mapping[str, object],
    keep_episodes: int,
) -> None:
    """Write the metrics of a step and the first `keep_episodes` of its episodes, failed ones first."""
    run.log(step + 1, metrics)
    places = [(number, index) for number, group in enumerate(groups) for index in range(len(group.episodes))]
    places.sort(key=lambda place: groups[place[0]].episodes[place[1]].error is None)
    chosen = [(groups[number], number, index) for number, index in places[:keep_episodes]]
    run.keep_episodes(
        step + 1,
        [group.episodes[index] for group, _, index in chosen],
        [group.episode_rewards(index) for group, _, index in chosen],
        [samples.advantages.get((number, index), {}) for _, number, index in chosen],
        [recorded(group, index) for group, _, index in chosen],
        session_rewards=[group.episode_session_rewards(index) for group, _, index in chosen],
        trained=learners,
    )
