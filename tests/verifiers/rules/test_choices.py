import time

import pytest

from forge_verifiers import Exact, MathEqual, SelfConsistency
from forge_verifiers.rules.choices import choice_letter, chosen_letter

from .helpers import by_gold, cells, said  # noqa: TID252 (tests are no installed package)

RIGHT = by_gold({
    "A": r"""
        The answer is (A). ¦ A) ¦ **A** ¦ option A ¦ \boxed{A} ¦ answer: a ¦ A. Paris ¦ (A) ¦ (A) Paris ¦ A ¦ a ¦ A.
        [A] ¦ The correct answer is A ¦ The correct option is (A). ¦ Answer: (A) ¦ Answer: A) Paris ¦ **Answer: A**
        **Answer:** (A) Paris ¦ Final answer: A ¦ Final Answer: **(A)** ¦ \boxed{\text{A}} ¦ \boxed{(A)}
        \boxed{\textbf{(A)}} ¦ $\boxed{A}$. ¦ I choose A. ¦ I would go with A. ¦ My answer is A.
        The best choice is A because it is blue. ¦ Option A is correct. ¦ (A) is correct. ¦ A is the correct answer.
        Choice A ¦ The answer is option (A). ¦ The answer is A: Paris ¦ The answer is A - Paris ¦ B... no, wait, A
        The answer is B. Wait, no, it's A. ¦ It's A. ¦ Therefore, (A) is the right choice. ¦ <answer>A</answer>
        <answer>(A)</answer> ¦ <answer>A. Paris</answer> ¦ Not B. The answer is A. ¦ B is wrong, so the answer is A.
        A, not B ¦ (B) is wrong; (A) is right. ¦ The answer is (A), not (B). ¦ The answer is not (B) but (A).
        Option B is incorrect. Option A is correct. ¦ ANSWER: A ¦ answer is a ¦ So the answer is A
        The answer is A.⏎⏎Explanation: B is wrong because it is red. ¦ A) Paris is the capital.
        The answer must be A. ¦ Answer - A ¦ Answer A ¦ (a) ¦ The answer is **A**. ¦ The answer is **A. Paris**.
        The answer is `A`. ¦ I pick option A! ¦ The correct answer is:⏎⏎A ¦ The correct answer is:⏎⏎(A) Paris
        The correct answer is:⏎⏎**A) Paris** ¦ Let's think. (B) says x. (C) says y. The answer is (A).
        A is true, and so the answer is A. ¦ Choose (A) ¦ Correct: A ¦ Thus A ¦ Selected option: A
        Correct option: (A) ¦ {A} ¦ The answer is $A$. ¦ The answer is (A) — Paris ¦ 答案是A。 ¦ 答案：A
        正解はAです。 ¦ 정답은 A입니다. ¦ उत्तर: A ¦ الإجابة: أ ¦ La respuesta es A. ¦ Jawaban: A ¦ 答案是Ａ ¦ Ⓐ
    """,
    "(A)": r"""The answer is (A) Paris. ¦ A ¦ (A)""",
    "A.": r"""The answer is A""",
    "A. Paris": r"""A. Paris""",
    "E": r"""
        The answer is E. ¦ (E) None of the above ¦ E. None of the above ¦ The correct answer is E. All of the above
    """,
    "J": r"""The answer is (J).""",
    "B": r"""
        正确答案是 (B) ¦ 答えは(B)です ¦ सही उत्तर B है। ¦ الإجابة هي B. ¦ Ответ: B ¦ La respuesta correcta es la B.
        Die richtige Antwort lautet B. ¦ La risposta è B ¦ Jibu: B ¦ উত্তর: ব ¦ （B） ¦ I'd say (B). ¦ B! ¦ Answer:⏎B
        Answer:⏎⏎**(B)** Rome ¦ The answer is B) Rome. ¦ First I thought A. But it is B.
        The answer is A. Wait, that's wrong. The answer is B. ¦ {"answer": "B"} ¦ answer=B ¦ <answer>⏎(B)⏎</answer>
        The correct answer is (B) because A is a vowel. ¦ Answer: B. A is too small.
        The answer is B.⏎⏎A) too small⏎C) too big ¦ So, the answer is $\boxed{\text{B}}$ ¦ #### B
        The answer is not A. It is B. ¦ It can't be A or C, so it's B. ¦ Among A, B, C and D, B is correct. ¦ "B"
        'B' ¦ B) ¦ Paris (B) ¦ The capital is Paris (B). ¦ I'd rule out A and C, leaving B.
        Eliminating A, C and D leaves B ¦ Between A and B, B is better. ¦ I suppose the answer is B.
        La respuesta es la opción B. ¦ La bonne réponse est la lettre B. ¦ Die richtige Antwort ist Buchstabe B.
        La risposta corretta è B ¦ La risposta corretta è la lettera B. ¦ A resposta correta é a letra B.
        A opção correta é B. ¦ Правильный вариант: B ¦ 選択肢Bが正しい ¦ 选项B正确 ¦ Doğru cevap B'dir.
        Jibu sahihi ni B ¦ ans: B ¦ The answer to the question is (B) Rome. ¦ The answer to question 3 is B.
        Statement B is correct. ¦ The answer is B rather than A. ¦ B instead of A ¦ \boxed{{\bf B}}
        \boxed{\bold{B}} ¦ ✅ B
        → B ¦ Response: B ¦ Verdict: B ¦ Only (B) works. ¦ Just B. ¦ 正确的是B ¦ Правильным ответом является B.
        Richtig ist B.
        A alternativa correta é a B. ¦ Gabarito: B ¦ A resposta certa é B. ¦ Jawaban yang benar adalah B. ¦ Chọn B
        Đáp án đúng là B. ¦ คำตอบที่ถูกต้องคือ B ¦ ข้อ B ถูกต้อง ¦ Riktig svar er B ¦ התשובה הנכונה היא B.
        پاسخ صحیح گزینه B است
        B, since the others fail. ¦ B. The claim is popular, but it is false. ¦ B, because it is wrong to steal.
        The answer is B, since the statement in the passage, which many believe, is false.
        The answer is B, as the rumor is widespread but false. ¦ The best answer is B because this is not true of fungi.
        The answer is B because the claim, taken literally, is wrong. ¦ B is right, but it is wrong to say A.
        B is right: the other view, that light is slow, is false. ¦ A is tempting, but it is wrong. B is right.
        The answer is B; it is not the answer most people expect.
        B. The other options fail. ¦ B is equivalent to the definition, so it is right. ¦ B is right, but it is not A.
    """,
    "C": r"""
        因此选C ¦ 정답: C ¦ الإجابة الصحيحة هي (ج) ¦ Правильный ответ — C. ¦ La bonne réponse est C.
        A resposta correta é C. ¦ Cevap: C ¦ After analysis, the correct choice must be C since the others fail.
        The most likely answer is C. ¦ I think the answer is (C) since (A) and (B) are wrong.
        Both A and B are wrong. So the answer is C. ¦ A and B are wrong, so C.
        (A) fails. (B) fails. (C) holds. Answer: C ¦ \boxed{\mathrm{C}} ¦ \boxed C
        只有C是对的 ¦ Conclusion: (C). Eliminated: (A), (B), (D).
        Of the options A, B, C, D, the answer is C. ¦ Choice (C) is the best answer ¦ Hence, option (c) is correct.
        The answer is c. ¦ option c ¦ c ¦ c) ¦ Answer: (c) water ¦ {'answer': 'C'} ¦ answer → C ¦ => C
    """,
    "D": r"""
        Die Antwort ist D. ¦ Đáp án: D ¦ I'm going with D. ¦ Final: D ¦ Option D. ¦ D, because the rest are wrong.
        \boxed{\langle H\rangle \ll \Delta E}⏎⏎**Answer: D** ¦ I considered (A), but it is incorrect. Final answer: D.
        Answer: Let's think step by step. A ring has 3 units. The answer is (D). ¦ Antwort: Antwort: D
        It must be (D). ¦ Looks like D ¦ \boxed{\mathbf{(D)}} ¦ All of the above (D)
    """,
})  # fmt: skip
WRONG = by_gold({
    "A": r"""
        The answer is (A) or (B). ¦ (A) is wrong ¦ (A) is wrong. ¦ not A ¦ Not (A) ¦ either A or B ¦ Either (A) or (B)
        A, B, C, D ¦ A B C D ¦ (A) (B) (C) (D) ¦ The answer is A, B, C or D. ¦ A or B ¦ A and B ¦ A... no, wait, B
        A. No wait, B. ¦ The answer is A. Actually, B. ¦ The answer is not A. ¦ I don't think it's A. ¦ It isn't A
        A is incorrect ¦ Option A is incorrect. ¦ A is not the answer. ¦ A is not correct. ¦ \boxed{A} \boxed{B}
        \boxed{B} \boxed{A} ¦ \boxed{A, B} ¦ \boxed{A} or \boxed{B} ¦ \boxed{A \text{ or } B}
        <answer>A</answer><answer>B</answer> ¦ <answer>B</answer> <answer>A</answer> ¦ A/B ¦ A or maybe B
        Maybe A, maybe B ¦ The answer could be A or B. ¦ A) Paris⏎B) Rome⏎C) Bern
        (A) Paris (B) Rome (C) Bern (D) Oslo ¦ The answer is A. The answer is B. ¦ Answer: A⏎Answer: B⏎Answer: C
        A, but B is also possible ¦ A dog is here ¦ A man walks ¦ I am sure ¦ B ¦ AB ¦ (AB) ¦ Neither A nor B
        All of them: A, B, C ¦ A & B ¦ A|B ¦ The answer is anything but A ¦ (A) is false ¦ Rule out A
        A can be excluded ¦ The answer is definitely not (A). ¦ The answer is A? No. ¦ A is not right ¦ Answer: A / B
        (A), (B) ¦ (A)(B) ¦ A;B ¦ A⏎B ¦ A⏎B⏎C⏎D ¦ It is A. It is B. ¦ The answer is (A). Also (B).
        The answer is A, if not B. ¦ I doubt it's A ¦ Everything except A ¦ The answer is (A) and (C)
        The answer is A, and possibly B. ¦ A isn't correct ¦ wrong: A ¦ 答案是A或B ¦ 答案不是A ¦ 答えはAではありません
        答えはAまたはBです ¦ 정답은 A가 아닙니다 ¦ 정답은 A 또는 B입니다 ¦ उत्तर A नहीं है ¦ الإجابة ليست A
        الإجابة هي A أو B ¦ Ответ не A ¦ La respuesta no es A ¦ La respuesta es A o B ¦ La réponse n'est pas A
        La réponse est A ou B ¦ Die Antwort ist nicht A ¦ Die Antwort ist A oder B ¦ A resposta não é A
        The answer is (A)/(B) ¦ A. B. C. D. ¦ A) B) C) D) ¦ Answer: ABCD ¦ One of A and B ¦ Possible answers: A, B
        Answer: not A ¦ Definitely not A. ¦ Is it A? ¦ A or B; I choose neither ¦ The answer isn't (A)
        The answer is unlikely to be A ¦ None of A, B, C ¦ I would never choose A ¦ (A) or maybe (B) ¦ A (or B)
        A, alternatively B ¦ The answer is A; or B ¦ if you think A then A else B ¦ A bird ¦ An A is a vowel
        The answer could be (A), but it's (B). ¦ A would be a mistake ¦ Nobody would choose A
        Suppose the answer is A. ¦ Let's assume the answer is A. ¦ The answer is A. Just kidding, B. ¦ 选项A或选项B
    """,
    "B": r"""
        \boxed{A}\boxed{B} ¦ The answer is A or B, I guess A ¦ Neither A nor B ¦ Both A and B ¦ - A⏎- B
        उत्तर A या B है ¦ Ответ: A или B ¦ <answer>A, B</answer> ¦ <answer>A</answer> or <answer>B</answer>
        The answer is \boxed{A}. The answer is \boxed{B}. ¦ It could be A. It could be B. ¦ not (A), not (B)
        A? Maybe. B? Maybe. ¦ I can't decide between A and B ¦ Option A or Option B ¦ Option A. Option B.
        Choose A. Choose B. ¦ Answer: A⏎⏎Answer: B ¦ A) yes⏎B) no ¦ A (or B) ¦ A; alternatively B
        B seems right, but it is wrong. ¦ B, I think, is wrong. ¦ B, which looked right, is wrong.
        The answer is B, but that is wrong. ¦ B is popular, but false.
        B is tempting, but incorrect. ¦ B is a distractor. ¦ B fails. ¦ B+ ¦ B♭
        1. A⏎2. B ¦ 不选B ¦ B不正确 ¦ B isnt right ¦ Ответ B неверен.
        Paris (A), Rome (B) ¦ Not Paris (B) ¦ La respuesta no es la opción B
    """,
    "C": r"""
        A) Paris⏎B) Rome⏎C) Bern ¦ \boxed{A}, \boxed{B}, \boxed{C}
        The answer is A.⏎The answer is B.⏎The answer is C.
    """,
    "D": r"""
        (A) Paris (B) Rome (C) Bern (D) Oslo ¦ A⏎B⏎C⏎D ¦ A. B. C. D. ¦ Answer: A B C D ¦ The answer is A, B, C, or D
        A is wrong. B is wrong. C is wrong. D is wrong. ¦ Eliminated: (D) ¦ Conclusion: (B). Eliminated: (A), (C), (D).
    """,
    "(A)": r"""The answer is not (A)""",
    "I": r"""I do not know ¦ I think it is B ¦ I, for one, choose B ¦ So do I think""",
})  # fmt: skip
OPTION_I = cells(r"""
    I ¦ I. ¦ (I) ¦ **I** ¦ I) Paris ¦ Option I ¦ The answer is I. ¦ Answer: I ¦ \boxed{I} ¦ I is correct
    I think the answer is (I) ¦ The answer is I because it is blue.
""")
"""MMLU-Pro has options up to J."""


@pytest.mark.parametrize(("text", "gold"), RIGHT)
def test_a_chosen_option_scores_one(text, gold):
    assert [rule.score([said(text, gold)])[0] for rule in (Exact(), MathEqual())] == [1, 1]


@pytest.mark.parametrize(("text", "gold"), WRONG)
def test_a_denied_or_undecided_option_scores_zero(text, gold):
    assert [rule.score([said(text, gold)])[0] for rule in (Exact(), MathEqual())] == [0, 0]


@pytest.mark.parametrize("later", ["Option B describes meiosis.", "Option B (London) is in England."])
@pytest.mark.parametrize(
    "chosen", ["The answer is C.\n\n", r"\boxed{C} ", "Answer: C\n", "The best answer is C. ", "I choose C. "]
)
def test_a_later_description_of_another_option_changes_no_choice(chosen, later):
    assert Exact().score([said(chosen + later, "C"), said(chosen + later, "B")]).tolist() == [1, 0]


@pytest.mark.parametrize("text", OPTION_I)
def test_option_i_is_no_pronoun(text):
    assert Exact().score([said(text, "I"), said(text, "B")]).tolist() == [1, 0]


@pytest.mark.parametrize("gold", ["A", "(A)", "A.", "A)", r"\text{(A)}", "**A**", "Ａ"])
def test_a_gold_option_may_be_written_in_several_ways(gold):
    assert choice_letter(gold) == "A"
    assert Exact().score([said("The answer is (A).", gold), said("The answer is (B).", gold)]).tolist() == [1, 0]


@pytest.mark.parametrize("gold", ["Ann", "a", "x", "7", "AB", "A or B", "(1)", ""])
def test_other_gold_answers_are_no_options(gold):
    assert choice_letter(gold) == ""


def test_options_vote_by_letter_and_denied_options_do_not():
    texts = ["The answer is (A).", "A", "**A. Paris**", "(B)", "(A) is wrong."]
    assert SelfConsistency().score([said(text) for text in texts]).tolist() == [1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    "unit",
    [
        *("A ", "all is except ", "the a is ", "the\n", "A or ", "(A) ", "not A but ", r"\boxed{A} ", "answer is the "),
        *("so ", "A\n", "'A'", "\\"),
    ],
)
def test_hostile_lists_of_options_take_little_time(unit):
    start = time.process_time()
    chosen_letter((unit * 20_000)[:20_000])
    assert time.process_time() - start < 10


def test_separators_without_options_take_little_time():
    start = time.process_time()
    chosen_letter("<answer>" + "\uff0c" * 20_000 + "x")
    assert time.process_time() - start < 0.4
