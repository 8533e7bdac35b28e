"""Words that state answers in languages other than English, and normalization of digits and letters.

The words are regular expressions for `re`, for the languages of MGSM (arXiv 2210.03057) and MMMLU: Arabic, Bengali,
Chinese, French, German, Hindi, Indonesian, Italian, Japanese, Korean, Portuguese, Russian, Spanish, Swahili, Telugu,
Thai and Yoruba, and some more.
"""

from __future__ import annotations

import importlib
import re
import unicodedata
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

ANSWER = (
    r"(?:答案|答え|答|正解|解答|回答|정답|답변|답|उत्तर|जवाब|উত্তর|సమాధానం|(?:คำ)?ตอบ|(?:ال)?[إا]جاب[ةه]|(?:ال)?جواب|پاسخ|(?:ה)?תשובה"
    r"|απάντηση|ответ(?:ом)?|відповідь|"
    r"\b(?:respuesta|réponse|reponse|antwort|resposta|risposta|cevap|yanıt|đáp án|câu trả lời|trả lời|jawaban(?:nya)?"
    r"|odpowiedź|odpověď|antwoord|jibu|svar(?:et)?|vastaus|răspuns(?:ul)?|ìdáhùn)\b)"
)
"""The word "answer"."""
OPTION = (
    r"(?:选项|選項|选择|選擇|選択肢|보기|विकल्प|বিকল্প|الخيار|вариант|буква|вариант ответа|ข้อ|گزینه"
    r"|\b(?:opci[oó]n|op[cç][aã]o|opzione|letra|lettera|lettre|buchstabe|möglichkeit|seçenek|pilihan|opsi|optie|alternativ[ae])\b)"
)
"""The words "option" and "letter"."""
COPULA = (
    r"(?:就是|应该是|應該是|应为|應為|是|为|為|는|은|가|이|は|が|হলো|হল|คือ|ได้แก่|هي|هو|היא|הוא|είναι|равен|равно|это|становить"
    r"|дорівнює|\b(?:es|est|ist|lautet|beträgt|é|è|là)\b)"
)
"""The word "is", before the value."""
RIGHT = (
    r"(?:正确|正確|正しい|सही|ถูกต้อง|ที่ถูกต้อง|الصحيحة|الصحيح|صحیح|הנכונה|правильн(?:о|ый|ым)|верн(?:о|ый|ым)"
    r"|\b(?:corr?e(?:c?t)[ao]?|corretta|corretto|correcte|sahihi|richtige?|korrekte?|giusta|certa|đúng|benar|juiste|tọ̀nà)\b)"
)
"""The word "right", before "answer", "is" and the value."""
IS = (
    rf"(?:{COPULA}|選|选|है|हैं|النهائية|النهائي|является|{RIGHT}"
    r"|\b(?:ser[ií]a|adalah|ialah|to|je|is|ni|är|er|on|este|final[e]?|yang|tó)\b)"
)
"""Words between "answer" and its value: "is", and adjectives."""
ENDING = (
    r"(?:(?:个|個)?(?:です|でした|でしょう|である|となります|となる|になります|になる|だ|입니다|이에요|예요|이다|입니다만|है|हैं|হয়|అవుతుంది"
    r"|است|میباشد|می‌باشد|ครับ|ค่ะ|dır|dir|dur|dür|tır|tir|['’]?[dt][ıiuü]r))"
)
"""Words after the value in languages that end a sentence with the verb."""
NEGATION = (
    r"(?:不是|并非|並非|不对|不為|不为|不正[确確]|不[选選]|错|錯|ではな|じゃな|でな|ません|間違|誤り|아니|아닙|않|틀|नहीं|ग़लत|गलत|নয়|না\b|కాదు|ไม่"
    r"|ليس|لا\s|خطأ|خاطئ|نیست|לא\b|δεν\b|λάθος|неверн|неверен|неправильн|не(?=\s)|"
    r"\b(?:no\s+(?:es|son|era)|incorrect[ao]|nicht|keine?|falsch|nie|ikke|faux|fausse|falso|falsa|fout|salah|felaktigt|n['’]est\s+pas|n['’](?=est)|não|errad[ao]|incorret[ao]"
    r"|non\s+è|sbagliat[ao]|değil|yanlış|không\s+phải|bukan|niet|inte|nu\s+este)\b)"
)
"""Words that deny a statement."""
INSTEAD = (
    r"(?:而是|ではなく|じゃなくて|でなく|が\s?아니라|이\s?아니라|아니라|बल्कि|بل|,\s*а(?=\s)|"
    r"\b(?:sino|sondern|mais|mas\s+sim|ma|maar|utan|lecz)\b)"
)
"""Words that replace a denied value by another."""
ENGLISH_CORRECTION = (
    r"wait|hold on|(?:edit|corrected)(?=:)|no(?=\s*[,:.!;\u2014])|actually|sorry|correction|scratch that|i mean(?:t)?"
    r"|rather(?! than)|make that|oops|hmm+|on second thought"
)
"""English words that retract the statement before them, at word boundaries."""
CORRECTION = (
    r"(?:不对|不對|等等|更正|いや|待って|訂正|아니[,다요]|잠깐|정정|नहीं,|रुको|لا،|مهلا|نет,|нет[,.]|подожд|точнее|исправл"
    r"|\b(?:espera|perdón|corrijo|attends|attendez|plutôt|nein,|warte|besser|espere|corrigindo|aspetta|anzi)\b)"
)
"""Words that retract the statement before them."""
ALTERNATIVE = (
    r"(?:或者|或是|或|还是|還是|または|もしくは|あるいは|か(?=\s?\d)|또는|혹은|या|অথবা|หรือ|أو|یا|או|ή(?=\s)|или|або"
    r"|\b(?:ou|oder|veya|hoặc|atau|lub|nebo|eller)\b)"
)
"""The word "or"."""
BOUND = (
    r"(?:(?:大于|大於|小于|小於|至少|至多|最多|最少|不少于|不超过|超过|少于|多于|不到|高于|低于|최소|최대|적어도)|\b(?:"
    r"أكثر من|أقل من|على الأقل|больше|меньше|более|менее|минимум|максимум|свыше|más de|menos de|al menos|por lo menos"
    r"|como (?:mínimo|máximo)|plus de|moins de|au (?:moins|plus)|mehr als|weniger als|mindestens|höchstens|über|unter"
    r"|mais de|pelo menos|no (?:mínimo|máximo)|più di|meno di|almeno|al massimo|meer dan|minder dan|minstens|hoogstens"
    r"|lebih dari|kurang dari|setidaknya|en az|en fazla|nhiều hơn|ít hơn|ít nhất|nhiều nhất|więcej niż|mniej niż"
    r"|co najmniej|co najwyżej|více než|méně než|alespoň|mer än|mindre än|minst|högst|mere end|mindst|mer enn|vähintään"
    r"|πάνω από|τουλάχιστον|λιγότερο από|בין|לפחות|بیش از|کمتر از|حداقل|zaidi ya|angalau)|(?:มากกว่า|น้อยกว่า|อย่างน้อย"
    r"|יותר מ|פחות מ))"
)
"""Words before a number that make it a bound: "at least"."""
RANGE = r"\b(?:entre|zwischen|tra|fra|tussen|antara|między|mezi|mellan|mellem|между|від|от|μεταξύ|بين|बीच)"
"""The word "between"."""
REASON = (
    r"(?:因为|由于|なぜなら|왜냐하면|क्योंकि|لأن|потому|так как"
    r"|\b(?:porque|pues|ya que|weil|denn|parce qu|car|perché|poiché|çünkü|vì|karena|ponieważ|protože|omdat|eftersom)\b)"
)
"""The word "because"."""
COUNTER = (
    r"(?:個|个|개|つ|人|명|名|本|枚|円|元|원|度|点|점|回|번|歳|岁|年|日|天|時間|小时|分|秒|米|厘米|千米|公里|公斤|メートル|センチ|キロ"
    r"|ドル|美元|달러)"
)
"""Units directly after a number."""
_WORDS = ("respuesta", "reponse", "antwort", "resposta", "risposta", "cevap", "jawaban", "antwoord", "jibu", "svar")
"""The words of `ANSWER` in ASCII."""
OTHER_SCRIPTS = r"\u0400-\u1dff\u2e80-\ua4cf\uac00-\ufaff"
"""Characters of scripts that do not occur in formulas."""
_MAX_CHARS = 4_000
_VERB_LAST = r"(?=[^\n.:।]{1,60}\s(?:है|हैं|است)\s*(?:[।.]|$))"
_STATEMENT = re.compile(
    rf"({ANSWER})[*_\s]*(?:{_VERB_LAST}"
    rf"|[^\n.:=?!。।؟\d]{{0,40}}?(?:[:=\u2014\u2013]|{IS}(?<![A-Za-z](?=[A-Za-z])))[*_\s:]*(?:{IS}(?=[\s:])[*_\s:]*)*"
    r"|\n\s*|(?=[\s*_(\[]*[-+]?[\d$\\]))",
    re.IGNORECASE,
)
_END = re.compile(r"[.!?](?=[\s*_\"$]|$)|[\n。।؟]")
_ENDING = re.compile(
    rf"(?<=[\d)\]}}$])\s*(?:が|は|가|이|就是|是)\s*(?:正确|最终)?{ANSWER}\s*{ENDING}?\s*$"
    rf"|(?<=[\d)\]}}$])\s*{COUNTER}?\s*{ENDING}?\s*$|\s*{ENDING}\s*$",
    re.IGNORECASE,
)
_REASON = re.compile(rf"[,、]?\s*{REASON}.*", re.DOTALL | re.IGNORECASE)
_OTHER = re.compile(  # "36, a не 35"
    r"(?<=\w)[,、]?\s*(?:而不是|而非|,\s*(?:а\s+)?не\s|(?:,|\b(?:y|et|und|e))\s+(?:no|non|pas|nicht|não)\s).*",
    re.DOTALL | re.IGNORECASE,
)
_NEGATION = re.compile(NEGATION, re.IGNORECASE)
_INSTEAD = re.compile(INSTEAD, re.IGNORECASE)
_ALTERNATIVE = re.compile(rf"\s*{ALTERNATIVE}\s*|(?<=\d)\s+(?:o|u|y|e|i)\s+(?=\d)", re.IGNORECASE)


_LETTERS = {"أ": "A", "ا": "A", "ب": "B", "ج": "C", "د": "D", "অ": "A", "ব": "B", "ড": "C", "ঢ": "D"}
_LOCAL_LETTER = re.compile(rf"(?<!\w)({'|'.join(_LETTERS)})(?!\w)")
_SIGNS = str.maketrans("٫٬٪،؛−‐‑‒﹣➖、", ".,%,;------,")
_KEPT = frozenset("ℂℝℤℕℚ…")
"""Characters whose compatibility form has another meaning."""


def normalized(text: str) -> str:
    """The text in NFC, with characters of ordinary width, digits 0 to 9 and Unix line ends."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if text.isascii():
        return text
    text = unicodedata.normalize("NFC", _long_marks().sub(r"\1", text)).translate(_SIGNS)
    return "".join(map(_character, text))


@cache
def _long_marks() -> Any:
    """More than 30 combining marks in a row. No language has so many, and NFC sorts them in quadratic time."""
    return importlib.import_module("regex").compile(r"(\p{M}{30})\p{M}+")


@lru_cache(maxsize=4096)
def _character(character: str) -> str:
    if character.isascii() or character in _KEPT:
        return character
    if unicodedata.category(character) == "Cf":  # direction marks, joiners
        return ""
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    if unicodedata.decomposition(character).startswith(("<wide>", "<narrow>", "<font>", "<compat>", "<circle>")):
        plain = unicodedata.normalize("NFKC", character)
        return plain if len(plain) == 1 or plain.isalpha() else character
    return character


def latin_choices(text: str) -> str:
    """The text with the letters of Arabic and Bengali options as A to D, as in the prompts of MMMLU."""
    return text if text.isascii() else _LOCAL_LETTER.sub(lambda match: _LETTERS[match[1]], text)


def foreign_statements(text: str) -> Iterator[tuple[int, int, int]]:
    """Start, start of the content, and end of each "答えは42です" or "La respuesta es 42" in the last characters."""
    if text.isascii():
        lower = text.lower()
        if not any(word in lower for word in _WORDS):
            return
    for match in _STATEMENT.finditer(text, max(0, len(text) - _MAX_CHARS)):
        end = _END.search(text, match.end())
        negation = _NEGATION.search(text, match.end(1), match.end())  # "答案不是42"
        content = negation.start() if negation else match.end()
        yield match.start(), content, end.start() if end else len(text)


def is_denied(text: str) -> bool:
    """True if a sentence has a negation in a language other than English."""
    return _NEGATION.search(text) is not None


def foreign_sentence(text: str) -> tuple[str, bool]:
    """The sentence without "not 41 but", reasons and the verb at its end, and whether it is a denial."""
    instead = _INSTEAD.search(text) if _NEGATION.search(text) or _INSTEAD.search(text) else None
    if instead and _NEGATION.search(text[: instead.end()]):
        text = text[instead.end() :]
    text = _REASON.sub("", _OTHER.sub("", text.strip(), count=1), count=1)
    text = _ENDING.sub("", text.rstrip("。।.! "), count=1).strip()
    return _ALTERNATIVE.sub(" or ", text), _NEGATION.search(text) is not None
