"""The memory of simulated DDP ranks, beside that of one process of gloo for each.

python -m bench.ranks_memory [RANKS [PARAMETERS]] prints the peak of a process for all ranks, and
for one rank of a gloo world of its own, both beyond what they have before the model; and their
ratio, by rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.memory import peak_bytes, status_bytes

RANKS, PARAMETERS = 64, 10_000_000
WIDTH, BATCH, STEPS = 1000, 2, 3


def train(parameters: int) -> None:
    """A few steps of DDP on layers of a million parameters."""
    import torch
    from torch import nn

    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(parameters // WIDTH**2)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(BATCH, WIDTH)).sum().backward()
        optimizer.step()


def measure(who: str, ranks: str, parameters: str) -> None:
    """Print the bytes that the ranks take beyond those of the libraries."""
    import torch.distributed as dist

    from gpusim.torch.distributed import launch

    def simulated(rank: int, size: int) -> None:
        dist.init_process_group("gloo")
        train(size)

    if who == "gpusim":
        launch(simulated, 2, (WIDTH**2,))  # loads modules
        before = status_bytes("VmRSS")
        launch(simulated, int(ranks), (int(parameters),))
    else:
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
            )
            train(WIDTH**2)
            before = status_bytes("VmRSS")
            train(int(parameters))
            dist.destroy_process_group()
    print(peak_bytes() - before)


def ask(who: str, ranks: int, parameters: int) -> int:
    """`measure` in a new process."""
    command = [sys.executable, "-m", "bench.ranks_memory", "of", who, str(ranks), str(parameters)]
    folder = Path(__file__).parents[1]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)
    return int(done.stdout.split()[-1])


def main(*given: str) -> None:
    if given[:1] == ("of",):
        measure(*given[1:])
        return
    numbers = [int(text) for text in given]
    ranks, parameters = (*numbers, *(RANKS, PARAMETERS)[len(numbers) :])
    ours, one = ask("gpusim", ranks, parameters), ask("gloo", 1, parameters)
    mib = 2**20
    print(f"{ranks} ranks of {parameters:,} parameters: {ours / mib:,.0f} MiB")
    print(
        f"one process of gloo: {one / mib:,.0f} MiB; all ranks: {ours / (ranks * one):.3f} times it"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
