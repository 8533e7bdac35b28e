"""Time limits of tokenizers, whose files may have any regular expression."""

import time

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFC, Replace, Sequence
from tokenizers.pre_tokenizers import ByteLevel, Split
from transformers import PreTrainedTokenizerFast

from forge_agents.rollout import tokenizing
from forge_agents.rollout.tokenizing import TokenizerLimitError, has_slow_patterns, tokenize


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


def test_expression_beyond_the_limit_of_the_library_is_an_error_of_one_text():
    tokenizer = split_by("(a|a)+[^a]")
    with pytest.raises(TokenizerLimitError, match=r"failed for a text of 60 characters \(Onig.*retry-limit"):
        tokenize(tokenizer, "a" * 60)
    assert tokenize(tokenizer, "ab")["input_ids"] == [0, 1]


@pytest.mark.parametrize("pattern", sorted(tokenizing._QUICK))
def test_expressions_of_common_models_take_linear_time(pattern):
    split, seconds = split_by(pattern).backend_tokenizer.pre_tokenizer, []
    assert not has_slow_patterns(split_by(pattern)) and has_slow_patterns(split_by(f"{pattern}|a+b"))
    for count in (5_000, 40_000):
        start = time.thread_time()
        for unit in ("a", "A", "aB", " ", "\n", " \n", "  a", "1", "'", "'s", "\u6f22", "\u02b0", "\u0301", "!/"):
            split.pre_tokenize_str(unit * count)
        seconds.append(time.thread_time() - start)
    assert seconds[1] < 32 * seconds[0], seconds  # 8 times if linear, 64 if quadratic


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
