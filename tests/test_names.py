"""What is named from outside: none of what is taken is an option, or leads elsewhere."""

from __future__ import annotations

import argparse

import pytest

from launcher import names

DIGEST = f"sha256:{'0a' * 32}"


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (names.image, "cpu"),
        (names.image, "megatron:24.10-0.9.0"),
        (names.image, "nvcr.io/nvidia/pytorch:24.10-py3"),
        (names.image, "localhost:5000/a/b__c/d-e.f:T_1"),
        (names.image, "[::1]:5000/a"),
        (names.image, f"quay.io/pypa/manylinux_2_28_x86_64@{DIGEST}"),
        (names.image, f"a:1@{DIGEST}"),
        (names.image, DIGEST),
        (names.image, "0a1b2c3d4e5f"),
        (names.git_url, "https://github.com/NVIDIA/Megatron-LM.git"),
        (names.git_url, "https://me:p%40ss@git.example:8443/~me/a.git"),
        (names.git_url, "ssh://git@git.example:22/a/b.git"),
        (names.git_url, "git@git.example:a/b.git"),
        (names.git_url, "file:///srv/git/a b.git".replace(" ", "%20")),
        (names.git_mirror, "https://git.example"),
        (names.git_mirror, "git@git.example:"),
        (names.git_mirror, "file:///srv/"),
        (names.git_ref, "core_r0.9.0"),
        (names.git_ref, "feature/a+b"),
        (names.folder, "3rdparty/cudnn-frontend"),
        (names.folder, ".github/0.9.0"),
        (names.tag, "24.10"),
        (names.index, "https://me:pw@pip.example:1/simple?a=b"),
        (names.index, "/srv/wheels"),
    ],
)
def test_a_name_is_taken(check: names.Check, text: str) -> None:
    assert check(text) == text


@pytest.mark.parametrize(
    ("check", "texts"),
    [
        (
            names.image,
            [
                *("", "-v/:/host", "--privileged", "a b", "a/../b", "../a", "/a", "a/", "A", "a:"),
                *(
                    "a:-1",
                    "a@sha256:0",
                    "a\n",
                    "a:1\n",
                    "a/-v",
                    "-a.b/c",
                    "a..b",
                    "ü",
                    "a?b",
                    "a#b",
                ),
            ],
        ),
        (
            names.git_url,
            [
                *("", "--upload-pack=touch x", "-u", "ext::sh -c x", "fd::17", "a::b", "x@y::b"),
                *("ssh://-oProxyCommand=x/a", "ssh://a@-b/c", "-a@b:c", "a@b:-c", "/srv/a", "a/b"),
                *("https://a b/c", "https://a/-b", "https:///a", "https://a/b\n", "ssh://u:p@h/a"),
                *("file://host/a", "file:///-a", "javascript:a", "https://a/b c"),
            ],
        ),
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
