"""Who sits in a seat: language models, endpoints, people, random and scripted players, oracles.

In: what a user declares. Out: `seat_policies`, which answers who decides for an agent. Waits for nothing: declaring a
policy loads no weights; `forge_agents.rollout.players` brings it to life.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args
from urllib.parse import urlsplit

from forge_agents.errors import did_you_mean
from forge_agents.settings import settings_class

Thinking: TypeAlias = Literal["auto", "on", "off"]
"""Whether a model is asked to think before it answers."""

KeepThoughts: TypeAlias = Literal["all", "turn", "none"]
"""Which of its own thoughts a model reads again."""

Context: TypeAlias = Literal["end", "window", "summarise"]
"""What is done when a conversation does not fit the model's context any more."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@settings_class
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn from a model."""

    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy. Range [0, 5]."""
    temperature_from: float | None = None
    """What a training begins with. The temperature moves from it to `temperature` in equal steps; evaluations, and all
    else that is not a step of training, sample at `temperature`. Range (0, 5]. None: `temperature` throughout."""
    temperature_steps: int = 0
    """Steps of training after which `temperature` is reached, at least 1 where `temperature_from` is set."""
    top_p: float = 1.0
    """Smallest set of tokens whose probability reaches it is kept. Range (0, 1]."""
    top_k: int = 0
    """So many of the most probable tokens are kept; 0 keeps every token."""
    min_p: float = 0.0
    """Tokens are kept whose probability is at least this share of the most probable one's. Range [0, 1]."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the response holds already. Range [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted as often as the response holds a token. Range [-2, 2]."""
    repetition_penalty: float = 1.0
    """Logits of tokens that prompt or response hold are divided by it where they are positive, and multiplied where
    they are negative. Range (0, 10]."""
    bad_words: tuple[str, ...] = ()
    """Texts that a response may not hold, at most 64, as the tokenizer spells them at the beginning of a text and after
    a blank; spelled in other tokens they may still come."""
    max_tokens: int = 64
    """Most tokens of one response, or of its answer where thoughts have a budget of their own; at least 1."""
    max_thought_tokens: int | None = None
    """Most tokens of the thought before an answer, tags included, at least 1. A thought that has used them up is closed
    with tokens that are not sampled, nor learned from. None: thought and answer share `max_tokens`."""
    stop: tuple[str, ...] = ()
    """Texts that end a response; the end-of-turn token always does. In a thought they are texts like any other; those
    of an `Endpoint` are its server's affair. The text is no part of the answer. Its tokens are: the learner sees them,
    and a model's next prompt goes on behind them."""

    def __post_init__(self) -> None:
        for name, low, high, usual in (
            ("temperature", 0, 5, "1.0 samples the model's own distribution"),
            ("top_k", 0, math.inf, "0 keeps every token"),
            ("min_p", 0, 1, "0 keeps every token"),
            ("presence_penalty", -2, 2, "0 is none"),
            ("frequency_penalty", -2, 2, "0 is none"),
        ):
            if not (math.isfinite(getattr(self, name)) and low <= getattr(self, name) <= high):
                raise ValueError(f"{name}={getattr(self, name)} is outside [{low}, {high}]; {usual}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is outside (0, 1]; 1.0 keeps every token")
        if not 0 < self.repetition_penalty <= 10:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} is outside (0, 10]; 1.0 is none")
        if self.temperature_from is not None and not 0 < self.temperature_from <= 5:
            raise ValueError(f"temperature_from={self.temperature_from} is outside (0, 5]; None keeps `temperature`")
        if (self.temperature_from is None) != (self.temperature_steps == 0) or self.temperature_steps < 0:
            raise ValueError(
                f"temperature_from={self.temperature_from}, temperature_steps={self.temperature_steps}: set both, a "
                "temperature to begin with and the steps of training in which it moves, or neither"
            )
        _check_room(self)
        for name in ("stop", "bad_words"):
            given: object = getattr(self, name)
            if isinstance(given, str):
                raise TypeError(f"{name}={given!r} is one text; write {name}=({given!r},)")
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if not all(isinstance(text, str) and text for text in getattr(self, name)):
                raise ValueError(f"{name}={given!r} holds what is no text, or an empty one; leave it out")
        if len(self.bad_words) > _MOST_BAD_WORDS:
            raise ValueError(f"bad_words holds {len(self.bad_words)} texts; engines take at most {_MOST_BAD_WORDS}")

    @property
    def shaping(self) -> dict[str, Any]:
        """What bends the distribution beside the temperature, by name: only what is set."""
        return {name: getattr(self, name) for name, none in _NO_SHAPE.items() if getattr(self, name) != none}

    def at_step(self, step: int) -> Sampling:
        """How a step of training samples, counted from 0: at its own temperature, which does not move."""
        if self.temperature_from is None:
            return self
        left = max(0.0, 1 - step / self.temperature_steps)
        now = self.temperature + left * (self.temperature_from - self.temperature)
        return replace(self, temperature=now, temperature_from=None, temperature_steps=0)


def _check_room(sampling: Sampling) -> None:
    for name, what in (("max_tokens", "response"), ("max_thought_tokens", "thought")):
        most = getattr(sampling, name)
        if most is not None and most < 1:
            raise ValueError(f"{name}={most} leaves no room for a {what}; set at least 1")


def _check_asked(sampling: Sampling) -> None:
    """Raise ValueError where an endpoint cannot be asked to sample so."""
    for name, why in (
        ("temperature_from", "the temperature of an endpoint does not move; a policy's does"),
        ("max_thought_tokens", "the API has no budget for thoughts; max_tokens is for thought and answer"),
    ):
        if getattr(sampling, name) is not None:
            raise ValueError(f"{name}={getattr(sampling, name)}: {why}")


_MOST_BAD_WORDS = 64
"""Two spellings each; vLLM takes 128."""
_NO_SHAPE = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "bad_words": (),
}


LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers that can have an adapter, by Hugging Face's names."""
_MAX_RANK = 512


@settings_class
@dataclass(frozen=True, kw_only=True)
class LoRA:
    """A low-rank adapter (arXiv 2106.09685): the model stays as it is, and what is learned is added to its layers.

    A layer's weight W becomes ``W + alpha / rank * B A`` with A of ``[rank, in]`` and B of ``[out, rank]``; B starts at
    zero.
    """

    rank: int = 16
    """Rows of A, 1 to 512."""
    alpha: float = 32.0
    """Scale of what is added, before it is divided by `rank`; above 0."""
    targets: tuple[str, ...] = LORA_TARGETS
    """Layers that get an adapter: "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj". Keys and
    values get theirs together or not at all."""

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= _MAX_RANK:
            raise ValueError(f"rank={self.rank} of a LoRA adapter must lie between 1 and {_MAX_RANK}; 16 is usual")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha={self.alpha} of a LoRA adapter must be positive; twice the rank is usual")
        given: object = self.targets
        if isinstance(given, str):
            raise TypeError(f"targets={given!r} is one text; write targets=({given!r},)")
        object.__setattr__(self, "targets", tuple(self.targets))
        if not self.targets:
            raise ValueError("targets=() of a LoRA adapter leaves nothing to train; name at least one layer")
        for target in self.targets:
            if target not in LORA_TARGETS:
                raise ValueError(
                    f"target {target!r} of a LoRA adapter is unknown; known are {', '.join(LORA_TARGETS)}."
                    f"{did_you_mean(str(target), LORA_TARGETS)}"
                )
        if ("k_proj" in self.targets) != ("v_proj" in self.targets):
            raise ValueError(
                f"targets={self.targets} of a LoRA adapter: TorchTitan gives k_proj and v_proj their adapters "
                "together; name both or neither"
            )


@settings_class
@dataclass(frozen=True)
class Policy:
    """A language model that decides for a seat.

    Args:
        model: A built-in name (`smollm2-135m-instruct`), a Hugging Face id or a local folder.
    """

    model: str
    name: str = field(default="", kw_only=True)
    """Unique among the policies of a run: its weights, metrics and checkpoints carry it. Empty: "policy", or in a
    trainer whose seats hold several that were given no name, that of the first seat each of them sits in."""
    sampling: Sampling = field(default_factory=Sampling, kw_only=True)
    trainable: bool = field(default=True, kw_only=True)
    """Whether a trainer updates the weights."""
    lora: LoRA | None = field(default=None, kw_only=True)
    """What a trainer updates instead of the weights: an adapter. Policies with adapters on one model share an engine,
    and a learner where their adapters have one shape. None: all weights are trained."""
    learner: Mapping[str, Any] | None = field(default=None, kw_only=True, hash=False)
    """Learner settings of this policy alone, by the names of `fa.LearnerConfig`'s fields, such as ``{"lr": 3e-4}``.
    They override the trainer's; all other fields stay as the trainer has them. An `fa.LearnerConfig` overrides the
    fields in which it differs from the defaults. None (default): the trainer's settings."""
    constrain_actions: bool = field(default=False, kw_only=True)
    """Whether the engine may only write one of the environment's legal actions, where it lists them. For play and
    benchmarks: the sampler's log-probabilities are then those of the constrained distribution, which the learner does
    not compute, so a trainer refuses a trainable policy that sets it. `max_tokens` has to hold the longest action."""

    thinking: Thinking = field(default="auto", kw_only=True)
    """Whether the model is asked to think before it answers: "on", "off", or "auto", which leaves it to the chat
    template. A template without a switch for it is refused unless "auto"."""
    keep_thoughts: KeepThoughts = field(default="all", kw_only=True)
    """Which of its own thoughts the model reads again: "all"; those of the "turn", that is since it was last told
    anything but the results of its own tool calls; or "none". Where a thought is dropped the prompt is written anew,
    and what follows is a training sample of its own."""
    context: Context = field(default="end", kw_only=True)
    """What is done when the conversation does not fit the model's context any more: "end" ends the episode. "window"
    goes on with the instructions, the first observation and the last turns that fit; what is left out is replaced by a
    mark, or by what the environment's `compact` says. "summarise" asks the policy for notes first, which take the place
    of what is left out and are trained with the turn that they were written for."""

    def __post_init__(self) -> None:
        for choice, kind in (("thinking", Thinking), ("keep_thoughts", KeepThoughts), ("context", Context)):
            known = get_args(kind)
            if getattr(self, choice) not in known:
                raise ValueError(f"{choice}={getattr(self, choice)!r} is unknown; choose one of {', '.join(known)}")
        if not self.model:
            raise ValueError("model='' names no model; pass a built-in name, a Hugging Face id or a folder")
        object.__setattr__(self, "_named", bool(self.name))
        object.__setattr__(self, "name", self.name or "policy")
        _check_name(self.name)
        if self.lora is not None and not self.trainable:
            raise ValueError(
                f"policy {self.name!r} has a LoRA adapter and trainable=False, so the adapter would stay zero; drop "
                "lora=, or set trainable=True"
            )
        if self.learner is not None:
            object.__setattr__(self, "learner", _overrides(self.learner, self.name))
            if not self.trainable:
                raise ValueError(
                    f"policy {self.name!r} has learner={self.learner} and trainable=False, so these settings would "
                    "have no effect; drop learner=, or set trainable=True"
                )

    @property
    def named(self) -> bool:
        """Whether whoever made it gave it its name."""
        return bool(self.__dict__["_named"])


def _overrides(settings: object, name: str) -> dict[str, Any]:
    """Settings that override others, by name: a mapping as it is, of a dataclass what differs from its defaults."""
    if isinstance(settings, Mapping):
        return dict(settings)
    if is_dataclass(settings) and not isinstance(settings, type):
        values = ((one.name, getattr(settings, one.name), one.default) for one in fields(settings))
        return {key: value for key, value, default in values if value != default}
    raise TypeError(
        f"learner={settings!r:.60} of policy {name!r} must be a mapping of learner settings such as "
        '{"lr": 3e-4}, or an fa.LearnerConfig(...)'
    )


@settings_class
@dataclass(frozen=True)
class Endpoint:
    """A language model behind an OpenAI-compatible server: plays a seat, never trained, or answers a judge's questions.

    All episodes of a run share its connections, its places and its budgets. A run is one event loop: a trainer's life,
    a benchmark, a call of ``asyncio.run``.

    Args:
        url: Base of the API, such as ``http://127.0.0.1:8000/v1``; without user, password or query.
        model: What the server calls the model.
    """

    url: str
    model: str
    name: str = field(default="endpoint", kw_only=True)
    """Unique among the policies of a run."""
    api_key_env: str = field(default="", kw_only=True)
    """Environment variable that holds the key, read when the first question is asked; empty where none is needed."""
    sampling: Sampling = field(default_factory=Sampling, kw_only=True)
    """How a seat's answers are drawn; judges ask greedily. Settings at their default are not sent, `max_tokens` apart,
    and a setting that the server refuses by name is left out, which one line on the console says."""
    concurrency: int = field(default=8, kw_only=True)
    """Requests under way at the same time; more wait."""
    retries: int = field(default=4, kw_only=True)
    """Number of times that a request is sent again after 408, 409, 429, 5xx, such an error with status 200, or a lost
    connection, within `timeout_s`."""
    timeout_s: float = field(default=60.0, kw_only=True)
    """Seconds for one answer, its retries and the waits between them included."""
    max_requests: int | None = field(default=None, kw_only=True)
    """Answers that a run may ask for; one more is a `BudgetError`. None: any number."""
    max_total_tokens: int | None = field(default=None, kw_only=True)
    """Tokens, read and written as the server counts them, after which no more is asked: a `BudgetError`. What is under
    way then is finished. None: any number."""
    price_in: float = field(default=0.0, kw_only=True)
    """Currency units per million tokens read, for the costs that a benchmark shows and limits; 0: nothing is paid."""
    price_out: float = field(default=0.0, kw_only=True)
    """Currency units per million tokens written; 0: nothing is paid."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
        except ValueError:
            parts = urlsplit("")
        if "@" in parts.netloc or parts.query or parts.fragment:  # not shown: it may be a secret
            raise ValueError(
                "url holds a user, a password or a query; give the API's base alone, the key in an environment "
                "variable and the variable's name as api_key_env="
            )
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"url={self.url!r} is no HTTP address; give the API's base, e.g. http://127.0.0.1:8000/v1")
        if not self.model:
            raise ValueError("model='' names no model; give the name that the server knows it by")
        _check_name(self.name)
        if self.api_key_env and not _VARIABLE.fullmatch(self.api_key_env):  # not shown: it may be the key itself
            raise ValueError("api_key_env is no name of an environment variable; give the name, not the key")
        if self.concurrency < 1 or self.retries < 0:
            raise ValueError(
                f"concurrency={self.concurrency}, retries={self.retries}: at least 1 request at a time, retries >= 0"
            )
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s={self.timeout_s} must be positive and finite: no wait goes without a deadline")
        _check_asked(self.sampling)
        for budget in ("max_requests", "max_total_tokens"):
            limit = getattr(self, budget)
            if limit is not None and limit < 1:
                raise ValueError(f"{budget}={limit} allows nothing; give at least 1, or None for any number")
        if not (0 <= self.price_in < math.inf and 0 <= self.price_out < math.inf):
            raise ValueError(
                f"price_in={self.price_in}, price_out={self.price_out}: give what a million tokens cost, at least 0"
            )

    def api_key(self) -> str:
        """The key; empty where none is needed.

        Raises:
            ValueError: Its environment variable is not set, or holds what no key is.
        """
        if not self.api_key_env:
            return ""
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise ValueError(
                f"environment variable {self.api_key_env!r} is not set; it must hold the key of {self.model} at "
                f"{self.url}"
            )
        if not (key.isascii() and key.isprintable() and " " not in key):  # no header can carry it
            raise ValueError(f"environment variable {self.api_key_env!r} holds blanks or characters that no key has")
        return key


@settings_class
@dataclass(frozen=True, kw_only=True)
class Human:
    """A person in the terminal: sees what the seat sees, types its actions; Ctrl-D leaves."""

    name: str = "human"

    def __post_init__(self) -> None:
        _check_name(self.name)


@settings_class
@dataclass(frozen=True, kw_only=True)
class Random:
    """Plays a uniformly random legal action where the environment lists them, and random letters elsewhere.

    Where such letters turn out to be illegal, a `RuntimeWarning` names the environment and the agent.
    """

    name: str = "random"
    seed: int = 0
    """Mixed with the episode's seed, so a repeated episode repeats its moves."""
    shared: bool = False
    """Whether the siblings of a group meet the same draws, so that they differ by what the others do alone. Otherwise
    each draws its own; the first of them, as an episode that is played by itself."""

    def __post_init__(self) -> None:
        _check_name(self.name)


@settings_class
@dataclass(frozen=True, kw_only=True)
class Oracle:
    """Plays what the environment's own oracle says: the script that it was registered with, where it was with one.

    Each seat of each episode gets a player of its own, which reads what the seat reads and no more.
    """

    name: str = "oracle"
    seed: int = 0
    """Of its random choices, mixed with the episode's seed; most oracles make none."""
    shared: bool = False
    """As of `Random`: whether the siblings of a group meet the same choices."""

    def __post_init__(self) -> None:
        _check_name(self.name)


@settings_class
@dataclass(frozen=True)
class Scripted:
    """Plays what a function says.

    Args:
        fn: Called as ``fn(observation)`` or, if it takes two arguments, ``fn(observation, agent)``; returns the action.
    """

    fn: Callable[..., str]
    name: str = field(default="scripted", kw_only=True)

    def __post_init__(self) -> None:
        _check_name(self.name)
        if not callable(self.fn):
            raise TypeError(f"Scripted takes a function observation -> action, got {type(self.fn).__name__}")

    def __call__(self, observation: str, agent: str) -> str:
        """The action for `observation`. Raises TypeError where the function returns anything but text."""
        action = self.fn(observation, agent) if self._takes_agent else self.fn(observation)
        if not isinstance(action, str):
            raise TypeError(
                f"Scripted policy {self.name!r} returned {type(action).__name__} for {agent!r}; return a str"
            )
        return action

    @cached_property
    def _takes_agent(self) -> bool:
        """Whether the function takes two arguments."""
        arguments = inspect.signature(self.fn).parameters.values()
        return sum(p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in arguments) > 1


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"policy name {name!r} must be letters, digits, '-' or '_' (it names files and weights)")


AnyPolicy: TypeAlias = Policy | Endpoint | Human | Random | Oracle | Scripted
WORDS: Mapping[str, AnyPolicy] = MappingProxyType({"random": Random(), "human": Human(), "oracle": Oracle()})
"""Whom a word names, wherever players are named."""
PolicyMapping: TypeAlias = AnyPolicy | Mapping[str, AnyPolicy] | Callable[[str, int], AnyPolicy]
"""One policy for all seats, a policy per seat, or a function ``(agent, episode_seed) -> policy``."""


_ANSWERS = "; a function that answers what a player sees is fa.Scripted(function)"


def seat_policies(seats: PolicyMapping, agents: Sequence[str], seed: int) -> dict[str, AnyPolicy]:
    """Who decides for each of `agents` in the episodes with `seed`.

    Raises:
        ValueError: A seat without a policy, or a policy for a seat that does not exist.
        TypeError: Something that is not a policy.
    """
    if isinstance(seats, Mapping):
        missing = [agent for agent in agents if agent not in seats]
        extra = [seat for seat in seats if seat not in agents]
        if extra:
            raise ValueError(
                f"no seat {extra[0]!r}; the seats are {', '.join(agents)}.{did_you_mean(extra[0], agents)}"
            )
        if missing:
            raise ValueError(
                f"seat {missing[0]!r} has no policy; policies were given for {', '.join(seats) or 'no seat'}"
            )
        chosen = {agent: seats[agent] for agent in agents}
    elif isinstance(seats, AnyPolicy):
        chosen = dict.fromkeys(agents, seats)
    elif callable(seats):
        if isinstance(seats, type):
            raise TypeError(f"seats must be a policy, a mapping or a function, got {_what(seats)}")
        if not _takes_two(seats):
            raise TypeError(f"seats is a function that does not take (agent, seed), which choose a policy{_ANSWERS}")
        chosen = {agent: seats(agent, seed) for agent in agents}
    else:
        raise TypeError(f"seats must be a policy, a mapping or a function, got {_what(seats)}")
    for agent, policy in chosen.items():
        if not isinstance(policy, AnyPolicy):
            raise TypeError(
                f"seat {agent!r} holds {_what(policy)}; use fa.Policy, fa.Endpoint, fa.Human, fa.Random, fa.Oracle or "
                f"fa.Scripted{_ANSWERS if callable(policy) or callable(seats) else ''}"
            )
    return chosen


def _what(given: object) -> str:
    """What was given where a policy was expected."""
    if isinstance(given, type):
        return f"the class {given.__name__}: write {given.__name__}()"
    if not isinstance(given, str):
        return type(given).__name__
    meant = f"fa.{given.title()}()" if given in WORDS else f"fa.Policy({given!r}) for the model"
    return f"str {given!r}: write {meant}"


def _takes_two(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind("agent", 0)
    except TypeError:
        return False
    except ValueError:  # it does not say what it takes
        pass
    return True


def declared_policies(seats: PolicyMapping, agents: Sequence[str]) -> dict[str, AnyPolicy]:
    """Every policy of `seats` by name; for a function, those of a few probed episode seeds.

    Raises:
        ValueError: Two different policies under one name, or an endpoint whose key is not set.
    """
    by_name: dict[str, AnyPolicy] = {}
    for seed in _probed(seats):
        for policy in seat_policies(seats, agents, seed).values():
            if by_name.setdefault(policy.name, policy) != policy:
                raise ValueError(f"two different policies are called {policy.name!r}; give each its own name=")
    for policy in by_name.values():
        if isinstance(policy, Endpoint):
            policy.api_key()
    return by_name


def named_apart(seats: PolicyMapping) -> PolicyMapping:
    """`seats` with a name of its own for every model that was given none, unless it is the only one.

    So seats share weights only where they hold the same object or policies of one given name.
    """
    if not isinstance(seats, Mapping):
        return seats
    unnamed = {id(p): agent for agent, p in reversed(list(seats.items())) if isinstance(p, Policy) and not p.named}
    taken = {p.name for p in seats.values() if id(p) not in unnamed}
    if len(unnamed) + ("policy" in taken) < 2:
        return seats
    named: dict[int, AnyPolicy] = {}
    for agent, policy in seats.items():
        if isinstance(policy, Policy) and id(policy) in unnamed and id(policy) not in named:
            base = name = re.sub(r"[^A-Za-z0-9_-]+|^[_-]+", "-", agent).strip("-") or "policy"
            number = 1
            while name in taken:
                number += 1
                name = f"{base}-{number}"
            taken.add(name)
            named[id(policy)] = replace(policy, name=name)
    return {agent: named.get(id(policy), policy) for agent, policy in seats.items()}


def players_of(seats: PolicyMapping, agents: Sequence[str]) -> dict[str, list[AnyPolicy]]:
    """Who may sit in each seat; for a function, in the episodes of a few probed seeds.

    Raises:
        ValueError: A function gives several models without a name: nobody knows which of them are one.
    """
    found: dict[str, list[AnyPolicy]] = {agent: [] for agent in agents}
    for seed in _probed(seats):
        for agent, policy in seat_policies(seats, agents, seed).items():
            if not any(policy is other for other in found[agent]):
                found[agent].append(policy)
    each = [policy for policies in found.values() for policy in policies]
    unnamed = {id(policy) for policy in each if isinstance(policy, Policy) and not policy.named}
    if not isinstance(seats, Mapping) and len(unnamed) > 1:
        raise ValueError(
            f"the function that gives seats their policies made {len(unnamed)} of fa.Policy without a name in "
            f"{len(_probed(seats))} episodes; make each once, outside of it, with its own name="
        )
    return found


def _probed(seats: PolicyMapping) -> range:
    """Episode seeds for which a function is asked."""
    return range(64) if callable(seats) and not isinstance(seats, AnyPolicy) else range(1)
