"""Renders a page from its template, style and script, with a policy that admits nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SHARED = Path(__file__).parent
"""The template that pages extend, and the style that they have in common."""

GENERATOR = "megatron-launchpad"
POLICY = (
    "default-src 'none'; style-src '{style}'; script-src '{script}'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)


def render(
    parts: Path,
    title: str,
    filters: Mapping[str, Callable[..., Any]],
    *,
    fetches: bool = False,
    **values: Any,
) -> str:
    """The page of page.html, page.css and page.js in `parts`; values are escaped in it.

    With `fetches` it may ask the server that it came from.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([parts, SHARED]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= filters
    style = (SHARED / "style.css").read_text("utf-8") + (parts / "page.css").read_text("utf-8")
    script = (parts / "page.js").read_text("utf-8")
    policy = POLICY.format(style=_hash(style), script=_hash(script))
    return environment.get_template("page.html").render(
        title=title,
        generator=GENERATOR,
        policy=Markup(policy + ("; connect-src 'self'" if fetches else "")),  # noqa: S704
        style=Markup(style),  # noqa: S704 - our own file
        script=Markup(script),  # noqa: S704 - our own file
        **values,
    )


def _hash(text: str) -> str:
    """What the page's policy lets in: `text` and nothing else (https://www.w3.org/TR/CSP3/)."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
