"""A real browser: Chromium without a window, told what to do over the pipe that it listens on.

The protocol is Chrome's own (https://chromedevtools.github.io/devtools-protocol): JSON, each
message ended by a zero byte, on its file descriptors 3 and 4.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launcher.engine.private import packages

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome-stable", "google-chrome")
"""What is used of a system that has it; else Debian's first of them is unpacked."""

ARGUMENTS = (
    "--headless",
    "--no-sandbox",  # tests run as root too, and open nothing but their own files
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--font-render-hinting=none",
    "--remote-debugging-pipe",
)

FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>{folders}<cachedir>{cache}</cachedir></fontconfig>
"""

PATIENCE = 60
"""Seconds that an answer may take on a machine that is busy."""


@dataclass
class Browser:
    """A browser that runs: `call` asks it for something, and keeps what it tells meanwhile."""

    send: int
    receive: int
    _last: int = 0
    _rest: bytes = b""
    _events: list[dict[str, Any]] = field(default_factory=list)

    def call(self, method: str, session: str | None = None, **given: Any) -> dict[str, Any]:
        """What it answers."""
        self._last += 1
        asked = {"id": self._last, "method": method, "params": given}
        _write(self.send, json.dumps(asked | ({"sessionId": session} if session else {})).encode())
        while (told := self._read()).get("id") != self._last:
            self._events.append(told)
        assert "error" not in told, (method, told["error"])
        return dict(told["result"])

    def take(self, session: str) -> Iterator[dict[str, Any]]:
        """What a page told of itself, each once."""
        mine = [one for one in self._events if one.get("sessionId") == session]
        self._events = [one for one in self._events if one.get("sessionId") != session]
        yield from mine

    def wait(self, session: str, method: str) -> None:
        """Until a page tells of that."""
        while not any(
            one["method"] == method and one.get("sessionId") == session for one in self._events
        ):
            self._events.append(self._read())

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self.receive], [], [], max(0, until - time.monotonic()))
            assert ready, "the browser doesn't answer"
            piece = os.read(self.receive, 1 << 20)
            assert piece, "the browser has ended"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))


def _write(to: int, message: bytes) -> None:
    left = message + b"\0"
    while left:
        left = left[os.write(to, left) :]


@dataclass
class Page:
    """A tab: what it asked for and what went wrong in it is kept."""

    browser: Browser
    session: str
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **given)

    def open(self, address: str) -> None:
        """Load an address, and wait until it is there."""
        list(self.heard())
        told = self.call("Page.navigate", url=address)
        assert "errorText" not in told, told
        if "loaderId" in told:  # else it went to another place in the same page
            self.browser.wait(self.session, "Page.loadEventFired")

    def ask(self, script: str) -> Any:
        """The value of an expression in the page."""
        told = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def becomes(self, script: str, value: Any) -> None:
        """Until an expression has the value that what was done before leads to, sooner or later."""
        until = time.monotonic() + PATIENCE
        while (found := self.ask(script)) != value:
            assert time.monotonic() < until, (script, found, value)
            time.sleep(0.02)

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, as a person does."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32}
        for key in keys:
            text = "\r" if key == "Enter" else key if len(key) == 1 else ""
            code = codes.get(key) or (ord(key.upper()) if key.isalnum() else 0)
            about = {"key": key, "windowsVirtualKeyCode": code}
            self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
            self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def click(self, selector: str) -> None:
        """Click what is there, where it is, with a mouse; it must not be under something else."""
        found = self.ask(
            "(() => { const part = document.querySelector(" + json.dumps(selector) + ");"
            "part.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const box = part.getBoundingClientRect();"
            "const at = [box.x + box.width / 2, box.y + box.height / 2];"
            "return part.contains(document.elementFromPoint(...at)) ? at : null; })()"
        )
        assert found, f"{selector} can't be clicked"
        x, y = found
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def size(self, width: int, height: int = 900) -> None:
        """Give the window a size in pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )

    def prefer(self, scheme: str) -> None:
        """Be of one who likes it "dark" or "light"."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def print(self) -> bytes:
        """The page as a PDF."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def heard(self) -> Iterator[str]:
        """What was told since the last time: `requests` and `errors` are kept of it."""
        for one in self.browser.take(self.session):
            about = one["params"]
            if one["method"] == "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])
            elif one["method"] == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(about["exceptionDetails"]))
            elif one["method"] == "Runtime.consoleAPICalled":
                self.errors.append(json.dumps(about["args"]))
            elif one["method"] == "Log.entryAdded":
                self.errors.append(about["entry"]["text"])
            yield one["method"]


@contextmanager
def browser(cache: Path, scratch: Path) -> Iterator[Browser]:
    """A browser for the block, with a profile of its own in `scratch`."""
    program, environment = _program(cache, scratch)
    (to_read, send), (receive, to_write) = os.pipe(), os.pipe()
    log = scratch / "browser.log"
    given = [program, *ARGUMENTS, f"--user-data-dir={scratch / 'profile'}", "about:blank"]
    placed = f'exec "$@" 3<&{to_read} 4>&{to_write}'
    with log.open("w") as file:
        process = subprocess.Popen(
            ["bash", "-c", placed, "bash", *given],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            pass_fds=(to_read, to_write),
            start_new_session=True,
        )
    os.close(to_read)
    os.close(to_write)
    try:
        yield Browser(send, receive)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{log.read_text(errors='replace')[-2000:]}") from error
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(send)
        os.close(receive)


@contextmanager
def page(within: Browser) -> Iterator[Page]:
    """A new tab for the block."""
    target = within.call("Target.createTarget", url="about:blank")["targetId"]
    told = within.call("Target.attachToTarget", targetId=target, flatten=True)
    tab = Page(within, told["sessionId"])
    for domain in ("Page", "Runtime", "Network", "Log"):
        tab.call(f"{domain}.enable")
    yield tab
    within.call("Target.closeTarget", targetId=target)


def _program(cache: Path, scratch: Path) -> tuple[str, dict[str, str]]:
    """A browser, the system's or one that is unpacked, and the environment that it runs in."""
    for name in PROGRAMS:
        found = shutil.which(name)
        if found and Path(found).resolve().name != "snap":  # which would see no file of a test's
            return found, dict(os.environ)
    if platform.freedesktop_os_release()["ID"] != "debian":
        pytest.skip(f"none of {', '.join(PROGRAMS)} is here, and only Debian has one to unpack")
    root = packages.unpack(cache / "browser", [PROGRAMS[0]])
    fonts = scratch / "fonts.conf"
    folders = "".join(
        f"<dir>{place}</dir>" for place in (root / "usr/share/fonts", "/usr/share/fonts")
    )
    fonts.write_text(FONTS.format(folders=folders, cache=scratch / "fonts"), encoding="utf-8")
    program = root / "usr/lib/chromium" / PROGRAMS[0]
    environment = packages.environment(root) | {"FONTCONFIG_FILE": str(fonts)}
    for folder in root.glob("usr/lib/*-linux-*/pulseaudio"):  # a library's own, off the search path
        environment["LD_LIBRARY_PATH"] += f":{folder}"
    return str(program), environment
