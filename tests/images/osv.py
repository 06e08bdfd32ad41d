"""A stand-in for OSV's API, which knows a few records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.build.conftest import serving as on_loopback


def record(id: str, name: str, *fixed: str, **more: Any) -> dict[str, Any]:
    """A record of the OSV schema, of all versions of one package up to those that mend it."""
    events = [{"introduced": "0"}, *({"fixed": version} for version in fixed)]
    part = {
        "package": {"ecosystem": "PyPI", "name": name},
        "ranges": [{"type": "ECOSYSTEM", "events": events}],
    }
    return {"id": id, "summary": f"{name} is broken", "affected": [part], **more}


class Osv(BaseHTTPRequestHandler):
    """OSV's API as far as it is asked; it answers in pages of one ID."""

    records: tuple[dict[str, Any], ...] = ()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer({"results": [self.page(query) for query in asked["queries"]]})

    def do_GET(self) -> None:
        wanted = self.path.removeprefix("/v1/vulns/")
        self.answer(next(one for one in self.records if one["id"] == wanted))

    def page(self, query: dict[str, Any]) -> dict[str, Any]:
        name = query["package"]["name"]
        hits = [
            one for one in self.records if name in one["affected"][0]["package"]["name"].lower()
        ]
        at = int(query.get("page_token", 0))
        more = {"next_page_token": str(at + 1)} if at + 1 < len(hits) else {}
        return {"vulns": [{"id": one["id"]} for one in hits[at : at + 1]], **more}

    def answer(self, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(handler: type[Osv], *records: dict[str, Any]) -> Iterator[str]:
    """A server of `handler`, which knows these records; its URL."""
    known = type("Known", (handler,), {"records": records})
    with on_loopback(known) as address:
        yield f"http://{address}"
