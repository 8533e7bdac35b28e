"""Values against schemas whose patterns have a time limit."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from costs import costs_less_than
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from forge_agents.schemas import Schema

H = "[0-9a-fA-F]{1,4}"
IP_6 = (
    "^("
    + "|".join([f"({H}:){{7}}{H}", f"({H}:){{1,7}}:", *(f"({H}:){{1,{7 - n}}}(:{H}){{1,{n}}}" for n in range(1, 7))])
    + f"|:((:{H}){{1,7}}|:))$"
)
URL = r"^https?:(?:/{1,3}|[a-z0-9%])(?:[^\s()<>]+|\((?:[^\s()<>]+|(?:\([^\s()<>]+\)))*\))+(?::\d{2,5})?(?:/\S*)?$"
ENDLESS = {"pattern": "^(a|aa)+$"}
STALLING = "a" * 60 + "b"
NAMED = {
    "properties": {"a": {"type": "integer"}},
    "patternProperties": {"^x": {"type": "string"}, "y$": {"maxLength": 2}},
    "additionalProperties": {"pattern": "^[0-9]+$"},
}


@pytest.mark.parametrize("closed", [False, True, {"pattern": "^[0-9]+$"}])
@pytest.mark.parametrize(
    "value", [{}, {"a": 1}, {"a": "1"}, {"x1": "b"}, {"x1": 1}, {"xy": "abc"}, {"b": "12"}, {"b": "c"}, [1], 3, "b"]
)
def test_validity_is_the_same_as_without_a_limit(value, closed):
    schema = {**NAMED, "additionalProperties": closed}
    error = Schema(schema, timeout_s=5).first_error(value)
    assert (error is None) == Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize(
    ("value", "step", "is_valid"),
    [
        (0.3, 0.1, True), (0.35, 0.1, False), (np.float64(0.3), 0.1, True), (np.int64(3), 1.5, True),
        (10**400, 0.1, True), (1e300, np.float64(0.5), True), (float("inf"), 0.1, False), (float("nan"), 1, False),
    ],
)  # fmt: skip
def test_multiples_are_those_of_decimals(value, step, is_valid):
    error = Schema({"multipleOf": step}, timeout_s=5).first_error(value)
    assert (error is None) == is_valid


def test_error_has_a_path():
    error = Schema({"items": {"patternProperties": {"^x": ENDLESS}}}, timeout_s=5).first_error([{"xa": "b"}])
    assert list(error.absolute_path) == [0, "xa"] and error.message == "'b' does not match '^(a|aa)+$'"
    error = Schema({"additionalProperties": False}, timeout_s=5).first_error({"a": 1, "b": 2})
    assert error.message == "additional properties are not allowed: 'a', 'b'"


@pytest.mark.parametrize("draft", ["http://json-schema.org/draft-07/schema#", Draft202012Validator.META_SCHEMA["$id"]])
def test_subschema_with_its_own_draft_is_limited(draft):
    here = {"$schema": draft, "items": {"$schema": draft, **ENDLESS}}
    again = {"$schema": draft, "properties": {"a": {"$ref": "#"}}, **ENDLESS}
    for schema, value in ((here, [STALLING]), (again, {"a": STALLING})):
        with pytest.raises(TimeoutError):
            Schema(schema, timeout_s=0.05).first_error(value)


@pytest.mark.parametrize(
    ("keyword", "value"), [("unevaluatedProperties", {"a": 1}), ("unevaluatedItems", [1]), ("allOf", {"a": 1})]
)
def test_multiplying_references_end_at_the_limit(keyword, value):
    """Forty definitions, each with two references to the next, stand for 2 ** 40 parts."""
    parts = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}", "$dynamicRef": f"#/$defs/d{n + 1}"} for n in range(40)}
    first = {"$ref": "#/$defs/d0"}
    asked = {"allOf": [first]} if keyword == "allOf" else {keyword: False, "if": first}
    started = time.thread_time()
    with pytest.raises(TimeoutError):
        Schema({"$defs": {**parts, "d40": {}}, **asked}, timeout_s=0.1).first_error(value)
    assert time.thread_time() - started < 20  # without a limit: years


def test_concurrent_checks_have_separate_limits():
    schema, fits = Schema({"items": ENDLESS}, timeout_s=0.5), []

    def stall():
        with pytest.raises(TimeoutError):
            schema.first_error([STALLING])

    other = threading.Thread(target=stall)
    other.start()
    while other.is_alive():
        fits.append(schema.first_error(["a"]) is None)
    assert all(fits) and schema.first_error(["a"]) is None


def test_unlimitable_keyword_combination_is_rejected():
    with pytest.raises(SchemaError, match="Write additionalProperties"):
        Schema({"allOf": [{"patternProperties": {"a": {}}}], "unevaluatedProperties": False}, timeout_s=1)


@pytest.mark.parametrize(
    ("items", "is_valid"),
    [
        ([1, True, "1", [1], {"a": 1}, None], True),
        ([{"a": 1, "b": [2.0]}, {"b": [2], "a": 1.0}], False),
        ([1, "a", 1.0], False),
        ([0, False, [0], [False]], True),
    ],
)
def test_unique_items_are_those_of_jsonschema(items, is_valid):
    schema = {"uniqueItems": True}
    assert (Schema(schema, timeout_s=5).first_error(items) is None) == is_valid
    assert Draft202012Validator(schema).is_valid(items) == is_valid


def test_many_unsortable_items_take_linear_time():
    def check(count):
        assert Schema({"uniqueItems": True}, timeout_s=60).first_error([{"a": n} for n in range(count)]) is None

    assert costs_less_than(24, check, 40_000, 5_000), "8 times if linear, 64 if each pair is compared"


@pytest.mark.parametrize(
    "pattern",
    [
        "(?:" * 40 + "a" + "){1,9}" * 40,
        "(" * 30 + "a" + ")+" * 30,
        "(?x)" + "(?:" * 40 + "a" + ")#\n+" * 40,
        "(?:a|){1000000}b",
        "(?:a?){1000000,}",
        "a{1000000000}",
        "(?:(?:(?:a?){1000}){1000}){1000}",
        "|".join(["(?:a?){9999}"] * 11),
        "|".join(map(str, range(9999))),
        "(?R)",
        "(" * 5000 + "a" + ")" * 5000,
    ],
)
def test_pattern_that_takes_much_memory_is_refused(pattern):
    with pytest.raises(SchemaError, match="has too many repetitions"):
        Schema({"pattern": pattern}, timeout_s=1).first_error("aaa")


@pytest.mark.parametrize(
    ("pattern", "fits", "differs"),
    [
        (IP_6, "fe80:0:0:0:1:2:3:4", "1:2"),
        (URL, "https://a.example/b", "ftp://a.example/b"),
        (r"^.{1,10000}$", "a" * 10_000, "a" * 10_001),
        (r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==)?$", "YWFhYQ==", "YWF"),
        (r"^\p{Lu}\p{L}+$", "\u00c4rger", "1rger"),
        (r"^(?<year>\d{4})-\d{2}$", "2020-05", "2020-5"),
    ],
)
def test_usual_patterns_are_matched(pattern, fits, differs):
    schema = Schema({"pattern": pattern}, timeout_s=5)
    assert schema.first_error(fits) is None and schema.first_error(differs) is not None


def test_garbage_collection_does_not_count_as_time_of_a_check(monkeypatch):
    schema = Schema({"properties": {"x": {"type": "integer"}}}, timeout_s=0.25)
    one_pause = iter([0.0, 0.4, *(0.4 + n / 1e6 for n in range(1000))])
    monkeypatch.setattr("forge_agents.schemas.time", SimpleNamespace(thread_time=lambda: next(one_pause)))
    assert schema.first_error({"x": 5}) is None
    always_slow = iter(n * 0.4 for n in range(1000))
    monkeypatch.setattr("forge_agents.schemas.time", SimpleNamespace(thread_time=lambda: next(always_slow)))
    with pytest.raises(TimeoutError):
        schema.first_error({"x": 5})
