"""Parses a shell script without running it: commands as words, and what can't be known.

Assignments, arrays, `${X:-default}`, arithmetic and positional parameters are followed; what
depends on a condition, a loop, a function or the output of a command is never guessed but told.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from types import MappingProxyType
from typing import TYPE_CHECKING

from launcher.tools.importing.words import (
    ShellSource,
    Word,
    WordPiece,
    WordValues,
    by_line,
    joined,
    plain_text,
)

if TYPE_CHECKING:
    from tree_sitter import Node

HARMLESS = frozenset(": cd date echo exit false ls mkdir printf pwd set sleep touch true".split())
"""Commands that leave a run as it is; `cd` moves relative paths, and is told."""
BLOCKS = {
    "if_statement": "if",
    "case_statement": "case",
    "for_statement": "for",
    "c_style_for_statement": "for",
    "while_statement": "while",
    "function_definition": "a function",
    "ERROR": "what the reader doesn't understand",
}
MOST_PASSES = 20
NOT_TAKEN = "stands in what isn't followed, and is left out"
LONGEST = 2**15
"""Characters that a script may have, twice as many as the longest of upstream's."""
DEEPEST = 100
"""Levels of the grammar's tree, far more than a person's script has; each takes several calls."""
SETTERS = frozenset("let mapfile read readarray".split())
"""Commands whose arguments name variables that they set."""


@dataclass(frozen=True)
class ShellCommand:
    """A command's words, the variables before it, and what its output goes to ("| tee log")."""

    words: tuple[Word, ...]
    env: dict[str, Word]
    line: int
    output: str = ""


@dataclass(frozen=True)
class Unfollowed:
    """Something of the script that isn't followed, and why."""

    line: int
    what: str


@dataclass
class Script:
    """What a script comes to: its commands in order, what it exports, and what isn't followed.

    Of that, `branches` are what it would come to where it is entered. What `bash -c` is given is
    read as part of it, with the words before `bash` before each of its commands.
    """

    commands: list[ShellCommand] = field(default_factory=list)
    exported: dict[str, Word] = field(default_factory=dict)
    left: list[Unfollowed] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)


@dataclass(frozen=True)
class Branch:
    """A part of what `left` says isn't followed, read with the variables as they are before it."""

    left: Unfollowed
    script: Script


def read_script(
    text: str, positional: tuple[str, ...] = (), given: Mapping[str, str] = MappingProxyType({})
) -> Script:
    """The script `text`, called with the arguments `positional`. Nothing of it is run.

    `given` are variables that are set from outside. A script past LONGEST or DEEPEST isn't
    followed, and a variable that comes to more than LARGEST has a value that can't be told.
    """
    variables = {str(number): [value] for number, value in enumerate(positional, 1)}
    variables |= {name: [value] for name, value in given.items()} | {"@": [*positional]}
    return _follow(ShellSource(by_line(text.replace("\r\n", "\n"), 1)), variables)


def _follow(
    source: ShellSource, variables: dict[str, list[str]], *, within: bool = False
) -> Script:
    """What `source` comes to; `within` another, which `bash -c` stands in."""
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    if len(source.text) > LONGEST:
        line = source.lines[source.text.count("\n", 0, LONGEST)]
        return Script(left=[Unfollowed(line, f"more than {LONGEST} characters: not followed")])
    parser = Parser(Language(tree_sitter_bash.language()))
    plain = source.plain
    root = parser.parse(plain).root_node
    deep = _too_deep(root)
    if deep is not None:
        line = source.line_of(deep)
        return Script(left=[Unfollowed(line, f"nested deeper than {DEEPEST} levels: not followed")])
    plain = _with_braces(plain, root)
    for _ in range(MOST_PASSES):
        ends = _unseparated(plain, parser.parse(plain).root_node)
        for end in reversed(ends):
            plain = plain[:end] + b";" + plain[end:]
        if not ends:
            break
    reader = _Reader(source, plain, variables, within=within)
    reader.sequence(parser.parse(plain).root_node.named_children)
    reader.end()
    return reader.script


def _too_deep(root: Node) -> int | None:
    """The row of the first node below DEEPEST, None where there's none."""
    cursor = root.walk()
    while cursor.depth <= DEEPEST:
        if cursor.goto_first_child() or cursor.goto_next_sibling():
            continue
        while cursor.goto_parent():
            if cursor.goto_next_sibling():
                break
        else:
            return None
    return int(cursor.node.start_point[0]) if cursor.node else None


def _unseparated(source: bytes, root: Node) -> list[int]:
    """The ends of assignments that the grammar takes for part of the next line's command."""
    found = []
    for command in _below(root, "command"):
        children = [child for child in command.named_children if child.type != "comment"]
        for one, other in pairwise(children):
            between = source[one.end_byte : other.start_byte]
            if one.type == "variable_assignment" and re.search(rb"(?<!\\)\n", between):
                found.append(one.end_byte)
    return sorted(set(found))


def _with_braces(source: bytes, root: Node) -> bytes:
    """The source with `$X` as `${X}`, which the grammar never takes for two words."""
    kinds = ("raw_string", "ansi_c_string", "comment")
    literal = [(node.start_byte, node.end_byte) for node in _below(root, *kinds)]

    def braced(match: re.Match[bytes]) -> bytes:
        last = bisect(literal, (match.start() + 1,)) - 1
        inside = last >= 0 and match.start() < literal[last][1]
        return match[0] if inside else b"${" + match[1] + b"}"

    return re.sub(rb"(?<!\\)\$([A-Za-z_]\w*|\d|@)", braced, source)


def _parts(node: Node) -> Iterator[list[Node]]:
    """The statements of each part of a condition, a loop or a function; else the node itself."""
    if node.type == "ERROR":
        return
    if node.type == "case_statement":
        items = [child for child in node.named_children if child.type == "case_item"]
        for item in items:  # without the patterns of `a|b)`
            patterns = item.children_by_field_name("value")
            yield [child for child in item.named_children if child not in patterns]
    elif node.type in ("if_statement", "elif_clause", "else_clause"):
        tests = node.children_by_field_name("condition")
        clauses = [c for c in node.named_children if c.type in ("elif_clause", "else_clause")]
        yield [c for c in node.named_children if c not in tests and c not in clauses]
        for clause in clauses:
            yield from _parts(clause)
    elif body := node.child_by_field_name("body"):
        yield body.named_children
    else:
        yield [node]


def _below(node: Node, *kinds: str) -> Iterator[Node]:
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one.type in kinds:
            yield one
        waiting += reversed(one.children)


class _Reader(WordValues):
    """Follows the statements of a script, with the variables as they stand at each."""

    def __init__(
        self, source: ShellSource, plain: bytes, variables: dict[str, list[str]], *, within: bool
    ) -> None:
        super().__init__(source, plain, variables)
        self.within = within
        self.script = Script()
        self.exports: dict[str, None] = {}

    def sequence(self, nodes: list[Node]) -> None:
        """Follow one statement after the other."""
        for node in nodes:
            self.statement(node)

    def end(self) -> None:
        """Say what is exported, as it stands in the end."""
        for name in self.exports:
            if values := self.values.get(name):
                self.script.exported[name] = joined(values[0], 0)

    def statement(self, node: Node, output: str = "") -> None:
        """Follow one statement; `output` is what stands behind it in a pipeline."""
        kind = node.type
        if kind in ("variable_assignment", "variable_assignments"):
            for assignment in _below(node, "variable_assignment"):
                self._assign(assignment)
        elif kind == "declaration_command":
            self._declaration(node)
        elif kind == "command":
            self._command(node, output)
        elif kind in ("redirected_statement", "pipeline"):
            first, *rest = node.named_children
            behind = self.plain[first.end_byte : node.end_byte].decode() if rest else ""
            told = self.source.told(behind).strip()
            self.statement(first, output=f"{told} {output}".strip())
        elif kind == "list":
            self._list(node)
        elif kind == "unset_command":
            for name in (self.text(child) for child in node.named_children):
                self.values.pop(name, None)
                self.exports.pop(name, None)
        elif kind == "compound_statement" and self.text(node).startswith("(("):
            self.forget(
                [self.text(name) for name in _below(node, "variable_name")], self.line(node)
            )
        elif kind in ("compound_statement", "subshell"):
            self.sequence(node.named_children)
        elif kind in BLOCKS:
            self._uncertain(node, BLOCKS[kind])

    def _list(self, node: Node) -> None:
        """`a && b` as a and then b, unless a is a test; of `a || b`, b is uncertain."""
        first, second = node.named_children[0], node.named_children[-1]
        operator = self.text(node.children[1])
        self.statement(first)
        if operator == "&&" and not list(_below(first, "test_command")):
            self.statement(second)
        else:
            self._uncertain(second, f"what stands behind {operator}")

    def _uncertain(self, node: Node, what: str) -> None:
        """Tell what depends on something; variables set there are no longer known."""
        branches = list(self._branches(node, what))
        names = [self.text(c.child_by_field_name("name")) for c in _below(node, "command")]
        sets = list(_below(node, "variable_assignment"))
        added = list[str]()
        for assignment in sets:
            name = self.text(assignment.child_by_field_name("name")).partition("[")[0]
            if any(self.text(child) == "+=" for child in assignment.children):
                added.append(name)  # what it has by now stays
            else:
                self.forget([name], self.line(assignment))
        loop = node.child_by_field_name("variable")
        self.forget([self.text(loop)] if loop else [], self.line(node))
        if sets or set(names) - HARMLESS or node.type == "ERROR":
            last = self.source.line_of(node.end_point[0])
            span = f" up to line {last}" if last > self.line(node) else ""
            adds = "".join(f", what it adds to {name} is left out" for name in dict.fromkeys(added))
            left = Unfollowed(self.line(node), f"{what}{span}: not followed{adds}")
            options = [one for assignment in sets for one in self._options_in(assignment)]
            self.script.left += [left, *options]
            self.script.branches += [Branch(left, script) for script in branches]

    def _options_in(self, node: Node) -> Iterator[Unfollowed]:
        """The options that an assignment's text names, each with its line."""
        plain = plain_text(node)
        for one in re.finditer(r"(?<![^\s\"'(=])--[A-Za-z][\w-]*", plain):
            line = self.source.line_of(node.start_point[0] + plain.count("\n", 0, one.start()))
            yield Unfollowed(line, f"{one[0]}: {NOT_TAKEN}")

    def _branches(self, node: Node, what: str) -> Iterator[Script]:
        """What each part of a statement comes to where it is entered, if it has any command."""
        for nodes in _parts(node):
            inner = copy(self)
            inner.script, inner.exports = Script(), {**self.exports}
            inner.values = {**self.values}
            if loop := node.child_by_field_name("variable"):
                inner.forget([self.text(loop)], self.line(node))
            if what == BLOCKS["function_definition"]:
                inner.values = {k: v for k, v in self.values.items() if not k.isdigit()}
                inner.values["@"] = [(WordPiece("", self.line(node), unknown="$@ of a function"),)]
            inner.sequence(nodes)
            inner.end()
            if inner.script.commands or inner.script.branches:
                yield inner.script

    def _declaration(self, node: Node) -> None:
        """export, declare, readonly, local: assignments, and names to export."""
        exporting = self.text(node.children[0]) == "export"
        for child in node.named_children:
            if child.type == "variable_assignment":
                self._assign(child)
            if exporting and child.type in ("variable_assignment", "variable_name"):
                self.exports[self.text(child.child_by_field_name("name") or child)] = None

    def _assign(self, node: Node) -> None:
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        name, adds = self.text(target), any(self.text(child) == "+=" for child in node.children)
        if target is None or target.type == "subscript" or node.has_error:
            self.script.left.append(
                Unfollowed(self.line(node), f"{self.shortened(node)}: isn't understood")
            )
            self.forget([name.partition("[")[0]], self.line(node))
        else:
            self.assigned(name, value, self.line(node), adds=adds)

    def _command(self, node: Node, output: str) -> None:
        env: dict[str, Word] = {}
        arguments: list[Node] = []
        children = node.named_children
        for child, following in zip_longest(children, children[1:]):
            if child.type == "variable_assignment":
                name = self.text(child.child_by_field_name("name"))
                between = self.plain[child.end_byte : following.start_byte] if following else b" "
                # The grammar drops a word that is a blank, and takes some for two that are one.
                if not between or re.sub(rb"\\\n", b"", between).strip():
                    self.forget([name], self.line(child))  # they are one, and aren't read as one
                value = child.child_by_field_name("value")
                env[name] = joined(self.pieces(value, False) if value else (), self.line(child))
            elif child.type not in ("comment", "file_redirect", "heredoc_redirect"):
                arguments += child.named_children if child.type == "command_name" else [child]
        fields = self.fields(arguments)
        if not fields:
            return
        words = tuple(word for _, word in fields)
        if words[0].text in SETTERS:
            names = [re.match(r"\w*", word.text) for word in words[1:]]
            self.forget([name[0] for name in names if name], self.line(node))
        at = None if self.within else _shell_text(words)
        if at is None:
            self.script.commands.append(ShellCommand(words, env, self.line(node), output))
            return
        text = tuple(replace(p, line=p.line or words[at].line) for p in fields[at][0])
        inner = _follow(ShellSource(text), {}, within=True)
        for one in inner.commands:
            around = (*words[: at - 2], *one.words)
            self.script.commands.append(ShellCommand(around, env | one.env, one.line, output))
        self.script.left += inner.left


def _shell_text(words: tuple[Word, ...]) -> int | None:
    """Where the text of `bash -c TEXT` stands among the words, if anything of it is known."""
    for at in range(2, len(words)):
        shells = words[at - 2].text.rpartition("/")[2] in ("bash", "sh")
        if shells and re.fullmatch(r"-[a-z]*c", words[at - 1].text) and words[at].text.strip():
            return at
    return None
