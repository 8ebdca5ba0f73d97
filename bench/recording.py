"""The cost of recording digests: `python -m bench.recording` times DDP steps with and without.

The target is 20 % of a step. Times are CPU time of all ranks, the least of several steps and runs,
so that other work on the machine counts little.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gpusim.torch.distributed import Recorder, launch

#: Width of four layers, samples of each rank, ranks.
CASES = ((32, 8, 8), (32, 8, 64), (512, 16, 8), (1024, 32, 8))
STEPS, RUNS = 6, 4
TARGET = 0.2


def training(width: int, samples: int) -> Callable[[int], float]:
    """A program that trains for some steps; it returns the time of the fastest one."""

    def program(rank: int) -> float:
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))
        model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(samples, width)
        times = []
        for _ in range(STEPS):
            dist.barrier()
            begun = time.process_time()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            dist.barrier()
            times.append(time.process_time() - begun)
        return min(times[1:])

    return program


def main() -> int:
    """Print a line for each case; 1 if one is above the target."""
    worst = 0.0
    for width, samples, ranks in CASES:
        plain, recorded = [], []
        for _ in range(RUNS):
            plain.append(launch(training(width, samples), ranks)[0])
            with tempfile.TemporaryDirectory() as folder:
                recorder = Recorder(Path(folder) / "run", digests=True, keep=0)
                recorded.append(launch(training(width, samples), ranks, recorder=recorder)[0])
        cost = min(recorded) / min(plain) - 1
        worst = max(worst, cost)
        print(
            f"{ranks} ranks, 4 layers of {width}, {samples} samples: {1e3 * min(plain):.1f} ms a "
            f"step, with digests {100 * cost:+.1f} %",
            flush=True,
        )
    print(f"at most {100 * worst:.1f} %, target {100 * TARGET:.0f} %")
    return int(worst > TARGET)


if __name__ == "__main__":
    os.environ.setdefault("GPUSIM_THREADS", "1")
    raise SystemExit(main())
