"""The models of matrix.yaml and matrix.lock: strict, so that a typo is a message, not a build."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from launcher.base import names
from launcher.base.errors import nearest
from launcher.base.yamlfile import KeyFault


def _quoted(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f'write it in quotes, as YAML reads a bare {value} as a number: "24.10"')
    return value


def _specifier(value: str) -> str:
    try:
        SpecifierSet(value)
    except InvalidSpecifier as error:
        raise ValueError('not a version specifier such as ">=2.6,<3"') from error
    return value


def _version(value: str) -> str:
    try:
        Version(value)
    except InvalidVersion as error:
        raise ValueError("not a version such as 2.4.0") from error
    return value


def _requirement(value: str) -> str:
    try:
        found = Requirement(value)
    except InvalidRequirement as error:
        raise ValueError('not a requirement such as "numpy<2"') from error
    if found.url or found.marker:
        raise ValueError("takes a name and versions, and no address or condition")
    return value


def _matching(pattern: str, example: str) -> AfterValidator:
    return AfterValidator(names.matching(pattern, example))


Text = Annotated[str, BeforeValidator(_quoted), Field(min_length=1)]
Specifier = Annotated[Text, AfterValidator(_specifier)]
Package = Annotated[Text, AfterValidator(_requirement)]
Commit = Annotated[Text, _matching(r"[0-9a-f]{40}", "a full commit: 40 hex digits")]
Sha256 = Annotated[Text, _matching(r"[0-9a-f]{64}", "a sha256: 64 hex digits")]
Release = Annotated[Text, _matching(r"\d+\.\d+\.\d+", "a release: 0.9.0")]
Tag = Annotated[Text, AfterValidator(names.tag)]
PythonVersion = Annotated[Text, _matching(r"3\.\d+", "a Python version: 3.10")]
Abi = Annotated[Text, _matching(r"cp3\d+(-arm64)?", "an ABI: cp310, or cp312-arm64 of arm64")]
PackageName = Annotated[Text, _matching(r"[a-z0-9]+(-[a-z0-9]+)*", "a package: flash-attn")]
Name = Annotated[Text, _matching(r"[a-z0-9][a-z0-9._-]*", "a name: apex-24.10")]
Url = Annotated[
    Text, _matching(r"https://[!-~]+/\w[\w.+%~-]*", "a file's address: https://…/a.tar.gz")
]
Folder = Annotated[Text, AfterValidator(names.folder)]
Architecture = Annotated[Text, _matching(r"\d{2,3}[af]?", "a compute capability: 90 of 9.0")]
Reference = Annotated[Text, AfterValidator(names.image)]
Digest = Annotated[Text, _matching(r"sha256:[0-9a-f]{64}", "a digest: sha256: and 64 hex digits")]
GitUrl = Annotated[Text, AfterValidator(names.git_url)]
GitRef = Annotated[Text, AfterValidator(names.git_ref)]
Module = Annotated[Text, _matching(r"[A-Za-z_]\w*(\.\w+)*", "a Python module: apex_C")]
Variable = Annotated[Text, _matching(r"[A-Za-z_]\w*", "a variable's name: NVTE_FRAMEWORK")]
Pin = Annotated[
    Text,
    _matching(r"\w[\w.\-]*==\w[\w.+!\-]* --hash=sha256:[0-9a-f]{64}", "name==version --hash=…"),
]

Source = Literal["git", "sdist"]
Platform = Literal["linux/amd64", "linux/arm64"]
AMD64: Platform = "linux/amd64"
Status = Literal["builds", "imports", "runs", "runs with warnings", "fails"]


class StrictMatrix(BaseModel):
    """Refuses unknown keys, and values of another type than the one written here."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


ONE_COMMIT = "takes a commit, or a ref (a tag or a branch), and not both"


class GitSource(StrictMatrix):
    """A repository at one commit, or at the one that a tag or branch named when it was locked.

    A release that has an sdist may leave both out where its commit isn't known.
    """

    url: GitUrl
    commit: Commit | None = None
    ref: GitRef | None = None

    @model_validator(mode="after")
    def _names_one_commit(self) -> GitSource:
        if self.commit and self.ref:
            raise ValueError(ONE_COMMIT)
        return self

    @property
    def is_named(self) -> bool:
        """Whether it says which commit."""
        return (self.commit or self.ref) is not None


class Caution(StrictMatrix):
    """A torch this release builds on, with a known defect there."""

    torch: Specifier
    because: Text


class BaseNeed(StrictMatrix):
    """The versions of a package that a release takes where an image has the package."""

    versions: Specifier
    because: Text


class MegatronRelease(StrictMatrix):
    """One Megatron-LM release: where it comes from and what is done to it.

    `python` and `torch` are the limits of the release's own metadata; `extension` is the compiled
    module that must be in the wheel; `patches` a folder below patches/, "" where none is needed;
    `version` what the source says of itself where that isn't the release's name; `needs_base` what
    packages must be, by their names as indexes compare them, where an image has them.
    """

    git: GitSource
    sdist: bool = False
    patches: Annotated[str, AfterValidator(lambda value: value and names.folder(value))]
    extension: Module
    version: Release | None = None
    python: Specifier | None = None
    torch: Specifier | None = None
    caution: Caution | None = None
    needs_base: dict[PackageName, BaseNeed] = {}

    @model_validator(mode="after")
    def _has_a_source(self) -> MegatronRelease:
        if not (self.git.is_named or self.sdist):
            raise KeyFault(("git",), ONE_COMMIT)
        return self


class Extension(StrictMatrix):
    """A package that is compiled with a base's own CUDA, by its setup.py.

    submodules: of the repository, those that it is compiled with: folder to address; package: its
    name as Python has it; modules: the compiled modules that must be in its wheel; options,
    environment: of setup.py; modules_at_once: the variable that gives it the number of modules
    to compile at a time, where it can compile several
    """

    git: GitSource
    submodules: dict[Folder, GitUrl] = {}
    package: Name
    modules: list[Module] = Field(min_length=1)
    options: list[Text] = []
    environment: dict[Variable, Text] = {}
    modules_at_once: Variable | None = None

    @model_validator(mode="after")
    def _has_a_commit(self) -> Extension:
        if not self.git.is_named:
            raise KeyFault(("git",), ONE_COMMIT)
        return self


class Interpreter(StrictMatrix):
    """A Python for bases that have none: a .tar.gz with all of it in a folder named python."""

    url: Url
    sha256: Sha256


class Needs(StrictMatrix):
    """Requirements, as people write them; the lock says which versions they are."""

    build: list[Package]
    runtime: list[Package]
    extensions: list[Package] = []


class ExtrasSet(StrictMatrix):
    """Packages that people add to an image together, by a name.

    purpose: what they are for; extensions: those of the matrix that are compiled for it, for the
    GPUs of architectures where the row names none
    """

    purpose: Text
    packages: list[Package] = []
    extensions: list[Name] = []
    architectures: list[Architecture] = []

    @model_validator(mode="after")
    def _has_something(self) -> ExtrasSet:
        if not self.packages and not self.extensions:
            raise ValueError("has neither packages nor extensions")
        if bool(self.extensions) != bool(self.architectures):
            raise ValueError("extensions are compiled for architectures: give both or none")
        return self


class Cap(StrictMatrix):
    """A limit of a package's versions on an older torch, which its own metadata doesn't say.

    torch_before: a version; 2.4.0a0 is before 2.4.0, as to the packages that ask for it
    """

    torch_before: Annotated[Text, AfterValidator(_version)]
    package: Package
    because: Text


class Row(StrictMatrix):
    """One image: a base and the Megatron release that goes into it.

    Facts about the base (os to driver) are empty where no public source states them.
    `packages` are Python packages the base lacks, such as CPU torch; `interpreter` is the Python
    that is added to a base without one; `extensions` are compiled there, for the GPUs of
    `architectures`. `extras` are packages and named sets that are resolved against all of that. An
    `untried` row was never probed with its own torch, as far as is recorded: it is built where it
    is named, and no status is expected of it.
    """

    base: Reference
    os: Text
    python: PythonVersion
    torch: Text
    cuda: Text | None = None
    cudnn: Text | None = None
    nccl: Text | None = None
    driver: Text | None = None
    megatron: Release
    source: Source = "git"
    platforms: list[Platform] = Field([AMD64], min_length=1)
    interpreter: Release | None = None
    packages: list[Package] = []
    extensions: list[Name] = []
    architectures: list[Architecture] = []
    extras: list[Package] = []
    untried: bool = False
    expected: Status | None = None

    @model_validator(mode="after")
    def _untried_is_not_expected(self) -> Row:
        if self.untried and self.expected:
            raise ValueError("untried, and yet a status is expected of it: leave one of both out")
        return self

    @model_validator(mode="after")
    def _nothing_is_there_twice(self) -> Row:
        for key in ("platforms", "extensions", "architectures", "extras"):
            listed = getattr(self, key)
            for index, one in enumerate(listed):
                if one in listed[:index]:
                    raise KeyFault((key, index), f"{one} is in the list twice: leave one out")
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> Row:
        if self.interpreter and not self.interpreter.startswith(f"{self.python}."):
            raise ValueError(f"interpreter {self.interpreter} is no Python {self.python}")
        if (self.interpreter or self.extensions) and not self.packages:
            raise ValueError("interpreter and extensions need packages: torch at least")
        if bool(self.extensions) != bool(self.architectures):
            raise ValueError("extensions are compiled for architectures: give both or none")
        if self.packages and self.platforms != [AMD64]:
            raise ValueError(f"packages are locked for {AMD64} alone: leave platforms out")
        return self

    @property
    def abi(self) -> str:
        """The CPython ABI tag of the row's Python: cp310."""
        return "cp" + self.python.replace(".", "")

    def compiled_by(self, platform: str) -> str:
        """The key of the builder and of the needs on a platform: cp312, or cp312-arm64."""
        return self.abi if platform == AMD64 else f"{self.abi}-{platform.partition('/')[2]}"


class Matrix(StrictMatrix):
    """matrix.yaml as a whole; rows and releases refer to each other, and the references hold.

    `moving` names the images whose publishers put the tag on newer ones as they go; `extras` are
    the named sets of packages that an image can be given, `caps` what limits them by the torch.
    """

    builders: dict[Abi, Reference]
    moving: list[Reference] = []
    needs: Needs
    releases: dict[Release, MegatronRelease]
    interpreters: dict[Release, Interpreter] = {}
    extensions: dict[Name, Extension] = {}
    extras: dict[Name, ExtrasSet] = {}
    caps: list[Cap] = []
    rows: dict[Tag, Row]

    @field_validator("rows", "releases", "interpreters", "extensions", "extras", mode="before")
    @classmethod
    def _keys_are_text(cls, value: object) -> object:
        for key in value if isinstance(value, dict) else ():
            _quoted(key)
        return value

    @property
    def images(self) -> dict[str, str]:
        """Every image that a build starts from, and what it is to whom: base of 24.10."""
        used: dict[str, list[str]] = {}
        for tag, row in self.rows.items():
            used.setdefault(row.base, []).append(f"base of {tag}")
        for abi, builder in self.builders.items():
            used.setdefault(builder, []).append(f"builder of {abi}")
        return {reference: ", ".join(roles) for reference, roles in used.items()}

    def platforms(self, reference: str) -> list[Platform]:
        """What an image of `images` is used for, in the order of the rows: linux/amd64 …"""
        rows = self.rows.values()
        of_bases = [one for row in rows if row.base == reference for one in row.platforms]
        of_builders: list[Platform] = [
            "linux/arm64" if key.endswith("-arm64") else AMD64
            for key, builder in self.builders.items()
            if builder == reference
        ]
        return list(dict.fromkeys([*of_bases, *of_builders]))

    @property
    def repositories(self) -> list[str]:
        """The address of every git repository that something is built from."""
        urls = [release.git.url for release in self.releases.values()]
        for extension in self.extensions.values():
            urls += [extension.git.url, *extension.submodules.values()]
        return list(dict.fromkeys(urls))

    @property
    def usual(self) -> list[str]:
        """The tags that are meant where none is named: the rows with CUDA that aren't `untried`."""
        return [tag for tag, row in self.rows.items() if row.cuda and not row.untried]

    @model_validator(mode="after")
    def _moving_are_used(self) -> Matrix:
        for index, reference in enumerate(self.moving):
            if reference not in self.images:
                known = nearest(reference, list(self.images))
                raise KeyFault(("moving", index), f"no row or builder uses {reference}. {known}")
        return self

    @model_validator(mode="after")
    def _extensions_are_there(self) -> Matrix:
        users: list[tuple[str, str, list[str]]] = [
            *(("rows", tag, row.extensions) for tag, row in self.rows.items()),
            *(("extras", name, one.extensions) for name, one in self.extras.items()),
        ]
        for part, user, named in users:
            for index, name in enumerate(named):
                if name not in self.extensions:
                    known = nearest(name, list(self.extensions))
                    reason = f"no {name} in extensions. {known}"
                    raise KeyFault((part, user, "extensions", index), reason)
        return self

    @model_validator(mode="after")
    def _references_hold(self) -> Matrix:
        for tag, row in self.rows.items():
            release = self.releases.get(row.megatron)
            if release is None:
                known = nearest(row.megatron, list(self.releases))
                raise KeyFault(("rows", tag, "megatron"), f"no release {row.megatron}. {known}")
            for key in map(row.compiled_by, row.platforms):
                if key not in self.builders:
                    raise KeyFault(("rows", tag, "python"), f"no builder for {key} in builders")
            if row.interpreter not in {None, *self.interpreters}:
                known = nearest(str(row.interpreter), list(self.interpreters))
                reason = f"no {row.interpreter} in interpreters. {known}"
                raise KeyFault(("rows", tag, "interpreter"), reason)
            if row.source == "sdist" and not release.sdist:
                raise KeyFault(("rows", tag, "source"), f"{row.megatron} has no sdist; use git")
            if row.source == "git" and not release.git.is_named:
                reason = f"{row.megatron} has no commit; use sdist"
                raise KeyFault(("rows", tag, "source"), reason)
            if problem := misfit(row, row.megatron, release):
                raise KeyFault(("rows", tag, "megatron"), problem)
        return self


def caps_of(torch: str, caps: Sequence[Cap]) -> list[Cap]:
    """The caps that hold on a version of torch. Raises InvalidVersion."""
    return [cap for cap in caps if Version(torch) < Version(cap.torch_before)]


def misfit(row: Row, version: str, release: MegatronRelease) -> str | None:
    """Why `release` can't be used on `row` by its own metadata, or None where it can."""
    for name, limit in (("python", release.python), ("torch", release.torch)):
        have = getattr(row, name)
        if limit and not _meets(have, limit):
            return f"Megatron {version} requires {name} {limit}, and the base has {have}"
    return None


def caution(row: Row, release: MegatronRelease) -> str | None:
    """What is known to be wrong with `release` on the torch of `row`, or None."""
    known = release.caution
    return known.because if known and _meets(row.torch, known.torch) else None


def unmet(packages: Mapping[str, str], release: MegatronRelease) -> list[str]:
    """What packages, versions by normalised names, are and `release` needs them to be, in words."""
    return [
        f"{name} {packages[name]}: Megatron needs {need.versions} there, since {need.because}"
        for name, need in release.needs_base.items()
        if name in packages and not _meets(packages[name], need.versions)
    ]


def _meets(version: str, limit: str) -> bool:
    return SpecifierSet(limit).contains(Version(version), prereleases=True)
