"""A folder belongs to one job at a time: by a lock that the system takes away when its process ends."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from horovod_sparse.checkpoint.errors import CheckpointError

NAME = "lock"
_LOG = logging.getLogger("horovod_sparse")
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
_MOST_BYTES = 300  # of what a holder says of itself

# Device and inode of the files that this process has locked, or could not lock, until it ends. Each is opened once:
# POSIX takes all locks on a file away as soon as the process closes it.
_held: set[tuple[int, int]] = set()


def hold(folder: Path) -> None:
    """Takes the lock of a folder for this process until it ends; does nothing where it has it already.

    All nodes see a POSIX lock, on NFS too, and on Lustre where it is mounted with ``flock``. Child processes do not
    inherit it. Where the file system has no locks, a warning says once that nothing keeps two jobs apart.

    Raises:
        CheckpointError: Another process has it; names that one.
        OSError: There can be no such file.
    """
    path = folder / NAME
    with suppress(FileNotFoundError):
        if _identity(path.stat()) in _held:
            return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _myself().encode(), 0)
    except (BlockingIOError, PermissionError) as error:
        holder = os.pread(descriptor, _MOST_BYTES, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise CheckpointError(
            f"another job saves in {folder} ({holder}): wait until it has ended, or give each job a folder of its own"
        ) from error
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            os.close(descriptor)
            raise
        _LOG.warning("%s: the file system has no locks (%s): let no other job save there", path, error.strerror)
    _held.add(_identity(os.fstat(descriptor)))


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _myself() -> str:
    job = next((f", job {os.environ[name]}" for name in _JOB_VARIABLES if name in os.environ), "")
    return f"process {os.getpid()} on {socket.gethostname()}{job}, since {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n"
