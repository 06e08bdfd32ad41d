"""Reads a shell script without running it: its commands as words, and what can't be known of them.

Assignments, arrays, `${X:-default}`, arithmetic and positional parameters are followed; what
depends on a condition, a loop, a function or the output of a command is never guessed but told.
The parser is tree-sitter's, with its grammar of bash:
https://github.com/tree-sitter/tree-sitter-bash
"""

from __future__ import annotations

import re
from bisect import bisect, bisect_left
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import count, pairwise, zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node

TEMPLATE = re.compile(rb"^([ \t]*(?:export[ \t]+)?\w+=)(<[^>\n]+>[^\s#]*)", re.MULTILINE)
"""`DATA=<your path>/data`, as examples have it to be filled in; no shell takes it."""
PLACEHOLDER = re.compile(r"<[A-Za-z][^<>]*>")
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
MOST_EXPANDED = 2**20
"""Characters that come out of a script's variables in all, each piece of text counted as 64."""
PLAIN = frozenset("word number extglob_pattern test_operator variable_name".split())
SETTERS = frozenset("let mapfile read readarray".split())
"""Commands whose arguments name variables that they set."""
DEFAULTS = {"PWD": ".", "HOME": "~"}
"""What the launcher takes for these itself: relative paths start where it is started."""


@dataclass(frozen=True)
class Piece:
    """Text of one origin. A quoted one isn't split; `unknown` says why its text can't be told."""

    text: str
    line: int
    quoted: bool = False
    unknown: str = ""


Pieces = tuple[Piece, ...]


@dataclass(frozen=True)
class Word:
    """One argument of a command; `unknown` says why it isn't known, "" where it is."""

    text: str
    line: int
    unknown: str = ""
    pieces: Pieces = field(default=(), repr=False, compare=False)


@dataclass(frozen=True)
class Command:
    """A command's words, the variables before it, and what its output goes to ("| tee log")."""

    words: tuple[Word, ...]
    env: dict[str, Word]
    line: int
    output: str = ""


@dataclass(frozen=True)
class Left:
    """Something of the script that isn't followed, and why."""

    line: int
    what: str


@dataclass
class Script:
    """What a script comes to: its commands in order, what it exports, and what isn't followed.

    Of that, `branches` are what it would come to where it is entered.
    """

    commands: list[Command] = field(default_factory=list)
    exported: dict[str, Word] = field(default_factory=dict)
    left: list[Left] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)


@dataclass(frozen=True)
class Branch:
    """A part of what `left` says isn't followed, read with the variables as they are before it."""

    left: Left
    script: Script


def read(
    text: str, positional: tuple[str, ...] = (), given: tuple[tuple[str, str], ...] = ()
) -> Script:
    """The script `text`, called with the arguments `positional`. Nothing of it is run.

    `given` are variables that are set from outside. A script past LONGEST or DEEPEST isn't
    followed, and a variable that comes to more than MOST_EXPANDED has a value that can't be told.
    """
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    if len(text) > LONGEST:
        line = text.count("\n", 0, LONGEST) + 1
        return Script(left=[Left(line, f"more than {LONGEST} characters: not followed")])
    parser = Parser(Language(tree_sitter_bash.language()))
    plain, decoded = _in_ascii(text.replace("\r\n", "\n"), positional)
    source = TEMPLATE.sub(rb"\1'\2'", re.sub(rb"\\(\n\s*)?\Z", b"", plain) + b"\n")
    root = parser.parse(source).root_node
    if deep := _too_deep(root):
        return Script(left=[Left(deep, f"nested deeper than {DEEPEST} levels: not followed")])
    source = _with_braces(source, root)
    for _ in range(MOST_PASSES):
        ends = _unseparated(source, parser.parse(source).root_node)
        for end in reversed(ends):
            source = source[:end] + b";" + source[end:]
        if not ends:
            break
    reader = _Reader(source, positional, given)
    reader.statements(parser.parse(source).root_node)
    reader.end()

    def word(one: Word) -> Word:
        pieces = (replace(p, text=decoded(p.text), unknown=decoded(p.unknown)) for p in one.pieces)
        return Word(decoded(one.text), one.line, decoded(one.unknown), tuple(pieces))

    return _mapped(reader.script, decoded, word, lambda line: line)


def within(word: Word) -> Script:
    """The script that a word holds, as `bash -c` reads it, with the lines of the one around it.

    What isn't known of the word stays so, each part with its own reason.
    """
    mark = _unused("Zu", word.text)
    text, lines, reasons = "", [word.line], list[str]()
    for piece in word.pieces:
        if text.endswith("\n") or not text:
            lines[text.count("\n") :] = [piece.line or word.line]
        text += f"{mark}{len(reasons):06}" if piece.unknown else piece.text
        reasons += [piece.unknown] if piece.unknown else []

    def told(part: str) -> str:
        return re.sub(rf"{mark}\d{{6}}|{mark}\d*…", "…", part)

    def marked(one: Word) -> Word:
        part = re.search(rf"{mark}(\d{{6}})", one.text)
        unknown = reasons[int(part[1])] if part else told(one.unknown)
        text = re.sub(rf"{mark}\d{{6}}", "", one.text)
        return Word(text, line(one.line), unknown, one.pieces)

    def line(number: int) -> int:
        return lines[min(number, len(lines)) - 1]

    return _mapped(read(text), told, marked, line)


def _unused(start: str, *texts: str) -> str:
    """A word that begins with `start` and is in none of the texts."""
    words = (f"{start}{number}{start[-1]}" for number in count())
    return next(word for word in words if not any(word in text for text in texts))


def _in_ascii(text: str, positional: tuple[str, ...]) -> tuple[bytes, Callable[[str], str]]:
    """The text with other characters as words of ASCII, and the function that turns them back.

    The grammar's scanner asks C's isalnum of each character, which can crash above 255.
    """
    mark = _unused("Zq", text, *positional)

    def decoded(part: str) -> str:
        part = re.sub(f"{mark}([0-9a-f]{{6}})", lambda match: chr(int(match[1], 16)), part)
        return re.sub(f"{mark}[0-9a-f]*…", "…", part)

    plain = re.sub(r"[^\x00-\x7f]", lambda match: f"{mark}{ord(match[0]):06x}", text)
    return plain.encode(), decoded


def _mapped(
    script: Script,
    change: Callable[[str], str],
    word: Callable[[Word], Word],
    line: Callable[[int], int],
) -> Script:
    """The script with every text, word and line changed."""
    commands = [
        Command(
            tuple(map(word, command.words)),
            {change(name): word(value) for name, value in command.env.items()},
            line(command.line),
            change(command.output),
        )
        for command in script.commands
    ]
    exported = {change(name): word(value) for name, value in script.exported.items()}
    left = [Left(line(one.line), change(one.what)) for one in script.left]
    branches = [
        Branch(
            Left(line(one.left.line), change(one.left.what)),
            _mapped(one.script, change, word, line),
        )
        for one in script.branches
    ]
    return Script(commands, exported, left, branches)


def _too_deep(root: Node) -> int | None:
    """The line of the first node below DEEPEST, None where there's none."""
    cursor = root.walk()
    while cursor.depth <= DEEPEST:
        if cursor.goto_first_child() or cursor.goto_next_sibling():
            continue
        while cursor.goto_parent():
            if cursor.goto_next_sibling():
                break
        else:
            return None
    return int(cursor.node.start_point[0]) + 1 if cursor.node else None


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


def _line(node: Node) -> int:
    return int(node.start_point[0]) + 1


def _text(node: Node | None) -> str:
    return (node.text or b"").decode(errors="replace") if node is not None else ""


def _parts(node: Node) -> Iterator[list[Node]]:
    """The statements of each part of a condition, a loop or a function; else the node itself."""
    if node.type == "ERROR":
        return
    if node.type == "case_statement":
        items = [child for child in node.named_children if child.type == "case_item"]
        yield from ([c for c in one.named_children if c not in _values(one)] for one in items)
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


def _values(item: Node) -> list[Node]:
    """The patterns of one `a|b)` of a case."""
    return item.children_by_field_name("value")


def _options_in(node: Node) -> list[tuple[str, int]]:
    """The options that an assignment's text names, each with its line."""
    found = re.finditer(r"(?<![^\s\"'(=])--[A-Za-z][\w-]*", _text(node))
    return [(one[0], _line(node) + _text(node).count("\n", 0, one.start())) for one in found]


def _touching(nodes: list[Node]) -> list[list[Node]]:
    """The nodes in groups without a byte between them."""
    groups: list[list[Node]] = []
    for node in nodes:
        if groups and groups[-1][-1].end_byte == node.start_byte:
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups


def _below(node: Node, *kinds: str) -> Iterator[Node]:
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one.type in kinds:
            yield one
        waiting += reversed(one.children)


class _Reader:
    """Follows the statements of a script, with the variables as they stand at each."""

    def __init__(
        self, source: bytes, positional: tuple[str, ...], given: tuple[tuple[str, str], ...]
    ) -> None:
        self.source = source
        self.ends = [match.start() for match in re.finditer(b"\n", source)]
        self.script = Script()
        self.expanded = 0
        known = [*DEFAULTS.items(), *given]
        self.scalars: dict[str, Pieces] = {name: (Piece(value, 0),) for name, value in known}
        self.arrays: dict[str, list[Pieces]] = {}
        self.exports: dict[str, None] = {}
        for number, value in enumerate(positional, 1):
            self.scalars[str(number)] = (Piece(value, 0),)
        self.scalars["0"] = (Piece("", 0, unknown="$0 is the script itself"),)
        self.arrays["@"] = [(Piece(value, 0),) for value in positional]

    # Statements

    def statements(self, node: Node) -> None:
        """Follow what stands in a program, a group or a subshell."""
        self.sequence(node.named_children)

    def sequence(self, nodes: list[Node]) -> None:
        """Follow one statement after the other."""
        for group in _touching(nodes):
            for child in group:
                self.statement(child)
            if len(group) > 1:  # what touches is one, and isn't read as one
                sets = [one for child in group for one in _below(child, "variable_assignment")]
                names = [_text(one.child_by_field_name("name")) for one in sets]
                self._forget(names, _line(group[0]))

    def end(self) -> None:
        """Say what is exported, as it stands in the end."""
        for name in self.exports:
            if name in self.scalars:
                self.script.exported[name] = _joined(self.scalars[name], 0)

    def statement(self, node: Node, output: str = "") -> None:
        """Follow one statement; `output` is what stands behind it in a pipeline."""
        kind = node.type
        if kind in ("variable_assignment", "variable_assignments"):
            self._assignments(node)
        elif kind == "declaration_command":
            self._declaration(node)
        elif kind == "command":
            self._command(node, output)
        elif kind in ("redirected_statement", "pipeline"):
            first, *rest = node.named_children
            behind = self._between(first.end_byte, node.end_byte) if rest else ""
            self.statement(first, output=f"{behind.strip()} {output}".strip())
        elif kind == "list":
            self._list(node)
        elif kind == "unset_command":
            for name in (_text(child) for child in node.named_children):
                self.scalars.pop(name, None)
                self.arrays.pop(name, None)
                self.exports.pop(name, None)
        elif kind == "compound_statement" and _text(node).startswith("(("):
            self._forget([_text(name) for name in _below(node, "variable_name")], _line(node))
        elif kind in ("compound_statement", "subshell"):
            self.statements(node)
        elif kind in BLOCKS:
            self._uncertain(node, BLOCKS[kind])

    def _list(self, node: Node) -> None:
        """`a && b` as a and then b, unless a is a test; of `a || b`, b is uncertain."""
        first, second = node.named_children[0], node.named_children[-1]
        operator = _text(node.children[1])
        self.statement(first)
        if operator == "&&" and not list(_below(first, "test_command")):
            self.statement(second)
        else:
            self._uncertain(second, f"what stands behind {operator}")

    def _uncertain(self, node: Node, what: str) -> None:
        """Tell what depends on something; variables set there are no longer known."""
        branches = list(self._branches(node, what))
        names = [_text(c.child_by_field_name("name")) for c in _below(node, "command")]
        sets = list(_below(node, "variable_assignment"))
        added = list[str]()
        for assignment in sets:
            name = _text(assignment.child_by_field_name("name")).partition("[")[0]
            if any(_text(child) == "+=" for child in assignment.children):
                added.append(name)  # what it has by now stays
            else:
                self._forget([name], _line(assignment))
        loop = node.child_by_field_name("variable")
        self._forget([_text(loop)] if loop else [], _line(node))
        if sets or set(names) - HARMLESS or node.type == "ERROR":
            last = int(node.end_point[0]) + 1
            span = f" up to line {last}" if last > _line(node) else ""
            adds = "".join(f", what it adds to {name} is left out" for name in dict.fromkeys(added))
            left = Left(_line(node), f"{what}{span}: not followed{adds}")
            options = [one for assignment in sets for one in _options_in(assignment)]
            self.script.left += [
                left,
                *(Left(line, f"{name}: {NOT_TAKEN}") for name, line in options),
            ]
            self.script.branches += [Branch(left, script) for script in branches]

    def _branches(self, node: Node, what: str) -> Iterator[Script]:
        """What each part of a statement comes to where it is entered, if it has any command."""
        for nodes in _parts(node):
            inner = copy(self)
            inner.script, inner.exports = Script(), {**self.exports}
            inner.scalars, inner.arrays = {**self.scalars}, {**self.arrays}
            if loop := node.child_by_field_name("variable"):
                inner._forget([_text(loop)], _line(node))
            if what == BLOCKS["function_definition"]:
                inner.scalars = {k: v for k, v in self.scalars.items() if not k.isdigit()}
                inner.arrays["@"] = [(Piece("", _line(node), unknown="$@ of a function"),)]
            inner.sequence(nodes)
            inner.end()
            self.expanded = inner.expanded
            if inner.script.commands or inner.script.branches:
                yield inner.script

    def _forget(self, names: list[str], line: int) -> None:
        """From here on the variables have values that can't be told."""
        for name in names:
            unknown = f"what {name} is set to depends on what isn't followed"
            self.scalars[name] = (Piece("", line, unknown=unknown),)
            self.arrays.pop(name, None)

    def _assignments(self, node: Node) -> None:
        for assignment in _below(node, "variable_assignment"):
            self._assign(assignment)

    def _declaration(self, node: Node) -> None:
        """export, declare, readonly, local: assignments, and names to export."""
        exporting = _text(node.children[0]) == "export"
        starts = {child.start_byte for child in node.named_children}
        for child in node.named_children:
            if child.type == "variable_assignment":
                self._assign(child)
            if exporting and child.type in ("variable_assignment", "variable_name"):
                name = _text(child.child_by_field_name("name") or child)
                if child.end_byte in starts:  # what touches is one, and isn't read as one
                    self._forget([name], _line(child))
                self.exports[name] = None

    def _assign(self, node: Node) -> None:
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        name, adds = _text(target), any(_text(child) == "+=" for child in node.children)
        if target is None or target.type == "subscript" or node.has_error:
            array = name.partition("[")[0]
            self.script.left.append(Left(_line(node), f"{_shortened(node)}: isn't understood"))
            self._forget([array], _line(node))
        elif value is not None and value.type == "array":
            nodes = [child for child in value.named_children if child.type != "comment"]
            fields = [one for group in _touching(nodes) for one in self.group_fields(group)]
            self.arrays[name] = (self._as_array(name) if adds else []) + fields
            self.scalars.pop(name, None)
        else:
            pieces = self.pieces(value, quoted=False) if value is not None else ()
            pieces = tuple(part for piece in pieces for part in _filled_in(piece))
            before: Pieces = ()
            if adds and name in self.arrays:
                before = (self.arrays[name] or [()])[0]
            elif adds:
                before = self.scalars.get(name, ())
            self._set(name, (*before, *pieces))

    def _set(self, name: str, pieces: Pieces) -> None:
        """Give a variable a value; of an array that is its first element's."""
        if name in self.arrays:
            self.arrays[name] = [pieces, *self.arrays[name][1:]]
            return
        self.scalars[name] = pieces

    def _as_array(self, name: str) -> list[Pieces]:
        if name in self.arrays:
            return self.arrays[name]
        return [self.scalars[name]] if name in self.scalars else []

    def _command(self, node: Node, output: str) -> None:
        env: dict[str, Word] = {}
        arguments: list[Node] = []
        children = node.named_children
        for child, following in zip_longest(children, children[1:]):
            if child.type == "variable_assignment":
                name = _text(child.child_by_field_name("name"))
                if following and not self._apart(child, following):
                    self._forget([name], _line(child))  # they are one, and aren't read as one
                value = child.child_by_field_name("value")
                env[name] = _joined(self.pieces(value, False) if value else (), _line(child))
            elif child.type not in ("comment", "file_redirect", "heredoc_redirect"):
                arguments += child.named_children if child.type == "command_name" else [child]
        words = self.words(arguments)
        if words:
            if words[0].text in SETTERS:
                names = [re.match(r"\w*", word.text) for word in words[1:]]
                self._forget([name[0] for name in names if name], _line(node))
            self.script.commands.append(Command(tuple(words), env, _line(node), output))

    def _apart(self, one: Node, other: Node) -> bool:
        """Whether nothing but blanks is between; the grammar drops a word that is a blank."""
        between = self.source[one.end_byte : other.start_byte]
        return bool(between) and not re.sub(rb"\\\n", b"", between).strip()

    # Words

    def words(self, nodes: list[Node]) -> list[Word]:
        """The arguments that nodes come to."""
        return [
            _joined(pieces, _line(group[0]))
            for group in _touching(nodes)
            for pieces in self.group_fields(group)
        ]

    def group_fields(self, group: list[Node]) -> list[Pieces]:
        """The words of nodes that touch: the grammar parts some words that are one."""
        if len(group) == 1:
            return self.fields(group[0])
        return _split(tuple(piece for node in group for piece in self.pieces(node, False)))

    def fields(self, node: Node) -> list[Pieces]:
        """The words that a node comes to after splitting, each still in pieces."""
        inner, quoted = node, False
        if node.type == "string" and len(node.named_children) == 1:
            only = node.named_children[0]
            if only.end_byte - only.start_byte == node.end_byte - node.start_byte - 2:
                inner, quoted = only, True
        elements = self._elements(inner)
        if elements is not None:
            if quoted:
                return [_quoted(pieces) for pieces in elements]
            return [word for pieces in elements for word in _split(_unquoted(pieces))]
        return _split(self.pieces(node, quoted=False))

    def _elements(self, node: Node) -> list[Pieces] | None:
        """The elements of `${ARRAY[@]}` or `$@`; None for anything else."""
        if _text(node) == "${@}":
            return self._bounded("@", self.arrays["@"], _line(node))
        subscript = next(iter(node.named_children), None) if node.type == "expansion" else None
        if subscript is None or subscript.type != "subscript" or len(node.named_children) > 1:
            return None
        name = _text(subscript.child_by_field_name("name"))
        whole = _text(subscript.child_by_field_name("index")) in ("@", "*")
        plain = len(node.children) == 3  # no ${#A[@]}, no ${A[@]:1}
        if not whole or not plain:
            return None
        if name in self.arrays or name in self.scalars:
            return self._bounded(name, self._as_array(name), _line(node))
        return [self._variable(name, _line(node))]

    def pieces(self, node: Node, quoted: bool) -> Pieces:
        """The text of a node in pieces, not yet split."""
        kind, line = node.type, _line(node)
        if kind == "string":
            return self._in_string(node)
        if kind == "concatenation":
            return tuple(p for child in node.children for p in self.pieces(child, quoted))
        if kind == "raw_string":
            return _by_line(_text(node)[1:-1], line, quoted=True)
        if kind in ("simple_expansion", "expansion"):
            return tuple(replace(p, quoted=quoted or p.quoted) for p in self._expansion(node))
        if kind == "arithmetic_expansion":
            return (self._arithmetic(node),)
        if kind == "command_substitution":
            if _text(node) in ("$(pwd)", "`pwd`"):
                return self._variable("PWD", line)
            return (Piece("", line, quoted, f"{_shortened(node)} is what a command prints"),)
        text = _text(node)
        if kind in PLAIN and not re.search(r"(?<!\\)[{}]", text):
            return (Piece(re.sub(r"\\(\n|.)", _unescaped, text), line, quoted=True),)
        return (Piece("", line, quoted, f"{_shortened(node)} isn't understood"),)

    def _in_string(self, node: Node) -> Pieces:
        """What stands between double quotes; the grammar leaves out blanks between expansions."""
        found: list[Piece] = []
        at = node.start_byte + 1
        for child in node.named_children:
            if child.type == "string_content":
                continue
            raw = self.source[child.start_byte : child.end_byte]
            begun = child.end_byte - len(raw.lstrip())  # a blank before it may count as its own
            found += self._plain(at, begun)
            found += self.pieces(child, quoted=True)
            at = child.end_byte
        return (*found, *self._plain(at, node.end_byte - 1))

    def _plain(self, start: int, end: int) -> Pieces:
        """Text between double quotes, without the backslashes that mean something there."""
        rows = _by_line(self._between(start, end), self._line_at(start), quoted=True)
        escape = re.compile(r'\\([\n"$`\\])')
        return tuple(replace(row, text=escape.sub(_unescaped, row.text)) for row in rows)

    def _between(self, start: int, end: int) -> str:
        return self.source[start:end].decode(errors="replace")

    def _line_at(self, offset: int) -> int:
        return bisect_left(self.ends, offset) + 1

    def _expansion(self, node: Node) -> Pieces:
        """`$X`, `${X}`, `${X:-default}` and its like."""
        parts = [c for c in node.children if _text(c).strip() not in ("$", "${", "}")]
        line = _line(node)
        if not parts or parts[0].type not in ("variable_name", "special_variable_name"):
            return (Piece("", line, unknown=f"{_shortened(node)} isn't followed"),)
        name = _text(parts[0])
        if len(parts) == 1:
            return _unquoted(self._variable(name, line))
        operator = _text(parts[1])
        if operator not in (":-", "-", ":=", "="):
            return (Piece("", line, unknown=f"{_shortened(node)} isn't followed"),)
        known = name in self.scalars or bool(self.arrays.get(name))
        value = _unquoted(self._variable(name, line)) if known else ()
        if known and (":" not in operator or any(p.text or p.unknown for p in value)):
            return value
        default = tuple(piece for part in parts[2:] for piece in self._default(part))
        if "=" in operator:
            default = _unquoted(default)
            self._set(name, default)
        return default

    def _default(self, node: Node) -> Pieces:
        """What stands behind `:-`; its own quotes keep it from being split."""
        pieces = self.pieces(node, quoted=False)
        return pieces if node.type in ("string", "raw_string") else _unquoted(pieces)

    def _bounded(self, name: str, elements: list[Pieces], line: int) -> list[Pieces]:
        """The values as they are, until variables have come to more than any script's do."""
        self.expanded += sum(64 + len(piece.text) for pieces in elements for piece in pieces)
        if self.expanded <= MOST_EXPANDED:
            return elements
        return [(Piece("", line, unknown=f"${name}: variables come to too many characters"),)]

    def _variable(self, name: str, line: int) -> Pieces:
        """The value of `$name`, as it is not yet split."""
        return self._bounded(name, [self._value(name, line)], line)[0]

    def _value(self, name: str, line: int) -> Pieces:
        if name == "@":
            if len(self.arrays["@"]) > 1:
                return (Piece("", line, unknown="$@ within a word isn't followed"),)
            return (self.arrays["@"] or [()])[0]
        if name in self.scalars:
            return self.scalars[name]
        if name in self.arrays:
            return (self.arrays[name] or [()])[0]
        if name.isdigit():
            return (Piece("", line, unknown=f"${name} is given on the command line"),)
        return (Piece("", line, unknown=f"${name} isn't set in the script"),)

    def _arithmetic(self, node: Node) -> Piece:
        line, inner = _line(node), [c for c in node.named_children if c.type != "comment"]
        value = self._computed(inner[0]) if len(inner) == 1 else None
        if value is None:
            return Piece("", line, unknown=f"{_shortened(node)} can't be computed")
        return Piece(str(value), line)

    def _computed(self, node: Node) -> int | None:
        """The value of an arithmetic expression of whole numbers, None where it isn't known."""
        if node.type == "parenthesized_expression":
            return self._computed(node.named_children[0])
        if node.type == "unary_expression" and _text(node.children[0]) == "-":
            negated = self._computed(node.named_children[-1])
            return None if negated is None else -negated
        if node.type == "binary_expression":
            left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
            sign = _text(node.child_by_field_name("operator"))
            a = self._computed(left) if left else None
            b = self._computed(right) if right else None
            if a is None or b is None or sign not in OPERATIONS or (b == 0 and sign in "/%"):
                return None
            return OPERATIONS[sign](a, b)
        if node.type == "variable_name":
            pieces = self._variable(_text(node), _line(node))
        else:
            pieces = self.pieces(node, quoted=True)
        word = _joined(pieces, 0)
        known = re.fullmatch(r"-?(0|[1-9]\d{0,17})", word.text.strip())
        return int(word.text) if known and not word.unknown else None


OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "%": lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
}


def _unescaped(match: re.Match[str]) -> str:
    return "" if match[1] == "\n" else match[1]


def _shortened(node: Node) -> str:
    text = " ".join(_text(node).split())
    return text if len(text) <= 40 else f"{text[:40]}…"


def _by_line(text: str, line: int, quoted: bool) -> Pieces:
    """A text in pieces of one line each, at least one."""
    rows = re.findall(r"[^\n]*\n|[^\n]+", text) or [""]
    return tuple(Piece(row, line + number, quoted) for number, row in enumerate(rows))


def _filled_in(piece: Piece) -> Iterator[Piece]:
    """The piece with what is left for the reader to fill in as pieces that aren't known."""
    at = 0
    for blank in PLACEHOLDER.finditer(piece.text):
        yield replace(piece, text=piece.text[at : blank.start()])
        yield replace(piece, text="", unknown=f"{blank[0]} is to be filled in")
        at = blank.end()
    yield replace(piece, text=piece.text[at:])


def _quoted(pieces: Pieces) -> Pieces:
    return tuple(replace(piece, quoted=True) for piece in pieces) or (Piece("", 0, quoted=True),)


def _unquoted(pieces: Pieces) -> Pieces:
    return tuple(replace(piece, quoted=False) for piece in pieces)


def _split(pieces: Pieces) -> list[Pieces]:
    """The words of pieces: unquoted text parts at blanks."""
    words: list[list[Piece]] = []
    open_word = False
    for piece in pieces:
        if piece.quoted or piece.unknown:
            words = words if open_word else [*words, []]
            words[-1].append(piece)
            open_word = True
            continue
        for part in re.findall(r"[ \t\n]+|[^ \t\n]+", piece.text):
            if part[0] in " \t\n":
                open_word = False
                continue
            words = words if open_word else [*words, []]
            words[-1].append(replace(piece, text=part))
            open_word = True
    return [tuple(word) for word in words]


def _joined(pieces: Pieces, line: int) -> Word:
    """The word that pieces make up; what isn't known of it is told by the first such piece."""
    unknown = next((piece for piece in pieces if piece.unknown), None)
    first = unknown or next((piece for piece in pieces if piece.line), None)
    text = "".join(piece.text for piece in pieces)
    reason = unknown.unknown if unknown else ""
    return Word(text, (first.line if first else 0) or line, reason, pieces)
