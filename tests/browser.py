"""Headless Chromium for the tests of the page, driven over a pipe by its DevTools protocol.

The system's own where there is one; else Debian's chromium-headless-shell and whichever of its libraries the system
lacks, fetched by apt-get with the system's signatures and unpacked into the cache, which needs no root.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import time
from base64 import b64decode
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from focus.cache import cache_root, locked, partial

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PACKAGE = NAMES[0]
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--remote-debugging-pipe", "about:blank"),
)


class NoBrowser(Exception):
    """Why there is no browser: the one reason to skip."""


class Failed(AssertionError):
    """What the browser answered instead of a result."""


def find() -> tuple[Path, dict[str, str]]:
    """A Chromium and the environment it runs in. Raises NoBrowser when there is none and none can be fetched."""
    for name in NAMES:
        if shutil.which(name):
            return Path(shutil.which(name)), dict(os.environ)
    target = cache_root() / "browser"
    with locked(target):
        if not target.exists():
            with partial(target) as folder:
                _fetch(folder)
                folder.rename(target)
    libraries = sorted({str(path.parent) for path in target.glob("root/usr/lib/**/*.so*")})
    environment = os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(libraries)}
    return target / "root/usr/lib/chromium" / PACKAGE, environment


def _fetch(folder: Path) -> None:
    apt = folder / "apt"
    for part in ("lists/partial", "archives/partial"):
        (apt / part).mkdir(parents=True)
    settings = {
        "Dir::State": apt,
        "Dir::State::status": "/var/lib/dpkg/status",
        "Dir::Cache": apt,
        "APT::Sandbox::User": "",
        "Acquire::Languages": "none",
        "Debug::NoLocking": "1",
    }
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    _run(["apt-get", *options, "update"])
    _run(["apt-get", *options, "--yes", "--no-install-recommends", "--download-only", "install", PACKAGE])
    for archive in sorted(apt.glob("archives/*.deb")):
        _run(["dpkg-deb", "--extract", str(archive), str(folder / "root")])
    shutil.rmtree(apt)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise NoBrowser(f"no Chromium on PATH, and none could be fetched: {error}") from None
    if done.returncode:
        raise NoBrowser(f"no Chromium on PATH, and none could be fetched: {' '.join(done.stderr.split())}")


@contextmanager
def opened(url: str, **device):
    """A Page at `url`; `device` as in `Page.resize`."""
    program, environment = find()
    with TemporaryDirectory() as profile:
        (ours, theirs), (their_answers, our_answers) = os.pipe(), os.pipe()
        spare = (100, 101)  # above what a test process has open, so that no end is overwritten before it is moved
        moves = [(ours, spare[0]), (our_answers, spare[1]), (spare[0], 3), (spare[1], 4)]
        quiet = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in (0, 1, 2)]
        process = os.posix_spawn(
            program,
            [str(program), f"--user-data-dir={profile}", *FLAGS],
            environment,
            file_actions=[*((os.POSIX_SPAWN_DUP2, *move) for move in moves), *quiet],
        )
        os.close(ours)
        os.close(our_answers)
        try:
            page = Page(theirs, their_answers)
            page.resize(**device)
            page.go(url)
            yield page
        finally:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            for end in (theirs, their_answers):
                os.close(end)
            _settle(profile)


def _settle(profile: str) -> None:
    """Chromium's helpers may write to their profile for a moment after it is gone."""
    for _ in range(20):
        with suppress(OSError):
            shutil.rmtree(profile)
            break
        time.sleep(0.1)
    Path(profile).mkdir(exist_ok=True)


class Page:
    """One tab; `problems` are its exceptions and console errors, `requests` every URL it asked for."""

    def __init__(self, send: int, receive: int):
        self.send, self.receive, self.buffer, self.number = send, receive, b"", 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.events: list[str] = []
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def go(self, url: str) -> None:
        """Load a page and wait until it is loaded."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        while "Page.loadEventFired" not in self.events:
            self._note(self._next())

    def resize(self, *, width: int = 1280, height: int = 900, dark: bool = False, mobile: bool = False) -> None:
        """The size of the screen in CSS pixels and the colours preferred."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, script: str):
        """The value of a JavaScript expression. Raises Failed when it throws."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise Failed(f"{script}: {answer['exceptionDetails']['exception'].get('description')}")
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """A real click, with the mouse, in the middle of the first element that matches."""
        self.run(
            f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center', behavior: 'instant'}})"
        )
        box = self.run(
            f"(b => [b.x + b.width / 2, b.y + b.height / 2])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def press(self, key: str) -> None:
        """One key, such as Enter, Escape or Tab, where the focus is."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        """Text, where the focus is."""
        self.call("Input.insertText", text=text)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """A screenshot as PNG, of what is seen or of the `whole` page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        Path(path).write_bytes(b64decode(shot["data"]))

    def printed(self) -> bytes:
        """The page as PDF."""
        return b64decode(self.call("Page.printToPDF", preferCSSPageSize=True)["data"])

    def _clip(self, whole: bool) -> dict:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def call(self, method: str, **parameters) -> dict:
        """The answer to one command. Raises Failed when the browser refuses it."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self.send, content) :]
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise Failed(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def _next(self) -> dict:
        while b"\0" not in self.buffer:
            if not select.select([self.receive], [], [], 60)[0]:
                raise Failed("no answer from the browser in 60 seconds")
            piece = os.read(self.receive, 1 << 20)
            if not piece:
                raise Failed("the browser ended")
            self.buffer += piece
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict) -> None:
        method, details = event.get("method", ""), event.get("params", {})
        self.events.append(method)
        if method == "Runtime.exceptionThrown":
            thrown = details["exceptionDetails"]
            self.problems.append(thrown.get("exception", {}).get("description") or thrown["text"])
        elif method == "Log.entryAdded":
            self.problems.append(details["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
            self.problems.append(str(details["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
