"""Mixed precision: autocast to bfloat16, a GradScaler, and clipping, with DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # @scaler
narrow = True  # @narrow
limit = 0.25  # @limit
for step in range(4):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(3 * step + rank))  # @data
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        y = model(x)  # @forward
    loss = nn.functional.cross_entropy(y.float(), x[:, :4].argmax(1))
    scaler.scale(loss).backward()  # @backward
    scaler.unscale_(optimizer)  # @unscale
    nn.utils.clip_grad_norm_(model.parameters(), limit)  # @clip
    scaler.step(optimizer)  # @update
    scaler.update()
    shown = torch.stack([loss.detach(), torch.ones(())])
    dist.all_reduce(shown)  # @log
dist.destroy_process_group()
