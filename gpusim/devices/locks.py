"""Exclusive locks on simulated IPUs: flock on a file each, among processes and within one.

flock belongs to the opened file, so two owners in one process exclude each other, which fcntl's
locks do not; the kernel releases it when the process dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from gpusim.devices.errors import DeviceError
from gpusim.devices.runtime_folder import WAY_OUT, open_file, open_folder, runtime_folder

__all__ = ["Hold", "read_locked", "try_hold"]

GATE = "gate.lock"
GATE_PATIENCE = 10.0  # seconds: whoever holds the gate for longer was stopped inside
GATE_POLL = 0.001
MOST_RECORD = 65536  # bytes read of what a holder wrote about itself

_no_fork = threading.RLock()  # held while there are descriptors that no Hold has yet


class Hold:
    """The locks on some IPUs, from `try_hold` until `release` or the end of the process."""

    def __init__(self, folder: int, files: list[int], record: bytes) -> None:
        self._folder = folder
        self._files = files
        _holds.add(self)
        for file in files:
            with suppress(OSError):  # a full disk: the lock is what counts
                os.ftruncate(file, 0)
                os.pwrite(file, record, 0)

    @property
    def held(self) -> bool:
        """Whether the locks are this process's: not after `release`, and not in a forked child."""
        return bool(self._files)

    def release(self) -> None:
        """Let go of the locks; does nothing the second time, nor in a forked child."""
        with _no_fork:
            for file in reversed(self._files):
                with suppress(OSError):
                    os.ftruncate(file, 0)
                unlock(file)
            if self._files:
                os.close(self._folder)
            self._files.clear()
            _holds.discard(self)

    def abandon(self) -> None:
        """Close what a fork has copied. Unlocking would take the locks from the parent."""
        for descriptor in (*self._files, self._folder):
            with suppress(OSError):
                os.close(descriptor)
        self._files.clear()


_holds: set[Hold] = set()


def _in_child() -> None:
    while _holds:
        _holds.pop().abandon()
    _no_fork.release()


os.register_at_fork(
    before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_in_child
)


def try_hold(ipus: Sequence[int], record: bytes) -> Hold | None:
    """Lock all the IPUs, or none: then None, at once. `record` is left for others to read.

    The files are taken in ascending order and behind a gate, so that two groups that overlap
    neither block each other nor both fail, and nobody sees half of an attempt.
    """
    with _no_fork:
        folder = open_folder(make=True)
        assert folder is not None
        try:
            with gate(folder):
                files = locked_files(folder, sorted(ipus))
        except BaseException:
            os.close(folder)
            raise
        if files is None:
            os.close(folder)
            return None
        # systemd-tmpfiles leaves a folder alone that is locked: a lock file must not be cleaned
        # away under its holder after ten days
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return Hold(folder, files, record)


def locked_files(folder: int, ipus: Sequence[int]) -> list[int] | None:
    """The IPUs' files, all locked; None, and none locked, if somebody has one of them.

    What was locked in vain is unlocked in here, before the caller leaves the gate.
    """
    files: list[int] = []
    complete = False
    try:
        for ipu in ipus:
            file = locked_file(folder, f"ipu-{ipu}.lock")
            if file is None:
                return None
            files.append(file)
        complete = True
        return files
    finally:
        if not complete:
            for file in files:
                unlock(file)


def locked_file(folder: int, name: str) -> int | None:
    """A descriptor of the file with its lock taken; None if somebody has it."""
    while True:
        file = open_file(folder, name, make=True)
        assert file is not None
        try:
            taken = lock(file, fcntl.LOCK_EX)
        except DeviceError:
            os.close(file)
            raise
        if not taken:
            os.close(file)
            return None
        with suppress(FileNotFoundError):
            there = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if os.path.samestat(there, os.fstat(file)):
                return file
        unlock(file)  # the file was removed meanwhile: others would lock another


def read_locked(ipus: Sequence[int]) -> dict[int, bytes]:
    """What the holders of the IPUs have written, by IPU; free ones are missing. Changes nothing.

    Looking means to try the lock; behind the gate no attaching process can take that for a
    holder. What dead holders have left is not locked, and not read.
    """
    with _no_fork:
        folder = open_folder(make=False)
        if folder is None:
            return {}
        try:
            with gate(folder):
                found = ((ipu, peek(folder, f"ipu-{ipu}.lock")) for ipu in ipus)
                return {ipu: record for ipu, record in found if record is not None}
        finally:
            os.close(folder)


def peek(folder: int, name: str) -> bytes | None:
    """The record in a file that is locked; None if it is not, or not there."""
    file = open_file(folder, name, make=False)
    if file is None:
        return None
    try:
        if lock(file, fcntl.LOCK_SH):
            fcntl.flock(file, fcntl.LOCK_UN)  # not by closing alone: see unlock
            return None
        return os.pread(file, MOST_RECORD, 0)
    finally:
        os.close(file)


@contextmanager
def gate(folder: int) -> Iterator[None]:
    """Only one process at a time is inside, for the milliseconds of an attempt.

    One that was stopped inside must not stop the others: they go in after GATE_PATIENCE. The locks
    exclude without the gate too, but then an attempt may fail because of another attempt.
    """
    file = open_file(folder, GATE, make=True)
    assert file is not None
    try:
        deadline = time.monotonic() + GATE_PATIENCE
        while not lock(file, fcntl.LOCK_EX) and time.monotonic() < deadline:
            time.sleep(GATE_POLL)
        yield
    finally:
        unlock(file)


def lock(file: int, kind: int) -> bool:
    """Try the lock; False if somebody has it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some network file systems cannot
        reason = f"{runtime_folder()} cannot lock files ({error.strerror})"
        raise DeviceError(f"{reason}: {WAY_OUT}") from error
    return True


def unlock(file: int) -> None:
    """Unlock and close: a copy that a child has between fork and exec must not keep the lock."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)
