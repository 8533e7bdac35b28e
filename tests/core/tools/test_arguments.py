"""Arguments of calls against the tools' JSON schemas, as servers send them."""

import time

import pytest

from forge_agents.tools import Tool, ToolCall, describe_tools, parse_tool_calls, run_tool
from forge_agents.tools.arguments import argument_schemas, check_arguments

NUMBER, TEXT = {"type": "integer"}, {"type": "string"}
CITY, POINT = {"properties": {"city": TEXT}, "required": ["city"]}, {"properties": {"x": NUMBER}, "required": ["x"]}
PLACE = {"type": "object", "properties": {"city": TEXT}, "required": ["city"], "additionalProperties": False}


def tool(parameters):
    return Tool(name="find", description="Finds.", parameters=parameters, fn=lambda **given: sorted(given.items()))


def run(parameters, **arguments):
    return run_tool([tool(parameters)], ToolCall(name="find", arguments=arguments))


SCHEMAS = {
    "anyOf": {"type": "object", "anyOf": [CITY, POINT]},
    "oneOf": {"type": "object", "oneOf": [PLACE, {**POINT, "additionalProperties": False}]},
    "allOf": {"type": "object", "allOf": [CITY, {"properties": {"x": NUMBER}}]},
    "$ref": {"$ref": "#/$defs/place", "$defs": {"place": PLACE}},
    "definitions": {"$ref": "#/definitions/a~1b", "definitions": {"a/b": PLACE}},
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/p", "definitions": {"p": PLACE},
    },
    "patternProperties": {"type": "object", "patternProperties": {"^ci": TEXT}, "additionalProperties": False},
    "additionalProperties {}": {"type": "object", "properties": {}, "additionalProperties": {}},
    "additionalProperties schema": {"type": "object", "additionalProperties": TEXT},
    "unevaluatedProperties": {"type": "object", "allOf": [CITY], "unevaluatedProperties": False},
    "if": {"type": "object", "if": {"required": ["city"]}, "then": {"properties": {"city": TEXT}}, "properties": {}},
    "propertyNames": {"type": "object", "properties": {}, "propertyNames": {"enum": ["city"]}},
    "nothing said": {"type": "object"},
    "plain": PLACE,
}  # fmt: skip


@pytest.mark.parametrize("kind", SCHEMAS)
def test_valid_call_runs(kind):
    result = run(SCHEMAS[kind], city="Oslo")
    assert (result.ok, result.content) == (True, '[["city", "Oslo"]]')


@pytest.mark.parametrize(
    ("kind", "arguments", "says"),
    [
        ("anyOf", {}, "not valid under any of the given schemas"),
        ("anyOf", {"city": 1, "x": "a"}, "do not fit"),
        ("oneOf", {"city": "Oslo", "x": 1}, "do not fit"),
        ("allOf", {"x": 1}, "'city' is a required property"),
        ("allOf", {"city": "Oslo", "x": "a"}, "argument 'x' of find is 'a'; expected {\"type\": \"integer\"}"),
        ("$ref", {"city": "Oslo", "cty": "x"}, "find has no argument 'cty'; arguments: city. Did you mean 'city'?"),
        ("$ref", {}, "'city' is a required property"),
        ("draft 7", {"city": 1}, "argument 'city' of find is 1"),
        ("definitions", {"city": 1}, "argument 'city' of find is 1"),
        ("patternProperties", {"city": 1}, "argument 'city' of find does not fit: 1 is not of type 'string'"),
        ("patternProperties", {"town": "Oslo"}, "find has no argument 'town'"),
        ("additionalProperties schema", {"town": 1}, "argument 'town' of find does not fit"),
        ("unevaluatedProperties", {"city": "Oslo", "town": "x"}, "find has no argument 'town'"),
        ("if", {"city": 1}, "argument 'city' of find is 1"),
        ("propertyNames", {"town": "x"}, "'town' is not one of ['city']"),
        ("plain", {"town": "x"}, "find has no argument 'town'; arguments: city."),
    ],
)
def test_invalid_call_error_says_what_was_expected(kind, arguments, says):
    result = run(SCHEMAS[kind], **arguments)
    assert not result.ok and says in result.content, result.content


def test_schema_with_only_properties_forbids_others():
    listed = {"type": "object", "properties": {"city": TEXT}}
    assert not run(listed, city="Oslo", town="x").ok
    assert run({**listed, "additionalProperties": True}, city="Oslo", town="x").ok
    assert run({**listed, "additionalProperties": {}}, city="Oslo", town="x").ok
    assert not run({"type": "object", "properties": {}}, town="x").ok


def doubled(keyword, leaf, levels=60):
    """Definitions of which each refers twice to the one before: as large as 2 to the power of `levels`."""
    made = {"a0": leaf}
    for number in range(1, levels):
        made[f"a{number}"] = {keyword: [{"$ref": f"#/$defs/a{number - 1}"}] * 2}
    return {"$ref": f"#/$defs/a{levels - 1}"}, made


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
def test_multiplying_references_hit_the_time_limit(keyword, monkeypatch):
    monkeypatch.setattr("forge_agents.tools.arguments._CHECK_TIMEOUT_S", 0.05)
    for leaf in (TEXT, NUMBER):
        last, definitions = doubled(keyword, leaf)
        result = run({"type": "object", "properties": {"x": last}, "$defs": definitions}, x="y")
        assert result.ok or "too long to compare" in result.content or "argument 'x' of find is 'y': " in result.content
    last, definitions = doubled(keyword, CITY)
    for closed in ({}, {"unevaluatedProperties": False}):
        hostile = {"type": "object", **last, "$defs": definitions, **closed}
        result = run(hostile, city="Oslo")
        assert result.ok or "too long to compare with its schema" in result.content
        assert describe_tools([tool(hostile)], "plain")
        assert parse_tool_calls("CALL find(Oslo)", tools=[tool(hostile)])[0].name == "find"


@pytest.mark.parametrize(
    "hostile",
    [
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"properties": {"x": {"$ref": "file:///etc/passwd"}}},
        {"$ref": "#/$defs/missing"},
        {"type": 5},
        {"properties": ["x"], "required": "x"},
        {"type": "object", "properties": {"x": {}}, "required": [["x"], {"x": "y"}, None]},
        {"type": "object", "allOf": [{"type": "object", "required": [["x"]]}]},
        {"allOf": {"x": 1}, "$ref": 7},
        {"patternProperties": {"(": {}}},
    ],
)
def test_unusable_schema_is_an_error_text(hostile):
    result = run(hostile, x="y")
    assert result.ok or "cannot be used" in result.content, result.content
    describe_tools([tool(hostile)], "plain")


@pytest.mark.parametrize("kind", ["anyOf", "oneOf", "allOf", "$ref", "draft 7", "if", "plain"])
def test_plain_calls_support_combined_schemas(kind):
    offered = tool(SCHEMAS[kind])
    assert next(iter(argument_schemas(offered.parameters))) == "city"
    (call,) = parse_tool_calls("CALL find(Oslo)", tools=[offered])
    assert run_tool([offered], call).content == '[["city", "Oslo"]]'
    text = describe_tools([offered], "plain")
    assert "find(city" in text
    if kind != "if":
        (example,) = parse_tool_calls(text.splitlines()[-1], tools=[offered])
        assert run_tool([offered], example).ok, example


def test_nullable_argument_accepts_null():
    schema = {"type": "object", "properties": {"x": {"type": "integer", "nullable": True}, "y": {"type": "integer"}}}
    assert check_arguments("tool", schema, {"x": None}) == ""
    assert check_arguments("tool", {**schema, "required": ["x"]}, {"x": None}) == ""
    assert "expected" in check_arguments("tool", schema, {"y": None})
    assert "expected" in check_arguments("tool", schema, {"x": "a"})


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "array", "items": {"type": "integer", "nullable": True}}, [None, 1], ["a"]),
        ({"type": "object", "properties": {"a": {"type": "integer", "nullable": True}}}, {"a": None}, {"a": "b"}),
        ({"anyOf": [{"type": "integer"}, {"type": "string", "nullable": True, "enum": ["a"]}]}, None, "b"),
        ({"type": "object", "properties": {"nullable": True, "type": {"type": "str"}}}, {"type": "a"}, {"type": 1}),
        ({"type": "array", "items": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], ["a", 1]),
        ({"type": "STRING"}, "a", 1),
        ({"type": "float"}, 1.5, "a"),
        ({"type": "dict", "properties": {"a": {"type": "list"}}}, {"a": [1]}, {"a": 1}),
        ({"type": "number", "multipleOf": 0.01}, 19.99, 19.995),
        ({"type": "number", "multipleOf": 0.1}, 0.3, 0.35),
        ({"type": "integer", "multipleOf": 3}, 10**30 * 3, 10**30),
    ],
)
def test_other_spellings_of_schemas_are_checked(schema, good, bad):
    parameters = {"type": "OBJECT", "properties": {"x": schema}}
    assert check_arguments("tool", parameters, {"x": good}) == ""
    error = check_arguments("tool", parameters, {"x": bad})
    assert "'x'" in error and "cannot be used" not in error


@pytest.mark.parametrize("kind", ["any", None, "ANY"])
def test_argument_of_any_type_takes_all_values(kind):
    for value in ("a", 1, None, [2]):
        assert check_arguments("tool", {"type": "dict", "properties": {"x": {"type": kind}}}, {"x": value}) == ""


def test_long_names_of_a_server_are_not_compared_with_a_long_name_of_a_model():
    """Comparing two names takes time in proportion to the product of their lengths: seconds for a kilobyte each."""
    letters = [chr(0x4E00 + number) for number in range(150)]
    names = ["".join(letters[number:] + letters[:number]) * 20 for number in range(100)]
    start = time.thread_time()
    error = check_arguments("find", {"properties": dict.fromkeys((*names, "city"), TEXT)}, {names[0] + "x": "a"})
    assert time.thread_time() - start < 2 and "has no argument" in error and "Did you mean" not in error
    assert check_arguments("find", {"properties": dict.fromkeys((*names, "city"), TEXT)}, {"citi": "a"}).endswith(
        "Did you mean 'city'?"
    )
