"""What the operating system knows about this machine, as gc-info's attributes.

Read from Linux's /proc and /sys; elsewhere most of it is not known.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

from gpusim.tools.info import memory_bytes

__all__ = ["host_attributes"]

PROC = Path("/proc")
THERMAL = Path("/sys/class/thermal")
DIE_SENSORS = ("x86_pkg_temp", "cpu-thermal", "cpu_thermal")


def host_attributes() -> dict[str, str]:
    """What is known; the rest is missing."""
    found = {
        "average die temp": die_temperature(),
        "board type": first_value(PROC / "cpuinfo", "model name") or platform.machine() or None,
        "clock": clock(),
        "memory total (bytes)": str(memory_bytes() or "") or None,
        "memory used (bytes)": memory_used(),
    }
    return {key: value for key, value in found.items() if value is not None}


def clock() -> str | None:
    text = first_value(PROC / "cpuinfo", "cpu MHz")
    try:
        return None if text is None else f"{float(text):.0f}MHz"
    except ValueError:
        return None


def memory_used() -> str | None:
    """What is not available to new programs."""
    sizes = [first_value(PROC / "meminfo", key) for key in ("MemTotal", "MemAvailable")]
    try:
        total, available = (int((size or "").removesuffix("kB")) for size in sizes)
    except ValueError:
        return None
    return str(1024 * (total - available))


def die_temperature() -> str | None:
    """The mean of the processors' own sensors; None in most virtual machines and containers."""
    found = [temperature for zone in zones() if (temperature := millidegrees(zone)) is not None]
    return f"{sum(found) / len(found) / 1000:.1f} C" if found else None


def zones() -> Iterator[Path]:
    for zone in THERMAL.glob("thermal_zone*"):
        if read(zone / "type").strip() in DIE_SENSORS:
            yield zone


def millidegrees(zone: Path) -> int | None:
    try:
        return int(read(zone / "temp"))
    except ValueError:
        return None


def first_value(file: Path, key: str) -> str | None:
    """The value in the first line `key: value`."""
    for line in read(file).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip() or None
    return None


def read(file: Path) -> str:
    """The file's text; empty if there is none."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
