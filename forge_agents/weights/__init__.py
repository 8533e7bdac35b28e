"""Weight transfer from learners to engines, by version: `Publisher.publish` and `Subscriber.load`."""

from typing import TYPE_CHECKING, Any

from forge_agents.weights.store import WeightStore, WeightStoreRef

if TYPE_CHECKING:
    from forge_agents.weights.publisher import Publisher
    from forge_agents.weights.subscriber import LoadedWeights, Subscriber

__all__ = ["LoadedWeights", "Publisher", "Subscriber", "WeightStore", "WeightStoreRef"]


def __getattr__(name: str) -> Any:
    # These modules import torch, which the controller, where the store is started, does not need.
    if name == "Publisher":
        from forge_agents.weights.publisher import Publisher

        return Publisher
    if name in ("LoadedWeights", "Subscriber"):
        from forge_agents.weights import subscriber

        return getattr(subscriber, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. It has {', '.join(__all__)}")
