"""File lock that lets one job at a time save to a folder; the system releases it when the process ends."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path

from horovod_sparse.checkpoint.manifest import CheckpointError

NAME = "lock"
_LOG = logging.getLogger("horovod_sparse")
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
_MOST_BYTES = 300  # maximum length of the holder's description

# Device and inode of each lock file that this process has locked, or could not lock. Each stays open until the process
# ends and is not opened again: closing any descriptor of a file releases all POSIX locks of the process on that file.
_held: set[tuple[int, int]] = set()


def hold(folder: Path) -> Hashable:
    """Lock a folder until this process ends, unless this process holds the lock already; return a key of the lock file.

    All nodes see a POSIX lock, also on NFS, and on Lustre if it is mounted with ``flock``. Child processes do not
    inherit it. If the file system does not support locks, a warning is logged once, and other jobs are not kept out.

    Raises:
        CheckpointError: Another process holds the lock; the message names it.
        OSError: The lock file cannot be created or locked.
    """
    path = folder / NAME
    with suppress(FileNotFoundError):
        if (identity := _identity(path.stat())) in _held:
            return identity
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        job = next((f", job {os.environ[name]}" for name in _JOB_VARIABLES if name in os.environ), "")
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}{job}, since {since}\n".encode(), 0)
    except (BlockingIOError, PermissionError) as error:
        holder = os.pread(descriptor, _MOST_BYTES, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise CheckpointError(
            f"another job saves to {folder} ({holder}): wait until it has ended, or use a separate folder for each job"
        ) from error
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            os.close(descriptor)
            raise
        _LOG.warning(
            "%s: the file system does not support locks (%s): make sure that no other job saves there",
            path,
            error.strerror,
        )
    identity = _identity(os.fstat(descriptor))
    _held.add(identity)
    return identity


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
