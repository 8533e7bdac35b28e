"""Checks that all settings classes share: names, types of values, and names from other libraries."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import os
import reprlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from forge_agents.errors import ArgumentError, did_you_mean, near_names

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

MAX_INTEGER = 2**63 - 1
"""Largest whole number of a setting."""
MAX_COUNT = 1_000_000
"""Largest number of things that a setting asks for at once, such as the episodes of a step."""
_EQUIVALENTS = {
    "GRPOConfig.group_size": "num_generations n_samples_per_prompt rollout_n",
    "GRPOConfig.groups_per_step": "per_device_train_batch_size train_batch_size batch_size",
    "GRPOConfig.credit": "adv_estimator",
    "GRPOConfig.tracker": "report_to",
    "GRPOConfig.checkpoint_every": "save_steps",
    "GRPOConfig.keep_checkpoints": "save_total_limit",
    "GRPOConfig.eval_every": "eval_steps",
    "OfflineConfig.batch_size": "per_device_train_batch_size train_batch_size",
    "OfflineConfig.max_sample_tokens": "max_seq_length max_length",
    "OfflineConfig.tracker": "report_to",
    "OfflineConfig.checkpoint_every": "save_steps",
    "OfflineConfig.keep_checkpoints": "save_total_limit",
    "OfflineConfig.eval_every": "eval_steps",
    "LearnerConfig.max_tokens_per_microbatch": "gradient_accumulation_steps",
    "LearnerConfig.lr": "learning_rate",
    "LearnerConfig.kl_coef": "beta kl_loss_coef init_kl_coef",
    "LearnerConfig.reference": "reference_update_every ref_model ref_model_sync_steps teacher teacher_model",
    "LearnerConfig.clip": "epsilon epsilon_high cliprange clip_ratio clip_ratio_low clip_ratio_high",
    "LearnerConfig.loss": "loss_type",
    "LearnerConfig.entropy_coef": "entropy_coeff",
    "LearnerConfig.lr_decay": "lr_scheduler_type",
    "LearnerConfig.warmup_steps": "warmup_ratio",
    "LearnerConfig.betas": "adam_beta1 adam_beta2",
    "LearnerConfig.max_grad_norm": "gradient_clipping grad_clip",
    "LearnerConfig.compute_dtype": "bf16 fp16",
    "LearnerConfig.activation_checkpointing": "gradient_checkpointing",
    "EngineConfig.max_model_len": "max_seq_length max_length max_prompt_length",
    "Credit.scale": "scale_rewards",
    "Sampling.max_tokens": "max_new_tokens max_completion_length max_response_length max_tokens",
    "Sampling.stop": "stop_strings stop_sequences",
    "Sampling.temperature": "do_sample temperature",
    "Sampling.top_p": "top_p",
    "Sampling.top_k": "top_k",
    "Sampling.min_p": "min_p",
    "Sampling.repetition_penalty": "repetition_penalty",
    "Policy.lora": "peft_config lora_config",
    "LoRA.rank": "r lora_r lora_rank",
    "LoRA.alpha": "lora_alpha",
    "LoRA.targets": "target_modules",
    "Policy.model": "model_name model_name_or_path pretrained_model_name_or_path model",
    "EngineConfig.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "EngineConfig.tp": "vllm_tensor_parallel_size tensor_parallel_size",
    "Endpoint.url": "base_url",
}
"""Names of TRL, verl, OpenRLHF, PEFT and transformers for each setting."""
_ADVICE = {
    "use_vllm": "Models are always served by vLLM. Leave it out.",
    "processing_class tokenizer": "The tokenizer comes with the model. Leave it out.",
    "num_train_epochs total_epochs": (
        "Give the number of optimizer steps as `steps` (supervised fine-tuning also takes `epochs`)."
    ),
    "max_steps total_training_steps": "Give the number of optimizer steps as `steps`.",
    "output_dir": "The folder of a run is `out_dir`.",
    "args": "The settings of a trainer are `config`.",
    "reward_funcs": "The reward of a run is `reward`. Several rewards by name are `fa.MultiReward`.",
    "reward_fn": "The reward of a run is `reward`.",
    "reward_weights": "Several rewards with weights are `fa.MultiReward(rewards, weights)`.",
    "train_dataset": "The first argument of `fit` is the environment, or the dataset for fine-tuning.",
}
"""Advice for names of these libraries that have no equivalent setting."""


def _other_names() -> dict[str, tuple[tuple[str, str], ...] | str]:
    by_name: dict[str, list[tuple[str, str]]] = {}
    for place, names in _EQUIVALENTS.items():
        owner, _, field = place.partition(".")
        for name in names.split():
            by_name.setdefault(name, []).append((owner, field))
    advice = {name: text for names, text in _ADVICE.items() for name in names.split()}
    return advice | {name: tuple(places) for name, places in by_name.items()}


OTHER_NAMES = _other_names()
"""Names of other libraries, each with the class and setting that mean the same here, or with advice."""


def settings_class(kind: C) -> C:
    """Decorator of a settings dataclass that checks names and types of its arguments.

    Nested settings may be mappings. Floats with integer values are accepted as integers. True and False are accepted
    for "on" and "off", as YAML 1.1 reads them.

    Raises:
        TypeError: A name is unknown (the message names the nearest known one), or a value has another type.
        ValueError: A number is NaN or no integer, or a word is none of the choices.
    """
    plain = kind.__init__  # type: ignore[misc]
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    positional = [field.name for field in dataclasses.fields(kind) if field.init and not field.kw_only]

    @functools.wraps(plain)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        check_names(kind.__name__, kwargs, names, kind=kind)
        hints, arguments = _hints(kind), {**dict(zip(positional, args, strict=False)), **kwargs}
        values = {name: _converted(kind, name, value, hints[name]) for name, value in arguments.items()}
        for name, value in arguments.items():
            _check_choice(name, value, hints[name])
        first = [values[name] for name in positional[: len(args)]]
        plain(self, *first, *args[len(positional) :], **{name: values[name] for name in kwargs})

    kind.__init__ = initialize  # type: ignore[misc]
    return kind


def values_of(settings: Any, kind: type | None = None) -> dict[str, Any]:
    """Return the fields of a settings object by name, without copying values: those of `kind`, by default all."""
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(kind or settings)}


def check_call(function: Callable[..., Any], description: str, *names: str) -> None:
    """Raise TypeError unless a function can be called with these positional arguments."""
    with contextlib.suppress(ValueError):  # built-ins have no signature
        try:
            inspect.signature(function).bind(*names)
        except TypeError as cause:
            name = getattr(function, "__name__", type(function).__name__)
            raise TypeError(f"{description} {name} must take ({', '.join(names)}): {cause}") from None


def named_arguments(function: F) -> F:
    """Decorator of a public function or constructor that checks its arguments as `settings_class` does.

    Unknown keywords are refused, with the nearest known one. Values are checked if the type of a parameter consists of
    numbers, booleans, texts and settings classes.
    """
    parameters = list(inspect.signature(function).parameters)
    names = [name for name in parameters if name != "self"]
    what = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        check_names(what, kwargs, names)
        hints = _parameter_hints(function)

        def checked(name: str, value: Any) -> Any:
            return _as_any_of(name, value, hints[name]) if name in hints else value

        first = [checked(name, value) for name, value in zip(parameters, args, strict=False)]
        return function(*first, *args[len(first) :], **{name: checked(name, value) for name, value in kwargs.items()})

    return typing.cast("F", call)


@functools.cache
def _parameter_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of the parameters that `named_arguments` checks."""
    hints: dict[str, Any] = {}
    for name, annotation in function.__annotations__.items():
        holder = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            hints |= get_type_hints(holder, function.__globals__)
        except (NameError, TypeError):  # written for type checkers only
            continue
    plain = (int, float, bool, str, type(None))
    return {
        name: hint
        for name, hint in hints.items()
        if name != "return" and all(part in plain or dataclasses.is_dataclass(part) for part in alternatives(hint))
    }


def check_names(what: str, arguments: Mapping[str, Any], names: Sequence[str], *, kind: type | None = None) -> None:
    """Raise ArgumentError, a TypeError, for the first of `arguments` that is not in `names`."""
    for name in arguments:
        if name not in names:
            advice = suggestion(name, names, kind=kind) or f" It has {', '.join(names)}."
            raise ArgumentError(f"{what} has no setting {name!r}.{advice}")


def suggestion(unknown: str, names: Sequence[str], *, kind: type | None = None) -> str:
    """Return a "Did you mean ...?" sentence for an unknown name, or an empty string. See `meanings`."""
    candidates = meanings(unknown, names, kind)
    if isinstance(candidates, str):
        return f" {candidates}"
    texts = [repr(_as_python(kind, place) if "." in place and kind is not None else place) for place in candidates]
    equivalents = OTHER_NAMES.get(unknown, ())
    if not texts and not isinstance(equivalents, str):
        texts = [repr(f"{owner}({field}=...)") for owner, field in equivalents]
    return " Did you mean " + " or ".join(texts) + "?" if texts else ""


def meanings(unknown: str, names: Sequence[str], kind: type | None) -> list[str] | str:
    """Return dotted places of the settings that an unknown name most likely means, or advice as a text.

    Without `names`, only the nested settings of the settings class `kind` are searched.
    """
    equivalents: tuple[tuple[str, str], ...] | str = OTHER_NAMES.get(unknown, ())
    if isinstance(equivalents, str):
        return equivalents
    direct = [field for owner, field in equivalents if field in names and (kind is None or owner in _owners(kind))]
    direct = direct or [field for _, field in equivalents if field in names]
    nested = [] if kind is None else nested_places(kind, unknown, equivalents)
    nested = [place for place in nested if _depth(place) == min(map(_depth, nested))]
    near = near_names(unknown, names, cutoff=0.65)
    return list(dict.fromkeys(direct or nested or near or ([] if equivalents else near_names(unknown, names))))


def _depth(place: str) -> tuple[int, int]:
    """Sort key of a place: settings of each policy and deeply nested settings are less likely."""
    return place.count("NAME"), place.count(".")


def _owners(kind: type) -> set[str]:
    return {base.__name__ for base in kind.__mro__}


def _as_python(kind: type | None, place: str) -> str:
    """Return ``learner.lr`` as ``learner=LearnerConfig(lr=...)``."""
    first, _, rest = place.partition(".")
    inner = None if kind is None else nested_kind(_hints(kind).get(first))
    if not rest:
        return f"{first}=..."
    return f"{first}={getattr(inner, '__name__', 'dict')}({_as_python(inner, rest)})"


def nested_places(
    kind: type, name: str, equivalents: Sequence[tuple[str, str]] = (), *, prefix: str = "", depth: int = 3
) -> list[str]:
    """Return dotted places of a setting in the nested settings of `kind`, such as ``learner.lr``.

    `equivalents` are other names of the setting, each with its class.
    """
    places: list[str] = []
    for field, hint in _hints(kind).items():
        inner = nested_kind(hint)
        if inner is None or not depth:
            continue
        at = f"{prefix}{field}." + ("NAME." if is_mapping(hint) else "")
        members = [member.name for member in dataclasses.fields(inner)]
        places += [at + other for owner, other in equivalents if owner in _owners(inner) and other in members]
        places += [at + name] if name in members and not equivalents else []
        places += nested_places(inner, name, equivalents, prefix=at, depth=depth - 1)
    return places


def nested_kind(hint: Any) -> type | None:
    """Return the settings class of a field, of an optional field, or of a mapping's values."""
    for part in alternatives(hint):
        if isinstance(part, type) and dataclasses.is_dataclass(part):
            return part
        if is_mapping(part) and get_args(part):
            return nested_kind(get_args(part)[1])
    return None


def field_hints(kind: type) -> Mapping[str, Any]:
    """Return the types of the fields of a settings class, by name."""
    return _hints(kind)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    resolved = get_type_hints(kind)
    return {field.name: resolved[field.name] for field in dataclasses.fields(kind)}


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def is_mapping(hint: Any) -> bool:
    """Return whether a type is a mapping, with or without types of keys and values."""
    origin = get_origin(hint) or hint
    return isinstance(origin, type) and issubclass(origin, Mapping)


# ---- types of values


def _converted(kind: type, name: str, value: Any, hint: Any) -> Any:
    """Return `value` converted to the type of the field.

    Raises:
        TypeError, ValueError: The field does not take such a value.
    """
    if value is None and type(None) not in alternatives(hint):
        default = next(field.default for field in dataclasses.fields(kind) if field.name == name)
        if default == ():
            return default  # None stands for an empty tuple
    return _as_any_of(name, value, hint)


def _as_any_of(name: str, value: Any, hint: Any) -> Any:
    error: Exception | None = None
    for member in alternatives(hint):
        try:
            return _as(name, value, member)
        except (TypeError, ValueError) as problem:
            is_word = member in (type(None), str) or get_origin(member) is Literal
            error = error if error is not None and is_word else problem
    assert error is not None
    if {int, str} < set(alternatives(hint)) and not isinstance(value, Mapping):  # a mapping's error is about its items
        if isinstance(error, TypeError):
            raise TypeError(f"{name}={reprlib.repr(value)} must be a whole number, a text or a mapping")
        raise ValueError(f"{name}={reprlib.repr(value)} must be a whole number, a text or a mapping")
    raise error


def _as(name: str, value: Any, hint: Any) -> Any:
    origin = get_origin(hint) or hint
    if hint is Any:
        return value
    if hint in (int, float):
        return _number(name, value, hint)
    if origin is Literal:
        return _word(name, value, get_args(hint))
    if hint in (bool, str, type(None)):
        return _simple(name, value, hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _nested(name, value, hint)
    if origin is tuple:
        return _items(name, value, get_args(hint))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _entries(name, value, get_args(hint))
    if isinstance(origin, type) and issubclass(origin, Sequence) and not isinstance(value, list | tuple):
        raise TypeError(f"{name}={reprlib.repr(value)} must be a list")
    return value


def _number(name: str, value: Any, hint: Any) -> Any:
    what = "a whole number" if hint is int else "a number"
    if isinstance(value, str):
        raise TypeError(f"{name}={reprlib.repr(value)} is a text. Give a number")
    number = value.item() if getattr(value, "ndim", None) == 0 else value  # of NumPy or PyTorch
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(f"{name}={reprlib.repr(value)} must be {what}")
    if isinstance(number, int) and abs(number) > MAX_INTEGER:
        raise ValueError(f"{name}={reprlib.repr(number)} must be at most {MAX_INTEGER}, and not below -{MAX_INTEGER}")
    if isinstance(number, float) and math.isnan(number):
        raise ValueError(f"{name}={reprlib.repr(value)} must be {what}")
    if hint is float:
        return number
    if math.isfinite(number) and number == int(number):
        return int(number)
    raise ValueError(f"{name}={reprlib.repr(value)} must be {what}")


def _simple(name: str, value: Any, hint: Any) -> Any:
    if hint is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if hint is bool and getattr(value, "ndim", None) == 0:  # NumPy's True and False
        value = value.item()
    if not isinstance(value, hint):
        what = {bool: "True or False", str: "a text"}.get(hint, "None")
        raise TypeError(f"{name}={reprlib.repr(value)} must be {what}")
    return value


def _word(name: str, value: Any, words: Sequence[Any]) -> Any:
    """Return a choice. YAML 1.1 reads on and off as booleans. `_check_choice` refuses other texts."""
    if isinstance(value, bool) and {"on", "off"} <= set(words):
        return "on" if value else "off"
    if not isinstance(value, str):
        raise TypeError(f"{name}={reprlib.repr(value)}. Choose one of {', '.join(map(repr, words))}")
    return value


def _nested(name: str, value: Any, kind: type) -> Any:
    if isinstance(value, Mapping):
        try:
            return kind(**value)
        except (TypeError, ValueError) as cause:
            raise type(cause)(f"{name}: {cause}") from cause
    is_base = dataclasses.is_dataclass(value) and not isinstance(value, type) and issubclass(kind, type(value))
    if not (isinstance(value, kind) or is_base):
        actual = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise TypeError(f"{name} must be {kind.__name__}(...), got {actual}")
    return value


def _items(name: str, value: Any, hints: tuple[Any, ...]) -> Any:
    if isinstance(value, str):
        raise TypeError(f"{name}={reprlib.repr(value)} is one text. Write {name}=({reprlib.repr(value)},)")
    if not isinstance(value, list | tuple):
        raise TypeError(f"{name}={reprlib.repr(value)} must be a tuple")
    each = hints[:1] * len(value) if hints[1:] == (Ellipsis,) else hints
    if hints and len(each) != len(value):
        raise TypeError(f"{name}={reprlib.repr(value)} must be {len(each)} values")
    if not hints:
        return tuple(value)
    pairs = zip(value, each, strict=True)
    return tuple(_number(name, item, hint) if hint in (int, float) else item for item, hint in pairs)


def _entries(name: str, value: Any, hints: tuple[Any, ...]) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return value  # some classes accept a settings object here
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}={reprlib.repr(value)} must be a mapping")
    if hints and (hints[1] in (int, float) or nested_kind(hints[1]) is not None):
        return {key: _as(f"{name}.{key}", item, hints[1]) for key, item in value.items()}
    return value


def _check_choice(name: str, value: Any, hint: Any) -> None:
    words = [word for member in alternatives(hint) if get_origin(member) is Literal for word in get_args(member)]
    others = [member for member in alternatives(hint) if get_origin(member) is not Literal and member is not type(None)]
    if value is None and type(None) in alternatives(hint):
        return
    if words and not others and _word(name, value, words) not in words:
        near = did_you_mean(str(value), map(str, words))
        raise ValueError(f"{name}={reprlib.repr(value)}. Choose one of {', '.join(map(repr, words))}.{near}")
