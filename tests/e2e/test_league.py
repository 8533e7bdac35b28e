"""A league on the whole stack: snapshots of a tiny model in the opponents' engine."""

import json

import pytest
from local_processes import take_over, use_local_learners

import forge_agents as fa

pytestmark = pytest.mark.timeout(300)


class Duel(fa.TurnEnv):
    """More lowercase letters win."""

    possible_agents = ["left", "right"]

    def setup(self, rng):
        self.start = "".join(map(chr, rng.integers(97, 123, 3)))
        self.said = []

    def instructions(self, agent):
        return "abc"

    def observe_text(self, agent):
        return self.start

    def act(self, agent, action):
        self.said.append(sum("a" <= c <= "z" for c in action) / max(len(action), 1))
        if len(self.said) < 2:
            return fa.Outcome()
        lead = self.said[0] - self.said[1]
        return fa.Outcome(rewards={"left": lead, "right": -lead}, done=True)


def logprobs_of(folder, turn):
    """Log-probabilities of a turn's response under a Hugging Face model."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[*turn["prompt_ids"], *turn["response_ids"]]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(turn["prompt_ids"]) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, ids[0, -len(logits) :, None])[:, 0].tolist()


def trainer_of(policy, folder):
    config = fa.GRPOConfig(
        group_size=4,
        groups_per_step=2,
        max_resamples=0,
        checkpoint_every=2,
        keep_episodes=8,
        seed=1,
        learner=fa.LearnerConfig(lr=1e-2, threads=1, compute_dtype="float32"),
        engine=fa.EngineConfig(enforce_eager=True, kv_cache_gb=0.1, max_model_len=256, threads=1),
    )
    league = fa.League(policy, snapshot_every=1, opponents="latest", self_play=0.0)
    return fa.GRPOTrainer(league, config=config, out_dir=folder)


def test_opponents_have_the_weights_of_their_snapshots(tiny_llama, tmp_path, monkeypatch):
    use_local_learners(monkeypatch)
    policy = fa.Policy(str(tiny_llama), name="hero", sampling=fa.Sampling(max_tokens=6))
    with trainer_of(policy, tmp_path) as first:
        first.fit(Duel, steps=2)
        first.evaluate(Duel, episodes=4)
        saved = json.loads((tmp_path / "league.json").read_text())
        again = trainer_of(policy, tmp_path)
        take_over(again, first)
        rows, held_out = again.fit(Duel, steps=4).metrics, again.evaluate(Duel, episodes=4)
    table = json.loads((tmp_path / "league.json").read_text())
    games = {row["name"]: row["games"] for row in table["opponents"]}
    assert len(rows) == 4 and saved["step"] == 2 and table["step"] == 4
    assert games["hero-000000"] == 8, "the first step's, from before the restart"
    assert set(games) == {f"hero-{version:06d}" for version in range(5)}
    assert sum(row["league/load_s"] > 0 for row in rows) == 3, "the first opponent, the start model, is there already"
    assert held_out.failed == 0
    assert {one.trajectories["left"].policy for one in held_out.episodes} == {"hero", "hero-000000"}

    last = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()][-8:]
    turns = [turn for e in last for one in e["trajectories"].values() for turn in one["turns"]]
    theirs = [turn for turn in turns if turn["policy"] == "hero-000003"]
    assert len(theirs) == 8 and {turn["policy"] for turn in turns} == {"hero", "hero-000003"}
    turn = max(theirs, key=lambda one: len(one["response_ids"]))
    assert logprobs_of(tmp_path / "league/hero-000003", turn) == pytest.approx(turn["logprobs"], abs=2e-3)
    assert logprobs_of(tiny_llama, turn) != pytest.approx(turn["logprobs"], abs=2e-2)
