"""DDP with SGD, a scheduler, a logged sum of losses, and an evaluation every second step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # @init
model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 4))
bucket = 25.0  # @bucket
model = DistributedDataParallel(model, bucket_cap_mb=bucket)  # @wrap
rate, momentum, decay = 0.05, 0.9, 0.01  # @settings
optimizer = torch.optim.SGD(model.parameters(), rate, momentum, weight_decay=decay)
scheduler = StepLR(optimizer, 2, gamma=0.5)  # @scheduler
draws = torch.Generator().manual_seed(rank)  # @seed
for step in range(5):
    x = torch.randn(48 // size, 16, generator=draws)  # @data
    y = x[:, :4].cumsum(1)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)  # @forward
    loss.backward()  # @backward
    optimizer.step()  # @update
    scheduler.step()  # @schedule
    total = loss.detach().clone()
    dist.all_reduce(total)  # @log
    if step % 2:
        model.eval()
        with torch.no_grad():
            score = (model(torch.ones(2, 16)) > 0).float().sum()  # @score
        dist.all_reduce(score, op=dist.ReduceOp.MAX)  # @evaluate
        model.train()
dist.destroy_process_group()
