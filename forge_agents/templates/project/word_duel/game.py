"""WordDuel: one agent knows a word and gives a hint, the other guesses."""

from difflib import SequenceMatcher

import forge_agents as fa

WORDS = ("apple", "river", "candle", "tiger", "piano", "window")


class WordDuel(fa.TurnEnv):
    """Both agents get the similarity of guess and word in [0, 1], or 0 if the hint contains the word."""

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
        similarity = SequenceMatcher(None, action.strip().lower()[:50], self.word).ratio()
        reward = 0.0 if self.word in self.hint.lower() else similarity
        return fa.Outcome(rewards={"giver": reward, "guesser": reward}, done=True)
