"""Batches on disk, for a look at what a learner could not learn from.

In: an `EpisodeBatch` and what is known of it. Out: a safetensors file with JSON beside it. Waits for nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_agents.errors import RunFolderError
from forge_agents.types import EpisodeBatch


def dump_batch(batch: EpisodeBatch, file: str | os.PathLike[str], facts: Mapping[str, Any]) -> Path:
    """Write `batch` to `file`, and `facts`, JSON-safe, beside it with the ending ``.json``.

    Args:
        file: Its folder is created; an existing file is replaced.

    Returns:
        `file`.
    """
    from safetensors.torch import save_file

    target = Path(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    flat = batch.flatten_keys(".")
    save_file({str(name): flat[name].contiguous() for name in flat.keys()}, target)  # noqa: SIM118  # no mapping
    target.with_suffix(".json").write_text(json.dumps(dict(facts), indent=2) + "\n")
    return target


def load_batch(file: str | os.PathLike[str]) -> EpisodeBatch:
    """The batch that `dump_batch` wrote, checked.

    Raises:
        RunFolderError: The file cannot be read.
        ValueError: It holds something else.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from tensordict import TensorDict

    from forge_trainers.batch.packing import check_batch

    try:
        flat = load_file(file)
    except (OSError, SafetensorError) as cause:
        raise RunFolderError(f"{os.fspath(file)} cannot be read as a batch ({cause})") from cause
    parts: dict[str, dict[str, Any]] = {"tokens": {}, "samples": {}}
    for name, column in flat.items():
        part, _, key = name.partition(".")
        parts.setdefault(part, {})[key] = column
    sizes = {part: [len(next(iter(columns.values())))] if columns else [0] for part, columns in parts.items()}
    batch = TensorDict(
        {part: TensorDict(columns, batch_size=sizes[part]) for part, columns in parts.items()},
        batch_size=[],
    )
    check_batch(batch)
    return batch
