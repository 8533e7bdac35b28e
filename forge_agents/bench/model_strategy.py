"""How a model plays a small game, written out: probabilities at every information set.

In: a game tree, a policy with its engine. Out: a table for `exploitability`. Waits for the engine.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from forge_agents.bench.exploitability import GameTree, InformationSet, Table, exploitability
from forge_agents.errors import ForgeError, LateAnswerError
from forge_agents.policy import Policy, Sampling
from forge_agents.rollout.players import Served, seed_of
from forge_agents.runtime.waits import all_or_first_error
from forge_agents.types import Completion

_log = logging.getLogger(__name__)
_MOST_LOGPROBS = 20
"""What an engine reports at each place at most."""
_LIVE_ANSWERS = 256
"""Free answers asked for at once; a deadline begins with the question."""


class Chooser(Protocol):
    """What exact probabilities need of an engine."""

    async def generate(  # noqa: D102
        self, prompt_ids: tuple[int, ...], sampling: Sampling, *, choices: Sequence[str], top_logprobs: int
    ) -> Completion: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStrategy:
    """How a model plays."""

    table: Table
    """Probability of every legal action at every information set; at one where no answer was legal, all alike."""
    illegal: float
    """Share of answers that were no legal action, the mean over information sets; 0 where the engine allows no others.
    `table` is of the legal ones. Answers that came too late, or that no context was left for, count in neither."""


async def model_strategy(tree: GameTree | str, policy: Policy, served: Served, *, samples: int = 0) -> ModelStrategy:
    """A model's strategy in both seats of a game.

    Args:
        tree: The game, or its id.
        policy: Who plays; its sampling counts.
        served: Its engine and renderer.
        samples: Free answers drawn at every information set, each after earlier answers of the model's own; what they
            mean is what the game makes of them. The same every time for the same weights. 0: exact probabilities of
            play among the legal actions only, as with ``constrain_actions=True``, after earlier actions in the game's
            own words.

    Raises:
        ForgeError: As `GameTree`; or one legal action's text is the beginning of another's, so that exact
            probabilities cannot be told: ask for samples.
    """
    game = GameTree(tree) if isinstance(tree, str) else tree
    if samples < 0:
        raise ValueError(f"samples={samples} must be at least 0")
    if samples:
        return await _sampled(game, policy, served, samples)
    engine: Any = served.engine
    rows = await all_or_first_error(
        _exact(engine, served, policy.sampling, _prompt(game, place, served), {text: text for text in place.legal})
        for place in game.places
    )
    return ModelStrategy(table=dict(zip(game.places, rows, strict=True)), illegal=0.0)


async def model_exploitability(
    tree: GameTree | str, policy: Policy, served: Served, *, samples: int = 0
) -> tuple[float, float]:
    """What a best response wins from a model, see `exploitability`, and the share of its illegal answers.

    Args:
        tree: The game, or its id.
        policy: Who plays.
        served: Its engine and renderer.
        samples: As in `model_strategy`. Sampled strategies look a little more exploitable than they are, because the
            best response answers the noise as well.
    """
    game = GameTree(tree) if isinstance(tree, str) else tree
    found = await model_strategy(game, policy, served, samples=samples)
    return exploitability(game, found.table), found.illegal


async def exploited(
    env_ids: Sequence[str], policies: Mapping[str, Policy], served: Mapping[str, Served], *, samples: int
) -> dict[str, float]:
    """Metrics of training: `model_exploitability` of each policy, the mean over games.

    Returns:
        ``eval/exploitability`` and ``eval/illegal``; where there are several policies, with ``/NAME``.
    """
    found = {}
    for name, policy in policies.items():
        suffix = f"/{name}" if len(policies) > 1 else ""
        games = [await _measured(_tree(env_id), policy, served[name], samples) for env_id in env_ids]
        for what, values in zip(("exploitability", "illegal"), zip(*games, strict=True), strict=True):
            found[f"eval/{what}{suffix}"] = math.fsum(values) / len(values)
    return found


async def _measured(game: GameTree, policy: Policy, served: Served, samples: int) -> tuple[float, float]:
    """`model_exploitability`, NaN where the model has answered nothing: a measurement must not end a training."""
    try:
        return await model_exploitability(game, policy, served, samples=samples)
    except LateAnswerError as error:
        _log.warning("%s", error)
        return math.nan, math.nan


_tree = functools.cache(GameTree)


def _prompt(game: GameTree, place: InformationSet, served: Served) -> tuple[int, ...]:
    """The conversation up to a decision, with earlier actions in the game's own words."""
    told = game.instructions[place.agent]
    messages = [("system", told)] if told else []
    for observation, action in (*place.past, (place.observation, "-")):
        messages += [("user", observation), ("assistant", action)]
    *before, (heard, _) = served.renderer.dialogue(messages)
    return (*(token for pair in before for part in pair for token in part), *heard)


async def _exact(
    engine: Chooser, served: Served, sampling: Sampling, prompt_ids: tuple[int, ...], actions: Mapping[str, str]
) -> dict[str, float]:
    """Probability of each of `actions`, which are by the text that is still to be written."""
    if len(actions) == 1:
        return dict.fromkeys(actions.values(), 1.0)
    one = replace(sampling, max_tokens=1)
    done = await engine.generate(prompt_ids, one, choices=tuple(actions), top_logprobs=_MOST_LOGPROBS)
    found = dict.fromkeys(actions.values(), 0.0)
    for token, logprob in done.top_logprobs[0].items():
        piece = served.renderer.piece(token)
        if not piece:
            continue
        left = {text.removeprefix(piece): action for text, action in actions.items() if text.startswith(piece)}
        if "" in left and len(left) > 1:
            raise ForgeError(
                f"the legal action {left['']!r} is the beginning of another, so exact probabilities cannot be told; "
                "give samples="
            )
        if left:
            chances = await _exact(engine, served, sampling, (*prompt_ids, token), left)
            for action, chance in chances.items():
                found[action] += math.exp(logprob) * chance
    total = math.fsum(found.values())
    return {action: found[action] / total for action in actions.values()}


@dataclass(frozen=True, slots=True)
class _Answer:
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    action: str
    """The legal action that it means; empty where it means none."""


_Given: TypeAlias = dict[tuple[str, tuple[tuple[str, str], ...], str], list[_Answer]]
"""Answers by agent, past and observation."""


async def _sampled(game: GameTree, policy: Policy, served: Served, samples: int) -> ModelStrategy:
    given: _Given = {}
    table: dict[InformationSet, Mapping[str, float]] = {}
    illegal: list[float] = []
    missing = 0
    depth, live = 0, asyncio.Semaphore(_LIVE_ANSWERS)
    while due := [place for place in game.places if len(place.past) == depth]:
        prompts = [_prompts(game, place, served, given) for place in due]
        asked = (
            _ask(game, *both, policy, served, samples=samples, live=live) for both in zip(due, prompts, strict=True)
        )
        for place, answers in zip(due, await all_or_first_error(asked), strict=True):
            given[place.agent, place.past, place.observation] = answers
            counts = Counter(answer.action for answer in answers)
            legal = len(answers) - counts[""]
            table[place] = {move: counts[move] / legal if legal else 1 / len(place.legal) for move in place.legal}
            missing += samples - len(answers)
            illegal += [counts[""] / len(answers)] if answers else []
        depth += 1
    if missing:
        _log.warning(
            "%s gave %d of %d free answers too late, or had no context left for them; its strategy is that of the "
            "others: raise engine.answer_timeout_s or engine.max_model_len",
            policy.name,
            missing,
            samples * len(table),
        )
    if not illegal:
        raise LateAnswerError(f"{policy.name} gave none of {missing} free answers, so nothing is known of its play")
    return ModelStrategy(table=table, illegal=math.fsum(illegal) / len(illegal))


def _prompts(game: GameTree, place: InformationSet, served: Served, given: _Given) -> list[tuple[int, ...]]:
    """Ways to a decision: through the model's own words where it went there, else in the game's."""
    if place.past:
        seen, move = place.past[-1]
        before = [one for one in given[place.agent, place.past[:-1], seen] if one.action == move]
        if before:
            return [served.renderer.extend(one.prompt_ids, one.response_ids, place.observation) for one in before]
    return [_prompt(game, place, served)]


async def _ask(
    game: GameTree,
    place: InformationSet,
    prompts: Sequence[tuple[int, ...]],
    policy: Policy,
    served: Served,
    *,
    samples: int,
    live: asyncio.Semaphore,
) -> list[_Answer]:
    """Free answers at one information set."""
    where = f"{place.agent}/{place.past}/{place.observation}"
    engine: Any = served.engine
    asked = [prompts[number % len(prompts)] for number in range(samples)]

    async def answer(number: int) -> Completion | None:
        room = engine.max_model_len - len(asked[number])
        if room < 1:
            return None
        sampling = replace(policy.sampling, max_tokens=min(policy.sampling.max_tokens, room))
        async with live:
            try:
                done: Completion = await engine.generate(asked[number], sampling, seed=seed_of(f"{where}/{number}"))
            except LateAnswerError:
                return None
        return done

    done = await all_or_first_error(map(answer, range(samples)))
    meaning = _Meaning(game, place)
    return [
        _Answer(prompt, one.token_ids, meaning(served.renderer.text(one.token_ids)))
        for prompt, one in zip(asked, done, strict=True)
        if one is not None
    ]


class _Meaning:
    """Which legal action a text is, by what the game makes of it."""

    def __init__(self, game: GameTree, place: InformationSet) -> None:
        self._env = game.places[place]
        self._known: dict[str, str] = {}
        self._outcomes = {move: self._outcome(move) for move in place.legal}

    def __call__(self, text: str) -> str:
        if text not in self._known:
            found = self._outcome(text)
            self._known[text] = next((move for move, outcome in self._outcomes.items() if outcome == found), "")
        return self._known[text]

    def _outcome(self, text: str) -> tuple[object, ...]:
        """All that players can tell of the game after `text`."""
        fork: Any = copy.deepcopy(self._env)
        fork.step(text)
        everyone = fork.possible_agents
        return (
            fork.agent_selection if fork.agents else "",
            [(fork.rewards.get(seat), fork.terminations.get(seat), str(fork.observe(seat))) for seat in everyone],
        )
