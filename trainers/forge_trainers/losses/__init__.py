"""What is minimised: the registered losses, and the weights that correct for older samples.

In: logprobs, advantages, masks: plain tensors and settings. Out: a loss and its measures. Waits for: nothing.
"""

from forge_trainers.losses.registry import TokenInputs, TokenLoss, find_loss

__all__ = ["TokenInputs", "TokenLoss", "find_loss"]
