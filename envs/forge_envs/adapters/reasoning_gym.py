"""Generators of reasoning-gym (arXiv:2505.24760), unchanged inside: one question, one answer, its own scorer.

In: a generator's name, its settings or a level of its curriculum, an answer. Out: the scorer's score as reward, the
gold answer in the info, and a verifier. Waits for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_agents.envs.env import Outcome, TurnEnv, writable
from forge_agents.errors import did_you_mean
from forge_agents.types import Trajectory
from forge_envs.adapters.contained import Randomness, ended
from forge_envs.adapters.patterns import bound_patterns
from forge_envs.adapters.scoring import score


class ReasoningGym(TurnEnv):
    """One question of a generator.

    The answer is what stands between the last ``<answer>`` and ``</answer>`` of the action, else the whole action.
    The reward is the generator's own score, cut to [0, 1]. The info then holds ``"answer"`` (the gold answer),
    ``"answer_given"``, ``"score"``, ``"outcome"`` (``"solved"`` at 1, ``"partial"`` above 0, ``"failed"``), and
    ``"reasoning_gym"`` (generator, seed, level and settings: all that makes the question again).

    Some scorers evaluate the answer as Python or sympy. An answer that is more than a literal or a formula is not
    handed to them: it scores 0 and the info says why under ``"refused"``. These scorers run in a process of their own,
    within a limit of memory and a deadline. An exception inside a scorer, and a limit that it breaks, score 0, too,
    and are told under ``"error"``.

    Args:
        generator: reasoning-gym's name, e.g. ``"leg_counting"``.
        level: Level of the generator's curriculum, from 0; beyond its last level the last one counts. None takes the
            generator's defaults.
        **settings: Fields of the generator's configuration; they win over the curriculum.

    Raises:
        ValueError: The generator is unknown or has no curriculum, or a setting is refused by it.
    """

    possible_agents = ("solver",)
    max_action_chars = 65536
    max_observation_chars = 200_000

    def __init__(self, generator: str, *, level: int | None = None, **settings: Any) -> None:
        super().__init__()
        self._task = {"generator": generator, "level": level, "settings": settings}
        _config(generator, level, settings, seed=0)  # a wrong argument is told here, not at reset

    def setup(self, rng: np.random.Generator) -> None:
        self._source: dict[str, Any] = {**self._task, "seed": int(rng.integers(2**31))}
        self._dataset, self._entry = _generate(self._source)
        self._answered = False

    def instructions(self, agent: str) -> str:
        from reasoning_gym.utils import SYSTEM_PROMPTS

        return str(SYSTEM_PROMPTS["default"])

    def observe_text(self, agent: str) -> str:
        return "" if self._answered else writable(str(self._entry["question"]))

    def act(self, agent: str, action: str) -> Outcome:
        self._answered = True
        given = final_answer(action)
        reward, why = score(self._dataset, self._entry, given, self._source["generator"])
        info = {
            "answer": str(self._entry["answer"]),
            "answer_given": given[:1000],
            "score": reward,
            "outcome": "solved" if reward >= 1 else "partial" if reward > 0 else "failed",
            "reasoning_gym": self._source,
        }
        return ended(agent, reward, **info, **why)


class ReasoningGymScore:
    """The generators' own scorers as a verifier: makes each question again and scores the last action.

    Abstains (NaN) on trajectories of other environments and on those without a turn.
    """

    name = "reasoning_gym"
    family: str | None = None
    cost = "cheap"

    def score(self, trajectories: Sequence[Trajectory]) -> NDArray[np.float32]:
        """float32 [n] in [0, 1], one per trajectory."""
        return np.array([self._grade(trajectory) for trajectory in trajectories], np.float32)

    def __call__(self, trajectories: Sequence[Trajectory]) -> NDArray[np.float32]:
        """The same as `score`: a verifier is a reward."""
        return self.score(trajectories)

    def _grade(self, trajectory: Trajectory) -> float:
        source = trajectory.info.get("reasoning_gym")
        if not trajectory.turns or not isinstance(source, Mapping):
            return float("nan")
        dataset, entry = _again(json.dumps(source, sort_keys=True))
        return score(dataset, entry, final_answer(trajectory.turns[-1].action), str(source["generator"]))[0]


def final_answer(action: str) -> str:
    """What stands between the last ``<answer>`` and ``</answer>``, else the whole text; without white space around.

    The same as `reasoning_gym.utils.extract_answer`, in time that grows with the text's length and not with its square.
    """
    answer, at = action, 0
    while (begin := action.find("<answer>", at)) >= 0 and (end := action.find("</answer>", begin)) >= 0:
        answer, at = action[begin + len("<answer>") : end], end
    return answer.strip()


def levels(generator: str) -> int:
    """How many levels the curriculum of a generator has; 0 where it has none."""
    from reasoning_gym.factory import create_curriculum, has_curriculum

    if not has_curriculum(generator):
        return 0
    return max((len(attribute.levels) for attribute in create_curriculum(generator).attributes.values()), default=0)


def _config(generator: str, level: int | None, settings: Mapping[str, Any], seed: int) -> Any:
    """The generator's configuration for one question."""
    from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum

    if generator not in DATASETS:
        raise ValueError(f"reasoning-gym has no generator {generator!r}.{did_you_mean(generator, DATASETS)}")
    arguments = {**settings, "seed": seed, "size": 1}
    try:
        if level is not None:
            if generator not in CURRICULA or type(level) is not int or level < 0:
                raise ValueError(f"level={level!r}: levels are integers from 0, and need a curriculum")
            curriculum = create_curriculum(generator)
            curriculum.set_global_level(level)
            made = vars(curriculum.generate_configuration())
            arguments = {name: value for name, value in made.items() if not name.startswith("_")} | arguments
        config = DATASETS[generator][1](**arguments)
        if hasattr(config, "validate"):
            config.validate()
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"{generator}: {error}") from error
    return config


def _generate(source: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The dataset of one question, and the question."""
    from reasoning_gym.factory import DATASETS

    bound_patterns("reasoning_gym")
    seed = int(source["seed"])
    config = _config(source["generator"], source["level"], source["settings"], seed)
    with Randomness(seed).contained():  # a few generators draw from the global generator
        dataset = DATASETS[source["generator"]][0](config)
        return dataset, dataset[0]


@lru_cache(maxsize=256)
def _again(source: str) -> tuple[Any, dict[str, Any]]:
    return _generate(json.loads(source))
