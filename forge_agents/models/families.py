"""A model's family and chat format, read from its config.json and chat template.

The model's name is not used: folders are renamed, and exports are named after their run.
"""

from __future__ import annotations

import itertools
import re
import reprlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_agents.errors import ModelNotFoundError, did_you_mean
from forge_agents.models.resolve import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models with the same architecture."""

    name: str
    """Name, usually ``model_type`` in config.json."""
    models: str
    """Well-known models of the family."""
    architectures: tuple[str, ...]
    """Values of ``architectures[0]`` in config.json."""
    untrainable_reason: str = ""
    """Reason why the learner cannot train it. Empty if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """The format of conversations in a chat template."""

    name: str
    marks: tuple[str, ...]
    """Texts that all occur in the template. Earlier entries of `CHAT_FORMATS` take precedence."""
    calls: str = ""
    """Format of tool calls: ``"hermes"`` (JSON in ``<tool_call>``), ``"xml"`` (``<function=NAME>`` in ``<tool_call>``),
    ``"llama"`` (JSON, with or without ``<|python_tag|>``), ``"mistral"`` (``[TOOL_CALLS]``), ``"harmony"`` (a channel),
    ``"deepseek"``, ``"glm"``, ``"kimi"`` or ``"minimax"``. Empty if the template does not support tools."""
    renderers: Mapping[str, str] = field(default_factory=dict)
    """Name of the hand-written renderer in the `renderers` package, by model family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Properties of a model."""

    architecture: str
    """``architectures[0]`` of config.json. Empty if missing."""
    family: Family | None
    """None if the architecture is not in `FAMILIES`."""
    untrainable_reason: str
    """Reason why the learner cannot train it. Empty if it can."""
    chat_format: ChatFormat | None
    """None without a chat template, or with one of an unknown format."""
    has_template: bool
    """Whether the model can hold a conversation."""
    supports_reasoning: bool
    """Whether the chat template has reasoning."""
    reasoning_switch: str
    """Values of `Policy.thinking` that the chat template follows, for people. Empty if there are none."""

    @property
    def renderer(self) -> str:
        """Name of the model's renderer in the `renderers` package. Empty if there is none."""
        if self.chat_format is None or self.family is None:
            return ""
        return self.chat_format.renderers.get(self.family.name, "")


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
        name="gemma3", models="Gemma 3, for text",
        architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    ),
    Family(name="phi3", models="Phi-3, Phi-3.5 and Phi-4", architectures=("Phi3ForCausalLM",)),
    Family(name="gpt_oss", models="gpt-oss", architectures=("GptOssForCausalLM",)),
    Family(
        name="qwen3_5", models="Qwen3.5, for text",
        architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    ),
    Family(
        name="qwen3_5_moe", models="Qwen3.5 mixtures, for text",
        architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    ),
    Family(
        name="deepseek_v3", architectures=("DeepseekV3ForCausalLM",),
        models="DeepSeek V3 and R1, Kimi K2, Moonlight, converted to bfloat16 and with a tokenizer.json",
    ),
    Family(name="glm4_moe_lite", models="GLM-4.7-Flash", architectures=("Glm4MoeLiteForCausalLM",)),
    Family(
        name="mixtral", models="Mixtral", architectures=("MixtralForCausalLM",),
        untrainable_reason="TorchTitan has no adapter of its weights",
    ),
    Family(
        name="glm4_moe", models="GLM-4.5 to 4.7", architectures=("Glm4MoeForCausalLM",),
        untrainable_reason="TorchTitan has no blocks that turn a part of each head only",
    ),
)  # fmt: skip
"""Known families. vLLM serves more."""

_QWEN3 = {"qwen3": "qwen3", "qwen3_moe": "qwen3"}
_QWEN3_5 = dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "qwen3.5")
CHAT_FORMATS = (
    ChatFormat(name="harmony", marks=("<|channel|>", "<|start|>"), calls="harmony", renderers={"gpt_oss": "gpt-oss"}),
    ChatFormat(name="llama-3", marks=("<|start_header_id|>",), calls="llama", renderers={"llama": "llama-3"}),
    ChatFormat(name="minimax", marks=("]~b]",), calls="minimax"),
    ChatFormat(
        name="glm",
        marks=("[gMASK]", "<arg_key>"),
        calls="glm",
        renderers={"glm4_moe": "glm-4.5", "glm4_moe_lite": "glm-5"},
    ),
    ChatFormat(name="kimi", marks=("<|im_middle|>",), calls="kimi", renderers={"deepseek_v3": "kimi-k2"}),
    ChatFormat(
        name="deepseek", marks=("<\uff5cUser\uff5c>",), calls="deepseek", renderers={"deepseek_v3": "deepseek-v3"}
    ),
    ChatFormat(name="qwen3.5", marks=("<|im_start|>", "<function="), calls="xml", renderers=_QWEN3_5),
    ChatFormat(name="qwen3", marks=("<|im_start|>", "<tool_call>", "<think>"), calls="hermes", renderers=_QWEN3),
    ChatFormat(name="qwen2.5", marks=("<|im_start|>", "<tool_call>"), calls="hermes", renderers=_QWEN3),
    ChatFormat(name="chatml", marks=("<|im_start|>",)),
    ChatFormat(name="mistral", marks=("[INST]", "[TOOL_CALLS]"), calls="mistral"),
    ChatFormat(name="llama-2", marks=("[INST]",)),
    ChatFormat(name="gemma", marks=("<start_of_turn>",)),
    ChatFormat(name="phi", marks=("<|assistant|>",)),
)
"""Known chat formats, the most specific first."""

REASONING_SWITCHES = ("enable_thinking", "thinking")
"""Template variables that turn reasoning on: of most templates, and of DeepSeek's and Granite's."""
REASONING_EFFORT = "reasoning_effort"
"""Template variable of the effort of reasoning, in gpt-oss and Qwen3.8."""
_TEMPLATE_TEXT = re.compile(r"'[^']*'|\"[^\"]*\"|\.\w+")
"""Matches texts and attributes in the code of a template. Neither are variables."""
_REASONING_MARKS = ("<think>", "<|channel|>", "[THINK]", "reasoning_content")
TRAINABLE = tuple(name for family in FAMILIES if not family.untrainable_reason for name in family.architectures)
"""Architectures that the learner trains."""
RECURRENT = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
"""Architectures with layers that have a state of constant size in place of keys and values."""

_ALL_SLIDE = ("Phi3ForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures with the same window, if any, in all layers."""
_SLIDING = ("MistralForCausalLM", "Phi3ForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM")
"""Architectures with the window of their config.json."""
_MAY_SLIDE = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "SmolLM3ForCausalLM")
"""Architectures with this window if ``use_sliding_window`` is true."""
_REQUIRED = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
             "max_position_embeddings")  # fmt: skip
_REQUIRED_OF_EXPERTS = ("moe_intermediate_size", "num_experts_per_tok")
_REQUIRED_OF_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_shared_experts",
                       "first_k_dense_replace", "n_group", "topk_group")  # fmt: skip
_SHARED_SIZE = "shared_expert_intermediate_size"
_ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu",),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
    "attention_dropout": (0, 0.0, None),
    "embd_pdrop": (0, 0.0, None),
    "resid_pdrop": (0, 0.0, None),
    "partial_rotary_factor": (1, 1.0, None),
    # engines compute these keys in most architectures, and transformers does not
    "is_causal": (True, None),
    "logit_scale": (1, 1.0, None),
    "llama_4_scaling": (None,),
    "dual_chunk_attention_config": (None,),
    # the other types rotate a token by the length of the sequence, which differs between sampling and training
    "rope_type": ("default", "linear", "llama3", "yarn"),
}
"""Options with the values that TorchTitan's blocks compute. Any other value would silently train a different model."""
_OF_QWEN3_5 = {"partial_rotary_factor": None, "rope_type": ("default",), "attn_output_gate": (True,)}
_LATENT: dict[str, tuple[Any, ...] | None] = {
    "rope_type": ("default", "yarn"),
    "rope_interleave": (True, None),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "tie_word_embeddings": (False,),
    "sliding_window": (None, 0),
    # vLLM computes these values only
    "attention_factor": (None,),
    "truncate": (True, None),
    "moe_layer_freq": (1, None),
}
_VALUES_OF: dict[str, dict[str, tuple[Any, ...] | None]] = {
    "LlamaForCausalLM": {"sliding_window": (None, 0)},  # vLLM has windows then, and transformers has none
    "DeepseekV3ForCausalLM": _LATENT,
    # transformers has one layer without experts, whatever the file says
    "Glm4MoeLiteForCausalLM": {**_LATENT, "first_k_dense_replace": (1,)},
    "Gemma3ForCausalLM": {
        "hidden_act": None,
        "hidden_activation": ("gelu_pytorch_tanh",),
        "truncate": (True, None),  # vLLM and transformers disagree about False
    },
    "Phi3ForCausalLM": {
        "partial_rotary_factor": None,
        "rope_type": ("default", "longrope"),
        # vLLM and transformers disagree about these
        **dict.fromkeys(("factor", "attention_factor", "short_mscale", "long_mscale"), (None,)),
    },
    "Qwen3_5ForCausalLM": _OF_QWEN3_5,
    "Qwen3_5MoeForCausalLM": {
        **_OF_QWEN3_5,
        "norm_topk_prob": (True,),
        "mlp_only_layers": ([], None),
        "decoder_sparse_step": (1, None),
    },
    "GptOssForCausalLM": {  # the only values that vLLM computes
        "attention_bias": (True,),
        "rope_type": ("yarn",),
        "swiglu_alpha": (1.702,),
        "swiglu_limit": (7.0,),
        "tie_word_embeddings": (False,),
    },
}
"""Values that differ by architecture. None: any value."""
_DEFAULTS_OF: dict[str, dict[str, Any]] = {"DeepseekV3ForCausalLM": {"scoring_func": "softmax", "topk_method": None}}
"""Values with which vLLM computes if config.json has none, by architecture."""
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Linear layers of Phi, and the layers of other families that each of them stacks."""
_RECURRENT = {"in_proj_qkv": ("q_proj", "k_proj", "v_proj"), "in_proj_z": ("q_proj", "k_proj", "v_proj"),
              "out_proj": ("o_proj",)}  # fmt: skip
"""Linear layers of recurrent attention, and those of attention whose place they take. `in_proj_z` is the gate, which in
attention belongs to `q_proj`."""
_HEAD_DIM = {**dict.fromkeys((*RECURRENT, "Gemma3ForCausalLM"), 256), "Qwen3ForCausalLM": 128,
             "GptOssForCausalLM": 64}  # fmt: skip
"""Default of the size of an attention head, where it does not follow from the hidden size."""
_RECURRENT_SIZES = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
                    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}  # fmt: skip
"""Settings of recurrent layers, with the defaults that transformers leaves out of config.json."""
_GEMMA3 = {"model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216,
           "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
           "max_position_embeddings": 131072}  # fmt: skip
"""Defaults of the sizes of Gemma 3, most of which the published models with images leave out."""
UNUSED = ("model.visual.", "mtp.", "vision_tower.", "multi_modal_projector.", "model.vision_tower.",
           "model.multi_modal_projector.")  # fmt: skip
"""Prefixes of tensors outside of the decoder."""
MAX_LAYERS = 100_000
"""Layers are counted one by one, and a stranger may have written the file."""
_MAX_SHOWN_LAYERS = 8
PUBLISHED_TEXT = "language_model."
"""Prefix of the text part of Gemma 3 with images as it is published. transformers 5 has another in its modules."""


def inspect_model(folder: Path) -> ModelInfo:
    """Return the properties of the model in `folder`.

    Raises:
        ModelNotFoundError: Its config.json is missing, or that or the tokenizer's config is not a JSON object.
    """
    config, template = read_json(folder / "config.json"), chat_template(folder)
    try:
        check_trainable(config)
        untrainable_reason = ""
    except ValueError as cause:
        untrainable_reason = str(cause)
    return ModelInfo(
        architecture=architecture_of(config),
        family=_family(architecture_of(config)),
        untrainable_reason=untrainable_reason,
        chat_format=chat_format_of(template),
        has_template=bool(template),
        supports_reasoning=any(mark in template for mark in _REASONING_MARKS),
        reasoning_switch=_reasoning_switch(template),
    )


def _reasoning_switch(template: str) -> str:
    parts = re.split(r"\{[{%]", template)[1:]
    code = "\n".join(_TEMPLATE_TEXT.sub(" ", re.split(r"[}%]\}", part, maxsplit=1)[0]) for part in parts)
    words = set(re.findall(r"\w+", code))
    switches = ["on or off"] * bool(words.intersection(REASONING_SWITCHES)) + ["effort"] * (REASONING_EFFORT in words)
    return ", ".join(switches)


def chat_format_of(template: str) -> ChatFormat | None:
    """Return the format of a chat template. None if unknown."""
    return next((each for each in CHAT_FORMATS if all(mark in template for mark in each.marks)), None)


def chat_template(folder: Path) -> str:
    """Return the chat template in a model's folder. Empty if there is none. Of several, the one for tools."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            continue
        template = read_json(folder / name).get("chat_template")
        if isinstance(template, list):  # several templates, each with its name
            named = {each["name"]: each["template"] for each in template if isinstance(each, dict) and "name" in each}
            template = named.get("tool_use") or named.get("default")
        if isinstance(template, str):
            return template
    return ""


def check_trainable(config: Mapping[str, Any], max_tokens: int | None = None) -> None:
    """Check that the learner can train a model with this config.json, on samples of up to `max_tokens`.

    Raises:
        ValueError: The learner cannot train it. The message says why and lists the supported architectures.
    """
    try:
        _check_trainable(config, max_tokens)
    except (TypeError, AttributeError, LookupError, ArithmeticError) as cause:
        raise ValueError(f"config.json has a value that no model has ({cause!r}). Download the model again") from cause


def _check_trainable(config: Mapping[str, Any], max_tokens: int | None) -> None:
    architecture = architecture_of(config)
    if architecture not in TRAINABLE:
        family = _family(architecture)
        reason = f" ({family.models}): {family.untrainable_reason}" if family is not None else ""
        raise ValueError(
            f"architecture {(architecture or '(none named)')!r} cannot be trained{reason}. It can play as a frozen "
            f"policy if vLLM serves it. Trainable: {', '.join(TRAINABLE)}.{did_you_mean(architecture, TRAINABLE)}"
        )
    _check_stored(config)
    config = decoder_config(config)
    architecture = architecture_of(config)
    required: tuple[str, ...] = _REQUIRED
    if num_experts(config):
        required += ("num_experts_per_tok",) if has_sinks(config) else _REQUIRED_OF_EXPERTS
    elif has_sinks(config):
        required += ("num_local_experts",)
    if architecture == "Qwen3_5MoeForCausalLM":  # no layer has a feed-forward without experts
        required = (*(key for key in required if key != "intermediate_size"), "num_experts", _SHARED_SIZE)
    if has_latent(config):
        required += ("n_routed_experts", *_REQUIRED_OF_LATENT)
    if missing := [key for key in required if not isinstance(config.get(key), int)]:
        raise ValueError(f"config.json lacks whole numbers for {', '.join(missing)}. Download the model again")
    _check_layers(config)
    rope = rope_of(config)
    kinds = [{**_DEFAULTS_OF.get(architecture, {}), **config, **rope}]
    if architecture == "Gemma3ForCausalLM":
        kinds.append(rope_of(config, "sliding_attention"))
    only_values = {**_ONLY_VALUES, **_VALUES_OF.get(architecture, {})}
    for settings, (key, allowed) in itertools.product(kinds, only_values.items()):
        if allowed is not None and key in settings and settings[key] not in allowed:
            supported = ", ".join(map(repr, allowed))
            source = "" if key in config or key in rope else f". config.json has no {key!r}, so vLLM takes this value"
            raise ValueError(f"{key}={settings[key]!r} is not supported by the learner. Supported: {supported}{source}")
    if rope["rope_type"] == "longrope" and (max_tokens or 0) > (limit := positions_of(config) or 0):
        raise ValueError(
            f"samples of {max_tokens} tokens are not supported: beyond {limit} tokens, LongRoPE rotates a token by the "
            "length of the sequence, which differs between sampling and training. Set engine.max_model_len, or "
            f"max_sample_tokens of SFT and DPO, to at most {limit}"
        )


def _check_stored(config: Mapping[str, Any]) -> None:
    """Check that weights are not quantized, and that RoPE's settings are in one place. Raises ValueError."""
    decoder = decoder_config(config)
    quantization = config.get("quantization_config", decoder.get("quantization_config"))
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method == "mxfp4" and has_sinks(config):
        raise ValueError(
            "the experts are stored in 4 bits (MXFP4), which are not trained. Write a copy in bfloat16 with "
            "`forge-agents list --models MODEL --bfloat16 FOLDER`, and train FOLDER"
        )
    if quantization is not None:
        raise ValueError(
            f"the weights are quantized (quantization_config names {str(method)!r:.40}), and quantized weights are not "
            "trained. Train a copy in bfloat16, which transformers writes if it loads the model with dequantize=True "
            "in its quantization config"
        )
    scaling, parameters = decoder.get("rope_scaling"), decoder.get("rope_parameters")
    if scaling and parameters and scaling != parameters:
        raise ValueError(
            "config.json has rope_scaling and rope_parameters, of which transformers and vLLM ignore the latter, also "
            "its rope_theta. Write all settings into rope_parameters, and remove rope_scaling"
        )


def _check_layers(config: Mapping[str, Any]) -> None:
    """Check the number, the order and the sizes of layers. Raises ValueError."""
    kinds, count = config.get("layer_types"), config["num_hidden_layers"]
    if not 0 <= count <= MAX_LAYERS:
        raise ValueError(f"num_hidden_layers={count} is outside [0, {MAX_LAYERS}]")
    if count:  # a damaged config raises here
        has_positions(config, count - 1)
        _kind_of({**config, "layer_types": None}, count - 1)
    if kinds and (len(kinds) != count or any(_kind_of(config, i) != kinds[i] for i in range(count))):
        computed = [_kind_of({**config, "layer_types": None}, layer) for layer in range(min(count, _MAX_SHOWN_LAYERS))]
        raise ValueError(
            f"layer_types={reprlib.repr(kinds)} is not supported by the learner. Its {count} layers begin with "
            f"{computed}"
        )
    kinds_of_blocks = config.get("mlp_layer_types") if has_latent(config) else None
    if kinds_of_blocks and any((kind == "sparse") != has_experts(config, i) for i, kind in enumerate(kinds_of_blocks)):
        raise ValueError(
            f"mlp_layer_types={reprlib.repr(kinds_of_blocks)} is not supported by the learner. Layers from "
            f"first_k_dense_replace={config['first_k_dense_replace']} on have experts"
        )
    if has_latent(config) and config["v_head_dim"] > head_dim_of(config):
        raise ValueError(f"v_head_dim={config['v_head_dim']} is not supported: values are larger than keys")


def _kind_of(config: Mapping[str, Any], layer: int) -> str:
    """Kind of attention that the learner computes in a layer, as in ``layer_types``."""
    if is_recurrent(config, layer):
        return "linear_attention"
    return "full_attention" if window_of(config, layer) is None else "sliding_attention"


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return ``architectures[0]`` of a config.json. Empty if missing."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list | tuple) and names else ""


def decoder_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the decoder, which is all that learners and engines compute.

    It differs for models with images: there it is a part of config.json.
    """
    decoder = architecture_of(config).replace("ForConditionalGeneration", "ForCausalLM")
    if decoder not in (*RECURRENT, "Gemma3ForCausalLM") or decoder == architecture_of(config):
        return config
    text = part if isinstance(part := config.get("text_config"), Mapping) else {}
    if decoder == "Gemma3ForCausalLM":
        text, tied = {**_GEMMA3, **text}, config.get("tie_word_embeddings", True)
    else:
        tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    return {**text, "architectures": [decoder], "tie_word_embeddings": tied}


def is_unused(tensor: str, config: Mapping[str, Any]) -> bool:
    """Return whether a tensor of a checkpoint is outside of the decoder: in an image encoder or a draft model."""
    if tensor.startswith(UNUSED):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", tensor) if has_latent(config) else None
    return layer is not None and int(layer[1]) >= config["num_hidden_layers"]  # draft models stand behind the others


def module_name(tensor: str) -> str:
    """Return the name that transformers 5 and adapters in PEFT's format have for a tensor of a checkpoint."""
    name = tensor.removeprefix(PUBLISHED_TEXT)
    return name if name == tensor else name.replace("model.", f"model.{PUBLISHED_TEXT}", 1)


def is_exact(tensor: str) -> bool:
    """Return whether a tensor of a checkpoint is float32, whatever the dtype of the others.

    Only the correction biases of routers are float32: no run trains them, and the choice of experts depends on small
    differences between them.
    """
    return tensor.endswith(".e_score_correction_bias")


def is_fused(config: Mapping[str, Any]) -> bool:
    """Return whether queries, keys and values are one weight, and gate and up projection another."""
    return architecture_of(config) == "Phi3ForCausalLM"


def is_recurrent(config: Mapping[str, Any], layer: int | None = None) -> bool:
    """Return whether a layer, or layers of this architecture, have a state in place of keys and values."""
    config = decoder_config(config)
    if architecture_of(config) not in RECURRENT or layer is None:
        return architecture_of(config) in RECURRENT
    kinds = config.get("layer_types")
    return bool(kinds[layer] == "linear_attention" if kinds else (layer + 1) % config.get("full_attention_interval", 4))


def has_sinks(config: Mapping[str, Any]) -> bool:
    """Return whether the model is gpt-oss, with attention sinks, and biases in attention, router and experts."""
    return architecture_of(config) == "GptOssForCausalLM"


def has_latent(config: Mapping[str, Any]) -> bool:
    """Return whether keys and values are computed from a latent vector per position, as in DeepSeek V3 (MLA).

    These models also have shared experts, and routers with correction biases.
    """
    return architecture_of(config) in {"DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"}


def expert_size(config: Mapping[str, Any]) -> int:
    """Return the intermediate size of an expert."""
    return int(config["intermediate_size"] if has_sinks(config) else config["moe_intermediate_size"])


def shared_expert_size(config: Mapping[str, Any]) -> int:
    """Return the intermediate size of the expert that computes every token, or 0 if there is none.

    DeepSeek's shared experts are one.
    """
    if has_latent(config):
        return int(config["moe_intermediate_size"] * config["n_shared_experts"])
    return int(config[_SHARED_SIZE]) if architecture_of(config) == "Qwen3_5MoeForCausalLM" else 0


def recurrent_sizes(config: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    """Return the numbers of key and value heads, the sizes of a key and a value, and the width of the convolution."""
    config = decoder_config(config)
    keys, values, key_size, value_size, width = (
        int(config.get(name) or default) for name, default in _RECURRENT_SIZES.items()
    )
    return keys, values, key_size, value_size, width


def head_dim_of(config: Mapping[str, Any]) -> int:
    """Return the size of an attention head: of its queries and keys, where values have another size."""
    if has_latent(config):
        return int(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    default = _HEAD_DIM.get(architecture_of(config))
    return int(config.get("head_dim") or default or config["hidden_size"] // config["num_attention_heads"])


def query_rank(config: Mapping[str, Any]) -> int | None:
    """Return the size of the vector from which queries are computed, or 0. None without `has_latent`."""
    return int(config.get("q_lora_rank") or 0) if has_latent(config) else None


def adapted_layers(targets: Collection[str], *, fused: bool, recurrent: bool, latent: int | None) -> tuple[str, ...]:
    """Return the linear layers that an adapter with these targets has in a model, by Hugging Face's names.

    Args:
        targets: Layers of attention and feed-forward.
        fused: Whether the model stacks them, as `is_fused` says.
        recurrent: Whether it has recurrent layers, as `is_recurrent` says. Their projections count as those of
            attention.
        latent: As `query_rank` says. Keys and values then share a layer.

    Raises:
        ValueError: The targets are a part of a layer.
    """
    stacked = _FUSED if fused else _RECURRENT if recurrent else {} if latent is None else _latent_layers(latent)
    for layer, parts in stacked.items():
        if 0 < len(set(parts) & set(targets)) < len(parts):
            raise ValueError(
                f"targets={tuple(targets)} of a LoRA adapter: {layer} is one layer of this model. Name all or none of "
                f"{', '.join(parts)}"
            )
    if recurrent:
        return *targets, *(layer for layer, parts in _RECURRENT.items() if set(parts) <= set(targets))
    if latent:  # queries have two layers
        stacked_parts = {part for parts in stacked.values() for part in parts}
        layers = (layer for layer, parts in stacked.items() if set(parts) <= set(targets))
        return *(target for target in targets if target not in stacked_parts), *layers
    of = {part: layer for layer, parts in stacked.items() for part in parts}
    return tuple(dict.fromkeys(of.get(target, target) for target in targets))


def _latent_layers(query_rank: int) -> dict[str, tuple[str, ...]]:
    """Linear layers of latent attention that an adapter may have, and the targets that each stands for.

    `kv_b_proj` is none of them: engines multiply it into queries and outputs, where an adapter would have no effect.
    """
    queries = dict.fromkeys(("q_a_proj", "q_b_proj") if query_rank else ("q_proj",), ("q_proj",))
    return {**queries, "kv_a_proj_with_mqa": ("k_proj", "v_proj")}


def context_of(folder: Path) -> int | None:
    """Return a model's maximum number of tokens, prompt and response together. None if its config has none.

    Raises:
        ModelNotFoundError: The config is missing or unreadable.
    """
    config = read_json(folder / "config.json")
    try:
        return positions_of(config)
    except (TypeError, AttributeError, LookupError, ValueError) as cause:
        raise ModelNotFoundError(f"{folder} has a config.json with a value that no model has ({cause!r})") from cause


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Return the number of positions with the same RoPE frequencies. None if config.json has none.

    LongRoPE has other frequencies for longer sequences: vLLM chooses them by its longest sequence, transformers by each
    sequence.
    """
    config = decoder_config(config)
    rope, limit = rope_of(config), config.get("max_position_embeddings")
    if rope["rope_type"] == "longrope":
        limit = config.get("original_max_position_embeddings") or 4096  # whatever RoPE's settings say
    return limit if isinstance(limit, int) else None


def has_positions(config: Mapping[str, Any], layer: int) -> bool:
    """Return whether a layer applies RoPE. Some layers of SmolLM3 do not."""
    if architecture_of(config) != "SmolLM3ForCausalLM":
        return True
    layers = config.get("no_rope_layers")  # 1 for a layer with positions, as transformers writes it
    return bool(layers[layer] if layers else (layer + 1) % config.get("no_rope_layer_interval", 4))


def is_local(config: Mapping[str, Any], layer: int) -> bool:
    """Return whether a layer of Gemma 3 has a sliding window and the RoPE of such layers."""
    kinds = config.get("layer_types")
    return bool(kinds[layer] == "sliding_attention" if kinds else (layer + 1) % config.get("sliding_window_pattern", 6))


def window_of(config: Mapping[str, Any], layer: int) -> int | None:
    """Return the size of a layer's sliding window in positions, including the query's own. None: no window."""
    name, kinds = architecture_of(config), config.get("layer_types")
    if name not in _SLIDING and not (name in _MAY_SLIDE and config.get("use_sliding_window")):
        return None
    window = config.get("sliding_window", {"GptOssForCausalLM": 128, "Phi3ForCausalLM": None}.get(name, 4096))
    if name == "Gemma3ForCausalLM":
        slides = is_local(config, layer)
    elif has_sinks(config):
        slides = layer % 2 == 0
    elif kinds and name not in _ALL_SLIDE:
        slides = kinds[layer] == "sliding_attention"
    elif name == "SmolLM3ForCausalLM":
        slides = not has_positions(config, layer)
    elif name in {"Qwen2ForCausalLM", "Qwen3ForCausalLM"}:
        slides = layer >= config.get("max_window_layers", 28)
    else:
        slides = True
    return int(window) if window and slides else None


def num_experts(config: Mapping[str, Any]) -> int:
    """Return the number of experts of each mixture layer, or 0 for a dense model."""
    count = config.get("num_experts") or config.get("num_local_experts")
    return int(count or (config.get("n_routed_experts") if has_latent(config) else 0) or 0)


def has_experts(config: Mapping[str, Any], layer: int) -> bool:
    """Return whether a layer is a mixture of experts. Layers of dense models, and some of mixtures, are not."""
    if has_latent(config):
        return bool(layer >= config["first_k_dense_replace"])
    if has_sinks(config):
        return True
    every, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    return num_experts(config) > 0 and layer not in dense and (layer + 1) % every == 0


def is_tied(config: Mapping[str, Any]) -> bool:
    """Return whether the output head shares the embedding. transformers leaves out the default of the architecture."""
    config = decoder_config(config)
    default = architecture_of(config) in {"Gemma3ForCausalLM", "SmolLM3ForCausalLM"}
    return bool(config.get("tie_word_embeddings", default))


def rope_of(config: Mapping[str, Any], layers: str = "full_attention") -> dict[str, Any]:
    """Return the settings of RoPE, with its scaling always in ``rope_type``.

    Gemma 3 has others for `layers` of the type ``"sliding_attention"``.
    """
    sliding = layers == "sliding_attention"
    settings = {"rope_type": "default"}
    if sliding:
        settings["rope_theta"] = config.get("rope_local_base_freq", 10000.0)
    for name in ("rope_parameters", "rope_scaling"):  # older files have rope_scaling, and rope_theta next to it
        rope = config.get(name) or {}
        if sliding or "full_attention" in rope:
            rope = rope.get(layers) or {}
        settings |= rope if "rope_type" in rope or "type" not in rope else {**rope, "rope_type": rope["type"]}
    return settings | ({"rope_type": "longrope"} if settings["rope_type"] == "su" else {})  # LongRoPE's first name


_CALLS = {
    "hermes": "JSON in <tool_call>",
    "xml": "<function=NAME> in <tool_call>",
    "llama": "JSON, with or without <|python_tag|>",
    "mistral": "JSON after [TOOL_CALLS]",
    "harmony": "a separate channel",
}


def describe(model: ModelInfo) -> Iterator[tuple[str, str]]:
    """Yield the rows of ``forge-agents list --models MODEL``: property and value."""
    family = model.family.models if model.family else "unknown family"
    yield "architecture", f"{model.architecture or 'not named'} ({family})"
    yield "trainable", f"no: {model.untrainable_reason}" if model.untrainable_reason else "yes"
    if not model.has_template:
        yield "chat", "no chat template"
        return
    yield "chat", model.chat_format.name if model.chat_format else "unknown format"
    switch = f", switched by Policy.thinking ({model.reasoning_switch})" if model.reasoning_switch else ""
    yield "reasoning", f"yes{switch}" if model.supports_reasoning else "not in its template"
    calls = model.chat_format.calls if model.chat_format else ""
    yield "tools", _CALLS.get(calls, calls) if calls else "not in its template"


def _family(architecture: str) -> Family | None:
    return next((family for family in FAMILIES if architecture in family.architectures), None)
