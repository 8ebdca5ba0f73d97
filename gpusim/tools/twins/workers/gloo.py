"""Sums by gloo, through torch.distributed: `python gloo.py FOLDER` forks the ranks of each case.

FOLDER has cases.json and the members' values; rank 0 writes the sums there.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import zlib
from pathlib import Path
from typing import Any

import numpy as np


def tensor(values: np.ndarray, dtype: str) -> Any:
    """A member; types that NumPy lacks are stored as their bits."""
    import torch

    given = torch.from_numpy(np.array(values))
    return given.view(getattr(torch, dtype)) if dtype == "bfloat16" else given


def rank_main(rank: int, ranks: int, folder: Path) -> None:
    """One process: its part of all cases with this number of ranks."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous-{ranks}", rank=rank, world_size=ranks
    )
    cases = json.loads((folder / "cases.json").read_text())
    found: dict[str, Any] = {"version": np.array(f"gloo of torch {torch.__version__}")}
    for number, case in enumerate(cases):
        if case["ranks"] != ranks:
            continue
        size, sums = case["size"], case["sums"]
        values = np.load(folder / f"{case['dtype']}.npy", mmap_mode="r")
        x = tensor(values[rank, : sums * size], case["dtype"])
        for first in range(0, sums * size, size):
            dist.all_reduce(x[first : first + size])
        total = x.view(torch.int16).numpy() if case["dtype"] == "bfloat16" else x.numpy()
        check = torch.tensor(zlib.crc32(total.tobytes()), dtype=torch.int64)
        checks = [torch.zeros_like(check) for _ in range(ranks)]
        dist.all_gather(checks, check)
        found[f"sum {number}"] = total
        found[f"alike {number}"] = np.array(len({int(c) for c in checks}) == 1)
    dist.barrier()
    if rank == 0:
        np.savez(folder / f"found-{ranks}.npz", **found)
    dist.destroy_process_group()


def main(folder: Path) -> int:
    """Fork the ranks of each number of ranks; how many have failed."""
    importlib.import_module("torch.distributed")  # once, before the ranks are forked
    cases = json.loads((folder / "cases.json").read_text())
    failed = 0
    for ranks in sorted({case["ranks"] for case in cases}):
        children = []
        for rank in range(ranks):
            child = os.fork()
            if not child:
                try:
                    rank_main(rank, ranks, folder)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        failed += sum(os.waitpid(child, 0)[1] != 0 for child in children)
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
