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
from pathlib import Path
from typing import Any

import pytest

from launcher.images.engine.private import packages

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


class Page:
    """A tab of a browser that runs; what it asked for, and what went wrong in it, is kept."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._last, self._rest = send, receive, 0, b""
        self._session: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        told = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": told["sessionId"]}
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        """What the browser answers; what it tells meanwhile is kept."""
        self._last += 1
        asked = {"id": self._last, "method": method, "params": given, **self._session}
        left = json.dumps(asked).encode() + b"\0"
        while left:
            left = left[os.write(self._send, left) :]
        while (told := self._read()).get("id") != self._last:
            self.events.append(told)
        assert "error" not in told, (method, told["error"])
        return dict(told["result"])

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._receive], [], [], max(0, until - time.monotonic()))
            assert ready, "the browser doesn't answer"
            piece = os.read(self._receive, 1 << 20)
            assert piece, "the browser has ended"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def told(self, method: str) -> list[dict[str, Any]]:
        """What events of that kind said."""
        return [one["params"] for one in self.events if one["method"] == method]

    def open(self, address: str) -> None:
        """Load an address, and wait until it is there."""
        before = len(self.told("Page.loadEventFired"))
        told = self.call("Page.navigate", url=address)
        assert "errorText" not in told, told
        if "loaderId" in told:  # else it went to another place in the same page
            while len(self.told("Page.loadEventFired")) == before:
                self.events.append(self._read())

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


@contextmanager
def browser(cache: Path, scratch: Path) -> Iterator[Page]:
    """A tab of a browser for the block, with a profile of its own in `scratch`."""
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
        yield Page(send, receive)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{log.read_text(errors='replace')[-2000:]}") from error
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(send)
        os.close(receive)


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
