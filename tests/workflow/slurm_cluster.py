"""A SLURM of one machine for tests, without systemd or accounting, with one GPU that is none.

By hand, as root: python tests/workflow/slurm_cluster.py start FOLDER, later stop FOLDER. Everything is kept in FOLDER,
but for the link /etc/slurm/slurm.conf, without which the commands inside a job find no configuration.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "squeue", "scancel")
LINK = Path("/etc/slurm/slurm.conf")
CONFIGURATION = "one-machine.conf"
DAEMONS = ("slurmd", "slurmctld", "munged")

# pgid, task/none and no cgroups: a container may not make any. config_overrides: CPUs as given here, not as found.
TEMPLATE = """\
ClusterName=onemachine
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
JobAcctGatherType=jobacct_gather/linux
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobs.txt
MpiDefault=none
SwitchType=switch/none
MinJobAge=300
KillWait=5
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory} Gres=gpu:1 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class NoSlurm(Exception):
    """Why there is no SLURM: the one reason to skip."""


def install() -> None:
    """Debian's packages, unless they are there. Raises NoSlurm in one line."""
    if os.geteuid():
        raise NoSlurm(f"a SLURM of one machine needs root, to link its configuration to {LINK}")
    if not all(map(_program, PROGRAMS)):
        _run(["apt-get", "update"])
        _run(["apt-get", "install", "--yes", "--no-install-recommends", *PACKAGES])
    if LINK.is_symlink() and LINK.readlink().name == CONFIGURATION and not _pid(LINK.readlink().parent, "slurmctld"):
        LINK.unlink()  # of a run that was killed
    if LINK.exists() or LINK.is_symlink():
        raise NoSlurm(f"{LINK}: this machine has a SLURM already")


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ["PATH"], "/usr/sbin"]))


def _run(command: list[str]) -> str:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900, env=environment)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise NoSlurm(f"no SLURM on one machine: {error}") from None
    if done.returncode:
        raise NoSlurm(f"no SLURM on one machine: {' '.join(command)}: {' '.join(done.stderr.split())}")
    return done.stdout


def start(folder: Path) -> None:
    """Start the three daemons in `folder` and wait until the node is idle. Raises NoSlurm where that cannot be."""
    install()
    folder = folder.resolve()
    for part in ("state", "spool"):
        (folder / part).mkdir(parents=True)
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
    configuration = folder / CONFIGURATION
    controller_port, node_port = _free_ports()
    configuration.write_text(
        TEMPLATE.format(
            folder=folder,
            host=socket.gethostname().split(".")[0],
            controller_port=controller_port,
            node_port=node_port,
            cpus=len(os.sched_getaffinity(0)),
            memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20,
        )
    )
    LINK.parent.mkdir(exist_ok=True)
    LINK.symlink_to(configuration)
    try:
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
        files["seed-file"] = "munge.seed"
        options = [f"--{name}={folder / file}" for name, file in files.items()]
        _run([_program("munged"), "--force", *options])
        _run([_program("slurmctld"), "-f", str(configuration)])
        _run([_program("slurmd"), "-f", str(configuration)])
        _wait(lambda: _run(["sinfo", "--noheader", "--format=%T"]).strip() == "idle", "the node to be idle")
    except BaseException:
        stop(folder)
        raise


def stop(folder: Path) -> None:
    """End all jobs and the daemons of `folder`, and take the link away."""
    folder = folder.resolve()
    if _pid(folder, "slurmctld"):
        _run(["scancel", "--user=root"])
        with suppress(NoSlurm):
            _wait(lambda: not _run(["squeue", "--noheader"]).strip(), "all jobs to end")
    for name in DAEMONS:
        if pid := _pid(folder, name):
            os.kill(pid, signal.SIGTERM)
            _wait(lambda name=name: not _pid(folder, name), f"{name} to end")
    if LINK.is_symlink() and LINK.readlink() == folder / CONFIGURATION:
        LINK.unlink()


def _pid(folder: Path, daemon: str) -> int | None:
    """The process of a daemon of this folder while it lives."""
    with suppress(OSError, ValueError):
        pid = int((folder / f"{daemon}.pid").read_text())
        status = Path(f"/proc/{pid}/status").read_text()
        if f"Name:\t{daemon}\n" in status and "State:\tZ" not in status:
            return pid
    return None


def _free_ports() -> list[int]:
    with socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in (first, second)]


def _wait(happened, what: str, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            raise NoSlurm(f"no SLURM on one machine: waited {seconds:.0f} seconds for {what}")
        time.sleep(0.1)


@contextmanager
def running():
    """A SLURM that lives as long as the block; its folder."""
    with TemporaryDirectory(prefix="slurm-") as name:  # short, as a socket's path may be
        start(Path(name))
        try:
            yield Path(name)
        finally:
            stop(Path(name))


if __name__ == "__main__":
    try:
        {"start": start, "stop": stop}[sys.argv[1]](Path(sys.argv[2]))
    except NoSlurm as reason:
        sys.exit(str(reason))
