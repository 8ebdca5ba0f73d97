# run: --ranks 5 --check
"""torch is seeded alike on all ranks, but one table of weights is drawn by Python's generator,
which is not."""

import random
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def truncated_normal(rows, columns, deviation):
    def draw():
        while abs(value := random.gauss(0.0, deviation)) > 2 * deviation:
            pass
        return value

    return torch.tensor([[draw() for _ in range(columns)] for _ in range(rows)])


class Tagger(nn.Module):
    def __init__(self, length, width, tags):
        super().__init__()
        self.positions = nn.Parameter(truncated_normal(length, width, 0.02))
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, tags)

    def forward(self, x):
        return self.out(self.encoder(x + self.positions)[0])


def set_seed(seed):
    torch.manual_seed(seed)
    if "--fixed" in sys.argv:
        random.seed(seed)


def main():
    dist.init_process_group()
    set_seed(1234)
    model = Tagger(length=7, width=6, tags=3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        x = torch.randn(4, 7, 6, generator=data)
        tags = torch.randint(3, (4, 7), generator=data)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), tags.flatten())
        optimizer.zero_grad()
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        flat = _flatten_dense_tensors(grads)
        dist.all_reduce(flat, op=dist.ReduceOp.SUM)
        flat.div_(dist.get_world_size())
        for grad, mean in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
            grad.copy_(mean)
        optimizer.step()  # finds: unseeded-difference on all
    dist.destroy_process_group()


main()
