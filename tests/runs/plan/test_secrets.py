"""Which names are secrets', and that no secret is shown."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import hypothesis
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import UsageError
from launcher.base.settings import ROOT
from launcher.cli.describe import describe
from launcher.runs.backends import local
from launcher.runs.backends.compose import compose_request
from launcher.runs.backends.docker import docker_request
from launcher.runs.backends.slurm import slurm_request
from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.records.provenance import kept_plan
from launcher.runs.records.record import record_of
from launcher.runs.runfile import secrets
from launcher.runs.runfile.clusters import Slurm
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.secrets import HIDDEN
from tests.plans import Planner, load, plan_of, request
from tests.tables import table

NAMES = ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "GITHUB_PAT"]
SECRETS = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=20, max_size=30)


@table("name")
def test_a_secrets_name(name: str) -> None:
    assert secrets.is_secret(name)


@table("name")
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
    from launcher.runs.plan import program_options

    table = program_options.table()
    options = [*table.megatron, *table.gpt]
    assert len(options) > 900
    assert [name for name in options if secrets.is_secret_option(name)] == []
    for section, field in RunConfig.model_fields.items():
        keys = getattr(field.annotation, "model_fields", {})
        assert not any(secrets.is_secret(key) for key in (section, *keys))


RIGHT = "name: a\nimage: cpu\ngpus: 0\nprogram: ./own.py\n"
FORMS = [
    # headers
    *("X-Api-Key: {}", "api-key:{}", "Ocp-Apim-Subscription-Key: {}", "X-Auth-Token: {}"),
    *("Authorization: Bearer {}", "bearer {}", "Authorization: token {}", "Basic {}=="),
    *("Cookie: session={}; a=b", "Set-Cookie: sid={}; Path=/", "sessionid={}; csrftoken=a"),
    # JSON, YAML, TOML, INI, XML, a dictionary
    *('{{"api_key": "{}"}}', '{{"a": {{"client_secret":"{}"}}}}', r"{{\"access_token\": \"{}\"}}"),
    *('{{"auths":{{"r.io":{{"auth":"{}"}}}}}}', "{{'password': '{}'}}", '{{"api_keys": ["{}"]}}'),
    *("user: a\npassword: {}\n", "password = {}", 'secret_key = "{}"', "<password>{}</password>"),
    # an address: who calls, what it signs, a fragment
    *("http://me:{}@proxy", "https://{}@host/x", "redis://:{}@cache:6379/0", "a:{}@db.example"),
    *(
        "user:{}@10.0.0.1:5432/db",
        "postgresql+psycopg://u:{}@h/d",
        "jdbc:m://h/d?user=a&password={}",
    ),
    *("https://b/k?X-Amz-Algorithm=A&X-Amz-Signature={}", "https://a/c?sv=2020&sp=r&sig={}%3D"),
    *("https://h/b?X-Goog-Signature={}", "https://h/x?Expires=1&Signature={}&Key-Pair-Id=K"),
    *("https://x/cb#access_token={}", "x?sig=a&access_token={}", "https://f/api/x?code={}abcd=="),
    # chats
    *("https://hooks.slack.com/services/T0A/B0A/1{}", "https://discord.com/api/webhooks/12/1{}"),
    "https://open.feishu.cn/open-apis/bot/v2/hook/1{}",
    *("https://api.telegram.org/bot123456789:{}/x", "https://h/robot/send?access_token={}"),
    "https://x.webhook.office.com/webhookb2/1@2/IncomingWebhook/1{}",
    "https://h/cgi-bin/webhook/send?key=1{}",
    # ~/.netrc, a connection, a command line
    *("machine h\n  login u\n  password {}", "default login u password {}"),
    *("Server=x;AccountKey={};", "DefaultEndpoints;SharedAccessKey={}", "Uid=me;Pwd={};"),
    *("--token {}", "-x --auth={}", "export WANDB_API_KEY={}", "curl -H 'X-Api-Key: {}' https://x"),
    # what well-known services give
    *("hf_{0}{0}", "ghp_{0}{0}", "github_pat_{0}{0}", "glpat-{}", "sk-proj-1{}", "nvapi-{}"),
    *("xoxb-{}-abc", "eyJ{0}.eyJ{0}.{0}", "-----BEGIN RSA PRIVATE KEY-----\n{}", "pypi-{}"),
]


@pytest.mark.parametrize("form", FORMS)
@given(secret=SECRETS)
@hypothesis.settings(max_examples=5)
def test_what_looks_like_a_credential_is_hidden_whatever_its_name(form: str, secret: str) -> None:
    """It was shown in dry runs and kept in records: a list of spellings had no header or JSON."""
    value = form.format(secret)
    assert secrets.is_secret("NCCL_DEBUG", value)
    env = {"SOME": value, "HF_TOKEN": "a", "WANDB_API_KEY": None, "NCCL_DEBUG": "INFO"}
    hidden = {"SOME": HIDDEN, "HF_TOKEN": HIDDEN, "WANDB_API_KEY": None, "NCCL_DEBUG": "INFO"}
    assert secrets.redact(env) == hidden
    assert secret not in " ".join(secrets.redacted(("--x", value, f"--x={value}")))
    assert secrets.holds_secret("env.SOME", value)
    assert secrets.holds_secret("", [{"a": value}])


def test_no_output_shows_it(plan: Planner) -> None:
    """Each stood in what a dry run prints and in three files of the record."""
    values = {f"z9y8x7w6{n:03}" * 3: form for n, form in enumerate(FORMS)}
    values = {secret: form.format(secret) for secret, form in values.items()}
    env = {f"A{n}": value for n, value in enumerate(values.values())}
    rest = [(f"--url{n}", value, f"--a{n}={value}") for n, value in enumerate(values.values())]
    text, words = f"{RIGHT}env: {json.dumps(env)}\n", sum(rest, ())
    made = plan(text, rest=words)
    kept = record_of(made, request(rest=words, **yaml.safe_load(text)), "docker")
    container = Slurm.model_validate({"container": "docker"})
    outputs = [
        describe(made),
        *(
            docker_request.show(made),
            compose_request.show(made),
            local.show(made, local.request(made, {})),
        ),
        slurm_request.request(made, container, Path("/runs")).script,
        *(repr(kept_plan(made)), repr(kept)),
    ]
    shown = [(at, values[one]) for at, text in enumerate(outputs) for one in values if one in text]
    assert shown == []
    hidden = {*(f"env.{name}" for name in env)}
    hidden |= {f"-- --{word}{n}" for n in range(len(FORMS)) for word in ("url", "a")}
    assert {*kept.hidden} == hidden


@table("value")
def test_an_ordinary_value_is_shown(value: str) -> None:
    assert not secrets.is_secret("NCCL_DEBUG", value)
    assert secrets.redacted(("--x", value)) == ("--x", value)


def test_a_long_value_is_looked_at_at_once() -> None:
    """A pattern that goes back and forth takes minutes for such a text."""
    for text in ("a" * 100_000, "a:" * 50_000, "a=" * 50_000, "--a " * 25_000, "://" * 30_000):
        assert not secrets.is_secret("A", text)
    for text in ("://hook/" * 15_000, "machine a " * 12_000, "://hooks." + "a/" * 50_000):
        assert not secrets.is_secret("A", text)
    assert secrets.is_secret("A", "a" * 10_000_000)  # no process can be given it


@table("argv")
def test_an_option_of_texts_and_data_is_shown(argv: str) -> None:
    words = tuple(shlex.split(argv))
    assert secrets.redacted(words) == words
    name, value = words[0].strip("-").replace("-", "_"), " ".join(words[1:])
    assert not secrets.is_secret_option(name, value)
    assert not secrets.is_secret_option(name, True)


def test_nothing_of_the_presets_and_golden_files_is_hidden() -> None:
    """A value that is hidden for nothing makes a line that no longer says what runs."""
    files = [*(ROOT / "launcher/presets").glob("*.yaml"), *(ROOT / "tests").glob("*/*/golden/*")]
    lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(lines) > 1000
    own = (HIDDEN, "a secret isn't written down", "--signal=B:TERM@", "its value is not shown")
    hidden = [line for line in lines if secrets.has_credential(line)]
    hidden = [line for line in hidden if not any(text in line for text in own)]
    assert hidden == ["export NCCL_DEBUG=INFO WANDB_API_KEY=abc123"]


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
        (("-token", "a", "-x", "-1"), ("-token", HIDDEN, HIDDEN, "-1")),
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
        plan = plan_of(*load(str(path), *sets), ImageFacts("0.9.0", True), rest=rest)
    except UsageError as error:
        return str(error)
    return describe(plan)


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
