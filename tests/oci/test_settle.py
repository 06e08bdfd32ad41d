"""The configuration that an image gets in place of one with the engine's clock in it."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from launcher.oci import settle

LAYERS = ["sha256:" + "1" * 64, "sha256:" + "2" * 64]
FOUND: dict[str, Any] = {
    "Architecture": "amd64",
    "Author": "",
    "Os": "linux",
    "Created": "2026-11-22T02:43:42.413311286Z",
    "Config": {"Env": ["A=b"], "Labels": {"b": "2", "a": "1"}},
    "RootFS": {"Type": "layers", "Layers": LAYERS},
}


def step(by: str, size: int = 0, created: int = 1795315422) -> dict[str, Any]:
    return {"CreatedBy": by, "Size": size, "Created": created, "Comment": "buildkit.dockerfile.v0"}


HISTORY = [step("ENV A=b"), step("COPY /stage/ / # buildkit", 7), step("base", 9, 1735689600)]


def test_the_build_s_time_is_the_source_s_and_the_base_keeps_its_own() -> None:
    written = json.loads(settle.configuration(FOUND, HISTORY, [False, True, True], 2, 1700000000))
    assert written["created"] == "2023-11-14T22:13:20Z"
    assert [one["created"] for one in written["history"]] == [
        "2025-01-01T00:00:00Z",
        "2023-11-14T22:13:20Z",
        "2023-11-14T22:13:20Z",
    ]
    assert [one.get("empty_layer", False) for one in written["history"]] == [False, False, True]
    assert written["config"] == FOUND["Config"]
    assert written["rootfs"] == {"type": "layers", "diff_ids": LAYERS}
    assert (written["architecture"], written["os"]) == ("amd64", "linux")
    assert "author" not in written


steps = st.one_of(
    st.tuples(
        st.sampled_from(["ENV A=b", "LABEL a=b", '/bin/sh -c #(nop)  CMD ["sh"]']), st.just(0)
    ),
    st.tuples(st.sampled_from(["RUN true # buildkit", "COPY a b"]), st.integers(0, 5)),
    st.tuples(st.sampled_from(["WORKDIR /x", "/bin/sh -c #(nop) WORKDIR /x"]), st.integers(0, 1)),
)


@given(st.lists(steps, max_size=12), st.data())
def test_which_steps_made_a_layer_is_told_right_or_not_at_all(
    told: list[tuple[str, int]], data: st.DataObject
) -> None:
    """A WORKDIR whose folder was there makes none, and the engine tells sizes alone."""
    truth = [
        size > 0 or by.startswith(("RUN", "COPY")) or ("WORKDIR" in by and data.draw(st.booleans()))
        for by, size in told
    ]
    found = settle.with_layers([step(by, size) for by, size in told], sum(truth))
    assert found in (truth, None)
    if not any("WORKDIR" in by for by, _ in told):
        assert found == truth
