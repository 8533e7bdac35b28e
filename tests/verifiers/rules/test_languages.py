import pytest

from forge_agents.types import Trajectory, Turn
from forge_verifiers import Exact, MathEqual, Numeric, SelfConsistency
from forge_verifiers.rules.languages import normalized


def said(text, answer=None):
    turn = Turn(agent="a", index=0, observation="", action=text, reward=0.0)
    info = {} if answer is None else {"answer": answer}
    return Trajectory(agent="a", policy="p", turns=(turn,), env_id="t", seed=0, info=info)


NUMBERS = [
    ("答えは42です。", "42"),
    ("答え：42", "42"),
    ("正解は42です", "42"),
    ("したがって、答えは42になります。", "42"),
    ("答えは４２です。", "42"),
    ("정답은 42입니다.", "42"),
    ("답: 42", "42"),
    ("따라서 정답은 42이다.", "42"),
    ("답은 42예요.", "42"),
    ("उत्तर 42 है।", "42"),
    ("उत्तर: ४२", "42"),
    ("सही उत्तर 42 है।", "42"),
    ("इसलिए उत्तर है 42।", "42"),
    ("الإجابة هي 42.", "42"),
    ("الجواب: ٤٢", "42"),
    ("الإجابة الصحيحة هي ٤٢", "42"),
    ("الإجابة النهائية: 42", "42"),
    ("答案是42。", "42"),
    ("答案：42", "42"),
    ("最终答案为 42。", "42"),
    ("**答案：42**", "42"),
    ("Ответ: 42", "42"),
    ("Ответ — 42.", "42"),
    ("Правильный ответ: 42", "42"),
    ("La respuesta es 42.", "42"),
    ("Respuesta: 42", "42"),
    ("La respuesta final es: 42", "42"),
    ("La réponse est 42.", "42"),
    ("Réponse : 42", "42"),
    ("Die Antwort ist 42.", "42"),
    ("Die Antwort lautet: 42", "42"),
    ("Antwort: 42", "42"),
    ("A resposta é 42.", "42"),
    ("Resposta: 42", "42"),
    ("La risposta è 42.", "42"),
    ("Cevap: 42", "42"),
    ("Đáp án là 42.", "42"),
    ("Jawabannya adalah 42.", "42"),
    ("Jawaban: 42", "42"),
    ("Odpowiedź: 42", "42"),
    ("Odpověď: 42", "42"),
    ("Het antwoord is 42.", "42"),
    ("Jibu ni 42.", "42"),
    ("উত্তর: ৪২", "42"),
    ("คำตอบคือ 42", "42"),
    ("คำตอบ: ๔๒", "42"),
    ("పసమాధానం: 42", "42"),
    ("پاسخ ۴۲ است.", "42"),
    ("התשובה היא 42.", "42"),
    ("Η απάντηση είναι 42.", "42"),
    ("Svaret är 42.", "42"),
    ("答案是 $\\boxed{42}$。", "42"),
    ("答えは42個です。", "42"),
    ("정답은 42개입니다.", "42"),
    ("答：小明有42个苹果。", "42"),
    ("答案是 42，因为 6 乘以 7 等于 42。", "42"),
    ("La respuesta es 42 porque 6 por 7 es 42.", "42"),
    ("Die Antwort ist 42, weil 6 mal 7 42 ist.", "42"),
    ("答案不是41，而是42。", "42"),
    ("答えは41ではなく42です。", "42"),
    ("정답은 41이 아니라 42입니다.", "42"),
    ("La respuesta no es 41 sino 42.", "42"),
    ("Die Antwort ist nicht 41, sondern 42.", "42"),
    ("Ответ не 41, а 42.", "42"),
    ("उत्तर 41 नहीं बल्कि 42 है", "42"),
    ("合計は42です。", "42"),
    ("총합은 42입니다.", "42"),
    ("कुल 42 है।", "42"),
    ("المجموع هو 42.", "42"),
    ("总数为42。", "42"),
    ("El total es 42.", "42"),
    ("答えは 42", "42"),
    ("答え:\n42", "42"),
    ("### 答案\n\n42", "42"),
    ("**정답:** 42", "42"),
    ("答案為 42", "42"),
    ("答えは41です。いや、42です。", "42"),
    ("答案是41。不对，答案是42。", "42"),
    ("\u200f42\u200f", "42"),
    ("４２", "42"),
    ("٤٢", "42"),
    ("४२", "42"),
    ("答えは $\\frac{1}{2}$ です。", "1/2"),
    ("정답은 3.14입니다.", "3.14"),
    ("الإجابة هي ٣٫١٤", "3.14"),
    ("Die Antwort ist 3,14.", "3.14"),
    ("La respuesta es -5.", "-5"),
    ("答案是-5。", "-5"),
    ("答えは1,234です。", "1234"),
    ("Ответ: 1 234", "1234"),
    ("答案是50%。", "50%"),
    ("১২", "12"),
    ("答えは\\(x=3\\)です。", "3"),
]
WORDS = [
    ("答えは東京です。", "東京"),
    ("答案是巴黎。", "巴黎"),
    ("정답은 서울입니다.", "서울"),
    ("الإجابة هي باريس.", "باريس"),
    ("उत्तर दिल्ली है।", "दिल्ली"),
    ("La respuesta es París.", "París"),
    ("Die Antwort ist Köln.", "Köln"),
    ("Ответ: Москва", "Москва"),
    ("La réponse est Orléans.", "Orléans"),
    ("café", "café"),
    ("The answer is café.", "café"),
    ("café", "café"),
    ("ＡＢＣ", "ABC"),
    ("ﬁsh", "fish"),
    ("한글", "한글"),
]
WRONG = [  # denied, undecided, a list, or another answer
    ("答えは42または43です。", "42"),
    ("答えは42ではありません。", "42"),
    ("答えは42じゃない", "42"),
    ("答案是42或43。", "42"),
    ("答案不是42。", "42"),
    ("정답은 42가 아닙니다.", "42"),
    ("정답은 42 또는 43입니다.", "42"),
    ("उत्तर 42 नहीं है।", "42"),
    ("उत्तर 42 या 43 है।", "42"),
    ("الإجابة ليست 42.", "42"),
    ("الإجابة هي 42 أو 43.", "42"),
    ("Ответ не 42.", "42"),
    ("Ответ: 42 или 43", "42"),
    ("La respuesta no es 42.", "42"),
    ("La respuesta es 42 o 43.", "42"),
    ("Die Antwort ist nicht 42.", "42"),
    ("La réponse n'est pas 42.", "42"),
    ("A resposta não é 42.", "42"),
    ("La risposta non è 42.", "42"),
    ("答案是42。答案是43。", "42"),
    ("답: 42, 43", "42"),
    ("答えは142です。", "42"),
    ("答案是4。", "42"),
    ("答えは43です。", "42"),
    ("答案是42.5。", "42"),
    ("合計は42ではない。", "42"),
    ("总数不是42。", "42"),
    ("El total no es 42.", "42"),
    ("答案是42和43", "42"),
    ("\\boxed{42}\n\\boxed{43}", "42"),
    ("41, 42, 43", "42"),
    ("The answer is 42, 43, or 44", "42"),
    ("\\boxed{42, 43}", "42"),
    ("\\boxed{41}, \\boxed{42}", "42"),
    ("La respuesta es 42 o 43.", "43"),
    ("Die Antwort ist 42 oder 43.", "43"),
    ("La réponse est 42 ou 43.", "43"),
    ("答えは42です。答えは43です。", "43"),
    ("\\boxed{42} \\boxed{43}", "43"),
    ("\\boxed{42}. The answer is \\boxed{43}.", "43"),
    ("The answer is 42. The answer is 43.", "43"),
    ("Answer: 42\nAnswer: 43", "43"),
    ("<answer>42</answer><answer>43</answer>", "43"),
    ("42 43", "43"),
    ("#### 42\n#### 43", "43"),
    ("1. 41\n2. 42\n3. 43", "43"),
    ("The answer is 10²", "102"),
    ("10²", "102"),
    ("x²", "x2"),
    ("café", "cafe"),
    ("1 2 3 4 5", "5"),
    ("1\n2\n3", "3"),
]


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
