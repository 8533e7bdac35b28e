"""Finds keys, tokens and passwords, which must not get into records, reports and the programs that models control."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
_VARIABLE = re.compile(
    r"TOKEN(?!S|IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|APIKEY|(?:^|_)(?:KEYS?|PASS|PAT)(?:_|$)|(?:KEYS?|SSHPASS|_PWD)$",
    re.IGNORECASE,
)
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_ARGUMENT = re.compile(
    r"(?:api|auth|access|private|secret|signing|encryption)_?keys?$|secret|passw(?:or)?d|passphrase|(?:^|_)pwd$"
    r"|credential|cookie|(?:^|_)auth(?:orization)?$"
    r"|(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!end_)(?<!mask_)(?<!stop_)(?<!start_)(?<!special_)token$"
)
"""Names of arguments that hold a credential; "token" also names tokens of a tokenizer."""
_KEY = re.compile(r"(?:^|_)(?:key|pat|pass|dsn|webhook)$")
"""Names of arguments that may hold a credential or something harmless, such as the key of a mapping."""
_RANDOM = re.compile(r"(?=\S*\d)(?=\S*[A-Za-z])[\w.~+/=:-]{12,}")
"""Texts that look like a generated key."""
_TEXTS = re.compile(
    r"""
    (?<![\w-]) (?:
        (?:sk|rk|pk|pplx|xai|nvapi|glpat|xapp|xox[abeoprs]) - (?=[\w-]*\d) [\w-]{8,}
      | (?:hf|gsk|gh[opsur]|r8|npm|dop_v1|tgp_v1|lsv2|github_pat) _ (?=\w*\d|\w{16}) \w{8,}
      | AIza [\w-]{16,} | A[KS]IA [A-Z0-9]{12,} | ya29\. [\w-]{8,} | pypi- [\w-]{16,}
      | eyJ [\w-]{8,} \. eyJ [\w-]+ (?:\.[\w-]*)?
    )
    | (?<= ://) [^/@\s]+ : [^/@\s]+ (?= @)
    """,
    re.VERBOSE,
)
"""Keys by the beginnings that providers give them, JSON web tokens, and names with passwords in addresses."""
_SCHEME = re.compile(
    r"\b(bearer\s+|(?:basic|token)\s+(?=[^\s'\"]*\d|[^\s'\"]{20}))[\w.~+/=:-]{8,}", re.IGNORECASE
)
_ASSIGNED = re.compile(
    r"((?<![A-Za-z])(?:(?:(?:api|access|auth|private|secret)[-_]?key|(?:access|auth|refresh|bearer)[-_]?token)"
    r"[\"']?\s*[=:]\s*[\"']?|(?:token|secret|password|passwd)=[\"']?))[^\s\"'&,;]+",
    re.IGNORECASE,
)
"""A credential behind its name, as in a command line or the query of an address."""


def is_secret_variable(name: str) -> bool:
    """Return whether an environment variable of this name may hold a credential."""
    return bool(_VARIABLE.search(name))


def is_secret(name: Any, value: Any) -> bool:
    """Return whether an argument holds a credential, by its name, and by its value where the name can mean both."""
    if not isinstance(value, str | bytes | list | tuple | Mapping) or not value:
        return False
    plain = _CAPITAL.sub("_", str(name)).replace("-", "_").lower()
    return bool(_ARGUMENT.search(plain)) or (
        bool(_KEY.search(plain)) and isinstance(value, str) and bool(_RANDOM.fullmatch(value))
    )


def without_secrets(text: str) -> str:
    """Return `text` with ``(hidden)`` in the place of each credential that is known by its form."""
    for pattern in (_ASSIGNED, _SCHEME):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return _TEXTS.sub(HIDDEN, text)
