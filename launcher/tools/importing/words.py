"""Evaluates words of a shell script by its variables, and marks what isn't known.

The parser is tree-sitter's, with its grammar of bash:
https://github.com/tree-sitter/tree-sitter-bash
"""

from __future__ import annotations

import ast
import operator
import re
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node

TEMPLATE = re.compile(rb"^([ \t]*(?:export[ \t]+)?\w+=)(<[^>\n]+>[^\s#]*)", re.MULTILINE)
"""`DATA=<your path>/data`, as examples have it to be filled in; no shell takes it."""
PLACEHOLDER = re.compile(r"<[A-Za-z][^<>]*>")
LARGEST = 2**16
"""Characters that a variable may come to, each piece of its text counted as 64."""
UNKNOWN = 0x110000
"""Above all characters: numbers from here on stand for what isn't known of a text."""
PLAIN = frozenset("word number extglob_pattern test_operator variable_name".split())
ESCAPED = re.compile(r'\\([\n"$`\\])')
"""What a backslash takes its meaning from between double quotes."""
DEFAULTS = {"PWD": ".", "HOME": "~"}
"""What the launcher takes for these itself: relative paths start where it is started."""


@dataclass(frozen=True)
class WordPiece:
    """Text of one origin. A quoted one isn't split; `unknown` says why its text can't be told."""

    text: str
    line: int
    quoted: bool = False
    unknown: str = ""


Pieces = tuple[WordPiece, ...]
EMPTY: Pieces = (WordPiece("", 0, quoted=True),)


@dataclass(frozen=True)
class Word:
    """One argument of a command; `unknown` says why it isn't known, "" where it is."""

    text: str
    line: int
    unknown: str = ""


class ShellSource:
    """A script as the grammar takes it: in ASCII, with words of it for other characters.

    The grammar's scanner asks C's isalnum of each character, which can crash above 255. So is
    what isn't known of the script, where `bash -c` is given it: each part with its own reason.
    """

    def __init__(self, pieces: Pieces) -> None:
        known = "".join(piece.text for piece in pieces)
        self.mark = next(f"Zq{n}q" for n in count() if f"Zq{n}q" not in known)
        self.reasons: list[str] = []
        self.text, self.lines = "", list[int]()
        for piece in pieces:
            if (piece.text or piece.unknown) and (not self.text or self.text.endswith("\n")):
                self.lines.append(piece.line)
            self.text += self._code(UNKNOWN + len(self.reasons)) if piece.unknown else piece.text
            self.reasons += [piece.unknown] if piece.unknown else []
        self.lines.append(self.lines[-1] + 1 if self.lines else 1)
        ascii_only = re.sub(r"[^\x00-\x7f]", lambda match: self._code(ord(match[0])), self.text)
        ended = re.sub(rb"\\(\n\s*)?\Z", b"", ascii_only.encode()) + b"\n"
        self.plain = TEMPLATE.sub(rb"\1'\2'", ended)

    def _code(self, number: int) -> str:
        return f"{self.mark}{number:06x}"

    def line_of(self, row: int) -> int:
        """The script's line of a row of the text (from 0)."""
        return self.lines[min(row, len(self.lines) - 1)]

    def pieces(self, plain: str, line: int, quoted: bool) -> Iterator[WordPiece]:
        """What a part of the text says, at least one piece."""
        text, found = "", False
        for index, part in enumerate(re.split(rf"{self.mark}([0-9a-f]{{6}})", plain)):
            number = int(part, 16) if index % 2 else 0
            text += chr(number) if 0 < number < UNKNOWN else "" if number else part
            if number >= UNKNOWN:
                yield WordPiece(text, line, quoted)
                yield WordPiece("", line, quoted, self.reasons[number - UNKNOWN])
                text, found = "", True
        if text or not found:
            yield WordPiece(text, line, quoted)

    def told(self, plain: str) -> str:
        """A part of the text for people."""
        return "".join("…" if p.unknown else p.text for p in self.pieces(plain, 0, True))


class WordValues:
    """The variables of a script, and what its words come to by them."""

    def __init__(self, source: ShellSource, plain: bytes, variables: dict[str, list[str]]) -> None:
        self.source, self.plain = source, plain
        self.ends = [match.start() for match in re.finditer(b"\n", plain)]
        known = {name: [value] for name, value in DEFAULTS.items()} | {"@": []} | variables
        # What is no array is one of a single element, as it is to a shell.
        self.values: dict[str, list[Pieces]] = {
            name: [(WordPiece(value, 0),) for value in values] for name, values in known.items()
        }
        self.values["0"] = [(WordPiece("", 0, unknown="$0 is the script itself"),)]

    def text(self, node: Node | None) -> str:
        """A node's text, as people know it."""
        return self.source.told(plain_text(node))

    def line(self, node: Node) -> int:
        return self.source.line_of(node.start_point[0])

    def shortened(self, node: Node) -> str:
        text = " ".join(self.text(node).split())
        return text if len(text) <= 40 else f"{text[:40]}…"

    def unknown(self, node: Node, why: str, *, quoted: bool = False) -> Pieces:
        """What a node comes to where that can't be told."""
        return (WordPiece("", self.line(node), quoted, f"{self.shortened(node)} {why}"),)

    def forget(self, names: list[str], line: int, why: str = "") -> None:
        """From here on the variables have values that can't be told."""
        for name in names:
            unknown = why or f"what {name} is set to depends on what isn't followed"
            self.values[name] = [(WordPiece("", line, unknown=unknown),)]

    def keep(self, name: str, values: list[Pieces], line: int) -> None:
        """Give a variable its elements; more than any script's are too many to keep."""
        if sum(64 + len(piece.text) for pieces in values for piece in pieces) <= LARGEST:
            self.values[name] = values
        else:
            self.forget([name], line, f"${name} comes to too many characters")

    def assigned(self, name: str, value: Node | None, line: int, *, adds: bool) -> None:
        """Follow `name=value` or, where it `adds`, `name+=value`."""
        if value is not None and value.type == "array":
            nodes = [child for child in value.named_children if child.type != "comment"]
            fields = [pieces for pieces, _ in self.fields(nodes)]  # `${name:=…}` in it sets it
            self.keep(name, (self.values.get(name, []) if adds else []) + fields, line)
            return
        pieces = self.pieces(value, quoted=False) if value is not None else ()
        filled = tuple(part for piece in pieces for part in _filled_in(piece))
        before = self.values.get(name, [])
        first = (*before[0], *filled) if adds and before else filled
        self.keep(name, [first, *before[1:]], line)

    def fields(self, nodes: list[Node]) -> list[tuple[Pieces, Word]]:
        """The words that nodes come to after splitting, each still in pieces and as one."""
        found = []
        for group in touching(nodes):
            for pieces in self._fields(group):
                found.append((pieces, joined(pieces, self.line(group[0]))))
        return found

    def _fields(self, group: list[Node]) -> list[Pieces]:
        """The words of nodes that touch: the grammar parts some words that are one."""
        node, quoted = group[0], False
        if len(group) == 1 and node.type == "string" and len(node.named_children) == 1:
            only = node.named_children[0]
            if only.end_byte - only.start_byte == node.end_byte - node.start_byte - 2:
                node, quoted = only, True
        elements = self._elements(node) if len(group) == 1 else None
        if elements is None:
            return _split(tuple(piece for one in group for piece in self.pieces(one, False)))
        if quoted:
            return [_requoted(pieces, quoted=True) or EMPTY for pieces in elements]
        return [word for pieces in elements for word in _split(_requoted(pieces))]

    def _elements(self, node: Node) -> list[Pieces] | None:
        """The elements of `${ARRAY[@]}` or `$@`; None for anything else."""
        whole = re.fullmatch(r"\$\{(@|(\w+)\[[@*]\])\}", plain_text(node))
        if node.type not in ("expansion", "simple_expansion") or not whole:
            return None
        name = self.source.told(whole[2] or "@")
        return self.values.get(name) if name in self.values else [self.variable(name, node)]

    def pieces(self, node: Node, quoted: bool) -> Pieces:
        """The text of a node in pieces, not yet split."""
        kind = node.type
        if kind == "string":
            return self._in_string(node)
        if kind == "concatenation":
            return tuple(p for child in node.children for p in self.pieces(child, quoted))
        if kind == "raw_string":
            return self._rows(plain_text(node)[1:-1], node.start_point[0])
        if kind in ("simple_expansion", "expansion"):
            return tuple(replace(p, quoted=quoted or p.quoted) for p in self._expansion(node))
        if kind == "arithmetic_expansion":
            return self._arithmetic(node)
        if kind == "command_substitution":
            if self.text(node) in ("$(pwd)", "`pwd`"):
                return self.variable("PWD", node)
            return self.unknown(node, "is what a command prints", quoted=quoted)
        if kind in PLAIN and not re.search(r"(?<!\\)[{}]", plain_text(node)):
            plain = re.sub(r"\\(\n|.)", _unescaped, plain_text(node))
            return tuple(self.source.pieces(plain, self.line(node), True))
        return self.unknown(node, "isn't understood", quoted=quoted)

    def _in_string(self, node: Node) -> Pieces:
        """What stands between double quotes; the grammar leaves out blanks between expansions."""
        found: list[WordPiece] = []
        at = node.start_byte + 1
        for child in node.named_children:
            if child.type == "string_content":
                continue
            raw = self.plain[child.start_byte : child.end_byte]
            begun = child.end_byte - len(raw.lstrip())  # a blank before it may count as its own
            found += self._in_quotes(at, begun)
            found += self.pieces(child, quoted=True)
            at = child.end_byte
        return (*found, *self._in_quotes(at, node.end_byte - 1))

    def _in_quotes(self, start: int, end: int) -> Pieces:
        """Text between double quotes, without the backslashes that mean something there."""
        return self._rows(self.plain[start:end].decode(), bisect(self.ends, start - 1), ESCAPED)

    def _rows(self, plain: str, row: int, escape: re.Pattern[str] | None = None) -> Pieces:
        """Quoted text from a row on, in pieces of one line each, without what escapes."""
        found = list[WordPiece]()
        for number, text in enumerate(_lines_of(plain), row):
            text = escape.sub(_unescaped, text) if escape else text
            found += self.source.pieces(text, self.source.line_of(number), True)
        return tuple(found)

    def _expansion(self, node: Node) -> Pieces:
        """`$X`, `${X}`, `${X:-default}` and its like."""
        parts = [c for c in node.children if self.text(c).strip() not in ("$", "${", "}")]
        named = bool(parts) and parts[0].type in ("variable_name", "special_variable_name")
        name, operator = self.text(parts[0]) if named else "", "".join(map(self.text, parts[1:2]))
        if not name or operator not in ("", ":-", "-", ":=", "="):
            return self.unknown(node, "isn't followed")
        known = bool(self.values.get(name))
        value = _requoted(self.variable(name, node)) if known or not operator else ()
        if not operator or (
            known and (":" not in operator or any(p.text or p.unknown for p in value))
        ):
            return value
        default: Pieces = ()
        for part in parts[2:]:  # its own quotes keep it from being split
            pieces = self.pieces(part, quoted=False)
            default += pieces if part.type in ("string", "raw_string") else _requoted(pieces)
        if "=" in operator:
            default = _requoted(default)
            self.keep(name, [default, *self.values.get(name, [])[1:]], self.line(node))
        return default

    def variable(self, name: str, node: Node) -> Pieces:
        """The value of `$name`, as it is not yet split."""
        values = self.values.get(name)
        if name == "@" and values and len(values) > 1:
            why = "within a word isn't followed"
        elif values is not None:
            return values[0] if values else ()
        else:
            why = "is given on the command line" if name.isdigit() else "isn't set in the script"
        return (WordPiece("", self.line(node), unknown=f"${name} {why}"),)

    def _arithmetic(self, node: Node) -> Pieces:
        """`$((…))` of whole numbers, and of variables that hold some."""

        def number(match: re.Match[str]) -> str:
            word = joined(self.variable(match[1] or match[2], node), 0)
            known = not word.unknown and re.fullmatch(r"-?\d{1,18}", word.text.strip())
            return f"({word.text})" if known else "?"

        text = " ".join(plain_text(node).split())
        text = re.sub(r"\$\{(\w+)\}|\b([A-Za-z_]\w*)", number, text)
        inner = re.fullmatch(r"\$\(\(([\d\s()+*/%-]+)\)\)", text)
        try:
            value = _computed(ast.parse(inner[1].strip(), mode="eval").body) if inner else None
        except (SyntaxError, ValueError, ZeroDivisionError):
            value = None
        if value is None or abs(value) >= 2**63:
            return self.unknown(node, "can't be computed")
        return (WordPiece(str(value), self.line(node)),)


def _computed(node: ast.expr) -> int:
    """The value of an expression as C has it. Raises ValueError and ZeroDivisionError."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(ast.USub(), inner):
            return -_computed(inner)
        case ast.BinOp(left, sign, right) if type(sign) in OPERATIONS:
            return OPERATIONS[type(sign)](_computed(left), _computed(right))
    raise ValueError("not of whole numbers")


OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
}


def _unescaped(match: re.Match[str]) -> str:
    return "" if match[1] == "\n" else match[1]


def plain_text(node: Node | None) -> str:
    """A node's text as the grammar has it."""
    return (node.text or b"").decode() if node is not None else ""


def touching(nodes: list[Node]) -> list[list[Node]]:
    """The nodes in groups without a byte between them."""
    groups: list[list[Node]] = []
    for node in nodes:
        if groups and groups[-1][-1].end_byte == node.start_byte:
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups


def _lines_of(text: str) -> list[str]:
    """Its lines with their ends, at least one."""
    return re.findall(r"[^\n]*\n|[^\n]+", text) or [""]


def by_line(text: str, line: int) -> Pieces:
    """A text in pieces of one line each, at least one."""
    return tuple(WordPiece(row, number) for number, row in enumerate(_lines_of(text), line))


def _filled_in(piece: WordPiece) -> Iterator[WordPiece]:
    """The piece with what is left for the reader to fill in as pieces that aren't known."""
    at = 0
    for blank in PLACEHOLDER.finditer(piece.text):
        yield replace(piece, text=piece.text[at : blank.start()])
        yield replace(piece, text="", unknown=f"{blank[0]} is to be filled in")
        at = blank.end()
    yield replace(piece, text=piece.text[at:])


def _requoted(pieces: Pieces, *, quoted: bool = False) -> Pieces:
    return tuple(replace(piece, quoted=quoted) for piece in pieces)


def _split(pieces: Pieces) -> list[Pieces]:
    """The words of pieces: unquoted text parts at blanks."""
    words: list[list[WordPiece]] = []
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


def joined(pieces: Pieces, line: int) -> Word:
    """The word that pieces make up; what isn't known of it is told by the first such piece."""
    unknown = next((piece for piece in pieces if piece.unknown), None)
    first = unknown or next((piece for piece in pieces if piece.line), None)
    text = "".join(piece.text for piece in pieces)
    reason = unknown.unknown if unknown else ""
    return Word(text, (first.line if first else 0) or line, reason)
