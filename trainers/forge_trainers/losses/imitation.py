"""The loss of imitation.

In: log-probabilities of the tokens to imitate, their weights. Out: a token loss that the learner knows by name. Waits
for nothing.
"""

from __future__ import annotations

from forge_trainers.losses.registry import TokenInputs, TokenLoss, register_loss

SFT_LOSS = f"{__name__}:sft"
"""What `LearnerConfig.loss` is set to; the learner's processes import this module by it."""


@register_loss("sft", reduction="token")
def sft(inputs: TokenInputs) -> TokenLoss:
    """``1/T sum_t -w_t log p_t`` over the T loss tokens of a batch: cross-entropy, weighted with the advantages."""
    loss_S = -inputs.advantages_S * inputs.logprobs_S
    return TokenLoss(loss_S, loss_S.new_zeros(loss_S.shape))
