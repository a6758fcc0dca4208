"""Jobs forked from one process: they do as processes of their own, end with their command, and only where they fit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from focus import warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="jobs are forked on Linux alone")
COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started without it
from focus import warm
warm.main()
"""
FOCUS = [sys.executable, "-c", COMMAND]
RUN = """
import os, sys
from focus import warm
warm.start()
print(os.environ[warm.VARIABLE], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def run():
    """The environment that a run gives its jobs, and the process of the run."""
    process = subprocess.Popen([sys.executable, "-c", RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    path = process.stdout.readline().strip()
    yield os.environ | {warm.VARIABLE: path, "OMP_NUM_THREADS": "1"}, process
    process.stdin.close()
    process.wait()


def outcome(arguments, environment, folder):
    done = subprocess.run(
        [*FOCUS, *arguments], check=False, env=environment, cwd=folder, capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


def inside(folder: Path) -> set[int]:
    """The processes that work in this folder."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if link.resolve() == folder:
                found.add(int(link.parent.name))
        except OSError:
            continue
    return found


def wait_until(holds, seconds=120.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_a_fork_prints_and_ends_as_a_process_of_its_own_does(run, tmp_path):
    environment, _ = run
    alone = {key: value for key, value in environment.items() if key != warm.VARIABLE}
    (tmp_path / "bad.yaml").write_text("scale: [")
    cases = (["config", "schema"], ["config", "check", "bad.yaml"], ["config", "check", "none.yaml"], ["--wrong"], [])
    for arguments in cases:
        assert outcome(arguments, environment, tmp_path) == outcome(arguments, alone, tmp_path), arguments


def test_a_command_that_fits_is_forked_and_no_other(run, tmp_path, monkeypatch, capfd):
    environment, _ = run
    path = environment[warm.VARIABLE]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", ["focus", "config", "check", "none.yaml"])
    monkeypatch.chdir(tmp_path)
    assert warm._handed_over(path) == 2
    assert "focus: error: none.yaml" in capfd.readouterr().err
    assert warm._handed_over(str(tmp_path / "nobody")) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert warm._handed_over(path) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "prefix", "another environment")
    assert warm._handed_over(path) is None


def test_source_that_changed_since_is_run_and_not_what_was_imported(run, tmp_path, monkeypatch):
    environment, _ = run
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = warm._identity()
    monkeypatch.setattr(warm, "PACKAGE", tmp_path)
    (tmp_path / "newer.py").touch()
    after = warm._identity()
    assert after[2] > before[2]
    assert warm._handed_over(environment[warm.VARIABLE]) is None


@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_ended_ends_its_fork(run, tmp_path, ends):
    environment, _ = run
    os.mkfifo(tmp_path / "endless")  # nobody writes to it, so the fork waits in its open()
    process = subprocess.Popen([*FOCUS, "config", "check", "endless"], env=environment, cwd=tmp_path)
    wait_until(lambda: len(inside(tmp_path)) == 2)
    process.send_signal(ends)
    process.wait(60)
    wait_until(lambda: not inside(tmp_path))


def test_a_fork_that_is_killed_is_told_as_a_shell_would(run, tmp_path):
    environment, _ = run
    os.mkfifo(tmp_path / "endless")
    process = subprocess.Popen([*FOCUS, "config", "check", "endless"], env=environment, cwd=tmp_path)
    wait_until(lambda: len(inside(tmp_path)) == 2)
    (fork,) = inside(tmp_path) - {process.pid}
    os.kill(fork, signal.SIGKILL)
    assert process.wait(60) == 128 + signal.SIGKILL


def test_the_process_ends_with_its_run_and_its_jobs_go_on(run, tmp_path):
    environment, process = run
    socket = Path(environment[warm.VARIABLE])
    os.mkfifo(tmp_path / "late.yaml")
    job = subprocess.Popen(
        [*FOCUS, "config", "check", "late.yaml"], env=environment, cwd=tmp_path, stderr=subprocess.PIPE
    )
    wait_until(lambda: len(inside(tmp_path)) == 2)
    process.kill()
    process.wait()
    wait_until(lambda: not socket.parent.exists())
    (tmp_path / "late.yaml").write_text("scale: [")
    assert b"late.yaml" in job.communicate(timeout=60)[1]
    assert job.returncode == 2
