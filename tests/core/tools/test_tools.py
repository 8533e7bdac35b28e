import asyncio
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

import forge_agents as fa
from forge_agents.tools import MAX_RESULT_CHARS, ToolCall, calculator, run_tool, tool


@fa.tool
def weather(
    city: str, days: int = 1, unit: Literal["C", "F"] = "C", tags: list[str] | None = None, exact: bool = False
) -> dict[str, object]:
    """Forecast the weather.

    Of one city.

    Args:
        city: Where, e.g.
            Paris.
        days (int): How many days ahead.

    Returns:
        A forecast.
    """
    return {"city": city, "days": days, "unit": unit, "tags": tags, "exact": exact}


def call(name, **arguments):
    return ToolCall(name=name, arguments=arguments)


def test_hints_and_docstring_become_the_schema():
    assert weather.schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Forecast the weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where, e.g. Paris."},
                    "days": {"type": "integer", "description": "How many days ahead."},
                    "unit": {"enum": ["C", "F"], "type": "string"},
                    "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
                    "exact": {"type": "boolean"},
                },
                "required": ["city"],
            },
        },
    }
    assert weather("Rome")["city"] == "Rome"


def test_bounds_and_descriptions_of_a_hint_are_kept():
    @fa.tool
    def take(stones: Annotated[int, Field(ge=1, le=3, description="How many.")]) -> int:
        """Take stones."""
        return stones

    hinted = {"type": "integer", "minimum": 1, "maximum": 3, "description": "How many."}
    assert take.parameters["properties"] == {"stones": hinted}
    assert run_tool([take], call("take", stones=3)).ok and not run_tool([take], call("take", stones=4)).ok


def test_functions_without_hints_or_docstring_are_rejected():
    def bare(x: int):
        return x

    def unhinted(x):
        """Do."""

    def variadic(*xs: int):
        """Do."""

    def strange(x: Callable[[int], int]):
        """Do."""

    for fn, error, says in [
        (bare, ValueError, "no docstring"),
        (unhinted, TypeError, "no type hint"),
        (variadic, TypeError, "variadic"),
        (strange, TypeError, "JSON cannot express"),
    ]:
        with pytest.raises(error, match=says):
            fa.tool(fn)


@dataclass
class Place:
    x: int
    y: int = 0


@fa.tool
def walk(path: list[Place], start: Place, avoid: set[int]) -> str:
    """Walk."""
    return f"{path[-1]} {start} {sorted(avoid)}"


def test_function_gets_values_of_its_hinted_types():
    assert walk.parameters["properties"]["path"]["items"] == walk.parameters["properties"]["start"]
    asked = call("walk", path=[{"x": 1, "y": 2}], start={"x": 3}, avoid=[4, 4])
    assert run_tool([walk], asked).content.startswith("Error: argument 'avoid' of walk is [4, 4]; expected")
    assert run_tool([walk], call("walk", **{**asked.arguments, "avoid": [5, 4]})).content == (
        "Place(x=1, y=2) Place(x=3, y=0) [4, 5]"
    )
    wrong = run_tool([walk], call("walk", path=[{"y": 2}], start={"x": 3}, avoid=[]))
    assert not wrong.ok and "'path' of walk is [{'y': 2}]" in wrong.content


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (call("wether", city="x"), "no tool is called 'wether'; tools: weather. Did you mean 'weather'?"),
        (call("weather"), "needs the argument 'city'"),
        (call("weather", city="x", dais=2), "no argument 'dais'"),
        (call("weather", city=3), "'city' of weather is 3"),
        (call("weather", city="x", days=True), "'days' of weather is True"),
        (call("weather", city="x", unit="K"), "'unit' of weather is 'K'"),
        (call("weather", city="x", tags=["a", 1]), "'tags'"),
    ],
)
def test_invalid_calls_are_error_texts(asked, says):
    result = run_tool([weather], asked)
    assert not result.ok and says in result.content


def test_exceptions_and_long_results_are_texts():
    @fa.tool
    def burst(size: int) -> str:
        """Write a lot, or fail."""
        return "x" * size if size else {}["key"]

    failed, flood = (
        run_tool([burst], call("burst", size=0)),
        run_tool([burst], call("burst", size=MAX_RESULT_CHARS + 5)),
    )
    assert (failed.ok, failed.content) == (False, "Error: KeyError: 'key'")
    assert flood.ok and flood.content.endswith("x... (5 characters cut)")


class Silent(Exception):  # noqa: N818  # as some libraries have them
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(
    ("error", "content"),
    [
        (SystemExit(2), "Error: SystemExit: 2"),  # as of argparse
        (asyncio.CancelledError(), "Error: CancelledError: "),
        (Silent(), "Error: Silent: "),
    ],
)
def test_tool_that_ends_or_cancels_something_is_an_error_text(error, content, waits):
    @fa.tool(timeout_s=60 if waits else None)
    def end() -> str:
        """End."""
        raise error

    result = run_tool([end], call("end"))
    assert (result.ok, result.content) == (False, content)


def test_interrupt_of_a_tool_is_the_users():
    @fa.tool
    def interrupted() -> str:
        """End."""
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_tool([interrupted], call("interrupted"))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("17 + 25", "42"), ("(1 + 2) * -3", "-9"), ("7 / 2", "3.5"), ("8/2", "4"), ("7 // 2", "3"), ("7 % 4", "3"),
        ("2^10", "1024"), ("2**-1", "0.5"), ("3 \u00d7 4 ÷ 2 =", "6"), ("1,234 + 1", "1235"), ("0.1 + 0.2", "0.3"),
        ("+5", "5"),
    ],
)  # fmt: skip
def test_calculator_values(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", "x + 1", "__import__('os')", "1e9", "9**9**9", "(-8)**0.5", "1/0", "5 % 0", "1 +", "(1)(2)",
        "1 if 2 else 3", "(" * 150, "9" * 201, "2**513", "10.0**300*10.0**300", "0777", "1 < 2", "[1]", "~1", "1_000",
        "0**-1", "٣",
    ],
)  # fmt: skip
def test_calculator_rejects_other_text(expression):
    result = run_tool([calculator], call("calculator", expression=expression))
    assert not result.ok and result.content.startswith("Error: ")


@given(st.text(alphabet="0123456789+-*/%(). ^", max_size=210) | st.text())
def test_calculator_never_hangs(expression):
    assert isinstance(run_tool([calculator], call("calculator", expression=expression)).content, str)


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_the_calculator_is_exact_on_integers(a, b):
    assert calculator(f"({a}) * ({b}) - {abs(a)}") == str(a * b - abs(a))


def test_generators_are_no_tools():
    def count(text: str):
        "Count."
        yield text

    async def wait(text: str):
        "Count later."
        yield text

    for generator in (count, wait):
        with pytest.raises(TypeError, match=f"tool {generator.__name__} is a generator. Write a function that returns"):
            tool(generator)


def test_async_tools_are_awaited():
    @fa.tool
    async def double(number: int) -> int:
        "Double a number."
        await asyncio.sleep(0)
        if number < 0:
            raise ValueError("no negative numbers")
        return 2 * number

    @fa.tool(timeout_s=0.01)
    async def never(number: int) -> int:
        "Wait."
        await asyncio.sleep(60)
        return number

    async def in_a_running_loop(number):
        return run_tool([double], call("double", number=number))

    assert double.waits and asyncio.run(double(3)) == 6  # still the function
    assert run_tool([double], call("double", number=3)).content == "6"
    assert asyncio.run(in_a_running_loop(4)).content == "8"
    assert asyncio.run(in_a_running_loop(-4)).content == "Error: no negative numbers"
    assert run_tool([never], call("never", number=1)).content == "Error: never gave no result within 0.01 s"


@pytest.mark.parametrize("timeout_s", [None, 60])
def test_async_tools_behind_a_plain_decorator_are_awaited(timeout_s):
    def counted(function):
        @functools.wraps(function)
        def call_it(*args, **kwargs):
            return function(*args, **kwargs)

        return call_it

    @fa.tool(timeout_s=timeout_s)
    @counted
    async def double(number: int) -> int:
        "Double a number."
        await asyncio.sleep(0)
        return 2 * number

    async def in_a_running_loop():
        return run_tool([double], call("double", number=4))

    assert asyncio.run(in_a_running_loop()).content == "8"


def test_numbers_and_dataclasses_of_a_result_are_json():
    @dataclass
    class Item:
        name: str
        price: Any

    @tool
    def stock() -> dict[str, Any]:
        "List the stock."
        return {
            "count": np.int64(2),
            "items": [Item("pen", np.float32(0.5))],
            "shelves": np.arange(3),
            "sizes": {"s", "l"},
        }

    result = run_tool([stock], call("stock"))
    items = [{"name": "pen", "price": 0.5}]
    assert json.loads(result.content) == {"count": 2, "items": items, "shelves": [0, 1, 2], "sizes": ["l", "s"]}


def test_text_in_a_structured_result_is_readable():
    @tool
    def greet() -> dict[str, str]:
        "Greet."
        return {"greeting": "こんにちは"}

    assert run_tool([greet], call("greet")).content == '{"greeting": "こんにちは"}'
