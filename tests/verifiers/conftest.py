"""Tiny random encoders and classifiers, written on the spot."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_bert(labels=2)``: the folder of that BERT, written once a session. Read-only."""
    made: dict[tuple[tuple[str, object], ...], Path] = {}

    def folder(**options: int) -> Path:
        key = tuple(sorted(options.items()))
        if key not in made:
            made[key] = write_bert(tmp_path_factory.mktemp("bert"), **options)
        return made[key]

    return folder


def write_bert(folder: Path, *, labels: int | None = None, seed: int = 0) -> Path:
    """A BERT of two layers over bytes, 64 positions, with a classifier's head of `labels` outputs if set."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    config = BertConfig(
        vocab_size=write_tokenizer(folder, model_max_length=64), hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=48, max_position_embeddings=64, pad_token_id=0, num_labels=labels or 2,
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = BertForSequenceClassification(config) if labels else BertModel(config, add_pooling_layer=False)
    model.save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path, **options: Any) -> int:
    """A tokenizer over bytes with the tokens of BERT. Returns the size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: at for at, token in enumerate(["[PAD]", "[CLS]", "[SEP]", *symbols])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", **options
    ).save_pretrained(folder)
    return len(vocab)


@pytest.fixture
def tiny_classifier(tmp_path: Path) -> Callable[..., Path]:
    """``tiny_classifier(XLNetConfig, d_model=16)``: the folder of that classifier, without a limit in its tokenizer."""

    def write(config: Any, **settings: Any) -> Path:
        import torch
        from transformers import AutoModelForSequenceClassification

        ids = {"vocab_size": write_tokenizer(tmp_path), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config(**{"num_labels": 1, **ids, **settings}))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(tmp_path)
        return tmp_path

    return write
