"""Exclusive locks on simulated IPUs: a lock file each, in a folder that the user's processes share.

The locks are `filelock`'s. They exclude the owners in one process as well, a forked child does not
inherit them, and the kernel releases those of a process that dies.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gpusim.devices.errors import DeviceError
from gpusim.platforms import PLAIN, lacks, user_id

if TYPE_CHECKING:
    from filelock import BaseFileLock

__all__ = ["Hold", "read_locked", "runtime_folder", "try_hold"]

GATE = "gate.lock"
GATE_PATIENCE = 10.0  # seconds: a process that holds the gate for longer was stopped inside
GATE_POLL = 0.001
MAX_RECORD = 65536  # bytes that are read of a holder's record
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
WAY_OUT = "name another folder with GPUSIM_RUNTIME_DIR"


class Hold:
    """The locks on some IPUs, from `try_hold` until `release` or the end of the process."""

    def __init__(self, locks: list[BaseFileLock]) -> None:
        self._locks = locks

    @property
    def held(self) -> bool:
        """Whether the locks are this process's: not after `release`, and not in a forked child."""
        return any(lock.is_locked for lock in self._locks)

    def release(self) -> None:
        """Release the locks; does nothing the second time, and nothing in a forked child."""
        for lock in reversed(self._locks):
            if lock.is_locked:
                with suppress(OSError, DeviceError):  # the lock is what counts
                    write_record(Path(lock.lock_file), b"")
                lock.release()


def try_hold(ipus: Sequence[int], record: bytes) -> Hold | None:
    """Lock all the IPUs, or return None at once. Others can read `record` meanwhile.

    The gate lets one attempt in at a time. Two groups that overlap therefore neither block each
    other nor both fail, and no process sees half of an attempt.
    """
    folder = open_folder()
    with gate(folder):
        hold = Hold([])
        try:
            for ipu in sorted(ipus):
                path = folder / f"ipu-{ipu}.lock"
                lock = locked(path) or locked(path)  # again: a file may be replaced meanwhile
                if lock is None:
                    hold.release()
                    return None
                hold._locks.append(lock)
                write_record(path, record)
        except BaseException:
            hold.release()
            raise
    return hold


def read_locked(ipus: Sequence[int]) -> dict[int, bytes]:
    """The records of the holders, by IPU, without the IPUs that are free. Changes nothing.

    A look tries the lock. The gate keeps attaching processes from taking that for a holder. A
    record that a dead process has left is not locked, and not read.
    """
    if not os.path.lexists(runtime_folder()):
        return {}
    folder = open_folder()
    with gate(folder):
        found = ((ipu, peek(folder / f"ipu-{ipu}.lock")) for ipu in ipus)
        return {ipu: record for ipu, record in found if record is not None}


def peek(path: Path) -> bytes | None:
    """The record in a file that is locked; None if the file is free or missing."""
    if not os.path.lexists(path):
        return None
    if lock := locked(path):
        lock.release()
        return None
    with plain_file(path, os.O_RDONLY) as file:
        return os.pread(file, MAX_RECORD, 0)


@contextmanager
def gate(folder: Path) -> Iterator[None]:
    """Let one process in at a time, for the milliseconds of an attempt.

    A process that was stopped inside must not stop the others: they go in after GATE_PATIENCE. The
    locks exclude without the gate too, but an attempt may then fail because of another attempt.
    """
    lock = locked(folder / GATE, GATE_PATIENCE)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def locked(path: Path, patience: float = 0.0) -> BaseFileLock | None:
    """The lock of a file, acquired; None if another owner keeps it for longer than `patience`.

    A new file has the permissions of its folder: who may write there may open it.
    """
    from filelock import FileLock, Timeout

    mode = path.parent.stat().st_mode & 0o666
    lock = FileLock(path, mode=mode, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(timeout=patience, poll_interval=GATE_POLL)
    except Timeout:
        return None
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in NO_LOCKS:  # some network file systems
            problem = f"{path.parent} cannot lock files ({reason})"
        else:
            problem = f"{path} cannot be used ({reason})"
        raise DeviceError(f"{problem}: {WAY_OUT}") from error
    return lock


def write_record(path: Path, record: bytes) -> None:
    """Replace the content of a file that this process has locked.

    The file is sticky as long as it has content: systemd-tmpfiles, which removes old files from
    /tmp, leaves sticky ones alone.
    """
    with plain_file(path, os.O_WRONLY) as file, suppress(OSError):  # a full disk, another's file
        os.ftruncate(file, 0)
        os.pwrite(file, record, 0)
        mode = os.fstat(file).st_mode & 0o777
        os.fchmod(file, mode | stat.S_ISVTX if record else mode)


@contextmanager
def plain_file(path: Path, access: int) -> Iterator[int]:
    """A descriptor of a plain file. DeviceError for a link, a FIFO or the like."""
    file = os.open(path, access | PLAIN)
    try:
        state = os.fstat(file)
        if not stat.S_ISREG(state.st_mode) or state.st_nlink > 1:
            raise DeviceError(f"{path} cannot be used (not a plain file): {WAY_OUT}")
        yield file
    finally:
        os.close(file)


# ---------------------------------------------------------------- the folder


def runtime_folder() -> Path:
    """The folder of the lock files: $GPUSIM_RUNTIME_DIR, or a folder of this user's in /tmp.

    Not XDG_RUNTIME_DIR or TMPDIR: they differ between a login, a cron job and a container's shell
    of the same user. Those would not see one another's IPUs in use.
    """
    if named := os.environ.get("GPUSIM_RUNTIME_DIR"):
        return Path(named).absolute()
    shared = Path("/tmp")
    base = shared if shared.is_dir() else Path(tempfile.gettempdir())
    return base / f"gpusim-{user_id()}"


def open_folder() -> Path:
    """The runtime folder, which is made if it is missing.

    DeviceError if it is a link, or if the default folder is open to other users. The permissions
    of a folder that GPUSIM_RUNTIME_DIR names are up to the user.
    """
    if not hasattr(os, "pwrite"):
        raise DeviceError(str(lacks("locks on simulated IPUs", "pwrite")))
    path = runtime_folder()
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        state = path.lstat()
    except FileNotFoundError:
        raise DeviceError(f"{path.parent} does not exist: {WAY_OUT}") from None
    except OSError as error:  # FileExistsError: a file, or a link that leads nowhere
        raise DeviceError(f"{path} is not a usable folder ({error.strerror}): {WAY_OUT}") from error
    if not stat.S_ISDIR(state.st_mode):
        raise DeviceError(f"{path} is not a usable folder (a link): {WAY_OUT}")
    private = state.st_uid == user_id() and not stat.S_IMODE(state.st_mode) & 0o077
    if not private and not os.environ.get("GPUSIM_RUNTIME_DIR"):
        raise DeviceError(f"{path} is not this user's alone: remove it, or {WAY_OUT}")
    return path
