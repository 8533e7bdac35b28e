"""An engine of several ranks beside one of one: the same model must give the same greedy tokens.

    python tests/perf/tp_greedy.py [--model smollm2-135m-instruct] [--tp 3] [--tokens 32]

In float32: in bfloat16 two ranks round other sums, and near ties of greedy tokens fall otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import forge_agents as fa
from forge_agents.models import resolve as models
from forge_agents.runtime import mesh
from forge_agents.serving import EngineProcess
from forge_agents.serving.config import EnginePlan
from forge_agents.types import Completion

PROMPTS = (
    "The capital of France is",
    "1, 2, 3, 4, 5,",
    "def add(a, b):\n    return",
    "Once upon a time there was a fox who",
    "To boil an egg, first",
    "The opposite of cold is",
    "Dear Sir or Madam, I am writing to",
    "Monday, Tuesday, Wednesday,",
)
START_S = 900.0


def main() -> int:
    """Sample with both, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as a policy names one")
    parser.add_argument("--tp", type=int, default=3, help="ranks of the second engine")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    arguments = parser.parse_args()
    folder = models.resolve(arguments.model)
    one, several = (asyncio.run(greedy(folder, tp, arguments.tokens)) for tp in (1, arguments.tp))
    pairs = list(zip(one, several, strict=True))
    equal = sum(a.token_ids == b.token_ids for a, b in pairs)
    gaps = [abs(x - y) for a, b in pairs for x, y in zip(a.logprobs, b.logprobs, strict=False)]
    sys.stdout.write(
        f"{arguments.model}, float32: {equal} of {len(pairs)} greedy answers, "
        f"{sum(len(a.token_ids) for a in one)} tokens, are equal with {arguments.tp} ranks and with one; "
        f"log-probabilities differ by {max(gaps):.1e} at most\n"
    )
    return 0 if equal == len(pairs) else 1


async def greedy(folder: Path, tp: int, tokens: int) -> list[Completion]:
    """The answers of an engine of `tp` ranks, in the order of the prompts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = EnginePlan(
        model=str(folder),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=len(PROMPTS),
        kv_cache_gb=0.25,
        enforce_eager=True,
        threads=1,
        tp=tp,
    )
    async with mesh.session():
        engine = await EngineProcess.start(
            config, name=f"engine of {tp}", heartbeat_timeout_s=START_S, timeout_s=START_S
        )
        sampling = fa.Sampling(temperature=0.0, max_tokens=tokens)
        asking = (engine.generate(tokenizer.encode(text), sampling, timeout_s=START_S) for text in PROMPTS)
        result = await asyncio.gather(*asking)
        await engine.stop()
    return result


if __name__ == "__main__":
    sys.exit(main())
