"""A loss of one's own, and what it does to one token, drawn before it trains anything.

"Tempered" takes the place of PPO's clip: the pull of a token fades smoothly as its probability moves away from the
sampler's, so there is a gradient everywhere.

    python examples/own_loss.py [--steps 20] [--model smollm2-135m-instruct] [--out runs/own_loss]

From a file, a run names the module: `--trainer.learner.loss own_loss:tempered`, in this folder.
"""

import argparse

import torch

import forge_agents as fa
from forge_trainers.losses import TokenInputs, TokenLoss


@fa.register_loss("tempered", reduction="token")
def tempered(inputs: TokenInputs) -> TokenLoss:
    """The gradient of log p is A * r * exp(-(log r)^2 / 2 w^2), with w = 0.3; the ratio r is to the sampler."""
    log_ratio_S = inputs.log_ratio_S
    fade_S = torch.exp(-(log_ratio_S.detach() ** 2) / (2 * 0.3**2))
    return TokenLoss(-fade_S * log_ratio_S.exp() * inputs.advantages_S, (fade_S < 0.5).float())


def curve(ratios):
    """The gradient of `tempered` at an advantage of 1, for each ratio."""
    from forge_trainers.losses import find_loss

    log_ratio_S = torch.tensor(ratios).log().requires_grad_()
    inputs = TokenInputs(
        logprobs_S=log_ratio_S,
        log_ratio_S=log_ratio_S,
        sequence_log_ratio_S=torch.zeros(len(ratios)),
        advantages_S=torch.ones(len(ratios)),
        clip_low=0.2,
        clip_high=0.2,
    )
    find_loss("tempered").function(inputs).loss_S.sum().backward()
    return (-log_ratio_S.grad).tolist()


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="0 only shows the curve")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", default="runs/own_loss")
    args = parser.parse_args(words)
    ratios = [0.5, 0.8, 1.0, 1.25, 2.0]
    for ratio, pull in zip(ratios, curve(ratios), strict=True):
        print(f"ratio {ratio:4.2f}  pull {pull:.3f}  {'#' * round(40 * pull)}")
    if not args.steps:
        return
    team = fa.Policy(args.model, name="team", sampling=fa.Sampling(max_tokens=16))
    config = fa.GRPOConfig(
        learner=fa.LearnerConfig(loss="own_loss:tempered", lr=2e-5), engine=fa.EngineConfig(max_model_len=512)
    )
    with fa.GRPOTrainer(team, config=config, out_dir=args.out) as trainer:
        print(trainer.fit("forge/Relay-v0", steps=args.steps, env_args={"max_number": 9, "tool": False}).curve)


if __name__ == "__main__":
    main()
