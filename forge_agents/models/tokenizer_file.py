"""Bounds on how much a model's tokenizer may lengthen a text, and on its time."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forge_agents.errors import ModelNotFoundError
from forge_agents.http_body import MAX_MODEL_BRACKETS, MAX_MODEL_COMMAS, bounded_json

_MAX_GROWTH = 64
"""Maximum number of letters that may replace one letter. Unicode's compatibility forms have up to 18."""
_MAX_ADDED_TOKENS = 10_000
"""Tokens that a tokenizer's settings may add to those of its vocabulary in one list or by one number."""
_NUMBERS_OF_TOKENS = ("extra_ids", "num_madeup_words", "offset")
"""Settings of T5, XGLM, Pegasus and their relatives for which transformers makes tokens."""
LONG_NUMBER = re.compile(r"\s*[-+]?[\d_]{21,}\s*")
"""Matches keys, as of labels and tokens, that become integers. Many of one hash take hours to compare."""
_MAX_TOKEN_CHARS = 1024
"""Maximum length of a token. Long tokens make long texts of short answers."""
_MAX_VOCABULARY_CHARS = 5_000_000
"""Maximum number of letters of all tokens. Each may take 400 bytes. 262,000 tokens of Gemma have 2 million."""
_MAX_STEPS = 32
"""Maximum number of steps of a part, such as normalizers. Some steps add letters to each text."""


def check_growth(file: Path, settings: Mapping[str, Any]) -> None:
    """Check that a ``tokenizer.json`` cannot multiply the length of a text or take endless time.

    Args:
        file: The file, for the message.
        settings: Its content.

    Raises:
        ModelNotFoundError: A part has more than 32 steps, one letter may become more than 64, which may make the
            library abort the process for lack of memory, a decoder has a regular expression, which would be
            searched for in every answer, or a token is longer than 1,024 letters.
    """
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        steps = list(parts(settings.get(name)))
        if len(steps) > _MAX_STEPS:
            raise _refusal(file, f"its {name} has {len(steps)} steps. Expected at most {_MAX_STEPS}")
        patterns = (step["pattern"] for step in steps if isinstance(step.get("pattern"), Mapping))
        if name == "decoder" and any("Regex" in pattern for pattern in patterns):
            raise _refusal(
                file, "its decoder searches for a regular expression, which may take endless time. Expected texts"
            )
        if name == "decoder" and any(step.get("type") == "Strip" and step.get("stop") for step in steps):
            raise _refusal(file, "its decoder strips the ends of tokens, which the library cannot do for short tokens")
        growth = math.prod(float(_growth(step)) for step in steps)  # floats end at infinity
        if growth > _MAX_GROWTH:
            raise _refusal(
                file, f"its {name} can turn one letter into {growth:g}. Expected at most {_MAX_GROWTH} letters"
            )
    model = settings.get("model")
    model = model if isinstance(model, Mapping) else {}
    texts = [value for name, value in model.items() if name != "merges"]  # they join tokens of the vocabulary
    check_tokens(file, (texts, settings.get("added_tokens")))
    if not 0 <= (chars := model.get("max_input_chars_per_word", 0)) <= _MAX_TOKEN_CHARS:  # quadratic time
        raise _refusal(file, f"its words have up to {chars!r:.20} letters. Expected at most {_MAX_TOKEN_CHARS}")


def check_tokens(file: Path, values: object) -> None:
    """Check that no text in a part of a tokenizer's file is longer than 1,024 letters, and all are not too long.

    Raises:
        ModelNotFoundError: A text is longer, so that decoded or encoded texts would have any length, and some of the
            library's tries could end the process.
    """
    pending, total = [values], 0
    while pending:
        part = pending.pop()
        if isinstance(part, str):
            total += len(part)
            if len(part) > _MAX_TOKEN_CHARS:
                raise _refusal(file, f"it has a token of {len(part)} letters. Expected at most {_MAX_TOKEN_CHARS}")
        if isinstance(part, Mapping):
            pending += [*part, *part.values()]
        elif isinstance(part, list | tuple):
            pending += part
    if total > _MAX_VOCABULARY_CHARS:
        raise _refusal(file, f"its tokens have {total} letters. Expected at most {_MAX_VOCABULARY_CHARS}")


def check_token_numbers(file: Path, settings: Mapping[str, Any]) -> None:
    """Check that a tokenizer's settings ask for no more tokens than a list of additional tokens may have.

    Some classes of the library make as many tokens as a number says, and add listed tokens in quadratic time.

    Raises:
        ModelNotFoundError: A number or a list is too large.
    """
    for name, value in settings.items():
        if name in _NUMBERS_OF_TOKENS and isinstance(value, int | float) and not abs(value) <= _MAX_ADDED_TOKENS:
            raise _refusal(file, f"{name} is {value!r:.20}. Expected at most {_MAX_ADDED_TOKENS}")
        if "special_tokens" in name and isinstance(value, list | Mapping) and len(value) > _MAX_ADDED_TOKENS:
            raise _refusal(file, f"{name!s:.60} has {len(value)} entries. Expected at most {_MAX_ADDED_TOKENS}")
        if isinstance(value, Mapping) and any(LONG_NUMBER.fullmatch(key) for key in value):
            raise _refusal(file, f"{name!s:.60} has a number of more than 20 digits as a key")


def check_same_tokens(folder: Path, other: Path) -> None:
    """Check that two complete models have the same tokens, so that log-probabilities of the same ids can be compared.

    Raises:
        ValueError: A token has another id, is missing, or is special in only one of the models.
    """
    files = folder / "tokenizer.json", other / "tokenizer.json"
    if files[0].read_bytes() == files[1].read_bytes():
        return
    first, second = (_tokens(bounded_json(file.read_bytes(), MAX_MODEL_BRACKETS, MAX_MODEL_COMMAS)) for file in files)
    differing = [token for token in first | second if first.get(token) != second.get(token)]
    if differing:
        what = [_described(tokens.get(differing[0])) for tokens in (first, second)]
        raise ValueError(
            f"the models {folder} and {other} have different tokenizers: {len(differing)} of {len(first | second)} "
            f"tokens differ. {differing[0]!r:.60} {what[0]} the first and {what[1]} the second. Choose a model with "
            "the same tokenizer"
        )


def num_tokens(folder: Path) -> int:
    """Return the number of token ids of a complete model's tokenizer, unused ones included."""
    settings = bounded_json((folder / "tokenizer.json").read_bytes(), MAX_MODEL_BRACKETS, MAX_MODEL_COMMAS)
    return 1 + max((number for number, _ in _tokens(settings).values()), default=-1)


def _tokens(settings: Mapping[str, Any]) -> dict[str, tuple[int, bool]]:
    """Return id of each token, and whether the token is special."""
    vocabulary = settings["model"].get("vocab") or {}
    if not isinstance(vocabulary, Mapping):  # Unigram: pairs of token and score
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    tokens = {token: (number, False) for token, number in vocabulary.items()}
    added = settings.get("added_tokens") or ()
    return tokens | {token["content"]: (token["id"], bool(token.get("special"))) for token in added}


def _described(token: tuple[int, bool] | None) -> str:
    if token is None:
        return "is missing in"
    return f"is {'special ' if token[1] else ''}token {token[0]} of"


def _refusal(file: Path, problem: str) -> ModelNotFoundError:
    return ModelNotFoundError(f"{file}: {problem}. Download the model again, from a source that you trust")


def parts(settings: object) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a sequence and of sequences in it."""
    pending = [settings]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            for name in ("normalizers", "pretokenizers", "processors", "decoders"):
                inner = part.get(name)
                pending.extend(inner if isinstance(inner, list) else ())
            if part.get("type") != "Sequence":
                yield part


def _growth(part: Mapping[str, Any]) -> float:
    """Return the largest number of letters that replace one letter. Infinite if a template repeats the text."""
    match part.get("type"):
        case "Replace":
            pattern, content = part.get("pattern"), str(part.get("content"))
            replaced = pattern.get("String") if isinstance(pattern, Mapping) else None
            if isinstance(replaced, str) and replaced:
                return max(1, math.ceil(len(content) / len(replaced)))
            return 1 + len(content)  # an expression can match nothing, before each letter
        case "Prepend":
            return 1 + len(str(part.get("prepend")))
        case "ByteLevel":  # a letter has up to four bytes, and each becomes a letter of two bytes
            return 4
        case "CTC" | "BPEDecoder" | "WordPiece":  # an empty text is found before each letter
            names = ("pad_token", "word_delimiter_token", "suffix", "prefix")
            return 1 + sum(bool(part.get(name) == "") for name in names)
        case "Precompiled":
            return _longest_replacement(part.get("precompiled_charsmap"))
        case "TemplateProcessing":
            special = part.get("special_tokens")
            tokens = special.values() if isinstance(special, Mapping) else ()
            ids = max((len(token.get("ids", ())) for token in tokens), default=1)
            return math.inf if any(_repeats(part.get(name), ids) for name in ("single", "pair")) else 1
    return 1


def _longest_replacement(charsmap: object) -> int:
    """Return the length of the longest text in SentencePiece's map of characters: a table's size, the table, texts."""
    try:
        data = base64.b64decode(str(charsmap))
    except ValueError:
        return 1  # the library refuses it
    texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return max(1, *(len(text.decode(errors="replace")) for text in texts))


def _repeats(template: object, ids: int) -> bool:
    """Return whether a template repeats the text, or has many pieces of `ids` tokens each."""
    pieces = template if isinstance(template, list) else []
    texts = [str(piece.get("Sequence")) for piece in pieces if isinstance(piece, Mapping) and "Sequence" in piece]
    return len(set(texts)) < len(texts) or len(pieces) * ids > _MAX_GROWTH
