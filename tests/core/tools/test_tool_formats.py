import copy
import json
import threading
from dataclasses import dataclass, replace
from typing import Literal

import pytest
from costs import costs_less_than
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_agents.rollout.rendering import Renderer
from forge_agents.tools import (
    FORMATS,
    Tool,
    ToolCall,
    ToolResult,
    calculator,
    describe_tools,
    parse_tool_calls,
    render_results,
    render_tool_call,
    run_tool,
    tool,
)
from forge_agents.tools.formats import MAX_CALLS
from forge_agents.types import Episode, Trajectory, Turn


@tool
def book(city: str, nights: int = 1, cheap: bool = False, tags: list[str] | None = None) -> str:
    """Book a room."""
    return f"{city} {nights} {cheap} {tags}"


def call(name, **arguments):
    return ToolCall(name=name, arguments=arguments)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "a", "parameters": {"x": 1}}', [call("a", x=1)]),
        ('<|python_tag|>{"name": "a", "parameters": {"x": 1}}<|eom_id|>', [call("a", x=1)]),
        ('So<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "arguments": {}}', [call("a"), call("b")]),
        ('{"type": "function", "name": "a", "parameters": {"x": null}}', [call("a", x=None)]),
        ('{"name": "Ann", "age": 7}', []),
        ('My answer is {"name": "a", "parameters": {}}', []),
        ("{not json}", []),
        ('[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]', [call("a"), call("b")]),
        ('[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b{"y": 2}', [call("a", x=1), call("b", y=2)]),
        ('[ TOOL_CALLS] {"name": "a", "arguments": {}}</s>', [call("a")]),
        ("first CALL a(x=1, y='b') then CALL b()", [call("a", x=1, y="b"), call("b")]),
        ('CALL a {"x": 1} CALL b: {"y": 2}', [call("a", x=1), call("b", y=2)]),
        ("CALL me maybe, or RECALL a(1)", []),
        ('<tool_call>{"name": "a", "arguments": {"x": "</tool_call>"}}</tool_call>', [call("a", x="</tool_call>")]),
        ('<tool_call>\n{"name": "a"}', [call("a")]),
        ('Hm. <tool_call>{"name": "a", "arguments": "{\\"x\\": 2}"}</tool_call> <tool_call>{"name": "b"}</tool_call>',
         [call("a", x=2), call("b")]),
        ('CALL a(x=1) <tool_call>{"name": "b"}</tool_call>', [call("a", x=1)]),
    ],
)  # fmt: skip
def test_calls_are_parsed_in_every_format(text, expected):
    assert parse_tool_calls(text) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("Rome", {"city": "Rome"}),
        ("New York, 2", {"city": "New York", "nights": 2}),
        ('"a, b)", nights=3', {"city": "a, b)", "nights": 3}),
        ("city=12, nights=2, cheap=True", {"city": "12", "nights": 2, "cheap": True}),
        ("nights=2, Rome", {"city": "Rome", "nights": 2}),
        ("city='it\\'s \"so\"'", {"city": 'it\'s "so"'}),
        ("L'Aquila, 2", {"city": "L'Aquila", "nights": 2}),
        ("Rome (north), cheap = false", {"city": "Rome (north)", "cheap": False}),
        ('Rome, tags=["a", "b"]', {"city": "Rome", "tags": ["a", "b"]}),
        ("Rome, tags=None", {"city": "Rome", "tags": None}),
        ("Rome, nights=1,000", {"city": "Rome", "nights": 1000}),
        ("nights=-12,345,678.5, city=1,000", {"nights": -12345678.5, "city": "1,000"}),
        ("nights=1, 200", {"nights": 1, "city": "200"}),
        ("nights=1,2000", {"nights": 1, "city": "2000"}),
        ("1,200", {"city": "1", "nights": 200}),
        ("Rome, tags=[1,200]", {"city": "Rome", "tags": [1, 200]}),
        ("", {}),
    ],
)
def test_plain_arguments_may_lack_names_and_quotes(arguments, expected):
    (read,) = parse_tool_calls(f"CALL book({arguments}) ok", tools=[book])
    assert (read.arguments, read.error) == (expected, None)


def test_an_expression_needs_no_quotes():
    (read,) = parse_tool_calls("CALL calculator((2 + 3) * 4)", tools=[calculator])
    assert run_tool([calculator], read).content == "20"
    (read,) = parse_tool_calls("CALL calculator(2 + 3 == 5)", tools=[calculator])
    assert not run_tool([calculator], read).ok


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<tool_call>17 + 25 =</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "a", ', "not closed"),
        ("<tool_call>[1]</tool_call>", 'needs a "name"'),
        ('<tool_call>{"name": 5}</tool_call>', 'needs a "name"'),
        ('<tool_call>{"name": "book", "arguments": [1]}</tool_call>', "JSON object"),
        ('<tool_call>{"name": "book", "arguments": "{"}</tool_call>', "JSON object"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "not valid JSON"),
        (f'<tool_call>{{"name": "a", "arguments": {{"x": {"9" * 5000}}}}}</tool_call>', "not valid JSON"),
        ("CALL book(Rome, 1, true, [], 5)", "'5' belongs to no argument; write CALL book(city=..., nights=..."),
        ("CALL book(Rome", "not closed; write CALL book(key=value)"),
        ("CALL book {'city': 'Rome'}", "not valid JSON"),
        ('<|python_tag|>book.call(city="Rome")', "not valid JSON"),
        ('{"name": "book", "parameters": {', "not valid JSON"),
        ("[TOOL_CALLS]book{", "not valid JSON"),
        ("[TOOL_CALLS][1]", 'needs a "name"'),
        ('<tool_call>{"name": "book", "arguments": {"city": NaN}}</tool_call>', "not valid JSON"),
        ('<tool_call>{"name": "book", "arguments": {"city": 1e999}}</tool_call>', "not valid JSON"),
        ('<tool_call>{"name": "book", "arguments": {"city": "\\ud800"}}</tool_call>', "not valid JSON"),
    ],
)
def test_malformed_call_error_shows_the_format(text, says):
    (read,) = parse_tool_calls(text, tools=[book])
    result = run_tool([book], read)
    assert not result.ok and says in read.error and says in result.content


def test_format_name_is_checked_and_number_of_calls_limited():
    with pytest.raises(ValueError, match="hermes.*Did you mean 'hermes'"):
        parse_tool_calls("", "hermess")
    assert len(parse_tool_calls("CALL a()" * 100)) == MAX_CALLS
    for flood in ("<tool_call>", 'CALL a("', "CALL a((((", "[TOOL_CALLS]"):

        def parse(count, flood=flood):
            parse_tool_calls(flood * count)

        assert costs_less_than(8, parse, 40_000, 10_000, slack_s=0.05), f"{flood}: 4 times if linear, 16 if quadratic"


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=60, deadline=None)
@given(
    text=st.text()
    | st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "CALL a(", "CALL b{", '{"name": "a", ',
             '"parameters": {}}', '"arguments": "', "'", '"', ",", "=", "[", "\\", "x", "1", " ", ")"]
        )
    ).map("".join)
)  # fmt: skip
def test_parsing_any_text_never_raises(form, text):
    for read in parse_tool_calls(text, form, [book]) + parse_tool_calls(text):
        result = run_tool([book], read)
        assert result.name == read.name and (result.ok or result.content.startswith("Error: "))
        json.dumps(dict(read.arguments), allow_nan=False).encode()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=60, deadline=None)
@given(name=st.from_regex(r"[a-z_]{1,9}", fullmatch=True),
       arguments=st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True), JSON, max_size=3))  # fmt: skip
def test_rendered_calls_are_parsed_back(form, name, arguments):
    written = call(name, **arguments)
    assert parse_tool_calls(render_tool_call(written, form)) == [written]
    assert parse_tool_calls(f"So.\n{render_tool_call(written, form)}", form if form != "llama" else "auto") == (
        [written] if form != "llama" else []
    )


@pytest.mark.parametrize("form", ["hermes", "llama", "mistral"])
def test_deeply_nested_call_is_an_error(form):
    for depth, error in ((90, False), (600, True)):
        deep = "[" * depth + "]" * depth
        text = render_tool_call(ToolCall(name="add", arguments={"a": "?"}), form).replace('"?"', deep)
        calls = tuple(parse_tool_calls(text))
        assert [call.error is not None for call in calls] == [error] and all(
            error or json.dumps(call.arguments["a"]) == deep for call in calls
        )
        turn = Turn(agent="a", index=0, observation="", action=text, reward=0.0, tool_calls=calls)
        told = Trajectory(agent="a", policy="", turns=(turn,))
        Episode(env_id="", seed=0, trajectories={"a": told}).to_json()


@pytest.mark.parametrize("form", FORMATS)
def test_description_lists_every_tool_and_the_format(form):
    text = describe_tools([book, calculator], form)
    assert "Book a room." in text and "calculator" in text
    marks = {"hermes": "<tool_call>", "llama": '"parameters"', "mistral": "[TOOL_CALLS]", "plain": 'CALL book(city="'}
    assert marks[form] in text
    assert describe_tools([], form) == ""


def test_example_call_is_valid():
    @dataclass
    class Place:
        row: int
        side: Literal["left"]

    @tool
    def put(what: Literal["stone"], where: Place, pair: tuple[int, str]) -> str:
        """Put it there."""
        return f"{what} {where} {pair}"

    (shown,) = parse_tool_calls(describe_tools([put], "plain"), "plain", [put])
    assert run_tool([put], shown).ok, shown
    itself = {"type": "object", "properties": {key: {"$ref": "#/$defs/n"} for key in "abc"}, "required": list("abc")}
    endless = Tool(name="t", description="", parameters={**itself, "$defs": {"n": itself}}, fn=dict)
    assert len(describe_tools([endless], "plain")) < 1000


def test_results_are_distinguishable():
    results = [ToolResult(name="a", content="1", ok=True), ToolResult(name="", content="Error: x", ok=False)]
    assert render_results(results, "plain") == "a: 1\ncall: Error: x"
    assert render_results(results[:1], "llama") == "1"
    assert render_results(results).count("<tool_response>") == 2


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"pattern": "^(a|aa)+$"}, "too long to compare with its schema"),
        ({"pattern": "("}, "schema of t cannot be used"),
        ({"type": "unheard-of"}, "schema of t cannot be used"),
        ({"$ref": "http://127.0.0.1:9/schema"}, "schema of t cannot be used"),
        (5, "schema of t cannot be used"),
    ],
)
def test_server_schema_neither_stalls_nor_breaks_a_call(wanted, told):
    strange = Tool(name="t", description="", parameters={"properties": {"x": wanted}}, fn=lambda **given: given)
    said = run_tool([strange], call("t", x="a" * 60 + "b"))
    assert not said.ok and told in said.content


def test_time_limit_ends_the_wait_and_keeps_tool_errors():
    @tool(timeout_s=20)
    def slow(kind: str) -> str:
        """Wait or fail."""
        if kind == "wait":
            over.wait(60)
        if kind == "late":
            raise TimeoutError("the far end is silent")
        return threading.current_thread().name

    over = threading.Event()
    assert run_tool([slow], call("slow", kind="")).content == "tool slow"
    hasty = replace(slow, timeout_s=0.1)
    assert run_tool([hasty], call("slow", kind="wait")).content == "Error: slow gave no result within 0.1 s"
    over.set()
    assert "the far end is silent" in run_tool([slow], call("slow", kind="late")).content
    with pytest.raises(ValueError, match="timeout_s=0"):
        tool(timeout_s=0)(slow.fn)


@pytest.mark.parametrize("properties", [{"x": True}, None, True])
def test_argument_without_a_schema_is_allowed(properties):
    tool = {"function": {"name": "add", "parameters": {"type": "object", "properties": properties}}}
    (read,) = parse_tool_calls("CALL add(x=1)", "plain", [tool])
    assert read.arguments == {"x": 1} and not read.error


@pytest.mark.parametrize("text", ['CALL now {"a": 1}', '<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'])
@pytest.mark.parametrize("more", [{}, {"parameters": None}, {"description": "The time."}])
def test_schema_without_parameters_is_that_of_a_tool(text, more):
    schema = {"type": "function", "function": {"name": "now", **more}}  # as OpenAI's API allows
    assert parse_tool_calls(text, tools=[schema]) == [call("now", a=1)]


def test_tool_conversation_is_token_exact(tokenizer):
    renderer = Renderer(tokenizer)
    system, asked = describe_tools([calculator], "hermes"), render_tool_call(call("calculator", expression="2 + 3"))
    first = renderer.start(system, "What is 2 + 3?")
    response = (*tokenizer.encode(asked, add_special_tokens=False), tokenizer.eos_token_id)
    (read,) = parse_tool_calls(renderer.text(response))
    result = render_results([run_tool([calculator], read)])
    second = renderer.extend(first, response, result)
    assert second[: len(first) + len(response)] == (*first, *response)
    turns = [("system", system), ("user", "What is 2 + 3?"), ("assistant", asked), ("user", result)]
    whole = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
    assert list(second) == list(whole) and "\n5\n" in result


def test_llamas_special_tokens_reach_the_parser(tokenizer):
    marked = copy.deepcopy(tokenizer)
    marked.add_special_tokens({"additional_special_tokens": ["<|python_tag|>", "<|eom_id|>"]})
    text = f"<|python_tag|>{render_tool_call(call('calculator', expression='6 * 7'), 'llama')}<|eom_id|>"
    ids = marked.encode(text, add_special_tokens=False)
    assert len(ids) < len(text) - 20  # the marks are one token each
    (read,) = parse_tool_calls(Renderer(marked).text(ids))
    assert run_tool([calculator], read).content == "42"


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "book", "city": "Rome"}</tool_call>',
        '{"name": "book", "parameters": {}, "city": "Rome"}',
        '<tool_call>{"name": "book", "arguments": "{\\"city\\": \\"Rome\\"}{\\"city\\": \\"Oslo\\"}"}</tool_call>',
        '<tool_call>{"name": "book", "arguments": "{\\"city\\": \\"Rome\\"}}"}</tool_call>',
    ],
)
def test_arguments_outside_of_their_object_are_an_error(text):
    (read,) = parse_tool_calls(text, tools=[book])
    assert read.name == "book" and not read.arguments and "write " in read.error


@pytest.mark.parametrize("arguments", ["null", '""', "{}"])
def test_call_without_arguments_may_say_null(arguments):
    for key in ("id", "call_id", "tool_call_id"):
        (read,) = parse_tool_calls(f'<tool_call>{{"name": "list", "{key}": "c", "arguments": {arguments}}}</tool_call>')
        assert (read.name, dict(read.arguments), read.error) == ("list", {}, None)


def test_id_of_mistrals_calls_is_skipped():
    text = '[TOOL_CALLS]book[CALL_ID]a1B2c3D4e[ARGS]{"city": "Rome"}[TOOL_CALLS]list[CALL_ID]x[ARGS]{}'
    assert [(c.name, dict(c.arguments), c.error) for c in parse_tool_calls(text)] == [
        ("book", {"city": "Rome"}, None), ("list", {}, None)
    ]  # fmt: skip


@pytest.mark.parametrize("quote", ['"""', "'''"])
def test_text_in_three_quotes_is_one_argument(quote):
    code = 'def f(a, b):\n    return "(" + a  # it\'s'
    (read,) = parse_tool_calls(f"CALL book(city={quote}{code}{quote}, nights=2)", tools=[book])
    assert (dict(read.arguments), read.error) == ({"city": code, "nights": 2}, None)
    (read,) = parse_tool_calls('CALL book(city="", nights=2)', tools=[book])
    assert (dict(read.arguments), read.error) == ({"city": "", "nights": 2}, None)
