"""Control tokens of common chat templates, for models whose tokenizer is unknown."""

from __future__ import annotations

import re
from collections.abc import Sequence

_CONTROL = re.compile(
    r"<\|[^|>\n]{1,40}\|>|<\uff5c[^\uff5c>\n]{1,40}\uff5c>|</?s>|<</?SYS>>|<(?:start|end)_of_turn>|<\|turn>|<turn\|>"
    r"|<(?:bos|eos|pad|unk)>|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CONTENT|MODEL_SETTINGS)\]"
    r"|\]~!?b[\[\]]|\[e~\[|\[\|[^|\]\n]{1,40}\|\]|</?(?:seed:\w{1,20}|extra_id_\d+|reserved_\d+|[se]op|eo[ahm])>|\[gMASK\]"
)


def defused(text: str, tokens: Sequence[str] = ()) -> str:
    """`text` with a space in each control token of common chat templates and in each of `tokens`.

    Servers read control tokens in texts. One agent's text could otherwise open a role in another model's prompt.
    """
    text = _CONTROL.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
    for token in sorted(filter(None, tokens), key=len, reverse=True):
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return text
