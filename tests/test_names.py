"""What is named from outside: none of what is taken is an option, or leads elsewhere."""

from __future__ import annotations

import argparse

import pytest

from launcher import names

IMAGES = "-v/:/host --privileged a/../b ../a /a a/ A a: a:-1 a@sha256:0 a/-v -a.b/c a..b ü a?b a#b"
ADDRESSES = """\
-u fd::17 a::b x@y::b ssh://-oProxyCommand=x/a ssh://a@-b/c -a@b:c a@b:-c /srv/a a/b https://a/-b
https:///a ssh://u:p@h/a file://host/a file:///-a javascript:a"""
DIGEST = f"sha256:{'0a' * 32}"


@pytest.mark.parametrize(
    ("check", "texts"),
    [
        (names.image, "cpu megatron:24.10-0.9.0 nvcr.io/nvidia/pytorch:24.10-py3 [::1]:5000/a"),
        (names.image, f"localhost:5000/a/b__c/d-e.f:T_1 a:1@{DIGEST} {DIGEST} 0a1b2c3d4e5f"),
        (names.image, f"quay.io/pypa/manylinux_2_28_x86_64@{DIGEST}"),
        (names.git_url, "https://github.com/NVIDIA/Megatron-LM.git git@git.example:a/b.git"),
        (names.git_url, "https://me:p%40ss@git.example:8443/~me/a.git file:///srv/git/a%20b.git"),
        (names.git_url, "ssh://git@git.example:22/a/b.git"),
        (names.git_mirror, "https://git.example git@git.example: file:///srv/"),
        (names.git_ref, "core_r0.9.0 feature/a+b"),
        (names.folder, "3rdparty/cudnn-frontend .github/0.9.0"),
        (names.tag, "24.10"),
        (names.index, "https://me:pw@pip.example:1/simple?a=b /srv/wheels"),
    ],
)
def test_a_name_is_taken(check: names.Check, texts: str) -> None:
    assert [check(text) for text in texts.split()] == texts.split()


@pytest.mark.parametrize(
    ("check", "texts"),
    [
        (names.image, ["", "a b", "a\n", "a:1\n", *IMAGES.split()]),
        (
            names.git_url,
            ["", "a b", "https://a/b\n", "https://a b/c", "https://a/b c", "ext::sh -c x"],
        ),
        (names.git_url, ["--upload-pack=touch x", *ADDRESSES.split()]),
        (names.git_mirror, ["", "-a", "ext::sh -c x ", "--upload-pack=x", "git.example", "a b/"]),
        (
            names.git_ref,
            ["", "-f", "--x", "a..b", "a//b", "a.lock", "a.lock/b", "a/", "a.", "/a", "a b", "a:b"],
        ),
        (
            names.folder,
            ["", "/a", "a/", "../a", "a/../b", "a/..", ".", "./a", "-a", "a/-b", "a//b"],
        ),
        (names.tag, ["", "-a", "../a", "a/b", ".a", "a b", "a\n", "a" * 101, "ä"]),
        (
            names.index,
            ["", "-i", "--x", "pip.example", "https://a b", "https://a\nb", "git+ssh://a"],
        ),
    ],
)
def test_another_text_is_refused(check: names.Check, texts: list[str]) -> None:
    """A dash makes an option of a name, `ext::` runs a command, `..` leads out of a folder."""
    for text in texts:
        with pytest.raises(ValueError, match="doesn't look like"):
            check(text)


def test_a_wrong_argument_names_its_option_without_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=names.argument(names.image_for_tag))
    assert parser.parse_args(["--base=a.b/c:{tag}"]).base == "a.b/c:{tag}"
    with pytest.raises(SystemExit):
        parser.parse_args(["--base=-v\x1b"])
    told = "argument --base: '-v\\x1b' doesn't look like an image's name"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("check", [names.image, names.git_url, names.git_ref, names.folder])
def test_a_long_text_is_told_at_once(check: names.Check) -> None:
    """A pattern that goes back and forth takes hours for such a text."""
    for text in ("a" * 50_000, "a-" * 25_000, "a/" * 25_000, "https://" + "a." * 25_000 + " "):
        try:
            check(text)
        except ValueError:
            continue
