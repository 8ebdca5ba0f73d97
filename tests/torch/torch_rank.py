"""One rank of torch.distributed with gloo: run as RANK SIZE FOLDER, writes what it receives."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist


def main(rank: int, size: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    x = torch.load(folder / "x.pt", weights_only=True)[rank]
    total = x.clone()
    dist.all_reduce(total)
    gathered = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(gathered, x)
    exchanged = torch.empty_like(x)
    dist.all_to_all_single(exchanged, x)
    found = {"psum": total, "all_gather": torch.stack(gathered), "all_to_all": exchanged}
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
