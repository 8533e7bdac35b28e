"""A minimal game to derive test environments from."""

import forge_agents as fa


def act(env, *texts):
    """Play actions in order."""
    for text in texts:
        env.step(text)


class Plain(fa.TurnEnv):
    """One agent, one question, and any answer ends the game."""

    possible_agents = ["a"]

    def setup(self, rng):
        pass

    def instructions(self, agent):
        return ""

    def observe_text(self, agent):
        return "?"

    def act(self, agent, action):
        return fa.Outcome(done=True)
