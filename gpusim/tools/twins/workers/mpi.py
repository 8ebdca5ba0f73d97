"""Sums by MPI: `mpirun -n RANKS python mpi.py FOLDER`, for Open MPI and MPICH.

FOLDER has cases.json and the members' values; rank 0 writes the sums there.
"""

from __future__ import annotations

import ctypes
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

#: Open MPI's control variables, set through the standard's tools interface.
ALGORITHM = "coll_tuned_allreduce_algorithm"
SEGMENT = "coll_tuned_allreduce_algorithm_segmentsize"
DYNAMIC = "coll_tuned_use_dynamic_rules"


class Controls:
    """The control variables of the library in this process; new communicators read them."""

    def __init__(self) -> None:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
        loaded = (line.split()[-1] for line in maps.splitlines())
        (library, *_) = [path for path in loaded if Path(path).name.startswith("libmpi.so")]
        self.library = ctypes.CDLL(library)
        self.check(self.library.MPI_T_init_thread(0, ctypes.byref(ctypes.c_int())))
        self.handles: dict[str, ctypes.c_void_p] = {}

    def set(self, name: str, value: int) -> None:
        """Write one, and read it back."""
        if name not in self.handles:
            index, handle, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
            self.check(self.library.MPI_T_cvar_get_index(name.encode(), ctypes.byref(index)))
            self.check(
                self.library.MPI_T_cvar_handle_alloc(
                    index, None, ctypes.byref(handle), ctypes.byref(count)
                )
            )
            self.handles[name] = handle
        given, found = ctypes.c_int(value), ctypes.c_int(-1)
        self.check(self.library.MPI_T_cvar_write(self.handles[name], ctypes.byref(given)))
        self.check(self.library.MPI_T_cvar_read(self.handles[name], ctypes.byref(found)))
        if found.value & 0xFF != value & 0xFF:
            raise RuntimeError(f"{name} is {found.value} after it was set to {value}")

    @staticmethod
    def check(code: int) -> None:
        if code:
            raise RuntimeError(f"MPI's tools interface answered {code}")


def communicator(world: Any, settings: dict[str, Any], controls: Controls | None) -> Any:
    """A communicator with these settings: the number of an algorithm, a segment size."""
    if controls is None:
        return world.Dup()
    controls.set(DYNAMIC, int("algorithm" in settings))
    if "algorithm" in settings:
        controls.set(ALGORITHM, settings["algorithm"])
        controls.set(SEGMENT, settings.get("segment", 0))
    return world.Dup()


def main(folder: Path) -> None:
    """Do all cases of these ranks."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    cases = json.loads((folder / "cases.json").read_text())
    controls = Controls() if "Open MPI" in MPI.Get_library_version() else None
    found: dict[str, Any] = {"version": np.array(MPI.Get_library_version().split(",")[0])}
    last, own = None, world
    for number, case in enumerate(cases):
        if case["ranks"] != world.size:
            continue
        if case["settings"] != last:
            last, own = case["settings"], communicator(world, case["settings"], controls)
        size, sums = case["size"], case["sums"]
        values = np.load(folder / f"{case['dtype']}.npy", mmap_mode="r")
        x = np.array(values[world.rank, : sums * size])
        total = np.empty_like(x)
        for first in range(0, sums * size, size):
            own.Allreduce(x[first : first + size], total[first : first + size])
        checks = world.gather(zlib.crc32(total.tobytes()))
        if checks is not None:
            found[f"sum {number}"] = total
            found[f"alike {number}"] = np.array(len(set(checks)) == 1)
    if world.rank == 0:
        np.savez(folder / f"found-{world.size}.npz", **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
