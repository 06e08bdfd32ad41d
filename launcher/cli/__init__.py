"""The command line: finds the command, parses, calls it, prints what a user did wrong."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NoReturn

from launcher import __version__
from launcher.base import screen
from launcher.base.errors import LauncherError, UsageError, nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

    from launcher.cli.command import Command

COMMANDS = {
    "run": ("run", "start the training that a run file describes"),
    "ps": ("runs", "list running runs, and runs that ended while no launcher followed them"),
    "attach": ("runs", "follow a run from its first line; Ctrl-C stops the run"),
    "logs": ("runs", "print a run's output, also after its end"),
    "explain": ("runs", "find why a run failed and how to fix it, from its log or any other log"),
    "stacks": ("runs", "show where each rank of a run is, and which rank the others wait for"),
    "stop": ("runs", "ask runs to save a checkpoint and end; remove ended runs from `ps`"),
    "resume": (
        "run",
        "continue a run from its newest complete checkpoint, also on other GPUs",
    ),
    "rerun": ("run", "repeat a run exactly, or list what has changed since"),
    "forecast": ("tune", "predict what a run will take: memory, time, disk, money"),
    "tune": ("tune", "find the fastest settings of a run file, and write them"),
    "bisect": (
        "tune",
        "find what makes BAD fail but not GOOD: base, extras, release, commit or key",
    ),
    "runs": ("runs", "list recorded runs; show or remove records"),
    "board": ("runs", "serve a page of all runs and their curves, until Ctrl-C"),
    "nodes": ("doctor", "list the machines that runs failed on, and faults of these machines"),
    "exec": ("runs", "run a command in a run's container: exec RUN -- nvidia-smi"),
    "shell": ("run", "open a shell in an image: shell [TAG] [-- COMMAND]"),
    "plot": ("runs", "draw loss and throughput of runs into one PNG"),
    "doctor": ("doctor", "check whether this machine can train: engine, GPUs, memory, disk"),
    "init": ("runfile", "write a run file to begin with, fitted to your GPUs"),
    "import": ("runfile", "write a run file from a shell script that starts Megatron"),
    "schema": ("runfile", "print the JSON Schema of a run file, for editors"),
    "completion": ("completion", "print the completion script of bash, zsh or fish"),
    "data": ("data", "make Megatron's .bin and .idx from text, and inspect them"),
    "checkpoint": (
        "checkpoint",
        "show checkpoints, and convert weights to Hugging Face's format and back",
    ),
    "generate": (
        "checkpoint",
        "print the likeliest tokens after a text, by a checkpoint",
    ),
    "image": ("images", "build images of the matrix, check them, carry them to other machines"),
    "fetch": (
        "build",
        "fetch all inputs of a build; --output and --from carry them to a machine without internet",
    ),
    "matrix": (
        "matrix",
        "list the images that can be built, render their Dockerfiles, lock their inputs",
    ),
    "demo": ("doctor", "build the CPU image from Megatron's source and train a tiny GPT in it"),
    "engine": ("doctor", "run a private engine (Linux, root, apt) and print its DOCKER_HOST"),
}
"""The module of each command, and its help, so that `--help` needs to import none of them."""

GROUP = "launchpad.commands"

WITH_REST = ("run", "forecast", "tune", "exec", "shell", "init", "import", "checkpoint")
"""Commands for which what stands behind `--` is another program's."""

EXIT_CODES = """\
exit codes:
  0    done
  1    a saved image is damaged, or a registry has another image than expected; a document
       can't be tokenized, or data files are damaged or differ; explain or bisect finds nothing
  2    wrong usage or a wrong file
  70   a defect of the launcher: report it with its traceback, in the file that is named;
       with LAUNCHER_TRACEBACK=1 it is printed
  121  refused at the start: the run can't work here
  122  an image could not be built
  123  the run can't be followed any more, and goes on
  125  no container engine, or it refused, or didn't answer in time; with --backend local,
       no torch here
  130  interrupted
  143  the run was stopped by a signal that no launcher sent (130: by SIGINT)
  any other is the training program's own, passed through unchanged
"""


@screen.guarded()
def main(argv: list[str]) -> int:
    """Run one command and return its exit code; a user's mistake prints no traceback."""
    if sys.stderr is None:  # closed by a shell's 2>&-: else a file that is opened takes its place
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # looking for any takes 30 ms
    rest = list[str]()
    if argv[:1] and argv[0] in WITH_REST and "--" in argv:
        at = argv.index("--")
        argv, rest = argv[:at], argv[at + 1 :]
    try:
        args = parser(argv).parse_args(argv or ["--help"])
        args.given, args.rest = argv, rest
        _see_home()
        code = find_command(args.command)(args)
        print(end="", flush=True)  # where a reader that has gone is noticed
        return code
    except LauncherError as error:
        print(f"launcher: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        return _in_own_environment(error, [*argv, *(["--", *rest] if rest else [])])
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if _is_short(error):
            return _tell_short(argv)
        if isinstance(error, OSError):
            return _tell(error)
        if os.environ.get("LAUNCHER_TRACEBACK"):
            raise
        return _tell_unforeseen(error, argv)


def program() -> int:
    """The program `launcher`, as it is installed."""
    return main(sys.argv[1:])


def _see_home() -> None:
    """Raises UsageError where neither HOME nor the system knows this user's home folder."""
    from pathlib import Path

    try:
        Path.home()
    except RuntimeError:
        raise UsageError(
            f"user {os.getuid()} has no home folder", "export HOME=FOLDER, one you may write to."
        ) from None


def _tell(error: OSError) -> int:
    """Print what the system refused, or an engine, whose errors have no errno; the exit code."""
    if error.errno is None:
        print(f"launcher: the engine: {error}", file=sys.stderr)
        return 125
    what = f"{error.filename}: " if error.filename else ""
    print(f"launcher: {what}{error.strerror}", file=sys.stderr)
    return 2


def _is_short(error: Exception) -> bool:
    """Whether the system gave no more memory, or no more threads, as under a shell's `ulimit`."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or str(error) == "can't start new thread"


def _tell_short(argv: list[str]) -> int:
    print(
        f"launcher: {_doing(argv)}: the system gives this process no more memory or threads\n"
        "  Raise what `ulimit -v` and `ulimit -u` show, or free memory.",
        file=sys.stderr,
    )
    return 2


def _doing(argv: list[str]) -> str:
    """The command's words; others may hold what is secret."""
    return " ".join(takewhile(str.isalpha, argv[:2]))


def _tell_unforeseen(error: Exception, argv: list[str]) -> int:
    """Keep the traceback in a file of its own, and print in one line where; the exit code."""
    import tempfile
    import traceback

    from launcher.base.yamlfile import printable

    what = printable(f"{type(error).__name__}: {error}".rstrip(": "))
    told = f"launcher: {_doing(argv)}: an unexpected error: {what}"
    try:
        kept, name = tempfile.mkstemp(prefix="megatron-launchpad-", suffix=".txt")
        with open(kept, "w", encoding="utf-8", errors="backslashreplace") as file:
            traceback.print_exception(type(error), error, error.__traceback__, file=file)
    except OSError as reason:
        name = f"can't be kept ({reason.strerror}): LAUNCHER_TRACEBACK=1 prints it"
    print(f"{told}; its traceback: {name}", file=sys.stderr)
    return 70


def _in_own_environment(error: ModuleNotFoundError, argv: list[str]) -> int:
    """Start again with the Python of .venv, where this one lacks one of our requirements."""
    from pathlib import Path

    root = Path(__file__).resolve().parents[2]
    python = root / ".venv/bin/python"
    if not os.access(python, os.X_OK) or Path(sys.prefix) == root / ".venv":
        print(
            f"launcher: this Python ({sys.executable}) has no {error.name}\n"
            f"  Run `make venv` in {root}, or install its requirements.txt.",
            file=sys.stderr,
        )
        return 2
    search = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": search}
    os.execve(python, [str(python), "-m", "launcher", *argv], environment)  # noqa: S606


def find_command(name: str) -> Command:
    """The command of a name; a function can't be called `import`, so that one ends in _."""
    if name not in COMMANDS:
        brought: Command = _brought()[name].load()
        return brought
    module = import_module(f"launcher.cli.{COMMANDS[name][0]}")
    found: Command = getattr(module, "import_" if name == "import" else name)
    return found


def _brought() -> EntryPoints:
    """What other packages bring; looked up only for a name that isn't one of ours."""
    from importlib.metadata import entry_points

    return entry_points(group=GROUP)


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors name the usage of the command that the words are for."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, and refuse what is left, here and not in the parser above."""
        self._words = args or ()
        found, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return found, left

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse what is no choice, and name the nearest one; argparse lists them all."""
        if action.choices is not None and value not in action.choices:
            if action.nargs == argparse.PARSER:  # behind it stand another command's words
                self._words = self._words[: self._words.index(value)]
            remedy = nearest(str(value), [*map(str, action.choices)])
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}. {remedy}")

    def error(self, message: str) -> NoReturn:
        """Print the usage, what is wrong and what is nearest to a wrong option; exit with 2."""
        words = takewhile("--".__ne__, self._words)
        if wrong := next((word for word in words if self._is_wrong(word)), None):
            message = f"unrecognized option: {wrong}\n  {self._remedy(wrong)}"
        super().error(message)

    def _is_wrong(self, word: str) -> bool:
        """Whether a word is an option, or the beginning of one, that this command hasn't."""
        name = word.partition("=")[0]
        known = self._option_string_actions
        return word[:2] == "--" and not any(one.startswith(name) for one in known)

    def _remedy(self, word: str) -> str:
        """What to write in place of an option that this command hasn't."""
        name, _, value = word.partition("=")
        known = [one for one in self._option_string_actions if one[:2] == "--"]
        if "--set" in known:  # then it may be one of the training program's
            from launcher.runs.plan import program_options

            table = program_options.table()
            if name in table.gpt or name in table.megatron:
                kinds = table.kinds_of(table.releases[-1]) | table.kinds_of(None)
                following = [*self._words, "VALUE"][[*self._words].index(word) + 1]
                given = "true" if kinds.get(name) == "flag" else value or following
                return f"It is a key of the run file: --set {program_options.key_of(name)}={given}"
        return nearest(name, known)


def parser(argv: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """The parser of the command that `argv` begins with; of all, in full where there is no argv."""
    parser = CommandParser(
        prog="launcher",
        description="Reproducible Megatron-LM images, and a launcher for training runs in them.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"launcher {__version__}")
    vars(parser)["color"] = False  # of Python 3.14's: to our screen, colours are no text
    first = "--help" if argv is not None and not argv else (argv or [""])[0]
    listed = first in ("-h", "--help")
    # None of those that are listed is called, and each looks for translations on the disk.
    kind: Any = (lambda **_: parser) if listed else CommandParser
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=kind
    )
    if listed:
        for name, (_, about) in COMMANDS.items():
            commands.add_parser(name, help=about)
        return parser
    is_known = first in COMMANDS or (first[:1].isalpha() and first in _brought().names)
    for each in map(find_command, [first] if is_known else COMMANDS):
        each.add_to(commands)
    return parser
