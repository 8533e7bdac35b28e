"""Environments whose seats call tools: the environment runs the calls and shows the results to the same seat.

In: a game written for `TurnEnv`, and the tools of each seat. Out: a PettingZoo environment in which a text with tool
calls is a decision whose answer is the next observation. Waits for the tools.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from forge_agents.envs.env import Observation, Outcome, TurnEnv, writable
from forge_agents.envs.reasoning import split_reasoning
from forge_agents.errors import did_you_mean
from forge_agents.tools import (
    FORMATS,
    Tool,
    ToolFormat,
    ToolResult,
    describe_tools,
    parse_tool_calls,
    render_results,
    run_tool,
)

_LAST = "\n(No calls are left: answer now.)"


class ToolEnv(TurnEnv):
    """A `TurnEnv` with tools: write a game as ever, say in `tools` who may call what, put `tool_help` in instructions.

    A text with at least one call, in any format that `parse_tool_calls` reads, does not reach `act`: the calls run in
    order, and the next to decide is the same seat, which then observes their results. Text beside the calls is its
    thinking and is dropped. A call that cannot be read, fails, or asks for a tool that the seat has no right to, has
    an error text as its result. Once a seat has used up its calls, a text is taken as it is, calls and all.

    Calls count as decisions (`max_turns`). After each decision with calls ``infos[agent]["tool_calls"]`` and
    ``["tool_errors"]`` hold the seat's numbers of calls and failed calls so far; both are absent before the first.

    Forks: tools that are methods of the game come along in a ``copy.deepcopy``. What a tool reaches outside (a server,
    a sandbox's files) is shared between the copies.

    Example:
        >>> class Doubling(ToolEnv):
        ...     possible_agents = ["player"]
        ...     def setup(self, rng):
        ...         self.number = int(rng.integers(100))
        ...     @tool
        ...     def secret(self) -> int:
        ...         "Tell the secret number."
        ...         return self.number
        ...     def tools(self, agent):
        ...         return [self.secret]
        ...     def instructions(self, agent):
        ...         return "Find the secret number. " + self.tool_help(agent)
        ...     def observe_text(self, agent):
        ...         return "What is twice the secret number?"
        ...     def act(self, agent, action):
        ...         return Outcome(rewards={agent: float(action == str(2 * self.number))}, done=True)

    Args:
        tool_format: How the instructions show calls, and results come back; `parse_tool_calls` reads every format.
        max_calls: Calls of a seat between two of its other texts.
        max_calls_per_episode: Calls of a seat in an episode; None sets no limit.
        max_turns: As for `TurnEnv`.
    """

    def __init__(
        self,
        *,
        tool_format: ToolFormat = "hermes",
        max_calls: int = 4,
        max_calls_per_episode: int | None = None,
        max_turns: int | None = None,
    ) -> None:
        super().__init__(max_turns=max_turns)
        if tool_format not in FORMATS:
            near = did_you_mean(str(tool_format), FORMATS)
            raise ValueError(f"tool_format={tool_format!r}; known are {', '.join(FORMATS)}.{near}")
        if max_calls < 0 or (max_calls_per_episode is not None and max_calls_per_episode < 0):
            raise ValueError(
                f"max_calls={max_calls} and max_calls_per_episode={max_calls_per_episode} must be at least 0"
            )
        self.tool_format, self.max_calls, self.max_calls_per_episode = tool_format, max_calls, max_calls_per_episode

    # ---- what a game writes

    def tools(self, agent: str) -> Sequence[Tool]:
        """What a seat may call, the same all episode long: its rights. Other seats' tools do not exist for it."""
        raise NotImplementedError(f"{type(self).__name__} must define tools(self, agent)")

    def after_calls(self, agent: str, results: Sequence[ToolResult]) -> Outcome:
        """What calls led to beside their results: rewards, or the end of the game. The same seat stays next."""
        return Outcome()

    def tool_schemas(self, agent: str) -> list[dict[str, Any]]:
        """The schemas of `tools`, for whoever sits in the seat: its model's own grammar of calls is read by them."""
        return [offered.schema for offered in self.tools(agent)]

    # ---- what a game uses

    def tool_help(self, agent: str) -> str:
        """How `agent` calls its tools, in `tool_format`, for its instructions; empty if it has none."""
        return describe_tools(self.tools(agent), self.tool_format)

    def calls_left(self, agent: str) -> int:
        """Calls that `agent` may still make before its next other text."""
        left = self.max_calls - self._calls_in_a_row[agent]
        if self.max_calls_per_episode is not None:
            left = min(left, self.max_calls_per_episode - self._calls[agent])
        return left

    # ---- TurnEnv

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Start an episode, as `TurnEnv.reset` does."""
        self._calls: Counter[str] = Counter()
        self._calls_in_a_row: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._shown: dict[str, str] = {}
        super().reset(seed=seed, options=options)

    def observe(self, agent: str) -> Observation:
        """The results of the calls that `agent` has just made; else what the game shows."""
        shown = self._shown.get(agent)
        return super().observe(agent) if shown is None else Observation(shown)

    def _play(self, agent: str, action: str) -> Outcome:
        left = self.calls_left(agent)
        offered = list(self.tools(agent)) if left > 0 else []
        said = split_reasoning(action)[1]  # a game that hears thoughts runs none of what is weighed in them
        calls = parse_tool_calls(said, tools=offered)[:left] if offered else []
        self._shown.pop(agent, None)
        if not calls:
            self._calls_in_a_row[agent] = 0
            return self.act(agent, action)
        results = [run_tool(offered, call) for call in calls]
        self._calls[agent] += len(calls)
        self._calls_in_a_row[agent] += len(calls)
        self._failed[agent] += sum(not result.ok for result in results)
        note = "" if self.calls_left(agent) > 0 else _LAST
        text = writable(render_results(results, self.tool_format))
        self._shown[agent] = text[: self.max_observation_chars - len(note)] + note
        outcome = self.after_calls(agent, results)
        counts = {"tool_calls": self._calls[agent], "tool_errors": self._failed[agent]}
        info = {**outcome.info, agent: {**counts, **outcome.info.get(agent, {})}}
        over = agent in {*self._ended(outcome.done, "done"), *self._ended(outcome.truncated, "truncated")}
        return replace(outcome, next=outcome.next or (None if over else agent), info=info)
