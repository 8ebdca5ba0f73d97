"""Checks of this folder in a process of their own, with so many devices.

`python -m tests.jax.programs.child MODULE CHECK ...` runs functions of a module here.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping

from tests.jax.child import ROOT
from tests.oracles.machine_time import PATIENCE


def run(
    devices: int, module: str, *checks: str, environment: Mapping[str, str] | None = None
) -> str:
    """Run checks on so many devices, and return their output; an AssertionError shows failures."""
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    own = {
        **inherited,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_ENABLE_X64": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **(environment or {}),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.jax.programs.child", module, *checks],
        cwd=ROOT, env=own, capture_output=True, text=True, timeout=PATIENCE + 30,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def main() -> int:
    """Run the checks named on the command line."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    module = importlib.import_module(f"tests.jax.programs.{sys.argv[1]}")
    failed = 0
    for name in sys.argv[2:]:
        begun = time.perf_counter()
        try:
            getattr(module, name)()
        except Exception:
            failed += 1
            print(f"{name}: {traceback.format_exc()}", flush=True)
        else:
            print(f"{name}: {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
