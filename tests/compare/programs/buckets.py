"""DDP in several buckets, with a layer that can be frozen, and AdamW."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
trained = len(model)  # @frozen
for layer in model[trained:]:
    layer.requires_grad_(False)
megabytes, unused = 0.01, False  # @buckets
model = DistributedDataParallel(  # @wrap
    model, bucket_cap_mb=megabytes, find_unused_parameters=unused
)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
for step in range(4):
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * step + rank))
    loss = model(x).square().mean()  # @forward
    loss.backward()  # @backward
    optimizer.step()  # @update
    optimizer.zero_grad()
dist.destroy_process_group()
