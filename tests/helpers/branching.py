"""Runs a function with every outcome of its random choices."""

import math


class Branches:
    """Random choices that take every outcome once, as `every_outcome` calls a function again and again."""

    def __init__(self):
        self._path, self._at = [], 0

    def choose(self, probabilities):
        """Return an index. Over all calls of the function each has its probability."""
        if self._at == len(self._path):
            self._path.append((0, probabilities))
        index, _ = self._path[self._at]
        self._at += 1
        return index

    def rewind(self):
        """Return the probability of the choices so far, and go to the next outcome. False at the end."""
        probability = math.prod(probabilities[index] for index, probabilities in self._path)
        while self._path and self._path[-1][0] == len(self._path[-1][1]) - 1:
            self._path.pop()
        if self._path:
            index, probabilities = self._path.pop()
            self._path.append((index + 1, probabilities))
        self._at = 0
        return probability, bool(self._path)


def every_outcome(run):
    """Yield probability and result of ``run(choose)`` for all outcomes of ``choose(probabilities)``."""
    branches, more = Branches(), True
    while more:
        result = run(branches.choose)
        probability, more = branches.rewind()
        yield probability, result
