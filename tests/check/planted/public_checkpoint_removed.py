# run: --ranks 3 --check
"""pytorch/pytorch#84881: after the barrier all ranks load the checkpoint; rank 0 removes it without
waiting for those that have not read it yet."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def scratch_file(name):
    folder = os.environ.get("SCRATCH", tempfile.gettempdir())
    return os.path.join(folder, f"{name}-{os.environ['MASTER_PORT']}.pt")


def save_and_load(ddp, path):
    if dist.get_rank() == 0:
        torch.save(ddp.state_dict(), path)
    dist.barrier()
    ddp.load_state_dict(torch.load(path, weights_only=True))  # finds: file-race on 1, 2


def main():
    dist.init_process_group("gloo")
    path = scratch_file("state")
    ddp = DistributedDataParallel(torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(2):
        ddp(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    save_and_load(ddp, path)
    if "--fixed" in sys.argv:
        dist.barrier()
    if dist.get_rank() == 0:
        os.remove(path)  # or here
    print(f"sum {sum(p.sum().item() for p in ddp.parameters()):.4f}")
    dist.destroy_process_group()


main()
