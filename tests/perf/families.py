"""Every family that is trained, as a tiny random model: its logits beside transformers', and GRPO through vLLM.

    python tests/perf/families.py [--only qwen2 smollm3] [--lora]

Float32 everywhere, so that what is left between sampler and learner is the order of sums.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

import forge_agents as fa
from forge_agents.models.families import FAMILIES
from forge_agents.models.tiny import tiny_model
from forge_agents.policy import LORA_TARGETS
from forge_trainers.learner.plan import LearnerPlan

STEPS = 3
HEAD = "| family | logits | gap before | gap after | a stale engine's | seconds |\n|---|---|---|---|---|---|\n"


@fa.register("study/Letters-v0", max_turns=2)
class Letters(fa.TurnEnv):
    """Two answers, each paid by its share of lowercase letters."""

    possible_agents = ["one"]

    def setup(self, rng):  # type: ignore[no-untyped-def]
        self.start, self.said = "".join(map(chr, rng.integers(97, 123, 24))), 0

    def instructions(self, agent):  # type: ignore[no-untyped-def]
        return "abc"

    def observe_text(self, agent):  # type: ignore[no-untyped-def]
        return self.start

    def act(self, agent, action):  # type: ignore[no-untyped-def]
        self.said += 1
        share = sum("a" <= c <= "z" for c in action) / max(len(action), 1)
        return fa.Outcome(rewards={agent: share}, done=self.said == 2)


def main() -> int:
    """Measure, and print a row for each family."""
    names = [family.name for family in FAMILIES if not family.untrainable_reason]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--lora", action="store_true", help="an adapter learns instead of all weights")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    sys.stdout.write(HEAD)
    for name in arguments.only:
        # whose experts cannot be adapted
        mixture = name in {"deepseek_v3", "glm4_moe_lite", "gpt_oss", "qwen3_moe", "qwen3_5_moe"}
        lora = fa.LoRA(rank=8, targets=LORA_TARGETS[:4] if mixture else LORA_TARGETS)
        row = measure(name, lora=lora if arguments.lora else None)
        sys.stdout.write("| " + " | ".join(row) + " |\n")
        sys.stdout.flush()
    return 0


def measure(family: str, *, lora: fa.LoRA | None) -> tuple[str, ...]:
    """One row."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"{family}-") as folder:
        # vLLM computes recurrent layers on CPU in bfloat16 only
        dtype = "bfloat16" if family.startswith("qwen3_5") else "float32"
        model, out = tiny_model(Path(folder, "model"), family=family, dtype=dtype), Path(folder, "run")  # type: ignore[arg-type]
        config = fa.GRPOConfig(
            group_size=8, groups_per_step=4, max_resamples=0, checkpoint_every=100, keep_episodes=32, seed=1,
            learner=fa.LearnerConfig(lr=3e-3, threads=1, compute_dtype=dtype),
            engine=fa.EngineConfig(enforce_eager=True, kv_cache_gb=0.1, max_model_len=512, threads=1),
        )  # fmt: skip
        policy = fa.Policy(str(model), name="team", sampling=fa.Sampling(max_tokens=12), lora=lora)
        with fa.GRPOTrainer(policy, config=config, out_dir=out) as trainer:
            result = trainer.fit("study/Letters-v0", steps=STEPS)
        gaps = [row["learner/logprob_gap_mean"] for row in result.metrics]
        stale, logits = beside_transformers(model, out)
        seconds = time.monotonic() - start
        return family, f"{logits:.0e}", f"{gaps[0]:.1e}", f"{gaps[-1]:.1e}", f"{stale:.1e}", f"{seconds:.0f}"


def beside_transformers(model: Path, run: Path) -> tuple[float, float]:
    """Log-probabilities of the last step's tokens under the first weights, and the learner's logits."""
    import torch
    from transformers import AutoModelForCausalLM

    from forge_trainers.batch.layout import Span
    from forge_trainers.learner.core import LearnerCore

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    gaps: list[float] = []
    table = fa.load_episodes(run)
    with torch.no_grad():
        for turn in [turn for at in range(len(table) - 8, len(table)) for turn in table.episode(at).turns]:
            ids = torch.tensor([[*turn.prompt_ids, *turn.response_ids]])
            logprobs = torch.log_softmax(theirs(ids).logits[0, len(turn.prompt_ids) - 1 : -1], dim=-1)
            result = logprobs.gather(1, torch.tensor(turn.response_ids)[:, None])[:, 0].tolist()
            gaps += [abs(a - b) for a, b in zip(result, turn.logprobs or (), strict=True)]
        core = LearnerCore(LearnerPlan(model=str(model), compute_dtype="float32", threads=1))
        core.model._skip_lm_head = False
        ids = torch.randint(0, 256, (1, 600), generator=torch.Generator().manual_seed(0))
        positions = torch.arange(600)[None]
        ours = core.model(ids, positions, core._built.masks([Span(start=0, length=600)], positions))
        return sum(gaps) / len(gaps), float((ours - theirs(ids).logits).abs().max())


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
