"""python -m tests.cuda.fake_cuda MODULE [ARGUMENTS]: `python -m` on the fake."""

from __future__ import annotations

import os
import runpy
import sys

from . import SWITCH, install

if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    os.environ[SWITCH] = "1"  # for its child processes
    install()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
