"""Which names are secrets', and that no secret is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cli.describe import describe
from launcher.errors import UsageError
from launcher.plan import secrets, source
from launcher.plan.image import Facts
from launcher.plan.plan import make_plan
from launcher.plan.secrets import HIDDEN
from tests.plans import HOST, STAMP

NAMES = ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "GITHUB_PAT"]
SECRETS = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=20, max_size=30)


@pytest.mark.parametrize(
    "name",
    [
        *NAMES,
        *("KEY", "TOKEN", "SECRET", "my_password", "PASSWD", "GOOGLE_CREDENTIALS"),
        *("OPENAI_APIKEY", "DB_PASSWORD_2", "SECRET_SAUCE", "NETRC_AUTH"),
        *("HF_TOKEN_2", "HFTOKEN", "MY_TOKEN_PROD", "api_key_backup", "dbPassword"),
        *("AUTHORIZATION", "hfToken", "APIKey", "MYSQL_PWD", "SSHPASS", "PGPASSWORD", "authToken1"),
        *("AccountKey", "AWS_SECRET_ACCESS_KEY_OLD", "WANDBAPIKEY", "API_KEYS", "BEARER_2"),
    ],
)
def test_a_secrets_name(name: str) -> None:
    assert secrets.is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("TOKENIZERS_PARALLELISM", "MAX_TOKENS", "NCCL_DEBUG", "KEYBOARD", "MONKEY", "PATH"),
        *("PWD", "OLDPWD", "AUTHOR", "AWS_SHARED_CREDENTIALS_FILE", "SECRETS_DIR", "TOKEN_PATH"),
        *("num_tokens", "EOS_TOKEN_ID", "AWS_ACCESS_KEY_ID", "PAD_TOKEN", "MAX_TOKEN_LENGTH"),
        *("text_key", "SORT_KEY", "FORWARD_PASS", "BYPASS", "COMPASS", "HOTKEY", "PATCH_SIZE"),
        *("NCCL_IB_HCA", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "CUDA_DEVICE_MAX_CONNECTIONS"),
        *("NVTE_FUSED_ATTN", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS", "SSH_AUTH_SOCK"),
        "",
        "_",
    ],
)
def test_another_name(name: str) -> None:
    assert not secrets.is_secret(name)


def test_options() -> None:
    secret = "--wandb-api-key --hf-token --db-password --token --auth --hf_token_2".split()
    other = (
        "--tokenizer-type --seq-length --eod-mask-loss --untie-embeddings-and-output-weights "
        "--text-key --fim-eod-token --tokenizer-model --linear-key-head-dim --json-keys "
        "--secret-file --"
    ).split()
    assert [one for one in [*secret, *other] if secrets.is_secret_option(one)] == secret


def test_no_option_of_megatron_and_no_key_of_a_run_file_is_hidden() -> None:
    from launcher.plan import arguments
    from launcher.plan.config import RunConfig

    table = arguments.table()
    options = [*table.megatron, *table.gpt]
    assert len(options) > 900
    assert [name for name in options if secrets.is_secret_option(name)] == []
    for section, field in RunConfig.model_fields.items():
        keys = getattr(field.annotation, "model_fields", {})
        assert not any(secrets.is_secret(key) for key in (section, *keys))


@pytest.mark.parametrize(
    "value",
    [
        *(
            "http://me:pw@proxy",
            "https://token@host/x",
            "redis://:pw@cache:6379/0",
            "a:b@db.example",
        ),
        *("user:pw@10.0.0.1:5432/db", "Server=x;AccountKey=abcd;", "x?sig=a&access_token=b"),
        *("DefaultEndpoints;SharedAccessKey=abc", "password=abc", "--token abc", "-x --auth=abc"),
        *(f"hf_{'a1' * 17}", f"ghp_{'a1' * 18}", f"github_pat_{'a1' * 18}", f"glpat-{'a1' * 10}"),
        *(f"sk-proj-{'a1' * 20}", f"AKIA{'A1' * 8}", f"nvapi-{'a1' * 20}", f"xoxb-{'1' * 12}-abc"),
        *("Authorization: Bearer abcdefgh", "bearer abcdefgh12", f"Basic {'YWxh' * 5}=="),
        *(f"eyJ{'a' * 20}.eyJ{'b' * 20}.{'c' * 20}", "-----BEGIN RSA PRIVATE KEY-----\nx"),
    ],
)
def test_what_looks_like_a_credential_is_hidden_whatever_its_name(value: str) -> None:
    assert secrets.is_secret("NCCL_DEBUG", value)
    env = {"SOME": value, "HF_TOKEN": "a", "WANDB_API_KEY": None, "NCCL_DEBUG": "INFO"}
    hidden = {"SOME": HIDDEN, "HF_TOKEN": HIDDEN, "WANDB_API_KEY": None, "NCCL_DEBUG": "INFO"}
    assert secrets.redact(env) == hidden
    assert secrets.redacted(("--x", value))[1] in (HIDDEN, f"{value.partition('=')[0]}={HIDDEN}")
    assert secrets.redacted((f"--x={value}",)) == (f"--x={HIDDEN}",)
    assert secrets.holds_secret("env.SOME", value)


@pytest.mark.parametrize(
    "value",
    [
        *("", "1", "INFO", "expandable_segments:True", "mlx5_0:1,mlx5_1:1", "^lo,docker0", "1e-4"),
        *("https://host/a@b:c", "ssh://user@machine", "git@host.example:a/b.git", "a.b/c:1"),
        *(f"megatron:24.10@sha256:{'0a' * 32}", "0a" * 20, "gpt2 --num-tokens 5", "--seq-length 5"),
        *("/data/token/passwords", "--xla_gpu_x=true --xla_y", "Basic training of a model", "a=b"),
        *("node0:29500", "12:30", "100*M", "NullTokenizer", "sk-learn", "me@example.org", "x: y@z"),
    ],
)
def test_an_ordinary_value_is_shown(value: str) -> None:
    assert not secrets.is_secret("NCCL_DEBUG", value)
    assert secrets.redacted(("--x", value)) == ("--x", value)


def test_a_long_value_is_looked_at_at_once() -> None:
    """A pattern that goes back and forth takes minutes for such a text."""
    for text in ("a" * 100_000, "a:" * 50_000, "a=" * 50_000, "--a " * 25_000, "://" * 30_000):
        assert not secrets.is_secret("A", text)


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (("--api-key", "a", "--lr", "1"), ("--api-key", HIDDEN, "--lr", "1")),
        (("--api-key=a=b", "c"), (f"--api-key={HIDDEN}", HIDDEN)),
        (("--lr", "1", "a"), ("--lr", "1", "a")),
        (("--proxy", "http://a:b@c:1"), ("--proxy", HIDDEN)),
        (("--proxy=http://a:b@c",), (f"--proxy={HIDDEN}",)),
        (("--url=http://c:80/a@b", "c@d"), ("--url=http://c:80/a@b", "c@d")),
        (("--token", "-a", "b", "--lr", "1"), ("--token", HIDDEN, HIDDEN, "--lr", "1")),
        (("--auth=X", "--hf_token_2=Y"), (f"--auth={HIDDEN}", f"--hf_token_2={HIDDEN}")),
        (("-token", "a", "-x", "-1"), ("-token", HIDDEN, HIDDEN, HIDDEN)),
        (("https://a@b/?c=d:e@f", "--a b=c:d@e"), (HIDDEN, HIDDEN)),
        (("wandb.api_key=a", "lr=1"), (f"wandb.api_key={HIDDEN}", "lr=1")),
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
