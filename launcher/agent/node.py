"""A node's part of a Slurm job: starts its command, and does what files in the run's folder ask.

Any Python 3 can read this file: where an engine runs the image, the node's own python3 runs this.
"""

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import time

POLL_SECONDS = 0.5
SETTLE_SECONDS = 20.0
"""How long a node that outlives a failed one has to fail, and say why, by itself."""

UNABLE = 121
START = os.path.join(os.path.dirname(os.path.abspath(__file__)), "start.py")


class NodeFiles:
    """The files by which the launcher, the job's script and its nodes exchange facts.

    stop and limit-N ask for a stop, failed-N says that a node has failed, ask holds a question,
    which NODE.QUESTION.tar answers. NODE.end is how a node has ended: its exit code and the time.
    """

    def __init__(self, folder: str, start: str, rank: str) -> None:
        self.folder, self.node = folder, "node-" + rank
        self.failed, self.limit = "failed-" + start, "limit-" + start
        self.answered = ""

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def has(self, *names: str) -> bool:
        """Whether one of these files is there."""
        return any(os.path.exists(self.path(name)) for name in names)

    def question(self) -> str:
        """A question that this node hasn't answered; "" where there is none.

        It is a number, which is a part of the answer's path: ranks may write here, too.
        """
        try:
            with open(self.path("ask")) as file:
                asked = file.read(30).strip()
        except (OSError, ValueError):
            return ""
        if asked == self.answered or not asked.isdigit():
            return ""
        self.answered = asked
        return asked

    def begin(self) -> None:
        """Say that this node has begun: without a further word the others have ended it."""
        self.write(self.node + ".end", "w", "begun")

    def end(self, code: int) -> None:
        """Report how this node has ended, and on a failure notify the others."""
        if code:
            self.write(self.failed, "w", "")
        self.write(self.node + ".end", "a", f" {code} {time.time():.6f}\n")

    def write(self, name: str, mode: str, text: str) -> None:
        """Write a file, or say why that can't be: a disk that fails doesn't end the run."""
        try:
            with open(self.path(name), mode) as file:
                file.write(text)
        except OSError as error:
            say(f"can't write {self.path(name)}: {error.strerror}")


def watch_command(files: NodeFiles, command: "list[str]", report: "list[str]") -> int:
    """Run the command until it ends; its exit code, as a shell has it.

    It alone is asked to stop: a signal to all processes would also end those that load the data,
    without which nothing is saved.
    """
    process = subprocess.Popen(command)
    report = report or [sys.executable, START, "stall.stall", str(process.pid)]
    asked, failed_at = False, 0.0
    while True:
        try:
            code = process.wait(timeout=POLL_SECONDS)
            return 128 - code if code < 0 else code
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if not asked and files.has("stop", files.limit):
            asked = True
            process.terminate()
        elif files.has(files.failed):
            failed_at = failed_at or now
            if now - failed_at >= SETTLE_SECONDS:
                process.kill()
        question = files.question()
        if question:
            answer(files, question, report)


def answer(files: NodeFiles, question: str, report: "list[str]") -> None:
    """Have the report written by a process of its own, which takes its time."""
    to = files.path(f"{files.node}.{question}.tar")
    line = '{} > "$1" && mv -f "$1" "$2"'.format(" ".join(map(shlex.quote, report)))
    subprocess.Popen(["sh", "-c", line, "sh", to + ".part", to])


def sees(paths: "list[str]") -> bool:
    """Whether this node sees all paths; those that it doesn't are reported."""
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    absent = [path for path in paths if not os.path.exists(path)]
    for path in absent:
        say(f"there is no {path} on {host}: let it be on a disk that all see")
    return not absent


def say(text: str) -> None:
    """A line of the launcher's own."""
    sys.stderr.write("launcher: " + text + "\n")


def main(argv: "list[str]") -> int:
    """The exit code of the command behind `--`, once the files say how it has ended."""
    at = argv.index("--")
    parser = argparse.ArgumentParser(prog="node", description=__doc__)
    parser.add_argument("folder", help="the run's folder, on a disk that all nodes see")
    parser.add_argument("start", help="how often the job was started before")
    parser.add_argument("--needs", nargs="*", default=[], help="paths that must be there")
    parser.add_argument("--report", default="", help="a command that says where the ranks are")
    asked = parser.parse_args(argv[:at])
    files = NodeFiles(asked.folder, asked.start, os.environ["SLURM_NODEID"])
    signal.signal(signal.SIGTERM, lambda *_: None)  # scancel's, which all processes get
    files.begin()
    code = UNABLE
    try:
        if sees(asked.needs):
            code = watch_command(files, argv[at + 1 :], shlex.split(asked.report))
    except OSError as error:
        say(f"{argv[at + 1]}: {error.strerror}")
    files.end(code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
