"""A zero-sum game: each agent has a number. Raising doubles the stake, showing ends the game."""

import forge_agents as fa


@fa.register("my/Duel-v0", max_turns=6, tags=("2p", "zero-sum", "hidden-information"))
class Duel(fa.TurnEnv):
    """The higher number wins the stake, at most 4. Any other word than raise or show loses it."""

    possible_agents = ["player_0", "player_1"]

    def setup(self, rng):
        self.number = {agent: int(n) for agent, n in zip(self.agents, rng.permutation(9)[:2] + 1, strict=True)}
        self.stake, self.moved = 1, "nothing"

    def instructions(self, agent):
        return "The higher number wins the stake. Answer 'raise' or 'show'."

    def observe_text(self, agent):
        return f"Your number: {self.number[agent]}. Stake: {self.stake}. Last move: {self.moved}."

    def legal_actions(self, agent):
        return ["raise", "show"]

    def secrets(self, agent):
        return [f"number: {n}" for name, n in self.number.items() if name != agent]

    def act(self, agent, action):
        other = next(name for name in self.agents if name != agent)
        move = action.strip().strip(".'\"").lower()
        if move not in ("raise", "show"):
            return fa.Outcome(rewards={agent: -self.stake, other: self.stake}, done=True)
        self.moved = move
        if move == "raise":
            self.stake = min(2 * self.stake, 4)
            return fa.Outcome()
        winner, loser = (agent, other) if self.number[agent] > self.number[other] else (other, agent)
        return fa.Outcome(rewards={winner: self.stake, loser: -self.stake}, done=True)
