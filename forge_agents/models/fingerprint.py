"""A hash that distinguishes models without reading all of their weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

from forge_agents.models.resolve import weight_files

_SAMPLE_BYTES = 1 << 16
_SAMPLES = 8
"""Number of evenly spread samples of each weight file. The first contains the names and shapes of its tensors."""


def sampled_hash(folder: Path) -> str:
    """Hash a model's config and the sizes and samples of its weight files. Returns 16 hexadecimal digits.

    Training changes every weight, so two trainings of one model differ. Half a megabyte of each file is read.
    """
    digest = hashlib.sha256()
    config = folder / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    for file in weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as weights:
            for number in range(_SAMPLES):
                weights.seek(number * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(weights.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
