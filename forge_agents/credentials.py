"""Finds keys, tokens and passwords, which must not get into records, reports and the programs that models control."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HIDDEN = "(hidden)"
_VARIABLE = re.compile(
    r"TOKEN(?!S|IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|APIKEY|WEBHOOK|NETRC|GPG_AGENT_INFO|KRB5CCNAME"
    r"|CONN(?:ECTION)?_?STR|(?:DATABASE|DB|MONGO(?:DB)?|POSTGRES(?:QL)?|MYSQL|REDIS|AMQP|BROKER|RABBITMQ)_UR[IL]"
    r"|(?:^|_)(?:KEYS?|PASS|PAT|O?AUTH|AUTHORIZATION|DSN|JWT|SAS)(?:_|$)|(?:KEYS?|SSHPASS|XAUTHORITY|_PWD)$",
    re.IGNORECASE,
)
"""Names of environment variables that hold a credential, or lead to a process or file that has one."""
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_ARGUMENT = re.compile(
    r"(?:api|auth|access|private|secret|signing|encryption)_?keys?$|secret|passw(?:or)?d|passphrase|(?:^|_)pwd$"
    r"|credential|cookie|(?:^|_)auth(?:orization)?$"
    r"|(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!end_)(?<!mask_)(?<!stop_)(?<!start_)(?<!special_)token$"
)
"""Names of arguments that hold a credential; "token" also names tokens of a tokenizer."""
_KEY = re.compile(r"(?:^|_)(?:key|pat|pass|dsn|webhook)$")
"""Names of arguments that may hold a credential or something harmless, such as the key of a mapping."""
_LEAST_SECRET = 6
"""Characters of the shortest value of an environment variable that is searched for in texts."""
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
    | (?<= ://) [^/@:\s]* : [^/\s]+ (?= @)
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


def is_secret_variable(name: str, value: str = "") -> bool:
    """Return whether an environment variable may hold a credential, by its name and by its value."""
    return bool(_VARIABLE.search(name)) or redact(value) != value


def is_secret(name: Any, value: Any) -> bool:
    """Return whether an argument holds a credential, by its name, and by its value where the name can mean both."""
    if not isinstance(value, str | bytes | list | tuple | Mapping) or not value:
        return False
    plain = _CAPITAL.sub("_", str(name)).replace("-", "_").lower()
    return bool(_ARGUMENT.search(plain)) or (
        bool(_KEY.search(plain)) and isinstance(value, str) and bool(_RANDOM.fullmatch(value))
    )


def redact(text: str) -> str:
    """Return `text` with ``(hidden)`` in the place of each credential that is known by its form."""
    for pattern in (_ASSIGNED, _SCHEME):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return _TEXTS.sub(HIDDEN, text)


def redact_command(words: Sequence[str]) -> str:
    """Return a command line as a shell takes it, with ``(hidden)`` in the place of each credential.

    Hidden are the value of a flag or variable whose name is that of a credential, the value of such a variable of this
    process, and credentials that are known by their form.
    """
    ours = {value for name, value in os.environ.items() if len(value) >= _LEAST_SECRET and is_secret_variable(name)}

    def shown() -> Iterator[str]:
        for flag, word in zip(("", *words), words, strict=False):
            name, equals, value = word.partition("=")
            if flag.startswith("-") and is_secret(flag.lstrip("-"), word):
                yield HIDDEN
            elif value and (is_secret_variable(name) or is_secret(name.lstrip("-"), value)):
                yield f"{name}{equals}{HIDDEN}"
            else:
                yield redact(re.sub("|".join(map(re.escape, ours)), HIDDEN, word) if ours else word)

    return shlex.join(shown())
