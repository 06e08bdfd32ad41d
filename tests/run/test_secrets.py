"""Which names are secrets', and that no secret is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import UsageError
from launcher.run import secrets, source
from launcher.run.describe import describe
from launcher.run.image import Facts
from launcher.run.plan import Host, Stamp, make_plan
from launcher.run.secrets import HIDDEN

HOST = Host(uid=1000, gid=100, home="/home/user", cwd="/home/user", cache="/home/user/.cache/x")
STAMP = Stamp(run="0a1b2c3d", created="2025-01-02T03:04:05+00:00")
NAMES = ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "GITHUB_PAT"]
SECRETS = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=20, max_size=30)


@pytest.mark.parametrize(
    "name",
    [
        *NAMES,
        "KEY",
        "TOKEN",
        "SECRET",
        "my_password",
        "PASSWD",
        "GOOGLE_CREDENTIALS",
        "OPENAI_APIKEY",
        "DB_PASSWORD_2",
        "SECRET_SAUCE",
        "NETRC_AUTH",
    ],
)
def test_a_secrets_name(name: str) -> None:
    assert secrets.is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "TOKENIZERS_PARALLELISM",
        "MAX_TOKENS",
        "NCCL_DEBUG",
        "KEYBOARD",
        "MONKEY",
        "PATH",
        "PWD",
        "OLDPWD",
        "AUTHOR",
        "AWS_SHARED_CREDENTIALS_FILE",
        "SECRETS_DIR",
        "TOKEN_PATH",
        "",
        "_",
    ],
)
def test_another_name(name: str) -> None:
    assert not secrets.is_secret(name)


@pytest.mark.parametrize(
    ("option", "secret"),
    [
        ("--wandb-api-key", True),
        ("--hf-token", True),
        ("--db-password", True),
        ("--fim-eod-token", False),
        ("--tokenizer-model", False),
        ("--linear-key-head-dim", False),
        ("--json-keys", False),
        ("--secret-file", False),
        ("--", False),
    ],
)
def test_options(option: str, secret: bool) -> None:
    assert secrets.is_secret_option(option) == secret


def test_no_option_of_megatron_is_hidden() -> None:
    from launcher.run import arguments

    assert [name for name in arguments.table().megatron if secrets.is_secret_option(name)] == []


def test_values_are_hidden_and_names_stay() -> None:
    env = {"HF_TOKEN": "a", "WANDB_API_KEY": None, "NCCL_DEBUG": "INFO", "P": "http://a:b@c"}
    hidden = {"HF_TOKEN": HIDDEN, "WANDB_API_KEY": None, "NCCL_DEBUG": "INFO", "P": HIDDEN}
    assert secrets.redact(env) == hidden


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (("--api-key", "a", "--lr", "1"), ("--api-key", HIDDEN, "--lr", "1")),
        (("--api-key=a=b", "c"), (f"--api-key={HIDDEN}", HIDDEN)),
        (("--lr", "1", "a"), ("--lr", "1", "a")),
        (("--proxy", "http://a:b@c:1"), ("--proxy", HIDDEN)),
        (("--proxy=http://a:b@c",), (f"--proxy={HIDDEN}",)),
        (("--url=http://c:80/a@b", "http://a@c"), ("--url=http://c:80/a@b", "http://a@c")),
        ((), ()),
    ],
)
def test_words_behind_a_secret_option_are_hidden(
    argv: tuple[str, ...], shown: tuple[str, ...]
) -> None:
    assert secrets.redacted(argv) == shown


def told(text: str, sets: list[str], rest: tuple[str, ...], path: Path) -> str:
    """What is shown of a run: the plan, or what is wrong."""
    path.write_text(text, encoding="utf-8")
    try:
        config, origin = source.load(str(path), [source.parse_set(one) for one in sets])
        plan = make_plan(config, origin, Facts("0.9.0", True), HOST, STAMP, rest=rest)
    except UsageError as error:
        return str(error)
    return describe(plan)


RIGHT = "name: a\nimage: cpu\ngpus: 0\nprogram: ./own.py\n"


@settings(max_examples=300, deadline=None)
@given(secret=SECRETS, name=st.sampled_from(NAMES), data=st.data())
def test_a_secret_is_never_shown(
    tmp_path_factory: pytest.TempPathFactory, secret: str, name: str, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "secret.yaml"
    text, sets, rest = data.draw(
        st.sampled_from(
            [
                (RIGHT + f"env: {{{name}: {secret}}}\n", [], ()),
                (RIGHT + f'env: {{{name}: "{secret}\\0"}}\n', [], ()),
                (RIGHT + f"env: {{{name}: [{secret}]}}\n", [], ()),
                (RIGHT + f"env: {name}={secret}\n", [], ()),
                (RIGHT + f"env: {{{name}: {secret}, {name}: {secret}}}\n", [], ()),
                (RIGHT + f"environment: {{{name}: {secret}}}\n", [], ()),
                (RIGHT + f"model: {{{name}: {secret}}}\n", [], ()),
                (RIGHT + f"megatron_args: {{wandb_api_key: {secret}}}\n", [], ()),
                (RIGHT, [f"env.{name}={secret}"], ()),
                (RIGHT, [f"env.{name}=[{secret}]"], ()),
                (RIGHT, [f"env.{name}=[{secret}"], ()),
                (RIGHT, [f"env={{{name}: {secret}}}"], ()),
                (RIGHT, [f"env={{{name}: {secret}"], ()),
                (RIGHT, [f"env={{{name}: {secret}}}", "model.num_layers=0"], ()),
                (RIGHT, [f"env.{name}.deeper={secret}"], ()),
                (RIGHT, [f"megatron_args.wandb_api_key={secret}"], ()),
                (RIGHT, [], ("--wandb-api-key", secret)),
                (RIGHT, [], (f"--wandb-api-key={secret}",)),
            ]
        )
    )
    shown = told(text, sets, rest, path)
    assert shown
    assert secret not in shown


def test_what_is_no_secret_is_shown(tmp_path: Path) -> None:
    text = told(RIGHT + "env: {NCCL_DEBUG: INFO, HF_TOKEN: abc}\n", [], (), tmp_path / "run.yaml")
    assert "  NCCL_DEBUG=INFO\n" in text
    assert f"  HF_TOKEN={HIDDEN}\n" in text
