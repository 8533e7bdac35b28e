"""Converts a Llama-family GGUF file with a byte-level BPE tokenizer to a Hugging Face checkpoint folder.

GGUF's layout: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_agents.models.tiny import write_json

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gguf import GGUFReader

CONTROL_TOKEN = 3  # token type of control tokens such as <|im_start|>

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def convert(source: Path, target: Path) -> None:
    """Write the model of the GGUF file `source` into the existing folder `target`.

    Quantized tensors become bfloat16. Digits are tokenized one by one, as in llama.cpp's "smollm" tokenizer.

    Raises:
        ValueError: The file's architecture or tokenizer is not supported.
        OSError: The file cannot be read or the folder cannot be written.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(source)
    kinds = (_value(reader, "general.architecture"), _value(reader, "tokenizer.ggml.pre"))
    if kinds != ("llama", "smollm"):
        raise ValueError(f"{source} has architecture and tokenizer {kinds}. Supported is ('llama', 'smollm')")
    config = _config(reader)
    write_json(target / "config.json", config)
    ids = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    write_json(target / "generation_config.json", ids | {"pad_token_id": config["pad_token_id"]})
    _write_tokenizer(reader, target)
    weights = target / "model.safetensors"
    save_file(_weights(reader), weights, metadata={"format": "pt"})
    weights.chmod((target / "config.json").stat().st_mode)  # safetensors makes it readable only by its owner


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"the GGUF file has no field {key!r}. It is not a complete model file")
    return field.contents()


def _config(reader: GGUFReader) -> dict[str, Any]:
    heads = _value(reader, "llama.attention.head_count")
    names = {tensor.name for tensor in reader.tensors}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _value(reader, "llama.vocab_size"),
        "hidden_size": _value(reader, "llama.embedding_length"),
        "intermediate_size": _value(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _value(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _value(reader, "llama.attention.head_count_kv"),
        "head_dim": _value(reader, "llama.embedding_length") // heads,
        "hidden_act": "silu",
        "max_position_embeddings": _value(reader, "llama.context_length"),
        # Stored as float32; seven digits restore the original decimal number.
        "rms_norm_eps": float(f"{_value(reader, 'llama.attention.layer_norm_rms_epsilon'):.7g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": _value(reader, "llama.rope.freq_base")},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _value(reader, "tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
        "use_cache": True,
    }


def _weights(reader: GGUFReader) -> dict[str, torch.Tensor]:
    import torch
    from gguf import dequantize

    heads = {
        "attn_q.weight": _value(reader, "llama.attention.head_count"),
        "attn_k.weight": _value(reader, "llama.attention.head_count_kv"),
    }
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        layer, _, kind = tensor.name.removeprefix("blk.").partition(".")
        if kind in heads:
            values = _rotate_halves(values, heads[kind])
        name = _TOP_NAMES.get(tensor.name) or f"model.layers.{layer}.{_LAYER_NAMES[kind]}"
        weights[name] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    return weights


def _rotate_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows from GGUF's rotary channels (adjacent pairs) to Hugging Face's (first halves, then second)."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(reader: GGUFReader, target: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = _value(reader, "tokenizer.ggml.tokens")
    types: list[int] = _value(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in _value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(target / "tokenizer.json"))
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {role: tokens[_value(reader, f"tokenizer.ggml.{name}_token_id")] for role, name in roles.items()}
    write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **named,
            "clean_up_tokenization_spaces": False,
            "model_max_length": _value(reader, "llama.context_length"),
            "chat_template": _value(reader, "tokenizer.chat_template"),
        },
    )
