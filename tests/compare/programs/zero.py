"""DDP with ZeroRedundancyOptimizer: each rank updates its part of the weights, and sends it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(5)
layers = [nn.Linear(12, 12) for _ in range(4)]
model = DistributedDataParallel(nn.Sequential(*layers))
rate, decay = 0.01, 0.0  # @settings
optimizer = ZeroRedundancyOptimizer(
    model.parameters(), torch.optim.AdamW, lr=rate, weight_decay=decay
)
for step in range(3):
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(7 * step + rank))
    loss = nn.functional.smooth_l1_loss(model(x), x.roll(1, 1))
    loss.backward()  # @backward
    optimizer.step()  # @update
    model.zero_grad()
    seen = torch.tensor(float(len(x)))
    dist.all_reduce(seen)  # @count
dist.destroy_process_group()
