"""Explains failed and unfinished episodes: the code that raised, full contexts, and games without a trained turn."""

from __future__ import annotations

import os
import re
import traceback
from collections import Counter
from collections.abc import Collection, Sequence
from importlib.util import find_spec

from forge_agents.bench.records import forfeits_of
from forge_agents.imports import is_library
from forge_agents.types import Episode, EpisodeError, EpisodeGroup

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')
_OUR_FOLDERS = tuple(
    folder + os.sep
    for package in ("forge_agents", "forge_trainers", "forge_verifiers")
    if (spec := find_spec(package)) is not None
    for folder in spec.submodule_search_locations or ()
)
MANY_FULL_CONTEXTS = 0.1
"""Fraction of a step's episodes out of context above which training warns."""


def describe_error(error: EpisodeError) -> str:
    """Describe an episode's failure in one line, with file and line in the user's code, else in a library's."""
    return f"{error.where}: {error.kind}: {error.message[:300]}{_place(error.trace)}"


def describe_exception(error: BaseException) -> str:
    """Describe an exception in one line, with file and line in the user's code, else in a library's."""
    trace = "".join(traceback.format_exception(error))
    return f"{type(error).__name__}: {str(error)[:300]}{_place(trace)}"


def file_of(error: EpisodeError) -> str:
    """Return the file that raised an episode's error. Empty if there is no trace."""
    frames = _FRAME.findall(error.trace)
    return frames[-1][0] if frames else ""


def _place(trace: str) -> str:
    frames = _FRAME.findall(trace)
    frames = [frame for frame in frames if not frame[0].startswith(_OUR_FOLDERS)]
    user_frames = [frame for frame in frames if not is_library(frame[0])] or frames
    return f" at {user_frames[-1][0]}:{user_frames[-1][1]} in {user_frames[-1][2].strip()}" if user_frames else ""


def acting_agents(episode: Episode, policies: Collection[str]) -> set[str]:
    """Return the agents of an episode for which one of `policies` sampled a token."""
    return {
        agent
        for agent, trajectory in episode.trajectories.items()
        if trajectory.policy in policies and any(turn.response_ids for turn in trajectory.turns)
    }


def idle_policies(episodes: Sequence[Episode], policies: Collection[str]) -> list[str]:
    """Return those of `policies` that sampled no token in any of the episodes, or none if there are no episodes."""
    return [name for name in policies if episodes and not any(acting_agents(episode, [name]) for episode in episodes)]


def explain_idle(episodes: Collection[Episode], policies: Collection[str] = ()) -> str:
    """Explain who ended `episodes` in which no trained policy, or none of `policies`, had a turn."""
    causes: Counter[str] = Counter()
    for episode in episodes:
        turns, forfeits = episode.turns, sorted(forfeits_of(episode))
        agents = forfeits or [turns[-1].agent] if turns else []
        names = ", ".join(f"{agent} ({episode.trajectories[agent].policy})" for agent in agents)
        action = "with an illegal action" if forfeits else "with the last turn of the game"
        causes[f"by {names} {action}" if names else "by the environment, before any turn"] += 1
    ended = "; ".join(f"{number} {cause}" for cause, number in causes.most_common(3))
    example = next((turn for episode in episodes for turn in episode.turns[-1:]), None)
    action = "" if example is None else f". The first ended after {example.agent} wrote {example.action[:80]!r}"
    subject = f"policy {', '.join(policies)} had no turn" if policies else "no trained policy had a turn"
    return f"{subject} in {len(episodes)} episodes, which were ended {ended}{action}"


def explain_full_contexts(groups: Sequence[EpisodeGroup]) -> str:
    """Explain how often episodes ended, or answers were empty, because a context was full, and the remedy."""
    episodes = [episode for group in groups for episode in group.episodes]
    full = [episode for episode in episodes if episode.out_of_context]
    filled = {turn.policy for each in full for turn in each.turns if turn.finish_reason == "context"}
    policies = f" (policies {', '.join(sorted(filled))})" if filled else ""
    return (
        f"{len(full)} of {len(episodes)} episodes were out of context{policies}. Their rewards are those of "
        "unfinished episodes, and a player of a game loses. Raise engine.max_model_len, shorten "
        'instructions and observations, or set Policy(context="window")'
    )


def nothing_to_train_on(groups: Sequence[EpisodeGroup], trained: Collection[str]) -> str | None:
    """Explain why no amount of resampling makes these groups informative, or None if it may."""
    episodes = [episode for group in groups for episode in group.episodes]
    errors = [episode.error for episode in episodes if episode.error is not None]
    if errors and len(errors) == len(episodes):
        return _explain_failures(errors)
    trajectories = [t for episode in episodes for t in episode.trajectories.values() if t.policy in trained]
    if any(turn.response_ids for trajectory in trajectories for turn in trajectory.turns) or not episodes:
        return None
    if any(episode.error is None and not episode.out_of_context and episode.turns for episode in episodes):
        return None  # games may end before a trained policy's turn; `StoppingCriteria` waits before it stops the run
    out_of_context = [episode for episode in episodes if episode.out_of_context]
    if not out_of_context:
        return (
            f"no token was sampled in {len(episodes)} episodes: no trained policy had a turn. Check that the "
            "environment lets its agents decide and that a trained policy plays one of them"
        )
    longest = max((len(t.instructions) for e in out_of_context for t in e.trajectories.values()), default=0)
    return (
        f"no token was sampled: {len(out_of_context)} of {len(episodes)} episodes were out of context before an answer "
        f"(instructions of up to {longest} characters). Raise engine.max_model_len, or shorten instructions and "
        "observations"
    )


def _explain_failures(errors: Sequence[EpisodeError]) -> str:
    causes = Counter(f"{error.where}: {error.kind}" for error in errors)
    advice = (
        "A player fails. Check that its server answers and that its settings are correct"
        if causes.most_common(1)[0][0].startswith("policy")
        else "The environment fails. Run `forge-agents check` on it"
    )
    counts = ", ".join(f"{number} in {cause}" for cause, number in causes.items())
    return f"all {len(errors)} episodes failed ({counts}). First: {describe_error(errors[0])}. {advice}, then run again"
