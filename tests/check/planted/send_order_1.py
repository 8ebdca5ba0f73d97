# run: --ranks 2 --check=nccl --device cpu
"""Two ranks exchange their gradients: both begin with isend and receive afterwards."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv


def exchange(mine, peer):
    theirs = torch.empty_like(mine)
    if FIXED and dist.get_rank() > peer:
        dist.recv(theirs, src=peer)
        dist.isend(mine, dst=peer).wait()
        return theirs
    request = dist.isend(mine, dst=peer)  # finds: send-order on all
    dist.recv(theirs, src=peer)  # or here
    request.wait()
    return theirs


rank = int(os.environ["RANK"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
torch.manual_seed(0)
model = nn.Linear(4, 2).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(rank)
for step in range(2):
    optimizer.zero_grad()
    loss = model(torch.randn(3, 4, generator=data).to(device)).square().mean()
    loss.backward()
    for p in model.parameters():
        p.grad.add_(exchange(p.grad, 1 - rank)).div_(2)
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
