"""FSDP2 with AdamW and a clipped norm of the gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(4)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
mesh = init_device_mesh("cpu", (size,))
policy = MixedPrecisionPolicy()  # @policy
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
betas = (0.9, 0.99)  # @betas
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=betas)
for step in range(3):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))  # @data
    loss = (model(x) - x.flip(1)).square().mean()
    loss.backward()  # @backward
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.2)  # @clip
    optimizer.step()  # @update
    optimizer.zero_grad()
    mean = loss.detach() / size  # @loss
    dist.all_reduce(mean)  # @log
dist.destroy_process_group()
