"""Sums by XLA:CPU, through JAX's psum on fake devices: `python xla.py FOLDER`.

FOLDER has cases.json and the members' values; the sums are written there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np


def main(folder: Path) -> None:
    """Do all cases, each on the first of as many devices as any case has ranks."""
    cases = json.loads((folder / "cases.json").read_text())
    most = max(case["ranks"] for case in cases)
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={most}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_X64"] = "1"
    import jax
    import ml_dtypes

    found: dict[str, Any] = {"version": np.array(f"JAX {jax.__version__}")}
    alike: dict[tuple[int, str], list[int]] = {}
    for number, case in enumerate(cases):
        alike.setdefault((case["ranks"], case["dtype"]), []).append(number)
    for (ranks, name), numbers in alike.items():  # one compilation for all sizes
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        stored = np.load(folder / f"{name}.npy", mmap_mode="r")
        given = []
        for case in (cases[number] for number in numbers):
            values = np.array(stored[:ranks, : case["sums"] * case["size"]])
            given.append(values.reshape(ranks, -1, case["size"]).view(dtype))
        devices = jax.devices()[:ranks]
        totals = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i", devices=devices)(given)
        for number, total in zip(numbers, totals, strict=True):
            every = np.asarray(total).view(stored.dtype)
            found[f"sum {number}"] = every[0].reshape(-1)
            found[f"alike {number}"] = np.array(bool((every == every[0]).all()))
    np.savez(folder / "found.npz", **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
