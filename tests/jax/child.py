"""Checks in a process of their own, as JAX fixes the number of devices when it starts.

`python -m tests.jax.child CHECK ...` runs functions of `checks`, or of another module of this
folder as MODULE:FUNCTION, and shows what fails.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(devices: int, *checks: str, timeout: float, flags: str = "") -> str:
    """Run checks on so many devices; an AssertionError shows those that fail.

    `flags` are XLA's.
    """
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_ENABLE_X64": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "GPUSIM_CHILD_SECONDS": str(timeout),
    }
    environment.pop("XLA_FLAGS", None)
    if flags:
        environment["XLA_FLAGS"] = flags
    command = [sys.executable, "-m", "tests.jax.child", *checks]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout + 30
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def main() -> int:
    """Run the checks named on the command line."""
    faulthandler.dump_traceback_later(float(os.environ["GPUSIM_CHILD_SECONDS"]), exit=True)
    failed = 0
    for name in sys.argv[1:]:
        begun = time.perf_counter()
        module, _, function = name.rpartition(":")
        try:
            getattr(import_module(f"tests.jax.{module or 'checks'}"), function)()
        except Exception:
            failed += 1
            print(f"{name}: {traceback.format_exc()}", flush=True)
        else:
            print(f"{name}: {time.perf_counter() - begun:.1f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
