"""Threads that are kept between replicas and between calls of pmap.

To start a thread takes longer than a few NumPy calls do. Idle threads end after `IDLE_SECONDS`.
All are daemons: none delays the end of the interpreter, even if it never returns from C code.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from ..errors import GpusimError

IDLE_SECONDS = 5.0
MOST_IDLE = 512
"""Each idle thread holds about 100 KiB of stack."""

IDLE_NAME = "pmap thread"
RESERVED = 64
"""Threads that pmap leaves to the rest of the process."""

THREAD_MEMORY = 128 * 1024
"""Bytes that a blocked thread takes: its stack, the kernel's, and the interpreter's frames."""

Job = Callable[[], None]


class WorkerThread(threading.Thread):
    """A thread that runs anyone's jobs, and so belongs to no rank that starts it."""


# A worker belongs to the pool while it waits, and to its job while that runs. `job` is written by
# the thread that starts a job, before it releases `wake`, and read by the worker's after that: no
# other lock is needed.
class _Worker:
    def __init__(self, pool: _Pool, job: Job) -> None:
        self.pool = pool
        self.job: Job | None = job
        # Held unless a job is there. Released exactly once for each job.
        self.wake = threading.Lock()
        self.wake.acquire()
        self.thread = WorkerThread(target=self.run, name=IDLE_NAME, daemon=True)

    def run(self) -> None:
        try:
            while True:
                # Nothing of a job stays in the worker while it waits: not the job either, which
                # holds a replica.
                job, self.job = self.job, None
                assert job is not None
                job()
                del job
                if not self.pool.wait(self):
                    return
        finally:
            self.pool.forget()


class _Pool:
    def __init__(self) -> None:
        # Guards the two fields below. It is the innermost lock: threads are started with a
        # scheduler's lock held, and nothing is waited for while this one is held.
        self._lock = threading.Lock()
        # Invariant: a worker in the list waits for `wake`. The newest goes first, so that old ones
        # end.
        self._idle: list[_Worker] = []
        # All threads of the pool, those that are about to start included.
        self._count = 0

    def start(self, job: Job) -> None:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
            if worker is None:
                self._count += 1
        if worker is not None:
            # The worker is out of the list: it is this thread's alone until it is released.
            worker.job = job
            worker.wake.release()
            return
        try:
            if self._count > most_threads():
                raise RuntimeError(f"it has {self._count - 1} threads already")
            _Worker(self, job).thread.start()
        except RuntimeError:
            self.forget()
            raise

    def forget(self) -> None:
        """Count one thread less."""
        with self._lock:
            self._count -= 1

    def wait(self, worker: _Worker) -> bool:
        """Wait for a job, in the worker's thread; False if the thread is to end."""
        with self._lock:
            if len(self._idle) >= MOST_IDLE:
                return False
            self._idle.append(worker)
        # The time-out may come just as a job does. Who takes the worker out of the list decides: if
        # the starter was first, the job comes, and the worker waits for it without a limit.
        if worker.wake.acquire(timeout=IDLE_SECONDS):
            return True
        # The worker is still in the list: it ends, and `run` counts one thread less.
        with self._lock:
            if worker in self._idle:
                self._idle.remove(worker)
                return False
        return worker.wake.acquire()  # a job comes


_pool = _Pool()


def _forget_threads() -> None:
    """Threads do not live on in a forked child: it starts its own."""
    # A lock of the old pool may have been held by another thread when the process was forked, for
    # ever. So the pool is left as it is, and a new one is made.
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def start(job: Job) -> None:
    """Run a job, which must not raise, in an idle thread or a new one.

    **Raises**:

    - RuntimeError: if the system refuses a thread.
    """
    # Called with a scheduler's lock held or not. The thread is a WorkerThread, which belongs to no
    # rank, whichever rank's thread has started it.
    _pool.start(job)


# --- as in a new thread ---------------------------------------------------------------------------


def begin_tracing() -> None:
    """Trace and profile this thread as `threading.settrace` and `setprofile` say."""
    # Here, not where the thread starts: it may be older than the debugger.
    trace, profile = threading.gettrace(), threading.getprofile()
    if sys.getprofile() is not profile:
        sys.setprofile(profile)
    if sys.gettrace() is not trace:
        sys.settrace(trace)


def end_tracing() -> None:
    """Neither trace nor profile this thread, whatever its last job began."""
    if sys.gettrace() is not None:
        sys.settrace(None)
    if sys.getprofile() is not None:
        sys.setprofile(None)


def clear_thread_state() -> None:
    """Drop this thread's values of `threading.local` objects, as the end of a thread does.

    torch's grad mode, which torch keeps by thread, returns to its default.
    """
    if sys.version_info < (3, 13):  # later versions keep them out of reach
        # In the thread that is to be as new. What gpusim itself keeps by thread (workspaces of
        # folds) is made anew at the next use.
        ctypes.cast(_thread_dict(), ctypes.py_object).value.clear()
    torch = sys.modules.get("torch")
    if torch is not None and not torch.is_grad_enabled():
        torch.set_grad_enabled(True)


_thread_dict = ctypes.pythonapi.PyThreadState_GetDict
_thread_dict.restype = ctypes.c_void_p


# --- how many -------------------------------------------------------------------------------------


def most_threads() -> int:
    """The number of threads that this machine lets pmap have at once."""
    return max(1, min(bound for _, bound in _bounds()) - RESERVED)


def check_thread_count(what: str, size: int) -> None:
    """Refuse a map of more replicas than the machine has threads for.

    **Raises**:

    - GpusimError: naming the limit of the machine and what works instead.
    """
    if size <= SURELY_POSSIBLE:
        return
    # Before any thread is started: a map that runs into the limit in the midst has started
    # hundreds, and leaves the machine without any for others.
    reason, bound = min(_bounds(), key=lambda item: item[1])
    if size > bound - RESERVED:
        raise GpusimError(
            f"{what} over {size} replicas needs {size} threads, but this machine allows about "
            f"{max(1, bound - RESERVED)} ({reason}); gpusim.vmap runs any number of replicas in "
            "one thread, and a pmap without an axis_name needs one thread for each core"
        )


SURELY_POSSIBLE = 512


@functools.cache
def _bounds() -> list[tuple[str, int]]:
    """The limits of the system, each with its name. Those that a system does not have are left
    out."""
    bounds = [("pmap's own limit", 1 << 20)]
    for name, path, share in (
        ("kernel.threads-max", "/proc/sys/kernel/threads-max", 1),
        ("vm.max_map_count, of which each thread takes two", "/proc/sys/vm/max_map_count", 2),
        ("pids.max of the cgroup", "/sys/fs/cgroup/pids.max", 1),
    ):
        try:
            bounds.append((name, int(Path(path).read_text(encoding="utf-8")) // share))
        except (OSError, ValueError):  # no such file, or "max"
            pass
    try:
        import resource

        processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        if processes != resource.RLIM_INFINITY:
            bounds.append(("ulimit -u", processes))
        space = resource.getrlimit(resource.RLIMIT_AS)[0]
        stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
        if resource.RLIM_INFINITY not in (space, stack):
            bounds.append(("ulimit -v, by ulimit -s", space // max(stack, THREAD_MEMORY)))
    except (ImportError, AttributeError):  # not a Unix
        pass
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        bounds.append((f"memory, {THREAD_MEMORY >> 10} KiB a thread", memory // THREAD_MEMORY))
    except (AttributeError, ValueError, OSError):
        pass
    return bounds
