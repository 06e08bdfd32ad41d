"""Values that a script reads and never sets: their names, and stand-ins for them.

A script is run twice, with other stand-ins each time: what differs between both depends on them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

SET = re.compile(
    r"(?:^|[\s;&|({])(?:(?:export|local|declare|readonly|typeset)\s+(?:-\w+\s+)*)?"
    r"([A-Za-z_]\w*)(?:\[[^]]*\])?\+?=|\bfor\s+(\w+)\s+in|\bfor\s*\(\(\s*(\w+)=|"
    r"\bread(?:array)?\s+(?:-\w+\s+)*([\w ]+)|\bgetopts\s+\S+\s+(\w+)|"
    r"\bmapfile\s+(?:-\w+\s+)*(\w+)",
    re.MULTILINE,
)
READ = re.compile(r"\$(?:([A-Za-z_]\w*)|\{[#!]?([A-Za-z_]\w*)([^}]?))")
TESTED = re.compile(r"(?:\[|\btest|&&|\|\|)\s+(?:!\s+)?-[nzv]\s+(?:\"|')?\$?\{?(\w+)(?::?[-+])?\}?")
ARITHMETIC = re.compile(r"(?<![\w$#{.])([A-Za-z_]\w*)(?!\w|\s*(?:\+\+|--|[-+*/]?=[^=]))")
OWN = frozenset(
    "BASH_SOURCE BASH BASHPID BASH_VERSION BASH_REMATCH RANDOM SECONDS LINENO PWD HOME PATH OLDPWD "
    "UID EUID IFS FUNCNAME PPID SHELL TERM LD_LIBRARY_PATH PYTHONPATH CPATH LIBRARY_PATH OPTARG "
    "OPTIND REPLY PIPESTATUS EPOCHSECONDS EPOCHREALTIME HOSTNAME LD_PRELOAD COLUMNS SHLVL OSTYPE "
    "MANPATH PKG_CONFIG_PATH CPLUS_INCLUDE_PATH C_INCLUDE_PATH".split()
)
"""What bash or any machine sets, or what is added to and may be empty."""
TO_FILL = re.compile(r"(?<!<)<([A-Za-z](?:[^<>\n|&;$`]*[\w.)'])?)>")
"""`DATA=<your path>`, as examples have it to be filled in; no shell takes it unquoted."""
YOURS = re.compile(r"""(?i)(?<==)(["'])\s*your[ _-][^"'\n$`\\]*\1""")
"""`DATA="your data path"`, which bash would take for three words."""
INSTALLED = re.compile(
    r"(?<![\w.$}~/!:-])/(?:usr/(?:local/)?)?bin/(?=(?:python[\d.]*|torchrun|deepspeed|accelerate|"
    r"srun|sbatch|mpirun|mpiexec|docker|podman|apptainer|singularity|ssh)(?![\w./:-]))"
)
"""A folder of programs, before one that the machine may have and that has a stand-in."""
MARKS = ("1", "22")
TOKEN = re.compile(r"/@(?:1|22)@/(\w+)@(?:1|22)@")
PART = re.compile(r"@(?:1|22)@")
NUMBER, SMALL, LARGE = "8", "1", "16"
"""A count that isn't known; and in the second run, one with which other branches are taken."""
FACTS = {
    "DATE": "the date",
    "OUT": "what a command prints",
    "GPUS": "the machine's GPUs",
    "HOST": "the machine's name",
    "RANK": "the node's number",
}


def filled(text: str) -> tuple[str, dict[str, str]]:
    """The text with a token for each `<your path>`, which bash would take for a redirection.

    And for each "your path" that is assigned; and what each token stands for, by its name. What
    this machine may have has a stand-in on PATH.
    """
    labels = dict[str, str]()

    def token_of(match: re.Match[str]) -> str:
        name = f"FILL{len(labels)}"
        labels[name] = match[0].strip("\"' ")
        return token(name, 1)

    rows = [
        row if row.lstrip().startswith("#") else YOURS.sub(token_of, TO_FILL.sub(token_of, row))
        for row in INSTALLED.sub("", text).split("\n")
    ]
    return "\n".join(rows), labels


def unset_variables(text: str) -> tuple[list[str], list[str]]:
    """Variables that the text reads and never sets: those that need a value, those only tested."""
    code = _code(text)
    settled = {name for match in SET.findall(code) for part in match for name in part.split()}
    found, optional = list[str](), set[str]()
    for match in READ.finditer(code):
        name = match[1] or match[2]
        if match[3] and match[3] in ":-=+":
            rest = code[match.end() : match.end() + 1]
            if match[3] != ":" or rest in "-=+":
                optional.add(name)
        if name not in settled and name not in OWN and not name.isdigit():
            found.append(name)
    counts = {name: found.count(name) for name in found}
    tests = [match[1] for match in TESTED.finditer(code)]
    only_tested = [name for name in counts if counts[name] == tests.count(name)]
    needed = [name for name in counts if name not in optional and name not in only_tested]
    return needed, [name for name in only_tested if name not in optional]


def set_in_block(text: str, line: int) -> set[str]:
    """The variables that are set in the `if` or `case` that begins on a line, or on the line."""
    depth, rows = 0, text.splitlines()[line - 1 :]
    for number, row in enumerate(rows):
        code = re.sub(r"(^|\s)#.*", "", row)
        depth += len(re.findall(r"(?:^|[;&|]|\bthen|\belse|\bdo)\s*(?:if|case)\b", code))
        depth += not number and bool(re.match(r"\s*elif\b", code))
        depth -= len(re.findall(r"(?:^|[;\s])(?:fi|esac)(?=\s|;|$|\))", code))
        if depth <= 0:
            rows = rows[: number + 1]
            break
    code = _code("\n".join(rows))
    return {name for match in SET.findall(code) for part in match for name in part.split()}


def count_arguments(text: str) -> int:
    """How many arguments the text reads, 0 where it takes options from them."""
    code = _code(text)
    code = re.sub(
        r"(?ms)^(?:function\s+)?[\w-]+\s*\(\)\s*\{.*?^\}|^function\s+\w+\s*\{.*?^\}", "", code
    )
    if re.search(
        r"\bgetopts?\b|while\s+(?:\[+|\(\(|test)[^\n]*\$(?:#|\{#|1|\{1)|for\s+\w+\s+in\s+\"?\$[@*]",
        code,
    ):
        return 0
    most = shifted = 0
    for match in re.finditer(r"(?:^|[\s;])shift(?:[ \t]+(\d+))?(?=\s|;|$)|\$(\d)|\$\{(\d+)", code):
        if match[2] or match[3]:
            number = int(match[2] or match[3])
            most = max(most, shifted + number) if number else most
        else:
            shifted += int(match[1] or 1)
    return min(most, 50)


def has_default(text: str, number: int) -> bool:
    """Whether the text has a default for its argument of that number."""
    return bool(re.search(rf"\$\{{{number}:?[-=]", text))


def _code(text: str) -> str:
    """The text without comments and without awk's programs, whose $1 are their own."""
    text = re.sub(r"(?m)^\s*#.*$|(?<=\s)#\s.*$", "", text)
    text = re.sub(r"\bawk\b[^|\n']*'[^']*'", "awk", text)
    # In arithmetic a name is read without a $, and set by = or ++.
    return re.sub(r"\(\((.*?)\)\)", lambda match: ARITHMETIC.sub(r"$\1", match[0]), text)


def token(name: str, world: int) -> str:
    """What stands for a value that isn't known."""
    mark = MARKS[world - 1]
    return f"/@{mark}@/{name}@{mark}@"


def names_in(text: str) -> list[str]:
    """The names of the values that a text has tokens of."""
    return list(dict.fromkeys(TOKEN.findall(text)))


def shown(name: str, labels: Mapping[str, str]) -> str:
    """A value's name for people."""
    if name in labels:
        return labels[name]
    if re.fullmatch(r"ARG\d+", name):
        return f"${name[3:]}"
    if re.fullmatch(r"OUT\d+", name):
        return f"what line {name[3:]} prints"
    return FACTS.get(name, name)


def readable(text: str, labels: Mapping[str, str]) -> str:
    """A text with names in the place of tokens."""
    return PART.sub("", TOKEN.sub(lambda match: shown(match[1], labels), text))


def to_numbers(stderr: str, trace: Iterable[tuple[int, str]]) -> set[str]:
    """The names of the values that have to be numbers, by what bash and other tools say."""
    wrong = r"syntax error|expression expected|invalid number|not a number|non-integer|operand"
    lines = [line for line in stderr.splitlines() if re.search(wrong, line)]
    found = {name for line in lines for name in names_in(line)}
    rows = dict[int, list[str]]()
    for line, text in trace:
        rows.setdefault(line, []).append(text)
    for texts in rows.values():
        if any(
            re.match(r"(\S*/)?(expr|seq|bc|let|python3?) |\(\( |\[\[? .* -(gt|lt|ge|le|eq|ne) ", x)
            for x in texts
        ):
            fits = re.compile(r"(\S*/)?(expr|seq|let|echo|printf|bc) |\(\( |\[")
            found |= {name for text in texts if fits.match(text) for name in names_in(text)}
    return found
