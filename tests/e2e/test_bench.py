"""A benchmark of models that vLLM serves."""

import asyncio
import json

import pytest

import forge_agents as fa
from forge_agents.bench import BenchLimits
from forge_agents.serving import EngineConfig

SMALL = EngineConfig(enforce_eager=True, kv_cache_gb=0.05, threads=1, max_model_len=512, max_num_seqs=16)


@pytest.mark.timeout(900)
def test_models_play_on_one_engine_and_what_was_played_is_not_repeated(tiny_llama, tmp_path):
    players = {
        "plain": fa.Policy(str(tiny_llama), sampling=fa.Sampling(max_tokens=4)),
        "legal": fa.Policy(str(tiny_llama), sampling=fa.Sampling(max_tokens=8), constrain_actions=True),
    }

    def measure(folder="first", live=64):
        return fa.benchmark(
            players,
            {"forge/KuhnPoker-v0": {}, "forge/Kitchen-v0": {"rounds": 2}},
            episodes=4,
            exploitability_samples=4,
            limits=BenchLimits(max_concurrent_episodes=live),
            engine=SMALL,
            out_dir=tmp_path / folder,
            progress=False,
        )

    at_once = measure()
    assert at_once.complete and at_once.planned == 32
    legal = next(cell for cell in at_once.summary.cells if cell.player == "legal")
    plain = next(cell for cell in at_once.summary.cells if cell.player == "plain")
    assert legal.invalid.value == 0 and plain.invalid.value > 0.5 and plain.tokens.value > 0
    assert len(at_once.players["plain"]["weights"]) == 64
    assert str(tmp_path.parent) not in json.dumps(at_once.as_json()), "no path of this machine"
    exploitability = at_once.exploitability["forge/KuhnPoker-v0"]
    assert 0 < exploitability["legal"] < 2 and 0 < exploitability["plain"] < 2
    together = {row.player: row for row in at_once.summary.teamwork}
    assert set(together) == {"plain", "legal"} and {row.env for row in together.values()} == {"forge/Kitchen-v0"}
    assert all(row.gap.n == 4 and row.alone.value == row.crossed.value == 0 for row in together.values())
    again = measure()
    assert again.timing["played"] == 0 and again.timing["reused"] == 32, "nothing is left to start an engine for"
    assert {**again.as_json(), "timing": {}} == {**at_once.as_json(), "timing": {}}
    elsewhere = measure("second", live=3)
    assert elsewhere.timing["played"] == 32, "another folder knows nothing"
    assert {**elsewhere.as_json(), "timing": {}} == {**at_once.as_json(), "timing": {}}, "the same seed"


@pytest.mark.timeout(900)
def test_engines_play_game_after_game_under_a_running_loop(tiny_llama):
    """As in a notebook."""
    talker = fa.Policy(str(tiny_llama), name="talker", sampling=fa.Sampling(max_tokens=4))
    bound = fa.Policy(str(tiny_llama), name="bound", constrain_actions=True)

    async def notebook():
        seats = {"player_0": bound, "player_1": talker}
        with fa.Engines(talker, config=SMALL) as engines:
            return [fa.play("forge/KuhnPoker-v0", seats, seed=seed, engines=engines) for seed in (1, 1, 2)]

    one, same, other = asyncio.run(notebook())
    assert one.error is None and one.turns[0].policy == "bound" and one.turns[0].action in ("check", "bet")
    assert {turn.policy for episode in (one, other) for turn in episode.turns} == {"bound", "talker"}
    sampled = [[turn.response_ids for turn in episode.turns] for episode in (one, same, other)]
    assert sampled[0] == sampled[1] != sampled[2]
