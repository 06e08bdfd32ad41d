"""Recognises secret values by their names or their form, and hides them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

HIDDEN = "(hidden)"
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
"""A word of a name: HF_TOKEN_2, hfToken and API-Key have two each."""
ALWAYS = re.compile(
    r".*(PASSW((OR|R)?DS?)?|PASSPHRASE|PASSCODE|SECRET|CREDENTIALS?|AUTHORIZATION|BEARER"
    r"|WEBHOOKS?|SIGNATURE|SESS(ION)?ID|(API|ACCESS|ACCOUNT|PRIVATE|SECRET)KEY|(DB|PG|SMTP|SSH)PASS)"
)
LAST = frozenset(
    "APIKEY PAT AUTH PW PWD PSWD COOKIE COOKIES CRED CREDS JWT NETRC SIG SESSION".split()
)
OPENING = frozenset(
    "ACCESS ACCOUNT API AUTH BEARER DEPLOY ENCRYPTION LICENSE MASTER PRIVATE SECRET SHARED SIGNING"
    " STORAGE SUBSCRIPTION".split()
)
"""Words before KEY, KEYS or TOKENS that make a secret of it, whatever follows."""
ORDINARY = frozenset(
    (
        "BOS CLASS CLS DISPATCHER DROP END EOD EOS EVENTS FIM GENERATED ID IDS IMAGE LENGTH LOSS"
        " MASK MAX MIDDLE MIN MOE NUM PAD PER PREFIX SEP SKIP SPECIAL START STOP SUFFIX TYPE UNK"
        " VIDEO VISION"  # the tokens of texts
        " CACHE JSON PRIMARY PUBLIC QUERY SORT TEXT"  # keys of data
        " BACKWARD FIRST FORWARD SECOND"  # passes of a program
        " DESKTOP"  # the session of a screen
    ).split()
)
"""Words beside TOKEN, KEY, PASS and SESSION that make none of it."""
PLACES = frozenset("FILE PATH DIR".split())
"""Words that end the name of a place: where a secret lies is none."""
NO_VALUE = re.compile(r"|(?i:true|false|yes|no|on|off|none|null)|\$([A-Z_\d]+|\{.*|\(.*)", re.S)
"""A flag or a variable of a shell: no secret under any name."""
PLAIN = re.compile(r"-?\d[\d.]{0,11}|<[^<>\s]*>|\[\w+\]|\$\w+.*|(\.{0,2}|~)/[\w./-]*", re.S)
"""A number, <eos>, [CLS], $name or a path: no secret under a name that other things have too."""
WORDS = re.compile(r"[A-Za-z]{1,15}([ _./-][A-Za-z]{1,15}){0,8}")
SHORT = 8
"""What an option such as --input-key takes: words, or less than any key has."""

LONGEST = 128 << 10
"""Bytes of an argument or a variable that Linux refuses (MAX_ARG_STRLEN, execve(2))."""
TOKENS = re.compile(
    "|".join(
        (
            r"\bhf_[A-Za-z0-9]{30}",
            r"\bgh[opsur]_[A-Za-z0-9]{30}|\bgithub_pat_\w{30}|\bglpat-[\w-]{20}|\bnpm_[A-Za-z0-9]{30}",
            r"\bsk-(?=[\w-]{0,40}\d)[\w-]{20}|\b[rs]k_(live|test)_\w{16}|\bnvapi-[\w-]{20}",
            r"\bxox[abeprs]-[\w-]{10}|\bgsk_\w{40}|\br8_\w{30}|\bhvs\.[\w-]{20}|\bSG\.[\w-]{16,40}\.",
            r"\bA(KIA|SIA)[A-Z0-9]{16}|\bAIza[\w-]{30}|\bya29\.[\w-]{20}|\b(pypi|dckr_pat)[-_][\w-]{20}",
            r"\beyJ[\w-]{10,500}\.[\w-]{10,500}\.",
            r"[?&]code=[\w%+/.-]{20}",
            r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY",
            r"\b[Bb]earer\s+[\w.~+/=-]{8}|\bBasic\s+[A-Za-z0-9+/]{16}",
        )
    )
)
"""Tokens as well-known services give them, and headers."""
USERINFO = re.compile(
    r"https?://[^\s/@]{1,400}@|://[^\s/@:]{0,200}:[^\s/@]{1,200}@"
    r"|(?<![^\s/@])[^\s:/@]{1,200}:[^\s:/@][^\s/@]{0,200}@(?!sha256:|\d{1,5}(?:\s|$))[\w\[]"
)
"""A name and a password before a host."""
ADDRESS = re.compile(r"://[^\s?]{1,400}")
HOOK = re.compile(r"hooks?(b2)?[./](.{0,200}[./])?(?=[\w-]{0,60}\d)[\w-]{8}|/bot\d{5,20}:", re.I)
"""In the address of a chat's webhook, which is all that is needed to write there."""
LOGIN = re.compile(r"\b(?:machine|login)\s+\S{1,200}\s.{0,400}?\bpassword\s+\S", re.S)
"""A line of ~/.netrc: machine H login U password P."""
NAMED = re.compile(
    r"""(?<![\w.-])(?:--([A-Za-z][\w-]{0,80})[=\s]|([A-Za-z_][\w.-]{0,80})\\{0,4}["']?\s{0,8}[=:]"""
    r"""|(?<=<)([A-Za-z_][\w.-]{0,80})>)[\s\[{\\"']{0,16}(?=([^\s;&,"'\\}\])<]{1,400}))"""
)
"""What gives a value in a text a name: --token X, AccountKey=X, X-Api-Key: X, "api_key": "X"."""
NAME = re.compile(r"-{0,2}[A-Za-z_][\w.-]*")
"""An option, or what is given a value without being one: wandb.api_key=X."""


def is_secret(name: str, value: object = None) -> bool:
    """True for a name that by convention is a secret's, or a value that looks like a credential.

    WANDB_API_KEY, HF_TOKEN_2, dbPassword; not TOKENIZERS_PARALLELISM, EOS_TOKEN_ID, PWD,
    AWS_SHARED_CREDENTIALS_FILE.
    """
    return has_credential(value) or (name != "PWD" and is_secret_option(name, value))


def is_secret_option(name: str, value: object = None) -> bool:
    """True for an option that takes a secret: --wandb-api-key; not --fim-eod-token, a word's.

    A `value` that can't be one decides where a name has several meanings: --input-key question.
    """
    sure, likely = _kind(name)
    if isinstance(value, bool) or not (sure or likely):
        return False
    text = None if value is None else str(value)
    if text is None or sure:
        return text is None or not NO_VALUE.fullmatch(text)
    of_data = name.lower().endswith(("key", "keys")) and (name == "KEY" or not name.isupper())
    if of_data and (len(text) < SHORT or WORDS.fullmatch(text)):
        return False
    return not (NO_VALUE.fullmatch(text) or PLAIN.fullmatch(text))


@lru_cache(maxsize=1 << 12)
def _kind(name: str) -> tuple[bool, bool]:
    """Whether a name is always a secret's, and whether it is one's unless the value says no."""
    words = [word.upper() for word in WORD.findall(name)]
    if not words or words[-1] in PLACES:
        return False, False
    around = list(zip(["", *words], words, [*words[1:], ""], strict=False))
    last = words[-1] in LAST and not ORDINARY.intersection(words[-2:-1])
    opened = any(
        word in ("KEY", "KEYS", "TOKENS") and before in OPENING and after not in ORDINARY
        for before, word, after in around
    )
    return opened or any(map(ALWAYS.fullmatch, words)), last or any(_likely(*one) for one in around)


def _likely(before: str, word: str, after: str) -> bool:
    """Whether a word between two others, "" for none, is probably a secret's."""
    token = word.endswith("TOKEN") and word != "TIKTOKEN"
    return (token or (word in ("KEY", "PASS") and not after)) and ORDINARY.isdisjoint(
        (before, after)
    )


def has_credential(value: object) -> bool:
    """True for a text with a credential in it: http://user:password@proxy, hf_…, --token X.

    A text that is longer than Linux lets an argument or a variable be counts as one.
    """
    return isinstance(value, str) and (len(value) >= LONGEST or _has_credential(value))


@lru_cache(maxsize=1 << 10)
def _has_credential(text: str) -> bool:
    if any(form.search(text) for form in (TOKENS, USERINFO, LOGIN)):
        return True
    if any(HOOK.search(address[0]) for address in ADDRESS.finditer(text)):
        return True
    return any(is_secret_option(one[1] or one[2] or one[3], one[4]) for one in NAMED.finditer(text))


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
    shown, option = list[str](), ""
    for word in argv:
        name, equals, value = word.partition("=")
        is_name = NAME.fullmatch(name) and (word.startswith("--") or not is_secret_option(option))
        is_option = is_name and word.startswith("-")
        option = name if is_option else option
        if is_name and equals and is_secret(name, value):
            shown.append(f"{name}={HIDDEN}")
        else:
            secret = has_credential(word) or (not is_option and is_secret_option(option, word))
            shown.append(HIDDEN if secret else word)
    return tuple(shown)


def holds_secret(key: str, value: object = None) -> bool:
    """True where a dotted key, or a key of the mapping that is its value, names a secret.

    So it is where a text in it looks like one.
    """
    if any(is_secret(part, value) for part in key.split(".")):
        return True
    if isinstance(value, list):
        return any(holds_secret("", inner) for inner in value)
    return isinstance(value, Mapping) and any(
        holds_secret(str(name), inner) for name, inner in value.items()
    )
