import json
import time

import numpy as np
import pytest

from forge_agents import EnvReward, Rule, check_verifier
from forge_agents.types import Trajectory, Turn
from forge_verifiers import (
    Exact,
    Format,
    JsonSchema,
    Language,
    Length,
    MathEqual,
    Numeric,
    Regex,
    Repetition,
    ScoreError,
    SelfConsistency,
)


def said(*actions, answer=None, agent="a", seed=0, reward=0.0):
    turns = tuple(
        Turn(agent=agent, index=k, observation="", action=text, reward=reward if k == 0 else 0.0)
        for k, text in enumerate(actions)
    )
    info = {} if answer is None else {"answer": answer}
    return Trajectory(agent=agent, policy="p", turns=turns, env_id="t", seed=seed, info=info)


SCHEMA = {"type": "object", "required": ["move"], "properties": {"move": {"type": "integer"}}}
CASES = {
    "exact": (Exact(), said("I think so.\nAnswer: Paris.", answer="paris"), said("Answer: Rome", answer="paris")),
    "numeric": (Numeric(), said("so $1,234.50 in all", answer=1234.5), said("1,234.5 or rather 7", answer=1234.5)),
    "regex": (Regex(pattern=r"\bfold|call\b"), said("I call."), said("I raise.")),
    "format": (Format(), said("<think>a</think>\n<answer>b</answer>"), said("well <think>a</think><answer>b</answer>")),
    "maths": (MathEqual(), said(r"\boxed{\frac{1}{2}}", answer="0.5"), said(r"\boxed{\frac{2}{1}}", answer="0.5")),
    "json": (JsonSchema(schema=SCHEMA), said('```json\n{"move": 3}\n```'), said('{"move": "3"}')),
    "length": (Length(low=2, high=5, unit="words"), said("one two three"), said("one")),
    "language": (Language(language="en"), said("good day"), said("добрый day")),
    "repetition": (Repetition(), said("the quick brown fox jumps over the lazy dog"), said("no no " * 20)),
    "env": (EnvReward(-1, 3), said("x", reward=3), said("x", reward=0)),
    "rule": (Rule(lambda t: "please" in t.turns[-1].action, name="polite"), said("please"), said("now")),
    "consistency": (SelfConsistency(), [said("Answer: 4"), said("<answer>4</answer>")], said("5")),
}


@pytest.mark.parametrize("case", CASES)
def test_every_verifier_scores_its_gold_answer_one_and_a_wrong_one_lower(case):
    assert check_verifier(*CASES[case]).ok


@pytest.mark.parametrize("verifier", [Exact(), Numeric(), MathEqual()])
def test_missing_gold_and_missing_turns_abstain(verifier):
    scores = verifier.score([said("4"), said(answer="4"), said("4", answer=["5", "4"])])
    assert np.isnan(scores).tolist() == [True, True, False] and scores[2] == 1


def test_a_pattern_that_backtracks_without_end_fails_the_text():
    start = time.perf_counter()
    assert Regex(pattern=r"(?:a|aa)+c|(a|aa)+d\1", timeout_s=0.1).score([said("a" * 60 + "b")]).tolist() == [0]
    assert time.perf_counter() - start < 30  # without a limit: hours


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"pattern": r"^(a|aa)+$"}, "a" * 60 + "b"),
        ({"patternProperties": {r"^(a|aa)+$": {}}}, {"a" * 60 + "b": 1}),
        ({"patternProperties": {r"^(a|aa)+$": {}}, "additionalProperties": False}, {"a" * 60 + "b": 1}),
    ],
    ids=["value", "name", "other-name"],
)
def test_a_schemas_pattern_that_backtracks_without_end_fails_the_text(schema, value):
    start = time.perf_counter()
    assert JsonSchema(schema=schema, timeout_s=0.1).score([said(json.dumps(value))]).tolist() == [0]
    assert time.perf_counter() - start < 30  # without a limit: hours


@pytest.mark.parametrize(
    "text",
    [
        '```json\r\n{"move": 3}\r\n```\r\n',
        '{\r\n  "move": 3\r\n}\r\n',
        '~~~json\n{"move": 3}\n~~~',
        '```JSON\n{"move": 3}```',
        '1. The move:\n\n   ```json\n   {"move": 3}\n   ```\n2. Done.',
        '```json\n{"move": 3}\n```\nRead it with\n```python\njson.loads(text)\n```',
        '<answer>```json\n{"move": 3}\n```</answer>',
    ],
)
def test_json_is_found_in_the_markdown_of_an_answer(text):
    wrong = text.replace("3}", '"3"}').replace("3\r", '"3"\r')
    assert JsonSchema(schema=SCHEMA).score([said(text), said(wrong)]).tolist() == [1, 0]


def test_nested_json_without_end_is_wrong():
    assert JsonSchema(schema=SCHEMA).score([said("[" * 19_000), said('{"move": NaN}')]).tolist() == [0, 0]


def test_consistency_compares_within_groups_only():
    trajectories = [said("1"), said("1"), said("2"), said("2", seed=1), said("2", agent="b"), said("", agent="b")]
    scores = SelfConsistency().score(trajectories).tolist()
    assert scores[:3] == [1, 1, 0] and scores[3] != scores[3] and scores[4:] == [1, 0]
    graded = SelfConsistency(graded=True).score(trajectories[:3])
    assert graded.tolist() == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert SelfConsistency().score([said("1"), said("2")]).tolist() == [0.5, 0.5]


def test_a_reward_out_of_range_says_what_to_set():
    with pytest.raises(ValueError, match="Set low and high"):
        EnvReward().score([said("x", reward=2)])
    assert EnvReward(clip=True).score([said("x", reward=2)]).tolist() == [1]


@pytest.mark.parametrize("grade", [2.0, -0.1, "yes", [1]])
def test_a_rule_that_returns_nonsense_is_named(grade):
    with pytest.raises(ScoreError, match="odd"):
        Rule(lambda t: grade, name="odd").score([said("x")])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Regex(pattern="("),
        lambda: Length(low=3, high=2),
        lambda: Language(language="xx"),
        lambda: Repetition(size=0),
        lambda: EnvReward(1, 1),
        lambda: Format(tags=()),
        lambda: JsonSchema(schema={"type": "nonsense"}),
        lambda: JsonSchema(schema={"patternProperties": {"a": {"unevaluatedProperties": False}}}),
        lambda: MathEqual(tolerance=0),
        lambda: MathEqual(timeout_s=0),
    ],
)
def test_wrong_options_are_refused(make):
    with pytest.raises(ValueError, match=r"=|pattern|schema|finite"):
        make()


def test_empty_sections_are_no_format_except_reasoning_that_closes_at_once():
    texts = ["<think></think><answer>b</answer>", "<think>a</think><answer> </answer>"]
    assert Format().score([said(text) for text in texts]).tolist() == [1, 0]


@pytest.mark.parametrize(
    "text",
    [
        "日本の首都は東京です。多くの観光客が毎年訪れ、寺院や神社を見ることができます。",
        "首先，我们设小明有九个苹果。根据题意，两人一共有十五个，因此小红有六个。",
        "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย มีประชากรมากกว่าแปดล้านคน",
    ],
)
def test_repetitions_in_languages_without_spaces_are_found(text):
    assert Repetition().score([said(text), said(f"{text} {text}\n{text}")]).tolist() == [1, pytest.approx(0.3, abs=0.1)]


URL = "https://example.org/a/path/of/one/page/in/the/documentation.html"


def test_repetitions_without_spaces_are_found():
    repeated = [
        *("ha" * 2000 + " " + "ha" * 2000, "a" * 4000 + "\n" + "a" * 4000, ("no" * 1000 + " ") * 4),
        *(" ".join("ha" * k for k in range(1, 90)), "\U0001f642" * 3000 + " \U0001f642", URL * 9),
    ]
    assert max(Repetition().score([said(text) for text in repeated]).tolist()) < 0.15
    assert Repetition().score([said(f"See {URL} for the rest."), said(URL)]).tolist() == [1, 1]


@pytest.mark.parametrize(
    "salt", ["\u200b", "\ufe0f", "\u034f", "\xad", "\U000e0041", "\u3164", "\u2060", "\x01", "\u2800"]
)
def test_characters_that_show_nothing_hide_no_repetition_and_fill_no_length(salt):
    text = "buy now, this is very cheap " * 60
    salted = "".join(letter + salt * (number % 7 == 0 or number % 11 == 0) for number, letter in enumerate(text))
    mixed = "".join(letter.upper() if number % 7 == 0 else letter for number, letter in enumerate(text))
    plain, *others = Repetition().score([said(each) for each in (text, salted, mixed)]).tolist()
    assert plain < 0.1 and others == [plain, plain]
    filled = [said(salt * 300), said(" ".join([salt] * 300))]
    assert Length(low=10, high=1000, unit="words").score(filled).tolist() == [0, 0]
    assert Length(low=200, high=1000).score(filled[:1]).tolist() == [0]
    assert Length(high=200).score(filled[:1]).tolist() == [0], "they count towards the maximum"
    blanks = [said("42" + white * 600) for white in (" ", "\n", "\u00a0")]
    assert Length(low=500, high=2000).score(blanks).tolist() == [0, 0, 0]


def test_long_runs_and_characters_of_chinese_count_as_words():
    texts = ["hello_world," * 2000, "首都是北京。", "one two three"]
    assert [Length(high=0, slack=500, unit="words").score([said(text)])[0] for text in texts] == [
        0, pytest.approx(1 - 6 / 500), pytest.approx(1 - 3 / 500)
    ]  # fmt: skip


def test_answer_without_letters_and_digits_is_in_no_language():
    scores = Language(language="en").score([said(text) for text in ("", "?", "\U0001f600", "42", "\u0664", "Yes, 42")])
    np.testing.assert_array_equal(scores, [0.0, 0.0, 0.0, np.nan, np.nan, 1.0])


def test_circled_letters_have_a_script_and_invisible_ones_are_no_answer():
    circled = "".join(chr(0x24D0 + ord(letter) - ord("a")) for letter in "helloworld")
    assert Language(language="ru").score([said(f"{circled} \u0430")]).tolist() == [pytest.approx(1 / 11)]
    empty = [f"<answer>{text}</answer>" for text in ("\u200b", "\u3164", "\u2800", "\u0301")]
    assert Format(tags=("answer",)).score([said(text) for text in empty]).tolist() == [0, 0, 0, 0]
    assert JsonSchema(schema={}).score([said("1e999"), said("1e99")]).tolist() == [0, 1]
