"""Packages that a row compiles on its base, such as Transformer Engine: commits with submodules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.base.errors import BuildError, UsageError
from launcher.base.screen import Progress
from launcher.base.settings import Settings
from launcher.images.matrix.locked import LockedExtension, LockedGit
from launcher.images.matrix.recipe import Recipe
from launcher.images.matrix.schema import Extension
from launcher.images.sources import megatron_source


@dataclass(frozen=True)
class ExtensionSource:
    """One extension's locked source. repositories: git folders by submodule, its own under ""."""

    name: str
    wanted: Extension
    locked: LockedExtension
    repositories: dict[str, Path]

    @property
    def commits(self) -> dict[str, LockedGit]:
        """What is locked, by the submodule's folder, its own under ""."""
        return {"": self.locked.git, **self.locked.submodules}

    @property
    def urls(self) -> dict[str, str]:
        """The publishers' repositories, by the submodule's folder."""
        return {"": self.wanted.git.url, **self.wanted.submodules}

    def unpack(self, folder: Path) -> None:
        """Write the tree to `folder`, which must not exist, with the submodules that it needs.

        Raises BuildError where git's objects don't give the locked trees. The repository's own
        hash is made with the commits of its submodules, so another commit can't stand in for one.
        """
        links = {folder / path: commit for path, commit in self.locked.links.items()}
        for path, locked in self.commits.items():
            repository, target = self.repositories[path], folder / path
            target.mkdir(parents=True, exist_ok=True)
            megatron_source.archive(repository, locked.commit, target)
            found = megatron_source.tree_hash(target, {} if path else links)
            megatron_source.check_tree(repository, locked.commit, locked.tree, found)

    def record(self) -> dict[str, Any]:
        """extension.json: what it is made of and how, for the build stage and for the image."""
        return {
            "name": self.name,
            "epoch": self.locked.git.epoch,
            "commits": {path: locked.commit for path, locked in self.commits.items()},
            "modules_at_once": self.wanted.modules_at_once,
            **self.wanted.model_dump(include={"package", "modules", "options", "environment"}),
        }


def sources(recipe: Recipe, site: Settings, progress: Progress) -> tuple[ExtensionSource, ...]:
    """The sources of a recipe's extensions, in the row's order. Raises as `from_git` does."""
    found = []
    for name, locked in recipe.extensions.items():
        progress.step(f"source: {name} from git")
        found.append(from_git(name, *locked, site))
        progress.close()
    return tuple(found)


def from_git(
    name: str, wanted: Extension, locked: LockedExtension, site: Settings
) -> ExtensionSource:
    """The locked commits of an extension, fetched into the cache where they aren't there.

    Raises UsageError where the lock is older than what is wanted, BuildError for what can't be
    fetched and for a tag or branch that was moved since.
    """
    if not locked.is_of(wanted):
        raise UsageError(f"{name}: matrix.lock holds another commit", "Run `make lock`.")
    repositories = {
        path: megatron_source.repository(url, locked.submodules[path].commit, site)
        for path, url in wanted.submodules.items()
    }
    repositories[""] = megatron_source.locked_repository(name, wanted.git, locked.git, site)
    return ExtensionSource(name, wanted, locked, repositories)


def lock(name: str, wanted: Extension, own: LockedGit, site: Settings) -> LockedExtension:
    """Lock the submodules of a locked commit. Raises BuildError for a folder that is none."""
    links = submodules(megatron_source.repository(wanted.git.url, own.commit, site), own.commit)
    if missing := set(wanted.submodules) - set(links):
        raise BuildError(
            f"{name}: no submodule at {', '.join(sorted(missing))} in commit {own.commit}",
            f"It has {', '.join(links) or 'none'}: correct the extension in matrix.yaml.",
        )
    locked = {
        path: locked_git(url, links[path], None, site) for path, url in wanted.submodules.items()
    }
    return LockedExtension(git=own, links=links, submodules=locked)


def locked_git(url: str, commit: str, ref: str | None, site: Settings) -> LockedGit:
    """A commit with its tree and time, fetched into the cache where it isn't there."""
    repository = megatron_source.repository(url, commit, site)
    options = ("--no-show-signature", "--format=%T %ct", "--end-of-options")
    tree, epoch = megatron_source.git(repository, "log", "-1", *options, commit).split()
    return LockedGit(commit=commit, ref=ref, tree=tree, epoch=int(epoch))


def submodules(repository: Path, commit: str) -> dict[str, str]:
    """The commit at each submodule of a commit, by its folder."""
    entries = megatron_source.git(
        repository, "ls-tree", "-r", "-z", "--end-of-options", commit
    ).split("\0")
    found = (entry.partition("\t") for entry in entries if entry.startswith("160000 "))
    return {path: entry.split()[2] for entry, _, path in found}
