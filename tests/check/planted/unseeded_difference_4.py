# run: --ranks 3 --check=gloo
"""Fine-tuning: rank 0 broadcasts the backbone; the adapters are added afterwards, by generators
that differ from rank to rank."""

import math
import sys

import torch
import torch.distributed as dist
import torch.nn as nn


class LowRankAdapter(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.empty(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t()


def synchronize_weights(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)


def average_gradients(parameters):
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())


dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
synchronize_weights(model)
model[0] = LowRankAdapter(model[0])
model[2] = LowRankAdapter(model[2])
if "--fixed" in sys.argv:
    synchronize_weights(model)
trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=1e-2)
for _ in range(3):
    x = torch.randn(10, 6)
    optimizer.zero_grad()
    (model(x) - x[:, :2]).square().mean().backward()
    average_gradients(trainable)
    optimizer.step()  # finds: unseeded-difference on all
dist.destroy_process_group()
