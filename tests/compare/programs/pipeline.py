"""A pipeline by hand: a stage on each rank; activations go forwards, their gradients back."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(10 + rank)
stage = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
optimizer = torch.optim.SGD(stage.parameters(), lr=0.2)
micro = 2
for step in range(3):
    optimizer.zero_grad()
    for part in range(micro):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * micro + part))
        if rank:
            x = torch.empty(4, 8)
            dist.recv(x, rank - 1)  # @receive
            x.requires_grad_()
        y = stage(x)  # @stage
        if rank < size - 1:
            out = y.detach()  # @out
            dist.send(out, rank + 1)  # @send
            gradient = torch.empty(4, 8)
            dist.recv(gradient, rank + 1)
            y.backward(gradient)  # @backward
        else:
            loss = (y - 0.5).square().mean() / micro  # @loss
            loss.backward()
        if rank:
            dist.send(x.grad, rank - 1)  # @return
    optimizer.step()  # @update
    norm = sum(p.square().sum() for p in stage.parameters()).detach()
    dist.all_reduce(norm)  # @norm
dist.destroy_process_group()
