"""Trees of two-player zero-sum games that list their openings, strategies, best responses and exploitability."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

from forge_agents.bench.entrants import Player, Team
from forge_agents.envs import registry
from forge_agents.envs.env import hook, listed_actions
from forge_agents.errors import ForgeError
from forge_agents.policy import Random, Scripted
from forge_agents.rollout.rollout import close

ILLEGAL = ""
"""Stands for all illegal answers in the strategy of a model, in games that end with them."""
_ILLEGAL_TEXT = "?"
"""Illegal answer whose outcome is that of all."""
_OPENINGS = "pairs (probability, environment): each environment reset, and probabilities that sum to 1"

Strategy: TypeAlias = Callable[[str, str, Sequence[str]], Mapping[str, float]]
"""``(agent, observation, legal_actions) -> probability by action``. Missing actions have probability 0. `ILLEGAL` may
have a probability, too."""


@dataclass(frozen=True, slots=True)
class InformationSet:
    """Everything that a player knows when it decides."""

    agent: str
    past: tuple[tuple[str, str], ...]
    """Earlier observations and actions, in order."""
    observation: str
    legal: tuple[str, ...]
    """Legal actions."""


Table: TypeAlias = Mapping[InformationSet, Mapping[str, float]]
"""A strategy as a table: probability by action at every information set of a game."""


@runtime_checkable
class Enumerable(Protocol):
    """An environment that can list its openings: all chance moves happen before the first decision."""

    possible_agents: list[str]

    def openings(self) -> Iterable[tuple[float, Any]]:
        """Return every opening as ``(probability, environment)``, each environment reset and before the first turn."""
        ...


@dataclass(slots=True)
class _Decision:
    """A decision node of the tree."""

    info_set: InformationSet
    children: dict[str, _Node]
    illegal: float | None
    """The first agent's total reward after an illegal answer. None: the game goes on, or is not zero-sum then."""


_Node: TypeAlias = "_Decision | float"
"""A decision, or the total reward of the first agent."""


@dataclass(slots=True)
class GameTree:
    """All openings and continuations of a two-player zero-sum game.

    Args:
        env_id: An id whose environment has `openings`, see `Enumerable`, and lists legal actions.
        make: Function that makes the environment. None: by its id.

    Raises:
        ForgeError: The environment has no valid `openings`, or is not a zero-sum game of two agents.
    """

    env_id: str
    make: Callable[[], Any] | None = field(default=None, repr=False, kw_only=True)
    agents: tuple[str, str] = field(init=False)
    roots: list[tuple[float, _Node]] = field(init=False, repr=False)
    instructions: dict[str, str] = field(init=False)
    """System prompt by agent."""
    info_sets: dict[InformationSet, list[Any]] = field(init=False, default_factory=dict, repr=False)
    """Every information set with its games, which are copied. Earlier decisions of a player come first."""
    endless: set[InformationSet] = field(init=False, default_factory=set, repr=False)
    """Information sets in which the outcome of an illegal answer is not known."""

    def __post_init__(self) -> None:
        env: Any = registry.make(self.env_id) if self.make is None else self.make()
        close(env, self.env_id)
        if not isinstance(env, Enumerable):
            raise ForgeError(
                f"{self.env_id} cannot list its openings, which exact computation needs. Write a method openings() "
                f"that returns {_OPENINGS}, or choose forge/KuhnPoker-v0 or forge/LeducPoker-v0"
            )
        if len(env.possible_agents) != 2:
            raise ForgeError(f"{self.env_id} has {len(env.possible_agents)} agents. Exact computation needs two")
        self.agents = cast("tuple[str, str]", tuple(env.possible_agents))
        empty: Mapping[str, tuple[tuple[str, str], ...]] = dict.fromkeys(self.agents, ())
        openings = _checked(env.openings(), self.env_id)
        for _, opening in openings:
            _list_legal_actions(opening)
        instructions = hook(openings[0][1], "instructions")
        self.instructions = {agent: str(instructions(agent)) if instructions else "" for agent in self.agents}
        self.roots = [(chance, self._node(opening, empty, 0.0, 0.0)) for chance, opening in openings]
        self.info_sets = dict(sorted(self.info_sets.items(), key=lambda item: len(item[0].past)))

    def _node(self, env: Any, past: Mapping[str, tuple[tuple[str, str], ...]], *paid: float) -> _Node:
        """Return the node of a game.

        Args:
            paid: Sum of the rewards before the last step, by agent.
        """
        mine, other = (total + float(env.rewards[agent]) for total, agent in zip(paid, self.agents, strict=True))
        if is_over(env):
            if abs(mine + other) > 1e-9:
                raise ForgeError(f"{self.env_id} paid {mine} and {other}. Exact computation needs a zero-sum game")
            return mine
        agent = env.agent_selection
        observation = str(env.observe(agent))
        legal = listed_actions(env.infos[agent])
        if not legal:
            raise ForgeError(
                f"{self.env_id} lists no legal actions of {agent} at {observation!r}. Exact computation needs a method "
                "legal_actions(agent) that returns at least one"
            )
        info_set = InformationSet(agent, past[agent], observation, legal)
        self.info_sets.setdefault(info_set, []).append(env)
        children: dict[str, _Node] = {}
        for move in legal:
            later = {**past, agent: (*past[agent], (observation, move))}
            children[move] = self._node(after(env, move), later, mine, other)
        illegal = _after_illegal(env, self.agents, mine, other)
        if illegal is None:
            self.endless.add(info_set)
        return _Decision(info_set, children, illegal)


def _checked(openings: object, env_id: str) -> list[tuple[float, Any]]:
    """Return the possible openings of an environment, or raise a `ForgeError` that says what is wrong with them."""
    checked: list[tuple[float, Any]] = []
    for opening in openings if isinstance(openings, Iterable) else ():
        match opening:
            case (Real() as chance, env) if float(chance) >= 0 and getattr(env, "agents", None):
                checked.append((float(chance), env))
            case _:
                raise ForgeError(f"openings() of {env_id} returned {opening!r}. Expected {_OPENINGS}")
    total = math.fsum(chance for chance, _ in checked)
    if abs(total - 1) > 1e-6:  # they may be float32
        raise ForgeError(
            f"openings() of {env_id} returned {len(checked)} pairs, whose probabilities sum to {total:g}. Expected "
            f"{_OPENINGS}"
        )
    return [opening for opening in checked if opening[0]]


def _list_legal_actions(opening: Any) -> None:
    """Store the legal actions of the present state. `openings` may have changed the state after `reset` stored them."""
    legal_actions, agent = hook(opening, "legal_actions"), opening.agent_selection
    legal = None if legal_actions is None else legal_actions(agent)
    if legal is not None:
        opening.infos[agent] = {**opening.infos[agent], "legal_actions": list(legal)}


def is_over(env: Any) -> bool:
    """Return whether a game has ended."""
    return any(env.terminations.values()) or not env.agents


def after(env: Any, action: str) -> Any:
    """Return a copy of a game after one more action."""
    fork = copy.deepcopy(env)
    fork.step(action)
    return fork


def _after_illegal(env: Any, agents: tuple[str, str], *paid: float) -> float | None:
    """Return the first agent's total reward if the next answer is illegal. See `_Decision.illegal`."""
    try:
        fork = after(env, _ILLEGAL_TEXT)
        if not is_over(fork):
            return None
        mine, other = (total + float(fork.rewards[agent]) for total, agent in zip(paid, agents, strict=True))
    except Exception:  # noqa: BLE001  # of user code, which need not accept other actions than the legal ones
        return None
    return mine if abs(mine + other) <= 1e-9 else None


def best_response(tree: GameTree, hero: str, strategy: Strategy | Table) -> float:
    """Return the mean reward of a best response as agent `hero` against `strategy`.

    Backward induction chooses the best action at each information set over its nodes, weighted by the probability that
    chance and the opponent lead to them: ``argmax_a sum_h pi_-i(h) v(h a)`` (Zinkevich et al. 2007, NeurIPS, "Regret
    minimization in games with incomplete information").
    """
    sign = 1.0 if hero == tree.agents[0] else -1.0
    nodes: dict[InformationSet, list[tuple[float, _Decision]]] = {}
    opponent = functools.cache(functools.partial(_probabilities, tree, strategy))

    def collect(node: _Node, chance: float) -> None:
        if isinstance(node, float):
            return
        mine = node.info_set.agent == hero
        if mine:
            nodes.setdefault(node.info_set, []).append((chance, node))
        for move, child in node.children.items():
            # pi_-i leaves out the probabilities of the hero's own moves
            collect(child, chance if mine else chance * opponent(node.info_set).get(move, 0.0))

    def value(node: _Node) -> float:
        if isinstance(node, float):
            return sign * node
        if node.info_set.agent == hero:
            return value(node.children[choose(node.info_set)])
        chances = opponent(node.info_set)
        illegal = sign * chances.get(ILLEGAL, 0.0) * (node.illegal or 0.0)
        return illegal + math.fsum(chances.get(move, 0.0) * value(child) for move, child in node.children.items())

    @functools.cache
    def choose(info_set: InformationSet) -> str:
        def mean(move: str) -> float:
            return math.fsum(chance * value(node.children[move]) for chance, node in nodes[info_set])

        return max(info_set.legal, key=mean)

    for chance, root in tree.roots:
        collect(root, chance)
    return math.fsum(chance * value(root) for chance, root in tree.roots)


def exploitability(tree: GameTree | str, strategy: Strategy | Table, *, agents: Collection[str] | None = None) -> float:
    """Return the mean reward of best responses over both agents: half of NashConv, and 0 at an equilibrium.

    Args:
        agents: Agents that the strategy plays. None: both. With one agent, the result is the reward of the best
            response to it, which at an equilibrium is the value of the game. The mean over two strategies that play an
            agent each is half of their NashConv.

    Raises:
        ForgeError: As `GameTree`.
        ValueError: Probabilities of the strategy are negative, do not sum to 1, or are for illegal actions, or a table
            lacks an information set.
    """
    game = GameTree(tree) if isinstance(tree, str) else tree
    played = game.agents if agents is None else agents
    first, second = game.agents
    heroes = [hero for hero, opponent in ((first, second), (second, first)) if opponent in played]
    # NashConv / 2: in a zero-sum game the agents' rewards against each other cancel
    value = math.fsum(best_response(game, hero, strategy) for hero in heroes) / len(heroes)
    return max(0.0, value) if len(heroes) == 2 else value


def average_strategy(tree: GameTree | str, strategies: Sequence[Strategy | Table]) -> Table:
    """Return the strategy that plays as a player that draws one of `strategies` at the start of each game.

    At an information set each strategy has the weight of the probability that its own earlier moves lead there (von
    Stengel 1996). If that is 0 for all, all have the same weight.
    """
    if not strategies:
        raise ValueError("average_strategy needs at least one strategy, got none")
    game = GameTree(tree) if isinstance(tree, str) else tree
    places = {(info_set.agent, info_set.past, info_set.observation): info_set for info_set in game.info_sets}
    reach: dict[InformationSet, list[float]] = {}
    result: dict[InformationSet, dict[str, float]] = {}
    rows = {info_set: [_probabilities(game, each, info_set) for each in strategies] for info_set in game.info_sets}
    for info_set in game.info_sets:  # earlier decisions come first
        weights = [1.0] * len(strategies)
        if info_set.past:
            observation, move = info_set.past[-1]
            earlier = places[info_set.agent, info_set.past[:-1], observation]
            weights = [w * row.get(move, 0.0) for w, row in zip(reach[earlier], rows[earlier], strict=True)]
        reach[info_set] = weights
        shares = weights if sum(weights) > 0 else [1.0] * len(strategies)
        mean = {
            move: math.fsum(w * row.get(move, 0.0) for w, row in zip(shares, rows[info_set], strict=True))
            for move in dict.fromkeys((*info_set.legal, *itertools.chain.from_iterable(rows[info_set])))
        }
        total = math.fsum(mean.values())
        result[info_set] = {move: chance / total for move, chance in mean.items()}
    return result


def uniform(agent: str, observation: str, legal: Sequence[str]) -> Mapping[str, float]:
    """Return equal probabilities for all legal actions."""
    return dict.fromkeys(legal, 1 / len(legal))


def strategy_of(player: Player) -> Strategy | None:
    """Return the strategy of a random or scripted player, or None for other players and teams that include them."""
    if isinstance(player, Team):
        strategies = {agent: strategy_of(policy) for agent, policy in player.policies.items()}
        if not all(strategies.values()):
            return None
        return lambda agent, observation, legal: cast("Strategy", strategies[agent])(agent, observation, legal)
    if isinstance(player, Scripted):
        scripted = player
        return lambda agent, observation, legal: {scripted(observation, agent): 1.0}
    return uniform if isinstance(player, Random) else None


def _probabilities(game: GameTree, strategy: Strategy | Table, info_set: InformationSet) -> Mapping[str, float]:
    if isinstance(strategy, Mapping):
        row = strategy.get(info_set, {})
    else:
        row = strategy(info_set.agent, info_set.observation, info_set.legal)
    possible = info_set.legal if info_set in game.endless else (*info_set.legal, ILLEGAL)
    if (
        any(move not in possible for move in row)
        or min(row.values(), default=0.0) < 0
        or abs(math.fsum(row.values()) - 1) > 1e-9
    ):
        raise ValueError(
            f"the strategy of {info_set.agent} at {info_set.observation!r} is {dict(row)}. Expected probabilities that "
            f"sum to 1 over {', '.join(info_set.legal)}"
        )
    return row
