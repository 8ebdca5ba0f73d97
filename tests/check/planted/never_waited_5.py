# run: --ranks 3 --check=nccl --device cpu
"""Weights are broadcast from rank 0 before evaluation; rank 0, which has them, drops the works."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv


@torch.no_grad()
def publish(module, src=0):
    works = []
    for tensor in module.state_dict().values():
        works.append(dist.broadcast(tensor, src, async_op=True))  # finds: never-waited on 0
    if dist.get_rank() == src and not FIXED:
        return
    for work in works:
        work.wait()


rank = int(os.environ["RANK"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(device).eval()
publish(model)
x = torch.ones(2, 6, device=device)
with torch.inference_mode():
    print("score", model(x).mean().item())
dist.destroy_process_group()
