"""The first psum by a compiled kernel: with an empty cache, and in later processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import machine
from bench.cases import VARIANTS
from bench.results import Start

ROOT = Path(__file__).parents[1]
PROGRAM = Path(__file__).with_name("start_program.py")
#: To nearest, in an 8-bit format, and with random numbers: the kernels that take longest.
MEASURED = ("float16", "float8_e4m3fn", "float16-sr16")
LATER = 3  # processes
SECONDS = 120.0


def starts(variants: Sequence[str] = MEASURED) -> Iterator[Start]:
    """The result for each variant; one with the problem where NumPy's kernels run."""
    if machine.kernel_set() == "numpy":
        yield Start("", problem="NumPy's kernels run: pip install 'gpusim[fast]'")
        return
    for variant in variants:
        try:
            yield _measure(variant)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            yield Start(variant, problem=str(error))


def _measure(variant: str) -> Start:
    with tempfile.TemporaryDirectory(prefix="gpusim-bench-") as folder:
        cold = _run(variant, folder)
        if not any(Path(folder).iterdir()):
            raise RuntimeError("no kernel was compiled")
        later = min((_run(variant, folder) for _ in range(LATER)), key=lambda seconds: seconds[1])
    return Start(variant, cold[0], cold[1], later[0], later[1])


def _run(variant: str, cache: str) -> list[float]:
    """The seconds of the import and of the psum. **Raises**: RuntimeError with the error."""
    how = VARIANTS[variant]
    reduction = {"accumulate": how.accumulate, "rounding": how.rounding}
    settings = {
        "GPUSIM_CACHE_DIR": cache, "GPUSIM_KERNELS": "compiled", "PYTHONPATH": str(ROOT)
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(PROGRAM), how.dtype, json.dumps(reduction)],
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it failed"])[-1][:160])
    seconds: list[float] = json.loads(done.stdout)
    return seconds
