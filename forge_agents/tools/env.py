"""Environments with tools: the environment runs an agent's calls, and the agent observes the results next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from forge_agents.envs.env import Observation, Outcome, TurnEnv, writable
from forge_agents.envs.reasoning import split_reasoning
from forge_agents.errors import did_you_mean
from forge_agents.runtime.threads import in_thread
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
from forge_agents.tools.definition import repeated_name
from forge_agents.tools.formats import without_results

T = TypeVar("T")

_LAST = "\n(No calls are left: answer now.)"


class ToolEnv(TurnEnv):
    """A `TurnEnv` with tools: return each agent's tools from `tools`, and include `tool_help` in its instructions.

    An answer with at least one call, in any format that `parse_tool_calls` supports, does not reach `act`. The calls
    run in order, and the same agent acts next and observes their results. Other text of the answer is dropped. A call
    that is malformed, fails, or names a tool that the agent does not have, has an error text as its result. Once an
    agent has used up its calls, its answers reach `act` unchanged.

    Calls count as decisions (`max_turns`). After each decision with calls ``infos[agent]["tool_calls"]`` and
    ``["tool_errors"]`` are the agent's numbers of calls and failed calls so far. Before the first such decision the
    keys are absent.

    A ``copy.deepcopy`` contains tools that are methods of the game. External state of a tool (a server, a sandbox's
    files) is shared between copies.

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
        tool_format: Format of calls and results in instructions and observations. Calls in other formats run as well.
        max_calls: Maximum number of an agent's calls between two answers without calls.
        max_calls_per_episode: Maximum number of an agent's calls in an episode. None: no limit.
        max_turns: As for `TurnEnv`.
    """

    judges_silence = True
    _results: dict[str, str] = {}  # before the first reset

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
            raise ValueError(f"tool_format={tool_format!r} is unknown; choose from {', '.join(FORMATS)}.{near}")
        if max_calls < 0 or (max_calls_per_episode is not None and max_calls_per_episode < 0):
            raise ValueError(
                f"max_calls={max_calls} and max_calls_per_episode={max_calls_per_episode} must be at least 0"
            )
        self.tool_format, self.max_calls, self.max_calls_per_episode = tool_format, max_calls, max_calls_per_episode

    # ---- methods that a game defines

    def tools(self, agent: str) -> Sequence[Tool]:
        """Return the tools of an agent. In an episode the tools must stay the same."""
        raise NotImplementedError(f"{type(self).__name__} must define tools(self, agent)")

    def after_calls(self, agent: str, results: Sequence[ToolResult]) -> Outcome:
        """Return the outcome of calls in addition to their results: rewards, or the end of the game."""
        return Outcome()

    def tool_schemas(self, agent: str) -> list[dict[str, Any]]:
        """Return the schemas of `tools`, with which calls in the grammar of a model family are parsed."""
        return [tool.schema for tool in self._named_tools(agent)]

    # ---- methods that a game calls

    def tool_help(self, agent: str) -> str:
        """Return the description of an agent's tools for its instructions. Empty if it has none."""
        return describe_tools(self._named_tools(agent), self.tool_format)

    def calls_left(self, agent: str) -> int:
        """Return how many calls `agent` may make before its next answer without calls."""
        remaining = self.max_calls - self._consecutive_calls[agent]
        if self.max_calls_per_episode is not None:
            remaining = min(remaining, self.max_calls_per_episode - self._calls[agent])
        return remaining

    def _named_tools(self, agent: str) -> list[Tool]:
        """Return the tools of an agent. Raises TypeError if one is no tool, and ValueError if two have one name."""
        listed: Any = self.tools(agent)  # of user code, which may ignore the declared type
        if isinstance(listed, Tool) or not isinstance(listed, Iterable):
            raise TypeError(f"{self}: tools({agent!r}) returned {listed!r:.80}. Return a list of tools, [] for none")
        tools: list[Any] = list(listed)
        if other := [item for item in tools if not isinstance(item, Tool)]:
            raise TypeError(
                f"{self}: tools({agent!r}) returned {getattr(other[0], '__name__', repr(other[0]))}, which is no tool. "
                "Put @fa.tool above the definition of the function or method"
            )
        if name := repeated_name(tools):
            raise ValueError(
                f"{agent} has several tools that are called {name!r}, and a call names only one. Rename the others, "
                "such as by dataclasses.replace(tool, name=...)"
            )
        return tools

    # ---- TurnEnv

    async def off_loop(self, where: str, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a step in a thread if the acting agent has a tool that waits, so that other episodes go on meanwhile."""
        if where != "step" or not any(tool.waits for tool in self._named_tools(self.agent_selection)):
            return call(*args, **kwargs)
        return await in_thread(lambda: call(*args, **kwargs), name=f"environment {self}")

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Start an episode."""
        self._calls: Counter[str] = Counter()
        self._consecutive_calls: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._results = {}
        super().reset(seed=seed, options=options)

    def observe(self, agent: str) -> Observation:
        """Return the results of the calls that `agent` has just made, otherwise the game's observation.

        Tags of results in the game's observation are broken up, because another agent may have written them.
        """
        results_text = self._results.get(agent)
        if results_text is not None:
            return Observation(results_text)
        return Observation(without_results(super().observe(agent)))

    def _play(self, agent: str, action: str) -> Outcome:
        remaining = self.calls_left(agent)
        tools = self._named_tools(agent) if remaining > 0 else []
        answer = split_reasoning(action)[1]  # calls within reasoning do not run
        calls = parse_tool_calls(answer, tools=tools)[:remaining] if tools else []
        self._results.pop(agent, None)
        if not calls:
            self._consecutive_calls[agent] = 0
            return self.act(agent, action)
        results = [run_tool(tools, call) for call in calls]
        self._calls[agent] += len(calls)
        self._consecutive_calls[agent] += len(calls)
        self._errors[agent] += sum(not result.ok for result in results)
        note = "" if self.calls_left(agent) > 0 else _LAST
        text = writable(render_results(results, self.tool_format))
        self._results[agent] = text[: self.max_observation_chars - len(note)] + note
        outcome: Any = self.after_calls(agent, results)
        if not isinstance(outcome, Outcome):
            raise TypeError(f"{self}: after_calls returned {type(outcome).__name__}. Return an Outcome")
        counts = {"tool_calls": self._calls[agent], "tool_errors": self._errors[agent]}
        info = {**outcome.info, agent: {**counts, **outcome.info.get(agent, {})}}
        over = agent in {*self._ended(outcome.done, "done"), *self._ended(outcome.truncated, "truncated")}
        return replace(outcome, next=outcome.next or (None if over else agent), info=info)
