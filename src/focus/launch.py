"""Start a training in several processes, or refuse a job that cannot be shared among them (see distributed.py)."""

from __future__ import annotations

import os
import subprocess
import sys

from focus.errors import UserError
from focus.jobs import TrainJob
from focus.method_config import OWN_STATE
from focus.methods import METHODS
from focus.methods.base import MethodKind
from focus.methods.focus import Focus

OF_A_WHOLE_BATCH = frozenset({*OWN_STATE, "entropy", "stop_gradient"})
"""Balances whose losses or centroids are no averages over the windows of a batch."""


def launch(job: TrainJob) -> int | None:
    """Start this command line again in `model_settings.processes` processes, wait, and return the exit code.

    None where there is nothing to start: one process is wanted, or torchrun or accelerate has started this one. Raises
    UserError for a job that cannot be shared, and for a launcher that started another number of processes.
    """
    wanted, started = job.model_settings.processes, int(os.environ.get("WORLD_SIZE", "1"))
    if started not in (1, wanted):
        raise _once(f"WORLD_SIZE: expected model_settings.processes ({wanted}) or 1, got {started}")
    _check(job)
    if wanted in (1, started):
        return None
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={wanted}"]
    return subprocess.run([sys.executable, *torchrun, "-m", "--", "focus.cli", *sys.argv[1:]], check=False).returncode


def _once(line: str) -> BaseException:
    """The error in the first process; the others of a launch end without repeating it."""
    return UserError(line) if os.environ.get("RANK", "0") == "0" else SystemExit(2)


def _check(job: TrainJob) -> None:
    count, training, method = job.model_settings.processes, job.settings.training, METHODS[job.settings.kind]
    if count == 1 or training is None:
        return
    if training.batch_size % count:
        raise _once(
            f"training.batch_size: expected a multiple of model_settings.processes ({count}), got {training.batch_size}"
        )
    if training.distillation is not None:
        raise _once(f"training.distillation: expected null with model_settings.processes {count}, got settings")
    balance = job.settings.adapter.balance if isinstance(method, Focus) else None
    if balance in OF_A_WHOLE_BATCH:
        raise _once(f"adapter.balance: expected an average over windows with {count} processes, got {balance}")
    if balance is None and type(method).after_step is not MethodKind.after_step:
        raise _once(f"kind: expected one that moves nothing by a whole batch in {count} processes, got {method}")
