"""Asks a registry what a repository has: its tags, and what an image says of itself, unpulled."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, Field

from launcher.images.oci.registry import PLATFORM, RegistrySession, documents, talking

PAGES = 100  # of a list of tags, of up to 1000 each


class _Tags(BaseModel):
    tags: list[str] | None = None


class _Settings(BaseModel):
    env: list[str] | None = Field(None, alias="Env")
    labels: dict[str, str] | None = Field(None, alias="Labels")


class _Step(BaseModel):
    created_by: str = ""


class _Config(BaseModel):
    config: _Settings = Field(default_factory=lambda: _Settings(Env=None, Labels=None))
    history: list[_Step] = []


@dataclass(frozen=True)
class ImageDescription:
    """What an image's configuration says of it, and the platforms that its name has images for.

    env: the environment of its processes; steps: the commands that built it
    """

    platforms: list[str]
    env: Mapping[str, str]
    labels: Mapping[str, str]
    steps: list[str]


def describe(reference: str, platform: str = PLATFORM) -> ImageDescription:
    """What the configuration of `reference` says. Raises EngineError."""
    with talking(reference) as asked:
        found = documents(asked, platform)
        config = asked.fitting(_Config, found.config.value)
        env = dict(one.partition("=")[::2] for one in config.config.env or ())
        steps = [step.created_by for step in config.history]
        return ImageDescription(found.platforms, env, config.config.labels or {}, steps)


def tags(reference: str) -> list[str]:
    """The tags of the repository of `reference`, in the registry's order. Raises EngineError."""
    with talking(reference) as asked:
        found: list[str] = []
        query = "n=1000"
        for _ in range(PAGES):
            page, query = _page(asked, query)
            found += page
            if not query:
                return found
        raise asked.wrong(f"lists its tags on more than {PAGES} pages")


def _page(asked: RegistrySession, query: str) -> tuple[list[str], str]:
    """Some of the tags, and the query for the next ones, "" after the last.

    Of the address that the registry names, the query alone is taken.
    """
    answer = asked.ask("GET", f"tags/list?{query}")
    page = asked.fitting(_Tags, asked.parsed(answer).value)
    more = re.match(r"<[^>?]*\?([^>]*)>", answer.headers.get("Link", ""))
    return page.tags or [], more[1] if more else ""
