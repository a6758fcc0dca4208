"""Jobs of one run are forked from a process that has imported torch and transformers once.

These imports take some six seconds, a quarter of the time of a scale of small jobs. The workflow calls `start`; the
command `focus` then hands its arguments, environment and output to that process, waits, and exits as the job did. A
command that does not fit (another environment, other threads, source changed since) or finds no such process runs as
ever. Nothing is shared between jobs but what an import leaves behind.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

VARIABLE = "FOCUS_WARM"
"""Names the socket that the process listens on."""
PRELOADED = ("focus.cli", "focus.trainer", "focus.evaluation.rows", "focus.paper.tables", "focus.paper.figures")
REFUSED, ACCEPTED = b"r", b"a"
PACKAGE = Path(__file__).parent
AWAKE = 1.0  # seconds between two looks at whether the run has ended


def main() -> None:
    """The command `focus`: a fork of the warm process where one fits, else this process."""
    path = os.environ.get(VARIABLE)
    try:
        code = _handed_over(path) if path else None
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    if code is None:
        from focus import cli

        cli.main()
    sys.exit(code)


def start() -> None:
    """Start the process for jobs of one thread and name it to what this process starts; it ends with this one."""
    folder = Path(tempfile.mkdtemp(prefix="focus-"))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
        listening.listen()
        subprocess.Popen(
            [sys.executable, "-m", "focus.warm", str(listening.fileno()), str(os.getpid())],
            env=os.environ | {"OMP_NUM_THREADS": "1", VARIABLE: str(folder / "socket")},
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # else a Ctrl-C meant for the run would end it before the jobs
        )
    os.environ[VARIABLE] = str(folder / "socket")


def serve(listening: socket.socket, parent: int) -> None:
    """Fork a worker for each command that asks until the process `parent` is gone; return in the workers alone."""
    identity, loaded = _identity(), False
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system buries those who attend to a worker
    listening.settimeout(AWAKE)
    while os.getppid() == parent:
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            continue
        request, outputs = _received(connection)
        fits = request.get("identity") == identity
        loaded = loaded or (fits and _load())
        if _told(connection, ACCEPTED if fits else REFUSED) and fits and os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            worker = os.fork()
            os.setpgid(worker, worker)  # in both, as either may come first
            if worker == 0:
                connection.close()
                return _become(request, outputs)
            _attend(worker, connection, outputs)
        for file in outputs:
            os.close(file)
        connection.close()
    path = Path(os.environ[VARIABLE])
    path.unlink(missing_ok=True)
    path.parent.rmdir()
    sys.exit()


def _handed_over(path: str) -> int | None:
    """The exit code of this command's worker; None where it has none."""
    request = {"identity": _identity(), "argv": sys.argv, "folder": os.getcwd(), "environment": dict(os.environ)}
    content = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(path)
            socket.send_fds(server, [len(content).to_bytes(8, "big")], [1, 2])
            server.sendall(content)
            if server.recv(1) != ACCEPTED:
                return None
        except OSError:
            return None
        try:
            return (server.recv(1) or bytes([128 + signal.SIGKILL]))[0]
        except ConnectionResetError:  # who attends to the worker was killed: never run the job beside it
            return 128 + signal.SIGKILL


def _received(connection: socket.socket) -> tuple[dict, list[int]]:
    """A command's request and its two outputs; nothing of one that has ended meanwhile."""
    length, outputs, _, _ = socket.recv_fds(connection, 8, 2)
    with connection.makefile("rb") as stream:
        content = stream.read(int.from_bytes(length, "big"))
    try:
        return json.loads(content), outputs
    except ValueError:
        return {}, outputs


def _load() -> bool:
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is never collected is never copied
    return True


def _become(request: dict, outputs: list[int]) -> None:
    """Make this process the command's: its group, outputs, folder, environment and arguments."""
    for file, own in zip(outputs, (1, 2), strict=True):
        os.dup2(file, own)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["argv"]


def _attend(worker: int, connection: socket.socket, outputs: list[int]) -> None:
    """Tell the command how its worker ended, or end the worker when the command is gone."""
    for file in outputs:
        os.close(file)
    watched, ended = select.poll(), os.pidfd_open(worker)
    watched.register(ended, select.POLLIN)
    watched.register(connection, select.POLLIN)
    if ended not in dict(watched.poll()):
        os.killpg(worker, signal.SIGTERM)
    _, status = os.waitpid(worker, 0)
    code = os.waitstatus_to_exitcode(status)
    _told(connection, bytes([code if code >= 0 else 128 - code]))
    os._exit(0)


def _told(connection: socket.socket, what: bytes) -> bool:
    """Whether the command was still there to hear it."""
    try:
        connection.sendall(what)
    except OSError:
        return False
    return True


def _identity() -> list:
    """What must be the same for a fork to do as a process of its own would."""
    newest = max(path.stat().st_mtime_ns for path in PACKAGE.rglob("*.py"))
    return [sys.prefix, str(PACKAGE), newest, os.environ.get("OMP_NUM_THREADS")]


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    from focus import cli

    cli.main()
