"""Players: language models, endpoints, people, random and scripted policies, and their assignment to agents.

Declaring a policy loads no weights. `forge_agents.rollout.players` makes the object that acts in an episode.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from forge_agents.errors import did_you_mean
from forge_agents.settings import check_call, settings_class

Thinking: TypeAlias = Literal["auto", "on", "off", "low", "medium", "high"]
"""Reasoning switch of the chat template."""

KeepReasoning: TypeAlias = Literal["all", "turn", "none"]
"""Part of its own earlier reasoning that a model reads again."""

Context: TypeAlias = Literal["end", "window", "summarize", "newest"]
"""Handling of a conversation that outgrows the model's context."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@settings_class
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling of tokens from a model."""

    temperature: float = 1.0
    """Divisor of the logits, in [0, 2]. 0 is greedy."""
    initial_temperature: float | None = None
    """Temperature of the first training step, in (0, 2]. The temperature changes linearly to `temperature` over
    `temperature_steps` steps. Evaluations always use `temperature`. None: `temperature` from the start."""
    temperature_steps: int = 0
    """Number of training steps until `temperature` is reached. At least 1 if `initial_temperature` is set."""
    top_p: float = 1.0
    """Nucleus sampling: cumulative probability of the tokens that are kept, in (0, 1]."""
    top_k: int = 0
    """Number of most probable tokens that are kept. 0 keeps all."""
    min_p: float = 0.0
    """Minimum probability of a kept token, relative to the most probable token, in [0, 1]."""
    presence_penalty: float = 0.0
    """Amount subtracted from the logits of tokens that the response already contains, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Amount subtracted from a token's logit for each occurrence in the response, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Factor for tokens that the prompt or the response contains, in (0, 10]: positive logits are divided by it,
    negative ones multiplied."""
    bad_words: tuple[str, ...] = ()
    """Texts that a response must not contain, at most 64. Their tokenizations at the start of a text and after a space
    are blocked. Other tokenizations are not blocked."""
    max_tokens: int = 64
    """Maximum number of tokens of a response, or of its answer if `max_reasoning_tokens` is set. At least 1."""
    max_reasoning_tokens: int | None = None
    """Maximum number of tokens of the reasoning before an answer, tags included. At least 1. Reasoning that reaches the
    limit is closed with tokens that are not trained on. None: reasoning and answer share `max_tokens`."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, in addition to the end-of-turn token. Stop texts do not apply within reasoning. For an
    `Endpoint` the server decides. The stop text is removed from the answer, but its tokens are trained on and stay in
    the model's next prompt."""

    def __post_init__(self) -> None:
        for name, low, high, default in (
            ("temperature", 0, 2, "1.0 samples the model's own distribution"),
            ("top_k", 0, math.inf, "0 keeps every token"),
            ("min_p", 0, 1, "0 keeps every token"),
            ("presence_penalty", -2, 2, "0 is none"),
            ("frequency_penalty", -2, 2, "0 is none"),
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise ValueError(f"{name}={value} is outside [{low}, {high}]; {default}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is outside (0, 1]. 1.0 keeps every token")
        if not 0 < self.repetition_penalty <= 10:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} is outside (0, 10]. 1.0 is none")
        self._check_schedule()
        for name, text in (("max_tokens", "response"), ("max_reasoning_tokens", "reasoning")):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ValueError(f"{name}={limit} leaves no room for a {text}. Set at least 1")
            if limit is not None and limit > _MAX_TOKENS:
                raise ValueError(f"{name}={limit} must be at most {_MAX_TOKENS}, more than any context has")
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        if len(self.bad_words) > _MAX_BAD_WORDS:
            raise ValueError(f"bad_words has {len(self.bad_words)} texts. Engines accept at most {_MAX_BAD_WORDS}")

    def _check_schedule(self) -> None:
        initial, steps = self.initial_temperature, self.temperature_steps
        if initial is not None and not 0 < initial <= 2:
            raise ValueError(f"initial_temperature={initial} is outside (0, 2]. None keeps `temperature`")
        if (initial is None) != (steps == 0) or steps < 0:
            raise ValueError(
                f"initial_temperature={initial}, temperature_steps={steps}: set both, the first temperature and the "
                "number of training steps until `temperature` is reached, or neither"
            )

    @property
    def logit_settings(self) -> dict[str, Any]:
        """Settings other than the temperature that change the distribution, without those at their defaults."""
        return {name: getattr(self, name) for name, off in _LOGIT_DEFAULTS.items() if getattr(self, name) != off}

    def at_step(self, step: int) -> Sampling:
        """Return the sampling of training step `step`, counted from 0, with a constant temperature."""
        if self.initial_temperature is None:
            return self
        remaining = max(0.0, 1 - step / self.temperature_steps)
        temperature = self.temperature + remaining * (self.initial_temperature - self.temperature)
        return replace(self, temperature=temperature, initial_temperature=None, temperature_steps=0)


def _texts(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        raise TypeError(f"{name}={value!r} is a single text. Write {name}=({value!r},)")
    texts: tuple[object, ...] = tuple(value)  # type: ignore[arg-type]
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{name}={value!r} must contain only non-empty texts. Remove the others")
    return texts  # type: ignore[return-value]


_MAX_TOKENS = 2**31 - 1
_MAX_BAD_WORDS = 64
"""Each text has two tokenizations, and vLLM accepts 128."""
_LOGIT_DEFAULTS = {
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
    """A low-rank adapter (arXiv 2106.09685) that is trained while the model's weights stay fixed.

    A layer's weight W becomes ``W + alpha / rank * B A`` with A of shape ``[rank, in]`` and B of shape ``[out, rank]``.
    B starts at zero.
    """

    rank: int = 16
    """Rank of the adapter, 1 to 512."""
    alpha: float = 32.0
    """Scale of the update before the division by `rank`. Above 0."""
    targets: tuple[str, ...] = LORA_TARGETS
    """Layers with an adapter: "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj". "k_proj" and
    "v_proj" must be given together. Phi fuses the first three, and "gate_proj" and "up_proj": give all or none."""

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= _MAX_RANK:
            raise ValueError(f"rank={self.rank} of a LoRA adapter must lie between 1 and {_MAX_RANK}; 16 is usual")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha={self.alpha} of a LoRA adapter must be positive. Twice the rank is usual")
        targets: object = self.targets
        if isinstance(targets, str):
            raise TypeError(f"targets={targets!r} is a single text. Write targets=({targets!r},)")
        object.__setattr__(self, "targets", tuple(self.targets))
        if not self.targets:
            raise ValueError("targets=() of a LoRA adapter leaves nothing to train. Name at least one layer")
        for target in self.targets:
            if target not in LORA_TARGETS:
                raise ValueError(
                    f"targets={self.targets} of a LoRA adapter: {target!r} is unknown. Choose from "
                    f"{', '.join(LORA_TARGETS)}.{did_you_mean(str(target), LORA_TARGETS)}"
                )
        if ("k_proj" in self.targets) != ("v_proj" in self.targets):
            raise ValueError(
                f"targets={self.targets} of a LoRA adapter: TorchTitan adapts k_proj and v_proj together. Name both or "
                "neither"
            )


@settings_class
@dataclass(frozen=True)
class Policy:
    """A language model that acts for an agent.

    Args:
        model: A built-in name (`smollm2-135m-instruct`), a Hugging Face id or a local folder.
    """

    model: str
    name: str = field(default="", kw_only=True)
    """Name of the policy, unique within a run. Weights, metrics and checkpoints carry it. Default: "policy", or if a
    trainer has several unnamed policies, the name of the first agent that each of them plays."""
    sampling: Sampling = field(default_factory=Sampling, kw_only=True)
    trainable: bool = field(default=True, kw_only=True)
    """Whether a trainer updates the weights."""
    lora: LoRA | None = field(default=None, kw_only=True)
    """Adapter that is trained instead of the weights. Policies with adapters on the same model share an engine, and a
    learner if their adapters have the same shape. None: all weights are trained."""
    learner: Mapping[str, Any] | None = field(default=None, kw_only=True, hash=False)
    """Learner settings of this policy, by the names of `fa.LearnerConfig`'s fields, such as ``{"lr": 3e-4}``. Settings
    given here override the trainer's settings. An `fa.LearnerConfig` overrides the fields in which it differs from the
    defaults. None (default): the trainer's settings."""
    constrain_actions: bool = field(default=False, kw_only=True)
    """Whether the engine may generate only legal actions, if the environment lists them. For play and benchmarks only:
    the log-probabilities are those of the constrained distribution. The learner does not compute this distribution, so
    a trainer rejects a trainable policy with this setting. `max_tokens` must be large enough for the longest action."""

    thinking: Thinking = field(default="auto", kw_only=True)
    """Reasoning before the answer: "on", "off", an effort ("low", "medium" or "high"), or "auto" (default), which is
    the chat template's default. All but "auto" require a template with such a switch, such as gpt-oss's for efforts."""
    keep_reasoning: KeepReasoning = field(default="all", kw_only=True)
    """Earlier reasoning of its own that the model reads again: "all" (default), "turn" (since the last message other
    than a result of its own tool calls), or "none". When reasoning is dropped, the prompt is rendered again, and the
    following turns form a separate training sample."""
    context: Context = field(default="end", kw_only=True)
    """Handling of a conversation that no longer fits the model's context. "end" (default) ends the episode, but
    is as "window" in games tagged as zero-sum or competitive, where a player could fill a rival's context. "window"
    continues with the instructions, the first observation and the last turns that fit. The omitted turns are replaced
    by a marker, or by the text of the environment's `compact`. "summarize" first asks the policy for notes. The notes
    replace the omitted turns and are trained with the turn that follows. "newest" does not wait for the limit: each
    prompt has only the instructions, the newest observation, and the agent's tool calls since this observation with
    their results. Each such prompt is a separate training sample. Not for programs, which choose their own messages."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model='' names no model. Pass a built-in name, a Hugging Face id or a folder")
        object.__setattr__(self, "_named", bool(self.name))
        object.__setattr__(self, "name", self.name or "policy")
        _check_name(self.name)
        if self.lora is not None and not self.trainable:
            raise ValueError(
                f"policy {self.name!r} has a LoRA adapter and trainable=False, so the adapter would stay zero. Remove "
                "lora=, or set trainable=True"
            )
        if self.learner is not None:
            object.__setattr__(self, "learner", _overrides(self.learner, self.name))
            if not self.trainable:
                raise ValueError(
                    f"policy {self.name!r} has learner={self.learner} and trainable=False, so these settings would "
                    "have no effect. Remove learner=, or set trainable=True"
                )

    @property
    def named(self) -> bool:
        """Whether `name` was set by the user."""
        return bool(self.__dict__["_named"])


@settings_class
@dataclass(frozen=True)
class SnapshotPolicy(Policy):
    """A policy that does not learn and plays snapshots of a LoRA policy, as adapters on that policy's engine.

    The model without an adapter is the start model. The owner of the snapshots loads them into the adapters.
    """

    snapshot_lora: LoRA = field(kw_only=True)
    """Settings of the adapters, those of the LoRA policy."""
    slots: int = field(kw_only=True)
    """Number of adapters, so of snapshots that play at the same time."""

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters."""
        return tuple(f"{self.name}-{slot}" for slot in range(1, self.slots + 1))


def _overrides(settings: object, name: str) -> dict[str, Any]:
    """Return learner settings as a mapping. Of a dataclass, fields at their defaults are left out."""
    if isinstance(settings, Mapping):
        return dict(settings)
    if is_dataclass(settings) and not isinstance(settings, type):
        values = ((item.name, getattr(settings, item.name), item.default) for item in fields(settings))
        return {key: value for key, value, default in values if value != default}
    raise TypeError(
        f"learner={settings!r:.60} of policy {name!r} must be a mapping of learner settings such as "
        '{"lr": 3e-4}, or an fa.LearnerConfig(...)'
    )


@settings_class
@dataclass(frozen=True)
class Endpoint:
    """A language model behind an OpenAI-compatible server, for playing an agent or judging. The model is never trained.

    All episodes of a run share its connections and its budgets. A run is one event loop: the lifetime of a trainer, a
    benchmark, or a call of ``asyncio.run``.

    Args:
        url: Base URL of the API, such as ``http://127.0.0.1:8000/v1``, without user, password or query.
        model: Name of the model on the server.
    """

    url: str
    model: str
    name: str = field(default="endpoint", kw_only=True)
    """Unique name among the policies of a run."""
    api_key_env: str = field(default="", kw_only=True)
    """Environment variable with the API key, read at the first request. Empty if the server needs no key."""
    sampling: Sampling = field(default_factory=Sampling, kw_only=True)
    """Sampling of an agent's answers. Judges are greedy. Settings at their defaults are not sent, except `max_tokens`.
    A setting that the server rejects by name is left out, and the console says so once."""
    concurrency: int = field(default=8, kw_only=True)
    """Maximum number of concurrent requests."""
    retries: int = field(default=4, kw_only=True)
    """Number of retries within `timeout_s` after status 408, 409, 429 or 5xx, after such an error in a response with
    status 200, or after a lost connection."""
    timeout_s: float = field(default=60.0, kw_only=True)
    """Time limit for an answer in seconds, retries and the waits between them included."""
    max_requests: int | None = field(default=None, kw_only=True)
    """Maximum number of answers in a run. Another request raises `BudgetError`. None: no limit."""
    max_total_tokens: int | None = field(default=None, kw_only=True)
    """Token budget of a run: prompt and completion tokens as the server counts them. Once it is used up, a new request
    raises `BudgetError`. Current requests finish. None: no limit."""
    price_in: float = field(default=0.0, kw_only=True)
    """Price of a million prompt tokens in any currency, for the costs that a benchmark shows and limits."""
    price_out: float = field(default=0.0, kw_only=True)
    """Price of a million completion tokens."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
        except ValueError:
            parts = urlsplit("")
        if "@" in parts.netloc or parts.query or parts.fragment:  # not printed: the URL may contain a secret
            raise ValueError(
                "url contains a user, a password or a query. Give only the base of the API, put the key into an "
                "environment variable and pass the variable's name as api_key_env="
            )
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(
                f"url={self.url!r} is not an HTTP address. Give the base of the API, e.g. http://127.0.0.1:8000/v1"
            )
        if not self.model:
            raise ValueError("model='' names no model. Give the model's name on the server")
        _check_name(self.name)
        if self.api_key_env and not _VARIABLE.fullmatch(self.api_key_env):  # not printed: it may be the key itself
            raise ValueError("api_key_env is not the name of an environment variable. Give the name, not the key")
        self._check_numbers()

    def _check_numbers(self) -> None:
        if self.concurrency < 1 or self.retries < 0:
            raise ValueError(
                f"concurrency={self.concurrency}, retries={self.retries}: concurrency must be at least 1, retries at "
                "least 0"
            )
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s={self.timeout_s} must be positive and finite: every wait has a timeout")
        for name, reason in (
            ("initial_temperature", "an endpoint has a constant temperature. Only a trained policy has a schedule"),
            ("max_reasoning_tokens", "the API has no separate limit for reasoning. max_tokens covers both"),
        ):
            if getattr(self.sampling, name) is not None:
                raise ValueError(f"{name}={getattr(self.sampling, name)}: {reason}")
        for name in ("max_requests", "max_total_tokens"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ValueError(f"{name}={limit} allows no request. Set at least 1, or None for no limit")
        if not (0 <= self.price_in < math.inf and 0 <= self.price_out < math.inf):
            raise ValueError(
                f"price_in={self.price_in}, price_out={self.price_out}: give the price of a million tokens, at least 0"
            )

    def api_key(self) -> str:
        """Return the API key, or an empty text if the server needs none.

        Raises:
            ValueError: The environment variable is not set, or its value cannot be a key.
        """
        if not self.api_key_env:
            return ""
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise ValueError(
                f"environment variable {self.api_key_env!r} is not set. It must contain the key of {self.model} at "
                f"{self.url}"
            )
        if not (key.isascii() and key.isprintable() and " " not in key):  # no HTTP header can carry it
            raise ValueError(
                f"environment variable {self.api_key_env!r} contains spaces or characters that a key cannot have"
            )
        return key


@settings_class
@dataclass(frozen=True, kw_only=True)
class Human:
    """A person at the terminal. The person sees observations and types actions. Ctrl-D ends the episode."""

    name: str = "human"

    def __post_init__(self) -> None:
        _check_name(self.name)


@settings_class
@dataclass(frozen=True, kw_only=True)
class Random:
    """A uniformly random choice among the legal actions if the environment lists them, otherwise random letters.

    If such letters are illegal, a `RuntimeWarning` names the environment and the agent.
    """

    name: str = "random"
    seed: int = 0
    """Random seed, combined with the episode's seed, so a repeated episode has the same actions."""
    shared: bool = False
    """Whether all episodes of a group use the same random numbers, so that they differ only by the other players'
    actions. Default: each episode has its own. The first of a group has those of an episode that is played alone."""

    def __post_init__(self) -> None:
        _check_name(self.name)


@settings_class
@dataclass(frozen=True, kw_only=True)
class Oracle:
    """The scripted policy that the environment was registered with, if it has one.

    Each agent of each episode has its own instance. An instance reads only its agent's observations.
    """

    name: str = "oracle"
    seed: int = 0
    """Random seed, combined with the episode's seed. Most scripted policies are deterministic."""
    shared: bool = False
    """Whether all episodes of a group use the same random numbers, as for `Random`."""

    def __post_init__(self) -> None:
        _check_name(self.name)


@settings_class
@dataclass(frozen=True)
class Scripted:
    """A function as a player.

    Args:
        fn: Called as ``fn(observation)`` or, if it takes two arguments, ``fn(observation, agent)``. Returns the action.
            May be a coroutine function, which runs in the loop of the episode.
    """

    fn: Callable[..., Any]
    name: str = field(default="scripted", kw_only=True)

    def __post_init__(self) -> None:
        _check_name(self.name)
        if not callable(self.fn):
            raise TypeError(f"Scripted takes a function observation -> action, got {type(self.fn).__name__}")
        names = ("observation", "agent") if self._takes_agent else ("observation",)
        check_call(self.fn, "the function of Scripted,", *names)

    def __call__(self, observation: str, agent: str) -> str:
        """Return the action for `observation`. Raises TypeError if the function does not return a str."""
        return self._checked(self._call(observation, agent), agent)

    async def decide(self, observation: str, agent: str) -> str:
        """Return the action for `observation`, also if the function is a coroutine function. Raises TypeError."""
        action = self._call(observation, agent)
        return self._checked(await action if inspect.isawaitable(action) else action, agent)

    def _call(self, observation: str, agent: str) -> Any:
        return self.fn(observation, agent) if self._takes_agent else self.fn(observation)

    def _checked(self, action: Any, agent: str) -> str:
        if not isinstance(action, str):
            raise TypeError(
                f"Scripted policy {self.name!r} returned {type(action).__name__} for {agent!r}. Return a str"
            )
        return action

    @cached_property
    def _takes_agent(self) -> bool:
        try:
            arguments = inspect.signature(self.fn).parameters.values()
        except ValueError:  # built-ins such as `str` have no signature
            return False
        return sum(p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in arguments) > 1


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"policy name {name!r} must be letters, digits, '-' or '_' (it names files and weights)")


AnyPolicy: TypeAlias = Policy | Endpoint | Human | Random | Oracle | Scripted
KEYWORDS: Mapping[str, AnyPolicy] = MappingProxyType({"random": Random(), "human": Human(), "oracle": Oracle()})
"""Players that a word selects on the command line and in YAML files."""
PolicyMapping: TypeAlias = AnyPolicy | Mapping[str, AnyPolicy] | Callable[[str, int], AnyPolicy]
"""A policy for all agents, a policy per agent, or a function ``(agent, episode_seed) -> policy``."""


_FUNCTION_HINT = ". To use a function of observations as a player, wrap it: fa.Scripted(function)"
_PROBED_SEEDS = range(64)
"""Episode seeds for which a policy-mapping function is evaluated to list its policies."""


def resolve_policies(policies: PolicyMapping, agents: Sequence[str], seed: int) -> dict[str, AnyPolicy]:
    """Return the policy of each agent in the episodes with `seed`.

    Raises:
        ValueError: There are no agents, an agent has no policy, or a policy was given for an unknown agent.
        TypeError: A value is not a policy, or an agent is not a string.
    """
    if not agents:
        raise ValueError("possible_agents is empty. Name one or more agents, such as 'player_0'")
    if odd := [agent for agent in agents if not isinstance(agent, str)]:  # type: ignore[redundant-expr]
        raise TypeError(f"possible_agents has {odd[0]!r}. Names of agents must be strings, such as 'player_0'")
    if isinstance(policies, Mapping):
        missing = [agent for agent in agents if agent not in policies]
        unknown = [agent for agent in policies if agent not in agents]
        if unknown:
            raise ValueError(
                f"no agent {unknown[0]!r}. The agents are {', '.join(agents)}.{did_you_mean(unknown[0], agents)}"
            )
        if missing:
            raise ValueError(
                f"agent {missing[0]!r} has no policy. Policies were given for {', '.join(policies) or 'no agent'}"
            )
        resolved = {agent: policies[agent] for agent in agents}
    elif isinstance(policies, AnyPolicy):
        resolved = dict.fromkeys(agents, policies)
    elif callable(policies) and not isinstance(policies, type):  # type: ignore[redundant-expr]
        if not _accepts_agent_and_seed(policies):
            raise TypeError(f"a policy mapping must be a function (agent, seed) that returns a policy{_FUNCTION_HINT}")
        resolved = {agent: policies(agent, seed) for agent in agents}
    else:
        raise TypeError(f"expected a policy, a mapping from agent to policy or a function, got {_describe(policies)}")
    for agent, policy in resolved.items():
        if not isinstance(policy, AnyPolicy):
            raise TypeError(
                f"the policy of agent {agent!r} is {_describe(policy)}. Use fa.Policy, fa.Endpoint, fa.Human, "
                f"fa.Random, fa.Oracle or fa.Scripted{_FUNCTION_HINT if callable(policy) or callable(policies) else ''}"
            )
    return resolved


def _describe(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}: write {value.__name__}()"
    if not isinstance(value, str):
        return type(value).__name__
    expression = f"fa.{value.title()}()" if value in KEYWORDS else f"fa.Policy({value!r}) for the model"
    return f"str {value!r}: write {expression}"


def _accepts_agent_and_seed(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind("agent", 0)
    except TypeError:
        return False
    except ValueError:  # built-ins have no signature
        pass
    return True


def policies_by_name(policies: PolicyMapping, agents: Sequence[str]) -> dict[str, AnyPolicy]:
    """Return all policies by name. A function is evaluated for a few episode seeds.

    Raises:
        ValueError: Two different policies have the same name, or the key of an endpoint is not set.
    """
    by_name: dict[str, AnyPolicy] = {}
    for seed in _seeds_to_probe(policies):
        for policy in resolve_policies(policies, agents, seed).values():
            if by_name.setdefault(policy.name, policy) != policy:
                raise ValueError(f"two different policies are called {policy.name!r}. Give each its own name=")
    for policy in by_name.values():
        if isinstance(policy, Endpoint):
            policy.api_key()
    return by_name


def with_unique_names(policies: PolicyMapping) -> PolicyMapping:
    """Return the mapping with unnamed models named after the first agent they play, unless there is only one model.

    Agents share weights only if they have the same policy object, or policies with the same explicit name.
    """
    if not isinstance(policies, Mapping):
        return policies
    unnamed = {id(p): agent for agent, p in reversed(list(policies.items())) if isinstance(p, Policy) and not p.named}
    values: Iterable[Any] = policies.values()  # types are checked later
    used = {p.name for p in values if isinstance(p, AnyPolicy) and id(p) not in unnamed}
    if len(unnamed) + ("policy" in used) < 2:
        return policies
    renamed: dict[int, AnyPolicy] = {}
    for agent, policy in policies.items():
        if isinstance(policy, Policy) and id(policy) in unnamed and id(policy) not in renamed:
            renamed[id(policy)] = replace(policy, name=unique_name(agent, used))
    return {agent: renamed.get(id(policy), policy) for agent, policy in policies.items()}


def unique_name(text: str, used: set[str]) -> str:
    """Return a valid policy name that is made of a text and not in `used`, and add it to `used`."""
    base = name = re.sub(r"[^A-Za-z0-9_-]+|^[_-]+", "-", text).strip("-") or "policy"
    number = 1
    while name in used:
        number += 1
        name = f"{base}-{number}"
    used.add(name)
    return name


def candidate_policies(policies: PolicyMapping, agents: Sequence[str]) -> dict[str, list[AnyPolicy]]:
    """Return the policies that each agent may have. A function is evaluated for a few episode seeds.

    Raises:
        ValueError: A function returns several models without a name, so it is unclear which of them share weights.
    """
    candidates: dict[str, list[AnyPolicy]] = {agent: [] for agent in agents}
    seeds = _seeds_to_probe(policies)
    for seed in seeds:
        for agent, policy in resolve_policies(policies, agents, seed).items():
            if not any(policy is other for other in candidates[agent]):
                candidates[agent].append(policy)
    every = [policy for group in candidates.values() for policy in group]
    unnamed = {id(policy) for policy in every if isinstance(policy, Policy) and not policy.named}
    if not isinstance(policies, Mapping) and len(unnamed) > 1:
        raise ValueError(
            f"the policy-mapping function returned {len(unnamed)} different fa.Policy objects without a name in "
            f"{len(seeds)} episodes. Create each of them once, outside the function, with its own name="
        )
    return candidates


def _seeds_to_probe(policies: PolicyMapping) -> range:
    return _PROBED_SEEDS if callable(policies) and not isinstance(policies, AnyPolicy) else range(1)
