import pytest

from forge_verifiers import Exact, MathEqual, Numeric, SelfConsistency
from forge_verifiers.rules.languages import normalized

from .helpers import by_gold, pairs, said  # noqa: TID252 (tests are no installed package)

NUMBERS = [
    *by_gold({
        "42": r"""
            答えは42です。 ¦ 答え：42 ¦ 正解は42です ¦ したがって、答えは42になります。 ¦ 答えは４２です。
            정답은 42입니다. ¦ 답: 42 ¦ 따라서 정답은 42이다. ¦ 답은 42예요. ¦ उत्तर 42 है। ¦ उत्तर: ४२
            सही उत्तर 42 है। ¦ इसलिए उत्तर है 42। ¦ الإجابة هي 42. ¦ الجواب: ٤٢ ¦ الإجابة الصحيحة هي ٤٢
            الإجابة النهائية: 42 ¦ 答案是42。 ¦ 答案：42 ¦ 最终答案为 42。 ¦ **答案：42** ¦ Ответ: 42 ¦ Ответ — 42.
            Правильный ответ: 42 ¦ La respuesta es 42. ¦ Respuesta: 42 ¦ La respuesta final es: 42
            La réponse est 42. ¦ Réponse : 42 ¦ Die Antwort ist 42. ¦ Die Antwort lautet: 42 ¦ Antwort: 42
            A resposta é 42. ¦ Resposta: 42 ¦ La risposta è 42. ¦ Cevap: 42 ¦ Đáp án là 42. ¦ Jawabannya adalah 42.
            Jawaban: 42 ¦ Odpowiedź: 42 ¦ Odpověď: 42 ¦ Het antwoord is 42. ¦ Jibu ni 42. ¦ উত্তর: ৪২ ¦ คำตอบคือ 42
            คำตอบ: ๔๒ ¦ పసమాధానం: 42 ¦ پاسخ ۴۲ است. ¦ התשובה היא 42. ¦ Η απάντηση είναι 42. ¦ Svaret är 42.
            答案是 $\boxed{42}$。 ¦ 答えは42個です。 ¦ 정답은 42개입니다. ¦ 答：小明有42个苹果。
            答案是 42，因为 6 乘以 7 等于 42。 ¦ La respuesta es 42 porque 6 por 7 es 42.
            Die Antwort ist 42, weil 6 mal 7 42 ist. ¦ 答案不是41，而是42。 ¦ 答えは41ではなく42です。
            정답은 41이 아니라 42입니다. ¦ La respuesta no es 41 sino 42. ¦ Die Antwort ist nicht 41, sondern 42.
            Ответ не 41, а 42. ¦ उत्तर 41 नहीं बल्कि 42 है ¦ 合計は42です。 ¦ 총합은 42입니다. ¦ कुल 42 है।
            المجموع هو 42. ¦ 总数为42。 ¦ El total es 42. ¦ 42が答えです。 ¦ 42가 정답입니다. ¦ 42个苹果
            42 яблока ¦ 42 Äpfel
            Há 42 maçãs. ¦ Kết quả là 42. ¦ Đáp số: 42 ¦ Το αποτέλεσμα είναι 42 ¦ São 42. ¦ 答えは 42 ¦ 答え:⏎42
            ### 答案⏎⏎42 ¦ **정답:** 42
            答案為 42 ¦ 答えは41です。いや、42です。 ¦ 答案是41。不对，答案是42。 ¦ ４２ ¦ ٤٢ ¦ ४२
        """,
        "1/2": r"""答えは $\frac{1}{2}$ です。""",
        "3.14": r"""정답은 3.14입니다. ¦ الإجابة هي ٣٫١٤ ¦ Die Antwort ist 3,14.""",
        "-5": r"""La respuesta es -5. ¦ 答案是-5。""",
        "1234": r"""答えは1,234です。 ¦ Ответ: 1 234""",
        "50%": r"""答案是50%。""",
        "12": r"""১২""",
        "3": r"""答えは\(x=3\)です。""",
    }),
    ("\u200f42\u200f", "42"),
]  # fmt: skip
WORDS = pairs(r"""
    La réponse est : Paris ≡ Paris ¦ « Paris » ≡ Paris ¦ forty‑two ≡ forty-two ¦ 答えは東京です。 ≡ 東京
    答案是巴黎。 ≡ 巴黎 ¦ 정답은 서울입니다. ≡ 서울 ¦ الإجابة هي باريس. ≡ باريس
    उत्तर दिल्ली है। ≡ दिल्ली ¦ La respuesta es París. ≡ París ¦ Die Antwort ist Köln. ≡ Köln
    Ответ: Москва ≡ Москва ¦ La réponse est Orléans. ≡ Orléans ¦ café ≡ café
    The answer is café. ≡ café ¦ café ≡ café ¦ ＡＢＣ ≡ ABC ¦ ﬁsh ≡ fish ¦ 한글 ≡ 한글
""")
WRONG = by_gold({
    "42": r"""
        答えは42または43です。 ¦ 答えは42ではありません。 ¦ 答えは42じゃない ¦ 答案是42或43。 ¦ 答案不是42。
        정답은 42가 아닙니다. ¦ 정답은 42 또는 43입니다. ¦ उत्तर 42 नहीं है। ¦ उत्तर 42 या 43 है। ¦ الإجابة ليست 42.
        الإجابة هي 42 أو 43. ¦ Ответ не 42. ¦ Ответ: 42 или 43 ¦ La respuesta no es 42. ¦ La respuesta es 42 o 43.
        Die Antwort ist nicht 42. ¦ La réponse n'est pas 42. ¦ A resposta não é 42. ¦ La risposta non è 42.
        至少42 ¦ 大于42 ¦ 최소 42 ¦ أكثر من 42 ¦ больше 42 ¦ al menos 42 ¦ entre 41 y 42 ¦ plus de 42 ¦ mindestens 42
        zwischen 41 und 42 ¦ pelo menos 42 ¦ almeno 42 ¦ lebih dari 42 ¦ co najmniej 42 ¦ mer än 42 ¦ יותר מ 42
        มากกว่า 42
        42 est faux ¦ Ответ 42 неверен. ¦ 42人以上 ¦ 42 тысячи ¦ 42 mil
        答案是42。答案是43。 ¦ 답: 42, 43 ¦ 答えは142です。 ¦ 答案是4。 ¦ 答えは43です。 ¦ 答案是42.5。
        合計は42ではない。 ¦ 总数不是42。 ¦ El total no es 42. ¦ 答案是42和43 ¦ \boxed{42}⏎\boxed{43} ¦ 41, 42, 43
        The answer is 42, 43, or 44 ¦ \boxed{42, 43} ¦ \boxed{41}, \boxed{42}
    """,
    "43": r"""
        La respuesta es 42 o 43. ¦ Die Antwort ist 42 oder 43. ¦ La réponse est 42 ou 43.
        答えは42です。答えは43です。 ¦ \boxed{42} \boxed{43} ¦ \boxed{42}. The answer is \boxed{43}.
        The answer is 42. The answer is 43. ¦ Answer: 42⏎Answer: 43 ¦ <answer>42</answer><answer>43</answer> ¦ 42 43
        #### 42⏎#### 43 ¦ 1. 41⏎2. 42⏎3. 43
    """,
    "102": r"""The answer is 10² ¦ 10²""",
    "x2": r"""x²""",
    "cafe": r"""café""",
    "5": r"""1 2 3 4 5""",
    "3": r"""1⏎2⏎3""",
})  # fmt: skip


@pytest.mark.parametrize(("text", "gold"), NUMBERS)
def test_a_number_stated_in_any_language_is_read(text, gold):
    assert [rule.score([said(text, gold)])[0] for rule in (Numeric(), MathEqual())] == [1, 1]
    assert Numeric().score([said(text, 7)]).tolist() == [0]


@pytest.mark.parametrize(("text", "gold"), WORDS)
def test_a_word_is_equal_whatever_its_language_and_composition(text, gold):
    assert [rule.score([said(text, gold)])[0] for rule in (Exact(), MathEqual())] == [1, 1]


@pytest.mark.parametrize(("text", "gold"), WRONG)
def test_a_denied_or_undecided_answer_in_any_language_is_wrong(text, gold):
    assert not any(rule.score([said(text, gold)])[0] == 1 for rule in (Exact(), Numeric(), MathEqual()))


def test_composed_and_decomposed_answers_vote_together():
    texts = ["cafe\u0301", "The answer is caf\u00e9.", "cafe", "Ca\u0301fe"]
    assert SelfConsistency().score([said(text) for text in texts]).tolist() == [1, 1, 0, 0]
    texts = ["答えは42です。", "정답은 42입니다.", "The answer is 42.", "٤٢", "43"]
    assert SelfConsistency().score([said(text) for text in texts]).tolist() == [1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("４２", "42"),
        ("٣٫١٤", "3.14"),
        ("10²", "10²"),
        ("½", "½"),
        ("π", "π"),
        ("\u200f42\u200f", "42"),
        ("（Ａ）", "(A)"),
    ],
)
def test_characters_are_normalized_unless_their_meaning_changes(text, plain):
    assert normalized(text) == plain
