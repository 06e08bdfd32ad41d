"""Which values are secret, by the names they go by, and how they are shown."""

from __future__ import annotations

import re
from collections.abc import Mapping

HIDDEN = "(hidden)"
ANYWHERE = frozenset("SECRET PASSWORD PASSWD PASSPHRASE CREDENTIAL CREDENTIALS".split())
LAST = frozenset("KEY TOKEN APIKEY PAT AUTH PASS PWD".split())
OF_OPTION = re.compile(r"(api|access|auth|bearer|hf|private|wandb)[-_]?(key|token)$")
WITH_PASSWORD = re.compile(r"://[^\s/:@]*:[^\s/@]+@")
PLACES = frozenset("FILE PATH DIR".split())
"""Words that end the name of a place: where a secret lies is none."""


def is_secret(name: str, value: object = None) -> bool:
    """True for a variable that by convention holds a secret, or whose value has a password in it.

    WANDB_API_KEY, HF_TOKEN, DB_PASSWORD_2; not TOKENIZERS_PARALLELISM, MAX_TOKENS, PWD,
    AWS_SHARED_CREDENTIALS_FILE.
    """
    if has_password(value):
        return True
    words = _words(name)
    if not words or words[-1] in PLACES or words == ["PWD"]:
        return False
    return words[-1] in LAST or not ANYWHERE.isdisjoint(words)


def is_secret_option(name: str) -> bool:
    """True for an option that takes a secret: --wandb-api-key; not --fim-eod-token, a word's."""
    words = _words(name)
    if not words or words[-1] in PLACES:
        return False
    return bool(OF_OPTION.search(name.lower())) or not ANYWHERE.isdisjoint(words)


def has_password(value: object) -> bool:
    """True for a text with an address like http://user:password@proxy in it."""
    return isinstance(value, str) and bool(WITH_PASSWORD.search(value))


def _words(name: str) -> list[str]:
    return [word.upper() for word in re.split(r"[^A-Za-z0-9]+", name) if word]


def redact(env: Mapping[str, str | None]) -> dict[str, str | None]:
    """`env` with its secret values hidden; None, the launcher's own value by name, stays."""
    return {
        name: HIDDEN if value is not None and is_secret(name, value) else value
        for name, value in env.items()
    }


def redacted(argv: tuple[str, ...]) -> tuple[str, ...]:
    """`argv` with the values of secret options hidden: `--api-key X` and `--api-key=X`.

    So is an address with a password in it.
    """
    shown, hide = list[str](), False
    for word in argv:
        option, equals, value = word.partition("=")
        if word.startswith("--"):
            hide = is_secret_option(option)
            hidden = equals and (hide or has_password(value))
            shown.append(f"{option}={HIDDEN}" if hidden else word)
        else:
            shown.append(HIDDEN if hide or has_password(word) else word)
    return tuple(shown)


def holds_secret(key: str, value: object = None) -> bool:
    """True where a dotted key, or a key of the mapping that is its value, names a secret."""
    if any(is_secret(part) for part in key.split(".")):
        return True
    return isinstance(value, Mapping) and any(
        holds_secret(str(name), inner) for name, inner in value.items()
    )
