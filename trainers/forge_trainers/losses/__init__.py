"""Registered policy losses and the importance weights of off-policy samples.

`registry` has the losses with their equations, `correction` the parts that depend on whole sequences, and
`policy_loss` computes a loss from logits.
"""

from forge_trainers.losses.registry import Correction, TokenInputs, TokenLoss, find_loss, list_losses

__all__ = ["Correction", "TokenInputs", "TokenLoss", "find_loss", "list_losses"]
