"""Weights by version, from learners to engines, through TorchStore.

In: state dicts. Out: the same tensors in another process, all or nothing. Waits for the store, with deadlines. Start at
`versions`: how a version is laid out, written and read; `_torchstore` and `_segments` carry its bytes.
"""

from forge_agents.weights.store import WeightStore, WeightStoreRef
from forge_agents.weights.versions import FetchResult, Publisher, Subscriber

__all__ = ["FetchResult", "Publisher", "Subscriber", "WeightStore", "WeightStoreRef"]
