"""Which family a model is of: its architecture says how it computes, its chat template how it talks.

In: a model's folder. Out: what is known of both. Waits for the disk.

Nothing here goes by a model's name: folders are renamed, and an export of a run is called after the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_agents.errors import did_you_mean
from forge_agents.models.resolve import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models that compute alike."""

    name: str
    """As config.json's ``model_type``."""
    models: str
    """What people call them."""
    architectures: tuple[str, ...]
    """Values of ``architectures[0]`` in a config.json."""
    why_not: str = ""
    """Why the learner does not train it; empty where it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """How conversations look in a chat template."""

    name: str
    marks: tuple[str, ...]
    """Texts that all occur in the template, and in no template of a dialect further up in `CHAT_FORMATS`."""
    calls: str = ""
    """How the model writes a call of a tool: ``"hermes"`` (JSON in ``<tool_call>``), ``"xml"`` (``<function=NAME>`` in
    ``<tool_call>``), ``"llama"`` (JSON, behind ``<|python_tag|>`` or not), ``"mistral"`` (``[TOOL_CALLS]``),
    ``"harmony"`` (a channel), ``"deepseek"``, ``"glm"``, ``"kimi"`` or ``"minimax"``; empty where the template knows of
    no tools."""
    renderers: Mapping[str, str] = field(default_factory=dict)
    """Name of the `renderers` package's hand-written renderer for models of a family in this dialect, by family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a model's folder tells."""

    architecture: str
    """``architectures[0]`` of its config.json; empty where that names none."""
    family: Family | None
    """None where the architecture is not in `FAMILIES`."""
    unlearnable: str
    """Why the learner does not train it, as an error says it; empty where it does."""
    chat_format: ChatFormat | None
    """None without a chat template, or with one that bears no known marks."""
    has_template: bool
    """Whether it can hold a conversation."""
    thinks: bool
    """Whether the chat template knows thoughts."""
    switch: bool
    """Whether it asks `Policy.thinking`."""

    @property
    def renderer(self) -> str:
        """The `renderers` package's name for this model; empty where it has no renderer of its own for it."""
        known = self.dialect is not None and self.family is not None
        return self.chat_format.renderers.get(self.family.name, "") if known else ""  # type: ignore[union-attr]


_MLA = "its values have another size than its queries, which packed attention on CPU does not compute"
FAMILIES = (
    Family(
        name="llama", models="Llama 2 and 3, SmolLM and SmolLM2, TinyLlama", architectures=("LlamaForCausalLM",)
    ),
    Family(name="qwen3", models="Qwen3", architectures=("Qwen3ForCausalLM",)),
    Family(name="qwen3_moe", models="Qwen3 mixtures", architectures=("Qwen3MoeForCausalLM",)),
    Family(name="qwen2", models="Qwen2 and Qwen2.5", architectures=("Qwen2ForCausalLM",)),
    Family(name="smollm3", models="SmolLM3", architectures=("SmolLM3ForCausalLM",)),
    Family(name="mistral", models="Mistral 7B, Mistral Nemo", architectures=("MistralForCausalLM",)),
    Family(
        name="gpt_oss", models="gpt-oss", architectures=("GptOssForCausalLM",),
        why_not="its weights are stored in four bits, which the learner does not read, and packed attention on CPU has "
        "no sinks",
    ),
    Family(
        name="qwen3_5", models="Qwen3.5",
        architectures=("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5ForConditionalGeneration",
                       "Qwen3_5MoeForConditionalGeneration"),
        why_not="its linear attention needs the package fla, which needs a GPU",
    ),
    Family(
        name="deepseek_v3", models="DeepSeek V3 and R1, Kimi K2, Moonlight", architectures=("DeepseekV3ForCausalLM",),
        why_not=_MLA,
    ),
    Family(
        name="gemma3", models="Gemma 3", architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        why_not="TorchTitan has no blocks with norms after attention, nor its scaled embeddings",
    ),
    Family(
        name="phi3", models="Phi-3, Phi-3.5 and Phi-4", architectures=("Phi3ForCausalLM",),
        why_not="TorchTitan has no adapter of its fused weights",
    ),
    Family(
        name="mixtral", models="Mixtral", architectures=("MixtralForCausalLM",),
        why_not="TorchTitan has no adapter of its weights",
    ),
    Family(
        name="glm4_moe", models="GLM-4.5 to 4.7", architectures=("Glm4MoeForCausalLM",),
        why_not="TorchTitan has no blocks that turn a part of each head only",
    ),
)  # fmt: skip
"""Families that are known by name; vLLM serves more."""

_QWEN3 = {"qwen3": "qwen3", "qwen3_moe": "qwen3"}
CHAT_FORMATS = (
    ChatFormat(name="harmony", marks=("<|channel|>", "<|start|>"), calls="harmony", renderers={"gpt_oss": "gpt-oss"}),
    ChatFormat(name="llama-3", marks=("<|start_header_id|>",), calls="llama", renderers={"llama": "llama-3"}),
    ChatFormat(name="minimax", marks=("]~b]",), calls="minimax"),
    ChatFormat(name="glm", marks=("[gMASK]", "<arg_key>"), calls="glm", renderers={"glm4_moe": "glm-4.5"}),
    ChatFormat(name="kimi", marks=("<|im_middle|>",), calls="kimi", renderers={"deepseek_v3": "kimi-k2"}),
    ChatFormat(
        name="deepseek", marks=("<\uff5cUser\uff5c>",), calls="deepseek", renderers={"deepseek_v3": "deepseek-v3"}
    ),
    ChatFormat(name="qwen3.5", marks=("<|im_start|>", "<function="), calls="xml", renderers={"qwen3_5": "qwen3.5"}),
    ChatFormat(name="qwen3", marks=("<|im_start|>", "<tool_call>", "<think>"), calls="hermes", renderers=_QWEN3),
    ChatFormat(name="qwen2.5", marks=("<|im_start|>", "<tool_call>"), calls="hermes", renderers=_QWEN3),
    ChatFormat(name="chatml", marks=("<|im_start|>",)),
    ChatFormat(name="mistral", marks=("[INST]", "[TOOL_CALLS]"), calls="mistral"),
    ChatFormat(name="llama-2", marks=("[INST]",)),
    ChatFormat(name="gemma", marks=("<start_of_turn>",)),
    ChatFormat(name="phi", marks=("<|assistant|>",)),
)
"""Dialects, the more particular first."""

REASONING_SWITCHES = ("enable_thinking", "thinking")
"""What templates call the question whether the model should think: most, and DeepSeek's and Granite's."""
_THOUGHTS = ("<think>", "<|channel|>", "[THINK]", "reasoning_content")


def inspect_model(folder: Path) -> Known:
    """What is known of the model in `folder`.

    Raises:
        ModelNotFoundError: Its config.json is missing, or that or its tokenizer's is no JSON object.
    """
    config, template = read_json(folder / "config.json"), chat_template(folder)
    try:
        check_trainable(config)
        unlearnable = ""
    except ValueError as cause:
        unlearnable = str(cause)
    return Known(
        architecture=architecture_of(config),
        family=_family(architecture_of(config)),
        unlearnable=unlearnable,
        dialect=chat_format_of(template),
        has_template=bool(template),
        thinks=any(mark in template for mark in _THOUGHTS),
        switch=any(re.search(rf"\b{name}\b", template) for name in REASONING_SWITCHES),
    )


def chat_format_of(template: str) -> ChatFormat | None:
    """The dialect that a chat template writes; None where it bears no known marks."""
    return next((each for each in CHAT_FORMATS if all(mark in template for mark in each.marks)), None)


def chat_template(folder: Path) -> str:
    """The chat template in a model's folder, that for tools where there are several; empty without one."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            continue
        found = read_json(folder / name).get("chat_template")
        if isinstance(found, list):  # several, each with its name
            named = {each["name"]: each["template"] for each in found if isinstance(each, dict) and "name" in each}
            found = named.get("tool_use") or named.get("default")
        if isinstance(found, str):
            return found
    return ""


TRAINABLE = tuple(name for family in FAMILIES if not family.why_not for name in family.architectures)
"""Architectures that the learner trains."""


_REQUIRED = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
             "max_position_embeddings")  # fmt: skip
_REQUIRED_OF_EXPERTS = ("moe_intermediate_size", "num_experts_per_tok")
_ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu",),
    "attention_dropout": (0, 0.0, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
    # the others turn a token by the length of what is read, which differs between playing and learning
    "rope_type": ("default", "linear", "llama3", "yarn"),
}
"""Options that TorchTitan's blocks do not compute; any other value would train a different model in silence."""


def check_trainable(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a model that the learner does not train, with the reason and what is known."""
    architecture = architecture_of(config)
    if architecture not in TRAINABLE:
        family = _family(architecture)
        why = f" ({family.models}): {family.why_not}" if family is not None else ""
        raise ValueError(
            f"architecture {(architecture or '(none named)')!r} cannot be trained{why}. It may play, frozen, if vLLM "
            f"serves it. Trained are {', '.join(TRAINABLE)}.{did_you_mean(architecture, TRAINABLE)}"
        )
    required = (*_REQUIRED, *(_REQUIRED_OF_EXPERTS if num_experts(config) else ()))
    if missing := [key for key in required if not isinstance(config.get(key), int)]:
        raise ValueError(f"config.json lacks whole numbers for {', '.join(missing)}; download the model again")
    settings = {**config, **rope_of(config)}
    for key, allowed in _ONLY_VALUES.items():
        if key in settings and settings[key] not in allowed:
            supported = ", ".join(map(repr, allowed))
            raise ValueError(f"{key}={settings[key]!r} is not supported by the learner; supported: {supported}")


def architecture_of(config: Mapping[str, Any]) -> str:
    """``architectures[0]`` of a config.json; empty where it names none."""
    return next(iter(map(str, config.get("architectures") or ())), "")


def num_experts(config: Mapping[str, Any]) -> int:
    """Experts of each mixture layer; 0 of a dense model."""
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def has_experts(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer of a mixture is one; the others, and those of dense models, are not."""
    every, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    return num_experts(config) > 0 and layer not in dense and (layer + 1) % every == 0


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of RoPE; its scaling is always in ``rope_type``."""
    found = {"rope_type": "default"}
    for name in ("rope_parameters", "rope_scaling"):  # the latter in older files, with rope_theta beside it
        given = config.get(name) or {}
        found |= given if "rope_type" in given or "type" not in given else {**given, "rope_type": given["type"]}
    return found


_CALLS = {
    "hermes": "JSON in <tool_call>",
    "xml": "<function=NAME> in <tool_call>",
    "llama": "JSON, behind <|python_tag|> or not",
    "mistral": "JSON behind [TOOL_CALLS]",
    "harmony": "a channel of its own",
}


def describe(model: Known) -> Iterator[tuple[str, str]]:
    """What a person asks of a model, and the answers."""
    yield "computes", f"{model.architecture or 'nothing named'} ({model.family.models if model.family else 'unknown'})"
    yield "learns", f"no: {model.unlearnable}" if model.unlearnable else "yes"
    if not model.has_template:
        yield "talks", "not: it has no chat template"
        return
    yield "talks", model.chat_format.name if model.dialect else "in a dialect of its own"
    switched = ", as Policy.thinking says" if model.switch else ""
    yield "thinks", f"yes{switched}" if model.thinks else "not by its template"
    calls = model.chat_format.calls if model.dialect else ""
    yield "tools", f"calls them by {_CALLS.get(calls, calls)}" if calls else "not by its template"


def _family(architecture: str) -> Family | None:
    return next((family for family in FAMILIES if architecture in family.architectures), None)
