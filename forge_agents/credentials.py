"""Finds keys, tokens and passwords that must not reach records, reports or the programs that models control."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HIDDEN = "(hidden)"
_VARIABLE = re.compile(
    r"TOKEN(?!S|IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|APIKEY|WEBHOOK|NETRC|GPG_AGENT_INFO|KRB5CCNAME"
    r"|ASKPASS|IPC_HANDLE|IDENTITY_HEADER|KUBECONFIG|PGPASSFILE|DOCKER_CONFIG|DBUS_SESSION_BUS_ADDRESS"
    r"|CONFIG_DATA|(?:OP|BW)_SESSION|CONN(?:ECTION)?_?STR"
    r"|(?:DATABASE|DB|MONGO(?:DB)?|POSTGRES(?:QL)?|MYSQL|REDIS|AMQP|BROKER|RABBITMQ)_UR[IL]"
    r"|(?:^|_)(?:KEYS?|PASS|PW|PAT|CREDS?|O?AUTH|AUTHORIZATION|DSN|JWT|SAS)(?:_|$)|(?:KEYS?|XAUTHORITY|_PWD)$"
    r"|BEARER|MNEMONIC|SEED_?PHRASE|WALLET_SEED|(?<!BY)(?<!COM)PASS(?:FILE)?$|[A-Z]PW$",
    re.IGNORECASE,
)
"""Names of environment variables that hold a credential or locate a process or file with one."""
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_ARGUMENT = re.compile(
    r"(?:api|auth|access|private|secret|signing|encryption)_?keys?$|secret|passw(?:or)?d|passphrase|(?:^|_)pwd$"
    r"|credential|cookie|(?:^|_)auth(?:orization)?$"
    r"|(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!end_)(?<!mask_)(?<!stop_)(?<!start_)(?<!special_)token$"
)
"""Names of arguments that hold a credential. "token" alone may also be a tokenizer's."""
_KEY = re.compile(r"(?:^|_)(?:key|pat|pass|dsn|webhook)$")
"""Names of arguments that may hold a credential or something harmless, such as the key of a mapping."""
_LEAST_SECRET = 6
"""Minimum length of the values of environment variables that are searched for in texts."""
_RANDOM = re.compile(r"(?=\S*\d)(?=\S*[A-Za-z])[\w.~+/=:-]{12,}")
"""Texts that look like a generated key."""
_TEXTS = re.compile(
    r"""
    (?<![\w-]) (?:
        (?:sk|rk|pk|pplx|xai|nvapi|glpat|xapp|xox[abeoprs]) - (?=[\w-]*\d) [\w-]{8,}
      | (?:hf|gsk|gh[opsur]|r8|npm|dop_v1|tgp_v1|lsv2|github_pat) _ (?=\w*\d|\w{16}) \w{8,}
      | AIza [\w-]{16,} | A[KS]IA [A-Z0-9]{12,} | ya29\. [\w-]{8,} | pypi- [\w-]{16,}
      | (?:sk|rk|pk)_(?:live|test)_ \w{8,} | SG\. [\w-]{8,} \. [\w-]{8,} | key- [0-9a-f]{32} | HRKU- [\w-]{8,}
      | (?:lin_api|ntn|figd|shpat)_ (?=\w*\d) \w{8,} | pul- [0-9a-f]{16,} | ATATT \w{16,} | \d{6,12} :AA [\w-]{30,}
      | eyJ [\w-]{8,} \. eyJ [\w-]+ (?:\.[\w-]*)?
    )
    | (?<= ://) [^/@:\s]* : [^/\s]+ (?= @)
    | -----BEGIN\ (?:[A-Z]+\ ){0,3} PRIVATE\ KEY----- [\w+/=\s:,-]*
    """,
    re.VERBOSE,
)
"""Keys with the prefixes of known providers, JSON web tokens, passwords in URLs, and private keys."""
_SCHEME = re.compile(r"\b(bearer\s+|(?:basic|token)\s+(?=[^\s'\"]*\d|[^\s'\"]{20}))[\w.~+/=:-]{8,}", re.IGNORECASE)
_ASSIGNED = re.compile(
    r"((?<![A-Za-z])(?:(?:(?:api|access|account|auth|private|secret)[-_]?key|(?:access|auth|refresh|bearer)[-_]?token)"
    r"[\"']?\s*[=:]\s*[\"']?|(?:token|secret|password|passwd)=[\"']?))[^\s\"'&,;]+",
    re.IGNORECASE,
)
"""A credential after its name, as in a command line or the query of a URL."""
_FLAG = re.compile(r"(?<![\w-])(--?([A-Za-z][\w-]*)[ \t]+[\"']?)((?!-)[^\s\"']+)")
"""A flag and its value within a command line."""
_ADDRESS = re.compile(r"\b(?:https?|wss?)://[^\s/\"'<>]+/[^\s\"'<>?#]*", re.IGNORECASE)
_PATH_KEY = re.compile(
    r"(:\d{2,5}/(?=[\w-]*\d)(?=[\w-]{16})|/(?=[\w-]*\d)(?=[\w-]*[A-Z])(?=[\w-]*[a-z])(?=\w{20}|[\w-]{40}))"
    r"[\w-]+(?![\w-]|\.\w)"
)
"""A part of an address that looks generated, as of webhooks and servers of OpenEnv. After a port it may be short."""


def is_secret_variable(name: str, value: str = "") -> bool:
    """Return whether an environment variable may hold a credential, by its name and by its value."""
    return bool(_VARIABLE.search(name)) or without_keys(value) != value  # the paths of addresses may be harmless


def is_secret(name: Any, value: Any) -> bool:
    """Return whether an argument holds a credential, by its name, and by its value if the name is ambiguous."""
    if not isinstance(value, str | bytes | list | tuple | Mapping) or not value:
        return False
    plain = _CAPITAL.sub("_", str(name)).replace("-", "_").lower()
    return bool(_ARGUMENT.search(plain)) or (
        bool(_KEY.search(plain)) and isinstance(value, str) and bool(_RANDOM.fullmatch(value))
    )


def redact(text: str) -> str:
    """Return `text` with ``(hidden)`` instead of each text in the form of a known credential."""
    return without_keys(_ADDRESS.sub(lambda address: _PATH_KEY.sub(rf"\1{HIDDEN}", address[0]), text))


def without_keys(text: str) -> str:
    """Return `text` as `redact` does, but with whole addresses: their paths may hold a token, or name a service."""
    for pattern in (_ASSIGNED, _SCHEME):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    text = _FLAG.sub(lambda flag: f"{flag[1]}{HIDDEN}" if is_secret(flag[2], flag[3]) else flag[0], text)
    return _TEXTS.sub(HIDDEN, text)


def secret_items(items: Sequence[Any]) -> list[bool]:
    """Return whether each item is a credential by the flag before it, as in the arguments of a command."""
    flags = [each.lstrip("-") if isinstance(each, str) and each.startswith("-") else "" for each in items]
    return [bool(flag) and is_secret(flag, each) for flag, each in zip(("", *flags), items, strict=False)]


def redact_command(words: Sequence[str]) -> str:
    """Return a command line in shell syntax, with ``(hidden)`` instead of each credential.

    Credentials are values of flags or variables with the name of a credential, values of such variables of this
    process, and texts in the form of a known credential.
    """
    secrets = {value for name, value in os.environ.items() if len(value) >= _LEAST_SECRET and is_secret_variable(name)}

    def redacted() -> Iterator[str]:
        for word, is_flags_secret in zip(words, secret_items(words), strict=True):
            name, equals, value = word.partition("=")
            if is_flags_secret:
                yield HIDDEN
            elif value and (is_secret_variable(name) or is_secret(name.lstrip("-"), value)):
                yield f"{name}{equals}{HIDDEN}"
            else:
                yield redact(re.sub("|".join(map(re.escape, secrets)), HIDDEN, word) if secrets else word)

    return shlex.join(redacted())
