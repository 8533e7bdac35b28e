"""`Program`: an environment in which an episode is a run of a program and a turn is a call of a model."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Self, TypeVar

import numpy as np

from forge_agents.envs.env import CONVERSATION, Outcome, TurnEnv, as_json
from forge_agents.errors import ForgeError
from forge_agents.programs.containers import Container, Image
from forge_agents.programs.gateway import CallKey, ModelCall, Session, gateway
from forge_agents.programs.http import MAX_BODY_BYTES
from forge_agents.programs.running import (
    AnyProgram,
    Ended,
    Finished,
    Running,
    as_number,
    check_program,
    describe_error,
    relative_path_hint,
    result_as_json,
    reward_of,
    start_program,
)
from forge_agents.programs.tasks import AnyTasks, Tasks
from forge_agents.runtime.threads import call_from_destructor, in_thread, start_destructor_thread
from forge_agents.sandbox.sandbox import Sandbox, validate_path
from forge_agents.settings import check_call

T = TypeVar("T")
_log = logging.getLogger(__name__)
_warned: set[str] = set()
"""Environments of this process whose `error_reward` was warned about."""
MAX_CALLS = 64
"""Default maximum number of calls of an episode."""
_RESERVED_INFOS = (
    "success", "outcome", "error", "program_error", "cut", "tool_calls", "tool_errors", "forfeits", "illegal",
    "legal_actions", "result", CONVERSATION,
)  # fmt: skip
"""Names of infos with a fixed meaning. Entries of a task with such a name appear only in ``"task"``."""
_ERRORS_OF_RESULTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors that a model's answer, as the result of a program, may cause where the reward is computed."""


class Program(TurnEnv):
    """A program that calls models through an API client, as an environment: each call is a turn of an agent.

    The program gets a task and a client of OpenAI's API, whose server is the `Gateway` of this process. The ``model``
    of a call names the agent. The observation contains the messages that are new to the agent, and the action is the
    answer. Calls that continue an earlier answer continue its tokens. Other calls start a branch (`Turn.branch`).
    Answers are sampled with the settings of the agent's policy, whatever temperature the program asks for.

    When the program ends, the reward is paid to all agents, or to those that it names. After the last turn
    ``infos[agent]`` contains ``"task"``, ``"result"``, ``"calls"``, and if the task is a mapping its entries as well
    (except reserved names such as ``"success"``). If the program failed there is ``"error"``, and if it failed or
    exited with a status other than 0 ``"program_error"``. The program gets a copy of its task, `reward` the task
    itself.

    A program that raises, exceeds its time limit between two calls, returns a result that `reward` fails on, or names
    other sessions than its reward, ends its episode with `error_reward`: the reason may be what a model wrote. A reward
    that raises another error than ArithmeticError, AttributeError, LookupError, TypeError or ValueError is an error of
    the environment. A program's failure is an error of the environment only
    if no model has answered before.

    Calls of one episode are answered one after the other, even if a program sends several at once. A fork of the
    environment runs the program again with the same answers.

    Example:
        >>> async def double(task, client):
        ...     messages = [{"role": "user", "content": f"What is twice {task}?"}]
        ...     answer = await client.chat.completions.create(model="agent", messages=messages)
        ...     return answer.choices[0].message.content
        >>> fa.register(
        ...     "my/Double-v0",
        ...     entry_point=fa.Program,
        ...     program=double,
        ...     tasks=range(100),
        ...     reward=lambda task, result: float(result == str(2 * task)),
        ... )

    Args:
        program: A function ``(task, client)``: async with an `openai.AsyncOpenAI`, otherwise with an `openai.OpenAI` in
            its own thread. Or a command line. The command gets the task on standard input (a text as it is, other
            values as JSON), ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` in its environment (and ``ANTHROPIC_...``), and
            a working folder that contains only `files`. With `image` a command line in the image. Empty: the image's
            own.
        agents: The agents, in their order.
        models: Agents by the model names that the program uses, if these differ from the agents' names.
        tasks: Tasks of episodes: a list, a file (JSON, JSONL, CSV, Parquet), a Hugging Face data set, or a function
            ``rng -> task``. The episode's seed selects one. A fifth of a list of 10 or more is held out for evaluations
            and benchmarks, and training plays the others.
        eval_tasks: Tasks of evaluations and benchmarks, in the same forms. Training then plays all of `tasks`. None:
            the part of `tasks` that is held out.
        reward: ``(task, result) -> number``, or numbers by agent. An agent may have a mapping of numbers by session,
            the text of the header ``X-Session-ID`` of its calls. The result is the function's return value, or the
            `Finished` of a command line. None: the result itself if it is a number, a truth value or numbers by agent.
            For a command line, 1 if it exits with 0. Otherwise 0, for verifiers to score. A reward function that raises
            or returns something else is an error of the environment.
        timeout_s: Time limit in seconds between an answer and the program's next call or end.
        error_reward: Reward of all agents if the program fails or is cut off.
        max_sampled_tokens: Number of tokens sampled in an episode at which it is cut off. None: no limit.
        max_turns: Maximum number of calls of an episode. None: the registered limit, otherwise 64.
        sandbox: Isolation of a command line: no network but the models, no files but the system's programs, our
            interpreter's packages, `Sandbox.import_paths` and its folder, and all limits except
            `SandboxLimits.wall_s`. None: the command has all rights of this process, and ends with it.
        files: ``task -> {relative path: bytes}``, files in the working folder of a command line. None: no files.
        image: Name of a container image in which the command line runs, each episode in a new container, with the same
            input and variables. Its working folder is ``/work``.
        container: Engine, limits, network and arguments of the container. None: the defaults.

    Raises:
        TypeError, ValueError: Invalid arguments.
        NotReadyError: No container engine has the image.
    """

    max_observation_chars = MAX_BODY_BYTES
    judges_silence = True

    def __init__(
        self,
        program: AnyProgram = (),
        *,
        agents: Sequence[str] = ("agent",),
        models: Mapping[str, str] | None = None,
        tasks: AnyTasks = (None,),
        eval_tasks: AnyTasks | None = None,
        reward: Callable[[Any, Any], float | Mapping[str, float | Mapping[str, float]]] | None = None,
        timeout_s: float = 60.0,
        error_reward: float = 0.0,
        max_sampled_tokens: int | None = None,
        max_turns: int | None = None,
        sandbox: Sandbox | None = None,
        files: Callable[[Any], Mapping[str, bytes]] | None = None,
        image: str | None = None,
        container: Container | None = None,
    ) -> None:
        super().__init__(max_turns=max_turns)
        if container is not None and image is None:
            raise TypeError("container= says how an image is run. Name it, image=...")
        self._image = None if image is None else Image(name=image, container=container or Container())
        check_program(program, sandbox, self._image)
        if files is not None and callable(program):
            raise TypeError("files= are for the folder of a command line. A function has no folder")
        if isinstance(agents, str) or not agents:
            raise ValueError(f"agents={agents!r}. Name one or more, as in agents=('planner', 'coder')")
        if models is not None and not isinstance(models, Mapping):
            raise TypeError(
                f"models={models!r:.200}. Give agents by model name, as in {{'gpt-4o': {next(iter(agents))!r}}}"
            )
        self.possible_agents = list(agents)
        self.models = {agent: agent for agent in agents} | dict(models or {})
        """Agents by the model names that the program uses."""
        self._check_agents(self.models.values(), "models names")
        _check_reward(reward)
        _check_limits(timeout_s, error_reward, max_sampled_tokens)
        self._program, self._tasks, self._reward = program, Tasks(tasks, eval_tasks), reward
        self._timeout_s, self._error_reward = timeout_s, error_reward
        self._max_sampled_tokens, self._sandbox, self._files = max_sampled_tokens, sandbox, files
        self._task_files: Mapping[str, bytes] = {}
        self._session: Session | None = None
        self._running: Running | None = None
        self._call: ModelCall | None = None
        if self._image is not None:
            self._image.host_address()  # finds the engine, too

    @property
    def num_training_tasks(self) -> int | None:
        """Number of training tasks. A trainer plays all of them before it repeats any. None for a function."""
        return self._tasks.num_training

    def setup(self, rng: np.random.Generator) -> str:
        """Start the program on a task and wait for its first call."""
        self.close()
        if self._limit is None:
            self._limit = MAX_CALLS
        assert self.episode_seed is not None, "set by reset"
        self._task = self._tasks.of(self.episode_seed, rng, str(self))
        self._answers: list[tuple[CallKey, str, dict[str, Any]]] = []
        self._details: dict[str, Any] = {}
        self._sampled = 0
        self._start()
        try:
            event = self._next()
        except TimeoutError as late:
            raise TimeoutError(f"{self._describe_timeout(late)}. {self._client_hint()}") from None
        if isinstance(event, Ended):
            hint = "" if callable(self._program) or self._image else relative_path_hint(self._program, self._task_files)
            reason = f"{event}{self._rejection() or f'. {self._client_hint()}'}{hint}"
            self.close()
            raise ForgeError(f"the program of {self} ended before it asked any model: {reason}")
        self._call = event
        return self._publish(event)

    def instructions(self, agent: str) -> str:
        """Return no instructions: the program's own system prompts are part of its messages."""
        return ""

    def observe_text(self, agent: str) -> str:
        """Return the new messages for the agent that is called, and nothing for the others."""
        return self._call.text() if self._call is not None and agent == self._call.agent else ""

    def about_answer(self, agent: str, about: Mapping[str, Any]) -> None:
        """Receive facts about the answer that `agent` gives next, see `Decision.about`."""
        self._details = dict(about)

    def act(self, agent: str, action: str) -> Outcome:
        """Answer the program's call and wait for the next call or the end."""
        assert self._session is not None
        details, self._details = self._details, {}
        self._session.errors.clear()  # the program continued after them
        assert self._call is not None
        self._answers.append((self._call.key, action, details))
        if details.get("finish_reason") == "context" and not details.get("completion_tokens"):
            return self._cut(f"the context of {agent} is full")
        self._sampled += (details.get("completion_tokens") or 0) + (details.get("notes_tokens") or 0)
        if num_calls := len(self._session.answer(action, details).calls):
            info = self.infos[agent]
            self.infos[agent] = {**info, "tool_calls": info.get("tool_calls", 0) + num_calls}
        try:
            event = self._next()
        except TimeoutError as late:
            return self._fail(TimeoutError(self._describe_timeout(late)))
        if isinstance(event, Ended):
            return self._finish(event)
        if self._max_sampled_tokens is not None and self._sampled >= self._max_sampled_tokens:
            return self._cut(f"{self._sampled} tokens were sampled")
        if self.num_turns + 1 >= (self._limit or math.inf):
            return self._cut(f"it made more than {self._limit} calls")
        self._call = event
        return Outcome(next=self._publish(event), info={event.agent: {CONVERSATION: event.conversation()}})

    def close(self) -> None:
        """Stop the program and reject its unanswered calls."""
        running, session = self._running, self._session
        self._running = self._session = None
        self._call = None
        if session is not None:
            session.close()
        if running is not None:
            running.stop()

    async def off_loop(self, where: str, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `call` in a thread if it may wait for the program. The call uses this environment."""
        if where in ("observe", "reward") or (where != "reset" and self._running is None):
            return call(*args, **kwargs)
        return await in_thread(lambda: call(*args, **kwargs), name=f"environment {self}")

    def snapshot(self) -> Mapping[str, Any]:
        """Return the whole state for `restore`."""
        return {"copy": copy.deepcopy(self)}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Return to the state of a `snapshot`."""
        self.close()
        twin = copy.deepcopy(snapshot["copy"])
        self.__dict__ = dict(vars(twin))
        twin._session = None  # it is ours now, and must not end with the twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        shared = ("_program", "_tasks", "_task", "_reward", "_files", "_task_files", "_call", "spec")
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin._session = twin._running = None  # an unfinished copy that is dropped stops only its own program
        for name, value in vars(self).items():
            if name not in ("_session", "_running"):
                twin.__dict__[name] = value if name in shared else copy.deepcopy(value, memo)
        if self._running is not None and self._call is not None:
            twin._start()
            twin._call = twin._replay(self._answers, self._call.key)
        return twin

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # at the end modules are gone
        if not finalizing() and self.__dict__.get("_session") is not None:
            call_from_destructor(self.close)

    # ---- the program

    def _client_hint(self) -> str:
        how = "through the client that it is given, or through a client that it makes itself without base_url"
        if not callable(self._program):
            how = "at OPENAI_BASE_URL or ANTHROPIC_BASE_URL, with the key OPENAI_API_KEY or ANTHROPIC_API_KEY"
        return f"No call came through the gateway: the program must ask models {how}"

    def _start(self) -> None:
        files: Any = {} if self._files is None else self._files(self._task)
        if not isinstance(files, Mapping) or not all(isinstance(data, bytes) for data in files.values()):
            raise ForgeError(f"files= of {self} returned {files!r:.200}. Return bytes by relative path")
        self._task_files = files = {validate_path(name): data for name, data in files.items()}
        start_destructor_thread(os.getpid())
        self._session = gateway().open(self.models)
        task = copy.deepcopy(self._task)
        self._running = start_program(self._program, task, self._session, self._image or self._sandbox, files)

    def _next(self) -> ModelCall | Ended:
        assert self._session is not None
        event: ModelCall | Ended = self._session.next(f"the program of {self}", self._timeout_s)
        return event

    def _describe_timeout(self, late: TimeoutError) -> str:
        place = self._running.where() if self._running is not None else ""
        return f"{late}. It stands at {place}" if place else str(late)

    def _replay(self, answers: Sequence[tuple[CallKey, str, dict[str, Any]]], last: CallKey) -> ModelCall:
        """Give the program the answers again, and return its call with the key `last`, which follows them.

        Raises:
            ForgeError: The program sends other calls, so the answers are not to its questions.
        """
        assert self._session is not None
        for key, action, details in answers:
            self._next_again(key)
            self._session.answer(action, details)
        return self._next_again(last)

    def _next_again(self, key: CallKey) -> ModelCall:
        """Return the next call of a program that runs again. Raises ForgeError if it is another than the first time."""
        call, agent = self._next(), key[0]
        if isinstance(call, Ended):
            raise ForgeError(f"the program of {self} ended earlier when it ran again with the same answers")
        if call.key != key:
            change = f"sent {agent} other messages"
            if call.agent != agent:
                change = f"asked {call.agent} where it had asked {agent}"
            raise ForgeError(
                f"the program of {self} ran again and {change}. Calls that it sends at once arrive in any order, "
                "and messages may depend on chance or the time. Such a program cannot be forked"
            )
        return call

    def _publish(self, call: ModelCall) -> str:
        self.infos[call.agent] = {**self.infos[call.agent], CONVERSATION: call.conversation()}
        return call.agent

    # ---- the end

    def _finish(self, end: Ended) -> Outcome:
        if end.error is not None:
            return self._fail(end.error)
        facts: dict[str, Any] = {}
        if isinstance(end.value, Finished) and end.value.exit_status:
            facts["program_error"] = f"{end}{self._rejection()}"
        try:
            compute = self._result_reward if self._reward is None else self._compute_reward
            reward = compute(end.value)
        except _ERRORS_OF_RESULTS as error:
            return self._fail(error)
        if problem := self._compare_sessions(reward):
            return self._fail(ForgeError(problem))
        return self._end(reward, result=as_json(result_as_json(end.value)), **facts)

    def _reward_of(self, value: Any) -> float | Mapping[str, Any] | None:
        assert self._session is not None
        return reward_of(value, self.agents, self._session.sessions)

    def _result_reward(self, value: Any) -> float | Mapping[str, Any]:
        """Return the reward that a program's result is, 0 if it is none.

        Raises:
            ArithmeticError, TypeError, ValueError: The result has values that cannot be rewards.
        """
        reward = self._reward_of(value)
        self._check_reward(reward, value, "the program's result")
        return 0.0 if reward is None else reward

    def _compute_reward(self, result: Any) -> float | Mapping[str, Any]:
        assert self._reward is not None
        try:
            value = self._reward(self._task, result)
        except _ERRORS_OF_RESULTS as error:
            error.add_note("raised by reward=")
            raise
        except Exception as error:
            raise ForgeError(f"reward= of {self} failed with {describe_error(error)}") from error
        reward = self._reward_of(value)
        if reward is None and isinstance(value, Mapping):
            reward = value  # empty, or with invalid values
        if reward is None:
            raise ForgeError(f"reward= of {self} returned {value!r:.200}. Return a number, or numbers by agent")
        try:
            self._check_reward(reward, value, f"reward= of {self}")
        except (ArithmeticError, TypeError, ValueError) as error:  # not the program's fault
            raise ForgeError(str(error)) from error
        return reward

    def _check_reward(self, reward: float | Mapping[str, Any] | None, value: Any, what: str) -> None:
        """Check that a reward is finite and of agents that exist. `what` returned it as `value`.

        Raises:
            ArithmeticError, TypeError, ValueError: It is not.
        """
        by_agent = reward if isinstance(reward, Mapping) else dict.fromkeys(self.agents, reward or 0.0)
        self._check_agents(by_agent, f"{what} has rewards of")
        parts = [each.values() if isinstance(each, Mapping) else [each] for each in by_agent.values()]
        numbers = [as_number(each) for part in parts for each in part]
        if not all(number is not None and math.isfinite(number) for number in numbers):
            raise ValueError(f"{what} is {value!r:.200}, which is no reward. Return finite numbers")

    def _fail(self, error: BaseException) -> Outcome:
        notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        description = f"{describe_error(error)}{notes}{self._rejection()}"
        return self._end(self._error_reward, error=description, program_error=description)

    def _cut(self, reason: str) -> Outcome:
        """Cut the program off. The reward is that of a failure: a model may use up its calls rather than answer."""
        return self._end(self._error_reward, truncated=True, cut=reason)

    def _compare_sessions(self, reward: float | Mapping[str, Any]) -> str:
        """Return a description of the first agent whose calls named other sessions than its reward, "" if none.

        A command that a model wrote can name further sessions or end the program early.
        """
        assert self._session is not None
        for agent, rewards in reward.items() if isinstance(reward, Mapping) else ():
            sessions = self._session.sessions.get(agent, {})
            if agent in self.agents and isinstance(rewards, Mapping) and set(rewards) != set(sessions):
                missing = set(sessions) - set(rewards)
                paid, called = (", ".join(map(repr, names)) or "none" for names in (rewards, sessions))
                advice = "Every call of the agent must name its session, in the header X-Session-ID"
                if "" not in missing and set(rewards) <= set(sessions):
                    advice = f"Return rewards of {', '.join(map(repr, sorted(missing))):.500} as well"
                return (
                    f"the reward of {self} names the sessions {paid:.500} of {agent!r}, but its calls named "
                    f"{called:.500}. {advice}"
                )
        return ""

    def _session_rewards(self, agent: str, rewards: Mapping[Any, Any]) -> list[float]:
        """Return the rewards of an agent's sessions in their order."""
        assert self._session is not None
        numbers = [as_number(rewards[name]) for name in self._session.sessions.get(agent, {})]
        if None in numbers:
            raise ForgeError(f"the reward of {self} for sessions of {agent!r} is {rewards!r:.200}. Return numbers")
        return [number for number in numbers if number is not None]

    def _end(self, reward: float | Mapping[str, Any], *, truncated: bool = False, **info: Any) -> Outcome:
        task = as_json(self._task)
        is_mapping = isinstance(task, dict)
        entries = {name: value for name, value in task.items() if name not in _RESERVED_INFOS} if is_mapping else {}
        facts = {**entries, "task": task, "calls": self.num_turns + 1, "result": None, **info}
        rewards = dict(reward) if isinstance(reward, Mapping) else dict.fromkeys(self.agents, reward)
        by_agent = {
            agent: each for agent, each in rewards.items() if agent in self.agents and isinstance(each, Mapping)
        }
        sessions = {agent: self._session_rewards(agent, each) for agent, each in by_agent.items()}
        self.close()
        for agent in self.agents:
            self.infos[agent] = {name: value for name, value in self.infos[agent].items() if name != CONVERSATION}
        for agent, numbers in sessions.items():
            self.infos[agent][CONVERSATION] = {"session_rewards": numbers}
            rewards[agent] = math.fsum(numbers) / max(1, len(numbers))
        self._warn_of_escape(rewards)
        return Outcome(rewards=rewards, done=not truncated, truncated=truncated, info=dict.fromkeys(self.agents, facts))

    def _warn_of_escape(self, rewards: Mapping[str, Any]) -> None:
        """Log a warning, once per environment, if an agent would have earned more by making the program fail."""
        numbers = [number for number in map(as_number, rewards.values()) if number is not None]
        if min(numbers, default=math.inf) < self._error_reward and str(self) not in _warned:
            _warned.add(str(self))
            _log.warning(
                "%s paid a reward of %g, and error_reward=%g is more. An agent avoids such a reward by an answer on "
                "which the program fails, or by too many calls. Set error_reward to the lowest possible reward or less",
                *(self, min(numbers), self._error_reward),
            )

    def _rejection(self) -> str:
        """Return the first request that was rejected since the last answer, for a message."""
        errors = self._session.errors if self._session is not None else []
        return f". The gateway had refused a request: {errors[0]}" if errors else ""


def _check_reward(reward: object) -> None:
    if reward is None:
        return
    if not callable(reward):
        raise TypeError(f"reward={reward!r:.200} is not a function (task, result). A verifier goes to the trainer")
    if inspect.iscoroutinefunction(reward):
        raise TypeError("reward= is async. Give a function that returns the number, or a judge to the trainer")
    check_call(reward, "reward", "task", "result")
    with contextlib.suppress(ValueError):  # built-ins have no signature
        names = list(inspect.signature(reward).parameters)[:2]
        if names[:1] == ["result"] or names[1:] == ["task"]:
            raise TypeError(f"reward takes ({', '.join(names)}). It is called with (task, result), in this order")


def _check_limits(timeout_s: float, error_reward: float, max_sampled_tokens: int | None) -> None:
    numbers: dict[str, object] = {"timeout_s": timeout_s, "error_reward": error_reward}
    numbers["max_sampled_tokens"] = max_sampled_tokens or 0
    for name, number in numbers.items():
        if not isinstance(number, Real):
            raise TypeError(f"{name}={number!r:.200} is not a number")
    if not 0 < timeout_s < math.inf or not math.isfinite(error_reward):
        raise ValueError(f"timeout_s={timeout_s} must be above 0 and finite, error_reward={error_reward} finite")
    if max_sampled_tokens is not None and max_sampled_tokens < 1:
        raise ValueError(f"max_sampled_tokens={max_sampled_tokens} allows no answer. Set at least 1, or None")
