"""Environments of PrimeIntellect's verifiers (single- and multi-turn, tools), unchanged inside, with their rubrics.

In: an installed environment module's name, or an environment object; the model's texts. Out: the environment's
messages as text, the rubric's score as reward. Waits for the environment and its rubric, with a deadline.
"""

from __future__ import annotations

import json
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv, writable
from forge_agents.errors import did_you_mean
from forge_agents.programs.tasks import Tasks
from forge_agents.tools import FORMATS, Tool, ToolFormat, ToolResult, describe_tools, parse_tool_calls, render_results
from forge_envs.adapters.contained import Randomness, ended, failure, fitting
from forge_envs.adapters.patterns import bound_patterns
from forge_envs.adapters.verifiers_rollout import End, Request, Rollout

_OPENAI = "api.openai.com"


class VerifiersEnv(TurnEnv):
    """An environment of verifiers; the seat is ``agent``. Made by `wrap`, or by ``fa.make("verifiers/NAME-v0")``.

    Each episode takes a row of the data set and is one rollout of the library's own loop. The instructions are the
    prompt's system messages and, where there are tools, how to call them; an observation is what was said since the
    seat's last text. Calls in any format that `forge_agents.tools.parse_tool_calls` reads become the message's tool
    calls, as a server that parses them would have it; the message keeps its whole text.

    At the end the reward is the rubric's, and the info holds ``"metrics"`` (by function), ``"stop_condition"``,
    ``"answer"`` (where the row has one) and ``"example_id"``. An exception inside the environment and a missed deadline
    end the episode with `error_reward`, told under ``"error"``; there, too, stand errors that the library itself turns
    into a score, such as a reward function that raised and counts 0. At reset they raise.

    A fork plays the same texts again in a rollout of its own: what a tool did outside is done twice. An episode that
    is cut by a turn limit of this framework has no score; set the environment's own ``max_turns``.

    Args:
        vf_env: A `verifiers.Environment`, such as a `SingleTurnEnv`, `MultiTurnEnv`, `ToolEnv` or `EnvGroup`. Any
            number of wrappers can share one.
        split: The data set that rows come from, "train" or "eval". None: evaluations and benchmarks play rows of the
            evaluation data set, or, where there is none, a fifth of the training data set, which training does not
            play.
        tool_format: How the instructions show tool calls, and results come back.
        judge_client: What its `JudgeRubric`s ask, in the place of their own client: an `openai.AsyncOpenAI` or its
            like. Their own is left only where it has another address than OpenAI's.
        error_reward: Reward of an episode that an exception or a missed deadline ended.
        timeout_s: Seconds for each answer of the environment, the rubric's score included.
        max_turns: As in `TurnEnv`.

    Raises:
        TypeError: `vf_env` is no environment of the classic kind.
        ValueError: The rubric compares the rollouts of a group, or asks a judge for which there is no client.
        RuntimeError: At reset, where the environment ends before it asks for anything.
    """

    possible_agents = ("agent",)
    max_action_chars = 65536
    max_observation_chars = 200_000

    def __init__(
        self,
        vf_env: Any,
        *,
        split: Literal["train", "eval"] | None = None,
        tool_format: ToolFormat = "hermes",
        judge_client: Any = None,
        error_reward: float = 0.0,
        timeout_s: float = 60.0,
        max_turns: int | None = None,
    ) -> None:
        super().__init__(max_turns=max_turns)
        import verifiers as vf

        bound_patterns("verifiers")
        if not isinstance(vf_env, vf.Environment):
            raise TypeError(f"wrap takes a verifiers.Environment, got {type(vf_env).__name__}; tasksets of v1 are none")
        for rubric in _rubrics(vf_env):
            if rubric.has_group_rewards:
                raise ValueError(
                    f"{type(rubric).__name__} has reward functions over a group of rollouts; an episode here is scored "
                    "alone: leave them out, or write a verifier over groups (forge_agents.Verifier)"
                )
            if isinstance(rubric, vf.JudgeRubric):
                _give_judge(rubric, judge_client)
        if split not in ("train", "eval", None) or tool_format not in FORMATS or not timeout_s > 0:
            raise ValueError(
                f"split={split!r} must be train, eval or None, tool_format={tool_format!r} one of "
                f"{', '.join(FORMATS)}, timeout_s={timeout_s} above 0.{did_you_mean(str(tool_format), FORMATS)}"
            )
        if not math.isfinite(error_reward):
            raise ValueError(f"error_reward={error_reward} must be finite")
        # Copies of a function are the function: forks share the library's environment.
        self._env: Callable[[], Any] = lambda: vf_env
        self._split = split
        self._format: ToolFormat = tool_format
        self._error_reward, self._timeout_s = error_reward, timeout_s
        self._rollout: Rollout | None = None

    def setup(self, rng: np.random.Generator) -> None:
        self.close()
        env = self._env()
        row = self._row(env, rng)
        self._rollout = Rollout(env, row, seed=int(rng.integers(2**31)), timeout_s=self._timeout_s)
        state = self._rollout.start()
        if isinstance(state, End):
            why = "; ".join(_errors(state)) or f"stop condition {state.output.get('stop_condition')}"
            message = f"{self}: the rollout ended before it asked for anything: {why}"
            raise RuntimeError(message)  # noqa: TRY004  # a failure of the environment
        self._calls = 0
        self._tools = [_tool(tool) for tool in state.tools]
        system = [_text(message) for message in state.prompt if message.role == "system"]
        self._told = writable("\n\n".join([*system, *filter(None, [describe_tools(self._tools, self._format)])]))
        self._show([message for message in state.prompt if message.role != "system"])
        self._asked = state

    def _row(self, env: Any, rng: np.random.Generator) -> Any:
        """The row of the episode. The library builds its data sets at the first call."""
        held_out = env.get_eval_dataset() if self._split == "eval" or env.build_eval_dataset() is not None else None
        has_training = env.dataset is not None or env.dataset_source is not None
        training = env.get_dataset() if has_training and self._split != "eval" else held_out
        assert self.episode_seed is not None, "set by reset"
        return Tasks(training, training if self._split else held_out).of(self.episode_seed, rng, str(self))

    def instructions(self, agent: str) -> str:
        return self._told

    def observe_text(self, agent: str) -> str:
        return self._seen

    def act(self, agent: str, action: str) -> Outcome:
        assert self._rollout is not None
        try:
            state = self._rollout.answer(self._response(action))
        except Exception as error:  # noqa: BLE001  # the environment's code, on text that a model wrote
            self._show([])
            return ended(agent, self._error_reward, error=failure(error))
        if isinstance(state, Request):
            self._show(_since(self._asked.prompt, state.prompt))
            self._asked = state
            return Outcome()
        self._show(_after_last_text(state.output.get("completion")))
        return self._scored(agent, state)

    def close(self) -> None:
        if self._rollout is not None:
            self._rollout.stop()
            self._rollout = None

    def __del__(self) -> None:
        rollout: Rollout | None = self.__dict__.get("_rollout")
        if rollout is not None:
            rollout.abandon()

    def _scored(self, agent: str, end: End) -> Outcome:
        output, errors = end.output, _errors(end)
        reward = float(output.get("reward") or 0.0)
        if not math.isfinite(reward):
            errors.append(f"the rubric's score is {reward}")
            reward = self._error_reward
        metrics = {name: float(value) for name, value in (output.get("metrics") or {}).items()}
        info = {
            "example_id": output.get("example_id"),
            "metrics": {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()},
            "stop_condition": output.get("stop_condition"),
        }
        answer = output.get("answer")
        info |= {"answer": str(answer)} if answer not in (None, "") else {}
        info |= {"error": "; ".join(dict.fromkeys(errors))} if errors else {}
        return ended(agent, reward, **info)

    def tool_schemas(self, agent: str) -> list[dict[str, Any]]:
        """The schemas of the tools of this episode's row."""
        return [offered.schema for offered in self._tools]

    def _response(self, action: str) -> Any:
        """The text as the library's servers answer."""
        from verifiers import types

        calls = []
        for call in parse_tool_calls(action, tools=self._tools) if self._tools else []:
            if call.error is None:
                self._calls += 1
                arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
                calls.append(types.ToolCall(id=f"call_{self._calls}", name=call.name, arguments=arguments))
        message = types.ResponseMessage(
            content=action,
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        return types.Response(id=f"turn_{self.num_turns}", created=0, model="seat", message=message)

    def _show(self, messages: Sequence[Any]) -> None:
        """Take messages as the observation: one as its text, tool results as their format has it, else role by role."""
        if messages and all(_field(message, "role") == "tool" for message in messages):
            results = [ToolResult(name="", content=_text(message), ok=True) for message in messages]
            text = render_results(results, self._format)
        elif len(messages) == 1:
            text = _text(messages[0])
        else:
            text = "\n\n".join(f"[{_field(message, 'role')}]\n{_text(message)}" for message in messages)
        self._seen = fitting(text, self.max_observation_chars)


wrap = VerifiersEnv
"""An environment object of verifiers as a PettingZoo text environment."""


def load(name: str, *, env_args: Mapping[str, Any] | None = None, **options: Any) -> VerifiersEnv:
    """The environment of an installed module, loaded once per process and arguments.

    The library installs handlers of signals whenever an environment is made; the process's own are put back.

    Args:
        name: The module, or its name on PrimeIntellect's hub.
        env_args: Arguments of its ``load_environment``.
        **options: Those of `wrap`.

    Raises:
        RuntimeError: ``load_environment`` failed; the message says why.
        ValueError: It wants to ask a model, and has no key.
    """
    arguments = dict(env_args or {})
    key = name, repr(sorted(arguments.items()))
    if key not in _loaded:
        _loaded[key] = _load(name, arguments), arguments  # the arguments stay, or another object could get their repr
    return wrap(_loaded[key][0], **options)


_loaded: dict[tuple[str, str], tuple[Any, dict[str, Any]]] = {}


def _load(name: str, arguments: dict[str, Any]) -> Any:
    from openai import OpenAIError

    import verifiers as vf

    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with Randomness(0).contained():
            environment = vf.load_environment(name, **arguments)
    except RuntimeError as error:
        if not isinstance(error.__cause__, OpenAIError):
            raise
        raise ValueError(
            f"{name} asks a model, such as a judge, through a client of its own, which has no key: hand one over in "
            f"env_args, or set OPENAI_API_KEY and pass judge_client. It says: {error.__cause__}"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in kept.items():
                if handler is not None:
                    signal.signal(number, handler)
    bound_patterns("verifiers", name.replace("-", "_").rpartition("/")[2])
    return environment


def _rubrics(env: Any) -> Iterator[Any]:
    """All rubrics of an environment, those inside groups, too."""
    waiting = [env.rubric, *(part.rubric for part in getattr(env, "envs", ()))]
    while waiting:
        rubric = waiting.pop()
        yield rubric
        waiting += getattr(rubric, "rubrics", ())


def _give_judge(rubric: Any, client: Any) -> None:
    if client is not None:
        rubric.judge_client = client
        rubric.class_objects["judge_client"] = client
    elif _OPENAI in str(getattr(rubric.judge_client, "base_url", "")):
        raise ValueError(
            f"{type(rubric).__name__} asks the model {rubric.judge_model!r} at {_OPENAI} in every episode; pass "
            "judge_client=openai.AsyncOpenAI(base_url=...) for a judge of yours, or openai.AsyncOpenAI() if you mean it"
        )


# ---- messages, as objects or, in the output, as dicts


def _field(message: Any, name: str) -> Any:
    return message.get(name) if isinstance(message, Mapping) else getattr(message, name, None)


def _text(message: Any) -> str:
    """The content of a message; parts that are no text are named only."""
    content = _field(message, "content")
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(str(_field(part, "text") or f"[{_field(part, 'type')}]") for part in content)


def _since(before: Sequence[Any], now: Sequence[Any]) -> Sequence[Any]:
    """What stands after the seat's text; everything but system messages where the conversation was rewritten."""
    place = len(before)
    if list(now[:place]) == list(before) and len(now) > place and now[place].role == "assistant":
        return now[place + 1 :]
    return [message for message in now if message.role != "system"]


def _after_last_text(completion: Any) -> Sequence[Any]:
    messages = completion if isinstance(completion, list) else []
    last = max((place for place, message in enumerate(messages) if _field(message, "role") == "assistant"), default=-1)
    return messages[last + 1 :]


def _tool(offered: Any) -> Tool:
    """A tool as `describe_tools` shows it; the environment runs it."""
    return Tool(name=offered.name, description=offered.description, parameters=dict(offered.parameters), fn=_not_here)


def _not_here(**_: Any) -> None:
    raise AssertionError("the environment runs its tools itself")


def _errors(end: End) -> list[str]:
    """What went wrong in a rollout, as the library tells and logs it."""
    error = end.output.get("error")
    told = [str(error.get("error_chain_repr") or error.get("error"))[:300]] if isinstance(error, Mapping) else []
    return [*told, *(said for said in end.errors if not (told and said.startswith("Aborted rollout")))]
