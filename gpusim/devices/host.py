"""Facts about this machine from the operating system, also as gc-info's attributes.

Linux's /proc and /sys are read. Elsewhere most of it is unknown.
"""

from __future__ import annotations

import platform
from pathlib import Path

from gpusim.runtime.probes import memory_bytes

__all__ = ["host_attributes"]

PROC = Path("/proc")
THERMAL = Path("/sys/class/thermal")
DIE_SENSORS = ("x86_pkg_temp", "cpu-thermal", "cpu_thermal")


def host_attributes() -> dict[str, str]:
    """The attributes that are known."""
    found = {
        "average die temp": die_temperature(),
        "board type": first_value(PROC / "cpuinfo", "model name") or platform.machine() or None,
        "clock": clock(),
        "memory total (bytes)": str(memory_bytes() or "") or None,
        "memory used (bytes)": memory_used(),
    }
    return {key: value for key, value in found.items() if value is not None}


def memory_used() -> str | None:
    """The memory that is not available to new programs."""
    sizes = [first_value(PROC / "meminfo", key) for key in ("MemTotal", "MemAvailable")]
    try:
        total, available = (int((size or "").removesuffix("kB")) for size in sizes)
    except ValueError:
        return None
    return str(1024 * (total - available))


def clock() -> str | None:
    value = first_value(PROC / "cpuinfo", "cpu MHz")
    try:
        return None if value is None else f"{float(value):.0f}MHz"
    except ValueError:
        return None


def die_temperature() -> str | None:
    """The mean of the processors' own sensors; None in most virtual machines and containers."""
    found = []
    for zone in THERMAL.glob("thermal_zone*"):
        text = read(zone / "temp").strip()
        if read(zone / "type").strip() in DIE_SENSORS and text.removeprefix("-").isdecimal():
            found.append(int(text) / 1000)
    return f"{sum(found) / len(found):.1f} C" if found else None


def first_value(file: Path, key: str) -> str | None:
    """The value in the first line `key: value`."""
    for line in read(file).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip() or None
    return None


def read(file: Path) -> str:
    """The file's text; empty if it is missing."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
