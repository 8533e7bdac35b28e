"""Extracts the answer from a text without a mark: from a short statement, or from the last sentence with a value."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from forge_verifiers.rules.languages import (
    ALTERNATIVE,
    BOUND,
    COPULA,
    CORRECTION,
    ENGLISH_CORRECTION,
    OTHER_SCRIPTS,
    RANGE,
    foreign_sentence,
    is_denied,
    normalized,
)
from forge_verifiers.rules.maths.fields import DATE
from forge_verifiers.rules.maths.number_words import MEASURE, number_in_words, with_digits


class ParsedAnswer(NamedTuple):
    """The final answer of a text."""

    raw: str
    """Everything that was marked as the answer, else the whole text."""
    value: str
    """The answer without markup, lead-in and remarks, or empty if there is none or it is denied."""
    source: Literal["marked", "statement", "fallback"]
    """Source of the value. Only rules for numbers trust a fallback."""
    text: str = ""
    """The whole text."""


BOUND_SPACE = "\u00a0"
_BLANKS = re.compile(r"[^\S\n]{9,}")  # patterns that begin with blanks need quadratic time for them
_CLEANED = (
    ("<<", re.compile(r"<<[^<>\n]*>>"), ""),  # 3*100=<<3*100=300>>300, as GSM8K has it
    ("<", re.compile(r"<\|\w+\|>|</?s>|<(?:bos|eos|pad|end_of_turn|br ?/?)>"), "\n"),  # <|im_end|>
    ("<", re.compile(r"</?(?:b|i|u|p|em|strong|span|div|mark)>", re.IGNORECASE), ""),
    ("~~", re.compile(r"(?<!~)~~(?=[^\s~])[^~\n]{1,200}~~(?!~)"), ""),
    ("- [", re.compile(r"^[ \t]*- \[(?: \].*|[xX]\])", re.MULTILINE), ""),
    ("color", re.compile(r"\\(?:text)?color\s*\{\w+\}"), ""),
    (" in the morning", re.compile(r"(?<=:\d\d) in the morning\b"), " AM"),
    (" in the ", re.compile(r"(?<=:\d\d) in the (?:afternoon|evening)\b"), " PM"),
    (
        ". ",
        re.compile(
            r"\b((?:Dr|Mr|Mrs|Ms|Prof|St|Mt|Gen|Col|Capt|Rev|Gov|Sen)\.|[A-Z]\.(?=\s[A-Z]\.)|(?<=[A-Z]\.\s)[A-Z]\."
            r"|(?!(?:Option|Answer|Choice|Letter|Statement|Vitamin|Hepatitis|Type|Group|Class|Plan|Team|Grade|Part"
            r"|Section|Point|Box|Set|Case|Figure|Table)\s)[A-Z][a-z]+\s[A-Z]\.)\s"
            r"(?!(?:The|It|So|This|That|These|There|Thus|Therefore|Hence|Then|We|You|I|A|An|In|Because|Since|But|And|Or|If"
            r"|No|Yes|Not|He|She|They|Wait|Actually|Note|As|For|All|Let|Now|Its?)\b)(?=[A-Z])"
        ),
        rf"\1{BOUND_SPACE}",
    ),
)

MAX_VALUE = 1_000
"""Maximum length of a value in characters."""
NOT = re.compile(
    r"n['\u2019]t\b|\b(?:not|never|cannot|neither|nor|none|no\s?one|nobody|hardly|refuse\w*)\b", re.IGNORECASE
)
CORRECTED = re.compile(
    rf"\b(?:{ENGLISH_CORRECTION}|that(?:['\u2019]s| is) (?:wrong|incorrect|not right)"
    r"|but\s+only(?=[^,.;]{1,30}\s(?:satisf|works?\b|is\s+(?:valid|possible)\b))|just kidding"
    r"|(?<!common )(?<!typical )mistake|I\s+disagree|but\s+I\s+get"
    rf"|let me (?:correct|redo|re(?:compute|check)))\b|{CORRECTION}",
    re.IGNORECASE,
)
"""Words that retract the value before them."""
DOUBTING = re.compile(
    rf"\W*{ALTERNATIVE}|\W*(?:I\s+(?:think|believe|guess|suppose),\s+)?(?:or|maybe|perhaps|possibly|alternatively"
    r"|(?:(?:but|though|and)\s+)?(?:(?:it|that)\s+)?(?:could|might|may)(?:\s+also)?\s+be)\b",
    re.IGNORECASE,
)
"""Text after a value that offers an alternative."""
SENTENCE = re.compile(
    r"(?<!\b[A-Z][a-z])(?<!\.[A-Za-z])(?:[.!?](?=(?!\u00a0)\s|[*_\"]|$)|[.?](?=\$))(?!\s*=)|[\u3002\u0964]|\n|</"
)
"""End of a sentence."""
STARTS = re.compile(
    r"(?:[-+\u2212\u2013\u00b1(\[{|]|\\[({\[]|\\left\b)*\s*(?:\\?[$\u20ac\u00a3]\s*){0,2}[-+\u2212]?"
    r"(?:\.?\d|(?:all|any)\s+real\b|\\(?!text|math|[()\[\]{}])[A-Za-z]|[\u221a\u03c0\u221e\u00bc-\u00be\u2150-\u215e]|(?:sqrt|pi|log|ln|sin|cos|tan|exp)\b"
    r"|[A-Za-z\u03b1-\u03c9](?:[\u2080-\u2089]|\([a-z]\))?\s*(?:-\s*\d|[=<>^+*/\u2264\u2265\u2208])|[a-z]\s*\\|(?<=\{)[a-z]\s*[:|]|\(?[A-J]\)?(?![\w'\u2019]|\s+(?!because|since|as\b|is\b)[a-z]))"
)
"""Start of a value: a number, a formula or an option."""
_UNIT = (
    r"(?:percent|dollars?|euros?|cents?|[kcm]?m|[km]?g|k?m/h|mph|ft|foot|lbs?|oz|ounces?|pounds?|inch|inches|feet|miles"
    r"|[kMGm\u03bc]?(?:N|J|W|V|A|K|Pa|Hz|eV|\u03a9)|\u00b0\s?[CF]"
    r"|h|hrs?|hours?|min|minutes?|s|sec|seconds?|days?|weeks?|months?|years?)\b"
)
RUN = re.compile(
    rf"(?<![\w.]){DATE}|(?<![\w.])\d+\s*{_UNIT}(?:,?\s+(?:and\s+)?\d+\s*{_UNIT})+"
    r"|\$\$?(?=\S)[^$\n]+?(?<=\S)\$\$?(?!\d)|\\\([^\n]+?\\\)|\\\[[^\n]+?\\\]"
    r"|(?:(?<![A-Za-z0-9_.)}])[-+\u2212\u00b1])?\\?[$\u20ac\u00a3]?"
    r"(?:(?<![A-Za-z0-9_.)^])(?:\d|\.\d)|\\(?:[dt]?frac|sqrt|pi|binom|infty)|[\u03c0\u221a\u221e\u00bc-\u00be\u2150-\u215e])"
    rf"(?:[^\s,;:!?{OTHER_SCRIPTS}]"
    r"|[,:](?=\d)|(?<=[\d)}])\s+[-+*/x\u00d7\u00b7\u00f7^\u2212]\s+(?=[\d(\\])|(?<=\d)\s(?=\d{1,2}/\d{1,3}(?![\d/])))*"
    r"(?:\s(?:dozen|hundred|thousand|million|billion)\b)?"
    rf"(?:\s?%|\s?[AaPp]\.?[Mm]\b|\s+(?:BCE?|century)\b|\s?o['\u2019]clock\b|\s+{_UNIT}(?:\sper\s[a-z]+)?(?:\s{MEASURE}\b)?)?"
)
"""A value in a sentence: a formula, or a number with its unit."""
_HEDGE = re.compile(r"\b(?:or|maybe|perhaps|possibly|either|alternatively|could|might)\b", re.IGNORECASE)
_COMPUTED = re.compile(r"\d[^=]*=\s*$")  # "half as many, or 0.5 * 100 = 50"
_BETWEEN = re.compile(r"\bbetween[\s*$]*$", re.IGNORECASE)
_RANGE = re.compile(rf"{RANGE}[\s*$]*$", re.IGNORECASE)
JOINED = re.compile(
    r"(?:[\s$,;]|\\q?quad|\\[,;) ])*(?:,|\band\b|\bor\b|\bto\b|\\text\{\s*(?:and|or)\s*\})(?:[\s$]|\\q?quad|\\[,;( ])*"
)
"""Text between two values of a list or a range."""
_COPULA = re.compile(
    r"(?:\b(?:is|are|was|were|be|equals?|equal to|gives?|makes?|leaves?|gets?|got|ha(?:s|ve)|totals?|yields?|becomes?"
    rf"|adds? up to|factors (?:as|into)|(?:simplifies|reduces|rounds|evaluates|converts"
    rf"|grows|grew|drops|dropped|falls|fell|rises|rose|increases|decreases) to|(?:sums?|amounts?) to|comes? to|obtain"
    rf"|find|earn(?:s|ed)?|costs?"
    rf"|pa(?:ys?|id)|spen(?:ds|t)|weighs?|needs?|takes?|took|lasts?|lasted|requires?)\b(?:\s+(?:that|us|you|me))?|{COPULA}"
    r"|['\u2019]s\b|\bi\.e\.,?|(?<![<>!])=|[\u2248\u2192\u21d2]|(?<![\d\s(])\s*:)"
    r"[\s*_]*(?:(?:exactly|about|now|only|just|the number)\s+)?"
)
_NO_VALUE = re.compile(r"\b(?:no|non|pas|nicht)\s+\W*$", re.IGNORECASE)
_THOUGHT = re.compile(r"\b(?:I|we)\s+(?:\w+\s+)?(?:thought|assumed|guessed|believed)\b")
_CLAUSE = re.compile(r"[,;]|\b(?:but|and|so|which|it(?=['\u2019]s|\sis))\b")
_BOUND = re.compile(  # "more than 5" is not 5
    rf"(?:{BOUND}|(?<![=-])[<>\u2264\u2265\u2260]=?|!=|\\[lg](?:eq?|eqslant|t)|\\neq?"
    r"|\b(?:(?:more|less|fewer|greater|larger|smaller|other) than|at (?:least|most)|up to|over|under|above"
    r"|before|until|(?:anything|everything|all) but|except|opposite of|reciprocal of|below|minus|negative"
    r"|twice|half|double|triple|(?:half|third|quarter|square|cube|root|sum|product|quotient) of"
    r"|(?:one|two|three)[\s-](?:halves|thirds?|quarters?|fifths?) of)(?:\s+the)?)\s*$",
    re.IGNORECASE,
)
_REMARK = re.compile(
    r"[,;:]?\s*(?:\u2014|,\s+of\s|\s+to\s+(?:the\b|[a-z]{2,}\s)|,\s+and\s+(?:the|s?he|it|they|we|you|this|that)\b|\s+of\s+(?:(?:the|them|all|his|her|its|their"
    r"|our|my|your|each|these|those)\b|[a-z]+\s+and\s+[a-z])|\s-\s(?=[A-Za-z])|;\s+(?=[A-Za-z]{2})"
    r"|(?<![\\A-Za-z])(?:because|since|i\.e|meaning|which|who|only|so|as|after|given|is|are|was|were|but|no|instead|rather|hence|therefore"
    r"|thus|due|using|from|in (?:total|all|the|(?:19|20)\d\d)|compared|versus"
    r"|altogether|left|now|remaining|correct|right|I(?!\s*=)|we|you|it|this|that|there"
    r"|they|he|she|not|the|with|works?|at(?!\s(?:most|least)\b)|than|each|assuming|provided|while|for|long|wide|tall|high|deep)\b|(?<=%)\s+of\b"
    r"|\s[(\[](?!base|mod|maybe|perhaps|possibly)(?:(?:\d+\s+)?[A-Za-z]{3}|i\.e|e\.g|(?:to|at)\s)).*",
    re.DOTALL,
)
_HEAD = re.compile(
    r"^(?:[\s,:;!?\u2014\u2022\u2234\u2190-\u21ff\u2700-\u27bf\ufe0f\U0001f300-\U0001faff]|\.(?!\d)|[#*]+[ \t]|[=-]>"
    r"|>>>)+"
)
WRONG = re.compile(  # "42 is wrong", "42 is not the answer"
    r"\b(?:is|are|was|were|would\s+be)\s+(?:(?:clearly|also|both|definitely|simply|just|the|a)\s+)*"
    r"(?:wrong|incorrect|false|mistaken)\b(?:\s+answer)?|\s[(\[](?:wrong|incorrect|false)[)\]]|(?<=\d)\s+(?:is|are|was|would\s+be)\s+too\s+\w+"
    r"|\b(?:is|are|was|can)(?:n['\u2019]t|\s+not|not)\s+(?:be\s+)?(?:(?:the|a|my|our)\s+)?(?:(?:final|correct|right)\s+)*"
    r"(?:answer|correct|right|true|it)\b",
    re.IGNORECASE,
)
REASON = re.compile(
    r",?\s+(?:because|since|who)\b|,\s+with\b|(?<!left)(?<!up)\s+with\s+\d|,\s+the\s+(?:\w+est|most|\w+\s+of)\b|,\s+not\s|\s+\(not\s|,\s+I\s+(?:think|believe|guess|suppose)\b"
)
"""Start of a remark after words."""
_NAMED = re.compile(  # "The capital of France is Paris", "Sorted words: red, tan"
    r"(?:(?:the|this|its|his|her|their|our|la|le|el|die|der|das|il|o|a)\s+|(?=[\w\s'\u2019-]{1,80}:\s))(?:(?!(?:not|cannot|never|if|maybe|perhaps|thought|said|wrong|incorrect|false|is|opposite|exclude\w*|reject\w*|doubt\w*|nicht|keine?|pas|no|non|não)\b|\w+n['\u2019]t)"
    r"[\w'\u2019-]+(?:\s+|(?=:))){1,8}(?:(?<=\s)(?:is|are|was|were|est|es|ist|è|é|era|war)\b(?::|\s+(?:called|named|known\s+as|\w+\s+by)\b)?|:)\s+"
    r"(?!(?:not|either|neither|probably|perhaps|maybe|nicht|keine?|pas|no|non|não)\b)([^\s,;:!?]+(?:\s+[^\s,;:!?]+){0,5}|(?:(?<=:\s)|(?<=are\s)|(?<=were\s))[^\s;:!?]+(?:\s+[^\s;:!?]+){0,20})",
    re.IGNORECASE,
)
_YEAR = re.compile(r"\s+in\s+\d{3,4}$")
_DESCRIBED = re.compile(  # in "The number that is not prime is 9", "not" denies no value
    r"^(?:(?:so|thus|hence|therefore),?\s)?(?:the|an?)\s(?=[^.,;:]{1,120}\b(?:that|who|which|of)\s)"
    r"(?:(?!(?:answers?|option|choice|claim|guess|statement|idea|right|correct|true|solution|result|I|we|you|wrong|false"
    r"|incorrect|it|this)\b)[\w'\u2019-]+\s){2,15}?(?:is|was|are|were|equals|got|has)\s(?=[$\\(]{0,3}-?\d)",
    re.IGNORECASE,
)
_DOUBTED = re.compile(r"(?:i|we)\s+(?:\w+\s+)?doubt\b[^,;]*$", re.IGNORECASE)
TAKEN_BACK = re.compile(
    r"(?:\s*(?:,\s*which\s+)?(?:\s(?:is|was|seems?|seemed|looks?|looked|sounds?|appears?|may|might|could|would)\b"
    r"(?:(?!\b(?:as|because|for|since|that)\b)[^:;,\u2014]){0,60})?,?\s*\b(?:but|though|although|yet|so)\s+"
    r"(?:(?:it|that|this|s?he|they|I|we)(?:['\u2019](?:s|m)|\s+is|\s+am|\s+are|\s+was|(?=\s+(?:is|was)n['\u2019]t))\s+)?"
    r"|\s*,\s*(?:I\s+\w+|which\s[^,]{1,40}),\s*(?:is|was)\s+)(?:actually\s+|clearly\s+|in fact\s+)?"
    r"(?:wrong|incorrect|false|untrue|mistaken|(?:not|(?:is|was)n['\u2019]t)\s+(?:right|correct|true|the\s+answer))"
    r"(?=\s*(?:[.,;!]|$))",
    re.IGNORECASE,
)
"""A clause after a value that denies the value and not a reason: "B seems right, but it is wrong"."""
REFUSED = re.compile(
    r"\W*(?:(?:no|nope)\b\W*)?(?:(?:i|we)\s+(?:disagree|(?:do\s*n['\u2019]t|do\s+not)\s+think\s+so)"
    r"|(?:that|this|it)(?:['\u2019]s|\s+is|\s+was)\s+(?:wrong|incorrect|false|a\s+mistake|not\s+(?:right|correct|true|it)))\b\W*$",
    re.IGNORECASE,
)
"""A text that denies the whole answer before it: "No, that is wrong."."""
_EXPLAINED = re.compile(  # bounded and possessive, because the time for blank lines would be quadratic
    r"(?<=\S)(?=[^\S\n]{0,200}\n)[\s*_#]{0,200}+(?:Explanation|Reasoning|Justification|Verification|Check|Note)\b"
    r"|(?<=[.!])\s(?:Check|Verification|Proof)\s?:"
)
_QUESTION = re.compile(r"\?(?=\s+\S)")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z\u03b1-\u03bf\u03c1-\u03c9]")
_COUNTED = re.compile(r"(?<=\d)\s+(?!sin|cos|tan|log|sqrt|mod)[a-z]{2,}\b|(?<=\d)\s*x(?=\s*\$?\d)")  # 6 kg, 2 x 3
_MEASURED = re.compile(r"(?<=\d)(?:\s[mghsl]|\s?(?:[kcm]m|[km]g|[km]l|min))(?![A-Za-z])(?:/[a-z]+)?")  # 3 m * 100 cm/m
_CHOICE = re.compile(
    r"(?:\\text\w*\{)?(?:\(?([A-J])\)\}?[\s\\]+\S|([A-J])\.(?!\u00a0)\s+\S"
    r"|\(?([A-J])\)?\s+(?:is|would be)\s+(?:the\s+)?(?:correct|right|true|best)\b).*",
    re.DOTALL,
)
_ROUNDED = re.compile(
    r"(?<=\S),?\s+\(?(?:or|which is|i\.e\.)?,?\s*(?:approximately|approx\.?|about|roughly|\u2248)\s.*"
    r"|(?<=[A-Za-z%])\s\(\u2248?\s?\d[\d.,]*\s?(?:[A-Z\u00b0%]|[a-z]{2})[\w/^]*\)$",
    re.DOTALL,
)
_VARIABLE = re.compile(  # x, a_n, AB, \angle ABC, f(5), P(A)
    r"\s*m?(?:\\(?:angle|triangle)\s*)?(?!\\?(?:pi|infty)\b)(?:\\[a-z]+|[A-Za-z]{1,3})(?:_\{?\w+\}?)?'?"
    r"\s*(?:\(\s*\w+(?:\s*,\s*\w+)*\s*\)\s*)?"
)
_PART_OF = re.compile(r"\S{1,40}\s+(?:of\s+[$*\\(]{0,4}\d|times\s+(?:as|more|the)\b)")  # 8% of $50
_GIVEN = re.compile(r"(?:since|because|as|if|when|given|for)\b", re.IGNORECASE)
_WHOLE = re.compile(  # "2 of the 3", "divide 60 by 4"
    r"\d(?:st|nd|rd|th)?(?:\s+[a-z]+)?\s+(?:out\s+)?of\s+(?:the|these|those|his|her|its|their)\s+$"
    r"|\b(?:divid|multipl|subtract|add)\w*\s[^,=:]{0,40}$",
    re.IGNORECASE,
)
_OPERATOR = re.compile(r"[\w)](?:\s[-+*/\u2212]\s|\s?\^\s?)$")
_REFUSING = re.compile(
    r"\b(?:(?:am|are|is|['\u2019]m)\s+unable|(?:I|we)\s+can(?:not|['\u2019]t|\s+not))\b", re.IGNORECASE
)
_SUPPOSED = re.compile(r"(?:if|unless|suppose|assume)\b[^,]*(?:,\s*(?:then\s+)?|\bthen\s+)", re.IGNORECASE)
_HENCE = re.compile(
    r"[,;.$]?\s+(?:and\s+)?(?:so|therefore|thus|hence|meaning|which means|and(?=\s+(?:the|s?he|it|they)\b))\b,?\s+"
    r"(?:that\s+)?",
    re.IGNORECASE,
)
_EITHER = re.compile(r",?\s+\(?or\s+([^()]+)\)?$")  # "1/2 (or 0.5)"
_LEAD = re.compile(
    r"(?:(?:so|thus|therefore|hence|then|well|ok|okay|sure|hmm+|and|or|finally|oh|ah|overall|in (?:conclusion|short)"
    r"|actually|clearly|probably|maybe|perhaps|definitely|certainly|indeed|just|simply|exactly|precisely|about|around|approximately"
    r"|roughly|nearly|equal to|either|obviously|of course|option|choice)\b,?:?|(?:yes|no)[,:]|a\d*:|a\d+[.)]"
    r"|\(?\d{1,2}\)(?=\s+\$?\d)|#\d{1,2}:"
    r"|ans\s*[.:=]"
    r"|i(?:['\u2019](?:m|d|ve))?\s+(?:[a-z]+\s+)?(?:think|believe|guess|say|get|got|found|find|reckon|sure|have|see"
    r"|calculated)\b(?:\s+that)?,?:?|(?:we|you)\s+(?:can\s+)?(?:get|have|find|obtain|see)\b(?:\s+that)?,?:?"
    r"|(?:it|that|this|there|they|which|here)(?:['\u2019](?:s|re)|\s+(?:is|are|was|equals|gives|makes|leaves"
    r"|(?:would|should|must|will|could|might|may|has to)\s+be))\b(?:\s+(?:called|named|known\s+as)\b)?:?"
    r"|the\s+(?:(?:correct|final|right)\s+)?(?:number|value|fraction|result|total|sum|product|integer|option|choice"
    r"|letter|solution)(?:\s+(?:is|are|was|equals))?\b:?)[\s*_]+",
    re.IGNORECASE,
)
_FOREIGN = re.compile(  # a word that does not occur in formulas
    r"(?<![\\A-Za-z])(?!(?:(?:arc)?(?:sin|cos|tan)h?|exp|abs|mod|and|max|min|log|sqrt|infinity)\b)"
    r"(?:[A-Za-z]{4,}|(?=[A-Za-z]?[AEIOUaeiou])[A-Za-z]{3}|[Tt]he|[Ii][sft]|[Tt]o|[Oo]f|[Ww]e|[Hh]e|[Ss]o|no|[Aa][st]"
    rf"|[Bb][ye]|my|why|try|[{OTHER_SCRIPTS}])(?![A-Za-z])"
    r"|[\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u1e00-\u1eff]|[\u0370-\u03ff]{4,}"
)
_TEXT = re.compile(r"\\(?:text|math|begin|end|mbox)[a-z]*\s*\{[^{}]*\}")
_WRAPPED = re.compile(
    r"\\(?:text|math|m|underline|bold|boldsymbol)(?:bf|it|rm|tt|normal|box)?\s*\{([^{}]*)\}|\{([^{},;\\]*)\}"
    r"|\\(?:bf|it|rm|bfseries|large|Large|huge|Huge|displaystyle)(?![A-Za-z])\s*(.*)",
    re.DOTALL,
)
_SPACES = re.compile(r"^(?:\\[,;:! ]|~){1,9}|(?:\\[,;:! ]|~){1,9}$")  # bounded: without, the time is quadratic
_BOLD = re.compile(r"(?<![\w)])\*\*(?=\S)((?:[^*\n]|\*(?!\*)|(?<=[\w)])\*\*(?=[\w(]))+)(?<=\S)\*\*(?![\w(])")
_LIST = re.compile(
    r"(?:[^\n]*:[ \t*]*\n\s*)?((?:[ \t]*(?:[-*][ \t]+|\d+[.)][ \t]+)?[-+$(]?\d[\d.,/]*%?[).,;]?[ \t]*(?:\n+|$)){2,})"
)
_LIST_MARK = re.compile(
    r"\s*(?:[-*\u2022\u25cf\u25aa]|\d{1,2}[.)]|(?:option|candidate|possibility|guess|attempt)\s\d{1,2}[.:)])\s+",
    re.IGNORECASE,
)
_FACTORIAL = re.compile(
    r"(?:(?<![A-Za-z])(?:n|(?<![\d$])(?<![\d$)]\s)[kmr])"
    r"|\((?=[^()]*[kmnr])(?:[^()\\,;A-Za-z]|(?<![A-Za-z])[a-z](?![A-Za-z])){2,}\))!\Z"
)
"""A factorial of an integer's usual name, or of a term with one, at the end of a plain text. Other exclamation marks
end a sentence, also after a number and ``m`` or ``k``, as in "5 m!"."""
_NUMBER_FACTORIAL = re.compile(r"\d!$")  # of 5! in a formula, the dollar signs remain, because "5!" is a sentence
_FORMULA_SIGNS = ("$$", "$", "\\(", "\\[")
_REPEATING = re.compile(  # 0.333..., in contrast to 1.4422... and 2.718281828...
    r"\.(?:(\d{1,6})\1+|\d{1,9}?(?:(\d)\2\2+|(\d{2,3})\3+))\u2026$"
)
_OPEN = re.compile(r"^\$(?!\s?\d)|(?<!\d)(?<!\d\s)\$$")
_ORNAMENTS = "\u2026\u2705\u2713\u2714\ufe0f" + "".join(map(chr, range(0x1F300, 0x1F700)))
_PAIRS = [(sign, sign) for sign in ("$$", "$", "**", "*", "__", "_", "```", "`", '"', "'")]
_PAIRS += [("\\(", "\\)"), ("\\[", "\\]"), ("\u201c", "\u201d")]
_PAIRS += [("\u201e", "\u201c"), ("\u00ab", "\u00bb"), ("\u2039", "\u203a"), ("\u300c", "\u300d"), ("\u300e", "\u300f")]
_OPENINGS = frozenset(opening[0] for opening, _ in _PAIRS)


def readable(text: str) -> str:
    """The visible text with ordinary characters, without tags, struck text and empty check boxes.

    `BOUND_SPACE` follows the periods of initials and titles, which end no sentence.
    """
    if "</think>" in text and (visible := text.rpartition("</think>")[2].strip()):
        text = visible
    text = _BLANKS.sub(" " * 8, normalized(text))
    for sign, pattern, replacement in _CLEANED:
        if sign in text:
            text = pattern.sub(replacement, text)
    return text


def unmarked_answer(text: str) -> ParsedAnswer:
    """The answer of a text without a mark."""
    clean = strip_markup(_EXPLAINED.split(_HEAD.sub("", text), maxsplit=1)[0])
    if clean.isascii() and clean.isalnum():
        return ParsedAnswer(text, clean, "statement")
    tail = clean[-4 * MAX_VALUE :]
    if value := _listed(clean) if "\n" in clean else "":
        return ParsedAnswer(text, value, "statement")
    if not RUN.search(tail):
        return _words(text, clean, tail)
    if (name := _name(tail)) and not RUN.search(with_digits(name) if name[0].islower() else name):
        return ParsedAnswer(text, name, "statement")
    if ("\n" not in clean or "\\begin" in clean) and _is_expression(lead := without_lead_in(clean)):
        return ParsedAnswer(text, bare_value(lead), "statement")
    sentences: list[str] = []
    for sentence in filter(str.strip, SENTENCE.split(_QUESTION.sub("??", tail))):
        if sentence.endswith("?"):
            continue
        if sentences and DOUBTING.match(sentence):  # "It is 41. Or 42."
            sentences[-1] += ", or" + sentence
        else:
            sentences.append(sentence)
    if sentences and REFUSED.match(sentences[-1]):
        return ParsedAnswer(text, "", "fallback")
    for sentence in reversed(sentences):
        read = sentence_value(sentence)
        if read is not None:
            return ParsedAnswer(text, *read)
    return ParsedAnswer(text, "", "fallback")


def _listed(text: str) -> str:
    """The items of a list of numbers, with "or" between them, or of words, with commas. Empty for other texts."""
    if len(text) <= MAX_VALUE and (listed := _LIST.fullmatch(text)):
        return " or ".join(_LIST_MARK.sub("", line, count=1) for line in listed[1].splitlines() if line)
    lines = [line for line in text[-MAX_VALUE:].splitlines() if line.strip()]
    while lines and not _LIST_MARK.match(lines[-1]) and not RUN.search(lines[-1]):  # "One of them is right."
        lines.pop()
    start = next((at for at in range(len(lines), 0, -1) if not _LIST_MARK.match(lines[at - 1])), 0)
    if start == 1 and not lines[0].rstrip(" *").endswith(":"):  # the first item, whose mark was removed
        start = 0
    items = [_LIST_MARK.sub("", line, count=1) for line in lines[start:]]
    if value := candidates(items):
        return value
    items = [_LIST_MARK.sub("", line, count=1) for line in text.splitlines()]
    is_list = all(map(_LIST_MARK.match, text.splitlines())) and not any(map(RUN.search, items))
    return ", ".join(items) if is_list and len(text) <= MAX_VALUE else ""


def list_items(text: str) -> list[tuple[int, str]]:
    """Place and text of each item, without its mark, of the list that the text begins with. Empty for other texts."""
    items, at = [], 0
    for line in text.splitlines(keepends=True):
        mark = _LIST_MARK.match(line)
        if not mark and line.strip():
            break
        if mark:
            items.append((at + mark.end(), line[mark.end() :].rstrip("\n")))
        at += len(line)
    return items


def candidates(items: list[str]) -> str:
    """The values of items that differ in nothing else, with "or" between them. Empty for other items."""
    runs = [list(RUN.finditer(item)) for item in items]
    if len(items) < 2 or any(len(each) != 1 for each in runs):
        return ""
    values = [run for (run,) in runs]
    wordings = {
        strip_markup(f"{item[: run.start()]}#{item[run.end() :]}").lower()
        for item, run in zip(items, values, strict=True)
    }
    return " or ".join(strip_markup(run[0]) for run in values) if len(wordings) == 1 else ""


def _words(text: str, clean: str, tail: str) -> ParsedAnswer:
    """The answer of a text without digits: its name, its last short line, or a number in words."""
    clean = clean.rpartition("? ")[2] or clean
    clean = foreign_sentence(clean)[0] if is_denied(clean) else clean
    lines = clean.splitlines()
    is_short = len(lines) == 1 or (lines and len(lines[-1].split()) <= 5)
    name = _name(clean)
    value = bare_value(name or REASON.split(lines[-1], maxsplit=1)[0] if is_short else clean)
    spelled = number_in_words(value)
    is_number = spelled is not None and len(spelled[1].split()) < 2
    digits = with_digits(tail)
    if digits == tail or is_number or (name and not value[:1].islower()):
        return ParsedAnswer(text, value, "statement")
    return ParsedAnswer(text, unmarked_answer(digits).value, "fallback")


def _name(text: str) -> str:
    """The name at the end of the last sentence, "The capital of France is Paris", or empty."""
    sentence = without_lead_in(SENTENCE.split(text[-MAX_VALUE:])[-1])
    *before, clause = _HENCE.split(sentence)
    name = None if any(map(NOT.search, before)) else _NAMED.fullmatch(REASON.split(clause, maxsplit=1)[0].strip())
    return _YEAR.sub("", name[1]) if name else ""


def sentence_value(text: str) -> tuple[str, Literal["statement", "fallback"]] | None:
    """The value and its source in a sentence, or None if there is none or it is denied."""
    text = without_lead_in(_DESCRIBED.sub("It is ", strip_markup(_HEAD.sub("", text[-MAX_VALUE:])), count=1))
    if not text.isascii() or is_denied(text):
        text, is_wrong = foreign_sentence(text)
        if is_wrong:
            return None
    if _DOUBTED.match(text):
        return None
    if supposed := _SUPPOSED.match(text):  # "If x were 42, we would get 43"
        text = text[supposed.end() :]
    if wrong := WRONG.search(text):  # "42 is wrong, it is 43"
        clause = next(reversed(list(_CLAUSE.finditer(text, 0, wrong.start()))), None)
        subject, rest = text[clause.end() if clause else 0 : wrong.start()], text[wrong.end() :]
        if run := RUN.search(subject):
            before = text[: clause.start() if clause else 0]
            listed = next(reversed(list(RUN.finditer(before))), None)  # "41 and 42 is wrong" denies both
            start = wrong.start() - len(subject) + run.start()
            is_plural = wrong[0].lower().startswith(("are", "were")) and not before.rstrip().endswith(",")
            before = "" if is_plural or (listed and JOINED.fullmatch(text, listed.end(), start)) else before
            return sentence_value(rest) or sentence_value(before)
        if not subject.strip() and not rest.strip(" .!"):  # "42, which is wrong"
            return None
    return _affirmed_value(text)


def _affirmed_value(text: str) -> tuple[str, Literal["statement", "fallback"]] | None:
    """The value and its source in a sentence that denies no value after it states it."""
    runs = list(RUN.finditer(text))
    corrected = CORRECTED.search(text, runs[0].end()) if runs else None
    if corrected and (again := sentence_value(text[corrected.end() :])):
        return again
    if _is_expression(text) and (runs or STARTS.match(text)):
        return bare_value(text), "statement"
    clauses = [clause.end() for clause in _HENCE.finditer(text)]
    if clauses and _stated_value(rest := text[clauses[-1] :])[1]:  # Mary is 10, so John is 15
        text = rest
        runs = list(RUN.finditer(text))
    at, value = _stated_value(text)
    source: Literal["statement", "fallback"] = "statement" if value else "fallback"
    if not value:
        if (last := _last_run(text, runs)) is None:
            return None
        at, value = last.start(), _balanced(last[0])
        if bound := _BOUND.search(text, 0, at):
            at, value = bound.start(), bound[0] + value
    if TAKEN_BACK.match(text, at + len(value)):
        return None
    before = next((run for run in reversed(runs) if run.end() <= at), None)
    if before:  # "maybe 41, maybe 42": neither
        between = text[before.end() : at]
        if (
            (_HEDGE.search(between) and not _COMPUTED.search(between))
            or JOINED.fullmatch(between)
            or _BETWEEN.search(text, 0, before.start())
            or (source == "fallback" and _RANGE.search(text, 0, before.start()))
        ):
            at, value = before.start(), text[before.start() : at] + value
            if _is_denied(text[:at]):
                return None
    is_first = "," in value and runs and at == runs[0].start() > 0
    if is_first and text[at - 1] in "([" and text[at + len(value) :][:1] in {")", "]"}:  # It lies in (0, 1)
        value = text[at - 1 : at + len(value) + 1]
    return bare_value(value), source


def _last_run(text: str, runs: list[re.Match[str]]) -> re.Match[str] | None:
    """The last value that is not denied, the size of a whole, or an operand, or None for "I cannot say"."""
    if runs and _GIVEN.match(text) and text.rfind(", ") >= runs[-1].end():  # "Since 12 is divisible by 4, yes"
        return None
    for run in reversed(runs if not _REFUSING.search(text) else []):
        before = text[: run.start()]
        if _OPERATOR.search(before):  # (x + 2)(x - 5)
            return None
        if not _is_denied(before) and not _WHOLE.search(before):
            return run
    return None


def _stated_value(text: str) -> tuple[int, str]:
    """Position and text of the value after a verb or "=", else at the start of the sentence."""
    at, value, is_part = 0, "", False
    is_given = _GIVEN.match(text)  # "Since x is 2, y is 4"
    found = RUN.finditer(text) if "$" in text or "\\" in text else ()
    formulas = [run.span() for run in found if run[0].startswith(("$", "\\(", "\\["))]
    for copula in _COPULA.finditer(text):
        formula = next((start for start, stop in formulas if start < copula.start() < stop), None)
        end = copula.end() if formula is None else formula  # $y = 2x$
        if value and not is_part and text.endswith("which ", 0, copula.start()):  # 30 degrees, which is half of 60
            continue
        is_value = STARTS.match(text, end) and not _is_denied(text[: copula.start()])
        if is_value and (statement := without_remark(text[end:])):
            at, value = end, statement
            is_part = _PART_OF.match(text, end) is not None
            if _is_expression(statement) and not is_given and not is_part:
                return at, value
    is_sum = value != "" and "=" in text[:at].rstrip()[-1:]
    if STARTS.match(text) and not is_sum:  # "42 is 6 times 7", "42 apples are left"
        return 0, without_remark(text)
    return at, value


def _is_denied(before: str) -> bool:
    clause = _CLAUSE.split(before)[-1]
    return (NOT.search(clause) or _THOUGHT.search(clause) or _NO_VALUE.search(clause)) is not None


def _is_expression(text: str) -> bool:
    return len(text) <= MAX_VALUE and not _FOREIGN.search(_TEXT.sub("", text) if "\\" in text else text)


def without_remark(text: str) -> str:
    """A value without remarks after it."""
    remark = _REMARK.search(text)
    return text[: remark.start()] if remark else text


def _balanced(text: str) -> str:
    if not text.endswith((")", "]", "}")) or not any(map(str.isalnum, text)):
        return text
    opened, closed = (sum(map(text.count, signs)) for signs in ("([{", ")]}"))
    return text[:-1] if opened < closed else text


def without_lead_in(text: str) -> str:
    """The text without lead-ins such as "so" and "I think it's"."""
    text = text.lstrip()
    while lead := _LEAD.match(text):
        text = text[lead.end() :]
    return text


def strip_markup(text: str) -> str:
    """The text without surrounding white space and markup, and without closing punctuation."""
    text = text.strip()
    if text.isalnum():
        return text
    if "**" in text:
        text = _BOLD.sub(r"\1", text)
    is_formula = False
    for _ in range(6):
        before = text
        text = _without_punctuation(text, is_formula=is_formula)
        if text.count("$") == 1:
            text = _OPEN.sub("", text)
        for sign in ("**", "*"):  # "**Answer: 42**"
            if text.count(sign) == 1 and (text.endswith(sign) or (text.startswith(sign) and not text.startswith("* "))):
                text = text.removesuffix(sign).removeprefix(sign)
        if text.startswith('"') and text.count('"') == 1:  # "Paris!", whose mark ended the sentence
            text = text[1:]
        if text.startswith(("\\", "{")) and (wrapped := _WRAPPED.fullmatch(text)):
            text = str(wrapped[wrapped.lastindex or 0])
        for opening, closing in _PAIRS if text[:1] in _OPENINGS else ():
            inner = text[len(opening) : -len(closing)]
            if inner and text == opening + inner + closing and opening not in inner:
                is_formula = opening in _FORMULA_SIGNS
                text = text if is_formula and _NUMBER_FACTORIAL.search(inner) else inner
                break
        if text == before:
            break
    return text


def _without_punctuation(text: str, *, is_formula: bool) -> str:
    """The text without closing punctuation and ornaments. The sign of a factorial remains."""
    is_factorial = is_formula or (text.endswith("!") and _FACTORIAL.search(text))
    text = _balanced(_SPACES.sub("", text.strip()).rstrip(",;:?\u3002" if is_factorial else ",;:!?\u3002").strip())
    if text.endswith(".") and not text.endswith("..."):
        text = text[:-1].rstrip()
    return text if _REPEATING.search(text) else text.rstrip(_ORNAMENTS)


def bare_value(text: str) -> str:
    """A value without markup and lead-in. For a calculation, its result."""
    text = strip_markup(text)
    if len(text) > MAX_VALUE or text.isalnum():
        return text
    text = _EITHER.sub(r" or \1", strip_markup(without_lead_in(text)))
    if choice := _CHOICE.fullmatch(text):
        return str(choice[choice.lastindex or 0])
    if STARTS.match(text):
        text = _ROUNDED.sub("", text)
    if ("=" in text or "\u2248" in text or "\\approx" in text) and not re.search("[<>]|!=", text):
        left, _, rounded = text.replace("\\approx", "\u2248").partition("\u2248")
        name, _, exact = left.rpartition("=")
        if rounded and _LETTER.search(_TEXT.sub("", _COUNTED.sub("", exact))):  # v = \sqrt{2gh} = 4.4
            text = left = f"{(name or exact).partition('=')[0]}={rounded}"
        sum_, _, result = (left or text).rpartition("=")
        sum_ = sum_ or result
        if _LETTER.search(result):  # 3 m = 300 cm; in 3m = 300, m may be the unknown
            sum_ = _MEASURED.sub("", sum_)
        if not _LETTER.search(_TEXT.sub("", _COUNTED.sub("", sum_))):  # 6 * 7 = 42, 6 kg + 7 kg = 13 kg
            if text.count("$") == 2 and not result.lstrip().startswith("$"):  # $2 + 3 = 5$ ways
                result = result.replace("$", "")
            text = text if _VARIABLE.fullmatch(result) else result.strip()  # 5 = x
    return text
