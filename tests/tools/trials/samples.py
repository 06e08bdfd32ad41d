"""Results of all kinds, with texts in them that would like to be more than text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.tools.trials.result import CellResult

HOSTILE = (
    "Traceback (most recent call last):",
    "\x1b[31mRuntimeError\x1b[0m: <script>document.title = 'owned'</script>",
    '</pre></details><img src="http://192.0.2.1/x.png" onerror="document.title=1">',
    "\"double\" 'single' &amp; &lt; {{ 7 * 7 }} {% raw %} \x00\x08 <!-- --> ]]>",
)
"""Last lines of a log that try to get out of where they stand."""

FORWARD = (
    "FutureWarning: `torch.cuda.amp.custom_fwd(args...)` is deprecated. "
    "Please use `torch.amp.custom_fwd(args..., device_type='cuda')` instead."
)
ODD = 'UserWarning: "quoted" <b onclick="x">bold</b> on GPU {}'
SECONDS = {"pull": 312.4, "fetch": 0.4, "compile": 52.1, "import": 11.3, "train": 95.0}


def facts(torch: str, cuda: str, **more: str | None) -> dict[str, Any]:
    """What an image with GPUs is told to have."""
    values = {
        "os": "ubuntu 22.04",
        "python": "3.10.12",
        "torch": torch,
        "cuda": cuda,
        "transformer_engine": "1.11.0",
        "extension": "helpers.cpython-310-x86_64-linux-gnu.so",
        "training": "megatron.training",
        "gpus": "2 × NVIDIA H100 80GB HBM3",
        **more,
    }
    return {name: {"value": value, "error": "", "warnings": []} for name, value in values.items()}


def trial(state: str, **more: Any) -> dict[str, Any]:
    """A trial of a cell."""
    return {"state": state, "reason": "", "tail": [], "stage": "", "warnings": [], **more}


TRIALS = {name: trial("runs") for name in ("entrypoint", "quickstart", "pretrain_gpt")}


def result(tag: str, verdict: str, expected: str | None = None, **more: Any) -> CellResult:
    """A cell of release 0.9.0, unless another is named."""
    ran: Mapping[str, Any] = {
        "facts": facts(f"2.3.0a0+{tag}", "12.3.2"),
        "trials": TRIALS,
        "seconds": SECONDS,
    }
    return CellResult(
        tag, more.pop("megatron", "0.9.0"), "key", verdict, expected, **{**ran, **more}
    )


FAILED = trial("fails", reason="pretrain-gpt: exit code 1", tail=[*HOSTILE], stage="train")

RESULTS = [
    result("24.02", "runs", "runs"),
    result("24.03", "runs", "runs"),
    result(
        *("24.06", "fails", "runs"),
        stage="pull",
        reason="nvcr.example/pytorch:24.06-py3 can't be pulled: <no such host>",
        tail=("try again",),
        facts={},
        trials={},
        seconds={"pull": 3.0},
    ),
    result("24.07", "imports", trials={}),
    result("24.08", "runs with warnings", "runs with warnings", warnings=(FORWARD, ODD.format(0))),
    result(
        *("24.09", "fails", "runs with warnings"),
        stage="train",
        reason=FAILED["reason"],
        tail=HOSTILE,
        trials=TRIALS | {"pretrain_gpt": FAILED},
    ),
    result("24.10", "runs", "runs with warnings"),
    result("24.10", "runs with warnings", megatron="0.12.3", warnings=(ODD.format(1),)),
]
