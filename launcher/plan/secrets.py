"""Which values are secret, by the names they go by or their own look, and how they are shown."""

from __future__ import annotations

import re
from collections.abc import Mapping

HIDDEN = "(hidden)"
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
"""A word of a name: HF_TOKEN_2, hfToken and API-Key have two each."""
ALWAYS = re.compile(
    r".*(PASSWORDS?|PASSWD|PASSPHRASE|SECRET|CREDENTIALS?|AUTHORIZATION|BEARER"
    r"|(API|ACCESS|ACCOUNT|PRIVATE|SECRET)KEY|(DB|SMTP|SSH)PASS)"
)
LAST = frozenset("APIKEY PAT AUTH PWD".split())
OPENING = frozenset(
    "ACCESS ACCOUNT API AUTH BEARER ENCRYPTION MASTER PRIVATE SECRET SIGNING".split()
)
"""Words before KEY, KEYS or TOKENS that make a secret of it, whatever follows."""
ORDINARY = frozenset(
    (
        "BOS CLS DISPATCHER DROP EOD EOS EVENTS FIM GENERATED ID IDS LENGTH LOSS MASK MAX MIDDLE"
        " MIN MOE NUM PAD PER PREFIX SEP SKIP SPECIAL SUFFIX TYPE UNK"  # the tokens of texts
        " CACHE JSON PRIMARY PUBLIC QUERY SORT TEXT"  # keys of data
        " BACKWARD FIRST FORWARD SECOND"  # passes of a program
    ).split()
)
"""Words beside TOKEN, KEY and PASS that make none of it."""
PLACES = frozenset("FILE PATH DIR".split())
"""Words that end the name of a place: where a secret lies is none."""

LOOKS_SECRET = re.compile(
    "|".join(
        (
            r"https?://[^\s/@]{1,400}@",
            r"://[^\s/@:]{0,200}:[^\s/@]{1,200}@",
            r"[^\s:/@]{1,200}:[^\s:/@][^\s/@]{0,200}@(?!sha256:)[\w\[]",
            r"\bhf_[A-Za-z0-9]{30}",
            r"\bgh[opsur]_[A-Za-z0-9]{30}|\bgithub_pat_\w{30}|\bglpat-[\w-]{20}",
            r"\bsk-(?=[\w-]{0,40}\d)[\w-]{20}|\bnvapi-[\w-]{20}|\bxox[abprs]-[\w-]{10}",
            r"\bA(KIA|SIA)[A-Z0-9]{16}|\bAIza[\w-]{30}|\b(pypi|dckr_pat)[-_][\w-]{20}",
            r"\beyJ[\w-]{10,500}\.[\w-]{10,500}\.",
            r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY",
            r"\b[Bb]earer\s+[\w.~+/=-]{8}|\bBasic\s+[A-Za-z0-9+/]{16}",
        )
    )
)
"""A name and a password before a host, tokens as well-known services give them, headers, keys."""
NAMED = re.compile(r"(?:--([\w-]{1,60})[=\s]|\b([\w.-]{1,60})=|\b(Authorization):)\s*[^\s;&]")
"""What gives something in a text a name: --token X, AccountKey=X; in a header Authorization: X."""
NAME = re.compile(r"-{0,2}[A-Za-z_][\w.-]*")
"""An option, or what is given a value without being one: wandb.api_key=X."""


def is_secret(name: str, value: object = None) -> bool:
    """True for a name that by convention is a secret's, or a value that looks like a credential.

    WANDB_API_KEY, HF_TOKEN_2, dbPassword; not TOKENIZERS_PARALLELISM, EOS_TOKEN_ID, PWD,
    AWS_SHARED_CREDENTIALS_FILE.
    """
    return has_credential(value) or (name != "PWD" and is_secret_option(name))


def is_secret_option(name: str) -> bool:
    """True for an option that takes a secret: --wandb-api-key; not --fim-eod-token, a word's."""
    words = [word.upper() for word in WORD.findall(name)]
    if not words or words[-1] in PLACES:
        return False
    if words[-1] in LAST or any(map(ALWAYS.fullmatch, words)):
        return True
    return any(map(_opens, ["", *words], words, [*words[1:], ""]))


def _opens(before: str, word: str, after: str) -> bool:
    """Whether a word between two others, "" for none, is a secret's."""
    if word in ("KEY", "KEYS", "TOKENS") and before in OPENING and after not in ORDINARY:
        return True
    secret = (word.endswith("TOKEN") and word != "TIKTOKEN") or (
        word in ("KEY", "PASS") and not after
    )
    return secret and ORDINARY.isdisjoint((before, after))


def has_credential(value: object) -> bool:
    """True for a text with a credential in it: http://user:password@proxy, hf_…, --token X."""
    if not isinstance(value, str):
        return False
    named = (match[match.lastindex or 0] for match in NAMED.finditer(value))
    return bool(LOOKS_SECRET.search(value)) or any(map(is_secret_option, named))


def redact(env: Mapping[str, str | None]) -> dict[str, str | None]:
    """`env` with its secret values hidden; None, the launcher's own value by name, stays."""
    return {
        name: HIDDEN if value is not None and is_secret(name, value) else value
        for name, value in env.items()
    }


def redacted(argv: tuple[str, ...]) -> tuple[str, ...]:
    """`argv` with the values of secret options hidden: `--api-key X` and `--api-key=X`.

    So is any word with a credential in it, and `api_key=X`.
    """
    shown, hide = list[str](), False
    for word in argv:
        name, equals, value = word.partition("=")
        is_name = NAME.fullmatch(name) and (word.startswith("--") or not hide)
        is_option = is_name and word.startswith("-")
        hide = is_secret_option(name) if is_option else hide
        if is_name and equals and (is_secret_option(name) or has_credential(value)):
            shown.append(f"{name}={HIDDEN}")
        else:
            secret = has_credential(word) or (hide and not is_option)
            shown.append(HIDDEN if secret else word)
    return tuple(shown)


def holds_secret(key: str, value: object = None) -> bool:
    """True where a dotted key, or a key of the mapping that is its value, names a secret.

    So it is where a text in it looks like one.
    """
    if has_credential(value) or any(is_secret(part) for part in key.split(".")):
        return True
    if isinstance(value, list):
        return any(map(has_credential, value))
    return isinstance(value, Mapping) and any(
        holds_secret(str(name), inner) for name, inner in value.items()
    )
