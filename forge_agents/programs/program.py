"""`Program`: an environment whose episodes are runs of a program, and whose turns are its calls of a model.

In: a program, its tasks, the seats behind the models' names that it uses. Out: a PettingZoo environment. Waits for the
program between two calls, with a deadline.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Self, TypeVar

import numpy as np

from forge_agents.envs.env import CONVERSATION, Outcome, TurnEnv, as_json
from forge_agents.errors import ForgeError
from forge_agents.programs.containers import Container, Image
from forge_agents.programs.gateway import MAX_BODY_BYTES, Question, Session, gateway
from forge_agents.programs.running import (
    AnyProgram,
    Ended,
    Finished,
    Running,
    check,
    misplaced,
    result_as_json,
    reward_of,
    started,
    takes,
    told,
    with_causes,
)
from forge_agents.programs.tasks import AnyTasks, Tasks
from forge_agents.runtime.threads import in_thread
from forge_agents.sandbox.sandbox import Sandbox, validate_path

T = TypeVar("T")
MAX_CALLS = 64
"""Of an episode, where nobody says another limit."""
_MEANT = (
    "success", "outcome", "error", "program_error", "cut", "tool_calls", "tool_errors", "forfeits", "illegal",
    "legal_actions",
)
"""What infos mean to others: entries of a task that are called so stay in ``"task"``."""


class Program(TurnEnv):
    """A program that asks models through a client, as an environment: each of its calls is a turn of a seat.

    The program gets a task and a client of OpenAI's API, whose server is the `Gateway` of this process. What it asks
    for as ``model`` names the seat. An observation is what the program says that the seat has not heard yet; the action
    is the answer. Calls that go on from an earlier answer continue its tokens; others open a branch (`Turn.branch`).
    Answers are sampled as the policy in the seat says, whatever temperature the program asks for.

    When the program is through, the reward is paid to all seats, or to those that it names. After the last turn
    ``infos[agent]`` holds ``"task"``, ``"result"``, ``"calls"``, where the task is a mapping its entries too (but such
    as infos have of their own, ``"success"`` for one), and ``"error"`` where the program failed; ``"program_error"``
    there, too, and where it exited with another status than 0. The program gets a copy of its task, `reward` the task
    itself.

    A program that raises, or takes too long between two calls, ends its episode with `error_reward`: what a model wrote
    may well be why. It is an error of the environment instead where no model was asked before, or where the program had
    asked for what is not there, such as an unknown model.

    Calls of one episode take turns, also where a program sends several at once. Forks run the program anew on the same
    answers.

    Example:
        >>> async def double(task, client):
        ...     asked = [{"role": "user", "content": f"What is twice {task}?"}]
        ...     answer = await client.chat.completions.create(model="agent", messages=asked)
        ...     return answer.choices[0].message.content
        >>> fa.register(
        ...     "my/Double-v0",
        ...     entry_point=fa.Program,
        ...     program=double,
        ...     tasks=range(100),
        ...     reward=lambda task, result: float(result == str(2 * task)),
        ... )

    Args:
        program: A function ``(task, client)``, async with an `openai.AsyncOpenAI`, else with an `openai.OpenAI` in a
            thread of its own; or a command line, which finds the task on its standard input (text as it is, else JSON),
            ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` in its environment (``ANTHROPIC_...``, too), and a folder to
            work in, which holds `files` alone. With `image` a command line within it; empty: the image's own.
        seats: The agents, in their order.
        models: Seats by the names that the program asks for, where these are others than the seats' own.
        tasks: What episodes are about: a list, a file of tasks (JSON, JSONL, CSV, Parquet), a data set of Hugging Face,
            or a function ``rng -> task``. An episode's seed chooses one. A fifth of a list of 10 or more is held out:
            evaluations and benchmarks play these tasks, training plays the others.
        eval_tasks: Tasks that evaluations and benchmarks play instead, given in the same ways; training then plays all
            of `tasks`. None: the part of `tasks` that is held out.
        reward: ``(task, result) -> number``, or a number by seat. The result is what the function returned, or the
            `Finished` of a command. None: the result itself where it is a number, a truth value or numbers by seat; of
            a command, 1 where it exits with 0; else 0, for verifiers to judge. One that raises or returns something
            else is an error of the environment.
        timeout_s: Seconds that the program may take between an answer and its next call, or its end.
        error_reward: What all seats get where the program fails.
        max_sampled_tokens: Tokens that the models of an episode may write before it is cut off; None: any number.
        max_turns: Calls of an episode before it is cut off; None takes the registered limit, else 64.
        sandbox: Shuts a command line in: no network but the models, no files but the system's programs, our
            interpreter's packages, `Sandbox.import_paths` and its folder, and the limits, `SandboxLimits.wall_s` apart.
            None: it has every right of this process, and ends with it.
        files: ``task -> {relative path: bytes}``, what a command line finds in its folder; None: nothing.
        image: Name of a container image, in which the command line runs, each episode in a new container, with the same
            input and variables; its folder is ``/work`` there.
        container: How that is run: the engine, limits, the network, more arguments; None: the defaults.

    Raises:
        TypeError, ValueError: Arguments that make no sense.
        NotReadyError: No container engine has the image.
    """

    max_observation_chars = MAX_BODY_BYTES

    def __init__(
        self,
        program: AnyProgram = (),
        *,
        seats: Sequence[str] = ("agent",),
        models: Mapping[str, str] | None = None,
        tasks: AnyTasks = (None,),
        eval_tasks: AnyTasks | None = None,
        reward: Callable[[Any, Any], float | Mapping[str, float]] | None = None,
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
            raise TypeError("container= says how an image is run; name it, image=...")
        self._image = None if image is None else Image(name=image, container=container or Container())
        check(program, sandbox, self._image)
        if files is not None and callable(program):
            raise TypeError("files= are what a command line finds in its folder; a function has no folder")
        if isinstance(seats, str) or not seats:
            raise ValueError(f"seats={seats!r}; name one or more, as in seats=('planner', 'coder')")
        if models is not None and not isinstance(models, Mapping):
            raise TypeError(f"models={models!r:.200}; give seats by name, as in {{'gpt-4o': {next(iter(seats))!r}}}")
        self.possible_agents = list(seats)
        self.models = {seat: seat for seat in seats} | dict(models or {})
        """Seats by the names that the program asks for."""
        self._check_agents(self.models.values(), "models names")
        _check_reward(reward)
        _check_limits(timeout_s, error_reward, max_sampled_tokens)
        self._program, self._tasks, self._reward = program, Tasks(tasks, eval_tasks), reward
        self._timeout_s, self._error_reward = timeout_s, error_reward
        self._max_sampled_tokens, self._sandbox, self._files = max_sampled_tokens, sandbox, files
        self._given: Mapping[str, bytes] = {}
        self._session: Session | None = None
        self._running: Running | None = None
        self._question: Question | None = None
        if self._image is not None:
            self._image.host_address()  # finds the engine, too

    @property
    def num_training_tasks(self) -> int | None:
        """Number of tasks that training plays. A trainer goes through all of them before it plays any again.

        None where a function draws the tasks.
        """
        return self._tasks.num_training

    def setup(self, rng: np.random.Generator) -> str:
        """Start the program on a task, up to its first call."""
        self.close()
        if self._limit is None:
            self._limit = MAX_CALLS
        assert self.episode_seed is not None, "set by reset"
        self._task = self._tasks.of(self.episode_seed, rng, str(self))
        self._said: list[tuple[str, str, dict[str, Any]]] = []
        self._about: dict[str, Any] = {}
        self._sampled = self._forgiven = 0
        self._begin_program()
        try:
            event = self._next()
        except TimeoutError as late:
            raise TimeoutError(f"{self._late(late)}. {self._how_to_ask()}") from None
        if isinstance(event, Ended):
            why = f"{event}{self._refusals(event.error)}{self._elsewhere()}"
            self.close()
            raise ForgeError(f"the program of {self} ended before it asked any model: {why}. {self._how_to_ask()}")
        self._question = event
        return self._show(event)

    def instructions(self, agent: str) -> str:
        """Nothing: the program's own system prompts are part of what it says."""
        return ""

    def observe_text(self, agent: str) -> str:
        """What the program says to the seat that it asks; nothing to the others."""
        return self._question.text() if self._question is not None and agent == self._question.seat else ""

    def about_answer(self, agent: str, about: Mapping[str, Any]) -> None:
        """Hear what is known of the answer that `agent` gives next: its tokens, why it ended.

        Args:
            agent: Who decides.
            about: ``finish_reason``, ``stopped_by``, ``prompt_tokens``, ``completion_tokens``, ``reasoning_tokens``,
                ``notes_tokens``, ``token_ids``, ``logprobs``, ``tool_calls``.
        """
        self._about = dict(about)

    def act(self, agent: str, action: str) -> Outcome:
        """Answer the program's call, and run it on to the next or to its end."""
        assert self._session is not None
        about, self._about = self._about, {}
        self._forgiven = self._session.num_refused  # it went on after those
        self._said.append((agent, action, about))
        self._sampled += (about.get("completion_tokens") or 0) + (about.get("notes_tokens") or 0)
        if called := len(self._session.answer(action, about).calls):
            told = self.infos[agent]
            self.infos[agent] = {**told, "tool_calls": told.get("tool_calls", 0) + called}
        try:
            event = self._next()
        except TimeoutError as late:
            return self._failed(TimeoutError(self._late(late)))
        if isinstance(event, Ended):
            return self._ended(event)
        if self._max_sampled_tokens is not None and self._sampled >= self._max_sampled_tokens:
            return self._over(0.0, truncated=True, cut=f"{self._sampled} tokens were sampled")
        if self.num_turns + 1 >= (self._limit or math.inf):
            return self._over(0.0, truncated=True, cut=f"it made more than {self._limit} calls")
        self._question = event
        return Outcome(next=self._show(event), info={event.seat: {CONVERSATION: event.conversation()}})

    def close(self) -> None:
        """End the program and refuse what it still asks."""
        running, session = self._running, self._session
        self._running = self._session = None
        self._question = None
        if session is not None:
            session.close()
        if running is not None:
            running.stop()

    async def off_loop(self, where: str, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `call`, which uses this environment, beside the event loop where it may wait for the program.

        Args:
            where: "reset", "observe", "step", "reward" or "close".
            call: What is run, with all that follows.
        """
        if where in ("observe", "reward") or (where != "reset" and self._running is None):
            return call(*args, **kwargs)
        return await in_thread(lambda: call(*args, **kwargs), name=f"environment {self}")

    def fork(self) -> Self:
        """A copy in the same state, in which the program runs anew on the same answers."""
        return copy.deepcopy(self)

    def snapshot(self) -> Mapping[str, Any]:
        """The whole state, for `restore`."""
        return {"copy": copy.deepcopy(self)}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Go back to a `snapshot`."""
        self.close()
        twin = copy.deepcopy(snapshot["copy"])
        self.__dict__ = dict(vars(twin))
        twin._session = None  # it is ours now, and does not end with the twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        shared = ("_program", "_tasks", "_task", "_reward", "_files", "_given", "_question", "spec")
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin._session = twin._running = None  # a copy that is given up half-made ends its own program, if any
        for name, value in vars(self).items():
            if name not in ("_session", "_running"):
                twin.__dict__[name] = value if name in shared else copy.deepcopy(value, memo)
        if self._running is not None:
            twin._begin_program()
            twin._question = twin._again(self._said)
        return twin

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # at the end modules are gone
        if not finalizing() and self.__dict__.get("_session") is not None:
            self.close()

    # ---- the program

    def _elsewhere(self) -> str:
        """What to do about paths of a command line that lead nowhere from where it starts."""
        return "" if callable(self._program) or self._image else misplaced(self._program, self._given)

    def _how_to_ask(self) -> str:
        asks = "through the client that it is given, or through a client that it makes itself without base_url"
        if not callable(self._program):
            asks = "at OPENAI_BASE_URL or ANTHROPIC_BASE_URL, with the key OPENAI_API_KEY or ANTHROPIC_API_KEY"
        return f"No call came through the gateway: the program must ask models {asks}"

    def _begin_program(self) -> None:
        files: Any = {} if self._files is None else self._files(self._task)
        if not isinstance(files, Mapping) or not all(isinstance(data, bytes) for data in files.values()):
            raise ForgeError(f"files= of {self} returned {files!r:.200}; return bytes by relative path")
        self._given = files = {validate_path(name): data for name, data in files.items()}
        self._session = gateway().open(self.models)
        task = copy.deepcopy(self._task)
        self._running = started(self._program, task, self._session, self._image or self._sandbox, files)

    def _next(self) -> Question | Ended:
        assert self._session is not None
        event: Question | Ended = self._session.next(f"the program of {self}", self._timeout_s)
        return event

    def _late(self, late: TimeoutError) -> str:
        at = self._running.where() if self._running is not None else ""
        return f"{late}; it stands at {at}" if at else str(late)

    def _again(self, said: Sequence[tuple[str, str, dict[str, Any]]]) -> Question:
        """Give the program the same answers. Returns the call that follows them."""
        assert self._session is not None
        event = self._next()
        for seat, answer, about in said:
            if isinstance(event, Question):
                if event.seat != seat:
                    raise ForgeError(
                        f"the program of {self} ran anew and asked {event.seat} where it had asked {seat}: calls that "
                        "it sends at once come in any order, and such a program has no forks"
                    )
                self._session.answer(answer, about)
                event = self._next()
        if isinstance(event, Ended):
            raise ForgeError(f"the program of {self} ended earlier when it ran anew on the same answers")
        return event

    def _show(self, question: Question) -> str:
        self.infos[question.seat] = {**self.infos[question.seat], CONVERSATION: question.conversation()}
        return question.seat

    def _ended(self, end: Ended) -> Outcome:
        if end.error is not None:
            return self._failed(end.error)
        facts: dict[str, Any] = {}
        if isinstance(end.value, Finished) and end.value.exit_status:
            facts["program_error"] = str(end)
            printed = f"{end.value.stderr}\n{end.value.stdout}"
            if refusal := next((refusal for refusal in self._unforgiven() if refusal[:60] in printed), ""):
                raise ForgeError(f"the program of {self} failed: {end}; the gateway had refused it: {refusal}")
        reward = reward_of(end.value, self.agents) if self._reward is None else self._paid(end.value)
        return self._over(0.0 if reward is None else reward, result=as_json(result_as_json(end.value)), **facts)

    def _paid(self, result: Any) -> float | Mapping[str, float]:
        assert self._reward is not None
        try:
            said = self._reward(self._task, result)
        except Exception as error:
            raise ForgeError(f"reward= of {self} failed with {told(error)}") from error
        reward = reward_of(said, self.agents)
        if reward is None and isinstance(said, Mapping):
            return said  # nothing to anybody, or what is no number, which is refused where all rewards are
        if reward is None:
            raise ForgeError(f"reward= of {self} returned {said!r:.200}; return a number, or numbers by seat")
        return reward

    def _failed(self, error: BaseException) -> Outcome:
        if refused := self._refusals(error):
            raise ForgeError(f"the program of {self} failed with {told(error)}{refused}") from error
        return self._over(self._error_reward, error=told(error), program_error=told(error))

    def _over(self, reward: float | Mapping[str, float], *, truncated: bool = False, **info: Any) -> Outcome:
        """The end of the episode; the program's, too, where it has not ended by itself."""
        task = as_json(self._task)
        entries = {name: value for name, value in task.items() if name not in _MEANT} if isinstance(task, dict) else {}
        facts = {**entries, "task": task, "calls": self.num_turns + 1, **info}
        rewards = reward if isinstance(reward, Mapping) else dict.fromkeys(self.agents, reward)
        self.close()
        for agent in self.agents:
            self.infos[agent] = {name: value for name, value in self.infos[agent].items() if name != CONVERSATION}
        return Outcome(
            rewards=rewards, done=not truncated, truncated=truncated, info=dict.fromkeys(self.agents, facts)
        )

    def _refusals(self, error: BaseException | None = None) -> str:
        """What the program was refused since its last answer, or ended with, at the end of a message."""
        refusals = self._session.refusals if self._session is not None else []
        raised = with_causes(error) if refusals else ""
        ended = (refusal for refusal in refusals if refusal[:60] in raised)
        why = next(itertools.chain(ended, self._unforgiven()), "")
        return f"; the gateway had refused it: {why}" if why else ""

    def _unforgiven(self) -> list[str]:
        """What it was refused since its last answer, as far as that is remembered."""
        since = self._session.num_refused - self._forgiven if self._session is not None else 0
        return self._session.refusals[-since:] if self._session is not None and since else []


def _check_reward(reward: object) -> None:
    if reward is None:
        return
    if not callable(reward):
        raise TypeError(f"reward={reward!r:.200} is no function (task, result); a verifier goes to the trainer")
    if inspect.iscoroutinefunction(reward):
        raise TypeError("reward= is async; give a function that returns the number, or a judge to the trainer")
    takes(reward, "reward", "task", "result")
    with contextlib.suppress(ValueError):  # built-ins have no signature
        names = list(inspect.signature(reward).parameters)[:2]
        if names[:1] == ["result"] or names[1:] == ["task"]:
            raise TypeError(f"reward takes ({', '.join(names)}); it is called with (task, result), in this order")


def _check_limits(timeout_s: float, error_reward: float, max_sampled_tokens: int | None) -> None:
    given: dict[str, object] = {"timeout_s": timeout_s, "error_reward": error_reward}
    given["max_sampled_tokens"] = max_sampled_tokens or 0
    for name, number in given.items():
        if not isinstance(number, Real):
            raise TypeError(f"{name}={number!r:.200} is no number")
    if not 0 < timeout_s < math.inf or not math.isfinite(error_reward):
        raise ValueError(f"timeout_s={timeout_s} must be above 0 and finite, error_reward={error_reward} finite")
    if max_sampled_tokens is not None and max_sampled_tokens < 1:
        raise ValueError(f"max_sampled_tokens={max_sampled_tokens} allows no answer; set at least 1, or None")
