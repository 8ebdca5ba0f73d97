"""DDP with micro-batches: gradients are added up in no_sync, and averaged with the last one."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(2)
model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
micro = 4
for step in range(3):
    optimizer.zero_grad()
    for part in range(micro):
        seed = 1000 * step + 10 * part + rank  # @seed
        x = torch.randn(6, 12, generator=torch.Generator().manual_seed(seed))
        last = part == micro - 1  # @last
        with nullcontext() if last else model.no_sync():
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            (loss / micro).backward()  # @backward
    optimizer.step()  # @update
    dist.all_reduce(total := loss.detach().clone(), op=dist.ReduceOp.MAX)  # @log
dist.destroy_process_group()
