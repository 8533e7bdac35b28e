"""Converts a Llama-family GGUF file with a byte-level BPE tokenizer to a Hugging Face checkpoint folder.

GGUF's layout: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_agents.models.tiny import without_progress_bars, write_json

if TYPE_CHECKING:
    from gguf import GGUFReader

CONTROL_TOKEN = 3  # token type of control tokens such as <|im_start|>


def convert(source: Path, target: Path) -> None:
    """Write the model of the GGUF file `source` into the existing folder `target`.

    Quantized tensors become bfloat16. Digits are tokenized one by one, as in llama.cpp's "smollm" tokenizer.

    Raises:
        ValueError: The file's architecture or tokenizer is not supported.
        OSError: The file cannot be read or the folder cannot be written.
    """
    import torch
    from gguf import GGUFReader
    from transformers import GgufConfig, LlamaForCausalLM

    reader = GGUFReader(source)
    kinds = (_value(reader, "general.architecture"), _value(reader, "tokenizer.ggml.pre"))
    if kinds != ("llama", "smollm"):
        raise ValueError(f"{source} has architecture and tokenizer {kinds}. Supported is ('llama', 'smollm')")
    arguments = {"local_files_only": True, "quantization_config": GgufConfig(dequantize=True), "dtype": torch.bfloat16}
    with without_progress_bars(), contextlib.redirect_stderr(io.StringIO()):  # a bar has no switch
        model = LlamaForCausalLM.from_pretrained(source.parent, gguf_file=source.name, **arguments)
        # stored as float32; seven digits restore the original decimal number
        model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.7g}")
        model.save_pretrained(target)
    ids = {f"{name}_token_id": getattr(model.config, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    write_json(target / "generation_config.json", ids)
    _write_tokenizer(reader, target)
    # safetensors makes the weights readable only by their owner
    (target / "model.safetensors").chmod((target / "config.json").stat().st_mode)


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"the GGUF file has no field {key!r}. It is not a complete model file")
    return field.contents()


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
