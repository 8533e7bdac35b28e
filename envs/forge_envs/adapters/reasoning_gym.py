"""Generators of reasoning-gym (arXiv:2505.24760) as single-turn environments with their own scorers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from forge_agents.display import printable
from forge_agents.envs.env import Outcome, TurnEnv, writable
from forge_agents.errors import did_you_mean
from forge_agents.runtime.threads import in_thread
from forge_agents.types import Trajectory
from forge_envs.adapters.contained import Randomness, ended
from forge_envs.adapters.listing import entry, folder_of, register_ids
from forge_envs.adapters.patterns import bound_patterns
from forge_envs.adapters.scoring import score

T = TypeVar("T")

_SETTING = re.compile(r"[+\-*/%&|^<>=!]|[\w ,;:!?'-]{0,200}(\.\w{0,10})?")
"""Texts in settings: an operator, or words, maybe with the suffix of a file name."""
_VARIABLE = re.compile(r"[^\W\d_]")
_MAX_PARTS = 10_000
"""Maximum number of texts, numbers and lists in a setting."""

_COPIED = {"string_insertion": "string"}
"""Generators in which a copy of the question's input is the right answer to most questions, and that input's key."""
_COPIED_SHARE, _MAX_DRAWS = 0.25, 200
"""Share of episodes that accept such a question, and maximum number of questions that the others draw."""


class ReasoningGym(TurnEnv):
    """A question of a generator.

    The answer is the text between the last ``<answer>`` and ``</answer>``, else the whole action. The reward is the
    generator's score, clipped to [0, 1]. At the end infos contain ``"answer"`` (gold), ``"answer_given"``, ``"score"``,
    ``"outcome"`` (``"solved"`` at 1, ``"partial"`` above 0, else ``"failed"``) and ``"reasoning_gym"`` (generator,
    seed, level and settings, which reproduce the question).

    Some scorers evaluate the answer as Python or sympy. Such scorers only receive literals and formulas. Other
    answers score 0 with the reason under ``"refused"``. Some scorers accept wrong answers, such as "x" or "nan",
    and are corrected. Some pay much for a copy of the input or for a guess. There, only a better answer earns
    anything. In string_insertion, three of four questions that a copy of the input answers are replaced by others.
    The scorers run in processes with memory and time limits. Exceptions and exceeded limits score 0, with a message
    under ``"error"``.

    Args:
        generator: Name in reasoning-gym, e.g. ``"leg_counting"``.
        level: Level of the generator's curriculum, from 0. Levels beyond the last use the last. None uses the
            generator's defaults.
        **settings: Fields of the generator's configuration, which override the curriculum.

    Raises:
        ValueError: The generator is unknown or has no curriculum, or it rejects a setting.
    """

    possible_agents = ("solver",)
    max_action_chars = 65536
    max_observation_chars = 200_000

    def __init__(self, generator: str, *, level: int | None = None, **settings: Any) -> None:
        super().__init__()
        self._task = {"generator": generator, "level": level, "settings": settings}
        _config(generator, level, settings, seed=0)  # reject wrong arguments here instead of at reset

    def setup(self, rng: np.random.Generator) -> None:
        copied = _COPIED.get(str(self._task["generator"]))
        accepts_copies = copied is None or rng.random() < _COPIED_SHARE
        for _ in range(_MAX_DRAWS):
            self._source: dict[str, Any] = {**self._task, "seed": int(rng.integers(2**31))}
            _, self._entry = _generate(self._source)
            if accepts_copies or self._entry["metadata"][copied] != self._entry["answer"]:
                break
        self._answered = False

    def instructions(self, agent: str) -> str:
        from reasoning_gym.utils import SYSTEM_PROMPTS

        return str(SYSTEM_PROMPTS["default"])

    def observe_text(self, agent: str) -> str:
        return "" if self._answered else writable(str(self._entry["question"]))

    def act(self, agent: str, action: str) -> Outcome:
        self._answered = True
        answer = final_answer(action)
        reward, reasons = score(self._source, self._entry, answer)
        info = {
            "answer": str(self._entry["answer"]),
            "answer_given": answer[:1000],
            "score": reward,
            "outcome": "solved" if reward >= 1 else "partial" if reward > 0 else "failed",
            "reasoning_gym": self._source,
        }
        return ended(agent, reward, **info, **reasons)

    async def off_loop(self, where: str, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `call` in a thread if it waits for the scoring process, so that other episodes go on."""
        if where != "step":
            return call(*args, **kwargs)
        return await in_thread(lambda: call(*args, **kwargs), name=f"environment {self}")


class ReasoningGymScore:
    """Verifier that reproduces the question of a trajectory and scores its last action by the generator's scorer.

    Abstains (NaN) on trajectories of other environments and on those without turns.
    """

    name = "reasoning_gym"
    family: str | None = None
    cost = "cheap"

    def score(self, trajectories: Sequence[Trajectory]) -> NDArray[np.float32]:
        """Return scores in [0, 1], of shape ``[n]``, float32."""
        return np.array([self._grade(trajectory) for trajectory in trajectories], np.float32)

    def __call__(self, trajectories: Sequence[Trajectory]) -> NDArray[np.float32]:
        """Same as `score`, so that the verifier can be used as a reward."""
        return self.score(trajectories)

    def _grade(self, trajectory: Trajectory) -> float:
        source = trajectory.info.get("reasoning_gym")
        if not trajectory.turns or not isinstance(source, Mapping):
            return float("nan")
        question = _reproduce(json.dumps(source, sort_keys=True))
        return score(source, question, final_answer(trajectory.turns[-1].action))[0]


def final_answer(action: str) -> str:
    """Return the text between the last ``<answer>`` and ``</answer>``, else the whole text, without outer whitespace.

    Same as `reasoning_gym.utils.extract_answer`, but in linear instead of quadratic time.
    """
    answer, start = action, 0
    while (begin := action.find("<answer>", start)) >= 0 and (end := action.find("</answer>", begin)) >= 0:
        answer, start = action[begin + len("<answer>") : end], end
    return answer.strip()


def _config(generator: str, level: int | None, settings: Mapping[str, Any], seed: int) -> Any:
    """Return the generator's configuration for one question."""
    from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum

    if generator not in DATASETS:
        raise ValueError(f"reasoning-gym has no generator {generator!r}.{did_you_mean(generator, DATASETS)}")
    for name, value in settings.items():
        _check_setting(generator, name, value)
    arguments = {**settings, "seed": seed, "size": 1}
    try:
        if level is not None:
            if generator not in CURRICULA or type(level) is not int or level < 0:
                raise ValueError(f"level={level!r}: levels are integers from 0, and need a curriculum")
            curriculum = create_curriculum(generator)
            curriculum.set_global_level(level)
            fields = vars(curriculum.generate_configuration())
            arguments = {name: value for name, value in fields.items() if not name.startswith("_")} | arguments
        config = DATASETS[generator][1](**arguments)
        if hasattr(config, "validate"):
            config.validate()
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"{generator}: {error}") from error
    return config


def _check_setting(generator: str, name: str, value: Any) -> None:
    """Refuse texts that a generator could evaluate or open, because settings may come from a stranger's file.

    Operators become part of formulas that reasoning-gym evaluates as Python, and names of variables that sympy does.
    """
    allowed = _VARIABLE if name in ("symbols", "variables") else _SETTING
    waiting, count = [value], 0
    while waiting and (count := count + 1) <= _MAX_PARTS:
        part = waiting.pop()
        if isinstance(part, str):
            if not allowed.fullmatch(part) or "__" in part:
                expected = "single letters" if allowed is _VARIABLE else "words or operators"
                raise ValueError(
                    f"{generator}: {name}={printable(part)[:100]!r} is refused. Its texts must be {expected}"
                )
        elif isinstance(part, Mapping):
            waiting += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple | set | frozenset):
            waiting += part
    if waiting:
        raise ValueError(f"{generator}: {name} has more than {_MAX_PARTS} parts")


def _generate(source: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a dataset of one question, and the question."""
    from reasoning_gym.factory import DATASETS

    bound_patterns("reasoning_gym")
    seed = int(source["seed"])
    config = _config(source["generator"], source["level"], source["settings"], seed)
    with Randomness(seed).contained():  # a few generators draw from the global generator
        dataset = DATASETS[source["generator"]][0](config)
        return dataset, dataset[0]


@lru_cache(maxsize=256)
def _reproduce(source: str) -> dict[str, Any]:
    return _generate(json.loads(source))[1]


def make_dataset(source: Mapping[str, Any]) -> Any:
    """Return the data set of one question, which has the scorer."""
    return _generate(source)[0]


# ---- ids

EXCLUDED: dict[str, str] = {
    "composite": "is a mixture of the others and needs their list as an argument",
    "propositional_logic": "pays every conclusion, such as two premises joined by a conjunction",
}
"""Generators that are not listed, with the reason."""
_CURRICULUM_LEVELS = 4
"""Number of levels of each curriculum. Two of reasoning-gym's 102 curricula have fewer and repeat their last level."""
_INVALID_LEVELS = {"caesar_cipher": (2, 3), "knight_swap": (0, 1, 2, 3), "modulo_grid": (1,), "survo": (2, 3)}
"""Levels whose settings the generator itself rejects. They are not listed."""


def list_ids(name: str | None) -> str | None:
    """Register ``reasoning-gym/generator-v0``. See `forge_agents.envs.registry.ListIds`."""
    entries = {
        f"{generator}-v0": entry(
            "reasoning_gym:ReasoningGym",
            "reasoning-gym",
            "1p",
            category,
            generator=generator,
            levels=[
                {"level": level}
                for level in range(_CURRICULUM_LEVELS * graded)
                if level not in _INVALID_LEVELS.get(generator, ())
            ],
        )
        for generator, (category, graded) in _generators().items()
    }
    return register_ids("reasoning-gym", name, entries, {f"{generator}-v0" for generator in EXCLUDED})


@cache
def _generators() -> dict[str, tuple[str, bool]]:
    """Return category and presence of a curriculum by generator, read from the source that registers them."""
    generators = {}
    root = folder_of("reasoning_gym")
    for path in sorted(root.rglob("*.py")):
        source = path.read_text()
        if "register_dataset(" not in source:
            continue
        names = dict(re.findall(r"^(\w+) = \"(\w+)\"$", source, re.MULTILINE))
        for argument, rest in re.findall(r"^register_dataset\(\s*([\w\"]+)([^)]*)", source, re.MULTILINE):
            generator = argument.strip('"') if argument.startswith('"') else names.get(argument, "")
            if generator:
                generators[generator] = path.relative_to(root).parts[0], "Curriculum" in rest
    return generators
