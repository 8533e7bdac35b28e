"""Weights by version, from learners to engines, through TorchStore.

In: state dicts. Out: the same tensors in another process, all or nothing. Waits for the store, with deadlines. Start at
`versions`: how a version is laid out, written and read; `_torchstore` and `_segments` carry its bytes.
"""

from typing import TYPE_CHECKING, Any

from forge_agents.weights.store import WeightStore, WeightStoreRef

if TYPE_CHECKING:
    from forge_agents.weights.versions import FetchResult, Publisher, Subscriber

__all__ = ["FetchResult", "Publisher", "Subscriber", "WeightStore", "WeightStoreRef"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    from forge_agents.weights import versions  # loads torch, which the controller, who starts the store, does not need

    return getattr(versions, name)
