"""gpusim's peak memory beyond the inputs, in a process of its own for each case.

Run as python -m bench.memory COLLECTIVE VARIANT REPLICAS ELEMENTS, it prints that many bytes.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from bench.cases import Case

SECONDS = 60
LEAST = 2**20  # bytes of inputs; beside smaller ones the allocator's own pages are measured


def extra_bytes(case: Case) -> int | None:
    """Asked of a new process; None when that fails, or for small inputs."""
    if case.input_bytes < LEAST:
        return None
    numbers = [str(case.replicas), str(case.elements)]
    command = [sys.executable, "-m", "bench.memory", case.collective, case.variant, *numbers]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return int(done.stdout) if done.returncode == 0 else None


def peak_bytes() -> int:
    """The most memory that this process has had.

    Linux's own line for it begins anew with every program; ru_maxrss may be that of the process
    that started this one.
    """
    try:
        return status_bytes("VmHWM")
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def status_bytes(name: str) -> int:
    """The memory of this process, from /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def main(collective: str, variant: str, replicas: str, elements: str) -> None:
    from bench.peers.ours import Vmap

    tiny = Vmap()  # the first call loads modules and starts threads
    tiny.prepare(Case(collective, variant, 8, 64))
    tiny.run(1)
    peer = Vmap()
    peer.prepare(Case(collective, variant, int(replicas), int(elements)))
    before = peak_bytes()
    peer.run(1)
    print(peak_bytes() - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
