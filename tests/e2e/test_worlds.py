"""What the README claims of new worlds: a two-seat game in 30 lines, and an array game in two functions, both train."""

import pytest

import forge_agents as fa
from forge_agents.envs import registry

pytest.importorskip("pygame")  # PettingZoo's board games import it

HINT = '''
from difflib import SequenceMatcher

import forge_agents as fa

WORDS = ("apple", "river", "candle", "tiger", "piano", "window")


@fa.register("my/Hint-v0", tags=("2p", "cooperative"))
class Hint(fa.TurnEnv):
    """One seat knows a word and hints at it; the other guesses. Both get the likeness of guess and word."""

    possible_agents = ["giver", "guesser"]

    def setup(self, rng):
        self.word, self.hint = str(rng.choice(WORDS)), ""

    def instructions(self, agent):
        return "Describe the word without saying it." if agent == "giver" else "Guess the word. Answer with one word."

    def observe_text(self, agent):
        return f"Word: {self.word}" if agent == "giver" else f"Hint: {self.hint}"

    def secrets(self, agent):
        return [self.word] if agent == "guesser" else []

    def act(self, agent, action):
        if agent == "giver":
            self.hint = action[:200]
            return fa.Outcome()
        likeness = SequenceMatcher(None, action.strip().lower()[:50], self.word).ratio()
        reward = 0.0 if self.word in self.hint.lower() else likeness
        return fa.Outcome(rewards={"giver": reward, "guesser": reward}, done=True)
'''

BOARD = '''
from pettingzoo.classic import tictactoe_v3

import forge_agents as fa


def see(seen, agent):
    own, other = seen["observation"].reshape(9, 2).T
    return " ".join("X" if own[i] else "O" if other[i] else str(i) for i in range(9))


def move(text, agent, action_space):
    return int([sign for sign in text if sign in "012345678"][-1])  # an exception is an illegal move


@fa.register("my/TicTacToe-v0", max_turns=9)
def tic_tac_toe():
    rules = "Tic-tac-toe. You are X. Answer with the number of a free square."
    return fa.wrap(tictactoe_v3.raw_env(), obs_to_text=see, text_to_action=move, instructions=rules)
'''


def lines(code):
    return len([line for line in code.splitlines() if line.strip()])


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_game_in_30_lines_and_an_array_game_in_two_functions_keep_the_contract_and_train(
    tiny_llama, tmp_path, monkeypatch
):
    fa.list_envs()
    monkeypatch.setattr(registry, "_specs", dict(registry._specs))
    assert lines(HINT) <= 30 and lines(BOARD) <= 15
    for code in (HINT, BOARD):
        exec(compile(code, "snippet", "exec"), {"__name__": "snippet"})
    assert fa.check_env("my/Hint-v0", episodes=2).ok
    assert fa.check_env("my/TicTacToe-v0", episodes=2).ok

    team = fa.Policy(str(tiny_llama), name="team", sampling=fa.Sampling(max_tokens=12))
    config = fa.GRPOConfig(
        group_size=4,
        groups_per_step=3,
        seed=1,
        learner=fa.LearnerConfig(threads=1, compute_dtype="float32"),
        engine=fa.EngineConfig(enforce_eager=True, kv_cache_gb=0.1, max_model_len=512, threads=1),
    )
    with fa.GRPOTrainer(team, config=config, out_dir=tmp_path) as trainer:  # one engine and one learner for both
        hinted = trainer.fit("my/Hint-v0", steps=1).metrics[-1]
        placed = trainer.fit("my/TicTacToe-v0", steps=2).metrics[-1]
    for version, row in enumerate((hinted, placed), 1):
        assert row["groups/used"] > 0 and row["groups/failed"] == 0 and row["learner/version"] == version
        assert row["learner/logprob_gap_mean"] < 1e-3
