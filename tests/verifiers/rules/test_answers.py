import logging
import math
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from costs import costs_less_than
from hypothesis import given
from hypothesis import strategies as st

from forge_agents import Ensemble, check_verifier
from forge_verifiers import Exact, MathEqual, Numeric, SelfConsistency
from forge_verifiers.rules.answers import MAX_CHARS, final_answer, gold_answers, parse_answer
from forge_verifiers.rules.languages import normalized
from forge_verifiers.rules.maths import worker
from forge_verifiers.rules.maths.equal import equal_answers

from .answer_styles import STATED, UNDECIDED, WRITINGS, cases, read_table  # noqa: TID252 (tests are no installed package)
from .helpers import limit_long_formulas, said  # noqa: TID252
from .ordinary_answers import TABLES  # noqa: TID252

GUIDE = Path(__file__).parents[3] / "docs" / "verifiers.md"


RULES = (Exact(), Numeric(), MathEqual())


def scores(text, answer):
    return [float(rule.score([said(text, answer)])[0]) for rule in RULES]


def rows_of_the_guide():
    """The table in the guide: a text, ``\\n`` for a new line, and what is read."""
    table = GUIDE.read_text(encoding="utf-8").partition("| text | read |\n|---|---|\n")[2].partition("\n\n")[0]
    return [
        tuple(cell.strip().strip("`").replace(r"\n", "\n") for cell in line.strip("| ").split(" | "))
        for line in table.splitlines()
    ]


FURTHER = [("42 is the answer.", "42"), ("The answer is 41. Or maybe 42.", "41 or 42")]


@pytest.mark.parametrize(("text", "read"), [*rows_of_the_guide(), *FURTHER])
def test_guide_table_of_extracted_answers(text, read):
    assert final_answer(text) == ("" if read == "(nothing)" else read)


def test_the_table_of_the_guide_is_there():
    assert len(rows_of_the_guide()) >= 20


@pytest.mark.parametrize(
    "text",
    [
        *("The answer is 42.", "**Answer:** 42", "#### 42", "The answer is **42**.", "I think it's 42", "It is 42"),
        *("**42**", r"\boxed{42}", r"\boxed 42", "<answer>42</answer>", "42", "42.", "6 times 7 is 42."),
        "The answer is $42$.",
        "### Answer\n\n42",
    ],
)
def test_every_rule_that_reads_answers_reads_the_same(text):
    assert scores(text, "42") == [1, 1, 1] and scores(text, "41") == [0, 0, 0]
    assert SelfConsistency().score([said(text), said("42"), said("7")]).tolist() == [1, 1, 0]


@pytest.mark.parametrize(("text", "gold", "is_right"), WRITINGS)
def test_notations_of_an_answer_differ_from_other_answers(text, gold, is_right):
    numeric, maths = scores(text, gold)[1:]
    assert maths == is_right
    assert numeric == is_right or np.isnan(numeric)  # the gold answer is no number


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        *(("Yes\nIt is, because 7 has no divisors.", "yes"), ("No\n\n15 = 3 * 5", "no")),
        *(("Answer: no (91 = 7*13)", "no"), ("yes because 91 = 7 * 13", "yes"), ("It is not prime, so no.", "no")),
        *(("答えは「東京」です。", "東京"), ("『東京』", "東京"), ('The answer is "Paris!"', "Paris")),
    ],
)
def test_words_on_a_line_of_their_own_and_in_quotation_marks_are_read(text, gold):
    assert Exact().score([said(text, gold), said(text, "Rome")]).tolist() == [1, 0]


def test_difference_of_two_prices_is_no_range():
    assert MathEqual().score([said("The change is $20 - $15.", gold) for gold in ("5", "$5", "$15-$20")]).tolist() == [
        1, 1, 0,
    ]  # fmt: skip


@pytest.mark.parametrize("topic", TABLES)
def test_ordinary_answers_are_accepted_and_near_ones_refused(topic):
    rows = read_table(TABLES[topic])
    trajectories = [said(text, gold) for text, gold, _ in rows]
    exact, numeric, maths = (rule.score(trajectories) for rule in RULES)
    assert rows == [row for row, score in zip(rows, maths, strict=True) if (score == 1) == row[2]]
    assert rows == [row for row, score in zip(rows, numeric, strict=True) if np.isnan(score) or score == row[2]]
    assert not [row for row, score in zip(rows, exact, strict=True) if score == 1 and not row[2]]


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        ("42\n\nExplanation: multiply 6 by 7.", "42", "7"),
        ('{"answer": "42"}', "42", "41"),
        ("### Answer\r\n\r\n42\r\n\r\nExplanation: 6 times 7.\r\n", "42", "7"),
        (r"\boxed{\text{B}}", "B", "A"),
        ("The answer is 42? No, 41.", "41", "42"),
        ("The answer is 12. Oh wait. 13.", "13", "12"),
        ("The answer is 12. Hmm, that's wrong. It should be 13.", "13", "12"),
        ("The answer is 12, no wait, 13", "13", "12"),
        ("The answer is Paris because it is big.", "Paris", "big"),
        ("Answer: Chapter 7", "Chapter 7", "Chapter 8"),
        ("First answer: 3\nSecond answer: 5", "5", "3"),
        ("The answer is 42.\n\n(Checked: 6*7=42)", "42", "6"),
        ("The answer is B) Rome", "B", "A"),
        ("The answer is Rome. Wait, let me check. Yes.", "Rome", "Paris"),
        ("The answer is Rome. Actually, I am sure.", "Rome", "Paris"),
        ("The answer is twice 5.", "twice 5", "5"),
        ("The answer is half of 10", "half of 10", "10"),
        ("The answer is more than 5.", "more than 5", "5"),
        ("It takes 3 hours 20 minutes", "it takes 3 hours 20 minutes", "3"),
        ("I'm torn between 41 and 42", "I'm torn between 41 and 42", "42"),
        ("\u041e\u0442\u0432\u0435\u0442: 42", "42", "41"),
    ],
)
def test_texts_that_are_easily_misread(text, right, wrong):
    for rule in RULES:
        scored = [rule.score([said(text, gold)])[0] for gold in (right, wrong)]
        assert not np.nan_to_num(scored[1]) and (scored[0] == 1 or (np.isnan(scored[0]) and isinstance(rule, Numeric)))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("\u00bd", 0.5), ("2\u00bd", 2.5), ("minus 42", -42), ("Answer: forty-two (42)", 42), ("It's 42\u00b0.", 42)),
        *(("A total of 42 apples.", 42), ("The answer is 5! = 120.", 120), ("7 = 3 + 4", 7), ("P(A) = 1/4", 0.25)),
    ],
)
def test_numbers_in_unusual_notations_are_read(text, number):
    assert Numeric().score([said(text, number), said(text, number + 1), said(text, -number)]).tolist() == [1, 0, 0]


def test_all_styles_of_all_kinds_are_read_and_the_results_have_the_numbers():
    pytest.importorskip("reasoning_gym")
    rows = list(dict.fromkeys(cases()))
    equal = MathEqual().score([said(case.text, case.gold) for case in rows]) == 1
    assert not [case for case, is_equal in zip(rows, equal, strict=True) if is_equal != case.is_right]
    right, wrong = (sum(case.is_right is kind for case in rows) for kind in (True, False))
    page = (GUIDE.parent / "results" / "verifiers.md").read_text(encoding="utf-8")
    assert right > 2_000 and f"{right:,} of {right:,} right answers and 0 of {wrong:,} wrong" in " ".join(page.split())


def test_solutions_that_end_without_a_mark_are_read():
    """Solutions of GSM8K with other numbers, without their "#### 42". math-verify reads 395 of 400, too."""
    pytest.importorskip("reasoning_gym")
    from reasoning_gym import create_dataset

    from forge_envs.adapters.contained import Randomness

    with Randomness(0).contained():
        entries = list(create_dataset("gsm_symbolic", seed=3, size=400))
    ends = [entry["metadata"]["answer_cot"].partition("####")[0].strip().rpartition("\n")[2] for entry in entries]
    for rule in (MathEqual(), Numeric()):
        assert sum(rule.score([said(text, e["answer"])])[0] for text, e in zip(ends, entries, strict=True)) >= 394
        assert not any(rule.score([said(text, e["answer"] + "7")])[0] for text, e in zip(ends, entries, strict=True))


@pytest.mark.parametrize(
    "text",
    [
        *("The final answer is #### 300", "So the rope is 300 cm long. #### 300", "#### 300 #### 300", "x\n### 300"),
        *("3 m = 300 cm", "The answer is 3 m = 300 cm.", "3 m * 100 cm/m = 300 cm", "3*100=<<3*100=300>>300"),
        *("1 m is 100 cm, so it is 300 cm long.", "So it is 3*100=<<3*100=300>>300 cm."),
    ],
)
def test_calculations_with_units_are_read(text):
    assert scores(text, "#### 300")[1:] == [1, 1] and scores(text, "#### 100")[1:] == [0, 0]


@pytest.mark.parametrize("text", ["2x = 300", "3m = 300", "3m = 300s", "a + b = 300"])
def test_an_equation_in_letters_is_not_its_right_side(text):
    assert scores(text, "300")[1:] == [0, 0]


# Letters, digits and signs of the numbers that a gold answer may be, and of another one.
numbers = st.one_of(
    st.integers(-(10**9), 10**9).map(str),
    st.integers(1000, 10**9).map("{:,}".format),
    st.decimals(-1000, 1000, places=3, allow_nan=False).map(str),
    st.fractions(-50, 50, max_denominator=60).map(str),
)


@given(numbers, numbers, st.sampled_from(STATED))
def test_a_number_stated_in_any_style_is_right_and_another_one_is_not(gold, other, style):
    text = style.format(g=gold, gt=gold, w=other, wt=other)
    assert scores(text, gold) == [1, 1, 1]
    if not MathEqual().score([said(gold, other)])[0]:
        assert scores(text, other) == [0, 0, 0]


@given(numbers, numbers, st.sampled_from(UNDECIDED))
def test_a_text_that_decides_for_neither_or_denies_is_wrong(gold, other, style):
    if not MathEqual().score([said(gold, other)])[0] and not MathEqual().score([said(other, gold)])[0]:
        text = style.format(g=gold, gt=gold, w=other, wt=other)
        assert scores(text, gold) == [0, 0, 0]


@given(st.text(alphabet="0123456789 answeritobxd{}<>/\\.,:;*$#\n-=", max_size=200))
def test_no_text_makes_the_parser_raise(text):
    read = parse_answer(text)
    assert len(read.value) <= len(text) + 4 and read.source in {"marked", "statement", "fallback"}


@pytest.mark.parametrize(
    "unit",
    [
        *(r"\boxed{", "<answer>", "answer is ", "Answer: ", "nswer", "1 or ", "it is 1. ", "no, ", "so ", "(", "$1$ "),
        *("**a ", "= 1 ", "the answer is not 1 but ", r"\boxed{1} or ", "I doubt the answer is 1. ", "1 + "),
        *("\n- [", "- [ ] ", "~~a", "Mr. A. ", "Ann A. ", "the a ", "if ", "two ", "5 h 3 min ", "May 5 "),
        *("#### 1\n", "x" * 50 + " 1 ", "wait 1 ", "it is not 1 ", "42 is the answer ", "\\"),
    ],
)
def test_the_cost_of_hostile_texts_grows_with_their_length_only(unit):
    def parse(length):
        text = (unit * length)[:length]
        parse_answer.__wrapped__(text)
        parse_answer.__wrapped__(text + "}" * 1000)

    parse(MAX_CHARS // 4)  # the first call fills caches
    assert costs_less_than(10, parse, MAX_CHARS, MAX_CHARS // 4, slack_s=0.01), "4 times if linear, 16 if quadratic"


@pytest.mark.parametrize("space", ["~", "\\,", "~~~", "\\,~"])
def test_spaces_of_latex_take_little_time(space):
    start = time.process_time()
    parse_answer.__wrapped__("42 " + space * 20_000 + "x")
    assert time.process_time() - start < 2


@pytest.mark.parametrize("rule", [Exact(), Numeric(), SelfConsistency()])
@pytest.mark.parametrize("text", ["1" * 20_000 + "than ", "2020-" + "\\%" * 10_000, "2020-" + "$ " * 10_000 + "x"])
def test_hostile_answers_take_every_rule_little_time(rule, text):
    start = time.process_time()
    rule.score([said(text, "42")] * 2)
    assert time.process_time() - start < 3  # 0.1 s; with patterns of quadratic time over 10 s


def test_runs_of_combining_marks_and_gold_answers_are_cut():
    """Sorting the marks of one letter takes quadratic time."""
    marks = "a" + "\u0315" * 500 + "\u0327" * 500
    assert len(normalized(marks)) <= 31 and normalized("e\u0301") == "\u00e9"
    (gold,) = gold_answers(said("42", "b" + "a " * MAX_CHARS), "answer")
    assert len(gold) == MAX_CHARS - 1


@pytest.mark.parametrize("blank", ["\n", "\r\n", "*\n", "\n#", " \n_"])
def test_blank_lines_after_an_answer_take_little_time(blank):
    start = time.process_time()
    for text in ("The answer is 5", "<answer>", "5"):
        parse_answer.__wrapped__(text + blank * 40_000)
    assert time.process_time() - start < 5
    start = time.process_time()
    for number in range(20):
        parse_answer.__wrapped__(f"The answer is {number}" + " " * 3_000 + "x")
    assert time.process_time() - start < 1
    assert parse_answer(f"The sum is 5{blank * 9}Explanation: 2 and 3 make 6").value == "5"


def test_a_gold_answer_may_be_a_whole_solution():
    assert scores("72", "48/2 = 24 clips in May, 48 + 24 = 72 in all.\n#### 72") == [1, 1, 1]
    assert scores("3", r"It is 1 + 2, so $\boxed{3}$.") == [1, 1, 1]
    assert Exact().score(
        [said("Move disk 2 to peg 3", "Move disk 2 to peg 3"), said("3", "Move disk 2 to peg 3")]
    ).tolist() == [1, 0]


@pytest.mark.parametrize("missing", [None, math.nan, np.float64("nan"), "", " ", [""], [], [None, math.nan]])
def test_placeholders_of_missing_gold_answers_count_as_missing(missing):
    for text in ("5", "", "I do not know."):
        assert all(rule.grade(said(text, missing)) is None for rule in RULES)


@pytest.mark.parametrize("several", [["5", None], ("6", "5"), {"5"}, np.array(["6", "5"]), np.array([5])])
def test_gold_answers_may_be_several_of_any_kind(several):
    assert scores("5", several) == [1, 1, 1]


def test_self_consistency_merges_equal_notations():
    def votes(*texts):
        return SelfConsistency().score([said(text) for text in texts]).tolist()

    assert votes("So Janet makes $18 every day.", r"\boxed{18}", "18 dollars", "It is $18.00", "20") == [1, 1, 1, 1, 0]
    assert votes("1/2", "0.5", r"\frac{1}{2}", "0.4", "0.4") == [1, 1, 1, 0, 0]
    assert votes("5 km", "5000 m", "5 m") == [1, 1, 0]
    own = SelfConsistency(extract=lambda t: t.turns[-1].action)
    assert own.score([said("1/2"), said("0.5")]).tolist() == [0.5, 0.5]


def test_numbers_found_in_prose_do_not_vote_and_are_no_exact_answer():
    moves = [said("Move disk 1 to peg 3"), said("Move disk 2 to peg 3")]
    assert SelfConsistency().score(moves).tolist() == [0.5, 0.5]
    assert scores("Paris has 2 airports", "2") == [0, 1, 1]


def test_a_gold_answer_that_is_no_number_makes_numeric_abstain_and_is_reported(caplog, tmp_path):
    rule = Numeric()
    with caplog.at_level(logging.WARNING):
        assert np.isnan(rule.score([said("42", "Thursday"), said("42", "x + 1")])).all()
        assert rule.score([said("42", ["Thursday", "42"])]).tolist() == [1]
    assert rule.unread.abstained == 2 and len(caplog.records) == 1
    ensemble = Ensemble([rule, Exact()])
    ensemble.score([said("42", "Thursday")])
    assert "no score for 3 trajectories, such as one with the gold answer 'Thursday'" in ensemble.report().table()
    assert "no score for 3 trajectories" in ensemble.report().html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert str(pickle.loads(pickle.dumps(rule)).unread) == str(rule.unread)


def test_whole_numbers_are_equal_exactly_unless_the_tolerance_says_more():
    near = [said("999999", 1000000), said("12345678901234567", 12345678901234568), said("0.333333", "1/3")]
    assert Numeric().score(near).tolist() == [0, 0, 1]
    assert Numeric(tolerance=0.01).score([*near, said("101", 100), said("102", 100)]).tolist() == [1, 1, 1, 1, 0]


SUM = r"\sum_{k=1}^{10} k"


def test_calculations_differ_from_unreadable_gold_answers():
    rule = MathEqual()
    unread = r"\foo{x} \mapsto = 3"
    texts = [("The answer is 55.", SUM), ("It is 54.", SUM), ("54", unread), (unread, unread), ("4", ["4", unread])]
    got = rule.score([said(text, gold) for text, gold in texts])
    assert got[:2].tolist() == [1, 0] and np.isnan(got[2]) and got[3:].tolist() == [1, 1]
    assert rule.unread.abstained == 1 and "no mathematics" in str(rule.unread)


@pytest.mark.parametrize(
    "answer",
    [
        *("9^{9^{9}}", r"\binom{99999}{50000}^{9999}", "9999!^{9999}", r"\sum_{k=1}^{10^{9}} \sin(k^k)"),
        "(" * 400 + "x",
        *("__import__('os').system('touch stolen')", r"\int e^{\sin(\cos(\tan(x^{x^{x}})))} dx", r"\sqrt{" * 90),
    ],
)
def test_a_hostile_formula_is_wrong_and_others_are_still_compared(answer, monkeypatch):
    limit_long_formulas(monkeypatch)
    rule = MathEqual()
    verdicts = []
    texts = [r"The answer is $\frac{110}{2}$.", f"<answer>{answer}</answer>", r"\boxed{54+1}", "56"]
    thread = threading.Thread(target=lambda: verdicts.extend(rule.score([said(text, SUM) for text in texts]).tolist()))
    thread.start()  # math-verify alone works in the main thread only
    thread.join(timeout=120)
    assert verdicts == [1, 0, 1, 0] and rule.unread.abstained == 0
    assert not Path("stolen").exists()


def test_a_worker_that_exceeds_a_limit_is_killed_and_replaced(monkeypatch):
    workers = worker.Workers()
    try:
        assert workers.compare([("x+x", "2x")], tolerance=1e-6, timeout_s=100) == {("x+x", "2x"): True}
        (process,) = [each._process for each in workers._workers if each._process]
        limit_long_formulas(monkeypatch)
        hard = r"\sum_{k=1}^{100000} \sin(k^{k})"
        assert workers.compare([(hard, "2")], tolerance=1e-6, timeout_s=100) == {(hard, "2"): False}
        assert process.wait(60) != 0
        assert workers.compare([("y+y", "2y")], tolerance=1e-6, timeout_s=100) == {("y+y", "2y"): True}
    finally:
        workers.close()


def test_pairs_that_time_out_get_no_score():
    assert equal_answers([("x + x", "2 x"), ("3", "3")], timeout_s=1e-9) == {("3", "3"): True}
    rule = MathEqual(timeout_s=1e-9)
    assert np.isnan(rule.score([said(r"\boxed{w+w}", "2w")])).all() and "timeout_s=1e-09" in str(rule.unread)


def test_many_threads_compare_at_one_time():
    def compare(number):
        pair = (f"{number}q + q", f"{number + 1}q")
        return equal_answers([pair])[pair]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(compare, range(40)))


def test_check_verifier_shows_extracted_answers():
    report = check_verifier(Numeric(), said("so it is 42.", 42), said("3-5", 42))
    assert "read '42' as gold and '3-5' as wrong" in str(report)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Paris is the answer.", "Paris"),
        ("Rome is big. I think Paris is the correct answer.", "Paris"),
        ("**Paris** is the answer", "Paris"),
        ("The answer is Paris. That is the answer.", "Paris"),
        ("42 is the answer", "42"),
    ],
)
def test_words_before_is_the_answer_are_the_answer(text, value):
    assert parse_answer(text).value == value


@pytest.mark.parametrize("text", ["Paris or Rome is the answer", "Not Paris is the answer", "I doubt it is the answer"])
def test_undecided_words_before_is_the_answer_are_not_one_answer(text):
    assert parse_answer(text).value != "Paris"


@pytest.mark.parametrize("text", ["3? \\g, no42", "0?\t\\log,no42", "Is it 0?\t\\g,no42"])
def test_command_between_a_question_and_its_answer_breaks_no_verifier(text):
    rows = [said(text, answer="5"), said("5", answer="5"), said("5", answer="5")]
    assert SelfConsistency().score(rows).tolist() == [0, 1, 1]
    for verifier in (Exact(), Numeric()):
        assert verifier.assess(rows).scores.tolist() == [0, 1, 1]


def test_answer_that_cannot_be_extracted_loses_only_its_row(caplog):
    verifier = SelfConsistency(extract=lambda trajectory: str(int(trajectory.turns[0].action)))
    scores = verifier.score([said("x"), said("5"), said("5")])
    assert np.isnan(scores[0]) and scores[1:].tolist() == [1, 1]
    assert "'self_consistency' fails on 1 of 3 trajectories: ValueError" in caplog.text


@pytest.mark.parametrize("text", ["Yes, x = no.", "No, x = yes", "yes\nx = no", "Yes, on", "No, yes^1", "Yes, n o"])
def test_one_text_is_not_both_yes_and_no(text):
    scores = MathEqual().score([said(text, "yes"), said(text, "no")])
    assert sorted(scores.tolist()) == [0, 1]


@pytest.mark.parametrize("mark", [r"\boxed{42}", "<answer>42</answer>", "#### 42"])
@pytest.mark.parametrize(
    ("later", "value"),
    [
        *(("Common mistake: 41.", "42"), ("Wait times were 41 minutes.", "42"), ("Actually, 41 people came.", "42")),
        *(("Sorry for the long solution; it has 41 lines.", "42"), ("Edit: fixed a typo in step 41.", "42")),
        *(("Wait, no: 41", "41"), ("Correction: 41", "41"), ("Wait, that's wrong. It should be 41.", "41")),
    ],
)
def test_only_a_plain_correction_replaces_a_boxed_answer(mark, later, value):
    assert final_answer(f"{mark}\n\n{later}") == value


@pytest.mark.parametrize("end", ["\n\nI hope this helps!", "\n\nLet me know if you need more.", ". Hope that helps."])
@pytest.mark.parametrize("answer", ["Paris", "42", "The answer is 42"])
def test_a_closing_courtesy_is_no_part_of_the_answer(answer, end):
    assert final_answer(answer + end) == answer.removeprefix("The answer is ")
