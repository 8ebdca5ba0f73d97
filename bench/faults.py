"""Plans of faults per minute: `python -m bench.faults`.

A campaign of `gpusim torchrun --faults seed=7` with FSDP2 and distributed checkpoints on four
ranks (`examples/torchrun/survive.py`): the plans per minute of this machine, and the processor's
seconds of a plan, which tell more where other work runs beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "torchrun" / "survive.py"
RANKS, RESTARTS, SEED = 4, 0, 7
#: At least so many plans in a minute on two cores that have nothing else to do.
TARGET = 100.0


def measure(runs: int, jobs: int) -> dict[str, Any]:
    """Run a campaign; its plans per minute, and the processor's seconds of each."""
    with tempfile.TemporaryDirectory(prefix="gpusim-bench-") as folder:
        to = Path(folder) / "campaign.json"
        command = [sys.executable, "-m", "gpusim", "torchrun", "--nproc-per-node", str(RANKS)]
        command += ["--max-restarts", str(RESTARTS), "--faults", f"seed={SEED}"]
        command += ["--runs", str(runs), "--jobs", str(jobs), "--json", str(to), str(SCRIPT)]
        done = subprocess.run(
            [*command, "--checkpoints", "{folder}"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
        )
        if done.returncode not in (0, 1):
            raise RuntimeError(f"the campaign fails with exit code {done.returncode}")
        found = json.loads(to.read_text())
    return {
        "plans": runs,
        "jobs": jobs,
        "plans per minute": round(60 * runs / found["seconds"], 1),
        "processor seconds of a plan": round(found["processor_seconds"] / runs, 2),
        "verdicts": found["verdicts"],
    }


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and print it; 1 if the target is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(words)
    found = measure(options.runs, options.jobs)
    print(json.dumps(found, indent=1))
    return 0 if found["plans per minute"] >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
