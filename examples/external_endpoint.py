"""A model behind an OpenAI-compatible server plays a game within a budget. Nothing is served or trained here.

    python examples/external_endpoint.py --endpoint http://127.0.0.1:8000/v1 --model rival-7b [--key-variable RIVAL_KEY]

The model plays Kuhn poker against random play, as both agents on the same seeds. vLLM, SGLang, llama.cpp, Ollama and
hosted services provide this protocol. A failed request is reported, and its episode counts as failed.
"""

import argparse
import asyncio

import numpy as np

import forge_agents as fa
from forge_agents.rollout import Rollout

ENV_ID = "forge/KuhnPoker-v0"


def play(rival, episodes):
    """Rewards of the rival by episode, and the errors."""
    rewards, errors = [], []
    for seat, other in (("player_0", "player_1"), ("player_1", "player_0")):
        seats = {seat: rival, other: fa.Random(seed=0)}
        rollout = Rollout(make_env=lambda: fa.make(ENV_ID), env_id=ENV_ID, policies=seats)
        for seed in range(episodes):
            episode = asyncio.run(rollout.group(seed, 1)).episodes[0]
            if episode.error is None:
                rewards.append(episode.rewards[seat])
            else:
                errors.append(episode.error.message)
    return rewards, errors


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", "--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", required=True, help="what the server calls it")
    parser.add_argument("--key-variable", default="", help="environment variable that holds the key")
    parser.add_argument("--episodes", type=int, default=20, help="seeds, each played from both seats")
    parser.add_argument("--max-tokens", type=int, default=100_000, help="budget of the whole run")
    args = parser.parse_args(words)
    rival = fa.Endpoint(
        args.endpoint,
        args.model,
        name="rival",
        api_key_env=args.key_variable,
        sampling=fa.Sampling(temperature=0.7, max_tokens=16),
        max_total_tokens=args.max_tokens,
        retries=1,
        timeout_s=30,
    )
    rewards, errors = play(rival, args.episodes)
    if rewards:
        half = 1.96 * np.std(rewards) / np.sqrt(len(rewards))
        print(f"{args.model} earns {np.mean(rewards):+.3f} +/- {half:.3f} a game against random play")
    print(f"{len(rewards)} episodes, {len(errors)} failed" + (f", the first because {errors[0]}" if errors else ""))


if __name__ == "__main__":
    main()
