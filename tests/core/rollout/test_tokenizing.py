"""Time limits of tokenizers, whose files may have any regular expression."""

import shutil

import pytest
from costs import costs_less_than
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFC, Replace, Sequence
from tokenizers.pre_tokenizers import ByteLevel, Split
from transformers import PreTrainedTokenizerFast

from forge_agents.rollout import tokenizing
from forge_agents.rollout.rendering import Renderer
from forge_agents.rollout.tokenizing import TokenizerLimitError, encode, has_slow_patterns, tokenize


def split_by(pattern):
    """A tokenizer of the letters a and b, without a chat template, that splits texts by a regular expression."""
    backend = Tokenizer(BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.pre_tokenizer = Split(Regex(pattern), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_expression_that_takes_endless_time_is_stopped(monkeypatch):
    tokenizer, other = split_by("(?:a|a){18}[^a]"), split_by("b+")
    assert tokenize(tokenizer, "ab")["input_ids"] == [0, 1]
    monkeypatch.setattr(tokenizing, "_DEADLINE_S", 0.0)
    with pytest.raises(
        TokenizerLimitError, match="did not end within 0 s for a text of 400 characters.*expression that"
    ):
        tokenize(tokenizer, "a" * 400)
    monkeypatch.setattr(tokenizing, "_DEADLINE_S", 600.0)
    with pytest.raises(TokenizerLimitError, match="did not end in time for an earlier text"):
        tokenize(tokenizer, "ab")
    assert tokenize(other, "ab", "bb")["input_ids"] == [0, 1, 1, 1]


@pytest.mark.parametrize("may_be_slow", [True, False])
def test_long_text_has_the_tokens_of_transformers_without_their_masks(tiny_llama, may_be_slow, monkeypatch):
    tokenizer = Renderer.of(tiny_llama)._tokenizer
    text = " ".join(f"<|im_start|>{number} \u6f22 caf\u00e9" for number in range(2000))
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(expected) > 10_000 and text[:12] in tokenizer.get_added_vocab()
    monkeypatch.setattr(type(tokenizer), "_encode_plus", None)  # it takes 0.2 s per million tokens from all threads
    assert encode(tokenizer, text, may_be_slow=may_be_slow) == tuple(expected)


def test_files_with_padding_and_truncation_change_no_prompt(tiny_llama, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(8)
    backend.enable_padding(length=1000)
    backend.save(str(folder / "tokenizer.json"))
    assert Renderer.of(folder).begin([("user", "a b c " * 20)]) == Renderer.of(tiny_llama).begin(
        [("user", "a b c " * 20)]
    )


def test_expression_beyond_the_limit_of_the_library_is_an_error_of_one_text():
    tokenizer = split_by("(a|a)+[^a]")
    with pytest.raises(TokenizerLimitError, match=r"failed for a text of 60 characters \(Onig.*retry-limit"):
        tokenize(tokenizer, "a" * 60)
    assert tokenize(tokenizer, "ab")["input_ids"] == [0, 1]


@pytest.mark.parametrize("pattern", sorted(tokenizing._QUICK))
def test_expressions_of_common_models_take_linear_time(pattern):
    pre_tokenizer = split_by(pattern).backend_tokenizer.pre_tokenizer
    assert not has_slow_patterns(split_by(pattern)) and has_slow_patterns(split_by(f"{pattern}|a+b"))

    def split(count):
        for unit in ("a", "A", "aB", " ", "\n", " \n", "  a", "1", "'", "'s", "\u6f22", "\u02b0", "\u0301", "!/"):
            pre_tokenizer.pre_tokenize_str(unit * count)

    assert costs_less_than(32, split, 40_000, 5_000), "8 times if linear, 64 if quadratic"


def test_normalizers_and_sequences_are_searched_for_expressions():
    tokenizer = split_by("a+")
    tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel()
    for normalizer, is_slow in (
        (NFC(), False),
        (Replace("a+", "b"), False),
        (Sequence([NFC(), Replace(Regex("a+"), "b")]), True),
    ):
        tokenizer.backend_tokenizer.normalizer = normalizer
        assert has_slow_patterns(tokenizer) is is_slow
