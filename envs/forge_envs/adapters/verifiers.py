"""Environments of PrimeIntellect's verifiers 0.3.1 (single-turn, multi-turn, tools), with their rubrics."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv, writable
from forge_agents.errors import did_you_mean
from forge_agents.programs.tasks import Tasks
from forge_agents.tools import FORMATS, Tool, ToolFormat, ToolResult, describe_tools, parse_tool_calls, render_results
from forge_envs.adapters.contained import Randomness, ended, failure, fitting
from forge_envs.adapters.listing import entry, register_ids
from forge_envs.adapters.patterns import bound_patterns
from forge_envs.adapters.verifiers_rollout import End, Request, Rollout

_OPENAI = "api.openai.com"


class VerifiersEnv(TurnEnv):
    """An environment of verifiers with the agent ``agent``. Made by `wrap`, or by ``fa.make("verifiers/NAME-v0")``.

    Each episode is a rollout of the library's own loop on one row of the data set. The instructions are the system
    messages and, if there are tools, how to call them. An observation has the messages since the agent's last text.
    Calls in any format of `forge_agents.tools.parse_tool_calls` become tool calls of the message, which keeps its text.

    The reward is the rubric's. At the end infos contain ``"metrics"`` (by function), ``"stop_condition"``, ``"answer"``
    (if the row has one) and ``"example_id"``. An exception in the environment or a timeout ends the episode with
    `error_reward` and a message under ``"error"``. Errors that the library converts to a score of 0, such as those of
    reward functions, are also listed there. At reset such errors raise.

    A fork repeats the texts in a new rollout, with all side effects of tools. An episode that is truncated by a turn
    limit of this framework has no score; set the environment's own ``max_turns`` instead.

    Args:
        vf_env: A `verifiers.Environment`, such as a `SingleTurnEnv`, `MultiTurnEnv`, `ToolEnv` or `EnvGroup`. Several
            wrappers can share it.
        split: Data set of the rows, "train" or "eval". None: evaluations and benchmarks use the evaluation data set,
            or, without one, a fifth of the training rows, which training does not use.
        tool_format: Format of tool calls in the instructions, and of results.
        judge_client: Replaces the client of each `JudgeRubric`: an `openai.AsyncOpenAI` or equivalent. Required if a
            rubric's own client uses OpenAI's address.
        error_reward: Reward after an exception or timeout.
        timeout_s: Maximum seconds for each answer of the environment, including the rubric's score.
        max_turns: As in `TurnEnv`.

    Raises:
        TypeError: `vf_env` is not a classic environment of verifiers.
        ValueError: The rubric compares the rollouts of a group, or needs a `judge_client`.
        RuntimeError: At reset, if the rollout ends before its first request.
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
            raise TypeError(f"wrap takes a verifiers.Environment (not a taskset of v1), got {type(vf_env).__name__}")
        for rubric in _rubrics(vf_env):
            if rubric.has_group_rewards:
                raise ValueError(
                    f"{type(rubric).__name__} has reward functions over a group of rollouts, but episodes are scored "
                    "one by one: remove them, or write a verifier over groups (forge_agents.Verifier)"
                )
            if isinstance(rubric, vf.JudgeRubric):
                _set_judge(rubric, judge_client)
        if split not in ("train", "eval", None) or tool_format not in FORMATS or not timeout_s > 0:
            raise ValueError(
                f"split={split!r} must be train, eval or None, tool_format={tool_format!r} one of "
                f"{', '.join(FORMATS)}, timeout_s={timeout_s} above 0.{did_you_mean(str(tool_format), FORMATS)}"
            )
        if not math.isfinite(error_reward):
            raise ValueError(f"error_reward={error_reward} must be finite")
        # A function, because copying it does not copy the environment, which forks share.
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
            reason = "; ".join(_errors(state)) or f"stop condition {state.output.get('stop_condition')}"
            message = f"{self}: the rollout ended before its first request: {reason}"
            raise RuntimeError(message)  # noqa: TRY004  # a failure of the environment
        self._calls = 0
        self._tools = [_tool(tool) for tool in state.tools]
        system = [_text(message) for message in state.prompt if message.role == "system"]
        parts = [*system, *filter(None, [describe_tools(self._tools, self._format)])]
        self._instructions = writable("\n\n".join(parts))
        self._show([message for message in state.prompt if message.role != "system"])
        self._request = state

    def _row(self, env: Any, rng: np.random.Generator) -> Any:
        """Return the row of the episode. The library builds its data sets at the first call."""
        held_out = env.get_eval_dataset() if self._split == "eval" or env.build_eval_dataset() is not None else None
        has_training = env.dataset is not None or env.dataset_source is not None
        training = env.get_dataset() if has_training and self._split != "eval" else held_out
        assert self.episode_seed is not None, "set by reset"
        return Tasks(training, training if self._split else held_out).of(self.episode_seed, rng, str(self))

    def instructions(self, agent: str) -> str:
        return self._instructions

    def observe_text(self, agent: str) -> str:
        return self._seen

    def act(self, agent: str, action: str) -> Outcome:
        assert self._rollout is not None
        try:
            state = self._rollout.answer(self._response(action))
        except Exception as error:  # noqa: BLE001  # library code on model-written text
            self._show([])
            return ended(agent, self._error_reward, error=failure(error))
        if isinstance(state, Request):
            self._show(_new_messages(self._request.prompt, state.prompt))
            self._request = state
            return Outcome()
        self._show(_after_last_text(state.output.get("completion")))
        return self._end(agent, state)

    def close(self) -> None:
        if self._rollout is not None:
            self._rollout.stop()
            self._rollout = None

    def __del__(self) -> None:
        rollout: Rollout | None = self.__dict__.get("_rollout")
        if rollout is not None:
            rollout.abandon()

    def _end(self, agent: str, end: End) -> Outcome:
        output, errors = end.output, _errors(end)
        reward = float(output.get("reward") or 0.0)
        if not math.isfinite(reward):
            errors.append(f"the rubric's score is {reward}")
            reward = self._error_reward
        metrics = {name: float(value) for name, value in (output.get("metrics") or {}).items()}
        info = {name: output.get(name) for name in ("example_id", "stop_condition")}
        info["metrics"] = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
        if (answer := output.get("answer")) not in (None, ""):
            info["answer"] = str(answer)
        if errors:
            info["error"] = "; ".join(dict.fromkeys(errors))
        return ended(agent, reward, **info)

    def tool_schemas(self, agent: str) -> list[dict[str, Any]]:
        """Return the schemas of the tools of this episode."""
        return [tool.schema for tool in self._tools]

    def _response(self, action: str) -> Any:
        """Convert a text to the response of a model server."""
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
        """Set the observation: the text of a single message, formatted tool results, or several messages with roles."""
        if messages and all(_field(message, "role") == "tool" for message in messages):
            results = [ToolResult(name="", content=_text(message), ok=True) for message in messages]
            text = render_results(results, self._format)
        elif len(messages) == 1:
            text = _text(messages[0])
        else:
            text = "\n\n".join(f"[{_field(message, 'role')}]\n{_text(message)}" for message in messages)
        self._seen = fitting(text, self.max_observation_chars)


wrap = VerifiersEnv
"""Alias under which the class is documented: wraps an environment object of verifiers."""


def load(name: str, *, env_args: Mapping[str, Any] | None = None, **options: Any) -> VerifiersEnv:
    """Wrap the environment of an installed module, loaded once per process and arguments.

    The library replaces signal handlers when it makes an environment. They are restored.

    Args:
        name: Module, or its name on PrimeIntellect's hub.
        env_args: Arguments of the module's ``load_environment``.
        **options: Arguments of `wrap`.

    Raises:
        RuntimeError: ``load_environment`` failed.
        ValueError: The environment needs a model client and has no key.
    """
    arguments = dict(env_args or {})
    key = name, repr(sorted(arguments.items()))
    if key not in _loaded:
        _loaded[key] = _load(name, arguments), arguments  # keep the arguments alive, as their repr may have addresses
    return wrap(_loaded[key][0], **options)


_loaded: dict[tuple[str, str], tuple[Any, dict[str, Any]]] = {}


def _load(name: str, arguments: dict[str, Any]) -> Any:
    from openai import OpenAIError

    import verifiers as vf

    in_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if in_main_thread}
    try:
        with Randomness(0).contained():
            environment = vf.load_environment(name, **arguments)
    except RuntimeError as error:
        if not isinstance(error.__cause__, OpenAIError):
            raise
        raise ValueError(
            f"{name} creates a client of a model, such as a judge, without a key: pass a client in env_args, or set "
            f"OPENAI_API_KEY and pass judge_client. The error: {error.__cause__}"
        ) from error
    finally:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
    bound_patterns("verifiers", name.replace("-", "_").rpartition("/")[2])
    return environment


def _rubrics(env: Any) -> Iterator[Any]:
    """Yield all rubrics of an environment, including nested ones."""
    pending = [env.rubric, *(part.rubric for part in getattr(env, "envs", ()))]
    while pending:
        rubric = pending.pop()
        yield rubric
        pending += getattr(rubric, "rubrics", ())


def _set_judge(rubric: Any, client: Any) -> None:
    if client is not None:
        rubric.judge_client = client
        rubric.class_objects["judge_client"] = client
    elif _OPENAI in str(getattr(rubric.judge_client, "base_url", "")):
        raise ValueError(
            f"{type(rubric).__name__} would call the model {rubric.judge_model!r} at {_OPENAI} in every episode; pass "
            "judge_client=openai.AsyncOpenAI(base_url=...) for another judge, or openai.AsyncOpenAI() to confirm it"
        )


# ---- messages: objects, or dicts in the output of a rollout


def _field(message: Any, name: str) -> Any:
    return message.get(name) if isinstance(message, Mapping) else getattr(message, name, None)


def _text(message: Any) -> str:
    """Return the text of a message, with placeholders for parts that are not text."""
    content = _field(message, "content")
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(str(_field(part, "text") or f"[{_field(part, 'type')}]") for part in content)


def _new_messages(before: Sequence[Any], now: Sequence[Any]) -> Sequence[Any]:
    """Return the messages after the agent's text, or all but system messages if the conversation was rewritten."""
    start = len(before)
    if list(now[:start]) == list(before) and len(now) > start and now[start].role == "assistant":
        return now[start + 1 :]
    return [message for message in now if message.role != "system"]


def _after_last_text(completion: Any) -> Sequence[Any]:
    messages = completion if isinstance(completion, list) else []
    last = max((index for index, message in enumerate(messages) if _field(message, "role") == "assistant"), default=-1)
    return messages[last + 1 :]


def _tool(tool: Any) -> Tool:
    """Convert a tool for its description. The environment runs it."""

    def not_callable(**_: Any) -> None:
        raise AssertionError("the environment runs its tools itself")

    return Tool(name=tool.name, description=tool.description, parameters=dict(tool.parameters), fn=not_callable)


def _errors(end: End) -> list[str]:
    """Return the errors of a rollout, both reported and logged."""
    error = end.output.get("error")
    reported = [str(error.get("error_chain_repr") or error.get("error"))[:300]] if isinstance(error, Mapping) else []
    return [*reported, *(text for text in end.errors if not (reported and text.startswith("Aborted rollout")))]


# ---- ids


def list_ids(name: str | None) -> str | None:
    """Register ``verifiers/name-v0``; see `forge_agents.envs.registry.ListIds`.

    Lists the environment modules of installed packages that require the library. Others are available by name.
    """
    name = None if name is None else name.removesuffix("-v0").replace("_", "-")
    entries = {
        f"{package}-v0": entry("verifiers:load", "verifiers", "1p", name=package)
        for package in (_environment_packages() if name is None else (name,))
        if _loads_environment(package.replace("-", "_"))
    }
    return register_ids("verifiers", name, entries)


def _environment_packages() -> Iterator[str]:
    for package in importlib.metadata.distributions():
        if re.search(r"^Requires-Dist: verifiers\b", package.read_text("METADATA") or "", re.MULTILINE):
            yield package.name.replace("_", "-")


def _loads_environment(module: str) -> bool:
    """Whether a module exists whose source contains ``load_environment``."""
    if not re.fullmatch(r"[A-Za-z]\w*", module):
        return False
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # the main program
        return False
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return False
    return "load_environment" in Path(spec.origin).read_text(errors="replace")
