"""The end to a question over HTTP."""

from __future__ import annotations

import pytest
from requests.exceptions import ConnectTimeout, ReadTimeout

from launcher.base.deadline import within


def test_a_time_out_of_requests_reads_as_the_deadlines_own() -> None:
    """On a loaded machine requests' own time-out came first, and the message was another."""

    def ask() -> None:
        raise ConnectTimeout("timed out")

    with pytest.raises(ReadTimeout, match=r"^no answer within 0\.3 s$") as late:
        within(0.3, ask)
    assert late.value.__context__ is None  # what `oci.registry` would name instead
