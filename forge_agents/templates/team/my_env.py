"""A game for two: one agent sees a digit and describes it, the other guesses."""

import forge_agents as fa


@fa.register("my/Guess-v0", max_turns=2, tags=("2p", "cooperative"))
class Guess(fa.TurnEnv):
    """Both agents get 1 for a right guess. Digits in the description are removed."""

    possible_agents = ["hinter", "guesser"]

    def setup(self, rng):
        self.digit, self.hint = int(rng.integers(1, 10)), ""

    def instructions(self, agent):
        return "Describe the number without digits." if agent == "hinter" else "Reply with one digit."

    def observe_text(self, agent):
        return f"The number is {self.digit}." if agent == "hinter" else f"Hint: {self.hint}\nWhich digit?"

    def act(self, agent, action):
        if agent == "hinter":
            self.hint = "".join(c for c in action if not c.isdigit())[:100]
            return fa.Outcome()
        reward = float([c for c in action if c.isdigit()] == [str(self.digit)])
        return fa.Outcome(rewards={"hinter": reward, "guesser": reward}, done=True)
