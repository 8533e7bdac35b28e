"""What is minimised: the registered losses, and the weights that correct for samples of another policy.

In: log-probabilities, advantages, masks, a `LossSettings`: plain tensors and settings. Out: a loss and its measures.
Waits for nothing. Start with `registry`, where each loss stands with its equation; `correction` has what looks at whole
sequences, `policy_loss` what makes a number of logits.
"""

from forge_trainers.losses.registry import Correction, TokenInputs, TokenLoss, find_loss, list_losses

__all__ = ["Correction", "TokenInputs", "TokenLoss", "find_loss", "list_losses"]
