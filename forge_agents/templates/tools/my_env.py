"""One agent with a tool: how many boxes are on the shelf?"""

import re

import forge_agents as fa

SHELVES = ("A", "B", "C")


@fa.register("my/Warehouse-v0", max_turns=4, tags=("1p", "tool"), tool_format="plain")
class Warehouse(fa.ToolEnv):
    """The keeper gets 1 for answering with a number that only the tool knows."""

    possible_agents = ["keeper"]

    def setup(self, rng):
        self.boxes = {shelf: int(n) for shelf, n in zip(SHELVES, rng.integers(100, 1000, 3), strict=True)}
        self.shelf = str(rng.choice(SHELVES))

    @fa.tool
    def count(self, shelf: str) -> int:
        """Count the boxes on a shelf.

        Args:
            shelf: A, B or C.
        """
        if shelf not in self.boxes:
            raise ValueError(f"there is no shelf {shelf}, only {', '.join(SHELVES)}")
        return self.boxes[shelf]

    def tools(self, agent):
        return [self.count]

    def instructions(self, agent):
        return f"Look the number up, then write it. {self.tool_help(agent)}"

    def observe_text(self, agent):
        return f"How many boxes are on shelf {self.shelf}?"

    def act(self, agent, action):
        right = re.findall(r"\d+", action) == [str(self.boxes[self.shelf])]
        return fa.Outcome(rewards={agent: float(right)}, done=True)
