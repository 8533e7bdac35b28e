"""The text of single tokens, as a run's own tokenizer writes them.

In: token ids and the policy that sampled them. Out: one piece of text per token. Waits for the disk, never for the
network.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Pieces:
    """Tokenizers of a run's policies.

    Args:
        folder: The run's folder; its exported models come first.
        models: Model by policy, as the run's settings name them.
    """

    def __init__(self, folder: Path, models: Mapping[str, str]) -> None:
        self._folder, self._models = folder, dict(models)
        self._tokenizer = functools.lru_cache(maxsize=16)(self._load)

    def of(self, policy: str, ids: Sequence[int]) -> list[str] | None:
        """One text per id; None where the tokenizer is not on this machine.

        Joined they are the response. A character that several tokens spell stands in the last of them, the others are
        empty.
        """
        tokenizer = self._tokenizer(policy)
        if tokenizer is None:
            return None
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        try:
            return [stream.step(tokenizer, token) or "" for token in ids]
        except (OverflowError, TypeError, ValueError):
            return None  # ids of another tokenizer

    def _load(self, policy: str) -> Any:
        from tokenizers import Tokenizer

        for file in self._candidates(policy):
            if file.is_file():
                return Tokenizer.from_file(str(file))
        return None

    def _candidates(self, policy: str) -> list[Path]:
        model = self._models.get(policy, "")
        export = self._folder / "export"
        own = [export / policy / "tokenizer.json"] if "/" not in policy and policy not in ("", ".", "..") else []
        if len(self._models) == 1:
            own.append(export / "tokenizer.json")
        return [*own, *_installed(model)] if model else own


def _installed(model: str) -> list[Path]:
    """Where the tokenizer of a model may lie on this machine."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    from forge_agents.models.resolve import BUILTIN, resolve

    if model.casefold() in BUILTIN:
        return [resolve(model) / "tokenizer.json"]
    found = [Path(model).expanduser() / "tokenizer.json"]
    try:
        cached = try_to_load_from_cache(model, "tokenizer.json")
    except HFValidationError:
        return found
    return [*found, Path(cached)] if isinstance(cached, str) else found
