"""Starts a part of the payload by its path: `python3 start.py runner …` runs launcher.agent.runner.

Any Python 3 can read this file, so that an old one is named rather than stumbled over.
"""

import hashlib
import os
import runpy
import sys

OLDEST = (3, 10)
DIGEST = "LAUNCHER_PAYLOAD"
"""The variable with the digest that the payload was sent with."""

UNABLE = 121
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def digest(contents: "dict[str, bytes]") -> str:
    """The payload's digest, in hex, of its files' bytes by their paths below the root."""
    whole = hashlib.sha256()
    for path in sorted(contents):
        whole.update((f"{path} {hashlib.sha256(contents[path]).hexdigest()}\n").encode())
    return whole.hexdigest()[:32]


def contents(root: str) -> "dict[str, bytes]":
    """The modules below a root, as bytes by their paths; what Python compiled isn't among them."""
    found = {}
    for folder, _, names in os.walk(os.path.join(root, "launcher")):
        for name in names:
            if name.endswith((".py", ".json")):
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    found[os.path.relpath(path, root)] = file.read()
    return found


def main(argv: "list[str]") -> int:
    """Run the module launcher.agent.ARGV[0], with the rest as its arguments."""
    if sys.version_info < OLDEST:
        here = "{} is Python {}.{}".format(sys.executable, *sys.version_info)
        say(here + ", and 3.10 or later is needed: name one as image.python")
        return UNABLE
    sent = os.environ.get(DIGEST)
    if sent and argv[0] == "runner" and digest(contents(ROOT)) != sent:
        say(ROOT + " isn't the payload that was sent: its files were changed on the way")
        return UNABLE
    beside = os.path.dirname(os.path.abspath(__file__))
    sys.path[:1] = [ROOT] + [path for path in sys.path[:1] if path != beside]
    sys.argv = argv
    runpy.run_module("launcher.agent." + argv[0], run_name="__main__", alter_sys=True)
    return 0


def say(text: str) -> None:
    """A line of the runner's own."""
    sys.stderr.write(f"runner: {text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
