"""Texts as numbers for a linear model: hashed n-grams of what an agent wrote and read, and a few measures of it.

In: trajectories. Out: a sparse matrix [n, NUM_HASHED] and a dense one [n, len(MEASURES)]. Waits for nothing; work is
bounded, however long the text.
"""

from __future__ import annotations

import re
import string
import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forge_agents.types import Trajectory
from forge_verifiers.rules.answers import final_answer, last_action

FORMAT = "hashed-text-1"
"""Raised whenever the features change: weights belong to one format."""

_BITS = 16
NUM_HASHED = 1 << _BITS
MEASURES = (
    "log characters",
    "log words",
    "log turns",
    "distinct words",
    "digits",
    "capitals",
    "punctuation",
    "not ASCII",
    "lines",
    "words of the observation",
    "numbers of the observation",
    "cut off",
)
"""What the dense columns measure; shares in [0, 1] but for the logarithms and the lines per 100 characters."""

_MAX_BYTES = 8_000
_MAX_WORDS = 2_000
_WORD = re.compile(r"\w+|[^\w\s]")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))
_HASH = np.uint32(2654435761)  # Knuth's multiplicative hash
_KINDS = (np.arange(5, dtype=np.uint32) + 1) * np.uint32(0x9E3779B1)
_ROLL = np.uint32(0x01000193)  # the FNV prime

Hashes: TypeAlias = NDArray[np.uint32]


def text_features(trajectories: Sequence[Trajectory]) -> tuple[Any, NDArray[np.float32]]:
    """Features of trajectories that have a last action.

    Returns:
        A scipy CSR matrix float32 [n, NUM_HASHED] whose five kinds of n-grams have length 1 each, and the measures,
        float32 [n, len(MEASURES)].
    """
    from scipy.sparse import csr_matrix

    columns, values, ends = [], [], [0]
    measures = np.zeros((len(trajectories), len(MEASURES)), np.float32)
    for at, trajectory in enumerate(trajectories):
        said, read = last_action(trajectory) or "", trajectory.turns[-1].observation[-_MAX_BYTES:]
        words, seen = _words(said), _words(read)
        column, value = _counted(_ngrams(trajectory, said, words, seen))
        columns.append(column)
        values.append(value)
        ends.append(ends[-1] + len(column))
        measures[at] = _measures(trajectory, said, words, read, seen)
    flat = (np.concatenate(values), np.concatenate(columns), ends) if columns else ([], [], ends)
    return csr_matrix(flat, shape=(len(trajectories), NUM_HASHED), dtype=np.float32), measures


def _counted(ngrams: Sequence[Hashes]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Columns and values of one row: log counts, each kind of n-gram scaled to length 1."""
    kinds = np.repeat(np.arange(len(ngrams), dtype=np.uint32), [len(hashes) for hashes in ngrams])
    column = ((np.concatenate(ngrams) ^ _KINDS[kinds]) * _HASH) >> np.uint32(32 - _BITS)
    keys, counts = np.unique(kinds << np.uint32(_BITS) | column, return_counts=True)
    value, kind = np.log1p(counts), keys >> np.uint32(_BITS)
    length = np.sqrt(np.bincount(kind, value * value))
    return (keys & np.uint32(NUM_HASHED - 1)).astype(np.int32), (value / length[kind]).astype(np.float32)


def _ngrams(trajectory: Trajectory, said: str, words: list[str], seen: list[str]) -> list[Hashes]:
    """Hashes by kind: characters, words and word pairs, the final answer, the observation, what both share."""
    earlier = " ".join(turn.action[-_MAX_BYTES:] for turn in trajectory.turns[-4:-1])
    spoken = _word_hashes(_words(earlier) + words)
    answer = _word_hashes(_words(final_answer(said))[-20:])
    both = _word_hashes(sorted(set(words) & set(seen)))
    return [
        np.concatenate([_windows(said, n) for n in (3, 4, 5)]),
        np.concatenate([spoken, _pairs(spoken)]),
        np.concatenate([answer, _pairs(answer)]),
        _word_hashes(seen),
        both,
    ]


def _windows(text: str, n: int) -> Hashes:
    """Hashes of all runs of n bytes of a text, ends marked."""
    codes = np.frombuffer(b"\x02" + text.encode(errors="replace")[-_MAX_BYTES:] + b"\x03", np.uint8).astype(np.uint32)
    if len(codes) < n:
        return np.empty(0, np.uint32)
    out = np.full(len(codes) - n + 1, n, np.uint32)
    for shift in range(n):
        out = (out ^ codes[shift : len(codes) - n + 1 + shift]) * _ROLL
    return out


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())[-_MAX_WORDS:]


def _word_hashes(words: Sequence[str]) -> Hashes:
    return np.array([zlib.crc32(word.encode(errors="replace")) for word in words], np.uint32)


def _pairs(hashes: Hashes) -> Hashes:
    return (hashes[:-1] * _ROLL) ^ hashes[1:]


def _measures(trajectory: Trajectory, said: str, words: list[str], read: str, seen: list[str]) -> list[float]:
    said = said or " "
    size = len(said)
    known, numbers = set(seen), _NUMBER.findall(said)
    given = set(_NUMBER.findall(read))
    turns = trajectory.turns
    return [
        float(np.log1p(len(said))),
        float(np.log1p(len(words))),
        float(np.log1p(len(turns))),
        len(set(words)) / max(len(words), 1),
        sum(map(str.isdigit, said)) / size,
        sum(map(str.isupper, said)) / size,
        1 - len(said.translate(_PUNCTUATION)) / size,
        1 - len(said.encode("ascii", "ignore")) / size,
        said.count("\n") / size * 100,
        sum(word in known for word in words) / max(len(words), 1),
        sum(number in given for number in numbers) / max(len(numbers), 1),
        sum(turn.finish_reason == "length" for turn in turns) / len(turns),
    ]
