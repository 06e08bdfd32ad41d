"""What is asked of registries and repositories for news."""

from __future__ import annotations

import pytest

from launcher.base.errors import EngineError
from launcher.tools.news.repository import tags
from tests.images.oci import fake_registry
from tests.images.oci.fake_registry import Fake

fake = fake_registry.fake


def test_a_list_of_tags_without_end_is_refused(fake: Fake) -> None:
    """Else a registry that names the same next page again and again is asked for ever."""
    page = b'{"tags": ["1"]}'
    head = f"HTTP/1.0 200 OK\r\nLink: </v2/x?n=1&last=1>; rel=next\r\nContent-Length: {len(page)}"
    fake.raw["tags/list"] = f"{head}\r\n\r\n".encode() + page
    with pytest.raises(EngineError, match="lists its tags on more than 100 pages"):
        tags(fake.reference)
